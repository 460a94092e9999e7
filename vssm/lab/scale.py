"""How much `vssm reproduce` does: the paper's settings, or small ones for minutes on a CPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vssm.checks import check_choice, check_number
from vssm.config import KINDS, PRESETS, ModelConfig, RunConfig, TrainConfig
from vssm.lab.sweep import LEARNING_RATES, check_values

__all__ = ["TRAINING_SETS", "Scale", "choose_scale", "config_of", "epochs_of"]

TRAINING_SETS = {"mnist": 54_000, "cifar10": 45_000, "digits": 1_294}  # without validation
_FEATURES = {"mnist": 28, "cifar10": 96, "digits": 8}


@dataclass(frozen=True)
class Scale:
    """The run, how long it trains, and how it is scored."""

    base: RunConfig
    epochs: float = 200
    grid_epochs: float = 200
    learning_rates: tuple[float, ...] = LEARNING_RATES
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    num_samples: int = 100
    max_sequences: int | None = None
    num_images: int = 10_000


def choose_scale(
    data: str,
    scale: str,
    kinds: Sequence[str],
    learning_rates: Sequence[float] | None,
    seeds: Sequence[int] | None,
    epochs: float | None,
    grid_epochs: float | None,
) -> Scale:
    """Returns the settings of a scale, with the given values in their place, all checked."""
    check_choice("data", data, tuple(TRAINING_SETS))
    check_choice("scale", scale, ("paper", "small"))
    if scale == "paper" and data == "digits":
        raise ValueError("scale='paper' has no data='digits'; use scale='small'")
    for kind in kinds:
        check_choice("kind", kind, KINDS)
    for name, value in (("epochs", epochs), ("grid_epochs", grid_epochs)):
        if value is not None:
            check_number(name, value, 0, above=True)
    usual = _small(data) if scale == "small" else Scale(PRESETS[f"paper-{data}"])
    found = replace(
        usual,
        epochs=epochs or usual.epochs,
        learning_rates=tuple(
            map(float, usual.learning_rates if learning_rates is None else learning_rates)
        ),
        seeds=tuple(usual.seeds if seeds is None else seeds),
    )
    check_values(kinds=kinds, learning_rates=found.learning_rates, seeds=found.seeds)
    for rate in found.learning_rates:
        TrainConfig(learning_rate=rate)  # checks it
    for seed in found.seeds:
        TrainConfig(seed=seed)
    if grid_epochs is not None and grid_epochs > found.epochs:
        raise ValueError(
            f"grid_epochs={grid_epochs:g} is not allowed; allowed: up to {found.epochs:g},"
            " the epochs of the runs"
        )
    usual_grid = found.epochs if scale == "paper" else min(found.epochs, usual.grid_epochs)
    return replace(found, grid_epochs=grid_epochs or usual_grid)


def _small(data: str) -> Scale:
    """A small model, few steps, three learning rates, one seed."""
    model = ModelConfig(
        features=_FEATURES[data], width=64, layers=2, heads=4, latents=12, classes=16
    )
    options = TrainConfig(batch=64, validate_every=0.25, num_valid=1000, samples=0)
    few: dict[str, Any] = {"learning_rates": (1e-2, 5e-3, 1e-3), "seeds": (0,), "num_samples": 20}
    if data == "digits":
        base = RunConfig(model=model, train=replace(options, validate_every=5.0))
        return Scale(base, epochs=20, grid_epochs=5, num_images=359, **few)
    base = RunConfig(model=model, train=options)
    return Scale(base, epochs=1.5, grid_epochs=0.2, max_sequences=500, num_images=500, **few)


def config_of(base: RunConfig, epochs: float, kind: str, rate: float, seed: int) -> RunConfig:
    """Returns a run that trains for so many epochs; parts of an epoch are counted in steps."""
    steps = max(1, round(epochs * (TRAINING_SETS[base.data.name] // base.train.batch)))
    options = replace(
        base.train,
        epochs=math.ceil(epochs),
        max_steps=None if epochs == int(epochs) else steps,
        learning_rate=rate,
        seed=seed,
    )
    return replace(base, model=replace(base.model, kind=kind), train=options)


def epochs_of(config: RunConfig) -> float:
    """Returns how many passes over the training set a run takes."""
    steps, per_epoch = config.train.max_steps, TRAINING_SETS[config.data.name] // config.train.batch
    return config.train.epochs if steps is None else round(steps / per_epoch, 4)
