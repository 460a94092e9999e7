"""A training step: a batch, its objective, the gradient, and the update of the weights.

    g = d/dw mean_b loss_b,  clipped to |g| <= clip V            V values of x in a sequence
    lr_s = lr min(1, s / W)                            s <= W = warmup S
    lr_s = lr (1 + cos(pi (s - W) / (S - W + 1))) / 2  afterwards, nearly 0 at the last step S
    ema <- ema + (1 - min(decay, s / (s + 9))) (weights - ema)

All randomness is a function of (seed, step) or (seed, epoch). Every process draws the numbers of
the whole batch and takes its own rows. So a resumed run, or a run with another number of processes,
sees the same data and noise as an unbroken one; on a CPU it is equal to the last bit.

A step never waits for a CUDA device, and may be replayed as a CUDA graph: it reads its inputs from
tensors that stay in place. A step whose gradient or loss terms are not finite changes nothing but
the count of such steps; the host learns of it at the next log point.

Legend: s steps done, S steps in all; x (B, T, D) or tokens (B, T); terms per sequence, in nats.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vssm.config import TrainConfig
from vssm.data import Meta, Split, moved
from vssm.data.dataset import on_device
from vssm.models import Model
from vssm.objectives import Terms, objective
from vssm.training.distributed import World
from vssm.training.muon import Muon, block_matrices

Parts = dict[str, dict[str, Tensor]]
_STREAK = 10  # bad steps in a row that stop a run


class Step:
    """Takes the steps of a training.

    Arguments:
        model: The model, which is moved to the device, and copied to or sharded over the processes.
        split: The training set.
        meta: What the data look like.
        options: How the model is trained.
        world: The processes that train it.
    """

    def __init__(
        self, model: Model, split: Split, meta: Meta, options: TrainConfig, world: World
    ) -> None:
        self.meta: Meta = meta
        self.options: TrainConfig = options
        self.world: World = world
        device = world.device
        automatic = "bfloat16" if device.type == "cuda" else "float32"
        precision = automatic if options.precision == "auto" else options.precision
        self.dtype: torch.dtype = getattr(torch, precision)
        self.alone: _Call = _Call(model)
        self.parallel: nn.Module = world.wrap(self.alone, options.fsdp)
        self.learner: Learner = Learner(model, options, world)
        self.tally: Tally = Tally(device)
        self.split: Split = on_device(split, device)
        # Gradients are clipped and logged per value of x; per sequence they would be thousands.
        self.values: float = math.prod(split.shape) * split.filled
        self.per_epoch: int = len(split) // options.batch
        self.total: int = min(options.epochs * self.per_epoch, options.max_steps or 10**18)
        self.generator: torch.Generator = torch.Generator(device)
        self.kl_weight: Tensor | None = (
            torch.zeros((), device=device) if options.kl_warmup else None
        )
        local = options.batch // world.size
        self.index: Tensor = torch.zeros(local, dtype=torch.long, device=device)
        self.update: Callable[[], Tensor] = self.compute
        self.epoch: int = -1
        self.order: Tensor = torch.empty(0)

    def take(self, step: int) -> None:
        """Takes step number 1 to S: sets all inputs, which the device reads, and computes."""
        options = self.options
        epoch, i = divmod(step - 1, self.per_epoch)
        if epoch != self.epoch:
            shuffle = torch.Generator().manual_seed(mix(options.seed, "epoch", epoch))
            order = torch.randperm(len(self.split), generator=shuffle, device="cpu")
            if self.split.x.is_cuda:  # pinned, so that the copy does not wait either
                order = order.pin_memory().to(self.split.x.device, non_blocking=True)
            self.epoch, self.order = epoch, order
        first = i * options.batch + self.world.rank * len(self.index)
        self.index.copy_(self.order[first : first + len(self.index)], non_blocking=True)
        self.learner.begin(step, self.total)
        if self.kl_weight is not None:
            self.kl_weight.fill_(min(1.0, (step - 1) / (options.kl_warmup * self.total)))
        self.generator.manual_seed(mix(options.seed, "step", step))
        self.update()

    def compute(self) -> Tensor:
        """Computes on the device: objective, gradient, clipping, optimiser."""
        options, world = self.options, self.world
        shard = world.rank, world.size
        x, lengths = self.split.take(self.index, world.device)
        if options.shift and self.meta.image_shape is not None:
            image, given = self.meta.without_given(x), x[..., x.shape[-1] - self.meta.given :]
            image = moved(image, options.shift, self.meta.image_shape[2], self.generator, shard)
            x = torch.cat([image, given], -1)
        with self.autocast():
            terms = self.parallel(objective, x, self.generator, shard, lengths, self.kl_weight)
        norm = self.learner.differentiate(terms.loss.mean(), self.values)
        means = torch.stack([term.detach().mean() for term in terms])
        if world.size > 1:
            means = world.sum(means) / world.size
        values = torch.cat([means, norm[None]])
        good = values.isfinite().all()
        self.learner.update(good)
        self.tally.add(values, good)
        return values

    def terms(self, x: Tensor, lengths: Tensor | None) -> Terms:
        """Returns the terms of sequences without a step."""
        shard = self.world.rank, self.world.size
        return self.alone(objective, x, self.generator, shard, lengths)

    def autocast(self) -> torch.autocast:
        """Returns the context in which matrix products have the dtype of the training."""
        half = self.dtype == torch.bfloat16
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=half)


class _Call(nn.Module):
    """Turns any function of a model into a forward pass, because DDP and FSDP2 hook into that."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
        return function(self.model, *arguments)


