"""The Mamba block and its step against mambapy's, with the same weights."""

import pytest
import torch

from tests.conftest import relative_error
from vssm import ModelConfig
from vssm.nn import MambaMixer

mambapy = pytest.importorskip("mambapy.mamba")

TOLERANCE = 1e-5


def mixers():
    """Ours and theirs with equal weights: width 24, 8 states."""
    ours = MambaMixer(ModelConfig(kind="ssm", features=1, width=24, layers=1, state_size=8))
    theirs = mambapy.MambaBlock(
        mambapy.MambaConfig(d_model=24, n_layers=1, d_state=8, dt_rank="auto")
    )
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("length", [1, 2, 33])
def test_block_and_gradients_equal_mambapy(length):
    ours, theirs = mixers()
    x = torch.randn(2, length, 24, requires_grad=True)
    y, expected = ours(x)[0], theirs(x)
    assert relative_error(y, expected) < TOLERANCE
    slope = torch.randn_like(y)
    grads = torch.autograd.grad(y, [x, *ours.parameters()], slope)
    expected_grads = torch.autograd.grad(expected, [x, *theirs.parameters()], slope)
    names = ["x", *dict(ours.named_parameters())]
    assert names[1:] == list(dict(theirs.named_parameters()))
    for name, grad, other in zip(names, grads, expected_grads, strict=True):
        assert relative_error(grad, other) < 10 * TOLERANCE, name


def test_steps_equal_mambapy():
    ours, theirs = mixers()
    x = torch.randn(2, 5, 24)
    cache, state = (None, torch.zeros(2, 48, 3)), None
    with torch.no_grad():
        for t in range(5):
            y, state = ours(x[:, t : t + 1], state)
            expected, cache = theirs.step(x[:, t], cache)
            assert relative_error(y[:, 0], expected) < TOLERANCE
