"""The fused kernels against their PyTorch twins: compiled on a GPU, else interpreted."""

from functools import partial

import pytest
import torch

from tests.conftest import relative_error, sequences, small_model
from tests.interpreter import DEVICE, kernels, needs_interpreter, run_interpreted
from vssm import objective
from vssm.distributions import Latents, gumbel_uniform
from vssm.nn import RMSNorm
from vssm.ops.draws import embed_sum, inverse_cdf, repeats
from vssm.ops.latents import sample_and_kl

SINGLE, HALF = 1e-5, 1e-2  # relative, in norm


@needs_interpreter
def test_in_the_interpreter():
    run_interpreted(__file__)


BACKENDS = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("triton", marks=kernels),
        pytest.param("numba", marks=pytest.mark.skipif(DEVICE == "cuda", reason="for a CPU")),
    ],
)


def normal(*shape, seed=0, dtype=torch.float32):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(DEVICE, dtype)


def noises(*shape, seed=0):
    return gumbel_uniform(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def draw(logits, noise, backend, dtype=None):
    """Returns z, KL and the gradient of the logits, of weights that all dtypes hold exactly."""
    logits = logits.detach().requires_grad_()
    z, kl = sample_and_kl(logits, noise, dtype, backend=backend)
    total = (z.double() * normal(*z.shape, seed=1, dtype=torch.bfloat16).double()).sum()
    total = total + (kl.double() * normal(*kl.shape, seed=2).double()).sum()
    return z.detach(), kl.detach(), *torch.autograd.grad(total, logits)


def assert_same_draw(logits, noise, z, exact):
    """Draws are equal but where the two best classes lie within rounding of each other."""
    assert ((z == 0) | (z == 1)).all() and (z.sum(-1) == 1).all()
    perturbed = logits.double() - torch.log(-torch.log(noise.double()))
    if perturbed.shape[-1] > 1:
        best = perturbed.topk(2).values
        clear = best[..., 0] - best[..., 1] > 1e-5
        assert clear.float().mean() > 0.99
        z, exact = z[clear], exact[clear]
    assert torch.equal(z.double(), exact.double())


SHAPES = [(2, 3, 4, 8), (5, 3, 5), (2, 3, 1), (1, 40, 33), (2, 70, 16), (3, 64), (1, 2, 130)]


@BACKENDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_draw_matches_float64(shape, backend):
    logits, noise = normal(*shape) * 3, noises(*shape)
    z, kl, grad = draw(logits, noise, backend)
    exact_z, exact_kl, exact_grad = draw(logits.double(), noise.double(), "reference")
    assert_same_draw(logits, noise, z, exact_z)
    assert z.dtype == kl.dtype == grad.dtype == torch.float32 and kl.shape == shape[:-2]
    assert shape[-1] == 1 or relative_error(kl, exact_kl) < SINGLE
    assert (grad - exact_grad).norm() <= SINGLE * exact_grad.norm() + 1e-7


def assert_selected(logits, noise, z, temperature=1.0):
    """The noise lies in the interval of its class, but for rounding."""
    p = (logits.double() / temperature).softmax(-1).expand(*z.shape, -1)
    upper = p.cumsum(-1).gather(-1, z[..., None])[..., 0]
    lower = upper - p.gather(-1, z[..., None])[..., 0]
    assert z.dtype == torch.int64 and z.shape == noise.shape
    assert (lower - 1e-6 < noise).all() and (noise < upper + 1e-6).all()


@kernels
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hard_draws_lie_in_their_interval(shape, dtype, temperature):
    logits, noise = 3 * normal(*shape, dtype=dtype), noises(*shape[:-1])
    z = inverse_cdf(logits, noise, temperature, "triton")
    assert_selected(logits, noise, z, temperature)
    wanted = inverse_cdf(logits, noise, temperature, "reference")
    assert (z != wanted).float().mean() < 1e-2  # only where the noise meets an edge within rounding


@kernels
@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("classes", [2, 5, 32])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_logits_that_are_not_finite_still_draw_a_class(classes, backend):
    """An index out of range would abort the device; training reports the error after the step."""
    logits, noise = normal(8, classes), noises(8)
    logits[::2] = torch.nan
    logits[1] = torch.inf
    z = inverse_cdf(logits, noise, backend=backend)
    assert ((z >= 0) & (z < classes)).all()


@kernels
def test_one_row_of_logits_serves_all_noise():
    logits, noise = normal(1, 5, 3, 7), noises(4, 5, 3)
    z = inverse_cdf(logits, noise, backend="triton")
    assert torch.equal(z, inverse_cdf(logits.expand(4, -1, -1, -1), noise, backend="triton"))
    assert torch.equal(
        inverse_cdf(logits[0, 0, 0], noise, backend="triton")[..., 0],
        inverse_cdf(logits[0, 0, :1], noise[..., :1], backend="triton")[..., 0],
    )
    assert_selected(logits, noise, z)


@kernels
@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    ("own", "shape"),
    [((2, 1, 5, 3), (2, 4, 5, 3)), ((2, 1, 1), (2, 3, 4)), ((3,), (2, 4, 3)), ((1,), (5,))],
)
def test_logits_broadcast_over_noise(own, shape, backend):
    logits, noise = normal(*own, 7), noises(*shape)
    z = inverse_cdf(logits, noise, backend=backend)
    whole = logits.expand(*shape, 7).contiguous()
    assert torch.equal(z, inverse_cdf(whole, noise, backend=backend))
    assert_selected(whole, noise, z)


