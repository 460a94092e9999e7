"""What a step of training changes: the weights, the state of optimisers, the moving average of the weights.

    ema <- ema + (1 - min(decay, s / (s + 9))) (weights - ema)

A step whose gradient or terms are not finite changes nothing; whether it was is known on the device alone.

Legend: s steps done.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vssm.config import TrainConfig
from vssm.training.distributed import World
from vssm.training.muon import Muon
from vssm.training.optimize import block_matrices, learning_rate, parameter_groups

__all__ = ["Learner"]


class Learner:
    """Holds the weights of a model, what one or two optimisers know of them, and their average.

    Arguments:
        model: The model, already spread over the processes.
        options: How it is trained.
        world: Where.
    """

    def __init__(self, model: nn.Module, options: TrainConfig, world: World) -> None:
        self.options, self.world = options, world
        self._cuda = world.device.type == "cuda"
        # On a CUDA device numbers that change from step to step lie there, for recordings to read.
        self._rate, self._pace = (torch.zeros((), device=world.device) for _ in range(2))
        rate, decay = self._rate if self._cuda else options.learning_rate, options.weight_decay
        matrices = block_matrices(model) if options.optimizer == "muon" else {}
        self.adamw = torch.optim.AdamW(
            parameter_groups(model, but=matrices),
            rate,
            betas=(0.9, options.beta2),
            weight_decay=decay,
            fused=True,
            capturable=self._cuda,
        )
        self.optimizers: list[torch.optim.Optimizer] = [self.adamw]
        if matrices:
            self.optimizers.append(Muon(matrices.values(), rate, weight_decay=decay))
        self.parameters = dict(model.named_parameters())
        self.ema = (
            {n: p.detach().clone() for n, p in self.parameters.items()} if options.ema else {}
        )

    def begin(self, step: int, total: int) -> None:
        """Sets what depends on the step, 1 to `total`."""
        rate = learning_rate(self.options, step, total)
        if self._cuda:
            self._rate.fill_(rate)
        else:
            for group in (
                group for optimizer in self.optimizers for group in optimizer.param_groups
            ):
                group["lr"] = rate
        self._pace.fill_(1 - min(self.options.ema, step / (step + 9)))

    def differentiate(self, loss: Tensor, values: float) -> Tensor:
        """Returns the norm of the gradient of a loss of so many values, per value, and clips the gradient."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(
            self.parameters.values(), (self.options.clip or math.inf) * values
        )
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[operator]
        return norm / values

    def update(self, good: Tensor) -> None:
        """Moves the weights and their average, if the step is good."""
        # As torch's GradScaler does it: optimisers then change nothing, and nobody waits to know.
        bad = (~good).float()
        for optimizer in self.optimizers:
            optimizer.found_inf = bad  # type: ignore[attr-defined]
            optimizer.step()
        if self.ema:
            with torch.no_grad():
                gaps = torch._foreach_sub(list(self.parameters.values()), list(self.ema.values()))
                torch._foreach_mul_(gaps, self._pace * good)
                torch._foreach_add_(list(self.ema.values()), gaps)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Puts the moving average of the weights in their place, when there is one."""
        current = {name: self.parameters[name].detach().clone() for name in self.ema}
        with torch.no_grad():
            try:
                for name, average in self.ema.items():
                    self.parameters[name].copy_(average)
                yield
            finally:  # the weights that training goes on with, whatever became of the average
                for name, value in current.items():
                    self.parameters[name].copy_(value)

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Returns all of it by the names of the files of a checkpoint; every process must call this."""
        parts = {"weights": self.parameters, "optimizer": self._state()}
        if self.ema:
            parts["ema"] = self.ema
        return {part: self.world.whole(tensors) for part, tensors in parts.items()}

    def restore(self, parts: dict[str, dict[str, Tensor]], source: str) -> None:
        """Takes up what `parts` returned, which the first process has read from `source`."""
        world = self.world
        # AdamW makes its state at the first step; Muon has had its own from the start.
        for parameter in (
            parameter for group in self.adamw.param_groups for parameter in group["params"]
        ):
            state = self.adamw.state[parameter]
            state["step"] = torch.zeros((), device=world.device)
            state["exp_avg"], state["exp_avg_sq"] = (
                torch.zeros_like(parameter),
                torch.zeros_like(parameter),
            )
        targets = {"weights": self.parameters, "optimizer": self._state(), "ema": self.ema}
        for part, tensors in targets.items():
            for name, target in tensors.items():
                saved = parts.get(part, {}).get(name)
                if part == "optimizer" and saved is None:  # a parameter that never had a gradient
                    saved = torch.zeros(target.shape)
                if world.rank == 0 and (saved is None or saved.shape != target.shape):
                    raise ValueError(
                        f"{source!r} has no {part} {name!r} of shape {tuple(target.shape)}"
                    )
                world.fill(target, saved)

    def _state(self) -> dict[str, Tensor]:
        """Returns what the optimisers know, by the parameter that they know it of."""
        states = {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in states.get(parameter, {}).items()
        }
