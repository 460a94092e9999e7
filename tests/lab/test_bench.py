"""The benchmarks at sizes of milliseconds, and the meaning of the paper's Table 1, for all six models."""

import collections
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vssm
from tests.conftest import KINDS, sequences, small_model
from tests.ops.test_scan import arguments
from vssm import generate, observe
from vssm.cli import main
from vssm.lab import bench
from vssm.lab.bench import Shape, bench_scan, scan_cuda, timing
from vssm.lab.bench.peers import Peer
from vssm.lab.bench.record import _UNTIMED, Record, _source
from vssm.lab.bench.scan import _inputs
from vssm.lab.bench.scan_peers import PEERS, peer_scan
from vssm.lab.bench.table1 import THEORY, exponent
from vssm.nn import Stack
from vssm.objectives import objective
from vssm.ops import selective_scan

CPU = torch.device("cpu")
SMALL = (Shape(2, 6, 5, 3), Shape(1, 1, 5, 3))
TINY = {"device": "cpu", "width": 16, "layers": 1}
ENVELOPE = {"name", "date", "commit", "machine", "command", "config", "metrics"}


@pytest.fixture
def record(tmp_path):
    return Record(
        "generate", "vssm bench generate", CPU, {"width": 16}, tmp_path / "a" / "result.json"
    )


def test_scan_metrics():
    pytest.importorskip("mambapy")
    metrics = bench_scan(SMALL, repeats=3)
    assert set(metrics) == {
        *(f"{what}_{part}ms_b2_t6" for what in ("fwd", "bwd") for part in ("", "p10_", "p90_")),
        *(
            f"{peer}_{what}_ms_b2_t6"
            for peer in ("reference", "mambapy")
            for what in ("fwd", "bwd")
        ),
        *(f"fwd_{part}ms_b1_t1" for part in ("", "p10_", "p90_")),
        "reference_fwd_ms_b1_t1",
        "floor_ms_b2_t6",
        "floor_ms_b1_t1",
    }
    assert all(value > 0 for value in metrics.values())
    assert metrics["fwd_p10_ms_b2_t6"] <= metrics["fwd_ms_b2_t6"] <= metrics["fwd_p90_ms_b2_t6"]


def test_chosen_backends_only():
    assert set(bench_scan(SMALL[1:], repeats=1, backends=["reference"])) == {
        "reference_fwd_ms_b1_t1",
        "floor_ms_b1_t1",
    }
    with pytest.raises(
        ValueError, match="backend='fastest' can not be timed; allowed: 'auto', 'reference'"
    ):
        bench_scan(SMALL, backends=["fastest"])


def test_scan_file_table_and_picture(tmp_path, capsys):
    out, picture = tmp_path / "new" / "scan.json", tmp_path / "pictures" / "scan.svg"
    options = {"device": "cpu", "repeats": 2, "peers": False, "plot": picture}
    made = bench.main_scan(out, shapes=["2x6x5x3"], **options)
    assert json.loads(out.read_text())["metrics"] == made["metrics"]
    assert set(made) == ENVELOPE
    assert made["config"]["shapes"] == [{"batch": 2, "length": 6, "channels": 5, "states": 3}]
    assert made["config"]["backend"] == "numba" and made["config"]["versions"]["torch"]
    assert made["command"] == "vssm bench scan --device cpu --shapes 2x6x5x3 --repeats 2 --no-peers"
    printed = capsys.readouterr().out
    assert "2, 6, 5, 3" in printed and "numba" in printed and f"commit {made['commit']}" in printed
    assert "<svg" in picture.read_text()


def test_a_peer_of_the_scan_that_is_missing_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mambapy", None)
    out, options = tmp_path / "scan.json", {"device": "cpu", "shapes": ["2x6x5x3"], "repeats": 1}
    assert "reference_fwd_ms_b2_t6" in bench.main_scan(out, **options)["metrics"]
    assert "mambapy_ms: not installed: mambapy\n" in capsys.readouterr().out
    assert json.loads(out.read_text())["config"]["notes"] == {
        "mambapy_ms": "not installed: mambapy"
    }
    assert bench.main_scan(**options, peers=False)["config"]["notes"] == {}, "nobody asked for it"


