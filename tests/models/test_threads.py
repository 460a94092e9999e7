"""Forked processes must not wait for threads that they do not have."""

import subprocess
import sys

FORKED = """
import multiprocessing, sys, warnings
import torch, vssm

torch.set_num_threads(2)
model = vssm.build(vssm.ModelConfig(features=28, width=128, layers=1))
x = torch.rand(64, 28, 28)

def use():
    vssm.generate(model, num=64, length=28)
    vssm.objective(model, x).loss.mean().backward()

def child():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use()
    messages = [str(w.message) for w in caught if "forked" in str(w.message)]
    sys.exit(0 if (len(messages), torch.get_num_threads()) == (1, 1) else str(messages))

def fork():
    process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
    process.start()
    process.join(60)
    if process.exitcode != 0:
        sys.exit("the child hangs" if process.exitcode is None else process.exitcode)

fork()  # before this process has computed
use()
fork()
assert torch.get_num_threads() == 2
"""


def test_a_forked_process_computes_on_one_thread_and_warns_once():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKED], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
