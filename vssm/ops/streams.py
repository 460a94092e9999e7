"""Work beside other work: what a CUDA graph records on a stream of its own runs while the rest goes on.

A recording keeps the priority of the stream that each kernel was recorded on. Where several could start, a
device starts blocks of threads of the most urgent one first:

| priority | what is recorded so                                                            |
| -------- | ------------------------------------------------------------------------------ |
| `SHORT`  | little work, which others wait for                                             |
| `MAIN`   | one kernel after the other, as most of a recording is                          |
| `FILL`   | much work, which is needed late: it takes the room that the others leave       |
"""

import threading
from contextlib import nullcontext
from functools import cache

import torch

__all__ = ["FILL", "MAIN", "SHORT", "Beside"]

SHORT, MAIN, FILL = -2, -1, 0


class Beside:
    """Records what is done with `stream` beside the rest, from here until `join`.

    What it reads must be kept until then: memory that is given back is used again. Where nothing is recorded,
    things are done one after the other.

    Arguments:
        device: Where it is done.
        what: Names the stream: of two with the same name the second comes after the first, and to join the
            first may be to wait for both.
        priority: One of those above.
    """

    def __init__(self, device: torch.device, what: str, priority: int = SHORT) -> None:
        self._own = None
        self._joined: set[torch.cuda.Stream] = set()
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._own = _stream(device, what, priority, threading.get_ident())
            self._own.wait_stream(torch.cuda.current_stream(device))
        self.stream = nullcontext() if self._own is None else torch.cuda.stream(self._own)

    def join(self) -> None:
        """Lets the current stream wait for what was done, if it does not yet."""
        if self._own is None:
            return
        current = torch.cuda.current_stream(self._own.device)
        if current not in self._joined:
            current.wait_stream(self._own)
            self._joined.add(current)


@cache
def _stream(device: torch.device, what: str, priority: int, thread: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # few: a thread makes one capture at a time
