"""The bits per character of experiments/compare_text.py, against sums over all latents."""

import itertools
import math
import runpy
from pathlib import Path

import pytest
import torch

import vssm
from tests.conftest import relative_error, small_model

SCRIPT = Path(__file__).parents[2] / "experiments" / "compare_text.py"
chunked_bits = runpy.run_path(str(SCRIPT))["chunked_bits"]


@pytest.mark.parametrize("kind", ["vssm", "tvae"])
def test_one_chunk_is_one_shot(kind):
    model = small_model(kind, "categorical")
    x = torch.randint(0, 5, (3, 7))
    nats = vssm.log_likelihood(model, x, num_samples=4, prior="partial")
    assert abs(chunked_bits(model, x, 7, 4) + float(nats.mean()) / 7 / math.log(2)) < 1e-5
    assert abs(chunked_bits(model, x, 99, 4) - chunked_bits(model, x, 7, 4)) < 1e-6


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_chunked_bits_converge_to_the_sum_over_all_latents(chunk):
    model = small_model("vssm", "categorical", latents=1, classes=2)
    x = torch.tensor([[3, 0, 4]])
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for path in itertools.product(range(2), repeat=3):
            z = torch.tensor(path).view(1, 3, 1)
            nats = model.likelihood(z)[0].log_prob(x).sum()
            for t in range(3):
                known = t // chunk * chunk
                q_z, _ = model.partial_posterior(x[:, :known] if known else None, empty=3 - known)
                nats = nats + q_z.log_prob(z)[0, t]
            total += nats.double().exp()
    exact = torch.tensor(-float(total.log()) / 3 / math.log(2))
    assert relative_error(torch.tensor(chunked_bits(model, x, chunk, 2000)), exact) < 0.02
