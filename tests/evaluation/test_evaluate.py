"""`evaluate_run` measures what its parts say, for every kind of model and data, and repeats."""

import dataclasses
import errno
import json
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import KINDS, small_config
from vssm import build, generate, load, log_likelihood, save
from vssm.cli import main
from vssm.cli.display import show_metrics
from vssm.config import RunConfig, TrainConfig
from vssm.data import DataConfig, SyntheticConfig, TextConfig, open_data
from vssm.evaluation import scores as evaluate
from vssm.evaluation.frechet import Classifier, features, frechet_distance, train_classifier
from vssm.evaluation.quality import (
    Work,
    image_quality,
    image_ways,
    make_sequences,
    observed,
    ways_to_sample,
)
from vssm.evaluation.report import report
from vssm.evaluation.scores import evaluate_run
from vssm.runs.results import commit, result, write_result
from vssm.training.loop import train
from vssm.training.progress import Progress

TIMES = ("_ms_b1", "_ms_b16", "timing_spread")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Small models gain nothing from threads, which wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    """The classifiers of these tests are nobody else's."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr("vssm.evaluation.frechet.cache_folder", lambda: folder)
        yield


def make_run(folder, kind, data, **options):
    """A run folder as training leaves it, of a small model with fresh weights."""
    torch.manual_seed(1)
    meta = open_data(data).meta
    values = {
        "features": meta.features,
        "head": meta.suggested_head,
        "layers": 1,
        "width": 16,
        **options,
    }
    save(build(small_config(kind, **values)), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"data": dataclasses.asdict(data), "train": {}, "data_meta": meta.to_json()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def steady(metrics):
    return {
        n: value
        for n, value in metrics.items()
        if not n.endswith(TIMES) and not n.startswith("ms_")
    }


DIGITS = DataConfig(name="digits")
WAVES = DataConfig(name="synthetic", synthetic=SyntheticConfig(length=7, features=3, num=40))


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "digits-vssm", "vssm", DIGITS)


@pytest.fixture(scope="module")
def evaluated(digits_run):
    stages = {}

    def progress(stage, done, total):
        assert 0 <= done <= total
        stages[stage] = done == total

    made = evaluate_run(digits_run, num_samples=5, num_images=300, progress=progress)
    return made, stages


def test_a_result_that_a_full_disk_refuses_is_printed(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", "rnn", WAVES)

    def refuse(path, made):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(evaluate, "write_result", refuse)
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", str(run), "--quick"])
    printed = capsys.readouterr()
    assert stop.value.code == 2 and "No space left on device" in printed.err
    assert "log_likelihood" in printed.out


def test_envelope(evaluated, digits_run):
    made, stages = evaluated
    assert json.loads((digits_run / "eval.json").read_text()) == made
    assert list(made) == ["name", "date", "commit", "machine", "command", "config", "metrics"]
    assert made["name"] == "digits-vssm"
    assert made["command"] == "vssm evaluate digits-vssm --num-samples 5 --num-images 300"
    assert all(isinstance(value, int | float) for value in made["metrics"].values())
    assert made["config"]["model"] == load(digits_run).config.to_dict()
    assert made["config"]["data"]["name"] == "digits"
    assert made["config"]["evaluate"]["backend"] == "numba"
    assert all(stages.values())
    assert {
        "reconstruction",
        "likelihoods",
        "generation times",
        "classifier",
        "fd_one_shot",
    } <= set(stages)


def test_metrics_of_a_vssm(evaluated, digits_run):
    metrics = evaluated[0]["metrics"]
    assert set(metrics) == {
        *("sequences", "parameters", "prompt_length", "passes"),
        *("num_samples", "num_images", "classifier_accuracy"),
        *("mse", "reconstruction", "kl", "elbo"),
        *("components", "active_components", "code_perplexity", "aggregate_kl"),
        *("log_likelihood", "log_likelihood_empty_prior", "partial_log_likelihood"),
        *(
            f"{way}_ms_b{num}"
            for way in ("generate", "chunks", "resumed", "prompted")
            for num in (1, 16)
        ),
        "timing_spread",
        *("fd_floor", "fd_one_shot", "fd_w4", "fd_w2", "fd_w1", "fd_prompted"),
    }
    model, x = load(digits_run), open_data(DIGITS).test().batch(slice(None))
    assert metrics["sequences"] == 359
    assert metrics["num_images"] == 300
    assert metrics["prompt_length"] == 4
    assert metrics["passes"] == 1
    assert metrics["parameters"] == sum(p.numel() for p in model.parameters())
    for name, options in (
        ("log_likelihood", {}),
        ("log_likelihood_empty_prior", {"prior": "partial"}),
        ("partial_log_likelihood", {"prompt_length": 4}),
    ):
        alone = log_likelihood(model, x, num_samples=5, **options).double().mean()
        assert metrics[name] == pytest.approx(float(alone), rel=1e-5)
    assert metrics["elbo"] < metrics["log_likelihood"]
    assert metrics["elbo"] == pytest.approx(metrics["reconstruction"] - metrics["kl"], rel=1e-6)
    assert all(metrics[name] > 0 for name in metrics if "_ms_" in name)
    assert metrics["timing_spread"] >= 1


def test_latent_diagnostics_match_their_definition(evaluated, digits_run):
    metrics = evaluated[0]["metrics"]
    model, x = load(digits_run), open_data(DIGITS).test().batch(slice(None))
    with torch.no_grad():
        q_z, _ = model.posterior(x)
    p = q_z.probs.double()
    kl = (p * (p * model.config.classes).log()).sum(-1).mean(0)  # (T, Z)
    aggregate = p.mean(0)
    entropy = -(aggregate * aggregate.log()).sum(-1)
    assert metrics["components"] == kl.numel() == 24
    assert metrics["active_components"] == int((kl > 0.01).sum())
    assert metrics["kl"] == pytest.approx(float(kl.sum()), rel=1e-4)
    assert metrics["code_perplexity"] == pytest.approx(float(entropy.exp().mean()), rel=1e-5)
    expected = float((math.log(model.config.classes) - entropy).sum())
    assert metrics["aggregate_kl"] == pytest.approx(
        expected, rel=1e-3
    )  # a small difference of large sums


def test_distances_match_their_parts(evaluated, digits_run):
    metrics = evaluated[0]["metrics"]
    model, data = load(digits_run), open_data(DIGITS)
    to_image, test = data.meta.to_image, data.test()
    classifier = train_classifier(to_image(data.train.batch(slice(None))), data.train.labels, 10)
    reference = features(classifier, to_image(test.batch(slice(None))))

    def distance(x):
        return frechet_distance(features(classifier, to_image(x)), reference)

    one_shot = generate(model, num=300, length=8).x
    stepwise = generate(model, num=300, length=8, chunk=1, recondition=True).x
    prompt = test.batch(torch.arange(300) * 359 // 300)[:, :4]
    completed = torch.cat([prompt, generate(model, length=4, prompt=prompt).x], 1)
    train = data.train.batch(torch.arange(300) * 1294 // 300)
    ways = {"fd_one_shot": one_shot, "fd_w1": stepwise, "fd_prompted": completed, "fd_floor": train}
    for name, x in ways.items():
        assert metrics[name] == pytest.approx(distance(x), rel=1e-3)
    hits = classifier(to_image(test.batch(slice(None)))).argmax(-1) == test.labels
    assert metrics["classifier_accuracy"] == pytest.approx(float(hits.double().mean()), abs=1e-6)
    assert metrics["fd_floor"] < metrics["fd_prompted"] < metrics["fd_one_shot"]


def test_dials_add_curves_and_change_nothing_else(evaluated, digits_run):
    without = evaluated[0]["metrics"]
    made = evaluate_run(digits_run, num_samples=5, num_images=300, dials=True)
    metrics, passes = made["metrics"], {"fd_s2", "fd_s4", "fd_s8"}
    ways = ("one_shot", "w4", "w2", "w1", "s2", "s4", "s8")
    times = {f"ms_{way}{end}" for way in ways for end in ("", "_b256")}
    assert made["command"] == "vssm evaluate digits-vssm --num-samples 5 --num-images 300 --dials"
    assert set(metrics) == set(without) | passes | times
    assert {n: v for n, v in steady(metrics).items() if n not in passes} == steady(without)
    assert metrics["fd_s8"] == pytest.approx(
        metrics["fd_w1"], rel=1e-4
    )  # the fixed point is the same sample
    assert metrics["fd_s2"] != pytest.approx(metrics["fd_w1"], rel=1e-3)
    assert all(metrics[name] > 0 for name in times)
    assert metrics["ms_one_shot"] < metrics["ms_w1"]


def test_particles_add_likelihoods_and_change_nothing_else(evaluated, digits_run):
    evaluation = (digits_run / "eval.json").read_bytes()
    made = evaluate_run(digits_run, num_samples=5, num_images=300, particles=True)
    (digits_run / "eval.json").write_bytes(evaluation)
    assert (
        made["command"] == "vssm evaluate digits-vssm --num-samples 5 --num-images 300 --particles"
    )
    metrics, before = made["metrics"], evaluated[0]["metrics"]
    cases = {"log_likelihood": (0, "uniform"), "log_likelihood_empty_prior": (0, "partial")}
    cases |= {"partial_log_likelihood": (4, "partial")}
    assert set(metrics) - set(before) == {f"{name}_particles" for name in cases}
    assert all(metrics[name] == before[name] for name in before if "log_likelihood" in name)
    model, x = load(digits_run), open_data(DIGITS).test().batch(slice(None))
    for name, (cut, prior) in cases.items():
        alone = log_likelihood(model, x, 5, cut, prior, method="particles").double().mean()
        assert metrics[f"{name}_particles"] == pytest.approx(float(alone), rel=1e-4)


def test_dials_without_images_are_times(tmp_path):
    metrics = evaluate_run(make_run(tmp_path / "run", "tvae", WAVES), quick=True, dials=True)[
        "metrics"
    ]
    assert {"ms_one_shot", "ms_w4", "ms_w3", "ms_w2", "ms_w1", "ms_s2", "ms_s4", "ms_s7"} < set(
        metrics
    )
    assert "ms_s8" not in metrics
    assert not any(name.startswith("fd_") for name in metrics)


@pytest.mark.parametrize("length", [1, 2, 3, 28, 32])
def test_every_way_to_sample_can_be_sampled(length):
    model = build(small_config("vssm", layers=1, width=16))
    ways = ways_to_sample(model, length, curves=True)
    assert next(iter(ways)) == "one_shot"
    for options in ways.values():
        assert generate(model, length=length, **options).x.shape[1] == length
    if length == 32:
        names = ["one_shot", "w16", "w8", "w4", "w2", "w1", "s2", "s4", "s8", "s16", "s32"]
        assert list(ways) == names
    assert list(ways_to_sample(build(small_config("ssm", layers=1)), length, curves=True)) == [
        "one_shot"
    ]


@torch.no_grad()
def test_sequences_are_those_of_generate():
    data, model = open_data(WAVES), build(small_config("vssm", layers=1, features=3))
    work = Work(model, data, data.test(), torch.device("cpu"))
    x = data.test().batch(slice(2, 5))
    whole = make_sequences(work, x, range(2, 5), chunk=2, recondition=True)
    expected = generate(model, 3, 7, chunk=2, recondition=True, rows=[2, 3, 4]).x
    assert torch.allclose(whole, expected, atol=1e-5)
    completed = make_sequences(work, x, range(2, 5), known="prefix")
    rest = generate(model, length=4, prompt=x[:, :3], rows=[2, 3, 4]).x
    assert torch.allclose(completed, torch.cat([x[:, :3], rest], 1), atol=1e-5)


BINARY = DataConfig(name="digits", binarize=True)


@pytest.mark.parametrize("kind", ["vssm", "ssm"])
def test_samples_of_binary_data_are_compared_in_black_and_white(kind, tmp_path, monkeypatch):
    seen = []

    def watched(classifier, images):
        seen.append(images)
        return features(classifier, images)

    monkeypatch.setattr("vssm.evaluation.quality.features", watched)
    run = make_run(tmp_path / kind, kind, BINARY)
    metrics = evaluate_run(run, quick=True)["metrics"]
    assert len(seen) >= 4  # the test set, the floor, and at least two ways
    assert all(((images == 0) | (images == 1)).all() for images in seen)
    assert {name for name in metrics if name.startswith("fd_")} == (
        {"fd_floor", "fd_one_shot", "fd_w4", "fd_w2", "fd_w1", "fd_prompted"}
        if kind == "vssm"
        else {"fd_floor", "fd_sample", "fd_prompted"}
    )


def test_means_are_compared_where_data_is_grey():
    binary, grey = (small_config("vssm", layers=1, head=head) for head in ("bernoulli", "gaussian"))
    assert observed(build(binary), levels=2) == "sample"
    assert observed(build(binary), levels=17) == "mean"
    assert observed(build(grey), levels=2) == "mean"


def test_evaluation_repeats(digits_run):
    first = evaluate_run(digits_run, quick=True)["metrics"]
    second = evaluate_run(digits_run, quick=True)["metrics"]
    assert steady(first) == steady(second)
    assert (first["sequences"], first["num_samples"], first["num_images"]) == (64, 10, 256)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "vssm"])
def test_every_kind(kind, tmp_path):
    metrics = evaluate_run(make_run(tmp_path / kind, kind, DIGITS), quick=True)["metrics"]
    variational, latent = kind == "tvae", kind in ("tvae", "vrnn")
    assert all(value is not None and math.isfinite(value) for value in metrics.values())
    for names, expected in (
        (
            ("log_likelihood", "partial_log_likelihood", "mse", "generate_ms_b16", "fd_prompted"),
            True,
        ),
        (
            ("log_likelihood_empty_prior", "aggregate_kl", "chunks_ms_b1", "fd_one_shot", "fd_w2"),
            variational,
        ),
        (("elbo", "kl", "reconstruction", "active_components", "num_samples"), latent),
        (("fd_sample", "fd_mean", "fd_prompted_mean"), not variational),
    ):
        assert {name: name in metrics for name in names} == dict.fromkeys(names, expected)


def test_text_has_bits_and_no_images(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 20)
    data = DataConfig(name="text", text=TextConfig(path=str(tmp_path / "text.txt"), length=9))
    made = evaluate_run(make_run(tmp_path / "run", "tvae", data), quick=True)
    metrics = made["metrics"]
    bits = -metrics["log_likelihood"] / (9 * math.log(2))
    assert metrics["bits_per_char"] == pytest.approx(bits, rel=1e-12)
    assert not {"mse", "num_images", "classifier_accuracy"} & set(metrics)
    assert not any(name.startswith("fd_") for name in metrics)
    assert made["config"]["data"]["text"]["path"] == "text.txt"  # not where it lies


def test_bernoulli_head_on_grey_values_has_a_pseudo_likelihood(tmp_path, capsys):
    """It is a cross-entropy, which must not be called a likelihood."""
    folder = make_run(tmp_path / "grey", "vssm", DIGITS, head="bernoulli")
    metrics = evaluate_run(folder, num_samples=2, max_sequences=8, num_images=0)["metrics"]
    names = ("log_likelihood", "log_likelihood_empty_prior", "partial_log_likelihood", "elbo")
    assert {name for name in metrics if name.startswith("pseudo_")} == {
        f"pseudo_{name}" for name in names
    }
    assert not {*names, "nats"} & set(metrics)
    show_metrics("grey", metrics)
    shown = capsys.readouterr().out
    assert "Pseudo-likelihood" in shown and "pseudo-log p(x)" in shown and " log p(x)" not in shown
    page = report(folder, out=tmp_path / "page.html").read_text()
    assert "Pseudo-likelihood" in page and "pseudo-ELBO" in page


@pytest.mark.parametrize(
    ("head", "name"), [("logistic-mixture", "bits_per_dim"), ("bernoulli", "nats")]
)
def test_units_of_heads(head, name, tmp_path):
    data = DataConfig(name="digits", binarize=head == "bernoulli")
    options = {"head": head, "bins": 17}
    metrics = evaluate_run(make_run(tmp_path / "run", "rnn", data, **options), quick=True)[
        "metrics"
    ]
    scale = 1 if name == "nats" else 64 * math.log(2)
    assert metrics[name] == pytest.approx(-metrics["log_likelihood"] / scale, rel=1e-12)


def test_validation_leaves_the_test_set_closed(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", "rnn", WAVES)
    data = open_data(WAVES)
    data.test = lambda: pytest.fail("the test set was opened")
    monkeypatch.setattr(evaluate, "open_data", lambda *_, **__: data)
    made = evaluate_run(run, splits="valid", quick=True)
    assert made["metrics"]["sequences"] == 4
    assert (run / "eval_valid.json").exists()
    assert not (run / "eval.json").exists()


def test_needs_only_the_base(tmp_path, monkeypatch):
    for name in ("tyro", "pooch", "sklearn", "rich", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    metrics = evaluate_run(make_run(tmp_path / "run", "tvae", WAVES), quick=True, max_sequences=3)[
        "metrics"
    ]
    assert metrics["sequences"] == 3


def test_one_step_has_no_halves(tmp_path):
    data = DataConfig(name="synthetic", synthetic=SyntheticConfig(length=1, features=3, num=20))
    metrics = evaluate_run(make_run(tmp_path / "run", "tvae", data), quick=True)["metrics"]
    assert metrics["prompt_length"] == 0
    assert not {"partial_log_likelihood", "resumed_ms_b1", "prompted_ms_b1"} & set(metrics)


def test_infinite_weights_give_null(tmp_path):
    run = make_run(tmp_path / "run", "rnn", DIGITS)
    model = load(run)
    with torch.no_grad():
        model.stack.out.bias.fill_(torch.nan)
    save_file(model.state_dict(), run / "weights.safetensors")
    metrics = evaluate_run(run, quick=True)["metrics"]
    assert metrics["log_likelihood"] is None
    assert metrics["fd_sample"] is None
    assert metrics["fd_floor"] > 0


def test_mistakes_are_named(tmp_path):
    run = make_run(tmp_path / "run", "rnn", WAVES)
    good = json.loads((run / "config.json").read_text())

    def refused(message, config, **options):
        (run / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message) as caught:
            evaluate_run(run, **options)
        assert "\n" not in str(caught.value)

    bare = {key: good[key] for key in ("format", "model")}
    refused("has no key 'data'; use a run folder of vssm train", bare)
    refused("'nmae'", {**good, "data": {"nmae": "digits"}})
    refused("'digit' is unknown", {**good, "data": {"name": "digit"}})
    refused("'digits' has 8 features", {**good, "data": {"name": "digits"}})
    lost = str(tmp_path / "lost.txt")
    refused(
        "lost.txt", {**good, "data": {"name": "text", "dir": str(tmp_path), "text": {"path": lost}}}
    )
    refused("num_samples is 0; it must be", good, num_samples=0)
    refused("num_samples is 1.5; it must be a whole number >= 1", good, num_samples=1.5)
    refused(
        "num_images=1 gives no distance; use 0 for none, or 2 or more",
        good,
        num_images=1,
    )
    refused("num_images is -1; it must be a whole number >= 0", good, num_images=-1)
    refused("splits='train' is unknown", good, splits="train")
    refused("dials=True is for models that generate in parallel, not kind='rnn'", good, dials=True)
    refused(
        "particles=True is not for kind='rnn' with levels=1; use it with vssm",
        good,
        particles=True,
    )
    refused("device='gpu' is not available here; choose from 'auto', 'cpu'", good, device="gpu")
    assert not (run / "eval.json").exists()
    with pytest.raises(ValueError, match=r"does not exist"):
        evaluate_run(tmp_path / "nowhere")


def test_no_images_no_distances(digits_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(digits_run, run, ignore=shutil.ignore_patterns("eval*"))
    made = evaluate_run(run, num_samples=2, num_images=0, max_sequences=5)
    assert made["command"] == "vssm evaluate run --num-samples 2 --max-sequences 5 --num-images 0"
    assert not [name for name in made["metrics"] if "fd_" in name or "classifier" in name]


def test_failed_write_leaves_the_old_evaluation(tmp_path, monkeypatch):
    write_result(tmp_path / "eval.json", {"metrics": {"elbo": 1.0}})
    before = (tmp_path / "eval.json").read_bytes()

    def full_disk(path, text):
        raise OSError("No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_result(tmp_path / "eval.json", {"metrics": {"elbo": 2.0}})
    assert (tmp_path / "eval.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["eval.json"]


def test_read_only_folder_is_named_before_the_work(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", "rnn", WAVES)
    monkeypatch.setattr("vssm.data.storage.os.access", lambda place, mode: False)
    stages = []
    message = rf"^folder='{run}' cannot be written to \(permission denied\); use a run folder"
    with pytest.raises(ValueError, match=message):
        evaluate_run(run, quick=True, progress=lambda *stage: stages.append(stage))
    assert not stages


def test_changed_data_are_refused(tmp_path):
    """The text has as many characters, but other tokens than in the training."""
    path, folder = tmp_path / "a.txt", tmp_path / "run"
    config = RunConfig(
        data=DataConfig(name="text", text=TextConfig(path=str(path), length=8)),
        model=small_config("rnn", head="auto", width=8, layers=1),
        train=TrainConfig(max_steps=1, batch=4, samples=0, num_valid=4),
    )
    path.write_text("the cat sat on the mat and the dog sat on the log " * 40)
    train(config, folder, progress=Progress())
    evaluate_run(folder, quick=True, max_sequences=2)
    path.write_text(path.read_text().replace("t", "!"))
    with pytest.raises(
        ValueError, match=r"^data 'text' has another vocabulary than the run in '.*run' was"
    ):
        evaluate_run(folder, quick=True, max_sequences=2)


def test_result_does_not_say_who_made_it(tmp_path):
    config = {"data": {"dir": "/home/me/data", "columns": ("a", "/b/c")}, "width": 3}
    made = result("x", "vssm train /home/me/run --seed 1", config, {"loss": math.inf, "steps": 3})
    assert made["config"] == {"data": {"dir": "data", "columns": ["a", "c"]}, "width": 3}
    assert made["command"] == "vssm train run --seed 1"
    assert result("x", "vssm train '/home/the me/a run'", {}, {})["command"] == "vssm train 'a run'"
    assert made["metrics"] == {"loss": None, "steps": 3}
    assert set(made["machine"]) == {"cpu", "cores", "gpu", "torch", "python", "system"}
    with pytest.raises(ValueError, match="metric 'name' is 'vssm'; give a number"):
        result("x", "y", {}, {"name": "vssm"})


def test_commit_is_that_of_the_package(monkeypatch, tmp_path):
    found = commit()
    run = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if run.returncode == 0 and found is not None:
        assert found.removesuffix("-dirty") == run.stdout.strip()
    elsewhere = tmp_path / "site-packages" / "vssm" / "runs" / "results.py"
    monkeypatch.setattr("vssm.runs.results.__file__", str(elsewhere))
    assert commit() is None


def test_commit_tells_changed_code_from_changed_results(monkeypatch, tmp_path):
    for name in ("vssm/runs/results.py", "results/old.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for arguments in (
        ["init", "-q"],
        ["add", "."],
        [*identity, "commit", "-q", "-m", "all", "--no-verify"],
    ):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(
        "vssm.runs.results.__file__", str(tmp_path / "vssm" / "runs" / "results.py")
    )
    clean = commit()
    assert clean is not None and re.fullmatch("[0-9a-f]{40}", clean)
    (tmp_path / "results" / "old.json").write_text("2\n")
    assert commit() == clean
    (tmp_path / "vssm" / "new.py").write_text("")
    assert commit() == f"{clean}-dirty"


@pytest.mark.parametrize("kind", ["ssm", "vssm"])
@torch.no_grad()
def test_batches_change_nothing(kind):
    """The last of three batches is not full, and no sequence has the noise of another."""
    data, model, found = open_data(WAVES), build(small_config(kind, layers=1)), []
    methods = ("importance", "particles") if kind == "vssm" else ("importance",)
    for batch in (3, 8):
        work = Work(model, data, data.test(), torch.device("cpu"), batch)
        index = np.arange(8)
        found += [evaluate.reconstruction(work, index)]
        found += [evaluate.likelihoods(work, index, 2, method) for method in methods]
    for one, other in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
        assert one == pytest.approx(other, rel=1e-4) and one


def test_images_do_not_depend_on_the_batch(monkeypatch):
    classifier = Classifier((8, 8, 1), 10)
    monkeypatch.setattr("vssm.evaluation.quality.cached_classifier", lambda *_: classifier)
    monkeypatch.setattr(
        "vssm.evaluation.quality.features", lambda _, images: images.flatten(1).double()
    )
    monkeypatch.setattr(
        "vssm.evaluation.quality.frechet_distance", lambda a, b: float(a.std(0).sum())
    )
    data, model = open_data(DIGITS), build(small_config("tvae", features=8, layers=1))
    works = (Work(model, data, data.test(), torch.device("cpu"), batch) for batch in (7, 20))
    few, many = (image_quality(work, 20, image_ways(work)) for work in works)
    assert few == pytest.approx(many, rel=1e-4)
