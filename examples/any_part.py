"""A VSSM that conditions on any known part of a sequence: compare with minimal.py, line by line.

    python examples/any_part.py     trains on 8 x 8 digits within two minutes on two CPU cores,
                                    prints log-likelihoods and draws any_part.png

The known part need not be a prefix. Let K be the entries (t, d) of x that are known, and R those
to be made now. Entries in neither are made later. Each network reads both masks, both ways:

    prior              p(z_t | x_K, R)        = D(z_t | v̄_t)      v̄ = f_par(x_K, K, R)
    posterior          q(z_t | x_K, x_R)      = D(z_t | v_t)      v = f_enc(x_{K+R}, K, R)
    likelihood         p(x_R | z, x_K)        = N(x_R | w_R, s²)  w = f_dec(z, x_K, K, R)

The paper's partial posterior has become the prior. A prompt is a prefix K; for a hole in an image
or a gap in a series, K is everything else. The unknown entries can be made in one pass, or be
divided at random into R_1, ..., R_S: each pass is given what the passes before it made.

Legend, with the letters of the paper and their shapes:

    x    data (B, T, D): each row of an image is a step   B  sequences in a batch
    z    latents (B, T, Z), each one of N classes         T  steps
    v    logits of the latents (B, T, Z, N)               S  passes
    w    mean of x (B, T, D)                              K  known entries (B, T, D), bool
    u    uniform noise: all randomness is an argument     R  entries to be made (B, T, D), bool
    h    state: what a network has to remember

Only the library has: windows that carry a state, for sequences of any length; levels of latents;
missing data; columns that are always given.
"""

import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

DIGITS = Path(__file__).parent.parent / "vssm" / "data" / "digits.npz"
STEPS, FEATURES = 8, 8  # T and D of the digits
WIDTH, LAYERS = 64, 2  # of each of the three networks
INNER, STATES, RANK, TAPS = 128, 8, 4, 4  # channels, states, rank of dt, convolution of a block
LATENTS, CLASSES = 12, 16  # Z and N
SIGMA = 0.1  # s, the paper's


# 1. The state space model ----------------------------------------------------------------------


