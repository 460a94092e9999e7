"""Decides which requests are admitted and whose piece is computed next.

A request of one piece is short, any other is long.

| question | rule |
| --- | --- |
| Is a request admitted? | Up to a number of requests. |
| Who is next? | The oldest short request and the two oldest long ones, in turns. |
| What is a batch? | Requests whose next pieces agree, up to a number of rows and cells. |
| When is it too late? | After half of the time if it has not begun, else after all of it. |

The worker calls all methods under its lock.
"""

from vssm.serve.errors import Refused
from vssm.serve.jobs import AnyJob
from vssm.serve.settings import Settings

__all__ = ["Scheduler"]

_UNDER_WAY = 2  # long requests that alternate, so that one that is too long does not hold up all
_TO_COMPUTE = 0.5  # share of its time that a request must have left when it begins


class Scheduler:
    """Holds the requests in progress."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.jobs: list[AnyJob] = []
        """All requests in progress, in the order of their arrival."""
        self._begun: set[AnyJob] = set()
        self._turn = 0

    @property
    def waiting(self) -> int:
        """The number of requests that have not begun."""
        return len(self.jobs) - len(self._begun)

    def admit(self, job: AnyJob) -> None:
        """Adds a request, or refuses it with 429."""
        if len(self.jobs) >= self._settings.max_queue:
            message = f"{len(self.jobs)} requests are in progress; try again soon"
            raise Refused(429, "busy", message, retry_after=1)
        self.jobs.append(job)

    def drop(self, now: float) -> list[tuple[AnyJob, Refused | None]]:
        """Takes out the requests whose clients have left (None) and those that are too late."""
        timeout, dropped = self._settings.timeout, []
        for job in self.jobs:
            if job.future.cancelled():
                dropped.append((job, None))
            elif now >= job.deadline:
                message = f"the request took more than {timeout:g} s; ask for less at once"
                dropped.append((job, Refused(504, "timeout", message, retry_after=1)))
            elif job not in self._begun and now >= job.deadline - _TO_COMPUTE * timeout:
                message = "other requests took too long; try again"
                dropped.append((job, Refused(429, "busy", message, retry_after=1)))
        for job, _ in dropped:
            self.end(job)
        return dropped

    def take(self) -> list[AnyJob]:
        """Returns the requests whose next pieces are computed together; empty if there are none."""
        short = [job for job in self.jobs if job.short]
        long = [job for job in self.jobs if not job.short][:_UNDER_WAY]
        if not self.jobs:
            return []
        self._turn += 1
        if short and (not long or self._turn % 2):
            first = short[0]
        else:
            first = long[self._turn // 2 % len(long)]
        batch, rows = [first], first.rows
        most = min(self._settings.max_rows, first.cells // first.piece.steps)
        for job in self.jobs if self._settings.batching else ():
            if job.key == first.key and job is not first and rows + job.rows <= most:
                batch.append(job)
                rows += job.rows
        self._begun.update(batch)
        return batch

    def end(self, job: AnyJob) -> None:
        """Takes out a request."""
        self.jobs.remove(job)
        self._begun.discard(job)
