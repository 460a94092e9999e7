"""Sampling in parallel: vssm and tvae, at once, in chunks, or by passes towards the step-by-step sample.

A chunk is made in S passes, all with the same noise:

    pass 1              z_t ~ q_omega(z_t | past, ∅, ..., ∅)                    x = f(z), the paper's one shot
    pass s = 2 ... S    z_t ~ q_omega(z_t | past, x_{1:t-1} of pass s - 1)      x = f(z), all t at once

Step t of a pass depends on the steps before t of the last one, so pass s settles step s at the latest: S >= W
gives the fixed point, which is the sample that is made step by step.

Legend: x (B, T, D) or tokens (B, T); z (B, T, Z); C steps of prompt; W chunk size; S passes; ∅ empty token;
f the decoder and the observation head.
"""

import threading
from collections.abc import Hashable
from functools import cache, partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from vssm.distributions import Latents
from vssm.engine import graphs
from vssm.engine.recording import OneShot
from vssm.engine.trees import describe
from vssm.engine.watch import Watch
from vssm.engine.weights import first_weight, opaque, weights_of
from vssm.models import Variational
from vssm.nn import Moving, State
from vssm.ops import choose_backend
from vssm.ops.dispatch import product_dtype
from vssm.sampling.ahead import posterior_ahead
from vssm.sampling.request import (
    BLIND,
    Noise,
    Options,
    Result,
    end_of,
    expand_rows,
    nothing,
    packed,
    results,
    taken,
    unpacked,
)

__all__ = ["draw", "read_variational", "repeat_variational", "sample_variational"]

_EMPTY_RUNS = 8  # lengths whose all-empty pass is remembered
_EMPTY_BYTES = 2**28  # of these passes, of all lengths of a model together
_EMPTY_STEPS = 4096  # of one row, whose pass takes little memory
_LOOKS = 64  # numbers of a weight that are looked at


def sample_variational(
    model: Variational,
    prompt: Tensor | None,
    state: State | None,
    source: Noise,
    options: Options,
    record: bool,
    remember: bool = True,
) -> Result:
    """Runs the algorithm below, or replays it; `remember` allows an all-empty pass of before."""
    steps = (
        _empty_steps(options, source.num)
        if state is None and prompt is None and options.length
        else 0
    )
    remember = remember and not opaque(model) and steps * _bytes_of_empty(model) <= _EMPTY_BYTES
    if record and remember and options.length:
        made = _replayed(model, prompt, state, source, options, steps)
        if made is not None:
            return made
    empty = None
    if steps:
        empty = (
            _remembered(model, steps) if remember else _Pass(*model.partial_posterior(empty=steps))
        )
    x, z, after = _variational(model, prompt, state, source, options, empty)
    assert z is not None
    return _alone(x), _alone(z), after


def _alone(made: Tensor) -> Tensor:
    """Returns steps that hold on to no others, such as those of the prompt in the same pass."""
    return made.clone() if made.untyped_storage().nbytes() > made.nbytes else made


def _variational(
    model: Variational,
    prompt: Tensor | None,
    state: State | None,
    source: Noise,
    options: Options,
    empty: "_Pass | _Empty | None",
) -> Result:
    """Algorithms "VSSM sampling" (one chunk) and "VSSM chunk sampling"."""
    num, position = source.num, 0 if state is None else state.position
    blind = state is not None and "blind" in state.children
    if blind and options.recondition:
        name = "recondition=True" if options.passes == 1 else f"passes={options.passes}"
        raise ValueError(f"{name} can not start from this state: {BLIND}")
    if prompt is not None and (options.recondition or options.length == 0):
        state = read_variational(model, prompt, state, source)
        position, prompt = state.position, None
    partial = None if state is None else state.child("blind" if blind else "partial")
    decoder = None if state is None else state.child("decoder")
    xs, zs = [], []
    for first in range(0, options.length, options.chunk):
        known = 0 if prompt is None else prompt.shape[1]
        width = min(options.chunk, options.length - first)
        if empty is not None and first + width <= empty.q_z.raw.shape[1]:
            q_z, ahead = Latents(empty.q_z.raw[:, first : first + width]), empty.state
        else:
            q_z, ahead = model.partial_posterior(prompt, empty=width, state=partial)
        start, u, w = decoder, source.latent(model, position, known + width), None
        if options.sample:
            w = source.observation(model, position, known + width)
        z = draw(q_z, u, known, options.temperature)
        x, decoder = _decode(model, z, start, w, options.temperature)
        before = None if partial is None else expand_rows(partial, num)
        for _ in range(min(options.passes, width) - 1):
            z = posterior_ahead(model, x, before).sample(u, options.temperature)
            x, decoder = _decode(model, z, start, w, options.temperature)
        xs.append(x[:, known:])
        zs.append(z[:, known:])
        if options.recondition:
            _, ahead = model.partial_posterior(xs[-1], state=before)
        partial, prompt = ahead, None
        position += known + width
    if partial is None or decoder is None:
        return *nothing(model, num, source), None
    if not options.recondition and options.length:
        blind = True
    state = State(
        {"blind" if blind else "partial": expand_rows(partial, num), "decoder": decoder}, position
    )
    if not xs:
        return *nothing(model, num, source), state
    if len(xs) == 1:
        return xs[0], zs[0], state
    return torch.cat(xs, 1), torch.cat(zs, 1), state


