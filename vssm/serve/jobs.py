"""A job is one request. It is computed in pieces of bounded size.

A job that makes steps reads its prompt, then makes new steps; each piece continues from the state
of the piece before. A job that fills gaps does some of its sequences in each piece. Cutting a
request into pieces does not change its result (to float rounding).
"""

import math
from collections.abc import Callable, Generator, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from vssm.nn import State
from vssm.serve.models import Served

__all__ = ["AnyJob", "Done", "FillJob", "Job", "Piece"]

_STEPWISE = 32  # most steps of a piece that is made step by step


class Done(NamedTuple):
    """The result of a job, or of one of its pieces."""

    x: Tensor | None
    """The new steps, or the sequences without gaps; None when data were only read."""
    state: State | None
    """Where to resume; None unless the job keeps it."""
    position: int
    seconds: float
    """How long its batches took."""
    rows: int
    """How many rows the last batch had, including rows of other jobs."""


class Piece(NamedTuple):
    """A part of a job: steps of the prompt to read, then new steps to make."""

    read: int
    make: int
    chunk: int | None = None
    recondition: bool = False

    @property
    def steps(self) -> int:
        """The steps of each sequence."""
        return self.read + self.make


@dataclass(eq=False, kw_only=True)
class _Request:
    """What the scheduler and the worker know of every job."""

    temperature: float = 1.0
    sample: bool = False  # x is a sample of the head, not its mean
    client: str = ""  # clients take turns
    deadline: float = math.inf  # in seconds of `time.monotonic`
    bytes: int = 0  # the size of the final state
    future: "Future[Done]" = field(default_factory=Future)  # cancelling it drops the job
    stream: bool = False  # send the pieces as they are made


