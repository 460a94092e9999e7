"""Models on the Hugging Face hub: three files each, none of which can run code.

    config.json            the model, and the data and settings that it was trained with
    weights.safetensors    its weights
    README.md              the model card

Nothing else is sent or fetched, and no path of the sender's machine is sent.
"""

import dataclasses
import math
import re
import shlex
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError, safe_open

from vssm.config import PRESETS, ModelConfig, RunConfig
from vssm.data.storage import read_object
from vssm.runs.config import SavedConfig, flatten

__all__ = ["FILES", "model_card", "pull", "push", "train_command", "without_folders"]

FILES = ("config.json", "weights.safetensors", "README.md")
_ADDRESS = re.compile(r"(?:hf://)?(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^\s@]+))?")
_SOURCES = ("images", "series", "text", "arrays", "synthetic")  # data sets with their own options
_IMPLIED = ("data.name", "model.features", "model.given", "train.device")  # by data or machine
_ALWAYS_SHOWN = ("model.kind", "model.width", "train.epochs")
_CARD = Path(__file__).with_name("card_template.md")  # for Jinja


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
        token: An access token with write permission; the default is that of `hf auth login` or
            $HF_TOKEN.
        private: Make a private repository. An existing public repository is refused.
        message: The commit message.

    Returns:
        The address of exactly this version, which `vssm.load` takes: "hf://OWNER/NAME@COMMIT".
    """
    name, revision = _parse_address(repo)
    if revision is not None:
        raise ValueError(f"repo={repo!r} has a revision; use 'OWNER/NAME'")
    hub = _import_hub()
    saved = SavedConfig.read(folder)
    public = dataclasses.replace(saved, values=without_folders(saved.values))
    contents = {
        "config.json": public.text().encode(),
        "weights.safetensors": Path(folder) / "weights.safetensors",
        "README.md": model_card(folder, f"hf://{name}").encode(),
    }
    api = hub.HfApi(token=token)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        if private and not api.model_info(name).private:
            raise ValueError("it exists and is public; use another name with private=True")
        files = [
            hub.CommitOperationAdd(path_in_repo=path, path_or_fileobj=content)
            for path, content in contents.items()
        ]
        text = message or "Add a model made with vssm"
        commit = api.create_commit(name, files, commit_message=text)
    except (OSError, ValueError, hub.errors.HTTPError) as error:
        raise ValueError(f"repo={repo!r} cannot be written: {_one_line(str(error))}") from None
    return f"hf://{name}@{commit.oid}"


def pull(repo: str, revision: str | None = None) -> Path:
    """Fetches a model, unless it is in the cache already.

    Arguments:
        repo: The repository, "OWNER/NAME", "hf://OWNER/NAME" or either with "@REVISION".
        revision: A commit, branch or tag; the newest commit by default.

    Returns:
        A folder in the cache of huggingface_hub, which `vssm.load` reads. Do not write to it.
    """
    name, given = _parse_address(repo)
    hub = _import_hub()
    try:
        found = hub.snapshot_download(name, revision=revision or given, allow_patterns=list(FILES))
    except (OSError, ValueError, hub.errors.HTTPError) as error:
        raise ValueError(f"repo={repo!r} cannot be read: {_one_line(str(error))}") from None
    for file in FILES[:2]:
        if not (Path(found) / file).is_file():
            raise ValueError(f"repo={repo!r} has no {file}; use a repository of vssm push")
    return Path(found)


def model_card(folder: str | Path, address: str = "hf://OWNER/NAME", limits: str = "") -> str:
    """Describes the model in a folder: data, settings, metrics, and the command that trains it.

    Arguments:
        folder: A run folder, with metrics if `vssm evaluate` has written eval.json, or a folder
            written by `vssm.save`.
        address: What `vssm.load` will be given to load it.
        limits: A paragraph about what the model cannot do.

    Returns:
        Markdown with YAML front matter.
    """
    hub, folder = _import_hub(), Path(folder)
    saved = SavedConfig.read(folder)
    model, run = saved.model(), saved.run() if saved.is_run else None
    meta: dict[str, Any] = saved.values.get("data_meta") or {}
    name = [] if run is None else [run.data.name]
    card = hub.ModelCard.from_template(
        hub.ModelCardData(
            license="mit", library_name="vssm", tags=[model.kind, "sequence-modeling", *name]
        ),
        template_path=str(_CARD),
        title=" on ".join([model.kind, *name]),
        kind=model.kind,
        facts=[(name, _escape(value)) for name, value in _facts(folder, model, run, meta).items()],
        metrics=_metrics(folder / "eval.json"),
        address=address,
        length=meta.get("length", 28),
        features=model.features,
        given=model.given,
        command="" if run is None else train_command(run),
        limits=limits,
    )
    return f"{str(card).rstrip()}\n"


def _facts(
    folder: Path, model: ModelConfig, run: RunConfig | None, meta: dict[str, Any]
) -> dict[str, str]:
    """Returns the rows of the table on top of a model card."""
    levels = f", levels of latents: {model.levels}" if model.levels > 1 else ""
    levels += f", spans: {' '.join(map(str, model.spans))}" if model.spans else ""
    levels += f", known: any part, given columns: {model.given}" if model.known == "any" else ""
    facts = {
        "data set": "not recorded",
        "parameters": f"{_count_parameters(folder / 'weights.safetensors'):,}",
        "model": f"layers: {model.layers}, width: {model.width}, head: {model.head}{levels}",
    }
    if run is None:
        return facts
    data, train = run.data, run.train
    facts["data set"] = data.name + (", black and white" if data.binarize else "")
    if "length" in meta and "features" in meta:
        step = "one of {} tokens" if model.head == "categorical" else "{} values"
        facts["a sequence"] = f"{meta['length']} steps of {step.format(meta['features'])}"
    if path := data.series.path or data.text.path:
        facts["file"] = PurePath(path).name
    if meta.get("columns"):
        facts["columns"] = ", ".join(meta["columns"])
    name = {"adamw": "AdamW", "muon": "Muon and AdamW"}[train.optimizer]
    steps = f"steps: {train.max_steps}" if train.max_steps else f"epochs: {train.epochs}"
    rest = f"batch: {train.batch}, learning rate: {train.learning_rate:g}, seed: {train.seed}"
    facts["training"] = f"{name}, {steps}, {rest}; the weights that were best on validation"
    return facts


def _parse_address(repo: str) -> tuple[str, str | None]:
    match = _ADDRESS.fullmatch(repo)
    if match is None:
        raise ValueError(
            f"repo={repo!r} is no repository; use 'OWNER/NAME' or 'hf://OWNER/NAME[@REVISION]'"
        )
    return match["repo"], match["revision"]


def _import_hub() -> Any:  # noqa: ANN401
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise ValueError(
            "huggingface_hub is not installed; install it with: pip install 'vssm[hub]'"
        ) from None
    return huggingface_hub


def without_folders(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a config.json without folders: of data files only the names stay."""
    if "data" not in values:
        return values
    named = {
        part: {**options, "path": PurePath(options["path"]).name}
        for part, options in values["data"].items()
        if isinstance(options, dict) and options.get("path")
    }
    return {**values, "data": {**values["data"], "dir": None, **named}}