def read_variational(model: Variational, x: Tensor, state: State | None, source: Noise) -> State:
    """Reads known data: draws its latents from the partial posterior and feeds them to the decoder."""
    position = 0 if state is None else state.position
    q_z, partial = model.partial_posterior(
        x, state=None if state is None else state.child("partial")
    )
    z = q_z.sample(source.latent(model, position, x.shape[1]))
    _, decoder = model.likelihood(z, None if state is None else state.child("decoder"))
    return State(
        {"partial": expand_rows(partial, len(z)), "decoder": decoder}, position + x.shape[1]
    )


def _decode(
    model: Variational, z: Tensor, state: State | None, u: Tensor | None, temperature: float
) -> tuple[Tensor, State]:
    """Returns x, a sample with the noise u or the mean without, and the state of the decoder."""
    p_x, after = model.likelihood(z, state)
    return p_x.mean if u is None else p_x.sample(u, temperature), after


def draw(q_z: Latents, u: Tensor, known: int, temperature: float) -> Tensor:
    """Draws z, (..., T, Z); the temperature is for new steps, not for the latents of `known` data."""
    if known == 0 or temperature == 1:
        return q_z.sample(u, temperature)
    old, new = (Latents(part) for part in q_z.logits.tensor_split([known], -3))
    return torch.cat(
        [old.sample(u[..., :known, :]), new.sample(u[..., known:, :], temperature)], -2
    )


class _Pass(NamedTuple):
    """An all-empty pass."""

    q_z: Latents
    state: State


class _Empty(NamedTuple):
    """The all-empty pass over some length, and what it was made with."""

    q_z: Latents
    state: State
    weights: list[Hashable]
    dtype: torch.dtype | None
    """Of products, by autocast."""
    looks: list[Tensor]
    """Views of some numbers of every weight."""
    seen: int
    """What they were."""
    probe: int
    watch: Watch
    """Whether a replay still finds this probe."""


_empty_runs: WeakKeyDictionary[Variational, dict[int, _Empty]] = WeakKeyDictionary()
_emptying = threading.Lock()


def _release(model: nn.Module) -> None:
    """Gives back what was remembered where a model was before it moved."""
    with _emptying:
        known = _empty_runs.get(model, {}) if isinstance(model, Variational) else {}
        if known and next(iter(known.values())).weights != weights_of(model):
            known.clear()


Moving.listeners.append(_release)


def _empty_steps(options: Options, num: int) -> int:
    """Returns over how many empty tokens one row runs at once before all rows are made from nothing.

    All, for all chunks, unless data comes between or they would take more memory than a chunk of all rows.
    """
    if options.recondition or options.length > max(_EMPTY_STEPS, num * options.chunk):
        return min(options.chunk, options.length)
    return options.length


def _bytes_of_empty(model: Variational) -> int:
    """Returns about what a step of an all-empty pass takes as long as it is remembered."""
    config = model.config
    numbers = config.latents * config.classes
    if config.block == "attention":  # keys and values, which hold on to queries
        numbers += 3 * config.width * config.layers
    return numbers * first_weight(model).itemsize


def _remembered(model: Variational, length: int) -> _Pass:
    """Returns an all-empty pass, as remembered or new, whose state is the caller's own."""
    run = _empty_run(model, length, weights_of(model))
    return _Pass(run.q_z, run.state.map(Tensor.clone))


def _empty_run(
    model: Variational, length: int, weights: list[Hashable], probed: bool = True
) -> _Empty:
    """Returns q_omega(z | ∅, ..., ∅), which is the same for every row: one row, remembered by length.

    To look at the weights waits for the device; `probed=False` leaves it to the caller.
    """
    dtype = product_dtype(first_weight(model).device)
    with _emptying:
        _listen_to_optimisers()
        known = _empty_runs.setdefault(model, {})
        run = known.get(length)
        if (
            run is None
            or (run.weights, run.dtype) != (weights, dtype)
            or (probed and run.seen != _sum(run.looks))
        ):
            known.pop(length, None)
            with torch.inference_mode(False), torch.no_grad():  # it is for calls in other modes too
                q_z, state = model.partial_posterior(empty=length)
                probe = int(_probe(model))
                looks = [_some_numbers(weight) for weight in model.partial.parameters()]
                watch = Watch(_show_probe, probe, q_z.raw.device)
                run = _Empty(q_z, state, weights, dtype, looks, _sum(looks), probe, watch)
            known[length] = run
            while len(known) > _EMPTY_RUNS or sum(known) * _bytes_of_empty(model) > _EMPTY_BYTES:
                known.pop(next(iter(known)))
        return run


