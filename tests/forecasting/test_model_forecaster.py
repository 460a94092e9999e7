"""Forecasts of a model: paths in the units of the data, files, scores, and GluonTS."""

import json
import sys
import warnings
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vssm
from tests.conftest import KINDS, relative_error, small_config, small_model
from vssm.cli import main
from vssm.config import RunConfig, TrainConfig
from vssm.data import DataConfig, Meta, SeriesConfig, open_data
from vssm.data.scale import centre_of_steps, window_scale
from vssm.forecasting.files import read_history, write_forecast
from vssm.forecasting.metrics import crps, energy_score, scores
from vssm.forecasting.model_forecaster import Forecast, ModelForecaster
from vssm.forecasting.scale import Scale
from vssm.noise import fork
from vssm.training.loop import train
from vssm.training.progress import Progress

HOURS = np.arange(9).astype("datetime64[h]")
DAY, NO_DATE = np.timedelta64(1, "D"), np.datetime64("NaT", "h")


def meta(columns=("a", "b", "c"), **options):
    num = len(columns)
    values = {
        "features": num,
        "mean": tuple(10.0 * k for k in range(num)),
        "std": tuple(1.0 + k for k in range(num)),
        "windowed": "window",
        "context": 9,
        "horizon": 5,
    }
    values |= options
    return Meta(
        name="series", length=14, suggested_head="gaussian-learned", columns=columns, **values
    )


def forecaster(kind="vssm", **options):
    own = meta(**options)
    return ModelForecaster(small_model(kind, features=own.features), own)


def history(steps=9, series=None, num=3, seed=0):
    shape = (steps, num) if series is None else (series, steps, num)
    return np.random.default_rng(seed).normal(size=shape) * (1 + np.arange(num)) + 10 * np.arange(
        num
    )


@pytest.mark.parametrize("windowed", [None, "window", "last"])
def test_paths_far_from_zero_equal_those_near_zero(windowed):
    """Numbers around 1e8 have no digit after the point in float32."""
    made = []
    for offset in (0.0, 1e8):
        own = forecaster(mean=(offset + 1.0, -2.0, 0.5), windowed=windowed)
        values = history() + np.array([offset, 0.0, 0.0])
        paths = own.forecast(values, samples=4, seed=3).samples.double()
        made.append(paths - torch.tensor([offset, 0.0, 0.0]))
    assert torch.allclose(*made, atol=1e-4) and made[0][..., 0].std() > 0.01


@pytest.mark.parametrize("windowed", ["window", "last"])
@pytest.mark.parametrize("kind", ["vssm", "ssm"])
def test_paths_of_a_series_that_drifted_far_from_zero_differ(kind, windowed):
    own, drift = forecaster(kind, windowed=windowed), np.array([0.0, 1e8, 0.0])
    near = own.forecast(history(), samples=8).samples
    assert near.dtype == torch.float32
    far = own.forecast(history() + drift, samples=8).samples
    assert torch.allclose(far - torch.tensor(drift), near.double(), atol=1e-4)
    assert own.forecast(history(), samples=8).samples.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_paths_of_a_series_have_its_shape_and_differ(kind):
    made = forecaster(kind).forecast(history(20), 4, 6)
    assert made.samples.shape == (6, 4, 3) and made.mean.shape == (4, 3)
    assert made.samples.isfinite().all() and made.columns == ("a", "b", "c")
    assert len(torch.unique(made.samples[:, 0, 0])) == 6
    several = forecaster(kind).forecast(history(9, series=2), 4, 6)
    assert several.samples.shape == (2, 6, 4, 3) and several.quantile(0.5).shape == (2, 4, 3)


def paths_of(model, prompt, length, samples, **options):
    """Returns what `generate` makes of copies of the prompt, (B, S, T, D)."""
    rows = fork(torch.arange(len(prompt)), samples).flatten()
    copies = prompt.repeat_interleave(samples, 0)
    made = vssm.generate(
        model, length=length, prompt=copies, rows=rows, observe="sample", **options
    )
    return made.x.unflatten(0, (len(prompt), samples))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}], ids=str)
@pytest.mark.parametrize("kind", ["vssm", "tvae", "rnn", "vrnn"])
def test_forecasts_equal_generate_on_the_scaled_history(kind, options):
    own, x = forecaster(kind), torch.from_numpy(history(9, series=2))
    scaled = (x - torch.tensor(own.meta.mean)) / torch.tensor(own.meta.std)
    centre = scaled.mean(1, keepdim=True)
    width = (scaled.var(1, correction=0, keepdim=True) + 0.01).sqrt()
    paths = paths_of(own.model, ((scaled - centre) / width).float(), 5, 4, seed=3, **options)
    expected = (paths * width[:, None] + centre[:, None]) * torch.tensor(
        own.meta.std
    ) + torch.tensor(own.meta.mean)
    assert relative_error(own.forecast(x, 5, 4, seed=3, **options).samples, expected) < 1e-5


