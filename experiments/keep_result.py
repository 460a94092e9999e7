"""Keeps a run as a result: its scores, how its training went, and a picture of its samples.

    vssm evaluate RUN --dials
    python experiments/keep_result.py RUN results/quality/DATA_NAME.json [DEVICE]

The JSON file is the eval.json of the run with `epochs`, `train_seconds` and the best validation.
Beside it, for images, is a PNG file: samples in one shot, in four chunks and step by step, and
completed test images. `make docs` shows both in the section "Better than the paper".
"""

import sys
from pathlib import Path
from typing import Any

from vssm.checks import choose_device
from vssm.data import open_data
from vssm.data.storage import read_object
from vssm.evaluation.quality import Work, draw_grid, ways_to_sample
from vssm.evaluation.result import validations
from vssm.runs.checkpoint import load
from vssm.runs.config import read_config
from vssm.runs.results import write_result


def keep_result(folder: str | Path, path: str | Path, device: str = "auto") -> None:
    """Writes the evaluation of a run to a file of its own, and a picture of samples beside it."""
    folder, path = Path(folder), Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (folder / "eval.json").is_file():
        raise ValueError(
            f"{str(folder)!r} has no eval.json; measure the run first with vssm evaluate"
        )
    scored = read_object(folder / "eval.json")
    config = read_config(folder)
    training: dict[str, Any] = {"learning_rate": config.train.learning_rate}
    if (folder / "meta.json").is_file():  # a shipped model has neither this file nor a log
        training["train_seconds"] = read_object(folder / "meta.json").get("seconds")
    if (folder / "log.jsonl").is_file():
        best, curve = validations(folder)
        training |= {**best, "epochs": curve["epoch"][-1] if curve["epoch"] else None}
    any_part = config.model.known == "any"
    data = open_data(config.data, missing=any_part)
    if data.meta.image_shape is not None:
        where, length = choose_device(device), data.meta.length
        model = load(folder, where).eval()
        ways = ways_to_sample(model, length, curves=any_part)
        shown = ("one_shot", f"w{length // 4}", "w1", "s4")
        shown = [ways[name] for name in shown if name in ways]
        work = Work(model, data, data.test(), where)
        draw_grid(work, path.with_suffix(".png"), shown, config.train.seed)
    write_result(path, {**scored, "name": path.stem, "metrics": scored["metrics"] | training})


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python experiments/keep_result.py RUN RESULT.json [DEVICE]")
    keep_result(*sys.argv[1:])
    print(f"kept: {sys.argv[2]}")
