"""The one-file model is the library's: its weights give the same numbers in both."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import vssm
from vssm.likelihoods.particles import latent_noise
from vssm.noise import uniform

FOLDER = Path(__file__).parent.parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


minimal = load("minimal")
sys.modules["minimal"] = minimal  # as if run in its folder
in_library = load("minimal_in_library")


@pytest.fixture(scope="module")
def pair():
    """A model of the file and the library's model of the same weights."""
    torch.manual_seed(3)
    small, model = minimal.VSSM(), in_library.build()
    config = model.config
    assert (config.inner, config.dt_rank) == (minimal.INNER, minimal.RANK)
    assert config.conv == minimal.TAPS
    model.load_state_dict(in_library.renamed(small.state_dict()))
    return small, model


@pytest.fixture(scope="module")
def x():
    return minimal.digits()[1][:6]


def test_no_import_of_the_library_and_short():
    for name in ("minimal", "any_part"):
        lines = (FOLDER / f"{name}.py").read_text().splitlines()
        assert len(lines) <= 300
        assert not [line for line in lines if "import" in line and "vssm" in line]


def test_outputs_are_the_librarys(pair, x):
    small, model = pair
    v, q_z = small.posterior(x), model.posterior(x)[0]
    torch.testing.assert_close(v, q_z.logits, atol=1e-5, rtol=1e-4)
    z = v.argmax(-1)
    torch.testing.assert_close(small.likelihood(minimal.one_hot(z))[0], model.likelihood(z)[0].mean)
    cut = torch.tensor([0, 1, 3, 5, 7, 8])
    v, _ = small.partial(x, torch.arange(8) < cut[:, None])
    torch.testing.assert_close(v, model.partial_posterior(x, cut=cut)[0].logits)


def test_objective_and_gradients_are_the_librarys(pair, x):
    small, model = pair
    generator = torch.Generator().manual_seed(5)
    terms = vssm.objective(model, x, generator=generator)
    generator.manual_seed(5)  # the library draws the noise of the latents, then the cuts
    u = torch.rand(len(x), 8, minimal.LATENTS, minimal.CLASSES, generator=generator)
    cut = torch.randint(0, 9, (len(x),), generator=generator)
    found = minimal.objective(small, x, u, cut)
    expected = terms.reconstruction, terms.kl, terms.partial
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-4)
    reconstruction, kl, partial = found
    (kl - reconstruction - partial).mean().backward()
    terms.loss.mean().backward()
    names = dict(model.named_parameters())
    for name, gradient in in_library.renamed(
        {n: p.grad for n, p in small.named_parameters()}
    ).items():
        if name == "decoder.embed.weight":  # whose bias went into it
            continue
        theirs = names[name].grad
        scale = theirs.abs().max()
        torch.testing.assert_close(gradient / scale, theirs / scale, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("cut", [0, 4])
def test_likelihood_is_the_librarys(pair, x, cut):
    small, model = pair
    u = latent_noise(x, 7, torch.arange(len(x)), range(5), minimal.LATENTS)
    ours = minimal.log_likelihood(small, x, u, cut)
    theirs = vssm.log_likelihood(model, x, num_samples=5, prompt_length=cut, seed=7)
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("cut", [0, 3])
def test_samples_are_the_librarys(pair, x, cut):
    small, model = pair
    seeds, rows = torch.full((len(x),), 9), torch.arange(len(x))
    u = uniform(seeds, rows, 0, 8, minimal.LATENTS)
    prompt = x[:, :cut] if cut else None
    theirs = vssm.generate(model, num=len(x), length=8 - cut, prompt=prompt, seed=9).x
    one_shot = minimal.generate(small, x[:, :cut], u)
    torch.testing.assert_close(one_shot[:, cut:], theirs, atol=1e-5, rtol=1e-4)
    for width in (1, 3):
        chunks = minimal.generate_in_chunks(small, x[:, :cut], u, width)
        torch.testing.assert_close(chunks, one_shot, atol=1e-5, rtol=1e-4)


def test_training_learns_and_main_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    minimal.main(steps=2, K=2)
    out = capsys.readouterr().out
    assert "log p(x)" in out and (tmp_path / "minimal.png").stat().st_size > 1000
    losses = []
    for steps in (1, 8):
        torch.manual_seed(0)
        model = minimal.VSSM()
        minimal.train(model, minimal.digits()[0], steps, batch=32)
        found = minimal.objective(model, *fixed())
        losses.append((found[1] - found[0] - found[2]).mean().item())
    assert losses[1] < losses[0] - 100, losses


def test_likelihoods_are_printed_beside_the_librarys(capsys):
    in_library.main(steps=2, K=3)
    lines = capsys.readouterr().out.splitlines()[-2:]
    for line in lines:
        ours, theirs = (float(number) for number in re.findall(r"-?\d+\.\d+", line))
        assert abs(ours - theirs) < 0.05 * abs(ours)


def fixed():
    """A batch with its noise and cuts."""
    generator = torch.Generator().manual_seed(1)
    u = torch.rand(64, 8, minimal.LATENTS, minimal.CLASSES, generator=generator)
    return minimal.digits()[1][:64], u.clamp(1e-7, 1 - 1e-7), torch.full((64,), 4)
