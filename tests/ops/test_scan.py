"""The selective scan: every backend against the reference in float64, with all gradients."""

import math
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import relative_error
from vssm.ops import choose_backend, selective_scan
from vssm.ops.scan.ahead import scan_ahead
from vssm.ops.scan.reference import selective_scan_reference

KERNELS = ("numba",)
TENSORS = ("u", "dt", "A", "B", "C", "D", "z", "dt_bias", "h0")
OPTIONAL = ("D", "z", "dt_bias", "h0")
TOLERANCE = 1e-5  # relative, in norm


def arguments(batch, length, channels, states, given=OPTIONAL, softplus=True, seed=0):
    """Random arguments of `selective_scan` by name, of the magnitude of a fresh Mamba layer."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    made = {
        "u": normal(batch, length, channels),
        "dt": normal(batch, length, channels) - 3
        if softplus
        else 0.2 * normal(batch, length, channels) ** 2,
        "A": -torch.arange(1.0, states + 1) * torch.exp(0.3 * normal(channels, states)),
        "B": normal(batch, length, states),
        "C": normal(batch, length, states),
        "D": normal(channels),
        "z": normal(batch, length, channels),
        # Negative steps would make states grow without bound.
        "dt_bias": 0.1 * (normal(channels) if softplus else normal(channels).abs()),
        "h0": normal(batch, channels, states),
    }
    absent = dict.fromkeys(name for name in OPTIONAL if name not in given)
    return {**made, **absent, "softplus": softplus}


def loss(y, h):
    """Weighs every number of both outputs differently."""
    return sum(
        (x * torch.cos(torch.arange(x.numel(), dtype=x.dtype).view_as(x))).sum() for x in (y, h)
    )


def run(values, backend, dtype=torch.float32, function=selective_scan):
    """Returns y, h and the gradients of `loss` for all tensors given, by name."""
    values = {
        name: value.detach().to(dtype).requires_grad_()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in values.items()
    }
    y, h = function(**values, backend=backend)
    leaves = {name: values[name] for name in TENSORS if values[name] is not None}
    grads = torch.autograd.grad(loss(y, h), list(leaves.values()))
    return {"y": y.detach(), "h": h.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_close(given, expected, tolerance=TOLERANCE):
    assert given.keys() == expected.keys()
    errors = {name: relative_error(given[name], expected[name]) for name in expected}
    assert all(error < tolerance for error in errors.values()), errors


def exact(values):
    return run(values, "reference", torch.float64)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("batch", "length", "channels", "states"),
    [
        (1, 1, 1, 1),
        (3, 1, 500, 16),
        (1, 2, 24, 3),
        (3, 63, 24, 16),
        (1, 64, 128, 17),
        (3, 65, 1, 3),
        (1, 500, 24, 1),
        (1, 1000, 1, 16),
        (1, 65, 500, 16),
        (18, 5, 40, 4),
    ],
)
def test_matches_the_reference(backend, batch, length, channels, states):
    values = arguments(batch, length, channels, states)
    assert_close(run(values, backend), exact(values))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize(
    "given", [(), *((name,) for name in OPTIONAL), ("D", "z"), ("dt_bias", "h0")]
)
def test_optional_arguments(backend, given, softplus):
    values = arguments(2, 37, 20, 5, given=given, softplus=softplus)
    assert_close(run(values, backend), exact(values))


@pytest.mark.parametrize("backend", ("reference", *KERNELS))
def test_no_state_is_a_zero_state(backend):
    values = arguments(2, 9, 5, 3, given=("D",))
    zero = {**values, "h0": torch.zeros(2, 5, 3)}
    first, second = run(values, backend), run(zero, backend)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("backend", KERNELS)
def test_any_strides(backend):
    """Slices of one projection, as in a Mamba layer, and transposed or repeated tensors."""
    values = arguments(3, 37, 20, 6)
    projected = torch.cat((values["u"], values["z"]), dim=-1)
    joint = torch.cat((values["dt"], values["B"], values["C"]), dim=-1)
    strided = {
        **values,
        "u": projected[..., :20],
        "z": projected[..., 20:],
        "dt": joint[..., :20],
        "B": joint[..., 20:26],
        "C": joint[..., 26:],
        "A": values["A"].T.contiguous().T,
        "h0": values["h0"].transpose(1, 2).contiguous().transpose(1, 2),
        "D": values["D"].repeat_interleave(2)[::2],
    }
    with torch.no_grad():
        plain, given = (
            selective_scan(**values, backend=backend),
            selective_scan(**strided, backend=backend),
        )
    assert torch.equal(plain[0], given[0])
    assert torch.equal(plain[1], given[1])
    by_time = {
        name: strided[name].transpose(0, 1).contiguous().transpose(0, 1)
        for name in ("u", "dt", "B", "C", "z")
    }
    by_step = {
        name: values[name].transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("u", "dt", "B", "C", "z")
    }
    for others in (by_time, by_step):
        y, h = selective_scan(**{**strided, **others}, backend=backend)
        assert torch.equal(plain[0], y)
        assert torch.equal(plain[1], h)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("reduce", ["sum of y", "sum of h", "transposed"])
def test_gradients_of_any_strides(backend, reduce):
    def scalar(y, h):
        if reduce == "sum of y":
            return y.sum()
        if reduce == "sum of h":
            return h.sum()
        return loss(y.transpose(1, 2), h.transpose(1, 2))

    def grads(backend, dtype):
        values = {
            name: value.to(dtype).requires_grad_() if isinstance(value, torch.Tensor) else value
            for name, value in arguments(2, 35, 20, 3).items()
        }
        scalar(*selective_scan(**values, backend=backend)).backward()
        grads = {name: values[name].grad for name in TENSORS}
        return {name: torch.zeros(()) if grad is None else grad for name, grad in grads.items()}

    assert_close(grads(backend, torch.float32), grads("reference", torch.float64))


@pytest.mark.parametrize("backend", ("reference", *KERNELS))
@pytest.mark.parametrize("given", [(), ("h0",)])
def test_no_steps(backend, given):
    values = arguments(2, 0, 5, 3, given=given)
    y, h = selective_scan(**values, backend=backend)
    assert y.shape == (2, 0, 5)
    assert torch.equal(h, values["h0"] if given else torch.zeros(2, 5, 3))


@pytest.mark.parametrize("backend", KERNELS)
def test_gradients_of_no_steps(backend):
    made = run(arguments(2, 0, 5, 3), backend)
    assert torch.equal(made["h0"], torch.cos(torch.arange(30.0)).view(2, 5, 3))
    assert made["u"].shape == made["z"].shape == (2, 0, 5)
    assert all(not made[name].any() for name in ("A", "D", "dt_bias"))


@pytest.mark.parametrize("backend", KERNELS)
def test_no_batch(backend):
    made = run(arguments(0, 7, 5, 3), backend)
    assert made["y"].shape == (0, 7, 5)
    assert torch.equal(made["A"], torch.zeros(5, 3))


def _in_parts(cuts, backend):
    """The scan as several calls, each starting from the state of the one before."""

    def function(u, dt, A, B, C, D, z, dt_bias, softplus, h0, backend=backend):
        outputs, h = [], h0
        for start, stop in zip((0, *cuts), (*cuts, u.shape[1]), strict=True):
            part = (x[:, start:stop] for x in (u, dt, B, C))
            u_, dt_, B_, C_ = part
            z_ = None if z is None else z[:, start:stop]
            y, h = selective_scan(u_, dt_, A, B_, C_, D, z_, dt_bias, softplus, h, backend)
            outputs.append(y)
        return torch.cat(outputs, 1), h

    return function


@pytest.mark.parametrize("backend", KERNELS)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 80), st.integers(1, 40), st.integers(1, 18)),
    where=st.lists(st.floats(0, 1), min_size=1, max_size=2),
    optional=st.lists(st.sampled_from(OPTIONAL), unique=True),
    softplus=st.booleans(),
)
@settings(max_examples=15)
def test_cutting_a_sequence_anywhere_changes_nothing(backend, shape, where, optional, softplus):
    values = arguments(*shape, given=optional, softplus=softplus)
    cuts = sorted(round(share * shape[1]) for share in where)
    assert_close(run(values, backend, function=_in_parts(cuts, backend)), run(values, backend))


@pytest.mark.parametrize("backend", KERNELS)
def test_one_step_at_a_time(backend):
    values = arguments(2, 9, 20, 5)
    assert_close(run(values, backend, function=_in_parts(range(1, 9), backend)), exact(values))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("constant", [True, False])
def test_slow_decay_over_a_long_sequence(backend, constant):
    """Rounding exp(dt A) to float32 would cost 1e-5: 2048 factors, all off in the same way."""
    values = arguments(1, 2048, 8, 4, given=(), softplus=False)
    values["dt"] = torch.full((1, 2048, 8), 1e-4) if constant else torch.rand(1, 2048, 8) * 2e-3
    assert_close(run(values, backend), exact(values), 3e-6)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 10.0, 1e3, 1e30])
def test_steps_of_any_size(backend, scale):
    values = arguments(1, 40, 20, 3, given=("D", "h0"), softplus=False)
    values["dt"] = values["dt"] * scale
    values["u"] = values["u"] / max(scale, 1.0)
    made = run(values, backend)
    assert all(torch.isfinite(value).all() for value in made.values())
    expected = exact(values)
    # After a decay of e^-100 a state is zero in float32, and so are its derivatives.
    names = [name for name in expected if expected[name].abs().max() > 1e-20]
    assert {"y", "h", "u", "B", "C"} <= set(names)
    assert_close({name: made[name] for name in names}, {name: expected[name] for name in names})


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("level", [-100.0, -20.0, 20.0, 100.0])
def test_extremes_of_softplus_and_gate(backend, level):
    values = arguments(1, 12, 20, 3)
    values["dt"] = values["dt"] + level
    values["z"] = values["z"] - level
    values["A"] = values["A"] / max(level, 1.0)
    made, expected = run(values, backend), exact(values)
    for name in expected:
        # Both agree, or both are zero as far as float32 can tell.
        difference = (made[name] - expected[name]).norm()
        assert difference <= TOLERANCE * expected[name].norm() + 1e-30, name


def test_nan_stays_in_its_channel():
    values = arguments(1, 4, 20, 3, given=(), softplus=False)
    values["u"][0, 1, 5] = math.nan
    for backend in KERNELS:
        y, h = selective_scan(**values, backend=backend)
        assert torch.isnan(y[0, 1:, 5]).all()
        assert torch.isnan(h[0, 5]).all()
        assert torch.isfinite(y[0, :, :5]).all()
        assert torch.isfinite(y[0, :, 6:]).all()
        assert torch.isfinite(y[0, :1]).all()


@pytest.mark.parametrize("softplus", [False, True])
def test_gradcheck_of_the_reference(softplus):
    values = arguments(2, 5, 3, 2, softplus=softplus)
    tensors = [values[name].double().requires_grad_() for name in TENSORS]

    def function(*tensors):
        return selective_scan_reference(*tensors, softplus)

    assert torch.autograd.gradcheck(function, tensors)


def test_the_reference_runs_many_small_steps_together():
    """Wide states take one step at a time, narrow ones many: the numbers are the same."""
    wide = {
        name: v.double() for name, v in arguments(1, 37, 1200, 16).items() if name != "softplus"
    }
    narrow = {
        name: v[..., :3] if v.shape[-1] == 1200 else v[:3] if len(v) == 1200 else v
        for name, v in wide.items()
    } | {"h0": wide["h0"][:, :3]}
    made = []
    for values in (wide, narrow):
        leaves = [values[name].requires_grad_() for name in ("u", "dt", "h0")]
        y, h = selective_scan(**values, softplus=True, backend="reference")
        made.append((y, h, *torch.autograd.grad(y.sum() + h.sum(), leaves)))
    for (name, dim), one, other in zip(
        [("y", 2), ("h", 1), ("u", 2), ("dt", 2), ("h0", 1)], *made, strict=True
    ):
        assert relative_error(other, one.narrow(dim, 0, 3)) < 1e-12, name


class Counter(TorchDispatchMode):
    """Counts the operations that PyTorch runs."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_the_reference_is_no_loop_over_time():
    values = arguments(1, 256, 4, 4)
    with Counter() as counter:
        selective_scan(**values, backend="reference")
    assert counter.count < 256


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("given", [(), OPTIONAL])
def test_operator_is_registered_properly(backend, given):
    values = arguments(2, 5, 3, 2, given=given)
    tensors = [None if values[name] is None else values[name].requires_grad_() for name in TENSORS]
    check = torch.library.opcheck
    check(torch.ops.vssm.selective_scan.default, (*tensors, None, True, backend, True))


