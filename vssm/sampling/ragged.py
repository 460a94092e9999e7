"""Sequences of different lengths: padding, the mask of what is real, and prompts of different
lengths.

All models are causal: what comes after the end of a row never changes what was before it. So a row
of a padded batch is the row alone once the terms after its end are left out, whatever the padding
holds.

A vssm or tvae continues prompts of all lengths in one pass, as it was trained: the partial
posterior reads x_{1:C_b} of row b and empty tokens after it. The new steps of row b are C_b + 1,
..., C_b + T of that pass.

Legend: x (B, T, D), or tokens (B, T); lengths (B,), the real steps of each row, C_b those of a
prompt.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vssm.checks import whole_number
from vssm.distributions import Latents
from vssm.models import Model, Variational, inner_model
from vssm.nn import State
from vssm.sampling.generation import Generation, generate
from vssm.sampling.request import Noise, check_room
from vssm.sampling.slabs import in_slabs, rows_of_slab

__all__ = ["Ragged", "generate_ragged", "pad"]


class Ragged(NamedTuple):
    """What `generate_ragged` made."""

    x: Tensor
    """The new steps only, (B, length, D), or (B, length) tokens."""
    z: Tensor | None
    """Their latents, (B, length, Z); None for an autoregressive model."""
    states: list[State] | None
    """Where to resume each row, where asked for."""


def pad(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns sequences of different lengths as one batch, padded with zeros, and their lengths.

    Arguments:
        sequences: Each (T, D), or (T,) tokens.

    Example:
        >>> x, lengths = pad([torch.ones(3, 2), torch.ones(1, 2)])
        >>> x.shape, lengths, x[1, :, 0]
        (torch.Size([2, 3, 2]), tensor([3, 1]), tensor([1., 0., 0.]))
    """
    several = isinstance(sequences, Sequence) or (
        isinstance(sequences, Tensor) and sequences.ndim > 0
    )
    if not several or not len(sequences):
        given = "empty" if several else f"a {type(sequences).__name__}"
        raise ValueError(f"sequences is {given}; allowed: a list of one sequence or more")
    for k, sequence in enumerate(sequences):
        if not isinstance(sequence, Tensor) or not sequence.ndim:
            given = "a number" if isinstance(sequence, Tensor) else f"a {type(sequence).__name__}"
            raise ValueError(f"sequence {k} is {given}; allowed: a torch tensor (steps, ...)")
    shapes = {tuple(sequence.shape[1:]) for sequence in sequences}
    if len(shapes) > 1 or len({sequence.dtype for sequence in sequences}) > 1:
        dtypes = sorted({str(sequence.dtype).removeprefix("torch.") for sequence in sequences})
        raise ValueError(
            f"sequences have steps of shapes {sorted(shapes)} and dtypes {dtypes}; "
            "allowed: one of each"
        )
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=sequences[0].device)
    return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True), lengths


@torch.no_grad()
def generate_ragged(
    model: Model,
    prompts: Sequence[Tensor],
    length: int,
    seed: int | Tensor = 0,
    states: bool = False,
    **options: Any,  # noqa: ANN401
) -> Ragged:
    """Continues prompts of different lengths; every row is as if it were alone.

    Row b reads the noise of row b: it equals `generate(model, prompt=prompts[b][None], rows=[b],
    ...)`. A vssm or tvae does all rows in one pass, or as many as fit the memory, unless it is
    asked for states or to work in chunks. The others, whose rows are at different steps, go through
    the lengths one by one.

    Arguments:
        model: Any of the six models.
        prompts: Each (C_b, D), or (C_b,) tokens, on the device of the model; C_b may be 0.
        length: The number of new steps of every row.
        seed: Names the sample; one for all rows, or one for each, (B,).
        states: Whether to return where each row can be resumed.
        options: Those of `generate`: `chunk`, `recondition`, `passes`, `temperature`, `observe`.

    Example:
        >>> from vssm import ModelConfig, build
        >>> sizes = {"width": 8, "layers": 1, "latents": 4, "classes": 5}
        >>> model = build(ModelConfig(kind="vssm", features=3, **sizes))
        >>> prompts = [torch.rand(5, 3), torch.rand(2, 3)]
        >>> together = generate_ragged(model, prompts, length=4).x
        >>> alone = generate(model, prompt=prompts[1][None], length=4, rows=[1]).x
        >>> torch.allclose(together[1], alone[0], atol=1e-5)
        True
    """
    model = inner_model(model)
    x, lengths = pad(prompts)
    model.head.validate(x, name="prompts", values=False, steps=0)
    device = next(model.parameters()).device
    if x.device != device:
        raise ValueError(f"prompts are on {x.device}; allowed: {device}, the device of the model")
    model.head.validate(x, name="prompts", steps=0)
    length = whole_number("length", length, 0)
    check_room(model, len(x), length, device)
    if isinstance(model, Variational) and not states and set(options) <= {"temperature", "observe"}:
        return _in_one_pass(model, x, lengths, length, seed, **options)
    seeds = generate(model, num=len(x), length=0, seed=seed).state["seed"]  # checks them too
    made: dict[int, Generation] = {}
    for steps in sorted(set(lengths.tolist())):
        rows = (lengths == steps).nonzero().flatten().tolist()
        own = seed if isinstance(seed, int) else seeds[rows]
        out = generate(model, prompt=x[rows, :steps], length=length, seed=own, rows=rows, **options)
        for k, row in enumerate(rows):
            here = slice(k, k + 1)
            z = None if out.z is None else out.z[here]
            made[row] = Generation(out.x[here], z, out.state.select([k]) if states else out.state)
    parts = [made[row] for row in range(len(x))]
    latents = [part.z for part in parts if part.z is not None]
    return Ragged(
        torch.cat([part.x for part in parts]),
        torch.cat(latents) if latents else None,
        [part.state for part in parts] if states else None,
    )


def _in_one_pass(
    model: Variational,
    prompts: Tensor,
    lengths: Tensor,
    length: int,
    seed: int | Tensor,
    temperature: float = 1.0,
    observe: str = "mean",
) -> Ragged:
    # For its checks, and the noise of the rows.
    start = generate(
        model, num=len(prompts), length=0, temperature=temperature, observe=observe, seed=seed
    )
    device, steps = prompts.device, prompts.shape[1] + length
    if not length:
        return Ragged(start.x, start.z, None)

    def make(prompts: Tensor, lengths: Tensor, source: Noise) -> State:
        known = prompts.to(torch.int64 if model.head.tokens else next(model.parameters()).dtype)
        q_z, _ = model.partial_posterior(known, cut=lengths, empty=length)
        new = torch.arange(steps, device=device) >= lengths[:, None]
        # The temperature applies to new steps, not to the latents of known data.
        heat = torch.where(new, temperature, 1.0)[..., None, None]
        z = Latents(q_z.logits / heat).sample(source.latent(model, 0, steps))
        p_x, x = model.likelihood(z)[0], None
        if observe == "sample":
            x = p_x.sample(source.observation(model, 0, steps), temperature)
        x = p_x.mean if x is None else x
        row = torch.arange(len(z), device=device)[:, None]
        index = lengths[:, None] + torch.arange(length, device=device)
        return State({"x": x[row, index], "z": z[row, index]})

    rows = rows_of_slab(model, len(prompts), steps, reads=True)
    source = Noise(start.state["seed"], start.state["row"])
    made = in_slabs(make, rows, len(prompts), prompts, lengths, source)
    return Ragged(made["x"], made["z"], None)
