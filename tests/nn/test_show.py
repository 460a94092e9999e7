"""Models, states and samples show themselves: short in a console, as a table in a notebook."""

import pandas
import pytest

import vssm
from vssm.cli import main
from vssm.config import KINDS
from vssm.nn.show import html_table
from vssm.runs.folder import RunFolder

SIZES = {"features": 3, "width": 8, "layers": 1, "heads": 2, "latents": 2, "classes": 4}


@pytest.mark.parametrize("kind", KINDS)
def test_models_show_their_kind_and_size(kind):
    model = vssm.build(vssm.ModelConfig(kind=kind, **SIZES))
    text, page = repr(model), model._repr_html_()
    parameters = f"{sum(p.numel() for p in model.parameters()):,}"
    assert f"kind={kind}, features=3, width=8" in text and f"parameters={parameters})" in text
    assert "\n" not in text and f"<td>{parameters}</td>" in page


def test_samples_and_states_show_their_shapes():
    model = vssm.build(vssm.ModelConfig(kind="vssm", **SIZES))
    made = vssm.generate(model, num=2, length=5)
    assert "<td>(2, 5, 3)</td>" in made._repr_html_()
    page = made.state._repr_html_()
    assert "State at position 5" in page and "decoder/0/ssm" in page and "(2, 16, 16)" in page


def test_a_forecaster_shows_its_parameters_and_its_fit():
    days = pandas.date_range("2024-01-01", periods=60, freq="D")
    table = pandas.DataFrame({"north": range(60), "south": range(60)}, index=days)
    own = vssm.Forecaster(horizon=3, max_steps=2, width=16, progress=False)
    assert "<th>horizon</th><td>3</td>" in own._repr_html_() and "series" not in own._repr_html_()
    page = own.fit(table)._repr_html_()
    assert "<th>series</th><td>2</td>" in page and "AnyPart(kind=vssm" in page


def test_a_run_folder_shows_its_settings_metrics_and_samples(tmp_path):
    assert RunFolder(tmp_path)._repr_html_() == f"<table><caption>Run {tmp_path}</caption></table>"
    main(["train", "digits", "--smoke", "--train.max-steps", "2", "--out", str(tmp_path / "run")])
    main(["evaluate", str(tmp_path / "run"), "--quick", "--num-images", "0"])
    page = RunFolder(tmp_path / "run")._repr_html_()
    assert "<td>digits</td>" in page and "<th>log_likelihood</th>" in page
    assert "<th>ended</th><td>True</td>" in page and '<img alt="Samples" src="data:' in page


def test_values_are_escaped():
    assert "&lt;b&gt;" in html_table("<b>", {"<b>": "<b>"}) and "<b>" not in html_table("<b>", {})
