"""`Meta`: what a run remembers of its data, so that generating and forecasting do without it."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

_ANY = object()
_RETIRED = {  # fields of earlier versions, and the values with which they change nothing
    **dict.fromkeys(("fill", "horizon", "time"), _ANY),
    "cycles": (),
    "cycles_given": False,
    "patch": 1,
    "season": 1,
    "separate": False,
}


@dataclass(frozen=True, kw_only=True)
class Meta:
    """Describes sequences well enough to show or decode generated ones without the data.

    Example:
        >>> known = {"name": "text", "features": 3, "length": 4, "suggested_head": "categorical"}
        >>> meta = Meta(**known, vocabulary="abc")
        >>> meta.decode(meta.encode("cab")), Meta.from_json(meta.to_json()) == meta
        ('cab', True)
    """

    name: str
    features: int
    """D, or the number of different tokens."""
    length: int
    """T."""
    suggested_head: str
    levels: int | None = None
    """Number of equally spaced values in [0, 1] that x can take (256 for 8-bit images)."""
    image_shape: tuple[int, int, int] | None = None
    """Height, width, channels; a step is one row, channels last within a pixel."""
    vocabulary: str | None = None
    """Token k is character k; None for 256 byte tokens."""
    columns: tuple[str, ...] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    """Mean and standard deviation of each column over the training rows; given columns too."""
    context: int | None = None
    """Rows of a window that are known."""
    windowed: Literal["window"] | None = None
    """Whether each window is standardised by its context, after `mean` and `std`."""
    classes: int | None = None
    """Number of classes; the class of a sequence, one-hot, is the last features of every step."""
    given_columns: tuple[str, ...] = ()
    """Columns of a series that are known in the future too; they come after `columns`."""

    @property
    def given(self) -> int:
        """How many features, counted from the last, are always known and never generated."""
        return (self.classes or 0) + len(self.given_columns)

    def without_given(self, x: Tensor) -> Tensor:
        """Returns sequences (B, T, D) without the features that are given."""
        return x[..., : x.shape[-1] - self.given] if self.given else x

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as a dictionary that `json` can write."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Meta":
        """Returns the metadata that `to_json` gave, also after a trip through a JSON file."""
        try:
            values: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in fields.items()
            }
            for name in ("mean", "std"):  # earlier versions kept those of given columns apart
                if more := values.pop(f"given_{name}", None):
                    values[name] = (values[name] or ()) + more
            for name, usual in _RETIRED.items():
                if name in values and usual in (_ANY, values[name]):
                    del values[name]
            return cls(**values)
        except (AttributeError, TypeError) as error:  # a missing field, or one of a newer version
            raise ValueError(f"data_meta does not fit this version: {error}") from None

    def differing(self, other: "Meta") -> Iterator[str]:
        """Yields the names of the fields that differ by more than rounding.

        Example:
            >>> meta = Meta(name="series", features=2, length=4, suggested_head="gaussian")
            >>> list(meta.differing(dataclasses.replace(meta, length=5)))
            ['length']
        """
        for name, one in self.to_json().items():
            two, same = getattr(other, name), False
            if name in ("mean", "std") and one and two and len(one) == len(two):
                same = np.allclose(one, two, rtol=1e-6, atol=1e-9 * max(map(abs, (*one, *two))))
            if one != two and not same:
                yield name

    def to_image(self, x: Tensor) -> Tensor:
        """Returns sequences of rows (B, T, D) as images (B, T, width, channels) within [0, 1].

        Features that are given are left out.
        """
        if self.image_shape is None:
            raise ValueError(f"data set {self.name!r} has no images")
        _, width, channels = self.image_shape
        x = x[..., : width * channels].detach().float().clamp(0, 1)
        return x.unflatten(-1, (width, channels))

    def encode(self, text: str) -> Tensor:
        """Returns the tokens (T,) of a text."""
        self._check_text()
        if self.vocabulary is None:
            return torch.tensor(list(text.encode()), dtype=torch.long, device="cpu")
        token = {character: k for k, character in enumerate(self.vocabulary)}
        if unknown := sorted(set(text) - set(token)):
            raise ValueError(
                f"text has characters outside the vocabulary: {unknown}; "
                f"the vocabulary is {self.vocabulary!r}"
            )
        return torch.tensor([token[c] for c in text], dtype=torch.long, device="cpu")

    def encode_gaps(self, text: str) -> tuple[Tensor, Tensor]:
        """Returns the tokens (T,) of a text with gaps, and which are known; "_" is an unknown one.

        Example:
            >>> known = {"name": "text", "features": 3, "length": 4}
            >>> meta = Meta(**known, suggested_head="categorical", vocabulary="abc")
            >>> meta.encode_gaps("c_b")
            (tensor([2, 0, 1]), tensor([ True, False,  True]))
        """
        if self.vocabulary is None:
            tokens = self.encode(text)
            return tokens, tokens != ord("_")
        known = torch.tensor([character != "_" for character in text], device="cpu")
        return self.encode(text.replace("_", self.vocabulary[0])), known

    def decode(self, tokens: Tensor) -> str:
        """Returns the text of tokens (T,); bytes that are not UTF-8 become U+FFFD."""
        self._check_text()
        if self.vocabulary is None:
            return bytes(tokens.tolist()).decode(errors="replace")
        return "".join(self.vocabulary[k] for k in tokens.tolist())

    def _check_text(self) -> None:
        if self.suggested_head != "categorical":
            raise ValueError(f"data set {self.name!r} has no text")


def steps_left(meta: Meta | None, known: int, option: str = "length") -> int:
    """Returns how many steps are left after the `known` ones, of the training data's; else 28.

    A message advises to give the `option`.
    """
    if meta is None:
        return 28
    if known >= meta.length:
        raise ValueError(
            f"{known} steps are known, and training sequences have {meta.length}; "
            f"give {option}, 1 or more"
        )
    return meta.length - known
