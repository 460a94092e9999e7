"""What a step of training changes: the weights, the state of AdamW, and the moving average of the weights.

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
from vssm.distributed import World
from vssm.optimize import learning_rate, parameter_groups

__all__ = ["Learner"]


class Learner:
    """Holds the weights of a model, what an optimiser knows of them, and their average.

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
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model),
            self._rate if self._cuda else options.learning_rate,
            betas=(0.9, options.beta2),
            weight_decay=options.weight_decay,
            fused=True,
            capturable=self._cuda,
        )
        self.parameters = dict(model.named_parameters())
        self.ema = {n: p.detach().clone() for n, p in self.parameters.items()} if options.ema else {}

    def begin(self, step: int, total: int) -> None:
        """Sets what depends on the step, 1 to `total`."""
        rate = learning_rate(self.options, step, total)
        if self._cuda:
            self._rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        self._pace.fill_(1 - min(self.options.ema, step / (step + 9)))

    def differentiate(self, loss: Tensor, values: float) -> Tensor:
        """Returns the norm of the gradient of a loss of so many values, per value, and clips the gradient."""
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), (self.options.clip or math.inf) * values)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[operator]
        return norm / values

    def update(self, good: Tensor) -> None:
        """Moves the weights, if the step is good, and their average."""
        # As torch's GradScaler does it: the fused kernel then changes nothing, and nobody waits to know.
        self.optimizer.found_inf = (~good).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        if self.ema:
            with torch.no_grad():
                gaps = torch._foreach_sub(list(self.parameters.values()), list(self.ema.values()))
                torch._foreach_mul_(gaps, self._pace)
                torch._foreach_add_(list(self.ema.values()), gaps)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Puts the moving average of the weights in their place, when there is one."""
        current = {name: self.parameters[name].detach().clone() for name in self.ema}
        with torch.no_grad():
            for name, average in self.ema.items():
                self.parameters[name].copy_(average)
            yield
            for name, value in current.items():
                self.parameters[name].copy_(value)

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Returns all of it by the names of the files of a checkpoint; every process must call this."""
        optimizer = {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state[parameter].items()
        }
        parts = {"weights": self.parameters, "optimizer": optimizer}
        if self.ema:
            parts["ema"] = self.ema
        return {part: self.world.whole(tensors) for part, tensors in parts.items()}

    def restore(self, parts: dict[str, dict[str, Tensor]], source: str) -> None:
        """Takes up what `parts` returned, which the first process has read from `source`."""
        world = self.world
        targets = {"weights": self.parameters, "optimizer": {}, "ema": self.ema}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state[parameter]
            state["step"] = torch.zeros((), device=world.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            targets["optimizer"] |= {f"{name}.{key}": value for key, value in state.items()}
        for part, tensors in targets.items():
            for name, target in tensors.items():
                saved = parts.get(part, {}).get(name)
                if part == "optimizer" and saved is None:  # a parameter that never had a gradient
                    saved = torch.zeros(target.shape)
                if world.rank == 0 and (saved is None or saved.shape != target.shape):
                    raise ValueError(f"{source!r} has no {part} {name!r} of shape {tuple(target.shape)}")
                world.fill(target, saved)
