"""The paper's experiments, piece by piece: learning rates, seeds, test likelihoods, times, samples, figure.

| file | what |
| --- | --- |
| `RESULTS/grid/DATA_KIND_lrRATE.json` | a run of the grid: `validation_loss`, by which the rate is chosen |
| `RESULTS/finals/DATA_KIND_lrRATE.json` | one of the best of a short grid, trained to the end |
| `RESULTS/DATA_KIND_seedN.json` | a run with the chosen rate, scored on the test set, and its `curve` |
| `RESULTS/DATA_KIND_seedN.png` | its samples: three rows from nothing, three that complete test sequences |
| `OUT/grid/`, `OUT/runs/` | the run folders |
| `OUT/classifier_DATA.safetensors` | the classifier of the Fréchet distances, trained once |
| `OUT/figure.png`, `OUT/samples_DATA.png` | the paper's figures, drawn from RESULTS |

A piece whose JSON lies in RESULTS is done, whatever OUT holds; a run that was begun goes on from its last
checkpoint. So the command can be killed at any moment, on any machine, and given again. Checkpoints of
runs that have ended are deleted: at the paper's scale thirty runs would take 70 GB.

Calls of different kinds, or of different seeds at one learning rate, may be on side by side in one OUT, so no
call claims it as a sweep does: their runs are different folders, and a run that another process trains is
refused. The `sweep.json` beside the run folders is that of the call that wrote it last; nothing reads it.
"""

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vssm.checks import choose_device
from vssm.config import RunConfig, TrainConfig
from vssm.data import DataConfig, open_data
from vssm.evaluation.result import draw_grid, validations
from vssm.evaluation.scores import evaluate_run
from vssm.lab.page.figures import damage, draw_figure, draw_samples
from vssm.lab.scale import Scale, choose_scale, config_of, epochs_of
from vssm.lab.sweep import run_all
from vssm.runs.checkpoint import load
from vssm.runs.folder import FREE, RunFolder, read_config
from vssm.runs.labels import is_number
from vssm.runs.results import result, write_result
from vssm.storage import why_read_only
from vssm.training.progress import Progress, choose_progress

__all__ = ["places", "reproduce"]


@dataclass(frozen=True)
class _Plan:
    """What every piece needs to know; it travels to the machines of a cluster."""

    data: str
    results: Path
    options: str
    """The options on the command line that change the numbers."""
    scale: Scale
    classifier: Path
    """What the Fréchet distances of all runs share."""
    deadline: float | None
    """On the monotonic clock of this process."""

    def piece(self, config: RunConfig, stage: str) -> Path:
        kind, options = config.model.kind, config.train
        if stage == "seeds":
            return self.results / f"{self.data}_{kind}_seed{options.seed}.json"
        return self.results / stage / f"{self.data}_{kind}_lr{options.learning_rate!r}.json"


class _RunFailed(ValueError):
    """A run failed, and others may have ended well."""


