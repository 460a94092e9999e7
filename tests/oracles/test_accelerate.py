"""`vssm.accelerate` against transformers' own code, with the same weights."""

import copy
import subprocess
import sys

import pytest
import torch

import vssm
from tests.conftest import relative_error

transformers = pytest.importorskip("transformers", minversion="5.17")

TOLERANCE = 1e-5
KINDS = ("Mamba", "FalconMamba")


def build(kind, **options):
    """Returns a model of two layers whose weights, unlike new ones, do not hide mistakes."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    sizes["time_step_rank"] = 3  # FalconMamba's norm of a single number is its sign
    sizes["tie_word_embeddings"] = False  # tied, greedy generation repeats one token
    config = getattr(transformers, f"{kind}Config")(**sizes, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens(batch=2, length=9):
    return torch.randint(1, 11, (batch, length))


def left_padded():
    """Returns two prompts, one of which begins with three empty places, and their mask."""
    ids, mask = tokens(), torch.ones(2, 9, dtype=torch.long)
    ids[1, :3] = mask[1, :3] = 0
    return ids, mask


@pytest.mark.parametrize("options", [{}, {"use_bias": True}, {"use_conv_bias": False}])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_gradients_are_those_of_transformers(kind, options):
    model, ids = build(kind, **options).train(), tokens(length=20)

    def step():
        model.zero_grad()
        made = model(ids, labels=ids)
        made.loss.backward()
        return made, [parameter.grad.clone() for parameter in model.parameters()]

    expected, gradients = step()
    with vssm.accelerate(model):
        found, ours = step()
    assert relative_error(found.logits, expected.logits) < TOLERANCE
    assert relative_error(found.loss, expected.loss) < TOLERANCE
    for mine, theirs in zip(ours, gradients, strict=True):
        assert relative_error(mine, theirs) < 10 * TOLERANCE


def test_gradient_checkpointing():
    model, ids = build("Mamba").train(), tokens()
    model(ids, labels=ids).loss.backward()
    expected = model.backbone.layers[0].mixer.A_log.grad.clone()
    model.zero_grad()
    model.gradient_checkpointing_enable()
    with vssm.accelerate(model):
        model(ids, labels=ids).loss.backward()
    assert relative_error(model.backbone.layers[0].mixer.A_log.grad, expected) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padding_does_not_count(kind):
    model = build(kind)
    ids, mask = left_padded()
    expected = model(ids, attention_mask=mask).logits
    with vssm.accelerate(model):
        found = model(ids, attention_mask=mask).logits
        alone = model(ids[1:, 3:]).logits
    assert relative_error(found, expected) < TOLERANCE
    assert relative_error(found[1:, 3:], alone) < TOLERANCE


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_generation_gives_the_same_tokens(kind, length, options):
    model, ids = build(kind), tokens(length=length)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **options}
    expected = model.generate(ids, **options)
    assert len(expected[0].unique()) > 2  # a constant would hide mistakes
    with vssm.accelerate(model):
        assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_from_left_padded_prompts(kind):
    model = build(kind)
    ids, mask = left_padded()
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, attention_mask=mask, **options)
    with vssm.accelerate(model):
        assert torch.equal(model.generate(ids, attention_mask=mask, **options), expected)


@pytest.mark.parametrize("cut", [1, 2, 5])
@torch.no_grad()
def test_tokens_after_a_cache_continue_the_sequence(cut):
    model, ids = build("Mamba"), tokens()
    with vssm.accelerate(model):
        whole = model(ids).logits
        cache = model(ids[:, :cut], use_cache=True).cache_params
        rest = model(ids[:, cut:], cache_params=cache, use_cache=True).logits
    assert relative_error(rest, whole[:, cut:]) < TOLERANCE


@torch.no_grad()
def test_caches_are_those_of_transformers():
    """One that our kernels wrote is continued by transformers' code, and the other way round."""
    model, ids = build("Mamba"), tokens()
    whole = model(ids).logits
    with vssm.accelerate(model):
        ours = model(ids[:, :-1], use_cache=True).cache_params
    theirs = model(ids[:, :-1], use_cache=True).cache_params
    last = model(ids[:, -1:], cache_params=ours, use_cache=True).logits
    assert relative_error(last, whole[:, -1:]) < TOLERANCE
    with vssm.accelerate(model):
        last = model(ids[:, -1:], cache_params=theirs, use_cache=True).logits
    assert relative_error(last, whole[:, -1:]) < TOLERANCE


