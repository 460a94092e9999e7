"""`vssm report`: one HTML page."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from vssm.cli.samples import check_files
from vssm.evaluation.report import report


def report_page(
    runs: Positional[Annotated[tuple[Path, ...], arg(metavar="RUN ...")]] = (),
    out: Path = Path("report.html"),
) -> None:
    """Makes one HTML page from runs.

    Arguments:
        runs: Run folders to show and compare.
        out: Where the page goes: .html or .htm. It needs no other file.
    """
    check_files({"out": out})
    print(f"report: {report(runs, out)}")
