"""The model of a run, where its config leaves that open: as its data have it, or the model it starts from."""

from dataclasses import fields, replace

from vssm.config import ModelConfig, RunConfig
from vssm.data import Meta
from vssm.models import Model

__all__ = ["resolve"]


def resolve(config: RunConfig, meta: Meta, first: Model | None = None) -> RunConfig:
    """Returns the config with the model's features, head and bins as the data has them.

    Arguments:
        config: What was asked for.
        meta: What the data are.
        first: The model that the run starts from, whose settings it has then.
    """
    if first is not None:
        _check_asked(config, first.config)
        config = replace(config, model=first.config)
    head, tokens = config.model.head, meta.suggested_head == "categorical"
    if head == "auto":
        head = meta.suggested_head
    if tokens != (head == "categorical"):
        allowed = "'categorical'" if tokens else "any other head"
        raise ValueError(
            f"head={head!r} does not suit data set {meta.name!r}; allowed: 'auto', {allowed}"
        )
    if head == "logistic-mixture" and meta.levels is None:
        raise ValueError(
            f"head={head!r} needs values in levels, data set {meta.name!r} has none; allowed: 'auto'"
        )
    bins = meta.levels if head == "logistic-mixture" and meta.levels else config.model.bins
    model = replace(config.model, features=meta.features, head=head, bins=bins)
    if first is not None and model != first.config:
        own = first.config
        raise ValueError(
            f"init={config.train.init!r} has {own.features} features and {own.bins} bins, data set "
            f"{meta.name!r} {model.features} and {model.bins}; allowed: a model of the same (--train.init)"
        )
    return replace(config, model=model)


def _check_asked(config: RunConfig, own: ModelConfig) -> None:
    """Raises where the config asks for another model than the one that the run starts from."""
    usual = RunConfig().model
    for name in (field.name for field in fields(own)):
        given, has = getattr(config.model, name), getattr(own, name)
        if given not in (has, getattr(usual, name)):
            raise ValueError(
                f"{name}={given!r} is not that of init={config.train.init!r}; allowed: {has!r}, or to leave "
                f"it out (--model.{name.replace('_', '-')})"
            )
