"""Markdown: numbers, tables, folded parts, links to result files, the list of contents."""

import math
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote


def number(value: float | None) -> str:
    """Writes any metric: whole numbers as they are, others with four digits."""
    if value is None:
        return ""
    if isinstance(value, int) or value == math.floor(value):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.0f}"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def details(summary: str, parts: Sequence[str]) -> list[str]:
    """Folds parts of the page; returns nothing for no parts."""
    return [f"<details>\n<summary>{summary}</summary>", *parts, "</details>"] if parts else []


def machine(result: dict[str, Any]) -> str:
    found = result["machine"]
    return str(found.get("gpu") or f"{found.get('cpu')}, {found.get('cores')} cores")


def origins(results: Iterable[dict[str, Any]]) -> str:
    """Lists result files, each with its command, machine, commit and day."""
    rows = []
    for result in results:
        commit = str(result.get("commit") or "unknown")
        changed = " (changed)" if commit.endswith("-dirty") else ""
        made = [f"[{_reference(result['path'])}]", f"`{result['command']}`", machine(result)]
        rows.append([*made, commit[:12] + changed, result["date"][:10]])
    return table(["file", "command", "machine", "commit", "date"], rows)


def links(paths: Iterable[Path], folder: Path) -> str:
    """Gives the address of every file that `origins` names, as seen from the folder of the page."""
    return "\n".join(
        f"[{_reference(path)}]: {quote(Path(os.path.relpath(path, folder)).as_posix())}"
        for path in paths
    )


def _reference(path: Path) -> str:
    return f"{path.absolute().parent.name}/{path.name}"


def contents(parts: Iterable[str]) -> str:
    """Lists the headings of a page, with links as GitHub makes them."""
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
    return "\n".join(f"- {first}{': ' * bool(rest)}{', '.join(rest)}" for first, *rest in lines)


def wrapped(part: str) -> str:
    """Breaks text into lines of at most 100 characters; tables and other markup stay."""
    if part.startswith(("|", "#", "!", "-", " ", "<", "[")):
        return part
    return textwrap.fill(part, 100, break_long_words=False, break_on_hyphens=False)
