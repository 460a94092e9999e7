"""The benchmarks at sizes of milliseconds."""

import json
import re

import pytest
import torch

from vssm.cli import main
from vssm.evaluation import timing
from vssm.lab import bench
from vssm.lab.bench.measure import Record
from vssm.lab.bench.scan import Shape, floor_ms

CPU = torch.device("cpu")
TINY = {"device": "cpu", "width": 16, "layers": 1}
ENVELOPE = {"name", "date", "commit", "machine", "command", "config", "metrics"}


@pytest.fixture
def record(tmp_path):
    out, config = tmp_path / "a" / "result.json", {"width": 16}
    return Record("generate", "vssm", CPU, config, out, seconds=4.0)


def test_scan_metrics():
    shapes = ["2x6x5x3", "1x1x5x3"]
    metrics = bench.main_scan(device="cpu", shapes=shapes, repeats=3).metrics
    ways = [f"{prefix}{way}" for prefix in ("", "reference_") for way in ("fwd", "bwd")]
    parts = ("", "_p10", "_p90")
    assert set(metrics) == {
        *(f"{way}{part}_ms_b2_t6" for way in ways for part in parts),
        *(f"{prefix}fwd{part}_ms_b1_t1" for prefix in ("", "reference_") for part in parts),
        "floor_ms_b2_t6",
        "floor_ms_b1_t1",
    }
    assert all(value > 0 for value in metrics.values())
    assert metrics["fwd_p10_ms_b2_t6"] <= metrics["fwd_ms_b2_t6"] <= metrics["fwd_p90_ms_b2_t6"]


def test_scan_file_and_table(tmp_path, capsys):
    out = tmp_path / "new" / "scan.json"
    made = bench.main_scan(out, shapes=["2x6x5x3"], device="cpu", repeats=2).result()
    assert json.loads(out.read_text())["metrics"] == made["metrics"]
    assert set(made) == ENVELOPE
    assert made["config"]["shapes"] == [{"batch": 2, "length": 6, "channels": 5, "states": 3}]
    assert made["config"]["backend"] == "numba" and made["config"]["versions"]["torch"]
    assert made["command"] == "vssm bench scan --device cpu --shapes 2x6x5x3 --repeats 2"
    printed = capsys.readouterr().out
    assert "b2_t6" in printed and "numba" in printed and f"commit {made['commit']}" in printed


def test_floor_of_the_scan_on_cuda(monkeypatch):
    class Properties:
        multi_processor_count = 100

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    shape, cuda = Shape(2, 5, 37, 3), torch.device("cuda")
    # 2 x 5 x 37 x 3 exponentials, 16 a clock; u, dt, z, y and B, C in two bytes
    exponentials, traffic = 1110 / (100 * 16 * 1.98e6), 2 * 10 * (4 * 37 + 2 * 3)
    assert floor_ms(shape, cuda, rate=1e6) == max(exponentials, traffic / 1e6)
    assert floor_ms(shape, cuda, rate=1e60, backward=True) == exponentials


@pytest.mark.parametrize(
    ("milliseconds", "options", "timed"),
    [
        (40.0, {}, 5),
        (0.5, {}, 200),  # short calls are repeated for a tenth of a second
        (0.01, {}, 500),
        (10.0, {"repeats": 5}, 5),
        (2500.0, {"repeats": 5, "seconds": 6.0}, 2),
        (9000.0, {"seconds": 6.0}, 1),
    ],
)
def test_number_of_timed_calls(milliseconds, options, timed, monkeypatch):
    calls = []
    monkeypatch.setattr(timing, "wall", lambda call, device: call() or milliseconds)
    times = timing.take_times(lambda: calls.append(1), CPU, **options)
    assert times == timed * [milliseconds]
    assert len(calls) == 1 + timed, "the first call may compile"


def test_times_and_their_spread_are_recorded(record, monkeypatch):
    taken = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    record.repeats = 5
    monkeypatch.setattr(timing, "wall", lambda call, device: next(taken))
    record.time("ssm_ms_b1_t2", lambda: 0)
    quantiles = {"ssm_p10_ms_b1_t2": 1.4, "ssm_p90_ms_b1_t2": 4.6}
    assert record.metrics == {"ssm_ms_b1_t2": 3.0, **quantiles}

    record.metrics.clear()
    record.device, record.repeats, calls = torch.device("cuda"), 1, []
    monkeypatch.setattr(timing, "wall", lambda call, device: call() or 60.0)
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 8 * 2**20)
    record.time("ssm_ms_b1_t2", lambda: calls.append(2))
    assert record.metrics == {"ssm_ms_b1_t2": 60.0, "ssm_mib_b1_t2": 5.0}
    assert len(calls) == 4, "three calls warm up for a tenth of a second on CUDA"


def test_calls_that_would_take_too_long_are_left_out(record):
    record.metrics["slow_ms_b1_t2"] = 2500.0
    record.time("slow_ms_b1_t8", pytest.fail)  # would take 10 s a call
    assert "left out: 2 steps took 2.5 s" in record.notes["slow_ms_b1_t8"]
    assert "slow_ms_b1_t8" not in record.metrics
    record.time("slow_ms_b2_t8", lambda: None)  # another series
    assert record.metrics["slow_ms_b2_t8"] < 1


def test_failures_are_noted(record):
    def greedy():
        raise torch.OutOfMemoryError("much too large")

    def broken():
        raise TypeError("no such argument")

    record.time("greedy_ms_t1", greedy)
    record.time("broken_ms_t1", broken, peer=True)
    record.time("modest_ms_t1", lambda: None)
    assert record.notes == {
        "greedy_ms_t1": "does not fit in the device's memory",
        "broken_ms_t1": "failed: TypeError: no such argument",
    }
    assert record.metrics["modest_ms_t1"] < 1
    assert json.loads(record.out.read_text())["config"]["notes"] == record.notes
    with pytest.raises(TypeError):  # it is ours
        record.time("broken_ms_t2", broken)


