"""Sequences of different lengths: batches with padding, and prompts of different lengths.

All models are causal, so padding after the end of a row never changes the row.

Legend: x (B, T, D), or tokens (B, T); lengths (B,), the real steps of each row, C_b those of a
prompt.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vssm.checks import check_model, check_sequence, shown
from vssm.models import Model
from vssm.nn import State
from vssm.sampling.generation import Generation, generate
from vssm.sampling.request import check_noise


class Ragged(NamedTuple):
    """The result of `generate_ragged`."""

    x: Tensor
    """The new steps only, (B, length, D), or (B, length) tokens."""
    z: Tensor | None
    """Their latents, (B, length, Z); None for an autoregressive model."""
    states: list[State] | None
    """The state of each row, to resume from; None unless asked for."""


def pad(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns sequences of different lengths as one batch, padded with zeros, and their lengths.

    Arguments:
        sequences: Each (T, D), or (T,) tokens.

    Example:
        >>> x, lengths = pad([torch.ones(3, 2), torch.ones(1, 2)])
        >>> x.shape, lengths, x[1, :, 0]
        (torch.Size([2, 3, 2]), tensor([3, 1]), tensor([1., 0., 0.]))
    """
    several = isinstance(sequences, Sequence | Tensor) and len(sequences) > 0
    if not several or not all(isinstance(one, Tensor) and one.ndim for one in sequences):
        raise ValueError(
            f"sequences is {shown(sequences)}; it must be a list of one tensor (steps, ...) or more"
        )
    shapes = {tuple(sequence.shape[1:]) for sequence in sequences}
    dtypes = {str(sequence.dtype).removeprefix("torch.") for sequence in sequences}
    if len(shapes) > 1 or len(dtypes) > 1:
        raise ValueError(
            f"sequences have steps of shapes {sorted(shapes)} and dtypes {sorted(dtypes)}; "
            "they must have one shape and one dtype"
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
    """Continues prompts of different lengths; every row is continued as if it were alone.

    Row b reads the noise of row b: it equals `generate(model, prompt=prompts[b][None], rows=[b],
    ...)`. Rows with prompts of equal length are generated together.

    Arguments:
        model: Any of the six models.
        prompts: Each (C_b, D), or (C_b,) tokens, on the device of the model; C_b may be 0.
        length: The number of new steps of every row.
        seed: Selects the sample; one for all rows, or one for each, (B,).
        states: Whether to return a state for each row, to resume from.
        options: Options of `generate`: `chunk`, `recondition`, `passes`, `temperature`, `observe`.

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
    model = check_model(model)
    x, lengths = pad(prompts)
    x = check_sequence(model, x, "prompts", steps=0)
    seeds = check_noise(len(x), seed, None, None, x.device).seed
    made: dict[int, Generation] = {}
    for steps in sorted(set(lengths.tolist())):
        rows = (lengths == steps).nonzero().flatten()
        out = generate(
            model, prompt=x[rows, :steps], length=length, seed=seeds[rows], rows=rows, **options
        )
        for k, row in enumerate(rows.tolist()):
            z = None if out.z is None else out.z[k : k + 1]
            state = out.state.select([k]) if states else out.state
            made[row] = Generation(out.x[k : k + 1], z, state)
    parts = [made[row] for row in range(len(x))]
    latents = [part.z for part in parts if part.z is not None]
    return Ragged(
        torch.cat([part.x for part in parts]),
        torch.cat(latents) if latents else None,
        [part.state for part in parts] if states else None,
    )
