"""Your own sequences of vectors, of one length or of many, or images, from .npy and .npz files.

    .npy    x (M, T, D) of numbers: sequences of vectors, read as they are
            x (M, H, W) of uint8: grey images, a row is a step
            x (M, H, W, C) of uint8, or of floats in [0, 1]: grey (C = 1) or RGB (C = 3) images
    .npz    x, and where sequences end before T also `lengths` (M,)

Pixels of uint8 go from 0 to 255 and are scaled to [0, 1], unless none is above 1. What x holds after the end
of a sequence is padding: it may be anything, it is read as zero, and no loss or likelihood counts it. The
split is fixed by the seed: a tenth of the sequences is the test set, and of the others a tenth is validation.
"""

import io
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from vssm.data.config import DataConfig
from vssm.data.dataset import Data, Meta, Split, split_at_random
from vssm.data.files import DAMAGED_NPY, check_unpacked, locate_own, read_bytes
from vssm.data.images import image_meta

FEWEST = 10  # sequences
_LARGE = 10.0  # mean size of values that a model hardly learns


def open_arrays(config: DataConfig) -> Data:
    """Opens a file of sequences or images."""
    if config.arrays.path is None:
        raise ValueError("arrays.path is needed: a .npy or .npz file")
    path = locate_own(config.arrays.path, "arrays", config.dir)
    x, lengths = _checked(path, _read(path))
    maximum = 255 if x.dtype == np.uint8 and x.max() > 1 else 1
    if x.ndim == 4 or x.dtype == np.uint8:
        height, width, channels = x.shape[1:] if x.ndim == 4 else (*x.shape[1:], 1)
        meta = image_meta(
            "arrays", (height, width, channels), maximum if x.dtype == np.uint8 else None
        )
        x = x.reshape(len(x), height, width * channels)
    else:
        meta = Meta(
            name="arrays", features=x.shape[2], length=x.shape[1], suggested_head="gaussian-learned"
        )
    for note in _notes(x, meta, maximum):
        warnings.warn(f"{path}: {note}", stacklevel=3)

    def split(index: np.ndarray) -> Split:
        ends = None if lengths is None else torch.from_numpy(lengths[index])
        return Split(torch.from_numpy(x[index]), maximum=maximum, lengths=ends)

    return split_at_random(config, meta, len(x), split, [path])


def _notes(x: np.ndarray, meta: Meta, maximum: int) -> list[str]:
    """Returns what the user should know about how x is read."""
    if x.dtype == np.uint8 and meta.image_shape is not None:
        height, width, channels = meta.image_shape
        kind = f"{'grey' if channels == 1 else 'RGB'} images of {width} x {height} pixels"
        scaled = "0 to 255 become 0 to 1" if maximum == 255 else "0 and 1 stay as they are"
        return [f"x is uint8 and read as {kind}, {scaled}; save other numbers as float32"]
    if np.abs(x).mean(dtype=np.float64) > _LARGE:
        advice = "divide or standardise them, since models expect values of the order of 1"
        return [f"x has values from {x.min():g} to {x.max():g}; {advice}"]
    return []


def _read(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file by name."""
    content = read_bytes(path)
    with _damage_named(path):
        file = np.load(io.BytesIO(content), allow_pickle=False)
    if isinstance(file, np.ndarray):
        return {"x": file}
    if "x" not in file.files or set(file.files) - {"x", "lengths"}:
        raise ValueError(
            f"{path} holds {', '.join(sorted(file.files)) or 'nothing'}; allowed: x, lengths"
        )
    packed = [
        member for member in file.zip.infolist() if member.compress_type != zipfile.ZIP_STORED
    ]
    check_unpacked(sum(member.file_size for member in packed), path)
    with _damage_named(path):
        if any(member.compress_type != zipfile.ZIP_DEFLATED for member in packed):
            raise ValueError  # numpy packs in this way only, and other ways unpack more than was asked for
        return {
            name: np.asarray(file[name]) for name in file.files
        }  # what is no array comes as bytes


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Says which file is damaged instead of numpy's own words, which advise to unpickle."""
    try:
        yield
    except (
        *DAMAGED_NPY,
        zipfile.BadZipFile,
        zlib.error,
        RuntimeError,
    ):  # which asks for a password
        raise ValueError(
            f"{path} is damaged or no file of plain arrays; allowed: .npy or .npz"
        ) from None


def _checked(path: Path, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns x, cut to the longest sequence and zero after the end of each, and lengths if there are any."""
    x, lengths = arrays["x"], arrays.get("lengths")
    images = x.ndim == 4 and x.shape[3] in (1, 3)
    if not (x.ndim == 3 or images) or x.dtype.kind not in "fiu" or 0 in x.shape or len(x) < FEWEST:
        raise ValueError(
            f"{path}: x is {x.dtype} of shape {x.shape}; allowed: numbers (sequences, steps, features) or"
            f" images (images, height, width, 1 or 3), {FEWEST} sequences or more of one step or more; one"
            " number a step is a last size of 1"
        )
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is named below
            x = x.astype(np.float32)
    if lengths is not None:
        if lengths.shape != (len(x),) or lengths.dtype.kind not in "iu":
            raise ValueError(
                f"{path}: lengths is {lengths.dtype} of shape {lengths.shape};"
                f" allowed: {len(x)} whole numbers, one for each sequence"
            )
        outside = np.flatnonzero((lengths < 1) | (lengths > x.shape[1]))
        if len(outside):
            row = outside[0]
            raise ValueError(
                f"{path}: lengths is {lengths[row]} at {row}; allowed: 1 to {x.shape[1]}"
            )
        x, lengths = x[:, : lengths.max()].copy(), lengths.astype(np.int64)
        x[np.arange(x.shape[1]) >= lengths[:, None]] = 0
    bad = np.argwhere(~np.isfinite(x))
    if len(bad):
        raise ValueError(
            f"{path}: x is not finite at sequence {bad[0][0]}, step {bad[0][1]}; allowed: finite numbers"
            f"{' before the end of a sequence' if lengths is not None else ', or lengths in an .npz file'}"
        )
    if images and x.dtype != np.uint8 and not 0 <= x.min() <= x.max() <= 1:
        raise ValueError(
            f"{path}: x has images with values from {x.min():g} to {x.max():g}; allowed: floats from 0 to 1,"
            " or uint8 from 0 to 255"
        )
    return x, lengths