@dataclass(eq=False)
class Job(_Request):
    """One request: reads the prompt, if any, and makes `length` steps, unless `length` is None."""

    served: Served
    seed: Tensor  # of the noise, (B,)
    row: Tensor  # of the noise, (B,)
    length: int | None
    prompt: Tensor | None = None  # (B, C, D) or (B, C)
    state: State | None = None  # where to continue from: B rows, or one row for all
    chunk: int | None = None  # steps that are made at a time (vssm, tvae)
    recondition: bool = False  # read each chunk before the next is made
    keep: str = "server"  # where the final state waits: server, client or none
    every: int | None = None  # no piece goes past a multiple of so many new steps
    each: Callable[[Done], None] | None = None  # gets every piece with new steps

    def __post_init__(self) -> None:
        self.rows = len(self.row)
        self._left, self._position, self._seconds = self.length or 0, 0, 0.0
        self._xs: list[Tensor] = []
        self._most = max(1, self.served.cells // self.rows)  # steps of a piece
        self._chunk = min(self.chunk or self.length or 1, self.length or 1)
        self._pieces = self._plan()
        self._set_piece(next(self._pieces))
        self.short = self.ends_with_piece
        """Whether one piece is all."""

    @property
    def _unread(self) -> int:
        return 0 if self.prompt is None else self.prompt.shape[1]

    @property
    def keeps_state(self) -> bool:
        """Whether the final state is needed."""
        return self.keep != "none"

    @property
    def ends_with_piece(self) -> bool:
        """Whether the next piece is all that is left."""
        return self.piece[:2] == (self._unread, self._left)

    def _plan(self) -> Generator[Piece, Tensor | None, None]:
        """Yields the pieces; the caller computes each one and sends its new steps."""
        split_chunks = self.recondition and self._chunk > self._most
        while self._left or self._unread:
            make = 0 if split_chunks else self._next_steps()
            while self._unread and (not make or self._unread + make > self._most):
                yield Piece(min(self._unread, self._most), 0)
            if split_chunks and self._left:
                yield from self._plan_chunk()
            elif make:
                chunk = None if self.chunk is None else min(self.chunk, make)
                yield Piece(self._unread, make, chunk, self.recondition)

    def _plan_chunk(self) -> Generator[Piece, Tensor | None, None]:
        """Makes a chunk that is too large for one piece, then reads it from the state before it."""
        before, made, left = self.state, [], min(self._chunk, self._left)
        while left:
            made.append((yield Piece(0, min(left, self._most))))
            left -= made[-1].shape[1]
        if not (self._left or self.keeps_state):
            return
        assert self.state is not None
        decoder = self.state.children.get("decoder")
        self.state, self.prompt = before, torch.cat(made, 1)
        while self._unread:
            yield Piece(min(self._unread, self._most), 0)
        assert self.state is not None
        if decoder is not None:  # it follows the latents that were drawn, not those of the reading
            children = {**self.state.children, "decoder": decoder}
            self.state = State(children, self.state.position, self.state.owner)

    def _next_steps(self) -> int:
        left, most = self._left, self._most
        if not self.served.parallel:
            most = min(most, _STEPWISE)
        elif self.recondition:
            most = self._chunk * max(1, min(most, _STEPWISE) // self._chunk)
        if self.every is not None:
            left = min(left, self.every - ((self.length or 0) - left) % self.every)
        return min(left, most)

    def _set_piece(self, piece: Piece) -> None:
        self.piece = piece
        before = None if self.state is None else _layout(self.state)
        self.key: Hashable = self.served.name, before, piece, self.temperature, self.sample
        """Jobs with equal keys can be computed together."""

    @property
    def narrowest(self) -> int:
        """The fewest steps of any pass over the next piece."""
        piece = self.piece
        if self.served.model.config.block == "gru":  # reads step by step too
            return 1
        if not piece.make:
            return piece.read
        if not self.served.parallel:
            return 1
        chunk = min(piece.chunk or piece.make, piece.make)
        passes = [chunk, piece.make % chunk or chunk]
        if piece.read:  # a prompt is embedded separately
            passes.append(piece.read)
        return min(passes)

    def advance(
        self, x: Tensor | None, state: State | None, seconds: float, rows: int
    ) -> Done | None:
        """Takes the result of the next piece; returns the result of the job once it has ended."""
        piece = self.piece
        self._position = (0 if self.state is None else self.state.position) + piece.steps
        self._seconds += seconds
        self._left -= piece.make
        self.state = state
        if self.prompt is not None and piece.read:
            self.prompt = self.prompt[:, piece.read :] if piece.read < self._unread else None
        if x is not None and self.each is not None:
            self.each(Done(x, None, self._position, seconds, rows))
        elif x is not None:
            self._xs.append(x)
        try:
            self._set_piece(self._pieces.send(x))
        except StopIteration:
            made = torch.cat(self._xs, 1) if self._xs else None
            kept = self.state if self.keeps_state else None
            return Done(made, kept, self._position, self._seconds, rows)
        return None

    def release(self) -> None:
        """Drops all tensors and the future.

        The generator of pieces refers to the job. An error in the future refers, by its traceback,
        to frames that hold the job. Both cycles would keep memory until the next collection.
        """
        self._pieces.close()
        self.prompt = self.state = self.each = None
        self._xs = []
        del self.future


@dataclass(eq=False)
class FillJob(_Request):
    """One request that fills gaps, in one piece for every few sequences."""

    served: Served
    seed: Tensor  # of the noise, (B,)
    row: Tensor  # of the noise, (B,)
    x: Tensor  # (B, T, D) or (B, T)
    known: Tensor  # which entries are known, of the shape of x
    passes: int = 1

    def __post_init__(self) -> None:
        self._left, self._xs, self._seconds = len(self.row), [], 0.0
        self.piece = Piece(self.x.shape[1] * self.passes, 0)
        self._most = max(1, self.served.cells // self.piece.steps)  # sequences of a piece
        self.short = self._left <= self._most
        dials = self.passes, self.temperature, self.sample
        self.key: Hashable = "fill", self.served.name, self.x.shape[1], dials

    @property
    def rows(self) -> int:
        """The sequences of the next piece."""
        return min(self._left, self._most)

    @property
    def next_rows(self) -> slice:
        """Which sequences the next piece fills."""
        first = len(self.row) - self._left
        return slice(first, first + self.rows)

    def advance(self, x: Tensor | None, _: object, seconds: float, rows: int) -> Done | None:
        """Takes the result of the next piece; returns the result of the job once it has ended."""
        assert x is not None
        self._xs.append(x)
        self._left -= len(x)
        self._seconds += seconds
        return None if self._left else Done(torch.cat(self._xs), None, 0, self._seconds, rows)

    def release(self) -> None:
        """Drops the tensors and the future, as `Job.release` does."""
        self._xs = []
        del self.x, self.known, self.future


AnyJob = Job | FillJob


def _layout(state: State) -> Hashable:
    """Returns what states must have in common to form a batch: position, names and shapes."""
    children = sorted(state.children.items())
    return state.position, *(
        (name, _layout(child) if isinstance(child, State) else child.shape[1:])
        for name, child in children
    )
