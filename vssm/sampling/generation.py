"""Generation: `generate` and `observe` check a call and run the algorithm of the model.

Every random number is a function of (seed, row, position, component). So chunk size, batch split
and resume point never change the sample of a seed, except for float rounding. Rarely, rounding
decides between two classes of a latent, and then the sample differs from there on.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vssm.checks import check_model
from vssm.distributions import Latents
from vssm.models import VRNN, AnyPart, Autoregressive, Ladder, Model, Variational, first_weight
from vssm.nn import State
from vssm.nn.show import html_table
from vssm.noise import Noise
from vssm.sampling.anypart import read_any_part, sample_any_part
from vssm.sampling.ladder import read_ladder, sample_ladder
from vssm.sampling.parallel import read_variational, sample_variational
from vssm.sampling.request import (
    Options,
    Result,
    check_reading,
    check_request,
    divide,
    rows_of_slab,
)
from vssm.sampling.slabs import in_slabs
from vssm.sampling.stepwise import (
    read_autoregressive,
    read_vrnn,
    sample_autoregressive,
    sample_recomputed,
    sample_vrnn,
)


class Generation(NamedTuple):
    """The result of `generate`.

    Example:
        >>> from vssm import ModelConfig, build
        >>> model = build(ModelConfig(kind="rnn", features=3, width=8, layers=1))
        >>> made = generate(model, num=2, length=4)
        >>> x, z, state = made
        >>> made
        Generation(x=(2, 4, 3), z=None, state=State(position=4, stack/0/h (2, 8), ...))
    """

    x: Tensor
    """The new steps only, (B, length, D), or (B, length) tokens."""
    z: Tensor | None
    """Their latents, (B, length, Z); None for an autoregressive model."""
    state: State
    """Where to resume: `generate(model, length=..., state=state)`."""

    def __repr__(self) -> str:
        x, z = (None if values is None else tuple(values.shape) for values in (self.x, self.z))
        return f"Generation(x={x}, z={z}, state={self.state!r})"

    def _repr_html_(self) -> str:
        z = None if self.z is None else tuple(self.z.shape)
        return html_table("Generation", {"x": tuple(self.x.shape), "z": z, "state": self.state})


def generate(
    model: Model,
    num: int | None = None,
    length: int = 28,
    prompt: Tensor | None = None,
    chunk: int | None = None,
    recondition: bool = False,
    passes: int = 1,
    temperature: float = 1.0,
    observe: str = "mean",
    seed: int | Tensor | None = None,
    state: State | None = None,
    rows: Sequence[int] | Tensor | None = None,
    cache: bool = True,
) -> Generation:
    """Generates `length` new steps after a prompt, after a state, or from nothing.

    Arguments:
        model: Any of the six models.
        num: The number of sequences, B. Defaults to the rows of the prompt or state, else 1. One
            row of prompt or state serves any number: `num=16` gives sixteen continuations of it.
            Each continuation draws its own latents of a prompt. The latents behind a state are
            already drawn, and a vssm, tvae or vrnn refuses to share them if the state may have read
            data: `observe(..., num=16)` draws them sixteen times, and `state.repeat(16)` shares
            them on purpose.
        length: The number of new steps.
        prompt: Steps that come first, (B, C, D), or (B, C) tokens.
        chunk: W, for vssm and tvae: generate W steps at a time. On its own it does not change the
            result.
        recondition: For vssm and tvae: read each generated chunk before generating the next.
        passes: S, for vssm and tvae: parallel passes over each chunk. 1 is the paper's one shot.
            Each further pass redraws all steps with the same noise, each step given the steps
            before it in the last pass. S >= chunk (or length) gives the sample of chunk=1,
            recondition=True. More than 1 implies `recondition`: the next chunk and the state have
            read the steps before.
        temperature: Divides the logits of every categorical distribution, and multiplies every
            scale that is drawn from.
        observe: What to return as x: the "mean" of the head (the mode if it is categorical), or a
            "sample" of it. A model with latents feeds back the x that it returns. An autoregressive
            model always feeds back a sample. If it is a model of tokens, it returns these samples
            whatever `observe` says: the modes would not be the tokens that its later steps and its
            state follow.
        seed: Selects the sample; one for all rows, or one for each, (B,). Defaults to the seed of
            the state, else 0.
        state: The state to continue from, as returned by `generate` and `observe`.
        rows: Which rows of the noise to use, (B,); 0 to B - 1 by default. `rows=range(8, 16)` gives
            the second half of a batch of sixteen.
        cache: False recomputes the whole prefix at every step, as the paper's Transformer does.

    Returns:
        The new steps, their latents, and the state to resume from.

    Example:
        >>> from vssm import ModelConfig, build
        >>> sizes = {"width": 8, "layers": 1, "latents": 4, "classes": 5}
        >>> model = build(ModelConfig(kind="vssm", features=3, **sizes))
        >>> whole = generate(model, num=2, length=8, seed=1)
        >>> half = generate(model, num=2, length=4, seed=1)
        >>> rest = generate(model, length=4, state=half.state)
        >>> torch.allclose(whole.x, torch.cat([half.x, rest.x], 1), atol=1e-6)
        True
    """
    model = check_model(model)
    with torch.no_grad():
        dials = chunk, recondition, passes, temperature, observe, cache
        request = check_request(model, num, length, prompt, state, seed, rows, *dials)
        x, z, after = sample(model, *request)
        return Generation(x, z, own_state(after, request.source, model.owner))


@torch.no_grad()
def observe(
    model: Model,
    x: Tensor,
    state: State | None = None,
    seed: int | Tensor | None = None,
    rows: Sequence[int] | Tensor | None = None,
    num: int | None = None,
) -> State:
    """Reads real data and returns the state after it, to generate from or to observe more.

    A vssm, tvae or vrnn draws latents for the data that it reads. Samples of the future follow the
    model's distribution only if each has latents of its own. So read the data for as many rows as
    you want to generate: `generate(model, state=observe(model, x, num=100))` gives a hundred
    futures of one sequence.

    Arguments:
        model: Any of the six models.
        x: The data, (B, C, D), or (B, C) tokens, C >= 1.
        state: The state after earlier data.
        seed: Selects the latents that are drawn for x, and the samples that are generated later.
        rows: Which rows of the noise to use.
        num: The number of rows of the new state. Defaults to the rows of x or the state. One row of
            x serves any number; a vssm or tvae reads it once and draws latents for every row.

    Example:
        >>> from vssm import ModelConfig, build, generate
        >>> sizes = {"width": 8, "layers": 1, "latents": 4, "classes": 5}
        >>> model = build(ModelConfig(kind="vssm", features=3, **sizes))
        >>> x = torch.rand(2, 6, 3)
        >>> state = observe(model, x[:, 4:], observe(model, x[:, :4]))
        >>> resumed, prompted = {"state": state}, {"prompt": x}
        >>> made = [generate(model, length=5, **start).x for start in (resumed, prompted)]
        >>> torch.allclose(*made, atol=1e-6)
        True
    """
    model = check_model(model)
    x, before, source = check_reading(model, x, state, seed, rows, num)
    return own_state(read(model, x, before, source), source, model.owner)


def sample(
    model: Model,
    prompt: Tensor | None,
    state: State | None,
    source: Noise,
    options: Options,
    empty: tuple[Latents, State] | None = None,
) -> Result:
    """Generates steps after a prompt, a state or nothing, with the algorithm of the model.

    Arguments:
        model: Any of the six models.
        prompt: Steps that come first, (1 or B, C, D), or tokens.
        state: The state after earlier steps, at a position above 0.
        source: The noise of the B rows.
        options: The options of the call.
        empty: As for `sample_variational`.
    """
    if options.length == 0:
        after = state if prompt is None else read(model, prompt, state, source)
        return *_no_steps(model, source), after
    if isinstance(model, VRNN):
        return sample_vrnn(model, prompt, state, source, options)
    if isinstance(model, AnyPart):
        return sample_any_part(model, prompt, state, source, options)
    if not options.cache:
        assert isinstance(model, Autoregressive)
        return sample_recomputed(model, prompt, source, options)
    options, rows = divide(model, prompt, state, source.num, options)
    if isinstance(model, Ladder):
        algorithm = partial(sample_ladder, model)
    elif isinstance(model, Variational):
        algorithm = partial(sample_variational, model, empty=empty)
    else:
        algorithm = partial(sample_autoregressive, model)
    if rows >= source.num:
        return algorithm(prompt, state, source, options)

    def make(prompt: Tensor | None, state: State | None, source: Noise) -> State:
        x, z, after = algorithm(prompt, state, source, options)
        assert after is not None
        return State({"x": x, "state": after} | ({} if z is None else {"z": z}))

    made = in_slabs(make, rows, source.num, prompt, state, source)
    return made["x"], made["z"] if "z" in made.children else None, made.child("state")


def _no_steps(model: Model, source: Noise) -> tuple[Tensor, Tensor | None]:
    """Returns x and z of zero steps."""
    num, config, weight, z = source.num, model.config, first_weight(model), None
    if not isinstance(model, Autoregressive):
        z = weight.new_empty(num, 0, config.latents, dtype=torch.int64)
    if model.head.tokens:
        return weight.new_empty(num, 0, dtype=torch.int64), z
    dtype = torch.promote_types(weight.dtype, torch.float32)  # that of made steps
    return weight.new_empty(num, 0, config.features, dtype=dtype), z


def read(model: Model, x: Tensor, state: State | None, source: Noise) -> State:
    """Reads known data and returns the state after it.

    Arguments:
        model: Any of the six models.
        x: The data, (1 or B, C, D), or tokens.
        state: The state after earlier data, of B rows.
        source: The noise of the B rows.
    """
    num = source.num
    if state is not None or isinstance(model, VRNN):
        x = x.expand(num, *x.shape[1:])
    if isinstance(model, VRNN):
        return read_vrnn(model, x, state, source)
    if isinstance(model, AnyPart):
        return read_any_part(model, x, state, num)
    if isinstance(model, Autoregressive):
        return read_autoregressive(model, x, state).expand(num)
    if isinstance(model, Ladder):
        rows = rows_of_slab(model, len(x), x.shape[1], True)
        return in_slabs(partial(read_ladder, model), rows, len(x), x, state).expand(num)
    rows = rows_of_slab(model, num, x.shape[1], True)
    return in_slabs(partial(read_variational, model), rows, num, x, state, source)


def own_state(state: State | None, source: Noise, owner: str) -> State:
    """Adds to a state the noise and the name of its model, which resuming needs."""
    children = {} if state is None else state.children
    position = 0 if state is None else state.position
    children = {**children, "seed": source.seed, "row": source.row}
    return State(children, position, owner)
