"""The paper's experiments, one piece at a time: learning rates, seeds, scores, samples, figures.

| file | what |
| --- | --- |
| `RESULTS/grid/DATA_KIND_lrRATE.json` | a run of the grid: `validation_loss` chooses the rate |
| `RESULTS/finals/DATA_KIND_lrRATE.json` | one of its best rates, trained to the end |
| `RESULTS/DATA_KIND_seedN.json` | a run with the chosen rate, scored on the test set; its `curve` |
| `RESULTS/DATA_KIND_seedN.png` | its samples: three unconditional rows, three completions |
| `OUT/grid/`, `OUT/runs/` | the run folders |
| `OUT/figure.png` | the paper's figure, drawn from RESULTS |

A piece whose JSON is in RESULTS is done, whatever OUT holds; its checkpoints are deleted, since at
the paper's scale thirty runs would take 70 GB. Other runs continue, as those of a sweep do. So
the command can be killed at any moment and given again, on any machine. Several calls may share one
OUT, for other kinds or seeds: a run that another process trains is refused.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, Suppress, arg

from vssm.checks import check_choice, check_number, choose_device
from vssm.config import PRESETS, ModelConfig, RunConfig, TrainConfig
from vssm.data import DataConfig, open_data
from vssm.data.storage import read_object
from vssm.evaluation.quality import Work, draw_grid
from vssm.evaluation.result import validations
from vssm.evaluation.scores import evaluate_run
from vssm.lab.bench.measure import command_line
from vssm.lab.experiments import draw_figure, scored_runs, summary
from vssm.lab.sweep import LEARNING_RATES, check_grid, grid_configs, run_grid
from vssm.runs.checkpoint import load
from vssm.runs.config import read_config
from vssm.runs.folder import differing
from vssm.runs.results import result, write_result
from vssm.training.progress import Progress, choose_progress

TRAINING_SETS = {"mnist": 54_000, "cifar10": 45_000, "digits": 1_294}  # without validation
Rates = dict[str, Sequence[float]]
_FEATURES = {"mnist": 28, "cifar10": 96, "digits": 8}


@dataclass(frozen=True)
class Scale:
    """The run, how long it trains, and how it is scored; the paper's by default."""

    base: RunConfig
    epochs: float = 200
    grid_epochs: float = math.inf
    """A grid trains no longer than the runs."""
    learning_rates: tuple[float, ...] = LEARNING_RATES
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    num_samples: int = 100
    max_sequences: int | None = None
    num_images: int = 10_000


