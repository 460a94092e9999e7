"""The Triton kernels against the reference in float64: compiled on a GPU, else interpreted."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.conftest import relative_error
from tests.interpreter import DEVICE, INTERPRETED, kernels, needs_interpreter, run_interpreted
from tests.ops.test_scan import OPTIONAL, TENSORS, arguments, assert_close
from vssm.ops import choose_backend, selective_scan
from vssm.ops.scan.ahead import scan_ahead

pytest.importorskip("triton")

HALF = 1e-2  # relative, in norm


@needs_interpreter
def test_in_the_interpreter():
    run_interpreted(__file__)


@pytest.fixture
def small(monkeypatch):
    """Makes the kernels cut small problems as they cut large ones."""
    from vssm.ops.scan import triton as scan_triton

    def plans(chunk):
        plan = scan_triton.Plan(chunk, 32, 2, None, True)
        backward = plan._replace(programs=3)
        monkeypatch.setattr(scan_triton, "plan_forward", lambda *_, **__: plan)
        # Two lanes share a channel if its states (the fourth argument) can be halved.
        monkeypatch.setattr(
            scan_triton, "plan_backward", lambda *sizes: backward._replace(parts=2 - sizes[3] % 2)
        )

    return plans


def to_device(values, dtype=torch.float32):
    """Rows of u, z and of B, C as slices of one tensor each, as a Mamba block makes them."""
    values = {
        name: value.to(DEVICE) if torch.is_tensor(value) else value
        for name, value in values.items()
    }
    for left, right in (("u", "z"), ("B", "C")):
        if values[right] is not None:
            both = torch.cat((values[left], values[right]), 2).to(dtype)
            values[left], values[right] = both.split(values[left].shape[2], 2)
    return {**values, "dt": values["dt"].to(dtype), "u": values["u"].to(dtype)}


def outputs(values, backend="triton", function=selective_scan):
    """Returns y, h and the gradients of a weighted sum of both, by name."""
    leaves = {
        name: values[name].detach().requires_grad_() for name in TENSORS if values[name] is not None
    }
    y, h = function(**{**values, **leaves}, backend=backend)
    # Numbers that every dtype has: the gradient that enters is the same for all.
    weights = [
        torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).bfloat16() for x in (y, h)
    ]
    total = sum((x * weight.to(x)).sum() for x, weight in zip((y, h), weights, strict=True))
    grads = torch.autograd.grad(total, list(leaves.values()))
    return {"y": y.detach(), "h": h.detach(), **dict(zip(leaves, grads, strict=True))}


def expected(values):
    exact_values = {name: v.double() if torch.is_tensor(v) else v for name, v in values.items()}
    return outputs(exact_values, "reference")


@kernels
@pytest.mark.parametrize(
    ("batch", "length", "channels", "states", "chunk"),
    [
        (2, 5, 7, 3, 5),
        (1, 1, 33, 16, 1),
        (2, 8, 32, 4, 4),
        (1, 7, 40, 16, 4),
        (2, 8, 16, 16, 4),
        (1, 11, 33, 5, 8),
        (2, 3, 4, 17, 3),
        (2, 6, 5, 1, 4),
        (1, 5, 20, 32, 4),
    ],
)
def test_matches_float64_reference(small, batch, length, channels, states, chunk):
    small(chunk)
    values = to_device(arguments(batch, length, channels, states))
    assert_close(outputs(values), expected(values))


@kernels
@pytest.mark.parametrize(
    ("batch", "length", "channels", "states", "parts", "block", "warps"),
    [
        (2, 7, 10, 16, 8, 8, 2),
        (1, 16, 8, 16, 8, 16, 2),
        (2, 8, 16, 8, 4, 8, 1),
        (1, 9, 17, 16, 2, 4, 1),
        (1, 5, 3, 6, 2, 2, 1),
    ],
)
@torch.no_grad()
def test_lanes_that_share_a_channel(
    monkeypatch, batch, length, channels, states, parts, block, warps
):
    from vssm.ops.scan import triton as scan_triton

    plan = scan_triton.Plan(length, 32 * warps, block, None, True, parts=parts, warps=warps)
    monkeypatch.setattr(scan_triton, "plan_forward", lambda *_, **__: plan)
    for given in (TENSORS, ("z",), ()):
        values = to_device(arguments(batch, length, channels, states, given, given != ()))
        exact = {name: v.double() if torch.is_tensor(v) else v for name, v in values.items()}
        for made, wanted in zip(
            selective_scan(**values, backend="triton"),
            selective_scan(**exact, backend="reference"),
            strict=True,
        ):
            assert relative_error(made, wanted) < 1e-6
    values = to_device(arguments(batch, length, channels, states), torch.bfloat16)
    exact = {name: v.double() if torch.is_tensor(v) else v for name, v in values.items()}
    made, wanted = (
        selective_scan(**kind, backend=backend)
        for kind, backend in ((values, "triton"), (exact, "reference"))
    )
    assert relative_error(made[0], wanted[0]) < HALF and relative_error(made[1], wanted[1]) < 1e-5


def unaligned(tensor):
    moved = torch.cat((tensor[..., :1], tensor), 2)[..., 1:]
    assert moved.data_ptr() % 16 != 0
    return moved


@pytest.fixture
def rings(monkeypatch, request):
    """Plans short sequences like long ones; returns a list that grows with every ring."""
    from vssm.ops.scan import triton as scan_triton
    from vssm.ops.scan.triton_plans import plan_ring

    ring = plan_ring(8, getattr(request, "param", 2), wide=False)._replace(length=4096)
    chunks = scan_triton.Plan(8, 64, 2, None, True)
    made = []
    run = scan_triton.Call.scan_ring
    monkeypatch.setattr(
        scan_triton,
        "plan_forward",
        lambda *sizes, copies=True, **_: chunks if sizes[1] % 8 or not copies else ring,
    )
    monkeypatch.setattr(
        scan_triton.Call, "scan_ring", lambda *inputs: made.append(1) or run(*inputs)
    )
    return made


def assert_ring(values, rings, tolerance):
    """Compares y and the last state with the reference in float64, and returns them."""
    rings.clear()
    exact = {name: v.double() if torch.is_tensor(v) else v for name, v in values.items()}
    made = selective_scan(**values, backend="triton")
    wanted = selective_scan(**exact, backend="reference")
    assert len(rings) == 1
    assert (
        relative_error(made[0], wanted[0]) < tolerance and relative_error(made[1], wanted[1]) < 1e-5
    )
    return made


@kernels
@pytest.mark.parametrize(
    ("given", "softplus"),
    [
        ((), True),
        ((), False),
        (OPTIONAL, True),
        (("D", "dt_bias"), False),
        *(((name,), True) for name in OPTIONAL),
    ],
)
@torch.no_grad()
def test_a_ring_with_every_optional_argument(rings, given, softplus):
    length = 8 * (1 + len(given) + softplus)  # fewer and more blocks than the ring has slots
    # A step size that is not positive lets errors grow with the state.
    tolerance = 1e-6 if softplus else 1e-5
    assert_ring(to_device(arguments(1, length, 64, 16, given, softplus)), rings, tolerance)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rings", "batch", "length", "channels", "states"),
    [(2, 2, 40, 64, 16), (4, 1, 24, 128, 8), (8, 1, 24, 64, 16)],
    indirect=["rings"],  # lanes a channel
)
@torch.no_grad()
def test_a_ring_of_every_dtype(rings, batch, length, channels, states, dtype):
    values = to_device(arguments(batch, length, channels, states), dtype)
    first, second = (
        assert_ring(values, rings, 1e-6 if dtype == torch.float32 else HALF) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    other = (
        torch.bfloat16 if dtype == torch.float32 else torch.float32
    )  # B and C need not be of the dtype of u
    assert_ring({**values, "B": values["B"].to(other), "C": values["C"].to(other)}, rings, HALF)


@kernels
@torch.no_grad()
def test_inputs_that_a_ring_can_not_copy_run_in_chunks(rings):
    values = to_device(arguments(1, 16, 64, 16))
    wanted = selective_scan(**values, backend="triton")
    assert rings
    rings.clear()

    pairs = ("u", "dt", "z"), ("B", "C")
    others = [{name: unaligned(values[name])} for names in pairs for name in names]
    # Rows that start at whole 16 bytes, but for those after the first.
    others.append({"B": torch.cat((values["B"], values["B"][..., :1]), 2)[..., :16]})
    # Half precision of one kind only, and the same for what lies together.
    for names, dtype in (
        (pairs[0], torch.float16),
        (("u",), torch.bfloat16),
        (("C",), torch.bfloat16),
    ):
        others.append({name: values[name].to(dtype) for name in names})
    for other in others:
        y, h = selective_scan(**{**values, **other}, backend="triton")
        half = any(value.dtype != torch.float32 for value in other.values())
        assert relative_error(y, wanted[0]) < (HALF if half else 1e-6)
        assert relative_error(h, wanted[1]) < (HALF if half else 1e-6)
    assert not rings
    # The whole blocks of an odd length are what a ring makes of them.
    longer = to_device(arguments(1, 19, 64, 16))
    y, h = selective_scan(**longer, backend="triton")
    assert not rings
    cuts = [
        {name: longer[name][:, rows] for name in ("u", "dt", "B", "C", "z")}
        for rows in (slice(0, 16), slice(16, 19))
    ]
    first, state = selective_scan(**{**longer, **cuts[0]}, backend="triton")
    second, state = selective_scan(**{**longer, **cuts[1], "h0": state}, backend="triton")
    assert len(rings) == 1
    assert (
        relative_error(torch.cat((first, second), 1), y) < 1e-6 and relative_error(state, h) < 1e-6
    )


@kernels
@pytest.mark.parametrize(
    ("batch", "length", "states", "parts", "block"),
    [(1, 96, 16, 8, 32), (2, 80, 16, 4, 16), (1, 72, 16, 8, 8), (1, 64, 8, 4, 16)],
)
@torch.no_grad()
def test_few_sequences_by_a_ring(monkeypatch, batch, length, states, parts, block):
    from vssm.ops.scan import triton as scan_triton

    plan = scan_triton.plan_forward(batch, length, 64, states, 2, wide=True)
    assert plan.ring and plan.parts == parts and block == plan.K
    monkeypatch.setattr(scan_triton, "processors", lambda _: 2)
    values = to_device(arguments(batch, length, 64, states))
    exact = {name: v.double() if torch.is_tensor(v) else v for name, v in values.items()}
    made = selective_scan(**values, backend="triton")
    for given, wanted in zip(made, selective_scan(**exact, backend="reference"), strict=True):
        assert relative_error(given, wanted) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "length", "channels"), [(1, 256, 2048), (1, 1024, 2048), (4, 64, 512)]
)
def test_gradients_of_few_sequences_by_a_ring(batch, length, channels):
    from vssm.ops.scan import triton as scan_triton

    device = torch.device(DEVICE)
    assert len(scan_triton.kept_shape(batch, length, channels, 16, torch.float32, device)) == 4
    values = to_device(arguments(batch, length, channels, 16))
    wanted = expected(values)
    assert_close(outputs(values), wanted)
    # What cannot be copied has kept states all the same.
    assert_close(outputs({**values, "dt": unaligned(values["dt"])}), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2, 4])
@torch.no_grad()
def test_a_ring_and_chunks_agree(monkeypatch, batch, dtype):
    from vssm.ops.scan import triton as scan_triton

    values = to_device(arguments(batch, 2048, 2048, 16), dtype)
    plan = scan_triton.plan_forward
    wide = dtype == torch.float32
    processors = scan_triton.processors(values["u"].device)
    assert (plan(*values["u"].shape, 16, processors, wide).ring > 0) == (wide or batch == 4)
    first, second = (selective_scan(**values, backend="triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    monkeypatch.setattr(scan_triton, "plan_forward", lambda *sizes, **_: plan(*sizes, copies=False))
    y, h = selective_scan(**values, backend="triton")
    assert relative_error(first[0], y) < (1e-5 if dtype == torch.float32 else HALF)
    assert relative_error(first[1], h) < 1e-5


@pytest.fixture
def keeps(monkeypatch):
    """Plans forwards that keep states; returns what plans so and a list of what ran."""
    from vssm.ops.scan import triton as scan_triton

    call, ran = scan_triton.Call, []
    ring = scan_triton.plan_forward(8, 4096, 2048, 16, 132)
    whole = scan_triton.Plan(4096, 32, 2, None, True)
    chunks = scan_triton.Plan(8, 64, 2, None, True)
    scan, scan_ring, pull = call.scan, call.scan_ring, call.pull

    def plans(way, chunk, split=True, span=2):
        backward = scan_triton.Plan(chunk, 32, 2, None, True, programs=3, split=split)

        def plan_forward(*_, copies=True, **__):
            return whole if way == "whole" else ring if copies else chunks

        def plan_backward(*sizes):
            return backward._replace(length=min(chunk, sizes[1]), parts=2 - sizes[3] % 2)

        monkeypatch.setattr(scan_triton, "plan_forward", plan_forward)
        monkeypatch.setattr(scan_triton, "plan_backward", plan_backward)
        monkeypatch.setattr(scan_triton, "plan_span", lambda *_: span)

    def note(*names):
        ran.append(" ".join(name for name in names if name))

    def noted_scan(*inputs, **results):
        note(*(name for name in ("y", "local", "starts") if results.get(name) is not None))
        scan(*inputs, **results)

    def noted_ring(*inputs):
        note("ring", inputs[-1] is not None and "starts")
        scan_ring(*inputs)

    monkeypatch.setattr(call, "scan", noted_scan)
    monkeypatch.setattr(call, "scan_ring", noted_ring)
    monkeypatch.setattr(call, "pull", lambda *inputs: note("pull") or pull(*inputs))
    return plans, ran


@kernels
@pytest.mark.parametrize(
    ("way", "batch", "length", "channels", "states", "chunk", "split", "span", "given"),
    [
        ("whole", 1, 9, 16, 16, 2, True, 2, OPTIONAL),
        ("whole", 2, 7, 16, 16, 4, False, 1, OPTIONAL),
        ("whole", 1, 8, 32, 4, 4, True, 1, ("z", "h0")),
        ("whole", 1, 14, 33, 3, 4, True, 3, ()),
        ("whole", 2, 5, 8, 4, 4, True, 8, ("h0",)),
        ("whole", 1, 7, 5, 17, 4, True, 1, ("dt_bias",)),
        ("ring", 1, 24, 64, 8, 16, True, 1, OPTIONAL),
        ("unaligned", 1, 24, 64, 8, 8, True, 2, ("h0",)),
    ],
)
def test_backward_from_kept_states(
    keeps, way, batch, length, channels, states, chunk, split, span, given
):
    plans, ran = keeps
    plans(way, chunk, split, span)
    values = to_device(arguments(batch, length, channels, states, given, softplus=given != ()))
    if way == "unaligned":
        values["dt"] = unaligned(values["dt"])
    assert_close(outputs(values), expected(values))
    forward = {"whole": ["y starts"], "ring": ["ring starts"], "unaligned": ["local", "y starts"]}[
        way
    ]
    assert ran == forward + ["pull"] * split


@kernels
@pytest.mark.parametrize(
    ("way", "split", "length", "channels", "dtype"),
    [("ring", True, 16, 64, torch.bfloat16), ("whole", False, 9, 16, torch.float16)],
)
def test_kept_states_change_only_rounding(keeps, monkeypatch, way, split, length, channels, dtype):
    from vssm.ops.scan import triton as scan_triton

    plans, ran = keeps
    plans(way, 8, split, span=1)
    values = to_device(arguments(1, length, channels, 16), dtype)
    kept = outputs(values)
    assert_close(kept, expected(values), HALF)
    ran.clear()
    monkeypatch.setattr(scan_triton, "kept_shape", lambda *_: (0,))
    found = outputs(values)
    assert ran == ["ring" if way == "ring" else "y", "local"]
    assert torch.equal(kept["y"], found["y"]) and torch.equal(kept["h"], found["h"])
    for name in found:
        rounded = found[name].dtype != torch.float32
        assert relative_error(kept[name], found[name]) < (HALF if rounded else 1e-5)


@kernels
@pytest.mark.parametrize("used", [0, 1])
def test_gradients_of_one_output_from_kept_states(keeps, used):
    plans, ran = keeps
    plans("whole", 4)
    values = to_device(arguments(1, 10, 16, 4))
    exact = {name: v.double() if torch.is_tensor(v) else v for name, v in values.items()}

    def grads(values, backend):
        leaves = {
            name: values[name].detach().requires_grad_() for name in ("u", "dt", "A", "B", "h0")
        }
        result = selective_scan(**{**values, **leaves}, backend=backend)[used]
        found = torch.autograd.grad(result.square().sum(), list(leaves.values()))
        return dict(zip(leaves, found, strict=True))

    assert_close(grads(values, "triton"), grads(exact, "reference"))
    assert ran == ["y starts", "pull"]


@kernels
def test_states_are_kept_only_for_a_graph(keeps):
    plans, ran = keeps
    plans("whole", 4)
    values = to_device(arguments(1, 10, 8, 4))
    selective_scan(**values, backend="triton")
    leaves = {name: values[name].detach().requires_grad_() for name in TENSORS}
    with torch.no_grad():
        selective_scan(**{**values, **leaves}, backend="triton")
        compiled = torch.compile(selective_scan, backend="aot_eager")
        compiled(**{**values, **leaves}, backend="triton")
    assert ran == ["y"] * 3
    ran.clear()
    # One chunk needs no states.
    outputs({**values, **{name: values[name][:, :4] for name in ("u", "dt", "B", "C", "z")}})
    assert ran == ["y"]
    arguments_of_op = (*leaves.values(), None, True, "triton")
    y, h, kept = torch.ops.vssm.selective_scan(*arguments_of_op, True)
    assert y.requires_grad and h.requires_grad and not kept.requires_grad
    assert kept.shape == (1, 3, 4, 8) and kept.dtype == torch.float32
    assert torch.equal(kept[:, 0], leaves["h0"].transpose(1, 2))
    assert torch.ops.vssm.selective_scan(*arguments_of_op, False)[2].shape == (0,)
    torch.library.opcheck(
        torch.ops.vssm.selective_scan.default,
        (*arguments_of_op, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@kernels
@pytest.mark.parametrize("dynamic", [False, True])
def test_kept_states_in_compiled_and_checkpointed_code(keeps, dynamic):
    plans, _ = keeps
    plans("whole", 4)
    compiled = torch.compile(selective_scan, backend="aot_eager", fullgraph=True, dynamic=dynamic)

    def again(**values):
        return checkpoint(selective_scan, **values, use_reentrant=False)

    for length in (6, 9):
        values = to_device(arguments(1, length, 8, 4))
        wanted = outputs(values)
        for function in (compiled, again):
            given = outputs(values, function=function)
            assert all(torch.equal(given[name], wanted[name]) for name in wanted)


@kernels
def test_an_exported_scan_takes_any_length(monkeypatch):
    """Which states are kept depends on the length: an exported program keeps none."""
    from vssm.ops.scan import triton as scan_triton

    monkeypatch.setattr(scan_triton, "processors", lambda device: 132)

    class Scan(torch.nn.Module):
        def forward(self, u, dt, A, B, C):
            return selective_scan(u, dt, A, B, C, backend="triton")[0]

    values = to_device(arguments(1, 64, 4, 2, ()))
    inputs = [values[name].requires_grad_() for name in ("u", "dt", "A", "B", "C")]
    steps = torch.export.Dim("T", min=2, max=4096)
    lengths = [{1: steps}, {1: steps}, None, {1: steps}, {1: steps}]
    exported = torch.export.export(Scan(), tuple(inputs), dynamic_shapes=(*lengths,))
    outputs = [node for node in exported.graph.nodes if "selective_scan" in str(node.target)]
    assert len(outputs) == 1 and outputs[0].args[-1] is False


@kernels
@pytest.mark.parametrize(
    ("given", "softplus"),
    [((), True), ((), False), (("D", "dt_bias"), False), (("z",), True), (("h0",), False)],
)
def test_every_argument_is_optional(small, given, softplus):
    small(4)
    values = to_device(arguments(1, 6, 8, 3, given, softplus))
    assert_close(outputs(values), expected(values))


@kernels
@pytest.mark.parametrize(
    ("dtype", "states"),
    [(torch.bfloat16, 16), (torch.float16, 16), (torch.float16, 8), (torch.bfloat16, 5)],
)
def test_half_precision_in_float32_inside(small, dtype, states):
    small(4)
    values = to_device(arguments(1, 8, 32, states), dtype)
    given, wanted = outputs(values), expected(values)
    assert_close(given, wanted, HALF)
    assert given["y"].dtype == given["u"].dtype == given["B"].dtype == dtype
    # What is kept in float32 is computed in float32.
    for name in ("h", "A", "D", "dt_bias", "h0"):
        assert given[name].dtype == torch.float32
        assert relative_error(given[name], wanted[name]) < 1e-5


@kernels
def test_rows_need_not_be_aligned(small):
    small(4)
    values = to_device(arguments(1, 8, 16, 16))
    wanted = outputs(values)
    for name in ("B", "C"):
        values[name] = torch.cat((values[name][..., :1], values[name]), 2)[..., 1:]
        assert values[name].data_ptr() % 8 != 0
    assert_close(outputs(values), wanted, 1e-6)


@kernels
@pytest.mark.filterwarnings("ignore:overflow")
def test_decays_of_any_size(small):
    small(2)
    rates = torch.tensor([-1e9, -1e4, -87.5, -3.3, -0.01, 0.0, 2.0, 40.0, 200.0], device=DEVICE)
    none, row = torch.zeros(1, 2, 9, device=DEVICE), torch.ones(1, 2, 16, device=DEVICE)
    A, h0 = rates[:, None].repeat(1, 16), torch.ones(1, 9, 16, device=DEVICE)
    _, h = selective_scan(none, none + 1, A, row, row, h0=h0, backend="triton")
    assert torch.allclose(h, torch.exp(2 * A.double()).float(), rtol=1e-5, atol=1e-30)
    assert h[0, 8].isinf().all()


@kernels
def test_small_steps_keep_their_precision(small):
    small(4)
    values = to_device(arguments(1, 8, 8, 4))
    values["dt"] = values["dt"] - 7
    assert_close(outputs(values), expected(values))


@kernels
def test_columns_may_be_strided(small):
    small(4)
    values = to_device(arguments(1, 6, 5, 3))
    wanted = outputs(values)
    for name in ("u", "dt", "B", "C", "z"):
        values[name] = values[name].transpose(1, 2).contiguous().transpose(1, 2)
        assert values[name].stride(2) != 1
    given = outputs(values)
    assert all(torch.equal(given[name], wanted[name]) for name in wanted)


@kernels
def test_an_empty_sequence_passes_the_state_on():
    values = to_device(arguments(2, 0, 5, 3))
    given = outputs(values)
    assert given["y"].shape == (2, 0, 5)
    assert torch.equal(given["h"], values["h0"])
    assert given["A"].abs().sum() == 0
    assert given["h0"].abs().sum() > 0


@kernels
def test_cutting_a_sequence_and_carrying_the_state_changes_nothing(small):
    small(4)
    values = to_device(arguments(1, 10, 8, 4))
    whole, h = selective_scan(**values, backend="triton")
    state, parts = values["h0"], []
    for rows in (slice(0, 3), slice(3, 4), slice(4, 10)):
        cut = {name: values[name][:, rows] for name in ("u", "dt", "B", "C", "z")}
        y, state = selective_scan(**{**values, **cut, "h0": state}, backend="triton")
        parts.append(y)
    assert relative_error(torch.cat(parts, 1), whole) < 1e-6
    assert relative_error(state, h) < 1e-6


@kernels
def test_results_repeat_bit_for_bit(small):
    small(4)
    values = to_device(arguments(1, 5, 40, 2))
    first, second = outputs(values), outputs(values)
    assert all(torch.equal(first[name], second[name]) for name in first)


@kernels
def test_results_from_kept_states_repeat_bit_for_bit(keeps):
    plans, ran = keeps
    plans("whole", 4)
    values = to_device(arguments(2, 9, 8, 2))
    first, second = outputs(values), outputs(values)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert ran == 2 * ["y starts", "pull"]


@kernels
def test_operator_is_registered_properly(small):
    small(4)
    values = to_device(arguments(1, 5, 4, 2))
    leaves = [values[name].detach().requires_grad_() for name in TENSORS]
    torch.library.opcheck(
        torch.ops.vssm.selective_scan.default,
        (*leaves, None, True, "triton", True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_choice_of_the_backend():
    if DEVICE == "cuda":
        assert choose_backend("auto", torch.device("cuda"), torch.bfloat16) == "triton"
    with pytest.raises(ValueError, match="float64"):
        choose_backend("triton", torch.device("cuda"), torch.float64)
    if not INTERPRETED:
        with pytest.raises(ValueError, match="cpu"):
            choose_backend("triton", torch.device("cpu"), torch.float32)


@kernels
def test_plans_fill_the_device(monkeypatch):
    from vssm.ops.scan import triton as scan_triton

    monkeypatch.setattr(scan_triton, "processors", lambda _: 132)
    # d_inner 2048, N 16 on 132 multiprocessors: only what has too few rows is cut in chunks.
    for batch, length, chunks, ring in (
        (1024, 28, 1, False),
        (256, 32, 1, False),
        (64, 1024, 1, False),
        (8, 4096, 1, True),
        (8, 4097, 33, False),
        (3, 2048, 1, True),
        (2, 2048, 64, False),
        (1, 65536, 256, False),
    ):
        plan = scan_triton.plan_forward(batch, length, 2048, 16, 132)  # numbers of 16 bits
        assert -(-length // plan.length) == chunks and (plan.ring > 0) == ring
        backward = scan_triton.plan_backward(batch, length, 2048, 16, 132)
        assert backward.split == (batch < 64)
        assert backward.length == min(length, 32)
    # Long sequences whose forward is one pass keep states; with many, spans are longer.
    for batch, length, chunks, span in (
        (1024, 28, 0, 1),
        (256, 32, 0, 1),
        (64, 1024, 32, 8),
        (32, 1024, 32, 4),
        (8, 4096, 128, 4),
        (8, 4097, 0, 4),
        (3, 2048, 64, 1),
        (1, 65536, 0, 8),
        (1, 256, 0, 1),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            shape = scan_triton.kept_shape(batch, length, 2048, 16, dtype, torch.device(DEVICE))
            ring = dtype == torch.float32 and batch == 1  # of eight lanes
            kept = length // 32 if ring else chunks
            assert shape == ((batch, kept, 16, 2048) if kept else (0,))
        assert scan_triton.plan_span(batch, -(-length // 32), 24 * 132 // 128) == span
    # A ring takes whole blocks of whole programs, and inputs that can be copied.
    assert scan_triton.plan_forward(8, 4096, 2048, 8, 132).ring
    for channels, states, copies in ((2080, 16, True), (2048, 12, True), (2048, 16, False)):
        plan = scan_triton.plan_forward(8, 4096, channels, states, 132, copies=copies)
        assert not plan.ring and plan.parts == 1 and plan.length < 4096
    # Lanes share a channel where there are few sequences, as far as states can be shared.
    for batch, length, states, parts in (
        (1, 256, 16, 8),
        (1, 28, 16, 8),
        (4, 28, 16, 4),
        (4, 28, 15, 1),
        (16, 28, 16, 1),
        (1, 1, 16, 1),
        (1, 1024, 16, 1),
        (1, 28, 4, 4),
    ):
        plan = scan_triton.plan_forward(batch, length, 2048, states, 132)
        assert plan.parts == parts and plan.K % parts == 0 and (parts == 1 or plan.length == length)
    # Few float32 sequences that are not short have a ring, of fewer lanes the more there are.
    for batch, length, channels, states, parts in (
        (1, 1024, 2048, 16, 8),
        (2, 4096, 2048, 16, 8),
        (4, 1024, 2048, 16, 4),
        (8, 1024, 2048, 16, 2),
        (1, 1024, 2048, 8, 1),
        (1, 1024, 1024, 16, 1),
        (1, 256, 1024, 16, 8),
        (1, 256, 2048, 8, 4),
        (1, 64, 64, 16, 8),
    ):
        plan = scan_triton.plan_forward(batch, length, channels, states, 132, wide=True)
        assert plan.parts == parts and (plan.ring > 0) == (parts > 1) and length % plan.K == 0
        other = scan_triton.plan_forward(
            batch, length, channels, states, 132, wide=True, copies=False
        )
        assert not other.ring and (other.parts > 1) == (length <= 256)
        assert (
            scan_triton.plan_forward(
                batch, length, channels, states, 132, wide=True, copies=False, lanes=False
            ).parts
            == 1
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "length", "channels"),
    [
        (1024, 28, 64),
        (256, 32, 64),
        (64, 1024, 64),
        (8, 4096, 64),
        (1, 16384, 64),
        (16, 32, 2048),
        (5, 301, 200),
    ],
)
def test_real_sizes(batch, length, channels, dtype):
    values = to_device(arguments(batch, length, channels, 16), dtype)
    given, again = outputs(values), outputs(values)
    assert_close(given, expected(values), 1e-5 if dtype == torch.float32 else HALF)
    assert all(torch.equal(given[name], again[name]) for name in given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "length", "channels"),
    [(8, 4104, 2048), (8, 1048, 2048), (32, 300, 2048), (64, 300, 2048)],
)
def test_kept_states_of_real_sizes(monkeypatch, batch, length, channels, dtype):
    from vssm.ops.scan import triton as scan_triton

    values = to_device(arguments(batch, length, channels, 16), dtype)
    assert len(scan_triton.kept_shape(batch, length, channels, 16, dtype, values["u"].device)) > 1
    given, again = outputs(values), outputs(values)
    assert all(torch.equal(given[name], again[name]) for name in given)
    monkeypatch.setattr(scan_triton, "kept_shape", lambda *_: (0,))
    assert_close(given, outputs(values), 1e-5 if dtype == torch.float32 else HALF)


@pytest.mark.gpu
def test_addresses_pass_two_to_the_31():
    generator = torch.Generator("cuda").manual_seed(0)
    u = torch.randn(3, 262_144, 3072, device="cuda", dtype=torch.bfloat16, generator=generator)
    assert u.numel() > 2**31
    values = to_device(arguments(1, 1, 3072, 4, ()))
    B = torch.randn(3, 262_144, 4, device="cuda", generator=generator)
    dt = torch.full((1, 1, 1), 0.1, device="cuda", dtype=torch.bfloat16).expand(u.shape)
    y, h = selective_scan(u, dt, values["A"], B, B, backend="triton")
    last = slice(262_144 - 600, None)
    wanted, state = selective_scan(
        u[2:, last, 5:9].double(), dt[2:, last, 5:9].double(), values["A"][5:9].double(),
        B[2:, last].double(), B[2:, last].double(), backend="reference",
    )  # fmt: skip
    assert relative_error(y[2:, last, 5:9][:, -100:], wanted[:, -100:]) < HALF
    assert relative_error(h[2:, 5:9], state) < HALF


@kernels
@pytest.mark.parametrize("sizes", [(1, 1, 5, 3), (3, 2, 17, 1), (2, 5, 40, 5), (2, 5, 16, 16)])
def test_the_scan_ahead_equals_its_twin(sizes):
    values = to_device(arguments(*sizes))
    del values["softplus"]
    for h0 in (None, values["h0"], values["h0"][:1].expand(sizes[0], -1, -1)):
        given = {**values, "h0": h0}
        exact = {name: None if v is None else v.double() for name, v in given.items()}
        made = scan_ahead(**given, backend="triton")
        assert relative_error(made, scan_ahead(**exact, backend="reference")) < 1e-5
