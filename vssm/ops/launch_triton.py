"""Starts Triton kernels with little work on the host.

Triton's own launch describes all arguments in text and finds the compiled kernel by that text,
which takes longer than a small kernel runs. Here a tuple describes them. The first call with a
description goes through Triton, which compiles; later ones go straight to the compiled kernel.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction, driver

_MOST = 8192  # kernels that are remembered: calls of many lengths may each have their own


# By description: what launches, the kernel on its device, its metadata, and the arguments that were
# compiled in, in the order of the kernel.
_compiled: dict[tuple, tuple[Callable, Any, Any, tuple]] = {}


@functools.cache
def processors(device: torch.device) -> int:
    """Returns the number of multiprocessors; 2 in the interpreter, for tests of all branches."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def ceil_div(number: int, size: int) -> int:
    """Returns number / size, rounded up; `triton.cdiv` takes 10 us to do so."""
    return -(-number // size)


def next_power(number: int) -> int:
    """Returns the smallest power of 2 that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def contiguous(x: Tensor | None) -> Tensor | None:
    """Returns an optional tensor without gaps."""
    return None if x is None else x.contiguous()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    key: Hashable = None,
    **constants: Any,
) -> None:
    """Does what `kernel[grid](*arguments, **constants)` does, in less time.

    Arguments:
        kernel: A function with `triton.jit`.
        grid: The numbers of programs, one to three.
        arguments: What is not compiled in, in the order of the kernel: tensors, numbers, None, and
            tuples of them.
        key: Stands for all tuples and constants, if the caller has described them already.
        constants: What is compiled in, after the arguments, and options of Triton.
    """
    if type(kernel) is not JITFunction or torch.version.cuda is None:  # the interpreter, AMD
        kernel[grid](*arguments, **constants)
        return
    active: Any = driver.active
    device = active.get_current_device()
    if key is None:
        described = (kernel.fn, device, *map(_describe, arguments), *constants.items())
    else:
        given = [_describe(argument) for argument in arguments if type(argument) is not tuple]
        described = (kernel.fn, device, key, *given)
    compiled = _compiled.get(described)
    if compiled is None:
        made = kernel[grid](*arguments, **constants)
        names = kernel.arg_names[len(arguments) :]
        fixed = tuple([constants[name] for name in names])
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[described] = made.run, made.function, made.packed_metadata, fixed
        return
    run, function, metadata, fixed = compiled
    stream, (x, y, z) = active.get_current_stream(device), (*grid, 1, 1)[:3]
    # The three None stand for hooks of profilers.
    run(x, y, z, stream, function, metadata, None, None, None, *arguments, *fixed)


def _describe(argument: Any) -> Hashable:
    """Returns the properties of an argument that Triton may compile a kernel for.

    Example:
        >>> _describe((torch.zeros(3), None, 48, 1))
        ((torch.float32, True), None, (True, False), 1)
    """
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    kind = type(argument)
    if kind is int:
        return argument if argument == 1 else (argument % 16 == 0, argument.bit_length() > 31)
    if kind is tuple:
        return tuple(map(_describe, argument))
    if kind is tl.constexpr:
        return (argument.value,)
    return kind if kind is float else argument
