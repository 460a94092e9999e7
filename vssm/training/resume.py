"""What a checkpoint holds of a training besides numbers, and how a training takes it up again.

| part | tensors |
| --- | --- |
| `weights` | the parameters by name |
| `optimizer` | the state of the optimisers, by the name of the parameter and of the state |
| `ema` | the moving average of the weights, if there is one |

All tensors are whole, so a run may go on with another number of processes.
"""

import torch
from torch import Tensor

from vssm.training.step import Learner

__all__ = ["checkpoint_parts", "restore_parts"]

Parts = dict[str, dict[str, Tensor]]


def checkpoint_parts(learner: Learner) -> Parts:
    """Returns the tensors of a checkpoint by file name; every process must call this."""
    return {part: learner.world.whole(t) for part, t in _tensors(learner).items() if t}


def restore_parts(learner: Learner, parts: Parts, source: str) -> None:
    """Continues from `parts`, which the first process has read from `source`."""
    adamw = learner.optimizers[0]
    for group in adamw.param_groups:  # AdamW would make its state at the first step
        for weight in group["params"]:
            zeros = {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
            adamw.state[weight] = {"step": torch.zeros((), device=weight.device)} | zeros
    for part, tensors in _tensors(learner).items():
        for name, target in tensors.items():
            saved = parts.get(part, {}).get(name)
            if part == "optimizer" and saved is None:  # a parameter that never had a gradient
                saved = torch.zeros(target.shape)
            if learner.world.rank == 0 and (saved is None or saved.shape != target.shape):
                shape = tuple(target.shape)
                raise ValueError(f"{source!r} has no {part} {name!r} of shape {shape}")
            learner.world.fill(target, saved)


def _tensors(learner: Learner) -> Parts:
    """Returns the tensors of a training, which `restore_parts` overwrites."""
    states = {p: state for optimizer in learner.optimizers for p, state in optimizer.state.items()}
    optimizer = {
        f"{name}.{key}": value
        for name, parameter in learner.parameters.items()
        for key, value in states.get(parameter, {}).items()
    }
    return {"weights": {**learner.parameters}, "optimizer": optimizer, "ema": learner.ema}