@pytest.mark.parametrize("peer", PEERS)
def test_peers_compute_the_same_scan(peer):
    pytest.importorskip({"associative_scan": "torch"}.get(peer, peer))
    values = arguments(batch=2, length=7, channels=5, states=3)
    values |= {
        "dt_bias": torch.rand(5),
        "z": torch.randn(2, 7, 5),
        "D": torch.randn(5),
        "softplus": True,
    }
    values.pop("h0", None)
    expected, _ = selective_scan(**values)
    assert torch.allclose(peer_scan(peer, **values), expected, rtol=1e-4, atol=1e-5)
    plain = _inputs(SMALL[0])
    assert torch.allclose(
        peer_scan(peer, **plain), selective_scan(**plain)[0], rtol=1e-4, atol=1e-5
    )


def test_transformers_loop_is_theirs():
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    if not hasattr(modeling, "mamba_selective_scan"):
        pytest.skip("this version of transformers has no scan of its own")
    u, dt, A, B, C, D = _inputs(SMALL[0]).values()
    given = [tensor.transpose(1, 2) for tensor in (u, dt, B, C)]
    theirs = modeling.mamba_selective_scan(given[0], given[1], A, given[2], given[3], D).transpose(
        1, 2
    )
    assert torch.allclose(
        peer_scan("transformers", u, dt, A, B, C, D), theirs, rtol=1e-5, atol=1e-6
    )


class Kernels:
    """Stands for the Triton kernels where there is no CUDA; its dB can be made wrong."""

    wrong = 0.0

    def kept_shape(self, *sizes):
        return (0,)

    def forward(self, kept=None, **values):
        return selective_scan(**values, backend="reference")

    def backward(self, dy, dh, softplus, kept=None, **values):
        leaves = {
            name: value.detach().requires_grad_()
            for name, value in values.items()
            if value is not None
        }
        y, h = selective_scan(**leaves, softplus=softplus, backend="reference")
        total = (y.float() * dy.float()).sum() + (h * dh).sum()
        grads = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
        grads["B"] = grads["B"] * (1 + self.wrong)
        return tuple(grads.get(name, torch.empty(0)) for name in scan_cuda.NAMES)


