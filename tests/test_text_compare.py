"""Bits per character: exact where they can be, by chunk size, and as a result file."""

import itertools
import json
import math

import pytest
import torch

import vssm
from tests.conftest import relative_error, small_config, small_model
from vssm.config import RunConfig, TrainConfig
from vssm.data import DataConfig, TextConfig
from vssm.progress import Progress
from vssm.text_compare import TextComparison, chunked_bits, compare_text, main
from vssm.train import train

TEXT = "to be or not to be, that is the question. " * 20


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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "hamlet.txt").write_text(TEXT)
    data = DataConfig(name="text", text=TextConfig(path=str(folder / "hamlet.txt"), length=12))
    options = TrainConfig(max_steps=2, batch=8, samples=0, num_valid=8)
    return [
        train(
            RunConfig(
                data=data,
                model=small_config(kind, head="auto", width=8, layers=1, latents=4, levels=levels),
                train=options,
            ),
            folder / f"{kind}{levels}",
            progress=Progress(),
        )
        for kind, levels in (("vssm", 1), ("ssm", 1), ("vssm", 2))
    ]


def test_comparison_writes_bits_of_all_models(runs, tmp_path, capsys):
    out = tmp_path / "results" / "text.json"
    options = TextComparison(chunks=(1, 4, 50), num_samples=2, sequences=3, prompt="to ", out=out)
    compare_text(runs, options)
    made = json.loads(out.read_text())
    metrics, samples = made["metrics"], made["samples"]
    bits = {key for key in metrics if "bits" in key}
    assert bits == {
        "vssm_bits_per_char",
        "ssm_bits_per_char",
        "vssm_l2_bits_per_char",
        *(f"vssm_bits_per_char_w{chunk}" for chunk in (1, 4, 12)),
    }
    assert all(0 < metrics[key] < 20 for key in bits) and metrics["vssm_ms_w4"] > 0
    assert metrics["vssm_l2_ms_w4"] > 0
    assert {"vssm W = 4", "ssm"} <= set(samples) and all(text.startswith("to ") for text in samples.values())
    shown = capsys.readouterr().out
    assert "--- vssm W = 12\nto " in shown and "--- ssm\nto " in shown


def test_bad_requests_are_named(runs, tmp_path, capsys):
    for arguments, message in (
        ([str(runs[0]), "--prompt", "Ω"], "text has characters outside the vocabulary: ['Ω']"),
        ([str(tmp_path)], "has no config.json"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*arguments, "--chunks", "12", "--sequences", "1", "--num-samples", "1"])
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and message in error
