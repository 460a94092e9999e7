"""Numbers between the host and a recording, without a wait: what it has seen, and what it is told."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vssm.nn import State

__all__ = ["Told", "Watch"]

_SOON = 2e-4  # seconds in which a replay that has nothing before it gets to its first number


class Watch:
    """Looks at a number of the model at every replay: what was recorded holds while it is what it was.

    It comes before all else but what is `Told`, or beside it, so the host can read it while the device works.

    Arguments:
        show: Writes the number of a model to an int64 of the host, when the device gets there.
        expected: What it was.
        device: Where the model is.
    """

    _UNSEEN = -(2**62) + 1  # a number that is not there yet

    def __init__(
        self, show: Callable[[Any, Tensor], None], expected: int, device: torch.device
    ) -> None:
        self._show, self._expected, self._device = show, expected, device
        self._looking = False  # whether a number may be on its way
        with torch.inference_mode(False):  # else it could be written to in that mode only
            self._value = torch.full(
                (), self._UNSEEN, device="cpu", pin_memory=device.type == "cuda"
            )
        self._seen = self._value.numpy()  # the same number, in less time

    def look(self, model: nn.Module) -> None:
        self._looking = True
        self._show(model, self._value)

    def expect(self) -> None:
        """Comes before a replay: what `unchanged` reads is then what this replay has seen."""
        if self._looking:  # while it was recorded, or by a replay that nobody asked about
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seen.fill(self._UNSEEN)
        self._looking = True

    def unchanged(self) -> bool:
        """Says after a replay whether the number is as expected; waits if it is not there yet."""
        if self._device.type == "cuda":
            # It comes first, so it is there soon; to wait for the device would be to wait for all the rest.
            end = time.perf_counter() + _SOON
            while self._seen == self._UNSEEN and time.perf_counter() < end:
                pass
            if self._seen == self._UNSEEN:
                torch.cuda.current_stream(self._device).synchronize()
        value = int(self._seen)
        self._seen.fill(self._UNSEEN)
        self._looking = value == self._UNSEEN
        return value == self._expected


class Told:
    """Numbers that a recording reads from memory of the host, which takes less time than to fill tensors.

    It is told before what is watched: whoever has seen that may change them.
    """

    def __init__(self, numbers: Iterable[str], fixed: State) -> None:
        with torch.inference_mode(False):  # as in `Watch`
            host = {name: torch.zeros((), dtype=torch.int64, pin_memory=True) for name in numbers}
        self._pairs = [(number, fixed[name]) for name, number in host.items()]
        self.values = {name: number.numpy() for name, number in host.items()}

    def tell(self) -> None:
        from vssm.ops.tell_triton import tell

        for number, target in self._pairs:
            tell(number, target)
