"""Where the weights of a model are, and whether they changed, asked for at every call that is replayed."""

import operator
from collections.abc import Hashable
from itertools import chain
from weakref import WeakKeyDictionary

from torch import Tensor, nn

__all__ = ["places_of", "weights_of"]

_version = operator.attrgetter("_version")
_found: WeakKeyDictionary[nn.Module, tuple[list[dict], list, list[nn.Parameter]]] = WeakKeyDictionary()


def weights_of(model: nn.Module) -> list[Hashable]:
    """Returns where the weights are and how often they were changed, as far as their versions tell."""
    weights = _weights(model)
    try:
        versions = list(map(_version, weights))
    except RuntimeError:  # weights made in inference mode have none
        versions = []
    return [model.training, weights[0].dtype, *map(Tensor.data_ptr, weights), *versions]


def places_of(model: nn.Module) -> list[int]:
    """Returns where those weights are now that `weights_of` has found last.

    They are held until it is asked again: if none has moved, their memory can still be read, even if the
    model has got others by now.
    """
    return list(map(Tensor.data_ptr, _found[model][2]))


def _weights(model: nn.Module) -> list[nn.Parameter]:
    """Does the same as `parameters()`, which would take most of the time of a short call."""
    tables, values, weights = _found.get(model, ((), (), ()))
    held = chain.from_iterable(map(dict.values, tables))
    if weights and sum(map(len, tables)) == len(values) and all(map(operator.is_, held, values)):
        return list(weights)
    modules: list[nn.Module] = [model]
    for module in modules:  # grows on the way
        modules.extend(filter(None, module._modules.values()))
    # Some modules, and all weights, could be replaced: look at every table of names next time.
    tables = [table for m in modules for table in (m._modules, m._parameters) if table]
    weights = [weight for m in modules for weight in m._parameters.values() if weight is not None]
    _found[model] = tables, [value for table in tables for value in table.values()], weights
    return weights
