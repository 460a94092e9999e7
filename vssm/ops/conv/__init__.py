"""The causal depthwise convolution of the Mamba block with SiLU, and with a carried state.

    s_t = bias + sum_k weight_k x_{t - K + 1 + k}          y_t = silu(s_t)          k = 0 ... K - 1

Shapes: x, y (B, T, D); weight (D, K); bias (D,); state (B, K - 1, D), the last K - 1 inputs.

Backends are those of the scan: `vssm.ops.conv.numba` and `vssm.ops.conv.triton` each offer `forward` and
`backward`, which become one operator.
"""

import importlib
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.ops.dispatch import needs_operator
from vssm.ops.linear import Ready, linear, linear_parts, ready_parts
from vssm.ops.scan import choose_backend

__all__ = ["MAX_TAPS", "causal_conv_silu", "causal_conv_silu_reference", "linear_conv_silu"]

MAX_TAPS = 16
"""The `numba` kernels hold a window of inputs in the fastest cache."""


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
            (B / S, K - 1, D), each is for S neighbouring rows of x.
        backend: "auto", "reference", "numba" or "triton", as for `selective_scan`.
        last: Whether the state to go on from is asked for; else it has no rows.

    Returns:
        y (B, T, D) and the state to go on from (B, K - 1, D).

    Example:
        >>> x, weight, bias = torch.ones(1, 4, 1), torch.ones(1, 3), torch.zeros(1)
        >>> causal_conv_silu(x, weight, bias)[0].flatten()
        tensor([0.7311, 1.7616, 2.8577, 2.8577])
    """
    _check_shapes(x, weight, bias, state)
    taps = weight.shape[1]
    chosen = _choose(backend, x, taps)
    needed = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias, state)
    )
    direct = not needed and not torch.compiler.is_compiling()
    if chosen == "triton" and direct and x.numel():
        after = x.new_empty(x.shape[0] if last else 0, taps - 1, x.shape[2])
        return _kernels(chosen).forward(x, weight, bias, state, after if last else None), after
    if state is not None and len(state) != len(x):
        state = state.repeat_interleave(len(x) // len(state), 0)
    if chosen == "reference":
        y, after = causal_conv_silu_reference(x, weight, bias, state)
        return y, after if last else after[:0]
    if chosen == "numba":  # knows float32 only
        weight, bias, state = weight.float(), bias.float(), None if state is None else state.float()
    if not last:
        after = x.new_empty(0, taps - 1, x.shape[2])
    elif x.shape[1] >= taps - 1:
        after = x[:, x.shape[1] - (taps - 1) :]
        after = after.clone() if direct else after  # x may be a part of something large
    elif state is None:
        after = F.pad(x, (0, 0, taps - 1 - x.shape[1], 0))
    else:
        after = torch.cat([state[:, x.shape[1] :].to(x.dtype), x], 1)
    if direct:  # the dispatcher costs tens of microseconds a call
        return _kernels(chosen).forward(x, weight, bias, state), after
    return _conv_silu(x, weight, bias, state, chosen), after


def _check_shapes(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None) -> None:
    """Raises unless they fit: a kernel would read what is not theirs."""
    given = {"x": x, "weight": weight, "bias": bias, **({} if state is None else {"state": state})}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is {type(value).__name__}; allowed: a tensor")
    if (
        x.dim() == 3
        and weight.dim() == 2
        and weight.shape[1]
        and weight.shape[:1] == x.shape[2:] == bias.shape
    ):
        before = (weight.shape[1] - 1, x.shape[2])
        if state is None or (
            state.dim() == 3
            and state.shape[1:] == before
            and (len(state) == len(x) or (len(state) and len(x) % len(state) == 0))
        ):
            return
    shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in given.items())
    raise ValueError(
        f"{shapes} do not fit; allowed: x (B, T, D), weight (D, K), bias (D,), state (B, K - 1, D)"
    )


def linear_conv_silu(
    x: Tensor | Ready,
    weight: Tensor,
    taps: Tensor,
    bias: Tensor,
    state: Tensor | None = None,
    norm: nn.Module | None = None,
    backend: str = "auto",
    last: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplies by a weight and convolves the first half of the product; the second is a gate.

    Arguments:
        x: The input, (B, T, W), or what `linear_ready` made of it, with this norm.
        weight: The weight, (2 D, W).
        taps: The taps of the convolution, (D, K).
        bias: Its bias, (D,).
        state: As for `causal_conv_silu`.
        norm: Applied to x before.
        backend: As for `linear` and `causal_conv_silu`.
        last: Whether the state to go on from is asked for.

    Returns:
        y and the gate, (B, T, D), and the state to go on from (B, K - 1, D).

    Example:
        >>> x, weight, taps = torch.ones(1, 4, 1), torch.tensor([[1.0], [2.0]]), torch.ones(1, 3)
        >>> y, gate, _ = linear_conv_silu(x, weight, taps, torch.zeros(1))
        >>> y.flatten(), gate.flatten()
        (tensor([0.7311, 1.7616, 2.8577, 2.8577]), tensor([2., 2., 2., 2.]))
    """
    others = [taps, bias] if state is None else [taps, bias, state]
    multiply = linear if needs_operator(*others) else linear_parts
    if isinstance(x, Ready):
        made, x = ready_parts(x, weight), x.x
    else:
        made = multiply(x, weight, norm=norm, backend=backend)
    if isinstance(made, Tensor):
        u, z = made.chunk(2, -1)
        u, after = causal_conv_silu(u, taps, bias, state, backend, last)
        return u, z, after
    from vssm.ops.conv import triton as conv_triton

    after = x.new_empty(len(x) if last else 0, taps.shape[1] - 1, len(taps))
    return *conv_triton.forward_parts(
        made, x.shape[1], taps, bias, state, after if last else None
    ), after


