"""Muon: which weights it moves and how far, compared with PyTorch's own; trainings with it."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import KINDS, relative_error, small_model
from tests.tiny_runs import log, newest, result, run, stopped, tiny
from vssm.config import PRESETS, RunConfig, TrainConfig
from vssm.lab.reproduce import difference
from vssm.models import build
from vssm.objectives import Terms, objective
from vssm.training.distributed import World
from vssm.training.muon import Muon, block_matrices, orthogonalize
from vssm.training.step import Learner, learning_rate, parameter_groups

SHAPES = [
    (12, 40),
    (40, 12),
    (16, 16),
    (9, 32),
    (32, 1),
]  # wide, tall, square, as x_proj, as dt_proj
MATRICES = {
    "attention": {"c_attn.weight", "c_proj.weight", "mlp_c_fc.weight", "mlp_c_proj.weight"},
    "mamba": {f"mixer.{name}.weight" for name in ("in_proj", "x_proj", "dt_proj", "out_proj")},
    "gru": {"gru.weight_ih_l0", "gru.weight_hh_l0"},
}


def weights(shapes=SHAPES, copies=2, dtype=torch.float32):
    return [
        torch.nn.Parameter(torch.randn(shape, dtype=dtype))
        for shape in shapes
        for _ in range(copies)
    ]


def step(optimizer, parameters):
    """A step with gradients whose directions are of very different sizes."""
    for parameter in parameters:
        sizes = torch.logspace(0, -2, parameter.shape[1], dtype=parameter.dtype)
        parameter.grad = torch.randn_like(parameter) * sizes
    optimizer.step()


def snapshot(optimizer, parameters):
    return [(p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()) for p in parameters]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
@pytest.mark.parametrize("shape", SHAPES)
def test_moves_as_that_of_pytorch(shape):
    """To within the bfloat16 that PyTorch's products have everywhere."""
    ours = weights([shape], copies=3)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    starts = [p.detach().clone() for p in ours]
    own = Muon(ours, 0.1, weight_decay=0.3)
    other = torch.optim.Muon(theirs, 0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        step(own, ours)
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.clone()
        other.step()
    for p, q, start in zip(ours, theirs, starts, strict=True):
        assert relative_error(p - start, q - start) < 0.03
        assert torch.allclose(own.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"])


@pytest.mark.parametrize("shape", SHAPES)
def test_moves_as_the_formulae_say(shape):
    """In float64, one matrix after another, through the singular values alone."""
    parameters = weights([shape], dtype=torch.float64)
    expected = [p.detach().clone() for p in parameters]
    momenta = [torch.zeros_like(p) for p in expected]
    optimizer = Muon(parameters, 0.1, momentum=0.9, weight_decay=0.3)
    for _ in range(3):
        step(optimizer, parameters)
        for i, p in enumerate(parameters):
            momenta[i] = 0.9 * momenta[i] + 0.1 * p.grad
            left, values, right = torch.linalg.svd(
                0.1 * p.grad + 0.9 * momenta[i], full_matrices=False
            )
            values = values / values.norm()
            for _ in range(5):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            move = 0.1 * 0.2 * math.sqrt(max(shape)) * left @ values.diag() @ right
            expected[i] = expected[i] * (1 - 0.1 * 0.3) - move
    for p, value in zip(parameters, expected, strict=True):
        assert relative_error(p, value) < 1e-9


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_are_near_one(shape):
    x = torch.randn(3, *shape) * torch.tensor([1e-6, 1.0, 1e6])[:, None, None]
    values = torch.linalg.svdvals(orthogonalize(x))
    assert values.shape == (3, min(shape))
    assert values.min() > 0.6
    assert values.max() < 1.25
    assert (
        torch.linalg.svdvals(x[1] / x[1].norm()).min() < 0.6 or min(shape) == 1
    )  # they were not before


def test_updates_are_of_the_size_of_those_of_adamw():
    for shape in ((64, 256), (256, 64), (96, 96)):
        parameter = torch.nn.Parameter(torch.zeros(shape))
        step(Muon([parameter], 1.0), [parameter])
        assert 0.15 < parameter.detach().square().mean().sqrt() < 0.25


def test_the_rate_may_be_a_tensor():
    one, other = weights(), weights()
    for p, q in zip(one, other, strict=True):
        q.data.copy_(p)
    rate = torch.zeros(())
    fixed, moving = Muon(one, 0.0, weight_decay=0.1), Muon(other, rate, weight_decay=0.1)
    for value in (0.1, 0.02):
        fixed.param_groups[0]["lr"] = value
        rate.fill_(value)
        state = torch.get_rng_state()
        step(fixed, one)
        torch.set_rng_state(state)
        step(moving, other)
    for p, q in zip(one, other, strict=True):
        assert relative_error(q, p) < 1e-6


def test_what_has_no_gradient_stays():
    first, second = weights([(4, 6)])
    optimizer = Muon([first, second], 0.1, weight_decay=0.5)
    before = snapshot(optimizer, [first, second])
    first.grad = torch.randn(4, 6)
    optimizer.step()
    assert not torch.equal(first, before[0][0])
    assert torch.equal(second, before[1][0])
    assert not optimizer.state[second]["momentum_buffer"].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(value):
    parameters = weights()
    optimizer = Muon(parameters, 0.1, weight_decay=0.1)
    optimizer.found_inf = torch.zeros(())
    step(optimizer, parameters)
    before = snapshot(optimizer, parameters)
    optimizer.found_inf = torch.ones(())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    for one, other in zip(before, snapshot(optimizer, parameters), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    optimizer.found_inf = torch.zeros(())
    step(optimizer, parameters)
    for (weight, moment), (then, later) in zip(
        before, snapshot(optimizer, parameters), strict=True
    ):
        assert not torch.equal(weight, then)
        assert not torch.equal(moment, later)


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_of_blocks_go_to_muon_and_all_else_to_adamw(kind):
    model = small_model(kind)
    adamw, muon = Learner(
        model, TrainConfig(optimizer="muon"), World(torch.device("cpu"))
    ).optimizers
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    moved, others = (
        [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        for optimizer in (muon, adamw)
    )
    assert sorted([*moved, *others]) == sorted(names.values())
    stacks = {"tvae": ("encoder", "partial", "decoder"), "vssm": ("encoder", "partial", "decoder")}
    assert sorted(moved) == sorted(
        f"{stack}.blocks.{i}.{name}"
        for stack in stacks.get(kind, ("stack",))
        for i in range(2)
        for name in MATRICES[model.config.block]
    )
    assert {group["weight_decay"] for group in muon.param_groups} == {0.01}
    (only,) = Learner(model, TrainConfig(), World(torch.device("cpu"))).optimizers
    assert sum(len(group["params"]) for group in only.param_groups) == len(names)


def test_muon_moves_the_blocks_of_levels():
    """The preset "best" has 8 levels with a block each, 4 blocks that read x and 2 that decode."""
    with torch.device("meta"):
        model = build(replace(PRESETS["best"].model, head="gaussian"))
    expected = [f"rungs.{i}.block" for i in range(8)]
    expected += [f"evidence.blocks.{i}" for i in range(4)] + [
        f"decoder.blocks.{i}" for i in range(2)
    ]
    assert sorted(block_matrices(model)) == sorted(
        f"{b}.{m}" for b in expected for m in MATRICES["mamba"]
    )
    assert len(block_matrices(model)) == 56


def test_both_have_the_rate_of_the_step():
    options = TrainConfig(optimizer="muon", warmup=0.5)
    learner = Learner(small_model("rnn"), options, World(torch.device("cpu")))
    for now in (1, 7):
        learner.begin(now, 10)
        rates = [
            group["lr"] for optimizer in learner.optimizers for group in optimizer.param_groups
        ]
        assert rates == [learning_rate(options, now, 10)] * 3


@pytest.mark.parametrize("kind", ["tvae", "vrnn", "vssm"])
def test_every_block_learns_with_it(kind, tmp_path):
    config = tiny(kind, epochs=8, optimizer="muon", checkpoint_minutes=9)
    lines = log(run(config, tmp_path / "run"), "valid")
    assert lines[-1]["loss"] < lines[0]["loss"] - 1


@pytest.mark.parametrize(("kind", "options"), [("rnn", {"log_every": 2}), ("vssm", {"ema": 0.8})])
def test_stop_and_resume_equals_unbroken(kind, options, tmp_path):
    config = tiny(kind, optimizer="muon", **options)
    whole = run(config, tmp_path / "whole")
    folder = stopped(config, tmp_path / "parts", 5)
    assert result(run(None, folder, resume=True)) == result(whole)
    state = load_file(newest(folder) / "optimizer.safetensors")
    model = small_model(kind, width=8, layers=1)
    matrices = set(block_matrices(model))
    assert {
        name.removesuffix(".momentum_buffer") for name in state if "momentum" in name
    } == matrices
    assert {name.removesuffix(".exp_avg") for name in state if name.endswith(".exp_avg")} == {
        name for name, _ in model.named_parameters() if name not in matrices
    }


def test_momentum_is_taken_up(tmp_path):
    """Without it what follows is another run."""
    learner, fresh = (
        Learner(small_model("ssm"), TrainConfig(optimizer="muon"), World(torch.device("cpu")))
        for _ in range(2)
    )
    loss = sum(parameter.square().sum() for parameter in learner.parameters.values())
    learner.begin(1, 10)
    learner.differentiate(loss, 1)
    learner.update(torch.tensor(True))
    saved = learner.tensors()["optimizer"]
    fresh.restore(learner.tensors(), "there")
    taken_up = fresh.tensors()["optimizer"]
    assert all(torch.equal(value, saved[name]) for name, value in taken_up.items())
    assert any(v.any() for name, v in taken_up.items() if name.endswith("momentum_buffer"))


@pytest.mark.parametrize(("begun", "resumed"), [("adamw", "muon"), ("muon", "adamw")])
def test_another_optimizer_on_resume_is_refused(begun, resumed, tmp_path):
    folder = stopped(tiny(optimizer=begun), tmp_path / "run", 2)
    message = f"^train.optimizer='{resumed}' differs from '{begun}' of the run in "
    with pytest.raises(ValueError, match=message):
        run(tiny(optimizer=resumed), folder, resume=True)


def test_runs_without_the_option_continue_with_adamw(tmp_path):
    """Older versions had AdamW alone, and did not write which optimiser they used."""
    whole = run(tiny(), tmp_path / "whole")
    folder = stopped(tiny(), tmp_path / "run", 5)
    values = json.loads((folder / "config.json").read_text())
    del values["train"]["optimizer"]
    (folder / "config.json").write_text(json.dumps(values))
    assert result(run(None, folder, resume=True)) == result(whole)
    values = RunConfig().to_dict()
    del values["train"]["optimizer"]
    assert RunConfig.from_dict(values) == RunConfig()


def test_results_from_before_there_was_a_choice_are_of_adamw(tmp_path):
    values, path = RunConfig().to_dict(), tmp_path / "result.json"
    del values["train"]["optimizer"]
    envelope = dict.fromkeys(("name", "date", "command", "machine"))
    made = {**envelope, "config": values, "metrics": {"validation_loss": 1.0}}
    path.write_text(json.dumps(made))
    assert difference(path, RunConfig(), "validation_loss") is None
    other = difference(path, RunConfig(train=TrainConfig(optimizer="muon")), "validation_loss")
    assert other == f"train.optimizer='muon' differs from 'adamw' of {str(path)!r}"


@pytest.mark.parametrize("term", ["reconstruction", "gradient_norm"])
def test_bad_steps_of_a_training_leave_weights_and_momentum(term, tmp_path, monkeypatch):
    """A run whose fourth and last step is bad ends with what it had after the third."""
    taken = 0

    def poisoned(model, x, *rest):
        nonlocal taken
        terms = objective(model, x, *rest)
        taken += torch.is_grad_enabled()
        if not torch.is_grad_enabled() or taken <= 3:
            return terms
        slope = (terms.loss - terms.loss.detach()).sqrt()  # finite, with an infinite gradient
        return terms._replace(
            loss=terms.loss + slope if term == "gradient_norm" else terms.loss * math.nan
        )

    monkeypatch.setattr("vssm.training.step.objective", poisoned)
    folder = run(tiny("ssm", max_steps=4, optimizer="muon"), tmp_path / "run")
    assert log(folder, "train")[-1]["skipped"] == 1
    before, after = sorted((folder / "checkpoint").glob("step-????????"))  # of the last two steps
    for name in ("weights.safetensors", "optimizer.safetensors"):
        ours, theirs = load_file(before / name), load_file(after / name)
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())
        assert all(tensor.isfinite().all() for tensor in theirs.values())


def test_decay_reaches_what_adamw_lets_decay(tmp_path, monkeypatch):
    """With terms that are constants only the decay is left."""

    def constant(model, x, *_):
        zero = sum((parameter * 0).sum() for parameter in model.parameters()).expand(len(x))
        return Terms(zero, zero, zero, zero)

    monkeypatch.setattr("vssm.training.step.objective", constant)
    still, smaller = (
        run(
            tiny("ssm", max_steps=1, warmup=0.0, weight_decay=decay, optimizer="muon"),
            tmp_path / str(decay),
        )
        for decay in (0.0, 0.5)
    )
    before, after = (
        load_file(newest(folder) / "weights.safetensors") for folder in (still, smaller)
    )
    model = small_model("ssm", width=8, layers=1)
    decays = {id(parameter) for parameter in parameter_groups(model)[0]["params"]}
    for name, parameter in model.named_parameters():
        factor = 1 - 1e-2 * 0.5 if id(parameter) in decays else 1
        assert torch.allclose(after[name], before[name] * factor, rtol=1e-6)


def test_what_goes_with_it_is_named():
    with pytest.raises(
        ValueError,
        match=r"^optimizer='muon' needs whole matrices, .*; use optimizer='adamw', or fsdp=False$",
    ):
        TrainConfig(optimizer="muon", fsdp=True)
    with pytest.raises(ValueError, match=r"^optimizer='moun' is unknown; .*did you mean 'muon'"):
        TrainConfig(optimizer="moun")


@pytest.mark.gpu
def test_on_a_gpu_products_are_bfloat16_and_still_orthogonal():
    x = orthogonalize(torch.randn(2, 64, 256, device="cuda"))
    values = torch.linalg.svdvals(x.float())
    assert x.dtype == torch.bfloat16
    assert 0.6 < values.min() < values.max() < 1.25


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_step_is_the_step(kind, tmp_path):
    options = {"ema": 0.9, "device": "cuda", "precision": "float32", "optimizer": "muon"}
    plain, replayed = (
        log(run(tiny(kind, graph=graph, **options), tmp_path / str(graph)))
        for graph in (False, True)
    )
    assert len(plain) == len(replayed) > 3
    for one, other in zip(plain, replayed, strict=True):
        assert other == pytest.approx(one, rel=1e-3)
