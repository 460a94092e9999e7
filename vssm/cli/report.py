"""`vssm report`: a page of runs, results or experiments."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

__all__ = ["Report"]


@dataclass
class Report:
    """Makes one self-contained HTML page from run folders, results, or a folder of experiments."""

    run_folders: tyro.conf.Positional[
        Annotated[tuple[Path, ...], tyro.conf.arg(metavar="[RUN ...]")]
    ]
    """Run folders to compare, or one folder that `vssm reproduce` wrote."""
    results: Path | None = None
    """A folder of result files."""
    out: Path = Path("report.html")
    """Where the page goes: .html or .htm."""

    def run(self) -> None:
        from vssm.lab.experiments import find_results, write_experiments
        from vssm.report.page import report

        if len(self.run_folders) == 1 and self.results is None:
            experiments = find_results(self.run_folders[0])
            if experiments is not None:
                print(f"report: {write_experiments(experiments, self.out)}")
                return
        if not self.run_folders and self.results is None:
            raise ValueError("neither RUN nor --results is given; allowed: one of them, or both")
        print(f"report: {report(self.run_folders, self.results, self.out)}")
