"""`Forecaster`: tables in and out, learning, calibration, covariates, gaps and mistakes."""

from dataclasses import replace

import numpy as np
import pandas
import pytest
import torch
from sklearn.base import clone

import vssm
from vssm.forecasting.backtest import naive_paths
from vssm.forecasting.fitting import choose_layout, hold_out, season_of
from vssm.forecasting.linear import choose_linear
from vssm.forecasting.panel import read_panel
from vssm.forecasting.windows import GivenScale, Layout, Windows, centre_and_scale

SMALL = {"horizon": 7, "max_steps": 4, "width": 16, "batch": 8, "latents": 2, "classes": 8}


def weeks(num=70, series=2, seed=0):
    """Daily series with a week in them, as a wide table."""
    noise = np.random.default_rng(seed).normal(size=(num, series))
    wave = 3 * np.sin(np.arange(num)[:, None] * 2 * np.pi / 7 + np.arange(series))
    days = pandas.date_range("2024-01-01", periods=num, freq="D")
    return pandas.DataFrame(10 + wave + 0.3 * noise, index=days, columns=list("abcdefgh"[:series]))


def as_long(wide):
    table = wide.rename_axis("ds").reset_index()
    return table.melt("ds", var_name="unique_id", value_name="y")[["unique_id", "ds", "y"]]


@pytest.fixture(scope="module")
def fitted():
    return vssm.Forecaster(**SMALL).fit(weeks())


def test_tables_have_the_form_of_the_input(fitted):
    made = fitted.predict(samples=20, quantiles=(0.05, 0.5))
    assert made.shape == (7, 6) and made.index[0] == pandas.Timestamp("2024-03-11")
    assert made["b"].columns.tolist() == ["mean", "0.05", "0.5"]
    long = fitted.predict(as_long(weeks())[::-1], samples=20, quantiles=(0.05, 0.5))
    assert long.columns.tolist() == ["unique_id", "ds", "mean", "0.05", "0.5"]
    assert long["unique_id"].tolist() == ["b"] * 7 + ["a"] * 7  # the order of the input
    assert (long["ds"].diff()[1:7] == pandas.Timedelta("1D")).all()
    paths = fitted.predict_samples(samples=20)
    assert paths.shape == (2, 20, 7)
    assert np.allclose(np.quantile(paths[1], 0.05, axis=0), made["b"]["0.05"])
    assert len(np.unique(paths[0, :, 0])) == 20  # each path has draws of its own


def test_seeds_fix_everything(fitted):
    again = vssm.Forecaster(**SMALL).fit(weeks())
    other = vssm.Forecaster(**SMALL, seed=1).fit(weeks())
    paths = fitted.predict_samples(samples=3)
    assert np.array_equal(paths, again.predict_samples(samples=3))
    assert not np.array_equal(paths, other.predict_samples(samples=3))


def test_scikit_learn_clones_it(fitted):
    copy = clone(fitted)
    assert copy.get_params() == fitted.get_params() and not hasattr(copy, "model_")
    assert repr(copy.set_params(horizon=9, max_steps=1000)) == (
        "Forecaster(batch=8, classes=8, horizon=9, latents=2, width=16)"
    )
    with pytest.raises(ValueError, match="did you mean 'horizon'"):
        copy.set_params(horizn=3)


def test_forecasts_keep_to_values_that_a_series_can_have():
    rng = np.random.default_rng(0)
    table = weeks(series=4)
    table["a"] = rng.poisson(0.7, 70)  # counts
    table["b"] = np.maximum(rng.normal(size=70), 0)  # rain
    table["c"] = rng.normal(3, 1, 70).clip(0.1)  # above zero so far
    table["d"] = rng.integers(-3, 4, 70)  # whole degrees
    table.iloc[5:9] = np.nan
    own = vssm.Forecaster(**SMALL).fit(table)
    counts, rain, above, degrees = own.predict_samples(samples=100)
    assert np.array_equal(counts, counts.round()) and counts.min() == 0
    assert rain.min() == 0 and not np.array_equal(rain, rain.round())
    assert above.min() < 0
    assert np.array_equal(degrees, degrees.round()) and degrees.min() < 0
    assert (own.fill()[["a", "b"]] >= 0).all().all()


