"""Other implementations that benchmarks run beside ours: the selective scan, and whole models.

Scans do all the work around the recurrence that our kernels fuse:

    h_t = decay_t h_{t-1} + drive_t       decay = exp(dt A), drive = dt B u, both (B, T, D, N)

| scan               | how it computes h                                                           |
| ------------------ | --------------------------------------------------------------------------- |
| `mambapy`          | mambapy's `pscan`, in the steps of its `MambaBlock.selective_scan`          |
| `transformers`     | the loop over time that transformers' `MambaMixer` runs without a kernel    |
| `associative_scan` | PyTorch's prototype, compiled on CUDA, as its documentation asks for        |

Models of transformers have the size of our stacks and the input and output projections of ours:

    mean of x_t = out(body(start, in(x_1), ..., in(x_{t-1})))         body: GPT2Model or MambaModel

Legend: x (B, T, D).
"""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.lab.bench.record import Record

__all__ = ["MODELS", "SCANS", "PeerModel", "missing", "models_that_run", "peer_scan"]

MODELS = ("transformers_gpt2", "transformers_mamba")


def missing(peer: str) -> str | None:
    """Says that a peer is not installed, or returns None."""
    module = f"torch._higher_order_ops.{peer}" if peer == "associative_scan" else peer
    return None if importlib.util.find_spec(module) else f"not installed: {peer}"


def models_that_run(record: Record, metric: str) -> tuple[str, ...]:
    """Returns the peer models that can run here, and notes why others can not."""
    if reason := missing("transformers"):
        for name in MODELS:
            record.note(f"{name}_{metric}", f"{reason} (pip install 'vssm[dev]')")
        return ()
    if missing("mamba_ssm"):
        record.note("transformers_mamba", "in plain PyTorch, since mamba_ssm is not installed")
    return MODELS


def peer_scan(
    peer: str,
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
) -> Tensor:
    """Returns y of `selective_scan` as a peer computes it; states are float32, as ours are."""
    if dt_bias is not None:
        dt = dt + dt_bias
    if softplus:
        dt = F.softplus(dt)
    decay = torch.exp(dt.unsqueeze(-1).float() * A)
    drive = (dt.unsqueeze(-1) * B.unsqueeze(2) * u.unsqueeze(-1)).float()
    y = SCANS[peer](decay, drive, C.float()) + D * u
    return (y if z is None else y * F.silu(z)).to(u.dtype)


def _mambapy(decay: Tensor, drive: Tensor, C: Tensor) -> Tensor:
    from mambapy.pscan import pscan

    return (pscan(decay, drive) @ C.unsqueeze(-1)).squeeze(3)


def _transformers(decay: Tensor, drive: Tensor, C: Tensor) -> Tensor:
    h, ys = torch.zeros_like(drive[:, 0]), []
    for t in range(drive.shape[1]):
        h = decay[:, t] * h + drive[:, t]
        ys.append((h @ C[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(ys, 1)


def _associative_scan(decay: Tensor, drive: Tensor, C: Tensor) -> Tensor:
    from torch._higher_order_ops.associative_scan import associative_scan

    mode = "pointwise" if decay.is_cuda else "generic"
    _, h = associative_scan(_combine, (decay, drive), dim=1, combine_mode=mode)
    return (h @ C.unsqueeze(-1)).squeeze(3)


def _combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return left[0] * right[0], right[0] * left[1] + right[1]


SCANS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mambapy": _mambapy,
    "transformers": _transformers,
    "associative_scan": _associative_scan,
}


class PeerModel(nn.Module):
    """An autoregressive model around a body of transformers.

    Arguments:
        name: One of `MODELS`.
        features: D.
        width: Width of the body.
        layers: Blocks of the body.
        steps: The longest sequence, for GPT-2's table of positions.
    """

    def __init__(self, name: str, features: int, width: int, layers: int, steps: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2Model, MambaConfig, MambaModel

        self.name = name
        if name == "transformers_gpt2":
            config = GPT2Config(vocab_size=1, n_positions=steps, n_embd=width, n_layer=layers)
            config.n_head, config.bos_token_id, config.eos_token_id = 8, 0, 0
            config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
            self.body = GPT2Model(config)
        else:
            config = MambaConfig(vocab_size=1, hidden_size=width, num_hidden_layers=layers)
            self.body = MambaModel(config)
        self.start = nn.Parameter(torch.zeros(width))
        self.into, self.out = nn.Linear(features, width), nn.Linear(width, features)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the means of all steps, each from the steps before it."""
        start = self.start.expand(len(x), 1, -1).to(x.dtype)
        e = torch.cat([start, self.into(x[:, :-1]).to(x.dtype)], 1)
        return self.out(self.body(inputs_embeds=e, use_cache=False).last_hidden_state)

    @torch.no_grad()
    def generate(self, num: int, length: int) -> Tensor:
        """Returns new sequences, step by step with the body's own cache and noise of 0.1."""
        key = "past_key_values" if self.name == "transformers_gpt2" else "cache_params"
        e, cache, xs = self.start.expand(num, 1, -1), None, []
        for _ in range(length):
            made = self.body(inputs_embeds=e, use_cache=True, **{key: cache})
            cache = getattr(made, key)
            mean = self.out(made.last_hidden_state)
            xs.append(mean + 0.1 * torch.randn_like(mean))
            e = self.into(xs[-1])
        return torch.cat(xs, 1)
