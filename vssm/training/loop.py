"""Training: one loop for all six models, in one process or many.

A step is in `vssm.training.step`. Here is what happens between steps: the log, validation,
checkpoints, samples, signals, and how a run is set up and resumed.

The loop never waits for a CUDA device. Loss terms are summed on the device and read at log points,
and a run in one process replays its step as a CUDA graph. Ten steps in a row that are not finite
stop the run.
"""

import math
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from vssm.checks import check_flag, check_path, check_type
from vssm.config import RunConfig, TrainConfig
from vssm.data import Meta, Split, draw, open_data
from vssm.data.dataset import digest, on_device
from vssm.data.storage import write_atomically
from vssm.likelihoods import estimates
from vssm.models import Model, build
from vssm.nn import BLOCKS
from vssm.objectives import Terms, real_steps
from vssm.ops import choose_backend
from vssm.runs.checkpoint import load_finite
from vssm.runs.config import read_config
from vssm.runs.folder import RunFolder
from vssm.runs.results import commit, machine
from vssm.sampling.filling import fill
from vssm.sampling.generation import generate
from vssm.training.distributed import World, join
from vssm.training.graph import GraphedStep, on_stream
from vssm.training.interrupts import Interrupts
from vssm.training.progress import Progress, choose_progress
from vssm.training.setup import check_data, resolve
from vssm.training.step import Step, TrainingStopped, learning_rate, mix


