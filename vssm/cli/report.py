"""`vssm report`: one HTML page."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from vssm.evaluation.report import report
from vssm.lab.experiments import find_results, write_experiments

__all__ = ["report_page"]


def report_page(
    runs: Positional[Annotated[tuple[Path, ...], arg(metavar="[RUN ...]")]] = (),
    out: Path = Path("report.html"),
) -> None:
    """Makes one HTML page from runs or experiments.

    Arguments:
        runs: Run folders to compare, or one folder that `vssm reproduce` wrote.
        out: Where the page goes: .html or .htm. It needs no other file.
    """
    experiments = find_results(runs[0]) if len(runs) == 1 else None
    if experiments is not None:
        print(f"report: {write_experiments(experiments, out)}")
    else:
        print(f"report: {report(runs, out)}")
