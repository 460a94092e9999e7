"""Cases that are easily forgotten: half precision, no steps, no rows, unusual number types."""

import copy
import inspect
import itertools
import json
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch

import vssm
from tests.conftest import KINDS, relative_error, sequences, small_model
from tests.tiny_runs import tiny
from vssm.config import RunConfig, TrainConfig
from vssm.data import ArraysConfig, DataConfig, open_data
from vssm.evaluation.scores import EvaluateOptions, evaluate_run
from vssm.likelihoods import reconstruct
from vssm.sampling.ragged import generate_ragged
from vssm.training.loop import train

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
    ways = [
        {"num": 2},
        {"prompt": x},
        {"prompt": x[:1], "num": 2},
        {"state": vssm.observe(model, x)},
    ]
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
def test_a_state_of_any_precision_is_gone_on_from(kind, levels, head):
    half, whole = half_and_whole(kind, levels, head)
    x = sequences(half, 2, 7)
    ways = [(half, False), (whole, False), (whole, True), (copy.deepcopy(whole).double(), False)]
    for before, after in itertools.product(ways, ways):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=before[1]):
            state = vssm.observe(before[0], x)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=after[1]):
            made = vssm.generate(after[0], length=3, state=state)
            assert vssm.observe(after[0], x, state).position == 14
        assert made.x.isfinite().all() and made.state.position == 10
    own = vssm.observe(whole, x)
    wide = own.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    given, expected = (vssm.generate(whole, length=3, state=state).x for state in (wide, own))
    assert torch.allclose(given, expected, atol=1e-5)


@pytest.mark.parametrize("head", ["gaussian", "categorical"])
@pytest.mark.parametrize(("kind", "levels"), MODELS)
def test_nothing_is_refused_or_gives_nothing(kind, levels, head):
    model = small_model(kind, head, levels=levels, latents=4)
    x = sequences(model, 2, 7)
    for function in (vssm.objective, vssm.log_likelihood, vssm.observe):
        with pytest.raises(
            ValueError, match=r"^x has shape \(2, 0.*\), no steps; it must have one step or more$"
        ):
            function(model, x[:, :0])
        with pytest.raises(
            ValueError, match=r"^x has shape \(0, 7.*\), no sequences; it must have one seq"
        ):
            function(model, x[:0])
    with pytest.raises(
        ValueError, match=r"^prompt has shape \(0, 7.*\), no sequences; it must have one seq"
    ):
        vssm.generate(model, length=3, prompt=x[:0])
    with pytest.raises(ValueError, match=r"^state has 0 rows; it must have 1 or more$"):
        vssm.generate(model, length=3, state=vssm.observe(model, x).select([]))
    with pytest.raises(ValueError, match=r"^num is 0; it must be a whole number >= 1$"):
        vssm.generate(model, num=0, length=3)

    from_nothing = vssm.generate(model, num=2, length=3)
    for way in ({"prompt": x[:, :0]}, {"state": vssm.generate(model, num=2, length=0).state}):
        assert torch.equal(vssm.generate(model, length=3, **way).x, from_nothing.x)
    made = [vssm.generate(model, length=0, prompt=x[:, :steps]) for steps in (7, 0)]
    made.append(generate_ragged(model, [x[0], x[1, :2]], 0))
    assert all(a.x.shape == b.x.shape and a.x.shape[:2] == (2, 0) for a, b in pairwise(made))


@pytest.mark.parametrize(("kind", "levels"), MODELS)
def test_whole_numbers_of_numpy_and_torch_are_whole_numbers(kind, levels):
    model = small_model(kind, levels=levels, latents=4)
    x = sequences(model, 2, 5)
    expected = vssm.generate(model, num=2, length=3, seed=7).x
    for number in (np.int64, np.int32, torch.tensor):
        options = {"num": number(2), "length": number(3), "seed": number(7)}
        assert torch.equal(vssm.generate(model, **options).x, expected)
        nats = vssm.log_likelihood(model, x, number(3), prompt_length=number(2), seed=number(7))
        assert torch.equal(nats, vssm.log_likelihood(model, x, 3, prompt_length=2, seed=7))


