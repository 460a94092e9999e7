"""The objective where any part may be known: random parts of sequences, and cells that are missing.

    S ELBO of log p(x_R | x_K)

The unknown entries are divided at random into S parts. One part is R, and the parts before it are
in K. So in expectation this bounds log p of all unknown entries, drawn in S passes. S is one of 1,
2, 4, ..., and small numbers are more frequent: the fewer the passes, the more there is to learn.

Without latents (S > `latent_passes`), pass s can be scored on all entries that are unknown then.
Each of them is in R with probability 1 / (S - s), s = 0, 1, ... So the expectation is the same, and
it is estimated from many more entries.

Legend: x (B, T, D) or tokens (B, T); `there`, the entries that are in the data, of the shape of x.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vssm.checks import check_type
from vssm.distributions import Latents
from vssm.models import AnyPart
from vssm.models.anypart import Part, order_of_passes
from vssm.objectives.masks import random_masks
from vssm.ops.operators import product_dtype

_MOST_PASSES = 64


def part_terms(
    model: AnyPart,
    x: Tensor,
    there: Tensor,
    gumbel: Callable[..., Tensor],
    share: Callable[..., Tensor],
) -> tuple[Tensor, Tensor]:
    """Returns the reconstruction and the KL of one random part of each sequence, times S, (B,).

    Arguments:
        model: The model.
        x: The sequences, finite.
        there: The entries that are in the data, of the shape of x.
        gumbel: As for `bound_of_part`.
        share: From sizes (...) to uniform numbers in [0, 1), (B, ...).
    """
    part, weight = _random_part(model, model.pad(x), model.pad(there), share)
    reconstruction, kl = bound_of_part(model, part, gumbel)
    return weight * reconstruction, weight * kl


def bound_of_part(
    model: AnyPart, part: Part, gumbel: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns the reconstruction and the KL, whose difference bounds log p(x_R | x_K), (B,).

    Arguments:
        model: The model.
        part: Whole windows, with their known entries and the entries to score.
        gumbel: From sizes (A, Z / L, N) to uniform numbers in (0, 1), (B, A, Z / L, N).
    """
    evidence, device = model.evidence(part), part.x.device
    kl = torch.zeros(len(part.x), dtype=torch.float32, device=device)
    dtype = product_dtype(device)

    def draw(level: int, p_z: Latents, query: Tensor) -> Tensor:
        nonlocal kl
        q_z = model.rung(level).posterior(p_z, query, evidence[level])
        noise = gumbel(*p_z.raw.shape[1:])
        z, own = q_z.rsample_and_kl(noise, dtype, p_z)
        kl = kl + torch.where(part.live_latents(model.spans[level]), own, 0).sum(1)
        return z

    p_x, _ = model.descend(part, draw)
    return model.score(p_x, part.x, part.made), kl


def _random_part(
    model: AnyPart, x: Tensor, there: Tensor, share: Callable[..., Tensor]
) -> tuple[Part, Tensor]:
    """Draws the known entries of x and the entries to score; also returns each row's weight."""
    columns = 1 if x.ndim == 2 else x.shape[2]
    most = min(_MOST_PASSES, model.config.window * columns)
    doublings = most.bit_length()  # 1, 2, 4, ... up to `most`
    passes = 2 ** (share().square() * doublings).long()
    which = (share() * passes).long()
    known = random_masks(len(x), x.shape[1], columns, share).view(x.shape)
    known = model.always_known(known) & there
    noise = share(x.shape[1], columns).view(x.shape)
    order = order_of_passes(there & ~known, noise, model.config.window, passes)
    row = -1, *[1] * (x.ndim - 1)
    now = which.view(row)
    if not model.config.latent_passes:
        return Part(x, known | ((order >= 0) & (order < now)), order == now), passes
    latent = passes <= model.config.latent_passes
    # Without latents, entries are divided one by one.
    alone = torch.where(there & ~known, (noise * passes.view(row)).long(), -1)
    order = torch.where(latent.view(row), order, alone)
    made = torch.where(latent.view(row), order == now, order >= now)
    weight = torch.where(latent, passes, passes / (passes - which))
    return Part(x, known | ((order >= 0) & (order < now)), made, latent), weight


def for_entries(mask: Tensor, x: Tensor) -> Tensor:
    """Returns a mask of steps (B, T) or of entries of x as one that can be broadcast to x."""
    return mask[..., None] if mask.ndim < x.ndim else mask


def there_and_finite(
    model: AnyPart, x: Tensor, known: Tensor | None, wait: bool = True
) -> tuple[Tensor, Tensor]:
    """Checks sequences with missing entries, and the mask of the entries that are there.

    Returns x with finite numbers everywhere, tokens as int64, and the mask, of the shape of x.
    """
    if known is None:
        check_type("x", x, Tensor, "a torch tensor")
        known = ~x.isnan() if x.is_floating_point() else torch.ones_like(x, dtype=torch.bool)
    elif not isinstance(known, Tensor) or known.dtype != torch.bool:
        given = known.dtype if isinstance(known, Tensor) else type(known).__name__
        raise ValueError(f"known has type {given}; use a bool tensor, True where x is known")
    elif known.shape not in (x.shape, x.shape[:2]):
        raise ValueError(
            f"known has shape {tuple(known.shape)}; use {tuple(x.shape)}, the shape of x, "
            f"or {tuple(x.shape[:2])}, one for each step"
        )
    known = for_entries(known, x).expand_as(x)
    if known.device != x.device:
        raise ValueError(f"known is on {known.device}; move it to {x.device}, the device of x")
    device = next(model.parameters()).device
    if x.device != device:
        raise ValueError(f"x is on {x.device}; move it to {device}, the device of the model")
    x = torch.where(known, x, torch.zeros((), dtype=x.dtype, device=x.device))
    model.head.validate(x, values=wait or device.type == "cpu", given=model.config.given)
    return (x.long() if model.head.tokens else x), known