class _TimeIsUp(BaseException):
    """Ends a run as Ctrl-C does: not an error, so that nothing records it as one."""


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
    """Does the pieces of the paper's experiments that are not done yet, and draws its figure.

    Arguments:
        data: "mnist" or "cifar10"; with scale "small" also "digits".
        scale: "paper", or "small" for minutes on a CPU.
        out: Where run folders and figures go; runs/reproduce-DATA by default (-small at that scale).
        results: Where results are kept; results/paper by default, OUT/results with scale "small".
        kinds: The models.
        learning_rates: The grid, the paper's by default; a single one is taken as it is.
        seeds: The seeds that are trained with the best rate; the grid has seed 0.
        epochs: Passes over the training set, if not the scale's (200 for the paper).
        grid_epochs: Passes of the grid's runs; those of the others by default, at the paper's scale.
        finalists: So many of the best rates of a shorter grid are trained to the end before one is chosen:
            what goes wrong late is not seen in few epochs.
        minutes: Stops with a checkpoint after so long; give the same call again to go on.
        ray_address: Run side by side on a Ray cluster that sees `out` and `results`, as in `vssm.lab.sweep`.
        data_dir: Folder with the data; else $VSSM_DATA; else the user cache.
        progress: What shows how it goes; by default a bar on a terminal, lines elsewhere.

    Returns:
        The runs that the time did not suffice for, of the first stage that is not done (grid, finals, seeds);
        none when all is done.
    """
    start = time.monotonic()
    chosen = choose_scale(data, scale, kinds, learning_rates, seeds, epochs, grid_epochs)
    if minutes is not None and (not minutes > 0 or ray_address is not None):
        raise ValueError(
            f"minutes={minutes!r} is not allowed; allowed: a number > 0, without ray_address"
        )
    out, results = places(data, scale, out, results)
    whole = chosen.grid_epochs == chosen.epochs
    most = 1 if whole else len(chosen.learning_rates)
    if isinstance(finalists, bool) or not isinstance(finalists, int) or not 1 <= finalists <= most:
        raise ValueError(
            f"finalists={finalists!r} is not allowed; allowed: "
            + (
                "1, as every rate is trained to the end"
                if whole
                else f"1 to {most}, the rates of the grid"
            )
        )
    options = _options(scale, learning_rates, epochs, grid_epochs, finalists)
    deadline = None if minutes is None else start + 60 * minutes
    classifier = out.resolve() / f"classifier_{data}.safetensors"
    plan = _Plan(data, results.resolve(), options, chosen, classifier, deadline)
    show = progress or choose_progress()

    base = replace(chosen.base, data=DataConfig(name=data, dir=data_dir))
    # Samples are drawn at the end, from the best weights.
    base = replace(base, train=replace(base.train, samples=0, validate_partial=True))
    grid = {
        f"{kind}-lr{rate!r}-seed0": config_of(base, chosen.grid_epochs, kind, rate, 0)
        for kind in kinds
        for rate in chosen.learning_rates
        if len(chosen.learning_rates) > 1
    }
    if not results.is_dir() or why_read_only(results) is None:  # else all may be done
        for stage in ("grid", "finals") if finalists > 1 else ("grid",):
            (plan.results / stage).mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    finals: dict[str, RunConfig] = {}
    seeded: dict[str, RunConfig] = {}

    def run(configs: Mapping[str, RunConfig], folder: Path, stage: str) -> None:
        left = _missing(plan, configs, stage)
        for name, place in (("out", out), ("results", results)) if left else ():
            if why := why_read_only(place):
                raise ValueError(
                    f"{name}={str(place)!r} can not be written to ({why}); allowed: a folder that can"
                )
        done = [name for name in configs if name not in left]
        for name in done:  # killed before it was deleted
            shutil.rmtree(folder / name / "checkpoint", ignore_errors=True)
            if stage == "seeds":
                _draw_again(plan, configs[name], folder / name, show)
        if done:
            show.message(
                f"{stage}: {len(done)} of {len(configs)} are in {results} already and not run again"
            )
        _run(left, folder, plan, stage, ray_address, _Until(show, deadline))

    failure = None
    try:
        run(grid, out / ("runs" if whole else "grid"), "grid")
        ranked = {
            kind: _ranked(plan, grid, kind, "grid") or [min(chosen.learning_rates)]
            for kind in kinds
        }
        finals = {
            f"{kind}-lr{rate!r}-seed0": config_of(base, chosen.epochs, kind, rate, 0)
            for kind in kinds
            for rate in ranked[kind][:finalists]
            if finalists > 1
        }
        for config in finals.values():
            _reuse(plan, config)
        run(finals, out / "runs", "finals")
        rates = {kind: (_ranked(plan, finals, kind, "finals") or ranked[kind])[0] for kind in kinds}
        seeded = {
            f"{kind}-lr{rates[kind]!r}-seed{seed}": config_of(
                base, chosen.epochs, kind, rates[kind], seed
            )
            for seed in chosen.seeds  # every kind once before any twice
            for kind in kinds
        }
        run(seeded, out / "runs", "seeds")
    except _TimeIsUp:
        show.message(
            f"stopped after {(time.monotonic() - start) / 60:.1f} minutes; the same call goes on"
        )
    except _RunFailed as error:
        failure = error  # the others are drawn all the same
    with nullcontext() if failure is None else suppress(ValueError, OSError):
        if any(plan.results.glob(f"{data}_*_seed*.json")):
            draw_figure(plan.results, out / "figure.png", [data])
            draw_samples(plan.results, data, out / f"samples_{data}.png")
    if failure is not None:
        raise failure
    stages = (("grid", grid), ("finals", finals), ("seeds", seeded))
    return next((left for stage, runs in stages if (left := list(_missing(plan, runs, stage)))), [])


