"""The settings of a model and of a run: typed, frozen, checked, and saved beside the weights."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

from vssm.checks import check_choice, check_flag, check_number, name_allowed, plain_number, shown
from vssm.data.config import DataConfig
from vssm.distributions import HEADS, HEADS_WITH_LOCATION, HeadName

FORMAT = 1
"""Version of `config.json` and its folder; raised when an older reader would misunderstand it."""
Kind = Literal["transformer", "ssm", "rnn", "tvae", "vrnn", "vssm"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_RETIRED: dict[str, dict[str, Any]] = {  # options of results made before they were dropped
    "train": {"tensorboard": False, "estimator": "gumbel"},
    "series": {"patch": 1, "season": 1, "separate": False, "stride": 1, "time_features": False},
}
_LEAST = {"classes": 2, "bins": 2, "given": 0, "latent_passes": 0, "season": 0}  # of sizes; else 1
_SIZES_BELOW = 10_000_000  # of a model: PyTorch crashes at sizes past the address space

Config = TypeVar("Config")


def _clean_fields(config: object) -> None:
    """Turns NumPy numbers into Python's, and JSON's lists into tuples; checks flags and names."""
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        many = isinstance(value, tuple | list)
        plain = tuple(map(plain_number, value)) if many else plain_number(value)
        object.__setattr__(config, field.name, plain)
        if field.type is bool:
            check_flag(field.name, plain)
        elif get_origin(field.type) is Literal:
            check_choice(field.name, plain, get_args(field.type))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Describes one of the six models; `vssm.build(config)` makes it.

    Example:
        >>> config = ModelConfig(kind="vssm", features=28, width=64, layers=2)
        >>> config.inner, config.dt_rank
        (128, 4)
        >>> ModelConfig(kind="vssm", features=28, width=-1)
        Traceback (most recent call last):
        ValueError: width is -1; it must be a whole number >= 1 and < 10000000
    """

    kind: Kind = "vssm"
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
    levels: int = 1
    """For vssm: levels of latents, each drawn given the levels above, so that one shot fits
    together. They share `latents` evenly. The encoder has `layers` blocks; the decoder has one for
    each level, then half as many as the encoder."""
    spans: tuple[int, ...] = ()
    """For each level, how many steps share a latent: with (28, 14, 7, 1) the first latent is for 28
    steps, the next are for their halves and quarters, the last for single steps. 1 for every level
    by default."""
    known: Literal["prefix", "any"] = "prefix"
    """What the model can be given: "prefix", the first steps of a sequence, as in the paper; or
    "any", for vssm, any entries: see `vssm.fill`."""
    given: int = 0
    """With known="any": how many features, counted from the last, are always known and never
    generated, such as a label, a price or a holiday."""
    window: int = 32
    """With known="any": how many steps the blocks that read backwards see at once. A run takes the
    length of its sequences, unless this is set to a number other than 32."""
    latent_passes: int = 0
    """With known="any": the largest number of passes with latents. A sample in more passes draws
    none, and the entries of a pass are independent, as in a masked diffusion model. 0 for no such
    limit."""
    interpolate: bool = False
    """With known="any" and numbers: read straight lines between the known entries of a feature, and
    predict the difference from them. For series, whose gaps are nearly straight lines."""
    season: int = 0
    """With interpolate=True: the steps of a season, such as 24 hours, a divisor of the window. The
    model then also reads lines between entries a season apart. 0 for no season."""
    head: HeadName | Literal["auto"] = "gaussian"
    """Distribution of x_t: gaussian, gaussian-learned, student-t, bernoulli, categorical or
    logistic-mixture; in a run also auto, for the one that suits the data."""
    sigma: float = 0.1
    """Standard deviation of the gaussian head, 1e-6 or more."""
    mixtures: int = 5
    """Components of the logistic-mixture head."""
    bins: int = 256
    """Grey levels of the logistic-mixture head: x takes the values k / (bins - 1)."""

    def __post_init__(self) -> None:
        _clean_fields(self)
        check_choice("head", self.head, ("auto", *HEADS))
        for field in dataclasses.fields(self):
            if field.type is int:
                least = _LEAST.get(field.name, 1)
                value = getattr(self, field.name)
                check_number(field.name, value, least, below=_SIZES_BELOW, whole=True)
        check_number("sigma", self.sigma, 1e-6, below=1_000_000)  # float32 divides by its square
        if self.levels > 1 and self.kind != "vssm":
            raise ValueError(f"levels={self.levels} is not for kind={self.kind!r}; use kind='vssm'")
        whole = isinstance(self.spans, tuple) and all(
            type(span) is int and 1 <= span < _SIZES_BELOW for span in self.spans
        )
        if not whole or (self.spans and (self.levels == 1 or len(self.spans) != self.levels)):
            raise ValueError(
                f"spans is {shown(self.spans)} with levels={self.levels}; it must have one whole "
                f"number >= 1 and < {_SIZES_BELOW} for each level of two or more, or none"
            )
        self._check_known()
        if self.latents % self.levels:
            raise ValueError(
                f"latents={self.latents} is not divisible by levels={self.levels}; "
                f"use a multiple of {self.levels}"
            )
        if self.block == "attention" and self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not divisible by heads={self.heads}; "
                f"use a multiple of {self.heads}"
            )

    def _check_known(self) -> None:
        if self.known == "prefix":
            for name in ("given", "latent_passes", "interpolate", "season"):
                if value := getattr(self, name):
                    raise ValueError(f"{name}={value} needs known='any'")
            return
        if self.kind != "vssm":
            raise ValueError(f"known='any' is not for kind={self.kind!r}; use kind='vssm'")
        for span in self.spans:
            if self.window % span:
                raise ValueError(
                    f"spans has {span}, which does not divide window={self.window}; "
                    "use divisors of the window"
                )
        if self.interpolate and self.head not in ("auto", *HEADS_WITH_LOCATION):
            raise ValueError(
                f"interpolate=True is not for head={self.head!r}; "
                f"use {', '.join(HEADS_WITH_LOCATION)}, or interpolate=False"
            )
        if self.season and not self.interpolate:
            raise ValueError(f"season={self.season} needs interpolate=True")
        if self.season and self.window % self.season:
            raise ValueError(
                f"season={self.season} does not divide window={self.window}; "
                "use a divisor of the window"
            )
        if self.given and self.head == "categorical":
            raise ValueError(f"given={self.given} is not for tokens; use given=0")
        if self.given >= self.features and self.head != "auto":
            raise ValueError(
                f"given={self.given} leaves nothing to generate of features={self.features}; "
                f"use less than {self.features}"
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
        """Rank of the projection to step sizes: a sixteenth of the width, as in Mamba."""
        return -(-self.width // 16)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a dictionary that JSON gives back unchanged."""
        return {**dataclasses.asdict(self), "spans": list(self.spans)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Builds a config from a dictionary; for an unknown key, raises and suggests another."""
        if isinstance(values, dict) and "features" not in values:
            raise ValueError("config has no key 'features'; it is required")
        return _from_plain(cls, values, "config")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Describes how a model is trained, and how often the run is validated and saved.

    Example:
        >>> TrainConfig(epochs=5).learning_rate
        0.001
        >>> TrainConfig(ema=1.5)
        Traceback (most recent call last):
        ValueError: ema is 1.5; it must be a number >= 0 and < 1
    """

    epochs: int = 20
    """Passes over the training set."""
    batch: int = 256
    """Sequences in a step, over all processes together."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """"adamw", or "muon" for the matrices of the blocks and AdamW for all other weights."""
    learning_rate: float = 1e-3
    """Highest learning rate, reached after the warm-up; a cosine takes it to 0."""
    weight_decay: float = 0.01
    """Decay of matrices; vectors, A_log and the learned blank input have none."""
    beta2: float = 0.999
    """Decay of AdamW's second moment; a lower value can prevent jumps of the loss."""
    warmup: float = 0.02
    """Fraction of the steps in which the learning rate rises linearly."""
    kl_warmup: float = 0.0
    """Fraction of the steps in which the weight of the KL in the loss rises from 0 to 1. Without
    it, a model of data like text never learns to use its latents."""
    shift: float = 0.0
    """Share of the images in a step that are shifted, by at most a pixel, against overfitting."""
    clip: float = 1.0
    """Largest norm of the gradient of the loss per value of x; 0 does not clip."""
    ema: float = 0.0
    """Decay of the moving average of the weights that is validated and kept; 0 keeps the weights
    themselves."""
    select: Literal["loss", "bound"] = "loss"
    """Which weights are kept: those with the lowest validation "loss", or with the highest "bound"
    on log p(x), which leaves out the term of the partial posterior."""
    init: str | None = None
    """A run, a folder of `vssm.save` or a shipped model to start from, instead of random weights.
    The new run takes over its model settings."""
    seed: int = 0
    """Fixes the initial weights, the order of the data and all noise; 0 to 2^63 - 1."""
    max_steps: int | None = None
    """Ends the run, and its learning rate schedule, after fewer steps than the epochs have."""
    validate_every: float = 1.0
    """Epochs, or a fraction of one, between validations; there is always one at the end."""
    num_valid: int | None = None
    """Validates on this many sequences only, the first ones."""
    validate_partial: bool = False
    """Whether validations also bound log p of the second half given the first, with one draw of
    latents (for vrnn an estimate, not a bound). Half means half of the longest sequence."""
    log_every: int = 50
    """Steps between log points, which read the losses from the device; so does each validation."""
    checkpoint_minutes: float = 5.0
    """Saves at the first log point this long after the last checkpoint; 0 saves at each."""
    samples: int = 64
    """Sequences in samples.png; 0 for none (there are none with fsdp)."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of matrix products: "float32", "bfloat16", or "auto": bfloat16 on CUDA, float32 on
    a CPU."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:N", or "auto": CUDA if there is a GPU, else the CPU."""
    graph: bool = True
    """Replays the step as a CUDA graph: on one CUDA device, without `compile` and `fsdp`."""
    compile: bool = False
    """Compiles every block of any model with torch.compile; `torch.compile(model)` reaches fewer
    blocks."""
    fsdp: bool = False
    """Shards weights and optimiser over the processes of torchrun instead of copying them to
    each."""

    def __post_init__(self) -> None:
        _clean_fields(self)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise ValueError(
                f"device={self.device!r} is unknown; choose from 'auto', 'cpu', 'cuda', 'cuda:N'"
            )
        for name in ("epochs", "batch", "log_every"):
            check_number(name, getattr(self, name), 1, whole=True)
        check_number("seed", self.seed, 0, below=2**63, whole=True)
        check_number("samples", self.samples, 0, whole=True)
        for name in ("max_steps", "num_valid"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1, whole=True)
        for name in ("weight_decay", "clip", "checkpoint_minutes"):
            check_number(name, getattr(self, name), 0)
        for name in ("learning_rate", "validate_every"):
            check_number(name, getattr(self, name), 0, above=True)
        for name in ("beta2", "warmup", "kl_warmup", "shift", "ema"):
            check_number(name, getattr(self, name), 0, below=1)
        if self.init is not None and (not isinstance(self.init, str) or not self.init):
            raise ValueError(f"init is {shown(self.init)}; use a folder or a shipped model")
        if self.optimizer == "muon" and self.fsdp:
            raise ValueError(
                "optimizer='muon' needs whole matrices, not fsdp=True; "
                "use optimizer='adamw', or fsdp=False"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Describes a whole run: the data, the model and the training.

    Example:
        >>> config = RunConfig(train=TrainConfig(epochs=5))
        >>> RunConfig.from_dict(config.to_dict()) == config
        True
        >>> RunConfig.from_dict({"train": {"epoch": 5}})
        Traceback (most recent call last):
        ValueError: train has no field 'epoch'; choose from 'epochs', ... (did you mean 'epochs'?)
    """

    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """Which data set."""
    model: ModelConfig = dataclasses.field(
        default_factory=lambda: ModelConfig(features=1, head="auto")
    )
    """Which model; its features, and a head of "auto", are taken from the data."""
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    """How it is trained."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the format and all fields as dictionaries that JSON gives back unchanged."""
        return {"format": FORMAT, **dataclasses.asdict(self), "model": self.model.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """Builds a config from dictionaries; for an unknown key, raises and suggests another."""
        if isinstance(values, dict):
            values = dict(values)
            if (version := values.pop("format", FORMAT)) != FORMAT:
                raise ValueError(
                    f"config has format {version!r}; this version reads format {FORMAT}"
                )
        return _from_plain(cls, values, "config")


def _from_plain(cls: type[Config], values: object, where: str) -> Config:
    if not isinstance(values, dict):
        raise ValueError(
            f"{where} is {values!r}; it must be a dictionary of the fields of {cls.__name__}"
        )
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    types: dict[str, Any] = {field.name: field.type for field in fields}
    retired = _RETIRED.get(where, {})
    values = {k: v for k, v in values.items() if k not in retired or v != retired[k]}
    for key in values:
        if key not in types:
            raise ValueError(f"{where} has no field {key!r}; {name_allowed(key, tuple(types))}")
    parts = {
        key: _from_plain(types[key], value, key) if dataclasses.is_dataclass(types[key]) else value
        for key, value in values.items()
    }
    try:
        return cls(**parts)
    except TypeError as error:  # a missing field, or one of a type that cannot be compared
        raise ValueError(f"{where} does not fit {cls.__name__}: {error}") from None


def _paper(data: str, features: int) -> RunConfig:
    """Returns a run of the paper: its model has the default settings."""
    # The paper gives 200 epochs and the grid of rates; the rest of this line is ours.
    options = TrainConfig(epochs=200, batch=512, learning_rate=1e-3, ema=0.999, validate_every=2.0)
    model = ModelConfig(features=features)
    return RunConfig(data=DataConfig(name=data), model=model, train=options)


_SPANS = (28, 28, 14, 7, 4, 2, 1, 1)

PRESETS: dict[str, RunConfig] = {
    "paper-mnist": _paper("mnist", 28),
    "paper-cifar10": _paper("cifar10", 96),
    "best": RunConfig(
        data=DataConfig(name="mnist"),
        model=ModelConfig(
            features=28, head="auto", width=256, latents=32, classes=16, levels=8, spans=_SPANS
        ),
        train=TrainConfig(epochs=100, batch=256, learning_rate=2e-3, ema=0.999, validate_every=2.0),
    ),
    "series": RunConfig(
        data=DataConfig(name="series"),
        model=ModelConfig(features=1, head="auto", width=96, layers=1, latents=1, classes=64),
        # Limited by steps, not epochs, since an epoch of a small table is a few steps.
        train=TrainConfig(epochs=10_000, max_steps=3000, batch=64, ema=0.995),
    ),
    "smoke": RunConfig(
        model=ModelConfig(
            features=1, head="auto", width=32, layers=1, state_size=4, heads=2, latents=4, classes=8
        ),
        train=TrainConfig(max_steps=20, batch=64, log_every=5, samples=16, num_valid=64),
    ),
}
"""Runs by name: the paper's two; the best we know, with levels of latents that have spans; the size
at which we compared forecasts of ETTh1, the default for series; and a run of seconds."""
