"""The package keeps its shape: public names, directions of imports, and no traces in a process."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vssm

PACKAGE = Path(vssm.__file__).parent
ROOT = PACKAGE.parent

# Each module may import only from modules that stand before it.
ORDER = (
    "checks",
    "ops",
    "noise",
    "distributions",
    "data",
    "config",
    "nn",
    "models",
    "objectives",
    "likelihoods",
    "runs",
    "sampling",
    "engine",
    "training",
    "forecasting",
    "evaluation",
    "lab",
    "serve",
    "cli",
)


def test_public_names():
    assert sorted(vssm.__all__) == [
        "Engine",
        "Forecaster",
        "Generation",
        "ModelConfig",
        "State",
        "Terms",
        "accelerate",
        "build",
        "fill",
        "generate",
        "load",
        "log_likelihood",
        "objective",
        "observe",
        "ops",
        "save",
    ]
    assert all(hasattr(vssm, name) for name in vssm.__all__)
    import inspect

    assert list(inspect.signature(vssm.ops.selective_scan).parameters) == (
        ["u", "dt", "A", "B", "C", "D", "z", "dt_bias", "softplus", "h0", "backend", "cu_seqlens"]
    )
    mamba_ssm = ["u", "delta", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus"]
    mamba_ssm += ["return_last_state", "initial_state"]
    assert list(inspect.signature(vssm.ops.selective_scan_fn).parameters) == mamba_ssm
    assert list(inspect.signature(vssm.log_likelihood).parameters)[:4] == (
        ["model", "x", "num_samples", "prompt_length"]
    )
    assert list(inspect.signature(vssm.generate).parameters)[:5] == [
        "model",
        "num",
        "length",
        "prompt",
        "chunk",
    ]
    assert vssm.Terms._fields == ("loss", "reconstruction", "kl", "partial")
    assert vssm.Generation._fields == ("x", "z", "state")


def test_completion_offers_what_is_public():
    assert {*vssm.__all__, "__version__", "__doc__"} <= set(dir(vssm))
    with pytest.raises(AttributeError, match="module 'vssm' has no attribute 'generat'"):
        vssm.generat  # noqa: B018


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vssm":
            if node.module == "vssm":
                yield from (alias.name for alias in node.names)
            else:
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("vssm."))


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_go_one_way(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[0] in ("__init__", "__main__"):
        return
    assert parts[0] in ORDER, f"give {parts[0]} its place in ORDER"
    own = ORDER.index(parts[0])
    for name in imported_modules(path):
        if name in ORDER:
            assert ORDER.index(name) <= own, f"{parts[0]} must not import {name}"


def exported(path):
    """The names of `__all__`; without it, those that the module defines and does not import."""
    names, defined = [], set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
            continue
        names_set = (part for part in ast.walk(node) if isinstance(part, ast.Name))
        defined |= {name.id for name in names_set if isinstance(name.ctx, ast.Store)}
        if isinstance(node, ast.Assign | ast.AugAssign):  # also __all__ += [...]
            target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
            if getattr(target, "id", None) == "__all__":
                names += ast.literal_eval(node.value)
    return names or defined


def test_modules_export_what_others_import():
    missing = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vssm."):
                continue
            source = PACKAGE.joinpath(*node.module.split(".")[1:]).with_suffix(".py")
            if source.exists():
                names = exported(source)
                public = (alias.name for alias in node.names if not alias.name.startswith("_"))
                missing |= {f"{node.module}.{name}" for name in public if name not in names}
    assert not missing


def test_sdist_includes_only_files_of_the_repository_root():
    """A pattern without a leading slash also matches demo/vssm, which `make demo` writes."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert "/vssm" in patterns and all(pattern.startswith("/") for pattern in patterns), patterns


def test_the_lowest_versions_that_are_tried_are_those_declared():
    """`make lowest` installs constraints-lowest.txt; other minimums would be untested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tried = re.search(r"lowest\.txt.*?\[(.*?)\]", (ROOT / "Makefile").read_text(), re.DOTALL)
    assert tried is not None
    declared = [
        *project["dependencies"],
        *(line for name in tried[1].split(",") for line in extras[name]),
    ]
    lowest = dict(
        re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints-lowest.txt").read_text(), re.MULTILINE)
    )
    minimums = dict(re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", line).groups() for line in declared)
    assert {
        name: f"{version}.0.0"[: len(lowest[name])] for name, version in minimums.items()
    } == lowest
    assert set(extras) - set(tried[1].split(",")) == {"gpu", "dev", "docs"}


def test_no_drawer():
    names = {path.stem for path in PACKAGE.rglob("*.py")}
    assert not names & {"utils", "util", "common", "helpers", "misc"}


IMPORT = """
import os, signal, sys, threading, time
import torch
opened, threads = [], threading.active_count()
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" and len(args) > 1
                 and isinstance(args[1], str) and any(c in args[1] for c in "wax+") else None)
