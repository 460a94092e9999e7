"""Decides which requests are admitted and whose piece is computed next.

A request is computed in pieces of bounded size. A request of one piece is short, any other is long.

| question | rule |
| --- | --- |
| Is a request admitted? | If it is expected to end in time, given the requests before it. |
| Who is next? | Clients take turns, by the time that their requests take. |
| Short or long? | Both kinds get the same time: short ones pass long ones, neither starves. |
| How many at once? | Two long requests, and their batches, alternate piece by piece. |
| What is a batch? | Requests whose next pieces agree, up to a number of rows and cells. |

Long requests begin late and then end soon: if all advanced together, all would end too late. Turns
are start-time fair queueing (Goyal, Vin and Cheng, 1996). The worker calls all methods under its
lock.
"""

import bisect
import math
from collections import Counter
from typing import TYPE_CHECKING

from vssm.serve.errors import Refused
from vssm.serve.settings import Settings

if TYPE_CHECKING:
    from vssm.serve.jobs import Job

__all__ = ["Scheduler"]

_UNDER_WAY = 2  # long requests that alternate
_SAFE = 0.8  # share of the timeout that an admitted request may be expected to take


class _Lane:
    """The short or the long requests that have not begun, sorted by turn."""

    def __init__(self) -> None:
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.used = 0.0
        """Seconds of computing that this lane has had."""
        self._clock = 0.0  # the latest turn that has begun
        self._ends: dict[str, float] = {}  # where the last request of each client ends

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def turn(self, client: str) -> float:
        """Returns the turn that the next request of a client gets."""
        return max(self._clock, self._ends.get(client, 0.0))

    def add(self, job: "Job") -> None:
        job.turn = self.turn(job.client)
        job.turn_end = self._ends[job.client] = job.turn + job.seconds_left
        bisect.insort(self.waiting, job, key=lambda other: other.turn)

    def begin(self, job: "Job", in_turn: bool = True) -> None:
        """Begins a request. A request that joins a batch before its turn does not move the clock:
        otherwise the next client would wait for all turns in between."""
        self.waiting.remove(job)
        self.running.append(job)
        if in_turn:
            self._clock = max(self._clock, job.turn)
        self._ends = {client: end for client, end in self._ends.items() if end > self._clock}

    def remove(self, job: "Job") -> None:
        if job in self.running:
            self.running.remove(job)
        else:
            self.waiting.remove(job)
            if job.client in self._ends:  # it used no time
                self._ends[job.client] -= job.turn_end - job.turn


