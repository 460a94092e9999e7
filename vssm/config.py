"""The description of a model and of a run: small, typed, frozen, checked, and saved beside the weights."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from vssm.checks import check_choice, check_number, name_allowed, plain_number, shown
from vssm.data.config import DataConfig
from vssm.distributions import HEADS
from vssm.ops.latents import ESTIMATORS

__all__ = ["FORMAT", "KINDS", "PRESETS", "ModelConfig", "RunConfig", "TrainConfig"]

FORMAT = 1
"""Version of `config.json` and its folder; raised when an older reader would misunderstand it."""
KINDS = ("transformer", "ssm", "rnn", "tvae", "vrnn", "vssm")
_SIZES_BELOW = 10_000_000  # of a model: PyTorch breaks at sizes that no address can have

Config = TypeVar("Config")


def _make_plain(config: object) -> None:
    """Makes numbers of Python of those of NumPy, which JSON does not know."""
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        plain = (
            tuple(map(plain_number, value))
            if isinstance(value, tuple | list)
            else plain_number(value)
        )  # JSON has lists
        object.__setattr__(config, field.name, plain)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Describes one of the six models; `vssm.build(config)` makes it.

    Example:
        >>> config = ModelConfig(kind="vssm", features=28, width=64, layers=2)
        >>> config.inner, config.dt_rank
        (128, 4)
        >>> ModelConfig(kind="vssm", features=28, width=-1)
        Traceback (most recent call last):
        ValueError: width=-1 is not allowed; allowed: a whole number >= 1 and < 10000000
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
    levels: int = 1
    """For vssm: levels of latents, each drawn given those above, so that one shot fits together. They share
    `latents` evenly. The encoder has `layers` blocks, the decoder half as many after one for each level."""
    spans: tuple[int, ...] = ()
    """For each level, how many steps a latent speaks for: (28, 14, 7, 1) settles 28 steps first, then halves
    and quarters of them, then each step. 1 for every level by default."""
    head: str = "gaussian"
    """Distribution of x_t: gaussian, gaussian-learned, bernoulli, categorical or logistic-mixture; in a
    run also auto, the one that suits the data."""
    sigma: float = 0.1
    """Standard deviation of the gaussian head, 1e-6 or more."""
    mixtures: int = 5
    """Components of the logistic-mixture head."""
    bins: int = 256
    """Grey levels of the logistic-mixture head: x takes the values k / (bins - 1)."""

    def __post_init__(self) -> None:
        _make_plain(self)
        check_choice("kind", self.kind, KINDS)
        check_choice("head", self.head, ("auto", *HEADS))
        for field in dataclasses.fields(self):
            if field.type is int:
                least = 2 if field.name in ("classes", "bins") else 1
                check_number(
                    field.name, getattr(self, field.name), least, below=_SIZES_BELOW, whole=True
                )
        check_number(
            "sigma", self.sigma, 1e-6, below=1_000_000
        )  # float32 squares and divides by it
        if self.levels > 1 and self.kind != "vssm":
            raise ValueError(f"levels={self.levels} is not for kind={self.kind!r}; allowed: vssm")
        listed = isinstance(self.spans, list | tuple)
        whole = listed and all(
            type(span) is int and 1 <= span < _SIZES_BELOW for span in self.spans
        )
        if not whole or (self.spans and (self.levels == 1 or len(self.spans) != self.levels)):
            raise ValueError(
                f"spans={shown(self.spans)} is not allowed with levels={self.levels}; allowed: one whole "
                f"number >= 1 and < {_SIZES_BELOW} for each level of two or more, or none"
            )
        if self.latents % self.levels:
            raise ValueError(
                f"latents={self.latents} is not divisible by levels={self.levels}; "
                f"allowed: a multiple of {self.levels}"
            )
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
        """Returns the fields as a plain dictionary, as it comes back from JSON."""
        return {**dataclasses.asdict(self), "spans": list(self.spans)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Builds a config from a dictionary, naming every key that does not belong."""
        names = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - names)
        if unknown:
            raise ValueError(
                f"config has unknown keys {unknown}; allowed: {', '.join(sorted(names))}"
            )
        if "features" not in values:
            raise ValueError("config has no key 'features'; it is required")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Describes how a model is trained, and how often the run is looked at and saved.

    Example:
        >>> TrainConfig(epochs=5).learning_rate
        0.001
        >>> TrainConfig(ema=1.5)
        Traceback (most recent call last):
        ValueError: ema=1.5 is not allowed; allowed: a number >= 0 and < 1
    """

    epochs: int = 20
    """Passes over the training set."""
    batch: int = 256
    """Sequences in a step, over all processes together."""
    optimizer: str = "adamw"
    """What moves the weights: "adamw", or "muon" for the matrices of the blocks and AdamW for the rest."""
    learning_rate: float = 1e-3
    """Highest learning rate, reached after the warm-up; a cosine takes it to 0."""
    weight_decay: float = 0.01
    """Decay of matrices; vectors, A_log and the learned blank input have none."""
    beta2: float = 0.999
    """Decay of AdamW's second moment; a lower one forgets sooner, which can prevent jumps of the loss."""
    warmup: float = 0.02
    """Fraction of the steps in which the learning rate rises linearly."""
    kl_warmup: float = 0.0
    """Fraction of the steps in which the weight of the KL in the loss rises from 0 to 1: for data like text,
    of which latents are otherwise never used."""
    estimator: str = "gumbel"
    """How gradients pass through draws of latents: "gumbel", the paper's, or "reinmax"."""
    shift: float = 0.0
    """Share of the images of a step that are moved, by a pixel at most, against overfitting; for images."""
    clip: float = 1.0
    """Largest norm of the gradient of the loss per value of x; 0 does not clip."""
    ema: float = 0.0
    """Decay of the moving average of the weights that is validated and kept; 0 keeps the weights."""
    select: str = "loss"
    """Whose weights are kept: those of the validation with the lowest "loss", or with the highest "bound" on
    log p(x), in which the term of the partial posterior has no say."""
    init: str | None = None
    """A run, a folder of `vssm.save` or a shipped model to start from instead of random weights, to train
    it on or to fine-tune it; the new run has its model settings."""
    seed: int = 0
    """Fixes the first weights, the order of the data and all noise; 0 to 2^63 - 1."""
    max_steps: int | None = None
    """Ends the run, and its learning rate schedule, after fewer steps than the epochs have."""
    validate_every: float = 1.0
    """Epochs, or a fraction of one, between validations; there is always one at the end."""
    num_valid: int | None = None
    """Validates on the first sequences only, this many."""
    validate_partial: bool = False
    """Validations also bound log p of the second half given the first, by one draw of latents (for vrnn an
    estimate, no bound); of sequences of different lengths, what comes after half of the longest."""
    log_every: int = 50
    """Steps between log points, where losses are read from the device; validations are others."""
    checkpoint_minutes: float = 5.0
    """Saves at the first log point this long after the last checkpoint; 0 saves at every log point."""
    samples: int = 64
    """Sequences in samples.png; 0 for none (there are none with fsdp)."""
    precision: str = "auto"
    """Of matrix products: "float32", "bfloat16", or "auto" for bfloat16 on CUDA and float32 on a CPU."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:N", or "auto" for CUDA where there is one."""
    graph: bool = True
    """Replays the step as a CUDA graph: on one CUDA device, without `compile` and `fsdp`."""
    compile: bool = False
    """Compiles every block with torch.compile, of any model; `torch.compile(model)` reaches fewer."""
    fsdp: bool = False
    """Shards weights and optimiser over the processes of torchrun instead of copying them to each."""
    tensorboard: bool = False
    """Also writes event files for TensorBoard (extra "track")."""

    def __post_init__(self) -> None:
        _make_plain(self)
        check_choice("precision", self.precision, ("auto", "float32", "bfloat16"))
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_choice("select", self.select, ("loss", "bound"))
        check_choice("optimizer", self.optimizer, ("adamw", "muon"))
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise ValueError(
                f"device={self.device!r} is unknown; allowed: 'auto', 'cpu', 'cuda', 'cuda:N'"
            )
        for name in ("epochs", "batch", "log_every"):
            check_number(name, getattr(self, name), 1, whole=True)
        check_number(
            "seed", self.seed, 0, below=2**63, whole=True
        )  # samples.png is drawn with it too
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
        for name in ("validate_partial", "graph", "compile", "fsdp", "tensorboard"):
            if not isinstance(getattr(self, name), bool):  # not NumPy's, which JSON does not know
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not allowed; allowed: True, False"
                )
        if self.init is not None and (not isinstance(self.init, str) or not self.init):
            raise ValueError(
                f"init={shown(self.init)} is not allowed; allowed: a folder, or a shipped model"
            )
        if self.optimizer == "muon" and self.fsdp:
            raise ValueError(
                "optimizer='muon' needs whole matrices, not fsdp=True; allowed: 'adamw', or fsdp=False"
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
        ValueError: train has no field 'epoch'; allowed: 'epochs', ... (did you mean 'epochs'?)
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
        """Returns the format and all fields as plain dictionaries, as they come back from JSON."""
        return {"format": FORMAT, **dataclasses.asdict(self), "model": self.model.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """Builds a config from dictionaries; a key that does not belong is named, with the nearest one."""
        version = values.get("format", FORMAT) if isinstance(values, dict) else FORMAT
        if version != FORMAT:
            raise ValueError(
                f"config has format {version!r}; allowed: {FORMAT}, the format of this version"
            )
        if isinstance(values, dict):
            values = {key: value for key, value in values.items() if key != "format"}
        return _from_plain(cls, values, "config")


def _from_plain(cls: type[Config], values: object, where: str) -> Config:
    if not isinstance(values, dict):
        raise ValueError(
            f"{where} is {values!r}; allowed: a dictionary of the fields of {cls.__name__}"
        )
    types: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in types:
            raise ValueError(f"{where} has no field {key!r}; {name_allowed(key, tuple(types))}")
    parts = {
        key: _from_plain(types[key], value, key) if dataclasses.is_dataclass(types[key]) else value
        for key, value in values.items()
    }
    try:
        return cls(**parts)
    except (
        TypeError
    ) as error:  # a field that is missing, or of another type than the checks compare with
        raise ValueError(f"{where} does not fit {cls.__name__}: {error}") from None


def _paper(data: str, features: int) -> RunConfig:
    return RunConfig(
        data=DataConfig(name=data),
        model=ModelConfig(
            kind="vssm",
            features=features,
            width=1024,
            layers=4,
            state_size=16,
            heads=8,
            latents=32,
            classes=32,
            head="gaussian",
            sigma=0.1,
        ),
        # The paper says 200 epochs and the grid of rates; the rest of this line is ours, for all kinds alike.
        train=TrainConfig(epochs=200, batch=512, learning_rate=1e-3, ema=0.999, validate_every=2.0),
    )


PRESETS: dict[str, RunConfig] = {
    "paper-mnist": _paper("mnist", 28),
    "paper-cifar10": _paper("cifar10", 96),
    "best": RunConfig(
        data=DataConfig(name="mnist"),
        model=ModelConfig(
            features=28,
            width=256,
            layers=4,
            latents=32,
            classes=16,
            levels=8,
            spans=(28, 28, 14, 7, 4, 2, 1, 1),
            head="auto",
        ),
        train=TrainConfig(epochs=100, batch=256, learning_rate=2e-3, ema=0.999, validate_every=2.0),
    ),
    "series": RunConfig(
        data=DataConfig(name="series"),
        model=ModelConfig(features=1, head="auto", width=96, layers=1, latents=1, classes=64),
        # Steps say how long it takes, whatever the size of the table: epochs of a small one are a few steps.
        train=TrainConfig(epochs=10_000, max_steps=3000, batch=64, ema=0.995),
    ),
    "smoke": RunConfig(
        model=ModelConfig(
            features=1, head="auto", width=32, layers=1, state_size=4, heads=2, latents=4, classes=8
        ),
        train=TrainConfig(max_steps=20, batch=64, log_every=5, samples=16, num_valid=64),
    ),
}
"""Runs by name: the paper's two, with its settings; the best we know, with levels of latents that have spans;
the size at which forecasts of ETTh1 were compared, which is where series start from; and one of seconds."""