def _some_numbers(weight: Tensor) -> Tensor:
    """Returns a view of some numbers of a weight, from its first to its last where they lie side by side."""
    numbers = weight.detach()
    row = numbers.view(-1) if numbers.is_contiguous() else numbers[(0,) * (numbers.ndim - 1)]
    return row[:: max(1, len(row) // _LOOKS)]


def _sum(looks: list[Tensor]) -> int:
    """Returns the sum of the bits of some numbers: writes through `.data` count no version."""
    return int(torch.cat(looks).double().view(torch.int64).sum())


def _forget_moved(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Forgets the passes of models whose weights an optimiser has moved: fused ones count no version."""
    if not any(_empty_runs.values()):
        return
    moved = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    with _emptying:
        for model, known in list(_empty_runs.items()):
            if known and not moved.isdisjoint(map(id, model.partial.parameters())):
                known.clear()
                graphs.forget_last(model)


@cache
def _listen_to_optimisers() -> None:
    register_optimizer_step_post_hook(_forget_moved)


def _probe(model: Variational) -> Tensor:
    """Looks at two of the weights, as a replay does: whatever trains all of them changes these too."""
    assert model.partial.blank is not None
    bits = torch.cat([model.partial.blank, model.partial.norm.weight])
    return bits.view(torch.int64 if bits.nbytes % 8 == 0 else torch.uint8).sum()


def _show_probe(model: Variational, place: Tensor) -> None:
    """Writes the probe to memory of the host, without waiting for it."""
    assert model.partial.blank is not None
    weights = model.partial.blank, model.partial.norm.weight
    whole = all(
        w.nbytes % 8 == w.storage_offset() * w.itemsize % 8 == 0 for w in weights
    )  # words of 64 bits
    if whole and choose_backend("auto", weights[0].device, torch.float32) == "triton":
        from vssm.sampling import probe_triton

        probe_triton.show(weights, place)
    else:
        place.copy_(_probe(model), non_blocking=True)


def _replayed(
    model: Variational,
    prompt: Tensor | None,
    state: State | None,
    source: Noise,
    options: Options,
    steps: int,
) -> Result | None:
    """Replays `_variational`, after an all-empty pass over `steps`; None if it is to run itself."""
    inputs, end = packed(model, prompt, state, source), end_of(prompt, state, options)
    fixed = options, source.num, describe(inputs.tensors)
    empty = _empty_runs.get(model, {}).get(steps)
    made = graphs.again(model, source.device, _key(fixed, empty), *inputs, end)
    if made is None:
        weights = weights_of(model)
        empty = _empty_run(model, steps, weights, probed=False) if steps else None
        made = graphs.attempt(
            model,
            source.device,
            _key(fixed, empty),
            lambda recorder: OneShot(
                recorder,
                model,
                partial(_variational_tree, options, empty),
                inputs.tensors,
                inputs.fixed(source),
                empty or (),
                None if empty is None else empty.watch,
                inputs.numbers,
            ),
            *inputs,
            end,
            weights=weights,
        )
    # None also if the weights were changed, unseen: `_variational` then makes and remembers a new pass.
    return None if made is None else taken(made, source)


def repeat_variational(
    model: Variational,
    num: int,
    options: Options,
    question: tuple,
    inputs: State,
    numbers: dict[str, int],
    end: int,
) -> State | None:
    """Does what `_replayed` does from nothing with one seed, in less time; None if that is to find out.

    `question` is by what `graphs.same` then finds it, in still less.
    """
    empty = _empty_runs.get(model, {}).get(_empty_steps(options, num))
    if empty is None or not graphs.usable(device := empty.q_z.raw.device):
        return None
    key = _key((options, num, describe(inputs)), empty)
    return graphs.again(model, device, key, inputs, numbers, end, question=question)


def _key(fixed: Hashable, empty: _Empty | None) -> Hashable:
    return "one shot", fixed, None if empty is None else empty.q_z.raw.data_ptr()


def _variational_tree(
    options: Options, empty: _Empty | None, model: Variational, inputs: State
) -> State:
    """Does `_variational` on a tree of inputs, as it is recorded."""
    prompt, state, source = unpacked(inputs)
    made = _variational(model, prompt, state, source, options, empty)
    return results(made, source)
