"""Decides which requests are admitted and whose piece is computed next.

A request of one piece is short, any other is long. The short and the long requests of a client are
two flows.

| question | rule |
| --- | --- |
| Is a request admitted? | Up to a number of requests, of which one client has at most half. |
| Who is next? | The flow that has had the least time. An idle flow saves no time up. |
| How many at once? | Two long requests, and their batches. The others begin when one ends. |
| What is a batch? | Requests whose next pieces agree, up to a number of rows and cells. |
| When is it too late? | After half of the time if it has not begun, else after all of it. |

The worker calls all methods under its lock.
"""

from vssm.serve.errors import Refused
from vssm.serve.jobs import AnyJob
from vssm.serve.settings import Settings

__all__ = ["Scheduler"]

_UNDER_WAY = 2  # long requests that alternate
_TO_COMPUTE = 0.5  # share of its time that a request must have left when it begins


class Scheduler:
    """Holds the requests in progress."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.jobs: list[AnyJob] = []
        """All requests in progress, in the order of their arrival or of their last piece."""
        self._begun: set[AnyJob] = set()
        self._used: dict[tuple[str, bool], float] = {}  # seconds that each flow has had

    @property
    def waiting(self) -> int:
        """The number of requests that have not begun."""
        return len(self.jobs) - len(self._begun)

    def admit(self, job: AnyJob) -> None:
        """Adds a request, or refuses it with 429."""
        most = self._settings.max_queue
        own = sum(other.client == job.client for other in self.jobs)
        if len(self.jobs) >= most or own >= -(-most // 2):
            message = f"{len(self.jobs)} requests are in progress, {own} of them yours; try again"
            raise Refused(429, "busy", f"{message} soon", retry_after=1)
        self._used.setdefault(_flow(job), min(self._used.values(), default=0.0))
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
        full = sum(not job.short for job in self._begun) >= _UNDER_WAY
        ready = [job for job in self.jobs if job.short or job in self._begun or not full]
        if not ready:
            return []
        first = min(ready, key=lambda job: self._used[_flow(job)])
        self.jobs.remove(first)
        self.jobs.append(first)  # the others of its flow come before its next piece
        batch, rows = [first], first.rows
        most = min(self._settings.max_rows, first.cells // first.piece.steps)
        for job in self.jobs[:-1] if self._settings.batching else ():
            if job.key == first.key and rows + job.rows <= most:
                batch.append(job)
                rows += job.rows
        self._begun.update(batch)
        return batch

    def spend(self, batch: list[AnyJob], seconds: float) -> None:
        """Charges the flows of a batch for its time, by their rows."""
        rows = sum(job.rows for job in batch)
        for job in batch:
            self._used[_flow(job)] += seconds * job.rows / rows

    def end(self, job: AnyJob) -> None:
        """Takes out a request."""
        self.jobs.remove(job)
        self._begun.discard(job)
        if all(_flow(other) != _flow(job) for other in self.jobs):
            del self._used[_flow(job)]


def _flow(job: AnyJob) -> tuple[str, bool]:
    return job.client, job.short
