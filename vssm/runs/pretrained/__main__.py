"""Prepares a run for shipping: `python -m vssm.runs.pretrained export --help`."""

import sys

import tyro

from vssm.runs.pretrained import export, write_card


def main() -> None:
    commands = {"export": export, "card": write_card}
    try:
        print(tyro.extras.subcommand_cli_from_dict(commands, prog="python -m vssm.runs.pretrained"))
    except ValueError as error:
        sys.exit(f"python -m vssm.runs.pretrained: {error}")


if __name__ == "__main__":
    main()
