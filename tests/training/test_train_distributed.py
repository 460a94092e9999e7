"""Several processes train as one does: the same losses and folder; killing one ends all."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vssm
from tests.conftest import relative_error
from tests.tiny_runs import StopAt, log, newest, run, stopped, tiny

ROOT = Path(__file__).parents[2]

# With some validations that are not the best, and weights that move enough to tell averaged ones.
SHARDED = {"ema": 0.9, "learning_rate": 0.3, "epochs": 6}

COMPARED = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
import torch.distributed as dist
from tests.tiny_runs import run, tiny

folder = Path(sys.argv[1])
dist.init_process_group("gloo")  # one group for all: torchrun takes seconds to start
run(tiny("tvae"), folder / "ddp", resume=True)
run(tiny("ssm", optimizer="muon"), folder / "muon", resume=True)
run(tiny("tvae", fsdp=True, **json.loads(sys.argv[2])), folder / "fsdp", resume=True)
vrnn = tiny("vrnn", ema=0.8, num_valid=3, fsdp=True, validate_partial=True)
run(vrnn, folder / "resumed", resume=True)
for rank in range(2):
    dist.barrier()
    try:
        run(tiny(batch=9), folder / "bad")
    except ValueError as error:
        (folder / f"error{dist.get_rank()}").write_text(str(error))
dist.destroy_process_group()
threads = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
(folder / f"threads{os.environ['RANK']}").write_text("".join(threads))
"""

KILLED = """
import os, sys
from pathlib import Path
from tests.tiny_runs import run, tiny

folder = Path(sys.argv[1])
(folder / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
run(tiny(epochs=100_000, log_every=5, validate_every=10.0), folder / "run")
"""


def torchrun(script, folder):
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            [*command, str(folder / "script.py"), str(folder), json.dumps(SHARDED)],
            env=environment,
            stdout=output,
            stderr=output,
        )


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Trainings by two processes, one of them begun by one."""
    folder = tmp_path_factory.mktemp("together")
    stopped(tiny("vrnn", ema=0.8, num_valid=3, validate_partial=True), folder / "resumed", 5)
    process = torchrun(COMPARED, folder)
    assert process.wait(timeout=240) == 0, (folder / "output").read_text()
    return folder


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ddp", tiny("tvae")),
        ("muon", tiny("ssm", optimizer="muon")),
        ("fsdp", tiny("tvae", **SHARDED)),
        # three rows for two processes: one is filled up
        ("resumed", tiny("vrnn", ema=0.8, num_valid=3, validate_partial=True)),
    ],
)
def test_two_processes_equal_one(name, config, together, tmp_path):
    alone, both = run(config, tmp_path / "alone"), together / name
    assert len(log(alone)) == len(log(both)) == 4 * config.train.epochs
    if name == "fsdp":
        assert not all(line["best"] for line in log(alone, "valid"))
    for one, two in zip(log(alone), log(both), strict=True):
        assert {key: two[key] for key in ("step", "split", "skipped") if key in two} == {
            key: one[key] for key in ("step", "split", "skipped") if key in one
        }
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3 if name == "fsdp" else 1e-5)
        assert two.get("partial_elbo", 0) == pytest.approx(one.get("partial_elbo", 0), rel=1e-5)
    for file in sorted(newest(alone).glob("*.safetensors")):
        ours, theirs = load_file(file), load_file(newest(both) / file.name)
        assert [(name, t.shape) for name, t in ours.items()] == [
            (name, t.shape) for name, t in theirs.items()
        ]
        one, two = (
            torch.cat([t.flatten() for t in tensors.values()]) for tensors in (ours, theirs)
        )
        assert relative_error(two, one) < (0.1 if name == "fsdp" else 1e-4)
    model = vssm.load(both)
    assert vssm.generate(model, num=2, length=5).x.isfinite().all()
    # and one process takes up what two have saved
    shown = StopAt(99)
    run(replace(config, train=replace(config.train, fsdp=False)), both, resume=True, progress=shown)
    steps = 3 * config.train.epochs
    assert shown.messages == [f"{str(both)!r} is finished: {steps} of {steps} steps"]


def test_batch_that_does_not_divide_names_both_numbers(together):
    for rank in range(2):
        assert (together / f"error{rank}").read_text() == (
            "batch=9 is not divisible by the 2 processes; use a multiple of 2"
        )
    assert not (together / "bad").exists()


def test_no_thread_of_the_process_group_outlives_it(together):
    """Such a thread aborts the process when it releases a tensor while Python exits."""
    for rank in range(2):
        names = (together / f"threads{rank}").read_text().splitlines()
        assert names and not [name for name in names if "gloo" in name]


def gone(pid):
    """Whether a process has ended; without a waiting parent it stays as a zombie (Z)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_killed_worker_ends_the_other_and_the_run_resumes(tmp_path):
    process = torchrun(KILLED, tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("run/checkpoint/step-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
            assert process.poll() is None, (tmp_path / "output").read_text()
        pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
        os.kill(pids[1], signal.SIGKILL)
        assert process.wait(timeout=90) != 0
        assert all(gone(pid) for pid in pids)
    finally:
        process.kill()
    folder = tmp_path / "run"
    step = int(newest(folder).name[5:])
    shown = StopAt(step + 10)
    with pytest.raises(KeyboardInterrupt):
        run(None, folder, resume=True, progress=shown)
    assert shown.messages[-1] == f"resuming {str(folder)!r} at step {step} of 300000"
    steps = [line["step"] for line in log(folder, "train")]
    assert steps == list(range(5, step + 6, 5))
    rates = [
        line["learning_rate"] for line in log(folder, "train")
    ]  # a loss may rise in so few steps
    assert all(before < after for before, after in itertools.pairwise(rates))
