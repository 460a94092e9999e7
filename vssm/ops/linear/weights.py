"""The split weights of recordings: kept from one replay to the next, and made again where a weight changed.

A product of many rows reads a weight (N, K) as high, low (N, K) and down (N,), as `vssm.ops.linear.triton`
says. A plain call makes these halves before every product, which reads and writes all of their bytes.
Recordings of `vssm.engine.recording` share halves that stay. No version tells of every change: fused
optimisers and writes through `.data` count none. So every replay reads all bits of its weights, which is half
of the traffic of splitting them: each few rows have a mark, a number that all of their bits determine, which
is kept beside their halves, and rows with another mark are split again, there and then, by the kernel that
has read them (`vssm.ops.linear.weights_triton`). The host has no part in it.

A replay does so beside its other work, a bit at a time, and beside large products, since what else there is
waits for memory itself: the weight that is read first is looked at beside the draws, which are short, or when
it is asked for, where a graph would begin with two branches; others while a product before them runs, two at
a time. In a Mamba block these are the weight that ends it and the one that begins the next.

Halves are as many bytes as the weights, and go with the last recording that reads them.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from vssm.ops.streams import FILL, Beside

__all__ = ["Halves", "Kept", "Renewal", "SplitWeights", "halves_of"]

Halves = tuple[Tensor, Tensor, Tensor]
Split = Callable[[Tensor], Halves]

_ALIGNED = 16  # bytes, of weights whose bits are read many at a time

_recorded = threading.local()


def halves_of(weight: Tensor, split: Split) -> Halves:
    """Splits a weight, or returns what this thread's recording keeps of it.

    Example:
        >>> halves_of(torch.ones(2), lambda weight: (weight, 0 * weight, weight[:1]))[0]
        tensor([1., 1.])
    """
    find: Callable[[nn.Parameter], Halves | None] | None = getattr(_recorded, "find", None)
    # Only a parameter is sure to be there before the recording starts, and to stay as it is while it runs.
    if find is None or not isinstance(weight, nn.Parameter):
        return split(weight)
    return find(weight) or split(weight)


class Kept:
    """The halves of one weight, and the marks of the rows that they were made of."""

    def __init__(self, weight: nn.Parameter, rows: int) -> None:
        N, K = weight.shape
        self.weight, self.address = weight, weight.data_ptr()
        high, low = torch.empty((2, N, K), dtype=torch.float16, device=weight.device)
        self.halves: Halves = high, low, torch.empty(N, dtype=torch.float32, device=weight.device)
        self.marks = torch.empty(-(-N // rows), dtype=torch.int64, device=weight.device)


class Renewal(Protocol):
    """Splits rows of some weights that have changed."""

    kept: list[Kept]

    def __call__(self, always: bool = False) -> None: ...


class SplitWeights:
    """Keeps the halves of a model's weights for its recordings."""

    def __init__(self) -> None:
        self._kept: WeakValueDictionary[int, Kept] = WeakValueDictionary()

    @contextmanager
    def note(self) -> Iterator[list[nn.Parameter]]:
        """Notes, while a function runs, which weights it splits."""
        noted: dict[int, nn.Parameter] = {}

        def find(weight: nn.Parameter) -> None:
            if weight.is_contiguous() and weight.data_ptr() % _ALIGNED == 0:
                noted[id(weight)] = weight

        weights: list[nn.Parameter] = []
        with _finding(find):
            yield weights
        weights += noted.values()

    def keep(self, weights: list[nn.Parameter]) -> list[Renewal]:
        """Splits what is not kept yet, and returns what renews it, in the order in which it is read.

        Halves stay as long as what is returned.
        """
        if not weights:
            return []
        from vssm.ops.linear import weights_triton as kernels

        all_kept, new = [], []
        for weight in weights:
            kept = self._kept.get(id(weight))
            if kept is None or kept.address != weight.data_ptr():
                kept = self._kept[id(weight)] = Kept(weight, kernels.rows_of(weight.shape[1]))
                new.append(kept)
            all_kept.append(kept)
        if new:
            kernels.Renewal(new)(always=True)
        groups = [all_kept[:1], *(all_kept[i : i + 2] for i in range(1, len(all_kept), 2))]
        return [kernels.Renewal(group) for group in groups]

    @staticmethod
    @contextmanager
    def renewed(renewals: Sequence[Renewal], early: bool = False) -> Iterator[None]:
        """Splits what has changed, for a function to read that is captured with it.

        The weight that is read first is looked at when it is asked for, or `early`, beside what comes before.
        """
        places = {
            id(kept.weight): (i, kept) for i, some in enumerate(renewals) for kept in some.kept
        }
        started: dict[int, Beside] = {}

        def start(group: int) -> None:
            if group < len(renewals) and group not in started:
                started[group] = Beside(renewals[group].kept[0].weight.device, "weights", FILL)
                with started[group].stream:
                    renewals[group]()

        def find(weight: nn.Parameter) -> Halves | None:
            if id(weight) not in places:
                return None
            group, kept = places[id(weight)]
            start(group)
            started[group].join()
            if kept is renewals[group].kept[-1]:
                start(group + 1)
            return kept.halves

        if early:
            start(0)
        try:
            with _finding(find):
                yield
        finally:  # a capture can not end before, whoever has read what on which stream
            for renewing in started.values():
                renewing.join()


@contextmanager
def _finding(find: Callable[[nn.Parameter], Halves | None]) -> Iterator[None]:
    _recorded.find = find
    try:
        yield
    finally:
        _recorded.find = None
