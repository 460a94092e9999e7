"""Makes operations with gradients of kernels.

An eager call of an operation is an `autograd.Function`. The dispatcher of `torch.library` costs
more than a small kernel, so operators are only for programs that `torch.compile` or `torch.export`
traces.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def make_operator(
    name: str,
    schema: str,
    forward: Callable,
    backward: Callable,
    fake: Callable,
    outputs: int = 1,
    gradients: int | None = None,
    keeps: bool = False,
) -> Callable:
    """Returns an operation of eager and of traced programs, `vssm::name` of `torch.library`.

    Arguments:
        name: The name of the operator; its gradient is `name_backward`.
        schema: The inputs in the language of `torch.library`, tensors first.
        forward: Maps the inputs to the outputs.
        backward: Maps the gradients of the outputs (None if there is none), all inputs and what
            forward kept to a list of gradients; what stands for an input that is None is ignored.
        fake: As forward, for tensors without numbers.
        outputs: How many tensors forward returns.
        gradients: How many inputs, the first ones, have gradients; all tensors if not given.
        keeps: Whether the last output is kept for backward, and has no gradient.
    """
    tensors = schema.count("Tensor")
    gradients = tensors if gradients is None else gradients
    results = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"
    slopes = ", ".join(f"Tensor? grad_{i}" for i in range(outputs - keeps))
    kept = ", Tensor kept" if keeps else ""

    def fill_gaps(found: Sequence, arguments: tuple) -> list[Tensor]:
        given = arguments[outputs - keeps :][:gradients]
        like = next(t for t in given if t is not None)
        return [like.new_empty(0) if t is None else g for t, g in zip(given, found, strict=True)]

    def real_backward(*arguments: object) -> list[Tensor]:
        return fill_gaps(backward(*arguments), arguments)

    def fake_backward(*arguments: Tensor | None) -> list[Tensor]:
        given = arguments[outputs - keeps :][:gradients]
        return fill_gaps([None if t is None else t.new_empty(t.shape) for t in given], arguments)

    def save(ctx, inputs: tuple, output) -> None:  # noqa: ANN001
        ctx.save_for_backward(*inputs[:tensors], *([output[-1]] if keeps else []))
        ctx.options = inputs[tensors:]
        ctx.set_materialize_grads(False)  # of zeros, they would be as large as the outputs
        if keeps:
            ctx.mark_non_differentiable(output[-1])

    def differentiate(run: Callable, ctx, slopes: tuple) -> tuple:  # noqa: ANN001
        saved = ctx.saved_tensors  # read once: checkpointing recomputes them at every read
        given, kept = saved[:tensors], saved[tensors:]
        found = run(*slopes[: outputs - keeps], *given, *ctx.options, *kept)
        grads = [None if t is None else g for t, g in zip(given[:gradients], found, strict=True)]
        return *grads, *[None] * (tensors - gradients + len(ctx.options))

    traced = torch.library.custom_op(
        f"vssm::{name}", forward, mutates_args=(), schema=f"({schema}) -> {results}"
    )
    traced_backward = torch.library.custom_op(
        f"vssm::{name}_backward",
        real_backward,
        mutates_args=(),
        schema=f"({slopes}, {schema}{kept}) -> Tensor[]",
    )
    traced.register_fake(fake)
    traced_backward.register_fake(fake_backward)
    traced.register_autograd(
        lambda ctx, *slopes: differentiate(traced_backward, ctx, slopes), setup_context=save
    )

    def run(ctx, *inputs):  # noqa: ANN001, ANN002, ANN202
        output = forward(*inputs)
        save(ctx, inputs, output)
        return output

    methods = {  # with a `setup_context`, PyTorch would read the signature of forward at every call
        "forward": staticmethod(run),
        "backward": staticmethod(
            once_differentiable(lambda ctx, *slopes: differentiate(backward, ctx, slopes))
        ),
    }
    eager = type(name, (torch.autograd.Function,), methods)

    def operation(*arguments: object) -> Tensor | tuple[Tensor, ...]:
        return (traced if torch.compiler.is_compiling() else eager.apply)(*arguments)

    return operation


def product_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype that autocast gives to matrix products, or None without autocast."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None
