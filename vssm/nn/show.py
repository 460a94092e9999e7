"""How models, states and samples show themselves, in a console and in a notebook."""

import dataclasses
from collections.abc import Mapping
from html import escape

from torch import nn

from vssm.config import ModelConfig

__all__ = ["Shown", "html_table"]


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Returns a table of names and values, for notebooks.

    Example:
        >>> html_table("State", {"position": 7})
        '<table><caption>State</caption><tr><th>position</th><td>7</td></tr></table>'
    """
    cells = (f"<tr><th>{escape(n)}</th><td>{escape(str(v))}</td></tr>" for n, v in rows.items())
    return f"<table><caption>{escape(title)}</caption>{''.join(cells)}</table>"


class Shown(nn.Module):
    """A model that shows its kind, sizes and parameters; `children()` has its layers.

    Example:
        >>> from vssm import build
        >>> build(ModelConfig(kind="ssm", features=3, width=8, layers=1))
        Autoregressive(kind=ssm, features=3, width=8, layers=1, parameters=1,379)
    """

    config: ModelConfig

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
