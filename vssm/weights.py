"""Where the weights are that generation reads, and whether they changed, asked for at every replayed call."""

import operator
from collections.abc import Hashable
from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from vssm.models import Variational

__all__ = ["first_weight", "found_weights", "listened_to", "weights_of"]

_version = operator.attrgetter("_version")
_found: WeakKeyDictionary[nn.Module, "_Found"] = WeakKeyDictionary()


class _Found(NamedTuple):
    tables: list[dict]
    """Of names, of modules and of weights."""
    values: list
    """All that was in them."""
    weights: list[nn.Parameter]
    hooks: list[dict]
    times: int
    """How often something else was found: a module may be in the place of another, with the same weights."""


def weights_of(model: nn.Module) -> list[Hashable]:
    """Returns where the weights are and how often they were changed, as far as their versions tell.

    And how often modules were replaced, and whether somebody listens to one: a replay would call nobody.
    """
    weights = found_weights(model)
    try:
        versions = list(map(_version, weights))
    except RuntimeError:  # weights made in inference mode have none
        versions = []
    found = _found[model]
    modules = model.training, any(found.hooks), found.times
    return [*modules, weights[0].dtype, *map(Tensor.data_ptr, weights), *versions]


def listened_to(model: nn.Module) -> bool:
    """Says whether a module of a model that generation calls has a hook."""
    found_weights(model)
    return any(_found[model].hooks)


def first_weight(module: nn.Module) -> Tensor:
    """Does the same as `next(module.parameters())`, in less time.

    Example:
        >>> model = nn.Sequential(nn.Tanh(), nn.Linear(2, 3))
        >>> first_weight(model) is model[1].weight
        True
    """
    ahead = [module]
    while True:
        module = ahead.pop()
        for weight in module._parameters.values():
            if weight is not None:
                return weight
        ahead += [child for child in reversed(module._modules.values()) if child is not None]


def found_weights(model: nn.Module) -> list[nn.Parameter]:
    """Does the same as `parameters()`, which would take most of the time of a short call.

    An encoder is left out: only training and scores read it.
    """
    found = _found.get(model)
    if found is not None and found.weights and sum(map(len, found.tables)) == len(found.values):
        held = chain.from_iterable(map(dict.values, found.tables))
        if all(map(operator.is_, held, found.values)):
            return found.weights
    modules, unread = [model], model.encoder if isinstance(model, Variational) else None
    for module in modules:  # grows on the way
        modules += [child for child in module._modules.values() if child not in (None, unread)]
    # Some modules, and all weights, could be replaced: look at every table of names next time.
    tables = [table for m in modules for table in (m._modules, m._parameters) if table]
    weights = [weight for m in modules for weight in m._parameters.values() if weight is not None]
    hooks = [table for m in modules for table in (m._forward_hooks, m._forward_pre_hooks)]
    values = [value for table in tables for value in table.values()]
    _found[model] = _Found(tables, values, weights, hooks, 0 if found is None else found.times + 1)
    return weights
