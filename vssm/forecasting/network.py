"""The model under a forecaster: how it is built, scored and sampled on windows of a panel.

A vssm has known="any": the history is known, the horizon is drawn, missing cells are neither, and
covariates are given. The other kinds continue a prefix. They read missing values as the centre of
the window, and have no covariates.

Legend: B windows of T steps of P points; S paths of each.
"""

import torch
from torch import Tensor

from vssm.config import ModelConfig
from vssm.distributions import gumbel_uniform
from vssm.forecasting.windows import Batch, Layout
from vssm.models import AnyPart, Autoregressive, Model, build, first_weight
from vssm.models.anypart import Part
from vssm.noise import Noise, fork
from vssm.objectives import objective
from vssm.objectives.parts import bound_of_part
from vssm.sampling.anypart import make_part
from vssm.sampling.generation import generate
from vssm.sampling.request import Options


def model_config(
    kind: str, layout: Layout, given: int, width: int, layers: int, latents: int, classes: int
) -> ModelConfig:
    """Returns the settings of the model of a kind for windows of a layout."""
    sizes = {"width": width, "layers": layers, "latents": latents, "classes": classes}
    known = {"features": layout.patch}
    if kind == "vssm":
        known = {"known": "any", "features": layout.patch + given, "given": given}
        known["window"] = layout.steps
    return ModelConfig(kind=kind, head="student-t", **known, **sizes)  # type: ignore[arg-type]


def build_model(config: ModelConfig) -> Model:
    """Returns a model with fresh weights, whose first forecast is the centre of the window."""
    model = build(config)
    if isinstance(model, AnyPart):
        torch.nn.init.zeros_(model.out.weight)
    elif isinstance(model, Autoregressive):
        torch.nn.init.zeros_(model.stack.out.weight)
    return model


def loss_of(model: Model, batch: Batch, generator: torch.Generator) -> Tensor:
    """Returns the loss of a batch, in nats for each value."""
    batch = batch.to(first_weight(model).device)
    if isinstance(model, AnyPart):
        part = _part(batch)

        def gumbel(*sizes: int) -> Tensor:
            return gumbel_uniform((len(part.x), *sizes), part.x.device, generator)

        reconstruction, kl = bound_of_part(model, part, gumbel)
        return (kl - reconstruction).sum() / part.made.sum().clamp(min=1)
    if isinstance(model, Autoregressive):
        p_x, _ = model(batch.x)
        there = batch.known | batch.made
        return -torch.where(there, p_x.entry_log_prob(batch.x), 0).sum() / there.sum().clamp(min=1)
    return objective(model, batch.x, generator).loss.sum() / batch.x.numel()


def _part(batch: Batch) -> Part:
    given = torch.ones_like(batch.given, dtype=torch.bool)
    return Part(
        torch.cat([batch.x, batch.given], 2),
        torch.cat([batch.known, given], 2),
        torch.cat([batch.made, ~given], 2),
    )


@torch.no_grad()
def draw_paths(
    model: Model, batch: Batch, layout: Layout, samples: int, seed: int, first: int = 0
) -> Tensor:
    """Returns paths of the points of windows, (B, S, L); every path draws its own latents.

    The seed selects the paths. `first` is the row of the noise of the first window.
    """
    device = first_weight(model).device
    batch = batch.to(device)
    rows = fork(torch.arange(len(batch.x), device=device) + first, samples).flatten()
    seeds = torch.full_like(rows, seed)
    if isinstance(model, AnyPart):
        part = _part(batch).map(lambda values: values.repeat_interleave(samples, 0))
        options = Options(layout.steps, 0, False, 1, 1.0, True)
        made, _, _ = make_part(model, part, Noise(seeds, rows), options, 0, None)
        made = made[..., : layout.patch]
    else:
        past = batch.x[:, : layout.history_steps].repeat_interleave(samples, 0)
        length = layout.steps - layout.history_steps
        options = {"observe": "sample", "seed": seeds, "rows": rows}
        made = torch.cat([past, generate(model, length=length, prompt=past, **options).x], 1)
    return made.flatten(1).unflatten(0, (-1, samples)).cpu()
