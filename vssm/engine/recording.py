"""Programs of an engine: functions recorded as CUDA graphs and replayed with other numbers.

A small model on a fast device waits for Python and for launches. A recorded program has static
tensors that it reads and writes. A call copies its inputs there, replays the graph, and copies the
results out.

| program   | recorded                                                   | used for         |
| --------- | ---------------------------------------------------------- | ---------------- |
| `OneShot` | a function of a tree of tensors                            | vssm and tvae    |
| `Loop`    | 16, 4 and 1 steps of a loop that carries a tree of tensors | ssm, rnn, vrnn   |
| `Decoder` | the same, with key-value caches that have room for R steps | transformer      |

The programs of a recorder share one pool of memory: they run one after the other and leave nothing
there between calls.

On a CPU nothing is recorded: a replay runs the function again. Tests use this to check the programs
without a GPU.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from vssm.engine.trees import OutputTree, copy, join_steps, leaves_like, zero
from vssm.nn import State

__all__ = ["Decoder", "Loop", "OneShot", "Recorder", "Recording"]

_BLOCKS = (16, 4, 1)  # steps in one recording of a loop
_capturing = threading.Lock()  # CUDA allows one capture at a time in a process

_T = TypeVar("_T")
Step = Callable[[State, State], tuple[State, State]]
"""Maps the carried tree and the feed of one step to the carried tree after it and the outputs."""


class Recorder:
    """Records functions on one device, in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], _T]) -> "Recording[_T]":
        """Records a function of static tensors. It runs once before, which compiles its kernels."""
        with torch.inference_mode(False), torch.no_grad():  # static tensors serve every mode
            if self.device.type != "cuda":
                return Recording(function(), None, function)
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
                        outputs = function()
                finally:
                    torch.cuda.set_stream(current)  # a failed capture leaves its stream behind
            return Recording(outputs, graph, None)


class Recording(Generic[_T]):
    """A recorded function: `replay` computes its `outputs` again, in place."""

    def __init__(
        self,
        outputs: _T,
        graph: "torch.cuda.CUDAGraph | None",
        function: Callable[[], _T] | None,
    ) -> None:
        self.outputs, self._graph, self._function = outputs, graph, function

    def replay(self) -> None:
        """Runs the recorded work."""
        if self._graph is not None:
            self._graph.replay()
        elif self._function is not None:  # on a CPU
            with torch.no_grad():
                made = self._function()
                if isinstance(self.outputs, OutputTree) and isinstance(made, OutputTree):
                    self.outputs.overwrite(made.tree)
                elif isinstance(self.outputs, State) and isinstance(made, State):
                    copy(self.outputs.leaves(), made.leaves())


class OneShot:
    """Records a function of a tree of tensors.

    Arguments:
        recorder: The recorder.
        function: Maps the tree of inputs to a tree of outputs.
        inputs: Inputs of the shapes to come.
        numbers: The names of more inputs, which are numbers; the function gets tensors (1,).
    """

    def __init__(
        self,
        recorder: Recorder,
        function: Callable[[State], State],
        inputs: State,
        numbers: Iterable[str],
    ) -> None:
        with torch.inference_mode(False):
            inputs = inputs.map(lambda t: t.clone(memory_format=torch.contiguous_format))
            self._numbers = {
                name: torch.zeros(1, dtype=torch.int64, device=recorder.device) for name in numbers
            }
        self._static = list(inputs.leaves())
        self._function = function  # a graph reads the tensors that it holds
        everything = State({**inputs.children, **self._numbers})
        self._recording = recorder.record(lambda: OutputTree(function(everything)))

    def __call__(self, inputs: State, numbers: Mapping[str, int], position: int) -> State:
        """Runs the function; all parts of its outputs are at the position."""
        for name, number in numbers.items():
            self._numbers[name].fill_(number)
        if self._static:
            copy(self._static, inputs.leaves())
        self._recording.replay()
        return self._recording.outputs.copy(position)


