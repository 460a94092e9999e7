"""A row of a ragged batch is the row alone: generated, in the training loss and the likelihood."""

import sys
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vssm
from tests.conftest import KINDS, relative_error, sequences, small_model
from vssm.sampling.ragged import generate_ragged, pad

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=5)
MODELS = {
    (kind, head): small_model(kind, head) for kind in KINDS for head in ("gaussian", "categorical")
}


def prompts_of(model, lengths):
    whole = sequences(model, len(lengths), 9)
    return [row[:steps] for row, steps in zip(whole, lengths, strict=True)]


def alone(model, prompts, row, length, **options):
    return vssm.generate(model, prompt=prompts[row][None], length=length, rows=[row], **options)


@pytest.mark.parametrize("head", ["gaussian", "categorical"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(lengths=LENGTHS, length=st.integers(1, 5), seed=st.integers(0, 9))
def test_row_generates_as_alone(kind, head, lengths, length, seed):
    model = MODELS[kind, head]
    prompts = prompts_of(model, lengths)
    made = generate_ragged(model, prompts, length, seed=seed)
    assert made.x.shape[:2] == (len(lengths), length) and made.states is None
    for row in range(len(lengths)):
        one = alone(model, prompts, row, length, seed=seed)
        if head == "categorical":
            assert torch.equal(made.x[row], one.x[0])
        else:
            assert relative_error(made.x[row], one.x[0]) < 1e-4
        assert (made.z is None) == (one.z is None)
        if made.z is not None:
            assert torch.equal(made.z[row], one.z[0])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("vssm", {"chunk": 2, "recondition": True}),
        ("vssm", {"temperature": 0.5, "observe": "sample"}),
        ("vssm", {"states": True}),
        ("tvae", {"temperature": 0.5}),
        ("rnn", {"states": True, "observe": "sample"}),
    ],
)
def test_options_and_states_of_a_row(kind, options):
    model = MODELS[kind, "gaussian"]
    prompts = prompts_of(model, [4, 0, 7, 4])
    made = generate_ragged(model, prompts, 5, **options)
    states = options.pop("states", False)
    for row in range(4):
        one = alone(model, prompts, row, 5, **options)
        assert relative_error(made.x[row], one.x[0]) < 1e-4
        if states:
            more = vssm.generate(model, length=3, state=made.states[row]).x
            assert relative_error(more, vssm.generate(model, length=3, state=one.state).x) < 1e-4


class _Noise:
    """Gives every row the same numbers at the same step, in one draw or step by step."""

    def __init__(self):
        self.table, self.step = torch.rand(20, 8, 8, generator=torch.Generator().manual_seed(3)), 0

    def __call__(self, shape, *_):
        batch, steps, latents, classes = shape
        first, self.step = self.step, self.step + steps
        return (
            self.table[first : first + steps, :latents, :classes]
            .expand(batch, -1, -1, -1)
            .clamp_min(1e-6)
        )


def terms_of(model, x, lengths):
    with (
        mock.patch.object(sys.modules["vssm.objectives"], "gumbel_uniform", _Noise()),
        mock.patch("torch.rand", lambda num, **_: torch.full((num,), 0.4)),
    ):
        return vssm.objective(model, x, lengths=torch.tensor(lengths))


@pytest.mark.parametrize("head", ["gaussian", "categorical"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_row_has_the_loss_and_gradient_of_the_row_alone(kind, head, lengths):
    model = MODELS[kind, head]
    x, _ = pad(prompts_of(model, lengths))
    together = terms_of(model, x, lengths)
    for row, steps in enumerate(lengths):
        one = terms_of(model, x[row : row + 1, :steps], [steps])
        for term, expected in zip(together, one, strict=True):
            torch.testing.assert_close(term[row], expected[0], rtol=1e-4, atol=1e-4)
    row = len(lengths) - 1
    parameter = model.decoder.out.weight if hasattr(model, "decoder") else next(model.parameters())
    (given_,) = torch.autograd.grad(together.loss[row], parameter)
    (expected,) = torch.autograd.grad(one.loss[0], parameter)
    assert relative_error(given_, expected) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=4), prompt=st.integers(0, 2))
