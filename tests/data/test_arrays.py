"""Your own sequences of different lengths: read, trained on and evaluated as if each were alone."""

import dataclasses
import json
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

import vssm
from tests.conftest import KINDS, relative_error, sequences, small_config, small_model
from tests.tiny_runs import StopAt, log, result, run, stopped, tiny
from vssm.cli import main
from vssm.data import ArraysConfig, DataConfig, describe, open_data
from vssm.evaluation.scores import evaluate_run
from vssm.likelihoods import reconstruct
from vssm.runs.checkpoint import load
from vssm.runs.config import SavedConfig
from vssm.training.step import Learner

MODELS = [*((kind, {}) for kind in KINDS), ("vssm", {"levels": 3})]


def write(path, num=41, longest=9, features=3, padding=0.0, trailing=0):
    """Writes sequences of 1 to `longest` steps, with `trailing` steps that no sequence reaches."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, longest + 1, num)
    lengths[0] = longest
    x = random.uniform(0, 1, (num, longest + trailing, features)).astype(np.float32)
    x[np.arange(longest + trailing) >= lengths[:, None]] = padding
    np.savez(path, x=x, lengths=lengths)
    return x, lengths


def arrays(path, **options):
    return DataConfig(name="arrays", arrays=ArraysConfig(path=str(path)), **options)


def rows(split):
    """The real steps of every sequence."""
    lengths = split.real(slice(None))
    x = split.batch(slice(None))
    return (
        list(x)
        if lengths is None
        else [row[:n] for row, n in zip(x, lengths.tolist(), strict=True)]
    )


def test_sequences_are_read_split_and_padded_with_zeros(tmp_path):
    x, lengths = write(tmp_path / "a.npz", padding=np.nan, trailing=4)
    data = open_data(arrays(tmp_path / "a.npz"))
    assert (data.meta.length, data.meta.features, data.meta.suggested_head) == (
        9,
        3,
        "gaussian-learned",
    )
    splits = (data.train, data.valid, data.test())
    assert [len(split) for split in splits] == [33, 4, 4]
    found = [row.numpy().tobytes() for split in splits for row in rows(split)]
    assert sorted(found) == sorted(row[:n].tobytes() for row, n in zip(x, lengths, strict=True))
    for split in splits:
        mask = torch.arange(9) >= split.real(slice(None))[:, None]
        assert (
            split.batch(slice(None))[mask].abs().max() == 0 and split.lengths.dtype == torch.int64
        )
    assert data.train.filled == pytest.approx(float(data.train.lengths.double().mean()) / 9)
    moved = data.train.to("meta")
    assert moved.lengths.device.type == "meta" and moved.lengths.shape == (33,)
    other = open_data(arrays(tmp_path / "a.npz", seed=1))
    assert not torch.equal(data.test().x, other.test().x)
    facts = describe(data)
    assert facts["lengths"] == [int(data.train.lengths.min()), int(data.train.lengths.max())]
    assert json.loads(json.dumps(facts)) == facts


def test_sequences_of_one_length_need_no_lengths(tmp_path):
    x = np.random.default_rng(0).integers(0, 9, (12, 5, 2))
    np.save(tmp_path / "a.npy", x)
    data = open_data(arrays(tmp_path / "a.npy"))
    assert data.train.lengths is None and data.train.real([0]) is None and data.train.filled == 1
    assert sum(len(rows(split)) for split in (data.train, data.valid, data.test())) == 12
    assert data.train.batch([0]).dtype == torch.float32


@pytest.mark.parametrize("shape", [(20, 5, 4), (20, 5, 4, 1), (20, 5, 4, 3)])
def test_arrays_of_uint8_are_images(shape, tmp_path):
    x = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    np.save(tmp_path / "a.npy", x)
    channels = shape[3] if len(shape) == 4 else 1
    kind = "RGB" if channels == 3 else "grey"
    note = rf"a\.npy: x is uint8 and read as {kind} images of 4 x 5 pixels, 0 to 255 become 0 to 1"
    with pytest.warns(UserWarning, match=note):
        data = open_data(arrays(tmp_path / "a.npy"))
    assert (data.meta.image_shape, data.meta.levels) == ((5, 4, channels), 256)
    assert (data.meta.length, data.meta.features, data.meta.suggested_head) == (
        5,
        4 * channels,
        "gaussian",
    )
    assert data.train.x.dtype == torch.uint8
    expected = {(row / np.float32(255)).tobytes() for row in x.reshape(20, -1).astype(np.float32)}
    assert all(row.numpy().tobytes() in expected for row in data.train.batch(slice(None)))


def test_uint8_of_zeros_and_ones_is_not_scaled(tmp_path):
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(0, 2, (20, 5, 4), np.uint8))
    with pytest.warns(UserWarning, match="0 and 1 stay as they are"):
        data = open_data(arrays(tmp_path / "a.npy"))
    assert (data.meta.image_shape, data.meta.levels, data.meta.suggested_head) == (
        (5, 4, 1),
        2,
        "bernoulli",
    )
    assert set(data.train.batch(slice(None)).flatten().tolist()) == {0.0, 1.0}


def test_floats_of_four_sizes_are_images_in_the_unit_interval(tmp_path):
    x = np.random.default_rng(0).random((20, 5, 4, 3))
    np.save(tmp_path / "a.npy", x)
    data = open_data(arrays(tmp_path / "a.npy"))
    assert (data.meta.image_shape, data.meta.levels) == ((5, 4, 3), None)
    np.save(tmp_path / "b.npy", 255 * x)
    with pytest.raises(
        ValueError, match=r"images with values from .* to 25\d.*; use floats from 0 to 1, or"
    ):
        open_data(arrays(tmp_path / "b.npy"))


def test_large_values_are_noted(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (20, 5, 4))
    np.save(tmp_path / "a.npy", x.astype(np.float32))
    with pytest.warns(
        UserWarning, match="x has values from 0 to 255; divide or standardise them, since"
    ):
        data = open_data(arrays(tmp_path / "a.npy"))
    assert data.meta.image_shape is None and data.train.batch(slice(None)).max() > 1


X = np.zeros((10, 5, 2), np.float32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"y": X}, r"holds y; use x, lengths"),
        ({"x": X, "z": X}, r"holds x, z; use x, lengths"),
        ({"x": X[:9]}, r"x is float32 of shape \(9, 5, 2\); use .* at least 10 sequences"),
        (
            {"x": X[..., 0]},
            r"x is float32 of shape \(10, 5\); use numbers \(sequences, steps, feat",
        ),
        ({"x": X[:, :0]}, r"x is float32 of shape \(10, 0, 2\); use .* at least one step"),
        ({"x": X.astype(str)}, r"x is <U32 of shape"),
        (
            {"x": X, "lengths": np.ones(9, int)},
            r"lengths is int64 of shape \(9,\); use 10 whole num",
        ),
        (
            {"x": X, "lengths": np.ones(10)},
            r"lengths is float64 .*; use 10 whole numbers, one for each",
        ),
        ({"x": X, "lengths": np.r_[[5] * 9, 6]}, r"lengths\[9\] is 6; use 1 to 5"),
        ({"x": X, "lengths": np.r_[[5] * 8, 0, 5]}, r"lengths\[8\] is 0; use 1 to 5"),
        (
            {"x": np.where(np.arange(5)[:, None] == 3, np.nan, X)},
            r"x is not finite at sequence 0, step 3; use finite .*--model.known any .*lengths in",
        ),
        ({"x": np.full(X.shape, 1e300)}, r"x is not finite at sequence 0, step 0"),
        (
            {
                "x": np.where(np.arange(5)[:, None] == 3, np.inf, X),
                "lengths": np.r_[[3] * 7, 4, 3, 3],
            },
            r"x is not finite at sequence 7, step 3; use finite numbers",
        ),
    ],
)
def test_bad_arrays_are_named(content, message, tmp_path):
    np.savez(tmp_path / "bad.npz", **content)
    with pytest.raises(ValueError, match=rf"bad\.npz:? {message}"):
        open_data(arrays(tmp_path / "bad.npz"))


def test_damaged_files_are_named_and_nothing_is_unpickled(tmp_path):
    with pytest.raises(ValueError, match=r"arrays\.path is needed"):
        open_data(DataConfig(name="arrays"))
    write(tmp_path / "whole.npz")
    whole = (tmp_path / "whole.npz").read_bytes()
    np.save(tmp_path / "object.npy", np.array([{}] * 20, dtype=object), allow_pickle=True)
    contents = {
        "none.npz": b"",
        "cut.npz": whole[: len(whole) // 2],
        "text.npz": b"1,2,3\n",
        "object.npy": (tmp_path / "object.npy").read_bytes(),
        "bits.npz": whole[:200] + bytes(byte ^ 255 for byte in whole[200:400]) + whole[400:],
    }
    np.save(tmp_path / "x.npy", X)
    plain = (tmp_path / "x.npy").read_bytes()
    entry = whole.index(b"PK\x01\x02")
    contents |= {f"{k}.npy": plain.replace(end, b" ", 1) for k, end in enumerate((b")", b"}"))}
    contents |= {f"{k}.npz": whole[:k] + b"\x01" + whole[k + 1 :] for k in (entry + 8, entry + 10)}
    with zipfile.ZipFile(tmp_path / "raw.npz", "w") as file:
        file.writestr("x", b"123")
    with pytest.raises(ValueError, match=r"raw\.npz: x is \|S3 of shape \(\); use numbers"):
        open_data(arrays(tmp_path / "raw.npz"))
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            ValueError, match=rf"{name} is damaged or does not hold plain arrays; use \.npy"
        ):
            open_data(arrays(tmp_path / name))


@pytest.mark.parametrize(("kind", "options"), MODELS)
def test_row_is_reconstructed_as_alone(kind, options):
    model = small_model(kind, **options)
    x, lengths = sequences(model, 3, 7), torch.tensor([4, 7, 1])
    together, *_ = reconstruct(model, x, 5, lengths)
    alone, *_ = reconstruct(model, x[:1, :4], 5)  # the noise of row 0
    assert relative_error(together.log_prob(x)[0, :4], alone.log_prob(x[:1, :4])[0]) < 1e-4


@pytest.mark.parametrize("kind", ["ssm", "transformer", "rnn"])
def test_logged_losses_are_those_of_the_sequences_alone(kind, tmp_path):
    write(tmp_path / "a.npz")
    options = {"epochs": 1, "batch": 33, "learning_rate": 1e-12, "validate_partial": True}
    config = tiny(kind, arrays(tmp_path / "a.npz"), **options)
    folder = run(config, tmp_path / "run")
    model, data = load(folder), open_data(config.data)
    for split, part in (("train", data.train), ("valid", data.valid)):
        alone = [-float(vssm.log_likelihood(model, row[None])) for row in rows(part)]
        assert log(folder, split)[0]["loss"] == pytest.approx(np.mean(alone), rel=1e-4)
    long = [row[None] for row in rows(data.valid) if len(row) > 4]  # of 9 at most
    assert 0 < len(long) < len(data.valid)
    halves = [float(vssm.log_likelihood(model, row, prompt_length=4)) for row in long]
    assert log(folder, "valid")[0]["partial_elbo"] == pytest.approx(np.mean(halves), rel=1e-4)


def test_short_sequences_alone_have_no_second_half(tmp_path):
    x, lengths = write(tmp_path / "a.npz")
    np.savez(
        tmp_path / "a.npz", x=x, lengths=np.where(np.arange(len(x)) == 1, 9, np.minimum(lengths, 3))
    )
    config = tiny(data=arrays(tmp_path / "a.npz"), max_steps=1, batch=8, validate_partial=True)
    assert int(open_data(config.data).valid.lengths.max()) <= 4, "none is longer than the cut"
    assert "partial_elbo" not in log(run(config, tmp_path / "run"), "valid")[0]


@pytest.mark.parametrize(("kind", "options"), MODELS)
def test_padding_never_changes_a_training(kind, options, tmp_path, monkeypatch):
    write(tmp_path / "a.npz")
    config = tiny(kind, arrays(tmp_path / "a.npz"), max_steps=2, batch=8, validate_partial=True)
    config = dataclasses.replace(
        config, model=small_config(kind, width=8, layers=1, sigma=0.3, **options)
    )
    zeros = result(run(config, tmp_path / "zeros"))

    def open_noisy(data_config, missing):
        data = open_data(data_config, missing)
        for split in (data.train, data.valid):
            split.x[torch.arange(9) >= split.lengths[:, None]] = 0.7
        return data

    monkeypatch.setattr("vssm.training.loop.open_data", open_noisy)
    assert result(run(config, tmp_path / "noise")) == zeros
    assert all(np.isfinite(line["loss"]) for line in zeros["log"])


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "options"), MODELS)
def test_a_replayed_step_has_its_own_lengths(kind, options, tmp_path):
    write(tmp_path / "a.npz")
    found = []
    for graph in (False, True):
        training = {"batch": 8, "device": "cuda", "graph": graph, "precision": "float32"}
        config = tiny(kind, arrays(tmp_path / "a.npz"), validate_partial=True, **training)
        told = StopAt(99)
        config = dataclasses.replace(
            config, model=small_config(kind, width=8, layers=1, sigma=0.3, **options)
        )
        found.append(log(run(config, tmp_path / str(graph), progress=told)))
        assert told.messages == [], "a step that could not be recorded runs plainly, and says so"
    assert len(found[0]) == len(found[1]) > 3
    for one, other in zip(*found, strict=True):
        assert other == pytest.approx(one, rel=1e-4)


def test_a_stopped_training_goes_on_with_the_same_lengths(tmp_path):
    write(tmp_path / "a.npz")
    config = tiny("vssm", arrays(tmp_path / "a.npz"), max_steps=4, batch=8, kl_warmup=0.5)
    whole = run(config, tmp_path / "whole")
    resumed = run(None, stopped(config, tmp_path / "stopped", 2), resume=True)
    assert result(whole) == result(resumed)


@pytest.mark.parametrize(("kind", "options"), [("ssm", {}), ("vssm", {}), ("vssm", {"levels": 3})])
def test_evaluation_counts_real_steps_only(kind, options, tmp_path):
    write(tmp_path / "a.npz", num=120)
    config = tiny(kind, arrays(tmp_path / "a.npz"), max_steps=2, batch=8)
    config = dataclasses.replace(
        config, model=small_config(kind, width=8, layers=1, sigma=0.3, **options)
    )
    folder = run(config, tmp_path / "run")
    metrics = evaluate_run(folder, num_samples=5)["metrics"]
    model, test = load(folder), open_data(config.data).test()
    x, lengths = test.batch(slice(None)), test.real(slice(None))
    expected = vssm.log_likelihood(model, x, 5, lengths=lengths)
    assert metrics["log_likelihood"] == pytest.approx(float(expected.mean()), rel=1e-4)
    longer = lengths > metrics["prompt_length"]
    assert 0 < longer.sum() < len(x) and metrics["prompt_length"] == 4
    if kind == "ssm":
        parts = [
            float(vssm.log_likelihood(model, row[None], 5, 4)) for row in rows(test) if len(row) > 4
        ]
        assert metrics["partial_log_likelihood"] == pytest.approx(np.mean(parts), rel=1e-4)
        errors = [(row - model(row[None])[0].mean[0]).square().mean().item() for row in rows(test)]
        assert metrics["mse"] == pytest.approx(np.mean(errors), rel=1e-4)
        return
    assert metrics["elbo"] < metrics["log_likelihood"] and metrics["components"] == 9 * 3
    if not options:
        kls = [model.posterior(row[None])[0].kl_to_uniform().sum().item() for row in rows(test)]
        assert metrics["kl"] == pytest.approx(np.mean(kls), rel=1e-4)


def test_the_command_line_trains_evaluates_and_generates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.npz", num=90)
    options = ["--arrays.path", str(tmp_path / "mine.npz")]
    main(["data", "arrays", *options])
    assert (tmp_path / "arrays.png").read_bytes().startswith(b"\x89PNG")
    main(["train", "arrays", "--smoke", *options, "--out", "run"])
    main(["evaluate", "run", "--quick"])
    assert json.loads((tmp_path / "run" / "eval.json").read_text())["metrics"]["sequences"] == 9
    main(["generate", "run", "--num", "2", "--out", "made.npy"])
    assert np.load("made.npy").shape == (2, 9, 3)
    (tmp_path / "my data").mkdir()
    (tmp_path / "mine.npz").rename(tmp_path / "my data" / "mine.npz")
    with pytest.raises(SystemExit):
        main(["evaluate", "run", "--quick"])
    assert "found no mine.npz in the place given" in capsys.readouterr().err
    main(["evaluate", "run", "--quick", "--data-dir", "my data"])
    made = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert made["metrics"]["sequences"] == 9
    assert made["command"] == "vssm evaluate run --data-dir 'my data' --quick"
    np.savez("short.npz", x=np.zeros((20, 4, 1)), lengths=np.full(20, 5))
    with pytest.raises(SystemExit) as stop:
        main(["train", "arrays", "--smoke", "--arrays.path", "short.npz", "--out", "other"])
    assert stop.value.code == 2 and not (tmp_path / "other").exists()
    assert capsys.readouterr().err.endswith("short.npz: lengths[0] is 5; use 1 to 4\n")


def test_gradients_are_scaled_by_the_real_values(tmp_path, monkeypatch):
    write(tmp_path / "a.npz")
    config = tiny("rnn", arrays(tmp_path / "a.npz"), max_steps=1, batch=8)
    seen, differentiate = [], Learner.differentiate

    def watched(learner, loss, values):
        seen.append(values)
        return differentiate(learner, loss, values)

    monkeypatch.setattr(Learner, "differentiate", watched)
    run(config, tmp_path / "run")
    lengths = open_data(config.data).train.real(slice(None))
    assert seen == [pytest.approx(3 * float(lengths.double().mean()))]


def test_active_components_count_real_steps_only(tmp_path, monkeypatch):
    write(tmp_path / "a.npz", num=120)
    config = tiny("vssm", arrays(tmp_path / "a.npz"), max_steps=1, batch=8)
    folder = run(config, tmp_path / "run")
    model, test = load(folder), open_data(config.data).test()
    with torch.no_grad():
        p = model.posterior(test.batch(slice(None)))[0].probs.double()
    missing = torch.arange(9) >= test.real(slice(None))[:, None]
    p[missing] = torch.nan
    kl = (p * (p * p.shape[-1]).log()).sum(-1).nanmean(0)  # (T, Z)
    threshold = kl.flatten().sort().values[13:15].mean()
    monkeypatch.setattr("vssm.evaluation.scores.ACTIVE", float(threshold))
    metrics = evaluate_run(folder, quick=True)["metrics"]
    assert metrics["active_components"] == int((kl > threshold).sum()) == 13
    aggregate = p.nanmean(0)
    perplexity = (-(aggregate * aggregate.log()).sum(-1)).exp().mean()
    assert metrics["code_perplexity"] == pytest.approx(float(perplexity), rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*x has values from 0 to 29")
def test_splits_of_old_runs_stay(tmp_path):
    """The test set and the validation set of a seed must never change."""
    np.save(tmp_path / "a.npy", np.arange(30.0).reshape(30, 1, 1))
    data = open_data(arrays(tmp_path / "a.npy", seed=3))
    assert data.test().x.flatten().tolist() == [3, 4, 28]
    assert data.valid.x.flatten().tolist() == [8, 15, 29]


@pytest.mark.filterwarnings("ignore:mine.npy. x is uint8 and read as RGB images")
def test_the_command_line_keeps_images_as_images(tmp_path, monkeypatch, capsys):
    """Arrays and folders of images: the run remembers their shape, and all pictures are images."""
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (90, 6, 5, 3), np.uint8)
    np.save("mine.npy", pixels)
    (tmp_path / "pictures").mkdir()
    for k, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "pictures" / f"{k:02d}.png")
    losses = []
    for name, path in (("arrays", "mine.npy"), ("images", "pictures")):
        main(
            ["train", name, "--smoke", f"--{name}.path", path, "--out", name, "--train.batch", "16"]
        )
        assert SavedConfig.read(name).meta().image_shape == (6, 5, 3)
        losses.append(log(tmp_path / name, "valid")[-1]["loss"])
        main(["evaluate", name, "--quick"])
        main(["generate", name, "--num", "8", "--out", f"{name}_made.png"])
        # eight images beside each other with a frame, each pixel drawn 600 // 56 = 10 times
        for picture in (f"{name}_made.png", f"{name}/samples.png"):
            with Image.open(picture) as drawn:
                assert drawn.size[0] == 8 * 7 * 10 and drawn.size[1] % (8 * 10) == 0
    assert losses[0] == losses[1] < 1e5
    np.save("upper.npy", pixels[:2, :2])
    np.save("rows.npy", pixels[:2, :2].reshape(2, 2, 15) / np.float32(255))
    for prompt in ("upper", "rows"):
        main(["generate", "images", "--prompt", f"{prompt}.npy", "--out", f"{prompt}_rest.npy"])
    assert np.load("rows_rest.npy").shape == (2, 4, 15)
    assert np.array_equal(np.load("upper_rest.npy"), np.load("rows_rest.npy"))
    capsys.readouterr()
    main(["data", "images", "--images.path", "pictures"])
    assert "and 85 more" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "pictures")
    with pytest.raises(SystemExit):
        main(["data", "images", "--images.path", "."])
    assert (
        "out='images.png' would become one of the images; use another folder"
        in capsys.readouterr().err
    )
