"""Says what is wrong with the arguments of a scan or of a convolution."""

from itertools import pairwise

import torch
from torch import Tensor

_NAMES = ("u", "dt", "A", "B", "C", "D", "z", "dt_bias", "h0")


def check_starts(cu_seqlens: Tensor, x: Tensor) -> Tensor:
    """Returns where the sequences start that are packed in x (1, T, D), and T: int64 on the CPU.

    Example:
        >>> check_starts([0, 3], torch.zeros(1, 3, 2))
        Traceback (most recent call last):
        ValueError: cu_seqlens must be a tensor of shape (S + 1,)
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.ndim != 1 or not len(cu_seqlens):
        raise ValueError("cu_seqlens must be a tensor of shape (S + 1,)")
    if cu_seqlens.is_floating_point() or cu_seqlens.is_complex():
        raise ValueError(f"cu_seqlens has dtype {cu_seqlens.dtype}; it must hold integers")
    if not isinstance(x, Tensor) or x.ndim != 3 or len(x) != 1:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"the input is {shape}; with cu_seqlens it must be (1, length, channels)")
    starts = cu_seqlens.detach().to("cpu", torch.int64).contiguous()
    values = starts.tolist()
    if values[0] != 0 or values[-1] != x.shape[1]:
        raise ValueError(
            f"cu_seqlens starts with {values[0]} and ends with {values[-1]}; "
            f"it must go from 0 to {x.shape[1]}, the length of the input"
        )
    for first, last in pairwise(values):
        if last <= first:
            raise ValueError(
                f"cu_seqlens does not rise: {first} is followed by {last}; "
                "every number must be larger than the one before"
            )
    return starts


def refuse(inputs: tuple, sequences: int | None) -> None:
    """Raises a `ValueError` that says what does not fit together."""
    for name, tensor in zip(_NAMES, inputs, strict=True):
        if tensor is None and name in _NAMES[5:]:
            continue
        if not isinstance(tensor, Tensor) or tensor.is_complex():
            found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} is {found}; it must be a tensor of real numbers")
    u, A = inputs[0], inputs[2]
    if u.ndim != 3:
        raise ValueError(f"u has shape {tuple(u.shape)}; it must be (batch, length, channels)")
    if not u.is_floating_point():
        raise ValueError(f"u has dtype {u.dtype}; it must be a floating-point dtype")
    batch, length, channels = u.shape
    if A.ndim != 2 or A.shape[0] != channels or A.shape[1] < 1:
        raise ValueError(
            f"A has shape {tuple(A.shape)}; it must be ({channels}, states) with states >= 1"
        )
    vector, row, channel = u.shape, (batch, length, A.shape[1]), (channels,)
    state = (batch if sequences is None else sequences, *A.shape)
    shapes = (vector, vector, A.shape, row, row, channel, vector, channel, state)
    for name, tensor, shape in zip(_NAMES, inputs, shapes, strict=True):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; u and A ask for {tuple(shape)}"
            )
        if tensor is not None and tensor.device != u.device:
            raise ValueError(
                f"{name} is on {tensor.device}, but u is on {u.device}; move one of them"
            )