def test_row_has_the_likelihood_of_the_row_alone(kind, lengths, prompt):
    model = MODELS[kind, "gaussian"]
    x, given_ = pad(prompts_of(model, lengths))
    x = torch.where(
        torch.arange(x.shape[1])[:, None] < given_[:, None, None], x, 0.7
    )  # whatever padding holds
    together = vssm.log_likelihood(model, x, 3, prompt, lengths=given_)
    alone_ = vssm.log_likelihood(model, x[:1, : lengths[0]], 3, prompt)
    torch.testing.assert_close(together[0], alone_[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"prior": "partial"}, {"prompt_length": 2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_short_row_beside_a_long_one_has_its_likelihood(kind, options):
    model = MODELS[kind, "gaussian"]
    x = sequences(model, 2, 7)
    together = vssm.log_likelihood(model, x, 3, lengths=torch.tensor([3, 7]), **options)
    alone_ = vssm.log_likelihood(model, x[:1, :3], 3, **options)  # the noise of row 0
    torch.testing.assert_close(together[0], alone_[0], rtol=1e-4, atol=1e-4)


def test_full_lengths_change_nothing():
    for kind in ("ssm", "transformer"):
        model = MODELS[kind, "gaussian"]
        x = sequences(model, 3, 5)
        terms = vssm.objective(model, x, lengths=torch.tensor([5, 5, 5]))
        assert torch.equal(terms.loss, vssm.objective(model, x).loss)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([5, 6]), r"lengths is \[5, 6\]; it must be 1 to 5"),
        (torch.tensor([5, 0]), r"lengths is \[5, 0\]; it must be 1 to 5"),
        (torch.tensor([5]), "it must be an int64 tensor of 2 numbers"),
        ([5, 5], "it must be an int64 tensor of 2 numbers"),
    ],
)
def test_bad_lengths_are_named(lengths, message):
    model = MODELS["vssm", "gaussian"]
    with pytest.raises(ValueError, match=message):
        vssm.objective(model, torch.zeros(2, 5, 3), lengths=lengths)
    with pytest.raises(ValueError, match=message):
        vssm.log_likelihood(model, torch.zeros(2, 5, 3), lengths=lengths)
    with pytest.raises(ValueError, match="prompt_length is 4; it must be 0 to 3"):
        vssm.log_likelihood(model, torch.zeros(1, 5, 3), 1, 4, lengths=torch.tensor([3]))


@pytest.mark.parametrize("kind", KINDS)
def test_no_steps_of_no_prompts(kind):
    made = generate_ragged(MODELS[kind, "gaussian"], [torch.zeros(0, 3)] * 2, 0)
    assert made.x.shape == (2, 0, 3)


def test_bad_batches_are_named():
    model = MODELS["vssm", "gaussian"]
    with pytest.raises(ValueError, match=r"^sequences is \[\]; it must be a list of one tensor"):
        generate_ragged(model, [], 3)
    for wrong in (None, (torch.zeros(4, 3) for _ in range(2))):
        with pytest.raises(ValueError, match=r"^sequences is .*; it must be a list of one tensor"):
            generate_ragged(model, wrong, 3)
    with pytest.raises(
        ValueError, match=r"steps of shapes \[\(2,\), \(3,\)\] and .*; they must have one shape"
    ):
        pad([torch.zeros(4, 3), torch.zeros(4, 2)])
    with pytest.raises(
        ValueError, match="prompts contains NaN or infinite values at row 1, step 0"
    ):
        generate_ragged(model, [torch.zeros(4, 3), torch.full((2, 3), torch.nan)], 3)
    with pytest.raises(ValueError, match="temperature is 0"):
        generate_ragged(model, [torch.zeros(4, 3)], 3, temperature=0)


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_prompts_have_the_checks_of_others(kind):
    model = small_model(kind)
    prompts = [torch.rand(n, 3) for n in (4, 2, 4)]
    with pytest.raises(ValueError, match=r"^num=1 and length=1000000000000 would take .* GB"):
        generate_ragged(model, prompts, 10**12)
    with pytest.raises(ValueError, match=r"^model has type str; use a model from"):
        generate_ragged("mnist-small", prompts, 4)
    for states in (False, True):
        with pytest.raises(
            ValueError, match=r"^seed has shape \(2,\); it must be \(3,\), one for each row"
        ):
            generate_ragged(model, prompts, 4, seed=torch.tensor([1, 2]), states=states)
        seeds = torch.tensor([7, 8, 9])
        together = generate_ragged(model, prompts, 4, seed=seeds, states=states, observe="sample").x
        for row in range(3):
            single = alone(model, prompts, row, 4, seed=int(seeds[row]), observe="sample").x
            assert relative_error(together[row], single[0]) < 1e-4
