"""Bits per character: exact where they can be, by chunk size, and as a result file."""

import itertools
import json
import math

import pytest
import torch

import vssm
from tests.conftest import relative_error, small_config, small_model
from vssm.config import RunConfig, TrainConfig
from vssm.data import DataConfig, TextConfig, open_data
from vssm.lab.compare_text import TextComparison, chunked_bits, compare_text, main
from vssm.runs.folder import read_config
from vssm.training.loop import train
from vssm.training.progress import Progress

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


def text_run(folder, kind="ssm", levels=1, text=TEXT, width=8, **options):
    """Trains a small model of a text."""
    path = folder.with_suffix(".txt")
    path.write_text(text)
    values = {"length": 12, **options}
    config = RunConfig(
        data=DataConfig(name="text", text=TextConfig(path=str(path), **values)),
        model=small_config(kind, head="auto", width=width, layers=1, latents=4, levels=levels),
        train=TrainConfig(max_steps=2, batch=8, samples=0, num_valid=8),
    )
    return train(config, folder, progress=Progress())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    kinds = (("vssm", 1), ("ssm", 1), ("vssm", 2))
    return [text_run(folder / f"{kind}{levels}", kind, levels) for kind, levels in kinds]


def test_runs_of_one_kind_are_named_by_their_folders(runs, tmp_path):
    wide = text_run(tmp_path / "wide", width=16)
    made = compare_text(
        [runs[1], wide, runs[0]],
        TextComparison(chunks=(), num_samples=1, sequences=1, prompt="to "),
    )
    names = {"ssm1", "wide", "vssm"}
    assert set(made["config"]) == names and made["config"]["wide"]["width"] == 16
    assert {f"{name}_bits_per_char" for name in names} <= set(made["metrics"])
    assert made["metrics"]["wide_parameters"] > made["metrics"]["ssm1_parameters"]
    assert set(made["samples"]) == {"ssm1", "wide", "vssm W = 12"}


def test_runs_that_can_not_be_compared_are_refused(runs, tmp_path):
    options = TextComparison(chunks=(), num_samples=1, sequences=1, prompt="to ")
    with pytest.raises(
        ValueError, match="would be called 'ssm1'; rename a folder, or give different kinds"
    ):
        compare_text([runs[1], runs[1]], options)
    for k, change in enumerate(({"text": TEXT[::-1]}, {"length": 6}, {"unit": "byte"})):
        other = text_run(tmp_path / str(k), **change)
        with pytest.raises(
            ValueError, match="have different test sequences; give runs of one text"
        ):
            compare_text([runs[0], other], options)
    with pytest.raises(ValueError, match="runs is empty; give one or more run folders"):
        compare_text([], options)


def test_prompts_are_counted_in_tokens(tmp_path):
    run = text_run(tmp_path / "bytes", unit="byte")
    options = TextComparison(chunks=(), num_samples=1, sequences=1, prompt="ΩΩΩ")
    model, meta = vssm.load(run), open_data(read_config(run).data).meta
    tokens = meta.encode("ΩΩΩ")[None]
    expected = vssm.generate(model, prompt=tokens, length=12 - 6, observe="sample").x[0]
    assert compare_text([run], options)["samples"]["ssm"] == "ΩΩΩ" + meta.decode(expected)


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
    assert {"vssm W = 4", "ssm"} <= set(samples) and all(
        text.startswith("to ") for text in samples.values()
    )
    shown = capsys.readouterr().out
    assert "--- vssm W = 12\nto " in shown and "--- ssm\nto " in shown


def test_bad_requests_are_named(runs, tmp_path, capsys):
    for arguments, message in (
        ([str(runs[0]), "--prompt", "Ω"], "text has characters outside the vocabulary: ['Ω']"),
        ([str(tmp_path)], "has no config.json"),
        ([], "runs is empty; give one or more run folders"),
        ([str(runs[0]), "--chunks", "0"], "chunks=0 is not allowed; allowed: a whole number >= 1"),
        (
            [str(runs[0]), "--chunks", "-3"],
            "chunks=-3 is not allowed; allowed: a whole number >= 1",
        ),
        (
            [str(runs[0]), "--sequences", "0"],
            "sequences=0 is not allowed; allowed: a whole number >= 1",
        ),
        (
            [str(runs[0]), "--num-samples", "0"],
            "num_samples=0 is not allowed; allowed: a whole number >= 1",
        ),
        (
            [str(runs[0]), "--prompt", "to be or not to be"],
            "prompt has 18 tokens; allowed: 1 to 11",
        ),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["--chunks", "12", "--sequences", "1", "--num-samples", "1", *arguments])
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and message in error
