"""Files of commands: checks before the work, prompts that are read, samples that are written."""

import io
import os
from collections.abc import Mapping
from itertools import combinations, product
from pathlib import Path

import numpy as np
import torch

from vssm.data import Meta, draw
from vssm.data.storage import is_device, why_read_only, write_atomically
from vssm.models import Model
from vssm.nn import State


def check_files(
    writes: Mapping[str, Path | None], reads: Mapping[str, Path | None] | None = None
) -> None:
    """Raises unless all files can be written, each under a name of its own, and no file that is
    read would be replaced."""
    targets = [(name, path) for name, path in writes.items() if path is not None]
    for name, path in targets:
        if not path.name or path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"{name}={str(path)!r} is not a file name in an existing folder")
        if why := why_read_only(path if is_device(path) else path.absolute().parent):
            raise ValueError(f"{name}={str(path)!r} cannot be written: {why}")
    given = [(name, path) for name, path in (reads or {}).items() if path is not None]
    for (name, path), (other, target) in (*combinations(targets, 2), *product(given, targets)):
        if os.path.realpath(path) == os.path.realpath(target):  # follows links
            raise ValueError(
                f"{name}={str(path)!r} and {other}={str(target)!r} are the same file; use two names"
            )


def check_state_target(path: Path) -> None:
    """Raises if a state would replace another kind of file, such as weights."""
    free = not path.exists() or is_device(path) or not path.stat().st_size  # mktemp leaves it empty
    if not free and not State.is_saved_at(path):
        raise ValueError(
            f"state={str(path)!r} exists and is not a state; give a new name, or a file of a state"
        )


def read_prompt(prompt: str, model: Model, meta: Meta | None) -> torch.Tensor:
    """Returns a prompt, the name of a .npy file or text, as a batch that the model takes."""
    tokens = model.head.tokens
    if not prompt.endswith(".npy"):
        if meta is None or not tokens:
            raise ValueError(
                f"prompt={prompt!r} is not a .npy file, and this model does not read text;"
                " give this model a .npy file"
            )
        return meta.encode(prompt)[None]
    array = read_array(prompt)
    if tokens:
        if array.dtype.kind == "f" and not np.equal(np.mod(array, 1), 0).all():
            raise ValueError(f"prompt={prompt!r} holds fractions or NaN; give whole numbers")
        array = array.astype(np.int64)
        return torch.from_numpy(array[None] if array.ndim == 1 else array)
    if meta is not None and meta.image_shape is not None:
        if array.shape[2:] == meta.image_shape[1:]:  # images, as the data set `arrays` reads them
            array = array.reshape(*array.shape[:2], -1)
        if array.dtype == np.uint8 and meta.levels == 256:
            array = array / np.float32(255)
        finite = array[np.isfinite(array)]
        if array.dtype.kind == "f" and (np.abs(finite) > 10).any():  # most likely 0 to 255
            raise ValueError(
                f"prompt={prompt!r} holds values up to {finite.max():g}, but pixels of this model "
                "lie from 0 to 1; divide them by 255, or give uint8"
            )
    if array.dtype.kind != "f":
        raise ValueError(
            f"prompt={prompt!r} holds {array.dtype}; give floats, as the training data has them,"
            " such as pixels from 0 to 1"
        )
    if array.ndim == 2 and array.shape[1] == model.head.features:  # one sequence
        array = array[None]
    with np.errstate(over="ignore"):  # a value that is too large becomes infinite and is refused
        return torch.from_numpy(array.astype(np.float32))


def read_array(path: str, name: str = "prompt") -> np.ndarray:
    """Returns the numbers in the .npy file that an option names."""
    if not Path(path).is_file():
        raise ValueError(f"{name}={path!r} is not a file; give a .npy file of numbers")
    with Path(path).open("rb") as file:
        try:
            array = np.lib.format.read_array(file, allow_pickle=False)
        except Exception:  # damaged files raise many kinds
            array = None
    if array is None or array.dtype.kind not in "biuf":
        raise ValueError(f"{name}={path!r} is damaged or holds no numbers; give a .npy file")
    return array


def write_samples(
    x: torch.Tensor, prompt: torch.Tensor | None, meta: Meta | None, out: Path
) -> None:
    """Writes the samples as an array, or prompt and samples as a picture or text."""
    if out.suffix == ".npy":
        write_array(x.numpy(), out)
        return
    if meta is None:
        raise ValueError(f"out={str(out)!r} needs a run folder that knows its data; use .npy")
    whole = x if prompt is None else torch.cat([prompt.expand(len(x), *prompt.shape[1:]), x], 1)
    if out.suffix == ".png":
        write_atomically(out, lambda path: draw(meta, whole, path))
        return
    if whole.ndim != 2:
        raise ValueError(f"out={str(out)!r} is for text; use .npy or .png for {meta.name!r}")
    text = "\n---\n".join(meta.decode(tokens) for tokens in whole)
    write_atomically(out, lambda path: path.write_text(text + "\n", encoding="utf-8"))
    print(_printable(text))


def write_array(array: np.ndarray, out: Path) -> None:
    """Writes a .npy file."""
    # Not to the file itself: NumPy writes past Python and does not notice a full disk.
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    write_atomically(out, lambda path: path.write_bytes(content.getbuffer()))


def _printable(text: str) -> str:
    r"""Returns a text with its control characters escaped, so that a terminal ignores them.

    >>> _printable("a\tb\n\x1b[2J")
    'a\tb\n\\x1b[2J'
    """
    return "".join(
        char if char.isprintable() or char in "\t\n" else char.encode("unicode_escape").decode()
        for char in text
    )
