"""The causal depthwise convolution of the Mamba block, with SiLU and a carried state.

    s_t = bias + sum_k weight_k x_{t - K + 1 + k}          y_t = silu(s_t)          k = 0 ... K - 1

Shapes: x, y (B, T, D); weight (D, K); bias (D,); state (B, K - 1, D), the last K - 1 inputs.

The backends are those of the scan. `vssm.ops.launch_numba` and `vssm.ops.conv.triton` have the
functions `conv_forward` and `conv_backward`.
"""

from functools import cache
from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from vssm.ops.operators import make_operator
from vssm.ops.scan import check_starts, choose_backend, needs_operator

__all__ = ["MAX_TAPS", "causal_conv_silu", "causal_conv_silu_reference"]

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
        >>> x, weight, bias = torch.ones(1, 4, 1), torch.ones(1, 3), torch.zeros(1)
        >>> causal_conv_silu(x, weight, bias)[0].flatten()
        tensor([0.7311, 1.7616, 2.8577, 2.8577])
    """
    starts = None if cu_seqlens is None else check_starts(cu_seqlens, x)
    _check_shapes(x, weight, bias, state, None if starts is None else len(starts) - 1)
    length, taps = x.shape[1], weight.shape[1]
    chosen = choose_backend(backend, x.device, x.dtype)
    if chosen == "numba" and taps > MAX_TAPS and backend == "numba":
        raise ValueError(
            f"backend='numba' can not run here: it takes up to {MAX_TAPS} taps, not {taps}; "
            "choose 'auto' or 'reference'"
        )
    if backend == "auto" and chosen == "numba" and (length == 1 or taps > MAX_TAPS):
        chosen = "reference"  # as fast for one step
    if chosen == "reference":
        return _reference(x, weight, bias, state, starts)
    if chosen == "numba":  # it takes float32 only
        weight, bias, state = weight.float(), bias.float(), None if state is None else state.float()
    direct = not needs_operator(x, weight, bias, state)
    if chosen == "triton" and direct and x.numel():
        after = x.new_empty(len(x) if starts is None else len(starts) - 1, taps - 1, x.shape[2])
        return _kernels(chosen).conv_forward(x, weight, bias, state, after, starts), after
    if starts is not None:
        after = _last_inputs(x, state, taps, starts)
    elif length >= taps - 1:
        after = x[:, length - (taps - 1) :]
        after = after.clone() if direct else after  # x may be a view of a large tensor
    elif state is None:
        after = F.pad(x, (0, 0, taps - 1 - length, 0))
    else:
        after = torch.cat([state[:, length:].to(x.dtype), x], 1)
    return (_forward if direct else _conv)(x, weight, bias, state, starts, chosen), after


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs the twin, on one packed sequence after the other."""
    if starts is None:
        return causal_conv_silu_reference(x, weight, bias, state)
    ys = [x[:, :0]]
    for i, (first, last) in enumerate(pairwise(starts.tolist())):
        own = None if state is None else state[i : i + 1]
        ys.append(causal_conv_silu_reference(x[:, first:last], weight, bias, own)[0])
    return torch.cat(ys, 1), _last_inputs(x, state, weight.shape[1], starts)


def _last_inputs(x: Tensor, state: Tensor | None, taps: int, starts: Tensor) -> Tensor:
    """Returns the last K - 1 inputs of packed sequences, which may reach back into their states."""
    if state is None:
        state = x.new_zeros(len(starts) - 1, taps - 1, x.shape[2])
    before, (first, last) = state.shape[1], (t.to(x.device) for t in (starts[:-1], starts[1:]))
    t = last[:, None] + torch.arange(-before, 0, device=x.device)
    in_state = (t - first[:, None] + before).clamp(max=max(before - 1, 0))[..., None]
    old = state.gather(1, in_state.expand_as(state)).to(x.dtype)
    return torch.where((t >= first[:, None])[..., None], x[0, t.clamp(min=0)], old)


def _check_shapes(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None, sequences: int | None
) -> None:
    """Raises `ValueError` if the shapes do not fit: a kernel would read out of bounds."""
    tensors = (x, weight, bias) if state is None else (x, weight, bias, state)
    given = dict(zip(("x", "weight", "bias", "state"), tensors, strict=False))
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is {type(value).__name__}; it must be a tensor")
    size, taps = x.shape, weight.shape
    fits = len(size) == 3 and len(taps) == 2 and taps[1] > 0
    fits = fits and (taps[0],) == size[2:] == bias.shape
    if fits and state is not None:
        fits = state.shape == (size[0] if sequences is None else sequences, taps[1] - 1, size[2])
    if not fits:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in given.items())
        raise ValueError(
            f"{shapes} do not fit; "
            "they must be x (B, T, D), weight (D, K), bias (D,), state (B, K - 1, D)"
        )


def causal_conv_silu_reference(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The plain PyTorch twin of `causal_conv_silu`."""
    batch, length, channels = x.shape
    taps = weight.shape[1]
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)  # so that y has the dtype of x
    if state is None:
        state = x.new_zeros(batch, taps - 1, channels)
    padded = torch.cat([state.to(x.dtype), x], 1)
    if length == 1:  # few operations, for generation step by step
        return F.silu((padded * weight.T).sum(1) + bias)[:, None], padded[:, 1:]
    y = torch.addcmul(bias, padded[:, :length], weight[:, 0])
    for k in range(1, taps):
        y = torch.addcmul(y, padded[:, k : k + length], weight[:, k])
    return F.silu(y), padded[:, length:]


@cache
def _kernels(backend: str) -> ModuleType:
    if backend == "numba":
        from vssm.ops import launch_numba as kernels
    else:
        from vssm.ops.conv import triton as kernels
    return kernels


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
    backend: str,
) -> Tensor:
    return _kernels(backend).conv_forward(x, weight, bias, state, starts=starts)


def _backward(dy: Tensor, *arguments) -> tuple[Tensor | None, ...]:  # noqa: ANN002
    *inputs, starts, backend = arguments
    return _kernels(backend).conv_backward(dy, *inputs, starts=starts)


_conv = make_operator(
    "conv_silu",
    "Tensor x, Tensor weight, Tensor bias, Tensor? state, Tensor? starts, str backend",
    _forward,
    _backward,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    gradients=4,
)
