"""Runs every command once on tiny models: `python tests/smoke.py`, in an environment that has vssm.

`make lowest` does so with the lowest versions that pyproject.toml declares.
"""

import datetime
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from vssm.cli import COMMANDS

DAYS = (datetime.date(2024, 1, 1) + datetime.timedelta(days) for days in range(300))
SERIES = "date,a,b\n" + "".join(f"{day},{i % 7},{i % 5}\n" for i, day in enumerate(DAYS))
RUNS = (
    "train digits --smoke --out run",
    "train digits --smoke --preset best --out levels --train.optimizer muon --model.width 16",
    "train digits --smoke --out transformer --model.kind transformer",
    "train --resume run",
    "train series --smoke --series.path series.csv --series.context 24 --series.horizon 8 "
    "--out series",
    "evaluate run --quick",
    "generate run --num 2 --state state.safetensors --out samples.npy",
    "generate run --resume state.safetensors --length 8 --out samples.png",
    "generate mnist-best-small --num 2",
    "generate mnist-any-small --label 3 --num 2",
    "forecast series.csv --horizon 8 --samples 8 --max-steps 9 --out forecast.csv",
    "sweep digits --smoke --seeds 0 --learning-rates 1e-3 --out sweep",
    "report run",
)


def main() -> None:
    """Runs all commands in an empty folder and shows what those say that fail."""
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "series.csv").write_text(SERIES)
        able = [name for name in COMMANDS if name != "serve" or find_spec("uvicorn")]  # an extra
        for line in [*(f"{command} --help" for command in able), *RUNS]:
            words = [sys.executable, "-m", "vssm", *line.split()]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600)
            print("ok  " if done.returncode == 0 else "FAIL", "vssm", line, flush=True)
            if done.returncode:
                failed.append(line)
                print((done.stdout + done.stderr)[-2000:])
    sys.exit(f"{len(failed)} commands failed" if failed else 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
