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

# What the documents import from. Like all modules of Python they are there once they were imported.
_MODULES = ("bench", "data", "ragged", "serve", "train")
_MODULES += ("forecast_compare", "forecast_files", "forecast_gluonts", "text_compare")


def __dir__() -> list[str]:
    """Lists what is public, for completion; other modules are there too, for ourselves."""
    return [name for name in globals() if name in (*__all__, *_MODULES) or name.startswith("__")]
