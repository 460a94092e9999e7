"""Your own sequences of vectors, of one length or of many, or images, from .npy and .npz files.

    x (M, T, D) of numbers          sequences of vectors, read as they are
    x (M, H, W) of uint8            grey images, a row is a step
    x (M, H, W, C)                  images of uint8, or of floats in [0, 1]; C is 1 or 3
    lengths (M,), labels (M,)       beside x in an .npz file: steps, and classes from 0

uint8 pixels are divided by 255, unless none is above 1. Values after the end of a sequence are
padding: they may be anything, and are read as zero.
"""

import warnings
from pathlib import Path

import numpy as np
import torch

from vssm.data.config import DataConfig
from vssm.data.dataset import Data, Split, split_at_random
from vssm.data.files import locate_own, read_numpy
from vssm.data.images import FEWEST, image_meta
from vssm.data.meta import Meta

_MOST_CLASSES = 10_000  # each is a feature of every step
_LARGE = 10.0  # a model hardly learns values of this mean size


def open_arrays(config: DataConfig, missing: bool = False) -> Data:
    """Opens a file of sequences or images; NaN is refused unless values may be `missing`."""
    path = locate_own(config)
    arrays = read_numpy(path)
    arrays = {"x": arrays} if isinstance(arrays, np.ndarray) else arrays
    if "x" not in arrays or set(arrays) - {"x", "lengths", "labels"}:
        names = ", ".join(sorted(arrays)) or "nothing"
        raise ValueError(f"{path} holds {names}; use x, lengths and labels")
    x = arrays["x"]
    pixels, coloured = x.dtype == np.uint8, x.ndim == 4 and x.shape[3] in (1, 3)
    fits = (x.ndim == 3 or coloured) and len(x) >= FEWEST and x.size > 0
    if not fits or x.dtype.kind not in "fiu":
        raise ValueError(
            f"{path}: x is {x.dtype} of shape {x.shape}; use numbers (sequences, steps,"
            f" features) or images (images, height, width, 1 or 3), at least {FEWEST} sequences of"
            " at least one step; if a step is one number, features is 1"
        )
    lengths = _whole_numbers(path, arrays, "lengths", len(x), 1, x.shape[1])
    labels = _whole_numbers(path, arrays, "labels", len(x), 0, _MOST_CLASSES - 1)
    if config.labels and labels is None:
        raise ValueError(f"{path} has no labels; save them beside x in an .npz file")
    classes = int(labels.max()) + 1 if labels is not None and config.labels else None
    maximum = 255 if pixels and x.max() > 1 else 1
    if not pixels:
        with np.errstate(over="ignore"):  # a number that is too large becomes infinite
            x = x.astype(np.float32)
    x = _checked(path, x, lengths, missing)
    low, high = np.nanmin(x), np.nanmax(x)
    if pixels or coloured:
        if (high > 1 and not pixels) or low < 0:
            raise ValueError(
                f"{path}: x has images with values from {low:g} to {high:g}; use floats from 0 to"
                " 1, or uint8 from 0 to 255"
            )
        shape = (*x.shape[1:3], x.shape[3] if coloured else 1)
        meta = image_meta("arrays", shape, maximum if pixels else None, classes)
        x = x.reshape(len(x), meta.length, -1)
        if pixels:
            height, width, channels = shape
            kind = "grey" if channels == 1 else "RGB"
            scaled = "0 to 255 become 0 to 1" if maximum == 255 else "0 and 1 stay as they are"
            warnings.warn(
                f"{path}: x is uint8 and read as {kind} images of {width} x {height} pixels,"
                f" {scaled}; save other numbers as float32",
                stacklevel=3,
            )
    else:
        meta = Meta(
            name="arrays",
            features=x.shape[2] + (classes or 0),
            length=x.shape[1],
            suggested_head="gaussian-learned",
            classes=classes,
        )
        if np.nanmean(np.abs(x), dtype=np.float64) > _LARGE:
            warnings.warn(
                f"{path}: x has values from {low:g} to {high:g}; divide or standardise them, since"
                " models expect values of about 1",
                stacklevel=3,
            )
    ends, kinds = (None if a is None else torch.from_numpy(a) for a in (lengths, labels))
    whole = Split(torch.from_numpy(x), kinds, maximum, ends, classes or 0, missing)
    return split_at_random(config, meta, whole, [path])


def _whole_numbers(
    path: Path, arrays: dict[str, np.ndarray], name: str, num: int, least: int, most: int
) -> np.ndarray | None:
    """Returns an array of a whole number for each sequence as int64, None if the file has none."""
    if (array := arrays.get(name)) is None:
        return None
    if array.shape != (num,) or array.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: {name} is {array.dtype} of shape {array.shape}; use {num} whole numbers, one"
            " for each sequence"
        )
    for row in np.flatnonzero((array < least) | (array > most)):
        raise ValueError(f"{path}: {name}[{row}] is {array[row]}; use {least} to {most}")
    return array.astype(np.int64)


def _checked(path: Path, x: np.ndarray, lengths: np.ndarray | None, missing: bool) -> np.ndarray:
    """Returns x, cut to the longest sequence and zero after the end of each."""
    if lengths is not None:
        x = x[:, : lengths.max()].copy()
        x[np.arange(x.shape[1]) >= lengths[:, None]] = 0
    for sequence, step, *_ in np.argwhere(np.isinf(x) if missing else ~np.isfinite(x)):
        advice = "" if missing else "; train with --model.known any if NaN stands for missing ones"
        raise ValueError(
            f"{path}: x is not finite at sequence {sequence}, step {step}; use finite numbers"
            f"{advice}, and lengths in an .npz if sequences end early"
        )
    if np.isnan(x).all():
        raise ValueError(f"{path}: all values of x are missing")
    return x
