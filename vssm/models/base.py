"""The base of all models: a config, an observation head, and a text for notebooks and terminals."""

import dataclasses
from typing import Any

from torch import nn

from vssm.config import ModelConfig
from vssm.distributions import Head, make_head
from vssm.nn.show import html_table


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
        # Not all fields: a new one must not make every older state belong to another model.
        owner = _unusual(config, "kind").items()
        self.owner: str = ", ".join(f"{name}={value}" for name, value in owner)
        """The name by which a state knows its model."""
        made = config.features - config.given
        self.head: Head = make_head(config.head, made, config.sigma, config.mixtures, config.bins)

    def forward(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        """Raises an error that says what to call instead."""
        raise NotImplementedError(
            f"a {self.config.kind} model cannot be called; use vssm.objective(model, x), "
            "vssm.log_likelihood(model, x) or vssm.generate(model)"
        )

    def __repr__(self) -> str:
        facts = (f"{name}={value}" for name, value in self._facts().items())
        return f"{type(self).__name__}({', '.join(facts)})"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._facts())

    def _facts(self) -> dict[str, object]:
        facts = _unusual(self.config, "kind", "features", "width", "layers")
        return {**facts, "parameters": f"{sum(p.numel() for p in self.parameters()):,}"}


def _unusual(config: ModelConfig, *always: str) -> dict[str, object]:
    """Returns the fields of a config that are not at their defaults, and those named."""
    fields = ((f.name, getattr(config, f.name), f.default) for f in dataclasses.fields(config))
    return {name: value for name, value, usual in fields if name in always or value != usual}
