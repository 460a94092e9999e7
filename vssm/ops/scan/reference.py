"""The selective scan in plain PyTorch: what the kernels are tested against, on any device."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 256  # steps that run together, at most


def selective_scan_reference(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    h0: Tensor | None,
    softplus: bool,
    ahead: bool = False,
) -> tuple[Tensor, Tensor]:
    """The plain PyTorch twin of `selective_scan` and, if `ahead`, of `scan_ahead`.

    The steps of a chunk are run together, in a number of operations that grows with the logarithm
    of their number. Nothing is divided by a product of decays, which may be too small.
    """
    exact = _exact(u)
    x, delta, A, B, C = (tensor.to(exact) for tensor in (u, dt, A, B, C))
    if dt_bias is not None:
        delta = delta + dt_bias.to(exact)
    if softplus:
        delta = F.softplus(delta)
    h = x.new_zeros(len(u), *A.shape) if h0 is None else h0.to(exact)
    drive, outputs = delta * x, [torch.zeros_like(x[:, :0])]
    size = _chunk_size(h, least=2 if ahead else 1)
    # Split, because the gradient of an index would be a tensor of all steps for every chunk.
    chunks = zip(*(tensor.split(size, 1) for tensor in (delta, drive, B, C)), strict=True)
    for delta_t, drive_t, B_t, C_t in chunks if x.shape[1] else ():
        a = torch.exp(delta_t[..., None] * A)
        b = drive_t[..., None] * B_t[:, :, None]
        if ahead:
            kept = torch.cat([h[:, None], _all_states(a[:, 1::2], b[:, 1::2], h)], 1)
            hs = a * kept.repeat_interleave(2, 1)[:, : a.shape[1]] + b
            h = kept[:, -1]
        else:
            hs = _all_states(a, b, h)
            h = hs[:, -1]
        outputs.append((hs @ C_t[..., None]).squeeze(3))
    y = torch.cat(outputs, 1)
    if D is not None:
        y = y + D.to(exact) * x
    if z is not None:
        y = y * F.silu(z.to(exact))
    return y.to(u.dtype), h


def scan_packed_reference(inputs: tuple, softplus: bool, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of `selective_scan` of packed sequences: each runs alone."""
    u, _, A, *_, h0 = inputs
    ys, hs = [u[:, :0]], [u.new_empty(0, *A.shape, dtype=_exact(u))]
    for i, (first, last) in enumerate(pairwise(starts.tolist())):
        own: list[Any] = [t if t is None or t.ndim < 3 else t[:, first:last] for t in inputs[:-1]]
        own.append(None if h0 is None else h0[i : i + 1])
        y, h = selective_scan_reference(*own, softplus=softplus)
        ys.append(y)
        hs.append(h)
    return torch.cat(ys, 1), torch.cat(hs)


def _chunk_size(h: Tensor, least: int) -> int:
    """Returns how many steps run together: many if operations on one state h would be short."""
    together = 2**16 if h.device.type == "cpu" else 2**20  # numbers of an operation
    size = _CHUNK if torch.compiler.is_compiling() else together // max(1, h.numel())
    return least if size < 4 else min(_CHUNK, size // 2 * 2)


def _all_states(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """Returns h_t = a_t h_{t-1} + b_t of all steps, (B, T, D, N), from h (B, D, N) before them."""
    first = a[:, :1] * h[:, None] + b[:, :1]
    return _combine(a, torch.cat([first, b[:, 1:]], 1))


def _combine(a: Tensor, b: Tensor) -> Tensor:
    """Returns h_t = a_t h_{t-1} + b_t with h_0 = b_0. Pairs of steps are steps of a shorter run:

    h_{2k+1} = (a_{2k+1} a_{2k}) h_{2k-1} + (a_{2k+1} b_{2k} + b_{2k+1})
    """
    length = a.shape[1]
    if length <= 1:
        return b
    pairs = length // 2 * 2
    a_odd, b_odd = a[:, 1:pairs:2], b[:, 1:pairs:2]
    odd = _combine(a_odd * a[:, :pairs:2], a_odd * b[:, :pairs:2] + b_odd)
    even = a[:, 2::2] * odd[:, : (length - 1) // 2] + b[:, 2::2]
    even = torch.cat([b[:, :1], even], 1)
    both = torch.stack([even[:, : length // 2], odd], 2).flatten(1, 2)
    return both if length == pairs else torch.cat([both, even[:, -1:]], 1)


def _exact(u: Tensor) -> torch.dtype:
    return torch.float64 if u.dtype == torch.float64 else torch.float32
