"""Generation: the paper's five algorithms, each a function below.

| algorithm of the paper    | here                                                        |
| ------------------------- | ----------------------------------------------------------- |
| VSSM sampling             | `_variational` with one chunk: everything at once           |
| VSSM chunk sampling       | `_variational` with `chunk=W`                               |
| RNN sampling              | `_autoregressive`, rnn: the prompt is read step by step     |
| SSM sampling              | `_autoregressive`, ssm: the prompt is read in parallel      |
| Transformer sampling      | `_recompute`; with a key-value cache, `_autoregressive`     |

`_vrnn` completes the six models. With `recondition=True` a variational model reads each chunk that
it has made, instead of empty tokens, before it makes the next: the chunk size is then a dial from
fully parallel (W = T) to step by step (W = 1).

Every random number is a function of (seed, row, position, component), so chunk size, batch split and
resume point never change what a seed gives.

Legend: x (B, T, D) or tokens (B, T); z (B, T, Z); C steps of prompt; W chunk size; ∅ empty token.
"""

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from vssm import noise
from vssm.config import check_choice
from vssm.distributions import Latents
from vssm.models import VRNN, Autoregressive, Model, Variational
from vssm.nn import State, reserve, trim

__all__ = ["Generation", "generate", "observe"]

_NOISE_STEPS = 1024  # steps of noise drawn ahead of a step-by-step loop
_EMPTY_RUNS = 8  # lengths whose all-empty pass is remembered
_BLIND = (
    "it has run over empty tokens, after which the model was never trained to read data; "
    "allowed: a state from observe, or from generate with recondition=True"
)


class Generation(NamedTuple):
    """What `generate` made."""

    x: Tensor
    """The new steps only, (B, length, D), or (B, length) tokens."""
    z: Tensor | None
    """Their latents, (B, length, Z); None for an autoregressive model."""
    state: State
    """Where to resume: `generate(model, length=..., state=state)`."""


class _Noise(NamedTuple):
    """The noise of a batch: which seed and which row each sequence reads."""

    seed: Tensor
    row: Tensor

    def latent(self, model: Variational | VRNN, position: int, length: int) -> Tensor:
        return noise.uniform(self.seed, self.row, position, length, model.config.latents, stream=noise.LATENT)

    def observation(self, model: Model, position: int, length: int) -> Tensor:
        return noise.uniform(
            self.seed, self.row, position, length, model.head.noise_size, stream=noise.OBSERVATION
        )


