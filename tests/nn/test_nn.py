"""Blocks and stacks are causal, differentiable and can be cut anywhere; and the State itself."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from tests.conftest import relative_error, small_config
from vssm.nn import BLOCKS, LatentEmbedding, Stack, State, reserve, trim
from vssm.ops import causal_conv_silu

KIND_OF_BLOCK = {"mamba": "ssm", "attention": "transformer", "gru": "rnn"}


def make_block(name):
    torch.manual_seed(2)
    return BLOCKS[name](small_config(KIND_OF_BLOCK[name]))


@pytest.mark.parametrize("name", BLOCKS)
@given(data=st.data())
def test_block_cut_anywhere_equals_one_call(name, data):
    block = make_block(name)
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4)) | {length})
    x = torch.randn(batch, length, 16, requires_grad=True)
    whole, last = block(x)
    loss = torch.randn_like(whole)
    (grad,) = torch.autograd.grad(
        (whole * loss).sum() + sum(leaf.square().sum() for leaf in last.leaves()),
        x,
        retain_graph=True,
    )
    parts, state, start = [], None, 0
    for cut in (c for c in cuts if c <= length):
        if cut > start:
            y, state = block(x[:, start:cut], state)
            parts.append(y)
            start = cut
    joined = torch.cat(parts, 1)
    assert relative_error(joined, whole) < 1e-5
    assert state.position == last.position == length
    for a, b in zip(state.leaves(), last.leaves(), strict=True):
        assert relative_error(a, b) < 1e-5
    (grad_cut,) = torch.autograd.grad(
        (joined * loss).sum() + sum(leaf.square().sum() for leaf in state.leaves()), x
    )
    assert relative_error(grad_cut, grad) < 1e-4


@pytest.mark.parametrize("name", BLOCKS)
def test_block_is_causal(name):
    block = make_block(name)
    x = torch.randn(1, 6, 16)
    jacobian = (
        torch.autograd.functional.jacobian(lambda x: block(x)[0].sum(2)[0], x)[:, 0].abs().sum(2)
    )
    assert torch.equal(jacobian.triu(1), torch.zeros(6, 6))
    assert (jacobian.tril() > 0)[torch.ones(6, 6).tril().bool()].all()  # and sees all of the past


@pytest.mark.parametrize("name", BLOCKS)
def test_row_alone_equals_row_in_batch(name):
    block = make_block(name)
    x = torch.randn(3, 5, 16)
    assert relative_error(block(x[1:2])[0], block(x)[0][1:2]) < 1e-6


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.data())
def test_conv_equals_torch_and_any_cut(batch, length, channels, taps, data):
    x, weight, bias = (
        torch.randn(batch, length, channels),
        torch.randn(channels, taps),
        torch.randn(channels),
    )
    expected = torch.nn.functional.conv1d(
        torch.nn.functional.pad(x.mT, (taps - 1, 0)), weight[:, None], bias, groups=channels
    ).mT
    expected = torch.nn.functional.silu(expected)
    y, last = causal_conv_silu(x, weight, bias)
    assert relative_error(y, expected) < 1e-5
    cut = data.draw(st.integers(1, length))
    head, state = causal_conv_silu(x[:, :cut], weight, bias)
    tail, state = causal_conv_silu(x[:, cut:], weight, bias, state)
    assert relative_error(torch.cat([head, tail], 1), expected) < 1e-5
    assert torch.equal(state, last)


def test_reserved_cache_is_the_same_and_keeps_old_states_usable():
    stack = Stack(small_config("transformer"), torch.nn.Linear(3, 16), 3)
    x = torch.randn(2, 9, 3)
    with torch.no_grad():
        whole, _ = stack(x)
        _, old = stack(x[:, :4])
        state = reserve(old, 5)
        steps = []
        for t in range(4, 9):
            y, state = stack(x[:, t : t + 1], state)
            steps.append(y)
        assert relative_error(torch.cat(steps, 1), whole[:, 4:]) < 1e-5
        assert trim(state).child("0")["k"].shape[2] == 9
        again, _ = stack(x[:, 4:], old)
        assert relative_error(again, whole[:, 4:]) < 1e-5


def test_latent_embedding_of_classes_equals_one_hot():
    embed = LatentEmbedding(3, 4, 16)
    z = torch.randint(0, 4, (2, 5, 3))
    one_hot = torch.nn.functional.one_hot(z, 4).float()
    assert relative_error(embed(z), embed(one_hot)) < 1e-6


def make_state():
    inner = State({"h": torch.randn(3, 4), "k": torch.randn(3, 2, 5)}, 5)
    return State({"stack": State({"0": inner}, 5), "row": torch.arange(3)}, 5, "kind=vssm")


def test_state_select_and_repeat_rebatch_every_leaf():
    state = make_state()
    picked = state.select([2, 0])
    assert picked.batch == 2
    assert torch.equal(
        picked.child("stack").child("0")["h"], state.child("stack").child("0")["h"][[2, 0]]
    )
    twice = state.repeat(2)
    assert twice.batch == 6
    assert twice["row"].unique().numel() == 6, "copies must not share their noise"
    assert torch.equal(
        twice.child("stack").child("0")["k"][::2], state.child("stack").child("0")["k"]
    )
    with pytest.raises(ValueError, match=r"index is \[3\]; it must hold rows below 3"):
        state.select([3])
    with pytest.raises(ValueError, match="times is 0"):
        state.repeat(0)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), min_size=1, max_size=12))
def test_forks_of_forks_all_have_noise_of_their_own(forks):
    """Forks rows again and again; the rows that were forked go on as well."""
    rows = State({"row": torch.arange(4)})
    asked = set()
    for parent, times in forks:
        parent %= rows.batch
        if parent not in asked:  # the same fork of the same row is the same fork
            rows = State.cat([rows, rows.select([parent]).repeat(times)])
        asked.add(parent)
    assert len(rows["row"].unique()) == rows.batch
    assert rows["row"].min() >= 0


def test_forks_of_different_rows_never_meet():
    two = State({"row": torch.arange(2)})
    some, others = two.select([0]).repeat(4)["row"], two.select([1]).repeat(2)["row"]
    assert len(torch.cat([some, others]).unique()) == 6
    assert torch.equal(two.repeat(4)["row"], torch.cat([some, two.select([1]).repeat(4)["row"]]))
    assert torch.equal(two.repeat(9)["row"].view(2, 9)[:, :4], two.repeat(4)["row"].view(2, 4))
    assert len(two.repeat(100_000)["row"].unique()) == 200_000


def test_a_fork_is_the_published_hash():
    x = (7 * 0xD1B54A32D192ED03 + 3 * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    x = x ^ x >> 31
    assert State({"row": torch.tensor([7])}).repeat(3)["row"][2] == x % 2**62 + 2**62


@pytest.mark.parametrize("index", [slice(0, 2), "01", None, [[0], [1, 2]], {0: 1}])
def test_what_is_no_row_numbers_selects_nothing(index):
    with pytest.raises(ValueError, match=r"^index (is|has type) .*; it must hold "):
        make_state().select(index)


def test_a_state_equals_itself_only():
    state = make_state()
    assert state == state and state != copy.deepcopy(state)
    assert len({state, state, copy.deepcopy(state)}) == 2


def test_state_detach_cuts_the_graph():
    state = State({"h": torch.ones(1, 2, requires_grad=True) * 2}, 1)
    assert state["h"].requires_grad
    assert not state.detach()["h"].requires_grad


@pytest.mark.parametrize("other", [torch.float64, "gpus", "meta", None, torch.ones(1)])
def test_a_state_moves_to_a_device_only(other):
    state = make_state()
    for move in (state.to, lambda device: State.from_bytes(state.to_bytes(), device)):
        with pytest.raises(ValueError, match=r"^device='.*' is not available here; choose [^\n]*$"):
            move(other)
    assert torch.equal(state.to("cpu").to(torch.device("cpu"))["row"], state["row"])


def test_state_file_round_trip(tmp_path):
    state = make_state()
    state.save(tmp_path / "state.safetensors")
    copy = State.load(tmp_path / "state.safetensors")
    assert (copy.position, copy.owner) == (5, "kind=vssm")
    assert copy.child("stack").child("0").position == 5
    for a, b in zip(state.leaves(), copy.leaves(), strict=True):
        assert a.dtype == b.dtype
    assert torch.equal(state.child("stack").child("0")["k"], copy.child("stack").child("0")["k"])
    assert list(tmp_path.iterdir()) == [tmp_path / "state.safetensors"], "no temporary file stays"


def test_state_file_damaged_or_foreign_is_named(tmp_path):
    path = tmp_path / "state.safetensors"
    make_state().save(path)
    whole = path.read_bytes()
    for damage in (whole[:-7], b"", b"\x80\x04pickle", whole[:20] + b"\xff" + whole[21:]):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match=r"state\.safetensors"):
            State.load(path)
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="it must be 'vssm-state-1'"):
        State.load(path)
    with pytest.raises(ValueError, match="is not a file"):
        State.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("tensors", "positions"),
    [
        ({}, '{"": 5}'),
        ({"h": torch.ones(2, 3)}, "[" * 100_000),
        ({"h": torch.ones(2, 3)}, json.dumps({"/".join("a" * n): 5 for n in range(2000)})),
        ({"h": torch.ones(2, 3)}, '{"": true}'),
        ({"h": torch.ones(2, 3)}, '{"": -1}'),
        ({"h": torch.ones(2, 3), "k": torch.ones(3, 3)}, '{"": 5}'),
        ({"h": torch.tensor(1.0)}, '{"": 5}'),
        ({"h": torch.ones(2, 3)}, '{"": 5, "h": 5}'),
    ],
)
def test_state_file_that_holds_no_state_is_named(tensors, positions, tmp_path):
    metadata = {"format": "vssm-state-1", "owner": "kind=vssm", "positions": positions}
    (tmp_path / "state.safetensors").write_bytes(save(tensors, metadata))
    with pytest.raises(ValueError, match=r"^file '.*state\.safetensors' is damaged: [^\n]*$"):
        State.load(tmp_path / "state.safetensors")


def test_states_join_along_the_batch_and_part_again():
    block = make_block("mamba")
    x = torch.randn(5, 4, 16)
    parts = [block(rows)[1] for rows in x.split([1, 3, 1])]
    joined = State.cat(parts)
    assert (joined.batch, joined.position) == (5, 4)
    more = torch.randn(5, 2, 16)
    assert relative_error(block(more, joined)[0], block(more, block(x)[1])[0]) < 1e-5
    for leaf, expected in zip(joined.select([1, 2, 3]).leaves(), parts[1].leaves(), strict=True):
        assert torch.equal(leaf, expected)
    nested = State({"inner": parts[0]}, 4, "a")
    assert State.cat([nested, nested]).child("inner").batch == 2
    for wrong in ([], parts[0]):
        with pytest.raises(ValueError, match=r"states is .*; it must be a list of one State"):
            State.cat(wrong)
    with pytest.raises(ValueError, match="positions 4 and 5 of models"):
        State.cat([parts[0], State(parts[0].children, 5)])
    with pytest.raises(ValueError, match="join states with the same names"):
        State.cat([parts[0], State({"h": torch.zeros(1, 2)}, 4)])


def test_a_state_goes_through_bytes():
    state = State({"a": torch.rand(2, 3), "b": State({"h": torch.arange(2)}, 3)}, 3, "model")
    copy = State.from_bytes(state.to_bytes())
    assert (copy.position, copy.owner, copy.child("b").position) == (3, "model", 3)
    assert torch.equal(copy["a"], state["a"])
    assert torch.equal(copy.child("b")["h"], state.child("b")["h"])
    for damaged in (b"", b"x" * 40, state.to_bytes()[:-1]):
        with pytest.raises(ValueError, match="state is damaged"):
            State.from_bytes(damaged)


@pytest.mark.parametrize(
    ("most", "shapes"),
    [
        (7 * 5, [(5, 7)]),
        (3 * 5, [(5, 3), (5, 3), (5, 1)]),
        (5, [(5, 1)] * 7),
        (3, [(5, 1)] * 7),
    ],
)
def test_a_large_batch_of_a_gru_is_read_in_parts_of_time(most, shapes, monkeypatch):
    block, seen = make_block("gru"), []
    x, h = (torch.randn(5, *shape, requires_grad=True) for shape in ((7, 16), (16,)))
    states = None, State({"h": h}, 3), State({"h": h[:1].expand(5, 16)}, 3)

    def results(state):
        y, last = block(x, state)
        inputs = [x, *block.parameters(), *([] if state is None else [h])]
        return (
            y,
            last["h"],
            *torch.autograd.grad(y.square().sum() + last["h"].sum(), inputs),
            last.position,
        )

    wanted = [results(state) for state in states]
    monkeypatch.setattr("vssm.nn.gru.MOST_GATES", most * 3 * 16)
    block.gru.register_forward_hook(
        lambda gru, inputs, outputs: seen.append(tuple(inputs[0].shape[:2]))
    )
    for state, want in zip(states, wanted, strict=True):
        seen.clear()
        made = results(state)
        assert seen == shapes
        assert made[-1] == want[-1]
        for a, b in zip(made[:-1], want[:-1], strict=True):
            assert a.shape == b.shape and relative_error(a, b) < 1e-6


@pytest.mark.gpu
def test_a_gru_reads_fifty_thousand_rows():
    block = make_block("gru").cuda()
    with torch.no_grad():
        x = torch.randn(50_000, 672, 16, device="cuda")
        y, state = block(x)
        assert torch.allclose(y[-3:], block(x[-3:])[0], atol=1e-5)
        assert torch.isfinite(state["h"]).all()


def test_a_step_of_a_gru_equals_its_layer():
    block = make_block("gru").double()
    x = torch.randn(3, 6, 16, dtype=torch.float64)
    whole, _ = block(x)
    y, state = block(x[:, :1])
    assert relative_error(y, whole[:, :1]) < 1e-12
    y, state = block(x[:, 2:], block(x[:, 1:2], state)[1])
    assert relative_error(y, whole[:, 2:]) < 1e-12
    assert state.position == 6


class Adapted(torch.nn.Module):
    """Takes the place of a layer and adds to its result, as adapters do.

    The scan adds the bias of `dt_proj`, so an adapter shows it.
    """

    def __init__(self, layer):
        super().__init__()
        self.layer, self.bias = layer, layer.bias
        self.extra = torch.nn.Parameter(torch.zeros(layer.out_features))

    def forward(self, x):
        return self.layer(x) + self.extra


LAYERS = [
    "blocks.1.mixer.in_proj",
    "blocks.1.mixer.x_proj",
    "blocks.1.mixer.dt_proj",
    "blocks.1.mixer.out_proj",
    "out",
]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_the_place_of_another_is_called(name):
    torch.manual_seed(0)
    stack = Stack(replace(small_config("ssm"), layers=2), torch.nn.Identity(), 5)
    x = torch.randn(2, 6, small_config("ssm").width)
    wanted, state = stack(x)
    layer = Adapted(stack.get_submodule(name))
    stack.set_submodule(name, layer)
    for gradient in (True, False):
        with torch.set_grad_enabled(gradient):
            given, after = stack(x)
            assert torch.allclose(given, wanted, atol=1e-6)
            assert torch.allclose(after.child("1")["ssm"], state.child("1")["ssm"], atol=1e-6)
    stack(x)[0].square().sum().backward()
    assert layer.extra.grad.abs().sum() > 0
    with torch.no_grad():
        layer.extra.add_(4)
        assert not torch.allclose(stack(x)[0], wanted, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_who_listens_to_a_layer_sees_its_input_and_output(name):
    torch.manual_seed(0)
    stack = Stack(replace(small_config("ssm"), layers=2), torch.nn.Identity(), 5)
    x, seen = torch.randn(2, 6, small_config("ssm").width), []
    wanted = stack(x)[0]
    layer = stack.get_submodule(name)
    layer.register_forward_hook(lambda _, given, made: seen.append((given, made)))
    assert torch.allclose(stack(x)[0], wanted, atol=1e-6)
    ((given,), made) = seen[0]
    bias = None if name.endswith("dt_proj") else layer.bias  # the scan adds it
    wanted = torch.nn.functional.linear(given, layer.weight, bias)
    assert len(seen) == 1 and torch.allclose(made, wanted, atol=1e-6)
