"""What is given with a sequence and never made: labels and columns that are known in advance."""

import json

import numpy as np
import pytest
import torch

from tests.tiny_runs import FEW, any_part, gaps, run
from vssm.cli import main
from vssm.config import RunConfig, TrainConfig
from vssm.data import ArraysConfig, DataConfig, Meta, open_data
from vssm.data.dataset import digest
from vssm.runs.config import read_config
from vssm.runs.folder import RunFolder, read_log
from vssm.runs.hub import train_command


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
    with pytest.raises(ValueError, match=r"labels\[0\] is -1; use 0 to 9999"):
        open_data(own_labels_of(tmp_path))


def test_labels_need_data_and_a_model_that_take_them(tmp_path):
    with pytest.raises(ValueError, match="'synthetic' has no labels"):
        DataConfig(name="synthetic", labels=True)
    config = RunConfig(data=DataConfig(labels=True), train=TrainConfig(**FEW))
    with pytest.raises(ValueError, match="train with --model"):
        run(config, tmp_path / "run")


def test_a_run_with_labels_trains_resumes_and_draws_a_class(tmp_path, monkeypatch, capsys):
    config = any_part(DataConfig(labels=True), shift=0.5)
    folder = run(config, tmp_path / "run")
    model = json.loads((folder / "config.json").read_text())["model"]
    assert (model["features"], model["given"], model["window"]) == (18, 10, 8)
    assert (folder / "samples.png").is_file()
    assert [line["step"] for line in read_log(folder) if line["split"] == "valid"] == [2]
    run(None, folder, resume=True)
    RunFolder(folder).check_same(config)
    assert "--labels --model.kind vssm" in train_command(read_config(folder))
    assert "--model.given" not in train_command(read_config(folder))

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


@pytest.mark.parametrize("scale", ["column", "window"])
def test_missing_cells_stay_missing(tmp_path, scale):
    config = gaps(tmp_path, scale=scale)
    with pytest.raises(ValueError, match=r"'sold' is missing .* or learn .* --model\.known any"):
        open_data(config)
    data = open_data(config, missing=True)
    x = data.train.batch(slice(0, 20))
    days = torch.arange(20)[:, None] + torch.arange(12)
    assert torch.equal(x[..., 0].isnan(), days % 5 == 3)
    assert torch.equal(x[..., 1].isnan(), (days >= 30) & (days < 40))
    assert x.nanmean().abs() < 1 and not x.isinf().any()
    assert digest(data.train) == digest(open_data(config, missing=True).train)
    table = np.genfromtxt(tmp_path / "gaps.csv", delimiter=",", skip_header=1)[:140, 1:3]
    assert np.allclose(data.meta.mean, np.nanmean(table, 0))


def test_given_columns_come_last_and_are_scaled(tmp_path):
    config = gaps(tmp_path, given=("price,weekday",))
    data = open_data(config, missing=True)
    meta = data.meta
    assert meta.columns == ("sold", "rain") and meta.given_columns == ("price", "weekday")
    assert (meta.features, meta.given) == (4, 2)
    assert Meta.from_json(json.loads(json.dumps(meta.to_json()))) == meta
    x = data.train.batch(slice(0, 3))
    assert x.shape == (3, 12, 4) and not x[..., 2:].isnan().any()
    rows = x[0, :, 2:]  # of price and weekday
    days = torch.arange(12)
    mean, std = meta.mean[2:], meta.std[2:]
    assert torch.allclose(rows[:, 0], (5 + days % 2 - mean[0]) / std[0], atol=1e-5)
    assert torch.allclose(rows[:, 1], (days % 7 - mean[1]) / std[1], atol=1e-5)
    with pytest.raises(ValueError, match=r"columns and series\.given name 'price' twice"):
        open_data(gaps(tmp_path, columns=("price",), given=("price",)))
    with pytest.raises(ValueError, match="column 'sold' is missing"):
        open_data(gaps(tmp_path, columns=("rain",), given=("sold",)), missing=True)


def test_missing_values_of_arrays_are_kept_for_models_that_learn_from_them(tmp_path):
    x = np.random.default_rng(0).normal(size=(30, 5, 2))
    x[::2, 1, 0] = np.nan
    np.save(tmp_path / "x.npy", x)
    config = DataConfig(name="arrays", arrays=ArraysConfig(path=str(tmp_path / "x.npy")))
    with pytest.raises(ValueError, match="any if NaN"):
        open_data(config)
    data = open_data(config, missing=True)
    assert data.train.batch(slice(None)).isnan().sum() == len(data.train.x[data.train.x.isnan()])
    folder = run(any_part(data.config), tmp_path / "run")
    assert all(np.isfinite(line["loss"]) for line in read_log(folder))


def test_a_series_with_gaps_and_given_columns_trains(tmp_path):
    config = any_part(gaps(tmp_path, given=("price",)))
    folder = run(config, tmp_path / "run")
    assert (folder / "samples.png").is_file()
    assert all(np.isfinite(line["loss"]) for line in read_log(folder))
    plain = RunConfig(data=gaps(tmp_path, given=("price",), fill="zero"), train=config.train)
    with pytest.raises(ValueError, match="train with --model"):
        run(plain, tmp_path / "other")
