"""The matrix product of a layer, fused with its neighbours.

    y = norm(x) weight^T + bias + add          norm(x) = x scale (mean_k x_k^2 + eps)^(-1/2), or x

Shapes: x (..., K); weight (N, K); bias (N,); add, y (..., N); scale (K,).

On a GPU, PyTorch multiplies float32 on the units for single numbers, and a product of few rows does
not fill even these. Without gradients, the kernels of `vssm.ops.linear.triton` take over, which are
as accurate as float32 and use tensor cores. PyTorch's own product runs with gradients, under
autocast or `torch.compile`, and on a CPU.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.ops.conv import causal_conv_silu
from vssm.ops.operators import product_dtype
from vssm.ops.scan import has_triton, needs_operator

__all__ = ["Halves", "PackedWeight", "linear", "linear_conv_silu"]

_DIVISOR = 32  # of K, in the kernels

Halves: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""A matrix as high and low parts in float16 and a factor for each row."""


class PackedWeight:
    """A weight that never changes, with the halves that products of many rows read.

    The halves are made when a product first asks for them, and kept: they take as many bytes as the
    weight.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight: Tensor = weight.detach().contiguous()
        self._halves: Halves | None = None

    def halves(self, split: Callable[[Tensor], Halves]) -> Halves:
        """Returns the halves, made by `split` at the first call."""
        if self._halves is None:
            halves = split(self.weight)
            if self.weight.is_cuda:
                if torch.cuda.is_current_stream_capturing():
                    return halves  # belongs to the memory of that CUDA graph
                torch.cuda.current_stream(self.weight.device).synchronize()  # any stream may read
            self._halves = halves
        return self._halves


def linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    norm: nn.RMSNorm | None = None,
    backend: str = "auto",
) -> Tensor:
    """Multiplies the rows of x, after the norm, by a weight and adds the bias and `add`.

    The backend is "auto", "reference" or, for tests, "triton".

    Example:
        >>> weight, bias = torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([0.5, 0.0])
        >>> linear(torch.tensor([1.0, 2.0]), weight, bias, add=torch.ones(2))
        tensor([12.5000, 18.0000])
    """
    if not _runs_kernels(backend, x, weight, bias, add, norm):
        whole = weight.weight if isinstance(weight, PackedWeight) else weight
        y = F.linear(x if norm is None else norm(x), whole, bias)
        return y if add is None else add + y
    from vssm.ops.linear import triton as kernels

    return kernels.linear(x, weight, bias, add, norm)


def linear_conv_silu(
    x: Tensor,
    weight: Tensor | PackedWeight,
    taps: Tensor,
    bias: Tensor,
    state: Tensor | None = None,
    norm: nn.RMSNorm | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplies by a weight and convolves the first half of the product; the second is a gate.

    Arguments:
        x: The input, (B, T, W).
        weight: The weight, (2 D, W).
        taps: The taps of the convolution, (D, K).
        bias: The bias of the convolution, (D,).
        state: As for `causal_conv_silu`.
        norm: Applied to x first.
        backend: As for `linear` and `causal_conv_silu`.

    Returns:
        y and the gate, (B, T, D), and the state to go on from (B, K - 1, D).

    Example:
        >>> x, weight, taps = torch.ones(1, 4, 1), torch.tensor([[1.0], [2.0]]), torch.ones(1, 3)
        >>> y, gate, _ = linear_conv_silu(x, weight, taps, torch.zeros(1))
        >>> y.flatten(), gate.flatten()
        (tensor([0.7311, 1.7616, 2.8577, 2.8577]), tensor([2., 2., 2., 2.]))
    """
    if not needs_operator(taps, bias, state) and _runs_kernels(backend, x, weight, norm=norm):
        from vssm.ops.conv.triton import forward_parts
        from vssm.ops.linear import triton as kernels

        # Few rows are multiplied in parts of the sums over W, which the convolution adds.
        made = kernels.multiply(x, weight, norm=norm)
        if isinstance(made, kernels.Parts):
            after = x.new_empty(len(x), taps.shape[1] - 1, len(taps))
            y, gate = forward_parts(made, x.shape[1], taps, bias, state, after)
            return y, gate, after
    else:
        made = linear(x, weight, norm=norm, backend=backend)
    u, gate = made.chunk(2, -1)
    y, after = causal_conv_silu(u, taps, bias, state, backend)
    return y, gate, after


def _runs_kernels(
    backend: str,
    x: Tensor,
    packed: Tensor | PackedWeight,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    norm: nn.RMSNorm | None = None,
) -> bool:
    """Says whether the kernels run: on CUDA, for float32 without gradients, and for most widths."""
    if backend != "auto" or not x.is_cuda:
        return backend == "triton"
    weight = packed.weight if isinstance(packed, PackedWeight) else packed
    given = (x, weight, bias, add, None if norm is None else norm.weight)
    tensors = [t for t in given if t is not None]
    return (
        not needs_operator(*tensors)
        and all(t.dtype == torch.float32 and t.device == x.device for t in tensors)
        and product_dtype(x.device) is None
        and x.shape[-1] == weight.shape[1]
        and weight.shape[1] % _DIVISOR == 0
        # Where products may be less accurate than float32, PyTorch's are faster.
        and torch.backends.cuda.matmul.fp32_precision in ("ieee", "none")
        and has_triton()
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )
