"""One contract for the six models and the five heads."""

import re

import pytest
import torch

from tests.conftest import KINDS, relative_error, sequences, small_config, small_model
from vssm import ModelConfig, build, generate, log_likelihood, objective
from vssm.distributions import HEADS
from vssm.models import MODELS, VRNN, Autoregressive, Variational


def test_every_kind_has_a_class():
    assert tuple(MODELS) == KINDS


def test_a_model_that_does_not_fit_into_the_memory_is_named(monkeypatch):
    def full(config):
        if torch.get_default_device().type != "meta":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return Autoregressive(config)

    monkeypatch.setitem(MODELS, "rnn", full)
    message = r"has 5\.1e\+04 parameters, too many for the memory; lower width=64 or layers=2$"
    with pytest.raises(ValueError, match=message):
        build(ModelConfig(kind="rnn", features=3, width=64, layers=2))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_model_takes_every_head(kind, head):
    model = small_model(kind, head)
    x = sequences(model, 3, 5)
    terms = objective(model, x)
    assert terms.loss.shape == (3,)
    terms.loss.mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} gets no gradient"
        assert torch.isfinite(parameter.grad).all(), f"{name} has a gradient that is not finite"
        assert parameter.grad.abs().sum() > 0, f"{name} has a gradient of zero"
    assert torch.isfinite(log_likelihood(model, x, num_samples=3)).all()
    for what in ("mean", "sample"):
        out = generate(model, num=2, length=4, observe=what)
        assert out.x.shape == sequences(model, 2, 4).shape
        assert out.x.dtype == x.dtype
    assert generate(model, num=2, length=3, prompt=out.x).state.position == 7


@pytest.mark.parametrize(("kind", "levels"), [("vssm", 1), ("tvae", 1), ("vssm", 2)])
def test_a_model_without_one_output_says_what_to_call(kind, levels):
    model = small_model(kind, levels=levels, latents=4)
    for called in (model, torch.compile(model, backend="eager")):
        with pytest.raises(
            NotImplementedError, match=r"vssm\.objective\(model, x\), vssm\.log_likel"
        ) as told:
            called(sequences(model, 1, 3))
        assert "\n" not in str(told.value)
    for name in re.findall(r"model\.(\w+)", str(told.value)):
        assert hasattr(model, name)


def pieces(model):
    """Names each map from a sequence to a sequence that a model is made of."""
    if isinstance(model, Autoregressive):
        return {"w": (lambda x: model(x)[0].loc, 0)}
    if isinstance(model, VRNN):
        torch.manual_seed(3)
        u = torch.rand(1, 6, model.config.latents, model.config.classes)

        def path(x):
            return model(x, lambda t, q_z: q_z.rsample(u[:, t, None]))

        return {
            "posterior": (lambda x: path(x).q_z.logits, 1),
            "prior": (lambda x: path(x).p_z.logits, 0),
        }
    return {
        "posterior": (lambda x: model.posterior(x)[0].logits, 1),
        "partial posterior": (lambda x: model.partial_posterior(x)[0].logits, 1),
    }


def jacobian_over_time(function, x):
    """|d output_t / d input_s| summed over features: (T, T)."""
    length = x.shape[1]
    jacobian = torch.autograd.functional.jacobian(
        lambda x: function(x).reshape(length, -1).sum(1), x
    )
    return jacobian.reshape(length, length, -1).abs().sum(2)


@pytest.mark.parametrize("kind", KINDS)
def test_causality_by_jacobian(kind):
    model = small_model(kind)
    x = torch.randn(1, 6, 3)
    for name, (function, reach) in pieces(model).items():
        jacobian = jacobian_over_time(function, x)
        assert torch.equal(jacobian.triu(reach), torch.zeros(6, 6)), f"{name} looks ahead"
        past = torch.ones(6, 6).tril(reach - 1).bool()
        assert (jacobian[past] > 0).all(), f"{name} forgets its past"


@pytest.mark.parametrize("kind", ["tvae", "vssm"])
def test_decoder_is_causal(kind):
    model = small_model(kind)
    z = torch.randn(1, 6, 3, 4)
    jacobian = jacobian_over_time(lambda z: model.likelihood(z)[0].loc, z)
    assert torch.equal(jacobian.triu(1), torch.zeros(6, 6))
    assert (jacobian[torch.ones(6, 6).tril().bool()] > 0).all()


