"""The split weights of a recording: made once for all of its products, and beside its other work.

A product of many rows reads a weight (N, K) as high, low (N, K) and down (N,), as `vssm.ops.linear_triton`
says. To split it reads and writes all of its bytes, and a plain call does that before every product. A
recording of `vssm.graphs` does it once for each weight, on a second stream: weights are there from the start,
and what runs between large products leaves most of the memory's bandwidth free.

Halves are not kept from one call to the next: fused optimisers and changes through `.data` count no version,
so only who reads a whole weight knows that it is the same, which is half of the traffic of splitting it. So
every replay splits the weights as they are then; halves are memory of a recording, as many bytes as weights.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["SplitWeights", "halves_of"]

Halves = tuple[Tensor, Tensor, Tensor]
Split = Callable[[Tensor], Halves]

_recorded = threading.local()


def halves_of(weight: Tensor, split: Split) -> Halves:
    """Splits a weight, or returns what this thread's recording has made of it.

    Example:
        >>> halves_of(torch.ones(2), lambda weight: (weight, 0 * weight, weight[:1]))[0]
        tensor([1., 1.])
    """
    weights: SplitWeights | None = getattr(_recorded, "weights", None)
    # Only a parameter is sure to be there before the recording starts, and to stay as it is.
    if weights is None or not isinstance(weight, nn.Parameter):
        return split(weight)
    return weights._halves_of(weight, split)


class SplitWeights:
    """Splits the weights of one recording; halves are gone when its capture is over.

    Arguments:
        device: Where the weights are.
        stream: Where they are split, while the current stream goes on.
    """

    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self._streams, self._stream = torch.get_device_module(device), stream
        self._noted: dict[int, tuple[nn.Parameter, Split]] = {}
        self._made: dict[int, Halves] = {}
        self._there: dict[int, torch.Event] = {}  # of those that the current stream has not waited for

    @contextmanager
    def note(self) -> Iterator[None]:
        """Notes, while a function runs, which weights it has split."""
        _recorded.weights = self
        try:
            yield
        finally:
            _recorded.weights = None

    @contextmanager
    def split(self) -> Iterator[None]:
        """Splits all that was noted, for the same function to read while it is captured."""
        if not self._noted:
            yield
            return
        current = self._streams.current_stream()
        self._stream.wait_stream(current)  # makes it part of the capture
        try:
            with self._streams.stream(self._stream):
                for at, (weight, split) in self._noted.items():
                    self._made[at] = split(weight)
                    self._there[at] = self._stream.record_event()
            with self.note():
                yield
        finally:
            current.wait_stream(self._stream)  # a capture must not end before
            self._made.clear()

    def _halves_of(self, weight: nn.Parameter, split: Split) -> Halves:
        at = id(weight)
        if at not in self._made:
            self._noted[at] = weight, split
            return split(weight)
        if at in self._there:
            self._streams.current_stream().wait_event(self._there.pop(at))
        return self._made[at]