def places(
    data: str, scale: str, out: str | Path | None = None, results: str | Path | None = None
) -> tuple[Path, Path]:
    """Returns the folders of runs and of results, as given or the usual ones.

    >>> [str(folder) for folder in places("mnist", "small")]
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
    progress: "_Until",
) -> None:
    """Trains and records pieces; a run of the grid or the finals that diverged is recorded as one, anything
    else is an error."""
    if not configs:
        return
    if plan.deadline is not None and time.monotonic() > plan.deadline:
        raise _TimeIsUp
    if ray_address is None:
        open_data(next(iter(configs.values())).data)  # what is wrong with it is wrong for all runs
    finish = partial(_record_rate, plan, stage)
    if stage == "seeds":
        finish = partial(_record, plan, None if ray_address is not None else progress)
    rows = run_all(configs, folder, ray_address, progress, finish=finish)
    failed = [row for row in rows if row["status"] == "failed"]
    diverged = [row for row in failed if stage != "seeds" and "not finite" in row["reason"]]
    for row in diverged:
        metrics = {"validation_loss": None, "train_seconds": row["seconds"]}
        _write_rate(plan, stage, configs[row["folder"]], metrics)
        shutil.rmtree(folder / row["folder"] / "checkpoint", ignore_errors=True)
    others = [f"{row['folder']}: {row['reason']}" for row in failed if row not in diverged]
    if others:
        raise _RunFailed(f"{len(others)} of {len(rows)} runs failed; {others[0]}")


def _missing(plan: _Plan, configs: Mapping[str, RunConfig], stage: str) -> dict[str, RunConfig]:
    """Returns the runs that have no result yet; one with other settings must not pass for theirs."""
    metric = "log_likelihood" if stage == "seeds" else "validation_loss"
    for config in configs.values():
        for path, other in _kept(plan, config, stage):
            if found := _difference(path, other, metric):
                raise ValueError(
                    f"{found}; allowed: the same settings, another results folder, or without that file"
                )
    return {
        name: config for name, config in configs.items() if not plan.piece(config, stage).exists()
    }


def _kept(plan: _Plan, config: RunConfig, stage: str) -> Iterator[tuple[Path, RunConfig]]:
    """Gives the results that a run's will be shown with, and how they must have been made."""
    path = plan.piece(config, stage)
    if stage != "seeds":
        if path.exists():
            yield path, config
        return
    for each in sorted(path.parent.glob(f"{plan.data}_{config.model.kind}_seed*.json")):
        seed = each.stem.rpartition("seed")[2]
        if seed.isdecimal():
            yield each, replace(config, train=replace(config.train, seed=int(seed)))


def _reuse(plan: _Plan, config: RunConfig) -> None:
    """Makes a scored run of the first seed a final one, where it is of these settings."""
    path, scored = plan.piece(config, "finals"), plan.piece(config, "seeds")
    if path.exists() or not scored.exists():
        return
    if _difference(scored, config, "validation_loss"):  # of another rate, as a rule
        return
    content = json.loads(scored.read_bytes())
    kept = (
        "validation_loss",
        "validation_elbo",
        "best_epoch",
        "train_seconds",
        "epochs",
        "learning_rate",
    )
    metrics = {name: content["metrics"].get(name) for name in kept}
    content = {key: value for key, value in content.items() if key != "curve"}
    write_result(path, {**content, "name": path.stem, "config": _plain(config), "metrics": metrics})


def _difference(path: Path, config: RunConfig, metric: str) -> str | None:
    """Says what setting of a result is another; raises unless it has the metric that it is there for."""
    try:
        content = json.loads(path.read_bytes())
        values, found = content["config"], content["metrics"][metric]
        saved = RunConfig.from_dict({part: values[part] for part in ("data", "model", "train")})
        if found is not None and not is_number(found):  # a run that diverged has null
            raise ValueError(f"its {metric} is {found}")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{str(path)!r} is damaged: {damage(error)}; allowed: without that file"
        ) from None
    given, kept = (dataclasses.asdict(_comparable(c)) for c in (config, saved))
    if saved.data.name == config.data.name:
        asked, had = epochs_of(config), epochs_of(saved)  # from which max_steps follows
        if asked != had:
            return f"epochs={asked:g} differs from {had:g} of {str(path)!r}"
    for part in given:
        for key, value in given[part].items():
            if value != kept[part][key]:
                return f"{part}.{key}={value!r} differs from {kept[part][key]!r} of {str(path)!r}"
    return None


def _comparable(config: RunConfig) -> RunConfig:
    """Returns the config without what the numbers do not depend on."""
    usual = TrainConfig()
    free = [key.removeprefix("train.") for key in FREE if key.startswith("train.")]
    options = replace(config.train, **{name: getattr(usual, name) for name in free})
    return replace(config, data=replace(config.data, dir=None), train=options)


