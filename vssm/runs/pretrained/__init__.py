"""Models that are shipped with the package, each in a folder here, so that they work offline.

    vssm.load("mnist-best-small")        vssm generate mnist-best-small --num 64 --out x.png

Weights are stored in bfloat16; the model computes in float32. `eval.json` is what `vssm evaluate`
measured of these very weights, and README.md is the model card. The wheel holds
`mnist-best-small` and `mnist-any-small`; a clone also has `mnist-small`, the paper's own model,
and `mnist-small-ssm`.
"""

from pathlib import Path

from vssm.runs.hub import pull

__all__ = ["find", "names"]

FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """Returns the names of the shipped models.

    Example:
        >>> all((FOLDER / name / "weights.safetensors").is_file() for name in names())
        True
    """
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/weights.safetensors")))


def find(folder: str | Path) -> Path:
    """Returns the folder of a model: a shipped one by its name, or fetched for "hf://OWNER/NAME".

    Anything else is returned as it is, also what exists in the working directory.

    Example:
        >>> find("my/run")
        PosixPath('my/run')
    """
    if isinstance(folder, str) and folder.startswith("hf://"):
        return pull(folder)
    if not str(folder):  # which Path takes for the working directory
        raise ValueError("the name of a run folder is empty; give a run folder or a shipped model")
    path = Path(folder)
    if isinstance(folder, str) and folder in names() and not path.exists():
        return FOLDER / folder
    return path
