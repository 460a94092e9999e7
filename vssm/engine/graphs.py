"""Generation as CUDA graphs: the programs of a model (`vssm.engine.recording`) are kept, and found again.

`attempt` keeps the programs of a model, under keys that hold all that is fixed in them (sizes, positions,
options). It answers None when the plain path is to run: at the first call of a key, since most keys are asked
for only once, where recording failed, and while a module of the model has a hook. A program is dropped when
the weights that it reads move or when their version shows that they were trained. `again` and `same` start a
program first, and look for such changes while the device works. So the memory of the weights is held until a
change is seen, by the next call or when the model is moved; it must not be freed under those who hold it
(`untyped_storage().resize_`). All programs of a model have one recorder, and so one pool of memory.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vssm.engine.recording import Recorder
from vssm.engine.weights import found_weights, opaque, weights_of
from vssm.nn import Moving

__all__ = ["again", "attempt", "forget_last", "same", "usable"]

DEVICES = ("cuda",)  # tests add "cpu", where a recording runs its function again
PROGRAMS = 8  # kept for a model
_KEYS = 64  # remembered for a model as asked for once

# What `torch.backends.cuda.matmul.fp32_precision` asks, which takes longer; older versions have neither.
_precision: Callable[[str, str], str | None] = getattr(
    torch._C, "_get_fp32_precision_getter", lambda backend, op: None
)

_finding = threading.Lock()


def usable(device: torch.device) -> bool:
    """Says whether recordings can be made and replayed here and now."""
    kind = device.type
    if kind not in DEVICES or torch.compiler.is_compiling() or torch.is_autocast_enabled(kind):
        return False
    return kind == "cpu" or not torch.cuda.is_current_stream_capturing()


class _Last(NamedTuple):
    """The program of the last call, and what it was asked: to find it again takes no key."""

    question: tuple
    types: list[type]
    settings: tuple
    device: torch.device
    key: Hashable
    program: Callable[..., Any]


class _Kept:
    """What is kept for one model."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.weights: list[Hashable] = []
        self.held: list[
            Tensor
        ] = []  # what the programs read stays there, also when the model gets others
        self.asked: OrderedDict[Hashable, bool] = (
            OrderedDict()
        )  # keys so far, and whether to record them
        self.programs: OrderedDict[Hashable, Callable[..., Any]] = (
            OrderedDict()
        )  # the last was used last
        self.last: _Last | None = None
        self.recorder: Recorder | None = None
        self.stream: torch.cuda.Stream | None = None
        self.handle: tuple[int, int] | None = None  # device and address of the stream

    def find(
        self,
        model: nn.Module,
        key: Hashable,
        at_once: bool,
        device: torch.device,
        make: Callable[[Recorder], Any],
    ) -> Any:  # noqa: ANN401
        """Returns the program of a key, made if that is due, or None."""
        if key in self.programs:
            self.programs.move_to_end(key)
            return self.programs[key]
        due = at_once or key in self.asked
        due = self.asked.setdefault(key, True) and due
        while len(self.asked) > _KEYS:
            self.asked.popitem(last=False)
        if not due:
            return None
        if (
            self.recorder is None or not self.programs
        ):  # a pool that was given back can not be used again
            self.recorder = Recorder(device)
        self.held = self.held or [weight.detach() for weight in found_weights(model)]
        self.programs[key] = make(self.recorder)
        while len(self.programs) > PROGRAMS:
            self.wait()
            self.forget(next(iter(self.programs)))
        return self.programs[key]

    def replay(
        self,
        model: nn.Module,
        device: torch.device,
        key: Hashable,
        program: Callable[..., Any],
        *inputs: object,
    ) -> Any:  # noqa: ANN401
        """Returns what a program makes, or None if weights have moved or changed, which is seen after it."""
        try:
            self.follow(device)
            made = program(model, *inputs)
        except RuntimeError:  # happens again in `attempt`, which says so
            return None
        except BaseException:  # a loop may have recorded more, of weights that nobody has looked at
            self.clear()
            raise
        if weights_of(model) != self.weights:
            self.clear()
            return None
        self.programs.move_to_end(key)
        self.last = (
            None if made is None else self.last
        )  # else it would be started in vain next time
        return made

    def forget(self, key: Hashable) -> None:
        self.last = None
        self.programs.pop(key, None)
        self.held = self.held if self.programs else []

    def follow(self, device: torch.device) -> None:
        """Lets this thread's stream wait for the last replay: they all use the same memory."""
        if device.type != "cuda":
            return
        handle = device.index, torch._C._cuda_getCurrentRawStream(device.index)
        if handle != self.handle:  # in less time than the streams would be compared
            current = torch.cuda.current_stream(device.index)
            if self.stream is not None:
                current.wait_stream(self.stream)
            self.stream, self.handle = current, handle

    def wait(self) -> None:
        """Waits for the last replay, before what it uses is freed."""
        if self.stream is not None:
            self.stream.synchronize()

    def clear(self) -> None:
        self.wait()
        self.asked.clear()
        self.programs.clear()
        self.last, self.weights, self.held = None, [], []


