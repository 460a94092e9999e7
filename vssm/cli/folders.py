"""The folder that a name on the command line stands for, and what it says of its data."""

import filecmp
import json
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vssm.data import Meta

__all__ = ["data_meta", "local_folder", "own_copy"]


def local_folder(folder: str) -> Path:
    """Returns a folder on this machine: as given, of a shipped model, or fetched from the hub."""
    from vssm.hub import pull
    from vssm.pretrained import find

    return pull(folder) if folder.startswith("hf://") else find(folder)


def own_copy(folder: Path) -> Path:
    """Returns a folder that may be written to: that of a shipped model is copied first."""
    from vssm.pretrained import find

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
    _, other, missing = filecmp.cmpfiles(shipped, copy, ("config.json", "weights.safetensors"), shallow=False)
    if other or missing:
        raise ValueError(
            f"{str(copy)!r} is there and no copy of the shipped {folder.name!r}; "
            f"allowed: {copy} for that run, or another name for it"
        )
    return copy


def data_meta(folder: Path) -> "Meta | None":
    """Returns what a run folder says of its data; an exported model may say nothing."""
    from vssm.data import Meta

    values = json.loads((folder / "config.json").read_text())
    return Meta.from_json(values["data_meta"]) if "data_meta" in values else None
