"""Every block of the README and the guides runs: Python in one namespace, shell line by line."""

import dataclasses
import doctest
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import vssm
from vssm.cli import main
from vssm.config import TrainConfig

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("guide", "sampling", "judging")),
]
NO_GUIDES = ("api", "reference", "results", "kernels")  # generated, or about the inside


def blocks(page, language):
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL
    )


def test_pages_are_short():
    assert len(PAGES[0].read_text().splitlines()) <= 150
    for page in (ROOT / "docs").glob("*.md"):
        assert page.stem in NO_GUIDES or len(page.read_text().splitlines()) <= 150, page


@pytest.mark.parametrize("page", PAGES[:3], ids=lambda page: page.name)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    code = blocks(page, "python")
    assert code
    for block in code:
        exec(compile(block, page.name, "exec"), namespace)


def test_the_reference_is_that_of_the_docstrings():
    found = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    page = found["page"]()
    assert (ROOT / "docs" / "reference.md").read_text() == page, "make docs writes it"
    named = {name for names in found["SECTIONS"].values() for name in names}
    assert {f"vssm.{name}" for name in vssm.__all__ if name != "ops"} <= named
    for field in dataclasses.fields(TrainConfig):
        assert f"\n- `{field.name}: " in page
    examples = blocks(ROOT / "docs" / "reference.md", "pycon")
    assert len(examples) > 20
    for number, example in enumerate(examples):  # of a newcomer, who has imported nothing
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
        test = doctest.DocTestParser().get_doctest(example, {}, f"example {number}", None, None)
        assert runner.run(test).failed == 0, example


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(page, tmp_path):
    """`vssm` commands run in an empty folder; `make` and `pip` lines must name what exists."""
    makefile = (ROOT / "Makefile").read_text()
    lines = [
        line.split("#")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()
    ]
    ran = 0
    for line in filter(None, lines):
        program, *arguments = line.split()
        if program == "make":
            assert f"\n{arguments[0]}:" in makefile, line
        elif program == "pip":
            extras = re.findall(r"\[(\w+)\]", line)
            pyproject = (ROOT / "pyproject.toml").read_text()
            assert all(f"\n{extra} = [" in pyproject for extra in extras), line
        else:
            assert program == "vssm", f"what is {line!r}?"
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            run = subprocess.run(
                [sys.executable, "-m", "vssm", *arguments],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert run.returncode == 0, f"{line}\n{run.stderr}"
            ran += 1
    assert ran


def test_links_lead_to_files():
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "experiments").glob("*.md"),
    ]
    kinds = (r"\]\(([^)#\s]+)", r"^\[[^]]+\]: (\S+)", r'src="([^"]+)"')
    links = [
        (page, link)
        for page in pages
        for kind in kinds
        for link in re.findall(kind, page.read_text(), re.MULTILINE)
        if "://" not in link
    ]
    assert len(links) > 50
    assert not [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()]


def test_options_of_training_are_those_of_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    known = re.findall(r"--train\.[\w-]+", capsys.readouterr().out)
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        assert set(re.findall(r"--train\.[\w-]+", text)) <= set(known), page.name
        assert not re.findall(r"`train\.\w+ [^`]+`", text), f"{page.name}: a value without a dash"
