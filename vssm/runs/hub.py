"""Models on the Hugging Face hub: config, weights and a model card, none of which can run code.

Nothing else is sent or fetched, and no path of the sender's machine is sent.
"""

import dataclasses
import re
import shlex
from pathlib import Path, PurePath
from typing import Any

from vssm.config import PRESETS, RunConfig
from vssm.data.storage import read_object, read_tensors
from vssm.runs.config import SavedConfig, flatten, refuse_forecaster

FILES = ("config.json", "weights.safetensors", "README.md")
_ADDRESS = re.compile(r"(?:hf://)?(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^\s@]+))?")
_SOURCES = ("images", "series", "text", "arrays", "synthetic")  # data sets with their own options
_IMPLIED = ("data.name", "model.features", "model.given", "train.device")  # by data or machine
_ALWAYS_SHOWN = ("model.kind", "model.width", "train.epochs")
_CARD = Path(__file__).with_name("card_template.md")  # for Jinja


def push(folder: str | Path, repo: str, token: str | None = None, private: bool = False) -> str:
    """Publishes a model with a model card, all in one commit.

    Arguments:
        folder: A run folder, or a folder written by `vssm.save`.
        repo: The repository, "OWNER/NAME"; it is made if it does not exist.
        token: An access token with write permission; the default is that of `hf auth login` or
            $HF_TOKEN.
        private: Make a private repository. An existing public repository is refused.

    Returns:
        The address of exactly this version, which `vssm.load` takes: "hf://OWNER/NAME@COMMIT".
    """
    name, revision = _parse_address(repo)
    if revision is not None:
        raise ValueError(f"repo={repo!r} has a revision; use 'OWNER/NAME'")
    hub = _import_hub()
    refuse_forecaster(folder)
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
        files = [hub.CommitOperationAdd(path, content) for path, content in contents.items()]
        commit = api.create_commit(name, files, commit_message="Add a model made with vssm")
    except (OSError, ValueError, hub.errors.HTTPError) as error:
        raise ValueError(f"repo={repo!r} cannot be written: {_one_line(str(error))}") from None
    return f"hf://{name}@{commit.oid}"


def pull(repo: str) -> Path:
    """Fetches a model, unless it is in the cache already.

    Arguments:
        repo: The repository, "OWNER/NAME" or "hf://OWNER/NAME", of which the newest commit is
            fetched, or either with "@REVISION": a commit, branch or tag.

    Returns:
        A folder in the cache of huggingface_hub, which `vssm.load` reads. Do not write to it.
    """
    name, revision = _parse_address(repo)
    hub = _import_hub()
    try:
        found = hub.snapshot_download(name, revision=revision, allow_patterns=list(FILES))
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
    model, run = saved.model(), saved.run() if "train" in saved.values else None
    tags = [model.kind, "sequence-modeling", *([] if run is None else [run.data.name])]
    path = run and (run.data.series.path or run.data.text.path)
    weights, _ = read_tensors(folder / "weights.safetensors")
    evaluation = folder / "eval.json"
    card = hub.ModelCard.from_template(
        hub.ModelCardData(license="mit", library_name="vssm", tags=tags),
        template_path=str(_CARD),
        model=model,
        run=run,
        meta=saved.values.get("data_meta") or {},
        file=PurePath(path).name if path else "",
        parameters=sum(tensor.numel() for tensor in weights.values()),
        metrics=read_object(evaluation)["metrics"] if evaluation.exists() else {},
        address=address,
        command="" if run is None else train_command(run),
        limits=limits,
        escape=_escape,
    )
    return f"{str(card).rstrip()}\n"


def _parse_address(repo: str) -> tuple[str, str | None]:
    match = _ADDRESS.fullmatch(repo)
    if match is None:
        raise ValueError(
            f"repo={repo!r} is not a repository; use 'OWNER/NAME' or 'hf://OWNER/NAME[@REVISION]'"
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
