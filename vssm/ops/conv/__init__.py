"""The causal depthwise convolution of the Mamba block, with SiLU and a carried state.

    s_t = bias + sum_k weight_k x_{t - K + 1 + k}          y_t = silu(s_t)          k = 0 ... K - 1

Shapes: x, y (B, T, D); weight (D, K); bias (D,); state (B, K - 1, D), the last K - 1 inputs.

The backends are those of the scan. `vssm.ops.conv.numba` and `vssm.ops.conv.triton` have the
functions `forward` and `backward`, which become one operator here.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.ops.dispatch import choose_backend, kernels, needs_operator
from vssm.ops.linear import PackedWeight, Ready, linear, linear_parts, ready_parts

__all__ = ["MAX_TAPS", "causal_conv_silu", "causal_conv_silu_reference", "linear_conv_silu"]

MAX_TAPS = 16
"""The `numba` kernels keep a window of this many inputs in the fastest cache."""


def causal_conv_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    state: Tensor | None = None,
    backend: str = "auto",
    last: bool = True,
) -> tuple[Tensor, Tensor]:
    """Convolves every channel with its own K taps, looking back only, and applies SiLU.

    Arguments:
        x: The input, (B, T, D).
        weight: The taps, oldest first, (D, K).
        bias: The bias, (D,).
        state: The K - 1 inputs before x, (B, K - 1, D); zero if not given. With fewer rows,
            (B / S, K - 1, D), each row serves S neighbouring rows of x.
        backend: "auto", "reference", "numba" or "triton", as for `selective_scan`.
        last: Whether to return the state to go on from; if not, the returned state has no rows.

    Returns:
        y (B, T, D) and the state to go on from (B, K - 1, D).

    Example:
        >>> x, weight, bias = torch.ones(1, 4, 1), torch.ones(1, 3), torch.zeros(1)
        >>> causal_conv_silu(x, weight, bias)[0].flatten()
        tensor([0.7311, 1.7616, 2.8577, 2.8577])
    """
    _check_shapes(x, weight, bias, state)
    length, taps = x.shape[1], weight.shape[1]
    refusal = None
    if x.device.type == "cpu" and backend != "triton" and taps > MAX_TAPS:
        refusal = f"it takes up to {MAX_TAPS} taps, not {taps}"
    chosen = choose_backend(backend, x.device, x.dtype, refusal)
    if backend == "auto" and chosen == "numba" and length == 1:  # where PyTorch is as fast
        chosen = "reference"
    direct = not needs_operator(x, weight, bias, state)
    if chosen == "triton" and direct and x.numel():
        after = x.new_empty(len(x) if last else 0, taps - 1, x.shape[2])
        y = kernels("conv", chosen).forward(x, weight, bias, state, after if last else None)
        return y, after
    if state is not None and len(state) != len(x):
        state = state.repeat_interleave(len(x) // len(state), 0)
    if chosen == "reference":
        y, after = causal_conv_silu_reference(x, weight, bias, state)
        return y, after if last else after[:0]
    if chosen == "numba":  # it takes float32 only
        weight, bias, state = weight.float(), bias.float(), None if state is None else state.float()
    if not last:
        after = x.new_empty(0, taps - 1, x.shape[2])
    elif length >= taps - 1:
        after = x[:, length - (taps - 1) :]
        after = after.clone() if direct else after  # x may be a view of a large tensor
    elif state is None:
        after = F.pad(x, (0, 0, taps - 1 - length, 0))
    else:
        after = torch.cat([state[:, length:].to(x.dtype), x], 1)
    if direct:  # the dispatcher costs tens of microseconds per call
        return kernels("conv", chosen).forward(x, weight, bias, state), after
    return _conv_silu(x, weight, bias, state, chosen), after


def _check_shapes(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None) -> None:
    """Raises `ValueError` if the shapes do not fit: a kernel would read out of bounds."""
    given = {"x": x, "weight": weight, "bias": bias, **({} if state is None else {"state": state})}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is {type(value).__name__}; allowed: a tensor")
    fits = x.dim() == 3 and weight.dim() == 2 and weight.shape[1] > 0
    fits = fits and weight.shape[:1] == x.shape[2:] == bias.shape
    if fits and state is not None:
        fits = state.dim() == 3 and state.shape[1:] == (weight.shape[1] - 1, x.shape[2])
        fits = fits and (len(state) == len(x) or (len(state) > 0 and len(x) % len(state) == 0))
    if not fits:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in given.items())
        raise ValueError(
            f"{shapes} do not fit; "
            "allowed: x (B, T, D), weight (D, K), bias (D,), state (B, K - 1, D)"
        )


def linear_conv_silu(
    x: Tensor | Ready,
    weight: Tensor | PackedWeight,
    taps: Tensor,
    bias: Tensor,
    state: Tensor | None = None,
    norm: nn.RMSNorm | None = None,
    backend: str = "auto",
    last: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplies by a weight and convolves the first half of the product; the second is a gate.

    Arguments:
        x: The input, (B, T, W), or what `linear_ready` made of it with this norm.
        weight: The weight, (2 D, W).
        taps: The taps of the convolution, (D, K).
        bias: The bias of the convolution, (D,).
        state: As for `causal_conv_silu`.
        norm: Applied to x first.
        backend: As for `linear` and `causal_conv_silu`.
        last: As for `causal_conv_silu`.

    Returns:
        y and the gate, (B, T, D), and the state to go on from (B, K - 1, D).

    Example:
        >>> x, weight, taps = torch.ones(1, 4, 1), torch.tensor([[1.0], [2.0]]), torch.ones(1, 3)
        >>> y, gate, _ = linear_conv_silu(x, weight, taps, torch.zeros(1))
        >>> y.flatten(), gate.flatten()
        (tensor([0.7311, 1.7616, 2.8577, 2.8577]), tensor([2., 2., 2., 2.]))
    """
    multiply = linear if needs_operator(taps, bias, state) else linear_parts
    if isinstance(x, Ready):
        made, x = ready_parts(x, weight), x.x
    else:
        made = multiply(x, weight, norm=norm, backend=backend)
    if isinstance(made, Tensor):
        u, z = made.chunk(2, -1)
        u, after = causal_conv_silu(u, taps, bias, state, backend, last)
        return u, z, after
    after = x.new_empty(len(x) if last else 0, taps.shape[1] - 1, len(taps))
    add_and_convolve = kernels("conv", "triton").forward_parts
    y, z = add_and_convolve(made, x.shape[1], taps, bias, state, after if last else None)
    return y, z, after


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


@torch.library.custom_op("vssm::conv_silu", mutates_args=())
def _conv_silu(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None, backend: str
) -> Tensor:
    return kernels("conv", backend).forward(x, weight, bias, state)


@_conv_silu.register_fake
def _(x, weight, bias, state, backend):  # noqa: ANN001, ANN202
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("vssm::conv_silu_backward", mutates_args=())
def _conv_silu_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return kernels("conv", backend).backward(dy, x, weight, bias, state)


@_conv_silu_backward.register_fake
def _(dy, x, weight, bias, state, backend):  # noqa: ANN001, ANN202
    like = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight, bias)]
    return *like, x.new_empty(0) if state is None else torch.empty_like(state)


def _setup_context(ctx, inputs, output) -> None:  # noqa: ANN001
    ctx.save_for_backward(*inputs[:4])
    ctx.backend = inputs[4]


def _backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
    saved = ctx.saved_tensors  # read once: checkpointing recomputes them at every read
    *grads, dstate = _conv_silu_backward(dy, *saved, ctx.backend)
    return *grads, dstate if saved[3] is not None else None, None


_conv_silu.register_autograd(_backward, setup_context=_setup_context)