@pytest.fixture
def kernels(monkeypatch):
    stand_in = Kernels()
    monkeypatch.setitem(sys.modules, "vssm.ops.scan.triton", stand_in)
    monkeypatch.setattr("vssm.ops.scan.triton", stand_in, raising=False)
    monkeypatch.setattr(scan_cuda, "_compile", lambda cases: None)
    monkeypatch.setattr(scan_cuda, "copy_bytes_per_ms", lambda device: 1e6)
    monkeypatch.setattr(scan_cuda, "_peak_mib", lambda call, device: 1.0)
    processors = SimpleNamespace(multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    return stand_in


def test_errors_of_the_cuda_check(kernels):
    error, _, same = scan_cuda.errors(Shape(2, 5, 37, 3), torch.float32, CPU)
    assert error < 1e-5 and same
    kernels.wrong = 1e-3
    error, worst, _ = scan_cuda.errors(Shape(2, 5, 37, 3), torch.float32, CPU)
    assert worst == "B" and error == pytest.approx(1e-3, rel=0.1)


def test_scan_metrics_on_cuda(kernels, record, monkeypatch):
    monkeypatch.setattr("vssm.lab.bench.scan_peers._SCANS", {"transformers": lambda *_: 1 / 0})
    monkeypatch.setattr(
        scan_cuda, "absence", lambda peer: None if peer == "transformers" else "not installed"
    )
    monkeypatch.setattr(
        scan_cuda,
        "_apart",
        lambda peer, shapes, device: (
            told for shape in shapes for told in scan_cuda._peer(peer, shape, device)
        ),
    )
    kernels.wrong = 1e-3
    shapes = [Shape(2, 5, 37, 3), Shape(1, 70, 3, 2)]
    scan_cuda.bench_scan_cuda(record, shapes, CPU, check=True, peers=True)
    ways = [
        f"{way}{part}" for way in ("fwd", "bwd") for part in ("_ms", "_p10_ms", "_p90_ms", "_mib")
    ]
    ways += ["floor_ms", "floor_bwd_ms", "error_float32", "error_bfloat16", "same_bits"]
    assert set(record.metrics) == {
        "copy_gb_per_second",
        *(f"{way}_{shape.name}" for way in ways for shape in shapes),
    }
    # 2 x 5 x 37 x 3 exponentials, 16 a clock; u, dt, z, y and B, C in two bytes
    assert record.metrics["floor_ms_b2_t5"] == max(
        1110 / (100 * 16 * 1.98e6), 2 * 10 * (4 * 37 + 2 * 3) / 1e6
    )
    assert record.metrics["same_bits_b2_t5"] == 1
    assert "in B is too large; allowed: below 1e-05" in record.notes["error_float32_b2_t5"]
    assert "error_bfloat16_b2_t5" not in record.notes
    assert record.notes["mambapy_fwd_ms_b2_t5"] == "not installed"
    assert (
        record.notes["transformers_fwd_ms_b2_t5"] == "failed: ZeroDivisionError: division by zero"
    )
    assert record.notes["transformers_fwd_ms_b1_t70"].startswith("not run: a loop of 70 steps")
    headings, rows = scan_cuda.headings_and_rows(record, shapes)
    assert len(rows) == 4 and all(len(row) == len(headings) for row in rows)


def test_a_peer_is_timed_in_a_process_of_its_own():
    shapes = [Shape(1, 70, 3, 2), Shape(2, 5, 3, 2)]
    (long, why), (name, taken), *_ = scan_cuda._apart("transformers", shapes, CPU)
    assert long == "transformers_fwd_ms_b1_t70" and why.startswith("not run: a loop of 70 steps")
    assert name == "transformers_fwd_ms_b2_t5" and taken > 0


def test_a_peer_that_hangs_is_killed(monkeypatch, tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(
        "import sys, time\n"
        "for shape in sys.argv[4:]:\n"
        "    if shape == '1x5x3x2': sys.exit(1)\n"
        "    print('told: [\"mambapy_fwd_ms_b%s_t%s\", 0.5]' % tuple(shape.split('x')[:2]), flush=True)\n"
        "    print('a remark', flush=True)\n"
        "    if shape == '2x5x3x2': time.sleep(60)\n"
        "    print('told: null', flush=True)\n"
    )
    popen = scan_cuda.subprocess.Popen
    monkeypatch.setattr(
        scan_cuda.subprocess,
        "Popen",
        lambda command, **options: popen([command[0], str(script), *command[3:]], **options),
    )
    monkeypatch.setattr(scan_cuda, "_PEER_SECONDS", 2.0)
    shapes = [Shape(3, 5, 3, 2), Shape(2, 5, 3, 2), Shape(1, 5, 3, 2), Shape(4, 5, 3, 2)]
    assert dict(scan_cuda._apart("mambapy", shapes, CPU)) == {
        "mambapy_fwd_ms_b3_t5": 0.5,
        "mambapy_fwd_ms_b2_t5": 0.5,
        "mambapy_bwd_ms_b2_t5": "stopped: took more than 2 s",
        "mambapy_fwd_ms_b1_t5": "stopped: ended its process",
        "mambapy_fwd_ms_b4_t5": 0.5,
    }


def test_times_and_quantiles():
    calls = []
    times = timing.kernel(lambda: calls.append(1), CPU, total_ms=1, most=7)
    assert len(times) == 7 and len(calls) == 9 and min(times) >= 0
    assert timing.spread([2.0]) == (2.0, 2.0, 2.0)


def test_stopwatch_keeps_to_its_budget(record, monkeypatch):
    taken = {"fast_ms_b1_t2": 10.0, "slow_ms_b1_t2": 2500.0}
    calls = []
    monkeypatch.setattr(timing, "wall", lambda call, device: taken[call()])
    watch = timing.Stopwatch(CPU, repeats=5, seconds=4.0, warm=3)
    watch.together(record, {name: lambda name=name: calls.append(name) or name for name in taken})
    assert calls.count("fast_ms_b1_t2") == 3 + 5
    assert calls.count("slow_ms_b1_t2") == 2 + 1
    assert record.metrics == taken
    assert record.notes == {"slow_ms_b1_t2": "warmed up by 2 calls, not 3: 4 s a point"}
    watch.alone(record, "slow_ms", "b1_", 8, pytest.fail)  # would take 10 s a call
    assert "left out: 2 steps took 2.5 s" in record.notes["slow_ms_b1_t8"]
    assert "slow_ms_b1_t8" not in record.metrics


def test_long_calls_are_warmed_up_less(record, monkeypatch):
    calls = []
    monkeypatch.setattr(timing, "wall", lambda call, device: 1e3 * call())
    watch = timing.Stopwatch(CPU, repeats=1, seconds=100.0, warm=3, at_least=0.5)
    for steps in (
        1,
        2,
        8,
        16,
    ):  # as long as a second for each step; 16 steps are expected to take 16 s
        watch.alone(
            record, "ssm_ms", "b1_", steps, lambda steps=steps: calls.append(steps) or steps
        )
    assert calls == 4 * [1] + 3 * [2] + 3 * [8] + [16]
    assert record.notes["ssm_ms_b1_t8"] == "warmed up by 2 calls, not 3: it takes long"
    assert record.notes["ssm_ms_b1_t16"] == "warmed up by 0 calls, not 3: it takes long"


def test_stopwatch_records_more_when_asked(record, monkeypatch):
    taken = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    monkeypatch.setattr(timing, "wall", lambda call, device: next(taken))
    timing.Stopwatch(CPU, repeats=5, seconds=4.0, warm=1, more=True).together(
        record, {"ssm_ms_b1_t2": lambda: 0}
    )
    quantiles = {"ssm_p10_ms_b1_t2": 1.4, "ssm_p90_ms_b1_t2": 4.6}
    assert record.metrics == {"ssm_ms_b1_t2": 3.0, **quantiles}

    record.metrics.clear()
    monkeypatch.setattr(timing, "wall", lambda call, device: 7.0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 8 * 2**20)
    watch = timing.Stopwatch(torch.device("cuda"), repeats=1, seconds=4.0, warm=1, more=True)
    watch.alone(record, "ssm_ms", "b1_", 2, lambda: 0)
    assert record.metrics == {"ssm_ms_b1_t2": 7.0, "ssm_mib_b1_t2": 5.0}


def test_short_calls_are_timed_more_often(record, monkeypatch):
    took, calls = {"short": 0.5, "long": 40.0, "tiny": 0.01}, collections.Counter()
    monkeypatch.setattr(timing, "wall", lambda call, device: took[call()])
    made = {f"{name}_ms_t1": lambda name=name: calls.update([name]) or name for name in took}
    timing.Stopwatch(CPU, repeats=2, seconds=9.0, warm=1, at_least=0.02).together(record, made)
    # The first compiles, and others warm up.
    assert calls == {"short": 1 + 40 + 40, "long": 1 + 1 + 2, "tiny": 1 + 499 + 500}


def test_generation_has_quantiles(tmp_path, capsys):
    options = {
        "kinds": ["vssm"],
        "batches": [1],
        "lengths": [4],
        "repeats": 3,
        "peers": False,
        **TINY,
    }
    made = bench.main_generate(tmp_path / "a.json", plot=tmp_path / "a.png", **options)["metrics"]
    for name in ("vssm", "vssm_prompted", "vssm_chunk1"):
        low, middle, high = (made[f"{name}{part}_ms_b1_t4"] for part in ("_p10", "", "_p90"))
        assert 0 < low <= middle <= high
    assert 0 < made["vssm_floor_ms_b1_t4"] < made["vssm_ms_b1_t4"]
    printed = capsys.readouterr().out
    assert "p10" not in printed, "the table has medians"
    assert "step by step" not in printed, "there is none to compare with"


def test_what_does_not_fit_is_noted(record):
    def greedy():
        raise torch.OutOfMemoryError("much too large")

    watch = timing.Stopwatch(CPU, repeats=1, seconds=1.0, warm=1)
    later = iter([None])  # one call is well, the second is not
    calls = {
        "greedy": greedy,
        "modest": lambda: None,
        "growing": lambda: next(later, 0) is None or greedy(),
    }
    watch.together(record, calls)
    assert record.notes.pop("growing") == record.notes["greedy"]
    assert record.notes == {"greedy": "does not fit the device's memory"} and set(
        record.metrics
    ) == {"modest"}
    record.fail("peer", TypeError("no such\nargument"))
    assert (
        json.loads(record.out.read_text())["config"]["notes"]["peer"]
        == "failed: TypeError: no such"
    )


def test_a_result_is_taken_up_again(tmp_path, monkeypatch, capsys):
    out, options = (
        tmp_path / "generate.json",
        {"batches": [2], "repeats": 1, "peers": False, **TINY},
    )
    first = bench.main_generate(out, kinds=["ssm", "vssm"], lengths=[4], **options)
    assert re.search(r"fastest step by step / vssm +\d+\.\dx", capsys.readouterr().out)
    assert set(first["metrics"]) == {
        "ssm_ms_b2_t4",
        "ssm_prompted_ms_b2_t4",
        "vssm_ms_b2_t4",
        "vssm_prompted_ms_b2_t4",
        "vssm_chunk1_ms_b2_t4",
        "ssm_floor_ms_b2_t4",
        "vssm_floor_ms_b2_t4",
    }
    assert all(value > 0 for value in first["metrics"].values())
    more = bench.main_generate(out, kinds=["ssm"], lengths=[4, 1], **options)
    new = {name: more["metrics"][name] for name in ("ssm_ms_b2_t1", "ssm_floor_ms_b2_t1")}
    assert more["metrics"] == {**first["metrics"], **new}
    again = first["command"].replace("ssm vssm", "ssm").replace("--lengths 4", "--lengths 4 1")
    assert more["command"] == f"{first['command']} && {again}"
    assert json.loads(out.read_text())["metrics"] == more["metrics"]
    with pytest.raises(
        ValueError, match=r"has width=16, this run 8; allowed: the same, a new name"
    ):
        bench.main_generate(out, kinds=["ssm"], lengths=[4], **{**options, "width": 8})
    monkeypatch.setattr("vssm.lab.bench.record._source", lambda: "other code")
    with pytest.raises(ValueError, match=r"has source='\w+', this run 'other code'"):
        bench.main_generate(out, kinds=["ssm"], lengths=[4], **options)
    anew = bench.main_generate(out, kinds=["ssm"], lengths=[1], restart=True, **options)
    assert set(anew["metrics"]) == set(new)


def test_what_is_timed_is_in_the_digest_of_the_code(tmp_path, monkeypatch):
    package, copy = Path(vssm.__file__).parent, tmp_path / "vssm"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    before = _source()
    monkeypatch.setattr(
        "vssm.lab.bench.record.vssm", SimpleNamespace(__file__=str(copy / "__init__.py"))
    )
    assert _source() == before

    def changes(name):
        source = (copy / name).read_bytes()
        (copy / name).write_bytes(source + b"#")
        digest = _source()
        (copy / name).write_bytes(source)
        return digest != before

    timed = ("training/learner", "training/muon", "ops/noise_triton", "data/feed", "data/scale")
    timed += (
        "training/distributed",
        "lab/bench/timing",
        "ops/vectors",
        "models/vrnn",
        "training/loop",
    )
    assert all(changes(f"{name}.py") for name in (*timed, "forecasting/forecaster"))
    apart = ("cli/lab", "serve/__init__", "report/style", "lab/page/write", "lab/bench/plot")
    assert not any(changes(f"{name}.py") for name in apart)
    for name in _UNTIMED:
        assert list(package.glob(f"{name}*")), f"{name} is no longer there"


UNTIMED = """
import importlib, pkgutil, sys
from vssm.lab import bench
from vssm.lab.bench.record import _UNTIMED
for module in pkgutil.iter_modules(bench.__path__):
    importlib.import_module(f"vssm.lab.bench.{module.name}")
names = [name.removeprefix("vssm.").replace(".", "/") for name in sys.modules if name.startswith("vssm.")]
print(*sorted(name for name in names if f"{name}/".startswith(_UNTIMED)))
"""


def test_benchmarks_do_not_load_what_is_left_out_of_the_digest():
    run = subprocess.run(
        [sys.executable, "-c", UNTIMED], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["lab/bench/plot", "runs/results"]  # both write what was measured


def test_on_cuda_every_point_is_for_itself(record, monkeypatch):
    monkeypatch.setattr(timing.Stopwatch, "turns", False)
    watch = timing.Stopwatch(CPU, repeats=1, seconds=1.0, warm=3)
    bench.bench_generate(record, watch, ["ssm", "tvae"], [2, 1], [5], width=16, layers=1)
    names = ("ssm_floor_ms", "tvae_floor_ms", "ssm_ms", "ssm_prompted_ms")
    names += ("tvae_ms", "tvae_prompted_ms", "tvae_chunk1_ms")
    assert list(record.metrics) == [f"{name}_b{batch}_t5" for batch in (1, 2) for name in names]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"metrics": {"a": "fast"}, "config": {}}', '{"metrics": {}}']
)
def test_a_damaged_result_is_named_and_kept(tmp_path, content):
    out = tmp_path / "scan.json"
    out.write_text(content)
    with pytest.raises(
        ValueError, match=r"scan.json' is damaged or no result; allowed: a new name, or --restart"
    ):
        bench.main_scan(out, device="cpu", shapes=SMALL)
    assert out.read_text() == content


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
            "lengths=0 is not allowed; allowed: whole numbers >= 1",
        ),
        (bench.main_generate, {"seconds_per_point": 0}, "seconds_per_point=0 is not allowed"),
        (bench.main_table1, {"lengths": [-1]}, "lengths=-1 is not allowed"),
        (
            bench.main_table1,
            {"plot": "a.pdf"},
            r"plot='a.pdf' is not allowed; allowed: a name in .png or .svg",
        ),
        (bench.main_train, {"steps": 0}, "steps=0 is not allowed"),
        (bench.main_scan, {"shapes": ["8"]}, "shapes='8' is not allowed; allowed: BxT or BxTxDxN"),
        (bench.main_scan, {"check": True}, "check=True is for CUDA"),
        (
            bench.main_scan,
            {"device": "tpu"},
            "device='tpu' is unknown; allowed: 'auto', 'cpu', 'cuda'",
        ),
        (bench.main_scan, {"out": "."}, r"out='.' is a folder; allowed: the name of a JSON file"),
    ],
)
def test_bad_options(function, options, message):
    with pytest.raises(ValueError, match=message):
        function(**{"device": "cpu", **options})


