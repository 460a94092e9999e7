"""Models that say when they may have moved, so that whoever keeps something of theirs can give it back."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

__all__ = ["Moving"]


class Moving(nn.Module):
    """A module that calls its listeners after it was asked to move to a device or dtype, even if it is there.

    Example:
        >>> Moving.listeners.append(print)
        >>> model = Moving().double()
        Moving()
        >>> Moving.listeners.remove(print)
    """

    listeners: ClassVar[list[Callable[[nn.Module], object]]] = []

    def _apply(self, *arguments: Any, **options: Any) -> "Moving":  # noqa: ANN401
        moved = super()._apply(*arguments, **options)
        for listen in self.listeners:
            listen(self)
        return moved
