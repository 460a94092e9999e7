"""The paper's experiments, one piece at a time: learning rates, seeds, scores, samples, figures.

| file | what |
| --- | --- |
| `RESULTS/grid/DATA_KIND_lrRATE.json` | a run of the grid: `validation_loss` chooses the rate |
| `RESULTS/finals/DATA_KIND_lrRATE.json` | one of its best rates, trained to the end |
| `RESULTS/DATA_KIND_seedN.json` | a run with the chosen rate, scored on the test set; its `curve` |
| `RESULTS/DATA_KIND_seedN.png` | its samples: three unconditional rows, three completions |
| `OUT/grid/`, `OUT/runs/` | the run folders |
| `OUT/classifier_DATA.safetensors` | the classifier of the Fréchet distances, trained once |
| `OUT/figure.png`, `OUT/samples_DATA.png` | the paper's figures, drawn from RESULTS |

A piece whose JSON is in RESULTS is done, whatever OUT holds. A run that was stopped continues from
its last checkpoint. So the command can be killed at any moment and given again, on any machine.
Checkpoints of runs that have ended are deleted: at the paper's scale thirty runs would take 70 GB.

Several calls may share one OUT, for other kinds or seeds: their runs are different folders, and a
run that another process trains is refused.
"""

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vssm.checks import check_number, choose_device
from vssm.config import RunConfig, TrainConfig
from vssm.data import DataConfig, open_data
from vssm.evaluation.result import draw_grid, validations
from vssm.evaluation.scores import evaluate_run
from vssm.lab.experiments import draw_figure, draw_samples, scored_runs
from vssm.lab.scale import Scale, choose_scale, config_of, epochs_of
from vssm.lab.sweep import run_all, run_name
from vssm.runs.checkpoint import load
from vssm.runs.folder import FREE, read_config
from vssm.runs.results import result, write_result
from vssm.training.progress import Progress, choose_progress

__all__ = ["difference", "folders", "reproduce"]

_FINAL_METRICS = (
    "validation_loss",
    "validation_elbo",
    "best_epoch",
    "train_seconds",
    "epochs",
    "learning_rate",
)


@dataclass(frozen=True)
class _Plan:
    """What every piece needs to know; it is sent to the machines of a cluster."""

    data: str
    results: Path
    options: str
    """The options on the command line that change the numbers."""
    scale: Scale
    classifier: Path
    """Shared by the Fréchet distances of all runs."""
    deadline: float
    """On the monotonic clock of this process."""

    def piece(self, config: RunConfig, stage: str) -> Path:
        """Returns the file of a piece."""
        kind, options = config.model.kind, config.train
        if stage == "seeds":
            return self.results / f"{self.data}_{kind}_seed{options.seed}.json"
        return self.results / stage / f"{self.data}_{kind}_lr{options.learning_rate!r}.json"

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise _OutOfTime


class _OutOfTime(BaseException):
    """Ends a run as Ctrl-C does, so that nothing records it as an error."""