def test_numbers_of_numpy_are_those_of_python_in_a_config():
    sizes = {
        "features": np.int64(3),
        "width": np.uint8(16),
        "levels": np.int32(2),
        "latents": np.uint64(4),
    }
    config = vssm.ModelConfig(**sizes, spans=(np.int64(4), 1), sigma=np.float32(0.2))
    run = RunConfig(model=config, train=TrainConfig(epochs=np.int32(2), clip=np.float16(0.5)))
    plain = json.loads(json.dumps(run.to_dict()))
    assert plain["model"]["spans"] == [4, 1] and plain["train"]["epochs"] == 2
    assert type(config.features) is int and type(config.sigma) is float
    assert RunConfig.from_dict(plain) == run
    for wrong in (
        {"features": np.float32(3)},
        {"features": np.bool_(True)},
        {"features": np.int64(0)},
    ):
        with pytest.raises(
            ValueError, match=r"^features is .*; it must be a whole number >= 1 and"
        ):
            vssm.ModelConfig(**wrong)
    for wrong in (np.float32("nan"), np.bool_(True)):
        with pytest.raises(
            ValueError, match=r"^sigma is .*; it must be a number >= 1e-06 and < 10"
        ):
            vssm.ModelConfig(features=3, sigma=wrong)


def test_a_sigma_whose_square_float32_loses_is_refused():
    for sigma in (0, 1e-30, 9.9e-7, -1, 1e6, "0.1"):
        with pytest.raises(
            ValueError, match=r"^sigma is .*; it must be a number >= 1e-06 and < 1000000$"
        ):
            vssm.ModelConfig(features=3, sigma=sigma)
    model = small_model("vssm", sigma=1e-6)
    assert vssm.objective(model, torch.full((1, 2, 3), 1e3)).loss.isfinite().all()


@pytest.mark.parametrize("weight", [np.float32(0.5), np.float64(0.5), np.int64(2)])
def test_a_weight_of_the_kl_may_be_of_numpy(weight):
    model = small_model("vssm")
    x = sequences(model, 2, 5)
    given, expected = (
        vssm.objective(model, x, torch.Generator().manual_seed(0), kl_weight=w).loss
        for w in (weight, float(weight))
    )
    assert torch.equal(given, expected) and given.requires_grad


@pytest.mark.parametrize(("kind", "levels"), [("vssm", 1), ("ssm", 1)])
def test_seeds_of_numpy_are_those_of_python(kind, levels):
    model = small_model(kind, levels=levels)
    expected = vssm.generate(model, length=3, seed=5, observe="sample").x
    for dtype in (np.uint64, np.uint32, np.uint16, np.int8, np.int64):
        assert torch.equal(
            vssm.generate(model, length=3, seed=dtype(5), observe="sample").x, expected
        )
    with pytest.raises(ValueError, match=r"^seed is 18446744073709551615; it must be a 64-bit"):
        vssm.generate(model, length=3, seed=np.uint64(2**64 - 1))


@pytest.mark.parametrize(("kind", "levels"), MODELS)
def test_numbers_that_do_not_fit_are_named(kind, levels):
    model = small_model(kind, levels=levels, latents=4)
    x = sequences(model, 2, 5)
    for options, message in (
        ({"num": 2.5}, r"num is 2.5; it must be a whole number >= 1"),
        ({"num": True}, r"num is True; it must be"),
        ({"length": "3"}, r"length is '3'; it must be a whole number >= 0"),
        ({"seed": 1.5}, r"seed has type float32; it must hold 64-bit whole"),
        ({"seed": torch.tensor([1.5])}, r"seed has type float32; it must hold 64-bit whole"),
        ({"seed": "a"}, r"seed has type str; it must hold 64-bit whole"),
        ({"seed": [2**64]}, r"seed has type list; it must hold 64-bit whole numbers"),
        ({"rows": [0.5]}, r"rows has type float32; it must hold 64-bit whole"),
        ({"temperature": "warm"}, r"temperature is 'warm'; it must be a number"),
        ({"temperature": 1e-300}, r"temperature is 1e-300; .* from 1e-30 to 1e6"),
        (
            {"prompt": x.double() * 1e300},
            r"prompt is .* at row 0, step 0; use finite numbers up to 1e",
        ),
        ({"prompt": x.to_sparse()}, r"prompt has layout sparse_coo.*; it must be dense"),
    ):
        with pytest.raises(ValueError, match=message):
            vssm.generate(model, **{"length": 2, **options})
    for options, message in (
        ({"num_samples": 2.5}, r"num_samples is 2.5; it must be a whole number >= 1"),
        ({"prompt_length": 1.5}, r"prompt_length is 1.5; it must be a whole number >= 0"),
        (
            {"seed": 2**64},
            r"seed is 18446744073709551616; it must be a whole number",
        ),
        ({"seed": None}, r"seed is None; it must be"),
    ):
        with pytest.raises(ValueError, match=message):
            vssm.log_likelihood(model, x, **options)
    for score in (vssm.objective, vssm.log_likelihood):
        for wrong, message in (
            (x.numpy(), "x has type ndarray; it must be a torch tensor"),
            (x.to("meta"), "x is on meta; move it to cpu"),
            (x * 1e25, "x is .* at row 0, step 0; use finite numbers up to 1e"),
        ):
            with pytest.raises(ValueError, match=message):
                score(model, wrong)
    for shard in (1, (0.0, 2), (2, 2)):
        with pytest.raises(ValueError, match=r"shard is .*; it must be \(index, count\)"):
            vssm.objective(model, x, shard=shard)


