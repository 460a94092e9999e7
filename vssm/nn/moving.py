"""Models that say when they are moved, so that whoever keeps something of theirs can give it back."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

__all__ = ["Moving"]


class Moving(nn.Module):
    """A module that calls its listeners before it is moved to another device or dtype.

    Example:
        >>> Moving.listeners.append(print)
        >>> model = Moving().double()
        Moving()
        >>> Moving.listeners.remove(print)
    """

    listeners: ClassVar[list[Callable[[nn.Module], object]]] = []

    def _apply(self, *arguments: Any, **options: Any) -> "Moving":  # noqa: ANN401
        for listen in self.listeners:
            listen(self)
        return super()._apply(*arguments, **options)