def test_held_out_rows_do_not_say_what_a_series_can_be():
    table = weeks().round()
    table.iloc[-7:] += 0.5
    seen = [len(table) - 7] * 2
    panel, layout = read_panel(table), Layout(7, 7, 7, 14)
    scale = GivenScale.of(panel, 7)
    assert Windows(panel, layout, scale, seen=seen).whole.all()
    assert not Windows(panel, layout, scale).whole.any()


def test_save_and_load(fitted, tmp_path):
    fitted.save(tmp_path / "own")
    own = vssm.Forecaster.load(tmp_path / "own")
    assert repr(own) == repr(fitted)
    pandas.testing.assert_frame_equal(own.predict(), fitted.predict())
    with pytest.raises(ValueError, match=r"no forecaster\.json"):
        vssm.Forecaster.load(tmp_path)


def test_update_adds_points_without_training(fitted, tmp_path):
    fitted.save(tmp_path)
    own, longer = vssm.Forecaster.load(tmp_path), weeks(77, 3)
    longer.iloc[:70, :2] = weeks()
    own.update(longer.iloc[70:, :2]).update(longer[["c"]])
    assert own.panel_.ids == ["a", "b", "c"]  # a new series too
    assert len(own.calibration_.dates) > len(fitted.calibration_.dates)
    own.calibration_ = fitted.calibration_  # of which new points are part
    assert np.array_equal(own.predict_samples(samples=4), fitted.predict_samples(longer, samples=4))


def test_all_kinds_forecast():
    for kind in ("rnn", "ssm", "transformer", "tvae", "vrnn"):
        own = vssm.Forecaster(**{**SMALL, "max_steps": 2}, kind=kind).fit(weeks())
        assert np.isfinite(own.predict_samples(samples=3)).all()
        with pytest.raises(ValueError, match="cannot fill"):
            own.fill()


def test_it_learns_a_promotion_that_is_known_ahead():
    rng = np.random.default_rng(0)
    days = pandas.date_range("2023-01-01", periods=130, freq="D")
    promo = (rng.random((6, 130)) < 0.3).astype(float)
    parts = [
        pandas.DataFrame({"unique_id": k, "ds": days, "promo": promo[k]}).assign(
            y=20 + 5 * promo[k] + rng.normal(size=130)
        )
        for k in range(6)
    ]
    table = pandas.concat(parts)
    table.loc[rng.random(len(table)) < 0.1, "y"] = np.nan
    own = vssm.Forecaster(horizon=7, future_columns=["promo"], max_steps=150, season=1, refit=False)
    ahead = pandas.DataFrame(
        {"ds": pandas.date_range(days[-1], periods=8)[1:], "promo": [0.0, 1, 0, 1, 0, 1, 0]}
    )
    made = own.fit(table).predict(future=ahead)["0.5"].to_numpy().reshape(6, 7)
    gain = made[:, 1::2].mean() - made[:, ::2].mean()
    assert 3 < gain < 7  # the truth is 5


def test_fill_keeps_what_is_known(fitted):
    table = weeks()
    table.iloc[20:24, 0] = np.nan
    full = fitted.fill(table)
    known = table.notna()
    assert full.notna().all().all() and full[known].equals(table[known])
    long = as_long(table).dropna()
    assert len(long) < len(fitted.fill(long)) == len(as_long(table))


