"""The six models: three classes, one stack; and vssm with levels of latents, a fourth."""

from torch import nn

from vssm.config import ModelConfig, check_type
from vssm.models.autoregressive import Autoregressive as Autoregressive
from vssm.models.ladder import Ladder as Ladder
from vssm.models.variational import Variational as Variational
from vssm.models.vrnn import VRNN as VRNN
from vssm.models.vrnn import Trajectory as Trajectory

__all__ = ["MODELS", "VRNN", "Autoregressive", "Ladder", "Model", "Trajectory", "Variational", "build"]
__all__ += ["inner_model"]

Model = Autoregressive | Variational | VRNN | Ladder

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
    model = (MODELS[config.kind] if config.levels == 1 else Ladder)(config)
    assert isinstance(model, Model)
    return model


def inner_model(model: object) -> Model:
    """Returns a model, or the one inside a module that shows its config, as `torch.compile` makes them.

    Example:
        >>> import torch
        >>> model = build(ModelConfig(kind="ssm", features=3, width=8, layers=1))
        >>> inner_model(torch.compile(model)) is model
        True
        >>> inner_model("mnist-small")
        Traceback (most recent call last):
        ValueError: model is a str; allowed: a model of vssm.build or vssm.load
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, nn.Module) and isinstance(getattr(model, "config", None), ModelConfig):
        for module in model.modules():
            if isinstance(module, Model):
                return module
    raise ValueError(f"model is a {type(model).__name__}; allowed: a model of vssm.build or vssm.load")
