"""One thread that computes; requests that fit together are computed at once.

Whatever waits when the thread becomes free is looked through: the oldest job and all that agree with it in
everything but prompt, state and noise form a batch. Noise is a function of (seed, row, position), and batches
are padded to where bits no longer depend on the number of rows, so a job's result is that of the job alone.

One thread, because two would share the same cores; kernels divide their work among threads themselves. Should
it fail, nothing is computed any more: all that waits and all that comes later ends with `Broken`.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from vssm.generate import generate, observe
from vssm.nn import State
from vssm.serve.models import Served, row_bytes, row_floor

__all__ = ["Broken", "Done", "Engine", "Job"]

_log = logging.getLogger("vssm.serve")


class Broken(Exception):
    """What jobs end with when the thread that computes has failed."""


class Done(NamedTuple):
    """What came of a job."""

    x: Tensor | None
    """The new steps; None when data were only read."""
    state: State | None
    """Where to go on; None unless the job keeps it."""
    position: int
    seconds: float
    """How long the batch took."""
    rows: int
    """How many rows the batch had, those of other jobs included."""


@dataclass(eq=False)
class Job:
    """One pass for one request: generate `length` steps, or read x when `length` is None.

    Arguments:
        served: The model.
        seed: Seeds of the noise, (B,).
        row: Rows of the noise, (B,).
        length: The number of new steps, or None to read only.
        prompt: What is read first, (B, C, D) or (B, C).
        state: Where to go on from, B rows, or one that serves them all.
        chunk: W, of a vssm or tvae.
        recondition: Whether a chunk is read before the next is made.
        temperature: Of what is drawn.
        sample: Whether x is a sample of the head or its mean.
        keep: Whether the state after it is needed.
    """

    served: Served
    seed: Tensor
    row: Tensor
    length: int | None
    prompt: Tensor | None = None
    state: State | None = None
    chunk: int | None = None
    recondition: bool = False
    temperature: float = 1.0
    sample: bool = False
    keep: bool = True
    future: "Future[Done]" = field(default_factory=Future)

    @property
    def key(self) -> Hashable:
        """What jobs must agree in to be computed together."""
        before = None if self.state is None else _layout(self.state)
        known = 0 if self.prompt is None else self.prompt.shape[1]
        dials = (self.chunk, self.recondition, self.temperature, self.sample)
        return self.served.name, before, known, self.length, dials

    @property
    def narrowest(self) -> int:
        """The fewest steps of any pass over this job."""
        known = [] if self.prompt is None else [self.prompt.shape[1]]
        if self.served.model.config.block == "gru":  # reads step by step as well
            return 1
        if self.length is None:
            return known[0]
        if not self.served.parallel:
            return 1
        chunk = min(self.chunk or self.length, self.length)
        # A prompt is embedded apart from what follows it, also where one pass goes over both.
        return max(1, min([chunk, self.length % chunk or chunk, *known]))


def _layout(state: State) -> Hashable:
    """Returns what states must agree in to form a batch: positions, names and shapes."""
    children = sorted(state.children.items())
    return state.position, *((n, _layout(c) if isinstance(c, State) else c.shape[1:]) for n, c in children)


class Engine:
    """Creates the queue and, on `start`, its thread.

    Arguments:
        models: The models; the rows that their batches are padded to are measured at the start.
        max_rows: Most rows of a batch; a job with more is a batch of its own.
        batching: Whether jobs are merged at all.
        threads: Threads to compute with; what torch is set to by default.
        watch: Called with (model name, rows, seconds) after every batch.
    """

    def __init__(
        self,
        models: list[Served],
        max_rows: int = 64,
        batching: bool = True,
        threads: int | None = None,
        watch: Callable[[str, int, float], None] = lambda name, rows, seconds: None,
    ) -> None:
        self.models = models
        self._max_rows, self._batching, self._watch = max_rows, batching, watch
        self._threads = threads
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._running: list[Job] = []
        self._closing = False
        self.failure: str | None = None
        """Why nothing is computed any more, for people; None while all is well."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called in the thread when it has failed."""
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vssm-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread; `ready` is set once it takes jobs."""
        self._thread.start()

    def close(self) -> None:
        """Finishes what waits, then stops the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether jobs are being computed."""
        return self.ready.is_set() and self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """The number of jobs that wait."""
        return len(self._waiting)

    def submit(self, job: Job) -> "Future[Done]":
        """Queues a job; cancelling the future takes it out again unless it is running."""
        with self._changed:
            if self.failure is not None:
                raise Broken(self.failure)
            if self._closing:
                raise RuntimeError("the engine is closed")
            self._waiting.append(job)
            self._changed.notify()
        return job.future

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # nobody else would say it, and whoever waits would wait in vain
            _log.exception("the engine failed")
            with self._changed:
                self.failure = f"the engine failed ({type(error).__name__}); the server's log says why"
                left, self._waiting = [*self._running, *self._waiting], deque()
            for job in left:
                if not job.future.done() and (
                    job.future.running() or job.future.set_running_or_notify_cancel()
                ):
                    job.future.set_exception(Broken(self.failure))
            self.on_failure()

    def _work(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        for served in self.models:
            served.floor, served.row_bytes = row_floor(served.model), row_bytes(served.model)
        self.ready.set()
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                self._running = self._take()
            self._running = [job for job in self._running if job.future.set_running_or_notify_cancel()]
            if self._running:
                self._compute(self._running)
            self._running = []  # whose results are no longer ours to hold

    def _take(self) -> list[Job]:
        if not self._batching:
            return [self._waiting.popleft()]
        first, *others = self._waiting  # where they stay until a batch is found
        batch, rest, rows, key = [first], [], len(first.row), first.key
        for job in others:
            fits = rows + len(job.row) <= self._max_rows
            if fits and not job.future.cancelled() and job.key == key:
                batch.append(job)
                rows += len(job.row)
            elif not job.future.cancelled():
                rest.append(job)
        self._waiting = deque(rest)
        return batch

    def _compute(self, batch: list[Job]) -> None:
        try:
            results = self._pass(batch)
        except Exception as error:
            if len(batch) > 1:  # whatever is wrong with one must not hurt the others
                for job in batch:
                    self._compute([job])
            else:
                batch[0].future.set_exception(error)
            return
        for job, done in zip(batch, results, strict=True):
            job.future.set_result(done)

    def _pass(self, batch: list[Job]) -> list[Done]:
        began, first = time.perf_counter(), batch[0]
        rows = sum(len(job.row) for job in batch)
        padded = max(rows, math.ceil(first.served.floor / first.narrowest))
        device = next(first.served.model.parameters()).device
        index = torch.arange(padded, device=device).clamp_max(rows - 1)  # repeats the last row
        seed = torch.cat([job.seed.to(device) for job in batch])[index]
        row = torch.cat([job.row.to(device) for job in batch])[index]
        prompts = [job.prompt.to(device) for job in batch if job.prompt is not None]
        states = [_widen(job.state.to(device), len(job.row)) for job in batch if job.state is not None]
        prompt = torch.cat(prompts)[index] if prompts else None
        state = State.cat(states).select(index) if states else None
        if first.length is None:
            assert prompt is not None
            x, after = None, observe(first.served.model, prompt, state, seed=seed, rows=row)
        else:
            x, _, after = generate(
                first.served.model,
                num=padded,
                length=first.length,
                prompt=prompt,
                chunk=first.chunk,
                recondition=first.recondition,
                temperature=first.temperature,
                observe="sample" if first.sample else "mean",
                seed=seed,
                state=state,
                rows=row,
            )
        x = None if x is None else x.cpu()
        cuts = torch.arange(rows).split([len(job.row) for job in batch])
        xs = [None if x is None else x[cut] for cut in cuts]
        states = [after.select(cut) if job.keep else None for job, cut in zip(batch, cuts, strict=True)]
        seconds = time.perf_counter() - began
        self._watch(first.served.name, rows, seconds)
        return [Done(x, state, after.position, seconds, rows) for x, state in zip(xs, states, strict=True)]


def _widen(state: State, rows: int) -> State:
    return state if state.batch == rows else state.repeat(rows)
