"""How models, states and samples show themselves in a notebook."""

from collections.abc import Mapping
from html import escape


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Returns a table of names and values, for notebooks.

    Example:
        >>> html_table("State", {"position": 7})
        '<table><caption>State</caption><tr><th>position</th><td>7</td></tr></table>'
    """
    cells = (f"<tr><th>{escape(n)}</th><td>{escape(str(v))}</td></tr>" for n, v in rows.items())
    return f"<table><caption>{escape(title)}</caption>{''.join(cells)}</table>"
