"""The description of a model: small, typed, frozen, checked, and saved beside the weights."""

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from vssm.distributions import HEADS

__all__ = ["KINDS", "ModelConfig", "check_choice"]

KINDS = ("transformer", "ssm", "rnn", "tvae", "vrnn", "vssm")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises `ValueError` when the value is not one of the allowed, and suggests the nearest one.

    >>> check_choice("kind", "vsm", ("ssm", "vssm"))
    Traceback (most recent call last):
    ValueError: kind='vsm' is unknown; allowed: 'ssm', 'vssm' (did you mean 'vssm'?)
    """
    if value in allowed:
        return
    nearest = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise ValueError(f"{name}={value!r} is unknown; allowed: {', '.join(map(repr, allowed))}{hint}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Describes one of the six models; `vssm.build(config)` makes it.

    Example:
        >>> config = ModelConfig(kind="vssm", features=28, width=64, layers=2)
        >>> config.inner, config.dt_rank
        (128, 4)
        >>> ModelConfig(kind="vssm", features=28, width=-1)
        Traceback (most recent call last):
        ValueError: width=-1 is not allowed; allowed: a whole number >= 1
    """

    kind: str = "vssm"
    """Which model: "transformer", "ssm", "rnn", "tvae", "vrnn" or "vssm"."""
    features: int
    """D, the number of values in one step of x; the vocabulary size for a categorical head."""
    width: int = 1024
    """Width of the residual stream."""
    layers: int = 4
    """Number of blocks in every stack."""
    state_size: int = 16
    """N of the selective scan: states per channel of a Mamba block."""
    expand: int = 2
    """Channels of a Mamba block, as a multiple of the width."""
    conv: int = 4
    """Steps that the causal convolution of a Mamba block sees."""
    heads: int = 8
    """Attention heads; must divide the width (transformer and tvae)."""
    latents: int = 32
    """Z, the number of discrete latent components at every step."""
    classes: int = 32
    """N, the number of classes of each latent component."""
    head: str = "gaussian"
    """Distribution of x_t: gaussian, gaussian-learned, bernoulli, categorical or logistic-mixture."""
    sigma: float = 0.1
    """Standard deviation of the gaussian head."""
    mixtures: int = 5
    """Components of the logistic-mixture head."""
    bins: int = 256
    """Grey levels of the logistic-mixture head: x takes the values k / (bins - 1)."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_choice("head", self.head, tuple(HEADS))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                least = 2 if field.name in ("classes", "bins") else 1
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise ValueError(
                        f"{field.name}={value!r} is not allowed; allowed: a whole number >= {least}"
                    )
        if (
            isinstance(self.sigma, bool)
            or not isinstance(self.sigma, int | float)
            or not 0 < self.sigma < 1e6
        ):
            raise ValueError(f"sigma={self.sigma!r} is not allowed; allowed: a number > 0")
        if self.block == "attention" and self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not divisible by heads={self.heads}; "
                f"allowed: a multiple of {self.heads}"
            )

    @property
    def block(self) -> str:
        """The block that the stacks of this kind are made of."""
        if self.kind in ("transformer", "tvae"):
            return "attention"
        return "mamba" if self.kind in ("ssm", "vssm") else "gru"

    @property
    def inner(self) -> int:
        """Channels of the selective scan."""
        return self.expand * self.width

    @property
    def dt_rank(self) -> int:
        """Rank of the projection that makes the step sizes, as in Mamba: a sixteenth of the width."""
        return -(-self.width // 16)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a plain dictionary, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Builds a config from a dictionary, naming every key that does not belong."""
        names = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - names)
        if unknown:
            raise ValueError(f"config has unknown keys {unknown}; allowed: {', '.join(sorted(names))}")
        if "features" not in values:
            raise ValueError("config has no key 'features'; it is required")
        return cls(**values)
