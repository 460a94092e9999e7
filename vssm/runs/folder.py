"""A run folder holds everything that one training leaves.

| file | content |
| --- | --- |
| `config.json` | format, model, data, train, and data_meta, the shape of the sequences |
| `weights.safetensors` | the weights that were best on validation; `vssm.load` reads them |
| `meta.json` | commit, versions, machine, seed, times; `ended` is set when the run is finished |
| `log.jsonl` | one JSON object a line: a log point ("train") or a validation ("valid") |
| `checkpoint/step-N/` | `weights`, `optimizer` and `ema` (.safetensors), and `progress.json` |
| `samples.png` | a picture of samples; `vssm report` draws the curves of the log |
| `eval.json.old` | an evaluation of weights that better ones have replaced |

A kill or a full disk damages nothing: files are written under a temporary name, flushed to the disk
and renamed, and so is a checkpoint, as a whole folder. Every file of a checkpoint has a checksum,
and `progress.json` has the config of its run: what is damaged or of another run is not loaded.
"""

import base64
import dataclasses
import hashlib
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from torch import Tensor

from vssm.config import RunConfig
from vssm.data import Meta
from vssm.data.storage import flush, read_object, read_tensors, write_atomically, write_tensors
from vssm.nn.show import html_table
from vssm.runs.config import SavedConfig, flatten, read_config

_FIELDS = {"step", "epoch", "split", "loss", "reconstruction", "kl"}  # of every line of the log
_KEPT = 2  # checkpoints: the newest, and one more in case it is damaged
FREE = ("data.dir", "train.device", "train.checkpoint_minutes", "train.samples", "train.compile")
FREE += ("train.graph", "train.fsdp", "train.validate_partial")
"""Options that may differ on resume, because the weights do not depend on them."""


Parts = dict[str, dict[str, Tensor]]
"""The tensors of a checkpoint by the name of their file, "weights", "optimizer" or "ema"."""


