"""Variational state space models: sequence models that train and generate in parallel.

config = vssm.ModelConfig(kind="vssm", features=28)
model = vssm.build(config)
terms = vssm.objective(model, x)
nats = vssm.log_likelihood(model, x)
samples = vssm.generate(model, num=16, length=28).x

Names are imported on first use (PEP 562), because Python imports this file before `vssm.__main__`,
which must set up signals and OpenMP before PyTorch is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vssm import ops as ops
    from vssm.config import ModelConfig as ModelConfig
    from vssm.engine import Engine as Engine
    from vssm.forecasting.forecaster import Forecaster as Forecaster
    from vssm.likelihoods import log_likelihood as log_likelihood
    from vssm.models import build as build
    from vssm.nn import State as State
    from vssm.nn.accelerate import accelerate as accelerate
    from vssm.objectives import Terms as Terms
    from vssm.objectives import objective as objective
    from vssm.runs.checkpoint import load as load
    from vssm.runs.checkpoint import save as save
    from vssm.sampling.filling import fill as fill
    from vssm.sampling.generation import Generation as Generation
    from vssm.sampling.generation import generate as generate
    from vssm.sampling.generation import observe as observe

__version__ = "0.2.0"

__all__ = [
    "Engine",
    "Forecaster",
    "Generation",
    "ModelConfig",
    "State",
    "Terms",
    "accelerate",
    "build",
    "fill",
    "generate",
    "load",
    "log_likelihood",
    "objective",
    "observe",
    "ops",
    "save",
]

_SOURCES = {
    "Engine": "engine",
    "ModelConfig": "config",
    "Forecaster": "forecasting.forecaster",
    "log_likelihood": "likelihoods",
    "build": "models",
    "State": "nn",
    "accelerate": "nn.accelerate",
    "Terms": "objectives",
    "objective": "objectives",
    "load": "runs.checkpoint",
    "save": "runs.checkpoint",
    "fill": "sampling.filling",
    "Generation": "sampling.generation",
    "generate": "sampling.generation",
    "observe": "sampling.generation",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name in _SOURCES:
        value = getattr(import_module(f"vssm.{_SOURCES[name]}"), name)
        globals()[name] = value  # the next use finds it without this function
        return value
    try:
        return import_module(f"vssm.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"vssm.{name}":
            raise
        raise AttributeError(f"module 'vssm' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
