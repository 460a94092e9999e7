"""The selective scan as others do it, with all the work around it that ours fuses.

    h_t = decay_t h_{t-1} + drive_t          decay = exp(dt A), drive = dt B u, both (B, T, D, N) in memory

| name               | how h is made of decay and drive                                               |
| ------------------ | ------------------------------------------------------------------------------ |
| `mambapy`          | mambapy's `pscan`, in the steps of its `MambaBlock.selective_scan`             |
| `associative_scan` | PyTorch's prototype, compiled, as its documentation asks for                   |
| `transformers`     | the loop over time that transformers' `MambaMixer` runs without a kernel       |
"""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["PEERS", "absence", "peer_scan"]

PEERS = ("mambapy", "transformers", "associative_scan")


def absence(peer: str) -> str | None:
    """Says why a peer can not run here at all, or None when it can be tried."""
    module = {"mambapy": "mambapy", "transformers": "transformers"}.get(
        peer, "torch._higher_order_ops.associative_scan"
    )
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    return None if found else f"not installed: {module.partition('._')[0]}"


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
    """Returns y of `selective_scan`, as a peer computes it; states are float32, as ours are."""
    if dt_bias is not None:
        dt = dt + dt_bias
    if softplus:
        dt = F.softplus(dt)
    decay = torch.exp(dt.unsqueeze(-1).float() * A)
    drive = (dt.unsqueeze(-1) * B.unsqueeze(2) * u.unsqueeze(-1)).float()
    y = _SCANS[peer](decay, drive, C.float()) + D * u
    return (y if z is None else y * F.silu(z)).to(u.dtype)


def _mambapy(decay: Tensor, drive: Tensor, C: Tensor) -> Tensor:
    from mambapy.pscan import pscan

    return (pscan(decay, drive) @ C.unsqueeze(-1)).squeeze(3)


def _associative_scan(decay: Tensor, drive: Tensor, C: Tensor) -> Tensor:
    from torch._higher_order_ops.associative_scan import associative_scan

    mode = "pointwise" if decay.is_cuda else "generic"
    _, h = associative_scan(_combine, (decay, drive), dim=1, combine_mode=mode)
    return (h @ C.unsqueeze(-1)).squeeze(3)


def _combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return left[0] * right[0], right[0] * left[1] + right[1]


def _transformers(decay: Tensor, drive: Tensor, C: Tensor) -> Tensor:
    h, ys = torch.zeros_like(drive[:, 0]), []
    for t in range(drive.shape[1]):
        h = decay[:, t] * h + drive[:, t]
        ys.append((h @ C[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(ys, 1)


_SCANS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mambapy": _mambapy,
    "associative_scan": _associative_scan,
    "transformers": _transformers,
}
