"""Training: one loop for all six models, in one process or many.

A step is in `vssm.training.step`. Here is what happens between steps: the log, validation,
checkpoints, pictures, signals, and how a run is set up and resumed.

The loop never waits for a CUDA device. Loss terms are summed on the device and read at log points,
and a run in one process replays its step as a CUDA graph. Ten steps in a row that are not finite
stop the run.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from vssm.checks import check_flag, check_path, check_type
from vssm.config import RunConfig, TrainConfig
from vssm.data import Meta, Split, draw, open_data
from vssm.likelihoods import estimates
from vssm.models import Model, build
from vssm.nn import BLOCKS
from vssm.objectives import Terms, real_steps
from vssm.ops import choose_backend
from vssm.runs.checkpoint import load_finite
from vssm.runs.folder import RunFolder, read_config
from vssm.runs.results import commit, machine
from vssm.sampling.filling import fill
from vssm.sampling.generation import generate
from vssm.storage import write_atomically
from vssm.training import figures
from vssm.training.distributed import World, join
from vssm.training.graph import GraphedStep, on_stream
from vssm.training.interrupts import Interrupts
from vssm.training.progress import Progress, choose_progress
from vssm.training.setup import check_options, check_values, resolve, warn_of_grey, warn_of_mps
from vssm.training.step import Learner, Step, Tally, TrainingStopped, learning_rate, mix

__all__ = ["Trainer", "TrainingStopped", "train"]

_PICTURE_SECONDS = 30  # between two pictures, so that short runs do not spend their time on drawing


def train(
    config: RunConfig | None,
    folder: str | Path,
    resume: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Trains a model and leaves a run folder, which `vssm.load` reads.

    Under torchrun every process calls this with the same arguments; only the first writes.

    Arguments:
        config: The run. With `resume` it may be None, for the folder's own, and may not differ from
            the folder's own in anything that changes the result.
        folder: The run folder, new or empty; with `resume` the folder of the run to continue.
        resume: Whether to continue from the newest good checkpoint, or from the start if there is
            none.
        progress: Shows the progress; by default a bar on a terminal, lines elsewhere.

    Returns:
        The run folder.
    """
    check_path("folder", folder)
    check_flag("resume", resume)
    if progress is not None:
        check_type("progress", progress, Progress, "a vssm.training.progress.Progress")
    if config is None:
        if not resume:
            raise ValueError("config=None goes with resume=True only; give a RunConfig")
        config = read_config(folder)
    check_type("config", config, RunConfig, "a RunConfig")
    with join(config.train.device) as world:
        show = (progress or choose_progress()) if world.rank == 0 else Progress()
        run_folder = RunFolder(folder)
        try:
            Trainer(config, run_folder, world, show, resume).run()
        finally:
            run_folder.close()
            show.close()
    return Path(folder)


