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
    from vssm.checkpoint import load as load
    from vssm.checkpoint import save as save
    from vssm.config import ModelConfig as ModelConfig
    from vssm.forecast import Forecaster as Forecaster
    from vssm.forecast import forecast as forecast
    from vssm.generate import Generation as Generation
    from vssm.generate import generate as generate
    from vssm.generate import observe as observe
    from vssm.likelihoods import log_likelihood as log_likelihood
    from vssm.models import build as build
    from vssm.nn import State as State
    from vssm.objectives import Terms as Terms
    from vssm.objectives import objective as objective

__all__ = [
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

__version__ = "0.1.0"
