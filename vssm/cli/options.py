"""Options that several commands share: of a data set and of a training run."""

import argparse
import warnings
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Self

import tyro

from vssm.checks import check_choice
from vssm.config import PRESETS, ModelConfig, RunConfig, TrainConfig
from vssm.data import DataConfig


@dataclass(frozen=True, kw_only=True)
class DataOptions(DataConfig):
    """A data set."""

    name: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[DATA]")]] = "digits"
    """The data set: digits, mnist, cifar10, images, text, series, arrays or synthetic."""
    dir: Annotated[str | None, tyro.conf.arg(name="data-dir")] = None
    """Folder with the files; else $VSSM_DATA; else the user cache."""
    seed: Annotated[int, tyro.conf.arg(name="split-seed")] = 0
    """Fixes the validation split, binarisation, synthetic data and the test set of images and
    arrays; 0 to 2^64 - 1."""

    def data_config(self) -> DataConfig:
        return DataConfig(
            **{option.name: getattr(self, option.name) for option in fields(DataConfig)}
        )


@dataclass(frozen=True, kw_only=True)
class RunOptions(DataOptions):
    """A data set, a model and how it is trained."""

    preset: str | None = None
    """Start from named settings: paper-mnist, paper-cifar10, best, series or smoke; the data set
    series starts from the preset series. Other options apply on top."""
    smoke: bool = False
    """Train a tiny model for a few steps; this takes seconds."""
    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(features=1, head="auto", width=128)
    )
    """The model; its features, and a head of "auto", follow the data."""
    train: TrainConfig = field(default_factory=TrainConfig)

    def run_config(self) -> RunConfig:
        return RunConfig(data=self.data_config(), model=self.model, train=self.train)

    @classmethod
    def default(cls, arguments: list[str]) -> Self:
        """Returns the defaults, which are those of the preset."""
        flags = [word.partition("=")[0] for word in arguments]
        if "--model.features" in flags and "--resume" not in flags:
            warnings.warn("--model.features is ignored: it follows the data", stacklevel=2)
        start, parser = cls(), argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--preset", nargs="?")
        preset = parser.parse_known_args(arguments)[0].preset
        if preset is None and "series" in arguments[:1]:
            preset = "series"  # the general size would take hours on a CPU
        if preset is not None:
            check_choice("preset", preset, tuple(PRESETS))
            config = PRESETS[preset]
            start = replace(start, name=config.data.name, model=config.model, train=config.train)
        if "--smoke" in arguments:
            start = replace(start, model=PRESETS["smoke"].model, train=PRESETS["smoke"].train)
        return start