def test_generation_has_quantiles(capsys):
    options = {"kinds": ["vssm"], "batches": [1], "lengths": [4], "repeats": 3}
    made = bench.main_generate(**options, **TINY).metrics
    for name in ("vssm", "vssm_prompted", "vssm_chunk1"):
        low, middle, high = (made[f"{name}{part}_ms_b1_t4"] for part in ("_p10", "", "_p90"))
        assert 0 < low <= middle <= high
    printed = capsys.readouterr().out
    assert "p10" not in printed, "the table has medians"


def test_result_file_is_written_anew(tmp_path, capsys):
    out, options = tmp_path / "generate.json", {"batches": [2], "repeats": 1, **TINY}
    out.write_text("{")
    first = bench.main_generate(out, kinds=["ssm", "vssm"], lengths=[4], **options).result()
    assert re.search(r"ssm_plain +\d", capsys.readouterr().out)
    assert set(first["metrics"]) == {
        "ssm_ms_b2_t4",
        "ssm_plain_ms_b2_t4",
        "ssm_prompted_ms_b2_t4",
        "vssm_ms_b2_t4",
        "vssm_plain_ms_b2_t4",
        "vssm_prompted_ms_b2_t4",
        "vssm_chunk1_ms_b2_t4",
    }
    assert all(value > 0 for value in first["metrics"].values())
    bench.main_generate(out, kinds=["ssm"], lengths=[1], **options)
    assert set(json.loads(out.read_text())["metrics"]) == {"ssm_ms_b2_t1", "ssm_plain_ms_b2_t1"}


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (
            bench.main_train,
            {"kinds": ["ssm", "vsm"]},
            r"kinds='vsm' is unknown; .*did you mean 'vssm'",
        ),
        (
            bench.main_generate,
            {"lengths": [4, 0]},
            "lengths is 0; it must be a whole number >= 1",
        ),
        (bench.main_generate, {"seconds_per_point": 0}, "seconds_per_point is 0; it must be"),
        (bench.main_train, {"steps": 0}, "steps is 0; it must be"),
        (bench.main_scan, {"shapes": ["8"]}, "shapes='8' is not allowed; use BxT or BxTxDxN"),
        (
            bench.main_scan,
            {"device": "tpu"},
            "device='tpu' is not available here; choose from 'auto', 'cpu'",
        ),
        (bench.main_scan, {"out": "."}, r"out='.' is a folder; give the name of a JSON file"),
    ],
)
def test_bad_options(function, options, message):
    with pytest.raises(ValueError, match=message):
        function(**{"device": "cpu", **options})


def test_cuda_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device='cuda' is not available here; choose from 'auto'"):
        bench.main_generate(device="cuda")


def test_training_metrics(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vssm.lab.bench.train.WINDOWS", 2)
    monkeypatch.setattr("vssm.lab.bench.train.WARM", 1)
    out = tmp_path / "train.json"
    made = bench.main_train(out, kinds=["rnn"], batch=2, steps=2, **TINY).result()
    assert set(made["metrics"]) == {
        "rnn_tokens_per_second",
        "rnn_tokens_per_second_p10",
        "rnn_tokens_per_second_p90",
        "rnn_parameters",
    }
    assert made["metrics"]["rnn_tokens_per_second"] > 0
    assert made["config"]["data"].startswith("synthetic rows")
    assert re.search(r"rnn +[\d,]+ ", capsys.readouterr().out)


def test_a_vssm_with_levels_is_timed_under_its_own_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vssm.lab.bench.train.WINDOWS", 1)
    monkeypatch.setattr("vssm.lab.bench.train.WARM", 1)
    options = {"kinds": ["vssm"], "levels": [2], **TINY}
    trained = bench.main_train(tmp_path / "train.json", batch=2, steps=1, **options).metrics
    assert trained["vssm_l2_tokens_per_second"] > 0
    assert trained["vssm_l2_parameters"] != trained["vssm_parameters"]
    record = bench.main_generate(lengths=[4], batches=[1], repeats=1, **options)
    generated = record.metrics
    ways = ("ms", "plain_ms", "prompted_ms", "chunk1_ms")
    assert set(generated) == {f"{name}_{way}_b1_t4" for name in ("vssm", "vssm_l2") for way in ways}
    assert " --levels 2" in record.command
    assert len(re.findall(r"^ *vssm_l2", capsys.readouterr().out, re.MULTILINE)) == 1 + 4


def test_levels_that_do_not_fit_are_named_before_anything_is_measured(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for what in ("train", "generate"):
        with pytest.raises(SystemExit) as stop:
            main(["bench", what, "--levels", "5", "--out", "speed.json"])
        message = "vssm: latents=32 is not divisible by levels=5; use a multiple of 5\n"
        assert stop.value.code == 2 and capsys.readouterr().err == message
    with pytest.raises(ValueError, match="levels is 0; it must be"):
        bench.main_generate(levels=[0], **TINY)
    assert not list(tmp_path.iterdir())


def test_command_line(tmp_path, capsys):
    out = tmp_path / "generate.json"
    options = "--device cpu --kinds rnn --batches 1 --lengths 2 --width 8"
    main(["bench", "generate", *options.split(), "--out", str(out)])
    assert json.loads(out.read_text())["command"] == f"vssm bench generate {options}"
    with pytest.raises(SystemExit) as stop:
        main(["bench", "scan", "--kinds", "rnn"])
    assert stop.value.code == 2
    assert (
        "Unrecognized options: --kinds, rnn; see vssm bench scan --help" in capsys.readouterr().err
    )
