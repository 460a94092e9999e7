"""The scheduler in simulated time: who is admitted, whose turn it is, what is answered."""

import itertools
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from vssm.serve.errors import Refused
from vssm.serve.scheduler import Scheduler
from vssm.serve.settings import Settings

PIECE = 0.25  # seconds
numbers = itertools.count()


class Request:
    """What the scheduler sees of a job: one that takes so many seconds, in pieces."""

    def __init__(self, seconds, client="a", now=0.0, timeout=60.0, key=None):
        self.seconds_left, self.client = seconds, client
        self.began, self.deadline = now, now + timeout
        self.short = seconds <= PIECE
        self.key = next(numbers) if key is None else key
        self.rows, self.cells = 1, 100
        self.piece = SimpleNamespace(steps=1)
        self.future = Future()


def compute(scheduler, now):
    """Computes one batch; returns the time after it and the requests that have ended."""
    ended = []
    dropped = scheduler.drop(now)
    batch = scheduler.take()
    seconds = max((min(PIECE, job.seconds_left) for job in batch), default=PIECE)
    if batch:
        scheduler.spend(batch, seconds)
    for job in batch:
        job.seconds_left -= seconds
        if job.seconds_left <= 1e-9:
            scheduler.end(job)
            ended.append(job)
    return now + seconds, ended, dropped


def simulate(arrivals, until, settings=None):
    """Runs requests (time, seconds, client); returns those answered, refused and given up."""
    settings = settings or Settings()
    scheduler, now, coming = Scheduler(settings), 0.0, sorted(arrivals)
    answered, refused, late = [], [], []
    while now < until:
        while coming and coming[0][0] <= now:
            when, seconds, client = coming.pop(0)
            try:
                scheduler.admit(Request(seconds, client, when, settings.timeout))
            except Refused as error:
                assert error.status_code == 429 and int(error.headers["retry-after"]) >= 1
                refused.append(error)
        now, ended, dropped = compute(scheduler, now)
        answered += [(now - job.began, job) for job in ended]
        for job, why in dropped:
            (late if why.status_code == 504 else refused).append(job)
    return answered, refused, late


@pytest.mark.parametrize("clients", [1, 3, 40])
@pytest.mark.parametrize("seconds", [0.2, 4.0, 12.0])
def test_at_twice_the_load_that_fits_most_of_the_capacity_ends_in_answers(clients, seconds):
    until = 300
    count = int(2 * until / seconds)
    arrivals = [
        (number * seconds / 2, seconds, f"client {number % clients}") for number in range(count)
    ]
    answered, refused, late = simulate(arrivals, until)
    assert seconds * len(answered) > 0.9 * until
    assert not late
    assert all(took <= 60 for took, _ in answered)
    assert refused


def test_a_burst_of_large_requests_is_answered_as_far_as_the_timeout_allows():
    answered, refused, late = simulate([(0, 4, "a")] * 120, 70)
    assert len(answered) >= 8 and not late, "those that began within 30 s"
    assert len(answered) + len(refused) == 120


@pytest.mark.parametrize("large", [0.1, 4.0])
def test_a_small_request_of_another_client_does_not_wait(large):
    flood = [(number * large / 2, large, "flood") for number in range(int(120 / large))]
    small = [(0.1 + 0.7 * number, 0.01, "small") for number in range(80)]
    answered, *_ = simulate(flood + small, 60)
    times = sorted(took for took, job in answered if job.client == "small")
    assert len(times) == 80
    assert times[-1] < 1


def test_small_requests_of_the_same_client_pass_large_ones_and_do_not_starve_them():
    large = [(0, 6, "a")] * 3
    small = [(number * 0.05, 0.1, "a") for number in range(800)]  # twice what fits
    answered, *_ = simulate(large + small, 60)
    assert sum(job.short for _, job in answered) > 200
    assert sum(not job.short for _, job in answered) == 3


def test_a_request_that_joins_a_batch_before_its_turn_does_not_hold_up_another_client():
    scheduler = Scheduler(Settings())
    for key in ("same", *range(40), "same"):
        scheduler.admit(Request(0.2, "a", key=key))
    now, _, _ = compute(scheduler, 0.0)  # the first and the last, which agree
    other = Request(0.2, "b")
    scheduler.admit(other)
    ended = [compute(scheduler, now)[1] for _ in range(3)]
    assert [other] in ended


def test_clients_take_turns_by_the_time_that_they_use():
    greedy = [(0, 4, "greedy")] * 10
    modest = [(10.1, 4, "modest")] * 2
    answered, *_ = simulate(greedy + modest, 60)
    order = [job.client for _, job in answered]
    assert order.index("modest") <= 5
    assert len(order) - order[::-1].index("modest") <= 8


def test_a_client_has_at_most_half_of_the_queue():
    scheduler = Scheduler(Settings(max_queue=4))
    for client in ("greedy", "greedy", "modest"):
        scheduler.admit(Request(0.1, client))
    with pytest.raises(Refused, match="3 requests are in progress, 2 of them yours"):
        scheduler.admit(Request(0.1, "greedy"))
    scheduler.admit(Request(0.1, "modest"))
    with pytest.raises(Refused, match="4 requests are in progress, 0 of them yours"):
        scheduler.admit(Request(0.1, "third"))


def test_a_request_that_does_not_begin_in_half_of_its_time_is_refused():
    scheduler = Scheduler(Settings(timeout=8))
    jobs = [Request(100, timeout=8) for _ in range(3)]
    for job in jobs:
        scheduler.admit(job)
    compute(scheduler, 0.0)
    assert scheduler.waiting == 2
    compute(scheduler, 0.25)
    assert scheduler.drop(3.9) == []
    ((job, why),) = scheduler.drop(4.0)
    assert job is jobs[2] and (why.status_code, why.type) == (429, "busy")
    assert {why.status_code for _, why in scheduler.drop(8.0)} == {504}
    assert not scheduler.jobs


def test_a_client_that_comes_back_has_saved_no_time_up():
    scheduler = Scheduler(Settings())
    for _ in range(40):
        scheduler.admit(Request(0.2, "a"))
    now = 0.0
    for _ in range(10):
        now, *_ = compute(scheduler, now)
    for _ in range(8):
        scheduler.admit(Request(0.2, "b"))
    order = [compute(scheduler, now)[1][0].client for _ in range(16)]
    assert order.count("b") == 8 and order[:8].count("b") in (3, 4, 5)


def test_a_request_that_never_ends_in_time_does_not_keep_others_out():
    answered, _, late = simulate(
        [(0, 100, "a"), *((1 + number, 2, "b") for number in range(20))], 60
    )
    assert len(answered) >= 12
    assert len(late) == 0 or late[0].client == "a"
