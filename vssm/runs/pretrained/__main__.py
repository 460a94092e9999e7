"""Makes a model for shipping of a run: `python -m vssm.runs.pretrained export RUN FOLDER`, `card FOLDER`."""

import argparse

from vssm.runs.pretrained import export, write_card


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vssm.runs.pretrained", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "export", help="rounds the weights to bfloat16 and writes a model card"
    )
    one.add_argument("run", help="a run folder")
    one.add_argument("folder", help="where the model goes; its last part is the name")
    commands.add_parser("card", help="writes the model card again, with eval.json").add_argument(
        "folder"
    )
    options = parser.parse_args()
    try:
        print(
            export(options.run, options.folder)
            if options.command == "export"
            else write_card(options.folder)
        )
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
