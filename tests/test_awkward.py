"""What is easily forgotten: weights in half precision, sequences of no steps, batches of no rows."""

import copy
from itertools import pairwise

import pytest
import torch

import vssm
from tests.conftest import KINDS, relative_error, sequences, small_model
from vssm.likelihoods import reconstruct
from vssm.ragged import generate_ragged

# A kind and its levels.
MODELS = [*((kind, 1) for kind in KINDS), ("vssm", 2)]
PARALLEL = [("tvae", 1), ("vssm", 1), ("vssm", 2)]


def half_and_whole(kind, levels, head="gaussian"):
    """A model in bfloat16, and the same weights in float32."""
    half = small_model(kind, head, levels=levels, latents=4, sigma=1.0).bfloat16()
    return half, copy.deepcopy(half).float()


@pytest.mark.parametrize("head", ["gaussian", "categorical"])
@pytest.mark.parametrize(("kind", "levels"), MODELS)
def test_half_precision_scores_as_float32_does(kind, levels, head):
    half, whole = half_and_whole(kind, levels, head)
    x, lengths = sequences(half, 3, 7), torch.tensor([7, 4, 1])
    for options in ({}, {"lengths": lengths}):
        given, expected = (vssm.log_likelihood(model, x, 50, **options) for model in (half, whole))
        assert given.dtype == torch.float32
        assert relative_error(given, expected) < 0.15  # a draw near an edge falls to the other side
        terms = vssm.objective(half, x, torch.Generator().manual_seed(0), **options)
        same = vssm.objective(whole, x, torch.Generator().manual_seed(0), **options)
        assert relative_error(terms.loss, same.loss) < 0.05
    p_x, *_ = reconstruct(half, x, seed=0)
    assert p_x.log_prob(x).isfinite().all()
    terms.loss.sum().backward()
    grads = [parameter.grad for parameter in half.parameters() if parameter.grad is not None]
    assert grads and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("observe", ["mean", "sample"])
@pytest.mark.parametrize("head", ["gaussian", "bernoulli", "categorical", "logistic-mixture"])
@pytest.mark.parametrize(("kind", "levels"), MODELS)
def test_half_precision_generates(kind, levels, head, observe):
    model, _ = half_and_whole(kind, levels, head)
    x = sequences(model, 2, 7)
    ways = [{"num": 2}, {"prompt": x}, {"prompt": x[:1], "num": 2}, {"state": vssm.observe(model, x)}]
    if (kind, levels) in PARALLEL:
        ways += [{"chunk": 2, "recondition": True, **way} for way in ways[:3]]
    if (kind, levels) in PARALLEL[:2]:
        ways += [{"passes": 3, "prompt": x}]
    for way in ways:
        out = vssm.generate(model, length=5, observe=observe, **way)
        assert out.x.shape[:2] == (2, 5)
        assert out.x.dtype == (torch.int64 if head == "categorical" else torch.float32)
        assert out.x.isfinite().all()
        more = vssm.generate(model, length=2, state=vssm.State.from_bytes(out.state.to_bytes()))
        assert more.x.shape[:2] == (2, 2) and more.state.position == out.state.position + 2
    assert generate_ragged(model, [x[0], x[1, :3]], 4, observe=observe).x.shape[:2] == (2, 4)


@pytest.mark.parametrize(("kind", "levels"), PARALLEL)
def test_half_precision_makes_the_sample_of_float32(kind, levels):
    half, whole = half_and_whole(kind, levels)
    x = sequences(half, 8, 6)
    options = {"prompt": x, "length": 6, "chunk": 2, "recondition": True}
    given, expected = (vssm.generate(model, **options) for model in (half, whole))
    assert (given.z == expected.z).double().mean() > 0.9  # as above
    assert relative_error(given.x, expected.x) < 0.2


@pytest.mark.parametrize("head", ["gaussian", "categorical"])
@pytest.mark.parametrize(("kind", "levels"), MODELS)
def test_nothing_is_refused_or_gives_nothing(kind, levels, head):
    model = small_model(kind, head, levels=levels, latents=4)
    x = sequences(model, 2, 7)
    for function in (vssm.objective, vssm.log_likelihood, vssm.observe):
        with pytest.raises(
            ValueError, match=r"^x has shape \(2, 0.*\), no steps; allowed: one step or more$"
        ):
            function(model, x[:, :0])
        with pytest.raises(ValueError, match=r"^x has shape \(0, 7.*\), no sequences; allowed: one seq"):
            function(model, x[:0])
    with pytest.raises(ValueError, match=r"^prompt has shape \(0, 7.*\), no sequences; allowed: one seq"):
        vssm.generate(model, length=3, prompt=x[:0])
    with pytest.raises(ValueError, match=r"^state has 0 rows; allowed: 1 or more$"):
        vssm.generate(model, length=3, state=vssm.observe(model, x).select([]))
    with pytest.raises(ValueError, match=r"^num=0 is not allowed; allowed: a whole number >= 1$"):
        vssm.generate(model, num=0, length=3)

    from_nothing = vssm.generate(model, num=2, length=3)
    for way in ({"prompt": x[:, :0]}, {"state": vssm.generate(model, num=2, length=0).state}):
        assert torch.equal(vssm.generate(model, length=3, **way).x, from_nothing.x)
    made = [vssm.generate(model, length=0, prompt=x[:, :steps]) for steps in (7, 0)]
    made.append(generate_ragged(model, [x[0], x[1, :2]], 0))
    assert all(a.x.shape == b.x.shape and a.x.shape[:2] == (2, 0) for a, b in pairwise(made))


def test_forecast_of_nothing_is_refused():
    model = small_model("vssm")
    for shape in ((0, 3), (0, 7, 3), (2, 0, 3)):
        with pytest.raises(ValueError, match=r"^history has shape \(.*one step and one series or more"):
            vssm.forecast(model, torch.zeros(shape), horizon=3)
    for name in ("horizon", "samples"):
        with pytest.raises(ValueError, match=f"^{name}=0 is not allowed; allowed: a whole number >= 1"):
            vssm.forecast(model, torch.zeros(5, 3), **{"horizon": 3, name: 0})