def test_evaluate_and_backtest(tmp_path):
    own = vssm.Forecaster(**{**SMALL, "max_steps": 60})
    made = own.backtest(weeks(120), windows=3)
    assert made.table.index.tolist() == ["vssm", "seasonal naive"]
    assert made.table.columns.tolist() == ["crps", "wql", "mase", "coverage80"]
    assert max(len(one.y) for one in own.panel_.series) == 120 - 21  # the rest was not trained on
    assert made.table.loc["vssm", "crps"] < made.table.loc["seasonal naive", "crps"]
    pandas.testing.assert_frame_equal(own.evaluate(weeks(120), windows=3), made.table)
    made.plot(tmp_path / "test.png")
    assert len(own.plot(path=tmp_path / "next.png").axes) == 2
    assert (tmp_path / "test.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="'a' has 120 rows, too few for 30 windows"):
        own.backtest(weeks(120), windows=30)


def test_a_constant_series_and_one_far_from_zero_are_forecast():
    table = weeks().assign(a=5.0, b=1e9 + np.arange(70.0))
    own = vssm.Forecaster(**SMALL).fit(table)
    paths = own.predict_samples(samples=50)
    assert np.abs(paths[0] - 5).max() < 0.1
    assert np.abs(np.median(paths[1], 0) - 1e9 - np.arange(70, 77)).max() < 70


def test_centres_of_windows_with_gaps():
    layout = Layout(horizon=2, season=3, patch=1, context=6)
    y = torch.tensor([[1.0, 2, 9, 3, 99, 7, 0, 0]], dtype=torch.float64)
    known = torch.tensor([[1, 1, 1, 1, 0, 1, 0, 0]]).bool()
    wanted = {
        "mean": [4.4, 4.4],
        "last": [7, 7],
        "season": [2, 2],  # of phases 0 and 1
        "season-last": [3, 2],
        "season-level": [2, 2],  # the last season is 1 above in one phase, 1 below in another
    }
    for name, ahead in wanted.items():
        centre, scale = centre_and_scale(y, known, layout, torch.zeros(1, 1), name)
        assert centre[0, 6:].tolist() == pytest.approx(ahead), name
        assert scale > 0
        moved, same = centre_and_scale(2 * y + 5, known, layout, torch.zeros(1, 1), name)
        assert torch.allclose(moved, 2 * centre + 5) and torch.allclose(same, 2 * scale)


def test_a_regression_is_used_where_it_is_clearly_better():
    """Noise that comes back after five days can be forecast; noise alone cannot."""
    noise = np.random.default_rng(0).normal(size=(400, 1))
    echo = noise + 3 * np.roll(noise, 5, axis=0)
    days = pandas.date_range("2022-01-01", periods=400, freq="D")

    def choice(values):
        panel = read_panel(pandas.DataFrame(values, index=days, columns=["a"]))
        layout = choose_layout(panel, 4, 1, 1, 12, "none")
        older, cuts = hold_out(panel, layout)
        scale = GivenScale.of(panel, layout.patch)
        return choose_linear(Windows(older, layout, scale), Windows(panel, layout, scale), cuts)

    assert np.isfinite(choice(echo).penalty)
    assert choice(noise) == ("mean", np.inf)


def test_a_regression_reads_covariates_of_the_future():
    rng = np.random.default_rng(0)
    table = as_long(weeks(200, 1)).drop(columns="y")
    table["promo"] = (rng.random(200) < 0.3).astype(float)
    table["y"] = 5 * table["promo"] + 0.1 * rng.normal(size=200)
    own = vssm.Forecaster(**SMALL, future_columns=["promo"]).fit(table)
    days = pandas.date_range("2024-07-19", periods=7, freq="D")
    ahead = pandas.DataFrame({"ds": days, "promo": [0.0, 1, 0, 0, 1, 1, 0]})
    made = own.predict(future=ahead)["0.5"].to_numpy()
    assert np.allclose(made, 5 * ahead["promo"], atol=1.0)  # after four steps of training


def test_a_backtest_does_not_see_what_it_forecasts():
    """Values that come later change no forecast and no score before them."""
    calm = weeks(100).assign(b=5.0)
    wild = calm.copy()
    wild.iloc[79:] *= 1000  # from the first window on
    made = [
        vssm.Forecaster(**SMALL).backtest(table, windows=3, samples=5) for table in (calm, wild)
    ]
    first = [(one.cuts[:, 1] == 79) for one in made]
    for paths in (
        [one.paths for one in made],
        [naive_paths(one.windows, one.cuts, 5) for one in made],
    ):
        assert torch.equal(*(part[own] for part, own in zip(paths, first, strict=True)))


def test_windows_of_a_backtest_can_overlap():
    made = vssm.Forecaster(**SMALL).backtest(weeks(), windows=3, samples=5, stride=2)
    assert made.cuts[made.cuts[:, 0] == 0, 1].tolist() == [59, 61, 63]
    with pytest.raises(ValueError, match="stride is 0"):
        vssm.Forecaster(**SMALL).backtest(weeks(), stride=0)


def test_sizes_are_chosen_from_frequency_and_length():
    def layout(freq, num, horizon):
        dates = pandas.date_range("2020-01-06", periods=num, freq=freq)
        table = pandas.DataFrame({"a": np.arange(num) % 5.0}, index=dates)
        return choose_layout(read_panel(table), horizon, None, None, None, "auto")

    hourly = layout("h", 2000, 96)
    assert (hourly.season, hourly.patch) == (24, 24)
    assert layout("MS", 120, 12).season == 12 and layout("MS", 30, 12).season == 1
    assert layout("D", 400, 28).patch == 7 and layout("15min", 900, 96).season == 96
    for one in (hourly, layout("W-SUN", 400, 13), layout("QS", 60, 8)):
        assert one.context % one.patch == 0 and one.steps <= 32
    assert season_of(pandas.tseries.frequencies.to_offset("B"), [100]) == 5
    assert season_of(pandas.DateOffset(months=1), [100]) == 12  # the 15th of each month


def test_series_that_grow_are_read_as_logarithms():
    months = pandas.date_range("2000-01-01", periods=120, freq="MS")
    grow = np.exp(0.02 * np.arange(120)) * (10 + np.sin(np.arange(120) * np.pi / 6))
    panel = read_panel(pandas.DataFrame({"a": grow}, index=months))
    assert choose_layout(panel, 12, None, None, None, "auto").log
    lower = replace(panel, series=(replace(panel.series[0], y=grow - 30),))
    assert not choose_layout(lower, 12, None, None, None, "auto").log
    assert not choose_layout(panel, 12, None, None, None, "none").log


def test_logarithms_are_read_where_they_clearly_forecast_better():
    """Prices multiply sales, or add to them."""
    rng = np.random.default_rng(0)
    table = as_long(weeks(100, 8)).assign(promo=(rng.random(800) < 0.3).astype(float))
    noise = 0.1 * rng.normal(size=800)
    options = {**SMALL, "max_steps": 1, "refit": False, "future_columns": ["promo"]}
    for y, log in ((np.exp(table["y"] / 5 + table["promo"] + noise), True), (table["y"], False)):
        own = vssm.Forecaster(**options).fit(table.assign(y=y + (0 if log else table["promo"])))
        assert own.layout_.log == log


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (weeks(13), {"season": 7}, "'a' has 13 rows, less than two seasons of 7"),
        (weeks().assign(b=np.nan), {}, "'b' has no value"),
        (weeks(), {"kind": "lstm"}, "kind='lstm'"),
        (weeks(), {"horizon": 0}, "horizon is 0"),
        (weeks(), {"context": 10_000}, "context is 10000, and the longest series has 70 rows"),
        (weeks(), {"patch": 71}, "patch is 71, .* give patch=70 or less"),
        (weeks(), {"freq": "soon"}, "freq='soon'"),
        (weeks(), {"transform": "sqrt"}, "transform='sqrt'"),
        (weeks(), {"future_columns": ["promo"]}, "no column 'promo'"),
        (weeks(), {"kind": "rnn", "future_columns": ["b"]}, "takes no future_columns"),
        (weeks() - 50, {"transform": "log"}, "'a' is -.* reads logarithms"),
    ],
)
def test_fit_names_the_mistake(table, options, message):
    with pytest.raises(ValueError, match=message) as error:
        vssm.Forecaster(**{**SMALL, **options}).fit(table)
    assert "\n" not in str(error.value)


