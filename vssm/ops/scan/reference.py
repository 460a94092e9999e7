"""The selective scan as a plain PyTorch loop: the ground truth of every other backend.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t          y_t = C_t h_t + D u_t

Runs anywhere, in any floating dtype; autograd differentiates it, so it has no backward of its own.
It stores the states of all steps for that, which the other backends never do.

Shapes: u, dt, z, y (B, T, D); A (D, N); B, C (B, T, N); D, dt_bias (D,); h (B, D, N).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def selective_scan_reference(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
    h0: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns y in the dtype of u, and the last state in float32 (float64 for float64 input)."""
    batch, _, channels = u.shape
    exact = torch.float64 if u.dtype == torch.float64 else torch.float32
    x, delta, A, B, C = (tensor.to(exact) for tensor in (u, dt, A, B, C))
    if dt_bias is not None:
        delta = delta + dt_bias.to(exact)
    if softplus:
        delta = F.softplus(delta)
    h = x.new_zeros(batch, channels, A.shape[1]) if h0 is None else h0.to(exact)
    drive = delta * x
    outputs = []
    # Not by an index: its gradient would be a tensor of all steps, for every step.
    for delta_t, drive_t, B_t, C_t in zip(
        *(steps.unbind(1) for steps in (delta, drive, B, C)), strict=True
    ):
        h = torch.exp(delta_t[..., None] * A) * h + drive_t[..., None] * B_t[:, None, :]
        outputs.append(torch.einsum("bdn,bn->bd", h, C_t))
    y = torch.stack(outputs, 1) if outputs else torch.zeros_like(x)
    if D is not None:
        y = y + D.to(exact) * x
    if z is not None:
        y = y * F.silu(z.to(exact))
    return y.to(u.dtype), h
