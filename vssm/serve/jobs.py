"""A job is one request. It is computed in pieces of bounded size.

A job that makes steps reads its prompt, then makes new steps; each piece continues from the state
of the piece before. A job that fills gaps does some of its sequences in each piece. A job that
forecasts is one piece. Cutting a request into pieces does not change its result (to float
rounding).
"""

import math
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vssm.nn import State
from vssm.serve.models import Served

__all__ = ["AnyJob", "CallJob", "Done", "FillJob", "Job", "Piece"]

_STEPWISE = 32  # most steps of a piece that is made step by step


class Done(NamedTuple):
    """The result of a job, or of one of its pieces."""

    x: Any
    """The new steps, or the sequences without gaps; None when data were only read."""
    state: State | None
    """Where to resume."""
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

    deadline: float = math.inf  # in seconds of `time.monotonic`
    future: "Future[Done]" = field(default_factory=Future)  # cancelling it drops the job
    name: str = ""  # of the model
    cells: int = 1  # the most rows times steps of a batch
    rows: int = 1  # of the next piece
    key: Hashable = None  # jobs with equal keys can be computed together
    short: bool = True  # whether one piece is all
    piece: Piece = field(default_factory=lambda: Piece(1, 0))  # the next one

    def release(self) -> None:
        """Drops all tensors and the future.

        An error in the future refers, by its traceback, to frames that hold the job: a cycle,
        which would keep memory until the next garbage collection.
        """
        for name in ("prompt", "state", "each", "x", "known", "call", "future"):
            self.__dict__.pop(name, None)


@dataclass(eq=False)
class Job(_Request):
    """Reads the prompt, if any, and makes `length` steps, unless `length` is None."""

    served: Served
    seed: Tensor  # of the noise, (B,)
    row: Tensor  # of the noise, (B,)
    length: int | None
    prompt: Tensor | None = None  # (B, C, D) or (B, C)
    state: State | None = None  # where to continue from: B rows, or one row for all
    chunk: int | None = None  # steps that are made at a time (vssm, tvae)
    recondition: bool = False  # read each chunk before the next is made
    temperature: float = 1.0
    sample: bool = False  # x is a sample of the head, not its mean
    keep: str = "server"  # where the final state waits: server or none
    every: int | None = None  # no piece goes past a multiple of so many new steps
    stream: bool = False  # send the pieces as they are made
    each: Callable[[Done], None] | None = None  # gets every piece with new steps

    def __post_init__(self) -> None:
        self.name, self.cells, self.rows = self.served.name, self.served.cells, len(self.row)
        self._left, self._seconds = self.length or 0, 0.0
        self._xs: list[Tensor] = []
        self._plan_piece()
        self.short = self.ends_with_piece

    @property
    def _unread(self) -> int:
        return 0 if self.prompt is None else self.prompt.shape[1]

    @property
    def ends_with_piece(self) -> bool:
        """Whether the next piece is all that is left."""
        return self.piece[:2] == (self._unread, self._left)

    def _plan_piece(self) -> None:
        most = max(1, self.cells // self.rows)
        make = self._next_steps(most)
        if self._unread and (not make or self._unread + make > most):
            self.piece = Piece(min(self._unread, most), 0)
        else:
            chunk = None if self.chunk is None else min(self.chunk, make)
            self.piece = Piece(self._unread, make, chunk, self.recondition)
        before = None if self.state is None else _layout(self.state)
        self.key = self.name, before, self.piece, self.temperature, self.sample

    def _next_steps(self, most: int) -> int:
        left = self._left
        if not self.served.parallel:
            most = min(most, _STEPWISE)
        elif self.recondition:  # whole chunks, since each is read from the state before it
            chunk = min(self.chunk or left, left) or 1
            most = chunk * max(1, min(most, _STEPWISE) // chunk)
        if self.every is not None:
            left = min(left, self.every - ((self.length or 0) - left) % self.every)
        return min(left, most)

    def advance(self, x: Tensor | None, state: State, seconds: float, rows: int) -> Done | None:
        """Takes the result of the next piece; returns the result of the job once it has ended."""
        piece, self.state = self.piece, state
        self._seconds += seconds
        self._left -= piece.make
        if self.prompt is not None and piece.read:
            self.prompt = self.prompt[:, piece.read :] if piece.read < self._unread else None
        if x is not None and self.each is not None:
            self.each(Done(x, None, seconds, rows))
        elif x is not None:
            self._xs.append(x)
        if self._left or self._unread:
            self._plan_piece()
            return None
        return Done(torch.cat(self._xs, 1) if self._xs else None, state, self._seconds, rows)


@dataclass(eq=False)
class FillJob(_Request):
    """Fills gaps, in one piece for every few sequences."""

    served: Served
    seed: Tensor  # of the noise, (B,)
    row: Tensor  # of the noise, (B,)
    x: Tensor  # (B, T, D) or (B, T)
    known: Tensor  # which entries are known, of the shape of x
    passes: int = 1
    temperature: float = 1.0
    sample: bool = False  # x is a sample of the head, not its mean

    def __post_init__(self) -> None:
        self.name, self.cells = self.served.name, self.served.cells
        self.piece = Piece(self.x.shape[1] * self.passes, 0)
        self._left, self._xs, self._seconds = len(self.row), [], 0.0
        self._most = max(1, self.cells // self.piece.steps)  # sequences of a piece
        self.rows, self.short = min(self._left, self._most), self._left <= self._most
        dials = self.passes, self.temperature, self.sample
        self.key = "fill", self.name, self.x.shape[1], dials

    @property
    def next_rows(self) -> slice:
        """Which sequences the next piece fills."""
        first = len(self.row) - self._left
        return slice(first, first + self.rows)

    def advance(self, x: Tensor, _: object, seconds: float, rows: int) -> Done | None:
        """Takes the result of the next piece; returns the result of the job once it has ended."""
        self._xs.append(x)
        self._left -= len(x)
        self._seconds += seconds
        self.rows = min(self._left, self._most)
        return None if self._left else Done(torch.cat(self._xs), None, self._seconds, rows)


@dataclass(eq=False)
class CallJob(_Request):
    """Computes a function in one piece, alone."""

    call: Callable[[], Any]

    def __post_init__(self) -> None:
        self.key = id(self)

    def advance(self, x: Any, _: object, seconds: float, rows: int) -> Done:  # noqa: ANN401
        """Returns the result."""
        return Done(x, None, seconds, rows)


AnyJob = Job | FillJob | CallJob


def _layout(state: State) -> Hashable:
    """Returns what states must have in common to form a batch: position, names and shapes."""
    children = sorted(state.children.items())
    return state.position, *(
        (name, _layout(child) if isinstance(child, State) else child.shape[1:])
        for name, child in children
    )
