"""Fused blocks compute what plain blocks compute, in Triton's interpreter and on a GPU."""

import copy

import pytest
import torch

import vssm
from tests.conftest import KINDS, relative_error, same_results, same_states, sequences, small_model
from tests.interpreter import DEVICE, INTERPRETED, kernels, needs_interpreter, run_interpreted
from vssm import Engine, generate
from vssm.engine.fused import FusedAttention, FusedGRU, FusedMamba, PackedLinear, fuse
from vssm.nn import Linear, Stack
from vssm.ops import linear


@pytest.fixture(autouse=INTERPRETED)
def products_of_kernels(monkeypatch):
    """In the interpreter, products of a CPU run by the kernels of a GPU."""
    monkeypatch.setattr(linear, "_runs_kernels", lambda *_: True)


@needs_interpreter
def test_in_the_interpreter():
    run_interpreted(__file__)


def fused(model):
    """A frozen copy whose blocks are fused."""
    frozen = copy.deepcopy(model).requires_grad_(False)
    fuse(frozen)
    return frozen


def wide(layers):
    """The kernels need widths and ranks of step sizes that 32 divides."""
    torch.manual_seed(3)
    model = small_model("ssm", layers=layers, width=512, expand=1, features=32)
    return model.to(DEVICE)


@kernels
@torch.no_grad()
def test_a_fused_mamba_stack_equals_the_plain_one():
    plain = wide(layers=1 if INTERPRETED else 3).stack
    stack = fused(torch.nn.Sequential(plain))[0]
    assert type(stack.blocks[0]) is FusedMamba
    e, state, wanted_state = torch.randn(1, 3, 512, device=DEVICE), None, None
    for part in e.split([2, 1], 1):  # some steps, and one step after a state
        y, state = stack.run(part, state)
        wanted, wanted_state = plain.run(part, wanted_state)
        assert relative_error(y, wanted) < 1e-5
        same_states(state, wanted_state)


@kernels
@torch.no_grad()
def test_a_fused_attention_block_equals_the_plain_one():
    plain = small_model("transformer", layers=1, width=64).to(DEVICE).stack
    stack, x = fused(torch.nn.Sequential(plain))[0], torch.randn(1, 4, 64, device=DEVICE)
    first, wanted = stack.run(x[:, :3]), plain.run(x[:, :3])
    assert relative_error(first[0], wanted[0]) < 1e-5
    last, wanted = stack.run(x[:, 3:], first[1]), plain.run(x[:, 3:], wanted[1])
    assert relative_error(last[0], wanted[0]) < 1e-5
    same_states(last[1], wanted[1])


@kernels
@torch.no_grad()
def test_a_fused_gru_block_equals_the_plain_one():
    plain = small_model("rnn", width=64).to(DEVICE).stack.blocks[0]
    block = fused(torch.nn.Sequential(plain))[0]
    x, state, wanted_state = torch.randn(3, 6, 64, device=DEVICE), None, None
    for part in x.split([4, 1, 1], 1):
        y, state = block(part, state)
        wanted, wanted_state = plain(part, wanted_state)
        assert relative_error(y, wanted) < (1e-5 if DEVICE == "cpu" else 1e-3)  # cuDNN uses TF32


@pytest.mark.parametrize("kind", KINDS)
def test_all_blocks_and_layers_of_a_model_are_fused(kind):
    own = {"gru": FusedGRU, "mamba": FusedMamba, "attention": FusedAttention}
    model = fused(small_model(kind))
    blocks = [block for part in model.modules() if isinstance(part, Stack) for block in part.blocks]
    assert blocks and all(type(block) is own[model.config.block] for block in blocks)
    assert not any(type(part) is Linear for part in model.modules())


MODELS = [*({"kind": kind} for kind in KINDS), {"kind": "vssm", "levels": 3, "latents": 6}]


