"""Muon: momentum for matrices, whose singular values are all brought near 1 before it moves the weights.

    M <- M + (1 - mu) (G - M)
    U = G + mu (M - G)                         Nesterov: one step ahead of M
    X = U / |U|                                every singular value is at most 1
    X <- a X + (b S + c S^2) X,  S = X X^T     five times: the singular values go to 0.7 ... 1.2, roughly
    W <- (1 - lr decay) W - lr 0.2 sqrt(max(R, C)) X

The last factor makes the update as large, entry by entry, as AdamW's usually is: one rate serves both.

Unlike `torch.optim.Muon` it can be recorded as a CUDA graph, and matrices of one shape share their products.

References:
    Muon: An optimizer for hidden layers in neural networks (Jordan et al., 2024),
    https://kellerjordan.github.io/posts/muon/
    Muon is scalable for LLM training (Liu et al., 2025), https://arxiv.org/abs/2502.16982

Legend: G (R, C) gradient, M momentum, W weights, mu its decay, (a, b, c) the coefficients of Newton-Schulz.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Muon", "orthogonalize"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """Moves matrices by their orthogonalised momentum, without waiting for the device.

    As with PyTorch's fused optimisers, a step changes nothing when the attribute `found_inf`, a tensor on the
    device, is not 0; gradients may be anything then.

    Arguments:
        parameters: Matrices, all of which decay.
        lr: The learning rate; as a tensor on the device it can change between replays of a recorded step.
        momentum: The decay of the momentum.
        weight_decay: Decay of the weights, times the learning rate.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 8))
        >>> weight.grad = torch.eye(2, 8)
        >>> Muon([weight], lr=1.0).step()
        >>> print(weight.detach().norm() / 4)  # as if AdamW had moved 16 entries by 0.2 to 0.3 each
        tensor(0.2...)
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
                if parameter.ndim != 2:
                    shape = tuple(parameter.shape)
                    raise ValueError(
                        f"a parameter has shape {shape}; allowed: matrices, (rows, columns)"
                    )
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves all matrices that have a gradient."""
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    key = parameter.shape, parameter.dtype, parameter.device
                    alike.setdefault(key, []).append(parameter)
            for parameters in alike.values():
                self._move(parameters, **{key: group[key] for key in self.defaults})

    def _move(
        self, parameters: list[Tensor], lr: float | Tensor, momentum: float, weight_decay: float
    ) -> None:
        """Moves matrices of one shape."""
        moments = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients = torch.stack([parameter.grad for parameter in parameters])  # type: ignore[misc]
        if self.found_inf is not None:
            # With the momentum as its gradient, the momentum stays as it is to the last bit; all is finite.
            bad = self.found_inf != 0
            gradients = torch.where(bad, torch.stack(moments), gradients)
            lr = torch.where(bad, 0.0, lr)
        torch._foreach_lerp_(moments, gradients.unbind(), 1 - momentum)
        ahead = gradients.lerp(torch.stack(moments), momentum)
        scale = 0.2 * math.sqrt(max(parameters[0].shape))
        # Into `ahead`, which lies in memory as the weights do: foreach has one kernel for such alone.
        moves = ahead.copy_(orthogonalize(ahead)).mul_(-scale * lr)
        torch._foreach_mul_(parameters, 1 - weight_decay * lr)
        torch._foreach_add_(parameters, moves.unbind())


def orthogonalize(x: Tensor) -> Tensor:
    """Returns matrices with the singular vectors of others and singular values near 1.

    Arguments:
        x: Matrices (N, R, C).

    Returns:
        Matrices (N, R, C), in bfloat16 on CUDA, else in the dtype of `x`.

    Example:
        >>> x = orthogonalize(torch.diag(torch.tensor([9.0, 1.0, 0.5]))[None])
        >>> bool(((torch.linalg.svdvals(x) - 1).abs() < 0.35).all())
        True
    """
    a, b, c = _COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_min(_EPS)
    x = x.bfloat16() if x.is_cuda else x
    x = x.mT if tall else x  # the smaller of X X^T and X^T X
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
