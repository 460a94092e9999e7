"""Your own sequences of vectors, of one length or of many, from .npy and .npz files.

    .npy    x (M, T, D)
    .npz    x (M, T, D), and where sequences end before T also `lengths` (M,)

What x holds after the end of a sequence is padding: it may be anything, it is read as zero, and no loss or
likelihood counts it. The split is fixed by the seed: a tenth of the sequences is the test set, and of the
others a tenth is validation.
"""

import io
import lzma
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from vssm.data.config import DataConfig
from vssm.data.dataset import ARRAYS, Data, Meta, Split, hold_out
from vssm.data.files import DAMAGED_NPY, locate_own, read_bytes

_FEWEST = 10  # sequences


def open_arrays(config: DataConfig) -> Data:
    """Opens a file of sequences."""
    if config.arrays.path is None:
        raise ValueError("arrays.path is needed: a .npy or .npz file")
    path = locate_own(config.arrays.path, "arrays", config.dir)
    x, lengths = _checked(path, _read(path))
    rest, test = hold_out(len(x), config.seed, stream=ARRAYS)

    def split(index: np.ndarray) -> Split:
        return Split(
            torch.from_numpy(x[index]),
            lengths=None if lengths is None else torch.from_numpy(lengths[index]),
        )

    def fit() -> tuple[Split, Split]:
        train, valid = hold_out(len(rest), config.seed)
        return split(rest[train]), split(rest[valid])

    meta = Meta(name="arrays", features=x.shape[2], length=x.shape[1], suggested_head="gaussian-learned")
    return Data(config, meta, fit, lambda: split(test), [path])


def _read(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file by name."""
    try:
        file = np.load(io.BytesIO(read_bytes(path)), allow_pickle=False)
        if isinstance(file, np.ndarray):
            return {"x": file}
        return {name: np.asarray(file[name]) for name in file.files}  # what is no array comes as bytes
    except (
        *DAMAGED_NPY,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        OSError,  # of bz2
        RuntimeError,  # a flipped bit asks for a password, or for a method that zipfile does not have
    ):  # numpy's own words advise to unpickle
        raise ValueError(f"{path} is damaged or no file of plain arrays; allowed: .npy or .npz") from None


def _checked(path: Path, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns x, cut to the longest sequence and zero after the end of each, and lengths if there are any."""
    if "x" not in arrays or set(arrays) - {"x", "lengths"}:
        raise ValueError(f"{path} holds {', '.join(sorted(arrays)) or 'nothing'}; allowed: x, lengths")
    x, lengths = arrays["x"], arrays.get("lengths")
    if x.ndim != 3 or x.dtype.kind not in "fiu" or not x.shape[1] or not x.shape[2] or len(x) < _FEWEST:
        raise ValueError(
            f"{path}: x is {x.dtype} of shape {x.shape}; allowed: numbers (sequences, steps, features),"
            f" {_FEWEST} sequences or more of one step or more; one number a step is a last size of 1"
        )
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
            raise ValueError(f"{path}: lengths is {lengths[row]} at {row}; allowed: 1 to {x.shape[1]}")
        x, lengths = x[:, : lengths.max()], lengths.astype(np.int64)
        x = np.where(np.arange(x.shape[1])[:, None] < lengths[:, None, None], x, np.float32(0))
    bad = np.argwhere(~np.isfinite(x))
    if len(bad):
        raise ValueError(
            f"{path}: x is not finite at sequence {bad[0][0]}, step {bad[0][1]}; allowed: finite numbers"
            f"{' before the end of a sequence' if lengths is not None else ', or lengths in an .npz file'}"
        )
    return x, lengths