@torch.no_grad()
def test_bfloat16():
    model, ids = build("Mamba").bfloat16(), tokens()
    expected = model(ids).logits
    with vssm.accelerate(model):
        found = model(ids).logits
    assert found.dtype == expected.dtype
    assert relative_error(found, expected) < 0.03


@torch.no_grad()
def test_compiled_models_keep_one_graph():
    model, ids = build("Mamba"), tokens()
    expected = model(ids, use_cache=False).logits
    with vssm.accelerate(model):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert relative_error(compiled(ids, use_cache=False).logits, expected) < TOLERANCE


def forwards(model):
    """Returns the replaced functions: of mixers, their projections and the head."""
    mixers = [block.mixer for block in model.backbone.layers]
    layers = [layer for mixer in mixers for layer in (mixer, mixer.in_proj, mixer.out_proj)]
    return [layer.forward for layer in (*layers, model.lm_head)]


def test_undo_restores_the_model():
    model = build("Mamba")
    before = forwards(model)
    handle = vssm.accelerate(model)
    assert all(new != old for new, old in zip(forwards(model), before, strict=True))
    assert torch.equal(build("Mamba").lm_head.weight, model.lm_head.weight)
    handle.undo()
    handle.undo()
    assert forwards(model) == before
    assert not any("forward" in vars(module) for module in model.modules())


def test_errors_in_the_block_undo_it_too():
    model = build("Mamba")
    before = forwards(model)
    with pytest.raises(KeyError), vssm.accelerate(model):
        raise KeyError
    assert forwards(model) == before


def test_accelerating_twice_is_undone_once():
    model = build("Mamba")
    before = forwards(model)
    vssm.accelerate(model)
    vssm.accelerate(model).undo()
    assert forwards(model) == before


@torch.no_grad()
def test_copies_use_their_own_weights():
    model, ids = build("Mamba"), tokens()
    expected = model(ids).logits
    vssm.accelerate(model)
    copied = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.zero_()
    assert relative_error(copied(ids).logits, expected) < TOLERANCE


def test_part_of_a_larger_module():
    holder = torch.nn.ModuleDict({"text": build("Mamba").backbone})
    before = holder["text"].layers[1].mixer.forward
    vssm.accelerate(holder)
    assert holder["text"].layers[1].mixer.forward != before


def refuse(model, message):
    with pytest.raises(ValueError, match=message) as error:
        vssm.accelerate(model)
    assert "\n" not in str(error.value)


def test_other_models_are_refused():
    config = transformers.Mamba2Config(
        vocab_size=5, hidden_size=16, num_hidden_layers=1, state_size=4, num_heads=4, head_dim=8
    )
    expected = "expected a Mamba or FalconMamba of transformers"
    refuse(transformers.Mamba2Model(config), f"model is Mamba2Model; {expected}")
    refuse(vssm.build(vssm.ModelConfig(kind="ssm", features=3, width=16)), expected)
    refuse("state-spaces/mamba-130m-hf", f"model is str; {expected}")


def test_older_transformers_are_refused(monkeypatch):
    model = build("Mamba")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.16.2")
    refuse(model, r"transformers is 5\.16\.2; vssm\.accelerate needs 5\.17 or later")


def test_what_the_kernels_can_not_do_is_refused_before_anything_changes():
    refuse(build("Mamba", hidden_act="gelu"), "hidden_act is 'gelu'; .* needs 'silu'")
    model = build("Mamba")
    projection = model.backbone.layers[1].mixer.dt_proj
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)
    refuse(model, "quantised to torch.int8; .* needs floating-point weights")
    model = build("Mamba")
    model.backbone.layers[1].mixer.forward = lambda *_: None
    refuse(model, "forward was replaced already")
    assert "forward" not in vars(model.backbone.layers[0].mixer)


def test_transformers_is_imported_by_its_user_only():
    code = (
        "import sys, torch, vssm\n"
        "try:\n    vssm.accelerate(torch.nn.Linear(1, 1))\n"
        "except ValueError:\n    assert 'transformers' not in sys.modules\n"
        "else:\n    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
