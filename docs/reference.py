"""Writes docs/reference.md, the reference of public names, from their docstrings: `make docs`."""

import ast
import doctest
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
SECTIONS = {
    "Models": ("vssm.ModelConfig", "vssm.build", "vssm.save", "vssm.load"),
    "Objective and likelihood": ("vssm.objective", "vssm.Terms", "vssm.log_likelihood"),
    "Generation": (
        "vssm.generate",
        "vssm.Generation",
        "vssm.Engine",
        "vssm.observe",
        "vssm.fill",
        "vssm.State",
        "vssm.sampling.ragged.generate_ragged",
        "vssm.sampling.ragged.Ragged",
        "vssm.sampling.ragged.pad",
    ),
    "Data": (
        "vssm.data.open_data",
        "vssm.data.Data",
        "vssm.data.Meta",
        "vssm.data.DataConfig",
        "vssm.data.SeriesConfig",
        "vssm.data.TextConfig",
        "vssm.data.ArraysConfig",
        "vssm.data.SyntheticConfig",
    ),
    "Training and evaluation": (
        "vssm.training.train",
        "vssm.config.RunConfig",
        "vssm.config.TrainConfig",
        "vssm.evaluation.evaluate_run",
        "vssm.lab.reproduce.reproduce",
        "vssm.lab.sweep.sweep",
    ),
    "Forecasting": (
        "vssm.Forecaster",
        "vssm.forecasting.gluonts.predictor",
    ),
    "Serving": ("vssm.serve.settings.Settings",),
    "Kernels": (
        "vssm.ops.selective_scan",
        "vssm.ops.selective_scan_fn",
        "vssm.ops.causal_conv_silu",
        "vssm.accelerate",
    ),
}
HEAD = """# Reference

`make docs` generates this page from the docstrings; do not edit it. Fields of `ModelConfig`,
`TrainConfig` and of the options of data sets are also options on the command line:
`--model.width`, `--train.batch`, `--series.path`. The help of each command lists them all. The
[guide](guide.md) shows how they fit together."""


def page() -> str:
    """Returns the whole page."""
    contents = [
        f"- [{title}](#{_anchor(title)}): {_links(names)}" for title, names in SECTIONS.items()
    ]
    parts = [HEAD, "\n".join(contents)]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}")
        for name in names:
            parts += _entry(name)
    return "\n\n".join(parts) + "\n"


def _links(names: tuple[str, ...]) -> str:
    return ", ".join(f"[{name.rpartition('.')[2]}](#{_anchor(name)})" for name in names)


def _anchor(title: str) -> str:
    """Returns the anchor of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _entry(name: str) -> Iterator[str]:
    module, _, own = name.rpartition(".")
    value = getattr(importlib.import_module(module), own)
    yield f"### {name}"
    fields = _fields(value) if inspect.isclass(value) else []
    if not fields:
        yield f"```text\n{textwrap.fill(_call(own, value), 100, subsequent_indent='    ')}\n```"
    names = vars(importlib.import_module(value.__module__))
    yield from _prose(value, names)
    if not inspect.isclass(value):
        return
    short: list[str] = []
    long: list[str] = []
    for method, function in _methods(value):
        call = _call(f"{own}.{method}", function)
        about = list(_prose(function, names))
        if len(about) == 1:
            short.append(f"- `{call}`: {about[0]}")
        else:
            long += [f"#### {own}.{method}", f"`{call}`", *about]
    if fields:
        yield "\n".join(fields)
    if short:
        yield "Methods and properties:"
        yield "\n".join(short)
    yield from long


def _call(name: str, function: object) -> str:
    """Writes a call with its defaults; a property is its name."""
    if isinstance(function, property):
        return name
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in ("self", "cls"):
            stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(
                parameter.kind, ""
            )
            default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
            shown.append(f"{stars}{parameter.name}{default}")
    return f"{name}({', '.join(shown)})"


def _prose(value: object, names: Mapping[str, object]) -> Iterator[str]:
    """Gives the paragraphs of a docstring; arguments become a list, the example becomes code.

    The example may use `names` of its module; names that it does not import are imported first.
    """
    text, _, example = (inspect.getdoc(value) or "").partition("\nExample:\n")
    for part in re.split(r"\n\s*\n", text.strip()):
        head, _, rest = part.partition("\n")
        if head == "Arguments:":
            entries = re.split(r"\n(?=\S)", textwrap.dedent(rest))
            pairs = (entry.partition(":") for entry in entries)
            yield "\n".join(f"- `{name.strip()}`: {_joined(about)}" for name, _, about in pairs)
        elif head in ("Returns:", "Raises:"):
            yield f"{head} {_joined(rest)}"
        else:
            yield _joined(part)
    if example:
        language = "pycon" if ">>>" in example else "python"
        yield "\n".join(
            [f"```{language}", *_imports(example, names), f"{textwrap.dedent(example)}\n```"]
        )


def _imports(example: str, names: Mapping[str, object]) -> list[str]:
    """Returns the imports that an example needs to run on its own."""
    tree = ast.parse("".join(part.source for part in doctest.DocTestParser().get_examples(example)))
    nodes = list(ast.walk(tree))
    own = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            own |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    used = {node.id for node in nodes if isinstance(node, ast.Name)} - own
    lines, ours = [], {}
    for name in sorted(used & names.keys()):
        value = names[name]
        if inspect.ismodule(value):
            short = "" if value.__name__ == name else f" as {name}"
            lines.append(f">>> import {value.__name__}{short}")
        else:
            ours.setdefault(_home(name, value), []).append(name)
    return lines + [
        f">>> from {module} import {', '.join(found)}" for module, found in sorted(ours.items())
    ]


def _home(name: str, value: object) -> str:
    """Returns the shortest path that a name can be imported from."""
    parts = value.__module__.split(".")
    for end in range(1, len(parts)):
        package = importlib.import_module(".".join(parts[:end]))
        if getattr(package, name, None) is value:
            return package.__name__
    return value.__module__


def _joined(text: str) -> str:
    return " ".join(text.split())


def _fields(value: type) -> list[str]:
    """Lists the fields of a class with their defaults and the docstrings below them.

    A class with an `__init__` of its own has arguments instead.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    assert isinstance(tree, ast.ClassDef)
    if any(isinstance(part, ast.FunctionDef) and part.name == "__init__" for part in tree.body):
        return []
    lines = []
    for field, below in itertools.pairwise([*tree.body, ast.Pass()]):
        match field:
            case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
                made = isinstance(field.value, ast.Call)  # by a factory: the type says more
                default = "" if field.value is None or made else f" = {ast.unparse(field.value)}"
                line = f"- `{name}: {ast.unparse(field.annotation)}{default}`"
                match below:
                    case ast.Expr(value=ast.Constant(value=str(about))):
                        line = f"{line}: {_joined(about)}"
                lines.append(line)
    return lines


def _methods(value: type) -> Iterator[tuple[str, object]]:
    for name, function in vars(value).items():
        function = (
            function.__func__ if isinstance(function, classmethod | staticmethod) else function
        )
        known = inspect.isfunction(function) or isinstance(function, property)
        if known and not name.startswith("_") and inspect.getdoc(function):
            yield name, function


if __name__ == "__main__":
    PAGE.write_text(page())
