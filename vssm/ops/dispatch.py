"""Which backend runs an op: its PyTorch twin, its numba kernels or its Triton kernels."""

import importlib
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

BACKENDS = ("reference", "numba", "triton")


def choose_backend(
    backend: str, device: torch.device, dtype: torch.dtype, refusal: str | None = None
) -> str:
    """Returns the backend that will run; raises `ValueError` if the requested one can not.

    "auto" takes `triton` on CUDA and `numba` for float32 on a CPU, if they can run, and `reference`
    otherwise.

    Arguments:
        backend: "auto", "reference", "numba" or "triton".
        device: The device of the input.
        dtype: The dtype of the input.
        refusal: Why the kernels of this op can not take the input, if they can not.

    Example:
        >>> choose_backend("auto", torch.device("cpu"), torch.float64)
        'reference'
    """
    if backend == "auto":
        chosen = "triton" if device.type == "cuda" else "numba"
        return "reference" if refusal or _refusal(chosen, device, dtype) else chosen
    if backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is unknown; allowed: 'auto', {', '.join(map(repr, BACKENDS))}"
        )
    if backend != "reference" and (reason := _refusal(backend, device, dtype) or refusal):
        raise ValueError(
            f"backend={backend!r} can not run here: {reason}; allowed: 'auto', 'reference'"
        )
    return backend


def _refusal(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why no kernel of a backend can run, or None if kernels can."""
    if backend == "numba":
        if device.type == "cpu" and dtype == torch.float32:
            return None
        return f"it runs float32 on a CPU, not {dtype} on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "the package 'triton' is not installed (pip install 'vssm[gpu]')"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"it needs a CUDA device, not {device.type} (or TRITON_INTERPRET=1 for a slow test run)"
        )
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it runs float32, bfloat16 and float16, not {dtype}"
    return None


def choose_fused(
    backend: str, device: torch.device, dtype: torch.dtype, refusal: str | None = None
) -> bool:
    """Returns whether the Triton kernel of an op without a numba kernel runs.

    The arguments are those of `choose_backend`.

    Example:
        >>> choose_fused("auto", torch.device("cpu"), torch.float32)
        False
    """
    if backend == "numba":
        raise ValueError(f"backend={backend!r} is unknown; allowed: 'auto', 'reference', 'triton'")
    return choose_backend(backend, device, dtype, refusal) == "triton"


def kernels(op: str, backend: str) -> ModuleType:
    """Imports the kernels of an op at first use, because numba and triton take a second to load."""
    return importlib.import_module(f"vssm.ops.{op}.{backend}")


def needs_operator(*tensors: Tensor | None) -> bool:
    """Returns whether autograd or the compiler must see a kernel; calling it directly is faster."""
    return torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    )


def product_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype that autocast gives to matrix products, or None without autocast."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None