def reproduce(
    data: str,
    scale: str = "paper",
    out: str | Path | None = None,
    results: str | Path | None = None,
    kinds: Sequence[str] = ("transformer", "ssm", "vssm"),
    learning_rates: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    epochs: float | None = None,
    grid_epochs: float | None = None,
    finalists: int = 1,
    minutes: float | None = None,
    ray_address: str | None = None,
    data_dir: str | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Does the pieces of the paper's experiments that are not done yet, and draws its figures.

    Arguments:
        data: "mnist" or "cifar10"; with scale "small" also "digits".
        scale: "paper", or "small" for minutes on a CPU.
        out: Where run folders and figures go; by default runs/reproduce-DATA, or
            runs/reproduce-DATA-small.
        results: Where results go; results/paper by default, OUT/results with scale "small".
        kinds: The models.
        learning_rates: The grid, the paper's by default; a single rate is used as it is.
        seeds: The seeds that are trained with the best rate; the grid has seed 0.
        epochs: Passes over the training set, if not the scale's (200 for the paper).
        grid_epochs: Passes of the grid's runs; at the paper's scale `epochs` by default.
        finalists: How many of the best rates of a shorter grid are trained to the end before one is
            chosen, since some runs go wrong late.
        minutes: Stops with a checkpoint after so long; the same call continues.
        ray_address: A Ray cluster that sees `out` and `results`, as in `vssm.lab.sweep`.
        data_dir: Folder with the data; else $VSSM_DATA; else the user cache.
        progress: What shows the progress; by default a bar on a terminal, lines elsewhere.

    Returns:
        The runs that there was no time for, of the first stage that is not done (grid, finals,
        seeds); an empty list when all is done.
    """
    start = time.monotonic()
    chosen = choose_scale(data, scale, kinds, learning_rates, seeds, epochs, grid_epochs)
    if minutes is not None:
        check_number("minutes", minutes, 0, above=True)
        if ray_address is not None:
            raise ValueError("minutes does not go with ray_address; leave out one of them")
    whole = chosen.grid_epochs == chosen.epochs
    if not 1 <= finalists <= (1 if whole else len(chosen.learning_rates)):
        reason = "every rate is trained to the end" if whole else "more than the grid has rates"
        raise ValueError(f"finalists={finalists!r} is not allowed: {reason}")
    out, results = folders(data, scale, out, results)
    words = [
        ("--scale", scale if scale != "paper" else None),
        ("--learning-rates", learning_rates and " ".join(f"{rate:g}" for rate in learning_rates)),
        ("--epochs", epochs and f"{epochs:g}"),
        ("--grid-epochs", grid_epochs and f"{grid_epochs:g}"),
        ("--finalists", finalists if finalists > 1 else None),
    ]
    plan = _Plan(
        data,
        results.resolve(),
        "".join(f" {option} {value}" for option, value in words if value),
        chosen,
        out.resolve() / f"classifier_{data}.safetensors",
        math.inf if minutes is None else start + 60 * minutes,
    )
    show = progress or choose_progress()
    # Samples are drawn at the end, from the best weights.
    options = replace(chosen.base.train, samples=0, validate_partial=True)
    base = replace(chosen.base, data=DataConfig(name=data, dir=data_dir), train=options)

    def run(
        stage: str, rates: Mapping[str, Sequence[float]], epochs: float, folder: str
    ) -> list[str]:
        """Trains and records the runs of a stage; returns those that there was no time for."""
        configs = {
            run_name(kind, rate, seed): config_of(base, epochs, kind, rate, seed)
            for seed in (chosen.seeds if stage == "seeds" else (0,))  # each kind once before twice
            for kind in kinds
            for rate in rates[kind]
        }
        if stage == "finals":
            for config in configs.values():
                _reuse_scored(plan, config)
        left = _missing(plan, configs, stage)
        for name in configs.keys() - left.keys():  # it may have been killed before it did this
            shutil.rmtree(out / folder / name / "checkpoint", ignore_errors=True)
        if len(left) < len(configs):
            num = len(configs) - len(left)
            show.message(
                f"{stage}: {num} of {len(configs)} are in {results} already and not run again"
            )
        try:
            _run(left, out / folder, plan, stage, ray_address, show)
        except _OutOfTime:
            spent = (time.monotonic() - start) / 60
            show.message(f"stopped after {spent:.1f} minutes; the same call continues")
        return list(_missing(plan, configs, stage))

    rates: dict[str, Sequence[float]] = dict.fromkeys(kinds, chosen.learning_rates)
    out.mkdir(parents=True, exist_ok=True)
    try:
        if len(chosen.learning_rates) > 1:
            if left := run("grid", rates, chosen.grid_epochs, "runs" if whole else "grid"):
                return left
            rates = {kind: _ranked(plan, kind, rates[kind], "grid")[:finalists] for kind in kinds}
        if finalists > 1:
            if left := run("finals", rates, chosen.epochs, "runs"):
                return left
            rates = {kind: _ranked(plan, kind, rates[kind], "finals")[:1] for kind in kinds}
        return run("seeds", rates, chosen.epochs, "runs")
    finally:
        if scored_runs(plan.results, data):
            draw_figure(plan.results, out / "figure.png", [data])
            draw_samples(plan.results, out / f"samples_{data}.png", [data])


def folders(
    data: str, scale: str, out: str | Path | None = None, results: str | Path | None = None
) -> tuple[Path, Path]:
    """Returns the folders of runs and of results, as given or the usual ones.

    >>> [str(folder) for folder in folders("mnist", "small")]
    ['runs/reproduce-mnist-small', 'runs/reproduce-mnist-small/results']
    """
    out = Path(out or f"runs/reproduce-{data}{'-small' if scale == 'small' else ''}")
    return out, Path(results or ("results/paper" if scale == "paper" else out / "results"))


def _run(
    configs: Mapping[str, RunConfig],
    folder: Path,
    plan: _Plan,
    stage: str,
    ray_address: str | None,
    show: Progress,
) -> None:
    """Trains and records pieces; a run of the grid or the finals that diverged is a result."""
    if not configs:
        return
    plan.check_time()
    (plan.results / ("" if stage == "seeds" else stage)).mkdir(parents=True, exist_ok=True)
    if ray_address is None:
        open_data(next(iter(configs.values())).data)  # an error here would stop every run
    finish: Callable[[Path], None] = partial(_record_rate, plan, stage)
    if stage == "seeds":
        finish = partial(_record_scores, plan, None if ray_address is not None else show)
    until = _Until(show, plan.deadline)
    rows = run_all(configs, folder.resolve(), ray_address, until, finish=finish)
    failed = [row for row in rows if row["status"] == "failed"]
    diverged = [row for row in failed if stage != "seeds" and "not finite" in row["reason"]]
    for row in diverged:
        metrics = {"validation_loss": None, "train_seconds": row["seconds"]}
        _write_rate(plan, stage, configs[row["folder"]], metrics)
        shutil.rmtree(folder / row["folder"] / "checkpoint", ignore_errors=True)
    others = [f"{row['folder']}: {row['reason']}" for row in failed if row not in diverged]
    if others:
        raise ValueError(f"{len(others)} of {len(rows)} runs failed; {others[0]}")


def _missing(plan: _Plan, configs: Mapping[str, RunConfig], stage: str) -> dict[str, RunConfig]:
    """Returns the runs without a result; raises if results that belong together differ."""
    for config in configs.values():
        kept = {plan.piece(config, stage): config}
        if stage == "seeds":  # the figure shows all seeds together
            for path in plan.results.glob(f"{plan.data}_{config.model.kind}_seed*.json"):
                seed = path.stem.partition("seed")[2]
                if seed.isdecimal():
                    kept[path] = replace(config, train=replace(config.train, seed=int(seed)))
        for path, same in kept.items():
            metric = "log_likelihood" if stage == "seeds" else "validation_loss"
            if path.exists() and (found := difference(path, same, metric)):
                raise ValueError(f"{found}; use the same settings, or another results folder")
    return {name: c for name, c in configs.items() if not plan.piece(c, stage).exists()}


def difference(path: Path, config: RunConfig, metric: str) -> str | None:
    """Returns how the settings of a result differ from a run, or None if they are the same.

    Raises `ValueError` for a result that is damaged or lacks the metric.
    """
    try:
        content = json.loads(path.read_bytes())
        found = content["metrics"][metric]
        parts = {part: content["config"][part] for part in ("data", "model", "train")}
        saved = RunConfig.from_dict(parts)
        if found is not None and not math.isfinite(found):  # a run that diverged has null
            raise ValueError(f"its {metric} is {found}")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}; remove it") from None
    if saved.data.name == config.data.name and epochs_of(config) != epochs_of(saved):
        return f"epochs={epochs_of(config):g} differs from {epochs_of(saved):g} of {str(path)!r}"
    given, kept = _plain(config), _plain(saved)
    for part in given:
        for key, value in given[part].items():
            if value != kept[part][key] and key != "validate_partial":
                return f"{part}.{key}={value!r} differs from {kept[part][key]!r} of {str(path)!r}"
    return None


def _plain(config: RunConfig) -> dict[str, Any]:
    """Returns the settings without those that do not change the numbers."""
    usual = TrainConfig()
    free = [key.removeprefix("train.") for key in FREE if key.startswith("train.")]
    fixed = {name: getattr(usual, name) for name in free if name != "validate_partial"}
    config = replace(
        config, data=replace(config.data, dir=None), train=replace(config.train, **fixed)
    )
    values = dataclasses.asdict(config)
    return {part: values[part] for part in ("data", "model", "train")}


def _reuse_scored(plan: _Plan, config: RunConfig) -> None:
    """Makes a scored run of the same settings a result of the finals: no run is trained twice."""
    path, scored = plan.piece(config, "finals"), plan.piece(config, "seeds")
    if path.exists() or not scored.exists() or difference(scored, config, "validation_loss"):
        return
    content = json.loads(scored.read_bytes())
    metrics = {name: content["metrics"].get(name) for name in _FINAL_METRICS}
    content = {key: value for key, value in content.items() if key != "curve"}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_result(path, {**content, "name": path.stem, "config": _plain(config), "metrics": metrics})


def _ranked(plan: _Plan, kind: str, rates: Sequence[float], stage: str) -> list[float]:
    """Returns the rates that did not diverge, the lowest validation loss first."""
    losses = {}
    for rate in rates:
        path = plan.results / stage / f"{plan.data}_{kind}_lr{rate!r}.json"
        losses[rate] = json.loads(path.read_bytes())["metrics"]["validation_loss"]
    finite = {rate: loss for rate, loss in losses.items() if loss is not None}
    if not finite:
        raise ValueError(
            f"kind={kind!r} diverged at every learning rate of {tuple(rates)}; use lower"
        )
    return sorted(finite, key=lambda rate: finite[rate])


def _record_rate(plan: _Plan, stage: str, folder: Path) -> None:
    """Keeps the validation loss of a run of the grid or the finals."""
    best, _ = validations(folder)
    seconds = json.loads((folder / "meta.json").read_bytes())["seconds"]
    _write_rate(plan, stage, read_config(folder), {**best, "train_seconds": seconds})
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)


def _write_rate(
    plan: _Plan, stage: str, config: RunConfig, metrics: dict[str, float | None]
) -> None:
    metrics = {**metrics, "epochs": epochs_of(config), "learning_rate": config.train.learning_rate}
    path = plan.piece(config, stage)
    command = f"vssm reproduce {plan.data}{plan.options} --kinds {config.model.kind}"
    write_result(path, result(path.stem, command, _plain(config), metrics))


def _record_scores(plan: _Plan, show: Progress | None, folder: Path) -> None:
    """Scores a run on the test set and draws samples; writes the result last: it means done."""
    config = read_config(folder)
    path = plan.piece(config, "seeds")
    if path.exists():
        return
    if show is not None:
        show.message(f"scoring {folder.name} on the test set")

    def check_time(stage: str = "", done: int = 0, total: int = 0) -> None:
        # Likelihoods continue at any sequence. Other stages would start again, so they are not
        # cut in two.
        if not done or stage.startswith("likelihoods"):
            plan.check_time()

    check_time()
    scored = evaluate_run(
        folder,
        num_samples=plan.scale.num_samples,
        max_sequences=plan.scale.max_sequences,
        num_images=plan.scale.num_images,
        particles=config.model.kind in ("tvae", "vrnn", "vssm"),
        device=config.train.device,
        classifier=plan.classifier,
        progress=check_time,
    )
    model = load(folder, choose_device(config.train.device)).eval()
    draw_grid(open_data(config.data), model, path.with_suffix(".png"), [{}], config.train.seed)
    best, curve = validations(folder)
    metrics = {
        **scored["metrics"],
        **best,
        "epochs": epochs_of(config),
        "train_seconds": json.loads((folder / "meta.json").read_bytes())["seconds"],
        "learning_rate": config.train.learning_rate,
    }
    which = f"--kinds {config.model.kind} --seeds {config.train.seed}"
    command = f"vssm reproduce {plan.data}{plan.options} {which}"
    settings = {**_plain(config), "evaluate": scored["config"]["evaluate"]}
    write_result(path, {**result(path.stem, command, settings, metrics), "curve": curve})
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)


class _Until(Progress):
    """Shows the progress of a training, and ends it with a checkpoint after a deadline."""

    def __init__(self, shown: Progress, deadline: float) -> None:
        self._shown, self._deadline = shown, deadline
        self._saved = False
        self.line, self.message, self.close = shown.line, shown.message, shown.close

    def start(self, step: int, total: int) -> None:
        self._saved = False
        if time.monotonic() > self._deadline:
            raise _OutOfTime
        self._shown.start(step, total)

    def step(self, step: int) -> None:
        self._shown.step(step)
        if self._saved:
            raise _OutOfTime

    def wants_checkpoint(self) -> bool:
        self._saved = time.monotonic() > self._deadline
        return self._saved
