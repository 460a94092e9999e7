"""Sampling of many paths from each history, for a vssm or tvae: one history is read once for all of them.

    q_omega(z_t | x_{1:C}), h_C          once a history: logits of the steps to come, state of the decoder
    z, x                                 for each of S paths, from noise of its own, for all steps at once

Path s of the history with row r reads the noise of row r S + s, as after `State.repeat(S)`.

On a GPU, reading and all that follows is one CUDA graph from the second call of the same sizes on: seed and
first row are numbers that are filled in, so slabs of as many histories replay one recording.

Legend: B histories, S paths of each, T new steps; x (B, C, D); z (B S, T, Z); paths (B, S, T, D).
"""

from functools import partial

import torch
from torch import Tensor

from vssm import graphs
from vssm.distributions import Latents
from vssm.models import Variational
from vssm.nn import State
from vssm.sampling.request import Noise

__all__ = ["paths_after", "paths_from"]


def paths_after(
    model: Variational,
    prompt: Tensor,
    seed: int,
    first: int,
    samples: int,
    length: int,
    temperature: float = 1.0,
) -> Tensor:
    """Returns paths after histories that are given as data, (B, S, T, D).

    Arguments:
        model: The model.
        prompt: The histories, (B, C, D), on the device of the model.
        seed: Names the paths.
        first: The row of the first history; the others follow.
        samples: S, paths of each.
        length: T, new steps.
        temperature: As for `generate`.
    """
    device, num = prompt.device, len(prompt)
    numbers = {"seed": seed, "first": first}
    sizes = samples, length, temperature

    def make(recorder: graphs.Recorder) -> graphs.OneShot:
        fixed = State({name: torch.full((num,), number, device=device) for name, number in numbers.items()})
        return graphs.OneShot(recorder, model, partial(_paths_tree, *sizes), State({"prompt": prompt}), fixed)

    if graphs.usable(device) and type(model) is Variational:
        key = "paths", prompt.shape, prompt.dtype, sizes
        inputs = State({"prompt": prompt}), numbers, prompt.shape[1] + length
        made = graphs.attempt(model, device, key, make, *inputs)
        if made is not None:
            return made["x"]
    rows = torch.arange(first, first + num, device=device)
    return _read_on(model, prompt, Noise(torch.full((num,), seed, device=device), rows), *sizes)


def paths_from(
    model: Variational, state: State, samples: int, length: int, temperature: float = 1.0
) -> Tensor:
    """Returns paths that go on from a state of `observe`, (B, S, T, D)."""
    q_z, _ = model.partial_posterior(empty=length, state=state.child("partial"))
    source = Noise(state["seed"], state["row"])
    return _decoded(model, q_z.raw, state.child("decoder"), source, samples, temperature)


def _read_on(
    model: Variational, prompt: Tensor, source: Noise, samples: int, length: int, temperature: float
) -> Tensor:
    """Reads histories and makes paths after them; the partial posterior goes over both at once."""
    known = prompt.shape[1]
    q_z, _ = model.partial_posterior(prompt, empty=length)
    z = Latents(q_z.raw[:, :known]).sample(source.latent(model, 0, known))
    _, state = model.decoder(z)
    return _decoded(model, q_z.raw[:, known:], state, source, samples, temperature)


def _decoded(
    model: Variational, logits: Tensor, state: State, source: Noise, samples: int, temperature: float
) -> Tensor:
    """Draws paths and decodes them.

    Arguments:
        model: The model.
        logits: Those of the new steps, (B, T, Z, N).
        state: That of the decoder after the histories.
        source: The noise of the histories.
        samples: S.
        temperature: As for `generate`.
    """
    batch, length = logits.shape[:2]
    rows = State({"seed": source.seed, "row": source.row}).repeat(samples)
    own = Noise(rows["seed"], rows["row"])
    # One row of logits serves all paths of a history without being copied, and so does one state.
    u = own.latent(model, state.position, length).unflatten(0, (batch, samples))
    z = Latents(logits[:, None]).sample(u, temperature).flatten(0, 1)
    start = state if model.config.block == "mamba" else state.repeat(samples)
    w, _ = model.decoder.run(model.decoder.embed(z), start, last=False)
    x = model.head(w).sample(own.observation(model, state.position, length), temperature)
    return x.unflatten(0, (batch, samples))


def _paths_tree(samples: int, length: int, temperature: float, model: Variational, inputs: State) -> State:
    """Makes paths of a tree of inputs, as it is recorded."""
    prompt, first = inputs["prompt"], inputs["first"]
    rows = first + torch.arange(len(prompt), device=prompt.device)
    source = Noise(inputs["seed"], rows)
    return State({"x": _read_on(model, prompt, source, samples, length, temperature)})
