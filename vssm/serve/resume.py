"""Where a state waits until it is resumed: here, under a handle, or with the client, sealed.

A handle is a random name ("h.") of a state in this process. A sealed state ("s.") is the state itself, so
that any process with the same key can go on from it:

    s. base64url( HMAC-SHA256(key, rest) | rest )
    rest = 4-byte length | JSON {"model", "weights", "expires"} | safetensors

Nothing of a sealed state is parsed before its seal has been compared, in constant time.
"""

import base64
import binascii
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

__all__ = ["Seal", "Store"]

_MAC = 32


class _Kept(NamedTuple):
    model: str
    state: State
    expires: float
    bytes: int


class Store:
    """Keeps states under handles: for a time, up to a number and a size; the least recently used goes first.

    Arguments:
        seconds: How long a state is kept after it was last used.
        count: Most states.
        bytes: Most bytes of all of them.
        clock: Seconds that never run backwards.
    """

    def __init__(
        self, seconds: float, count: int, bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._count, self._bytes, self._clock = seconds, count, bytes, clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self.held = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, model: str, state: State) -> str:
        """Keeps a state and returns its handle."""
        size = sum(leaf.untyped_storage().nbytes() for leaf in state.leaves())
        if size > self._bytes:
            raise Refused(
                413,
                "state_too_large",
                f"the state has {size} bytes; allowed: {self._bytes}, or keep='none'",
            )
        self._forget_expired()
        handle = f"h.{secrets.token_urlsafe(24)}"
        self._kept[handle] = _Kept(model, state, self._clock() + self._seconds, size)
        self.held += size
        while len(self._kept) > self._count or self.held > self._bytes:
            self.held -= self._kept.popitem(last=False)[1].bytes
        return handle

    def get(self, handle: str) -> tuple[str, State]:
        """Returns the model and the state of a handle, which stays valid and becomes the latest used."""
        self._forget_expired()
        kept = self._kept.pop(handle, None)
        if kept is None:
            raise Refused(
                404,
                "resume_unknown",
                "resume is unknown, expired or was evicted; allowed: a recent one",
                "resume",
            )
        self._kept[handle] = kept._replace(expires=self._clock() + self._seconds)
        return kept.model, kept.state

    def _forget_expired(self) -> None:
        # Every use moves a state to the end with the same time to live: the first expires first.
        while self._kept and next(iter(self._kept.values())).expires <= self._clock():
            self.held -= self._kept.popitem(last=False)[1].bytes


class Seal:
    """Seals states for clients to keep.

    Arguments:
        key: The secret, shared by the processes that may resume each other's states.
        seconds: How long a sealed state can be resumed.
        clock: Seconds since the epoch.
    """

    def __init__(self, key: bytes, seconds: float, clock: Callable[[], float] = time.time) -> None:
        self._key, self._seconds, self._clock = key, seconds, clock

    def seal(self, model: str, weights: str, state: State) -> str:
        """Returns a sealed state of a model, with the checksum of the weights that made it."""
        facts = {"model": model, "weights": weights, "expires": self._clock() + self._seconds}
        head = json.dumps(facts).encode()
        rest = len(head).to_bytes(4, "little") + head + state.to_bytes()
        return "s." + base64.urlsafe_b64encode(self._mac(rest) + rest).decode()

    def open(self, sealed: str) -> tuple[str, str, State]:
        """Returns model, weights and state as they were sealed; what was changed or is too old is refused."""
        try:
            content = base64.b64decode(sealed.removeprefix("s."), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            content = b""
        mac, rest = content[:_MAC], content[_MAC:]
        if not hmac.compare_digest(mac, self._mac(rest)):
            raise Refused(
                403,
                "resume_forged",
                "resume was not sealed by this server; allowed: one as given",
                "resume",
            )
        cut = 4 + int.from_bytes(rest[:4], "little")
        head = json.loads(rest[4:cut])
        if head["expires"] <= self._clock():
            raise Refused(
                410, "resume_expired", "resume has expired; allowed: a recent one", "resume"
            )
        return head["model"], head.get("weights", ""), State.from_bytes(rest[cut:])

    def _mac(self, content: bytes) -> bytes:
        return hmac.new(self._key, content, hashlib.sha256).digest()