@pytest.mark.parametrize("kind", ["vssm", "ssm"])
@given(shift=st.floats(-100, 100), factor=st.floats(0.01, 100))
def test_forecasts_move_with_the_level_of_a_series(kind, shift, factor):
    """Data in other units, with their scale, gives the same forecast in those units."""
    one = forecaster(kind)
    other = replace(
        one.meta,
        mean=tuple(m * factor + shift for m in one.meta.mean),
        std=tuple(s * factor for s in one.meta.std),
    )
    expected = one.forecast(history(), 5, 3).samples * factor + shift
    assert (
        relative_error(
            ModelForecaster(one.model, other).forecast(history() * factor + shift, 5, 3).samples,
            expected,
        )
        < 1e-3
    )


def test_separate_columns_are_forecast_by_one_model_of_one_channel():
    own = forecaster(features=1, separate=True)
    made = own.forecast(history(9, series=2), 5, 4).samples
    assert made.shape == (2, 4, 5, 3)
    alone = ModelForecaster(own.model, replace(own.meta, columns=("a",), mean=(0.0,), std=(1.0,)))
    assert (
        relative_error(
            alone.forecast(history(9, series=2)[0, :, :1], 5, 4).samples, made[0, ..., :1]
        )
        < 1e-5
    )


def test_windows_may_be_centred_at_their_last_value():
    own = forecaster(windowed="last")
    x = torch.from_numpy(history())
    scaled = (x - torch.tensor(own.meta.mean)) / torch.tensor(own.meta.std)
    width = (scaled.diff(dim=0).square().sum(0) + 0.01).sqrt()
    paths = paths_of(own.model, ((scaled - scaled[-1]) / width).float()[None], 5, 4)[0]
    expected = (paths * width + scaled[-1]) * torch.tensor(own.meta.std) + torch.tensor(
        own.meta.mean
    )
    assert relative_error(own.forecast(x, 5, 4).samples, expected) < 1e-5


@pytest.mark.parametrize("windowed", ["window", "last"])
def test_each_step_of_a_season_has_its_own_centre(windowed):
    own, x = forecaster(windowed=windowed, season=4), history()
    season = 100 * np.random.default_rng(1).normal(size=(4, 3))
    at = np.arange(-9, 5) % 4
    expected = own.forecast(x, 5, 4).samples + torch.from_numpy(season[at[9:]])
    assert relative_error(own.forecast(x + season[at[:9]], 5, 4).samples, expected) < 1e-4
    with pytest.raises(
        ValueError, match="history has 3 steps; allowed: 4 or more, a season of the run"
    ):
        own.forecast(x[:3], 5, 4)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(
    ("windowed", "season"), [(None, 1), ("window", 1), ("window", 4), ("last", 1)]
)
def test_factor_and_shift_combine_both_scales(windowed, season, separate):
    own = meta(windowed=windowed, season=season, separate=separate)
    scale, x = Scale(own), torch.from_numpy(history(series=2))
    once = (x - scale.mean) / scale.std
    middle, width = torch.zeros(2, 1, 3), torch.ones(2, 1, 3)
    if windowed is not None:
        middle, width = window_scale(once, windowed, season)
    twice = (once - centre_of_steps(middle, -9, 9)) / width
    rows = x.transpose(1, 2).flatten(0, 1)[..., None] if separate else x
    factor, shift = scale.units(rows)
    expected = twice.transpose(1, 2).reshape(6, 9, 1) if separate else twice
    assert relative_error(scale.steps(rows, factor, shift), expected) < 1e-6
    assert (
        relative_error(scale.place(expected[:, None], factor, shift, first=-9)[:, 0], rows) < 1e-12
    )
    if separate:  # rows of a slab that starts in the middle of a series
        assert all(
            torch.equal(a, b[2:])
            for a, b in zip(scale.units(rows[2:], 2), (factor, shift), strict=True)
        )


@pytest.mark.parametrize("windowed", [None, "window", "last"])
@given(exponent=st.floats(0, 30), least=st.floats(-25, 5))
def test_histories_that_fit_are_finite_in_float32(windowed, exponent, least):
    scale, x = Scale(meta(windowed=windowed, std=(10.0**least, 1.0, 1.0))), torch.zeros(1, 9, 3)
    x[0, -1], x[0, 3] = 10.0**exponent, -(10.0**exponent)
    steps = scale.steps(x.double(), *scale.units(x.double()))
    assert steps.isfinite().all() or not scale.fits(10.0**exponent)


def test_small_numbers_far_from_a_mean_do_not_fit():
    scale = Scale(meta(windowed=None, mean=(1e30, 0.0, 0.0), std=(1e-10, 1.0, 1.0)))
    x = torch.zeros(1, 9, 3, dtype=torch.float64)
    assert not scale.steps(x, *scale.units(x)).isfinite().all() and not scale.fits(0.0)


@pytest.mark.parametrize("kind", ["vssm", "rnn"])
@pytest.mark.parametrize("options", [{}, {"separate": True, "features": 1}, {"windowed": "window"}])
@pytest.mark.parametrize("series", [None, 3])
def test_single_and_double_precision_give_the_same_forecast(kind, options, series):
    single = torch.as_tensor(history(series=series)).float()
    one = forecaster(kind, **options)
    expected = one.forecast(single.double(), 4, 2).samples
    for same in (single, single.numpy(), single.double().numpy(), single.tolist()):
        assert torch.equal(one.forecast(same, 4, 2).samples, expected)


