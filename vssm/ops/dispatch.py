"""Which backend runs an operation, whether a kernel or its PyTorch twin does, and the dtype of a result."""

import importlib.util
import os

import torch
from torch import Tensor

__all__ = ["BACKENDS", "choose_backend", "choose_fused", "needs_operator", "product_dtype"]

BACKENDS = ("reference", "numba", "triton")


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Returns the backend that will run; raises `ValueError` when the one asked for can not.

    "auto" takes `triton` on CUDA, `numba` for float32 on a CPU and `reference` otherwise.

    >>> choose_backend("auto", torch.device("cpu"), torch.float64)
    'reference'
    """
    if backend == "auto":
        if device.type == "cuda" and _triton_refusal(device, dtype) is None:
            return "triton"
        return "numba" if device.type == "cpu" and dtype == torch.float32 else "reference"
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; allowed: 'auto', {', '.join(map(repr, BACKENDS))}")
    refusal = None
    if backend == "numba" and (device.type != "cpu" or dtype != torch.float32):
        refusal = f"it runs float32 on a CPU, not {dtype} on {device.type}"
    if backend == "triton":
        refusal = _triton_refusal(device, dtype)
    if refusal:
        raise ValueError(f"backend={backend!r} can not run here: {refusal}; allowed: 'auto', 'reference'")
    return backend


def _triton_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Says why the Triton kernels can not run, or None when they can."""
    if importlib.util.find_spec("vssm.ops.scan_triton") is None or importlib.util.find_spec("triton") is None:
        return "the package 'triton' is not installed (pip install 'vssm[gpu]')"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it needs a CUDA device, not {device.type} (or TRITON_INTERPRET=1 for a slow test run)"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it runs float32, bfloat16 and float16, not {dtype}"
    return None


def choose_fused(backend: str, device: torch.device, dtype: torch.dtype, refusal: str | None = None) -> bool:
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
        raise ValueError(f"backend='triton' can not run here: {refusal}; allowed: 'auto', 'reference'")
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
