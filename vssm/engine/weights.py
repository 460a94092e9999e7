"""Where the weights are that generation reads, and whether they changed, asked for at every replayed call."""

import operator
from collections.abc import Hashable
from itertools import chain, repeat
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from vssm.models import Variational

__all__ = ["first_weight", "found_weights", "opaque", "weights_of"]

_version = operator.attrgetter("_version")
_found: WeakKeyDictionary[nn.Module, "_Found"] = WeakKeyDictionary()


class _Found(NamedTuple):
    tables: list[dict]
    """Of names, of modules and of weights."""
    values: list
    """All that was in them."""
    weights: list[nn.Parameter]
    hooks: list[dict]
    own: list[dict]
    """The attributes of every module, where its `forward` may be another than its class's."""
    foreign: bool
    """Whether there is a module of somebody else."""
    times: int
    """How often something else was found: a module may be in the place of another, with the same weights."""


def weights_of(model: nn.Module) -> list[Hashable]:
    """Returns where the weights are and how often they were changed, as far as their versions tell.

    And how often modules were replaced, and whether one is `opaque`: a replay would call nobody.
    """
    weights = found_weights(model)
    try:
        versions = list(map(_version, weights))
    except RuntimeError:  # weights made in inference mode have none
        versions = []
    found = _found[model]
    modules = model.training, _is_opaque(found), found.times
    return [*modules, weights[0].dtype, *map(Tensor.data_ptr, weights), *versions]


def opaque(model: nn.Module) -> bool:
    """Says whether weights do not tell all that generation does: every call then has to call the modules.

    Somebody listens to one, or it is neither ours nor PyTorch's, such as an adapter that can be switched off.

    Example:
        >>> from vssm import ModelConfig, build
        >>> model = build(ModelConfig(kind="ssm", features=3, width=8, layers=1))
        >>> before, hook = opaque(model), model.stack.out.register_forward_hook(print)
        >>> before, opaque(model)
        (False, True)
    """
    found_weights(model)
    return _is_opaque(_found[model])


def _is_opaque(found: _Found) -> bool:
    return (
        found.foreign
        or any(found.hooks)
        or any(map(dict.__contains__, found.own, repeat("forward")))
    )


def _is_foreign(module: nn.Module) -> bool:
    package = type(module).__module__.partition(".")[0]
    return package != "vssm" and (package != "torch" or bool(module._buffers))


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
    own, foreign = [vars(module) for module in modules], any(map(_is_foreign, modules))
    times = 0 if found is None else found.times + 1
    _found[model] = _Found(tables, values, weights, hooks, own, foreign, times)
    return weights
