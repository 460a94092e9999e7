"""What all models have in common: a config, an observation head, and how they show themselves."""

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from vssm.config import ModelConfig
from vssm.distributions import Head, make_head
from vssm.nn.show import html_table

if TYPE_CHECKING:
    from vssm.models import Model

__all__ = ["BaseModel", "inner_model", "owner_of"]


class BaseModel(nn.Module):
    """A model that shows its kind, sizes and parameters; `children()` has its layers.

    Example:
        >>> from vssm import build
        >>> build(ModelConfig(kind="ssm", features=3, width=8, layers=1))
        Autoregressive(kind=ssm, features=3, width=8, layers=1, parameters=1,379)
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config: ModelConfig = config
        made = config.features - config.given
        self.head: Head = make_head(config.head, made, config.sigma, config.mixtures, config.bins)

    def forward(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        """Raises, in place of PyTorch, and says what to call."""
        raise NotImplementedError(
            f"a {self.config.kind} is not called itself; call vssm.objective(model, x), "
            "vssm.log_likelihood(model, x) or vssm.generate(model)"
        )

    def __repr__(self) -> str:
        facts = (f"{name}={value}" for name, value in self._facts().items())
        return f"{type(self).__name__}({', '.join(facts)})"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._facts())

    def _facts(self) -> dict[str, object]:
        always = ("kind", "features", "width", "layers")
        facts = {
            field.name: getattr(self.config, field.name)
            for field in dataclasses.fields(self.config)
            if field.name in always or getattr(self.config, field.name) != field.default
        }
        return {**facts, "parameters": f"{sum(p.numel() for p in self.parameters()):,}"}


def owner_of(config: ModelConfig) -> str:
    """Returns the name by which a state knows its model."""
    # Only unusual fields: a new field must not make every older state belong to another model.
    fields = [(f.name, getattr(config, f.name), f.default) for f in dataclasses.fields(config)]
    return ", ".join(
        f"{name}={value}" for name, value, usual in fields if name == "kind" or value != usual
    )


def inner_model(model: object) -> "Model":
    """Returns a model, or the one inside a module that shows its config: one of `torch.compile`.

    Warns when `torch.compile` had no effect: it compiles `forward`, which only autoregressive
    models and a vrnn have.

    Example:
        >>> import torch
        >>> from vssm import build
        >>> model = build(ModelConfig(kind="ssm", features=3, width=8, layers=1))
        >>> inner_model(torch.compile(model)) is model
        True
        >>> inner_model("mnist-small")
        Traceback (most recent call last):
        ValueError: model is a str; use a model of vssm.build or vssm.load
    """
    found = model if isinstance(model, BaseModel) else None
    if isinstance(model, nn.Module) and isinstance(getattr(model, "config", None), ModelConfig):
        found = found or next((p for p in model.modules() if isinstance(p, BaseModel)), None)
    if found is None:
        raise ValueError(
            f"model is a {type(model).__name__}; use a model of vssm.build or vssm.load"
        )
    compiled = found._compiled_call_impl is not None or hasattr(model, "_orig_mod")
    if compiled and type(found).forward is BaseModel.forward:
        warnings.warn(
            f"torch.compile has no effect on a {found.config.kind} model as a whole, so it runs "
            "uncompiled; compile a function that calls vssm.objective(model, x), or train with "
            "--train.compile",
            stacklevel=3,
        )
    return cast("Model", found)