def scan(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """Solves h_t = a_t h_{t-1} + b_t for all t at once, in log2(T) rounds: (B, T, ...).

    Two steps in a row have the form of one: h_t = (a_t a_{t-1}) h_{t-2} + (a_t b_{t-1} + b_t).
    Each round joins every step with the one `reach` before it, and doubles the reach.
    """
    b = torch.cat([b[:, :1] + a[:, :1] * h[:, None], b[:, 1:]], 1)
    reach = 1
    while reach < a.shape[1]:
        b = torch.cat([b[:, :reach], b[:, reach:] + a[:, reach:] * b[:, :-reach]], 1)
        a = torch.cat([a[:, :reach], a[:, reach:] * a[:, :-reach]], 1)
        reach *= 2
    return b


class Mamba(nn.Module):
    """A Mamba block (Gu and Dao, 2023): a gated state space model whose steps depend on the input.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t        y_t = (C_t h_t + D u_t) silu(gate_t)
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.in_proj = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.conv1d = nn.Conv1d(INNER, INNER, TAPS, groups=INNER)
        self.x_proj = nn.Linear(INNER, RANK + 2 * STATES, bias=False)
        self.dt_proj = nn.Linear(RANK, INNER)
        self.A_log = nn.Parameter(torch.arange(1.0, STATES + 1).log().repeat(INNER, 1))
        self.D = nn.Parameter(torch.ones(INNER))
        self.out_proj = nn.Linear(INNER, WIDTH, bias=False)
        dt = torch.empty(INNER).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        with torch.no_grad():
            self.dt_proj.bias.copy_(dt.expm1().log())  # softplus of it is dt: short and long memory
            self.out_proj.weight.div_(math.sqrt(LAYERS))  # the sum over layers keeps its size

    def forward(self, x: Tensor, state: tuple | None) -> tuple[Tensor, tuple]:
        """Maps x (B, T, WIDTH) and the state before it to y (B, T, WIDTH) and the state after."""
        zeros = x.new_zeros(len(x), INNER, TAPS - 1 + STATES)
        past, h = state or zeros.split([TAPS - 1, STATES], -1)
        u, gate = self.in_proj(self.norm(x)).chunk(2, -1)
        seen = torch.cat([past, u.mT], -1)  # the last steps of the call before come first
        u = F.silu(self.conv1d(seen).mT)
        dt, B, C = self.x_proj(u).split([RANK, STATES, STATES], -1)
        dt, A = F.softplus(self.dt_proj(dt)), -self.A_log.exp()  # A < 0: the state decays
        h = scan((dt[..., None] * A).exp(), (dt * u)[..., None] * B[:, :, None], h)
        y = (h * C[:, :, None]).sum(-1) + self.D * u
        return x + self.out_proj(y * F.silu(gate)), (seen[..., 1 - TAPS :], h[:, -1])


class SSM(nn.Module):
    """Blocks in alternating directions: y_{1:T} = f(x_{1:T}), where each y_t depends on all x."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, WIDTH)
        self.blocks = nn.ModuleList(Mamba() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.out = nn.Linear(WIDTH, outputs)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Reads inputs (B, T, ...), side by side, and returns y (B, T, outputs)."""
        e = self.embed(torch.cat([values.float() for values in inputs], -1))
        for i, block in enumerate(self.blocks):
            e = block(e.flip(1), None)[0].flip(1) if i % 2 else block(e, None)[0]
        return self.out(self.norm(e))


# 2. The model and its objective ----------------------------------------------------------------


class VSSM(nn.Module):
    """Three state space models: encoder, decoder and prior."""

    def __init__(self) -> None:
        super().__init__()
        self.f_enc = SSM(3 * FEATURES, LATENTS * CLASSES)
        self.f_dec = SSM(LATENTS * CLASSES + 3 * FEATURES, FEATURES)
        self.f_par = SSM(3 * FEATURES, LATENTS * CLASSES)

    def posterior(self, x: Tensor, K: Tensor, R: Tensor) -> Tensor:
        """Returns v, the logits of q(z_t | x_K, x_R), (B, T, Z, N)."""
        return self.f_enc(x * (K | R), K, R).unflatten(-1, (LATENTS, CLASSES))

    def prior(self, x: Tensor, K: Tensor, R: Tensor) -> Tensor:
        """Returns v̄, the logits of p(z_t | x_K, R), (B, T, Z, N)."""
        return self.f_par(x * K, K, R).unflatten(-1, (LATENTS, CLASSES))

    def likelihood(self, z: Tensor, x: Tensor, K: Tensor, R: Tensor) -> Tensor:
        """Returns w, the mean of p(x_R | z, x_K), from one-hot z (B, T, Z, N)."""
        return self.f_dec(z.flatten(-2), x * K, K, R)


def one_hot(z: Tensor) -> Tensor:
    """Turns classes (B, T, Z) into one-hot vectors (B, T, Z, N)."""
    return F.one_hot(z, CLASSES).float()


def log_normal(x: Tensor, w: Tensor, R: Tensor) -> Tensor:
    """Returns log p(x_R | w_R), (B,)."""
    log_p = -(((x - w) / SIGMA) ** 2) / 2 - math.log(SIGMA * math.sqrt(2 * math.pi))
    return (log_p * R).sum((1, 2))


def log_prob(v: Tensor, z: Tensor, R: Tensor) -> Tensor:
    """Returns log D(z | v), of the latents at steps that have an entry in R, (B,)."""
    return (v.log_softmax(-1).gather(-1, z[..., None]).sum((-2, -1)) * R.any(-1)).sum(1)


def objective(model: VSSM, x: Tensor, u: Tensor, K: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """Returns reconstruction and KL, (B,) each; train to maximise their difference.

        ELBO    = E_{z ~ q} log p(x_R | z, x_K) - KL(q(z | x_K, x_R) || p(z | x_K, R))

    Noise u (B, T, Z, N) picks z. The KL is an exact sum over the classes.
    """
    v = model.posterior(x, K, R)
    log_q, q = v.log_softmax(-1), v.softmax(-1)
    # Gumbel: argmax(v - log(-log u)) is a sample of softmax(v). The hard sample goes forwards, the
    # gradient of the soft one backwards.
    soft = (v - (-u.log()).log()).softmax(-1)
    z = one_hot(soft.argmax(-1)) + soft - soft.detach()
    w = model.likelihood(z, x, K, R)
    log_p = model.prior(x, K, R).log_softmax(-1)
    reconstruction = log_normal(x, w, R)
    kl = ((q * (log_q - log_p)).sum((2, 3)) * R.any(-1)).sum(1)
    return reconstruction, kl


@torch.no_grad()
def log_likelihood(model: VSSM, x: Tensor, u: Tensor, K: Tensor) -> Tensor:
    """Estimates log p(x_R | x_K) of all that is not known by importance sampling, (B,).

        p(x_R | x_K)  ~ 1/n sum_k p(x_R | z^k, x_K) p(z^k | x_K, R) / q(z^k | x_K, x_R)

    with z^k ~ q(z | x_K, x_R): a lower bound in expectation, closer with more. u: (n, B, T, Z).
    """
    R = ~K
    v, prior = model.posterior(x, K, R), model.prior(x, K, R)
    weights = []
    for u_k in u:
        z = draw(v, u_k)
        log_p_x = log_normal(x, model.likelihood(one_hot(z), x, K, R), R)
        weights.append(log_p_x + log_prob(prior, z, R) - log_prob(v, z, R))
    return torch.stack(weights).logsumexp(0) - math.log(len(u))


# 3. Sampling in passes -------------------------------------------------------------------------


def draw(v: Tensor, u: Tensor) -> Tensor:
    """Draws z ~ D(z | v), (B, T, Z): the first class whose cumulative probability exceeds u."""
    return (v.softmax(-1).cumsum(-1) <= u[..., None]).sum(-1).clamp(max=CLASSES - 1)


def parts(unknown: Tensor, order: Tensor, S: Tensor) -> Tensor:
    """Divides unknown entries into S (B,) parts of equal size, by noise: 0 ... S - 1, else -1."""
    key = torch.where(unknown, order, 2.0).flatten(1)  # entries that are known come last
    rank, count = key.argsort(1).argsort(1), unknown.flatten(1).sum(1, keepdim=True).clamp(min=1)
    return torch.where(unknown, (rank * S[:, None] // count).view(unknown.shape), -1)


@torch.no_grad()
def fill(model: VSSM, x: Tensor, known: Tensor, u: Tensor, order: Tensor) -> Tensor:
    """Makes the entries that are not known in S passes. Noise: u (S, B, T, Z), order (B, T, D)."""
    part = parts(~known, order, torch.tensor(len(u)).expand(len(x)))
    for s, u_s in enumerate(u):
        K, R = part < s, part == s
        z = draw(model.prior(x, K, R), u_s)
        x = torch.where(R, model.likelihood(one_hot(z), x, K, R), x)
    return x


# 4. Train, judge and look ----------------------------------------------------------------------


def digits() -> tuple[Tensor, Tensor]:
    """Returns images (M, 8, 8) in [0, 1] for training and testing: 1,437 and 360."""
    x = torch.from_numpy(np.load(DIGITS)["pixels"]) / 16
    test = torch.arange(len(x)) % 5 == 4
    return x[~test], x[test]


def masks(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draws for each sequence what is known and what is to be made, (B, T, D), and S, (B,).

    Half of the sequences have a prefix, half have entries at random. Of the S passes that would
    make the rest, one is drawn: the passes before it have made their entries, so these are known.
    """
    share, is_prefix = torch.rand(len(x), 1, 1), torch.rand(len(x), 1, 1) < 0.5
    prefix = torch.arange(STEPS)[:, None] < (share * (STEPS + 1)).floor()
    known = torch.where(is_prefix, prefix, torch.rand_like(x) < share)
    S = 2 ** torch.randint(5, (len(x),))
    part, s = parts(~known, torch.rand_like(x), S), (torch.rand(len(x)) * S).long()[:, None, None]
    return part < s, part == s, S


def train(model: VSSM, x: Tensor, steps: int, batch: int = 64, rate: float = 4e-3) -> None:
    """Maximises S times the ELBO with AdamW; the learning rate rises shortly, then falls to 0."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.05)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        rows = x[torch.randint(len(x), (batch,))]
        u = torch.rand(batch, STEPS, LATENTS, CLASSES).clamp(1e-7, 1 - 1e-7)
        K, R, S = masks(rows)
        terms = objective(model, rows, u, K, R)
        reconstruction, kl = ((S * term).mean() for term in terms)  # S such passes make the whole
        (-(reconstruction - kl) / (STEPS * FEATURES)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step == 1 or step % max(1, steps // 8) == 0:
            seconds, elbo = time.perf_counter() - start, reconstruction - kl
            print(f"step {step}: ELBO {elbo:.1f} nats, {seconds:.0f} s")


def picture(rows: dict[str, Tensor], path: str) -> None:
    """Draws some images in a row under each title."""
    figure = Figure(figsize=(8, 0.95 * len(rows)), layout="constrained")
    for ax, (title, x) in zip(figure.subplots(len(rows)), rows.items(), strict=True):
        image = F.pad(x, (1, 1, 1, 1)).permute(1, 0, 2).flatten(1)
        ax.imshow(image.numpy(), cmap="gray_r", vmin=0, vmax=1)
        ax.set_title(title, loc="left", fontsize=9)
        ax.axis("off")
    figure.savefig(path, dpi=120)


def main(steps: int = 1000, n: int = 100) -> None:
    """Trains a model, prints its likelihoods and draws its samples."""
    torch.manual_seed(0)
    (x, test), model = digits(), VSSM()
    train(model, x, steps)
    nothing = torch.zeros_like(test, dtype=torch.bool)
    upper, border = nothing.clone(), ~nothing
    upper[:, : STEPS // 2], border[:, 2:6, 2:6] = True, False
    u = torch.rand(n, len(test), STEPS, LATENTS)
    whole, half, hole = (log_likelihood(model, test, u, K).mean() for K in (nothing, upper, border))
    print(f"log p(x) {whole:.2f}, second half given the first {half:.2f}, hole {hole:.2f} nats")
    x, u, order = test[:16], torch.rand(16, 16, STEPS, LATENTS), torch.rand(16, STEPS, FEATURES)
    rows = {"test set": x}
    for title, K in (("a hole", border), ("upper half known", upper), ("from nothing", nothing)):
        for S in (1, 16):
            rows[f"{title}, passes: {S}"] = fill(model, x * K[:16], K[:16], u[:S], order)
    picture(rows, "any_part.png")


if __name__ == "__main__":
    main()
