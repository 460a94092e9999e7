"""The benchmarks at sizes of milliseconds, and the meaning of the paper's Table 1."""

import json
import re
import sys
import types
from functools import partial

import pytest
import torch

from tests.conftest import KINDS, sequences, small_model
from tests.ops.test_scan import arguments
from vssm import generate, observe
from vssm.cli import main
from vssm.lab import bench
from vssm.lab.bench import Shape, measure
from vssm.lab.bench.measure import Record
from vssm.lab.bench.peers import SCANS, PeerModel
from vssm.lab.bench.scan import floor_ms, scan_arguments
from vssm.lab.bench.table1 import THEORY, exponent
from vssm.nn import Stack
from vssm.objectives import objective
from vssm.ops import selective_scan

CPU = torch.device("cpu")
TINY = {"device": "cpu", "width": 16, "layers": 1}
ENVELOPE = {"name", "date", "commit", "machine", "command", "config", "metrics"}


def main_generate(out=None, repeats=None, seconds_per_point=20.0, restart=False):
    """Stands for a benchmark."""


@pytest.fixture
def record(tmp_path):
    options = {"out": tmp_path / "a" / "result.json", "restart": False, "seconds_per_point": 4.0}
    return Record(main_generate, options, CPU, {"width": 16}, quantiles=True)


def test_scan_metrics():
    pytest.importorskip("mambapy")
    shapes = ["2x6x5x3", "1x1x5x3"]
    metrics = bench.main_scan(device="cpu", shapes=shapes, repeats=3)["metrics"]
    ways = [f"{prefix}{way}" for prefix in ("", "reference_", "mambapy_") for way in ("fwd", "bwd")]
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
    options = {"device": "cpu", "repeats": 2, "peers": False}
    made = bench.main_scan(out, shapes=["2x6x5x3"], **options)
    assert json.loads(out.read_text())["metrics"] == made["metrics"]
    assert set(made) == ENVELOPE
    assert made["config"]["shapes"] == [{"batch": 2, "length": 6, "channels": 5, "states": 3}]
    assert made["config"]["backend"] == "numba" and made["config"]["versions"]["torch"]
    assert made["command"] == "vssm bench scan --device cpu --shapes 2x6x5x3 --repeats 2 --no-peers"
    printed = capsys.readouterr().out
    assert "2, 6, 5, 3" in printed and "numba" in printed and f"commit {made['commit']}" in printed


def test_missing_peer_of_the_scan_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mambapy", None)
    out, options = tmp_path / "scan.json", {"device": "cpu", "shapes": ["2x6x5x3"], "repeats": 1}
    assert "reference_fwd_ms_b2_t6" in bench.main_scan(out, **options)["metrics"]
    assert "mambapy_ms: mambapy is not installed\n" in capsys.readouterr().out
    notes = {"mambapy_ms": "mambapy is not installed"}
    assert json.loads(out.read_text())["config"]["notes"] == notes
    assert bench.main_scan(**options, peers=False)["config"]["notes"] == {}, "nobody asked for it"


def time_last_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus):
    """Has the interface of mamba_ssm: u (B, D, T), B (B, N, T)."""
    u, delta, B, C = (tensor.mT for tensor in (u, delta, B, C))
    z = None if z is None else z.mT
    return selective_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus)[0].mT


@pytest.mark.parametrize("peer", SCANS)
def test_peers_compute_the_same_scan(peer, monkeypatch):
    if peer == "mamba_ssm":  # it runs on CUDA only
        interface = types.SimpleNamespace(selective_scan_fn=time_last_scan)
        for name in ("mamba_ssm", "mamba_ssm.ops"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "mamba_ssm.ops.selective_scan_interface", interface)
    else:
        pytest.importorskip(peer)
    values = arguments(batch=2, length=7, channels=5, states=3)
    values |= {
        "dt_bias": torch.rand(5),
        "z": torch.randn(2, 7, 5),
        "D": torch.randn(5),
        "softplus": True,
    }
    values.pop("h0", None)
    plain = scan_arguments(Shape(2, 6, 5, 3), torch.float32, CPU, full=False)
    for given in (values, plain):
        expected, _ = selective_scan(**given)
        assert torch.allclose(SCANS[peer](**given), expected, rtol=1e-4, atol=1e-5)


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
    monkeypatch.setattr(measure, "wall", lambda call, device: call() or milliseconds)
    times = measure.take_times(lambda: calls.append(1), CPU, **options)
    assert times == timed * [milliseconds]
    assert len(calls) == 1 + timed, "the first call may compile"


