"""Settings of the site, for Sphinx: `make site` builds it of pages, notebooks and docstrings."""

import runpy
from pathlib import Path

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
exclude_patterns = ["results_page"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the outputs are committed; a test runs the notebooks

# Every name that a page or a docstring refers to must exist; types of other packages are not ours.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!vssm\.).*"), ("py:.*", r"vssm\..*\._.*")]
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
default_role = "code"  # docstrings write `name`, as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autosummary_generate = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False

html_theme = "furo"  # search, light and dark, phones; no JavaScript of other sites
html_title = f"vssm {release}"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b57b5", "color-brand-content": "#0b57b5"},
    "dark_css_variables": {"color-brand-primary": "#7db4ff", "color-brand-content": "#7db4ff"},
}


def write_api(_: object) -> None:
    """Lists the public names for autosummary, in the sections of the written reference."""
    sections = runpy.run_path(str(FOLDER / "reference.py"))["SECTIONS"]
    lines = ["# API", "", "Each name has a page of its own, with links to its source.", ""]
    for title, names in sections.items():
        lines += [f"## {title}", "", "```{eval-rst}", ".. autosummary::", "   :toctree: api", ""]
        lines += [*(f"   {name}" for name in names), "```", ""]
    (FOLDER / "api.md").write_text("\n".join(lines))


def setup(app: object) -> None:
    """Writes the list of names before Sphinx looks for pages."""
    app.connect("config-inited", lambda app, config: write_api(app))  # type: ignore[attr-defined]
