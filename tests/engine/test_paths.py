"""Forecasts that are recorded equal those that are not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.conftest import relative_error, same, small_model
from vssm.config import ModelConfig
from vssm.data import Meta
from vssm.forecasting import ModelForecaster, paths
from vssm.models import build


def make_forecaster(device, kind="vssm", **options):
    """A forecaster of two columns, in patches of two steps."""
    values = {"features": 4, "patch": 2, "mean": (5.0, -3.0), "std": (2.0, 0.5)}
    values |= {"windowed": "window", **options}
    meta = Meta(name="series", length=0, suggested_head="", columns=("a", "b"), **values)
    model = small_model(kind, "gaussian-learned", features=values["features"])
    return ModelForecaster(model.to(device), meta)


def histories(num, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 12, 2, generator=generator, dtype=torch.float64)


META = [
    {},
    {"separate": True, "features": 2},
    {"season": 3},
    {"windowed": None},
    {"windowed": None, "separate": True, "features": 2},
    {"cycles": ("day",), "features": 8},
    {"context": 7},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", META, ids=str)
def test_recorded_paths_equal_plain_ones(options, dtype, device, counts, plainly):
    own, before = make_forecaster(device, **options), None
    for turn in range(4):
        x = histories(3, seed=turn).to(dtype)
        times = np.arange(turn, turn + 12).astype("datetime64[h]")
        dials = {"seed": (0, -5, 2**63 - 1, 3)[turn], "temperature": 0.8, "times": times}
        made = own.forecast(x, 9, 5, **dials).samples
        same(made, plainly(own.forecast, x, 9, 5, **dials).samples)
        assert before is None or not torch.equal(made, before), "other histories and seeds"
        before = made
    assert (counts.recorded, counts.replayed) == (1, 3)


@pytest.mark.parametrize("kind", ["tvae", "vssm", "ssm", "vrnn"])
def test_every_kind_of_model_forecasts_as_it_does_plainly(kind, device, counts, plainly):
    own, x = make_forecaster(device, kind), histories(2)
    for seed in range(4):
        made = own.forecast(x, 6, 4, seed=seed).samples
        same(made, plainly(own.forecast, x, 6, 4, seed=seed).samples)
    assert counts.replayed


@pytest.mark.parametrize(
    ("options", "num", "most", "slabs"),
    [
        ({}, 7, 9, 4),
        ({}, 8, 9, 4),
        ({"separate": True, "features": 2, "windowed": None}, 5, 12, 4),
    ],
)
def test_slabs_of_paths_replay_one_recording(
    options, num, most, slabs, device, counts, plainly, monkeypatch
):
    """The last slab has as many paths as the others, also if it makes some paths again."""
    own, x = make_forecaster(device, **options), histories(num)
    whole = plainly(own.forecast, x, 6, 4).samples
    monkeypatch.setattr(paths, "_MOST_PATHS", dict.fromkeys(("cpu", "cuda"), most))
    same(plainly(own.forecast, x, 6, 4).samples, whole)
    for calls in (1, 2):
        same(own.forecast(x, 6, 4).samples, whole)
        assert (counts.recorded, counts.replayed) == (1, calls * slabs - 1)


def test_equal_scales_share_a_recording_and_others_do_not(device, counts, plainly):
    own, x = make_forecaster(device), histories(2)
    for _ in range(2):
        own.forecast(x, 6, 4)

    def other(**changes):
        made = ModelForecaster(own.model, replace(own.meta, **changes))
        made.engine = own.engine
        wanted = plainly(made.forecast, x, 6, 4).samples
        same(made.forecast(x, 6, 4).samples, wanted)

    other(columns=("c", "d"))
    assert (counts.recorded, counts.replayed) == (1, 2)
    other(std=(9.0, 0.5))
    other(windowed="last")
    assert (counts.recorded, counts.replayed) == (1, 2)


def test_bad_arguments_are_refused_also_after_equal_good_ones(device):
    own, x = make_forecaster(device, horizon=6), histories(2)
    for horizon in (1, 1, 1, None, None):
        own.forecast(x, horizon, 1)
    for name, value in (("horizon", True), ("samples", True), ("horizon", 1.0), ("samples", 1.0)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            own.forecast(x, **{"horizon": 1, "samples": 1, name: value})
    for wrong in ({"seed": 2**63}, {"seed": True}, {"temperature": -1.0}, {"chunks": 2}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            own.forecast(x, 1, 1, **wrong)


def test_recorded_histories_are_still_checked(device):
    options = {"windowed": None, "mean": (0.0, 0.0), "std": (1e-20, 1.0)}
    own, x = make_forecaster(device, **options), histories(2) * 1e-20
    for _ in range(3):
        own.forecast(x, 6, 4)
    for value, message in (
        (1e25, "x contains NaN or infinite"),
        (1e31, "up to 1e\\+31"),
        (torch.inf, "infinite"),
    ):
        x[1, 3, 0] = value
        with pytest.raises(ValueError, match=message):
            own.forecast(x, 6, 4)


def test_gaps_are_filled_before_a_replay(device, counts, plainly):
    own, x = make_forecaster(device, fill="zero"), histories(2)
    for _ in range(3):
        own.forecast(x, 6, 4)
    whole, x = x.clone(), x.clone()
    whole[1, 3, 0], x[1, 3, 0] = 0, torch.nan
    same(own.forecast(x, 6, 4).samples, plainly(own.forecast, whole, 6, 4).samples)
    assert (counts.recorded, counts.replayed) == (1, 3)


def test_paths_own_their_memory_and_do_not_follow_the_model(device):
    meta, x = make_forecaster(device).meta, histories(2)
    model = small_model("vssm", "gaussian-learned", features=4).to(device)
    own = ModelForecaster(model, meta)
    made = [own.forecast(x, 6, 4, seed=seed).samples for seed in (0, 1, 2)]
    copies = [samples.clone() for samples in made]
    with torch.no_grad():
        model.decoder.out.weight.mul_(1.5)
    same(own.forecast(x, 6, 4, seed=2).samples, made[2])
    fresh = ModelForecaster(model, meta).forecast(x, 6, 4, seed=2).samples
    assert relative_error(fresh, made[2]) > 1e-3
    assert all(torch.equal(samples, copy) for samples, copy in zip(made, copies, strict=True))


@pytest.mark.gpu
def test_forecasts_on_a_gpu_are_those_of_a_cpu(monkeypatch):
    """At a width that all kernels take, with slabs and replays."""
    torch.manual_seed(0)
    sizes = {"features": 24, "width": 64, "layers": 2, "latents": 4, "classes": 16}
    model = build(ModelConfig(kind="vssm", head="gaussian-learned", **sizes))
    meta = {"name": "series", "length": 0, "suggested_head": "", "columns": ("a",)}
    meta = Meta(**meta, features=24, patch=24, windowed="last")
    x = torch.randn(30, 120, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = ModelForecaster(model, meta).forecast(x, 200, 60, seed=2).samples
    own = ModelForecaster(model.cuda(), meta)
    for numbers in (2**30, 2**18):
        monkeypatch.setattr(paths, "_MOST_NUMBERS", {"cuda": numbers})
        for _ in range(3):
            made = own.forecast(x, 200, 60, seed=2).samples.cpu()
        off = ((made - wanted).abs() / wanted.abs().amax()).amax((2, 3))
        # Noise within rounding of the edge between two classes gives another path.
        assert off.median() < 1e-5 and (off > 1e-4).float().mean() < 1e-2
