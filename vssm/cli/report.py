"""`vssm report`: a page of runs and results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

__all__ = ["Report"]


@dataclass
class Report:
    """Makes one self-contained HTML page from run folders and results."""

    run_folders: tyro.conf.Positional[
        Annotated[tuple[Path, ...], tyro.conf.arg(metavar="[RUN ...]")]
    ]
    """Run folders to compare."""
    results: Path | None = None
    """A folder of result files."""
    out: Path = Path("report.html")
    """Where the page goes: .html or .htm."""
    page: Path | None = None
    """Write the results page instead, as Markdown with figures beside it: docs/results.md."""

    def run(self) -> None:
        from vssm.lab.page.write import write_page
        from vssm.report.page import report

        if self.page is not None:
            if self.run_folders:
                raise ValueError(
                    "run_folders are for the HTML page, not for page; allowed: results"
                )
            print(f"page: {write_page(self.results or Path('results'), self.page)}")
            return
        if not self.run_folders and self.results is None:
            raise ValueError("neither RUN nor --results is given; allowed: one of them, or both")
        print(f"report: {report(self.run_folders, self.results, self.out)}")
