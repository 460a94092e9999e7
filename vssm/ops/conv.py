"""The causal depthwise convolution of the Mamba block, with a carried state.

    y_t = bias + sum_k weight_k x_{t - K + 1 + k}          k = 0 ... K - 1

Shapes: x, y (B, T, D); weight (D, K); bias (D,); state (B, K - 1, D), the last K - 1 inputs.
"""

import torch
from torch import Tensor

__all__ = ["causal_conv"]


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convolves every channel with its own K taps, looking back only.

    Arguments:
        x: The input, (B, T, D).
        weight: The taps, oldest first, (D, K).
        bias: The bias, (D,).
        state: The K - 1 inputs before x, (B, K - 1, D); zero if not given.

    Returns:
        y (B, T, D) and the state to go on from (B, K - 1, D).

    Example:
        >>> x, weight, bias = torch.ones(1, 4, 1), torch.ones(1, 3), torch.zeros(1)
        >>> causal_conv(x, weight, bias)[0].flatten()
        tensor([1., 2., 3., 3.])
    """
    batch, length, channels = x.shape
    taps = weight.shape[1]
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)  # float32 would make the result float32 too
    if state is None:
        state = x.new_zeros(batch, taps - 1, channels)
    padded = torch.cat([state.to(x.dtype), x], 1)
    if length == 1:  # few and small operations: a step-by-step loop feels each of them
        return ((padded * weight.T).sum(1) + bias)[:, None], padded[:, 1:]
    y = torch.addcmul(bias, padded[:, :length], weight[:, 0])
    for k in range(1, taps):
        y = torch.addcmul(y, padded[:, k : k + length], weight[:, k])
    return y, padded[:, length:]
