"""Muon: moves a matrix along its momentum, after bringing all singular values of that near 1.

    M <- M + (1 - mu) (G - M)
    U = G + mu (M - G)                         Nesterov: one step ahead of M
    X = U / |U|                                every singular value is at most 1
    X <- a X + (b S + c S^2) X,  S = X X^T     five times: singular values end at about 0.7 ... 1.2
    W <- (1 - lr decay) W - lr 0.2 sqrt(max(R, C)) X

The factor 0.2 sqrt(max(R, C)) makes an update about as large as AdamW's, so one rate serves both.

`torch.optim.Muon` would not do: it cannot skip a bad step on the device (`found_inf`), reads a
learning rate that is a tensor back from the device, which no CUDA graph allows, and takes one
matrix at a time.

References:
    Muon: An optimizer for hidden layers in neural networks (Jordan et al., 2024),
    https://kellerjordan.github.io/posts/muon/
    Muon is scalable for LLM training (Liu et al., 2025), https://arxiv.org/abs/2502.16982

Legend: G (R, C) gradient, M momentum, W weights, mu decay of the momentum, (a, b, c) coefficients
of the Newton-Schulz iteration.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vssm.nn import BLOCKS

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def block_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the matrices of all blocks by name; not A_log, whose rows are vectors.

    >>> from vssm import ModelConfig, build
    >>> [*block_matrices(build(ModelConfig(kind="rnn", features=3, width=8, layers=1)))]
    ['stack.blocks.0.gru.weight_ih_l0', 'stack.blocks.0.gru.weight_hh_l0']
    """
    blocks = [part for part in model.modules() if isinstance(part, tuple(BLOCKS.values()))]
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in inside and parameter.ndim == 2 and not name.endswith("A_log")
    }


class Muon(torch.optim.Optimizer):
    """Moves matrices by their orthogonalised momentum, without waiting for the device.

    As with PyTorch's fused optimisers, a step changes nothing when the attribute `found_inf`, a
    tensor on the device, is not 0; gradients may be NaN then.

    Arguments:
        parameters: Matrices, all of which decay.
        lr: The learning rate; a tensor can change between replays of a recorded step.
        momentum: The decay of the momentum.
        weight_decay: Decay of the weights, times the learning rate.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float | Tensor,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves all matrices that have a gradient; matrices of one shape share their products."""
        for group in self.param_groups:
            shapes: dict[Any, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault((parameter.shape, parameter.dtype), []).append(parameter)
            for parameters in shapes.values():
                self._move(parameters, **{key: group[key] for key in self.defaults})

    def _move(
        self, parameters: list[Tensor], lr: float | Tensor, momentum: float, weight_decay: float
    ) -> None:
        moments = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients = torch.stack([parameter.grad for parameter in parameters])  # type: ignore[misc]
        if self.found_inf is not None:
            # The momentum as its own gradient leaves the momentum as it is, to the last bit.
            bad = self.found_inf != 0
            gradients = torch.where(bad, torch.stack(moments), gradients)
            lr = torch.where(bad, 0.0, lr)
        torch._foreach_lerp_(moments, gradients.unbind(), 1 - momentum)
        ahead = gradients.lerp(torch.stack(moments), momentum)
        scale = 0.2 * math.sqrt(max(parameters[0].shape))
        # Copied into `ahead`, which has the weights' memory layout: foreach needs one for its fast
        # kernel.
        moves = ahead.copy_(orthogonalize(ahead)).mul_(-scale * lr)
        torch._foreach_mul_(parameters, 1 - weight_decay * lr)
        torch._foreach_add_(parameters, moves.unbind())


def orthogonalize(x: Tensor) -> Tensor:
    """Returns matrices with the same singular vectors as x, (N, R, C), and singular values near 1.

    They are in bfloat16 on CUDA, else in the dtype of x.

    Example:
        >>> x = orthogonalize(torch.diag(torch.tensor([9.0, 1.0, 0.5]))[None])
        >>> bool(((torch.linalg.svdvals(x) - 1).abs() < 0.35).all())
        True
    """
    a, b, c = _COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    x = x.bfloat16() if x.is_cuda else x
    x = x.mT if tall else x  # the smaller of X X^T and X^T X
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
