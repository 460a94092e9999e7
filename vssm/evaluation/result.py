"""Keeps a run as a result: its scores, how its training went, and a picture of its samples.

| file | content |
| --- | --- |
| `RESULT.json` | `eval.json`, with `epochs`, `train_seconds` and the best validation |
| `RESULT.png` | for images, samples of every way that is asked for, and completed test images |
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vssm.checks import choose_device
from vssm.data import Data, open_data
from vssm.data.show import tiled
from vssm.data.storage import read_object, why_read_only, write_atomically
from vssm.evaluation.parts import fill_by_name
from vssm.evaluation.quality import observed, ways_to_sample
from vssm.models import AnyPart, Model
from vssm.runs.checkpoint import load
from vssm.runs.config import read_config
from vssm.runs.folder import read_log
from vssm.runs.results import write_result
from vssm.sampling.generation import generate

__all__ = ["check_result_path", "draw_grid", "keep_result", "validations"]

_COLUMNS = 16  # of the samples
_ROWS = 3  # of every way to sample, and of completions

Options = Mapping[str, Any]


def check_result_path(path: Path) -> None:
    """Raises, before the work, if a result could not be written or the results page not find it."""
    if path.suffix != ".json":
        raise ValueError(f"result={str(path)!r} is no result; use a file that ends in .json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        blocked = "it is a folder" if path.is_dir() else why_read_only(path.parent)
    except (OSError, ValueError) as error:
        blocked = str(error)
    if blocked:
        raise ValueError(
            f"result={str(path)!r} cannot be written ({blocked}); use a file in a folder of yours"
        )


def keep_result(
    folder: str | Path, path: str | Path, device: str = "auto", data_dir: str | None = None
) -> None:
    """Writes the evaluation of a run to a file of its own, and a picture of samples beside it.

    The samples are drawn on `device`; `data_dir` is where the data files are, if not where they
    were in training.
    """
    folder, path = Path(folder), Path(path)
    check_result_path(path)
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
    options = config.data if data_dir is None else replace(config.data, dir=data_dir)
    data = open_data(options, missing=config.model.known == "any")
    if data.meta.image_shape is not None:
        model = load(folder, choose_device(device)).eval()
        ways = ways_to_sample(model, data.meta.length)  # one shot, in four chunks, step by step
        shown = ("one_shot", f"w{data.meta.length // 4}", "w1")
        ways = [ways[name] for name in shown if name in ways]
        draw_grid(data, model, path.with_suffix(".png"), ways, config.train.seed)
    write_result(path, {**scored, "name": path.stem, "metrics": scored["metrics"] | training})


def validations(folder: Path) -> tuple[dict[str, float | None], dict[str, list[float | None]]]:
    """Returns the best validation of a run, and the bound on log p(x) of every validation.

    A run with `validate_partial` also has the bound of the second half given the first.
    """
    lines = [line for line in read_log(folder) if line["split"] == "valid"]
    for line in lines:
        terms = line["reconstruction"], line["kl"]
        line["elbo"] = None if None in terms else terms[0] - terms[1]
    kept = [line for line in lines if line.get("best")]  # the last of them has the best weights
    names = {"validation_loss": "loss", "validation_elbo": "elbo", "best_epoch": "epoch"}
    facts = {name: kept[-1][own] if kept else None for name, own in names.items()}
    curve = {"epoch": [line["epoch"] for line in lines]}
    curve["validation_elbo"] = _rounded([line["elbo"] for line in lines])
    if any("partial_elbo" in line for line in lines):
        curve["validation_partial_elbo"] = _rounded([line.get("partial_elbo") for line in lines])
    return facts, curve


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 3) for value in values]


@torch.no_grad()
def draw_grid(data: Data, model: Model, path: Path, ways: Sequence[Options], seed: int = 0) -> None:
    """Draws samples pixel by pixel: three rows for each way, and three rows of completions.

    The ways are options of `generate` for samples from nothing. A model with known="any" makes them
    in one pass and in four.
    """
    from matplotlib.image import imsave

    device, split = next(model.parameters()).device, data.test()
    num, length, cut = _ROWS * _COLUMNS, data.meta.length, data.meta.length // 2
    x = split.batch(np.arange(num) * len(split) // num, device)
    prompt, observe = x[:, :cut], observed(model, data.meta.levels)
    if isinstance(model, AnyPart):
        numbers = torch.arange(num, device=device)
        made = [
            fill_by_name(model, data.meta, x, way, numbers, observe, seed)
            for way in ((None, 1), (None, 4), ("prefix", 1))
        ]
    else:
        options = {"num": num, "seed": seed, "observe": observe}
        made = [generate(model, **{"length": length, **options, **way}).x for way in ways]
        rest = generate(model, length=length - cut, prompt=prompt, **options).x
        made.append(torch.cat([prompt, rest], 1))
    images = data.meta.to_image(torch.cat(made)).cpu().numpy()
    write_atomically(path, lambda file: imsave(file, tiled(images, _COLUMNS), format="png"))
