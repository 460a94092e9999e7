"""One thread that computes batches of jobs.

Between two pieces the `Scheduler` decides whose piece is next, and drops jobs whose clients have
left. Noise is a function of (seed, row, position), so a job has the same result in every batch, to
float rounding.

There is one thread because kernels already use all cores. If the thread fails, every job that waits
or comes later is refused with 503.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from vssm.nn import State
from vssm.serve.errors import Refused, invalid
from vssm.serve.jobs import AnyJob, CallJob, Done, FillJob, Job
from vssm.serve.models import Served
from vssm.serve.scheduler import Scheduler
from vssm.serve.settings import Settings

__all__ = ["Worker", "compute"]

_log = logging.getLogger("vssm.serve")


class Worker:
    """Creates the scheduler and, on `start`, the thread.

    Arguments:
        models: The models, which are warmed up at the start.
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
        self.start: Callable[[], None] = self._thread.start

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
        future = job.future
        try:
            with self._changed:
                if self.failure is not None:
                    raise Refused(503, "failed", self.failure)
                if self._closing:
                    raise Refused(503, "not_ready", "the server is stopping", retry_after=1)
                self._scheduler.admit(job)
                self._changed.notify()
        except Refused:
            job.release()
            raise
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
            served.warm_up()
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
        self._watch(first.name, rows, seconds)
        for job, (x, state) in zip(batch, results, strict=True):
            done = job.advance(x, state, seconds, rows)
            if done is not None:
                self._finish(job, done)

    def _finish(self, job: AnyJob, result: Done | Refused) -> None:
        with self._changed:
            self._scheduler.end(job)
        _end(job, result)


def compute(batch: list[Any]) -> list[tuple[Any, Any]]:
    """Computes the next piece of every job, all in one call; returns new steps and states."""
    if isinstance(batch[0], CallJob):
        return [(job.call(), None) for job in batch]
    return _fill(batch) if isinstance(batch[0], FillJob) else _make(batch)


def _make(batch: list[Job]) -> list[tuple[Any, Any]]:
    first, piece, device = batch[0], batch[0].piece, batch[0].served.device
    seed, row = (torch.cat([getattr(job, name) for job in batch]) for name in ("seed", "row"))
    noise: dict[str, Any] = {"seed": seed, "rows": row}
    prompt = state = None
    if piece.read:
        prompt = torch.cat([job.prompt[:, : piece.read] for job in batch if job.prompt is not None])
        prompt = prompt.to(device)
    if first.state is not None:
        states = [_widen(job.state.to(device), job.rows) for job in batch if job.state is not None]
        state = states[0] if len(states) == 1 else State.cat(states)
    if not piece.make:
        assert prompt is not None
        x, after = None, first.served.engine.observe(prompt, state, **noise)
    else:
        x, _, after = first.served.engine.generate(
            num=len(row),
            length=piece.make,
            prompt=prompt,
            chunk=piece.chunk,
            recondition=piece.recondition,
            temperature=first.temperature,
            observe="sample" if first.sample else "mean",
            state=state,
            **noise,
        )
        x = x.cpu()
    if len(batch) == 1:
        return [(x, after)]
    cuts = torch.arange(len(row)).split([job.rows for job in batch])
    return [(None if x is None else x[cut], after.select(cut)) for cut in cuts]


def _fill(batch: list[FillJob]) -> list[tuple[Any, Any]]:
    first = batch[0]
    x, known, seed, row = (
        torch.cat([getattr(job, name)[job.next_rows] for job in batch])
        for name in ("x", "known", "seed", "row")
    )
    noise: dict[str, Any] = {"seed": seed, "rows": row}
    made = first.served.engine.fill(
        x.to(first.served.device),
        known.to(first.served.device),
        passes=first.passes,
        temperature=first.temperature,
        observe="sample" if first.sample else "mean",
        **noise,
    )
    return [(part, None) for part in made.cpu().split([job.rows for job in batch])]


def _widen(state: State, rows: int) -> State:
    return state if state.batch == rows else state.repeat(rows)


def _refusal(error: Exception) -> Refused:
    if isinstance(error, ValueError):  # a mistake that no earlier check saw
        return invalid(str(error))
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