def reproduce(
    data: Positional[Annotated[str, arg(metavar="DATA")]],
    scale: str = "paper",
    out: Path | None = None,
    results: Path | None = None,
    kinds: tuple[str, ...] = ("transformer", "ssm", "vssm"),
    learning_rates: tuple[float, ...] | None = None,
    seeds: tuple[int, ...] | None = None,
    epochs: float | None = None,
    grid_epochs: float | None = None,
    finalists: int = 1,
    data_dir: str | None = None,
    progress: Suppress[Progress | None] = None,
) -> None:
    """Repeats the paper's experiments; skips finished ones.

    Arguments:
        data: The data set: mnist, cifar10, or digits (small only).
        scale: paper, or small, which takes minutes on a CPU.
        out: The folder for runs and figures; runs/reproduce-DATA by default, or
            runs/reproduce-DATA-small.
        results: The folder for results: results/paper by default, OUT/results at the small scale.
        kinds: The models; tvae, rnn and vrnn are available too.
        learning_rates: The grid, the paper's by default; a single rate is used without a search.
        seeds: The seeds that are trained with the best rate, 0 to 4 by default (0 at the small
            scale); the grid has seed 0.
        epochs: Passes over the training set, 200 by default.
        grid_epochs: Passes over the training set for the runs of the grid, if fewer.
        finalists: With a shorter grid, how many of its best rates are trained to the end before one
            is chosen, because some runs fail late.
        data_dir: Folder with the data; else $VSSM_DATA; else the user cache.
        progress: What shows the progress; by default a bar on a terminal, lines elsewhere.
    """
    options = {
        "scale": scale,
        "learning_rates": learning_rates,
        "epochs": epochs,
        "grid_epochs": grid_epochs,
        "finalists": finalists,
    }
    check_choice("data", data, tuple(TRAINING_SETS))
    check_choice("scale", scale, ("paper", "small"))
    if scale == "paper" and data == "digits":
        raise ValueError("scale='paper' has no data='digits'; use scale='small'")
    usual = _small(data) if scale == "small" else Scale(PRESETS[f"paper-{data}"])
    epochs = usual.epochs if epochs is None else epochs
    check_number("epochs", epochs, 0, above=True)
    grid_epochs = min(epochs, usual.grid_epochs) if grid_epochs is None else grid_epochs
    check_number("grid_epochs", grid_epochs, 0, above=True)
    if grid_epochs > epochs:
        raise ValueError(f"grid_epochs={grid_epochs:g} is more than the {epochs:g} of the runs")
    rates = usual.learning_rates if learning_rates is None else tuple(map(float, learning_rates))
    seeds = usual.seeds if seeds is None else tuple(seeds)
    grid_configs(usual.base, kinds, rates, seeds)  # checks them
    whole = grid_epochs == epochs
    if not 1 <= finalists <= (1 if whole else len(rates)):
        reason = "every rate is trained to the end" if whole else "more than the grid has rates"
        raise ValueError(f"finalists={finalists!r} is not allowed: {reason}")

    out = Path(out or f"runs/reproduce-{data}{'-small' if scale == 'small' else ''}")
    results = Path(results or ("results/paper" if scale == "paper" else out / "results"))
    # Samples are drawn at the end, from the best weights.
    training = replace(usual.base.train, samples=0, validate_partial=True)
    base = replace(usual.base, data=DataConfig(name=data, dir=data_dir), train=training)
    plan = _Plan(data, results.resolve(), options, usual, progress or choose_progress())

    def run(stage: str, rates: Rates, epochs: float, folder: str, seeds: Sequence[int]) -> None:
        long, configs = _with_epochs(base, epochs), {}
        for seed in seeds:  # each kind once before any twice
            for kind in kinds:
                configs |= grid_configs(long, [kind], rates[kind], [seed])
        plan.run(stage, configs, (out / folder).resolve())

    chosen: Rates = dict.fromkeys(kinds, rates)
    out.mkdir(parents=True, exist_ok=True)
    try:
        if len(rates) > 1:
            run("grid", chosen, grid_epochs, "runs" if whole else "grid", [0])
            chosen = {kind: plan.best("grid", kind, rates)[:finalists] for kind in kinds}
        if finalists > 1:
            run("finals", chosen, epochs, "runs", [0])
            chosen = {kind: plan.best("finals", kind, chosen[kind])[:1] for kind in kinds}
        run("seeds", chosen, epochs, "runs", seeds)
    finally:
        if scored_runs(plan.results, data):
            (out / "figure.png").write_bytes(draw_figure(plan.results, [data]))
    figure = f"figure: {out / 'figure.png'}"
    plan.show.message(f"{summary(plan.results, data)}\nresults: {results}\n{figure}")


