import contextlib
import os
from pathlib import Path

import pytest
import torch

# Property tests draw the same examples on every machine, and slow machines do not fail them.
from hypothesis import settings

from vssm import ModelConfig, State, build

settings.register_profile("vssm", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("vssm")

KINDS = ("transformer", "ssm", "rnn", "tvae", "vrnn", "vssm")


# Slow files come first: else one of several processes would end with one of them alone.
LONGEST = (
    "test_tutorials.py",
    "test_scan_triton.py",
    "test_readme.py",
    "test_conv.py",
    "test_reproduce.py",
)


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_dir():
    """The folder of real data sets; tests that need it are skipped where there is none."""
    folder = os.environ.get("VSSM_DATA")
    if not folder or not os.path.isdir(folder):  # noqa: PTH112
        pytest.skip("VSSM_DATA names no folder")
    return folder


def small_config(kind, head="gaussian", **options):
    values = {
        "kind": kind,
        "head": head,
        "features": 5 if head == "categorical" else 3,
        "width": 16,
        "layers": 2,
        "state_size": 4,
        "heads": 2,
        "latents": 3,
        "classes": 4,
        "mixtures": 2,
    }
    return ModelConfig(**{**values, **options})


def small_model(kind, head="gaussian", **options):
    """A small model whose weights are large enough that every input matters in the output."""
    torch.manual_seed(1)
    model = build(small_config(kind, head, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
    return model


def sequences(model, batch, length):
    """Random data that suits the head of a model."""
    config = model.config
    if config.head == "categorical":
        return torch.randint(0, config.features, (batch, length))
    if config.head == "bernoulli":
        return torch.randint(0, 2, (batch, length, config.features)).float()
    if config.head == "logistic-mixture":
        return torch.randint(0, config.bins, (batch, length, config.features)) / (config.bins - 1)
    return torch.rand(batch, length, config.features)


def relative_error(given, expected):
    """‖given - expected‖ / ‖expected‖ in float64."""
    given, expected = given.detach().double(), expected.detach().double()
    return float((given - expected).norm() / expected.norm().clamp_min(1e-30))


def same(given, expected, tolerance=1e-5):
    """Asserts that two tensors, or two missing ones, are equal to rounding."""
    assert (given is None) == (expected is None)
    if given is not None:
        assert given.shape == expected.shape and given.dtype == expected.dtype
        assert relative_error(given, expected) < tolerance


def same_states(given, expected, tolerance=1e-5):
    """Asserts that two states are equal to rounding; their names may have another order."""
    assert (given.position, given.owner) == (expected.position, expected.owner)
    assert given.children.keys() == expected.children.keys()
    for name, child in given.children.items():
        if isinstance(child, State):
            same_states(child, expected.child(name), tolerance)
        else:
            same(child, expected[name], tolerance)


def same_results(given, expected, tolerance=1e-5):
    """Asserts that two generations are equal to rounding, with their states."""
    same(given.x, expected.x, tolerance)
    same(given.z, expected.z, tolerance)
    same_states(given.state, expected.state, tolerance)


def descendants(process, command):
    """Yields the processes below a process whose command line starts so, by Linux's own account."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    for found in parents:
        above = found
        while above in parents and above != process:
            above = parents[above]
        with contextlib.suppress(OSError):
            if above == process and Path(f"/proc/{found}/cmdline").read_bytes().startswith(command):
                yield found
