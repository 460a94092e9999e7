"""Recordings as CUDA graphs: what was run once is replayed with other numbers.

A small model on a fast device waits for Python and for launches. A recorded program has static tensors that
it reads and writes; a call copies its inputs there, replays, and copies the results out. The device waits for
what comes before the replay, so that is little: numbers are filled in, and all tensors are copied at once.

| program   | what is recorded                                                | used for                    |
| --------- | --------------------------------------------------------------- | --------------------------- |
| `OneShot` | a function of a tree of tensors                                 | vssm, tvae, reading prompts |
| `Loop`    | 16, 4 and 1 steps of a loop that carries a tree of tensors      | ssm, rnn, vrnn              |
| `Decoder` | the same with key-value caches that have room for R steps       | transformer                 |

Weights are read where they are, so a program sees them change. What a recording takes for granted beside
them, a `Watch` looks at on the device. All programs of a recorder share one pool of memory: they run one
after the other, and leave nothing there between calls. Beside it they share halves of weights
(`vssm.ops.linear.weights`), which every replay compares with the weights. `vssm.engine.graphs` keeps the
programs.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from vssm.engine.trees import Gathered, copy, join, leaves_like, leaves_of, row_of, zero
from vssm.engine.watch import Told, Watch
from vssm.nn import State
from vssm.ops import choose_backend
from vssm.ops.linear.weights import Renewal, SplitWeights
from vssm.ops.streams import MAIN, Beside

__all__ = ["Decoder", "Loop", "OneShot", "Recorder", "Recording"]

_BLOCKS = (16, 4, 1)  # steps in one recording of a loop
_capturing = threading.Lock()  # one capture at a time in a process


class _Outputs(Protocol):
    def leaves(self) -> Iterator[Tensor]: ...


_T = TypeVar("_T", bound=_Outputs)


class Recorder:
    """Makes the recordings of a model: they share a stream, a pool of memory and halves of weights."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.weights = device, SplitWeights()
        if device.type == "cuda":
            self.stream, self.pool = (
                torch.cuda.Stream(device, priority=MAIN),
                torch.cuda.graph_pool_handle(),
            )

    def record(
        self,
        model: nn.Module,
        function: Callable[[nn.Module], _T],
        watch: Watch | None = None,
        told: Told | None = None,
    ) -> "Recording[_T]":
        """Records a function that reads static tensors; it runs once before, which compiles its kernels.

        The function must not hold the model: the programs of a model would keep it alive. What is told comes
        before it, and what is watched then, before it or beside it.
        """
        if self.device.type != "cuda":
            return Recording(function(model), None, function, watch)
        current = torch.cuda.current_stream(self.device)
        graph = torch.cuda.CUDAGraph()
        with _capturing, torch.cuda.device(self.device):
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                with self.weights.note() as noted:
                    if told is not None:
                        told.tell()
                    if watch is not None:
                        watch.look(model)
                    function(model)
                renewals = self.weights.keep(noted)
            current.wait_stream(self.stream)
            # Other threads may allocate meanwhile: "global" would make that their error.
            capture = torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            )
            try:
                with capture:
                    begun = told is not None  # a graph that begins with two branches begins later
                    if told is not None:
                        told.tell()
                    looking = Beside(self.device, "watch") if begun else None
                    if watch is not None:  # first, since the host waits for it
                        with nullcontext() if looking is None else looking.stream:
                            watch.look(model)
                    try:
                        with self.weights.renewed(renewals, early=begun):
                            outputs = function(model)
                    finally:  # else the end of the capture would fail, and hide why
                        if looking is not None:
                            looking.join()
            finally:
                torch.cuda.set_stream(current)  # a capture that fails leaves its own stream behind
        return Recording(outputs, graph, weights=renewals)