def causal_conv_silu_reference(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The plain PyTorch twin of `causal_conv_silu`."""
    batch, length, channels = x.shape
    taps = weight.shape[1]
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)  # float32 would make the result float32 too
    if state is None:
        state = x.new_zeros(batch, taps - 1, channels)
    padded = torch.cat([state.to(x.dtype), x], 1)
    if length == 1:  # few and small operations: a step-by-step loop feels each of them
        return F.silu((padded * weight.T).sum(1) + bias)[:, None], padded[:, 1:]
    y = torch.addcmul(bias, padded[:, :length], weight[:, 0])
    for k in range(1, taps):
        y = torch.addcmul(y, padded[:, k : k + length], weight[:, k])
    return F.silu(y), padded[:, length:]


def _choose(backend: str, x: Tensor, taps: int) -> str:
    """Returns the backend that runs; `numba` has room for few taps only, and gains nothing at one step."""
    chosen = choose_backend(backend, x.device, x.dtype)
    if chosen == "numba" and backend == "auto" and (taps > MAX_TAPS or x.shape[1] == 1):
        return "reference"
    if chosen != "numba" or taps <= MAX_TAPS:
        return chosen
    raise ValueError(
        f"backend='numba' can not run here: it takes up to {MAX_TAPS} taps, not {taps}; "
        "allowed: 'auto', 'reference'"
    )


def _kernels(backend: str) -> ModuleType:
    # Imported at first use: numba and triton take a second to load and not everybody needs them.
    return importlib.import_module(f"vssm.ops.conv.{backend}")


@torch.library.custom_op("vssm::conv_silu", mutates_args=())
def _conv_silu(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None, backend: str
) -> Tensor:
    return _kernels(backend).forward(x, weight, bias, state)


@_conv_silu.register_fake
def _(x, weight, bias, state, backend):  # noqa: ANN001, ANN202
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("vssm::conv_silu_backward", mutates_args=())
def _conv_silu_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _kernels(backend).backward(dy, x, weight, bias, state)


@_conv_silu_backward.register_fake
def _(dy, x, weight, bias, state, backend):  # noqa: ANN001, ANN202
    like = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight, bias)]
    return *like, x.new_empty(0) if state is None else torch.empty_like(state)


def _setup_context(ctx, inputs, output) -> None:  # noqa: ANN001
    ctx.save_for_backward(*inputs[:4])
    ctx.backend = inputs[4]


def _backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
    saved = ctx.saved_tensors  # once: activation checkpointing makes them again for every look
    *grads, dstate = _conv_silu_backward(dy, *saved, ctx.backend)
    return *grads, dstate if saved[3] is not None else None, None


_conv_silu.register_autograd(_backward, setup_context=_setup_context)