def test_times_and_their_spread_are_recorded(record, monkeypatch):
    taken = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    record.repeats = 5
    monkeypatch.setattr(measure, "wall", lambda call, device: next(taken))
    record.time("ssm_ms_b1_t2", lambda: 0)
    quantiles = {"ssm_p10_ms_b1_t2": 1.4, "ssm_p90_ms_b1_t2": 4.6}
    assert record.metrics == {"ssm_ms_b1_t2": 3.0, **quantiles}
    record.time("ssm_ms_b1_t2", pytest.fail)  # it is known

    record.metrics.clear()
    record.device, record.repeats, calls = torch.device("cuda"), 1, []
    monkeypatch.setattr(measure, "wall", lambda call, device: call() or 60.0)
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
    options = {"kinds": ["vssm"], "batches": [1], "lengths": [4], "repeats": 3, "peers": False}
    made = bench.main_generate(**options, **TINY)["metrics"]
    for name in ("vssm", "vssm_prompted", "vssm_chunk1"):
        low, middle, high = (made[f"{name}{part}_ms_b1_t4"] for part in ("_p10", "", "_p90"))
        assert 0 < low <= middle <= high
    printed = capsys.readouterr().out
    assert "p10" not in printed, "the table has medians"
    assert "step by step" not in printed, "there is none to compare with"


NEW = ("ssm_ms_b2_t1", "ssm_plain_ms_b2_t1")


def test_result_is_continued(tmp_path, monkeypatch, capsys):
    out, options = (
        tmp_path / "generate.json",
        {"batches": [2], "repeats": 1, "peers": False, **TINY},
    )
    first = bench.main_generate(out, kinds=["ssm", "vssm"], lengths=[4], **options)
    assert re.search(r"fastest step by step / vssm +\d+\.\dx", capsys.readouterr().out)
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
    more = bench.main_generate(out, kinds=["ssm"], lengths=[4, 1], **options)
    new = {name: more["metrics"][name] for name in NEW}
    assert more["metrics"] == {**first["metrics"], **new}
    again = first["command"].replace("ssm vssm", "ssm").replace("--lengths 4", "--lengths 4 1")
    assert more["command"] == f"{first['command']} && {again}"
    assert json.loads(out.read_text())["metrics"] == more["metrics"]
    with pytest.raises(ValueError, match=r"has width=16, this run has 8; use the same, a new name"):
        bench.main_generate(out, kinds=["ssm"], lengths=[4], **{**options, "width": 8})
    monkeypatch.setattr("vssm.lab.bench.measure.source", lambda untimed: "other code")
    with pytest.raises(ValueError, match=r"has source='\w+', this run has 'other code'"):
        bench.main_generate(out, kinds=["ssm"], lengths=[4], **options)
    anew = bench.main_generate(out, kinds=["ssm"], lengths=[1], restart=True, **options)
    assert set(anew["metrics"]) == set(new)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"metrics": {"a": "fast"}, "config": {}}', '{"metrics": {}}']
)
def test_damaged_result_is_named_and_kept(tmp_path, content):
    out = tmp_path / "scan.json"
    out.write_text(content)
    with pytest.raises(
        ValueError, match=r"scan.json' is damaged or no result; give a new name, or --restart"
    ):
        bench.main_scan(out, device="cpu", shapes=["2x6x5x3"])
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
            "lengths is 0; it must be a whole number >= 1",
        ),
        (bench.main_generate, {"seconds_per_point": 0}, "seconds_per_point is 0; it must be"),
        (bench.main_table1, {"lengths": [-1]}, "lengths is -1; it must be"),
        (bench.main_train, {"steps": 0}, "steps is 0; it must be"),
        (bench.main_scan, {"shapes": ["8"]}, "shapes='8' is not allowed; allowed: BxT or BxTxDxN"),
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
    made = bench.main_train(
        tmp_path / "train.json", kinds=["rnn"], batch=2, steps=2, peers=False, **TINY
    )
    assert set(made["metrics"]) == {
        "rnn_tokens_per_second",
        "rnn_tokens_per_second_p10",
        "rnn_tokens_per_second_p90",
        "rnn_parameters",
    }
    assert made["metrics"]["rnn_tokens_per_second"] > 0
    assert made["config"]["data"].startswith("synthetic rows")
    assert re.search(r"rnn +[\d,]+ ", capsys.readouterr().out)


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("name", ["transformers_gpt2", "transformers_mamba"])
def test_peers_are_autoregressive_and_use_their_caches(name):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = PeerModel(name, features=3, width=16, layers=2, steps=6).eval()
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
    monkeypatch.setattr("vssm.lab.bench.train.WINDOWS", 1)
    monkeypatch.setattr("vssm.lab.bench.train.WARM", 1)
    trained = bench.main_train(tmp_path / "train.json", kinds=[], batch=2, steps=1, **TINY)[
        "metrics"
    ]
    assert trained["transformers_mamba_tokens_per_second"] > 0
    generated = bench.main_generate(kinds=[], lengths=[3, 300], repeats=1, **TINY)["metrics"]
    assert set(generated) == {"transformers_gpt2_ms_b1_t3", "transformers_mamba_ms_b1_t3"}
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    missing = bench.main_generate(kinds=[], lengths=[3], repeats=1, **TINY)
    note = missing["config"]["notes"]["transformers_gpt2_ms"]
    assert note == "transformers is not installed (pip install 'vssm[dev]')"


