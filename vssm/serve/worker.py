"""Computes the calls of all requests, in batches.

A request of one call is short, any other is long.

| question | rule |
| --- | --- |
| Is a request admitted? | Up to a number of requests. |
| Who is next? | The oldest short request and the two oldest long ones, in turns. |
| What is a batch? | Requests whose next calls agree, up to a number of rows and cells. |
| When is it too late? | After half of the time if it has not begun, else after all of it. |

Requests whose clients have left are dropped between two calls. All this happens in the event loop;
one thread computes, because kernels already use all cores. If computing fails, every request that
waits or comes later is refused with 503.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vssm.nn import State
from vssm.serve.calls import Call, Calls, compute
from vssm.serve.errors import Refused, invalid
from vssm.serve.models import Served
from vssm.serve.settings import Settings

_log = logging.getLogger("vssm.serve")
_UNDER_WAY = 2  # long requests that alternate, so that a very long one does not hold up all
_TO_COMPUTE = 0.5  # share of its time that a request must have left when it begins


class Done(NamedTuple):
    """The result of a request, or of its calls so far."""

    x: Any
    """The result, such as new steps; None if data was only read."""
    state: State | None
    """Where to resume."""
    seconds: float
    """How long its batches took so far."""
    rows: int
    """How many rows the last batch had, including rows of other requests."""


@dataclass(eq=False)
class Job:
    """A request in progress."""

    calls: Calls
    call: Call  # the next one
    deadline: float  # of `time.monotonic`
    future: "asyncio.Future[Done]"
    """Gets the result; cancelling it drops the request."""
    each: Callable[[Done], None] | None = None
    """Gets the result of every call."""
    short: bool = True
    begun: bool = False
    seconds: float = 0.0


class Scheduler:
    """Holds the requests in progress, and decides whose call is next."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._turn = settings, 0
        self.jobs: list[Job] = []
        """All requests in progress, in the order of their arrival."""

    def admit(self, job: Job) -> None:
        """Adds a request, or refuses it with 429."""
        if len(self.jobs) >= self._settings.max_queue:
            raise Refused(429, "busy", f"{len(self.jobs)} requests are in progress; try again soon")
        self.jobs.append(job)

    @property
    def waiting(self) -> int:
        """The number of requests that have not begun."""
        return sum(not job.begun for job in self.jobs)

    def late(self, now: float) -> list[tuple[Job, Refused | None]]:
        """Returns the requests whose clients have left (None) and those that are too late."""
        timeout, late = self._settings.timeout, []
        for job in self.jobs:
            if job.future.cancelled():
                late.append((job, None))
            elif now >= job.deadline:
                message = f"the request took more than {timeout:g} s; ask for less at once"
                late.append((job, Refused(504, "timeout", message)))
            elif not job.begun and now >= job.deadline - _TO_COMPUTE * timeout:
                message = "other requests took too long; try again"
                late.append((job, Refused(429, "busy", message)))
        return late

    def take(self) -> list[Job]:
        """Returns the requests whose next calls are computed together; empty if there are none."""
        if not self.jobs:
            return []
        short = [job for job in self.jobs if job.short]
        long = [job for job in self.jobs if not job.short][:_UNDER_WAY]
        self._turn += 1
        if short and (not long or self._turn % 2):
            first = short[0]
        else:
            first = long[self._turn // 2 % len(long)]
        batch, rows, key = [first], first.call.rows, first.call.key
        most = min(self._settings.max_rows, first.call.most)
        for job in self.jobs:
            if rows + job.call.rows <= most and job is not first and job.call.key == key:
                batch.append(job)
                rows += job.call.rows
        for job in batch:
            job.begun = True
        return batch


class Worker:
    """Takes requests; `run` computes them. `watch` gets (model name, rows) after every batch."""

    def __init__(
        self,
        models: list[Served],
        settings: Settings | None = None,
        watch: Callable[[str, int], None] = lambda name, rows: None,
    ) -> None:
        self.models = models
        self._watch, self._settings = watch, settings or Settings()
        self.scheduler: Scheduler = Scheduler(self._settings)
        self._thread = ThreadPoolExecutor(1, "vssm-worker")
        self._changed, self._closing = asyncio.Event(), False
        self.ready: bool = False
        """Whether requests are being computed."""
        self.failure: str | None = None
        """Why nothing is computed any more; None while all is well."""
        self.on_failure: Callable[[], None] = lambda: None

    def submit(
        self, calls: Calls, each: Callable[[Done], None] | None = None
    ) -> "asyncio.Future[Done]":
        """Queues a request, or raises `Refused`; `each` gets the result of every call."""
        if self.failure is not None:
            raise Refused(503, "failed", self.failure)
        if self._closing:
            raise Refused(503, "not_ready", "the server is stopping")
        call, future = next(calls), asyncio.get_running_loop().create_future()
        deadline = time.monotonic() + self._settings.timeout
        self.scheduler.admit(Job(calls, call, deadline, future, each, short=call.last))
        self._changed.set()
        return future

    def close(self) -> None:
        """Takes no more requests; `run` returns once the requests in progress have ended."""
        self._closing = True
        self._changed.set()

    async def run(self) -> None:
        """Computes until the end."""
        try:
            await self._in_thread(self._warm_up)
            self.ready = True
            while self.scheduler.jobs or not self._closing:
                if not self.scheduler.jobs:
                    self._changed.clear()
                    await self._changed.wait()
                await self._take_turn()
        except BaseException as error:  # otherwise all requests would wait forever
            _log.exception("computing failed")
            name = type(error).__name__
            self.failure = f"computing failed ({name}); the server's log says why"
            for job in list(self.scheduler.jobs):
                self._end(job, Refused(503, "failed", self.failure))
            self.on_failure()
        self.ready = False
        self._thread.shutdown()

    async def _take_turn(self) -> None:  # a frame of its own, so that no request outlives its turn
        for job, why in self.scheduler.late(time.monotonic()):
            self._end(job, why)
        if batch := self.scheduler.take():
            await self._compute(batch)

    def _warm_up(self) -> None:
        if self._settings.threads is not None:
            torch.set_num_threads(self._settings.threads)
        for served in self.models:
            served.warm_up()

    async def _in_thread(self, function: Callable[..., Any], *given: object) -> Any:  # noqa: ANN401
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *given)

    async def _compute(self, batch: list[Job]) -> None:
        began = time.perf_counter()
        try:
            results = await self._in_thread(compute, [job.call for job in batch])
        except Exception as error:
            if len(batch) == 1:
                self._end(batch[0], _refusal(error))
                return
            for job in batch:  # a bad request must not hurt the others
                await self._compute([job])
            return
        seconds, rows = time.perf_counter() - began, sum(job.call.rows for job in batch)
        self._watch(batch[0].call.name, rows)
        for job, (x, state) in zip(batch, results, strict=True):
            job.seconds += seconds
            if job.each is not None:
                job.each(Done(x, None, job.seconds, rows))
            try:
                job.call = job.calls.send((x, state))
            except StopIteration as end:
                x, state = end.value
                self._end(job, Done(x, state, job.seconds, rows))

    def _end(self, job: Job, result: Done | Refused | None) -> None:
        """Takes out a request and gives it its result, unless its client has left."""
        self.scheduler.jobs.remove(job)
        if job.future.done():
            return
        if isinstance(result, Done):
            job.future.set_result(result)
        elif result is not None:
            job.future.set_exception(result)


def _refusal(error: Exception) -> Refused:
    if isinstance(error, ValueError):  # a mistake that no earlier check saw
        return invalid(str(error))
    _log.error("a call failed", exc_info=error)
    return Refused(500, "internal", "the server failed; its log says why")
