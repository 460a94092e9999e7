"""The variational state space model (VSSM) of Lambrechts et al. (2024), in one file of PyTorch.

    python examples/minimal.py      trains on 8 x 8 digits within two minutes on two idle CPU cores
                                    (if they are busy, set OMP_NUM_THREADS=1), draws minimal.png

A VSSM is a variational autoencoder of sequences. Its three networks are state space models:

    prior              p(z_t)                 = 1 / N^Z           uniform, at every step
    posterior          q_psi(z_t | x_{1:t})   = D(z_t | v_t)      v = f_enc(x_{1:T})
    likelihood         p_phi(x_t | z_{1:t})   = N(x_t | w_t, s²)  w = f_dec(z_{1:T})
    partial posterior  q_omega(z_t | x_{1:C}) = D(z_t | v̄_t)      v̄ = f_par(x_{1:C}, ∅, ..., ∅)

Steps of x are independent given z, and steps of z given x. So all are drawn at once, in training
and in generation. The partial posterior lets the model follow a prompt x_{1:C}.

Legend, with the letters of the paper and their shapes:

    x    data (B, T, D): each row of an image is a step   B  sequences in a batch
    z    latents (B, T, Z), each one of N classes         T  steps
    v    logits of the latents (B, T, Z, N)               C  steps of the prompt
    w    mean of x (B, T, D)                              W  steps of a chunk
    u    uniform noise: all randomness is an argument     K  draws of the likelihood
    h    state: what a network has to remember            ∅  empty token, a learned input

Only the library has: fast kernels for the scan, other kinds of data, levels of latents that make
one-shot samples fit together, other models to compare with.
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
    """A stack of blocks: y_{1:T}, h_T = f(x_{1:T}, h_0). Cut anywhere, it gives the same y."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, WIDTH)
        self.blocks = nn.ModuleList(Mamba() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.out = nn.Linear(WIDTH, outputs)

    def forward(self, e: Tensor, h: list | None = None) -> tuple[Tensor, list]:
        """Reads embedded inputs e (B, T, WIDTH) after the state h; returns y and the state."""
        after = []
        for i, block in enumerate(self.blocks):
            e, last = block(e, h and h[i])
            after.append(last)
        return self.out(self.norm(e)), after


# 2. The model and its objective ----------------------------------------------------------------


class VSSM(nn.Module):
    """Three state space models: encoder, decoder and partial posterior."""

    def __init__(self) -> None:
        super().__init__()
        self.f_enc = SSM(FEATURES, LATENTS * CLASSES)
        self.f_dec = SSM(LATENTS * CLASSES, FEATURES)
        self.f_par = SSM(FEATURES, LATENTS * CLASSES)
        self.empty = nn.Parameter(torch.randn(WIDTH) * 0.02)  # ∅

    def posterior(self, x: Tensor) -> Tensor:
        """Returns v, the logits of q_psi(z_t | x_{1:t}), (B, T, Z, N)."""
        return self.f_enc(self.f_enc.embed(x))[0].unflatten(-1, (LATENTS, CLASSES))

    def partial(self, x: Tensor, known: Tensor, h: list | None = None) -> tuple[Tensor, list]:
        """Returns v̄, the logits of q_omega(z_t | x_{1:min(C,t)}), and the state; ∅ if not known."""
        e = torch.where(known[..., None], self.f_par.embed(x), self.empty)
        v, h = self.f_par(e, h)
        return v.unflatten(-1, (LATENTS, CLASSES)), h

    def likelihood(self, z: Tensor, h: list | None = None) -> tuple[Tensor, list]:
        """Returns w, the mean of p_phi(x_t | z_{1:t}), from one-hot z (B, T, Z, N)."""
        return self.f_dec(self.f_dec.embed(z.flatten(-2)), h)


def one_hot(z: Tensor) -> Tensor:
    """Turns classes (B, T, Z) into one-hot vectors (B, T, Z, N)."""
    return F.one_hot(z, CLASSES).float()


def log_normal(x: Tensor, w: Tensor) -> Tensor:
    """Returns log p(x_t | w_t), (B, T)."""
    return (-(((x - w) / SIGMA) ** 2) / 2 - math.log(SIGMA * math.sqrt(2 * math.pi))).sum(-1)


def log_prob(v: Tensor, z: Tensor) -> Tensor:
    """Returns log D(z_t | v_t), (B, T)."""
    return v.log_softmax(-1).gather(-1, z[..., None]).sum((-2, -1))


def objective(model: VSSM, x: Tensor, u: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns reconstruction, KL and partial term, (B,) each; train to maximise their sum.

        ELBO    = E_{z ~ q_psi} log p_phi(x | z) - KL(q_psi(z | x) || p(z))
        partial = E_{z ~ q_psi} log q_omega(z | x_{1:C}),        C uniform in 0 ... T

    Noise u (B, T, Z, N) picks z. The KL and the partial term are exact sums over the classes.
    """
    v = model.posterior(x)
    log_q, q = v.log_softmax(-1), v.softmax(-1)
    # Gumbel: argmax(v - log(-log u)) is a sample of softmax(v). The hard sample goes forwards, the
    # gradient of the soft one backwards.
    soft = (v - (-u.log()).log()).softmax(-1)
    z = one_hot(soft.argmax(-1)) + soft - soft.detach()
    w, _ = model.likelihood(z)
    # The partial posterior learns from the encoder, never the reverse: q is a constant here.
    v_par, _ = model.partial(x, torch.arange(x.shape[1]) < C[:, None])
    reconstruction = log_normal(x, w).sum(1)
    kl = (q * (log_q + math.log(CLASSES))).sum((1, 2, 3))
    partial = (q.detach() * v_par.log_softmax(-1)).sum((1, 2, 3))
    return reconstruction, kl, partial


@torch.no_grad()
def log_likelihood(model: VSSM, x: Tensor, u: Tensor, C: int = 0) -> Tensor:
    """Estimates log p(x_{C+1:T} | x_{1:C}) from K draws by importance sampling, (B,).

        p(x)                  ~ 1/K sum_k p(x | z^k) p(z^k) / q_psi(z^k | x)               C = 0
        p(x_{C+1:T}|x_{1:C})  ~ 1/K sum_k p(x_{C+1:T}|z^k) q_omega(z^k|x_{1:C}) / q_psi(z^k|x)

    with z^k ~ q_psi(z | x): a lower bound in expectation, closer with each draw. u: (K, B, T, Z).
    """
    v = model.posterior(x)
    v_par, _ = model.partial(x, (torch.arange(x.shape[1]) < C).expand(x.shape[:2]))
    prior = v_par if C else torch.zeros_like(v)  # equal logits: the uniform prior
    weights = []
    for u_k in u:
        z = draw(v, u_k)
        log_p_x = log_normal(x, model.likelihood(one_hot(z))[0])[:, C:].sum(1)
        weights.append(log_p_x + (log_prob(prior, z) - log_prob(v, z)).sum(1))
    return torch.stack(weights).logsumexp(0) - math.log(len(u))


# 3. The two sampling algorithms ----------------------------------------------------------------


def draw(v: Tensor, u: Tensor) -> Tensor:
    """Draws z ~ D(z | v), (B, T, Z): the first class whose cumulative probability exceeds u."""
    return (v.softmax(-1).cumsum(-1) <= u[..., None]).sum(-1).clamp(max=CLASSES - 1)


@torch.no_grad()
def generate(model: VSSM, prompt: Tensor, u: Tensor) -> Tensor:
    """Algorithm "VSSM sampling": all steps at once. Noise u is (B, T, Z), prompt (B, C, D)."""
    C, T = prompt.shape[1], u.shape[1]
    x = F.pad(prompt, (0, 0, 0, T - C))  # padded steps read the empty token instead
    v, _ = model.partial(x, (torch.arange(T) < C).expand(len(x), -1))
    w, _ = model.likelihood(one_hot(draw(v, u)))
    return torch.cat([prompt, w[:, C:]], 1)


@torch.no_grad()
def generate_in_chunks(model: VSSM, prompt: Tensor, u: Tensor, W: int) -> Tensor:
    """Algorithm "VSSM chunk sampling": W steps at a time, from states of constant size.

    With the same noise it makes the same x. It can stop after any chunk and go on later.
    """
    x, C, h_par, h_dec = prompt, prompt.shape[1], None, None
    if C:
        v, h_par = model.partial(prompt, torch.ones(prompt.shape[:2], dtype=torch.bool))
        _, h_dec = model.likelihood(one_hot(draw(v, u[:, :C])))
    for u_chunk in u[:, C:].split(W, 1):
        empty = prompt.new_zeros(*u_chunk.shape[:2], FEATURES)
        v, h_par = model.partial(empty, torch.zeros(empty.shape[:2], dtype=torch.bool), h_par)
        w, h_dec = model.likelihood(one_hot(draw(v, u_chunk)), h_dec)
        x = torch.cat([x, w], 1)
    return x


# 4. Train, judge and look ----------------------------------------------------------------------


def digits() -> tuple[Tensor, Tensor]:
    """Returns images (M, 8, 8) in [0, 1] for training and testing: 1,437 and 360."""
    x = torch.from_numpy(np.load(DIGITS)["pixels"]) / 16
    test = torch.arange(len(x)) % 5 == 4
    return x[~test], x[test]


def train(model: VSSM, x: Tensor, steps: int, batch: int = 64, rate: float = 4e-3) -> None:
    """Maximises ELBO + partial with AdamW; the learning rate rises shortly, then falls to 0."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.05)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        rows = x[torch.randint(len(x), (batch,))]
        u = torch.rand(batch, STEPS, LATENTS, CLASSES).clamp(1e-7, 1 - 1e-7)
        terms = objective(model, rows, u, C=torch.randint(STEPS + 1, (batch,)))
        reconstruction, kl, partial = (term.mean() for term in terms)
        (-(reconstruction - kl + partial) / (STEPS * FEATURES)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step == 1 or step % max(1, steps // 8) == 0:
            seconds, elbo = time.perf_counter() - start, reconstruction - kl
            print(f"step {step}: ELBO {elbo:.1f}, partial {partial:.1f} nats, {seconds:.0f} s")


def picture(rows: dict[str, Tensor], path: str) -> None:
    """Draws some images in a row under each title."""
    figure = Figure(figsize=(8, 0.95 * len(rows)), layout="constrained")
    for ax, (title, x) in zip(figure.subplots(len(rows)), rows.items(), strict=True):
        image = F.pad(x, (1, 1, 1, 1)).permute(1, 0, 2).flatten(1)
        ax.imshow(image.numpy(), cmap="gray_r", vmin=0, vmax=1)
        ax.set_title(title, loc="left", fontsize=9)
        ax.axis("off")
    figure.savefig(path, dpi=120)


def main(steps: int = 1000, K: int = 100) -> None:
    """Trains a model, prints its likelihoods and draws its samples."""
    torch.manual_seed(0)
    (x, test), model = digits(), VSSM()
    train(model, x, steps)
    C, u = STEPS // 2, torch.rand(K, len(test), STEPS, LATENTS)
    whole, half = log_likelihood(model, test, u), log_likelihood(model, test, u, C)
    print(f"log p(x) {whole.mean():.2f}, second half given the first {half.mean():.2f} nats")
    x, u = test[:16], u[0, :16]
    completed = generate(model, x[:, :C], u)
    chunks = generate_in_chunks(model, x[:, :C], u, W=1)
    print(f"one shot and chunks differ by {(completed - chunks).abs().max():.0e}: see minimal.png")
    made = generate(model, x[:, :0], u)
    titles = "test set", "upper half known, lower half in one shot", "from nothing, in one shot"
    picture(dict(zip(titles, (x, completed, made), strict=True)), "minimal.png")


if __name__ == "__main__":
    main()