def scaled_paths(own, x, length, samples):
    """Returns what `generate` makes of histories (B, N, D) at once, in the units of the data."""
    x = torch.from_numpy(x)
    factor, shift = Scale(own.meta).units(x)
    paths = paths_of(own.model, ((x - shift) / factor).float(), length, samples)
    return paths * factor[:, None] + shift[:, None]


def test_slabs_change_no_path():
    own, x = forecaster(), history(9, series=1200)
    made = own.forecast(x, 2, 4).samples  # more paths than one slab holds
    assert relative_error(made, scaled_paths(own, x, 2, 4)) < 1e-5


@pytest.mark.parametrize("kind", ["vssm", "tvae"])
def test_many_paths_of_one_series_are_made_in_parts(kind):
    own, x = forecaster(kind), history(9)
    sizes = []
    expected = scaled_paths(own, x[None], 2, 5000)[0]
    own.model.decoder.embed.register_forward_hook(lambda _, given, made: sizes.append(len(made)))
    assert relative_error(own.forecast(x, 2, 5000).samples, expected) < 1e-5
    assert len(sizes) == 2 and sum(sizes) == 5000


@pytest.mark.parametrize("kind", KINDS)
def test_more_paths_than_memory_holds_are_refused(kind):
    own = forecaster(kind, horizon=None)
    message = r"^samples=1000000000 and horizon=1000000000 of 1 series would take .*; ask for less"
    with pytest.raises(ValueError, match=message):
        own.forecast(history(), 10**9, 10**9)


def test_time_features_follow_the_dates():
    own = forecaster(features=5, cycles=("day",))
    times = np.arange(9).astype("datetime64[h]")
    made = own.forecast(history(), 5, 4, times)
    assert made.samples.shape == (4, 5, 3)
    assert made.times.tolist() == [
        np.datetime64(f"1970-01-01T{h:02}:00:00").item() for h in range(9, 14)
    ]
    later = own.forecast(history(), 5, 4, times + np.timedelta64(7, "h"))
    assert relative_error(later.samples, made.samples) > 1e-3, "the hour must matter"
    with pytest.raises(
        ValueError, match="times is needed: the model was trained with the time features"
    ):
        own.forecast(history(), 5, 4)


@pytest.mark.parametrize(
    ("dates", "next_dates"),
    [
        (
            np.arange("2023-06", "2024-03", dtype="datetime64[M]"),
            ["2024-03-01", "2024-04-01", "2024-05-01"],
        ),
        (
            np.arange("2023-06", "2024-03", dtype="datetime64[M]").astype("datetime64[D]") - DAY,
            ["2024-02-29", "2024-03-31", "2024-04-30"],
        ),
        (
            np.arange("2015", "2024", dtype="datetime64[Y]"),
            ["2024-01-01", "2025-01-01", "2026-01-01"],
        ),
        (
            np.datetime64("2024-02-20") + DAY * np.arange(9),
            ["2024-02-29", "2024-03-01", "2024-03-02"],
        ),
        (
            np.datetime64("2024-01-01") + 7 * DAY * np.arange(9),
            ["2024-03-04", "2024-03-11", "2024-03-18"],
        ),
        (
            np.arange("2022-01", "2024-04", 3, dtype="datetime64[M]"),
            ["2024-04-01", "2024-07-01", "2024-10-01"],
        ),
        (
            np.arange("2023-06", "2024-03", dtype="datetime64[M]").astype("datetime64[D]")
            + 14 * DAY,
            ["2024-03-15", "2024-04-15", "2024-05-15"],
        ),
        (
            np.busday_offset("2024-05-02", np.arange(9)),
            ["2024-05-15", "2024-05-16", "2024-05-17"],
        ),
    ],
    ids=[
        "month_start",
        "month_end",
        "years",
        "days",
        "weeks",
        "quarters",
        "mid_month",
        "business_days",
    ],
)
def test_dates_continue_by_the_calendar(dates, next_dates):
    made = forecaster().forecast(history(), 3, 2, dates)
    assert made.times.astype("datetime64[D]").astype(str).tolist() == next_dates


@pytest.mark.parametrize("unit", ["ms", "ns"])
def test_dates_between_seconds_continue(unit, tmp_path):
    pandas = pytest.importorskip("pandas")
    dates = (np.datetime64("2024-01-01", "ms") + 100 * np.arange(9)).astype(f"datetime64[{unit}]")
    made = forecaster().forecast(history(), 3, 2, dates)
    expected = np.datetime64("2024-01-01T00:00:00.9") + np.timedelta64(100, "ms") * np.arange(3)
    assert (made.times == expected).all()
    for name in ("a.csv", "a.parquet"):
        write_forecast(made.to_frame([0.5]), tmp_path / name)
    csv = pandas.read_csv(tmp_path / "a.csv", parse_dates=["ds"])
    for table in (csv, pandas.read_parquet(tmp_path / "a.parquet")):
        assert (table["ds"].to_numpy()[:3] == expected).all()


