"""A training step as a CUDA graph, which waits neither for Python nor for kernel launches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class GraphedStep:
    """Calls a function twice, then records it as a CUDA graph and replays the graph.

    The function reads and writes tensors that stay where they are, never waits for the device, and
    draws random numbers only from the given generator, whose seed can be set before every call.
    """

    function: Callable[[], Tensor]
    """Takes nothing; returns tensors that the next call overwrites."""
    generator: torch.Generator
    stream: "torch.cuda.Stream"
    failed: Callable[[str], object]
    """Called with the reason if recording fails; the function is then called every time."""
    _calls: int = 0
    _graph: "torch.cuda.CUDAGraph | None" = None
    _result: Tensor | None = None

    def __call__(self) -> Tensor:
        self._calls += 1
        if self._calls == 3:
            self._record()
        if self._graph is None or self._result is None:
            return self.function()
        self._graph.replay()
        return self._result

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self._result = self.function()
            self._graph = graph
        except RuntimeError as error:
            self.failed(f"the step runs without a CUDA graph: {str(error).splitlines()[0]}")


@contextmanager
def on_stream(stream: "torch.cuda.Stream | None") -> Iterator[None]:
    """Runs the body on one stream: a CUDA graph needs gradients on the stream that made them."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(stream.device).wait_stream(stream)
