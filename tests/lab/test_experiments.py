"""The scripts in experiments/: the bits of compare_text.py, the peers, and the paper's Table 1."""

import itertools
import json
import math
import re
import runpy
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch

import vssm
from tests.conftest import KINDS, relative_error, sequences, small_model
from tests.ops.test_scan import arguments
from vssm import generate, objective, observe
from vssm.lab.bench.scan import Shape, scan_arguments
from vssm.nn import Stack
from vssm.ops import selective_scan

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TINY = {"device": "cpu", "width": 16, "layers": 1, "repeats": 1}


def script(name):
    return runpy.run_path(str(EXPERIMENTS / f"{name}.py"))


chunked_bits = script("compare_text")["chunked_bits"]
peers, table1 = script("bench_peers"), script("table1")
SCANS, THEORY, exponent = peers["SCANS"], table1["THEORY"], table1["exponent"]


@pytest.mark.parametrize("kind", ["vssm", "tvae"])
def test_one_chunk_is_one_shot(kind):
    model = small_model(kind, "categorical")
    x = torch.randint(0, 5, (3, 7))
    nats = vssm.log_likelihood(model, x, num_samples=4, prior="partial")
    assert abs(chunked_bits(model, x, 7, 4) + float(nats.mean()) / 7 / math.log(2)) < 1e-5
    assert abs(chunked_bits(model, x, 99, 4) - chunked_bits(model, x, 7, 4)) < 1e-6


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_chunked_bits_converge_to_the_sum_over_all_latents(chunk):
    model = small_model("vssm", "categorical", latents=1, classes=2)
    x = torch.tensor([[3, 0, 4]])
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for path in itertools.product(range(2), repeat=3):
            z = torch.tensor(path).view(1, 3, 1)
            nats = model.likelihood(z)[0].log_prob(x).sum()
            for t in range(3):
                known = t // chunk * chunk
                q_z, _ = model.partial_posterior(x[:, :known] if known else None, empty=3 - known)
                nats = nats + q_z.log_prob(z)[0, t]
            total += nats.double().exp()
    exact = torch.tensor(-float(total.log()) / 3 / math.log(2))
    assert relative_error(torch.tensor(chunked_bits(model, x, chunk, 2000)), exact) < 0.02


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
    plain = scan_arguments(Shape(2, 6, 5, 3), torch.float32, torch.device("cpu"), full=False)
    for given in (values, plain):
        expected, _ = selective_scan(**given)
        assert torch.allclose(SCANS[peer](**given), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("name", ["transformers_gpt2", "transformers_mamba"])
def test_peers_are_autoregressive_and_use_their_caches(name):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = peers["PeerModel"](name, features=3, width=16, layers=2, steps=6).eval()
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
def test_peers_beside_ours_in_one_result(tmp_path, capsys):
    pytest.importorskip("transformers"), pytest.importorskip("mambapy")
    options = partial(peers["Options"], device="cpu", repeats=1)
    scanned = options("scan", tmp_path / "scan.json", shapes=("2x6x5x3", "1x1x5x3"))
    peers["time_scans"](scanned, "python peers.py scan")
    metrics = json.loads(scanned.out.read_text())["metrics"]
    assert metrics["fwd_ms_b2_t6"] > 0 and metrics["mambapy_bwd_ms_b2_t6"] > 0
    assert "mambapy" in capsys.readouterr().out
    generated = options("generate", tmp_path / "generate.json", lengths=(2,))
    peers["time_generation"](generated, "python peers.py generate")
    metrics = json.loads(generated.out.read_text())["metrics"]
    assert metrics["vssm_ms_b1_t2"] > 0 and metrics["transformers_gpt2_ms_b1_t2"] > 0


def test_table1_metrics(tmp_path, capsys):
    options = {"kinds": ("rnn", "vssm"), "lengths": (2, 4, 8), **TINY}
    metrics = table1["measure_table"](tmp_path / "table1.json", **options).metrics
    ways = [f"{kind}_{way}" for kind in ("rnn", "vssm") for way in ("train", "sample")]
    assert set(metrics) == {
        *(f"{way}_ms_t{length}" for way in ways for length in (2, 4, 8)),
        *(f"{way}_exponent" for way in ways),
    }
    points = [(length, metrics[f"rnn_train_ms_t{length}"]) for length in (2, 4, 8)]
    assert metrics["rnn_train_exponent"] == exponent(points)
    assert re.search(r"vssm +O\(T\) +yes +T\^-?\d", capsys.readouterr().out)


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
