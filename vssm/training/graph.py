"""A training step as a CUDA graph, which waits neither for Python nor for kernel launches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["GraphedStep", "on_stream"]


class GraphedStep:
    """Calls a function twice, then records it as a CUDA graph and replays the graph.

    The function reads and writes tensors that stay where they are, never waits for the device, and
    draws random numbers only from the given generator, whose seed can be set before every call.

    Arguments:
        function: Takes nothing; returns tensors that the next call overwrites.
        generator: Its source of random numbers.
        stream: The CUDA stream of all calls.
        failed: Called with the reason if recording fails; the function is then called every time.
    """

    generator: torch.Generator
    plain_calls: int
    result: Tensor

    def __init__(
        self,
        function: Callable[[], Tensor],
        generator: torch.Generator,
        stream: "torch.cuda.Stream",
        failed: Callable[[str], object],
    ) -> None:
        self.function: Callable[[], Tensor] = function
        self.generator = generator
        self.stream: torch.cuda.Stream = stream
        self.failed: Callable[[str], object] = failed
        self.plain_calls = 2
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> Tensor:
        if self.graph is None and not self.plain_calls:
            self._record()
        if self.graph is None:
            self.plain_calls -= 1
            return self.function()
        self.graph.replay()
        return self.result

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self.result = self.function()
            self.graph = graph
        except RuntimeError as error:
            self.plain_calls = -1  # never 0 again
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