def _ranked(plan: _Plan, runs: Mapping[str, RunConfig], kind: str, stage: str) -> list[float]:
    """Returns the rates that did not diverge, lowest validation loss first, by the results."""
    losses = {}
    for config in runs.values():
        if config.model.kind == kind:
            loss = json.loads(plan.piece(config, stage).read_bytes())["metrics"]["validation_loss"]
            losses[config.train.learning_rate] = math.inf if loss is None else loss
    ranked = sorted(
        (rate for rate in losses if losses[rate] < math.inf), key=lambda rate: losses[rate]
    )
    if losses and not ranked:
        raise ValueError(
            f"kind={kind!r} diverged at every learning rate of {tuple(losses)}; allowed: lower"
        )
    return ranked


def _record_rate(plan: _Plan, stage: str, folder: Path) -> None:
    """Keeps what a run of the grid or the finals came to."""
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


def _record(plan: _Plan, show: Progress | None, folder: Path) -> None:
    """Scores a run on the test set and keeps samples and result; the result comes last: it says "done"."""
    config = read_config(folder)
    path = plan.piece(config, "seeds")
    if path.exists():
        return
    if show is not None:
        show.message(f"scoring {folder.name} on the test set")

    def check_time(stage: str = "", done: int = 0, total: int = 0) -> None:
        # Likelihoods are taken up at any sequence, other stages at their start: these are not cut in two, so
        # that every piece of time gets further.
        cut = not done or stage.startswith("likelihoods")
        if cut and plan.deadline is not None and time.monotonic() > plan.deadline:
            raise _TimeIsUp

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
    _draw(plan, config, folder)
    best, curve = validations(folder)
    facts = json.loads((folder / "meta.json").read_bytes())
    metrics = {
        **scored["metrics"],
        **best,
        "epochs": epochs_of(config),
        "train_seconds": facts["seconds"],
        "learning_rate": config.train.learning_rate,
    }
    kind, seed = config.model.kind, config.train.seed
    command = f"vssm reproduce {plan.data}{plan.options} --kinds {kind} --seeds {seed}"
    settings = {**_plain(config), "evaluate": scored["config"]["evaluate"]}
    write_result(path, {**result(path.stem, command, settings, metrics), "curve": curve})
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)


def _draw(plan: _Plan, config: RunConfig, folder: Path) -> None:
    model = load(folder, choose_device(config.train.device)).eval()
    picture = plan.piece(config, "seeds").with_suffix(".png")
    draw_grid(open_data(config.data), model, picture, [{}], config.train.seed)


def _draw_again(plan: _Plan, config: RunConfig, folder: Path, show: Progress) -> None:
    """Draws samples that were lost, if the run is still there and not another one in its place."""
    path = plan.piece(config, "seeds")
    if path.with_suffix(".png").exists():
        return
    try:
        RunFolder(folder).compare(config)
        if not RunFolder(folder).has_ended():
            raise ValueError("its weights are not the last ones")
        _draw(plan, config, folder)
    except (ValueError, OSError):
        show.message(
            f"note: the samples of {path} are lost, and its run is not there to draw them again"
        )


def _plain(config: RunConfig) -> dict[str, Any]:
    plain = _comparable(config)
    shown = replace(
        plain.train, validate_partial=config.train.validate_partial
    )  # the curve says it too
    values = dataclasses.asdict(replace(plain, train=shown))
    return {part: values[part] for part in ("data", "model", "train")}


def _options(
    scale: str,
    learning_rates: Sequence[float] | None,
    epochs: float | None,
    grid_epochs: float | None,
    finalists: int,
) -> str:
    """Returns the options that change the numbers, as they are given on the command line."""
    words = [f"--scale {scale}"] if scale != "paper" else []
    if learning_rates is not None:
        words.append("--learning-rates " + " ".join(f"{rate:g}" for rate in learning_rates))
    words += [f"--epochs {epochs:g}"] if epochs is not None else []
    words += [f"--grid-epochs {grid_epochs:g}"] if grid_epochs is not None else []
    words += [f"--finalists {finalists}"] if finalists > 1 else []
    return "".join(f" {word}" for word in words)


class _Until(Progress):
    """Passes on what a training shows, and ends it with a checkpoint after a deadline."""

    def __init__(self, shown: Progress, deadline: float | None) -> None:
        self._shown = shown
        self._deadline = math.inf if deadline is None else deadline
        self._saved = False

    def start(self, step: int, total: int) -> None:
        self._saved = False
        if time.monotonic() > self._deadline:
            raise _TimeIsUp
        self._shown.start(step, total)

    def step(self, step: int) -> None:
        self._shown.step(step)
        if self._saved:
            raise _TimeIsUp

    def line(self, line: dict[str, Any]) -> None:
        self._shown.line(line)

    def wants_checkpoint(self) -> bool:
        self._saved = time.monotonic() > self._deadline
        return self._saved

    def message(self, text: str) -> None:
        self._shown.message(text)

    def close(self) -> None:
        self._shown.close()
