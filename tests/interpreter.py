"""Where kernels are tested: compiled on a GPU, else by Triton's interpreter.

Triton decides at import whether it interprets, so without a GPU `run_interpreted` starts pytest
again with TRITON_INTERPRET=1 in its environment; tests marked `kernels` run only there.
"""

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
kernels = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu", reason="test_in_the_interpreter runs it, or a CUDA device"
)
needs_interpreter = pytest.mark.skipif(
    INTERPRETED or DEVICE == "cuda", reason="the other tests already run the kernels"
)


def run_interpreted(tests):
    """Runs a test file, or one test of it, in the interpreter, and returns what pytest printed."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            "not gpu",
            tests,
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
    return done.stdout
