"""The folder that a name on the command line stands for."""

import filecmp
import secrets
import shutil
from pathlib import Path

__all__ = ["local_folder", "own_copy"]


def local_folder(folder: str) -> Path:
    """Returns a folder on this machine: as given, of a shipped model, or fetched from the hub."""
    from vssm.runs.pretrained import find

    return find(folder)


def own_copy(folder: Path) -> Path:
    """Returns a folder that may be written to: that of a shipped model is copied first."""
    from vssm.runs.pretrained import find

    shipped = find(str(folder))
    if shipped == folder:
        return folder
    copy = Path("runs") / folder.name
    if not copy.exists():
        begun = copy.with_name(f".{copy.name}.{secrets.token_hex(6)}.tmp")
        try:
            shutil.copytree(shipped, begun)
            begun.rename(copy)
        finally:
            shutil.rmtree(begun, ignore_errors=True)
    _, other, missing = filecmp.cmpfiles(
        shipped, copy, ("config.json", "weights.safetensors"), shallow=False
    )
    if other or missing:
        raise ValueError(
            f"{str(copy)!r} is there and no copy of the shipped {folder.name!r}; "
            f"allowed: {copy} for that run, or another name for it"
        )
    return copy
