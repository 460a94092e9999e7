"""Reads config.json, which says what a folder holds.

A model that was saved alone has the keys `format` and `model`. A run also has `data`, `train` and
`data_meta`, the shape of its sequences.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vssm.config import FORMAT, ModelConfig, RunConfig
from vssm.data import Meta
from vssm.data.storage import read_object, write_atomically

Config = TypeVar("Config")


@dataclass(frozen=True)
class SavedConfig:
    """The content of a config.json."""

    path: Path
    """The file that it was read from, for messages."""
    values: dict[str, Any]
    """The JSON object as it was saved."""

    @classmethod
    def read(cls, folder: str | Path) -> "SavedConfig":
        """Reads the config.json of a folder."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            what = "is a file, not a folder" if Path(folder).is_file() else "does not exist"
            what = "has no config.json" if Path(folder).is_dir() else what
            raise ValueError(
                f"{str(folder)!r} {what}; use a run folder, or a folder written by vssm.save"
            )
        return cls.parse(path)

    @classmethod
    def parse(cls, path: Path, text: str | None = None) -> "SavedConfig":
        """Reads a config.json, or its `text` that was found in another file."""
        values = read_object(path, text)
        if not isinstance(values.get("model"), dict):
            raise ValueError(f"{str(path)!r} has no key 'model'; it is not a config of vssm")
        if values.get("format") != FORMAT:
            raise ValueError(
                f"{str(path)!r} has format {values.get('format')!r}, but this version reads "
                f"{FORMAT}; use the version that wrote it"
            )
        return cls(path, values)

    def model(self) -> ModelConfig:
        """Returns the settings of the model."""
        return self._checked(ModelConfig.from_dict, self.values["model"])

    def run(self) -> RunConfig:
        """Returns the settings of the run; raises `ValueError` if there is just a model."""
        for key in ("data", "train"):  # a default would train another model over this one
            if key not in self.values:
                raise ValueError(
                    f"{str(self.path)!r} has no key {key!r}; use a run folder of vssm train"
                )
        values = {name: value for name, value in self.values.items() if name != "data_meta"}
        return self._checked(RunConfig.from_dict, values)

    def meta(self) -> Meta | None:
        """Returns the description of the data of a run; None if there is just a model."""
        return Meta.from_json(self.values["data_meta"]) if "data_meta" in self.values else None

    def _checked(self, make: Callable[[dict[str, Any]], Config], values: dict[str, Any]) -> Config:
        try:
            return make(values)
        except ValueError as error:
            raise ValueError(f"{str(self.path)!r}: {error}") from None

    def text(self) -> str:
        """Returns the text of the file."""
        return json.dumps(self.values, indent=2) + "\n"

    def write(self) -> None:
        """Writes the file."""
        write_atomically(self.path, lambda file: file.write_text(self.text()))


def refuse_forecaster(folder: str | Path) -> None:
    """Raises for a folder of `Forecaster.save`: its model alone does not know the units of data."""
    if (Path(folder) / "forecaster.json").is_file():
        command = f"vssm forecast {shlex.quote(str(folder))}"
        raise ValueError(f"{str(folder)!r} is a forecaster, not a run; use it with: {command}")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested dictionaries as one, with keys such as "train.epochs"."""
    flat = {}
    for key, value in values.items():
        name = prefix + key
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def read_config(folder: str | Path) -> RunConfig:
    """Returns the settings of the run in a folder."""
    return SavedConfig.read(folder).run()
