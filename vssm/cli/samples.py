"""Prompts and samples as files: arrays, pictures and text."""

import os
import re
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, cast

from vssm.checks import printable
from vssm.storage import is_device, why_read_only, write_atomically

if TYPE_CHECKING:
    import numpy as np
    import torch

    from vssm.data import Meta
    from vssm.models import Model

__all__ = [
    "check_inputs_stay",
    "check_place_target",
    "check_state_target",
    "check_targets",
    "read_array",
    "read_place",
    "read_prompt",
    "write_array",
    "write_samples",
    "write_texts",
]


def check_targets(**paths: Path) -> None:
    """Raises, before the work is done, unless files can be written there, each under a name of its own."""
    for name, path in paths.items():
        if not path.name or path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(
                f"{name}={str(path)!r} is not allowed; allowed: a file in a folder that exists"
            )
        place = path if is_device(path) else path.absolute().parent
        if why := why_read_only(place):
            raise ValueError(
                f"{name}={str(path)!r} can not be written ({why}); allowed: a file in a folder of yours"
            )
    for one, other in combinations(paths.items(), 2):
        _check_apart(one, other)


def check_inputs_stay(inputs: "dict[str, Path | None]", **targets: Path) -> None:
    """Raises, before the work is done, if a file that is read would be replaced by one that is written."""
    for name, path in inputs.items():
        for target in targets.items():
            if path is not None:
                _check_apart((name, path), target)


def check_state_target(state: Path) -> None:
    """Raises, before the work is done, if a state would replace a file that is none, such as weights."""
    from vssm.nn import State

    if not _is_free(state) and not State.is_saved_at(state):
        raise ValueError(
            f"state={str(state)!r} is there and no state; allowed: a new name, or an older state's"
        )


def check_place_target(state: Path) -> None:
    """Raises, before the work is done, if a state of a server would replace a file that is none."""
    if not _is_free(state) and _place(state) is None:
        raise ValueError(
            f"state={str(state)!r} is there and no state of a server; allowed: a new name, or that of one"
        )


def read_place(path: Path) -> str:
    """Returns the place to resume from, as a server named it, that a file holds."""
    if not path.exists() or path.is_dir():
        raise ValueError(
            f"resume={str(path)!r} is no file; allowed: what --state wrote of a server"
        )
    place = _place(path)
    if place is None:
        raise ValueError(
            f"resume={str(path)!r} holds no state of a server; allowed: what --state wrote of one"
        )
    return place


def _place(path: Path) -> str | None:
    content = path.read_bytes()
    # A handle or a sealed state (vssm.serve.resume): one word.
    return content.strip().decode() if re.fullmatch(rb"[hs]\.[\w=-]+\s*", content) else None


def _is_free(path: Path) -> bool:
    """Says whether nothing is lost when a file is written here."""
    return not path.exists() or is_device(path) or not path.stat().st_size  # as mktemp leaves it


def _check_apart(*named: tuple[str, Path]) -> None:
    if len({os.path.realpath(path) for _, path in named}) < len(named):  # links are followed
        given = ", ".join(f"{name}={str(path)!r}" for name, path in named)
        raise ValueError(f"{given} are one file; allowed: a name for each")


def read_prompt(prompt: str, model: "Model", meta: "Meta | None") -> "torch.Tensor":
    """Returns what a prompt holds, the name of a .npy file or text, as a batch that the model takes."""
    import numpy as np
    import torch

    if not prompt.endswith(".npy"):
        if meta is None or not model.head.tokens:
            raise ValueError(
                f"prompt={prompt!r} is not allowed; allowed for this model: a .npy file"
            )
        return meta.encode(prompt)[None]
    array = read_array(prompt)
    if not model.head.tokens:
        if meta is not None and meta.image_shape is not None:
            if array.shape[2:] == meta.image_shape[1:]:  # images, as `arrays` reads them
                array = array.reshape(*array.shape[:2], -1)
            if array.dtype == np.uint8 and meta.levels == 256:
                array = array / np.float32(255)
        if array.dtype.kind != "f":
            raise ValueError(
                f"prompt={prompt!r} holds {array.dtype}; allowed for this model: floats,"
                " as its data has them, such as pixels from 0 to 1"
            )
        if meta is not None and meta.image_shape is not None and array.size:
            low, high = float(array.min()), float(array.max())
            if max(-low, high) > 10:  # far beyond what a poor model makes: most likely 0 to 255
                raise ValueError(
                    f"prompt={prompt!r} holds values from {low:g} to {high:g}, but pixels of this model lie"
                    " from 0 to 1; divide them by 255, or give uint8"
                )
        if array.ndim == 2 and array.shape[1] == model.head.features:  # one sequence
            array = array[None]
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is named later
            return torch.from_numpy(array.astype(np.float32))
    if array.dtype.kind == "f" and not np.equal(np.mod(array, 1), 0).all():
        raise ValueError(
            f"prompt={prompt!r} holds fractions or NaN; allowed for this model: whole numbers"
        )
    array = array.astype(np.int64)
    return torch.from_numpy(array[None] if array.ndim == 1 else array)


def read_array(prompt: str) -> "np.ndarray":
    """Returns the numbers in the .npy file of a prompt."""
    import numpy as np

    from vssm.data.files import DAMAGED_NPY

    if not Path(prompt).exists() or Path(prompt).is_dir():
        raise ValueError(f"prompt={prompt!r} is no file; allowed: a .npy file of numbers")
    with Path(prompt).open("rb") as file:
        try:
            array = np.lib.format.read_array(file, allow_pickle=False)
        except DAMAGED_NPY:  # numpy's own words advise to unpickle
            array = None
    if array is None or array.dtype.kind not in "biuf":
        raise ValueError(
            f"prompt={prompt!r} is damaged or holds no numbers; allowed: a .npy file of numbers"
        )
    return array


def write_samples(
    x: "torch.Tensor", prompt: "torch.Tensor | None", meta: "Meta | None", out: Path
) -> None:
    """Writes an array of the samples alone, or a picture or text of what came first and the samples."""
    import torch

    from vssm.data import draw

    if out.suffix == ".npy":
        write_array(x.numpy(), out)
        return
    if meta is None:
        raise ValueError(
            f"out={str(out)!r} needs a run folder that knows its data; allowed here: .npy"
        )
    whole = x if prompt is None else torch.cat([prompt.expand(len(x), *prompt.shape[1:]), x], 1)
    if out.suffix == ".png":
        write_atomically(out, lambda path: draw(meta, whole, path))
        return
    if whole.ndim != 2:
        raise ValueError(
            f"out={str(out)!r} is for text; allowed for data set {meta.name!r}: .npy, .png"
        )
    print(write_texts([meta.decode(tokens) for tokens in whole], out))


def write_array(array: "np.ndarray", out: Path) -> None:
    """Writes a .npy file."""
    import numpy as np

    def save(path: Path) -> None:
        with path.open("wb") as file:
            # To a file itself NumPy writes past Python, and does not see that the last bytes found no room.
            np.save(cast("IO[bytes]", SimpleNamespace(write=file.write)), array, allow_pickle=False)

    write_atomically(out, save)


def write_texts(texts: list[str], out: Path) -> str:
    """Writes texts with a rule between them, and returns them as a terminal may show them."""
    text = "\n---\n".join(texts)
    write_atomically(out, lambda path: path.write_text(text + "\n", encoding="utf-8"))
    return printable(text)
