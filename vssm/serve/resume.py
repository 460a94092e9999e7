"""Where a state waits until it is resumed: in the server under a handle, or sealed at the client.

A handle is a random name ("h.") of a state in this process. A sealed state ("s.") is the state
itself, so that any process with the same key can resume it:

    s. base64url( HMAC-SHA256(key, rest) | rest )
    rest = 4-byte length | JSON {"model", "weights", "expires"} | safetensors

A sealed state is parsed only after its seal has been compared, in constant time.
"""

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from vssm.nn import State
from vssm.serve.errors import Refused

__all__ = ["Seal", "Store", "check_size"]

_MAC = 32


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
        self.held = 0
        """The bytes of all states."""

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, model: str, state: State) -> str:
        """Keeps a state and returns its handle."""
        size = check_size(state, self._bytes)
        handle = f"h.{secrets.token_urlsafe(24)}"
        self._entries[handle] = _Entry(model, state, self._clock() + self._seconds, size)
        self.held += size
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
            len(self._entries) > self._count
            or self.held > self._bytes
            or next(iter(self._entries.values())).expires <= self._clock()
        ):
            self.held -= self._entries.popitem(last=False)[1].bytes


class Seal:
    """Seals states for clients to keep; processes that share the key can open each other's.

    Arguments:
        key: The secret.
        seconds: How long a sealed state can be opened.
        bytes: The largest state that is sealed.
        clock: The time.
    """

    def __init__(
        self, key: bytes, seconds: float, bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._key, self._seconds, self._bytes, self._clock = key, seconds, bytes, clock

    def seal(self, model: str, weights: str, state: State) -> str:
        """Returns a sealed state of a model, with the checksum of the weights that made it."""
        check_size(state, self._bytes)
        facts = {"model": model, "weights": weights, "expires": self._clock() + self._seconds}
        head = json.dumps(facts).encode()
        rest = len(head).to_bytes(4, "little") + head + state.to_bytes()
        return "s." + base64.urlsafe_b64encode(self._mac(rest) + rest).decode()

    def open(self, sealed: str) -> tuple[str, str, State]:
        """Returns model, weights and state; a changed or expired one is refused."""
        try:
            content = base64.b64decode(sealed.removeprefix("s."), altchars=b"-_", validate=True)
        except ValueError:
            content = b""
        mac, rest = content[:_MAC], content[_MAC:]
        if not hmac.compare_digest(mac, self._mac(rest)):
            message = "resume was not sealed by this server; send one that it gave, unchanged"
            raise Refused(403, "resume_forged", message, "resume")
        cut = 4 + int.from_bytes(rest[:4], "little")
        head = json.loads(rest[4:cut])
        if head["expires"] <= self._clock():
            message = "resume has expired; use a recent one"
            raise Refused(410, "resume_expired", message, "resume")
        return head["model"], head["weights"], State.from_bytes(rest[cut:])

    def _mac(self, content: bytes) -> bytes:
        return hmac.new(self._key, content, hashlib.sha256).digest()


def check_size(state: State, most: int) -> int:
    """Returns the bytes of a state; refuses a state with more than `most`."""
    size = sum(leaf.untyped_storage().nbytes() for leaf in state.leaves())
    if size > most:
        message = f"the state has {size} bytes, more than {most}; ask for fewer sequences or steps"
        raise Refused(413, "state_too_large", f"{message}, or keep='none'", "keep")
    return size
