"""Counter-based noise: known answers, independence of how it is cut up, and statistics."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vssm.noise import LATENT, OBSERVATION, philox, uniform

INT64 = st.integers(-(2**63), 2**63 - 1)


def draw_noise(seeds=(3,), rows=(0,), position=0, length=7, components=5, **kwargs):
    return uniform(torch.tensor(seeds), torch.tensor(rows), position, length, components, **kwargs)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers_of_random123(counter, key, expected):
    counter, key, expected = (
        torch.tensor([int(word, 16) for word in words.split()])[:, None]
        for words in (counter, key, expected)
    )
    assert torch.equal(philox(counter, key), expected)
    # The same inside a batch: in-place arithmetic must not leak between elements or change its
    # inputs.
    wide = counter.repeat(1, 3)
    assert torch.equal(philox(wide, key), expected.repeat(1, 3))
    assert torch.equal(wide, counter.repeat(1, 3))


def test_uniform_uses_the_documented_counter():
    seed, row, position, component, draw = -(2**40) + 12345, 9 + 5 * 2**32, 2**32 - 3, 6, 2**24 - 1
    u = draw_noise([seed], [row], position - 1, 3, 7, stream=OBSERVATION, draw=draw)
    counter = torch.tensor([position, component // 4, 9, OBSERVATION << 24 | draw])
    key = torch.tensor([seed % 2**32 ^ 5, (seed >> 32) % 2**32])
    bits = int(philox(counter[:, None], key[:, None])[component % 4])
    assert float(u[0, 1, component]) == ((bits >> 9) + 0.5) / 2**23


@settings(max_examples=25, deadline=None)
@given(INT64, st.integers(0, 2**32 - 20), st.integers(0, 13), st.integers(1, 9))
def test_uniform_does_not_depend_on_chunks(seed, position, cut, components):
    whole = draw_noise([seed, seed], [0, 4], position, 13, components)
    first = draw_noise([seed, seed], [0, 4], position, cut, components)
    second = draw_noise([seed, seed], [0, 4], position + cut, 13 - cut, components)
    assert torch.equal(torch.cat((first, second), dim=1), whole)


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(5)), st.integers(0, 5))
def test_uniform_does_not_depend_on_batch_split_or_order(order, cut):
    seeds, rows = torch.tensor([5, 5, -1, 2**62, 0]), torch.tensor([0, 2**32 - 1, 3, 3, 7])
    whole = uniform(seeds, rows, 11, 4, 6)
    parts = [uniform(seeds[index], rows[index], 11, 4, 6) for index in (order[:cut], order[cut:])]
    assert torch.equal(torch.cat(parts), whole[order])


def test_uniform_takes_a_position_that_only_the_device_knows():
    for position in (0, 7, 2**32 - 13):
        assert torch.equal(
            draw_noise(position=torch.tensor([position]), length=13),
            draw_noise(position=position, length=13),
        )


def test_uniform_components_are_a_prefix():
    whole = draw_noise(components=11)
    assert whole.shape == (1, 7, 11)
    for components in range(11):
        assert torch.equal(draw_noise(components=components), whole[..., :components])


def test_uniform_differs_between_seeds_rows_streams_and_draws():
    base = {"seeds": [3], "rows": [2], "position": 5, "length": 3, "components": 4}
    changes = [{"seeds": [seed]} for seed in (4, -3, 3 + 2**32, 3 - 2**63, 2**63 - 1)]
    changes += [
        {"rows": [3]},
        {"rows": [2**31 + 2]},
        {"rows": [2**32 + 2]},
        {"rows": [2**62 + 2]},
        {"position": 8},
        {"position": 5 + 2**31},
    ]
    changes += [{"stream": OBSERVATION}, {"draw": 1}, {"draw": 2**24 - 1}]
    results = [draw_noise(**base, stream=LATENT, draw=0)] + [
        draw_noise(**base | change) for change in changes
    ]
    for (i, a), (j, b) in itertools.combinations(enumerate(results), 2):
        assert not (a == b).any(), (i, j)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_uniform_statistics(seed):
    rows = torch.arange(64)
    u = uniform(torch.full_like(rows, seed), rows, 1000, 32, 32)
    count = u.numel()
    assert u.dtype == torch.float32
    assert u.min() > 0 and u.max() < 1
    # Five standard errors of each estimate; the seeds are fixed, so this never flickers.
    assert abs(u.double().mean() - 1 / 2) < 5 * (1 / 12 / count) ** 0.5
    assert abs(u.double().var() - 1 / 12) < 5 * (1 / 180 / count) ** 0.5
    gap = u.double().flatten().sort().values - torch.arange(0.5, count, dtype=torch.float64) / count
    assert gap.abs().max() < 1.95 / count**0.5  # Kolmogorov-Smirnov at p = 0.001


def test_uniform_is_uncorrelated():
    rows = torch.arange(33)
    seeds = torch.full_like(rows, 17)
    u = uniform(seeds, rows, 0, 33, 33).double()
    pairs = {
        "rows": (u[1:], u[:-1]),
        "positions": (u[:, 1:], u[:, :-1]),
        "components": (u[..., 1:], u[..., :-1]),
        "streams": (u, uniform(seeds, rows, 0, 33, 33, stream=OBSERVATION)),
        "draws": (u, uniform(seeds, rows, 0, 33, 33, draw=1)),
        "seeds": (u, uniform(seeds + 1, rows, 0, 33, 33)),
    }
    for name, (a, b) in pairs.items():
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(correlation) < 5 / a.numel() ** 0.5, name


def test_uniform_conversion_is_strictly_inside(monkeypatch):
    for word, expected in ((0, 2.0**-24), (2**32 - 1, 1 - 2.0**-24)):
        monkeypatch.setattr(
            "vssm.noise.philox", lambda counter, key, word=word: torch.full_like(counter, word)
        )
        assert (draw_noise() == expected).all()


def test_uniform_of_nothing_is_empty():
    assert draw_noise(length=0).shape == (1, 0, 5)
    assert uniform(torch.zeros(0).long(), torch.zeros(0).long(), 0, 7, 5).shape == (0, 7, 5)
    assert draw_noise(position=2**32 - 7).shape == (1, 7, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": -1}, r"^position is -1; it must be 0 to 4294967296$"),
        (
            {"position": 2**32 - 6},
            r"^position \+ length is 4294967297; it must be 0 to 4294967296$",
        ),
        ({"stream": 256}, r"^stream is 256; it must be 0 to 255$"),
        ({"draw": 2**24}, r"^draw is 16777216; it must be 0 to 16777215$"),
    ],
)
def test_uniform_names_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        draw_noise(**change)


INTERPRETED = """
import torch
from vssm import noise
from vssm.ops import noise_triton
seeds = torch.tensor([5, -(2**63), 2**63 - 1, -(2**40) + 12345])
rows = torch.tensor([0, 2**32 - 1, 3, 2**62 + 2**33 + 9])
for position, length, components, stream, draw in (
    (0, 1, 1, 0, 0), (2**31, 65, 33, 1, 7), (2**32 - 3, 3, 7, 255, 2**24 - 1), (1000, 13, 4, 0, 1)
):
    expected = noise.uniform(seeds, rows, position, length, components, stream, draw)
    tag = stream << 24 | draw
    for where in (position, torch.tensor([position])):
        u = noise_triton.uniform(seeds, rows, where, length, components, tag)
        assert u.shape == expected.shape and torch.equal(u, expected), (position, components)
assert noise_triton.uniform(seeds, rows, 0, 0, 5, 0).shape == (4, 0, 5)
torch.set_default_dtype(torch.float64)
assert noise_triton.uniform(seeds, rows, 0, 2, 5, 0).dtype == torch.float32
print("same bits")
"""


def test_the_kernel_gives_the_same_bits_in_the_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "same bits\n", done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_uniform_gives_the_same_bits_on_a_gpu():
    seeds, rows = (
        torch.tensor([5, -(2**63), 2**63 - 1]),
        torch.tensor([0, 2**32 - 1, 2**62 + 2**33 + 3]),
    )
    u = uniform(seeds.cuda(), rows.cuda(), 2**31, 65, 33, OBSERVATION, 7)
    assert u.device.type == "cuda"
    assert torch.equal(u.cpu(), uniform(seeds, rows, 2**31, 65, 33, OBSERVATION, 7))
    known = torch.tensor([2**31]).cuda()
    assert torch.equal(uniform(seeds.cuda(), rows.cuda(), known, 65, 33, OBSERVATION, 7), u)
