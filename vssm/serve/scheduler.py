"""Decides which requests are admitted and whose call is computed next.

A request of one call is short, any other is long.

| question | rule |
| --- | --- |
| Is a request admitted? | Up to a number of requests. |
| Who is next? | The oldest short request and the two oldest long ones, in turns. |
| What is a batch? | Requests whose next calls agree, up to a number of rows and cells. |
| When is it too late? | After half of the time if it has not begun, else after all of it. |
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from vssm.nn import State
from vssm.serve.calls import Call, Calls
from vssm.serve.errors import Refused
from vssm.serve.settings import Settings

__all__ = ["Done", "Job", "Scheduler"]

_UNDER_WAY = 2  # long requests that alternate, so that one that is too long does not hold up all
_TO_COMPUTE = 0.5  # share of its time that a request must have left when it begins


class Done(NamedTuple):
    """The result of a request, or of its calls so far."""

    x: Any
    """What was asked for, such as new steps; None when data were only read."""
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
    call: Call
    """The next one."""
    deadline: float
    """In seconds of `time.monotonic`."""
    future: "asyncio.Future[Done]"
    """Gets the result; cancelling it drops the request."""
    each: Callable[[Done], None] | None = None
    """Gets the result of every call."""
    short: bool = True
    begun: bool = False
    seconds: float = 0.0


class Scheduler:
    """Holds the requests in progress."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.jobs: list[Job] = []
        """All requests in progress, in the order of their arrival."""
        self._turn = 0

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
