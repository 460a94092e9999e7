"""One thread that computes; requests that fit together are computed at once.

A job is a request. It is computed in pieces of bounded size, each of which goes on from the state of the one
before: the prompt is read in pieces, then new steps are made. Between two pieces the `Scheduler` decides
whose piece is next, and jobs whose clients have left are dropped.

Noise is a function of (seed, row, position), and batches are padded to where bits no longer depend on the
number of rows, so a job's result is that of the job alone.

One thread, because two would share the same cores; kernels divide their work among threads themselves. Should
it fail, nothing is computed any more: all that waits and all that comes later ends with `Broken`.
"""

import contextlib
import ctypes
import logging
import math
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from vssm.nn import State
from vssm.sampling.generation import generate, observe
from vssm.serve.errors import Refused
from vssm.serve.models import Served, measure_speed, row_bytes, row_floor
from vssm.serve.scheduler import Scheduler
from vssm.serve.settings import Settings

__all__ = ["Broken", "Done", "Engine", "Job", "Piece"]

_log = logging.getLogger("vssm.serve")
_IDLE = 1.0  # seconds without work after which freed memory is given back
_STEPWISE = 32  # most steps of a piece that is made step by step


class Broken(Exception):
    """What jobs end with when the thread that computes has failed."""


class Done(NamedTuple):
    """What came of a job, or of one of its pieces."""

    x: Tensor | None
    """The new steps; None when data were only read."""
    state: State | None
    """Where to go on; None unless the job keeps it."""
    position: int
    seconds: float
    """How long its batches took."""
    rows: int
    """How many rows the last batch had, those of other jobs included."""


class Piece(NamedTuple):
    """What is computed of a job at a time: steps of the prompt to read, then new steps to make."""

    read: int
    make: int
    chunk: int | None = None
    recondition: bool = False

    @property
    def steps(self) -> int:
        """The steps of each sequence."""
        return self.read + self.make


