"""Writes WikiText-2 in the alphabet of text8: the letters a to z and single spaces.

    python experiments/text27.py --data-dir DATA --out text27.txt
    vssm train text --text.path text27.txt

The three parts of WikiText-2 follow each other in the file, so that the positional split of
`vssm train text` (81, 9 and 10 %) cuts close to the published one.
"""

import argparse
import gzip
import re
from pathlib import Path

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def letters(text: str) -> str:
    """Returns a text as text8 has it: digits spelled out, lower case, all else a single space.

    >>> letters("In 2 <unk> Years , Mamba-1 !")
    'in two unk years mamba one '
    """
    text = re.sub("[0-9]", lambda digit: f" {DIGITS[int(digit[0])]} ", text.lower())
    return re.sub("[^a-z]+", " ", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("text27.txt"))
    options = parser.parse_args()
    files = [options.data_dir / f"wikitext-2.{part}.txt.gz" for part in ("train", "valid", "test")]
    text = "".join(letters(gzip.decompress(file.read_bytes()).decode()) for file in files)
    options.out.write_text(text)
    print(f"{options.out}: {len(text):,} characters")