class TrainingStopped(ValueError):
    """Raised when a training cannot go on; its last checkpoint is good."""


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


def parameter_groups(model: nn.Module, but: Collection[str] = ()) -> list[dict[str, Any]]:
    """Splits the parameters for AdamW: matrices decay; vectors and A_log do not.

    Leaves out the names in `but`, which another optimiser moves.
    """
    groups: tuple[list[Tensor], list[Tensor]] = [], []
    for name, parameter in model.named_parameters():
        if name not in but:
            groups[0 if parameter.ndim > 1 and not name.endswith("A_log") else 1].append(parameter)
    return [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}]


class Learner:
    """Holds the weights of a model, the optimisers that move them, and their moving average.

    The model is already copied to or sharded over the processes of `world`.
    """

    def __init__(self, model: nn.Module, options: TrainConfig, world: World) -> None:
        self.options: TrainConfig = options
        self.world: World = world
        cuda = world.device.type == "cuda"
        # On CUDA the rate is a tensor on the device, where recorded steps read it.
        self._rate = torch.zeros((), device=world.device) if cuda else None
        self._pace = torch.zeros((), device=world.device)
        rate = options.learning_rate if self._rate is None else self._rate
        matrices = block_matrices(model) if options.optimizer == "muon" else {}
        adamw = torch.optim.AdamW(
            parameter_groups(model, but=matrices),
            rate,
            betas=(0.9, options.beta2),
            weight_decay=options.weight_decay,
            fused=True,
            capturable=cuda,
        )
        self.optimizers: list[torch.optim.Optimizer] = [adamw]
        if matrices:
            self.optimizers.append(Muon(matrices.values(), rate, weight_decay=options.weight_decay))
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        weights = self.parameters.items() if options.ema else ()
        self.ema: dict[str, Tensor] = {name: weight.detach().clone() for name, weight in weights}

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
        """Computes the gradient of a loss and clips it; returns its norm per value before that."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        most = (self.options.clip or math.inf) * values
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), most)
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()  # type: ignore[operator]
        return norm / values

    def update(self, good: Tensor) -> None:
        """Moves the weights and their average, if the step is good."""
        # As in torch's GradScaler: optimisers skip a bad step without waiting for the device.
        bad = (~good).float()
        for optimizer in self.optimizers:
            optimizer.found_inf = bad  # type: ignore[attr-defined]
            optimizer.step()
        if self.ema:
            with torch.no_grad():
                gaps = torch._foreach_sub(list(self.parameters.values()), list(self.ema.values()))
                torch._foreach_mul_(gaps, self._pace * good)
                torch._foreach_add_(list(self.ema.values()), gaps)

    def tensors(self) -> Parts:
        """Returns the tensors of a checkpoint by file: weights, optimizer, ema; none is copied."""
        states = {p: state for each in self.optimizers for p, state in each.state.items()}
        optimizer = {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in states.get(parameter, {}).items()
        }
        parts = {"weights": {**self.parameters}, "optimizer": optimizer, "ema": self.ema}
        return {part: tensors for part, tensors in parts.items() if tensors}

    def restore(self, parts: Parts, source: str) -> None:
        """Continues from `parts`, which the first process has read from `source`."""
        adamw = self.optimizers[0]
        for group in adamw.param_groups:  # AdamW would make its state at the first step
            for weight in group["params"]:
                zeros = {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
                adamw.state[weight] = {"step": torch.zeros((), device=weight.device)} | zeros
        for part, tensors in self.tensors().items():
            for name, target in tensors.items():
                saved = parts.get(part, {}).get(name)
                if part == "optimizer" and saved is None:  # a parameter that never had a gradient
                    saved = torch.zeros(target.shape)
                if self.world.rank == 0 and (saved is None or saved.shape != target.shape):
                    shape = tuple(target.shape)
                    raise ValueError(f"{source!r} has no {part} {name!r} of shape {shape}")
                self.world.fill(target, saved)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replaces the weights by their moving average inside the `with` block, if there is one."""
        self._swap_average()
        try:
            yield
        finally:  # also after an error: training goes on with the weights
            self._swap_average()

    @torch.no_grad()
    def _swap_average(self) -> None:
        for name, average in self.ema.items():
            before = average.clone()
            average.copy_(self.parameters[name])
            self.parameters[name].copy_(before)