class Checkpoint(NamedTuple):
    """The content of a checkpoint."""

    path: Path
    config: RunConfig
    progress: dict[str, Any]
    """The step and whatever else `RunFolder.save_checkpoint` was given."""
    parts: Parts


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of the log of a run, without a last line that a kill has torn."""
    path, whole = Path(folder) / "log.jsonl", []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            damaged = not values.keys() >= _FIELDS
        except (ValueError, AttributeError, RecursionError):
            damaged = True
        if not damaged:
            whole.append(values)
        elif number < len(lines):
            raise ValueError(f"{str(path)!r} line {number} is damaged; remove that line")
    return whole


def claim(folder: Path, what: str) -> IO[str] | None:
    """Keeps other processes out of a folder until the returned file is closed or this process ends.

    Returns None on Windows, where nothing is locked. `what` names the folder in error messages.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    lock = (folder / ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(
            f"{what} {str(folder)!r} is in use by another process; wait until it has ended"
        ) from None
    return lock


class RunFolder:
    """Reads and writes one run folder, which need not exist yet. A notebook shows the run.

    Example:
        >>> RunFolder("runs/first")
        RunFolder('runs/first')
    """

    def __init__(self, folder: str | Path) -> None:
        self.path: Path = Path(folder)
        self.log_path: Path = self.path / "log.jsonl"
        self.checkpoints: Path = self.path / "checkpoint"
        self._lock: IO[str] | None = None

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def _repr_html_(self) -> str:
        rows: dict[str, object] = {}
        if (self.path / "config.json").is_file():
            config = read_config(self.path)
            rows = {"data": config.data.name, "kind": config.model.kind, "ended": self.has_ended()}
        if self.log_path.is_file() and (log := read_log(self.path)):
            rows |= {name: log[-1][name] for name in ("epoch", "step", "loss")}
        if (self.path / "eval.json").is_file():
            rows |= read_object(self.path / "eval.json")["metrics"]
        rows = {name: f"{v:.5g}" if isinstance(v, float) else v for name, v in rows.items()}
        shown = html_table(f"Run {self.path}", rows)
        if (picture := self.path / "samples.png").is_file():
            data = base64.b64encode(picture.read_bytes()).decode()
            shown += f'<img alt="Samples" src="data:image/png;base64,{data}">'
        return shown

    def close(self) -> None:
        """Lets another process train in this folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def check_new(self) -> None:
        """Raises unless the folder is absent, empty, or left by a start that was killed."""
        name = str(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"run folder {name!r} is a file; use a new name")
        files = set(self.path.glob("*")) - {*self.path.glob(".*.tmp"), self.path / ".lock"}
        if files:
            again = f"--resume {shlex.quote(name)}"
            raise ValueError(f"run folder {name!r} is not empty; use {again}, or another name")

    def create(self, config: RunConfig, meta: Meta) -> None:
        """Starts a run in a new folder."""
        self.check_new()  # before a lock is put into a folder of somebody else
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = claim(self.path, "run folder")
        self.check_new()  # another process may have trained here until now
        self._tidy()
        values = {**config.to_dict(), "data_meta": meta.to_json()}
        SavedConfig(self.path / "config.json", values).write()

    def has_ended(self) -> bool:
        """Returns whether meta.json says that the training is finished."""
        try:
            return read_object(self.path / "meta.json")["ended"] is not None
        except (OSError, ValueError, KeyError):
            return False

    def compare(self, config: RunConfig) -> None:
        """Raises if the run in this folder has other settings, except those in `FREE`."""
        for key, given, saved in differing(config, read_config(self.path)):
            raise ValueError(
                f"{key}={given!r} differs from {saved!r} of the run in {str(self.path)!r}; "
                "use the same, or another run folder"
            )

    def check_same(self, config: RunConfig) -> None:
        """Raises if the folder has a run with other settings than `config`.

        Unlike in `compare`, the config may leave open what the data decides (features, head "auto",
        bins, given, window). If it starts from another model, that decides all model settings.
        """
        if not (self.path / "config.json").exists():
            return
        saved = read_config(self.path).model
        head = saved.head if config.model.head == "auto" else config.model.head
        decided = {"features": saved.features, "head": head, "bins": saved.bins}
        if config.model.known == "any":
            decided |= {"given": saved.given, "window": saved.window}
        model = saved if config.train.init else dataclasses.replace(config.model, **decided)
        self.compare(dataclasses.replace(config, model=model))

    def reopen(self, config: RunConfig) -> None:
        """Prepares to resume the run."""
        self.compare(config)
        self._lock = claim(self.path, "run folder")
        self._tidy()
        self.check_resumable()

    def check_resumable(self) -> None:
        """Raises if a new start, for want of a checkpoint, would replace weights."""
        # Without a log, this may be all that is left of a finished run.
        finished = self.has_ended() or not self.log_path.exists()
        if finished and (self.path / "weights.safetensors").exists() and not self._saved():
            raise ValueError(
                f"{str(self.path)!r} has weights but no checkpoint to go on from, and a new start "
                "would replace them; use a new run folder"
            )

    def _tidy(self) -> None:
        """Removes temporary files of a training that was killed, but not those of an evaluation."""
        for folder in (self.path, self.checkpoints):
            for file in folder.glob(".*.tmp"):
                if not file.name.startswith(".eval"):
                    _remove(file)

    def describe(self, facts: dict[str, Any]) -> None:
        """Writes meta.json."""
        text = json.dumps(facts, indent=2) + "\n"
        write_atomically(self.path / "meta.json", lambda path: path.write_text(text))

    def save_weights(self, tensors: dict[str, Tensor]) -> None:
        """Writes the best weights, and renames evaluations of other weights to "eval.json.old"."""
        # Renamed first, so that after a kill no evaluation lies beside weights of another step.
        for file in (self.path / "eval.json", self.path / "eval_valid.json"):
            with suppress(FileNotFoundError):
                file.replace(file.with_name(f"{file.name}.old"))
        write_tensors(self.path / "weights.safetensors", tensors)

    def has_weights(self) -> bool:
        """Returns whether the best weights are there and undamaged."""
        try:
            read_tensors(self.path / "weights.safetensors")
        except ValueError:
            return False
        return True

    def log(self, line: dict[str, Any]) -> None:
        """Appends a line to the log."""
        with self.log_path.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def cut_log(self, step: int) -> None:
        """Removes the lines after a step from the log."""
        if self.log_path.exists():
            lines = [line for line in read_log(self.path) if line["step"] <= step]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            write_atomically(self.log_path, lambda path: path.write_text(text))

    def save_checkpoint(
        self, config: RunConfig, step: int, parts: Parts, progress: dict[str, Any]
    ) -> Path:
        """Writes a checkpoint, then removes all but the two newest; returns its folder.

        `progress` is ready for JSON.
        """
        final = self.checkpoints / f"step-{step:08d}"
        if final.exists():  # this step was saved before
            return final
        temporary = final.with_name(f".{final.name}.tmp")
        _remove(temporary)
        temporary.mkdir(parents=True)
        try:
            if self.log_path.exists():
                flush(self.log_path)
            for name, tensors in parts.items():
                write_tensors(temporary / f"{name}.safetensors", tensors)
            files = [f"{name}.safetensors" for name in parts]
            record = {**progress, "step": step, "config": config.to_dict(), "files": files}
            record["checksum"] = _checksum(record)
            (temporary / "progress.json").write_text(json.dumps(record, indent=2) + "\n")
            flush(temporary / "progress.json")
            flush(temporary)
            temporary.rename(final)
            flush(self.checkpoints)
        finally:
            _remove(temporary)
        for old in self._saved()[:-_KEPT]:
            shutil.rmtree(old)
        return final

    def read_checkpoint(
        self, config: RunConfig, warn: Callable[[str], object]
    ) -> Checkpoint | None:
        """Returns the newest undamaged checkpoint, or None if there never was one.

        Damaged checkpoints are reported to `warn` and renamed to "step-N.damaged". A checkpoint of
        another run is refused, and nothing is changed.
        """
        damaged: dict[Path, ValueError] = {}
        for path in reversed(self._saved()):
            try:
                checkpoint = _read(path)
            except ValueError as error:
                damaged[path] = error
                continue
            for key, here, there in differing(config, checkpoint.config):
                raise ValueError(
                    f"{str(path)!r} is a checkpoint of another run, with {key}={there!r} instead of"
                    f" {here!r}; move it out of {str(self.path)!r} to continue from the one before"
                )
            for newer, problem in damaged.items():
                warn(f"{problem}; going on from {path.name}")
                aside = newer.with_name(f"{newer.name}.damaged")
                _remove(aside)
                newer.rename(aside)
            return checkpoint
        if damaged:
            problems = ", ".join(map(str, damaged.values()))
            raise ValueError(f"no checkpoint can be used: {problems}; use a new run folder")
        return None

    def has_checkpoint(self) -> bool:
        """Returns whether there is a checkpoint, damaged or not."""
        return bool(self._saved())

    def _saved(self) -> list[Path]:
        """Returns the checkpoints, oldest first."""
        found = [path for path in self.checkpoints.glob("step-*") if path.name[5:].isdecimal()]
        return sorted(found, key=lambda path: int(path.name[5:]))  # steps may have over 8 digits


def _read(path: Path) -> Checkpoint:
    """Reads a checkpoint; raises `ValueError` with the name of a damaged file."""
    place = path / "progress.json"
    try:
        record = read_object(place)
        if record.pop("checksum", None) != _checksum(record):
            raise ValueError(f"{str(place)!r} is damaged: it differs from its checksum")
        parts = {Path(file).stem: read_tensors(path / file)[0] for file in record.pop("files")}
        config = RunConfig.from_dict(record.pop("config"))
    except OSError as error:
        raise ValueError(f"{str(place)!r} is damaged: {error}") from None
    return Checkpoint(path, config, record, parts)


def differing(config: RunConfig, other: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yields the options that change the weights and differ between two runs, with both values."""
    values, others = flatten(dataclasses.asdict(config)), flatten(dataclasses.asdict(other))
    for key, value in values.items():
        if value != others[key] and key not in FREE:
            yield key, value, others[key]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
