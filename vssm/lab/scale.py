"""How much `vssm reproduce` does at a scale: the paper's settings, and small ones for minutes on a CPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vssm.checks import check_choice
from vssm.config import KINDS, PRESETS, ModelConfig, RunConfig, TrainConfig
from vssm.lab.sweep import LEARNING_RATES

__all__ = ["TRAINING_SETS", "Scale", "choose_scale", "config_of", "epochs_of"]

TRAINING_SETS = {"mnist": 54_000, "cifar10": 45_000, "digits": 1_294}  # without validation
_FEATURES = {"mnist": 28, "cifar10": 96, "digits": 8}


@dataclass(frozen=True)
class Scale:
    """How much is done: the run, and how it is scored."""

    base: RunConfig
    epochs: float
    grid_epochs: float
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    num_samples: int
    max_sequences: int | None
    num_images: int


def choose_scale(
    data: str,
    scale: str,
    kinds: Sequence[str],
    learning_rates: Sequence[float] | None,
    seeds: Sequence[int] | None,
    epochs: float | None,
    grid_epochs: float | None,
) -> Scale:
    """Returns what a scale says, with what was given in its place, all of it checked."""
    check_choice("data", data, tuple(TRAINING_SETS))
    check_choice("scale", scale, ("paper", "small"))
    if scale == "paper" and data == "digits":
        raise ValueError("scale='paper' is not for data='digits'; allowed: 'small'")
    for name, values in (("kinds", kinds), ("learning_rates", learning_rates), ("seeds", seeds)):
        if values is not None and (not values or len(set(values)) < len(values)):
            raise ValueError(
                f"{name}={tuple(values)!r} is not allowed; allowed: one or more different ones"
            )
    for name, value in (("epochs", epochs), ("grid_epochs", grid_epochs)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r} is not allowed; allowed: a number > 0")
    for kind in kinds:
        check_choice("kind", kind, KINDS)
    for seed in seeds or ():
        TrainConfig(seed=seed)
    for rate in learning_rates or ():
        TrainConfig(learning_rate=rate)
    if scale == "small":
        found = _small(data)
    else:
        found = Scale(
            PRESETS[f"paper-{data}"], 200, 200, LEARNING_RATES, (0, 1, 2, 3, 4), 100, None, 10_000
        )
    epochs = epochs or found.epochs
    if grid_epochs is not None and grid_epochs > epochs:
        raise ValueError(
            f"grid_epochs={grid_epochs:g} is not allowed; allowed: up to {epochs:g}, those of the runs"
        )
    return replace(
        found,
        epochs=epochs,
        grid_epochs=grid_epochs or (epochs if scale == "paper" else min(epochs, found.grid_epochs)),
        learning_rates=tuple(map(float, learning_rates or found.learning_rates)),
        seeds=tuple(seeds or found.seeds),
    )


def _small(data: str) -> Scale:
    """The same on a CPU: a small model, few steps, three learning rates, one seed."""
    model = ModelConfig(
        features=_FEATURES[data], width=64, layers=2, heads=4, latents=12, classes=16
    )
    options = TrainConfig(batch=64, validate_every=0.25, num_valid=1000, samples=0)
    if data == "digits":
        options = replace(options, validate_every=5.0)
        return Scale(
            RunConfig(model=model, train=options), 20, 5, (1e-2, 5e-3, 1e-3), (0,), 20, None, 359
        )
    return Scale(
        RunConfig(model=model, train=options), 1.5, 0.2, (1e-2, 5e-3, 1e-3), (0,), 20, 500, 500
    )


def config_of(base: RunConfig, epochs: float, kind: str, rate: float, seed: int) -> RunConfig:
    steps_per_epoch = TRAINING_SETS[base.data.name] // base.train.batch
    steps = None if epochs == int(epochs) else max(1, round(epochs * steps_per_epoch))
    options = replace(
        base.train, epochs=math.ceil(epochs), max_steps=steps, learning_rate=rate, seed=seed
    )
    return replace(base, model=replace(base.model, kind=kind), train=options)


def epochs_of(config: RunConfig) -> float:
    """Returns the passes over the training set that a run takes."""
    steps_per_epoch = TRAINING_SETS[config.data.name] // config.train.batch
    steps = config.train.max_steps
    return config.train.epochs if steps is None else round(steps / steps_per_epoch, 4)