@kernels
def test_broadcast_dimensions_must_be_neighbours():
    logits, noise = normal(1, 5, 1, 7), noises(4, 5, 3)
    z = inverse_cdf(logits, noise)  # by the twin, which does without
    assert repeats(logits, noise) is None
    assert torch.equal(z, inverse_cdf(logits.expand(4, 5, 3, 7), noise, backend="reference"))


@kernels
def test_hard_draws_of_sure_and_impossible_classes():
    logits = torch.full((1, 4), -1e30, device=DEVICE)
    logits[:, 2] = 1e30
    noise = torch.tensor([2.0**-24, 0.5, 1 - 2.0**-24], device=DEVICE)
    assert inverse_cdf(logits, noise[:, None], backend="triton").flatten().tolist() == [2, 2, 2]


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_float32_inside(dtype):
    logits, noise = normal(2, 3, 4, 16, dtype=dtype), noises(2, 3, 4, 16)
    z, kl, grad = draw(logits, noise, "triton", dtype)
    exact_z, exact_kl, exact_grad = draw(logits.double(), noise.double(), "reference")
    assert_same_draw(logits, noise, z, exact_z)
    assert z.dtype == grad.dtype == dtype
    assert relative_error(kl, exact_kl) < SINGLE
    assert relative_error(grad, exact_grad) < HALF


@BACKENDS
@pytest.mark.parametrize("u", [1e-45, 2.0**-25, 0.5, 1 - 2.0**-24])
def test_finite_for_extreme_logits_and_noise(u, backend):
    logits = torch.tensor([[[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e4, 1e4, 1e4]]], device=DEVICE)
    noise = torch.full((1, 3, 3), u, device=DEVICE)
    noise[..., 1] = 0.5
    results = draw(logits, noise, backend)
    assert all(torch.isfinite(result).all() for result in results)
    # No noise lifts a class by 1e4 nats.
    assert torch.equal(results[0][0, 0], torch.tensor([1.0, 0.0, 0.0], device=DEVICE))


