"""Tables of flat metrics: which of them a table shows, by model and by something else, and which is best.

A metric such as `vssm_ms_b16_t28` is of a model (vssm) and stands under something else (16 x 28). A view
finds both with a pattern. Of all views that match a metric the last shows it, so that general ones can come
first.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vssm.lab.page.markdown import number, table

__all__ = ["Best", "View", "less", "more", "show"]

Best = Callable[[float], float] | None
"""What is least where a value is best; None where none is."""

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
    """Less is better."""
    return value


def more(value: float) -> float:
    """More is better."""
    return -value


@dataclass(frozen=True)
class View:
    """One table."""

    about: str
    """What it shows, in words."""
    pattern: str
    """Names of its metrics: a group `model`, and {by} for what else they stand under."""
    by: Mapping[str, tuple[str, Best]]
    """Patterns of what they stand under: in words, and what is best. In the order of the table."""
    rows: str = "model"
    """What the rows are; when it is not models, these are the columns."""
    folded: bool = False
    """Whether it is hidden until asked for."""

    def place(self, name: str) -> tuple[int, str, str] | None:
        """Returns the place of a metric: which of `by`, that in words, and the model; None if not shown."""
        for order, (pattern, (words, _)) in enumerate(self.by.items()):
            found = re.fullmatch(self.pattern.format(by=f"(?P<by>{pattern})"), name)
            under = re.fullmatch(pattern, found["by"]) if found else None
            if found and under:
                return order, under.expand(words), found["model"] or ""
        return None

    def table(self, metrics: Mapping[str, float | None]) -> str:
        """Makes the table of metrics that all have a place in it; two values of one place are a range."""
        cells: dict[tuple[str, str], list[float]] = {}
        orders: dict[str, int] = {}
        models: set[str] = set()
        for name, value in metrics.items():
            place = self.place(name)
            assert place is not None
            order, under, model = place
            orders.setdefault(under, order)
            models.add(model)
            cells.setdefault((under, model), []).extend([] if value is None else [value])
        unders, kinds = sorted(orders, key=lambda under: orders[under]), sorted(models, key=_order)
        bests = [best for _, best in self.by.values()]
        shown = {
            under: _marked([cells.get((under, kind), []) for kind in kinds], bests[orders[under]])
            for under in unders
        }
        words = [_words(kind) for kind in kinds]
        if self.rows != "model":
            return table([self.rows, *words], [[under, *shown[under]] for under in unders])
        return table(
            ["model", *unders],
            [[word, *(shown[u][place] for u in unders)] for place, word in enumerate(words)],
        )


def show(
    views: Sequence[View], metrics: Mapping[str, float | None]
) -> tuple[list[str], list[str], dict[str, float | None]]:
    """Shows metrics in tables.

    Arguments:
        views: The tables; one without metrics is left out.
        metrics: Those of one result.

    Returns:
        The parts of the page that are open, those that are folded, and the metrics that no view shows.
    """
    own: list[dict[str, float | None]] = [{} for _ in views]
    rest: dict[str, float | None] = {}
    for name, value in metrics.items():
        places = [place for place, view in enumerate(views) if view.place(name)]
        (own[places[-1]] if places else rest)[name] = value
    made = [
        (view, [*filter(None, [view.about]), view.table(found)])
        for view, found in zip(views, own, strict=True)
        if found
    ]
    parts = [
        [part for view, both in made if view.folded == folded for part in both]
        for folded in (False, True)
    ]
    return parts[0], parts[1], rest


def _marked(cells: Sequence[Sequence[float]], best: Best) -> list[str]:
    """Writes what models have in common, the best in bold where there is something to compare.

    >>> _marked([[2.0], [1.5], [], [1.0, 3.0]], less)
    ['2', '**1.5**', '–', '1 to 3']
    """
    scores = [best(cell[0]) if best and len(cell) == 1 else None for cell in cells]
    known = [score for score in scores if score is not None]
    texts = [" to ".join(map(number, cell)) or "–" for cell in cells]
    if len(known) < 2:
        return texts
    return [
        f"**{text}**" if score == min(known) else text
        for text, score in zip(texts, scores, strict=True)
    ]


def _variant(model: str) -> tuple[str, str]:
    """Parts the name of a model from what is special about it, in words."""
    base, _, last = model.rpartition("_")
    for pattern, words in _VARIANTS.items():
        found = re.fullmatch(pattern, last)
        if found:
            return base, found.expand(words)
    return model, ""


def _words(model: str) -> str:
    """Says the name of a model in words.

    >>> [_words(model) for model in ("vssm_l4", "vssm_t1", "deepar", "mambapy_fwd", "fwd", "prophet_2")]
    ['vssm, 4 levels', 'vssm, temperature 1', 'DeepAR', 'mambapy, forward', 'vssm, forward', 'prophet 2']
    """
    base, special = _variant(model)
    return _MODELS.get(base, base.replace("_", " ")) + special


def _order(model: str) -> tuple[int, str, int, str]:
    base, special = _variant(model)
    known = list(_MODELS).index(base) if base in _MODELS else len(_MODELS)
    return known, base, len(special), special