def test_uneven_dates_give_a_warning_and_continue_in_the_usual_step():
    dates = np.datetime64("2024-05-01") + DAY * np.array([0, 1, 2, 4, 5, 6, 7, 8, 16])
    note = r"^dates are uneven: 2024-05-05\S* comes right after 2024-05-03\S*; dates of the fore"
    with pytest.warns(UserWarning, match=note):
        made = forecaster().forecast(history(), 2, 2, dates)
    assert made.times.astype("datetime64[D]").astype(str).tolist() == ["2024-05-18", "2024-05-19"]
    workdays = np.datetime64("2024-05-02") + DAY * np.array([0, 1, 4, 5, 6, 8, 11, 12, 13])
    with pytest.warns(UserWarning, match=r"2024-05-10\S* comes right after 2024-05-08"):
        made = forecaster().forecast(history(), 3, 2, workdays)
    days = made.times.astype("datetime64[D]").astype(str).tolist()
    assert days == ["2024-05-16", "2024-05-17", "2024-05-20"]
    months = np.arange("2023-06", "2024-04", dtype="datetime64[M]")
    with pytest.warns(UserWarning, match=r"2023-09-01\S* comes right after 2023-07-01"):
        made = forecaster().forecast(history(), 2, 2, np.delete(months, 2))
    assert made.times.astype("datetime64[D]").astype(str).tolist() == ["2024-04-01", "2024-05-01"]


def test_horizon_beyond_training_is_extrapolation():
    own = forecaster()
    with pytest.warns(
        UserWarning,
        match=r"horizon=8 is longer than the 5 steps .* from step 6 on .* extrapolation",
    ):
        made = own.forecast(history(), 8, 4)
    assert relative_error(made.samples[:, :5], own.forecast(history(), 5, 4).samples) < 1e-5


@pytest.mark.parametrize(
    "options", [{"chunk": 2}, {"chunk": 2, "recondition": True}, {"temperature": 0.5}]
)
def test_options_of_generate_are_passed_on(options):
    own = forecaster()
    same = (
        relative_error(
            own.forecast(history(), 5, 4, **options).samples, own.forecast(history(), 5, 4).samples
        )
        < 1e-5
    )
    assert same == (options == {"chunk": 2})


def test_forecasts_of_a_constant_series_stay_near_it():
    x = np.tile([5.0, -7.0, 1e6], (9, 1))
    made = forecaster(mean=None, std=None).forecast(x, 5, 50).samples
    assert made.isfinite().all() and (made - torch.tensor(x[0])).abs().max() < 5


def test_missing_values_are_filled_as_in_training():
    x, gaps = history(), history()
    gaps[[3, 8], 1] = np.nan
    x[3, 1], x[8, 1] = (x[2, 1] + x[4, 1]) / 2, x[7, 1]
    own = forecaster(fill="linear")
    assert relative_error(own.forecast(gaps, 5, 4).samples, own.forecast(x, 5, 4).samples) < 1e-6
    with pytest.warns(UserWarning, match="^history is missing 2 of 27 values; they are inter"):
        made = forecaster().forecast(gaps, 5, 4).samples
    assert relative_error(made, own.forecast(x, 5, 4).samples) < 1e-6
    x[3, 1] = np.inf
    with pytest.raises(ValueError, match="infinite at series 0, step -6, column 'b'"):
        own.forecast(x, 5, 4)
    gaps[2:8, 1] = np.nan
    with pytest.raises(
        ValueError, match=r"column 'b' is missing in 7 of the last 9 steps; allowed: half"
    ):
        own.forecast(gaps, 5, 4)


def test_columns_of_a_dataframe_are_taken_by_name():
    pandas = pytest.importorskip("pandas")
    own, x = forecaster(), history()
    right = own.forecast(x, 5, 4).samples
    table = pandas.DataFrame(x, columns=list("abc"), index=HOURS)
    for columns in (table[["c", "a", "b"]], table.assign(note="words"), pandas.DataFrame(x)):
        assert torch.equal(own.forecast(columns, 5, 4).samples, right)
    many = own.forecast([table, table[["b", "a", "c"]]], 5, 4).samples
    assert torch.equal(many, own.forecast(np.stack([x, x]), 5, 4).samples)
    assert own.forecast(table, 5, 4).times[0] == HOURS[-1] + 1, "the index gives the dates"
    with pytest.raises(
        ValueError, match=r"^history has no column 'b'; allowed: a, b, c, in any order$"
    ):
        own.forecast(table.rename(columns={"b": "B"}), 5, 4)
    plain = ModelForecaster(small_model("vssm", features=3))  # has no names to look for
    plain.columns = ("2", "4", "7")  # numbers of columns are no names either
    assert torch.equal(plain.forecast(table, 5, 4).samples, plain.forecast(x, 5, 4).samples)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"history": np.zeros((4, 2))},
            r"history has shape \(4, 2\); allowed: \(steps, 3\) .* a, b, c",
        ),
        ({"history": np.zeros((0, 3))}, r"history has shape \(0, 3\)"),
        ({"history": np.full((9, 3), 1e31)}, "history has values up to 1e.31; allowed: up to 1e30"),
        ({"horizon": 0}, "horizon is 0; it must be a whole number >= 1"),
        ({"samples": 0}, "samples is 0; it must be a whole number >= 1"),
        ({"times": np.arange(3).astype("datetime64[h]")}, "times has 3 dates; allowed: 9"),
        (
            {"times": HOURS[::-1]},
            "times: 1970-01-01T07 comes after 1970-01-01T08; allowed: each .* in order",
        ),
        (
            {"times": HOURS[[0, *range(8)]]},
            "times: 1970-01-01T00 is there twice; allowed: each date once",
        ),
        (
            {"times": np.where(np.arange(9) < 4, HOURS, NO_DATE)},
            "times has no date at step 4",
        ),
    ],
)
def test_bad_requests_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        vssm.forecast(forecaster(), **{"history": history(), "horizon": 5, "samples": 2, **options})


