"""`vssm data`: what a data set holds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vssm.cli.display import show_table
from vssm.cli.options import DataOptions
from vssm.cli.samples import check_inputs_stay, check_targets

__all__ = ["Data"]


@dataclass
class Data(DataOptions):
    """Prepares a data set (downloading it if need be) and shows its shape, range, splits and a picture."""

    out: Annotated[Path | None, tyro.conf.arg(aliases=("--picture",))] = None
    """Where the picture goes; DATA.png by default."""

    def run(self) -> None:
        from vssm.data import describe, open_data, picture

        out = self.out or Path(f"{self.name}.png")
        config = self.data_config()
        check_targets(out=out)
        read = {"series": self.series.path, "text": self.text.path, "arrays": self.arrays.path}
        check_inputs_stay({f"{name}.path": Path(path) for name, path in read.items() if path}, out=out)
        data = open_data(config)
        facts = describe(data)
        rows = {**facts, "files": [f"{f['path']}  sha256 {f['sha256']}" for f in facts["files"]]}
        show_table(f"data set {self.name}", rows)
        print(f"picture: {picture(data, out)}")
