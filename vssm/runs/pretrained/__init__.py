"""Models that come with the package, each a folder here, so that real samples can be drawn offline.

    vssm.load("mnist-small")        vssm generate mnist-small --num 64 --out one-shot.png

| file | what |
| --- | --- |
| `config.json` | the model, and the data and settings it was trained with |
| `weights.safetensors` | its weights in bfloat16; they are computed with in float32 |
| `eval.json` | what `vssm evaluate` measured of these very weights |
| `README.md` | the model card |

A file or folder of the same name where the program runs comes first: what a user made is never hidden.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vssm.runs.hub import model_card, pull, without_folders
from vssm.storage import with_checksum, write_atomically

__all__ = ["export", "find", "names", "write_card"]

FOLDER = Path(__file__).parent
_LIMITS = (
    "Trained for minutes, to be small and quick to try: longer training and more width give better numbers. "
    "It knows only sequences like those of its data set. The weights are rounded to bfloat16; metrics are "
    "those of the rounded weights."
)
_ONE_SHOT = (
    " Samples in one shot from nothing are worse than completions, and than samples with "
    "`--chunk 1 --recondition`."
)


def names() -> tuple[str, ...]:
    """Returns the names of the models that are there.

    Example:
        >>> all((FOLDER / name / "weights.safetensors").is_file() for name in names())
        True
    """
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/weights.safetensors")))


def find(folder: str | Path) -> Path:
    """Returns the folder that a model is in: of a shipped one for its name, fetched for "hf://OWNER/NAME".

    Anything else, or what exists here, as it is.

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
    """Makes a model for shipping of a run: weights in bfloat16, a config without folders, a model card.

    Arguments:
        run: A run folder.
        folder: Where it goes; its last part is the name.

    Returns:
        `folder`. Measure it with `vssm evaluate`, then call `write_card` again.
    """
    run, folder = Path(run), Path(folder)
    for file in ("config.json", "weights.safetensors"):
        if not (run / file).is_file():
            raise ValueError(f"run={str(run)!r} has no {file}; allowed: the folder of a run")
    if (folder / "eval.json").exists():
        raise ValueError(
            f"folder={str(folder)!r} has metrics of other weights; allowed: a new folder"
        )
    try:
        tensors = load_file(run / "weights.safetensors")
        values = json.loads((run / "config.json").read_bytes())
        values |= without_folders({"data": dict(values["data"])})
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"run={str(run)!r} is damaged: {error}; allowed: the folder of a run"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    text = json.dumps(values, indent=2) + "\n"
    metadata = with_checksum(rounded, {})
    write_atomically(
        folder / "weights.safetensors", lambda path: save_file(rounded, path, metadata)
    )
    write_atomically(folder / "config.json", lambda path: path.write_text(text))
    write_card(folder)
    return folder


def write_card(folder: str | Path) -> Path:
    """Writes README.md: data, settings, metrics if there is an eval.json, the command, limits, licence.

    Arguments:
        folder: A folder that `export` made.

    Returns:
        The path of the card.
    """
    folder = Path(folder)
    name = folder.resolve().name
    card = model_card(folder, name).replace(f"hf://{name}", name)
    model = json.loads((folder / "config.json").read_bytes())["model"]
    poor = model["kind"] in ("tvae", "vssm") and model.get("levels", 1) == 1
    limits = _LIMITS + _ONE_SHOT * poor
    text = card.replace("\n## Licence\n", f"\n## Limits\n\n{limits}\n\n## Licence\n")
    assert limits in text
    write_atomically(folder / "README.md", lambda path: path.write_text(text))
    return folder / "README.md"