@pytest.mark.skipif(INTERPRETED, reason="this is about the modules, not about their kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", MODELS, ids=str)
def test_a_fused_model_generates_as_the_plain_one(options, dtype):
    model = small_model(**options).to(DEVICE, dtype)
    own, prompt = fused(model), sequences(model, 2, 3).to(DEVICE)
    assert any(isinstance(part, PackedLinear) for part in own.modules())
    tolerance = 1e-5 if dtype.itemsize > 2 else 1e-2
    for given in ({"num": 2}, {"prompt": prompt}):
        made, wanted = (generate(each, length=5, **given) for each in (own, model))
        same_results(made, wanted, tolerance)
        rests = [generate(each, length=3, state=wanted.state) for each in (own, model)]
        same_results(*rests, tolerance)
    again = copy.deepcopy(own)
    fuse(again)  # of fused blocks there is nothing to fuse
    same_results(generate(again, num=2, length=5), generate(own, num=2, length=5), 1e-12)
    if options["kind"] in ("tvae", "vssm") and "levels" not in options:
        refined = [generate(each, num=2, length=5, passes=3) for each in (own, model)]
        same_results(*refined, tolerance)


class Adapter(torch.nn.Module):
    """Takes the place of a layer and adds to its result, as adapters do."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.bias = layer, layer.bias
        self.more = torch.nn.Parameter(torch.randn(layer.out_features, device=layer.weight.device))

    def forward(self, x):
        return self.layer(x) + self.more


class Doubled(torch.nn.Module):
    """Takes the place of a norm."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return 2 * self.norm(x)


LAYERS = {
    "vssm": [
        "decoder.blocks.1.mixer.in_proj",
        "decoder.blocks.1.mixer.x_proj",
        "decoder.blocks.0.mixer.dt_proj",
        "decoder.blocks.1.mixer.out_proj",
        "decoder.out",
        "partial.out",
    ],
    "transformer": ["stack.blocks.0.c_attn", "stack.blocks.1.c_proj", "stack.blocks.0.mlp_c_fc"],
    "rnn": ["stack.out"],
}
NORMS = {
    "vssm": ["decoder.blocks.1.norm", "decoder.norm"],
    "transformer": ["stack.blocks.0.ln_1", "stack.norm"],
    "rnn": ["stack.blocks.0.norm", "stack.norm"],
}
REPLACED = [
    *((kind, name, Adapter) for kind, names in LAYERS.items() for name in names),
    *((kind, name, Doubled) for kind, names in NORMS.items() for name in names),
]


@pytest.mark.skipif(INTERPRETED, reason="this is about the modules, not about their kernels")
@pytest.mark.parametrize(("kind", "name", "make"), REPLACED)
def test_a_layer_that_was_replaced_is_called(kind, name, make):
    model = small_model(kind).to(DEVICE)
    before = generate(model, num=2, length=5, seed=1, observe="sample")
    model.set_submodule(name, make(model.get_submodule(name)))
    options = {"num": 2, "length": 5, "seed": 1, "observe": "sample"}
    wanted = generate(model, **options)
    assert relative_error(wanted.x, before.x) > 1e-4, "the adapter matters"
    same_results(generate(fused(model), **options), wanted)


HOOKED = ["decoder", "decoder.blocks.1", "decoder.blocks.1.mixer"]


@pytest.mark.skipif(INTERPRETED, reason="this is about the modules, not about their kernels")
@pytest.mark.parametrize("name", [*LAYERS["vssm"], *NORMS["vssm"], *HOOKED])
def test_a_hook_that_changes_a_result_is_called(name):
    def add(module, given, made):
        return 2 * made + 1 if isinstance(made, torch.Tensor) else (2 * made[0] + 1, made[1])

    model = small_model("vssm").to(DEVICE)
    options = {"num": 4, "length": 5, "seed": 1}
    before = generate(model, **options)
    model.get_submodule(name).register_forward_hook(add)
    wanted = generate(model, **options)
    assert relative_error(wanted.x, before.x) > 1e-4, "the hook matters"
    own = fused(model)
    same_results(generate(own, **options), wanted)
    same_results(Engine(model).generate(**options), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["vssm", "rnn"])
def test_an_engine_keeps_halves_of_weights(kind):
    """With rows and widths for which products read weights in halves."""
    model = small_model(kind, width=512).to("cuda")
    engine = Engine(model)
    sizes = {"num": 16, "length": 28} if kind == "vssm" else {"num": 400, "length": 16}
    for seed in range(4):
        made, wanted = engine.generate(seed=seed, **sizes), vssm.generate(model, seed=seed, **sizes)
        assert relative_error(made.x, wanted.x) < 1e-4