@torch.no_grad()
def generate(
    model: Model,
    num: int | None = None,
    length: int = 28,
    prompt: Tensor | None = None,
    chunk: int | None = None,
    recondition: bool = False,
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
        num: The number of sequences, B. Defaults to the rows of the prompt or state, else 1. One row of
            prompt or state serves any number: `num=16` gives sixteen continuations of it.
        length: The number of new steps.
        prompt: Steps that come first, (B, C, D), or (B, C) tokens.
        chunk: W, for vssm and tvae: make W steps at a time. Alone it changes nothing in the result.
        recondition: For vssm and tvae: read each generated chunk before making the next.
        temperature: Divides the logits of every categorical and multiplies every scale that is drawn from.
        observe: What x is made of: the "mean" of the head (mode of a categorical one), or a "sample" of
            it. An autoregressive model always feeds back a sample, the others what they return.
        seed: Names the sample; one for all rows, or one for each, (B,). Defaults to the state's, else 0.
        state: Where to go on from, as returned by `generate` and `observe`.
        rows: Which rows of the noise to use, (B,); 0 to B - 1 by default. `rows=range(8, 16)` makes the
            second half of a batch of sixteen.
        cache: False recomputes the whole prefix at every step, as the paper's Transformer does.

    Returns:
        The new steps, their latents, and the state to resume from.

    Example:
        >>> from vssm import ModelConfig, build
        >>> model = build(ModelConfig(kind="vssm", features=3, width=8, layers=1, latents=4, classes=5))
        >>> whole = generate(model, num=2, length=8, seed=1)
        >>> half = generate(model, num=2, length=4, seed=1)
        >>> rest = generate(model, length=4, state=half.state)
        >>> torch.allclose(whole.x, torch.cat([half.x, rest.x], 1), atol=1e-6)
        True
    """
    _check_options(model, length, chunk, recondition, temperature, observe, cache, state)
    device = next(model.parameters()).device
    if prompt is not None:
        prompt = _check_sequence(model, prompt, "prompt", device)
    if state is not None:
        _check_state(model, state, device)
    num = _check_num(num, prompt, state)
    if state is not None and state.batch != num:
        state = state.repeat(num)
    source = _noise_source(num, seed, rows, state, device)
    if prompt is not None and prompt.shape[1] == 0:
        prompt = None
    if prompt is not None and state is not None and "blind" in state.children:
        raise ValueError(f"prompt and state together are ambiguous here: {_BLIND}")
    options = _Options(length, chunk or max(length, 1), recondition, temperature, observe == "sample")
    before = state if state is not None and state.position else None
    if isinstance(model, Variational):
        x, z, after = _variational(model, prompt, before, source, options)
    elif isinstance(model, VRNN):
        x, z, after = _vrnn(model, prompt, before, source, options)
    else:
        run = _autoregressive if cache else _recompute
        x, z, after = run(model, prompt, before, source, options)
    return Generation(x, z, _own(model, after, source))


@torch.no_grad()
def observe(
    model: Model,
    x: Tensor,
    state: State | None = None,
    seed: int | Tensor | None = None,
    rows: Sequence[int] | Tensor | None = None,
) -> State:
    """Reads real data and returns the state after it, to generate from or to observe more.

    Arguments:
        model: Any of the six models.
        x: What was observed, (B, C, D), or (B, C) tokens, C >= 1.
        state: What came before.
        seed: Names the latents that are drawn for x, and what is generated later.
        rows: Which rows of the noise to use.

    Example:
        >>> from vssm import ModelConfig, build, generate
        >>> model = build(ModelConfig(kind="vssm", features=3, width=8, layers=1, latents=4, classes=5))
        >>> x = torch.rand(2, 6, 3)
        >>> state = observe(model, x[:, 4:], observe(model, x[:, :4]))
        >>> torch.allclose(generate(model, length=5, state=state).x, generate(model, length=5, prompt=x).x)
        True
    """
    device = next(model.parameters()).device
    x = _check_sequence(model, x, "x", device)
    if x.shape[1] == 0:
        raise ValueError("x has no steps; allowed: (batch, length, ...) with length >= 1")
    if state is not None:
        _check_state(model, state, device)
        if state.batch != len(x):
            raise ValueError(f"state has {state.batch} rows; allowed: {len(x)}, the rows of x")
        if "blind" in state.children:
            raise ValueError(f"x can not follow this state: {_BLIND}")
    source = _noise_source(len(x), seed, rows, state, device)
    before = state if state is not None and state.position else None
    if isinstance(model, Autoregressive):
        _, state = model(x, before)
    elif isinstance(model, VRNN):
        state = _read_vrnn(model, x, before, source)
    else:
        state = _read_variational(model, x, before, source)
    return _own(model, state, source)


class _Options(NamedTuple):
    length: int
    chunk: int
    recondition: bool
    temperature: float
    sample: bool


_Result = tuple[Tensor, Tensor | None, State | None]


def _variational(
    model: Variational, prompt: Tensor | None, state: State | None, source: _Noise, options: _Options
) -> _Result:
    """Algorithms "VSSM sampling" (one chunk) and "VSSM chunk sampling"."""
    num, position = len(source.row), 0 if state is None else state.position
    blind = state is not None and "blind" in state.children
    if blind and options.recondition:
        raise ValueError(f"recondition=True can not start from this state: {_BLIND}")
    if prompt is not None and (options.recondition or options.length == 0):
        state = _read_variational(model, prompt, state, source)
        position, prompt = state.position, None
    partial = None if state is None else state.child("blind" if blind else "partial")
    decoder = None if state is None else state.child("decoder")
    xs, zs = [], []
    for first in range(0, options.length, options.chunk):
        known = 0 if prompt is None else prompt.shape[1]
        width = min(options.chunk, options.length - first)
        if partial is None and prompt is None:
            q_z, ahead = _empty_run(model, width)
        else:
            q_z, ahead = model.partial_posterior(prompt, empty=width, state=partial)
        z = _draw(q_z, source.latent(model, position, known + width), known, options.temperature)
        p_x, decoder = model.likelihood(z, decoder)
        x = p_x.mean
        if options.sample:
            x = p_x.sample(source.observation(model, position, known + width), options.temperature)
        xs.append(x[:, known:])
        zs.append(z[:, known:])
        if options.recondition:
            _, ahead = model.partial_posterior(xs[-1], state=_rows(partial, num))
        partial, prompt = ahead, None
        position += known + width
    if partial is None or decoder is None:
        return *_nothing(model, num, source), None
    if not options.recondition and options.length:
        blind = True
    state = State({"blind" if blind else "partial": _expand(partial, num), "decoder": decoder}, position)
    if not xs:
        return *_nothing(model, num, source), state
    return torch.cat(xs, 1), torch.cat(zs, 1), state


def _read_variational(model: Variational, x: Tensor, state: State | None, source: _Noise) -> State:
    """Reads known data: draws its latents from the partial posterior and feeds them to the decoder."""
    position = 0 if state is None else state.position
    q_z, partial = model.partial_posterior(x, state=None if state is None else state.child("partial"))
    z = q_z.sample(source.latent(model, position, x.shape[1]))
    _, decoder = model.likelihood(z, None if state is None else state.child("decoder"))
    return State({"partial": _expand(partial, len(z)), "decoder": decoder}, position + x.shape[1])


def _draw(q_z: Latents, u: Tensor, known: int, temperature: float) -> Tensor:
    """Draws z; the temperature is for what is new, not for the latents of `known` data."""
    if known == 0 or temperature == 1:
        return q_z.sample(u, temperature)
    old, new = Latents(q_z.logits[:, :known]), Latents(q_z.logits[:, known:])
    return torch.cat([old.sample(u[:, :known]), new.sample(u[:, known:], temperature)], 1)


_empty_runs: WeakKeyDictionary[Variational, dict] = WeakKeyDictionary()


def _empty_run(model: Variational, length: int) -> tuple[Latents, State]:
    """Returns q_omega(z | ∅, ..., ∅), which is the same for every row: one row, remembered by length."""
    partial = model.partial
    assert partial.blank is not None
    # Fused optimisers change weights without counting a version: look at some of the values as well.
    probe = torch.stack([vector.detach().double().sum() for vector in (partial.blank, partial.norm.weight)])
    versions = tuple((p.data_ptr(), p._version, p.dtype) for p in partial.parameters())
    weights = (*probe.tolist(), versions)
    known = _empty_runs.setdefault(model, {})
    if length not in known or known[length][0] != weights:
        while len(known) >= _EMPTY_RUNS:
            known.pop(next(iter(known)), None)
        known[length] = weights, model.partial_posterior(empty=length)
    return known[length][1]


def _autoregressive(
    model: Autoregressive, prompt: Tensor | None, state: State | None, source: _Noise, options: _Options
) -> _Result:
    """Algorithms "RNN sampling" and "SSM sampling", and the Transformer with a key-value cache."""
    num = len(source.row)
    if prompt is not None:
        _, state = model(prompt, state)
    state = _rows(state, num)
    position = 0 if state is None else state.position
    xs = []
    for t in range(options.length):
        if t % _NOISE_STEPS == 0:
            u = source.observation(model, position + t, min(_NOISE_STEPS, options.length - t))
        p_x, stack = model.next(num, state)
        if t == 0 and model.config.block == "attention":
            stack = reserve(stack, options.length - 1)
        x = p_x.sample(u[:, t % _NOISE_STEPS, None], options.temperature)
        xs.append(x if options.sample else p_x.mean)
        state = State({"stack": stack, "last": x}, position + t + 1)
    if not xs:
        return *_nothing(model, num, source), state
    assert state is not None
    return torch.cat(xs, 1), None, trim(state)


def _recompute(
    model: Autoregressive, prompt: Tensor | None, state: State | None, source: _Noise, options: _Options
) -> _Result:
    """Algorithm "Transformer sampling": the whole prefix again at every step."""
    num = len(source.row)
    x = None if prompt is None else prompt.expand(num, *prompt.shape[1:])
    position = 0 if x is None else x.shape[1]
    u = source.observation(model, position, options.length)
    xs = []
    for t in range(options.length):
        p_x, stack = model.recompute(num, x)
        x_t = p_x.sample(u[:, t, None], options.temperature)
        xs.append(x_t if options.sample else p_x.mean)
        x = x_t if x is None else torch.cat([x, x_t], 1)
        state = State({"stack": stack, "last": x_t}, position + t + 1)
    if not xs:
        return *_nothing(model, num, source), None if x is None else model(x)[1]
    return torch.cat(xs, 1), None, state


def _vrnn(
    model: VRNN, prompt: Tensor | None, state: State | None, source: _Noise, options: _Options
) -> _Result:
    """The VRNN, step by step: a latent from the prior, x from the latent, both into the recurrence."""
    num = len(source.row)
    if prompt is not None:
        state = _read_vrnn(model, prompt.expand(num, *prompt.shape[1:]), state, source)
    position = 0 if state is None else state.position
    u_z = source.latent(model, position, options.length)
    u_x = source.observation(model, position, options.length) if options.sample else None
    xs, zs = [], []
    for t in range(options.length):
        h = model.memory(num, state)
        zs.append(model.prior(h).sample(u_z[:, t, None], options.temperature))
        p_x = model.likelihood(h, zs[-1])
        xs.append(p_x.mean if u_x is None else p_x.sample(u_x[:, t, None], options.temperature))
        state = model.advance(xs[-1], zs[-1], state)
    if not xs:
        return *_nothing(model, num, source), state
    return torch.cat(xs, 1), torch.cat(zs, 1), state


def _read_vrnn(model: VRNN, x: Tensor, state: State | None, source: _Noise) -> State:
    u = source.latent(model, 0 if state is None else state.position, x.shape[1])
    return model(x, lambda t, q_z: q_z.sample(u[:, t, None]), state).state


def _expand(state: State, num: int) -> State:
    """Views a state that all rows share as one of `num` rows."""
    return state if state.batch == num else state.expand(num)


def _rows(state: State | None, num: int) -> State | None:
    return None if state is None else _expand(state, num)


def _nothing(model: Model, num: int, source: _Noise) -> tuple[Tensor, Tensor | None]:
    """Returns x and z of no steps."""
    device = source.row.device
    z = (
        None
        if isinstance(model, Autoregressive)
        else torch.empty(num, 0, model.config.latents, dtype=torch.int64, device=device)
    )
    if model.head.tokens:
        return torch.empty(num, 0, dtype=torch.int64, device=device), z
    return torch.empty(num, 0, model.config.features, device=device), z


def _owner(model: Model) -> str:
    return ", ".join(f"{name}={value}" for name, value in model.config.to_dict().items())


def _own(model: Model, state: State | None, source: _Noise) -> State:
    """Adds to a state what resuming needs: the noise, and whose state it is."""
    children = {} if state is None else state.children
    position = 0 if state is None else state.position
    return State({**children, "seed": source.seed, "row": source.row}, position, _owner(model))


def _noise_source(
    num: int,
    seed: int | Tensor | None,
    rows: Sequence[int] | Tensor | None,
    state: State | None,
    device: torch.device,
) -> _Noise:
    if seed is None:
        seeds = torch.zeros(num, dtype=torch.int64, device=device) if state is None else state["seed"]
    elif isinstance(seed, int) and not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed={seed} is not allowed; allowed: a whole number of 64 bits")
    else:
        seeds = torch.as_tensor(seed, dtype=torch.int64, device=device)
        seeds = seeds.repeat(num) if seeds.ndim == 0 else seeds
    if rows is None:
        row = torch.arange(num, device=device) if state is None else state["row"]
    else:
        row = torch.as_tensor(rows, dtype=torch.int64, device=device)
    for name, tensor in (("seed", seeds), ("rows", row)):
        if tensor.shape != (num,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: ({num},), one for each row")
    return _Noise(seeds, row)


def _check_options(
    model: Model,
    length: int,
    chunk: int | None,
    recondition: bool,
    temperature: float,
    observe: str,
    cache: bool,
    state: State | None,
) -> None:
    kind = model.config.kind
    for name, value, least in (("length", length, 0), ("chunk", 1 if chunk is None else chunk, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value} is not allowed; allowed: a whole number >= {least}")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature={temperature} is not allowed; allowed: a number > 0")
    check_choice("observe", observe, ("mean", "sample"))
    if (chunk is not None or recondition) and not isinstance(model, Variational):
        name = "recondition=True" if recondition else f"chunk={chunk}"
        raise ValueError(
            f"{name} is for models that generate in parallel, not kind={kind!r}; allowed: vssm, tvae"
        )
    if not cache and not isinstance(model, Autoregressive):
        raise ValueError(
            f"cache=False is for autoregressive models, not kind={kind!r}; allowed: transformer, ssm, rnn"
        )
    if not cache and state is not None:
        raise ValueError(
            "cache=False recomputes from the first step and can not use a state; allowed: a prompt"
        )


def _check_sequence(model: Model, x: Tensor, name: str, device: torch.device) -> Tensor:
    model.head.validate(x, name=name, values=False)
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}; allowed: {device}, the device of the model")
    model.head.validate(x, name=name)
    return x if model.head.tokens else x.to(next(model.parameters()).dtype)


def _check_state(model: Model, state: State, device: torch.device) -> None:
    if not isinstance(state, State):
        raise ValueError(f"state is a {type(state).__name__}; allowed: a State from generate or observe")
    if state.owner != _owner(model):
        raise ValueError(
            f"state belongs to another model ({state.owner or 'unknown'}); "
            f"allowed: a state of {_owner(model)}"
        )
    if state.device != device:
        raise ValueError(f"state is on {state.device}; allowed: {device}, the device of the model")


def _check_num(num: int | None, prompt: Tensor | None, state: State | None) -> int:
    """Settles the number of rows: a prompt or state of one row serves any number."""
    if num is not None and num < 1:
        raise ValueError(f"num={num} is not allowed; allowed: a whole number >= 1")
    given = {}
    if prompt is not None:
        given["prompt"] = len(prompt)
    if state is not None:
        given["state"] = state.batch
    total = num or max(given.values(), default=1)
    for name, batch in given.items():
        if batch not in (1, total):
            raise ValueError(f"{name} has {batch} rows; allowed: 1 or {total}")
    return total
