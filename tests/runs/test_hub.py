"""A model goes to the hub and comes back; nothing else does, and nothing of it can run code."""

import inspect
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import sequences, small_config, small_model
from vssm import load, save
from vssm.config import ModelConfig, RunConfig, TrainConfig
from vssm.data import DataConfig, SeriesConfig, TextConfig
from vssm.runs.hub import FILES, model_card, pull, push

huggingface_hub = pytest.importorskip("huggingface_hub")
yaml = pytest.importorskip("yaml")

PICKLE = b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."


def checked(real, fake):
    """The fake, for calls that the real function takes as well."""

    def call(*arguments, **options):
        inspect.signature(real).bind(*arguments, **options)
        return fake(*arguments, **options)

    return call


class Hub:
    """A hub in a folder: one folder per repository and commit."""

    def __init__(self, folder):
        self.folder, self.private, self.commits, self.tokens = folder, {}, {}, []

    def commit(self, repo, files):
        commits = self.commits.setdefault(repo, [])
        commits.append(f"{len(commits):040x}")
        for name, content in files.items():
            path = self.folder / "remote" / repo / commits[-1] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return commits[-1]

    def api(self, token=None):
        self.tokens.append(token)

        def create_commit(repo, operations, commit_message):
            assert commit_message
            files = {}
            for operation in operations:
                with operation.as_file() as file:
                    files[operation.path_in_repo] = file.read()
            return SimpleNamespace(oid=self.commit(repo, files))

        real = huggingface_hub.hf_api.HfApi()

        def create_repo(repo, private, exist_ok):
            self.private.setdefault(repo, private)

        return SimpleNamespace(
            create_repo=checked(real.create_repo, create_repo),
            model_info=checked(
                real.model_info, lambda repo: SimpleNamespace(private=self.private[repo])
            ),
            create_commit=checked(real.create_commit, create_commit),
        )

    def snapshot_download(self, repo, revision=None, allow_patterns=None):
        if repo not in self.commits:
            raise huggingface_hub.errors.LocalEntryNotFoundError(f"no {repo},\nnor a network")
        commit = revision or self.commits[repo][-1]
        remote, local = (self.folder / side / repo / commit for side in ("remote", "cache"))
        names = [str(path.relative_to(remote)) for path in remote.rglob("*") if path.is_file()]
        for name in huggingface_hub.utils.filter_repo_objects(names, allow_patterns=allow_patterns):
            (local / name).parent.mkdir(parents=True, exist_ok=True)
            (local / name).write_bytes((remote / name).read_bytes())
        return str(local)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    fake_download = checked(huggingface_hub.snapshot_download, hub.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", checked(huggingface_hub.HfApi, hub.api))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_download)
    return hub


def save_run(folder, config, **meta):
    """A run folder as training leaves it, without the training."""
    kind, head = config.model.kind, config.model.head.replace("auto", "gaussian")
    save(small_model(kind, head), folder)
    values = {**config.to_dict(), "model": small_config(kind, head).to_dict()}
    (folder / "config.json").write_text(json.dumps({**values, "data_meta": meta}))
    for name in (
        "meta.json",
        "log.jsonl",
        "eval.json",
        "pytorch_model.bin",
        "checkpoint/step-1/optimizer.pt",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(PICKLE)
    metrics = {"log_likelihood": -12.3456789, "kl": 3, "fd_one_shot": None}
    (folder / "eval.json").write_text(json.dumps({"name": "run", "metrics": metrics}))


def front_matter(card):
    start, front, body = card.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(front), body


def test_round_trip(hub, tmp_path):
    config = RunConfig(data=DataConfig(name="mnist", dir="/home/someone/data"))
    save_run(tmp_path / "run", config, name="mnist", length=28, features=3)
    address = push(tmp_path / "run", "lab/model", token="secret")
    assert address == f"hf://lab/model@{0:040x}"
    assert hub.tokens == ["secret"]
    remote = hub.folder / "remote" / "lab" / "model" / f"{0:040x}"
    assert sorted(p.name for p in remote.rglob("*")) == sorted(FILES)
    assert (remote / "weights.safetensors").read_bytes() == (
        tmp_path / "run/weights.safetensors"
    ).read_bytes()
    assert (
        "someone" not in (remote / "config.json").read_text() + (remote / "README.md").read_text()
    )

    model, copy = load(tmp_path / "run"), load(address)
    x = sequences(model, 2, 5)
    assert copy.config == model.config
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters(), strict=True)
    )
    assert torch.equal(model.posterior(x)[0].logits, copy.posterior(x)[0].logits)


