"""Processes that fork after they computed: the child must not wait for threads that it does not have."""

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
        use(vssm.load("mnist-small") if {fresh} else model)
    told = [str(w.message) for w in caught if "forked" in str(w.message)]
    sys.exit(0 if (len(told), torch.get_num_threads()) == ({told}, {threads}) else f"{{told}}")

if {used}:
    model = vssm.load("mnist-small")
    use(model)
process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
process.start()
process.join(60)
sys.exit("the child hangs" if process.exitcode is None else process.exitcode)
"""


@pytest.mark.parametrize(("used", "fresh"), [(True, False), (False, True)])
def test_a_fork_after_use_does_not_hang(used, fresh):
    """One that was never used before keeps its threads."""
    code = FORKED.format(used=used, fresh=fresh, told=int(used), threads=1 if used else 2)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
