"""The command line: a table of commands, each a dataclass of options with a `run` method.

    vssm COMMAND --help          what a command takes

Options come from the typed dataclasses that Python users fill in as well. A mistake of the user gives one
line and exit code 2; anything else is a bug and gives a traceback.
"""

import contextlib
import inspect
import io
import json
import re
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import tyro

from vssm.config import PRESETS, ModelConfig, RunConfig, TrainConfig, check_choice
from vssm.data import DataConfig, SeriesConfig, SyntheticConfig, TextConfig
from vssm.serve.settings import Settings
from vssm.storage import write_atomically

if TYPE_CHECKING:
    import torch

    from vssm.data import Meta
    from vssm.models import Model

__all__ = ["main"]


@dataclass
class _DataOptions:
    name: tyro.conf.Positional[str] = "digits"
    """The data set: digits, mnist, cifar10, text, series or synthetic."""
    data_dir: str | None = None
    """Folder with the files; else $VSSM_DATA; else the user cache."""
    split_seed: int = 0
    """Fixes the validation split, binarisation and synthetic data."""
    binarize: bool = False
    """Black and white images, drawn once."""
    series: SeriesConfig = field(default_factory=SeriesConfig)
    text: TextConfig = field(default_factory=TextConfig)
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)

    def config(self) -> DataConfig:
        return DataConfig(
            name=self.name,
            dir=self.data_dir,
            seed=self.split_seed,
            binarize=self.binarize,
            series=self.series,
            text=self.text,
            synthetic=self.synthetic,
        )


@dataclass
class Data(_DataOptions):
    """Prepares a data set (downloading it if need be) and shows its shape, range, splits and a picture."""

    picture: Path | None = None
    """Where the picture goes; NAME.png by default."""

    def run(self) -> None:
        from vssm.data import describe, open_data, picture

        data = open_data(self.config())
        facts = describe(data)
        rows = {**facts, "files": [f"{f['path']}  sha256 {f['sha256']}" for f in facts["files"]]}
        _table(f"data set {self.name}", rows)
        print(f"picture: {picture(data, self.picture or Path(f'{self.name}.png'))}")


@dataclass
class _RunOptions(_DataOptions):
    preset: str | None = None
    """Start from named settings: paper-mnist or paper-cifar10. Other options still apply on top."""
    smoke: bool = False
    """A run of seconds: a tiny model and a few steps."""
    model: ModelConfig = field(default_factory=lambda: ModelConfig(features=1, head="auto", width=128))
    """The model; its features, and a head of "auto", follow the data."""
    train: TrainConfig = field(default_factory=TrainConfig)

    def run_config(self) -> RunConfig:
        return RunConfig(data=self.config(), model=self.model, train=self.train)

    @classmethod
    def default(cls, arguments: list[str]) -> Self:
        """Returns the defaults that the preset on the command line sets."""
        start = cls()
        preset = _value_of("--preset", arguments)
        if preset is not None:
            check_choice("preset", preset, tuple(PRESETS))
            config = PRESETS[preset]
            start = replace(start, name=config.data.name, model=config.model, train=config.train)
        if "--smoke" in arguments:
            start = replace(start, model=PRESETS["smoke"].model, train=PRESETS["smoke"].train)
        return start


@dataclass
class Train(_RunOptions):
    """Trains a model and keeps everything about it in a run folder."""

    out: Path | None = None
    """The run folder; runs/DATA-KIND by default."""
    resume: Path | None = None
    """Go on with the run in this folder, with its own settings."""

    def run(self) -> None:
        from vssm.train import train

        if self.resume is not None:
            folder = train(None, self.resume, resume=True)
        else:
            folder = train(self.run_config(), self.out or Path("runs") / f"{self.name}-{self.model.kind}")
        print(f"run: {folder}\nnext: vssm generate {folder}   vssm evaluate {folder}   vssm report {folder}")


