"""Models on the Hugging Face hub: three files each, none of which can run code.

    config.json            what the model is, and the data and settings it was trained with
    weights.safetensors    its weights
    README.md              the model card

Nothing else is ever sent or fetched. What is sent says nothing about folders of the machine it comes from.
"""

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from vssm.config import PRESETS, ModelConfig, RunConfig
from vssm.runs.labels import is_number
from vssm.storage import read_object

__all__ = ["FILES", "model_card", "pull", "push", "train_command", "without_folders"]

FILES = ("config.json", "weights.safetensors", "README.md")
_ADDRESS = re.compile(r"(?:hf://)?(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^\s@]+))?")
_PAPER = "https://arxiv.org/abs/2407.08415"
_SOURCES = (
    "images",
    "series",
    "text",
    "arrays",
    "synthetic",
)  # data sets with options of their own


def push(
    folder: str | Path,
    repo: str,
    token: str | None = None,
    private: bool = False,
    message: str | None = None,
) -> str:
    """Publishes a model with a model card, all in one commit.

    Arguments:
        folder: A run folder, or a folder written by `vssm.save`.
        repo: The repository, "OWNER/NAME"; it is made if it does not exist.
        token: An access token that may write; by default that of `hf auth login` or $HF_TOKEN.
        private: Make a private repository; one that exists and is public is refused.
        message: What the commit says.

    Returns:
        The address of exactly this version, which `vssm.load` takes: "hf://OWNER/NAME@COMMIT".
    """
    name, revision = _address(repo)
    if revision is not None:
        raise ValueError(f"repo={repo!r} has a revision; allowed: 'OWNER/NAME'")
    hub = _import_hub()
    values, _ = _read_config(Path(folder))
    card = model_card(folder, name)
    contents = {
        "config.json": (json.dumps(without_folders(values), indent=2) + "\n").encode(),
        "weights.safetensors": Path(folder) / "weights.safetensors",
        "README.md": card.encode(),
    }
    assert tuple(contents) == FILES
    api = hub.HfApi(token=token)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        if private and not api.model_info(name).private:
            raise ValueError(
                "it exists and is public; allowed with private=True: a private or new one"
            )
        files = [
            hub.CommitOperationAdd(path_in_repo=path, path_or_fileobj=content)
            for path, content in contents.items()
        ]
        commit = api.create_commit(
            name, files, commit_message=message or "Add a model made with vssm"
        )
    except (OSError, ValueError, hub.errors.HTTPError) as error:
        raise ValueError(f"repo={repo!r} can not be written: {_one_line(error)}") from None
    return f"hf://{name}@{commit.oid}"


def pull(repo: str, revision: str | None = None) -> Path:
    """Fetches a model, unless it is in the cache already.

    Arguments:
        repo: The repository, "OWNER/NAME", "hf://OWNER/NAME" or either with "@REVISION".
        revision: A commit, branch or tag; the newest commit when not given.

    Returns:
        A folder in the cache of huggingface_hub, which `vssm.load` reads; it is not to be written to.
    """
    name, given = _address(repo)
    hub = _import_hub()
    try:
        folder = Path(
            hub.snapshot_download(name, revision=revision or given, allow_patterns=list(FILES))
        )
    except (OSError, ValueError, hub.errors.HTTPError) as error:
        raise ValueError(f"repo={repo!r} can not be read: {_one_line(error)}") from None
    for file in FILES[:2]:
        if not (folder / file).is_file():
            raise ValueError(
                f"repo={repo!r} has no {file}; allowed: a repository made by vssm.runs.hub.push"
            )
    return folder


def model_card(folder: str | Path, repo: str = "OWNER/NAME") -> str:
    """Says what the model in a folder is: its data, settings, metrics, and the command that makes it again.

    Arguments:
        folder: A run folder, with metrics if `vssm evaluate` has written eval.json, or one of `vssm.save`.
        repo: Where it will be, for the lines that say how to load it.

    Returns:
        Markdown with YAML front matter.
    """
    folder = Path(folder)
    values, run = _read_config(folder)
    kind, trained = run.model.kind, "train" in values  # else the model was saved alone
    meta = values.get("data_meta")
    meta = meta if isinstance(meta, dict) else {}

    # The front matter has values from fixed lists only, so nothing in it needs quotes.
    tags = [kind, "sequence-modeling", *([run.data.name] if trained else [])]
    front = [
        "---",
        "license: mit",
        "library_name: vssm",
        "tags:",
        *(f"- {tag}" for tag in tags),
        "---",
    ]
    facts = [("data set", "not recorded")]
    if trained:
        facts = _data_facts(run, meta)
    facts.append(("parameters", f"{_count_parameters(folder / 'weights.safetensors'):,}"))
    facts += _model_facts(run.model) + (_train_facts(run) if trained else [])
    sections = [
        "\n".join(front),
        f"# {kind}" + (f" on {run.data.name}" if trained else ""),
        f"A sequence model of kind `{kind}`, made with `vssm`: [variational state space models]({_PAPER}) "
        "and the models that they are compared to.",
        _table(("", ""), facts),
        "## Metrics",
        _metrics(folder / "eval.json"),
        "## Use",
        _code(
            f'import vssm\n\nmodel = vssm.load("hf://{repo}")\n'
            f"samples = vssm.generate(model, num=16, length={meta.get('length', 28)}).x",
            "python",
        ),
        "`config.json` and `weights.safetensors` are all that is read; neither can run code.",
    ]
    if trained:
        sections += ["## Reproduce", _code(train_command(run), "sh")]
    sections += ["## Licence", "MIT"]
    return "\n\n".join(sections) + "\n"


