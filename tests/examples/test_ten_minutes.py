"""A newcomer's first ten minutes run as they are written; the installed vssm is this one."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "examples" / "ten_minutes.sh"
FILES = (
    *("digits.png", "completed.png", "filled.png", "waves_made.npy"),
    *("run/weights.safetensors", "forecast.csv", "forecast.png"),
)


def test_a_newcomers_ten_minutes(tmp_path):
    pytest.importorskip("fastapi")
    command = tmp_path / "bin" / "vssm"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vssm "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    environment = {
        **os.environ,
        "PATH": f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [shutil.which("bash") or "bash", SCRIPT, tmp_path / "tour"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 sequences of 28 steps came over HTTP" in done.stdout
    assert not [name for name in FILES if not (tmp_path / "tour" / name).is_file()]
    assert len((tmp_path / "tour" / "forecast.csv").read_text().splitlines()) == 29