def test_predict_names_the_mistake(fitted):
    for call, message in [
        (lambda: vssm.Forecaster().predict(), "call fit"),
        (lambda: fitted.predict(quantiles=(0.1, 1.5)), "from 0 to 1"),
        (lambda: fitted.predict(quantiles=("low",)), "quantiles has 'low'"),
        (lambda: fitted.predict(quantiles=0.5), "quantiles has type float; it must be a list"),
        (lambda: fitted.predict(samples=0), "samples is 0"),
        (lambda: fitted.predict(weeks().assign(a=np.nan)), "'a' has no value"),
        (lambda: fitted.predict(future=weeks()), "no future_columns"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert fitted.predict(weeks(series=3)[["c"]].tail(10), samples=5).shape == (7, 4)  # a new one


@pytest.mark.gpu
def test_forecasts_on_a_gpu_are_those_of_a_cpu(tmp_path):
    own = vssm.Forecaster(horizon=14, max_steps=20, width=64).fit(weeks(150))
    own.save(tmp_path)
    wanted = own.predict_samples(samples=200)
    made = vssm.Forecaster.load(tmp_path, "cuda").predict_samples(samples=200)
    off = (np.abs(made - wanted) / np.abs(wanted).max()).max(2)
    # Noise within rounding of the edge between two classes gives another path.
    assert np.median(off) < 1e-5 and (off > 1e-4).mean() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["vssm", "rnn"])
def test_a_forecaster_is_trained_on_a_gpu(kind):
    own = vssm.Forecaster(horizon=7, max_steps=60, kind=kind, device="cuda")
    made = own.backtest(weeks(200), windows=3).table["crps"]
    assert made[kind] < made["seasonal naive"]
