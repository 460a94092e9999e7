"""The command line: the whole way on a tiny run, and one line for every mistake."""

import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import vssm
from vssm.cli import COMMANDS, main, parse
from vssm.cli.errors import box_as_line, report_mistakes
from vssm.cli.evaluate import own_copy
from vssm.cli.options import RunOptions
from vssm.cli.samples import write_array
from vssm.config import PRESETS
from vssm.training.progress import Progress


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "smoke"
    main(["train", "digits", "--smoke", "--out", str(folder)])
    return str(folder)


def fails(capsys, *arguments):
    """Runs a command that must fail, and returns its one line."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("vssm: ")
    assert error.count("\n") == 1, "one line"
    return error


def test_a_run_that_starts_from_another_has_its_model(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    steps = ["--train.max-steps", "2", "--train.samples", "0", "--train.device", "cpu"]
    main(["train", "digits", "--smoke", "--model.width", "24", *steps, "--out", str(first)])
    main(["train", "digits", "--smoke", "--train.init", str(first), *steps, "--out", str(second)])
    assert vssm.load(second).config == vssm.load(first).config
    capsys.readouterr()
    options = ["--train.init", str(tmp_path / "no"), "--out", str(tmp_path / "third")]
    message = f"'{tmp_path / 'no'}' does not exist; use a run folder"
    assert message in fails(capsys, "train", "digits", *options)
    assert not (tmp_path / "third").exists()


def test_help_lists_every_command(capsys):
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80, "it fits a screen"
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    example, _, usage, *_, text = capsys.readouterr().out.split("\n", 3)
    assert example.startswith(f"example: vssm {command} ")
    assert usage.startswith(f"usage: vssm {command} ")
    if command != "bench":  # which has a text for each of its three
        assert COMMANDS[command].summary in text, "the same words as in vssm --help"


@pytest.mark.parametrize("part", ["scan", "train", "generate"])
def test_every_benchmark_has_its_own_example(part, capsys):
    with pytest.raises(SystemExit):
        main(["bench", part, "--help"])
    assert capsys.readouterr().out.startswith(f"example: vssm bench {part} ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_is_a_valid_command(command):
    for example in (COMMANDS[command].example, *COMMANDS[command].parts):
        assert callable(parse(command, example.split()))


def test_a_missing_extra_is_named_with_how_to_install_it(monkeypatch, capsys):
    for module in [name for name in sys.modules if name.startswith("vssm.serve.run")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    message = "vssm: serving needs uvicorn; install it with: pip install 'vssm[serve]'\n"
    assert fails(capsys, "serve", "--port", "0") == message


def test_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out.strip() == vssm.__version__


@pytest.mark.filterwarnings("default:'old/config.json'")
def test_warnings_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder, sigma in (("old", 0.1), ("new", 0.5)):
        config = vssm.ModelConfig(kind="ssm", features=3, width=8, layers=1, sigma=sigma)
        vssm.save(vssm.build(config), folder)
    shutil.copy("new/weights.safetensors", "old")  # as a save that was killed leaves it
    main(["generate", "old", "--num", "2", "--length", "3", "--device", "cpu"])
    notes = capsys.readouterr().err
    assert notes.startswith("note: 'old/config.json' describes another model")
    assert notes.count("\n") == 1


def test_generate_writes_samples_and_a_state_that_resumes(run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["generate", run_folder, "--num", "3", "--length", "8", "--seed", "4"])
    whole = np.load("samples.npy", allow_pickle=False)
    assert whole.shape == (3, 8, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["samples.npy"], (
        "a state is kept when asked for"
    )
    half = [
        "--num",
        "3",
        "--length",
        "5",
        "--seed",
        "4",
        "--out",
        "a.npy",
        "--state",
        "half.safetensors",
    ]
    main(["generate", run_folder, *half])
    main(
        ["generate", run_folder, "--resume", "half.safetensors", "--length", "3", "--out", "b.npy"]
    )
    joined = np.concatenate([np.load("a.npy"), np.load("b.npy")], 1)
    np.testing.assert_allclose(joined, whole, atol=1e-5)
    np.save("prompt.npy", whole[:, :4])
    main(
        [
            "generate",
            run_folder,
            "--prompt",
            "prompt.npy",
            "--out",
            "c.npy",
            "--chunk",
            "2",
            "--recondition",
        ]
    )
    assert np.load("c.npy").shape == (3, 4, 8), "what is left of a sequence"
    main(["generate", run_folder, "--out", "grid.png"])
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_left_of_a_sequence_after_a_state(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["generate", run_folder, "--num", "2", "--length", "5", "--state", "s"])
    main(["generate", run_folder, "--resume", "s", "--out", "rest.npy", "--state", "s"])
    assert np.load("rest.npy").shape == (2, 3, 8)
    np.save("nine.npy", np.zeros((1, 9, 8), np.float32))
    for options, known in ((["--resume", "s"], 8), (["--prompt", "nine.npy"], 9)):
        message = fails(capsys, "generate", run_folder, *options, "--out", "none.npy")
        assert f"{known} steps are known, and training sequences have 8; give --length" in message
        assert not Path("none.npy").exists()
        main(["generate", run_folder, *options, "--out", "more.npy", "--length", "2"])
        assert np.load("more.npy").shape[1] == 2


def test_text_from_train_to_prompt(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "poem.txt").write_text("the cat sat on the mat. " * 400)
    options = ["--smoke", "--text.path", "poem.txt", "--text.length", "32", "--out", "run"]
    main(["train", "text", *options])
    main(["generate", "run", "--prompt", "the c", "--length", "12", "--out", "t.txt"])
    lines = (tmp_path / "t.txt").read_text()
    assert lines.startswith("the c")
    assert len(lines.rstrip("\n")) >= 12
    capsys.readouterr()
    main(["generate", "run", "--prompt", "the c", "--num", "1"])
    shown = capsys.readouterr().out
    assert shown.startswith("the c") and "samples: samples.txt" in shown, "text is shown as text"
    assert (tmp_path / "samples.txt").read_text().startswith("the c")
    assert "outside the vocabulary" in fails(
        capsys, "generate", "run", "--prompt", "QUIZ", "--out", "t.txt"
    )
    assert "allowed: a .npy file" not in (tmp_path / "t.txt").read_text()


def test_units_in_the_names_of_columns_are_shown(tmp_path, capsys):
    lines = ["wind [m/s],rain [/h]", *(f"{i},{i % 7}" for i in range(60))]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    options = [
        "--series.path",
        str(tmp_path / "a.csv"),
        "--series.context",
        "4",
        "--series.horizon",
        "2",
    ]
    main(["data", "series", *options, "--out", str(tmp_path / "a.png")])
    shown = capsys.readouterr().out
    assert "wind [m/s]" in shown and "rain [/h]" in shown


def test_samples_that_find_no_room_are_refused(tmp_path):
    """Also where the disk ends within the last bytes, which NumPy alone would not notice."""
    out = tmp_path / "a.npy"
    out.write_bytes(b"before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(OSError, match="File too large"):
            write_array(np.zeros((64, 1, 8), np.float32), out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert out.read_bytes() == b"before"
    write_array(np.arange(6.0).reshape(2, 3).T, out)
    assert np.array_equal(np.load(out), np.arange(6.0).reshape(2, 3).T)


def test_a_training_that_nobody_reads_any_more_ends_quietly(tmp_path, monkeypatch, capsys):
    class Gone(Progress):
        def line(self, line):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("vssm.training.loop.choose_progress", Gone)
    arguments = ["train", "digits", "--smoke", "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 1 and not capsys.readouterr().err


def test_a_reader_of_the_help_who_has_seen_enough(tmp_path):
    command = f"{sys.executable} -m vssm --help"
    done = subprocess.run(
        ["sh", "-c", f"(sleep 0.2; {command}) | true"], capture_output=True, text=True
    )
    assert not done.stderr


def test_series_start_from_a_small_model():
    own, general = PRESETS["series"], RunOptions()
    chosen = RunOptions.default(["series", "--series.path", "x.csv"])
    assert (chosen.name, chosen.model, chosen.train) == ("series", own.model, own.train)
    for arguments, model in (
        (["digits"], general.model),
        (["series", "--preset", "best"], PRESETS["best"].model),
        (["series", "--smoke"], PRESETS["smoke"].model),
        (["digits", "--out", "series"], general.model),
    ):
        assert RunOptions.default(arguments).model == model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trane"], "command='trane' is unknown; choose from .*did you mean 'train'"),
        (["train", "mnits"], "data set='mnits' is unknown; choose from"),
        (["train", "digits", "--model.kind", "vsm"], "invalid choice 'vsm' .*'vssm'"),
        (
            ["train", "digits", "--preset", "paper"],
            "preset='paper' is unknown; choose from 'paper-mnist'",
        ),
        (["train", "series", "--smoke"], "series"),
        (["train", "--resume", "nowhere"], "'nowhere' does not exist; use a run folder"),
        (["train", "--resume", __file__], "test_cli.py' is a file, not a folder; use a run folder"),
        (["generate", __file__], "test_cli.py' is a file, not a folder; use a run folder"),
        (["generate", ""], "the name of a run folder is empty; give a run folder or"),
        (["train", "digits", "--train.batch", "0"], "batch is 0; it must be"),
        (
            ["train", "digits", "--smoke", "--train.seed", str(2**63)],
            "seed is 9223372036854775808; it must be",
        ),
        (
            ["train", "digits", "--train.batch", "5000", "--smoke"],
            "batch=5000 is more than the 1294 sequences",
        ),
        (["generate", "nowhere"], "'nowhere' does not exist; use a run folder"),
        (["evaluate", "nowhere"], "'nowhere' does not exist"),
        (["forecast", "nowhere", "--path", "x.csv"], "'nowhere' does not exist"),
        (
            ["train", "series", "--series.path", "x.csv"],
            "found no x.csv in the place given, nor as .*; give its path",
        ),
        (
            ["generate", "nowhere", "--device", "gpu"],
            "device='gpu' is not available here; choose from 'auto', 'cpu'",
        ),
        (
            ["generate", "nowhere", "--device", "cuda:99"],
            "device='cuda:99' is not available here; choose from 'auto', 'cpu'",
        ),
        (["generate"], "run"),
        (["bench", "nothing"], "nothing"),
    ],
)
def test_mistakes_give_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert re.search(message, fails(capsys, *arguments))
    assert not any(tmp_path.rglob("weights.safetensors")), "nothing is left behind"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("num=0 is not allowed"), 2, "vssm: num=0 is not allowed\n"),
        (
            FileNotFoundError(2, "No such file", "x.csv"),
            2,
            "vssm: No such file: x.csv; give another file or folder\n",
        ),
        (OSError("the disk is full"), 2, "vssm: the disk is full\n"),
        (MemoryError(), 2, "vssm: out of memory; ask for less at once\n"),
        (
            RuntimeError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has\na total of 1 GiB"
            ),
            2,
            "vssm: out of memory (tried to allocate 2.00 gib); ask for less at once\n",
        ),
        (
            RuntimeError("Storage size calculation overflowed with sizes=[9000000000000000000, 8]"),
            2,
            "vssm: out of memory; ask for less at once\n",
        ),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
        (KeyboardInterrupt(), 130, "vssm: stopped by the user\n"),
    ],
)
def test_each_mistake_has_its_line_and_exit_code(error, code, line, capsys):
    with pytest.raises(SystemExit) as stop, report_mistakes():
        raise error
    assert stop.value.code == code
    assert capsys.readouterr().err == line


def test_a_stopped_training_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def stop(config, folder, resume=False):
        (folder / "config.json").parent.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("vssm.cli.train.train", stop)
    folder = tmp_path / "my run"
    for arguments in (["digits", "--out", str(folder)], ["--resume", str(folder)]):
        with pytest.raises(SystemExit) as ended:
            main(["train", *arguments])
        assert ended.value.code == 130
        said = capsys.readouterr().err
        assert said == (
            f"to go on from the last checkpoint: vssm train --resume '{folder}'\n"
            "vssm: stopped by the user\n"
        )
    (folder / "meta.json").write_text('{"ended": "2026-01-02"}')  # stopped at its last step
    with pytest.raises(SystemExit):
        main(["train", "--resume", str(folder)])
    assert capsys.readouterr().err == "vssm: stopped by the user\n"


def test_commands_that_are_printed_can_be_pasted(run_folder, tmp_path, monkeypatch, capsys):
    def copy(config, folder, resume=False):
        shutil.copytree(run_folder, folder)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vssm.cli.train.train", copy)
    main(["train", "digits", "--out", "my run"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "run: my run"
    commands = [
        shlex.split(f"vssm {part}")
        for part in said[1].removeprefix("next: vssm ").split("   vssm ")
    ]
    assert commands == [["vssm", name, "my run"] for name in ("generate", "evaluate", "report")]
    assert "use --resume 'my run', or" in fails(capsys, "train", "digits", "--out", "my run")


def test_a_bug_keeps_its_traceback():
    for bug in (KeyError("ours"), RuntimeError("shapes differ")):
        with pytest.raises(type(bug)), report_mistakes():
            raise bug


def test_sigterm_is_said_and_leaves_no_half_written_file(tmp_path):
    code = (
        "import sys, time\n"
        "from vssm import cli\nfrom vssm.data.storage import write_atomically\n"
        "def slow(path):\n    path.write_text('half')\n    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
        "def write():\n    write_atomically(sys.argv[1], slow)\n"
        "cli.COMMANDS['write'] = cli.Command('__main__:write', '', '')\ncli.main(['write'])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "writing\n"
        process.terminate()
        assert process.stderr.read() == "vssm: stopped by SIGTERM\n"
    assert process.returncode == 143
    assert not list(tmp_path.iterdir())


# An import that waits, and goes on when it fails, as some of NumPy's do.
SLOW = """
import time
try:
    print("waiting", flush=True)
    time.sleep(60)
