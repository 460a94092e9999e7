"""`vssm demo`: the whole way in one go."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Demo"]


@dataclass
class Demo:
    """Trains three small models on digits, generates in every way, races them, and writes a report."""

    out: Path = Path("demo")
    """The folder for runs, pictures and the report; it is made anew."""

    def run(self) -> None:
        from vssm.lab.demo import demo

        demo(self.out)