class Recording(Generic[_T]):
    """A function that was recorded: `replay` computes its `outputs` again, in place."""

    def __init__(
        self,
        outputs: _T,
        graph: "torch.cuda.CUDAGraph | None",
        function: Callable[[nn.Module], _T] | None = None,
        watch: Watch | None = None,
        weights: Sequence[Renewal] = (),
    ) -> None:
        self.outputs, self._graph, self._function, self._watch = outputs, graph, function, watch
        self.weights = weights  # held: the graph reads them

    def replay(self, model: nn.Module) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif self._function is not None:  # without a GPU
            if self._watch is not None:
                self._watch.look(model)
            with torch.no_grad():
                copy(
                    map(row_of, self.outputs.leaves()), map(row_of, self._function(model).leaves())
                )


class OneShot:
    """Records a function of a tree of tensors.

    Arguments:
        function: Maps the model and the tree of inputs to a tree of outputs.
        inputs: Inputs such as those to come.
        fixed: More of them, which a call fills with a number or leaves as they are.
        constants: Other tensors and trees that the function reads, which must stay where and as they are;
            where they are outputs too, they are handed out themselves.
        watch: What must be as it was for the outputs to be right.
        numbers: Names of all that calls fill with a number.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        function: Callable[[Any, State], State],
        inputs: State,
        fixed: State,
        constants: Iterable[object] = (),
        watch: Watch | None = None,
        numbers: Iterable[str] = (),
    ) -> None:
        inputs, self.fixed = (
            tree.map(lambda t: t.clone(memory_format=torch.contiguous_format))
            for tree in (inputs, fixed)
        )
        self.static, self.constants, self.watch = list(inputs.leaves()), constants, watch
        everything = State({**inputs.children, **self.fixed.children})
        shared = {tensor.data_ptr() for tensor in _tensors(constants)}
        told, numbers = None, tuple(numbers)
        if (
            watch is not None
            and numbers
            and choose_backend("auto", recorder.device, torch.float32) == "triton"
        ):
            told = Told(numbers, self.fixed)
        self._told = {} if told is None else told.values
        run = partial(_gathered, function, everything, shared)
        self.recording = recorder.record(model, run, watch, told)

    def __call__(
        self, model: nn.Module, inputs: State, numbers: Mapping[str, int], position: int
    ) -> State | None:
        """Runs the function; None, if what is watched has changed.

        Arguments:
            model: The model.
            inputs: The inputs.
            numbers: What to fill some of the fixed ones with.
            position: Where all parts of the outputs are.
        """
        if self.watch is not None:
            self.watch.expect()
        for name, number in numbers.items():
            if name in self._told:
                self._told[name].fill(number)
            else:
                self.fixed[name].fill_(number)
        if self.static:
            copy(self.static, inputs.leaves())
        self.recording.replay(model)
        made = self.recording.outputs.own(position)
        return made if self.watch is None or self.watch.unchanged() else None


class Loop:
    """Records some steps of a loop.

    Arguments:
        step: Maps the model, what is carried and the feed of one step, each (B, 1, ...), to what is carried
            on and to the outputs of the step, each (B, 1, ...).
        carried: What is carried, with the right shapes; the values are not used.
    """

    def __init__(
        self,
        recorder: Recorder,
        step: Callable[[Any, State, State], tuple[State, State]],
        carried: State,
    ) -> None:
        self.recorder, self.step = recorder, step
        self.carried = carried.map(
            lambda t: torch.zeros_like(t, memory_format=torch.contiguous_format)
        )
        self._gathered = Gathered(State({"carried": self.carried}))
        self._blocks: dict[int, tuple[list[Tensor], Recording[State]]] = {}

    def __call__(self, model: nn.Module, carried: State, feed: State) -> tuple[State, State]:
        """Runs over all steps of the feed.

        Arguments:
            model: The model.
            carried: What the first step starts from; what is missing starts from zero.
            feed: What the steps read, each (B, T, ...).

        Returns:
            The outputs of all steps, each (B, T, ...), and what the last step carries on.
        """
        known = [name for name in self.carried.children if name in carried.children]
        if len(known) < len(self.carried.children):
            zero(self.carried.leaves())
        for name in known:
            static, given = self.carried.children[name], carried.children[name]
            copy(
                leaves_of(static), leaves_like(static, given)
            )  # a state that was loaded has another order
        steps = list(feed.leaves())
        length, done = steps[0].shape[1], 0
        made: list[Tensor] = []
        while done < length:
            size = next(size for size in _BLOCKS if size <= length - done)
            static, recording = self._block(model, feed, size)
            copy(static, [tensor[:, done : done + size] for tensor in steps])
            recording.replay(model)
            new = list(recording.outputs.leaves())
            made = made or [
                tensor.new_empty(len(tensor), length, *tensor.shape[2:]) for tensor in new
            ]
            copy([tensor[:, done : done + size] for tensor in made], new)
            done += size
        outputs = State(dict(zip(recording.outputs.children, made, strict=True)))
        return outputs, self._gathered.own(carried.position + length).child("carried")

    def _block(
        self, model: nn.Module, feed: State, size: int
    ) -> tuple[list[Tensor], Recording[State]]:
        if size not in self._blocks:
            static = feed.map(lambda t: t[:, :size].clone(memory_format=torch.contiguous_format))
            # To record runs the steps once, which moves what is carried.
            before = self.carried.map(torch.clone)
            run = partial(_steps, self.step, self.carried, static, size)
            self._blocks[size] = list(static.leaves()), self.recorder.record(model, run)
            copy(self.carried.leaves(), before.leaves())
        return self._blocks[size]


class Decoder(Loop):
    """Records some steps of a loop over key-value caches of a fixed room.

    Arguments:
        step: As for `Loop`, and it gets `caches`, to write in place.
        carried: As for `Loop`; a call also gives and gets `stack`, the keys and values known so far.
        caches: For every block its keys and values, (2, B, heads, R, size).
    """

    def __init__(
        self,
        recorder: Recorder,
        step: Callable[..., tuple[State, State]],
        carried: State,
        caches: list[Tensor],
    ) -> None:
        super().__init__(recorder, partial(step, caches=caches), carried)
        self.caches = caches

    def __call__(self, model: nn.Module, carried: State, feed: State) -> tuple[State, State]:
        torch._foreach_zero_(self.caches)  # the mask hides numbers only: it can not hide a NaN
        if "stack" in carried.children:
            for i, cache in enumerate(self.caches):
                known = carried.child("stack").child(str(i))
                for static, name in zip(cache, ("k", "v"), strict=True):
                    static[:, :, : known.position] = known[name][:, :, : known.position]
        made, after = super().__call__(model, carried, feed)
        end = after.position
        blocks: dict[str, Tensor | State] = {}
        for i, cache in enumerate(self.caches):
            k, v = cache[:, :, :, :end].clone(memory_format=torch.contiguous_format)
            blocks[str(i)] = State({"k": k, "v": v}, end)
        return made, State({**after.children, "stack": State(blocks, end)}, end)


def _gathered(
    function: Callable[[Any, State], State], inputs: State, shared: set[int], model: nn.Module
) -> Gathered:
    return Gathered(function(model, inputs), shared)


def _steps(
    step: Callable[[Any, State, State], tuple[State, State]],
    carried: State,
    feed: State,
    size: int,
    model: nn.Module,
) -> State:
    now, made = carried, []
    for t in range(size):
        now, outputs = step(model, now, feed.map(lambda tensor, t=t: tensor[:, t : t + 1]))
        made.append(outputs)
    copy(carried.leaves(), now.leaves())
    return join(made)


def _tensors(values: Iterable[object]) -> list[Tensor]:
    return [
        tensor
        for value in values
        if isinstance(value, Tensor | State)
        for tensor in leaves_of(value)
    ]
