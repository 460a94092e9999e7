"""Sampling: the paper's five algorithms, each a function of this package.

| algorithm of the paper    | here                                                              |
| ------------------------- | ----------------------------------------------------------------- |
| VSSM sampling             | `sample_variational` with one chunk: everything at once           |
| VSSM chunk sampling       | `sample_variational` with `chunk=W`                               |
| RNN sampling              | `sample_autoregressive`, rnn: the prompt is read step by step     |
| SSM sampling              | `sample_autoregressive`, ssm: the prompt is read in parallel      |
| Transformer sampling      | `sample_recomputed`; with a key-value cache `sample_autoregressive` |

`sample_vrnn` completes the six models, and `sample_ladder` is for a vssm with levels of latents. With
`recondition=True` a variational model reads each chunk that it has made, instead of empty tokens, before it
makes the next: the chunk size is then a dial from fully parallel (W = T) to step by step (W = 1). With
`passes=S` it redraws a chunk that it has made, all steps at once, each after those that the last pass made
before it: a second dial between the same ends.

Every random number is a function of (seed, row, position, component), so chunk size, batch split and
resume point never change what a seed gives, but for float rounding.

Calls that are too large for one pass are made in pieces (see `vssm.sampling.slabs`).

On a GPU, a call that is made a second time is recorded as a CUDA graph and replayed from then on (see
`vssm.engine.graphs`), unless its rows are divided.
"""

from functools import partial

from torch import Tensor

from vssm.models import VRNN, Autoregressive, Ladder, Model, Variational
from vssm.nn import State
from vssm.sampling.ladder import read_ladder, sample_ladder
from vssm.sampling.parallel import read_variational, sample_variational
from vssm.sampling.parallel import repeat_variational as repeat_variational
from vssm.sampling.request import BLIND as BLIND
from vssm.sampling.request import Noise as Noise
from vssm.sampling.request import Options as Options
from vssm.sampling.request import Result as Result
from vssm.sampling.request import expand_rows
from vssm.sampling.slabs import fitting, in_slabs, rows_of_cache, rows_of_slab
from vssm.sampling.stepwise import (
    read_autoregressive,
    read_vrnn,
    sample_autoregressive,
    sample_recomputed,
    sample_vrnn,
)

__all__ = ["BLIND", "Noise", "Options", "Result", "read", "repeat_variational", "sample"]


def sample(
    model: Model,
    prompt: Tensor | None,
    state: State | None,
    source: Noise,
    options: Options,
    cache: bool = True,
    record: bool = False,
    remember: bool = True,
) -> Result:
    """Makes new steps after a prompt, a state or nothing, with the algorithm of the model.

    Arguments:
        model: Any of the six models.
        prompt: Steps that come first, (1 or B, C, D), or tokens.
        state: What came before, at a position above 0.
        source: The noise of the B rows.
        options: What is asked for.
        cache: False recomputes the whole prefix at every step.
        record: Whether calls that repeat are recorded and replayed.
        remember: Whether what depends on the weights alone is kept for the next call.
    """
    if isinstance(model, Variational | Ladder):
        return _sample_in_parallel(model, prompt, state, source, options, record, remember)
    if isinstance(model, VRNN):
        return sample_vrnn(model, prompt, state, source, options, record)
    if cache:
        return _sample_with_cache(model, prompt, state, source, options, record)
    return sample_recomputed(model, prompt, state, source, options)


def _sample_with_cache(
    model: Autoregressive,
    prompt: Tensor | None,
    state: State | None,
    source: Noise,
    options: Options,
    record: bool,
) -> Result:
    before = (0 if prompt is None else prompt.shape[1]) + (0 if state is None else state.position)
    rows = rows_of_cache(model, source.num, before + options.length)
    if rows == source.num:
        return sample_autoregressive(model, prompt, state, source, options, record)

    def make(prompt: Tensor | None, state: State | None, source: Noise) -> State:
        x, _, after = sample_autoregressive(model, prompt, state, source, options, record)
        assert after is not None, "something was made or read"
        return State({"x": x, "state": after})

    made = in_slabs(make, rows, source.num, prompt, state, source)
    return made["x"], None, made.child("state")


def _sample_in_parallel(
    model: Variational | Ladder,
    prompt: Tensor | None,
    state: State | None,
    source: Noise,
    options: Options,
    record: bool,
    remember: bool,
) -> Result:
    num, known, least = source.num, 0 if prompt is None else prompt.shape[1], 1
    reads = prompt is not None or state is not None
    if isinstance(model, Ladder):
        run = partial(sample_ladder, model)
    else:
        run = partial(sample_variational, model, remember=remember)
        options = fitting(model, options, num, known, reads)
        if state is None and (prompt is None or len(prompt) == 1) and not options.recondition:
            least = 2  # these share a state, which can not be seen of one row
    steps, reads = known + min(options.chunk, options.length), reads or options.recondition
    rows = rows_of_slab(model, num, steps, reads, least)
    record = record and rows == num

    def make(prompt: Tensor | None, state: State | None, source: Noise) -> State:
        x, z, after = run(prompt, state, source, options, record)
        assert z is not None
        return State({"x": x, "z": z} if after is None else {"x": x, "z": z, "state": after})

    made = in_slabs(make, rows, num, prompt, state, source)
    return made["x"], made["z"], made.child("state") if "state" in made.children else None


def read(model: Model, x: Tensor, state: State | None, source: Noise) -> State:
    """Reads known data and returns the state after it.

    Arguments:
        model: Any of the six models.
        x: The data, (1 or B, C, D), or tokens.
        state: What came before, of B rows.
        source: The noise of the B rows.
    """
    num = source.num
    if state is not None or isinstance(model, VRNN):
        x = x.expand(num, *x.shape[1:])
    if isinstance(model, VRNN):
        return read_vrnn(model, x, state, source)
    if not isinstance(model, Variational | Ladder):
        return expand_rows(read_autoregressive(model, x, state), num)
    if isinstance(model, Ladder):
        rows = rows_of_slab(model, len(x), x.shape[1], True)
        return expand_rows(in_slabs(partial(read_ladder, model), rows, len(x), x, state), num)
    rows = rows_of_slab(model, num, x.shape[1], True)
    return in_slabs(partial(read_variational, model), rows, num, x, state, source)