@dataclass
class Sweep(_RunOptions):
    """Trains over a grid of learning rates, seeds and kinds; what is done already is skipped."""

    out: Path = Path("runs/sweep")
    """The folder for the runs and sweep.json."""
    kinds: tuple[str, ...] = ()
    """The models; only model.kind by default."""
    learning_rates: tuple[float, ...] = (1e-2, 5e-3, 1e-3, 5e-4, 1e-4)
    """The learning rates; the paper's grid by default."""
    seeds: tuple[int, ...] = (0,)
    """The seeds."""
    ray_address: str | None = None
    """Run side by side on a Ray cluster: auto, local, or an address."""

    def run(self) -> None:
        from vssm.sweep import sweep

        rows = sweep(
            self.run_config(),
            self.out,
            self.learning_rates,
            self.seeds,
            self.kinds or None,
            self.ray_address,
        )
        for row in rows:
            loss = "" if row["validation_loss"] is None else f"  validation loss {row['validation_loss']:.3f}"
            print(f"{row['folder']}: {row['status']}{loss}  {row['reason'] or ''}".rstrip())
        print(f"table: {self.out / 'sweep.json'}")
        failed = sum(row["status"] == "failed" for row in rows)
        if failed:
            raise ValueError(f"{failed} of {len(rows)} runs failed, as said above")


@dataclass
class Reproduce:
    """Repeats the paper's experiments, piece by piece: what is done already is skipped."""

    data: tyro.conf.Positional[str]
    """The data set: mnist, cifar10, or digits (small only)."""
    scale: str = "paper"
    """paper, or small: minutes on a CPU."""
    out: Path | None = None
    """The folder for runs and figures; runs/reproduce-DATA by default."""
    results: Path | None = None
    """The folder for results: results/paper by default, OUT/results at the small scale."""
    kinds: tuple[str, ...] = ("transformer", "ssm", "vssm")
    """The models; tvae, rnn and vrnn are there too."""
    learning_rates: tuple[float, ...] | None = None
    """The grid, the paper's by default; a single one is taken as it is."""
    seeds: tuple[int, ...] | None = None
    """The seeds, 0 to 4 by default (0 at the small scale)."""
    epochs: float | None = None
    """Passes over the training set, 200 by default."""
    grid_epochs: float | None = None
    """A shorter training for the grid."""
    minutes: float | None = None
    """Stop at the first checkpoint after so long; the same command goes on."""
    ray_address: str | None = None
    """Run side by side on a Ray cluster: auto, local, or an address."""
    data_dir: str | None = None
    """Folder with the data; else $VSSM_DATA; else the user cache."""

    def run(self) -> None:
        from vssm.reproduce import reproduce

        left = reproduce(**vars(self))
        print(
            f"left: {', '.join(left)}" if left else "all done; vssm report --page makes a page of the results"
        )