@dataclass(eq=False)
class Job:
    """One request: read the prompt, if there is one, and make `length` steps, unless `length` is None.

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
        every: No piece goes past a multiple of so many new steps.
        each: Called in the engine's thread with every piece that has new steps.
        client: Who asks; clients take turns.
        deadline: When the job is given up, in seconds of `time.monotonic`.
        bytes: The size of its state at the end.
        future: The result. Cancelling it takes the job out before its next piece.
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
    every: int | None = None
    each: Callable[[Done], None] | None = None
    client: str = ""
    deadline: float = math.inf
    bytes: int = 0
    future: "Future[Done]" = field(default_factory=Future, repr=False)
    turn: float = 0.0
    """Its place in the order of the scheduler, and where its client's next request may begin."""
    turn_end: float = 0.0

    def __post_init__(self) -> None:
        self._made, self._position, self._seconds = 0, 0, 0.0
        self._xs: list[Tensor] = []
        # A chunk that is too large for one piece is made in pieces, and then read from the state before it.
        self._before: State | None = None
        self._unread: list[Tensor] = []
        self._decoder: State | None = None
        self._reading = False
        self.short = self.ends_with(self.piece)
        """Whether one piece is all."""

    @property
    def _known(self) -> int:
        return 0 if self.prompt is None else self.prompt.shape[1]

    @property
    def _left(self) -> int:
        return (self.length or 0) - self._made

    @property
    def _most(self) -> int:
        """Most steps of a piece."""
        return max(1, self.served.cells // len(self.row))

    @property
    def _chunk(self) -> int:
        return min(self.chunk or self.length or 1, self.length or 1)

    @property
    def _in_parts(self) -> bool:
        """Whether a chunk that is to be read again is too large for one piece."""
        return self.recondition and self._chunk > self._most

    @cached_property
    def piece(self) -> Piece:
        """What is computed next."""
        make = 0 if self._reading else self._next_steps()
        if self._known and (not make or self._in_parts or self._known + make > self._most):
            return Piece(min(self._known, self._most), 0)
        if not self.served.parallel:
            return Piece(self._known, make)
        chunk = None if self.chunk is None or self._in_parts else min(self.chunk, make)
        return Piece(self._known, make, chunk, self.recondition and not self._in_parts)

    def _next_steps(self) -> int:
        left, most = self._left, self._most
        if not self.served.parallel:
            most = min(most, _STEPWISE)
        elif self._in_parts:
            left = min(left, self._chunk - self._made % self._chunk)
        elif self.recondition:
            most = self._chunk * max(1, min(most, _STEPWISE) // self._chunk)
        if self.every is not None:
            left = min(left, self.every - self._made % self.every)
        return min(left, most)

    @cached_property
    def key(self) -> Hashable:
        """What jobs must agree in to be computed together."""
        before = None if self.state is None else _layout(self.state)
        return self.served.name, before, self.piece, self.temperature, self.sample

    @property
    def costs(self) -> tuple[float, float]:
        """The seconds that it still takes: those that other rows can share, and its own."""
        return self._cost(self._known, self._left, len(self.row))

    @property
    def seconds_left(self) -> float:
        """The seconds that it still takes alone."""
        return sum(self.costs)

    def _cost(self, read: int, make: int, rows: int) -> tuple[float, float]:
        speed = self.served.speed
        calls = make if not self.served.parallel else math.ceil(make / self._most)
        fixed = math.ceil(read / self._most) * speed.read[0]
        variable = read * speed.read[1] + make * speed.make[1]
        if self.recondition:
            calls = max(calls, math.ceil(make / self._chunk))
            fixed += calls * speed.read[0]
            variable += make * speed.read[1]
        return speed.stretch * (fixed + calls * speed.make[0]), speed.stretch * rows * variable

    def expected(self, piece: Piece, rows: int) -> float:
        """Returns the seconds that a batch of so many rows is expected to take."""
        return sum(self._cost(piece.read, piece.make, rows))

    def narrowest(self, piece: Piece) -> int:
        """Returns the fewest steps of any pass over a piece."""
        if self.served.model.config.block == "gru":  # reads step by step as well
            return 1
        if not piece.make:
            return piece.read
        if not self.served.parallel:
            return 1
        chunk = min(piece.chunk or piece.make, piece.make)
        # A prompt is embedded apart from what follows it, also where one pass goes over both.
        known = [piece.read] if piece.read else []
        return max(1, min([chunk, piece.make % chunk or chunk, *known]))

    def ends_with(self, piece: Piece) -> bool:
        """Returns whether a piece is all that is left."""
        return piece[:2] == (self._known, self._left)

    def advance(
        self, piece: Piece, x: Tensor | None, state: State | None, seconds: float, rows: int
    ) -> Done | None:
        """Takes over what was computed of a piece; returns the result once the job has ended."""
        before, self.state = self.state, state
        self._position = (0 if before is None else before.position) + piece.steps
        self._seconds += seconds
        for cached in ("piece", "key"):
            self.__dict__.pop(cached, None)
        if self.prompt is not None and piece.read:
            self.prompt = self.prompt[:, piece.read :] if piece.read < self._known else None
        if x is not None:
            self._made += piece.make
            if self.each is None:
                self._xs.append(x)
            else:
                self.each(Done(x, None, self._position, seconds, rows))
            if self._in_parts:
                self._read_again(before, x)
        elif self._reading and self.prompt is None:
            if (
                state is not None and self._decoder is not None
            ):  # it has followed the latents that were drawn
                self.state = State(
                    {**state.children, "decoder": self._decoder}, state.position, state.owner
                )
            self._reading, self._decoder = False, None
        if self._left or self.prompt is not None:
            return None
        made = torch.cat(self._xs, 1) if self._xs else None
        return Done(made, self.state if self.keep else None, self._position, self._seconds, rows)

    def _read_again(self, before: State | None, x: Tensor) -> None:
        if not self._unread:
            self._before = before
        self._unread.append(x)
        whole = self._made % self._chunk == 0 or not self._left
        if whole and (self._left or self.keep):
            assert self.state is not None
            self.prompt, self._unread, self._reading = torch.cat(self._unread, 1), [], True
            self._decoder = (
                self.state.child("decoder") if "decoder" in self.state.children else None
            )
            self.state, self._before = self._before, None

    def release(self) -> None:
        """Lets go of all tensors and of the future.

        An error in the future refers, by its traceback, to the frames that wait for the job, and so to the
        job: a cycle, which would keep both until the next garbage collection.
        """
        self.prompt = self.state = self._before = self._decoder = self.each = None
        self._xs, self._unread = [], []
        del self.future


def _layout(state: State) -> Hashable:
    """Returns what states must agree in to form a batch: positions, names and shapes."""
    children = sorted(state.children.items())
    return state.position, *(
        (n, _layout(c) if isinstance(c, State) else c.shape[1:]) for n, c in children
    )


class Engine:
    """Creates the scheduler and, on `start`, the thread.

    Arguments:
        models: The models; the rows that their batches are padded to, and how long passes take, are measured
            at the start.
        settings: The limits.
        watch: Called with (model name, rows, seconds) after every batch.
    """

    def __init__(
        self,
        models: list[Served],
        settings: Settings | None = None,
        watch: Callable[[str, int, float], None] = lambda name, rows, seconds: None,
    ) -> None:
        self.models = models
        self._watch, self._settings = watch, settings or Settings()
        self._scheduler = Scheduler(self._settings)
        self._changed = threading.Condition()
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
        """The number of jobs that have not begun."""
        return self._scheduler.waiting

    @property
    def in_progress(self) -> int:
        """The number of jobs that have not ended."""
        return len(self._scheduler.jobs)

    def submit(self, job: Job) -> "Future[Done]":
        """Queues a job, or raises `Refused` when there is too much to do."""
        future = job.future
        with self._changed:
            if self.failure is not None:
                raise Broken(self.failure)
            if self._closing:
                raise RuntimeError("the engine is closed")
            displaced = self._scheduler.admit(job)
            self._changed.notify()
        if displaced is not None:
            message = "other clients need the place of this request; try again soon"
            _end(displaced, Refused(429, "busy", message, retry_after=1))
        return future

    def _run(self) -> None:
        try:
            self._work()
        except (
            BaseException
        ) as error:  # nobody else would say it, and whoever waits would wait in vain
            _log.exception("the engine failed")
            with self._changed:
                self.failure = (
                    f"the engine failed ({type(error).__name__}); the server's log says why"
                )
                left, self._scheduler = self._scheduler.jobs, Scheduler(self._settings)
            for job in left:
                _end(job, Broken(self.failure))
            self.on_failure()

    def _work(self) -> None:
        if self._settings.threads is not None:
            torch.set_num_threads(self._settings.threads)
        for served in self.models:
            served.floor, served.row_bytes = row_floor(served.model), row_bytes(served.model)
            served.speed = measure_speed(served.model)
        self.ready.set()
        while True:
            with self._changed:
                if not self._changed.wait_for(self._called, timeout=_IDLE):
                    _return_memory()
                    self._changed.wait_for(self._called)
                dropped = self._scheduler.drop(time.monotonic())
                batch = self._scheduler.take()
                closed = self._closing and not batch
            while dropped:
                _end(*dropped.pop())
            if closed:
                return
            if batch:
                self._compute(batch)
            del batch  # while this waits it must not hold what has ended

    def _called(self) -> bool:
        return bool(self._scheduler.jobs) or self._closing

    def _compute(self, batch: list[Job]) -> None:
        began, piece = time.perf_counter(), batch[0].piece
        try:
            results = self._pass(batch, piece)
        except Exception as error:
            if len(batch) > 1:  # whatever is wrong with one must not hurt the others
                for job in batch:
                    self._compute([job])
                return
            if not isinstance(error, ValueError):
                _log.exception("a pass failed")
            # Without its traceback, whose frames hold the job and thereby the error itself.
            self._finish(batch[0], error.with_traceback(None))
            return
        seconds, rows = time.perf_counter() - began, sum(len(job.row) for job in batch)
        batch[0].served.speed.learn(batch[0].expected(piece, rows), seconds)
        self._watch(batch[0].served.name, rows, seconds)
        with self._changed:
            self._scheduler.spend(batch, seconds)
        for job, (x, state) in zip(batch, results, strict=True):
            done = job.advance(piece, x, state, seconds, rows)
            if done is not None:
                self._finish(job, done)

    def _finish(self, job: Job, result: Done | Exception) -> None:
        with self._changed:
            self._scheduler.end(job)
        _end(job, result)

    def _pass(self, batch: list[Job], piece: Piece) -> list[tuple[Tensor | None, State | None]]:
        first = batch[0]
        rows = sum(len(job.row) for job in batch)
        padded = max(rows, math.ceil(first.served.floor / first.narrowest(piece)))
        device = next(first.served.model.parameters()).device
        alone = len(batch) == 1 and padded == rows  # its state, which may be large, is not copied
        index = torch.arange(padded, device=device).clamp_max(rows - 1)  # repeats the last row
        seed = torch.cat([job.seed.to(device) for job in batch])[index]
        row = torch.cat([job.row.to(device) for job in batch])[index]
        prompts = [
            job.prompt[:, : piece.read].to(device) for job in batch if job.prompt is not None
        ]
        states = [
            _widen(job.state.to(device), len(job.row)) for job in batch if job.state is not None
        ]
        prompt = torch.cat(prompts)[index] if prompts else None
        state = None if not states else states[0] if alone else State.cat(states).select(index)
        if not piece.make:
            assert prompt is not None
            x, after = None, observe(first.served.model, prompt, state, seed=seed, rows=row)
        else:
            x, _, after = generate(
                first.served.model,
                num=padded,
                length=piece.make,
                prompt=prompt,
                chunk=piece.chunk,
                recondition=piece.recondition,
                temperature=first.temperature,
                observe="sample" if first.sample else "mean",
                seed=seed,
                state=state,
                rows=row,
            )
        x = None if x is None else x.cpu()
        if alone and not first.ends_with(piece):
            return [(x, after)]
        results = []
        for job, cut in zip(
            batch, torch.arange(rows).split([len(job.row) for job in batch]), strict=True
        ):
            needed = job.keep or not job.ends_with(piece)
            results.append((None if x is None else x[cut], after.select(cut) if needed else None))
        return results


def _end(job: Job, result: Done | Exception | None) -> None:
    """Gives a job its result, unless its client has left."""
    future = job.future
    job.release()
    if result is None or not future.set_running_or_notify_cancel():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def _return_memory() -> None:
    """Gives freed memory back to the system; glibc keeps blocks of up to 32 MiB, which states are made of."""
    with contextlib.suppress(
        OSError, AttributeError, TypeError
    ):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)


def _widen(state: State, rows: int) -> State:
    return state if state.batch == rows else state.repeat(rows)