@BACKENDS
def test_gradient_of_one_result_alone(backend):
    logits, noise, weight = (
        normal(2, 3, 5).requires_grad_(),
        noises(2, 3, 5),
        normal(2, 3, 5, seed=1),
    )
    for part in (lambda z, kl: (z * weight).sum(), lambda z, kl: kl.square().sum()):
        given, wanted = (
            torch.autograd.grad(part(*sample_and_kl(logits, noise, backend=one)), logits)[0]
            for one in (backend, "reference")
        )
        assert relative_error(given, wanted) < SINGLE


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 5), (4, 7, 1, 33), (5, 33, 16)], ids=str)
def test_kl_to_a_prior_matches_float64(shape, dtype, backend):
    if backend == "numba" and dtype != torch.float32:
        pytest.skip("float32 only")
    noise = noises(*shape)
    logits, prior = (3 * normal(*shape, seed=seed).to(dtype) for seed in (0, 4))

    def run(logits, prior, backend):
        logits, prior = (values.detach().requires_grad_() for values in (logits, prior))
        z, kl = sample_and_kl(logits, noise, None, prior, backend)
        total = (z.double() * normal(*z.shape, seed=1).double()).sum() + (kl.double() * 3).sum()
        return z.detach(), kl.detach(), *torch.autograd.grad(total, (logits, prior))

    given, wanted = run(logits, prior, backend), run(logits.double(), prior.double(), "reference")
    assert_same_draw(logits, noise, given[0], wanted[0])
    assert relative_error(given[1], wanted[1]) < SINGLE
    for result, exact in zip(given[2:], wanted[2:], strict=True):
        assert result.dtype == dtype
        assert relative_error(result, exact) < (SINGLE if dtype == torch.float32 else HALF)
    (repeated,) = run(logits, logits, backend)[1:2]
    assert repeated.abs().max() < 1e-4  # of itself


@kernels
def test_results_repeat_bit_for_bit_and_strides_do_not_matter():
    logits, noise = normal(3, 2, 5, 7), noises(3, 2, 5, 7)
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (logits, noise)]
    assert not any(t.is_contiguous() for t in strided)
    first, second = draw(logits, noise, "triton"), draw(*strided, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@BACKENDS
@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5)])
def test_draws_of_no_latents(shape, backend):
    z, kl, grad = draw(normal(*shape), noises(*shape), backend)
    assert (
        z.shape == grad.shape == shape
        and torch.equal(kl, torch.zeros_like(kl))
        and len(kl) == shape[0]
    )


check = partial(
    torch.library.opcheck,
    test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
)


@BACKENDS
def test_operators_of_latents_are_registered_properly(backend):
    logits, noise = normal(2, 3, 5).requires_grad_(), noises(2, 3, 5)
    check(torch.ops.vssm.sample_and_kl.default, (logits, None, noise, torch.float32, backend))
    prior = normal(2, 3, 5, seed=1).requires_grad_()
    check(torch.ops.vssm.sample_and_kl.default, (logits, prior, noise, torch.bfloat16, backend))


@kernels
def test_without_gradients_the_values_are_the_same():
    logits, noise = normal(2, 3, 5).requires_grad_(), noises(2, 3, 5)
    with torch.no_grad():
        plain = sample_and_kl(logits, noise, backend="triton")
    values = sample_and_kl(logits, noise, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(values, plain, strict=True))


def test_the_twin_has_the_right_gradients():
    logits = normal(2, 3, 4, dtype=torch.float64).requires_grad_()
    noise = noises(2, 3, 4).double()
    assert torch.autograd.gradcheck(lambda v: sample_and_kl(v, noise)[1], logits)


@pytest.mark.skipif(DEVICE == "cuda", reason="compares two ways that are one on a CPU")
def test_latents_draw_and_score_in_one_call_as_in_two():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        latents, noise = Latents(normal(2, 3, 4, 5, dtype=dtype)), noises(2, 3, 4, 5)
        z, kl = latents.rsample_and_kl(noise)
        assert torch.equal(z, latents.rsample(noise))
        torch.testing.assert_close(kl, latents.kl_to_uniform(), rtol=1e-6, atol=1e-6)
        half, _ = latents.rsample_and_kl(noise, torch.bfloat16)
        assert half.dtype == torch.bfloat16 and torch.equal(half.to(z.dtype), z)


