"""Set-up before the first step: fits the model to the data and checks the options."""

import os
import warnings
from dataclasses import fields, replace

import torch

from vssm.config import ModelConfig, RunConfig, TrainConfig
from vssm.data import Data, Meta, Split
from vssm.distributions import HEADS_IN_UNIT, Head
from vssm.models import Model

__all__ = ["check_options", "check_values", "resolve", "warn_of_grey", "warn_of_mps"]


def resolve(config: RunConfig, meta: Meta, first: Model | None = None) -> RunConfig:
    """Returns the config with the model's features, head and bins taken from the data.

    Arguments:
        config: The run as the user wrote it.
        meta: What the data look like.
        first: The model that the run starts from; its settings replace those of the config.
    """
    if first is not None:
        _check_asked(config, first.config)
        config = replace(config, model=first.config)
    head, tokens = config.model.head, meta.suggested_head == "categorical"
    if head == "auto":
        head = meta.suggested_head
    if tokens != (head == "categorical"):
        other = "'categorical'" if tokens else "any other head"
        raise ValueError(
            f"head={head!r} does not suit data set {meta.name!r}; use 'auto' or {other}"
        )
    if head == "logistic-mixture" and meta.levels is None:
        raise ValueError(
            f"head={head!r} needs values in levels, data set {meta.name!r} has none; use 'auto'"
        )
    bins = meta.levels if head == "logistic-mixture" and meta.levels else config.model.bins
    model = replace(
        config.model, features=meta.features, head=head, bins=bins, **_any_part(config, meta)
    )
    if first is not None and model != first.config:
        own = first.config
        raise ValueError(
            f"init={config.train.init!r} has {own.features} features and {own.bins} bins, data set "
            f"{meta.name!r} {model.features} and {model.bins}; use a model of the same"
        )
    return replace(config, model=model)


def _any_part(config: RunConfig, meta: Meta) -> dict[str, int]:
    """Returns the settings of a model with known="any" that the data decide."""
    if config.model.known != "any":
        if meta.given:
            raise ValueError(
                f"{meta.given} features of data set {meta.name!r} are given, such as labels; "
                "train with --model.known any"
            )
        return {}
    usual = config.model.window == ModelConfig(features=1).window
    return {"given": meta.given, "window": meta.length if usual else config.model.window}


def _check_asked(config: RunConfig, own: ModelConfig) -> None:
    """Raises where the config asks for another model than the one that the run starts from."""
    default = RunConfig().model
    for name in (field.name for field in fields(own)):
        given, has = getattr(config.model, name), getattr(own, name)
        if given not in (has, getattr(default, name)):
            raise ValueError(
                f"{name}={given!r} is not that of init={config.train.init!r}; use {has!r}, or leave"
                f" it out (--model.{name.replace('_', '-')})"
            )


def check_options(options: TrainConfig, data: Data) -> None:
    """Raises where the options of a training do not fit its data or this machine."""
    if options.shift and data.meta.image_shape is None:
        raise ValueError(
            f"shift={options.shift:g} is for images, data set {data.meta.name!r} has none;"
            " use --train.shift 0"
        )
    if options.batch > len(data.train):
        raise ValueError(
            f"batch={options.batch} is more than the {len(data.train)} sequences of the training"
            " set; use a smaller --train.batch"
        )


def check_values(head: Head, split: Split, name: str, given: int = 0) -> None:
    """Checks once, before training, that the model can read all sequences.

    The last `given` features have no distribution and any finite values. Others may be missing if
    the split says so.
    """
    if not len(split):
        raise ValueError(f"{name} is empty; use more data")
    first = 0
    for x in split.parts():
        if given:
            x, always = x.split([x.shape[-1] - given, given], -1)
            if not always.isfinite().all():
                raise ValueError(f"{name} from row {first} has given features that are not known")
        if split.missing:
            x = torch.where(x.isnan(), 0.0, x)
        head.validate(x, name=f"{name} from row {first}", values=False)
        if head.name in HEADS_IN_UNIT and (x.min() < 0 or x.max() > 1):
            raise ValueError(
                f"head={head.name!r} is for values in [0, 1], {name} has others; use 'auto'"
            )
        head.validate(x, name=f"{name} from row {first}")
        first += len(x)


def warn_of_grey(head: Head, data: Data) -> None:
    """Warns if a Bernoulli head will be trained on values between 0 and 1."""
    if head.name == "bernoulli" and (data.train.is_grey() or data.valid.is_grey()):
        warnings.warn(
            f"head='bernoulli' is for values that are 0 or 1, and data set {data.meta.name!r} has"
            " others: its scores are pseudo-likelihoods, which do not compare with likelihoods. Use"
            " --binarize for black and white images, or another head (--model.head gaussian,"
            " logistic-mixture)",
            stacklevel=4,
        )


def warn_of_mps(device: torch.device, dtype: torch.dtype) -> None:
    """Warns if products may be wrong: see "Sharing a GPU" in docs/kernels.md."""
    share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
    if device.type == "cuda" and dtype == torch.bfloat16 and share != "100":
        warnings.warn(
            f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={share}: cuBLAS has computed wrong bfloat16 "
            "products with a part of a GPU, so losses may be wrong or not finite; unset it, or set "
            "it to 100",
            stacklevel=4,
        )
