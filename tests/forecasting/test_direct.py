"""The direct forecast: it learns what a regression cannot, and stops before it does harm."""

import numpy as np
import pandas
import torch

from vssm.forecasting.direct import Direct, choose_direct, fit_direct
from vssm.forecasting.fitting import choose_layout, hold_out, progress_bar
from vssm.forecasting.linear import Linear, fit_linear
from vssm.forecasting.panel import read_panel
from vssm.forecasting.windows import GivenScale, Windows, phases


def windows_of(values):
    """Returns the older windows of a daily series, all windows, and the cuts held out."""
    days = pandas.date_range("2015-01-01", periods=len(values), freq="D")
    panel = read_panel(pandas.DataFrame({"a": values}, index=days))
    layout = choose_layout(panel, 2, 1, 1, 8, "none")
    older, cuts = hold_out(panel, layout)
    scale = GivenScale.of(panel, layout.patch)
    return Windows(older, layout, scale), Windows(panel, layout, scale), cuts


def choose(values, steps):
    with progress_bar(False) as bar:
        older, whole, cuts = windows_of(values)
        choice, direct = choose_direct(older, whole, cuts, steps, 0, bar)
    return choice, direct, whole.centred(choice.centre), cuts


def error(direct, windows, cuts):
    a, u, due, _ = windows.direct_task(cuts)
    with torch.no_grad():
        m, _ = direct(a)
    return float((u - m).abs()[due].mean())


def test_it_learns_what_a_regression_can_not():
    """The logistic map is chaotic: linear in nothing, and certain in the next step."""
    x = [0.3]
    for _ in range(999):
        x.append(3.9 * x[-1] * (1 - x[-1]))
    choice, direct, windows, cuts = choose(np.array(x), 600)
    linear = Direct(fit_linear(windows, choice.penalty)).eval()
    assert choice.steps > 0
    assert error(direct, windows, cuts) < 0.5 * error(linear, windows, cuts)


def test_it_is_not_trained_on_noise():
    noise = np.random.default_rng(0).normal(size=400)
    choice, direct, windows, cuts = choose(noise, 600)
    linear = Direct(fit_linear(windows, choice.penalty)).eval()
    assert error(direct, windows, cuts) < 1.05 * error(linear, windows, cuts)


def test_the_spread_follows_the_window():
    """After a value above zero the next one is ten times as noisy."""
    rng, y = np.random.default_rng(0), [0.0]
    for _ in range(2000):
        y.append((1.0 if y[-1] > 0 else 0.1) * rng.normal())
    _, direct, windows, cuts = choose(np.array(y), 600)
    a = windows.direct_task(cuts)[0]
    with torch.no_grad():
        b = direct(a)[1][:, 0]
    last = torch.tensor(y)[cuts[:, 1] - 1]
    assert float(b[last > 0].mean()) > 2 * float(b[last < 0].mean())


def test_one_seed_gives_one_forecast():
    y = np.sin(np.arange(300) / 3)
    older, whole, cuts = windows_of(y)
    with progress_bar(False) as bar:
        choice, first = choose_direct(older, whole, cuts, 20, 1, bar)
        _, second = choose_direct(older, whole, cuts, 20, 1, bar)
        other = fit_direct(choice._replace(steps=20), older.centred(choice.centre), 2, bar)
    a = older.centred(choice.centre).direct_task(older.cuts(2))[0]
    assert torch.equal(first(a)[0], second(a)[0])
    assert not torch.equal(first(a)[0], other(a)[0])


def test_without_held_out_windows_it_is_the_regression():
    older, whole, cuts = windows_of(np.arange(9.0))
    with progress_bar(False) as bar:
        choice, direct = choose_direct(older, whole, cuts[:0], 100, 0, bar)
    assert choice.steps == 0
    linear = fit_linear(older.centred(choice.centre), choice.penalty)
    a = torch.randn(3, len(linear.weight))
    assert torch.allclose(direct(a)[0], a @ linear.weight.float())


def test_weights_come_back():
    direct = Direct(Linear(torch.randn(5, 2), torch.rand(2) + 1), width=8)
    torch.nn.init.normal_(direct.out.weight)
    again, a = Direct.from_tensors(direct.state_dict()), torch.randn(3, 5)
    assert all(map(torch.equal, direct.eval()(a), again(a)))


def test_phases_resolve_fractions_of_seconds():
    noon = np.datetime64("2024-01-01T12", "ms") + np.array([0, 250, 1000])
    found = phases(noon, ["day"])
    angles = 2 * np.pi * (43_200 + np.array([0, 0.25, 1])) / 86_400
    np.testing.assert_allclose(
        found, np.stack([np.sin(angles), np.cos(angles)], 1) / 2, rtol=0, atol=1e-12
    )
    assert (
        phases(noon[[0, 2]], ["day"]) == phases(noon[[0, 2]].astype("datetime64[s]"), ["day"])
    ).all()
