"""`python -m vssm` is the command line; `torchrun ... -m vssm train ...` starts it on many GPUs."""

from vssm.interrupts import command_ends_at_once

__all__ = ["main"]


def main() -> None:
    """Runs the command line; Ctrl-C ends it in one line while it is imported too."""
    with command_ends_at_once():
        from vssm.cli import main as run
    run()


if __name__ == "__main__":
    main()
