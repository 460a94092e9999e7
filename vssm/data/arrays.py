"""Your own sequences of vectors, of one length or of many, or images, from .npy and .npz files.

    .npy    x (M, T, D) of numbers: sequences of vectors, read as they are
            x (M, H, W) of uint8: grey images, a row is a step
            x (M, H, W, C) of uint8, or of floats in [0, 1]: grey (C = 1) or RGB (C = 3) images
    .npz    x, `lengths` (M,) if sequences end before T, and `labels` (M,) if they have classes,
            numbered from 0

uint8 pixels from 0 to 255 are scaled to [0, 1], unless none is above 1. Values of x after the end
of a sequence are padding: they may be anything, are read as zero, and no loss or likelihood counts
them. The seed fixes the split: a tenth of the sequences is the test set, a tenth of the others
validation.
"""

import io
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from vssm.data.config import DataConfig
from vssm.data.dataset import Data, split_at_random
from vssm.data.files import DAMAGED_NPY, locate_own, read_bytes
from vssm.data.images import FEWEST, image_meta
from vssm.data.meta import Meta
from vssm.data.split import Split

_MOST_CLASSES = 10_000  # each is a feature of every step
_LARGE = 10.0  # a model hardly learns values of this mean size


def open_arrays(config: DataConfig, missing: bool = False) -> Data:
    """Opens a file of sequences or images; NaN is refused unless values may be `missing`."""
    if config.arrays.path is None:
        raise ValueError("arrays.path is needed: a .npy or .npz file")
    path = locate_own(config.arrays.path, "arrays", config.dir)
    arrays = _read(path)
    labels = arrays.pop("labels", None)
    x, lengths = _checked(path, missing, **arrays)
    labels = _checked_labels(path, labels, len(x), config.labels)
    classes = int(labels.max()) + 1 if labels is not None and config.labels else None
    pixels = x.dtype == np.uint8
    maximum = 255 if pixels and x.max() > 1 else 1
    if pixels or x.ndim == 4:
        shape = (*x.shape[1:3], x.shape[3] if x.ndim == 4 else 1)
        meta = image_meta("arrays", shape, maximum if pixels else None, classes)
        x = x.reshape(len(x), meta.length, -1)
    else:
        _, length, features = x.shape
        meta = Meta(
            name="arrays",
            features=features + (classes or 0),
            length=length,
            suggested_head="gaussian-learned",
            classes=classes,
        )
    if pixels:
        kind = "grey" if shape[2] == 1 else "RGB"
        scaled = "0 to 255 become 0 to 1" if maximum == 255 else "0 and 1 stay as they are"
        note = f"x is uint8 and read as {kind} images of {shape[1]} x {shape[0]} pixels, {scaled};"
        warnings.warn(f"{path}: {note} save other numbers as float32", stacklevel=3)
    elif np.nanmean(np.abs(x), dtype=np.float64) > _LARGE:
        low, high = np.nanmin(x), np.nanmax(x)
        note = f"x has values from {low:g} to {high:g}; divide or standardise them"
        warnings.warn(f"{path}: {note}, since models expect values of about 1", stacklevel=3)

    def split(index: np.ndarray) -> Split:
        ends = None if lengths is None else torch.from_numpy(lengths[index])
        kinds = None if labels is None else torch.from_numpy(labels[index])
        own = torch.from_numpy(x[index])
        return Split(own, kinds, maximum, lengths=ends, classes=classes or 0, missing=missing)

    return split_at_random(config, meta, len(x), split, [path])


def _read(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file by name."""
    content = io.BytesIO(read_bytes(path))
    try:
        file = np.load(content, allow_pickle=False)
        if isinstance(file, np.ndarray):
            return {"x": file}
        arrays = {name: np.asarray(file[name]) for name in file.files}
    except (*DAMAGED_NPY, zipfile.BadZipFile, zlib.error, RuntimeError):  # the last: a password
        # The words of numpy advise to unpickle.
        raise ValueError(
            f"{path} is damaged or no file of plain arrays; use .npy or .npz"
        ) from None
    if "x" not in arrays or set(arrays) - {"x", "lengths", "labels"}:
        names = ", ".join(sorted(arrays)) or "nothing"
        raise ValueError(f"{path} holds {names}; use x, lengths and labels")
    return arrays


def _checked_labels(
    path: Path, labels: np.ndarray | None, num: int, wanted: bool
) -> np.ndarray | None:
    """Returns the class of each sequence as int64, None if the file has none."""
    if labels is None:
        if wanted:
            raise ValueError(f"{path} has no labels; save them beside x in an .npz file")
        return None
    whole = labels.shape == (num,) and labels.dtype.kind in "iu"
    if not whole or not 0 <= labels.min() <= labels.max() < _MOST_CLASSES:
        raise ValueError(
            f"{path}: labels is {labels.dtype} of shape {labels.shape}; use {num} whole numbers"
            f" from 0 to {_MOST_CLASSES - 1}, one for each sequence"
        )
    return labels.astype(np.int64)


def _checked(
    path: Path, missing: bool, x: np.ndarray, lengths: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns x, cut to the longest sequence and zero after the end of each, and the lengths."""
    images = x.ndim == 4 and x.shape[3] in (1, 3)
    if not (x.ndim == 3 or images) or x.dtype.kind not in "fiu" or 0 in x.shape or len(x) < FEWEST:
        raise ValueError(
            f"{path}: x is {x.dtype} of shape {x.shape}; use numbers (sequences, steps,"
            f" features) or images (images, height, width, 1 or 3), at least {FEWEST} sequences of"
            " at least one step; if a step is one number, features is 1"
        )
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # a number that is too large becomes infinite, see below
            x = x.astype(np.float32)
    if lengths is not None:
        if lengths.shape != (len(x),) or lengths.dtype.kind not in "iu":
            raise ValueError(
                f"{path}: lengths is {lengths.dtype} of shape {lengths.shape};"
                f" use {len(x)} whole numbers, one for each sequence"
            )
        for row in np.flatnonzero((lengths < 1) | (lengths > x.shape[1])):
            steps = x.shape[1]
            raise ValueError(f"{path}: lengths is {lengths[row]} at {row}; use 1 to {steps}")
        x, lengths = x[:, : lengths.max()].copy(), lengths.astype(np.int64)
        x[np.arange(x.shape[1]) >= lengths[:, None]] = 0
    for sequence, step, *_ in np.argwhere(np.isinf(x) if missing else ~np.isfinite(x)):
        advice = "" if missing else "; train with --model.known any if NaN stands for missing ones"
        raise ValueError(
            f"{path}: x is not finite at sequence {sequence}, step {step}; use finite numbers"
            f"{advice}, and lengths in an .npz if sequences end early"
        )
    if np.isnan(x).all():
        raise ValueError(f"{path}: all values of x are missing")
    if images and x.dtype != np.uint8 and not 0 <= np.nanmin(x) <= np.nanmax(x) <= 1:
        raise ValueError(
            f"{path}: x has images with values from {np.nanmin(x):g} to {np.nanmax(x):g}; use"
            " floats from 0 to 1, or uint8 from 0 to 255"
        )
    return x, lengths