@dataclass
class Generate:
    """Generates from a trained model: samples, a picture or text, and the state to resume from."""

    run_folder: tyro.conf.Positional[str]
    """A run folder, a folder written by vssm.save, hf://OWNER/NAME on the hub, or http://SERVER[/MODEL]."""
    num: int | None = None
    """How many sequences; 16, or the rows of the prompt or state."""
    length: int | None = None
    """How many new steps; by default what is left of a sequence as long as the training data's."""
    prompt: str | None = None
    """What comes first: a .npy file (batch, steps, features), or text."""
    chunk: int | None = None
    """Generate so many steps at a time (vssm, tvae)."""
    recondition: bool = False
    """Read each generated chunk before making the next (vssm, tvae)."""
    passes: int = 1
    """Parallel passes over each chunk: 1 is one shot, more come closer to step by step (vssm, tvae)."""
    temperature: float = 1.0
    """Below 1 for safer, above 1 for wilder samples."""
    observe: Literal["mean", "sample"] = "mean"
    """Return the mean of the observation head, or a sample of it."""
    seed: int | None = None
    """Names the sample; 0, or the state's."""
    resume: Path | None = None
    """A state.safetensors to go on from."""
    out: Path = Path("samples.npy")
    """Where the samples go: .npy, .png or .txt."""
    state: Path = Path("state.safetensors")
    """Where the state to resume from goes."""
    device: str = "auto"
    """Where to run: auto, cpu or cuda."""
    token_file: Path | None = None
    """The token that a server asks for."""

    def run(self) -> None:
        if self.run_folder.startswith(("http://", "https://")):
            return self._ask_server()
        return self._compute()

    def _ask_server(self) -> None:
        import numpy as np
        import torch

        from vssm.serve.client import Client
        from vssm.serve.run import read_secret

        if self.out.suffix not in (".npy", ".txt"):
            raise ValueError(f"out={str(self.out)!r} is not allowed; allowed from a server: .npy or .txt")
        if self.passes != 1:
            raise ValueError(f"passes={self.passes} is not allowed; allowed from a server: 1")
        url, _, model = self.run_folder.partition("://")[2].partition("/")
        options = {
            name: getattr(self, name)
            for name in ("num", "length", "chunk", "recondition", "temperature", "observe", "seed")
        }
        options = {name: value for name, value in options.items() if value is not None}
        token = None if self.token_file is None else read_secret(self.token_file, "token_file")
        prompt = self.prompt
        if prompt is not None and prompt.endswith(".npy"):
            prompt = np.load(prompt, allow_pickle=False)
        with Client(f"{self.run_folder.partition('://')[0]}://{url}", token) as client:
            if self.resume is not None:
                answer = client.resume(self.resume.read_text().strip(), **options)
            else:
                num = {"num": 16} if prompt is None else {}
                answer = client.generate(prompt, **{**num, **options, "model": model or None})
        if self.out.suffix == ".npy":
            _write_samples(torch.from_numpy(answer.x), None, None, self.out)
        elif answer.text is None:
            raise ValueError(f"out={str(self.out)!r} is for text; allowed for this model: .npy")
        else:
            given = prompt if isinstance(prompt, str) else ""
            text = "\n---\n".join(given + made for made in answer.text)
            write_atomically(self.out, lambda path: path.write_text(text + "\n"))
        state = self.state.with_suffix(".resume")
        write_atomically(state, lambda path: path.write_text(f"{answer.resume}\n"))
        print(f"samples: {self.out}  {answer.x.shape}\nstate: {state}, after step {answer.position}")

    def _compute(self) -> None:
        import vssm
        from vssm.train import choose_device

        if self.out.suffix not in (".npy", ".png", ".txt"):
            raise ValueError(f"out={str(self.out)!r} is not allowed; allowed: a name in .npy, .png or .txt")
        device = choose_device(self.device)
        folder = _local(self.run_folder)
        model, meta = vssm.load(folder, device), _meta(folder)
        state = None if self.resume is None else vssm.State.load(self.resume, device)
        prompt = None if self.prompt is None else _read_prompt(self.prompt, model, meta).to(device)
        known = 0 if prompt is None else prompt.shape[1]
        length = self.length
        if length is None:
            length = max(1, meta.length - known) if meta is not None and state is None else 28
        num = 16 if self.num is None and prompt is None and state is None else self.num
        out = vssm.generate(
            model,
            num=num,
            length=length,
            prompt=prompt,
            chunk=self.chunk,
            recondition=self.recondition,
            passes=self.passes,
            temperature=self.temperature,
            observe=self.observe,
            seed=self.seed,
            state=state,
        )
        x = out.x.cpu()
        _write_samples(x, None if prompt is None else prompt.cpu(), meta, self.out)
        out.state.save(self.state)
        print(f"samples: {self.out}  {tuple(x.shape)}\nstate: {self.state}, after step {out.state.position}")


@dataclass
class Evaluate:
    """Measures a run on the test set: likelihoods, sample quality, generation times."""

    run_folder: tyro.conf.Positional[Path]
    """A run folder, or the name of a shipped model, which is copied to runs/NAME."""
    num_samples: int = 100
    """K, the latent draws of each likelihood estimate."""
    max_sequences: int | None = None
    """Use only so many test sequences, spread evenly over the set."""
    num_images: int = 10_000
    """Generated images for each Fréchet distance."""
    dials: bool = False
    """Measure quality against time as well, over chunk sizes and passes (vssm, tvae)."""
    splits: str = "test"
    """What to measure on: test, or valid while the test set stays closed."""
    quick: bool = False
    """Take at most 64 sequences, 10 draws and 256 images."""
    batch: int | None = None
    """Sequences of a pass; what suits the device by default."""
    result: Path | None = None
    """Keep the result, with how the training went, in this file too: results/quality/DATA_NAME.json."""
    device: str = "auto"
    """Where to run: auto, cpu or cuda."""

    def run(self) -> None:
        from vssm.evaluate import evaluate_run
        from vssm.run_result import check_result_path, keep_result

        if self.result is not None:
            check_result_path(self.result)
            if self.splits != "test":
                raise ValueError(f"splits={self.splits!r} is not allowed with result; allowed: 'test'")
        folder = _own_copy(self.run_folder)
        with _Bar() as bar:
            result = evaluate_run(
                folder,
                num_samples=self.num_samples,
                max_sequences=self.max_sequences,
                num_images=self.num_images,
                dials=self.dials,
                splits=self.splits,
                quick=self.quick,
                batch=self.batch,
                device=self.device,
                progress=bar.show,
            )
        _table(f"{folder}: {self.splits} set", result["metrics"])
        print(f"written: {folder / ('eval.json' if self.splits == 'test' else 'eval_valid.json')}")
        if self.result is not None:
            keep_result(folder, self.result, self.device)
            print(f"kept: {self.result}")


