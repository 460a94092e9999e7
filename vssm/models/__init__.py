"""The six models: three classes, one stack; and two more for vssm, with levels and any part."""

import os
import warnings

import torch
from torch import Tensor, nn

from vssm.checks import check_type
from vssm.config import ModelConfig
from vssm.models.anypart import AnyPart as AnyPart
from vssm.models.autoregressive import Autoregressive as Autoregressive
from vssm.models.ladder import Ladder as Ladder
from vssm.models.variational import Variational as Variational
from vssm.models.vrnn import VRNN as VRNN
from vssm.models.vrnn import Trajectory as Trajectory

__all__ = [
    "MODELS",
    "VRNN",
    "AnyPart",
    "Autoregressive",
    "Ladder",
    "Model",
    "Trajectory",
    "Variational",
    "build",
    "first_weight",
    "inner_model",
    "single_after_fork",
]

Model = Autoregressive | Variational | VRNN | Ladder | AnyPart
_CLASSES = (Autoregressive, Variational, VRNN, Ladder, AnyPart)  # torch.compile knows no unions
_IMPORTED_IN = os.getpid()

MODELS: dict[str, type[nn.Module]] = {
    "transformer": Autoregressive,
    "ssm": Autoregressive,
    "rnn": Autoregressive,
    "tvae": Variational,
    "vrnn": VRNN,
    "vssm": Variational,
}


def build(config: ModelConfig) -> Model:
    """Creates the model that a config describes, with fresh weights from torch's random state.

    Example:
        >>> model = build(ModelConfig(kind="ssm", features=3, width=8, layers=1))
        >>> sum(p.numel() for p in model.parameters())
        1379
    """
    check_type("config", config, ModelConfig, "a ModelConfig")
    single_after_fork()
    if config.known == "any":
        return AnyPart(config)
    model = (MODELS[config.kind] if config.levels == 1 else Ladder)(config)
    assert isinstance(model, Model)
    return model


def first_weight(model: nn.Module) -> Tensor:
    """Returns a weight of the model, for its device and dtype."""
    return next(model.parameters())


def inner_model(model: object) -> Model:
    """Returns a model, or the one inside a module that shows its config, as `torch.compile` makes
    them.

    Warns when `torch.compile` had no effect: it compiles `forward`, which only autoregressive
    models have.

    Example:
        >>> import torch
        >>> model = build(ModelConfig(kind="ssm", features=3, width=8, layers=1))
        >>> inner_model(torch.compile(model)) is model
        True
        >>> inner_model("mnist-small")
        Traceback (most recent call last):
        ValueError: model is a str; use a model of vssm.build or vssm.load
    """
    single_after_fork()
    found = model if isinstance(model, _CLASSES) else None
    if isinstance(model, nn.Module) and isinstance(getattr(model, "config", None), ModelConfig):
        found = found or next(
            (part for part in model.modules() if isinstance(part, _CLASSES)), None
        )
    if found is None:
        raise ValueError(
            f"model is a {type(model).__name__}; use a model of vssm.build or vssm.load"
        )
    wrapped = found is not model and hasattr(model, "_orig_mod")  # by torch.compile(model)
    in_place = found._compiled_call_impl is not None  # by model.compile(), which reaches a vrnn
    if (wrapped and not isinstance(found, Autoregressive)) or (
        in_place and isinstance(found, (Variational, Ladder, AnyPart))
    ):
        warnings.warn(
            f"torch.compile has no effect on a {found.config.kind} model as a whole, so it runs "
            "uncompiled; compile a function that calls vssm.objective(model, x), or train with "
            "--train.compile",
            stacklevel=3,
        )
    return found


def single_after_fork() -> None:
    """Keeps a forked process on one thread, as PyTorch's DataLoader does.

    A child has none of its parent's threads, but GNU OpenMP waits for them forever.
    """
    if torch.compiler.is_compiling() or os.getpid() == _IMPORTED_IN:
        return
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        warnings.warn(
            "this process was forked, so PyTorch runs on one thread here; more would wait forever. "
            "To use more threads, start it with multiprocessing.get_context('spawn')",
            stacklevel=4,
        )
