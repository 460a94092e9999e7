"""Variational state space models: sequence models that train and generate in parallel.

config = vssm.ModelConfig(kind="vssm", features=28)
model = vssm.build(config)
terms = vssm.objective(model, x)
nats = vssm.log_likelihood(model, x)
samples = vssm.generate(model, num=16, length=28).x
"""

from vssm.interrupts import command_ends_at_once
from vssm.threads import sleep_soon

with command_ends_at_once():  # PyTorch takes seconds
    sleep_soon()
    from vssm import ops as ops
    from vssm.config import ModelConfig as ModelConfig
    from vssm.engine import Engine as Engine
    from vssm.forecasting.forecaster import Forecaster as Forecaster
    from vssm.forecasting.forecaster import forecast as forecast
    from vssm.likelihoods import log_likelihood as log_likelihood
    from vssm.models import build as build
    from vssm.nn import State as State
    from vssm.objectives import Terms as Terms
    from vssm.objectives import objective as objective
    from vssm.runs.checkpoint import load as load
    from vssm.runs.checkpoint import save as save
    from vssm.sampling.generation import Generation as Generation
    from vssm.sampling.generation import generate as generate
    from vssm.sampling.generation import observe as observe

__all__ = [
    "Engine",
    "Forecaster",
    "Generation",
    "ModelConfig",
    "State",
    "Terms",
    "build",
    "forecast",
    "generate",
    "load",
    "log_likelihood",
    "objective",
    "observe",
    "ops",
    "save",
]

__version__ = "0.2.0"

# What the documents import from. Like all modules of Python they are there once they were imported.
_MODULES = ("data", "evaluation", "forecasting", "lab", "sampling", "serve", "training")


def __dir__() -> list[str]:
    """Lists what is public, for completion; other modules are there too, for ourselves."""
    return [name for name in globals() if name in (*__all__, *_MODULES) or name.startswith("__")]
