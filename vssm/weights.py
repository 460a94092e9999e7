"""Where the weights are that generation reads, and whether they changed, asked for at every replayed call."""

import operator
from collections.abc import Hashable
from itertools import chain
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from vssm.models import Variational

__all__ = ["first_weight", "found_weights", "weights_of"]

_version = operator.attrgetter("_version")
_found: WeakKeyDictionary[nn.Module, tuple[list[dict], list, list[nn.Parameter]]] = WeakKeyDictionary()


def weights_of(model: nn.Module) -> list[Hashable]:
    """Returns where the weights are and how often they were changed, as far as their versions tell."""
    weights = found_weights(model)
    try:
        versions = list(map(_version, weights))
    except RuntimeError:  # weights made in inference mode have none
        versions = []
    return [model.training, weights[0].dtype, *map(Tensor.data_ptr, weights), *versions]


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
    tables, values, weights = _found.get(model, ((), (), ()))
    held = chain.from_iterable(map(dict.values, tables))
    if weights and sum(map(len, tables)) == len(values) and all(map(operator.is_, held, values)):
        return weights
    modules, unread = [model], model.encoder if isinstance(model, Variational) else None
    for module in modules:  # grows on the way
        modules += [child for child in module._modules.values() if child not in (None, unread)]
    # Some modules, and all weights, could be replaced: look at every table of names next time.
    tables = [table for m in modules for table in (m._modules, m._parameters) if table]
    weights = [weight for m in modules for weight in m._parameters.values() if weight is not None]
    _found[model] = tables, [value for table in tables for value in table.values()], weights
    return weights
