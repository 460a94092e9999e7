"""The Fréchet distance equals closed forms; the classifier is the same each time."""

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from vssm.data import DataConfig, open_data
from vssm.evaluation.frechet import (
    Classifier,
    cached_classifier,
    features,
    frechet_distance,
    train_classifier,
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Small models gain nothing from threads, which wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def whitened(num, size, seed=0):
    """Rows with mean 0 and covariance 1, exactly."""
    rows = torch.randn(
        num, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    rows = rows - rows.mean(0)
    return torch.linalg.qr(rows).Q * (num - 1) ** 0.5


def test_identical_sets_are_at_distance_zero():
    rows = torch.randn(37, 64).double() * torch.logspace(
        -6, 2, 64
    )  # fewer rows than features: singular
    assert frechet_distance(rows, rows.flip(0)) < 1e-9 * float(rows.var(0).sum())


def test_shifted_means():
    rows, shift = torch.randn(50, 7).double(), torch.arange(7.0).double()
    assert frechet_distance(rows, rows + shift) == pytest.approx(
        91, rel=1e-12
    )  # 0² + 1² + ... + 6²


def test_diagonal_gaussians():
    a, b = (
        torch.tensor([1.0, 2.0, 0.0, 5.0]),
        torch.tensor([3.0, 2.0, 4.0, 0.0]),
    )  # deviations, some 0
    found = frechet_distance(whitened(90, 4) * a, whitened(31, 4, seed=1) * b)
    assert found == pytest.approx(float((a - b).square().sum()), rel=1e-12)


def test_correlated_gaussians_match_the_matrix_square_root():
    a, b = torch.randn(80, 5).double() @ torch.randn(5, 5).double(), torch.randn(60, 5).double() + 1
    values, vectors = torch.linalg.eigh(torch.cov(a.T))
    root = vectors @ torch.diag(values.sqrt()) @ vectors.T
    trace = torch.linalg.eigvalsh(root @ torch.cov(b.T) @ root).sqrt().sum()
    expected = (a.mean(0) - b.mean(0)).square().sum() + a.var(0).sum() + b.var(0).sum() - 2 * trace
    assert frechet_distance(a, b) == pytest.approx(float(expected), rel=1e-10)
    assert frechet_distance(b, a) == pytest.approx(float(expected), rel=1e-10)


def test_constant_features_have_only_a_mean():
    assert frechet_distance(torch.zeros(2, 3), torch.ones(5, 3)) == 3
    assert frechet_distance(torch.zeros(2, 3), torch.zeros(9, 3)) == 0


@pytest.fixture(scope="module")
def digits():
    data = open_data(DataConfig(name="digits"))
    return data.meta.to_image(data.train.batch(slice(0, 500))), data.train.labels[:500]


def test_recipe(digits):
    classifier = Classifier((28, 28, 1), 10)
    assert [tuple(c.weight.shape) for c in classifier.convolutions] == (
        [(32, 1, 3, 3), (64, 32, 3, 3), (128, 64, 3, 3)]
    )
    assert classifier.hidden.weight.shape == (64, 128 * 7 * 7)
    steps = []
    train_classifier(*digits, 10, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(k, 8) for k in range(1, 9)]  # 4 epochs of 2 batches


def test_classifier_learns_and_is_the_same_each_time(digits):
    images, labels = digits
    state = torch.random.get_rng_state()
    first = train_classifier(images, labels, 10)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(123)
    second = train_classifier(images, labels, 10)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert (
        float((first(images).argmax(-1) == labels).double().mean()) > 0.3
    )  # 0.1 by chance, after 8 steps
    assert not any(parameter.requires_grad for parameter in first.parameters())


def test_no_gpu_is_seeded(digits, monkeypatch):
    monkeypatch.setattr("torch.cuda.manual_seed_all", lambda seed: pytest.fail("seeds GPUs"))
    images, labels = digits[0][:60], digits[1][:60]
    classifier = train_classifier(images, labels, 10)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        first = Classifier(tuple(images.shape[1:]), 10).requires_grad_(False)
    pairs = zip(classifier.parameters(), first.parameters(), strict=True)
    moved = [float((a - b).abs().max()) for a, b in pairs]
    assert 0 < max(moved) < 0.02  # 4 steps of at most 0.001 or little more


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_default_dtype_of_pytorch_changes_nothing(dtype, digits):
    images, labels = digits[0][:60], digits[1][:60]
    wanted = train_classifier(images, labels, 10)
    torch.set_default_dtype(torch.float64)
    try:
        given = train_classifier(images.to(dtype), labels, 10)
        found = features(given, images)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(given.parameters(), wanted.parameters(), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)
    assert torch.equal(found, features(wanted, images))


def test_features_are_of_clamped_images_and_do_not_depend_on_passes(digits):
    images = digits[0]
    classifier = train_classifier(*digits, 10)
    wide = images * 3 - 1
    assert torch.equal(features(classifier, wide), features(classifier, wide.clamp(0, 1)))
    apart = torch.cat([features(classifier, images[:77]), features(classifier, images[77:])])
    torch.testing.assert_close(features(classifier, images), apart, rtol=1e-4, atol=1e-5)
    assert features(classifier, images).dtype == torch.float64


def test_convolutions_are_exact_in_training_and_features(digits):
    images, labels = digits
    found = []

    def note(*_):
        found.append((torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic))

    with (
        torch.backends.cudnn.flags(allow_tf32=True, deterministic=False),
        register_module_forward_hook(note),
    ):
        classifier = train_classifier(images, labels, 10)
        trained = len(found)
        features(classifier, images)
        assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic) == (
            True,
            False,
        )
    assert len(found) > trained > 0 and set(found) == {(False, True)}


@pytest.mark.parametrize("trouble", ["none", "flipped", "read-only"])
def test_the_cache_saves_a_training_and_never_fails(trouble, digits, tmp_path, monkeypatch):
    images, labels = digits
    folder = tmp_path / "cache"
    monkeypatch.setattr("vssm.evaluation.frechet.cache_folder", lambda: folder)
    if trouble == "read-only":
        folder.write_text("a file where the folder should be")
    steps = []

    def classifier():
        steps.clear()
        return cached_classifier(
            images, labels, 10, torch.device("cpu"), lambda *step: steps.append(step)
        ).state_dict()

    first, trained = classifier(), len(steps)
    assert trained > 1
    files = list(folder.rglob("*.safetensors"))
    assert len(files) == (0 if trouble == "read-only" else 1)
    if trouble == "flipped":
        content = bytearray(files[0].read_bytes())
        content[-100] ^= 1
        files[0].write_bytes(content)
    again = classifier()
    assert steps == [(1, 1)] if trouble == "none" else len(steps) == trained
    assert all(torch.equal(first[name], again[name]) for name in first)
    classifier()
    assert len(steps) == (trained if trouble == "read-only" else 1)  # what was damaged is new
    images.mul_(0.5)
    classifier()
    images.mul_(2)
    assert len(steps) == trained  # other images


def test_the_classifier_learns_from_clamped_images_with_noise(monkeypatch):
    seen, forward = [], Classifier.forward

    def watched(classifier, images):
        seen.append(images)
        return forward(classifier, images)

    monkeypatch.setattr(Classifier, "forward", watched)
    train_classifier(torch.full((256, 8, 8, 1), 3.0), torch.zeros(256, dtype=torch.int64), 2)
    assert len(seen) == 4
    for images in seen:
        assert float(images.mean()) == pytest.approx(1, abs=2e-3)
        assert float(images.std()) == pytest.approx(0.05, rel=0.05)