class Scheduler:
    """Holds the requests in progress.

    Arguments:
        settings: The limits.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._short, self._long = _Lane(), _Lane()

    @property
    def jobs(self) -> "list[Job]":
        """All requests in progress."""
        return [job for lane in (self._short, self._long) for job in (*lane.running, *lane.waiting)]

    @property
    def waiting(self) -> int:
        """The number of requests that have not begun."""
        return len(self._short.waiting) + len(self._long.waiting)

    def admit(self, job: "Job") -> "Job | None":
        """Adds a request or refuses it with 429; returns a request that lost its place, if any."""
        lane, other = (self._short, self._long) if job.short else (self._long, self._short)
        turn = lane.turn(job.client)
        ahead = [*lane.running, *(one for one in lane.waiting if one.turn <= turn)]
        if ahead:  # the first of its kind is always admitted: only computing shows its real time
            seconds = self._until_end(ahead, job) * (2 if other.busy else 1)
            late = math.ceil(seconds - _SAFE * self._settings.timeout)
            if late > 0:
                message = f"the answer would take about {seconds:.0f} s; try later or ask for less"
                wait = min(late, math.ceil(self._settings.timeout))
                raise Refused(429, "busy", message, retry_after=wait)
        displaced = self._make_place(job.client)
        if not lane.busy:
            lane.used = max(lane.used, other.used)  # unused time is not saved up
        lane.add(job)
        return displaced

    def drop(self, now: float) -> "list[tuple[Job, Refused | None]]":
        """Takes out the requests whose clients have left (None) and those that are too late."""
        dropped: list[tuple[Job, Refused | None]] = []
        for job in self.jobs:
            if job.future.cancelled():
                dropped.append((job, None))
            elif now >= job.deadline:
                limit = f"{self._settings.timeout:g} s"
                message = f"the request took more than {limit}; ask for fewer sequences or steps"
                dropped.append((job, Refused(504, "timeout", message, retry_after=1)))
        late = [job for job in self._long.waiting if now + job.seconds_left > job.deadline]
        for job in late if len(self.jobs) > 1 else ():  # when alone, it may try
            if all(job is not other for other, _ in dropped):
                message = "other requests took longer than expected; try again"
                dropped.append((job, Refused(429, "busy", message, retry_after=1)))
        for job, _ in dropped:
            self.end(job)
        return dropped

    def take(self) -> "list[Job]":
        """Returns the requests whose next pieces are computed together; empty if there are none."""
        lanes = [lane for lane in (self._short, self._long) if lane.busy]
        if not lanes:
            return []
        lane = min(lanes, key=lambda lane: lane.used)
        if lane is self._short:
            lane.begin(lane.waiting[0])
        while lane is self._long and lane.waiting and len(lane.running) < _UNDER_WAY:
            if not self._fits(lane.waiting[0]):
                break
            lane.begin(lane.waiting[0])
        first = lane.running.pop(0)
        lane.running.append(first)  # the others come before its next piece
        return [first, *self._companions(first, lane)] if self._settings.batching else [first]

    def spend(self, batch: "list[Job]", seconds: float) -> None:
        """Notes the time that a batch took."""
        (self._short if batch[0].short else self._long).used += seconds

    def end(self, job: "Job") -> None:
        """Takes out a request."""
        (self._short if job.short else self._long).remove(job)

    def _companions(self, first: "Job", lane: _Lane) -> "list[Job]":
        key, rows, found = first.key, len(first.row), []
        most = min(self._settings.max_rows, first.served.cells // first.piece.steps)
        for job in (*lane.running[:-1], *lane.waiting):
            if rows + len(job.row) > most or job.key != key:
                continue
            if job in lane.waiting:
                if not self._fits(job):
                    continue
                lane.begin(job, in_turn=False)
            found.append(job)
            rows += len(job.row)
        return found

    def _fits(self, job: "Job") -> bool:
        """Returns whether the states of the long requests under way leave room for one more."""
        held = sum(other.bytes for other in self._long.running)
        return job.short or not held or held + job.bytes <= self._settings.work_mib * 2**20

    def _until_end(self, ahead: "list[Job]", job: "Job") -> float:
        """Returns the expected seconds until a request ends, if no other comes."""
        alone = [other.seconds_left for other in ahead]
        if sum(alone) < 1:
            return sum(alone) + job.seconds_left
        total, longest = self._together([*ahead, job]), max(alone)
        # Two alternate, so the longest takes no more time than all the others.
        return min(total, 2 * max(total - longest, job.seconds_left))

    def _together(self, jobs: "list[Job]") -> float:
        """Returns the expected seconds of requests; equal keys share the fixed costs of passes."""
        rows: Counter = Counter()
        for job in jobs:
            rows[job.key] += len(job.row)
        total = 0.0
        for job in jobs:
            mates = min(rows[job.key], self._settings.max_rows) if self._settings.batching else 1
            fixed, variable = job.costs
            total += fixed * min(1.0, len(job.row) / mates) + variable
        return total

    def _make_place(self, client: str) -> "Job | None":
        """Returns None if there is a place, else the latest request of the client with the most."""
        jobs = self.jobs
        if len(jobs) < self._settings.max_queue:
            return None
        held = Counter(job.client for job in jobs)
        greediest, most = held.most_common(1)[0]
        waiting = [*self._short.waiting, *self._long.waiting]
        waiting = [job for job in waiting if job.client == greediest]
        if most <= held[client] + 1 or not waiting:
            message = f"{self._settings.max_queue} requests are in progress; try again soon"
            raise Refused(429, "busy", message, retry_after=1)
        displaced = max(waiting, key=lambda job: job.turn)
        self.end(displaced)
        return displaced