def test_revision_names_a_version(hub, tmp_path):
    for kind in ("ssm", "rnn"):
        save(small_model(kind), tmp_path / kind)
        push(tmp_path / kind, "lab/model")
    assert load("hf://lab/model").config.kind == "rnn"
    assert load(f"hf://lab/model@{0:040x}").config.kind == "ssm"
    assert load(pull(f"lab/model@{0:040x}")).config.kind == "ssm"


def test_only_three_files_are_fetched(hub, tmp_path):
    save(small_model("ssm"), tmp_path)
    good = {name: (tmp_path / name).read_bytes() for name in FILES[:2]}
    others = (
        "pytorch_model.bin",
        "model.pt",
        "modeling.py",
        "sub/config.json",
        "config.json.pkl",
        ".gitattributes",
    )
    hub.commit("lab/model", {**good, **dict.fromkeys(others, PICKLE)})
    folder = pull("hf://lab/model")
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == sorted(good)
    assert load("hf://lab/model").config.kind == "ssm"


@pytest.mark.parametrize("file", FILES[:2])
def test_pickle_is_refused(file, hub, tmp_path):
    save(small_model("ssm"), tmp_path)
    good = {name: (tmp_path / name).read_bytes() for name in FILES[:2]}
    hub.commit("lab/pickle", {**good, file: PICKLE})
    with pytest.raises(ValueError, match=f"{file}' is damaged"):
        load("hf://lab/pickle")
    hub.commit(
        "lab/bin", {"pytorch_model.bin": PICKLE, **{n: good[n] for n in FILES[:2] if n != file}}
    )
    with pytest.raises(ValueError, match=rf"^repo='hf://lab/bin' has no {file}; use a "):
        load("hf://lab/bin")
    (tmp_path / file).write_bytes(PICKLE)
    with pytest.raises(ValueError, match=f"{file}' is damaged"):
        push(tmp_path, "lab/other")
    assert "lab/other" not in hub.private


def test_private_model_is_not_pushed_to_a_public_repository(hub, tmp_path):
    save(small_model("ssm"), tmp_path)
    push(tmp_path, "lab/open")
    with pytest.raises(
        ValueError, match=r"^repo='lab/open' cannot be written: it exists and is public"
    ):
        push(tmp_path, "lab/open", private=True)
    assert len(hub.commits["lab/open"]) == 1
    push(tmp_path, "lab/closed", private=True)
    assert hub.private["lab/closed"] is True


def test_mistakes_are_named(hub, tmp_path, monkeypatch):
    for repo in ("model", "a/b/c", "../x", "hf://", "hf://a/b@", "a/b c", ""):
        with pytest.raises(
            ValueError, match=rf"^repo={re.escape(repr(repo))} is not a repository; use 'OWNER"
        ):
            pull(repo)
    with pytest.raises(
        ValueError, match=r"^repo='lab/none' cannot be read: no lab/none, nor a network$"
    ):
        pull("lab/none")
    with pytest.raises(ValueError, match="has a revision"):
        push(tmp_path, "lab/model@main")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        push(tmp_path, "lab/model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (lambda: push(tmp_path, "lab/model"), lambda: load("hf://lab/model")):
        with pytest.raises(
            ValueError, match=re.escape("not installed; install it with: pip install 'vssm[hub]'")
        ):
            call()


def test_card_of_a_run(tmp_path):
    data = DataConfig(name="mnist", binarize=True, dir="/home/someone/data")
    config = RunConfig(data=data, train=TrainConfig(epochs=7, learning_rate=5e-4))
    save_run(tmp_path, config, name="mnist", length=28, features=3)
    front, body = front_matter(model_card(tmp_path, "hf://lab/model"))
    assert front == {
        "license": "mit",
        "library_name": "vssm",
        "tags": ["vssm", "sequence-modeling", "mnist"],
    }
    parameters = sum(p.numel() for p in load(tmp_path).parameters())
    for line in (
        "# vssm on mnist",
        "| data set | mnist, black and white |",
        "| a sequence | 28 steps of 3 values |",
        f"| parameters | {parameters:,} |",
        "| log_likelihood | -12.3457 |",
        "| kl | 3 |",
        "| fd_one_shot | not finite |",
        'model = vssm.load("hf://lab/model")',
        "samples = vssm.generate(model, num=16, length=28).x",
        "MIT",
    ):
        assert line in body.splitlines()
    assert "| training | AdamW, epochs: 7, batch: 256, learning rate: 0.0005," in body
    assert "vssm train mnist --binarize --model.kind vssm" in body
    assert "--train.epochs 7" in body
    assert "--train.learning-rate 0.0005" in body
    assert "someone" not in body


@pytest.mark.parametrize("huge", [10**400, -(10**400), 10**120])
def test_card_with_huge_numbers_is_refused_in_one_line(huge, tmp_path):
    save_run(tmp_path, RunConfig(), name="digits", length=8, features=3)
    values = json.loads((tmp_path / "config.json").read_text())
    values["train"]["learning_rate"] = huge
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"^'.*config.json'.*learning_rate") as told:
        model_card(tmp_path)
    assert "\n" not in str(told.value) and len(str(told.value)) < 600


