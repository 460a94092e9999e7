"""Programs that are tested without a GPU: on a CPU a replay runs the recorded function again."""

from types import SimpleNamespace

import pytest
import torch

from vssm.engine import programs
from vssm.engine.programs import Recorder


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A device on which calls are recorded."""
    monkeypatch.setattr(programs, "DEVICES", ("cuda", "cpu"))
    return torch.device(request.param)


@pytest.fixture
def counts(monkeypatch):
    """Counts recordings and replays."""
    counted = SimpleNamespace(recorded=0, replayed=0)
    record = Recorder.record

    def counting_record(*arguments):
        counted.recorded += 1
        replay = record(*arguments)

        def counting_replay():
            counted.replayed += 1
            replay()

        return counting_replay

    monkeypatch.setattr(Recorder, "record", counting_record)
    return counted


@pytest.fixture
def plainly(monkeypatch):
    """Calls a function while nothing is recorded or replayed."""

    def call(function, *arguments, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(programs, "DEVICES", ())
            return function(*arguments, **options)

    return call
