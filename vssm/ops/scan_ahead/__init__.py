"""A selective scan of two interleaved streams, whose even steps leave the state as it was.

    x_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t      y_t = (C_t x_t + D u_t) silu(z_t)
    h_t = x_t if t is odd, else h_{t-1}           dt_t <- softplus(dt_t + dt_bias)

Steps are counted from 0. `vssm.sampling.ahead` uses it to look one empty token ahead of every step.
Shapes: u, dt, z, y (B, T, D); A (D, N); B, C (B, T, N); D, dt_bias (D,); h0 (B, D, N).
"""

import torch
from torch import Tensor

from vssm.ops.dispatch import choose_backend, kernels
from vssm.ops.scan import selective_scan

__all__ = ["scan_ahead", "scan_ahead_reference"]


def scan_ahead(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
    h0: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Runs the scan over a sequence; there is no gradient.

    Arguments:
        u: The input, (B, T, D).
        dt: The step sizes, (B, T, D), before bias and softplus.
        A: The decay, (D, N).
        B: The input matrix of every step, (B, T, N).
        C: The output matrix of every step, (B, T, N).
        D: The skip connection, (D,).
        z: The gate, (B, T, D).
        dt_bias: Added to dt, (D,).
        h0: The state to start from, (B, D, N); zero if not given.
        backend: "auto", "reference", "numba" or "triton".

    Returns:
        y (B, T, D).

    Example:
        >>> u, A, one = torch.ones(1, 3, 1), -torch.ones(1, 1), torch.ones(1)
        >>> even, odd, after = scan_ahead(u, u, A, u, u, one, u, one)[0, :, 0]
        >>> bool(even == odd), bool(after > odd)
        (True, True)
    """
    backend = choose_backend(backend, u.device, u.dtype)
    if backend == "reference":
        return scan_ahead_reference(u, dt, A, B, C, D, z, dt_bias, h0)
    if backend == "numba":  # a case of the scan's kernel, in float32 only
        inputs = (u, dt, A, B, C, D, z, dt_bias, h0)
        inputs = (None if tensor is None else tensor.float() for tensor in inputs)
        return kernels("scan", backend).forward_ahead(*inputs)
    return kernels("scan_ahead", backend).forward(u, dt, A, B, C, D, z, dt_bias, h0)


def scan_ahead_reference(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
    h0: Tensor | None = None,
) -> Tensor:
    """The plain PyTorch twin of `scan_ahead`: one `selective_scan` per step."""
    h, ys = h0, []
    for t in range(u.shape[1]):
        u_t, dt_t, B_t, C_t, z_t = (tensor[:, t : t + 1] for tensor in (u, dt, B, C, z))
        y, after = selective_scan(u_t, dt_t, A, B_t, C_t, D, z_t, dt_bias, True, h)
        ys.append(y)
        h = after if t % 2 else h
    return torch.cat(ys, 1)