@dataclass
class Forecast:
    """Forecasts what comes after a table file: quantiles as CSV or Parquet, and a fan chart."""

    run_folder: tyro.conf.Positional[Path]
    """A run folder of data set series."""
    path: Path
    """The history: a CSV, .npy or Parquet file with the columns of the run."""
    horizon: int | None = None
    """Steps to forecast; those of training by default, more is extrapolation."""
    samples: int = 500
    """Sample paths to draw."""
    quantiles: tuple[float, ...] = (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)
    """The quantiles to write."""
    chunk: int | None = None
    """Generate so many steps at a time (vssm, tvae)."""
    recondition: bool = False
    """Read each generated chunk before making the next (vssm, tvae)."""
    seed: int = 0
    """Names the paths."""
    temperature: float = 1.0
    """Above 1 for wider intervals."""
    out: Path = Path("forecast.csv")
    """Where the quantiles go: .csv or .parquet; the fan chart goes beside them."""
    device: str = "auto"
    """Where to run: auto, cpu or cuda."""

    def run(self) -> None:
        import warnings

        from vssm.forecast import Forecaster
        from vssm.forecast_files import draw_fan, forecast_file, write_quantiles
        from vssm.train import choose_device

        forecaster = Forecaster.load(self.run_folder, choose_device(self.device))
        options: dict[str, Any] = {"chunk": self.chunk} if self.chunk is not None else {}
        if self.recondition:
            options["recondition"] = True
        if self.temperature != 1:
            options["temperature"] = self.temperature
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            made, history = forecast_file(
                forecaster, self.path, self.horizon, self.samples, self.seed, **options
            )
        for note in notes:
            print(f"note: {note.message}", file=sys.stderr)
        write_quantiles(made, self.out, self.quantiles)
        picture = self.out.with_suffix(".png")
        draw_fan(made, history, picture, forecaster.meta.context or 96)
        steps = made.mean.shape[0]
        print(f"forecast: {self.out}  {steps} steps of {len(made.columns)} columns\nfan chart: {picture}")


@dataclass
class Report:
    """Makes one self-contained HTML page from run folders and results."""

    run_folders: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders to compare."""
    results: Path | None = None
    """A folder of result files."""
    out: Path = Path("report.html")
    """Where the page goes."""
    page: Path | None = None
    """Write the results page instead, as Markdown with figures beside it: docs/results.md."""

    def run(self) -> None:
        from vssm.report import report
        from vssm.results_page import write_page

        if self.page is not None:
            print(f"page: {write_page(self.results or Path('results'), self.page)}")
            return
        print(f"report: {report(self.run_folders, self.results, self.out)}")


@dataclass
class Serve:
    """Serves models over HTTP, with a page to play with at /; the shipped ones by default."""

    models: tyro.conf.Positional[tuple[str, ...]] = ()
    """Run folders, names of shipped models or hf://OWNER/NAME, each optionally after NAME=."""
    host: str = "127.0.0.1"
    """The address to listen on; one that others can reach needs --token-file or --insecure."""
    port: int = 8000
    """The port; 0 for any that is free."""
    token_file: Path | None = None
    """A file with the token that clients must send."""
    insecure: bool = False
    """Serve on an address that others can reach without a token."""
    key_file: Path | None = None
    """A file with the secret that seals states which clients keep; by default they end with the process."""
    device: str = "auto"
    """Where to run: auto, cpu or cuda."""
    ray: bool = False
    """Serve on a Ray cluster."""
    replicas: int = 1
    """Processes that compute, at least (with --ray)."""
    max_replicas: int | None = None
    """Processes that compute, at most, as load asks for (with --ray)."""
    limits: Settings = field(default_factory=Settings)

    def run(self) -> None:
        from vssm.serve.run import read_secret, serve
        from vssm.train import choose_device

        token = None if self.token_file is None else read_secret(self.token_file, "token_file")
        key = None if self.key_file is None else read_secret(self.key_file, "key_file").encode()
        device = str(choose_device(self.device))
        options = (self.host, self.port, self.limits, token, key, self.insecure, device)
        if self.ray:
            from vssm.serve.cluster import serve_on_ray

            serve_on_ray(self.models, *options, replicas=self.replicas, max_replicas=self.max_replicas)
        else:
            serve(self.models, *options)


