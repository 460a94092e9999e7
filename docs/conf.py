"""Settings of the site, for Sphinx: `make site` builds it of pages, notebooks and docstrings."""

import re
import runpy
import shutil
from importlib.util import find_spec
from pathlib import Path

from sphinx.application import Sphinx

import vssm

FOLDER = Path(__file__).parent

project, author, copyright = "vssm", "the vssm authors", "2026, the vssm authors"
release = version = vssm.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
    "sphinx_copybutton",
]
exclude_patterns = ["results_page", "browser"]
myst_enable_extensions = ["dollarmath", "amsmath", "html_image"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the outputs are committed; a test runs the notebooks

# Links must lead somewhere. Types in signatures may be those of other packages, or inner ones.
nitpicky = True
nitpick_ignore_regex = [("py:(class|obj|exc)", ".*")]
suppress_warnings = ["ref.python", "misc.highlighting_failure", "myst.header"]
default_role = "code"  # docstrings write `name`, as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autosummary_generate = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False

# MathJax is part of the site, so that formulas need no network.
mathjax = find_spec("sphinx-mathjax-offline")
assert mathjax and mathjax.origin, "a package of the docs extra"
tex = Path(mathjax.origin).parent / "static" / "mathjax" / "tex-svg.js"
built = FOLDER / "browser" / "built"  # the page that runs in the browser, if npm was there
html_extra_path = [str(built)] if built.is_dir() else []
html_static_path = [str(tex), "site.css"]
mathjax_path = "tex-svg.js"

html_theme = "furo"  # search, light and dark, phones
html_css_files = ["site.css"]
pygments_dark_style = "monokai"  # the default underlines every import
html_title = f"vssm {release}"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b57b5", "color-brand-content": "#0b57b5"},
    "dark_css_variables": {"color-brand-primary": "#7db4ff", "color-brand-content": "#7db4ff"},
}


def write_api() -> None:
    """Lists the public names for autosummary, in the sections of the written reference."""
    shutil.rmtree(FOLDER / "api", ignore_errors=True)  # may hold pages of names that have gone
    sections = runpy.run_path(str(FOLDER / "reference.py"))["SECTIONS"]
    lines = ["# API", "", "Each name has a page of its own, with links to its source.", ""]
    for title, names in sections.items():
        lines += [f"## {title}", "", "```{eval-rst}", ".. autosummary::", "   :toctree: api", ""]
        lines += [*(f"   {name}" for name in names), "```", ""]
    (FOLDER / "api.md").write_text("\n".join(lines))


def keep_inside(_: object, page: str, source: list[str]) -> None:
    """Turns links to pages outside of docs/ into downloads, to the README into the first page."""
    if page.startswith("notebooks/"):
        return
    if not html_extra_path:
        source[0] = re.sub(r".*browser/index\.html.*\n", "", source[0])
    text = re.sub(r"\]\(\.\./README\.md[^)]*\)", "](index.md)", source[0])
    source[0] = re.sub(r"\[([^]]+)\]\((\.\./[\w/]+\.md)[^)]*\)", r"{download}`\1 <\2>`", text)


def setup(app: Sphinx) -> None:
    """Writes the list of names before Sphinx looks for pages, and mends links as it reads."""
    app.connect("config-inited", lambda app, config: write_api())
    app.connect("source-read", keep_inside)