def test_models_of_other_data_are_refused(tmp_path):
    with pytest.raises(ValueError, match="head 'categorical'; allowed: a model of numbers"):
        ModelForecaster(small_model("ssm", "categorical"))
    with pytest.raises(ValueError, match="2 features; allowed: data set 'series' with 3"):
        ModelForecaster(small_model("ssm"), meta(("a", "b")))
    vssm.save(small_model("ssm"), tmp_path)
    with pytest.raises(
        ValueError, match="was trained on unknown data; allowed: a run of data set 'series'"
    ):
        vssm.forecast(tmp_path, history())
    with pytest.raises(
        ValueError, match="'mnist-small' was trained on 'mnist'; allowed: a run of data set"
    ):
        ModelForecaster.load("mnist-small")
    with pytest.raises(ValueError, match="horizon=None needs a run"):
        vssm.forecast(small_model("ssm"), history())
    assert Forecast(torch.ones(2, 3, 1), ("a",)).quantile(torch.tensor(0.5)).tolist() == [[1.0]] * 3
    for level in (2, "a", [0.1, 0.9]):
        with pytest.raises(
            ValueError, match=r"^level=.* is not allowed; allowed: a number from 0 to 1"
        ):
            Forecast(torch.zeros(2, 3, 1), ("a",)).quantile(level)


@pytest.mark.parametrize("kind", ["vssm", "vrnn"])
def test_every_path_draws_latents_of_the_history(kind):
    """The mean of the first step varies from seed to seed by its Monte Carlo error only."""
    own, x, samples, means, errors = forecaster(kind), history(9), 400, [], []
    for seed in range(12):
        paths = own.forecast(x, 1, samples, seed=seed).samples[:, 0]
        means.append(paths.mean(0))
        errors.append(paths.std(0) / samples**0.5)
    assert (torch.stack(means).std(0) / torch.stack(errors).mean(0)).max() < 2.2


def test_forecasts_leave_the_mode_of_a_model_as_it_was():
    model = small_model("vssm").train()
    next(model.children()).eval()
    modes = [part.training for part in model.modules()]
    assert len(set(modes)) == 2
    vssm.forecast(model, history(), 5, 4)
    with pytest.raises(ValueError, match="horizon is 0; it must be"):
        vssm.forecast(model, history(), 0)
    assert [part.training for part in model.modules()] == modes


@pytest.mark.parametrize("kind", ["vssm", "rnn"])
def test_patches_are_rows_of_one_step(kind):
    own = forecaster(kind, features=6, patch=2, context=8, horizon=6)
    x = history(9)
    made = own.forecast(x, 5, 4)
    assert made.samples.shape == (4, 5, 3)
    scaled = (torch.from_numpy(x[1:]) - torch.tensor(own.meta.mean)) / torch.tensor(own.meta.std)
    centre, width = scaled.mean(0), (scaled.var(0, correction=0) + 0.01).sqrt()
    prompt = ((scaled - centre) / width).float().reshape(1, 4, 6)
    paths = paths_of(own.model, prompt, 3, 4).reshape(4, 6, 3)[:, :5]
    expected = (paths * width + centre) * torch.tensor(own.meta.std) + torch.tensor(own.meta.mean)
    assert relative_error(made.samples, expected) < 1e-5
    assert own.forecast(x[:3], 5, 4).samples.shape == (4, 5, 3), (
        "what does not fill a patch is left out"
    )
    with pytest.raises(
        ValueError, match="history has 1 steps; allowed: 2 or more, a step of the model"
    ):
        own.forecast(x[:1], 5, 4)


