"""Forked processes must not wait for threads that they do not have."""

import subprocess
import sys

import pytest

FORKED = """
import multiprocessing, sys, warnings
import torch, vssm

torch.set_num_threads(2)
x = torch.rand(64, 28, 28)

def use(model):
    vssm.generate(model, num=64, length=28)
    vssm.objective(model, x).loss.mean().backward()

def child():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(model if {used} else vssm.load("mnist-small"))
    messages = [str(w.message) for w in caught if "forked" in str(w.message)]
    sys.exit(0 if (len(messages), torch.get_num_threads()) == (1, 1) else str(messages))

model = vssm.load("mnist-small")
if {used}:
    use(model)
process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
process.start()
process.join(60)
sys.exit("the child hangs" if process.exitcode is None else process.exitcode)
"""


@pytest.mark.parametrize("used", [True, False])
def test_a_forked_process_computes_on_one_thread(used):
    """It warns once, whether or not the parent has computed."""
    code = FORKED.format(used=used)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