def test_table1_metrics(tmp_path, capsys):
    options = {"kinds": ["rnn", "vssm"], "lengths": [2, 4, 8], "repeats": 1, **TINY}
    made = bench.main_table1(tmp_path / "table1.json", **options)
    ways = [f"{kind}_{way}" for kind in ("rnn", "vssm") for way in ("train", "sample")]
    assert set(made["metrics"]) == {
        *(f"{way}_ms_t{length}" for way in ways for length in (2, 4, 8)),
        *(f"{way}_exponent" for way in ways),
    }
    points = [(length, made["metrics"][f"rnn_train_ms_t{length}"]) for length in (2, 4, 8)]
    assert made["metrics"]["rnn_train_exponent"] == exponent(points)
    assert re.search(r"vssm +O\(T\) +yes +T\^-?\d", capsys.readouterr().out)


def test_forecasts_are_timed_by_horizon_and_patch(tmp_path, capsys):
    options = {"paths": 3, "context": 8, "repeats": 1, **TINY}
    made = bench.main_forecast(tmp_path / "f.json", lengths=[5, 8], patches=[1, 4], **options)
    metrics = made["metrics"]
    names = {
        f"{kind}_p{patch}_ms_t{h}" for kind in ("vssm", "rnn") for patch in (1, 4) for h in (5, 8)
    }
    assert set(metrics) == names | {f"ahead_p{patch}_t{h}" for patch in (1, 4) for h in (5, 8)}
    assert metrics["ahead_p4_t8"] == metrics["rnn_p1_ms_t8"] / metrics["vssm_p4_ms_t8"]
    assert re.search(r"rnn, P = 1 / vssm, P = 4 +[\d.]+x", capsys.readouterr().out)
    with pytest.raises(
        ValueError, match=r"patches=\(9,\) is not allowed; allowed: 1 to 8, the context"
    ):
        bench.main_forecast(patches=[9], **options)
    with pytest.raises(ValueError, match="kinds='gru' is unknown"):
        bench.main_forecast(kinds=["gru"], **options)
    for name in ("series", "paths"):
        with pytest.raises(ValueError, match=f"{name} is 0; it must be a whole number >= 1"):
            bench.main_forecast(**{**options, name: 0})


def test_a_vssm_with_levels_is_timed_under_its_own_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vssm.lab.bench.train.WINDOWS", 1)
    monkeypatch.setattr("vssm.lab.bench.train.WARM", 1)
    options = {"kinds": ["vssm"], "levels": [2], **TINY}
    trained = bench.main_train(tmp_path / "train.json", batch=2, steps=1, peers=False, **options)[
        "metrics"
    ]
    assert trained["vssm_l2_tokens_per_second"] > 0
    assert trained["vssm_l2_parameters"] != trained["vssm_parameters"]
    generated = bench.main_generate(lengths=[4], batches=[1], repeats=1, peers=False, **options)[
        "metrics"
    ]
    ways = ("ms", "plain_ms", "prompted_ms", "chunk1_ms")
    assert set(generated) == {f"{name}_{way}_b1_t4" for name in ("vssm", "vssm_l2") for way in ways}
    table1 = bench.main_table1(lengths=[2, 4, 8], repeats=1, **options)
    assert {"vssm_l2_train_exponent", "vssm_l2_sample_exponent"} <= set(table1["metrics"])
    assert " --levels 2" in table1["command"]
    assert len(re.findall(r"^ *vssm_l2 ", capsys.readouterr().out, re.MULTILINE)) == 1 + 4 + 1


def test_levels_that_do_not_fit_are_named_before_anything_is_measured(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for what in ("train", "generate", "table1"):
        with pytest.raises(SystemExit) as stop:
            main(["bench", what, "--levels", "5", "--out", "speed.json"])
        message = "vssm: latents=32 is not divisible by levels=5; allowed: a multiple of 5\n"
        assert stop.value.code == 2 and capsys.readouterr().err == message
    with pytest.raises(ValueError, match="levels is 0; it must be a whole number >= 1"):
        bench.main_table1(levels=[0], **TINY)
    assert not list(tmp_path.iterdir())


def test_exponent_is_of_the_upper_half():
    points = [(2**k, 1.0) for k in range(4)] + [(2**k, 3e-3 * 2.0 ** (2 * k)) for k in range(4, 8)]
    assert exponent(points) == pytest.approx(2.0, rel=1e-9)


def sequential_steps(function):
    """Counts the sequential runs of a stack; a GRU's loop over time counts its steps."""
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