def test_crps_is_the_integral_of_the_squared_difference_of_distributions():
    """With the pairs of equal paths left out, the score of a normal distribution is unbiased."""
    y = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None, None]
    paths = torch.randn(
        9, 4000, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    normal = torch.distributions.Normal(0.0, 1.0)
    exact = y * (2 * normal.cdf(y) - 1) + 2 * normal.log_prob(y).exp() - 1 / np.sqrt(np.pi)
    torch.testing.assert_close(crps(paths, y), exact, rtol=0, atol=0.03)
    few = torch.randn(
        20_000, 3, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    expected = 2 * normal.log_prob(torch.tensor(0.0)).exp() - 1 / np.sqrt(np.pi)
    assert abs(float(crps(few, torch.zeros(20_000, 1, 1)).mean()) - float(expected)) < 0.01


@given(st.integers(1, 6))
def test_crps_equals_its_definition_over_pairs(num):
    paths = torch.randn(2, num, 3, 1, dtype=torch.float64)
    y = torch.randn(2, 3, 1, dtype=torch.float64)
    pairs = (paths[:, :, None] - paths[:, None]).abs().sum((1, 2)) / max(1, num * (num - 1))
    torch.testing.assert_close(crps(paths, y), (paths - y[:, None]).abs().mean(1) - pairs / 2)
    if num > 1:  # of one step, the energy score is the crps of neighbouring pairs
        near = (paths[:, :, :1] - paths[:, :, :1].roll(1, 1)).abs().mean(1)
        expected = (paths[:, :, :1] - y[:, None, :1]).abs().mean(1) - near / 2
        torch.testing.assert_close(energy_score(paths[:, :, :1], y[:, :1]), expected[:, 0])


def test_scores_of_exact_and_wide_forecasts():
    y = torch.randn(50, 7, 2, dtype=torch.float64) * torch.tensor([1.0, 5.0]) + 3
    unit = torch.ones(2, dtype=torch.float64)
    exact = scores(y[:, None].repeat(1, 4, 1, 1), y, unit * 0, unit, unit)
    assert exact["coverage80"] == 1
    assert all(abs(exact[key]) < 1e-12 for key in ("crps", "wql", "mase", "energy", "mae"))
    spread = torch.tensor([1.0, 5.0], dtype=torch.float64)
    paths = torch.randn(50, 400, 7, 2, dtype=torch.float64) * spread + 3
    good = scores(paths, y, unit * 3, spread, unit)
    assert 0.72 < good["coverage80"] < 0.88 and abs(good["crps"] - 1 / np.sqrt(np.pi)) < 0.06
    wide = scores((paths - 3) * 3 + 3, y, unit * 3, spread, unit)
    assert (
        wide["coverage80"] > 0.97
        and wide["crps"] > good["crps"]
        and wide["energy"] > good["energy"]
    )


def waves(path, rows=220, columns=("load", "heat")):
    t = np.arange(rows)
    lines = ["date," + ",".join(columns)]
    for k in t:
        numbers = ",".join(f"{np.sin(k / 4 + c) + 5 * c:.5f}" for c in range(len(columns)))
        lines.append(f"2020-01-{1 + k // 24:02} {k % 24:02}:00,{numbers}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecast")
    path = waves(folder / "waves.csv")
    data = DataConfig(
        name="series", series=SeriesConfig(path=str(path), context=12, horizon=6, separate=True)
    )
    model = small_config("vssm", head="auto", width=8, layers=1)
    options = TrainConfig(max_steps=3, batch=16, samples=0, num_valid=8)
    return train(
        RunConfig(data=data, model=model, train=options), folder / "run", progress=Progress()
    )


def test_training_on_patches_draws_its_rows(run_folder, tmp_path):
    path = str(run_folder.parent / "waves.csv")
    series = SeriesConfig(path=path, context=12, horizon=6, patch=3)
    model = small_config("vssm", head="auto", width=8, layers=1)
    options = TrainConfig(max_steps=1, batch=16, samples=2, num_valid=8)
    config = RunConfig(data=DataConfig(name="series", series=series), model=model, train=options)
    folder = train(config, tmp_path / "run", progress=Progress())
    assert (folder / "samples.png").exists()
    assert vssm.forecast(folder, np.zeros((12, 2)), samples=4).samples.shape == (4, 6, 2)


@pytest.mark.filterwarnings("default:horizon=8 is longer")
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_command_writes_quantiles_and_a_chart(run_folder, tmp_path, capsys, suffix):
    pandas = pytest.importorskip("pandas")
    new, out = waves(tmp_path / "new.csv", 30), tmp_path / f"out.{suffix}"
    options = f"--path {new} --samples 9 --horizon 8 --quantiles 0.1 0.5 --device cpu --out {out}"
    main(["forecast", str(run_folder), *options.split()])
    assert "note: horizon=8 is longer than the 6 steps of training" in capsys.readouterr().err
    table = pandas.read_csv(out) if suffix == "csv" else pandas.read_parquet(out)
    assert list(table) == ["unique_id", "ds", "mean", "0.1", "0.5"] and len(table) == 16
    assert list(table["unique_id"]) == ["load"] * 8 + ["heat"] * 8
    assert str(pandas.Timestamp(table["ds"][0])) == "2020-01-02 06:00:00"
    assert (table["0.1"] <= table["0.5"]).all()
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    direct = vssm.forecast(
        run_folder, read_history(ModelForecaster.load(run_folder), new).values, 6, 9
    )
    np.testing.assert_allclose(table["mean"][:6], direct.mean[:, 0], rtol=1e-5)


def test_command_names_what_is_wrong_with_a_file(run_folder, tmp_path, capsys):
    def refused(path, *parts, options=()):
        with pytest.raises(SystemExit, match="2"):
            main(
                [
                    "forecast",
                    str(run_folder),
                    "--path",
                    str(path),
                    "--out",
                    str(tmp_path / "o.csv"),
                    *options,
                ]
            )
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and all(part in message for part in parts), message

    refused(tmp_path / "none.csv", "none.csv", "does not exist")
    missing = waves(tmp_path / "missing.csv", 30, ("load", "heart"))
    refused(
        missing, "no column of numbers 'heat'", "did you mean 'heart'?", "available: load, heart"
    )
    new = waves(tmp_path / "new.csv", 30)
    lines = new.read_text().splitlines()
    new.write_text("\n".join([*lines[:20], lines[18], *lines[20:]]))
    refused(new, "row 20", "'date'", "comes after")
    new.write_text("\n".join([*lines[:20], lines[19], *lines[20:]]))
    refused(new, "row 20", "is there twice", "--time none")
    new.write_text("\n".join([*lines[:20], "2020-01-32" + lines[20][10:], *lines[21:]]))
    refused(new, "row 20", "is no date")
    gap = [line.rpartition(",")[0] + "," for line in lines[20:]]
    new.write_text("\n".join([*lines[:20], *gap]))
    refused(new, "column 'heat' is missing in 11 of the last 12 steps")
    refused(
        waves(tmp_path / "good.csv", 30), "o.txt", ".csv or .parquet", options=["--out", "o.txt"]
    )
    assert not (tmp_path / "o.csv").exists()


@pytest.mark.parametrize(
    ("levels", "given"),
    [("0.1 1.5", "1.5"), ("-0.1", "-0.1"), ("nan", "nan"), ("0.5 0.1 0.50", "0.5 twice")],
)
def test_command_names_a_wrong_quantile_before_any_work(
    levels, given, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["forecast", "nowhere", "--path", "nothing.csv", "--quantiles", *levels.split()])
    line = f"vssm: quantiles has {given}; give numbers from 0 to 1, each once\n"
    assert capsys.readouterr().err == line


def test_command_keeps_the_history(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    history = waves(tmp_path / "dates.csv", 30).read_text()
    (tmp_path / "link.csv").symlink_to("dates.csv")
    for path in ("dates.csv", "link.csv"):
        with pytest.raises(SystemExit, match="2"):
            main(
                [
                    "forecast",
                    str(run_folder),
                    "--path",
                    path,
                    "--samples",
                    "2",
                    "--out",
                    "dates.csv",
                ]
            )
        line = f"vssm: path='{path}', out='dates.csv' are one file; use two names\n"
        assert capsys.readouterr().err == line
    assert (tmp_path / "dates.csv").read_text() == history and not (tmp_path / "dates.png").exists()


def test_command_takes_the_column_of_dates_it_is_given(run_folder, tmp_path):
    def times(*options, header="date"):
        new, out = waves(tmp_path / "new.csv", 30), tmp_path / "out.csv"
        new.write_text(new.read_text().replace("date", header, 1))
        common = ["--path", str(new), "--samples", "2", "--device", "cpu", "--out", str(out)]
        main(["forecast", str(run_folder), *common, *options])
        return out.read_text().splitlines()[1].split(",")[1] != "1"  # a date, or the step

    assert times() and not times("--time", "none")
    assert times(header="when") and times("--time", "when", header="when")


@pytest.mark.parametrize(("time", "dated"), [("when", True), ("none", False)])
def test_a_run_remembers_its_column_of_dates(time, dated, tmp_path):
    path = waves(tmp_path / "waves.csv")
    path.write_text(path.read_text().replace("date", "when" if dated else "date", 1))
    if not dated:  # as it was trained, so it forecasts
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines, lines[-1]]))
    series = SeriesConfig(path=str(path), context=12, horizon=6, time=time)
    own = open_data(DataConfig(name="series", series=series)).meta
    forecaster = ModelForecaster(
        small_model("vssm", features=2), Meta.from_json(json.loads(json.dumps(asdict(own))))
    )
    assert (read_history(forecaster, path).times is not None) == dated
    other = waves(tmp_path / "other.csv")  # whose dates have another name
    assert (read_history(forecaster, other).times is not None) == dated


