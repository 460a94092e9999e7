"""Where states wait in the server until they are resumed, under random handles."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from vssm.nn import State
from vssm.serve.errors import Refused


class _Entry(NamedTuple):
    model: str
    state: State
    expires: float
    bytes: int


class Store:
    """Keeps states under handles, up to an age since the last use, a number and a total size.

    The least recently used state goes first.
    """

    def __init__(
        self, seconds: float, count: int, bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._count, self._bytes, self._clock = seconds, count, bytes, clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._held = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, model: str, state: State) -> str:
        """Keeps a state and returns its handle."""
        size = sum(leaf.untyped_storage().nbytes() for leaf in state.leaves())
        if size > self._bytes:
            message = f"the state has {size} bytes, more than {self._bytes}; ask for fewer "
            message += "sequences or steps, or keep='none'"
            raise Refused(413, "state_too_large", message, "keep")
        handle = f"h.{secrets.token_urlsafe(24)}"
        self._entries[handle] = _Entry(model, state, self._clock() + self._seconds, size)
        self._held += size
        self._evict()
        return handle

    def get(self, handle: str) -> tuple[str, State]:
        """Returns the model and the state of a handle, which becomes the most recently used."""
        self._evict()
        entry = self._entries.pop(handle, None)
        if entry is None:
            message = "resume is unknown, has expired or was evicted; use a recent one"
            raise Refused(404, "resume_unknown", message, "resume")
        self._entries[handle] = entry._replace(expires=self._clock() + self._seconds)
        return entry.model, entry.state

    def _evict(self) -> None:
        # Every use moves an entry to the end with a new deadline, so the first expires first.
        while self._entries and (
            len(self) > self._count
            or self._held > self._bytes
            or next(iter(self._entries.values())).expires <= self._clock()
        ):
            self._held -= self._entries.popitem(last=False)[1].bytes
