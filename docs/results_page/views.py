"""Tables of flat metrics: which metrics a table shows, by model and size, and which is best.

A metric such as `vssm_ms_b16_t28` belongs to a model (vssm) and to a size (16 x 28). A view finds
both with a pattern. If several views match a metric, the last one shows it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from writing import number, table

Metrics = Mapping[str, float | None]
Rank = Callable[[float], float] | None
"""A function that is smallest for the best value; None where no value is best."""

_MODELS = {  # as metrics name them, in the order of tables
    "": "vssm",
    "vssm": "vssm",
    "rnn": "rnn",
    "ssm": "ssm",
    "transformer": "transformer",
    "vrnn": "vrnn",
    "tvae": "tvae",
    "deepar": "DeepAR",
    "naive": "naive",
    "transformers_gpt2": "GPT-2 of transformers",
    "transformers_mamba": "Mamba of transformers",
    "reference": "loop over time",
    "mambapy": "mambapy",
    "associative_scan": "PyTorch's associative_scan",
    "transformers": "loop of transformers",
}
_VARIANTS = {
    r"l(\d+)": r", \1 levels",
    r"p(\d+)": r", P = \1",
    r"t(\d+)": r", temperature \1",
    r"w(\d+)": r", in chunks of \1",
    r"fwd": r", forward",
    r"bwd": r", backward",
}


def less(value: float) -> float:
    return value


def more(value: float) -> float:
    return -value


@dataclass(frozen=True)
class View:
    """One table."""

    about: str
    """What it shows, in words."""
    pattern: str
    """Names of its metrics: a group `model`, and {by} for what else they belong to."""
    by: Mapping[str, tuple[str, Rank]]
    """Patterns for {by}, each with its heading and rank, in the order of the table."""
    rows: str = "model"
    """What the rows are; if not models, then models are the columns."""
    folded: bool = False
    """Whether the table is folded."""

    def place(self, name: str) -> tuple[int, str, str] | None:
        """Returns the index in `by`, the heading and the model of a metric; None if not shown."""
        for index, (pattern, (words, _)) in enumerate(self.by.items()):
            found = re.fullmatch(self.pattern.format(by=f"(?P<by>{pattern})"), name)
            heading = re.fullmatch(pattern, found["by"]) if found else None
            if found and heading:
                return index, heading.expand(words), found["model"] or ""
        return None

    def table(self, metrics: Metrics) -> str:
        """Makes the table; two values in one cell are a range."""
        cells: dict[tuple[str, str], list[float]] = {}
        indices: dict[str, int] = {}
        for name, value in metrics.items():
            index, heading, model = self.place(name) or (0, "", "")
            indices.setdefault(heading, index)
            cells.setdefault((heading, model), []).extend([] if value is None else [value])
        headings = sorted(indices, key=lambda heading: indices[heading])
        models = sorted({model for _, model in cells}, key=_order)
        ranks = [rank for _, rank in self.by.values()]
        shown = {
            heading: _marked([cells.get((heading, m), []) for m in models], ranks[indices[heading]])
            for heading in headings
        }
        names = ["".join(_named(model)) for model in models]
        if self.rows != "model":
            return table([self.rows, *names], [[heading, *shown[heading]] for heading in headings])
        rows = [[name, *(shown[h][place] for h in headings)] for place, name in enumerate(names)]
        return table(["model", *headings], rows)


def show(views: Sequence[View], metrics: Metrics) -> tuple[list[str], list[str], Metrics]:
    """Returns the open parts of the page, the folded ones, and the metrics that no view shows."""
    own: list[dict[str, float | None]] = [{} for _ in views]
    rest: dict[str, float | None] = {}
    for name, value in metrics.items():
        places = [place for place, view in enumerate(views) if view.place(name)]
        (own[places[-1]] if places else rest)[name] = value
    parts: tuple[list[str], list[str]] = [], []
    for view, found in zip(views, own, strict=True):
        if found:
            parts[view.folded].extend([*filter(None, [view.about]), view.table(found)])
    return *parts, rest


def _marked(cells: Sequence[Sequence[float]], rank: Rank) -> list[str]:
    """Writes the values of all models, the best in bold where there is something to compare."""
    scores = [rank(cell[0]) if rank and len(cell) == 1 else None for cell in cells]
    known = [score for score in scores if score is not None]
    texts = [" to ".join(map(number, cell)) or "–" for cell in cells]
    if len(known) < 2:
        return texts
    pairs = zip(texts, scores, strict=True)
    return [f"**{text}**" if score == min(known) else text for text, score in pairs]


def _named(model: str) -> tuple[str, str]:
    """Returns the name of a model in words, and what is special about this variant."""
    base, _, last = model.rpartition("_")
    for pattern, words in _VARIANTS.items():
        if found := re.fullmatch(pattern, last):
            return _MODELS.get(base, base.replace("_", " ")), found.expand(words)
    return _MODELS.get(model, model.replace("_", " ")), ""


def _order(model: str) -> tuple[int, str, int, str]:
    name, special = _named(model)
    names = list(_MODELS.values())
    return names.index(name) if name in names else len(names), name, len(special), special