@dataclass(frozen=True)
class _Plan:
    """What every piece needs to know."""

    data: str
    results: Path
    options: Mapping[str, Any]
    """Those that were given and change the numbers."""
    scale: Scale
    show: Progress

    def piece(self, stage: str, config: RunConfig) -> Path:
        """Returns the result file of a run."""
        kind, options = config.model.kind, config.train
        if stage == "seeds":
            return self.results / f"{self.data}_{kind}_seed{options.seed}.json"
        return self.results / stage / f"{self.data}_{kind}_lr{options.learning_rate!r}.json"

    def run(self, stage: str, configs: Mapping[str, RunConfig], folder: Path) -> None:
        """Trains and records the runs of a stage that have no result yet."""
        self.check(stage, configs)
        left = {n: c for n, c in configs.items() if not self.piece(stage, c).exists()}
        for name in configs.keys() - left.keys():  # it may have been killed before it did this
            shutil.rmtree(folder / name / "checkpoint", ignore_errors=True)
        if len(left) < len(configs):
            known = f"{len(configs) - len(left)} of {len(configs)}"
            self.show.message(f"{stage}: {known} are in {self.results} already and not run again")
        if not left:
            return
        check_grid(left, folder)
        open_data(next(iter(left.values())).data)  # an error here would stop every run
        failed = []
        for row in run_grid(left, folder, self.show, partial(self.record, stage)):
            name, reason = row["folder"], row["reason"]
            if reason is not None and stage != "seeds" and "not finite" in reason:
                # A run of the grid or the finals that diverged is a result.
                metrics = {"validation_loss": None, "train_seconds": row["seconds"]}
                self.write(stage, left[name], metrics)
                shutil.rmtree(folder / name / "checkpoint", ignore_errors=True)
            elif reason is not None:
                failed.append(f"{name}: {reason}")
        if failed:
            raise ValueError(f"{len(failed)} of {len(left)} runs failed; {failed[0]}")

    def check(self, stage: str, configs: Mapping[str, RunConfig]) -> None:
        """Raises if a result of these runs, or of other seeds beside them, has other settings."""
        metric = "log_likelihood" if stage == "seeds" else "validation_loss"
        for config in configs.values():
            paths = [self.piece(stage, config)]
            if stage == "seeds":  # the figure shows all seeds together
                others = f"{self.data}_{config.model.kind}_seed[0-9]*.json"
                paths += sorted(self.results.glob(others))
            for path in filter(Path.exists, paths):
                if found := difference(path, config, metric):
                    raise ValueError(f"{found}; use the same settings, or another results folder")

    def best(self, stage: str, kind: str, rates: Sequence[float]) -> list[float]:
        """Returns the rates that did not diverge, the lowest validation loss first."""
        paths = (self.results / stage / f"{self.data}_{kind}_lr{rate!r}.json" for rate in rates)
        metrics = [read_object(path)["metrics"] for path in paths]
        losses = {each["learning_rate"]: each["validation_loss"] for each in metrics}
        finite = {rate: loss for rate, loss in losses.items() if loss is not None}
        if not finite:
            raise ValueError(
                f"kind={kind!r} diverged at every learning rate of {tuple(rates)}; use lower"
            )
        return sorted(finite, key=finite.__getitem__)

    def record(self, stage: str, folder: Path) -> None:
        """Writes the result of a run that has ended, which means done, and frees the disk."""
        config = read_config(folder)
        if self.piece(stage, config).exists():
            return
        metrics, curve = validations(folder)
        metrics["train_seconds"] = read_object(folder / "meta.json")["seconds"]
        if stage == "seeds":
            scored = self.score(folder, config)
            both = {**scored["metrics"], **metrics}
            self.write(stage, config, both, config=scored["config"], curve=curve)
        else:
            self.write(stage, config, metrics)
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)

    def score(self, folder: Path, config: RunConfig) -> dict[str, Any]:
        """Scores a run on the test set, and draws its samples."""
        scored = evaluate_run(
            folder,
            num_samples=self.scale.num_samples,
            max_sequences=self.scale.max_sequences,
            num_images=self.scale.num_images,
            particles=config.model.kind in ("tvae", "vrnn", "vssm"),
            device=config.train.device,
        )
        device, data = choose_device(config.train.device), open_data(config.data)
        work = Work(load(folder, device).eval(), data, data.test(), device)
        picture = self.piece("seeds", config).with_suffix(".png")
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw_grid(work, picture, [{}], config.train.seed)
        return scored

    def write(
        self, stage: str, run: RunConfig, metrics: Mapping[str, float | None], **parts: object
    ) -> None:
        """Writes the result of a run; `parts` go into the file as they are."""
        path, train = self.piece(stage, run), run.train
        path.parent.mkdir(parents=True, exist_ok=True)
        own = {"kinds": [run.model.kind], "seeds": [train.seed] if stage == "seeds" else None}
        command = command_line(f"vssm reproduce {self.data}", reproduce, {**self.options, **own})
        steps = train.max_steps
        epochs = train.epochs if steps is None else round(steps / _steps_per_epoch(run), 4)
        metrics = {**metrics, "epochs": epochs, "learning_rate": train.learning_rate}
        settings = {part: run.to_dict()[part] for part in ("data", "model", "train")}
        write_result(path, {**result(path.stem, command, settings, metrics), **parts})


def difference(path: Path, config: RunConfig, metric: str) -> str | None:
    """Returns how the settings of a result differ from a run, but for the seed, or None.

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
    for key, given, kept in differing(config, saved):
        if key != "train.seed":
            return f"{key}={given!r} differs from {kept!r} of {str(path)!r}"
    return None


def _small(data: str) -> Scale:
    """A small model, few steps, three learning rates, one seed."""
    model = ModelConfig(
        features=_FEATURES[data], width=64, layers=2, heads=4, latents=12, classes=16
    )
    options = TrainConfig(batch=64, validate_every=0.25, num_valid=1000, samples=0)
    few: dict[str, Any] = {"learning_rates": (1e-2, 5e-3, 1e-3), "seeds": (0,), "num_samples": 20}
    if data == "digits":
        base = RunConfig(model=model, train=replace(options, validate_every=5.0))
        return Scale(base, epochs=20, grid_epochs=5, num_images=359, **few)
    base = RunConfig(model=model, train=options)
    return Scale(base, epochs=1.5, grid_epochs=0.2, max_sequences=500, num_images=500, **few)


def _with_epochs(base: RunConfig, epochs: float) -> RunConfig:
    """Returns a run that trains for so many epochs; parts of an epoch are counted in steps."""
    steps = max(1, round(epochs * _steps_per_epoch(base)))
    limit = None if epochs == int(epochs) else steps
    return replace(base, train=replace(base.train, epochs=math.ceil(epochs), max_steps=limit))


def _steps_per_epoch(config: RunConfig) -> int:
    return TRAINING_SETS[config.data.name] // config.train.batch
