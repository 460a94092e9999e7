"""The convolution as an operation with gradients, of eager programs and of compiled ones."""
# ruff: noqa: ANN001, ANN002, ANN202 (the schema has the types)

from functools import cache
from types import ModuleType

import torch

from vssm.ops.operators import make_operator

__all__ = ["conv_operator", "kernels"]


@cache
def kernels(backend: str) -> ModuleType:
    """Returns the module of a backend, imported at first use: numba and triton load slowly."""
    if backend == "numba":
        from vssm.ops import launch_numba as kernels
    else:
        from vssm.ops.conv import triton as kernels
    return kernels


def _forward(*arguments):
    *inputs, backend = arguments
    return kernels(backend).conv_forward(*inputs)


def _backward(dy, *arguments):
    *inputs, backend = arguments
    return kernels(backend).conv_backward(dy, *inputs)


conv_operator = make_operator(
    "conv_silu",
    "Tensor x, Tensor weight, Tensor bias, Tensor? state, Tensor? starts, str backend",
    _forward,
    _backward,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    gradients=4,
)
