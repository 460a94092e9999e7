"""Products by oneDNN against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import relative_error
from vssm.ops import onednn


@pytest.fixture
def everywhere(monkeypatch):
    """Lets oneDNN multiply matrices of any number of rows, on any processor that has it."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(onednn, "_ROWS", 1)


def operands(*batch):
    x, weight, bias = torch.randn(*batch, 7), torch.randn(5, 7), torch.randn(5)
    return [tensor.requires_grad_() for tensor in (x, weight, bias)]


@pytest.mark.parametrize("batch", [(1,), (40,), (2, 20), (2, 3, 4)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients(everywhere, batch, with_bias):
    given = operands(*batch)[: 3 if with_bias else 2]
    y, expected = onednn.multiply(*given), F.linear(*given)
    assert "_Product" in str(y.grad_fn.next_functions[0][0]) or "_Product" in str(y.grad_fn)
    assert relative_error(y, expected) < 1e-6
    dy = torch.randn_like(expected)
    gradients = torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, given, dy)
    for ours, theirs in zip(*gradients, strict=True):
        assert relative_error(ours, theirs) < 1e-6


def test_transposed_operands_and_second_derivatives(everywhere):
    x, weight = torch.randn(6, 8).T.requires_grad_(), torch.randn(6, 4).T.requires_grad_()

    def second(product):
        (first,) = torch.autograd.grad(product(x, weight).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), (x, weight))

    for ours, theirs in zip(second(onednn.multiply), second(F.linear), strict=True):
        assert relative_error(ours, theirs) < 1e-5


def test_slices_and_expanded_gradients(everywhere):
    x, weight = torch.randn(40, 9, requires_grad=True), torch.randn(5, 14, requires_grad=True)

    def gradients(product):
        return torch.autograd.grad(product(x[:, 1:8], weight[:, ::2]).sum(), (x, weight))

    for ours, theirs in zip(gradients(onednn.multiply), gradients(F.linear), strict=True):
        assert relative_error(ours, theirs) < 1e-6


def test_frozen_weights_get_no_gradient(everywhere):
    x, weight, bias = operands(40)
    y = onednn.multiply(x, weight.requires_grad_(False), bias.requires_grad_(False))
    y.sum().backward()
    assert x.grad is not None and weight.grad is None and bias.grad is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_pytorch(everywhere, dtype):
    given = [tensor.detach().to(dtype) for tensor in operands(40)]
    assert torch.equal(onednn.multiply(*given), F.linear(*given))


def test_autocast_decides_the_dtype(everywhere):
    with torch.autocast("cpu", torch.bfloat16):
        assert onednn.multiply(*operands(40)).dtype == torch.bfloat16