def test_cuda_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device='cuda' is not there; allowed: 'auto', 'cpu'"):
        bench.main_generate(device="cuda")


def test_training_metrics(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vssm.lab.bench.train._WINDOWS", 2)
    monkeypatch.setattr("vssm.lab.bench.train._WARM", 1)
    made = bench.main_train(
        tmp_path / "train.json", kinds=["rnn"], batch=2, steps=2, peers=False, **TINY
    )
    assert set(made["metrics"]) == {
        "rnn_tokens_per_second",
        "rnn_tokens_per_second_p10",
        "rnn_tokens_per_second_p90",
        "rnn_ceiling_per_second",
        "rnn_parameters",
    }
    assert made["metrics"]["rnn_tokens_per_second"] < made["metrics"]["rnn_ceiling_per_second"]
    assert made["metrics"]["rnn_tokens_per_second"] > 0
    assert made["config"]["data"].startswith("synthetic rows")
    assert re.search(r"rnn +[\d,]+ ", capsys.readouterr().out)


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("name", ["transformers_gpt2", "transformers_mamba"])
def test_peers_are_autoregressive_and_use_their_caches(name):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = Peer(name, features=3, width=16, layers=2, steps=6).eval()
    x = torch.rand(2, 6, 3)
    changed = torch.cat([x[:, :4], x[:, 4:] + 1], 1)
    with torch.no_grad():
        means, other = model(x), model(changed)
        torch.manual_seed(1)
        made = model.generate(2, 6)
        torch.manual_seed(1)
        noise = torch.cat([0.1 * torch.randn(2, 1, 3) for _ in range(6)], 1)
        assert torch.allclose(made - noise, model(made), rtol=1e-4, atol=1e-5)
    assert torch.allclose(means[:, :5], other[:, :5], atol=1e-6)
    assert not torch.allclose(means[:, 5], other[:, 5], atol=1e-3)


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_peers_in_the_result(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr("vssm.lab.bench.train._WINDOWS", 1)
    monkeypatch.setattr("vssm.lab.bench.train._WARM", 1)
    trained = bench.main_train(tmp_path / "train.json", kinds=[], batch=2, steps=1, **TINY)[
        "metrics"
    ]
    assert trained["transformers_mamba_tokens_per_second"] > 0
    generated = bench.main_generate(kinds=[], lengths=[3, 300], repeats=1, **TINY)["metrics"]
    assert set(generated) == {"transformers_gpt2_ms_b1_t3", "transformers_mamba_ms_b1_t3"}
    monkeypatch.setattr("vssm.lab.bench.generate.absence", lambda: "not installed: transformers")
    missing = bench.main_generate(kinds=[], lengths=[3], repeats=1, **TINY)
    assert missing["config"]["notes"]["transformers_gpt2_ms"] == "not installed: transformers"


def test_table1_metrics_and_picture(tmp_path, capsys):
    picture = tmp_path / "table1.png"
    options = {
        "kinds": ["rnn", "vssm"],
        "lengths": [2, 4, 8],
        "repeats": 1,
        "plot": picture,
        **TINY,
    }
    made = bench.main_table1(tmp_path / "table1.json", **options)
    ways = [f"{kind}_{way}" for kind in ("rnn", "vssm") for way in ("train", "sample")]
    assert set(made["metrics"]) == {
        *(f"{way}_ms_t{length}" for way in ways for length in (2, 4, 8)),
        *(f"{way}_exponent" for way in ways),
    }
    points = [(length, made["metrics"][f"rnn_train_ms_t{length}"]) for length in (2, 4, 8)]
    assert made["metrics"]["rnn_train_exponent"] == exponent(points)
    assert re.search(r"vssm +O\(T\) +yes +T\^-?\d", capsys.readouterr().out)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_forecasts_are_timed_by_horizon_and_patch(tmp_path, capsys):
    picture, options = tmp_path / "forecast.png", {"paths": 3, "context": 8, "repeats": 1, **TINY}
    made = bench.main_forecast(
        tmp_path / "f.json", lengths=[5, 8], patches=[1, 4], plot=picture, **options
    )
    metrics = made["metrics"]
    names = {
        f"{kind}_p{patch}_ms_t{h}" for kind in ("vssm", "rnn") for patch in (1, 4) for h in (5, 8)
    }
    assert set(metrics) == names | {f"ahead_p{patch}_t{h}" for patch in (1, 4) for h in (5, 8)}
    assert metrics["ahead_p4_t8"] == metrics["rnn_p1_ms_t8"] / metrics["vssm_p4_ms_t8"]
    assert re.search(r"rnn, P = 1 / vssm, P = 4 +[\d.]+x", capsys.readouterr().out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(
        ValueError, match=r"patches=\(9,\) is not allowed; allowed: 1 to 8, the context"
    ):
        bench.main_forecast(patches=[9], **options)
    with pytest.raises(ValueError, match="kinds='gru' is unknown"):
        bench.main_forecast(kinds=["gru"], **options)
    for name in ("series", "paths"):
        with pytest.raises(
            ValueError, match=f"{name}=0 is not allowed; allowed: whole numbers >= 1"
        ):
            bench.main_forecast(**{**options, name: 0})


def test_a_vssm_with_levels_is_timed_under_its_own_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vssm.lab.bench.train._WINDOWS", 1)
    monkeypatch.setattr("vssm.lab.bench.train._WARM", 1)
    options = {"kinds": ["vssm"], "levels": [2], **TINY}
    trained = bench.main_train(tmp_path / "train.json", batch=2, steps=1, peers=False, **options)[
        "metrics"
    ]
    assert trained["vssm_l2_tokens_per_second"] > 0
    assert trained["vssm_l2_parameters"] != trained["vssm_parameters"]
    generated = bench.main_generate(lengths=[4], batches=[1], repeats=1, peers=False, **options)[
        "metrics"
    ]
    ways = ("ms", "prompted_ms", "chunk1_ms", "floor_ms")
    assert set(generated) == {f"{name}_{way}_b1_t4" for name in ("vssm", "vssm_l2") for way in ways}
    table1 = bench.main_table1(lengths=[2, 4, 8], repeats=1, **options)
    assert {"vssm_l2_train_exponent", "vssm_l2_sample_exponent"} <= set(table1["metrics"])
    assert " --levels 2" in table1["command"]
    assert len(re.findall(r"^ *vssm_l2 ", capsys.readouterr().out, re.MULTILINE)) == 5


def test_levels_that_do_not_fit_are_named_before_anything_is_measured(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for what in ("train", "generate", "table1"):
        with pytest.raises(SystemExit) as stop:
            main(["bench", what, "--levels", "5", "--out", "speed.json"])
        message = "vssm: latents=32 is not divisible by levels=5; allowed: a multiple of 5\n"
        assert stop.value.code == 2 and capsys.readouterr().err == message
    with pytest.raises(ValueError, match="levels=0 is not allowed; allowed: whole numbers >= 1"):
        bench.main_table1(levels=[0], **TINY)
    assert not list(tmp_path.iterdir())


def test_exponent_is_of_the_upper_half():
    points = [(2**k, 1.0) for k in range(4)] + [(2**k, 3e-3 * 2.0 ** (2 * k)) for k in range(4, 8)]
    assert exponent(points) == pytest.approx(2.0, rel=1e-9)


def sequential_steps(function):
    """Counts the runs of a stack that must follow one another; a GRU's loop over time counts its steps."""
    steps, run = [], Stack.run

    def counted(stack, e, state=None):
        recurrent = any(isinstance(part, torch.nn.GRU) for part in stack.modules())
        steps.append(e.shape[1] if recurrent else 1)
        return run(stack, e, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stack, "run", counted)
        function()
    return sum(steps)


@pytest.mark.parametrize("kind", KINDS)
def test_parallel_means_no_more_sequential_steps_for_longer_sequences(kind):
    model, theory = small_model(kind), THEORY[kind]
    trained = [
        sequential_steps(partial(objective, model, sequences(model, 2, length)))
        for length in (6, 12)
    ]
    sampled = [
        sequential_steps(partial(generate, model, num=2, length=length)) for length in (6, 12)
    ]
    for steps, parallel in (
        (trained, theory.trains_in_parallel),
        (sampled, theory.samples_in_parallel),
    ):
        assert (steps[0] == steps[1] <= 3) if parallel else (steps[1] == 2 * steps[0] >= 12)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_means_that_what_follows_depends_on_it(kind):
    model = small_model(kind)
    x = sequences(model, 1, 9)
    prompts = torch.cat([x, x + 0.5 * torch.rand_like(x)])
    assert THEORY[kind].follows_prompt
    made = generate(model, length=5, prompt=prompts, rows=[0, 0], seed=3).x
    assert not torch.allclose(made[0], made[1], atol=1e-3)  # with the same noise
    again = generate(model, length=5, prompt=x, seed=3).x
    assert torch.allclose(made[:1], again, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_resume_means_going_on_from_a_state_of_constant_size(kind):
    model = small_model(kind)
    x = sequences(model, 2, 12)
    whole, half = (
        generate(model, num=2, length=12, seed=5),
        generate(model, num=2, length=6, seed=5),
    )
    rest = generate(model, length=6, state=half.state)
    assert torch.allclose(torch.cat([half.x, rest.x], 1), whole.x, rtol=1e-4, atol=1e-5)
    for short, long in ((half.state, whole.state), (observe(model, x[:, :6]), observe(model, x))):
        sizes = [sum(leaf.nbytes for leaf in state.leaves()) for state in (short, long)]
        assert (sizes[0] == sizes[1]) == THEORY[kind].resumes
        assert sizes[1] >= sizes[0]


def test_command_line(tmp_path, capsys):
    out = tmp_path / "t.json"
    main(
        [
            "bench",
            "table1",
            "--device",
            "cpu",
            "--kinds",
            "rnn",
            "--lengths",
            "2",
            "--width",
            "8",
            "--out",
            str(out),
        ]
    )
    assert (
        json.loads(out.read_text())["command"]
        == "vssm bench table1 --device cpu --kinds rnn --lengths 2 --width 8"
    )
    with pytest.raises(SystemExit) as stop:
        main(["bench", "scan", "--kinds", "rnn"])
    assert stop.value.code == 2
    assert (
        "kinds=('rnn',) does not go with bench scan; allowed: out, device"
        in capsys.readouterr().err
    )
