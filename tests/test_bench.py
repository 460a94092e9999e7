import json

import pytest
import torch

from vssm import bench
from vssm.bench import Shape, bench_scan

SMALL = (Shape(2, 6, 5, 3), Shape(1, 1, 5, 3))


def test_metrics():
    pytest.importorskip("mambapy")
    metrics = bench_scan(SMALL, repeats=3)
    assert set(metrics) == {
        *(f"{what}_{part}ms_b2_t6" for what in ("fwd", "bwd") for part in ("", "p10_", "p90_")),
        *(f"{peer}_{what}_ms_b2_t6" for peer in ("reference", "mambapy") for what in ("fwd", "bwd")),
        *(f"fwd_{part}ms_b1_t1" for part in ("", "p10_", "p90_")),
        "reference_fwd_ms_b1_t1",
        "floor_ms_b2_t6",
        "floor_ms_b1_t1",
    }
    assert all(value > 0 for value in metrics.values())
    assert metrics["fwd_p10_ms_b2_t6"] <= metrics["fwd_ms_b2_t6"] <= metrics["fwd_p90_ms_b2_t6"]


def test_chosen_backends_only():
    assert set(bench_scan(SMALL[1:], repeats=1, backends=["reference"])) == {
        "reference_fwd_ms_b1_t1",
        "floor_ms_b1_t1",
    }
    with pytest.raises(ValueError, match="backend='fastest' can not be timed; allowed: 'auto', 'reference'"):
        bench_scan(SMALL, backends=["fastest"])


def test_file_and_table(tmp_path, capsys):
    made = bench.main_scan(tmp_path / "scan.json", SMALL, repeats=2)
    assert json.loads((tmp_path / "scan.json").read_text()) == made
    assert set(made) == {"name", "date", "commit", "machine", "command", "config", "metrics"}
    assert made["config"]["shapes"][0] == {"batch": 2, "length": 6, "channels": 5, "states": 3}
    assert made["metrics"]["fwd_ms_b2_t6"] > 0
    assert "2, 6, 5, 3" in capsys.readouterr().out


def test_peer_computes_the_same_scan():
    pytest.importorskip("mambapy")
    inputs = bench._inputs(SMALL[0])
    ours, _ = bench.selective_scan(**inputs)
    assert torch.allclose(bench._mambapy_scan(**inputs), ours, rtol=1e-5, atol=1e-6)


def test_generation_metrics_and_table(tmp_path, capsys):
    options = {
        "kinds": ("ssm", "vssm"),
        "batches": (2,),
        "lengths": (4,),
        "width": 16,
        "layers": 1,
        "repeats": 1,
    }
    made = bench.main_generate(tmp_path / "generate.json", **options)
    assert set(made["metrics"]) == {
        "ssm_ms_b2_t4",
        "ssm_prompted_ms_b2_t4",
        "vssm_ms_b2_t4",
        "vssm_prompted_ms_b2_t4",
        "vssm_chunk1_ms_b2_t4",
    }
    assert all(value > 0 for value in made["metrics"].values())
    assert json.loads((tmp_path / "generate.json").read_text())["metrics"] == made["metrics"]
    assert "b2_t4" in capsys.readouterr().out