def test_command_names_a_shipped_model_of_other_data(tmp_path, capsys):
    new = waves(tmp_path / "new.csv", 30)
    with pytest.raises(SystemExit, match="2"):
        main(["forecast", "mnist-small", "--path", str(new), "--out", str(tmp_path / "o.csv")])
    assert (
        "'mnist-small' was trained on 'mnist'; allowed: a run of data set"
        in capsys.readouterr().err
    )


def test_parquet_names_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'vssm\[forecast\]'"):
        made = Forecast(torch.zeros(2, 3, 1), ("a",)).to_frame([0.5])
        write_forecast(made, tmp_path / "a.parquet")


def test_chart_without_dates(tmp_path):
    made = Forecast(torch.randn(9, 4, 1), ("a$",))
    figure = made.plot(np.arange(20.0)[:, None], path=tmp_path / "fan.png")
    assert (tmp_path / "fan.png").stat().st_size > 1000
    (legend,), (axes,) = figure.legends, figure.axes
    assert [text.get_text() for text in legend.get_texts()] == [
        "history",
        "95%",
        "80%",
        "50%",
        "median",
    ]
    assert not legend.get_window_extent().overlaps(axes.get_window_extent()), "no line is covered"


def test_predictor_works_with_gluonts_evaluation(run_folder):
    pytest.importorskip("gluonts")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from gluonts.dataset.common import ListDataset
        from gluonts.evaluation import make_evaluation_predictions

        from vssm.forecasting.gluonts import entries, predictor

        made = predictor(run_folder, num_samples=5)
        assert made.prediction_length == 6
        series = np.random.default_rng(0).normal(size=(40, 3)).cumsum(0) * [1, 100, 1e-3]
        dataset = ListDataset(entries(series, "h"), freq="h")
        forecasts, actual = make_evaluation_predictions(dataset, made, num_samples=8)
        forecasts, actual = list(forecasts), list(actual)
        assert [f.item_id for f in forecasts] == ["0", "1", "2"]
        for forecast, whole in zip(forecasts, actual, strict=True):
            assert forecast.samples.shape == (8, 6)
            assert forecast.start_date == whole.index[-6]
            near = (
                np.abs(forecast.samples - whole.to_numpy()[-7]).mean() / whole.to_numpy()[:-6].std()
            )
            assert near < 5, "in the units of the series"
        ragged = [
            {**entry, "target": entry["target"][: 20 + k]}
            for k, entry in enumerate(entries(series, "h"))
        ]
        assert [f.samples.shape for f in made.predict(ragged)] == [(5, 6)] * 3
        with pytest.raises(
            ValueError, match=r"target has shape \(2, 9\); allowed for this run: \(N,\)"
        ):
            list(made.predict([{**ragged[0], "target": np.zeros((2, 9))}]))


