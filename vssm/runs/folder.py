"""A run folder: all that one training leaves, written so that no kill or full disk damages what is there.

| file | what |
| --- | --- |
| `config.json` | format, model, data, train, and data_meta, what the sequences are |
| `weights.safetensors` | the best weights on validation: the folder is a model that `vssm.load` reads |
| `meta.json` | commit, versions, machine, seed, times; `ended` says that the run is finished |
| `log.jsonl` | one JSON object a line: a log point ("split": "train") or a validation ("split": "valid") |
| `checkpoint/step-N/` | where to resume: `weights`, `optimizer`, `ema` (.safetensors), `progress.json` |
| `curves.png`, `samples.png` | pictures of the log and of samples |
| `eval.part-*.json` | what an evaluation that was stopped has found, for the same one to go on with |
| `eval.json.old` | what `vssm evaluate` found of weights that better ones have replaced, then or since |

Files are written under a temporary name, flushed to the disk and renamed; a checkpoint is a folder that is
written that way as a whole. `progress.json` has the SHA-256 of its neighbours and of itself, so damage is
seen before anything is loaded, and the config of the run, so that a checkpoint of another is seen too.
Nothing is ever unpickled.
"""

import dataclasses
import hashlib
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vssm.config import RunConfig
from vssm.data import Meta
from vssm.runs.labels import is_number
from vssm.storage import check_checksum, read_object, with_checksum, write_atomically

__all__ = [
    "FREE",
    "Checkpoint",
    "RunFolder",
    "claim",
    "finite",
    "read_config",
    "read_line",
    "read_log",
]

_TERMS = ("loss", "reconstruction", "kl")  # of every line; null where they were not finite
_KEPT = 2  # checkpoints: the newest, and one more should that be damaged
FREE = ("data.dir", "train.device", "train.checkpoint_minutes", "train.samples", "train.compile")
FREE += ("train.graph", "train.fsdp", "train.tensorboard", "train.validate_partial")
"""What may differ on resume, since the weights do not depend on it."""


class Checkpoint(NamedTuple):
    """What a checkpoint holds."""

    path: Path
    progress: dict[str, Any]
    """The step and whatever else `RunFolder.save_checkpoint` was given."""
    parts: dict[str, dict[str, Tensor]]
    """Tensors by the name of their file, "weights", "optimizer" or "ema"."""


class _Damaged(Exception):
    pass