class Trainer:
    """One training: what is set up once, and what changes with every step."""

    options: TrainConfig
    folder: RunFolder
    world: World
    progress: Progress
    config: RunConfig
    meta: Meta
    clock: float
    seconds: float
    step: int
    lost: bool

    def __init__(
        self, config: RunConfig, folder: RunFolder, world: World, progress: Progress, resume: bool
    ) -> None:
        self.options, self.folder, self.world, self.progress = config.train, folder, world, progress
        options = config.train
        world.check(options.batch, options.fsdp)
        with warnings.catch_warnings():
            if world.rank > 0:  # the first process alone warns of odd data
                warnings.simplefilter("ignore", UserWarning)
            data = open_data(config.data, missing=config.model.known == "any")
        init = None if resume and folder.has_checkpoint() else options.init
        first = None if init is None else load_finite(init)
        self.config, self.meta = resolve(config, data.meta, first), data.meta
        check_options(options, data)

        self.steps_per_epoch: int = len(data.train) // options.batch
        self.total: int = min(options.epochs * self.steps_per_epoch, options.max_steps or 10**18)
        if self.total < (options.max_steps or 0):
            progress.message(
                f"note: {options.epochs} epochs end after {self.total} steps, before max_steps="
                f"{options.max_steps} (--train.epochs)"
            )
        self.cut: int = data.meta.length // 2 if options.validate_partial else 0
        steps = min(options.validate_every * self.steps_per_epoch, 1e18)
        self.validation_steps: int = max(1, round(steps))

        self.model: Model = self._build_model(first)
        for name, split in (("training", data.train), ("validation", data.valid)):
            check_values(self.model.head, split, f"the {name} set", data.meta.given)
        self.digest: list[float] = data.train.digest()
        self.valid_split: Split = data.valid.placed(world.device)
        self.steps: Step = Step(self.model, data.train, data.meta, options, world, self.total)
        self.learner: Learner = self.steps.learner
        self.tally: Tally = self.steps.tally
        if world.rank == 0:
            warn_of_grey(self.model.head, data)
            warn_of_mps(world.device, self.steps.dtype)
        self._record_steps()

        self.step = 0
        self.best: float | None = None
        self.lost = False  # whether a resumed run has lost its best weights
        self.seconds, self.started = 0.0, datetime.now(UTC).isoformat(timespec="seconds")
        self.saved: Path | None = None
        self.drawn = -math.inf
        if world.rank == 0:
            if resume and (folder.path / "config.json").exists():
                folder.reopen(self.config)
            else:
                folder.create(self.config, self.meta)
        if resume:
            self._restore()

    def _build_model(self, first: Model | None) -> Model:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(mix(self.options.seed, "weights"))
            model = build(self.config.model) if first is None else first
        if self.options.compile:
            for block in [m for m in model.modules() if isinstance(m, tuple(BLOCKS.values()))]:
                block.compile()
        return model

    def _record_steps(self) -> None:
        """Makes CUDA graphs of training and validation steps, on one CUDA device."""
        options, world, device = self.options, self.world, self.world.device
        local = options.batch // world.size
        self.valid_index: Tensor = torch.zeros(local, dtype=torch.long, device=device)
        self.score: Callable[[], Tensor] = self._score
        self.stream: torch.cuda.Stream | None = None
        alone = options.graph and not (world.grouped or options.fsdp or options.compile)
        if device.type == "cuda" and alone:
            self.stream = torch.cuda.Stream(device)
            if self.steps.split.x.is_cuda and self.valid_split.x.is_cuda:
                self.steps.update, self.score = (
                    GraphedStep(function, self.steps.generator, self.stream, self.progress.message)
                    for function in (self.steps.compute, self._score)
                )

    def run(self) -> None:
        """Takes the steps that are left."""
        self.clock = self.window = self.checkpointed = time.monotonic()
        # A run that has ended keeps its meta.json.
        done = self.step == self.total and not self.lost and self.folder.has_ended()
        if self.world.rank == 0 and not done:
            with self._stopping():
                self.folder.describe(self._facts(ended=False))
        self.progress.start(self.step, self.total)
        interrupts = Interrupts()
        # Several processes would have to agree at every step on whether to save.
        patient = interrupts.put_off() if self.world.size == 1 else nullcontext()
        with warnings.catch_warnings(), on_stream(self.stream), patient:
            # FSDP2 warns of views that we never write to, bfloat16 norms on a CPU of a slow kernel,
            # and AdamW of the steps before the recorded one.
            expected = "FSDP2-wrapped module|Mismatch dtype between input|.*capturable=True"
            warnings.filterwarnings("ignore", expected)
            logged = self.step
            if self.step == self.total and self.lost:
                with self._stopping():
                    self.validate()
            while self.step < self.total:
                self.step += 1
                self.steps.take(self.step)
                self.progress.step(self.step)
                validating = self.step % self.validation_steps == 0 or self.step == self.total
                with self._stopping():
                    if validating or self.step % self.options.log_every == 0:
                        self._log_point(self.step - logged, validating)
                        logged = self.step
                    elif self.world.device.type == "cpu" and self.tally.stopped:
                        self.tally.fetch()
                    if interrupts.came is not None and self.step < self.total:
                        _, skipped, streak = self.tally.fetch(clear=False)
                        self.save(skipped, streak)
                        self.progress.message(f"saved at step {self.step} of {self.total}")
                        interrupts.act()
        if self.world.rank == 0:
            with self._stopping():
                self.draw()
                if not done:
                    self.folder.describe(self._facts(ended=True))
        interrupts.act()  # a signal at the last step must still end a sweep over many runs

    def _log_point(self, steps: int, validating: bool) -> None:
        """Reads the terms from the device; logs, validates, saves and draws if it is time."""
        means, skipped, streak = self.tally.fetch()
        now = time.monotonic()
        tokens = steps * self.options.batch * self.meta.length * self.steps.split.filled
        line = {
            **means,
            "learning_rate": learning_rate(self.options, self.step, self.total),
            "skipped": skipped,
            "tokens_per_second": round(tokens / (now - self.window), 1),
        }
        self._log("train", line)
        if validating:
            self.validate()
        due = now - self.checkpointed >= 60 * self.options.checkpoint_minutes
        due = due or self.step == self.total
        if self.world.agree([float(due)])[0]:
            self.save(skipped, streak)
            self.checkpointed: float = time.monotonic()
        rested = time.monotonic() - self.drawn > _PICTURE_SECONDS
        if validating and self.world.rank == 0 and rested:
            self.draw()
        self.window: float = time.monotonic()

    def _log(self, split: str, values: dict[str, Any]) -> None:
        now = time.monotonic()
        self.seconds, self.clock = self.seconds + now - self.clock, now
        epoch = round(self.step / self.steps_per_epoch, 4)
        at = {"step": self.step, "epoch": epoch, "split": split}
        line = {**at, **values, "seconds": round(self.seconds, 3)}
        for name, value in line.items():  # JSON knows neither NaN nor infinity
            line[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        if self.world.rank == 0:
            self.folder.log(line)
        self.progress.line(line)

    @torch.no_grad()
    def validate(self) -> None:
        """Scores the validation set, always with the same noise, and keeps the best weights."""
        with self.learner.averaged():
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
        options, world = self.options, self.world
        num = min(len(self.valid_split), options.num_valid or len(self.valid_split))
        local = options.batch // world.size
        names = (*Terms._fields, *(("partial_elbo", "partial_rows") if self.cut else ()))
        sums = torch.zeros(len(names), dtype=torch.float64, device=world.device)
        for first in range(0, num, options.batch):
            # The last batch is filled up with rows that do not count: noise depends on its size.
            index = first + world.rank * local + torch.arange(local, device=world.device)
            self.valid_index.copy_(index % num)
            self.steps.generator.manual_seed(mix(options.seed, "valid", first))
            sums += torch.where(index < num, self.score().double(), 0.0).sum(1)
        means = dict(zip(names, (world.average(sums) * world.size / num).tolist(), strict=True))
        bound, share = means.pop("partial_elbo", 0.0), means.pop("partial_rows", 0.0)
        return {**means, "partial_elbo": bound / share} if share else means

    @torch.no_grad()
    def _score(self) -> Tensor:
        """Returns the terms of the sequences at `valid_index`, stacked.

        With `validate_partial` two more rows follow: the bound on log p of the steps after the cut,
        and whether there are any.
        """
        x, lengths = self.valid_split.take(self.valid_index, self.world.device)
        with self.steps.autocast():
            terms = self.steps.terms(x, lengths)
            if not self.cut:
                return torch.stack(terms)
            real = None if lengths is None else real_steps(x, lengths)
            case, seed, rows = [(self.cut, "partial")], self.options.seed, self.valid_index
            rest = 1, case, seed, len(x), real, "importance", rows
            (bound,) = self.steps.alone(estimates, x, *rest)
        counts = torch.ones_like(bound) if lengths is None else (lengths > self.cut).to(bound)
        return torch.stack([*terms, torch.where(counts > 0, bound, 0), counts])

    def draw(self) -> None:
        """Replaces the pictures."""
        if self.folder.log_path.exists():
            figures.curves(self.folder.path)
        if num := self._num_samples():
            with self.learner.averaged():
                x = self._sample(num)
            write_atomically(
                self.folder.path / "samples.png", lambda path: draw(self.meta, x, path)
            )
        self.drawn: float = time.monotonic()

    def _sample(self, num: int) -> Tensor:
        """Returns samples; features that are given are those of the first validation sequences."""
        seed = self.options.seed
        if not self.meta.given:
            return generate(self.model, num=num, length=self.meta.length, seed=seed).x
        index = torch.arange(num, device=self.valid_split.x.device) % len(self.valid_split)
        x = self.valid_split.batch(index, self.world.device)
        self.meta.without_given(x)[:] = torch.nan
        return fill(self.model, x, seed=seed)

    def _num_samples(self) -> int:
        """Returns how many samples are drawn."""
        if self.options.fsdp:
            return 0
        return self.options.samples if self.meta.image_shape else min(6, self.options.samples)

    def save(self, skipped: int, streak: int) -> None:
        """Writes a checkpoint; every process must call this."""
        parts = self.learner.parts()
        if self.world.rank == 0:
            progress = {"best": self.best, "skipped": skipped, "streak": streak}
            progress |= {"seconds": self.seconds, "started": self.started, "data": self.digest}
            progress["pending"] = self.tally.pending()
            self.saved = self.folder.save_checkpoint(self.config, self.step, parts, progress)

    def _restore(self) -> None:
        """Continues from the newest good checkpoint, which rank 0 reads for all processes."""
        pending = self.tally.pending()
        numbers = [0.0] * (6 + len(pending))
        parts: dict[str, dict[str, Tensor]] = {}
        if self.world.rank == 0:
            name = repr(str(self.folder.path))
            checkpoint = self.folder.read_checkpoint(self.config, self.progress.message)
            if checkpoint is not None:
                self.saved, progress, parts = checkpoint
                self.started: str = progress["started"]
                self._check_data(progress["data"])
                best = math.nan if progress["best"] is None else progress["best"]
                validated = not math.isnan(best) or progress["step"] == self.total
                self.lost = validated and not self.folder.has_weights()
                if self.lost:
                    best = math.nan  # so that the next validation keeps its weights
                    self.progress.message(
                        f"the best weights of {name} are damaged or gone; "
                        "those of its next validation take their place"
                    )
                numbers = [progress[key] for key in ("step", "skipped", "streak", "seconds")]
                numbers += [best, float(self.lost), *progress["pending"]]
            step = int(numbers[0])
            self.folder.cut_log(step, self.progress.message)
            self.progress.message(
                f"resuming {name} at step {step} of {self.total}"
                if step < self.total
                else f"{name} is finished: {step} of {self.total} steps"
            )
        step, skipped, streak, self.seconds, best, lost, *pending = self.world.agree(numbers)
        self.step, self.lost = int(step), bool(lost)
        if self.step:
            self.best = None if math.isnan(best) else best
            self.tally.restore(self.step, skipped, streak, pending)
            self.learner.restore(parts, str(self.saved))

    def _check_data(self, digest: list[float]) -> None:
        """Raises `ValueError` if the training set is not the one that the run began with."""
        least = 1e-6 * max(map(abs, self.digest))  # machines round differently
        if any(abs(a - b) > least for a, b in zip(digest, self.digest, strict=True)):
            raise ValueError(
                f"the training set of {self.config.data.name!r} is another than the one that"
                f" {str(self.folder.path)!r} was trained on; use the same data, or a new run"
            )

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Says in one line why the run ends, and which checkpoint it can resume from."""
        try:
            yield
        except BrokenPipeError:  # nobody reads our output any more
            raise
        except (TrainingStopped, OSError, SafetensorError) as error:
            reason, name = str(error), str(self.folder.path)
            if not isinstance(error, TrainingStopped):
                reason = f"step {self.step}: {name!r} could not be written ({reason})"
            last = repr(str(self.saved)) if self.saved else "none yet"
            raise TrainingStopped(f"{reason}; last good checkpoint: {last}") from error

    def _facts(self, ended: bool) -> dict[str, Any]:
        """Returns what meta.json says of the run."""
        backend = None
        if self.config.model.block == "mamba":
            backend = choose_backend("auto", self.world.device, self.steps.dtype)
        return {
            "started": self.started,
            "ended": datetime.now(UTC).isoformat(timespec="seconds") if ended else None,
            "seconds": round(self.seconds, 3),
            "commit": commit(),
            "machine": machine(),
            "device": str(self.world.device),
            "processes": self.world.size,
            "precision": str(self.steps.dtype).removeprefix("torch."),
            "backend": backend,
            "seed": self.options.seed,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": self.total,
            "steps_per_epoch": self.steps_per_epoch,
            "best_validation_loss": self.best,
        }
