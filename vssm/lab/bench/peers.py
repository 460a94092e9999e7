"""Other implementations that benchmarks run beside ours, if they are installed.

| peer                | what it is                                                                 |
| ------------------- | -------------------------------------------------------------------------- |
| `mambapy`           | a scan in plain PyTorch, in the steps of `MambaBlock.selective_scan`       |
| `mamba_ssm`         | the scan of Mamba's authors, a CUDA kernel                                 |
| `transformers_gpt2` | `GPT2Model` of transformers, between input and output projections of ours  |
| `transformers_mamba`| `MambaModel` of transformers, the same; it uses mamba_ssm where installed  |

Scans take the arguments of `vssm.ops.selective_scan` and return y. Models are autoregressive:

    mean of x_t = out(body(start, in(x_1), ..., in(x_{t-1})))               x (B, T, D)
"""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MODELS", "SCANS", "PeerModel", "missing"]

MODELS = ("transformers_gpt2", "transformers_mamba")


def missing(peer: str) -> str | None:
    """Says that a peer is not installed, or returns None."""
    package = peer.removesuffix("_gpt2").removesuffix("_mamba")
    return None if importlib.util.find_spec(package) else f"{package} is not installed"


def mambapy_scan(
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
    """Returns y of the scan; states are float32, as ours are."""
    from mambapy.pscan import pscan

    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if softplus else dt
    decay = torch.exp(dt.unsqueeze(-1).float() * A)  # (B, T, D, N)
    drive = (dt.unsqueeze(-1) * B.unsqueeze(2) * u.unsqueeze(-1)).float()
    y = (pscan(decay, drive) @ C.float().unsqueeze(-1)).squeeze(3) + D * u
    return (y if z is None else y * F.silu(z)).to(u.dtype)


def mamba_ssm_scan(
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
    """Returns y of the scan; this peer has time last, so it copies other inputs first."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    u, dt, B, C = (tensor.transpose(1, 2) for tensor in (u, dt, B, C))
    z = None if z is None else z.transpose(1, 2)
    return selective_scan_fn(u, dt, A, B, C, D, z, dt_bias, softplus).transpose(1, 2)


SCANS: dict[str, Callable[..., Tensor]] = {"mambapy": mambapy_scan, "mamba_ssm": mamba_ssm_scan}


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
