"""Computes the calls of all requests, in batches.

Between two calls the `Scheduler` decides whose call is next, and drops requests whose clients have
left. All this happens in the event loop; one thread computes, because kernels already use all
cores. If computing fails, every request that waits or comes later is refused with 503.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from vssm.serve.calls import Calls, compute
from vssm.serve.errors import Refused, invalid
from vssm.serve.models import Served
from vssm.serve.scheduler import Done, Job, Scheduler
from vssm.serve.settings import Settings

__all__ = ["Worker"]

_log = logging.getLogger("vssm.serve")


class Worker:
    """Takes requests; `run` computes them.

    Arguments:
        models: The models, which are warmed up at the start.
        settings: The limits.
        watch: Called with (model name, rows) after every batch.
    """

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
        """Takes no more requests; `run` returns when those that are there have ended."""
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

    def _warm_up(self) -> None:
        if self._settings.threads is not None:
            torch.set_num_threads(self._settings.threads)
        for served in self.models:
            served.warm_up()

    async def _in_thread(self, function: Callable[..., Any], *given: object) -> Any:  # noqa: ANN401
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *given)

    async def _take_turn(self) -> None:
        for job, why in self.scheduler.late(time.monotonic()):
            self._end(job, why)
        if batch := self.scheduler.take():
            await self._compute(batch)

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