@pytest.mark.parametrize("backend", KERNELS)
def test_compiled(backend):
    def function(**values):
        y, h = selective_scan(**{**values, "u": values["u"].sin()})
        return y.cos(), h

    values = arguments(2, 6, 5, 3)
    compiled = torch.compile(function, fullgraph=True)
    assert_close(
        run(values, backend, function=compiled), run(values, backend, function=function), 1e-6
    )


@pytest.mark.parametrize("backend", KERNELS)
def test_same_bits_for_any_number_of_threads(backend):
    values = arguments(3, 65, 200, 16)
    threads = torch.get_num_threads()
    try:
        runs = []
        for count in (1, 2, 2, 5):
            torch.set_num_threads(count)
            runs.append(run(values, backend))
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(torch.equal(runs[0][name], other[name]) for name in other)


@pytest.mark.parametrize("backend", KERNELS)
def test_calls_from_many_threads(backend):
    sets = [arguments(2, 40, 300, 16, seed=seed) for seed in range(4)]
    expected = [run(values, backend) for values in sets]
    wrong = []

    def work(i):
        for _ in range(3):
            made = run(sets[i], backend)
            wrong.extend(name for name in made if not torch.equal(made[name], expected[i][name]))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


@pytest.mark.parametrize("backend", KERNELS)
def test_never_reads_uninitialised_memory(backend, monkeypatch):
    values = arguments(3, 35, 20, 5)
    expected = run(values, backend)

    def filled(make):
        return lambda *args, **options: make(*args, **options).fill_(math.nan)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", filled(torch.empty))
        patch.setattr(torch, "empty_like", filled(torch.empty_like))
        patch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))
        made = run(values, backend)
    assert all(torch.equal(made[name], expected[name]) for name in expected)


