"""RMSNorm, written in the dtype of the matrix product that follows.

    y = x r weight,   r = (mean_d x_d^2 + eps)^(-1/2)

Shapes: x, y (..., D); weight (D,).

Under autocast the residual stream x is float32 and the product that reads y is not. On a GPU the
kernel of `vssm.ops.norm.triton` then writes y in the dtype of that product; where there is no cast
to save, PyTorch's own kernel runs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.ops.dispatch import choose_fused, needs_operator, product_dtype

__all__ = ["RMSNorm", "rms_norm"]

MAX_WIDTH = 8192
"""The kernels hold a row in registers."""


class RMSNorm(nn.RMSNorm):
    """Creates an `nn.RMSNorm`, same parameter and same numbers, for use before a matrix product.

    Example:
        >>> RMSNorm(3, eps=1e-5)(torch.tensor([[1.0, 1.0, -1.0]])).detach()
        tensor([[ 1.0000,  1.0000, -1.0000]])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., D) to (..., D); under autocast in its dtype, in that of x otherwise."""
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps, product_dtype(x.device))


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None, backend: str = "auto"
) -> Tensor:
    """Divides x by its root mean square over the last dimension, and multiplies it by the weight.

    Arguments:
        x: The input, (..., D).
        weight: The weight, (D,).
        eps: Added to the mean square.
        dtype: The dtype of the result; that of x if not given.
        backend: "auto", "reference" or "triton"; "auto" takes the kernel on CUDA when dtype is not
            that of x.

    Returns:
        The normed x, (..., D). Gradients flow to x and weight.

    Example:
        >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), 0.0, torch.bfloat16)
        tensor([0.8477, 1.1328], dtype=torch.bfloat16)
    """
    if weight.shape != x.shape[-1:] or not x.dim():
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; allowed: {tuple(x.shape[-1:])}, to match x"
        )
    refusal = None
    if x.shape[-1] > MAX_WIDTH:
        refusal = f"x has width {x.shape[-1]}, more than {MAX_WIDTH}"
    elif weight.device != x.device or weight.dtype == torch.float64:
        refusal = f"weight is {weight.dtype} on {weight.device}, x is on {x.device}"
    dtype = dtype or x.dtype
    if (backend == "auto" and dtype == x.dtype) or not choose_fused(
        backend, x.device, x.dtype, refusal
    ):
        return F.rms_norm(x, weight.shape, weight, eps).to(dtype)
    if needs_operator(x, weight):
        return _norm(x, weight, eps, dtype)
    return _kernels().forward(x, weight, eps, dtype)


def _kernels():  # noqa: ANN202
    # Imported at first use: triton takes a second to load and not everybody has it.
    from vssm.ops.norm import triton as norm_triton

    return norm_triton


@torch.library.custom_op("vssm::rms_norm", mutates_args=())
def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return _kernels().forward(x, weight, eps, dtype)


@_norm.register_fake
def _(x, weight, eps, dtype):  # noqa: ANN001, ANN202
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("vssm::rms_norm_backward", mutates_args=())
def _norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _kernels().backward(dy, x, weight, eps)


@_norm_backward.register_fake
def _(dy, x, weight, eps):  # noqa: ANN001, ANN202
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx, inputs, output) -> None:  # noqa: ANN001
    x, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight)


_norm.register_autograd(
    lambda ctx, dy: (*_norm_backward(dy, *ctx.saved_tensors, ctx.eps), None, None),
    setup_context=_setup_context,
)