@pytest.mark.parametrize("cycles", [(), ("day",)])
def test_equal_series_of_a_predictor_get_different_paths(cycles):
    pytest.importorskip("gluonts")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vssm.forecasting.gluonts import entries, predictor

        own = forecaster(columns=("a",), features=1 + 2 * len(cycles), separate=True, cycles=cycles)
        series = entries(np.repeat(history(20, num=1), 70, 1), "h")  # more than one pass
        made = predictor(own, num_samples=3)
        paths = [list(made.predict(series)) for _ in range(2)]
    assert len({one.samples.tobytes() for one in paths[0]}) == 70
    assert all((a.samples == b.samples).all() for a, b in zip(*paths, strict=True)), (
        "each time the same"
    )


def test_predictor_names_its_extra(run_folder, monkeypatch):
    from vssm.forecasting.gluonts import predictor

    for name in [name for name in sys.modules if name.split(".")[0] == "gluonts"] + ["gluonts"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"pip install 'vssm\[forecast\]'"):
        predictor(run_folder)


def test_histories_that_leave_float32_are_named():
    own = forecaster(mean=(0.0, 0.0, 0.0), std=(1e-20, 1.0, 1.0), windowed=None)
    with pytest.raises(ValueError, match="x contains NaN or infinite values at row 0, step 0"):
        own.forecast(np.full((9, 3), 1e25), 5, 4)
    large = forecaster(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), windowed=None)
    assert large.forecast(np.full((9, 3), 1e30), 5, 4).samples.shape == (4, 5, 3)


def test_half_of_a_column_may_be_missing():
    x = history(8)
    x[[1, 3, 5, 6], 1] = np.nan
    own = forecaster(fill="linear", context=8)
    assert own.forecast(x, 5, 4).samples.isfinite().all()
    x[7, 1] = np.nan
    with pytest.raises(ValueError, match="is missing in 5 of the last 8 steps"):
        own.forecast(x, 5, 4)


def test_scores_equal_their_definitions():
    paths, y = (
        torch.randn(3, 6, 4, 2, dtype=torch.float64),
        torch.randn(3, 4, 2, dtype=torch.float64),
    )
    mean, std, naive = torch.tensor([[1.0, -2.0], [0.5, 3.0], [2.0, 0.2]], dtype=torch.float64)
    found = scores(paths, y, mean, std, naive)
    pinball = 0.0
    for level in np.arange(1, 10) / 10:
        gap = y - paths.quantile(level, 1)
        pinball += float(torch.where(gap > 0, level * gap, (level - 1) * gap).sum())
    assert found["wql"] == pytest.approx(2 * pinball / 9 / float(y.abs().sum()))
    error = (paths.quantile(0.5, 1) - y).abs() / std
    assert found["mae"] == pytest.approx(float(error.mean()))
    assert found["mase"] == pytest.approx(float((error.mean((0, 1)) / naive).mean()))
    scaled, target = (paths - mean) / std, (y - mean) / std
    assert found["crps"] == pytest.approx(float(crps(scaled, target).mean()))
    apart = [(scaled[:, k] - scaled[:, k - 1]).norm(dim=1) for k in range(6)]
    energy = (scaled - target[:, None]).norm(dim=2).mean(1) - torch.stack(apart).mean(0) / 2
    assert found["energy"] == pytest.approx(float(energy.mean()) / 2)  # over the root of four steps
    inside = (y >= paths.quantile(0.1, 1)) & (y <= paths.quantile(0.9, 1))
    assert found["coverage80"] == pytest.approx(float(inside.double().mean()))
