"""Where the weights are that generation reads, and whether they changed, asked for at every replayed call."""

import operator
from collections.abc import Callable, Hashable
from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vssm.models import Variational

__all__ = ["Places", "first_weight", "places_of", "unmoved", "weights_of"]

# Compares addresses in a third of the time; PyTorch has it where it is built with CUDA.
_all_at: Callable[[list[nn.Parameter], list[int], list[int]], bool] | None = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", None
)
_version = operator.attrgetter("_version")
_found: WeakKeyDictionary[nn.Module, tuple[list[dict], list, list[nn.Parameter]]] = WeakKeyDictionary()


class Places(NamedTuple):
    weights: list[nn.Parameter]
    addresses: list[int]
    numbers: list[int]
    """0, 1, 2, ...: which of them to compare."""


def weights_of(model: nn.Module, places: Places | None = None) -> list[Hashable]:
    """Returns where the weights are and how often they were changed, as far as their versions tell.

    Arguments:
        model: The model.
        places: What `places_of` has said just now.
    """
    weights = _weights(model)
    if places is None or places.weights is not weights:
        places = _places(weights)
    try:
        versions = list(map(_version, weights))
    except RuntimeError:  # weights made in inference mode have none
        versions = []
    return [model.training, weights[0].dtype, *places.addresses, *versions]


def places_of(model: nn.Module) -> Places:
    """Returns where those weights are now that `weights_of` has found last."""
    return _places(_found[model][2])


def unmoved(places: Places) -> bool:
    """Says whether weights are where they were: then their memory can be read, whether or not the model still
    has them.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> places = Places([weight], [weight.data_ptr()], [0])
        >>> before = unmoved(places)
        >>> weight.data = torch.ones(2)
        >>> before, unmoved(places)
        (True, False)
    """
    if _all_at is not None:
        return _all_at(*places)
    return list(map(Tensor.data_ptr, places.weights)) == places.addresses


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


def _places(weights: list[nn.Parameter]) -> Places:
    return Places(weights, list(map(Tensor.data_ptr, weights)), list(range(len(weights))))


def _weights(model: nn.Module) -> list[nn.Parameter]:
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