_kept: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()


def _release(model: nn.Module) -> None:
    """Gives back what is kept for a model, if it has moved."""
    kept = _kept.get(model)
    if kept is not None:
        with kept.lock:
            if kept.weights and weights_of(model) != kept.weights:
                kept.clear()


Moving.listeners.append(_release)


def attempt(
    model: nn.Module,
    device: torch.device,
    key: Hashable,
    make: Callable[[Recorder], Callable[..., Any]],
    *inputs: object,
    at_once: bool = False,
    weights: list[Hashable] | None = None,
) -> Any:  # noqa: ANN401
    """Returns what a recorded program makes of the inputs, or None if the plain path is to run.

    Arguments:
        model: The model.
        device: Where it and all inputs are.
        key: All that is fixed in the program beside the model.
        make: Creates the program, when the key is asked for a second time.
        inputs: What the program is called with, after the model.
        at_once: Whether to record at the first time already.
        weights: What `weights_of` the model says, if the caller has asked already.
    """
    made = again(model, device, key, *inputs) if weights is None else None
    if made is not None:
        return made
    if opaque(model):
        return None
    weights = weights or weights_of(model)
    key = _whole(key, device)
    with _finding:
        kept = _kept.setdefault(model, _Kept())
    with kept.lock:
        if weights != kept.weights:
            kept.clear()
            kept.weights = weights
        try:
            kept.follow(device)
            program = kept.find(model, key, at_once, device, make)
            return None if program is None else program(model, *inputs)
        except RuntimeError as error:  # of CUDA, also when it is out of memory
            kept.forget(key)
            kept.asked[key] = False
            why = str(error).partition("\n")[0]
            warnings.warn(
                f"generating without a CUDA graph, which could not be made: {why}", stacklevel=3
            )
            return None


def again(
    model: nn.Module,
    device: torch.device,
    key: Hashable,
    *inputs: object,
    question: tuple | None = None,
) -> Any:  # noqa: ANN401
    """Returns what a program makes that is there already, or None if `attempt` is to find out.

    Arguments:
        model: The model.
        device: Where it is.
        key: All that is fixed in the program beside the model.
        inputs: What the program is called with, after the model.
        question: What `same` finds the program by when it is asked next, with other inputs.
    """
    kept, key = _kept.get(model), _whole(key, device)
    if kept is None:
        return None
    with kept.lock:
        program = kept.programs.get(key)
        if program is None:
            return None
        made = kept.replay(model, device, key, program, *inputs)
        if made is not None and question is not None:
            kept.last = _Last(
                question, list(map(type, question)), _settings(), device, key, program
            )
        return made


def same(model: nn.Module, question: tuple, *inputs: object) -> Any:  # noqa: ANN401
    """Does what `again` did at the last call of a model, if that had this question; None if not.

    Only what can change between two calls is looked at, since the device waits for it.
    """
    kept = _kept.get(model)
    if kept is None:
        return None
    with kept.lock:
        last = kept.last
        if (
            last is None
            or last.types != list(map(type, question))  # first: to compare tensors would fail
            or last.question != question
            or last.settings != _settings()
            or not usable(last.device)
        ):
            return None
        return kept.replay(model, last.device, last.key, last.program, *inputs)


def forget_last(model: nn.Module) -> None:
    """Makes `same` find nothing until `again` has answered once more."""
    kept = _kept.get(model)
    if kept is not None:
        with kept.lock:
            kept.last = None


def _whole(key: Hashable, device: torch.device) -> Hashable:
    """Adds to a key what is fixed in every recording."""
    return key, device, _settings()


def _settings() -> tuple:
    return _precision("cuda", "matmul"), torch.is_inference_mode_enabled()
