"""The scan of `vssm.ops.scan_ahead` on a GPU.

As in `vssm.ops.scan.triton`, a thread owns whole channels, runs over time and has their N states in
registers. Time is not cut into chunks.
"""

# Kernels are written in the subset of Python that Triton compiles.
# ruff: noqa: ANN001, ANN202, RUF005, RUF059
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from vssm.ops.scan.triton import make_call

from vssm.ops.scan.triton_steps import (  # isort: skip
    _load_states, _rates, _row, _scalars, _sigmoid, _softplus, _vector,
)  # fmt: skip

__all__ = ["forward"]

_BD = 32  # channels of a program: one warp


# fmt: off
@triton.jit(do_not_specialize=["T"])
def _ahead_kernel(
    inputs, strides, start, y, T, channels,
    N: tl.constexpr, LOG: tl.constexpr, BD: tl.constexpr, WORDS: tl.constexpr,
):
    # fmt: on
    dy, u, dt, A, B, C, D, z, dt_bias = inputs
    s_dy, s_u, s_dt, s_B, s_C, s_z = strides
    blocks = tl.cdiv(channels, BD)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    d = tl.program_id(0) % blocks * BD + tl.arange(0, BD)
    if start is not None:
        start += b * channels * N
    states = _load_states(start, d, channels, N, LOG, BD)
    rates = _rates(A, d, channels, N, LOG, BD)
    skip = _vector(D, d, channels, BD)
    bias = _vector(dt_bias, d, channels, BD)
    y += b * T * channels
    for step in range(T):
        t = tl.cast(step, tl.int64)
        x = _vector(u + b * s_u[0] + t * s_u[1], d, channels, BD)
        gate = _vector(z + b * s_z[0] + t * s_z[1], d, channels, BD)
        delta, _slope = _softplus(_vector(dt + b * s_dt[0] + t * s_dt[1], d, channels, BD) + bias)
        row_B = _scalars(_row(B + b * s_B[0] + t * s_B[1], N, WORDS), B.dtype.element_ty, WORDS)
        row_C = _scalars(_row(C + b * s_C[0] + t * s_C[1], N, WORDS), C.dtype.element_ty, WORDS)
        out = skip * x
        kept = ()
        for n in tl.static_range(N):
            h = tl.exp2(delta * rates[n]) * states[n] + delta * x * row_B[n]
            out += h * row_C[n]
            kept = kept + (tl.where(step % 2 == 1, h, states[n]),)
        states = kept
        out *= gate * _sigmoid(gate)
        tl.store(y + t * channels + d, out.to(y.dtype.element_ty), mask=d < channels)


def forward(u, dt, A, B, C, D, z, dt_bias, h0) -> Tensor:
    """Returns y; the arguments are those of `scan_ahead`."""
    (batch, length, channels), states = u.shape, A.shape[1]
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    call = make_call(None, u, dt, A, B, C, D, z, dt_bias, True)
    if y.numel():
        _ahead_kernel[(batch * triton.cdiv(channels, _BD),)](
            call.inputs, call.strides, None if h0 is None else h0.contiguous(), y, length, channels,
            N=states, LOG=(states - 1).bit_length(), BD=_BD, WORDS=call.words, num_warps=1,
        )  # fmt: skip
    return y
