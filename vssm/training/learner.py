"""What a training step changes: the weights, the state of the optimisers, the average of the weights.

    ema <- ema + (1 - min(decay, s / (s + 9))) (weights - ema)

A step whose gradient or loss terms are not finite changes nothing. Only the device knows whether it was.

Legend: s steps done.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vssm.config import TrainConfig
from vssm.training.distributed import World
from vssm.training.optimizers import Muon, block_matrices, learning_rate, parameter_groups

__all__ = ["Learner"]


class Learner:
    """Holds the weights of a model, the optimisers that move them, and their moving average.

    Arguments:
        model: The model, already copied to or sharded over the processes.
        options: How it is trained.
        world: The processes that train it.
    """

    def __init__(self, model: nn.Module, options: TrainConfig, world: World) -> None:
        self.options, self.world = options, world
        cuda = world.device.type == "cuda"
        # On CUDA the rate is a tensor on the device, where recorded steps read it.
        self._rate = torch.zeros((), device=world.device) if cuda else None
        self._pace = torch.zeros((), device=world.device)
        rate = options.learning_rate if self._rate is None else self._rate
        decay = options.weight_decay
        matrices = block_matrices(model) if options.optimizer == "muon" else {}
        self.adamw = torch.optim.AdamW(
            parameter_groups(model, but=matrices),
            rate,
            betas=(0.9, options.beta2),
            weight_decay=decay,
            fused=True,
            capturable=cuda,
        )
        self.optimizers: list[torch.optim.Optimizer] = [self.adamw]
        if matrices:
            self.optimizers.append(Muon(matrices.values(), rate, weight_decay=decay))
        self.parameters = dict(model.named_parameters())
        weights = self.parameters.items() if options.ema else ()
        self.ema = {name: weight.detach().clone() for name, weight in weights}

    def begin(self, step: int, total: int) -> None:
        """Sets the rates of a step, 1 to `total`."""
        rate = learning_rate(self.options, step, total)
        if self._rate is not None:
            self._rate.fill_(rate)
        else:
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
        self._pace.fill_(1 - min(self.options.ema, step / (step + 9)))

    def differentiate(self, loss: Tensor, values: float) -> Tensor:
        """Computes and clips the gradient of a loss; returns its norm per value of x before clipping."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        most = (self.options.clip or math.inf) * values
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), most)
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
        """Puts the moving average in place of the weights inside the `with` block, if there is one."""
        current = {name: self.parameters[name].detach().clone() for name in self.ema}
        with torch.no_grad():
            try:
                for name, average in self.ema.items():
                    self.parameters[name].copy_(average)
                yield
            finally:  # also after an error: training goes on with the weights
                for name, value in current.items():
                    self.parameters[name].copy_(value)

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Returns the tensors of a checkpoint by file name; every process must call this."""
        parts = {"weights": self.parameters, "optimizer": self.state()}
        if self.ema:
            parts["ema"] = self.ema
        return {part: self.world.whole(tensors) for part, tensors in parts.items()}

    def restore(self, parts: dict[str, dict[str, Tensor]], source: str) -> None:
        """Continues from `parts`, which the first process has read from `source`."""
        for group in self.adamw.param_groups:  # AdamW would make its state at the first step
            for weight in group["params"]:
                zeros = {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
                self.adamw.state[weight] = {"step": torch.zeros((), device=weight.device)} | zeros
        targets = {"weights": self.parameters, "optimizer": self.state(), "ema": self.ema}
        for part, tensors in targets.items():
            for name, target in tensors.items():
                saved = parts.get(part, {}).get(name)
                if part == "optimizer" and saved is None:  # a parameter that never had a gradient
                    saved = torch.zeros(target.shape)
                if self.world.rank == 0 and (saved is None or saved.shape != target.shape):
                    shape = tuple(target.shape)
                    raise ValueError(f"{source!r} has no {part} {name!r} of shape {shape}")
                self.world.fill(target, saved)

    def state(self) -> dict[str, Tensor]:
        """Returns the state of the optimisers, by the name of the parameter and of the state."""
        states = {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in states.get(parameter, {}).items()
        }