@dataclass
class Push:
    """Uploads a model, its config and a model card to the Hugging Face hub."""

    run_folder: tyro.conf.Positional[Path]
    """A run folder, or a folder written by vssm.save."""
    repo: tyro.conf.Positional[str]
    """OWNER/NAME."""
    private: bool = False
    """Whether only you can see it."""

    def run(self) -> None:
        from vssm.hub import push

        print(f"pushed: {push(self.run_folder, self.repo, private=self.private)}")


@dataclass
class Pull:
    """Downloads a model from the Hugging Face hub and says where it is."""

    repo: tyro.conf.Positional[str]
    """OWNER/NAME, or OWNER/NAME@REVISION."""

    def run(self) -> None:
        from vssm.hub import pull

        print(f"pulled: {pull(self.repo)}")


@dataclass
class Bench:
    """Times the selective scan, training, generation or the paper's Table 1, beside installed peers."""

    what: tyro.conf.Positional[Literal["scan", "train", "generate", "table1"]]
    """What to time."""
    out: Path | None = None
    """Where the JSON goes, for example results/scan_cpu.json; a run that was stopped goes on from it."""
    plot: Path | None = None
    """Where a picture goes, .png or .svg."""
    restart: bool = False
    """Forget what the file holds."""
    device: str = "auto"
    """Where to run: auto, cpu or cuda."""
    peers: bool = True
    """Time the peers that are installed (not table1)."""
    check: bool = False
    """Measure errors against float64 too (scan on CUDA)."""
    shapes: tuple[str, ...] = ()
    """Problems as BxT or BxTxDxN (scan)."""
    kinds: tuple[str, ...] = ()
    """The models (train, generate, table1); all by default."""
    batch: int | None = None
    """Sequences in a pass (train, table1)."""
    steps: int | None = None
    """Steps that are timed (train)."""
    batches: tuple[int, ...] = ()
    """Numbers of sequences (generate)."""
    lengths: tuple[int, ...] = ()
    """Numbers of steps in a sequence (generate, table1)."""
    width: int | None = None
    """Width of the models (train, generate, table1)."""
    layers: int | None = None
    """Depth of every stack (train, generate, table1)."""
    repeats: int | None = None
    """How often each call is timed (scan, generate, table1)."""
    seconds_per_point: float | None = None
    """What all calls for one number may take (generate, table1)."""

    def run(self) -> None:
        from vssm import bench

        functions = {
            "scan": bench.main_scan,
            "train": bench.main_train,
            "generate": bench.main_generate,
            "table1": bench.main_table1,
        }
        function = functions[self.what]
        defaults, allowed = Bench(self.what), inspect.signature(function).parameters
        names = [option.name for option in fields(self) if option.name != "what"]
        given = {
            name: getattr(self, name) for name in names if getattr(self, name) != getattr(defaults, name)
        }
        for name, value in given.items():
            if name not in allowed:
                raise ValueError(
                    f"{name}={value!r} does not go with bench {self.what}; allowed: {', '.join(allowed)}"
                )
        function(**given)


@dataclass
class Demo:
    """Trains three small models on digits, generates in every way, races them, and writes a report."""

    out: Path = Path("demo")
    """The folder for runs, pictures and the report; it is made anew."""

    def run(self) -> None:
        from vssm.demo import demo

        demo(self.out)


