"""Set-up before the first step: fits the model to the data and checks the options."""

import warnings
from dataclasses import replace

import torch

from vssm.config import ModelConfig, RunConfig
from vssm.data import Data, Meta, Split
from vssm.data.dataset import in_parts, is_grey
from vssm.distributions import Head
from vssm.models import Model


def resolve(config: RunConfig, meta: Meta, first: Model | None = None) -> RunConfig:
    """Returns the config with the model's features, head and bins taken from the data.

    Arguments:
        config: The run as the user wrote it.
        meta: What the data look like.
        first: The model that the run starts from; its settings replace those of the config.
    """
    if first is not None:
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
            f"head={head!r} needs values at equally spaced levels, such as 8-bit images; "
            f"use 'auto' for data set {meta.name!r}"
        )
    if meta.given and config.model.known != "any":
        raise ValueError(
            f"{meta.given} features of data set {meta.name!r} are given, such as labels; "
            "train with --model.known any"
        )
    decided = {"features": meta.features, "head": head}
    if head == "logistic-mixture":
        decided["bins"] = meta.levels
    if config.model.known == "any":
        decided["given"] = meta.given
        if config.model.window == ModelConfig(features=1).window:
            decided["window"] = meta.length
    model = replace(config.model, **decided)
    if first is not None and model != first.config:
        own = first.config
        raise ValueError(
            f"init={config.train.init!r} has {own.features} features and {own.bins} bins, but data "
            f"set {meta.name!r} has {model.features} and {model.bins}; use a model that has as many"
        )
    return replace(config, model=model)


def check_data(config: RunConfig, head: Head, data: Data) -> None:
    """Raises where the data do not fit the options or the model; warns of odd data."""
    options = config.train
    if options.shift and data.meta.image_shape is None:
        raise ValueError(
            f"shift={options.shift:g} is for images, and data set {data.meta.name!r} has none;"
            " use --train.shift 0"
        )
    if options.batch > len(data.train):
        raise ValueError(
            f"batch={options.batch} is more than the {len(data.train)} sequences of the training"
            " set; use a smaller --train.batch"
        )
    for name, split in (("training", data.train), ("validation", data.valid)):
        check_values(head, split, f"the {name} set", data.meta.given)
    if head.name == "bernoulli" and (is_grey(data.train) or is_grey(data.valid)):
        warnings.warn(
            f"head='bernoulli' is for values that are 0 or 1, and data set {data.meta.name!r} has"
            " others: its scores are pseudo-likelihoods, which do not compare with likelihoods. Use"
            " --binarize for black and white images, or another head (--model.head gaussian,"
            " logistic-mixture)",
            stacklevel=4,
        )


def check_values(head: Head, split: Split, name: str, given: int = 0) -> None:
    """Checks once, before training, that the model can read all sequences.

    The last `given` features may have any finite values; others may be missing if the split says
    so.
    """
    if not len(split):
        raise ValueError(f"{name} is empty; use more data")
    first = 0
    for x in in_parts(split):
        if given:
            x, always = x.split([x.shape[-1] - given, given], -1)
            if not always.isfinite().all():
                raise ValueError(
                    f"{name} from row {first} has missing values in given features; fill them"
                )
        if split.missing:
            x = torch.where(x.isnan(), 0.0, x)
        head.validate(x, name=f"{name} from row {first}")
        first += len(x)