@pytest.mark.skipif(DEVICE == "cuda", reason="the twin of a CPU")
@pytest.mark.parametrize("autocast", [False, True])
def test_norm_is_that_of_torch_on_a_cpu(autocast):
    x, mine, theirs = normal(3, 5, 16), RMSNorm(16, eps=1e-5), torch.nn.RMSNorm(16, eps=1e-5)
    with torch.no_grad():
        theirs.weight.copy_(normal(16, seed=1))
    assert list(mine.state_dict()) == ["weight"]
    mine.load_state_dict(theirs.state_dict())
    product, results = torch.nn.Linear(16, 4), []
    for module in (mine, theirs):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = product(module(leaf))
        results.append((y, *torch.autograd.grad(y.float().square().sum(), (leaf, module.weight))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: sample_and_kl(torch.zeros(2, 3), torch.rand(2, 3), backend="cuda"),
            "backend='cuda' is unknown; choose from 'auto', 'reference', 'numba', 'triton'",
        ),
        (
            lambda: sample_and_kl(torch.zeros(2, 3).double(), torch.rand(2, 3), backend="numba"),
            "backend='numba' cannot run here: it runs float32 on a CPU, .*; choose 'auto' or .*",
        ),
        (
            lambda: sample_and_kl(torch.zeros(2, 3).double(), torch.rand(2, 3), backend="triton"),
            "backend='triton' cannot run here: .*; choose 'auto' or 'reference'",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()


@kernels
@pytest.mark.parametrize("autocast", [False, True])
def test_objective_agrees_with_the_plain_path(monkeypatch, autocast):
    from vssm.ops import latents

    model = small_model("vssm", layers=1).to(DEVICE)
    x = sequences(model, 2, 3).to(DEVICE)

    def score(backend):
        asked = []
        monkeypatch.setattr(latents, "_choose", lambda *_: asked.append(1) or backend)
        generator = torch.Generator(DEVICE).manual_seed(0)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            terms = objective(model, x, generator)
        grads = torch.autograd.grad(terms.loss.sum(), list(model.parameters()))
        assert len(asked) == 1
        return torch.cat([value.flatten() for value in (*terms, *grads)])

    given = score("triton")
    assert torch.isfinite(given).all()
    assert relative_error(given, score("reference")) < (HALF if autocast else SINGLE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_sizes(dtype):
    shape = (64, 28, 32, 32)
    logits, noise = normal(*shape, dtype=dtype) * 2, noises(*shape)
    z, kl, grad = draw(logits, noise, "triton", dtype)
    exact = draw(logits.double(), noise.double(), "reference")
    assert_same_draw(logits, noise, z, exact[0])
    limit = SINGLE if dtype == torch.float32 else HALF
    assert relative_error(kl, exact[1]) < SINGLE and relative_error(grad, exact[2]) < limit


@pytest.mark.gpu
def test_kernels_can_be_captured():
    logits, noise = normal(4, 5, 32, 32).requires_grad_(), noises(4, 5, 32, 32)

    def work():
        z, kl = sample_and_kl(logits, noise, torch.bfloat16)
        return kl, *torch.autograd.grad(z.float().sum() + kl.sum(), logits)

    wanted = [value.detach().clone() for value in work()]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    graph.replay()
    assert all(torch.equal(given, value) for given, value in zip(results, wanted, strict=True))
    assert results[0].isfinite().all()


def classes_of(latents, classes, *steps):
    return torch.randint(classes, (*steps, latents), generator=torch.Generator().manual_seed(0)).to(
        DEVICE
    )


@kernels
@pytest.mark.parametrize("size", [(3, 5, 40), (32, 4, 130), (1, 7, 16), (60, 2, 9)], ids=str)
@torch.no_grad()
def test_embed_sum(size):
    latents, classes, width = size
    weight = normal(latents * classes, width)
    for steps in ((2, 3), (1,), ()):
        z = classes_of(latents, classes, *steps)
        given = embed_sum(z, weight, backend="triton")
        assert given.shape == (*steps, width)
        assert relative_error(given, embed_sum(z, weight.double(), backend="reference")) < 1e-6
    strided = classes_of(latents, classes, 5, 2).movedim(1, 0)
    wanted = embed_sum(strided, weight, backend="reference")
    assert relative_error(embed_sum(strided, weight, backend="triton"), wanted) < 1e-6
    assert embed_sum(strided[:0], weight, backend="triton").shape == (0, 5, width)
    assert embed_sum(strided, weight.bfloat16(), backend="triton").dtype == torch.bfloat16


@kernels
@torch.no_grad()
def test_embed_sum_of_unknown_classes_is_not_a_number():
    z, weight = torch.tensor([[0, 1], [2, 0], [0, -1]], device=DEVICE), normal(4, 8)
    given = embed_sum(z, weight, backend="triton")
    assert torch.isfinite(given[0]).all() and given[1:].isnan().all()