COMMANDS: dict[str, type] = {
    "demo": Demo,
    "data": Data,
    "train": Train,
    "generate": Generate,
    "evaluate": Evaluate,
    "forecast": Forecast,
    "report": Report,
    "sweep": Sweep,
    "reproduce": Reproduce,
    "push": Push,
    "pull": Pull,
    "serve": Serve,
    "bench": Bench,
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command that the arguments name."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return
    if arguments[0] in ("-V", "--version"):
        import vssm

        print(vssm.__version__)
        return
    name, rest = arguments[0], arguments[1:]
    try:
        check_choice("command", name, tuple(COMMANDS))
        _parse(name, rest).run()
    except ValueError as error:
        _fail(str(error))
    except BrokenPipeError:  # the reader of our output has seen enough
        raise SystemExit(1) from None
    except OSError as error:
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    except KeyboardInterrupt:
        _fail("stopped by the user", 130)


def _parse(name: str, arguments: list[str]) -> Any:  # noqa: ANN401
    """Returns the command with its options; what tyro would say in a box becomes one line."""
    command = COMMANDS[name]
    default = command.default(arguments) if hasattr(command, "default") else tyro.MISSING_NONPROP
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(command, prog=f"vssm {name}", args=arguments, default=default)
    except SystemExit as stop:
        text = errors.getvalue()
        if stop.code == 0 or not text.strip():
            raise
    # Rules part the box into message, advice and a pointer to the help; without Unicode a title comes first.
    parts = [
        " ".join(part.split()) for part in re.split(r"[^\n]*(?:───|---)[^\n]*\n", text.replace("│", " "))
    ]
    message, *rest = [part for part in parts if part][0 if "╭" in text else 1 :]
    nearest = re.search(r"--[\w.-]+", rest[0]) if rest and "Perhaps you meant" in rest[0] else None
    hint = f" (did you mean {nearest[0]}?)" if nearest else f"; see vssm {name} --help"
    raise ValueError(message.removesuffix(".") + hint)


def _fail(message: str, code: int = 2) -> None:
    print(f"vssm: {message}", file=sys.stderr)
    raise SystemExit(code)


def _help() -> str:
    lines = [f"  {name:<10}{(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    head, tail = ["usage: vssm COMMAND [options]", ""], ["", "vssm COMMAND --help says what it takes."]
    return "\n".join(head + lines + tail)


def _value_of(flag: str, arguments: list[str]) -> str | None:
    for i, argument in enumerate(arguments):
        if argument == flag and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}=")
    return None


def _local(folder: str) -> Path:
    """Returns a folder on this machine: as given, of a shipped model, or fetched from the hub."""
    from vssm.hub import pull
    from vssm.pretrained import find

    return pull(folder) if folder.startswith("hf://") else find(folder)


def _own_copy(folder: Path) -> Path:
    """Returns a folder that may be written to: that of a shipped model is copied first."""
    from vssm.pretrained import find

    shipped = find(str(folder))
    if shipped == folder:
        return folder
    import shutil

    shutil.copytree(shipped, Path("runs") / folder.name, dirs_exist_ok=True)
    return Path("runs") / folder.name


def _meta(folder: Path) -> "Meta | None":
    """Returns what a run folder says of its data; an exported model may say nothing."""
    from vssm.data import Meta

    values = json.loads((folder / "config.json").read_text())
    return Meta.from_json(values["data_meta"]) if "data_meta" in values else None


def _read_prompt(prompt: str, model: "Model", meta: "Meta | None") -> "torch.Tensor":
    import numpy as np
    import torch

    if not prompt.endswith(".npy"):
        if meta is None or not model.head.tokens:
            raise ValueError(f"prompt={prompt!r} is not allowed; allowed for this model: a .npy file")
        return meta.encode(prompt)[None]
    try:
        array = np.load(prompt, allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"prompt={prompt!r} is damaged: {error}") from None
    tensor = torch.from_numpy(array)
    return tensor.long() if model.head.tokens else tensor.float()


def _write_samples(x: "torch.Tensor", prompt: "torch.Tensor | None", meta: "Meta | None", out: Path) -> None:
    import numpy as np
    import torch

    from vssm.data import draw
    from vssm.storage import write_atomically

    if out.suffix == ".npy":
        array = x.numpy()

        def save(path: Path) -> None:
            with path.open("wb") as file:
                np.save(file, array, allow_pickle=False)

        write_atomically(out, save)
        return
    if meta is None:
        raise ValueError(f"out={str(out)!r} needs a run folder that knows its data; allowed here: .npy")
    whole = x if prompt is None else torch.cat([prompt.expand(len(x), *prompt.shape[1:]), x], 1)
    if out.suffix == ".png":
        write_atomically(out, lambda path: draw(meta, whole, path))
        return
    if whole.ndim != 2:
        raise ValueError(f"out={str(out)!r} is for text; allowed for data set {meta.name!r}: .npy, .png")
    text = "\n---\n".join(meta.decode(tokens) for tokens in whole)
    write_atomically(out, lambda path: path.write_text(text + "\n"))
    print(text)


def _table(title: str, values: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in values.items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    Console().print(table)


class _Bar:
    """A progress bar of named stages; plain lines when the output is no terminal."""

    def __enter__(self) -> "_Bar":
        from rich.console import Console
        from rich.progress import Progress

        self._console = Console(stderr=True)
        self._progress = Progress(console=self._console, transient=True)
        self._tasks: dict[str, Any] = {}
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def show(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
            if not self._console.is_terminal:
                print(f"{stage} ...", file=sys.stderr, flush=True)
        self._progress.update(self._tasks[stage], completed=done)
