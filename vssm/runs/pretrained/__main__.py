"""Ships a run: `python -m vssm.runs.pretrained export RUN FOLDER`, then `card FOLDER`."""

import sys

import tyro

from vssm.runs.pretrained import export, write_card

if __name__ == "__main__":
    commands = {"export": export, "card": write_card}
    try:
        options = (tyro.conf.PositionalRequiredArgs,)
        print(tyro.extras.subcommand_cli_from_dict(commands, config=options))
    except ValueError as error:
        sys.exit(f"python -m vssm.runs.pretrained: {error}")