def _address(repo: str) -> tuple[str, str | None]:
    match = _ADDRESS.fullmatch(repo)
    if match is None:
        raise ValueError(
            f"repo={repo!r} is not allowed; allowed: 'OWNER/NAME', 'hf://OWNER/NAME[@REVISION]'"
        )
    return match["repo"], match["revision"]


def _import_hub() -> Any:  # noqa: ANN401
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise ValueError(
            "huggingface_hub is not installed; allowed: pip install 'vssm[hub]'"
        ) from None
    return huggingface_hub


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{str(path.parent)!r} has no {path.name}; allowed: the folder of a model")
    return read_object(path)


def _read_config(folder: Path) -> tuple[dict[str, Any], RunConfig]:
    """Returns config.json as it is, and the run it describes."""
    values = _read_json(folder / "config.json")
    try:
        return values, RunConfig.from_dict({k: v for k, v in values.items() if k != "data_meta"})
    except ValueError as error:
        raise ValueError(f"{str(folder / 'config.json')!r}: {error}") from None


def without_folders(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a config without the data folder, and of data files only the names, to be found in any."""
    data = values.get("data")
    if data is None:
        return values
    named = {
        part: {**options, "path": PurePath(options["path"]).name}
        for part, options in data.items()
        if isinstance(options, dict) and options.get("path")
    }
    return {**values, "data": {**data, "dir": None, **named}}


def _count_parameters(path: Path) -> int:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"{str(path.parent)!r} has no {path.name}; allowed: the folder of a model")
    try:
        with safe_open(path, framework="numpy") as file:  # reads shapes, not tensors
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from None


def _data_facts(run: RunConfig, meta: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("data set", run.data.name + (", black and white" if run.data.binarize else ""))]
    if "length" in meta and "features" in meta:
        step = "one of {} tokens" if run.model.head == "categorical" else "{} values"
        rows.append(("a sequence", f"{meta['length']} steps of {step.format(meta['features'])}"))
    for options in (run.data.series, run.data.text):
        if options.path is not None:
            rows.append(("file", PurePath(options.path).name))
    if isinstance(meta.get("columns"), list):
        rows.append(("columns", ", ".join(map(str, meta["columns"]))))
    return rows


def _model_facts(model: ModelConfig) -> list[tuple[str, str]]:
    levels = f", levels of latents: {model.levels}" if model.levels > 1 else ""
    levels += f", spans: {' '.join(map(str, model.spans))}" if model.spans else ""
    return [("model", f"layers: {model.layers}, width: {model.width}, head: {model.head}{levels}")]


def _train_facts(run: RunConfig) -> list[tuple[str, str]]:
    options = run.train
    length = (
        f"epochs: {options.epochs}" if options.max_steps is None else f"steps: {options.max_steps}"
    )
    rest = f"batch: {options.batch}, learning rate: {options.learning_rate:g}, seed: {options.seed}"
    name = {"adamw": "AdamW", "muon": "Muon and AdamW"}[options.optimizer]
    return [("training", f"{name}, {length}, {rest}; the weights that were best on validation")]


def _metrics(path: Path) -> str:
    if not path.exists():
        return "Not measured: there was no `eval.json`, which `vssm evaluate RUN` writes."
    metrics = _read_json(path).get("metrics")
    if not isinstance(metrics, dict):
        raise ValueError(f"{str(path)!r} is damaged: it has no metrics by name")
    for name, value in metrics.items():
        if value is not None and not is_number(value):
            raise ValueError(f"{str(path)!r} is damaged: metric {name} is no number, or a huge one")
    rows = [
        (name, "not finite" if value is None else f"{value:.6g}") for name, value in metrics.items()
    ]
    return "On the test set, by `vssm evaluate`; likelihoods in nats per sequence.\n\n" + _table(
        ("metric", "value"), rows
    )


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [f"| {_escape(name)} | {_escape(value)} |" for name, value in rows]
    return "\n".join([f"| {head[0]} | {head[1]} |", "| --- | --- |", *lines])


def _escape(text: str) -> str:
    """Makes any text one line of Markdown that shows as it is."""
    return re.sub(r"([\\`*\[\]<>|&])", r"\\\1", " ".join(text.split()))


def _code(text: str, language: str) -> str:
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def train_command(run: RunConfig) -> str:
    """Returns the command that trains this run: what is not the default, and a few options that say most."""
    run = RunConfig.from_dict(without_folders(run.to_dict()))
    words = ["vssm", "train", run.data.name]
    default = (
        PRESETS["series"] if run.data.name == "series" else RunConfig()
    )  # as the command starts from
    others = {name: getattr(default.data, name) for name in _SOURCES if name != run.data.name}
    run = dataclasses.replace(
        run, data=dataclasses.replace(run.data, **others)
    )  # not read for this data
    for part in ("data", "model", "train"):
        prefix = "" if part == "data" else f"{part}."
        words += _options(getattr(run, part), getattr(default, part), prefix)
    return " ".join(map(shlex.quote, words))


def _options(given: Any, default: Any, prefix: str) -> Iterator[str]:  # noqa: ANN401
    for field in dataclasses.fields(given):
        value, usual = getattr(given, field.name), getattr(default, field.name)
        name = prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from _options(value, usual, f"{name}.")
        elif name in ("name", "model.features", "train.device"):
            continue  # an argument of its own, what the data has, what the machine has
        elif value != usual or name in ("model.kind", "model.width", "train.epochs"):
            short = "split-seed" if name == "seed" else field.name.replace("_", "-")
            yield from _option(prefix, short, value)


def _option(prefix: str, name: str, value: Any) -> Iterator[str]:  # noqa: ANN401
    if isinstance(value, bool):
        yield f"--{prefix}{name}" if value else f"--{prefix}no-{name}"
    else:
        yield f"--{prefix}{name}"
        yield from map(str, value if isinstance(value, tuple) else [value])