environment = dict(os.environ)
signals = {name: signal.getsignal(name) for name in signal.valid_signals()}
start = time.process_time()  # other programs may keep this one waiting
from vssm import *
seconds = time.process_time() - start
heavy = {"numba", "triton", "matplotlib", "sklearn", "tyro", "pooch", "rich", "pandas"}
heavy &= set(sys.modules)
assert not heavy, heavy
assert threading.active_count() == threads
assert dict(os.environ) == environment
assert {name: signal.getsignal(name) for name in signal.valid_signals()} == signals
assert not torch.cuda.is_initialized()
written = [name for name in opened if "__pycache__" not in str(name)]
assert not written, written
print(seconds)
"""


def test_import_does_nothing_and_is_quick():
    run = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 1.5


FOOTPRINT = """
import collections, importlib, os, signal, sys, threading, weakref
hooks = importlib.import_module("torch.optim.optimizer")

CONTAINERS = (dict, list, set, collections.deque, weakref.WeakKeyDictionary, weakref.WeakSet,
              weakref.WeakValueDictionary)
ROOMS = ("vssm.sampling", "vssm.nn", "vssm.models", "vssm.engine")

def process():
    return (dict(os.environ), {n: signal.getsignal(n) for n in signal.valid_signals()},
            set(threading.enumerate()), len(hooks._global_optimizer_post_hooks),
            len(hooks._global_optimizer_pre_hooks))

def kept():
    found = {}
    for module in [m for name, m in sys.modules.items() if name.startswith(ROOMS)]:
        for name, value in vars(module).items():
            if name[:2] != "__" and isinstance(value, CONTAINERS):
                found[module.__name__, name] = len(value)
            elif hasattr(value, "cache_info"):
                found[module.__name__, name] = value.cache_info().currsize
    return found

before = process()
import vssm
vssm.build, vssm.generate, vssm.Engine  # names are imported at first use
sizes = kept()
assert ("vssm.models", "MODELS") in sizes
for kind in ("vssm", "tvae", "vrnn", "ssm", "rnn", "transformer"):
    config = vssm.ModelConfig(kind=kind, features=3, width=8, layers=1, heads=2)
    model = vssm.build(config)
    state = vssm.generate(model, prompt=vssm.generate(model, num=2, length=4).x, length=3).state
    vssm.generate(model, length=2, state=state)
    vssm.Engine(model).generate(num=2, length=4)
assert process() == before
assert kept() == sizes, (kept(), sizes)
"""


def test_generation_leaves_no_trace_in_the_process():
    """No handler of signals, no variable, no thread, no hook, and nothing kept in a module."""
    command = [sys.executable, "-c", FOOTPRINT]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


KERNEL = """
import torch
from vssm.ops import causal_conv_silu
from vssm.ops.conv.numba import forward_kernel

y, _ = causal_conv_silu(torch.ones(1, 2, 3), torch.ones(3, 2), torch.zeros(3), backend="numba")
print(float(y.sum()), sum(forward_kernel.stats.cache_hits.values()))
"""


def test_compiled_kernels_are_those_of_the_code(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(PACKAGE, tmp_path / "vssm", ignore=ignored)
    vectors = tmp_path / "vssm" / "ops" / "vectors.py"

    def run():
        command = [sys.executable, "-c", KERNEL]
        made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return made.stdout.split()

    first, hits = run()
    assert hits == "0"
    assert run() == [first, "1"]
    source = vectors.read_text()
    vectors.write_text(
        source.replace("0.6931471435060839", "0.5931471435060839")
    )  # of the same size
    assert vectors.read_text() != source
    changed, hits = run()
    assert (changed != first, hits) == (True, "0")


def test_all_code_of_kernels_is_watched():
    """Compiled kernels are cached under a digest of the sources in `vssm/ops`, and no others."""
    for path in PACKAGE.rglob("*numba.py"):
        assert path.is_relative_to(PACKAGE / "ops")
        assert set(imported_modules(path)) <= {"ops"}