def read_config(folder: str | Path) -> RunConfig:
    """Returns the config of the run in a folder; what is wrong with it is said in one line."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{str(folder)!r} has no config.json; allowed: the folder of a run that was started"
        )
    values = read_object(path)
    values.pop("data_meta", None)
    for key in ("data", "train"):  # defaults in their place would train another model over this one
        if key not in values:
            raise ValueError(
                f"{str(path)!r} has no key {key!r}; allowed: a run folder written by vssm train"
            )
    try:
        return RunConfig.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from None


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of the log of a run; a torn last one, which a kill leaves, is left out."""
    path, kept = Path(folder) / "log.jsonl", []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            kept.append(read_line(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(
                    f"{str(path)!r} line {number} is damaged: {error}; allowed: without that line"
                ) from None
    return kept


def read_line(line: bytes) -> dict[str, Any]:
    """Returns a line of a log; one that lacks what every line has is as damaged as one that is no JSON."""
    try:
        values = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    for name in ("step", "epoch", *_TERMS):
        if not is_number(values.get(name)) and not (
            name in _TERMS and values.get(name, "") is None
        ):
            raise ValueError(f"{name!r} is no number")
    if values.get("partial_elbo") is not None and not is_number(values["partial_elbo"]):
        raise ValueError("'partial_elbo' is no number")
    if values.get("split") not in ("train", "valid"):
        raise ValueError("'split' is neither 'train' nor 'valid'")
    return values


def claim(folder: Path, what: str) -> IO[str] | None:
    """Keeps other processes from a folder until what is returned is closed, or this process ends.

    Arguments:
        folder: A folder that exists; it gets a file `.lock`, which stays.
        what: What the message calls it.

    Returns:
        An open file; None on Windows, where nothing is claimed.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    lock = (folder / ".lock").open("a")
    for wait in (0.01, 0.1, None):  # who asks whether somebody trains holds it for a moment
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if wait is not None:
                time.sleep(wait)
                continue
            lock.close()
            raise ValueError(
                f"{what} {str(folder)!r} is in use by another process; allowed: one at a time"
            ) from None
    return lock


class RunFolder:
    """Reads and writes one run folder.

    Arguments:
        folder: Where it is, or will be.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        self.log_path = self.path / "log.jsonl"
        self.checkpoints = self.path / "checkpoint"
        self._lock: IO[str] | None = None

    def close(self) -> None:
        """Lets another process train in this folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _claim(self) -> None:
        """Keeps other processes from training in this folder until `close`, or the end of this one."""
        self._lock = claim(self.path, "run folder")

    def is_in_training(self) -> bool:
        """Says whether a process trains in this folder now; on Windows nobody can tell."""
        lock = self.path / ".lock"
        if sys.platform == "win32" or not lock.is_file():
            return False
        import fcntl

        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back as the file is closed
            except BlockingIOError:
                return True
        return False

    def check_new(self) -> None:
        """Raises unless the folder does not exist, is empty, or has remains of a killed start."""
        name = str(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"run folder {name!r} is a file; allowed: a new name")
        remains = self.path.iterdir() if self.path.exists() else ()
        if any(not _is_temporary(file) and file.name != ".lock" for file in remains):
            again = f"--resume {shlex.quote(name)}"
            raise ValueError(f"run folder {name!r} is not empty; allowed: {again}, or another name")

    def create(self, config: RunConfig, meta: Meta) -> None:
        """Starts a run in a new folder."""
        self.check_new()  # a folder of others gets no lock
        self.path.mkdir(parents=True, exist_ok=True)
        self._claim()
        self.check_new()  # another process may have trained here until now
        self._tidy()
        self.write_config(config, meta)

    def write_config(self, config: RunConfig, meta: Meta) -> None:
        """Writes config.json."""
        text = json.dumps({**config.to_dict(), "data_meta": meta.to_json()}, indent=2) + "\n"
        write_atomically(self.path / "config.json", lambda path: path.write_text(text))

    def has_ended(self) -> bool:
        """Says whether the training is finished, as far as meta.json can be read."""
        try:
            return json.loads((self.path / "meta.json").read_bytes())["ended"] is not None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False

    def compare(self, config: RunConfig) -> None:
        """Raises unless the run in this folder has the same config in all that matters."""
        for key, given, saved in _differing(config, read_config(self.path)):
            raise ValueError(
                f"{key}={given!r} differs from {saved!r} of the run in {str(self.path)!r}; "
                "allowed: the same, or another run folder"
            )

    def check_same(self, config: RunConfig) -> None:
        """Raises when the folder has a run with other settings, which must not pass for the one asked for.

        Unlike in `compare`, the config may leave open what the data gives (features, head "auto", bins) and
        what a model gives that it starts from (all).
        """
        if not (self.path / "config.json").exists():
            return
        saved = read_config(self.path).model
        head = saved.head if config.model.head == "auto" else config.model.head
        model = dataclasses.replace(
            config.model, features=saved.features, head=head, bins=saved.bins
        )
        model = saved if config.train.init is not None else model
        self.compare(dataclasses.replace(config, model=model))

    def reopen(self, config: RunConfig) -> None:
        """Makes ready to resume the run."""
        self.compare(config)
        self._claim()
        self._tidy()
        if self._is_done() and not self._saved():
            raise ValueError(
                f"{str(self.path)!r} has weights but no checkpoint to go on from, and a new start would "
                "replace them; allowed: a run with its checkpoint folder, or a new run under another name"
            )

    def _is_done(self) -> bool:
        """Whether the weights are all that is left of a training: a copy of them, or a run that ended."""
        if not (self.path / "weights.safetensors").exists():
            return False
        try:
            ended = json.loads((self.path / "meta.json").read_bytes())["ended"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return True  # a run has a whole meta.json before it has weights: it may have ended
        return (
            ended is not None or not self.log_path.exists()
        )  # a run has a log before it has weights

    def _tidy(self) -> None:
        """Removes what a killed training was writing; an evaluation may be at work."""
        for folder in (self.path, self.checkpoints):
            for file in folder.glob(".*"):
                if _is_temporary(file) and not file.name.startswith(".eval"):
                    _remove(file)

    def describe(self, facts: dict[str, Any]) -> None:
        """Writes meta.json."""
        text = json.dumps(facts, indent=2) + "\n"
        write_atomically(self.path / "meta.json", lambda path: path.write_text(text))

    def save_weights(self, tensors: dict[str, Tensor]) -> None:
        """Writes the best weights; what was measured of those before is set aside as "eval.json.old"."""
        self._set_aside()  # first: killed in between, this leaves no result beside weights that it is not of
        metadata = with_checksum(tensors, {})
        write_atomically(
            self.path / "weights.safetensors", lambda path: save_file(tensors, path, metadata)
        )
        self._set_aside()  # what an evaluation of those before has written meanwhile

    def _set_aside(self) -> None:
        for file in (self.path / "eval.json", self.path / "eval_valid.json"):
            with suppress(FileNotFoundError):
                file.replace(file.with_name(f"{file.name}.old"))
            for part in self.path.glob(f"{file.stem}.part-*.json"):  # nobody could go on with it
                part.unlink(missing_ok=True)

    def has_weights(self) -> bool:
        """Whether the best weights are there and whole."""
        path = self.path / "weights.safetensors"
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                check_checksum(str(path), tensors, file.metadata() or {})
        except (OSError, SafetensorError, ValueError):
            return False
        return True

    def log(self, line: dict[str, Any]) -> None:
        """Appends to the log."""
        with self.log_path.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def cut_log(self, step: int, warn: Callable[[str], object]) -> None:
        """Takes out of the log what comes after a step, and lines that are damaged."""
        if not self.log_path.exists():
            return
        kept, lines = [], self.log_path.read_bytes().splitlines()
        for number, line in enumerate(lines, 1):
            try:
                if read_line(line)["step"] <= step:
                    kept.append(line + b"\n")
            except ValueError:
                if number < len(lines):  # a torn last line is what a kill leaves
                    warn(f"{str(self.log_path)!r} line {number} is damaged and was left out")
        write_atomically(self.log_path, lambda path: path.write_bytes(b"".join(kept)))

    def save_checkpoint(
        self,
        config: RunConfig,
        step: int,
        parts: dict[str, dict[str, Tensor]],
        progress: dict[str, Any],
    ) -> Path:
        """Writes a checkpoint, then lets go of all but the two newest.

        Arguments:
            config: The run that it is of.
            step: How many steps were done.
            parts: Tensors by the name of their file.
            progress: What else to remember, ready for JSON.

        Returns:
            The folder of the checkpoint.
        """
        final = self.checkpoints / f"step-{step:08d}"
        temporary = self.checkpoints / f".{final.name}.tmp"
        _remove(temporary)
        temporary.mkdir(parents=True)
        try:
            if self.log_path.exists():
                _flush(self.log_path)
            checksums = {}
            for name, tensors in parts.items():
                file = temporary / f"{name}.safetensors"
                save_file(tensors, file)
                _flush(file)
                checksums[file.name] = _sha256(file)
            record = {**progress, "step": step, "config": config.to_dict(), "files": checksums}
            record["checksum"] = _checksum(record)
            (temporary / "progress.json").write_text(json.dumps(record, indent=2) + "\n")
            _flush(temporary / "progress.json")
            _flush(temporary)
            before = final.with_name(f".{final.name}.old.tmp")
            if final.exists():  # of this step: it goes when the new one has its name
                _remove(before)
                final.rename(before)
            temporary.rename(final)
            _flush(self.checkpoints)
            _remove(before)
        finally:
            _remove(temporary)
        for old in self._saved()[:-_KEPT]:
            self._discard(old)
        return final

    def read_checkpoint(
        self, config: RunConfig, warn: Callable[[str], object]
    ) -> Checkpoint | None:
        """Returns the newest checkpoint that is whole, or None when there never was one.

        A damaged one is named to `warn` and set aside under the name "step-N.damaged". One of another run
        than `config` is refused, and nothing is changed.
        """
        reasons = []
        saved = self._saved()
        for path in reversed(saved):
            try:
                checkpoint = _read(path)
            except _Damaged as error:
                reasons.append(f"{str(path)!r} is damaged ({error})")
                continue
            self._check_origin(checkpoint, config, warn)
            for reason in reasons:
                warn(f"{reason}; going on from {path.name}")
            for newer in saved[saved.index(path) + 1 :]:
                aside = newer.with_name(f"{newer.name}.damaged")
                _remove(aside)
                newer.rename(aside)
            return checkpoint
        if reasons:
            raise ValueError(
                f"no checkpoint is good: {', '.join(reasons)}; allowed: a new run under another name"
            )
        return None

    def _check_origin(
        self, checkpoint: Checkpoint, config: RunConfig, warn: Callable[[str], object]
    ) -> None:
        path, origin = str(checkpoint.path), checkpoint.progress.pop("config", None)
        if origin is None:  # as older versions wrote it
            warn(f"{path!r} does not say which run it is of; it is taken for one of this run")
            return
        try:
            saved = RunConfig.from_dict(origin)
        except ValueError as error:
            raise ValueError(f"{path!r}: {error}") from None
        for key, here, there in _differing(config, saved):
            raise ValueError(
                f"{path!r} is a checkpoint of another run, with {key}={there!r}, here {here!r}; "
                f"allowed: those of this run (move it out of {str(self.path)!r} to go on from the one before)"
            )

    def has_checkpoint(self) -> bool:
        """Whether there is one, whole or not."""
        return bool(self._saved())

    def _saved(self) -> list[Path]:
        """The checkpoints by their final name, oldest first."""
        found = [path for path in self.checkpoints.glob("step-*") if path.name[5:].isdecimal()]
        return sorted(
            found, key=lambda path: int(path.name[5:])
        )  # names have 8 digits, steps may have more

    @staticmethod
    def _discard(checkpoint: Path) -> None:
        """Deletes a checkpoint; killed in between it leaves nothing under the final name."""
        hidden = checkpoint.with_name(f".{checkpoint.name}.old.tmp")
        _remove(hidden)
        checkpoint.rename(hidden)
        _remove(hidden)


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with None for every float that JSON has no number for."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
    }


def _read(path: Path) -> Checkpoint:
    try:
        record = json.loads((path / "progress.json").read_bytes())
        if record.pop("checksum") != _checksum(record) or path.name != f"step-{record['step']:08d}":
            raise _Damaged("progress.json differs from its checksum")
        files = list(record.pop("files").items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _Damaged(f"progress.json: {error}") from None
    parts = {}
    for name, checksum in files:
        try:
            if _sha256(path / name) != checksum:
                raise _Damaged(f"{name} differs from its checksum")
            parts[name.removesuffix(".safetensors")] = load_file(path / name)
        except (OSError, ValueError, SafetensorError) as error:
            raise _Damaged(f"{name}: {error}") from None
    return Checkpoint(path, record, parts)


def _differing(config: RunConfig, other: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Gives the options, with both values, that make two runs of different results."""
    values, others = _flat(dataclasses.asdict(config)), _flat(dataclasses.asdict(other))
    return (
        (key, values[key], others[key])
        for key in values
        if values[key] != others[key] and key not in FREE
    )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".tmp")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Makes a file, or the names in a folder, reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