def train(
    config: RunConfig | None,
    folder: str | Path,
    resume: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Trains a model and leaves a run folder, which `vssm.load` reads.

    Under torchrun every process calls this with the same arguments; only the first writes.

    Arguments:
        config: The settings of the run. With `resume`, None takes the settings in the folder; other
            settings may differ from these only where that does not change the result.
        folder: The run folder, new or empty; with `resume` the folder of the run to continue.
        resume: Whether to continue from the newest good checkpoint, or from the start if there is
            none.
        progress: Shows the progress; by default a bar on a terminal, lines elsewhere.

    Returns:
        The run folder.
    """
    check_path("folder", folder)
    check_flag("resume", resume)
    check_type("progress", progress, Progress | None, "a Progress")
    if config is None:
        if not resume:
            raise ValueError("config=None goes with resume=True only; give a RunConfig")
        config = read_config(folder)
    check_type("config", config, RunConfig, "a RunConfig")
    run_folder = RunFolder(folder)
    if resume:
        run_folder.check_resumable()  # before data are read, and perhaps downloaded
    with join(config.train.device) as world:
        show = (progress or choose_progress()) if world.rank == 0 else Progress()
        try:
            Trainer(config, run_folder, world, show, resume).run()
        finally:
            run_folder.close()
            show.close()
    return Path(folder)


class Trainer:
    """One training: what is set up once, and what changes with every step."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, world: World, progress: Progress, resume: bool
    ) -> None:
        options = config.train
        self.options: TrainConfig = options
        self.folder: RunFolder = folder
        self.world: World = world
        self.progress: Progress = progress
        world.check(options.batch, options.fsdp)
        with warnings.catch_warnings():
            if world.rank > 0:  # the first process alone warns of odd data
                warnings.simplefilter("ignore", UserWarning)
            data = open_data(config.data, missing=config.model.known == "any")
            init = None if resume and folder.has_checkpoint() else options.init
            first = None if init is None else load_finite(init)
            self.config: RunConfig = resolve(config, data.meta, first)
            self.meta: Meta = data.meta
            self.model: Model = _build_model(self.config, first)
            check_data(self.config, self.model.head, data)
        self.digest: list[float] = digest(data.train)

        self.steps: Step = Step(self.model, data.train, data.meta, options, world)
        self.total: int = self.steps.total
        between = round(min(options.validate_every * self.steps.per_epoch, 1e18))
        self.validation_steps: int = max(1, between)
        self.valid_split: Split = on_device(data.valid, world.device)
        self.valid_index: Tensor = torch.zeros_like(self.steps.index)
        self.score: Callable[[], Tensor] = self._score
        self.stream: torch.cuda.Stream | None = None
        self._record_steps()

        self.step: int = 0
        self.best: float | None = None  # the best validation, whose weights are in the folder
        self.lost: bool = False  # whether a resumed run has lost these weights
        self.seconds: float = 0.0  # of the training before it was resumed
        self.began: float = time.monotonic()
        self.logged: float = self.began
        self.checkpointed: float = self.began
        self.started: str = _now()
        self.saved: Path | None = None
        if world.rank == 0:
            if resume and (folder.path / "config.json").exists():
                folder.reopen(self.config)
            else:
                folder.create(self.config, self.meta)
        if resume:
            self._restore()

    def _record_steps(self) -> None:
        """Makes CUDA graphs of training and validation steps, on one CUDA device."""
        options, world = self.options, self.world
        alone = options.graph and not (world.grouped or options.fsdp or options.compile)
        if world.device.type != "cuda" or not alone:
            return
        self.stream = torch.cuda.Stream(world.device)
        if self.steps.split.x.is_cuda and self.valid_split.x.is_cuda:
            self.steps.update, self.score = (
                GraphedStep(function, self.steps.generator, self.stream, self.progress.message)
                for function in (self.steps.compute, self._score)
            )

    def run(self) -> None:
        """Takes the steps that are left."""
        interrupts = Interrupts()
        # Several processes would have to agree at every step on whether to save.
        patient = interrupts if self.world.size == 1 else nullcontext()
        # FSDP2 warns of views that we never write to, bfloat16 norms on a CPU of a slow kernel, and
        # AdamW of the steps before the recorded one.
        expected = "FSDP2-wrapped module|Mismatch dtype between input|.*capturable=True"
        try:
            with warnings.catch_warnings(), on_stream(self.stream), patient:
                warnings.filterwarnings("ignore", expected)
                self._run(interrupts)
        except BrokenPipeError:  # nobody reads our output any more
            raise
        except (TrainingStopped, OSError, SafetensorError) as error:
            reason, name = str(error), str(self.folder.path)
            if not isinstance(error, TrainingStopped):
                reason = f"step {self.step}: {name!r} could not be written ({reason})"
            last = repr(str(self.saved)) if self.saved else "none yet"
            raise TrainingStopped(f"{reason}; last good checkpoint: {last}") from error
        interrupts.act()  # a signal at the last step must still end a sweep over many runs

    def _run(self, interrupts: Interrupts) -> None:
        if self.step == self.total and not self.lost and self.folder.has_ended():
            return  # and keep meta.json
        self.logged = self.checkpointed = time.monotonic()
        self.began = self.logged - self.seconds
        self._describe(ended=False)
        self.progress.start(self.step, self.total)
        if self.step == self.total and self.lost:
            self.validate()
        logged = self.step
        while self.step < self.total:
            self.step += 1
            self.steps.take(self.step)
            self.progress.step(self.step)
            last = self.step == self.total
            validating = last or self.step % self.validation_steps == 0
            interrupted = interrupts.came is not None
            telling = validating or interrupted or self.step % self.options.log_every == 0
            if telling or (self.world.device.type == "cpu" and self.steps.tally.stopped):
                self._log_point(self.step - logged, validating, saving=last or interrupted)
                logged = self.step
            if interrupted and not last:
                self.progress.message(f"saved at step {self.step} of {self.total}")
                interrupts.act()
        self._describe(ended=True)

    def _log_point(self, steps: int, validating: bool, saving: bool) -> None:
        """Reads the terms from the device; logs, validates, saves and draws if it is time."""
        means, skipped, streak = self.steps.tally.fetch()
        tokens = steps * self.options.batch * self.meta.length * self.steps.split.filled
        line = {
            **means,
            "learning_rate": learning_rate(self.options, self.step, self.total),
            "skipped": skipped,
            "tokens_per_second": round(tokens / (time.monotonic() - self.logged), 1),
        }
        self._log("train", line)
        if validating:
            self.validate()
        due = time.monotonic() - self.checkpointed >= 60 * self.options.checkpoint_minutes
        if self.world.agree([saving or due])[0]:
            self.save(skipped, streak)
            self.draw()
            self.checkpointed = time.monotonic()
        self.logged = time.monotonic()

    def _log(self, split: str, values: dict[str, Any]) -> None:
        line = {
            "step": self.step,
            "epoch": round(self.step / self.steps.per_epoch, 4),
            "split": split,
            **values,
            "seconds": round(time.monotonic() - self.began, 3),
        }
        for name, value in line.items():  # JSON knows neither NaN nor infinity
            line[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        if self.world.rank == 0:
            self.folder.log(line)
        self.progress.line(line)

    @torch.no_grad()
    def validate(self) -> None:
        """Scores the validation set, always with the same noise, and keeps the best weights."""
        with self.steps.learner.averaged():
            means = self.validation_means()
            bound = means["kl"] - means["reconstruction"]
            score = means["loss"] if self.options.select == "loss" else bound
            best = self.best is None or score < self.best
            if best:
                self.best = score if math.isfinite(score) else None
                tensors = self.world.whole(self.model.state_dict())
                if self.world.rank == 0:
                    self.folder.save_weights(tensors)
        self._log("valid", {**means, "best": best})
        if not math.isfinite(score):
            self.progress.message(
                "note: validation is not finite; a lower --train.learning-rate may help"
            )

    def validation_means(self) -> dict[str, float]:
        """Returns the mean terms of the validation set."""
        options, world, device = self.options, self.world, self.world.device
        num = min(len(self.valid_split), options.num_valid or len(self.valid_split))
        local, sums = len(self.valid_index), torch.zeros((), dtype=torch.float64, device=device)
        for first in range(0, num, options.batch):
            # The last batch is filled up with rows that do not count: noise depends on its size.
            index = first + world.rank * local + torch.arange(local, device=device)
            self.valid_index.copy_(index % num)
            self.steps.generator.manual_seed(mix(options.seed, "valid", first))
            sums = sums + torch.where(index < num, self.score().double(), 0.0).sum(1)
        values = ((world.sum(sums) if world.size > 1 else sums) / num).tolist()
        means = dict(zip((*Terms._fields, "partial_elbo", "share"), values, strict=False))
        bound, share = means.pop("partial_elbo", 0.0), means.pop("share", 0.0)
        return {**means, "partial_elbo": bound / share} if share else means

    @torch.no_grad()
    def _score(self) -> Tensor:
        """Returns the terms of the sequences at `valid_index`, stacked.

        With `validate_partial` two more rows follow: the bound on log p of the second half given
        the first, and whether there is a second half.
        """
        cut = self.meta.length // 2 if self.options.validate_partial else 0
        x, lengths = self.valid_split.take(self.valid_index, self.world.device)
        with self.steps.autocast():
            terms = self.steps.terms(x, lengths)
            if not cut:
                return torch.stack(terms)
            real = None if lengths is None else real_steps(x, lengths)
            case, seed, rows = [(cut, "partial")], self.options.seed, self.valid_index
            rest = 1, case, seed, len(x), real, "importance", rows
            (bound,) = self.steps.alone(estimates, x, *rest)
        counts = torch.ones_like(bound) if lengths is None else (lengths > cut).to(bound)
        return torch.stack([*terms, torch.where(counts > 0, bound, 0), counts])

    @torch.no_grad()
    def draw(self) -> None:
        """Replaces the picture of samples; given features are those of validation sequences."""
        num = self.options.samples if self.meta.image_shape else min(6, self.options.samples)
        if not num or self.world.rank > 0 or self.options.fsdp:
            return
        seed, meta = self.options.seed, self.meta
        with self.steps.learner.averaged():
            if meta.given:
                index = torch.arange(num, device=self.valid_split.x.device) % len(self.valid_split)
                x = self.valid_split.batch(index, self.world.device)
                meta.without_given(x)[:] = torch.nan
                x = fill(self.model, x, seed=seed)
            else:
                x = generate(self.model, num=num, length=meta.length, seed=seed).x
        path = self.folder.path / "samples.png"
        write_atomically(path, lambda file: draw(meta, x, file))

    def save(self, skipped: int, streak: int) -> None:
        """Writes a checkpoint; every process must call this."""
        tensors = self.steps.learner.tensors()
        parts = {part: self.world.whole(own) for part, own in tensors.items()}
        if self.world.rank == 0:
            seconds = time.monotonic() - self.began
            progress = {"best": self.best, "skipped": skipped, "streak": streak}
            progress |= {"seconds": seconds, "started": self.started, "data": self.digest}
            self.saved = self.folder.save_checkpoint(self.config, self.step, parts, progress)

    def _restore(self) -> None:
        """Continues from the newest good checkpoint, which rank 0 reads for all processes."""
        numbers = [0.0] * 6
        parts: dict[str, dict[str, Tensor]] = {}
        if self.world.rank == 0:
            name = repr(str(self.folder.path))
            checkpoint = self.folder.read_checkpoint(self.config, self.progress.message)
            if checkpoint is not None:
                self.saved, _, progress, parts = checkpoint
                self.started = progress["started"]
                self._check_digest(progress["data"])
                best, lost = progress["best"], not self.folder.has_weights()
                if lost and best is not None:
                    self.progress.message(
                        f"the best weights of {name} are damaged or gone; "
                        "those of its next validation take their place"
                    )
                numbers = [progress[key] for key in ("step", "skipped", "streak", "seconds")]
                numbers += [math.nan if lost or best is None else best, lost]
            step = int(numbers[0])
            self.folder.cut_log(step)
            self.progress.message(
                f"resuming {name} at step {step} of {self.total}"
                if step < self.total
                else f"{name} is finished: {step} of {self.total} steps"
            )
        step, skipped, streak, self.seconds, best, lost = self.world.agree(numbers)
        self.step, self.lost = int(step), bool(lost)
        if self.step:
            self.best = None if math.isnan(best) else best
            self.steps.tally.restore(self.step, skipped, streak)
            self.steps.learner.restore(parts, str(self.saved))

    def _check_digest(self, saved: list[float]) -> None:
        """Raises `ValueError` if the training set is not the one that the run began with."""
        least = 1e-6 * max(map(abs, self.digest))  # machines round differently
        if any(abs(a - b) > least for a, b in zip(saved, self.digest, strict=True)):
            raise ValueError(
                f"the training set of {self.config.data.name!r} differs from the one that"
                f" {str(self.folder.path)!r} was trained on; use the same data, or a new run"
            )

    def _describe(self, ended: bool) -> None:
        """Writes meta.json."""
        if self.world.rank > 0:
            return
        device, dtype = self.world.device, self.steps.dtype
        mamba = self.config.model.block == "mamba"
        facts = {
            "started": self.started,
            "ended": _now() if ended else None,
            "seconds": round(time.monotonic() - self.began, 3),
            "commit": commit(),
            "machine": machine(),
            "device": str(device),
            "processes": self.world.size,
            "precision": str(dtype).removeprefix("torch."),
            "backend": choose_backend("auto", device, dtype) if mamba else None,
            "seed": self.options.seed,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": self.total,
            "steps_per_epoch": self.steps.per_epoch,
            "best_validation_loss": self.best,
        }
        self.folder.describe(facts)


def _build_model(config: RunConfig, first: Model | None) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(mix(config.train.seed, "weights"))
        model = build(config.model) if first is None else first
    if config.train.compile:
        for block in [m for m in model.modules() if isinstance(m, tuple(BLOCKS.values()))]:
            block.compile()
    return model


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
