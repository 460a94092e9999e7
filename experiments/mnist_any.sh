#!/usr/bin/env bash
# Trains the shipped model `mnist-any-small`: any part known, labels given. About 70 minutes of one CPU core.
set -euo pipefail
OMP_NUM_THREADS=1 vssm train mnist --labels --model.known any --model.width 64 --model.layers 2 \
  --model.window 28 --model.levels 8 --model.spans 28 28 14 7 4 2 1 1 --model.latents 16 --model.classes 32 \
  --train.batch 64 --train.epochs 29 --train.max-steps 24000 --train.learning-rate 2e-3 --train.clip 0.3 \
  --train.ema 0.999 --train.validate-every 2 --train.num-valid 1000 --train.device cpu --out "${1:-runs/mnist-any}"