def test_card_names_the_optimizer(tmp_path):
    config = RunConfig(train=TrainConfig(optimizer="muon"))
    save_run(tmp_path, config, name="digits", length=8, features=3)
    body = model_card(tmp_path)
    assert "| training | Muon and AdamW, epochs: 20," in body
    assert "--train.optimizer muon" in body


def test_card_of_a_model_that_was_saved_alone(tmp_path):
    save(small_model("tvae"), tmp_path)
    front, body = front_matter(model_card(tmp_path))
    assert front["tags"] == ["tvae", "sequence-modeling"]
    assert "| data set | not recorded |" in body
    assert "Not measured" in body
    assert "vssm train" not in body


def test_card_shows_strange_names_as_they_are(tmp_path):
    columns = ("a|b", "<script>", "`---\n# c", "d'e")
    series = SeriesConfig(path="/home/someone/my data.csv", columns=columns)
    config = RunConfig(
        data=DataConfig(name="series", series=series),
        model=ModelConfig(features=1, head="gaussian-learned"),
    )
    save_run(tmp_path, config, name="series", length=192, features=3, columns=columns)
    (tmp_path / "eval.json").write_text(json.dumps({"metrics": {"x|y\n\n# z": 1.0}}))
    front, body = front_matter(model_card(tmp_path))
    assert front["tags"] == ["vssm", "sequence-modeling", "series"]
    lines = body.splitlines()
    assert r"| columns | a\|b, \<script\>, \`--- # c, d'e |" in lines
    assert r"| x\|y # z | 1 |" in lines
    assert "| file | my data.csv |" in lines
    command = body.partition("```sh\n")[2].partition("\n```")[0]
    assert [line for line in lines if line.startswith("```")] == [
        "```python",
        "```",
        "```sh",
        "```",
    ]
    words = shlex.split(command)
    start = words.index("--series.columns") + 1
    assert tuple(words[start : start + 4]) == columns
    assert words[words.index("--series.path") + 1] == "my data.csv"


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(data=DataConfig(name="mnist", dir="/data", seed=3)),
        RunConfig(
            data=DataConfig(
                name="series",
                series=SeriesConfig(path="/x/y.csv", columns=("a b", "c"), scale="none"),
            ),
            model=ModelConfig(kind="tvae", features=1, width=128, head="gaussian-learned"),
            train=TrainConfig(
                max_steps=7, ema=0.99, compile=True, num_valid=5, device="cpu", precision="float32"
            ),
        ),
        RunConfig(
            data=DataConfig(name="series", series=SeriesConfig(path="a.csv")),
            model=ModelConfig(features=1),
        ),
        RunConfig(
            data=DataConfig(name="text", text=TextConfig(unit="byte", length=33)),
            model=ModelConfig(kind="rnn", features=256, head="categorical", layers=1),
            train=TrainConfig(learning_rate=3e-5, seed=2, epochs=1),
        ),
    ],
    ids=["mnist", "series", "whole series", "text"],
)
def test_command_of_a_card_makes_the_same_run(config, tmp_path, monkeypatch):
    from vssm.cli import main

    made = []
    monkeypatch.setattr(
        "vssm.cli.train.train", lambda config, folder, **_: made.append(config) or Path(folder)
    )
    save(small_model("ssm"), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), "data_meta": {}}))
    command = model_card(tmp_path).partition("```sh\n")[2].partition("\n```")[0]
    main(shlex.split(command)[1:])
    (run,) = made
    path = config.data.series.path
    series = replace(config.data.series, path=path and Path(path).name)
    assert run.data == replace(config.data, dir=None, series=series)
    assert run.model == replace(config.model, features=run.model.features)
    assert run.train == replace(config.train, device="auto")
