"""One thread that computes batches of jobs.

Between two pieces the `Scheduler` decides whose piece is next, and drops jobs whose clients have
left. Noise is a function of (seed, row, position), and batches are padded until bits no longer
depend on the number of rows, so a job has the same result in every batch.

There is one thread because kernels already use all cores. If the thread fails, every job that waits
or comes later is refused with 503.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from vssm.nn import State
from vssm.serve.errors import Refused
from vssm.serve.jobs import AnyJob, Done, FillJob, Job
from vssm.serve.models import Served
from vssm.serve.scheduler import Scheduler
from vssm.serve.settings import Settings

__all__ = ["Worker", "compute"]

_log = logging.getLogger("vssm.serve")


class Worker:
    """Creates the scheduler and, on `start`, the thread.

    Arguments:
        models: The models; they are measured at the start.
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
        """Why nothing is computed any more; None while all is well."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called in the thread when it has failed."""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vssm-worker", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Finishes all jobs, then stops the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def ready(self) -> bool:
        """Whether jobs are being computed."""
        return self._ready.is_set() and self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """The number of jobs that have not begun."""
        return self._scheduler.waiting

    @property
    def in_progress(self) -> int:
        """The number of jobs that have not ended."""
        return len(self._scheduler.jobs)

    def submit(self, job: AnyJob) -> "Future[Done]":
        """Queues a job, or raises `Refused`."""
        future, displaced = job.future, None
        try:
            with self._changed:
                if self.failure is not None:
                    raise Refused(503, "failed", self.failure)
                if self._closing:
                    raise Refused(503, "not_ready", "the server is stopping", retry_after=1)
                displaced = self._scheduler.admit(job)
                self._changed.notify()
        except Refused:
            job.release()
            raise
        if displaced is not None:
            message = "other clients need the place of this request; try again soon"
            _end(displaced, Refused(429, "busy", message, retry_after=1))
        return future

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # otherwise all jobs would wait forever
            _log.exception("computing failed")
            name = type(error).__name__
            with self._changed:
                self.failure = f"computing failed ({name}); the server's log says why"
                jobs, self._scheduler = self._scheduler.jobs, Scheduler(self._settings)
            for job in jobs:
                _end(job, Refused(503, "failed", self.failure))
            self.on_failure()

    def _work(self) -> None:
        if self._settings.threads is not None:
            torch.set_num_threads(self._settings.threads)
        for served in self.models:
            served.measure()
        self._ready.set()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._scheduler.jobs or self._closing)
                dropped = self._scheduler.drop(time.monotonic())
                batch = self._scheduler.take()
                closed = self._closing and not batch
            while dropped:
                _end(*dropped.pop())
            if closed:
                return
            if batch:
                self._compute(batch)
            del batch  # a thread that waits must not hold finished jobs

    def _compute(self, batch: list[AnyJob]) -> None:
        began, first = time.perf_counter(), batch[0]
        try:
            results = compute(batch)
        except Exception as error:
            if len(batch) > 1:  # a bad job must not hurt the others
                for job in batch:
                    self._compute([job])
            else:
                self._finish(first, _refusal(error))
            return
        seconds, rows = time.perf_counter() - began, sum(job.rows for job in batch)
        self._watch(first.served.name, rows, seconds)
        with self._changed:
            self._scheduler.spend(batch, seconds)
        for job, (x, state) in zip(batch, results, strict=True):
            done = job.advance(x, state, seconds, rows)
            if done is not None:
                self._finish(job, done)

    def _finish(self, job: AnyJob, result: Done | Refused) -> None:
        with self._changed:
            self._scheduler.end(job)
        _end(job, result)


def compute(batch: list[AnyJob]) -> list[tuple[Tensor | None, State | None]]:
    """Computes the next piece of every job, all in one call; returns new steps and states."""
    fills = [job for job in batch if isinstance(job, FillJob)]
    return _fill(fills) if fills else _make([job for job in batch if isinstance(job, Job)])


class _Rows:
    """The rows of all jobs of a batch, padded until bits do not depend on their number."""

    def __init__(self, batch: list[AnyJob], narrowest: int) -> None:
        self.served, self.sizes = batch[0].served, [job.rows for job in batch]
        rows = sum(self.sizes)
        self.padded = max(rows, math.ceil(self.served.floor / narrowest))
        self.exact = self.padded == rows
        # Repeats the last row.
        self.index = torch.arange(self.padded, device=self.served.device).clamp_max(rows - 1)

    def join(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.to(self.served.device) for tensor in tensors])[self.index]

    def cuts(self) -> tuple[Tensor, ...]:
        return torch.arange(sum(self.sizes)).split(self.sizes)


def _make(batch: list[Job]) -> list[tuple[Tensor | None, State | None]]:
    first, piece, served = batch[0], batch[0].piece, batch[0].served
    rows = _Rows([*batch], first.narrowest)
    seed, row = rows.join([job.seed for job in batch]), rows.join([job.row for job in batch])
    prompts = [job.prompt[:, : piece.read] for job in batch if job.prompt is not None]
    prompt = rows.join(prompts) if prompts else None
    states = [
        _widen(job.state.to(served.device), len(job.row)) for job in batch if job.state is not None
    ]
    alone = len(batch) == 1 and rows.exact  # do not copy the state, which may be large
    state = None if not states else states[0] if alone else State.cat(states).select(rows.index)
    if piece.make:
        x, _, after = served.generate(
            num=rows.padded,
            length=piece.make,
            prompt=prompt,
            chunk=piece.chunk,
            recondition=piece.recondition,
            temperature=first.temperature,
            observe="sample" if first.sample else "mean",
            state=state,
            seed=seed,
            rows=row,
        )
        x = x.cpu()
    else:
        assert prompt is not None
        x, after = None, served.observe(prompt, state, seed=seed, rows=row)
    if alone and not first.ends_with_piece:
        return [(x, after)]
    results = []
    for job, cut in zip(batch, rows.cuts(), strict=True):
        needed = job.keeps_state or not job.ends_with_piece
        results.append((None if x is None else x[cut], after.select(cut) if needed else None))
    return results


def _fill(batch: list[FillJob]) -> list[tuple[Tensor | None, State | None]]:
    first, rows = batch[0], _Rows([*batch], batch[0].x.shape[1])
    names = ("x", "known", "seed", "row")
    x, known, seed, row = (
        rows.join([getattr(job, name)[job.next_rows] for job in batch]) for name in names
    )
    made = first.served.fill(
        x,
        known,
        passes=first.passes,
        temperature=first.temperature,
        observe="sample" if first.sample else "mean",
        seed=seed,
        rows=row,
    ).cpu()
    return [(made[cut], None) for cut in rows.cuts()]


def _widen(state: State, rows: int) -> State:
    return state if state.batch == rows else state.repeat(rows)


def _refusal(error: Exception) -> Refused:
    if isinstance(error, ValueError):  # a mistake that no earlier check saw
        return Refused(422, "invalid", str(error))
    _log.error("a pass failed", exc_info=error)
    return Refused(500, "internal", "the server failed; its log says why")


def _end(job: AnyJob, result: Done | Refused | None) -> None:
    """Gives a job its result, unless its client has left."""
    future = job.future
    job.release()
    if result is None or not future.set_running_or_notify_cancel():
        return
    if isinstance(result, Refused):
        future.set_exception(result)
    else:
        future.set_result(result)
