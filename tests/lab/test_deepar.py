"""The peer of the comparison leaves no trace in the process."""

import pickle
import warnings

import numpy as np
import pytest
import torch


def test_deepar_restores_the_global_random_states():
    pytest.importorskip("gluonts")
    from vssm.lab.deepar import deepar

    values = np.random.default_rng(0).normal(size=(60, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = pickle.dumps(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002
        deepar(values, 4, 2, "h", epochs=1, batches=1, seed=5, num_layers=1, hidden_size=4)
    assert pickle.dumps(np.random.get_state()) == before[0]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[1])
