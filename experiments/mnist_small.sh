#!/usr/bin/env bash
# Small models of MNIST rows, trained and evaluated in minutes on one GPU.
# usage: experiments/mnist_small.sh OUT     (MNIST in $VSSM_DATA, or downloaded)
set -euo pipefail
out=$1
one() { # kind width epochs
  python3 -m vssm train mnist --model.kind "$1" --model.width "$2" --train.epochs "$3" --train.ema 0.999 \
    --train.checkpoint-minutes 60 --out "$out/mnist-small-$1"
  python3 -m vssm evaluate "$out/mnist-small-$1"
}
one vssm 160 "${EPOCHS:-45}"
one ssm 224 "${EPOCHS_AR:-25}"
one transformer 160 "${EPOCHS_AR:-25}"
