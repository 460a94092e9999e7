"""Loads the script of the results page, which is not part of the package."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
_script = runpy.run_path(str(ROOT / "docs" / "results_page"))
page_text, write_page = _script["page_text"], _script["write_page"]
