"""`vssm data`: the facts of a data set, and a picture."""

from dataclasses import dataclass
from pathlib import Path

from vssm.cli.display import show_table
from vssm.cli.options import DataOptions
from vssm.cli.samples import check_files
from vssm.data import describe, open_data, picture

_MOST_FILES = 6  # shown; cifar10 has six


@dataclass(frozen=True, kw_only=True)
class Data(DataOptions):
    """Prepares a data set; shows its shape, range, splits and a picture."""

    out: Path | None = None
    """Where the picture goes; DATA.png by default."""

    def run(self) -> None:
        out = self.out or Path(f"{self.name}.png")
        config = self.data_config()
        reads = {"series": self.series.path, "text": self.text.path, "arrays": self.arrays.path}
        reads = {f"{name}.path": Path(path) for name, path in reads.items() if path}
        check_files({"out": out}, reads)
        if self.images.path and Path(self.images.path).resolve() == out.resolve().parent:
            raise ValueError(f"out={str(out)!r} would become one of the images; use another folder")
        data = open_data(config)
        facts = describe(data)
        files = [f"{file['path']}  sha256 {file['sha256']}" for file in facts["files"]]
        if len(files) > _MOST_FILES:
            files = [*files[: _MOST_FILES - 1], f"and {len(files) - _MOST_FILES + 1} more"]
        made = picture(data, out)  # first, because its file may fail to be written
        show_table(f"data set {self.name}", {**facts, "files": files})
        print(f"picture: {made}")