@pytest.mark.parametrize("kind", ["tvae", "vssm"])
@pytest.mark.parametrize("cut", [0, 1, 4, 6])
def test_partial_posterior_does_not_see_past_the_cut(kind, cut):
    model = small_model(kind)
    x, other = torch.randn(2, 6, 3), torch.randn(2, 6, 3)
    other[:, :cut] = x[:, :cut]
    cuts = torch.tensor([cut, cut])
    logits = model.partial_posterior(x, cut=cuts)[0].logits
    assert torch.equal(logits, model.partial_posterior(other, cut=cuts)[0].logits)
    prompt = x[:, :cut] if cut else None
    again = model.partial_posterior(prompt, empty=6 - cut)[0].logits
    assert relative_error(again.expand_as(logits), logits) < 1e-6
    if cut < 6:
        assert relative_error(model.partial_posterior(x)[0].logits, logits) > 1e-3, (
            "the cut hides something"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_row_alone_equals_row_in_batch(kind):
    model = small_model(kind)
    x = sequences(model, 4, 6)
    for function in (pieces(model)[name][0] for name in pieces(model) if kind != "vrnn"):
        assert relative_error(function(x[2:3]), function(x)[2:3]) < 1e-5
    alone = generate(model, length=5, prompt=x[2:3], seed=5, rows=[2]).x
    assert relative_error(alone, generate(model, length=5, prompt=x, seed=5).x[2:3]) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_state_carries_gradients(kind):
    model = small_model(kind)
    x = torch.randn(2, 6, 3, requires_grad=True)
    u = torch.rand(2, 6, 3, 4)
    if isinstance(model, Autoregressive):
        _, state = model(x[:, :3])
        y = model(x[:, 3:].detach(), state)[0].loc
    elif isinstance(model, Variational):
        _, state = model.posterior(x[:, :3])
        y = model.posterior(x[:, 3:].detach(), state)[0].logits
    else:
        state = model(x[:, :3], lambda t, q_z: q_z.rsample(u[:, t, None])).state
        y = model(x[:, 3:].detach(), lambda t, q_z: q_z.rsample(u[:, t, None]), state).q_z.logits
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert (grad[:, :3].abs().sum((0, 2)) > 0).all()


def test_paper_scale_sizes():
    """The paper: 4 layers of width 1024, state 16, 8 heads; the vssm is three such stacks."""
    with torch.device("meta"):
        counts = {
            kind: sum(p.numel() for p in build(ModelConfig(kind=kind, features=28)).parameters())
            for kind in KINDS
        }
    assert 25e6 < counts["ssm"] < 28e6
    assert 75e6 < counts["vssm"] < 85e6
    assert counts["transformer"] < counts["tvae"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "vsm"}, "kind='vsm' is unknown; choose from .*did you mean 'vssm'"),
        ({"head": "gausian"}, "head='gausian' is unknown; choose from .*did you mean 'gaussian'"),
        ({"features": 0}, "features is 0; it must be a whole number >= 1"),
        (
            {"width": 10**12},
            "width is 1000000000000; it must be a whole number >= 1 and < 10000000",
        ),
        (
            {"classes": 10**18},
            f"classes is {10**18}; it must be a whole number >= 2 and < 10000000",
        ),
        (
            {"levels": 2, "spans": (10**18, 1)},
            "spans is .* one whole number >= 1 and < 10000000 for each level",
        ),
        ({"width": -4}, "width is -4"),
        ({"layers": 0}, "layers is 0"),
        ({"state_size": 0}, "state_size is 0"),
        ({"latents": 0}, "latents is 0"),
        ({"classes": 1}, "classes is 1; it must be a whole number >= 2"),
        ({"width": 2.5}, "width is 2.5"),
        ({"layers": True}, "layers is True"),
        ({"sigma": 0.0}, "sigma is 0.0"),
        ({"sigma": float("nan")}, "sigma is nan"),
        ({"kind": "transformer", "width": 18, "heads": 4}, "width=18 is not divisible by heads=4"),
    ],
)
def test_config_names_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        small_config(**{"kind": "vssm", **options})


def test_config_names_unknown_keys():
    with pytest.raises(ValueError, match=r"config has no field 'depth'; choose from .*layers"):
        ModelConfig.from_dict({"features": 3, "depth": 4})
    with pytest.raises(ValueError, match="no key 'features'"):
        ModelConfig.from_dict({"kind": "vssm"})