except BaseException:
    pass
"""


def interrupted(command, slow, folder):
    """Sends Ctrl-C to a command that imports a module; returns its exit status and lines."""
    (folder / f"{slow}.py").write_text(SLOW)
    root = Path(__file__).parents[2]
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # in the background it is ignored
    try:
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{root}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        return process.wait(timeout=60), process.communicate()[1].splitlines()


@pytest.mark.parametrize("slow", ["torch", "tyro"])
@pytest.mark.parametrize("way", ["module", "one word", "script"])
def test_ctrl_c_during_imports_is_one_line(way, slow, tmp_path):
    command = ["-mvssm"] if way == "one word" else ["-m", "vssm"]
    if way == "script":
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())[
            "project"
        ]
        module, function = project["scripts"]["vssm"].split(":")
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "vssm").write_text(f"from {module} import {function}\n{function}()\n")
        command = [str(tmp_path / "bin" / "vssm")]
    assert interrupted([*command, "train"], slow, tmp_path) == (130, ["vssm: stopped by the user"])


def test_ctrl_c_during_imports_of_other_programs_is_theirs(tmp_path):
    code = "try:\n    import vssm.models\nexcept ImportError:\n    raise SystemExit(7)"
    # The import of torch was interrupted and left an empty module.
    assert interrupted(["-c", code], "torch", tmp_path) == (7, [])


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, "3000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "None"),
    ],
)
def test_threads_of_commands_sleep_soon(settings, wanted, tmp_path):
    """OpenMP reads the variable when PyTorch is imported, so it must be set before."""
    (tmp_path / "torch.py").write_text(
        "import os\nprint(os.environ.get('GOMP_SPINCOUNT'), flush=True)\nos._exit(0)"
    )
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    bare = {key: value for key, value in os.environ.items() if key not in names}
    path = f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"
    done = subprocess.run(
        [sys.executable, "-m", "vssm", "--version"],
        env=bare | settings | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{wanted}\n"


def test_seeds_of_samples_are_those_of_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    message = fails(capsys, "generate", "mnist-small", "--seed", str(2**63))
    assert f"seed is {2**63}; it must be a 64-bit whole number" in message
    message = fails(capsys, "train", "digits", "--smoke", "--train.seed", "-1")
    assert f"seed is -1; it must be a whole number >= 0 and < {2**63}" in message
    assert not list(tmp_path.iterdir())


def test_features_that_do_not_count_are_noted():
    for words in (["--model.features", "5"], ["--model.features=5"]):
        with pytest.warns(UserWarning, match="^--model.features is ignored: it follows the data$"):
            RunOptions.default(["digits", *words])


def test_folders_below_a_file_are_refused_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").touch()
    lost = ["train", "series", "--series.path", "lost.csv", "--out"]
    for command, out in ((lost, "notes.txt/x"), (["demo", "--out"], "notes.txt")):
        message = f"vssm: out='{out}' is a file or lies below one; use a folder, or a new name\n"
        assert fails(capsys, *command, out) == message


def test_data_without_a_picture_say_nothing_else(monkeypatch, capsys):
    def refuse(data, out):
        raise FileNotFoundError(2, "No such file or directory", str(out))

    monkeypatch.setattr("vssm.cli.data.picture", refuse)
    with pytest.raises(SystemExit):
        main(["data", "digits", "--out", "/proc/x.png"])
    shown = capsys.readouterr()
    line = "vssm: No such file or directory: /proc/x.png; give another file or folder\n"
    assert (shown.out, shown.err) == ("", line)


def test_unknown_flag_suggests_the_nearest(capsys):
    message = fails(capsys, "train", "digits", "--model.knd", "vssm")
    assert "--model.knd" in message
    assert "did you mean --model.kind?" in message


def test_bad_generate_options(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "chunk is 0" in fails(capsys, "generate", run_folder, "--chunk", "0")
    assert "num is 0" in fails(capsys, "generate", run_folder, "--num", "0")
    for length in ("0", "-2"):
        message = fails(capsys, "generate", run_folder, "--length", length)
        assert f"length is {length}; it must be a whole number >= 1" in message
    assert "use .npy, .png or .txt" in fails(capsys, "generate", run_folder, "--out", "x.jpg")
    assert "give this model a .npy file" in fails(
        capsys, "generate", run_folder, "--prompt", "words"
    )
    (tmp_path / "bad.npy").write_bytes(b"\x80\x04\x95pickle")
    assert "bad.npy' is damaged" in fails(capsys, "generate", run_folder, "--prompt", "bad.npy")
    np.save("objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "objects.npy' is damaged" in fails(
        capsys, "generate", run_folder, "--prompt", "objects.npy"
    )
    np.save("flat.npy", np.zeros(8))
    assert "prompt has shape (8,)" in fails(capsys, "generate", run_folder, "--prompt", "flat.npy")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    message = fails(capsys, "generate", run_folder, "--resume", "bad.safetensors")
    assert message.endswith("; give a whole file that a state was saved to\n")
    resumed = fails(capsys, "generate", run_folder, "--resume", str(tmp_path))
    assert "is not a file; give a state that was saved" in resumed
    np.save("infinite.npy", np.full((1, 4, 8), np.inf, np.float32))
    message = fails(capsys, "generate", run_folder, "--prompt", "infinite.npy")
    assert "prompt contains NaN or infinite values at row 0, step 0" in message
    message = fails(capsys, "generate", "mnist-any-small", "--num", "0")
    assert "num is 0; it must be a whole number >= 1" in message
    assert "text" in fails(capsys, "generate", run_folder, "--out", "x.txt")


def test_weights_that_are_no_numbers_generate_nothing(capsys, run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = vssm.load(run_folder)
    name, parameter = list(model.named_parameters())[-1]
    torch.nn.init.constant_(parameter, torch.nan)
    vssm.save(model, "model")
    message = f"tensor {name!r} holds NaN or infinity; train the model again"
    assert message in fails(capsys, "generate", "model", "--length", "3")
    assert not list(tmp_path.glob("samples*"))


def test_a_wrong_number_is_named_without_the_words_of_the_parser(capsys):
    line = "vssm: Error parsing --num: '1.5' is not allowed; give a whole number"
    message = fails(capsys, "generate", "run", "--num", "1.5")
    assert message == f"{line}; see vssm generate --help\n"
    for option, text, allowed in (
        ("--train.epochs", "1e400", "a whole number"),
        ("--model.width", "7.5", "a whole number"),
        ("--model.sigma", "x", "a number"),
    ):
        line = f"vssm: Error parsing {option}: '{text}' is not allowed; give {allowed}; see"
        assert fails(capsys, "train", "digits", option, text).startswith(line)


def test_colours_of_the_parser_do_not_hide_its_words():
    red = "\x1b[31m│\x1b[0m \x1b[91;1mError\x1b[0m\x1b[91;1m parsing Evaluate:\x1b[0m\x1b[m"
    box = f"\x1b[31m╭─ Error ───╮\x1b[0m\n{red} known='a'\x1b[0m │\n│ is unknown │\n╰───────────╯\n"
    assert box_as_line(box, "evaluate") == "known='a' is unknown; see vssm evaluate --help"


def test_where_files_go_is_checked_before_the_work(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.npy").mkdir()
    for options, message in (
        (
            ["--out", "nowhere/x.npy"],
            "out='nowhere/x.npy' is not a file name in an existing folder",
        ),
        (
            ["--out", "folder.npy"],
            "out='folder.npy' is not a file name in an existing folder",
        ),
        (
            ["--state", "nowhere/s"],
            "state='nowhere/s' is not a file name in an existing folder",
        ),
        (["--state", ""], "state='.' is not a file name in an existing folder"),
        (
            ["--state", "samples.npy"],
            "out='samples.npy' and state='samples.npy' are the same file; use two names",
        ),
    ):
        assert message in fails(capsys, "generate", run_folder, *options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.npy"], "nothing was written"
    assert fails(capsys, "data", "digits", "--out", "nowhere/x.png") == (
        "vssm: out='nowhere/x.png' is not a file name in an existing folder\n"
    )
    assert fails(capsys, "report", run_folder, "--out", "nowhere/r.html") == (
        "vssm: out='nowhere/r.html' is not a file name in an existing folder\n"
    )
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    ("flag", "why"), [(os.ST_RDONLY, "read-only file system"), (0, "permission denied")]
)
def test_why_a_folder_can_not_be_written_to_is_said(
    run_folder, tmp_path, monkeypatch, capsys, flag, why
):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((0,) * 8 + (flag, 255)))
    out = tmp_path / "a.npy"
    assert fails(capsys, "generate", run_folder, "--out", str(out)) == (
        f"vssm: out='{out}' cannot be written: {why}\n"
    )


def test_the_picture_of_data_goes_where_it_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for options, name in (
        ([], "digits.png"),
        (["--out", "a.png"], "a.png"),
        (["--out", "b"], "b"),
    ):
        main(["data", "digits", *options])
        assert capsys.readouterr().out.endswith(f"picture: {name}\n")
        assert Path(name).read_bytes().startswith(b"\x89PNG")
    Path("table.csv").write_text("1,2\n" * 200)
    assert "series.path='table.csv' and out='table.csv' are the same file" in fails(
        capsys, "data", "series", "--series.path", "table.csv", "--out", "table.csv"
    )


def test_samples_do_not_replace_what_they_were_made_from(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("samples.npy", np.zeros((1, 4, 8), np.float32))
    main(
        [
            "generate",
            run_folder,
            "--num",
            "1",
            "--length",
            "2",
            "--out",
            "g.npy",
            "--state",
            "st.npy",
        ]
    )
    Path("link.npy").symlink_to("samples.npy")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for options, message in (
        (
            ["--prompt", "samples.npy"],
            "prompt='samples.npy' and out='samples.npy' are the same file; use two names",
        ),
        (
            ["--prompt", "link.npy", "--out", "samples.npy"],
            "prompt='link.npy' and out='samples.npy' are",
        ),
        (
            ["--resume", "st.npy", "--out", "st.npy"],
            "resume='st.npy' and out='st.npy' are the same file",
        ),
    ):
        assert message in fails(capsys, "generate", run_folder, *options)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_state_replaces_states_alone(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    weights = Path(shutil.copy(Path(run_folder, "weights.safetensors"), tmp_path))
    notes = Path("notes.txt")
    notes.write_text("years of work")
    for path in (weights, notes):
        before = path.read_bytes()
        message = fails(capsys, "generate", run_folder, "--state", str(path))
        assert f"state='{path}' exists and is not a state; give a new name, or a file of" in message
        assert path.read_bytes() == before and not Path("samples.npy").exists()
    Path("empty").touch()
    for _ in range(2):
        main(["generate", run_folder, "--num", "1", "--state", "empty"])
        assert vssm.State.load("empty").position == 8
    main(["generate", str(run_folder), "--num", "1", "--state", "/dev/null"])  # nobody wants it
    assert not Path("/dev/null").is_file()


def test_a_full_disk_is_said_of_the_file_that_did_not_fit(
    run_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "samples.npy").write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))  # Python turns the signal into an error
    try:
        line = fails(capsys, "generate", run_folder, "--num", "64")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert line == "vssm: File too large: samples.npy\n"
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_an_array_of_fractions_is_no_prompt_of_tokens(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    vssm.save(
        vssm.build(vssm.ModelConfig(features=5, width=8, layers=1, head="categorical")), "tokens"
    )
    vssm.save(vssm.build(vssm.ModelConfig(features=5, width=8, layers=1)), "numbers")
    for name, value in (("fraction", 1.5), ("nan", np.nan)):
        np.save(f"{name}.npy", np.full((1, 4), value))
        message = fails(capsys, "generate", "tokens", "--prompt", f"{name}.npy")
        assert message.endswith("holds fractions or NaN; give whole numbers\n")
    np.save("large.npy", np.full((1, 4, 5), 1e300))
    assert "prompt contains NaN or infinite" in fails(
        capsys, "generate", "numbers", "--prompt", "large.npy"
    )
    np.save("whole.npy", np.full((1, 4), 2.0))
    main(["generate", "tokens", "--prompt", "whole.npy", "--length", "2"])
    assert np.load("samples.npy").shape == (1, 2)


@pytest.mark.parametrize("dtype", ["int8", "int64", "bool"])
def test_whole_numbers_are_no_prompt_of_pixels(dtype, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("pixels.npy", np.ones((2, 14, 28), dtype))
    message = fails(capsys, "generate", "mnist-small", "--prompt", "pixels.npy")
    assert f"prompt='pixels.npy' holds {dtype}; give floats" in message
    assert not Path("samples.npy").exists()


def test_pixels_that_were_not_scaled_are_no_prompt(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("pixels.npy", np.full((2, 14, 28), 255.0))
    message = fails(capsys, "generate", "mnist-small", "--prompt", "pixels.npy")
    assert "holds values up to 255, but pixels of this model lie from 0 to 1" in message


def test_a_sample_is_continued_in_several_ways(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [
        "--num",
        "1",
        "--length",
        "14",
        "--chunk",
        "7",
        "--recondition",
        "--state",
        "s",
        "--out",
        "a.npy",
    ]
    main(["generate", "mnist-small", *options])
    main(["generate", "mnist-small", "--resume", "s", "--num", "3", "--out", "b.npy"])
    assert len(np.unique(np.load("b.npy"), axis=0)) == 3


def test_one_sequence_is_a_prompt(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    half = np.random.default_rng(0).random((14, 28), np.float32)
    for name, prompt in (("one", half), ("batch", half[None])):
        np.save(f"{name}.npy", prompt)
        main(["generate", "mnist-small", "--prompt", f"{name}.npy", "--out", f"{name}_made.npy"])
    assert np.load("one_made.npy").shape == (1, 14, 28)
    assert np.array_equal(np.load("one_made.npy"), np.load("batch_made.npy"))
    main(["generate", "mnist-small", "--prompt", "one.npy", "--num", "2", "--out", "many.png"])
    vssm.save(
        vssm.build(vssm.ModelConfig(features=5, width=8, layers=1, head="categorical")), "tokens"
    )
    np.save("tokens.npy", np.arange(5))
    main(["generate", "tokens", "--prompt", "tokens.npy", "--length", "2"])
    assert np.load("samples.npy").shape == (1, 2)


@pytest.mark.parametrize("shape", [(14, 29), (2, 28, 27), (1, 1, 28, 28)])
def test_a_prompt_of_another_shape_is_named_before_its_steps_are_counted(
    shape, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.zeros(shape))
    message = fails(capsys, "generate", "mnist-small", "--prompt", "a.npy")
    assert f"prompt has shape {shape}; it must be (batch, length, 28)" in message


def test_bad_prompt_files_are_named(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    message = "prompt='gap.png' is not a .npy file, and this model does not read text; give"
    assert message in fails(capsys, "generate", run_folder, "--prompt", "gap.png")
    (tmp_path / "bad.npy").write_bytes(b"\x80\x04\x95pickle")
    (tmp_path / "none.npy").write_bytes(b"")
    np.save("words.npy", np.array(["a", "b"]))
    with open("zip.npy", "wb") as file:  # noqa: PTH123
        np.savez(file, x=np.zeros(3))
    np.save("header.npy", np.zeros((2, 3)))
    Path("header.npy").write_bytes(Path("header.npy").read_bytes().replace(b")", b" ", 1))
    for name in ("bad", "none", "words", "zip", "header"):
        assert fails(capsys, "generate", run_folder, "--prompt", f"{name}.npy") == (
            f"vssm: prompt='{name}.npy' is damaged or holds no numbers; give a .npy file\n"
        )
    assert fails(capsys, "generate", run_folder, "--prompt", "lost.npy") == (
        "vssm: prompt='lost.npy' is not a file; give a .npy file of numbers\n"
    )


def test_run_folder_that_exists_is_left_alone(run_folder, capsys):
    before = Path(run_folder, "meta.json").read_bytes()
    message = fails(capsys, "train", "digits", "--smoke", "--out", run_folder)
    assert "--resume" in message
    assert Path(run_folder, "meta.json").read_bytes() == before
    # Before anything is read that takes time: data that is not there is not even looked for.
    lost = ("series", "--series.path", "lost.csv", "--out", run_folder)
    assert fails(capsys, "train", *lost) == message


def test_resuming_says_which_options_it_does_not_use(run_folder, capsys):
    for options, ignored in (
        (["mnist", "--train.epochs", "9"], "mnist, --train.epochs"),
        (["series", "--series.path", "a.csv"], "series, --series.path"),
        (["--smoke", "--train.no-graph", "--out", "b"], "--smoke, --train.no-graph, --out"),
        (["--preset", "best", "--model.latents", "8"], "--preset, --model.latents"),
    ):
        main(["train", *options, "--resume", run_folder])
        shown = capsys.readouterr()
        assert shown.err == f"note: --resume keeps the run's own settings and ignores {ignored}\n"
        assert shown.out.startswith(f"{run_folder!r} is finished: ") and "resuming" not in shown.out
    main(["train", "--resume", run_folder])
    assert capsys.readouterr().err == ""


def test_a_shipped_model_is_not_copied_over_a_run_of_its_name(
    run_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    own = Path(shutil.copytree(run_folder, tmp_path / "runs" / "mnist-small"))
    before = {path.name: path.read_bytes() for path in own.iterdir() if path.is_file()}
    assert "exists and is not a copy of the shipped 'mnist-small'" in fails(
        capsys, "evaluate", "mnist-small"
    )
    assert {path.name: path.read_bytes() for path in own.iterdir() if path.is_file()} == before
    own.rename(tmp_path / "mine")
    copy = own_copy(Path("mnist-small"))
    (copy / "eval.json").write_text("of this machine")
    assert own_copy(Path("mnist-small")) == copy == Path("runs/mnist-small")
    assert (copy / "eval.json").read_text() == "of this machine"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mnist-small"]


def test_demo_refuses_a_folder_of_others(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert "is not the folder of a demo" in fails(capsys, "demo", "--out", str(tmp_path))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_metrics_are_shown_in_groups_and_in_words(capsys, monkeypatch):
    from vssm.cli.display import show_metrics

    monkeypatch.setenv("COLUMNS", "100")
    show_metrics("run: test set", {"sequences": 3, "fd_w4": 12.5, "log_likelihood": 883.41})
    shown = capsys.readouterr().out
    words = [
        "Likelihood, nats a sequence (more is better)",
        *("log p(x)", "883.4100", "log_likelihood"),
        *("in chunks of 4, re-conditioned", "12.5000", "fd_w4", "sequences"),
    ]
    places = [shown.index(word) for word in words]
    assert places == sorted(places)
