"""Prepares a run for shipping in vssm/runs/pretrained: `ship_model.py export RUN FOLDER`.

Measure the result with `vssm evaluate`; then `ship_model.py card FOLDER` writes its card again.
"""

import dataclasses
import sys
from pathlib import Path

import torch
import tyro

from vssm.data.storage import read_tensors, write_atomically, write_tensors
from vssm.runs.config import SavedConfig
from vssm.runs.hub import model_card, without_folders

_LIMITS = (
    "The model was trained for minutes, to be small and quick to try: longer training and more "
    "width give better numbers. It knows only sequences like those of its data set. The weights "
    "are rounded to bfloat16, and the metrics are those of the rounded weights."
)
_ONE_SHOT = (
    " Samples in one shot from nothing are worse than completions, and than samples with "
    "`--chunk 1 --recondition`."
)


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


if __name__ == "__main__":
    commands = {"export": export, "card": write_card}
    try:
        options = (tyro.conf.PositionalRequiredArgs,)
        print(tyro.extras.subcommand_cli_from_dict(commands, config=options))
    except ValueError as error:
        sys.exit(f"ship_model.py: {error}")
