"""Trains the model of minimal.py, loads its weights into the library and compares the numbers.

python examples/minimal_in_library.py
"""

import minimal
import torch
from torch import Tensor

import vssm
from vssm.models import Model

STACKS = {"f_enc": "encoder", "f_dec": "decoder", "f_par": "partial"}


def build() -> Model:
    """Returns an untrained model of the library with the sizes of minimal.py."""
    config = vssm.ModelConfig(
        kind="vssm",
        features=minimal.FEATURES,
        width=minimal.WIDTH,
        layers=minimal.LAYERS,
        state_size=minimal.STATES,
        latents=minimal.LATENTS,
        classes=minimal.CLASSES,
        sigma=minimal.SIGMA,
    )
    return vssm.build(config)


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights of minimal.py under the library's names."""
    found = {}
    for name, value in weights.items():
        stack, _, rest = name.partition(".")
        if name == "empty":
            found["partial.blank"] = value
            continue
        if rest.startswith("blocks") and ".norm." not in rest:
            _, number, part = rest.split(".", 2)
            rest = f"blocks.{number}.mixer.{part}"
        found[f"{STACKS[stack]}.{rest}"] = value
    # The library looks latents up and sums them, without a bias: each of Z rows brings its share.
    bias = found.pop("decoder.embed.bias")
    found["decoder.embed.weight"] = found["decoder.embed.weight"].T + bias / minimal.LATENTS
    return found


def main(steps: int = 1000, K: int = 100) -> None:
    """Trains with minimal.py, then prints the likelihoods of both side by side."""
    torch.manual_seed(0)
    (x, test), small = minimal.digits(), minimal.VSSM()
    minimal.train(small, x, steps)
    model = build()
    model.load_state_dict(renamed(small.state_dict()))
    print("test set, nats           minimal.py   library")
    for words, C in (("log p(x)", 0), ("second half given first", minimal.STEPS // 2)):
        u = torch.rand(K, len(test), minimal.STEPS, minimal.LATENTS)
        ours = minimal.log_likelihood(small, test, u, C).mean()
        theirs = vssm.log_likelihood(model, test, num_samples=K, prompt_length=C).mean()
        print(f"{words:24s}{ours:11.2f}{theirs:10.2f}")


if __name__ == "__main__":
    main()
