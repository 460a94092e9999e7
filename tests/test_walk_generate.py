"""How many files and lines somebody reads who follows one plain call of generate."""

import sys
from pathlib import Path

import vssm
from tests.conftest import small_model

PACKAGE = Path(vssm.__file__).parent


def files_walked(function):
    """Returns the files of the package whose Python functions run in a call."""
    found = set()

    def note(frame, event, argument):
        # numba reports its compiled kernels too, but no Python of theirs runs.
        compiled = "__name__" not in frame.f_globals
        if event == "call" and not compiled:
            found.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return sorted(path for path in map(Path, found) if path.is_relative_to(PACKAGE))


def test_one_shot_generation_is_short():
    model = small_model("vssm")
    vssm.generate(model, num=2, length=8)  # compiles the kernels
    files = files_walked(lambda: vssm.generate(model, num=2, length=8, seed=1))
    lines = {path: len(path.read_text().splitlines()) for path in files}
    for path, count in lines.items():
        print(f"{count:5} {path.relative_to(PACKAGE)}")
    print(f"{sum(lines.values()):5} lines in {len(files)} files")
    assert len(files) <= 14 and sum(lines.values()) <= 3000
