"""What is given with a sequence and never made: labels and columns that are known in advance."""

import json

import numpy as np
import pytest
import torch

import vssm
from tests.tiny_runs import run
from vssm.cli import main
from vssm.config import RunConfig, TrainConfig
from vssm.data import ArraysConfig, DataConfig, open_data
from vssm.runs.folder import read_log

SMALL = {"width": 8, "layers": 1, "latents": 4, "classes": 5, "levels": 2}
FEW = {"max_steps": 2, "batch": 8, "samples": 4, "log_every": 1, "checkpoint_minutes": 0.0}


def any_part(data, **options):
    """A short training of a model with known="any"."""
    model = vssm.ModelConfig(features=1, head="auto", known="any", **SMALL)
    return RunConfig(data=data, model=model, train=TrainConfig(**{**FEW, **options}))


def own_labels(folder, num=40):
    """A file of labelled sequences, (40, 6, 3), with three classes."""
    random = np.random.default_rng(0)
    x = random.normal(size=(num, 6, 3)).astype(np.float32)
    np.savez(folder / "mine.npz", x=x, labels=np.arange(num) % 3)
    return own_labels_of(folder)


def own_labels_of(folder):
    arrays = ArraysConfig(path=str(folder / "mine.npz"))
    return DataConfig(name="arrays", labels=True, arrays=arrays)


def test_labels_are_the_last_features_of_every_step():
    plain, labelled = (open_data(DataConfig(labels=labels)) for labels in (False, True))
    assert (labelled.meta.features, labelled.meta.given, labelled.meta.classes) == (18, 10, 10)
    index = torch.arange(5)
    x = labelled.train.batch(index)
    assert x.shape == (5, 8, 18)
    assert torch.equal(x[..., :8], plain.train.batch(index))
    one_hot = torch.nn.functional.one_hot(plain.train.labels[:5], 10).float()
    assert torch.equal(x[..., 8:], one_hot[:, None].expand(-1, 8, -1))
    assert torch.equal(labelled.meta.without_given(x), x[..., :8])
    assert labelled.meta.to_image(x).shape == (5, 8, 8, 1)


def test_arrays_have_labels_if_the_file_does(tmp_path):
    data = open_data(own_labels(tmp_path))
    assert (data.meta.features, data.meta.given) == (6, 3)
    x = data.train.batch(slice(0, 4))
    assert torch.equal(x[:, 2, 3:].argmax(-1), data.train.labels[:4])
    np.savez(tmp_path / "mine.npz", x=np.zeros((20, 4, 2), np.float32))
    with pytest.raises(ValueError, match="has no labels; save them beside x"):
        open_data(own_labels_of(tmp_path))
    np.savez(tmp_path / "mine.npz", x=np.zeros((20, 4, 2), np.float32), labels=np.full(20, -1))
    with pytest.raises(ValueError, match=r"labels is int64 .* use 20 whole numbers from 0"):
        open_data(own_labels_of(tmp_path))


def test_labels_need_data_and_a_model_that_take_them(tmp_path):
    with pytest.raises(ValueError, match="'synthetic' has no labels"):
        DataConfig(name="synthetic", labels=True)
    config = RunConfig(data=DataConfig(labels=True), train=TrainConfig(**FEW))
    with pytest.raises(ValueError, match="train with --model"):
        run(config, tmp_path / "run")


def test_a_run_with_labels_trains_resumes_and_draws_a_class(tmp_path, monkeypatch, capsys):
    config = any_part(DataConfig(labels=True), shift=0.5)
    folder = run(config, tmp_path / "run", pictures=True)
    model = json.loads((folder / "config.json").read_text())["model"]
    assert (model["features"], model["given"], model["window"]) == (18, 10, 8)
    assert (folder / "samples.png").is_file()
    assert [line["step"] for line in read_log(folder) if line["split"] == "valid"] == [2]
    run(None, folder, resume=True)

    monkeypatch.chdir(tmp_path)
    prompt = np.zeros((3, 8), np.float32)
    np.save("prompt.npy", prompt)
    main(["generate", "run", "--label", "7", "--num", "2", "--out", "one.npy"])
    main(["generate", "run", "--label", "3", "--num", "2", "--out", "two.npy"])
    main(["generate", "run", "--label", "3", "--prompt", "prompt.npy", "--out", "rest.npy"])
    one, two, rest = (np.load(name) for name in ("one.npy", "two.npy", "rest.npy"))
    assert one.shape == two.shape == (2, 8, 8) and rest.shape == (1, 5, 8)
    assert not np.array_equal(one, two)
    with pytest.raises(SystemExit):
        main(["generate", "run", "--label", "10"])
    assert "label=10 is unknown; use 0 to 9" in capsys.readouterr().err
