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

    def __init__(
        self,
        function: Callable[[], Tensor],
        generator: torch.Generator,
        stream: "torch.cuda.Stream",
        failed: Callable[[str], object],
    ) -> None:
        self._function, self._generator = function, generator
        self._stream, self._failed = stream, failed
        self._calls, self._graph, self._result = 0, torch.cuda.CUDAGraph(), torch.empty(0)
        self._replayed = False

    def __call__(self) -> Tensor:
        self._calls += 1
        if self._calls == 3:
            self._record()
        if not self._replayed:
            return self._function()
        self._graph.replay()
        return self._result

    def _record(self) -> None:
        self._graph.register_generator_state(self._generator)
        try:
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._result = self._function()
            self._replayed = True
        except RuntimeError as error:
            self._failed(f"the step runs without a CUDA graph: {str(error).splitlines()[0]}")


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