class Tally:
    """Sums the terms of good steps on the device, and counts the steps that were skipped."""

    names: tuple[str, ...] = (*Terms._fields, "gradient_norm")
    stopped: Tensor
    """The step that ends the training, 0 if none does."""

    def __init__(self, device: torch.device) -> None:
        num = len(self.names)
        self._numbers = torch.zeros(2 * num + 5, dtype=torch.float64, device=device)
        self._sums, self._culprit, self._counts = self._numbers.split([num, num, 5])
        self._step, self._taken, self._skipped, self._streak, self.stopped = self._counts

    def add(self, values: Tensor, finite: Tensor) -> None:
        """Adds one step: its values in the order of `names`, and whether all are finite.

        All tensors change in place, so that a CUDA graph of this can be replayed.
        """
        values = values.double()
        self._step += 1
        self._sums += values.masked_fill(~finite, 0.0)
        self._culprit.copy_(torch.where(finite, self._culprit, values))
        self._taken += finite
        self._skipped += ~finite
        self._streak.copy_((self._streak + 1) * ~finite)
        self.stopped += ((self._streak == _STREAK) & (self.stopped == 0)) * self._step

    def fetch(self) -> tuple[dict[str, float], int, int]:
        """Returns the means since the last call, steps skipped in all, and bad steps in a row.

        Raises `TrainingStopped` when ten steps in a row were not finite.
        """
        num, (*terms, _, taken, skipped, streak, stopped) = len(self.names), self._numbers.tolist()
        sums, culprit = terms[:num], terms[num:]
        if stopped:
            bad = [n for n, v in zip(self.names, culprit, strict=True) if not math.isfinite(v)]
            term = (*bad[1:], *bad)[0]  # a part of the loss says more than the loss
            raise TrainingStopped(
                f"step {stopped:.0f}: {term} is not finite, for the tenth step in a row;"
                " lower --train.learning-rate, or look for extreme values in the data"
            )
        self._sums.zero_()
        self._taken.zero_()
        means = {n: s / taken if taken else math.nan for n, s in zip(self.names, sums, strict=True)}
        return means, int(skipped), int(streak)

    def restore(self, step: float, skipped: float, streak: float) -> None:
        """Continues from a checkpoint."""
        self._counts.copy_(self._counts.new_tensor([step, 0.0, skipped, streak, 0.0]))


def mix(*parts: object) -> int:
    """Returns 63 well mixed bits; consecutive seeds would start similar generators."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
