"""The site builds without a warning: no link is dead, and every public name has a page."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import vssm

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("sphinx", "myst_nb", "furo", "sphinx_copybutton"):
        pytest.importorskip(package)
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    command += ["-d", str(out / "trees"), str(DOCS), str(out / "html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return out / "html"


def test_pages_are_there_and_searched(site):
    index = (site / "searchindex.js").read_text()
    for page in ("guide", "gallery", "theory", "notebooks/start", "api", "results"):
        assert (site / f"{page}.html").is_file()
        assert f'"{page}"' in index


def test_public_names_have_a_page(site):
    for name in vssm.__all__:
        if name != "ops":
            assert (site / "api" / f"vssm.{name}.html").is_file(), name
    page = (site / "api" / "vssm.generate.html").read_text()
    assert "(batch" in page or "Generation" in page


def test_the_moving_picture_is_small():
    file = DOCS / "pictures" / "race.gif"
    assert file.stat().st_size < 500_000
    with Image.open(file) as image:
        assert image.n_frames == 15
