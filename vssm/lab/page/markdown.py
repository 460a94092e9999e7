"""How the results page is written: numbers, tables, where results come from, blocks to unfold, contents."""

import math
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from vssm.lab.page.figures import Result

__all__ = [
    "contents",
    "details",
    "links",
    "machine",
    "number",
    "origins",
    "short",
    "table",
    "wrapped",
]


def short(value: float) -> str:
    """Writes a number with four digits."""
    return f"{value:.4g}"


def number(value: float | None) -> str:
    """Writes any metric: whole numbers as they are, others with four digits.

    >>> [number(value) for value in (None, 28, 12345.678, 0.0123456, 2.5)]
    ['', '28', '12,346', '0.01235', '2.5']
    """
    if value is None:
        return ""
    if isinstance(value, int) or value == math.floor(value):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.0f}"
    return f"{value:,.0f}" if abs(value) >= 1_000 else short(value)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Makes a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def details(summary: str, parts: Sequence[str]) -> list[str]:
    """Hides parts of the page until they are asked for; nothing of no parts."""
    return [f"<details>\n<summary>{summary}</summary>", *parts, "</details>"] if parts else []


def origins(results: Iterable[Result]) -> str:
    """Lists files, each with its command, machine, commit and day."""
    rows = []
    for result in results:
        commit = str(result.get("commit") or "unknown")
        dirty = " (changed)" if commit.endswith("-dirty") else ""
        made = [f"[{_reference(result['path'])}]", f"`{result['command']}`", machine(result)]
        rows.append([*made, commit[:12] + dirty, result["date"][:10]])
    return table(["file", "command", "machine", "commit", "date"], rows)


def machine(result: Result) -> str:
    """Names the machine of a result."""
    found = result["machine"]
    return str(found.get("gpu") or f"{found.get('cpu')}, {found.get('cores')} cores")


def links(paths: Iterable[Path], folder: Path) -> str:
    """Says where the files that `origins` names lie, seen from the folder of the page."""
    lines = (
        f"[{_reference(path)}]: {quote(Path(os.path.relpath(path, folder)).as_posix())}"
        for path in paths
    )
    return "\n".join(lines)


def _reference(path: Path) -> str:
    return f"{path.absolute().parent.name}/{path.name}"


def contents(parts: Iterable[str]) -> str:
    """Lists the sections of a page and what is in them, with links as GitHub makes them.

    >>> print(contents(["# Results", "## The paper's", "### mnist", "## Better", "### mnist"]))
    - [The paper's](#the-papers): [mnist](#mnist)
    - [Better](#better): [mnist](#mnist-1)
    """
    lines: list[list[str]] = []
    seen: dict[str, int] = {}
    for part in parts:
        heading = re.fullmatch(r"(#+) (.+)", part)
        if not heading:
            continue
        anchor = re.sub(r"[^\w -]", "", heading[2].lower()).replace(" ", "-")
        times = seen[anchor] = seen.get(anchor, -1) + 1
        link = f"[{heading[2]}](#{anchor}{f'-{times}' if times else ''})"
        if heading[1] == "##":
            lines.append([link])
        elif heading[1] == "###":
            lines[-1].append(link)
    return "\n".join(
        f"- {': '.join([first, ', '.join(rest)] if rest else [first])}" for first, *rest in lines
    )


def wrapped(part: str) -> str:
    """Returns a part of the page, its text in lines of at most 128 characters; tables and the like stay."""
    if part.startswith(("|", "#", "!", "-", " ", "<", "[")):
        return part
    return textwrap.fill(part, 128, break_long_words=False, break_on_hyphens=False)
