"""The six models: three classes, one stack; and two more for vssm, with levels and any part."""

from collections.abc import Callable

import torch

from vssm.checks import check_type
from vssm.config import ModelConfig
from vssm.models.anypart import AnyPart as AnyPart
from vssm.models.autoregressive import Autoregressive as Autoregressive
from vssm.models.base import BaseModel as BaseModel
from vssm.models.ladder import Ladder as Ladder
from vssm.models.variational import Variational as Variational
from vssm.models.vrnn import VRNN as VRNN
from vssm.models.vrnn import Trajectory as Trajectory
from vssm.nn import first_weight as first_weight

Model = Autoregressive | Variational | VRNN | Ladder | AnyPart

MODELS: dict[str, type[Autoregressive] | type[Variational] | type[VRNN]] = {
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
    if config.known == "any":
        own: Callable[[ModelConfig], Model] = AnyPart
    else:
        own = MODELS[config.kind] if config.levels == 1 else Ladder
    try:
        return own(config)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        with torch.device("meta"):  # takes no memory
            num = sum(parameter.numel() for parameter in own(config).parameters())
        raise ValueError(
            f"this model has {num:.2g} parameters, too many for the memory; "
            f"lower width={config.width} or layers={config.layers}"
        ) from None
