"""The scheduler in simulated time: who is admitted, whose turn it is, what is answered."""

import itertools
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from vssm.serve.errors import Refused
from vssm.serve.settings import Settings
from vssm.serve.worker import Scheduler

PIECE = 0.25  # seconds
numbers = itertools.count()


class Request:
    """What the scheduler sees of a job: one that takes so many seconds, in pieces."""

    def __init__(self, seconds, now=0.0, timeout=60.0):
        self.seconds_left = seconds
        self.began, self.deadline = now, now + timeout
        self.short = seconds <= PIECE
        self.begun = False
        self.call = SimpleNamespace(key=next(numbers), rows=1, most=100)
        self.future = Future()


def drop(scheduler, now):
    late = scheduler.late(now)
    for job, _ in late:
        scheduler.jobs.remove(job)
    return late


def compute(scheduler, now):
    """Computes one batch; returns the time after it and the requests that have ended."""
    ended = []
    dropped = drop(scheduler, now)
    batch = scheduler.take()
    seconds = max((min(PIECE, job.seconds_left) for job in batch), default=PIECE)
    for job in batch:
        job.seconds_left -= seconds
        if job.seconds_left <= 1e-9:
            scheduler.jobs.remove(job)
            ended.append(job)
    return now + seconds, ended, dropped


def simulate(arrivals, until, settings=None):
    """Runs requests (time, seconds); returns those answered, refused and given up."""
    settings = settings or Settings()
    scheduler, now, coming = Scheduler(settings), 0.0, sorted(arrivals)
    answered, refused, late = [], [], []
    while now < until:
        while coming and coming[0][0] <= now:
            when, seconds = coming.pop(0)
            try:
                scheduler.admit(Request(seconds, when, settings.timeout))
            except Refused as error:
                assert error.status_code == 429 and int(error.headers["retry-after"]) >= 1
                refused.append(error)
        now, ended, dropped = compute(scheduler, now)
        answered += [(now - job.began, job) for job in ended]
        for job, why in dropped:
            (late if why.status_code == 504 else refused).append(job)
    return answered, refused, late


@pytest.mark.parametrize("seconds", [0.2, 4.0, 12.0])
def test_at_twice_the_load_that_fits_most_of_the_capacity_ends_in_answers(seconds):
    until = 300
    count = int(2 * until / seconds)
    arrivals = [(number * seconds / 2, seconds) for number in range(count)]
    answered, refused, late = simulate(arrivals, until)
    assert seconds * len(answered) > 0.9 * until
    assert not late
    assert all(took <= 60 for took, _ in answered)
    assert refused


def test_a_burst_of_large_requests_is_answered_as_far_as_the_timeout_allows():
    answered, refused, late = simulate([(0, 4)] * 120, 70)
    assert len(answered) >= 8 and not late, "those that began within 30 s"
    assert len(answered) + len(refused) == 120


def test_a_small_request_does_not_wait_for_large_ones():
    flood = [(number * 2.0, 4.0) for number in range(30)]
    small = [(0.1 + 0.7 * number, 0.01) for number in range(80)]
    answered, *_ = simulate(flood + small, 60)
    times = sorted(took for took, job in answered if job.short)
    assert len(times) == 80
    assert times[-1] < 1


def test_small_requests_pass_large_ones_and_do_not_starve_them():
    large = [(0, 6)] * 3
    small = [(number * 0.05, 0.1) for number in range(800)]  # twice what fits
    answered, *_ = simulate(large + small, 60)
    assert sum(job.short for _, job in answered) > 200
    assert sum(not job.short for _, job in answered) == 3


def test_a_request_that_does_not_begin_in_half_of_its_time_is_refused():
    scheduler = Scheduler(Settings(timeout=8))
    jobs = [Request(100, timeout=8) for _ in range(3)]
    for job in jobs:
        scheduler.admit(job)
    compute(scheduler, 0.0)
    assert scheduler.waiting == 2
    compute(scheduler, 0.25)
    assert drop(scheduler, 3.9) == []
    ((job, why),) = drop(scheduler, 4.0)
    assert job is jobs[2] and (why.status_code, why.type) == (429, "busy")
    assert {why.status_code for _, why in drop(scheduler, 8.0)} == {504}
    assert not scheduler.jobs


def test_a_request_that_never_ends_in_time_does_not_keep_others_out():
    answered, _, late = simulate([(0, 100), *((1 + number, 2) for number in range(20))], 60)
    assert len(answered) >= 12
    assert len(late) <= 1
