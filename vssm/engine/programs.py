"""Programs of an engine: calls that repeat, recorded as CUDA graphs.

A small model on a fast device waits for Python and for launches. A recorded program has static
tensors that it reads and writes. A call copies its inputs there, replays the graph, and copies the
results out.

| program             | recorded                                            | used for      |
| ------------------- | --------------------------------------------------- | ------------- |
| `OneShot`           | a function of a tree of tensors                     | vssm and tvae |
| `vssm.engine.loops` | some steps of a loop that carries a tree of tensors | all others    |

Programs are found by keys that hold everything that is fixed in them. They share one pool of
memory: they run one after the other and leave nothing there between calls.

On a CPU nothing is recorded, except in tests, where a replay runs the function again.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeAlias

import torch

from vssm.engine.trees import compact, copy, describe, duplicate
from vssm.nn import State

DEVICES = ("cuda",)  # tests add "cpu"
_PROGRAMS = 8  # kept at a time
_KEYS = 64  # remembered as asked for once
_capturing = threading.Lock()  # CUDA allows one capture at a time in a process


class Recorder:
    """Records functions on one device, in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Returns a replay of a function that reads and writes static tensors.

        The function runs once before it is recorded, which compiles its kernels.
        """
        with torch.inference_mode(False), torch.no_grad():  # static tensors serve every mode
            if self.device.type != "cuda":
                function()
                return torch.no_grad()(function)
            current, graph = torch.cuda.current_stream(self.device), torch.cuda.CUDAGraph()
            with _capturing, torch.cuda.device(self.device):
                self._stream.wait_stream(current)
                with torch.cuda.stream(self._stream):
                    function()
                current.wait_stream(self._stream)
                # "global" would fail whenever another thread allocates memory meanwhile.
                capture = torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                )
                try:
                    with capture:
                        function()
                finally:
                    torch.cuda.set_stream(current)  # a failed capture leaves its stream behind
            return graph.replay


Program: TypeAlias = Callable[..., Any]
Make: TypeAlias = Callable[[Recorder], Program | None]


class Programs:
    """Keeps the most recently used programs of one model on one device.

    `run` returns None if the plain path should run: at the first call of a key, because most keys
    are used only once; if recording failed; and if nothing can be recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()
        self._asked: OrderedDict[Hashable, bool] = OrderedDict()  # whether a key may be recorded
        self._recorder = Recorder(device)
        self._stream: torch.cuda.Stream | None = None  # of the last replay

    def can_record(self) -> bool:
        """Says whether programs can be recorded and replayed here and now."""
        kind = self._device.type
        if kind not in DEVICES or torch.compiler.is_compiling() or torch.is_autocast_enabled(kind):
            return False
        return kind == "cpu" or not torch.cuda.is_current_stream_capturing()

    def run(self, key: Hashable, make: Make, *inputs: object, at_once: bool = False) -> Any:  # noqa: ANN401
        """Returns the result of a program, or None if the plain path should run.

        Arguments:
            key: Everything that is fixed in the program.
            make: Records the program, when the key is asked for a second time; it may return None.
            inputs: The arguments of the program.
            at_once: Whether to record at the first time already.
        """
        if not self.can_record():
            return None
        with self._lock:
            try:
                self._wait_for_other_streams()
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

    def run_function(
        self,
        key: tuple[Hashable, ...],
        function: Callable[[State], State],
        given: State,
        position: int | None = None,
    ) -> State | None:
        """Returns a function of a tree of tensors, computed by a program; None as `run` does.

        Arguments:
            key: Everything that is fixed in the function, besides the shapes of its tensors.
            function: Maps tensors to results.
            given: The tensors.
            position: The position of the results; the recorded position if not given.
        """
        make = partial(OneShot, function=function, inputs=given)
        return self.run((*key, describe(given)), make, given, position)

    def _find(self, key: Hashable, make: Make, at_once: bool) -> Program | None:
        if key in self._programs:
            self._programs.move_to_end(key)
            return self._programs[key]
        asked = at_once or key in self._asked
        may_record = self._asked.setdefault(key, True)
        while len(self._asked) > _KEYS:
            self._asked.popitem(last=False)
        if not (asked and may_record):
            return None
        if not self._programs:  # the pool of programs that are gone cannot be used again
            self._recorder = Recorder(self._device)
        program = make(self._recorder)
        if program is None:
            self._asked[key] = False
            return None
        self._programs[key] = program
        if len(self._programs) > _PROGRAMS:
            if self._stream is not None:
                self._stream.synchronize()  # before the memory of a replay is freed
            self._programs.popitem(last=False)
        return self._programs[key]

    def _wait_for_other_streams(self) -> None:
        """Lets this thread's stream wait for the last replay: all programs use the same memory."""
        if self._device.type == "cuda":
            current = torch.cuda.current_stream(self._device)
            if self._stream is not None and self._stream != current:
                current.wait_stream(self._stream)
            self._stream = current


class OneShot:
    """Records a function of a tree of tensors.

    Arguments:
        recorder: The recorder.
        function: Maps the tree of inputs to a tree of outputs.
        inputs: Inputs of the shapes to come.
    """

    def __init__(
        self, recorder: Recorder, function: Callable[[State], State], inputs: State
    ) -> None:
        with torch.inference_mode(False):
            static = inputs.map(lambda t: t.clone(memory_format=torch.contiguous_format))
        results: list[State] = []

        def run() -> None:
            results.clear()  # first, because results of many rows take much memory
            results.append(compact(function(static)))

        self._static, self._results = list(static.leaves()), results
        self._replay = recorder.record(run)
        self._function = function  # a graph reads the tensors that it holds

    def __call__(self, inputs: State, position: int | None) -> State:
        """Runs the function; all parts of its outputs are at the position, if one is given."""
        copy(self._static, inputs.leaves())
        self._replay()
        return duplicate(self._results[0], position)
