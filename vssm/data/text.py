"""Text as sequences of tokens, characters or bytes, from any UTF-8 file.

Sequences are windows of `length` tokens that do not overlap; a shorter rest is left out. The split
is by position: the last 10 % of the file is the test set, and the last tenth of the 90 % before it
is validation. The vocabulary covers the whole file, so that every split can be encoded.
"""

import numpy as np
import torch

from vssm.data.config import DataConfig
from vssm.data.dataset import Data, Split
from vssm.data.files import Remote, locate, locate_own, read_bytes, read_published
from vssm.data.meta import Meta

_SHAKESPEARE = Remote(
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    file="text/tinyshakespeare.txt",
)


def open_text(config: DataConfig) -> Data:
    """Opens a text file, by default tinyshakespeare."""
    options = config.text
    if options.path is None:
        path = locate("tinyshakespeare.txt", ("text",), config.dir, _SHAKESPEARE)
        content = read_published(path, _SHAKESPEARE.sha256)
    else:
        path = locate_own(config)
        content = read_bytes(path)
    if options.unit == "byte":
        tokens, vocabulary = np.frombuffer(content, np.uint8), None
    else:
        try:
            tokens, vocabulary = _characters(content.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            byte = f"byte {error.start} (0x{content[error.start]:02x})"
            advice = "read the file with --text.unit byte"
            raise ValueError(f"{path}: {byte} is not UTF-8; {advice}") from error

    test = round(0.9 * len(tokens))
    valid = round(0.9 * test)
    parts = {"training": tokens[:valid], "validation": tokens[valid:test], "test": tokens[test:]}
    for part, own in parts.items():
        if len(own) < options.length:
            raise ValueError(
                f"{path} has {len(tokens)} tokens, {len(own)} of them for {part},"
                f" fewer than one sequence of text.length = {options.length}; use a"
                " longer text or a smaller text.length"
            )
    meta = Meta(
        name="text",
        features=256 if vocabulary is None else len(vocabulary),
        length=options.length,
        suggested_head="categorical",
        vocabulary=vocabulary,
    )

    def windows(part: str) -> Split:
        whole = len(parts[part]) // options.length * options.length
        return Split(torch.from_numpy(parts[part][:whole].reshape(-1, options.length).copy()))

    def fit() -> tuple[Split, Split]:
        return windows("training"), windows("validation")

    return Data(config, meta, fit, lambda: windows("test"), [path])


def _characters(text: str) -> tuple[np.ndarray, str]:
    """Returns the tokens of a text in the smallest type that fits, and its characters in order."""
    characters = sorted(set(text))
    smallest = next(
        t for t in (np.uint8, np.int16, np.int32) if len(characters) - 1 <= np.iinfo(t).max
    )
    token = np.zeros(0x110000, smallest)  # a table is faster than sorting
    token[[ord(character) for character in characters]] = np.arange(len(characters))
    return token[np.frombuffer(text.encode("utf-32-le"), "<u4")], "".join(characters)
