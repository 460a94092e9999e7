"""RMSNorm, written in the dtype of the matrix product that follows.

    y = x r weight,   r = (mean_d x_d^2 + eps)^(-1/2)

Shapes: x, y (..., D); weight (D,).

Under autocast the residual stream x is float32 and the product that reads y is not. On a GPU the
kernel of `vssm.ops.norm.triton` then writes y in the dtype of that product; where there is no cast
to save, PyTorch's own kernel runs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vssm.ops.operators import make_operator
from vssm.ops.scan import has_triton, needs_operator

__all__ = ["rms_norm"]

MAX_WIDTH = 8192
"""The kernels hold a row in registers."""


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None, backend: str = "auto"
) -> Tensor:
    """Returns the normed x, (..., D), in a dtype, or in that of x; gradients flow to x and weight.

    The backend is "auto", "reference" or "triton"; "auto" takes the kernel on CUDA if there is a
    cast to save.

    Example:
        >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), 0.0, torch.bfloat16)
        tensor([0.8477, 1.1328], dtype=torch.bfloat16)
    """
    dtype = dtype or x.dtype
    if not (backend == "triton" or (backend == "auto" and dtype != x.dtype and _fits(x, weight))):
        return F.rms_norm(x, weight.shape, weight, eps).to(dtype)
    return (_norm if needs_operator(x, weight) else _forward)(x, weight, eps, dtype)


def _fits(x: Tensor, weight: Tensor) -> bool:
    exact = torch.float64 in (x.dtype, weight.dtype)
    return x.is_cuda and has_triton() and x.shape[-1] <= MAX_WIDTH and not exact


def _forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    from vssm.ops.norm import triton as kernels  # not everybody has triton

    return kernels.forward(x, weight, eps, dtype)


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, _: torch.dtype
) -> tuple[Tensor, Tensor]:
    from vssm.ops.norm import triton as kernels

    return kernels.backward(dy, x, weight, eps)


_norm = make_operator(
    "rms_norm",
    "Tensor x, Tensor weight, float eps, ScalarType dtype",
    _forward,
    _backward,
    lambda x, weight, eps, dtype: x.new_empty(x.shape, dtype=dtype),
)