class Loop:
    """Records some steps of a loop.

    Arguments:
        recorder: The recorder.
        step: One step of the loop; feed and outputs are (B, 1, ...).
        carried: The carried tree, with the right shapes; its values are not used.
    """

    def __init__(self, recorder: Recorder, step: Step, carried: State) -> None:
        self._recorder, self._step = recorder, step
        with torch.inference_mode(False):
            self._carried = carried.map(
                lambda t: torch.zeros_like(t, memory_format=torch.contiguous_format)
            )
        self._outputs = OutputTree(State({"carried": self._carried}))
        self._blocks: dict[int, tuple[list[Tensor], Recording[State]]] = {}

    def __call__(self, carried: State, feed: State) -> tuple[State, State]:
        """Runs over all steps of the feed.

        Arguments:
            carried: The tree before the first step; a missing part starts from zero.
            feed: What the steps read, each (B, T, ...).

        Returns:
            The outputs of all steps, each (B, T, ...), and the tree after the last step.
        """
        known = [name for name in self._carried.children if name in carried.children]
        if len(known) < len(self._carried.children):
            zero(self._carried.leaves())
        for name in known:  # by name: a loaded state may have another order
            static, given = self._carried.children[name], carried.children[name]
            copy(leaves_like(static, static), leaves_like(static, given))
        steps, done = list(feed.leaves()), 0
        length, made, names = steps[0].shape[1], [], []
        while done < length:
            size = next(size for size in _BLOCKS if size <= length - done)
            static, recording = self._block(feed, size)
            copy(static, [tensor[:, done : done + size] for tensor in steps])
            recording.replay()
            new, names = list(recording.outputs.leaves()), list(recording.outputs.children)
            made = made or [t.new_empty(len(t), length, *t.shape[2:]) for t in new]
            copy([tensor[:, done : done + size] for tensor in made], new)
            done += size
        outputs = State(dict(zip(names, made, strict=True)))
        return outputs, self._outputs.copy(carried.position + length).child("carried")

    def _block(self, feed: State, size: int) -> tuple[list[Tensor], Recording[State]]:
        if size not in self._blocks:
            with torch.inference_mode(False):
                static = feed.map(
                    lambda t: t[:, :size].clone(memory_format=torch.contiguous_format)
                )
                before = self._carried.map(torch.clone)
            run = partial(_run_steps, self._step, self._carried, static, size)
            recording = self._recorder.record(run)
            self._blocks[size] = list(static.leaves()), recording
            copy(self._carried.leaves(), before.leaves())  # recording has run the steps
        return self._blocks[size]


def _run_steps(step: Step, carried: State, feed: State, size: int) -> State:
    """Runs some steps of a loop: writes the carried tree, and returns the outputs."""
    now, made = carried, []
    for t in range(size):
        now, outputs = step(now, feed.map(lambda tensor, t=t: tensor[:, t : t + 1]))
        made.append(outputs)
    copy(carried.leaves(), now.leaves())
    return join_steps(made)


class Decoder(Loop):
    """Records some steps of a loop over key-value caches of fixed size.

    Arguments:
        recorder: The recorder.
        step: As for `Loop`; it writes into the caches.
        carried: As for `Loop`. A call also gives and gets `stack`, the keys and values so far.
        caches: For every block its keys and values, (2, B, heads, R, size).
    """

    def __init__(
        self, recorder: Recorder, step: Step, carried: State, caches: list[Tensor]
    ) -> None:
        super().__init__(recorder, step, carried)
        self._caches = caches

    def __call__(self, carried: State, feed: State) -> tuple[State, State]:
        """Runs over all steps of the feed, as `Loop` does."""
        torch._foreach_zero_(self._caches)  # the mask can not hide a NaN
        if "stack" in carried.children:
            for i, cache in enumerate(self._caches):
                known = carried.child("stack").child(str(i))
                for static, name in zip(cache, ("k", "v"), strict=True):
                    static[:, :, : known.position] = known[name][:, :, : known.position]
        made, after = super().__call__(carried, feed)
        end = after.position
        blocks: dict[str, Tensor | State] = {}
        for i, cache in enumerate(self._caches):
            k, v = cache[:, :, :, :end].clone(memory_format=torch.contiguous_format)
            blocks[str(i)] = State({"k": k, "v": v}, end)
        return made, State({**after.children, "stack": State(blocks, end)}, end)