@pytest.mark.parametrize(("kind", "levels"), MODELS)
def test_tokens_of_any_integer_dtype_are_the_same_tokens(kind, levels):
    model = small_model(kind, "categorical", levels=levels, latents=4)
    x = sequences(model, 2, 5)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32):
        small = x.to(dtype)
        assert torch.equal(vssm.log_likelihood(model, small, 3), vssm.log_likelihood(model, x, 3))
        assert torch.equal(
            vssm.generate(model, length=3, prompt=small).x,
            vssm.generate(model, length=3, prompt=x).x,
        )
        losses = [
            vssm.objective(model, t, torch.Generator().manual_seed(0)).loss for t in (small, x)
        ]
        assert torch.equal(*losses)
        assert generate_ragged(model, [small[0], small[1, :2]], 3).x.shape == (2, 3)


@pytest.mark.parametrize(("kind", "levels"), MODELS)
def test_ragged_prompts_are_checked_as_others_are(kind, levels):
    model = small_model(kind, levels=levels, latents=4)
    prompts = [sequences(model, 1, steps)[0] for steps in (4, 2)]
    for arguments, options, message in (
        ((prompts, -1), {}, "length is -1; it must be a whole number >= 0"),
        ((prompts, 3), {"seed": 2**64}, "seed is 18446744073709551616"),
        ((prompts, 3), {"seed": 1.5}, "seed has type float32; it must hold 64-bit whole"),
        (
            ([prompt.numpy() for prompt in prompts], 3),
            {},
            "sequences is .*; it must be a list of one tensor",
        ),
        (([torch.tensor(1.0)], 3), {}, "sequences is .*; it must be a list of one tensor"),
        (([prompt.to("meta") for prompt in prompts], 3), {}, "prompts is on meta; move it to cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            generate_ragged(model, *arguments, **options)
    batch = torch.stack([prompts[0], prompts[0]])
    plain = generate_ragged(model, batch, 3).x
    assert torch.equal(plain, generate_ragged(model, list(batch), 3, seed=np.int64(0)).x)


def test_a_mask_or_a_fraction_selects_no_rows():
    state = vssm.State({"h": torch.arange(3.0)[:, None]}, position=1)
    for index, dtype in ((torch.tensor([True, False, True]), "bool"), ([0.5], "float32")):
        with pytest.raises(ValueError, match=f"index has type {dtype}; it must hold 64-bit"):
            state.select(index)
    assert state.select(range(2)).batch == 2
    with pytest.raises(ValueError, match=r"times is 1.5; it must be a whole number >= 1"):
        state.repeat(1.5)


def test_what_is_nothing_of_the_kind_is_refused_in_a_line(tmp_path):
    state = vssm.State({"h": torch.zeros(2, 3)})
    (tmp_path / "config.json").write_text('{"my": "precious"}')
    for call, message in (
        (
            lambda: state.expand(3),
            "num=3 does not fit 2 rows; use a state of one row",
        ),
        (lambda: vssm.State.cat(["a"]), "states is .*; it must be a list of one State"),
        (lambda: vssm.State.cat([None]), "states is .*; it must be a list of one State"),
        (
            lambda: vssm.State.cat([state, torch.zeros(2)]),
            "states is .*; it must be a list of one State",
        ),
        (lambda: open_data("digits"), "config='digits' is not a DataConfig; use DataConfig"),
        (
            lambda: RunConfig.from_dict("a"),
            "config is 'a'; it must be a dictionary of the fields of RunConfig",
        ),
        (lambda: vssm.save(small_model("ssm"), tmp_path), "has a config.json of another program"),
        (
            lambda: open_data(DataConfig(name="arrays", arrays=ArraysConfig(path=str(tmp_path)))),
            "is a folder; use a file",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert (tmp_path / "config.json").read_text() == '{"my": "precious"}'


# Of every public function, arguments that are right; each in turn is replaced by what is nothing of
# the kind.
FUNCTIONS = {
    "objective": lambda model, folder: (
        vssm.objective,
        {"model": model, "x": sequences(model, 2, 5)},
    ),
    "log_likelihood": lambda model, folder: (
        vssm.log_likelihood,
        {"model": model, "x": sequences(model, 2, 5)},
    ),
    "generate": lambda model, folder: (vssm.generate, {"model": model}),
    "observe": lambda model, folder: (vssm.observe, {"model": model, "x": sequences(model, 2, 5)}),
    "build": lambda model, folder: (vssm.build, {"config": model.config}),
    "save": lambda model, folder: (vssm.save, {"model": model, "folder": folder}),
    "load": lambda model, folder: (vssm.load, {"folder": folder}),
    "train": lambda model, folder: (train, {"config": tiny(), "folder": folder}),
    "evaluate_run": lambda model, folder: (evaluate_run, {"folder": folder}),
}
ODD = (object(), b"a", {"a": 1}, 3 + 4j, np.full((2, 2), "a"), "?")


@pytest.mark.parametrize(
    ("name", "kind", "levels"),
    [(name, "ssm", 1) for name in FUNCTIONS]
    + [
        (name, *model)
        for name in list(FUNCTIONS)[:4]
        for model in [("vrnn", 1), ("vssm", 1), ("vssm", 2)]
    ],
)
def test_arguments_of_another_kind_are_named_in_one_line(name, kind, levels, tmp_path):
    folder = tmp_path / "folder"
    function, right = FUNCTIONS[name](small_model(kind, levels=levels, latents=4), folder)
    names = {*right, *inspect.signature(function).parameters}
    if "options" in names:  # those of evaluate_run are the fields of a dataclass
        names = names - {"options"} | {field.name for field in fields(EvaluateOptions)}
    for argument in names:
        paths = argument in ("folder", "classifier", "data_dir")
        for odd in ODD[:-1] if paths else ODD:  # any word could be a path
            with pytest.raises(ValueError, match=r"allowed: |; (use|it must|choose) ") as error:
                function(**{**right, argument: odd})
            assert argument in str(error.value) and "\n" not in str(error.value)
    assert not folder.exists()


@pytest.mark.parametrize(("kind", "levels"), MODELS)
def test_weights_of_the_kl_are_numbers_or_one_for_each_row(kind, levels):
    model = small_model(kind, levels=levels, latents=4)
    x = sequences(model, 2, 5)

    def loss(weight):
        return vssm.objective(model, x, torch.Generator().manual_seed(0), kl_weight=weight).loss

    assert torch.equal(loss(0.5), loss(torch.tensor(0.5)))
    assert torch.equal(loss(torch.tensor([1.0, 0.5])), torch.stack([loss(1)[0], loss(0.5)[1]]))
    for weight in (-1, float("nan"), float("inf"), True):
        with pytest.raises(ValueError, match=r"kl_weight is .*; it must be a number >= 0"):
            loss(weight)
    for weight in (torch.ones(3), torch.ones(2, 1), torch.tensor(1)):
        with pytest.raises(
            ValueError, match=r"kl_weight has shape .*; it must be a number >= 0, or 2 floats"
        ):
            loss(weight)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_that_are_not_finite_are_refused(bad, dtype, tmp_path):
    state = vssm.State(
        {"layer": vssm.State({"h": torch.zeros(2, 3, dtype=dtype)}), "row": torch.arange(2)}
    )
    state.save(tmp_path / "state")
    assert vssm.State.load(tmp_path / "state").batch == 2
    state.child("layer")["h"][1, 2] = bad
    state.save(tmp_path / "state")
    with pytest.raises(
        ValueError, match=r"state' holds NaN or infinity in 'layer/h'; resume from a finite"
    ):
        vssm.State.load(tmp_path / "state")
    with pytest.raises(ValueError, match=r"^state holds NaN or infinity in 'layer/h'"):
        vssm.State.from_bytes(state.to_bytes())
