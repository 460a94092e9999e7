"""What the fused kernels share: whether kernel or PyTorch twin runs, and the dtype of a result."""

import torch
from torch import Tensor

from vssm.ops.scan import choose_backend

__all__ = ["choose_fused", "needs_operator", "product_dtype"]


def choose_fused(
    backend: str, device: torch.device, dtype: torch.dtype, refusal: str | None = None
) -> bool:
    """Says whether the Triton kernel runs rather than its twin in PyTorch.

    Arguments:
        backend: "auto", "reference" or "triton"; "auto" takes the kernel on CUDA where it can run.
        device: The device of the input.
        dtype: The dtype of the input.
        refusal: Why the kernel can not take this input, if it can not.

    Example:
        >>> choose_fused("auto", torch.device("cpu"), torch.float32)
        False
    """
    if backend == "reference":
        return False
    if backend == "auto":
        return refusal is None and choose_backend("auto", device, dtype) == "triton"
    if backend != "triton":
        raise ValueError(f"backend={backend!r} is unknown; allowed: 'auto', 'reference', 'triton'")
    choose_backend("triton", device, dtype)
    if refusal is not None:
        raise ValueError(
            f"backend='triton' can not run here: {refusal}; allowed: 'auto', 'reference'"
        )
    return True


def needs_operator(*tensors: Tensor) -> bool:
    """Says whether autograd or the compiler must see a kernel; if not, its direct call costs less."""
    return torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    )


def product_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype that autocast gives a matrix product, None where it gives none."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None
