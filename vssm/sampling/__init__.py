"""Sampling: the paper's five algorithms, each a function of this package.

| algorithm of the paper    | here                                                              |
| ------------------------- | ----------------------------------------------------------------- |
| VSSM sampling             | `sample_variational` with one chunk: everything at once           |
| VSSM chunk sampling       | `sample_variational` with `chunk=W`                               |
| RNN sampling              | `sample_autoregressive`, rnn: the prompt is read step by step     |
| SSM sampling              | `sample_autoregressive`, ssm: the prompt is read in parallel      |
| Transformer sampling      | `sample_recomputed`; with a key-value cache `sample_autoregressive` |

`sample_vrnn` completes the six models, `sample_ladder` is for a vssm with levels of latents, and
`sample_any_part` for one that conditions on any known part.
With `recondition=True` a variational model reads each chunk that it has made, instead of empty
tokens, before it makes the next: the chunk size is then a dial from fully parallel (W = T) to step
by step (W = 1). With `passes=S` it redraws a chunk that it has made, all steps at once, each after
those that the last pass made before it: a second dial between the same ends.

Every random number is a function of (seed, row, position, component), so chunk size, batch split
and resume point never change what a seed gives, but for float rounding.

A call that is too large for one pass is made in pieces (`vssm.sampling.slabs`). Nothing is kept
from one call to the next; `vssm.engine` keeps things.
"""

from functools import partial

from torch import Tensor

from vssm.distributions import Latents
from vssm.models import VRNN, AnyPart, Autoregressive, Ladder, Model, Variational
from vssm.nn import State
from vssm.sampling.anypart import read_any_part, sample_any_part
from vssm.sampling.ladder import read_ladder, sample_ladder
from vssm.sampling.parallel import read_variational, sample_variational
from vssm.sampling.request import Noise, Options, Result, expand_rows
from vssm.sampling.slabs import fitting, in_slabs, rows_of_cache, rows_of_slab
from vssm.sampling.stepwise import (
    read_autoregressive,
    read_vrnn,
    sample_autoregressive,
    sample_recomputed,
    sample_vrnn,
)

__all__ = ["divide", "read", "sample"]


def sample(
    model: Model,
    prompt: Tensor | None,
    state: State | None,
    source: Noise,
    options: Options,
    empty: tuple[Latents, State] | None = None,
) -> Result:
    """Makes new steps after a prompt, a state or nothing, with the algorithm of the model.

    Arguments:
        model: Any of the six models.
        prompt: Steps that come first, (1 or B, C, D), or tokens.
        state: The state after earlier steps, at a position above 0.
        source: The noise of the B rows.
        options: What is asked for.
        empty: As for `sample_variational`.
    """
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

    def make(prompt: Tensor | None, state: State | None, source: Noise) -> State:
        x, z, after = algorithm(prompt, state, source, options)
        parts = {"x": x, "z": z, "state": after}
        return State({name: part for name, part in parts.items() if part is not None})

    made = in_slabs(make, rows, source.num, prompt, state, source)
    z = made["z"] if "z" in made.children else None
    return made["x"], z, made.child("state") if "state" in made.children else None


def divide(
    model: Model, prompt: Tensor | None, state: State | None, num: int, options: Options
) -> tuple[Options, int]:
    """Returns options whose chunks fit the memory, and how many rows are made at a time."""
    known, least = 0 if prompt is None else prompt.shape[1], 1
    if isinstance(model, Autoregressive):
        before = known + (0 if state is None else state.position)
        return options, rows_of_cache(model, num, before + options.length)
    reads = prompt is not None or state is not None
    if isinstance(model, Variational):
        options = fitting(model, options, num, known, reads)
        if state is None and (prompt is None or len(prompt) == 1) and not options.recondition:
            least = 2  # rows share a state here, and one row alone would not show it
    steps = known + min(options.chunk, options.length)
    return options, rows_of_slab(model, num, steps, reads or options.recondition, least)


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
        return expand_rows(read_autoregressive(model, x, state), num)
    if isinstance(model, Ladder):
        rows = rows_of_slab(model, len(x), x.shape[1], True)
        return expand_rows(in_slabs(partial(read_ladder, model), rows, len(x), x, state), num)
    rows = rows_of_slab(model, num, x.shape[1], True)
    return in_slabs(partial(read_variational, model), rows, num, x, state, source)
