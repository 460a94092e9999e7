"""The convolution of `vssm.ops.conv` in plain PyTorch."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv_silu_reference(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The plain PyTorch twin of `causal_conv_silu`."""
    batch, length, channels = x.shape
    taps = weight.shape[1]
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)  # so that y has the dtype of x
    if state is None:
        state = x.new_zeros(batch, taps - 1, channels)
    padded = torch.cat([state.to(x.dtype), x], 1)
    if length == 1:  # few operations, for generation step by step
        return F.silu((padded * weight.T).sum(1) + bias)[:, None], padded[:, 1:]
    y = torch.addcmul(bias, padded[:, :length], weight[:, 0])
    for k in range(1, taps):
        y = torch.addcmul(y, padded[:, k : k + length], weight[:, k])
    return F.silu(y), padded[:, length:]


def conv_packed_reference(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs one packed sequence after the other."""
    ys = [x[:, :0]]
    for i, (first, last) in enumerate(pairwise(starts.tolist())):
        own = None if state is None else state[i : i + 1]
        ys.append(causal_conv_silu_reference(x[:, first:last], weight, bias, own)[0])
    return torch.cat(ys, 1), last_inputs(x, state, weight.shape[1], starts)


def last_inputs(x: Tensor, state: Tensor | None, taps: int, starts: Tensor | None) -> Tensor:
    """Returns the last K - 1 inputs of every sequence, which may reach back into its state."""
    rows = len(x) if starts is None else len(starts) - 1
    if state is None:
        state = x.new_zeros(rows, taps - 1, x.shape[2])
    if starts is None:
        return torch.cat([state.to(x.dtype), x], 1)[:, x.shape[1] :]
    before, (first, last) = taps - 1, (t.to(x.device) for t in (starts[:-1], starts[1:]))
    t = last[:, None] + torch.arange(-before, 0, device=x.device)
    in_state = (t - first[:, None] + before).clamp(max=max(before - 1, 0))[..., None]
    old = state.gather(1, in_state.expand_as(state)).to(x.dtype)
    return torch.where((t >= first[:, None])[..., None], x[0, t.clamp(min=0)], old)
