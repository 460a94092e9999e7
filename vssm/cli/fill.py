"""`vssm fill`: the gaps of tables, pictures, texts and arrays, for models with any part known."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from PIL import Image

import vssm
from vssm.checks import choose_device, whole_number
from vssm.cli.samples import check_files, read_array, write_array, write_samples
from vssm.data import Meta
from vssm.data.series import TableWindows
from vssm.data.storage import write_atomically
from vssm.data.table import find_columns, read_table
from vssm.forecasting.files import write_forecast
from vssm.models import Model, first_weight
from vssm.runs.checkpoint import load_finite
from vssm.runs.config import SavedConfig, refuse_forecaster
from vssm.runs.pretrained import find

_CELLS = 2**18  # sequences times steps that are made at once
_QUANTILES = (0.1, 0.9)


@dataclass
class Fill:
    """Fills the gaps of a table, a picture or a text."""

    run_folder: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
    """A run folder, a folder of vssm.save, a shipped model's name, or hf://OWNER/NAME: a model that
    was trained with --model.known any."""
    input: Path
    """The file with gaps: a CSV, Parquet or .npy file with empty cells or NaN, a PNG with
    transparent pixels, or a text with underscores, one for each unknown character."""
    out: Path
    """Where the result goes: .csv, .parquet, .npy, .png or .txt."""
    mask: Path | None = None
    """A picture as large as the input; its white pixels are unknown, instead of transparent
    ones."""
    num: int = 1
    """How many samples. A table gets their median, and columns with their quantiles 0.1 and 0.9."""
    passes: int = 1
    """Parallel passes: 1 fills all entries at once, more fill one part after the other."""
    seed: int = 0
    """Selects the sample; one seed always gives the same one."""
    temperature: float = 1.0
    """Below 1 for safer, above 1 for wilder samples."""
    label: int | None = None
    """The class of the sequences, for models that were trained with labels."""
    device: str = "auto"
    """Where to run: auto, cpu or cuda."""

    def run(self) -> None:
        whole_number("num", self.num, 1)
        check_files({"out": self.out}, {"input": self.input, "mask": self.mask})
        for name, path in (("input", self.input), ("mask", self.mask)):
            if path is not None and not path.is_file():
                raise ValueError(f"{name}={str(path)!r} is not a file; give a file to read")
        folder = find(self.run_folder)
        refuse_forecaster(folder)
        model = load_finite(folder, choose_device(self.device))
        meta = SavedConfig.read(folder).meta()
        if model.config.known != "any":
            raise ValueError(
                f"{self.run_folder!r} continues sequences and cannot fill gaps; "
                "train a vssm with --model.known any, as the shipped 'mnist-any-small' was"
            )
        if meta is not None and meta.columns is not None:
            self._fill_table(model, meta)
        elif self.input.suffix == ".npy":
            self._fill_array(model)
        elif meta is not None and meta.image_shape is not None:
            self._fill_picture(model, meta)
        elif meta is not None and model.head.tokens:
            self._fill_text(model, meta)
        else:
            raise ValueError(f"input={str(self.input)!r} is not allowed for this run; use .npy")
        print(f"filled: {self.out}")

    def _check_out(self, *suffixes: str) -> None:
        if self.out.suffix not in suffixes:
            usable = " or ".join(suffixes)
            raise ValueError(f"out={str(self.out)!r} does not fit this run; use {usable}")

    def _samples(
        self, model: Model, x: torch.Tensor, known: torch.Tensor, observe: str = "mean"
    ) -> torch.Tensor:
        """Returns samples (B, num, T, ...) of sequences with gaps."""
        device = first_weight(model).device
        made = x[:, None].expand(-1, self.num, *x.shape[1:]).clone()
        gaps = (~known).flatten(1).any(1).nonzero().flatten()  # the others are there already
        if not len(gaps):
            raise ValueError(
                f"input={str(self.input)!r} has no gaps; mark them: empty cells or NaN in tables "
                "and arrays, transparent pixels or --mask for pictures, underscores in texts"
            )
        for rows in gaps.split(max(1, _CELLS // (self.num * x.shape[1]))):
            part = x[rows].to(device), known[rows].to(device)
            options = {"temperature": self.temperature, "observe": observe, "seed": self.seed}
            filled = vssm.fill(model, *part, self.num, self.passes, **options, rows=rows.tolist())
            made[rows] = filled.cpu()
        return made

    def _label(self, model: Model, x: torch.Tensor) -> torch.Tensor:
        """Adds the one-hot class to every step, if the model was trained with labels."""
        classes = model.config.given
        if not classes and self.label is None:
            return x
        if self.label is None:
            raise ValueError(f"this run was trained with labels; give --label 0 to {classes - 1}")
        if not 0 <= self.label < classes:
            allowed = f"use 0 to {classes - 1}" if classes else "this run has no labels"
            raise ValueError(f"label={self.label} is not allowed; {allowed}")
        one_hot = (torch.arange(classes) == self.label).float()
        return torch.cat([x, one_hot.expand(*x.shape[:2], classes)], -1)

    def _fill_array(self, model: Model) -> None:
        self._check_out(".npy")
        array = read_array(str(self.input), "input")
        known = torch.from_numpy(~np.isnan(array))
        x = torch.from_numpy(np.where(known, array, 0))
        tokens = model.head.tokens
        if tokens and bool((x != x.long()).any()):
            raise ValueError(
                f"input={str(self.input)!r} holds fractions; give whole numbers, because this run "
                "has tokens"
            )
        if single := x.ndim == (1 if tokens else 2):
            x, known = x[None], known[None]
        made = self._samples(model, x.long() if tokens else x.float(), known)
        made = made if self.num > 1 else made[:, 0]
        write_array((made[0] if single else made).numpy(), self.out)

    def _fill_text(self, model: Model, meta: Meta) -> None:
        self._check_out(".txt", ".npy")
        text = self.input.read_text(encoding="utf-8").removesuffix("\n")
        x, known = meta.encode_gaps(text)
        # The most likely character of a place, regardless of its neighbours, is often a space.
        made = self._samples(model, x[None], known[None], "sample")[0]
        write_samples(made, None, meta, self.out)

    def _fill_picture(self, model: Model, meta: Meta) -> None:
        assert meta.image_shape is not None
        self._check_out(".png", ".npy")
        height, width, channels = meta.image_shape
        mode = "LA" if channels == 1 else "RGBA"
        pixels = _read_picture(self.input, "input", (height, width), mode)
        unknown = pixels[..., -1] < 128
        if self.mask is not None:
            unknown = _read_picture(self.mask, "mask", (height, width), "L") >= 128
        levels = (meta.levels or 256) - 1
        x = np.round(pixels[..., :-1] / 255 * levels) / levels
        x = self._label(model, torch.from_numpy(x).float().reshape(1, height, -1))
        known = torch.from_numpy(~unknown).repeat_interleave(channels, 1)[None]
        known = torch.cat([known, torch.ones(1, height, model.config.given, dtype=torch.bool)], -1)
        made = self._samples(model, x, known)[0, ..., : width * channels]
        if self.num > 1 or self.out.suffix == ".npy":
            write_samples(made, None, meta, self.out)
            return
        image = (255 * meta.to_image(made)[0]).round().byte().numpy()
        image = Image.fromarray(image[..., 0] if channels == 1 else image)
        write_atomically(self.out, lambda path: image.save(path, format="PNG"))

    def _fill_table(self, model: Model, meta: Meta) -> None:
        self._check_out(".csv", ".parquet", ".npy")
        table = read_table(self.input, time="none")
        windows = TableWindows(table, meta)
        observe = "mean" if self.num == 1 else "sample"
        made = windows.place(self._samples(model, windows.x, windows.known, observe).numpy())
        if self.out.suffix == ".npy":
            write_array(made if self.num > 1 else made[0], self.out)
            return
        assert meta.columns is not None
        values = table.values.copy()
        values[:, find_columns(table, meta.columns)] = np.median(made, 0)
        columns = dict(zip(table.names, values.T, strict=True))
        for level in _QUANTILES if self.num > 1 else ():
            for k in np.flatnonzero(np.isnan(windows.values).any(0)):
                columns[f"{meta.columns[k]} q{level}"] = np.quantile(made[..., k], level, 0)
        write_forecast(table.frame.assign(**columns), self.out)


def _read_picture(path: Path, name: str, size: tuple[int, int], mode: str) -> np.ndarray:
    try:
        with Image.open(path) as image:  # a picture of another size is not unpacked
            given = image.size[::-1]
            pixels = np.asarray(image.convert(mode)) if given == size else None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        message = f"{name}={str(path)!r} is not a picture, or is damaged; give a whole PNG file"
        raise ValueError(message) from None
    if pixels is None:
        raise ValueError(
            f"{name}={str(path)!r} has {given[0]} x {given[1]} pixels; "
            f"this run needs {size[0]} x {size[1]}"
        )
    return pixels
