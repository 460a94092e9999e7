#!/usr/bin/env bash
# The shipped models of MNIST rows: trained side by side, rounded to bfloat16, measured one after another.
# usage: experiments/mnist_small.sh OUT     (MNIST in $VSSM_DATA, or downloaded; run it where vssm can be imported)
# OUT/runs has the run folders, OUT/models what is measured; vssm and ssm are shipped in vssm/runs/pretrained/. Given again, it goes on.
# The widths make 2.6, 1.8 and 1.8 M parameters: 11.8 MiB in all. EPOCHS=1 and WIDTHS="16 16 16" try it out.
set -euo pipefail
out=$1
read -r vssm ssm transformer <<<"${WIDTHS:-160 256 192}"

fit() { # name kind width
  python3 - "$out/runs/$1" "$2" "$3" "${EPOCHS:-30}" <<'PY'
import sys
from pathlib import Path

from vssm.config import ModelConfig, RunConfig, TrainConfig
from vssm.data import DataConfig
from vssm.training.loop import train

folder, kind, width, epochs = sys.argv[1:]
config = RunConfig(
    data=DataConfig(name="mnist"),
    model=ModelConfig(kind=kind, features=28, width=int(width)),
    train=TrainConfig(epochs=int(epochs), learning_rate=2e-3, ema=0.999, checkpoint_minutes=2),
)
train(config, folder, resume=(Path(folder) / "config.json").exists())
PY
}

measure() { # name
  rm -rf "$out/models/$1"
  python3 "$(dirname "$0")/ship_model.py" export "$out/runs/$1" "$out/models/$1"
  vssm evaluate "$out/models/$1" --num-images "${IMAGES:-10000}" --num-samples "${DRAWS:-100}"
  python3 "$(dirname "$0")/ship_model.py" card "$out/models/$1"
}

mkdir -p "$out/models"
fit mnist-small vssm "$vssm" & first=$!
fit mnist-small-ssm ssm "$ssm" & second=$!
fit mnist-small-transformer transformer "$transformer" & third=$!
wait "$first"
wait "$second"
wait "$third"
for name in mnist-small mnist-small-ssm mnist-small-transformer; do
  measure "$name"
done
du -bsh "$out/models"
