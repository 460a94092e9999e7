"""The recorded programs of an engine, found by keys that hold everything that is fixed in them."""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from vssm.engine.recording import OneShot, Recorder
from vssm.engine.trees import describe, place
from vssm.models import Model
from vssm.nn import State

__all__ = ["Programs", "portable"]

DEVICES = ("cuda",)  # tests add "cpu", where a replay runs the function again
_PROGRAMS = 8  # kept at a time
_KEYS = 64  # remembered as asked for once


class Programs:
    """Keeps the programs of one model on one device, the last used ones.

    `run` returns None where the plain path should run: at the first call of a key, since most keys
    are asked for only once; where recording failed; and where nothing can be recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._programs: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()
        self._asked: OrderedDict[Hashable, bool] = OrderedDict()  # whether a key may be recorded
        self._recorder = Recorder(device)
        self._stream: torch.cuda.Stream | None = None  # of the last replay

    def usable(self) -> bool:
        """Says whether programs can be recorded and replayed here and now."""
        kind = self._device.type
        if kind not in DEVICES or torch.compiler.is_compiling() or torch.is_autocast_enabled(kind):
            return False
        return kind == "cpu" or not torch.cuda.is_current_stream_capturing()

    def replay(self, key: Hashable, *inputs: object) -> Any:  # noqa: ANN401
        """Returns the result of a program that exists already, or None."""
        with self._lock:
            program = self._programs.get(key)
            if program is None or not self.usable():
                return None
            self._programs.move_to_end(key)
            self._follow()
            return program(*inputs)

    def run(
        self,
        key: Hashable,
        make: Callable[[Recorder], Callable[..., Any]],
        *inputs: object,
        at_once: bool = False,
    ) -> Any:  # noqa: ANN401
        """Returns the result of a program, or None if the plain path should run.

        Arguments:
            key: Everything that is fixed in the program.
            make: Records the program, when the key is asked for a second time.
            inputs: The arguments of the program.
            at_once: Whether to record at the first time already.
        """
        if not self.usable():
            return None
        with self._lock:
            try:
                self._follow()
                program = self._find(key, make, at_once)
                return None if program is None else program(*inputs)
            except RuntimeError as error:  # of CUDA, also when it is out of memory
                self._programs.pop(key, None)
                self._asked[key] = False
                why = str(error).partition("\n")[0]
                warnings.warn(
                    f"could not record a CUDA graph, so this call runs without: {why}", stacklevel=4
                )
                return None

    def run_once(
        self,
        key: tuple[Any, ...],
        function: Callable[[State], State],
        given: State,
        numbers: Mapping[str, int] | None = None,
        position: int = 0,
    ) -> State | None:
        """Returns what a function makes of a tree of tensors, by a program, or None as `run` does.

        Arguments:
            key: Everything that is fixed in the function, beside the form of what it is given.
            function: Maps tensors to results.
            given: The tensors.
            numbers: Numbers, which the function gets as tensors (1,).
            position: The position of the results.
        """
        numbers = numbers or {}
        return self.run(
            self.key_once(key, given, numbers),
            lambda recorder: OneShot(recorder, function, given, numbers),
            given,
            numbers,
            position,
        )

    def key_once(
        self, key: tuple[Any, ...], given: State, numbers: Mapping[str, int]
    ) -> tuple[Any, ...]:
        """Returns the key of a program that `run_once` makes."""
        return *key, describe(given), *numbers

    def clear(self) -> None:
        """Forgets all programs."""
        with self._lock:
            self._wait()
            self._programs.clear()

    def _find(
        self, key: Hashable, make: Callable[[Recorder], Callable[..., Any]], at_once: bool
    ) -> Callable[..., Any] | None:
        if key in self._programs:
            self._programs.move_to_end(key)
            return self._programs[key]
        due = at_once or key in self._asked
        due = self._asked.setdefault(key, True) and due
        while len(self._asked) > _KEYS:
            self._asked.popitem(last=False)
        if not due:
            return None
        if not self._programs:  # the pool of programs that are gone can not be used again
            self._recorder = Recorder(self._device)
        self._programs[key] = make(self._recorder)
        if len(self._programs) > _PROGRAMS:
            self._wait()
            self._programs.popitem(last=False)
        return self._programs[key]

    def _follow(self) -> None:
        """Lets this thread's stream wait for the last replay: all programs use the same memory."""
        if self._device.type == "cuda":
            current = torch.cuda.current_stream(self._device)
            if self._stream is not None and self._stream != current:
                current.wait_stream(self._stream)
            self._stream = current

    def _wait(self) -> None:
        """Waits for the last replay, before the memory that it uses is freed."""
        if self._stream is not None:
            self._stream.synchronize()


def portable(model: Model, state: State) -> State:
    """Returns a state as input of a recording: without its noise, and without its position.

    Attention keeps the position, because the shape of its cache depends on it.
    """
    kept = {name: child for name, child in state.children.items() if name not in ("seed", "row")}
    return place(State(kept), state.position if model.config.block == "attention" else 0)
