"""`vssm.fill`: this file checks its arguments; `vssm.sampling.anypart` draws the entries."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vssm import noise
from vssm.checks import check_choice, check_model, whole_number
from vssm.models import AnyPart, Model
from vssm.models.anypart import Part
from vssm.noise import Noise
from vssm.objectives.parts import there_and_finite
from vssm.sampling.anypart import make_part
from vssm.sampling.request import Options, check_noise, check_temperature


@torch.no_grad()
def fill(
    model: Model,
    x: Tensor,
    known: Tensor | None = None,
    num: int | None = None,
    passes: int = 1,
    temperature: float = 1.0,
    observe: str = "mean",
    seed: int = 0,
    rows: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Draws the unknown entries of sequences; the known ones come back bit for bit.

    Arguments:
        model: A vssm with known="any".
        x: The sequences, (B, T, D), or (B, T) tokens.
        known: Which entries are known, bool, of the shape of x or (B, T). By default the entries
            that are not NaN.
        num: The number of samples of each row. One by default.
        passes: S, the parallel passes. One draws all entries at once; several draw one random part
            after the other, each given the parts before it. More passes than a window has entries
            change nothing.
        temperature: Divides the logits of every categorical distribution, and multiplies every
            scale.
        observe: What an unknown entry becomes: the "mean" of its distribution (the mode of a
            token), or a "sample" of it. Later passes read the entries of earlier passes.
        seed: Selects the sample.
        rows: Which rows of the noise to use, one for each of the B sequences; 0 to B - 1 by
            default.

    Returns:
        x with all entries known, of its shape; with `num`, (B, num, T, ...).

    Example:
        >>> from vssm import ModelConfig, build
        >>> sizes = {"width": 8, "layers": 1, "latents": 4, "classes": 5, "levels": 2}
        >>> model = build(ModelConfig(features=2, known="any", window=6, **sizes))
        >>> x = torch.rand(3, 6, 2)
        >>> x[:, 2:4] = torch.nan
        >>> y = fill(model, x, passes=2)
        >>> torch.equal(y[:, :2], x[:, :2]), bool(y.isnan().any())
        (True, False)
    """
    task = check_filling(
        check_model(model), x, known, num, passes, temperature, observe, seed, rows
    )
    return task.finish(make_part(*task.work, position=0, states=None)[0])


class Filling(NamedTuple):
    """A checked call of `fill`."""

    work: tuple[AnyPart, Part, Noise, Options]
    """The arguments of `make_part`; the sequences are repeated `num` times and padded."""
    x: Tensor
    """The sequences as the user gave them."""
    known: Tensor
    """Which of their entries are known, of the shape of x."""
    num: int | None

    def finish(self, made: Tensor) -> Tensor:
        """Returns the result of `fill`, with the known entries as the user gave them."""
        made = made[:, : self.x.shape[1]].to(self.x.dtype)
        if self.num is None:
            return torch.where(self.known, self.x, made)
        made = made.unflatten(0, (-1, self.num))
        return torch.where(self.known[:, None], self.x[:, None], made)


def check_filling(
    model: Model,
    x: Tensor,
    known: Tensor | None,
    num: int | None,
    passes: int,
    temperature: float,
    observe: str,
    seed: int,
    rows: Sequence[int] | Tensor | None,
) -> Filling:
    """Checks the arguments of `fill`, of the same names."""
    if not isinstance(model, AnyPart):
        raise ValueError(
            f"this {model.config.kind} continues a prefix and cannot fill a gap; "
            "train a vssm with --model.known any"
        )
    if known is None and model.head.tokens and isinstance(x, Tensor) and bool((x < 0).any()):
        raise ValueError("x has tokens below 0; pass known=, False where a token is unknown")
    given = x
    x, known = there_and_finite(model, x, known)
    num = None if num is None else whole_number("num", num, 1)
    passes = min(whole_number("passes", passes, 1), model.most_passes)
    check_choice("observe", observe, ("mean", "sample"))
    options = Options(
        x.shape[1], 0, False, passes, check_temperature(temperature), observe == "sample"
    )
    check_given(model, known)
    if bool(known.all()):
        how = "pass known=, False where a token is unknown"
        how = how if model.head.tokens else "set unknown entries to NaN, or pass known="
        raise ValueError(f"nothing is unknown in x; {how}")
    gap, window = _longest_gap(model.without_given(known)), model.config.window
    if gap > window:
        warnings.warn(
            f"x has a gap of {gap} steps, but the model saw {window} at once in training; "
            "filling it is extrapolation",
            stacklevel=3,
        )
    source = check_noise(len(x), seed, rows, None, x.device)
    part = Part(model.pad(x), model.pad(known), model.pad(~known))
    if num is not None and num > 1:
        source = Noise(source.seed.repeat_interleave(num), noise.fork(source.row, num).flatten())
        part = part.map(lambda values: values.repeat_interleave(num, 0))
    return Filling((model, part, source, options), given, known, num)


def check_given(model: AnyPart, known: Tensor) -> None:
    """Raises `ValueError` if a given feature is unknown."""
    if bool((model.always_known(torch.zeros_like(known)) & ~known).any()):
        raise ValueError(
            f"the last {model.config.given} features of x are given and cannot be filled; "
            "pass their values at every step"
        )


def _longest_gap(known: Tensor) -> int:
    """Returns the most steps in a row of which nothing is known.

    Example:
        >>> _longest_gap(torch.tensor([[True, False, False, True, False]]))
        2
    """
    there = known if known.ndim == 2 else known.any(-1)
    steps = torch.arange(there.shape[1], device=there.device)
    last = torch.where(there, steps, -1).cummax(1).values
    return int((steps - last).max())
