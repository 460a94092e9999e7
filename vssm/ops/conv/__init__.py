"""The causal depthwise convolution of the Mamba block, with SiLU and a carried state.

    s_t = bias + sum_k weight_k x_{t - K + 1 + k}          y_t = silu(s_t)          k = 0 ... K - 1

Shapes: x, y (B, T, D); weight (D, K); bias (D,); state (B, K - 1, D), the last K - 1 inputs.

The backends are those of the scan. `vssm.ops.launch_numba` and `vssm.ops.conv.triton` have the
functions `conv_forward` and `conv_backward`.
"""

import torch
from torch import Tensor

from vssm.ops.conv.reference import causal_conv_silu_reference, conv_packed_reference, last_inputs
from vssm.ops.operators import make_operator
from vssm.ops.scan import choose_backend, kernels_of, needs_operator
from vssm.ops.scan.checks import check_starts

__all__ = ["MAX_TAPS", "causal_conv_silu"]

MAX_TAPS = 16
"""The `numba` kernels keep a window of this many inputs in the fastest cache."""


def causal_conv_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    state: Tensor | None = None,
    backend: str = "auto",
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolves every channel with its own K taps, looking back only, and applies SiLU.

    Arguments:
        x: The input, (B, T, D).
        weight: The taps, oldest first, (D, K).
        bias: The bias, (D,).
        state: The K - 1 inputs before x, (B, K - 1, D); zero if not given.
        backend: "auto", "reference", "numba" or "triton", as for `selective_scan`.
        cu_seqlens: Where packed sequences start, as for `selective_scan`. Then B is 1, but the
            states are (S, K - 1, D).

    Returns:
        y (B, T, D) and the state to go on from (B, K - 1, D).

    Example:
        >>> import torch
        >>> x, weight, bias = torch.ones(1, 4, 1), torch.ones(1, 3), torch.zeros(1)
        >>> causal_conv_silu(x, weight, bias)[0].flatten()
        tensor([0.7311, 1.7616, 2.8577, 2.8577])
    """
    starts = None if cu_seqlens is None else check_starts(cu_seqlens, x)
    rows = len(x) if starts is None else len(starts) - 1
    _check_shapes(x, weight, bias, state, rows)
    length, taps = x.shape[1], weight.shape[1]
    chosen = choose_backend(backend, x.device, x.dtype)
    if chosen == "numba" and taps > MAX_TAPS and backend == "numba":
        raise ValueError(
            f"backend='numba' cannot run here: it takes up to {MAX_TAPS} taps, not {taps}; "
            "choose 'auto' or 'reference'"
        )
    if backend == "auto" and chosen == "numba" and (length == 1 or taps > MAX_TAPS):
        chosen = "reference"  # as fast for one step
    if chosen == "reference":
        if starts is not None:
            return conv_packed_reference(x, weight, bias, state, starts)
        return causal_conv_silu_reference(x, weight, bias, state)
    if chosen == "numba":  # it takes float32 only
        weight, bias, state = weight.float(), bias.float(), None if state is None else state.float()
    direct = not needs_operator(x, weight, bias, state)
    if chosen == "triton" and direct and x.numel():
        after = x.new_empty(rows, taps - 1, x.shape[2])
        return kernels_of("conv", chosen).conv_forward(x, weight, bias, state, starts, after), after
    if starts is not None or length < taps - 1:
        after = last_inputs(x, state, taps, starts)
    else:
        after = x[:, length - (taps - 1) :]
        after = after.clone() if direct else after  # x may be a view of a large tensor
    if direct:
        return kernels_of("conv", chosen).conv_forward(x, weight, bias, state, starts), after
    return _conv(x, weight, bias, state, starts, chosen), after


def _check_shapes(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None, rows: int) -> None:
    """Raises `ValueError` if the shapes do not fit: a kernel would read out of bounds."""
    given = {"x": x, "weight": weight, "bias": bias}
    given |= {} if state is None else {"state": state}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is {type(value).__name__}; it must be a tensor")
    size, taps = x.shape, weight.shape
    fits = len(size) == 3 and len(taps) == 2 and taps[1] > 0
    fits = fits and (taps[0],) == size[2:] == bias.shape
    if not fits or (state is not None and state.shape != (rows, taps[1] - 1, size[2])):
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in given.items())
        raise ValueError(
            f"{shapes} do not fit; "
            "they must be x (B, T, D), weight (D, K), bias (D,), state (B, K - 1, D)"
        )


def _forward(*arguments):  # noqa: ANN002, ANN202
    *inputs, backend = arguments
    return kernels_of("conv", backend).conv_forward(*inputs)


def _backward(dy, *arguments):  # noqa: ANN001, ANN002, ANN202
    *inputs, backend = arguments
    return kernels_of("conv", backend).conv_backward(dy, *inputs)


_conv = make_operator(
    "conv_silu",
    "Tensor x, Tensor weight, Tensor bias, Tensor? state, Tensor? starts, str backend",
    _forward,
    _backward,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    gradients=4,
)
