"""Measures fixed-point refinement: how far S passes are from the step-by-step sample.

    python experiments/passes.py --num 512

x* is the sample that the same noise gives step by step (chunk 1, re-conditioned). For every chunk
size W and number of passes S, a table shows the mean of |x - x*|, the share of latents that equal
those of x*, and the seconds of the best of `repeats` calls. Rounding can flip a latent, so the
distance at S = T is small rather than zero.
"""

import time

import tyro

import vssm


def follow(
    model: str = "mnist-small",
    num: int = 512,
    length: int = 28,
    chunks: tuple[int, ...] = (28, 7, 1),
    passes: tuple[int, ...] = (1, 2, 4, 8, 28),
    repeats: int = 1,
    seed: int = 0,
) -> list[tuple[int, int, float, float, float]]:
    """Prints and returns W, S, the mean distance, the share of equal latents, and the seconds."""
    net = vssm.load(model)
    end = vssm.generate(net, num=num, length=length, chunk=1, recondition=True, seed=seed)
    assert end.z is not None
    print(f"{model}, {num} samples of {length} steps; mean |x*| {float(end.x.abs().mean()):.4f}")
    print(
        "| W | S | mean distance to x* | latents equal | seconds |\n| --- | --- | --- | --- | --- |"
    )
    made = []
    for chunk in chunks:
        for count in sorted({min(s, chunk) for s in passes}):
            seconds = []
            for _ in range(repeats):
                began = time.perf_counter()
                out = vssm.generate(
                    net,
                    num=num,
                    length=length,
                    chunk=chunk,
                    recondition=True,
                    passes=count,
                    seed=seed,
                )
                seconds.append(time.perf_counter() - began)
            assert out.z is not None
            distance = float((out.x - end.x).abs().mean())
            equal = float((out.z == end.z).float().mean())
            made.append((chunk, count, distance, equal, min(seconds)))
            print(
                f"| {chunk} | {count} | {distance:.5f} | {equal:.3f} | {min(seconds):.3f} |",
                flush=True,
            )
    return made


if __name__ == "__main__":
    tyro.cli(follow)
