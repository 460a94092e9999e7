"""Every block of the tutorials runs, in the order of the page and in one folder."""

import re
import sys
from pathlib import Path

import pytest

from vssm.cli import main

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["forecasting", "filling", "text", "images", "your-data"])
def test_tutorial_runs(name, tmp_path, monkeypatch):
    if name == "forecasting":
        pytest.importorskip("gluonts")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vssm"])
    namespace, ran = {}, 0
    for language, block in BLOCK.findall((DOCS / f"{name}.md").read_text()):
        if language == "python":
            exec(compile(block, f"{name}.md", "exec"), namespace)
            ran += 1
            continue
        for line in filter(None, block.splitlines()):
            program, *arguments = line.split()
            assert program in ("vssm", "pip"), line
            if program == "vssm":
                main(arguments)
            ran += 1
    assert ran >= 2
