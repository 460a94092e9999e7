"""Models that are shipped with the package, each in a folder here, so that they work offline.

    vssm.load("mnist-small")        vssm generate mnist-small --num 64 --out one-shot.png

| file | content |
| --- | --- |
| `config.json` | the model, and the data and settings that it was trained with |
| `weights.safetensors` | its weights in bfloat16; the model computes in float32 |
| `eval.json` | what `vssm evaluate` measured of these very weights |
| `README.md` | the model card |

A file or folder of the same name in the working directory comes first.
"""

import dataclasses
from pathlib import Path

import torch

from vssm.runs.config import SavedConfig
from vssm.runs.hub import model_card, pull, without_folders
from vssm.storage import read_tensors, write_atomically, write_tensors

__all__ = ["export", "find", "names", "write_card"]

FOLDER = Path(__file__).parent
_LIMITS = (
    "The model was trained for minutes, to be small and quick to try: longer training and more "
    "width give better numbers. It knows only sequences like those of its data set. The weights "
    "are rounded to bfloat16, and the metrics are those of the rounded weights."
)
_ONE_SHOT = (
    " Samples in one shot from nothing are worse than completions, and than samples with "
    "`--chunk 1 --recondition`."
)


def names() -> tuple[str, ...]:
    """Returns the names of the shipped models.

    Example:
        >>> all((FOLDER / name / "weights.safetensors").is_file() for name in names())
        True
    """
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/weights.safetensors")))


def find(folder: str | Path) -> Path:
    """Returns the folder of a model: a shipped one by its name, or fetched for "hf://OWNER/NAME".

    Anything else, and whatever exists in the working directory, is returned as it is.

    Example:
        >>> find("my/run")
        PosixPath('my/run')
    """
    if isinstance(folder, str) and folder.startswith("hf://"):
        return pull(folder)
    path = Path(folder)
    if isinstance(folder, str) and folder in names() and not path.exists():
        return FOLDER / folder
    return path


def export(run: str | Path, folder: str | Path) -> Path:
    """Prepares a run for shipping: bfloat16 weights, a config without folders, a model card.

    Arguments:
        run: A run folder.
        folder: Where the model goes; its last part is the name.

    Returns:
        `folder`. Measure it with `vssm evaluate`, then call `write_card` again.
    """
    folder = Path(folder)
    if (folder / "eval.json").exists():
        raise ValueError(f"folder={str(folder)!r} has metrics of other weights; use a new folder")
    config = SavedConfig.read(run)
    config.run()  # raises unless it is a run
    tensors, _ = read_tensors(Path(run) / "weights.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    write_tensors(folder / "weights.safetensors", rounded)
    values = without_folders(config.values)
    dataclasses.replace(config, path=folder / "config.json", values=values).write()
    write_card(folder)
    return folder


def write_card(folder: str | Path) -> Path:
    """Writes README.md: data, settings, metrics if there is an eval.json, the command, limits.

    Arguments:
        folder: A folder that `export` made.

    Returns:
        The path of the card.
    """
    folder = Path(folder)
    model = SavedConfig.read(folder).model()
    poor = model.kind in ("tvae", "vssm") and model.levels == 1
    card = model_card(folder, folder.resolve().name, _LIMITS + _ONE_SHOT * poor)
    write_atomically(folder / "README.md", lambda path: path.write_text(card))
    return folder / "README.md"