MEMORY = """
import torch
from pathlib import Path
from vssm.ops import selective_scan

def step(backend, batch, length, channels, states):
    u, dt, z = (torch.rand(batch, length, channels, requires_grad=True) for _ in range(3))
    B, C = (torch.rand(batch, length, states, requires_grad=True) for _ in range(2))
    A = -torch.rand(channels, states)
    y, h = selective_scan(u, dt, A.requires_grad_(), B, C, z=z, softplus=True, backend=backend)
    (y.sum() + h.sum()).backward()

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

torch.set_num_threads(1)
for backend in ("numba", "reference"):
    step(backend, 1, 2, 3, 4)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = status("VmRSS")
    step(backend, 2, 256, 128, 64)
    print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_far_below_all_states():
    states = 4 * 2 * 256 * 128 * 64  # bytes of h for every step
    command = [sys.executable, "-c", MEMORY]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numba, reference = map(int, printed.split())
    assert reference > states  # the measurement sees what there is to see
    assert numba < states / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"u": torch.zeros(2, 7)}, r"u has shape \(2, 7\); it must be \(batch, length, channels\)"),
        (
            {"u": torch.zeros(2, 7, 5, dtype=torch.int64)},
            r"u has dtype torch.int64; it must be a floating",
        ),
        (
            {"A": torch.zeros(4, 3)},
            r"A has shape \(4, 3\); it must be \(5, states\) with states >= 1",
        ),
        (
            {"A": torch.zeros(5, 0)},
            r"A has shape \(5, 0\); it must be \(5, states\) with states >= 1",
        ),
        ({"dt": torch.zeros(2, 7, 1)}, r"dt has shape \(2, 7, 1\); u and A ask for \(2, 7, 5\)"),
        ({"B": torch.zeros(2, 7, 5)}, r"B has shape \(2, 7, 5\); u and A ask for \(2, 7, 3\)"),
        ({"C": torch.zeros(7, 3)}, r"C has shape \(7, 3\); u and A ask for \(2, 7, 3\)"),
        ({"D": torch.zeros(3)}, r"D has shape \(3,\); u and A ask for \(5,\)"),
        ({"z": torch.zeros(2, 6, 5)}, r"z has shape \(2, 6, 5\); u and A ask for \(2, 7, 5\)"),
        ({"dt_bias": torch.zeros(1)}, r"dt_bias has shape \(1,\); u and A ask for \(5,\)"),
        ({"h0": torch.zeros(1, 5, 3)}, r"h0 has shape \(1, 5, 3\); u and A ask for \(2, 5, 3\)"),
        (
            {"C": torch.zeros(2, 7, 3, device="meta")},
            "C is on meta, but u is on cpu; move one of them",
        ),
        (
            {"A": torch.zeros(5, 3, device="meta")},
            "A is on meta, but u is on cpu; move one of them",
        ),
        (
            {"backend": "cuda"},
            "backend='cuda' is unknown; choose from 'auto', 'reference', 'numba', 'triton'",
        ),
        (
            {"u": torch.zeros(2, 7, 5, dtype=torch.float64), "backend": "numba"},
            "backend='numba' cannot run here: it runs float32 on a CPU, not torch.float64 on cpu;",
        ),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message) as error:
        selective_scan(**{**arguments(2, 7, 5, 3), **change})
    assert "\n" not in str(error.value)


def test_automatic_choice():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_backend("auto", cpu, torch.float32) == "numba"
    assert choose_backend("auto", cpu, torch.bfloat16) == "reference"
    assert choose_backend("auto", cuda, torch.float64) == "reference"


@pytest.mark.parametrize("name", ["A", "B", "h0"])
def test_complex_numbers_and_arrays_are_refused(name):
    values = {"u": torch.ones(1, 3, 2), "dt": torch.ones(1, 3, 2), "A": -torch.ones(2, 1)}
    values |= {"B": torch.ones(1, 3, 1), "C": torch.ones(1, 3, 1), "h0": torch.zeros(1, 2, 1)}
    for wrong, told in (
        (values[name].to(torch.complex64), "torch.complex64"),
        (values[name].numpy(), "ndarray"),
    ):
        with pytest.raises(
            ValueError, match=f"{name} is {told}; it must be a tensor of real numbers"
        ):
            selective_scan(**{**values, name: wrong})


@pytest.mark.parametrize(
    "sizes", [(1, 1, 5, 3), (3, 2, 17, 1), (2, 33, 40, 5), (2, 71, 16, 16), (9, 8, 33, 7)]
)
def test_the_scan_ahead_holds_the_state_at_even_steps(sizes):
    values = arguments(*sizes)
    values = {name: v if name == "softplus" else v.double() for name, v in values.items()}
    made = scan_ahead(**{name: v for name, v in values.items() if name != "softplus"})
    h = values["h0"]
    for t in range(sizes[1]):
        step = {name: values[name][:, t : t + 1] for name in ("u", "dt", "B", "C", "z")}
        y, after = selective_scan(**{**values, **step, "h0": h})
        assert relative_error(made[:, t : t + 1], y) < 1e-12
        h = after if t % 2 else h


@pytest.mark.parametrize(
    "sizes", [(1, 1, 5, 3), (3, 2, 17, 1), (2, 33, 40, 5), (2, 71, 16, 16), (9, 8, 33, 7)]
)
def test_the_scan_ahead_equals_its_twin(sizes):
    values = arguments(*sizes)
    del values["softplus"]
    for h0 in (None, values["h0"], values["h0"][:1].expand(sizes[0], -1, -1)):
        given = {**values, "h0": h0}
        exact = {name: None if v is None else v.double() for name, v in given.items()}
        for backend in KERNELS:
            made = scan_ahead(**given, backend=backend)
            assert relative_error(made, scan_ahead(**exact, backend="reference")) < TOLERANCE


def test_the_example_of_the_page_runs():
    page = Path(__file__).parents[2] / "docs" / "kernels.md"
    (example,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(example, page.name, "exec"), names)
    assert names["u"].grad.isfinite().all() and names["rest"].shape == names["u"].shape
    assert names["packed"].shape == (1, 100, 64) and names["ends"].shape == (2, 64, 16)
