"""The site builds without a warning: no link is dead, and every public name has a page."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from PIL import Image

import vssm

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("sphinx", "myst_nb", "furo", "sphinx_copybutton", "sphinx-mathjax-offline"):
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


def test_no_link_or_picture_of_the_site_is_dead(site):
    pages = [page for page in site.rglob("*.html") if "_modules" not in page.parts]
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', page.read_text())) for page in pages}
    dead, links = [], 0
    for page in pages:
        for link in re.findall(r'\b(?:src|href)="([^"]+)"', page.read_text()):
            if re.match(r"[a-z]+:", link):
                continue
            links += 1
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path.partition("?")[0]).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors.get(target, {anchor})):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert links > 1000
    assert not dead


def test_the_site_needs_no_network(site):
    loaded = re.compile(r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(\w+:[^"]*)"')
    found = {link for page in site.rglob("*.html") for link in loaded.findall(page.read_text())}
    assert not {link for link in found if not link.startswith("data:")}
    assert (site / "_static" / "tex-svg.js").is_file()


def test_the_moving_picture_is_small():
    file = DOCS / "pictures" / "race.gif"
    assert file.stat().st_size < 500_000
    with Image.open(file) as image:
        assert image.n_frames == 15
