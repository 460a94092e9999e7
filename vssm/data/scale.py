"""The centre and the deviation of windows of series, over the C steps of their context.

x' = (x - m) / s           m is the mean or the last value; each step of a season may have its
                           own m (`Meta.season`)
"""

import torch
from torch import Tensor

__all__ = ["LEAST_SPREAD", "centre_of_steps", "window_scale", "window_scale_of_known"]

LEAST_SPREAD = 0.1
"""Least deviation of a window, relative to its column: a window may be constant."""


def window_scale(
    x: Tensor, centre: str = "window", season: int = 1, least: Tensor | float = LEAST_SPREAD**2
) -> tuple[Tensor, Tensor]:
    """Returns the centres of every window, (B, P, D), and its deviation, (B, 1, D).

    Arguments:
        x: The contexts of windows, (B, C, D).
        centre: "window" for the mean, and the deviation from it; "last" for the last value, and the
            deviation that a random walk with the same steps has after C of them.
        season: P, steps of a season, each with a centre of its own. C is at least P; steps beyond
            whole seasons, at the start, do not count.
        least: Added to the variance, (D,) or (B, 1, D).
    """
    x = x[:, x.shape[1] % season :].unflatten(1, (-1, season))  # (B, seasons, P, D)
    if centre == "last":
        middle, variance = x[:, -1], x.diff(dim=1).square().sum(1)
    else:
        middle = x.mean(1)
        variance = (x - middle[:, None]).square().mean(1)
    return middle, (variance.mean(1, keepdim=True) + least).sqrt()


def window_scale_of_known(
    x: Tensor, centre: str = "window", season: int = 1, least: Tensor | float = LEAST_SPREAD**2
) -> tuple[Tensor, Tensor]:
    """Does what `window_scale` does, and skips values that are NaN.

    A step of a season without any value has the centre of the others. A window without any value
    has centre 0 and deviation 1, like its whole column.

    Example:
        >>> x = torch.tensor([[[1.0], [torch.nan], [3.0], [torch.nan]]])
        >>> [scale.flatten().tolist() for scale in window_scale_of_known(x, least=0.0)]
        [[2.0], [1.0]]
        >>> [scale.flatten().tolist() for scale in window_scale_of_known(x, "last", least=0.0)]
        [[3.0], [2.0]]
    """
    x = x[:, x.shape[1] % season :].unflatten(1, (-1, season))  # (B, seasons, P, D)
    if centre == "last":
        steps = torch.arange(x.shape[1], device=x.device).view(-1, 1, 1)
        last = torch.where(x.isnan(), 0, steps).cummax(1).values
        x = x.gather(1, last)  # the last known value at every step; NaN before the first
        middle, variance = x[:, -1], x.diff(dim=1).square().nansum(1)
        variance = torch.where(middle.isnan(), torch.nan, variance)
    else:
        middle = x.nanmean(1)
        variance = (x - middle[:, None]).square().nanmean(1)
    middle = torch.where(middle.isnan(), middle.nanmean(1, keepdim=True), middle)
    variance = variance.nanmean(1, keepdim=True).nan_to_num(1.0)
    return middle.nan_to_num(0.0), (variance + least).sqrt()


def centre_of_steps(centres: Tensor, first: int, num: int) -> Tensor:
    """Returns the centres (B, P, D) of a season for `num` steps, (B, num, D).

    Step `first` is counted from the end of the context.

    Example:
        >>> centre_of_steps(torch.tensor([[[0.0], [1.0], [2.0]]]), -1, 5).flatten().tolist()
        [2.0, 0.0, 1.0, 2.0, 0.0]
    """
    if centres.shape[1] == 1:
        return centres.expand(-1, num, -1)
    return centres[:, torch.arange(first, first + num, device=centres.device) % centres.shape[1]]
