"""`vssm data`: what a data set holds."""

from dataclasses import dataclass
from pathlib import Path

from vssm.cli.display import show_table
from vssm.cli.options import DataOptions

__all__ = ["Data"]


@dataclass
class Data(DataOptions):
    """Prepares a data set (downloading it if need be) and shows its shape, range, splits and a picture."""

    picture: Path | None = None
    """Where the picture goes; NAME.png by default."""

    def run(self) -> None:
        from vssm.data import describe, open_data, picture

        data = open_data(self.data_config())
        facts = describe(data)
        rows = {**facts, "files": [f"{f['path']}  sha256 {f['sha256']}" for f in facts["files"]]}
        show_table(f"data set {self.name}", rows)
        print(f"picture: {picture(data, self.picture or Path(f'{self.name}.png'))}")
