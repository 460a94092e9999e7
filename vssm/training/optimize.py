"""What a step of training is made of, apart from the model: decay, learning rate, seeds, tally, replay.

    lr_s = lr min(1, s / W)                            s <= W = warmup S
    lr_s = lr (1 + cos(pi (s - W) / (S - W + 1))) / 2  after that, nearly 0 at the last step S

Legend: s steps done, S steps in all.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vssm.config import TrainConfig
from vssm.nn import BLOCKS
from vssm.objectives import Terms

__all__ = [
    "Replayed",
    "Tally",
    "TrainingStopped",
    "block_matrices",
    "learning_rate",
    "mix",
    "on_stream",
    "parameter_groups",
]

_STREAK = 10  # steps in a row that may not be finite


class TrainingStopped(ValueError):
    """Raised when a training can not go on; what it has saved is good."""


def block_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the matrices of all blocks by name, which Muon moves; not A_log, whose rows are vectors.

    A block is found by its class, wherever it is in the model: in a stack, or in a level of latents.

    Example:
        >>> from vssm import ModelConfig, build
        >>> [*block_matrices(build(ModelConfig(kind="rnn", features=3, width=8, layers=1)))]
        ['stack.blocks.0.gru.weight_ih_l0', 'stack.blocks.0.gru.weight_hh_l0']
    """
    blocks = [part for part in model.modules() if isinstance(part, tuple(BLOCKS.values()))]
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in inside and parameter.ndim == 2 and not name.endswith("A_log")
    }


def parameter_groups(model: nn.Module, but: Collection[str] = ()) -> list[dict[str, Any]]:
    """Splits parameters for AdamW: matrices decay; vectors (norms, biases, D, blank) and A_log do not.

    Arguments:
        model: The model.
        but: Names of parameters that something else moves.

    Example:
        >>> from vssm import ModelConfig, build
        >>> decayed, kept = parameter_groups(build(ModelConfig(kind="ssm", features=3, width=8, layers=1)))
        >>> len(decayed["params"]), len(kept["params"]), kept["weight_decay"]
        (7, 9, 0.0)
    """
    decayed, kept = [], []
    for name, parameter in model.named_parameters():
        if name in but:
            continue
        (decayed if parameter.ndim > 1 and not name.endswith("A_log") else kept).append(parameter)
    return [{"params": decayed}, {"params": kept, "weight_decay": 0.0}]


def learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """Returns the learning rate of a step, 1 to `total`.

    >>> config = TrainConfig(learning_rate=1.0, warmup=0.5)
    >>> [round(learning_rate(config, step, total=4), 3) for step in (1, 2, 3, 4)]
    [0.5, 1.0, 0.75, 0.25]
    """
    warm = max(1, round(config.warmup * total))
    if step <= warm:
        return config.learning_rate * step / warm
    return config.learning_rate * (1 + math.cos(math.pi * (step - warm) / (total - warm + 1))) / 2


def mix(*parts: object) -> int:
    """Returns 63 well mixed bits; seeds that follow one another would start generators that are alike."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Tally:
    """Sums the terms of steps on the device, without waiting for it, and counts those that were skipped."""

    names = (*Terms._fields, "gradient_norm")

    def __init__(self, device: torch.device) -> None:
        self.sums, self.culprit = torch.zeros(
            2, len(self.names), dtype=torch.float64, device=device
        )
        counts = torch.zeros(5, dtype=torch.float64, device=device)
        self.step, self.taken, self.skipped, self.streak, self.stopped = counts

    def add(self, values: Tensor, finite: Tensor) -> None:
        """Adds one step: its values in the order of `names`, and whether all are finite.

        Everything is changed in place, so that a recording of this can be replayed.
        """
        values = values.double()
        self.step += 1
        self.sums += values.masked_fill(~finite, 0.0)
        self.culprit.copy_(torch.where(finite, self.culprit, values))
        self.taken += finite
        self.skipped += ~finite
        self.streak.copy_((self.streak + 1) * ~finite)
        self.stopped += ((self.streak == _STREAK) & (self.stopped == 0)) * self.step

    def fetch(self, clear: bool = True) -> tuple[dict[str, float], int, int]:
        """Waits for the device and returns the means since the last clearing, steps skipped, and the streak.

        Raises `TrainingStopped` when ten steps in a row were not finite.
        """
        size = len(self.names)
        counts = torch.stack([self.taken, self.skipped, self.streak, self.stopped])
        numbers = torch.cat([self.sums, self.culprit, counts]).tolist()
        sums, culprit, (taken, skipped, streak, stopped) = (
            numbers[:size],
            numbers[size:-4],
            numbers[-4:],
        )
        if stopped:
            bad = [
                name
                for name, value in zip(self.names, culprit, strict=True)
                if not math.isfinite(value)
            ]
            term = (*bad[1:], *bad)[0]  # a part of the loss says more than the loss
            raise TrainingStopped(
                f"step {stopped:.0f}: {term} is not finite, for the tenth step in a row"
            )
        if clear:
            self.sums.zero_()
            self.taken.zero_()
        means = {n: s / taken if taken else math.nan for n, s in zip(self.names, sums, strict=True)}
        return means, int(skipped), int(streak)

    def pending(self) -> list[float]:
        """Returns the sums of steps that no line of the log tells of yet, and how many these are."""
        return [*self.sums.tolist(), float(self.taken)]

    def restore(self, pending: list[float]) -> None:
        """Goes on from what `pending` returned."""
        self.sums.copy_(torch.tensor(pending[:-1], dtype=torch.float64))
        self.taken.fill_(pending[-1])


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Runs what is inside on one stream, as recordings need it: gradients return where they were made."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(stream.device).wait_stream(stream)


class Replayed:
    """Runs a function of static tensors on a CUDA device: twice plainly, then as a recording.

    A recorded step waits neither for Python nor for launches. The function reads and writes tensors that stay
    where they are, never waits for the device, and draws random numbers from the given generator alone, whose
    seed can be set before every call.

    Arguments:
        function: What to run; takes nothing, returns tensors that the next call overwrites.
        generator: What it draws from.
        stream: The CUDA stream that all calls run on; None to run plainly always.
        failed: Called with the reason if recording fails; the function then runs plainly.
    """

    def __init__(
        self,
        function: Callable[[], Tensor],
        generator: torch.Generator,
        stream: "torch.cuda.Stream | None",
        failed: Callable[[str], object],
    ) -> None:
        self.function, self.generator, self.stream, self.failed = (
            function,
            generator,
            stream,
            failed,
        )
        self.plain_calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> Tensor:
        if self.stream is None or self.plain_calls < 2:
            self.plain_calls += 1
            return self.function()
        if self.graph is None:
            try:
                self._record()
            except RuntimeError as error:
                self.stream = None
                self.failed(f"the step runs without a CUDA graph: {str(error).splitlines()[0]}")
                return self.function()
        assert self.graph is not None
        self.graph.replay()
        return self.result

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, stream=self.stream):
            self.result = self.function()
        self.graph = graph
