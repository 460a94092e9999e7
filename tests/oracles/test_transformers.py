"""The blocks against transformers' MambaModel and GPT2Model, with the same weights."""

import pytest
import torch

from tests.conftest import relative_error
from vssm import ModelConfig
from vssm.nn import Stack

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5


def hidden(stack, e):
    """Returns what a stack computes before its output projection."""
    with torch.no_grad():
        stack.out.weight.copy_(torch.eye(len(stack.out.weight)))
        stack.out.bias.zero_()
    return stack.run(e)[0]


@pytest.mark.parametrize("length", [1, 37])
def test_mamba_equals_transformers(length):
    theirs = transformers.MambaModel(
        transformers.MambaConfig(
            vocab_size=7, hidden_size=48, num_hidden_layers=3, state_size=8, conv_kernel=4, expand=2
        )
    ).eval()
    config = ModelConfig(kind="ssm", features=48, width=48, layers=3, state_size=8)
    ours = Stack(config, torch.nn.Identity(), 48)
    weights = {
        name.replace("layers.", "blocks.").replace("norm_f.", "norm."): tensor
        for name, tensor in theirs.state_dict().items()
        if not name.startswith("embeddings.")
    }
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    assert set(missing) == {"out.weight", "out.bias"}
    assert not unexpected
    e = torch.randn(2, length, 48)
    with torch.no_grad():
        expected = theirs(inputs_embeds=e).last_hidden_state
        assert relative_error(hidden(ours, e), expected) < TOLERANCE


@pytest.mark.parametrize("length", [1, 37])
def test_attention_equals_transformers(length):
    theirs = transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=7, n_positions=64, n_embd=48, n_layer=3, n_head=4)
    ).eval()
    config = ModelConfig(kind="transformer", features=48, width=48, layers=3, heads=4)
    ours = Stack(config, torch.nn.Identity(), 48)
    ours.positional = False
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases are zero at first and would hide a mistake
            parameter.add_(0.1 * torch.randn_like(parameter))
        theirs.wpe.weight.zero_()  # positions are coded outside the block
    weights = {}
    for name, tensor in theirs.state_dict().items():
        ours_name = (
            name.replace("h.", "blocks.", 1).replace("ln_f.", "norm.").replace("attn.c_", "c_")
        )
        ours_name = ours_name.replace("mlp.c_", "mlp_c_")
        linear = "c_" in ours_name and ours_name.endswith("weight")
        weights[ours_name] = tensor.T if linear else tensor  # their linear layers are transposed
    weights = {
        name: tensor for name, tensor in weights.items() if not name.startswith(("wte", "wpe"))
    }
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    assert set(missing) == {"out.weight", "out.bias"}
    assert not unexpected
    e = torch.randn(2, length, 48)
    with torch.no_grad():
        expected = theirs(inputs_embeds=e).last_hidden_state
        assert relative_error(hidden(ours, e), expected) < TOLERANCE