def _count_parameters(path: Path) -> int:
    try:
        with safe_open(path, framework="numpy") as file:  # reads shapes, not tensors
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{str(path)!r} is damaged or missing: {error}") from None


def _metrics(path: Path) -> list[tuple[str, str]]:
    """Returns the metrics of an eval.json as text; none if there is no such file."""
    metrics = read_object(path)["metrics"] if path.exists() else {}
    return [
        (_escape(name), "not finite" if value is None else f"{value:.6g}")
        for name, value in metrics.items()
    ]


def _escape(text: str) -> str:
    """Turns any text into one line of Markdown that is shown as it is."""
    return re.sub(r"([\\`*\[\]<>|&])", r"\\\1", _one_line(text))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def train_command(run: RunConfig) -> str:
    """Returns the command that trains a run, with the options that differ from the defaults."""
    run = RunConfig.from_dict(without_folders(run.to_dict()))
    default = PRESETS["series"] if run.data.name == "series" else RunConfig()  # as vssm train does
    words, usual = ["vssm", "train", run.data.name], flatten(dataclasses.asdict(default))
    for path, value in flatten(dataclasses.asdict(run)).items():
        prefix, _, name = path.removeprefix("data.").rpartition(".")
        unused = prefix in _SOURCES and prefix != run.data.name
        if unused or path in _IMPLIED or (value == usual[path] and path not in _ALWAYS_SHOWN):
            continue
        option = "split-seed" if path == "data.seed" else name.replace("_", "-")
        option = f"no-{option}" if value is False else option
        words.append(f"--{prefix}.{option}" if prefix else f"--{option}")
        if not isinstance(value, bool):
            words += map(str, value if isinstance(value, tuple) else [value])
    return shlex.join(words)
