#!/usr/bin/env bash
# Your first ten minutes with vssm: install, generate, complete, fill, train on an array, forecast a table, serve.
# usage: bash examples/ten_minutes.sh [FOLDER]       all files go to FOLDER, ./ten_minutes by default
set -euo pipefail
clone=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${1:-ten_minutes}"
cd "${1:-ten_minutes}"
step() { printf '\n%s\n' "$*"; }

step "1. Install, if there is no vssm yet"
if ! command -v vssm > /dev/null; then
  python3 -m venv venv
  export PATH="$PWD/venv/bin:$PATH"
  pip install --quiet "$clone[serve]"
fi
echo "vssm $(vssm --version)"

step "2. Generate: 16 digits, all rows in one pass, as a picture and as an array"
vssm generate mnist-best-small --num 16 --seed 1 --out digits.png
vssm generate mnist-best-small --num 16 --seed 1 --out digits.npy

step "3. Complete: new lower halves for the upper halves of the digits"
python -c 'import numpy as np; np.save("upper.npy", np.load("digits.npy")[:, :14])'
vssm generate mnist-best-small --prompt upper.npy --out completed.png

step "4. Fill: draw a seven, make its middle transparent, and fill the hole in eight ways"
vssm generate mnist-any-small --label 7 --num 1 --seed 1 --out seven.npy
python - << 'END'
import numpy as np
from PIL import Image

grey = (np.load("seven.npy")[0].clip(0, 1) * 255).astype("uint8")
opaque = np.full_like(grey, 255)
opaque[7:21, 7:21] = 0
Image.fromarray(np.stack([grey, opaque], -1)).save("hole.png")
END
vssm fill mnist-any-small --input hole.png --label 7 --num 8 --out filled.png

step "5. Train on an array of your own: 400 sequences of 32 steps and 2 features"
python - << 'END'
import numpy as np

random = np.random.default_rng(0)
phase = random.uniform(0, 6, (400, 1))
angle = phase + np.arange(32) / 4
np.save("waves.npy", np.stack([np.sin(angle), np.cos(angle)], -1).astype("float32"))
END
vssm train arrays --smoke --arrays.path waves.npy --out run # leave out --smoke for a better model
vssm generate run --num 4 --out waves_made.npy

step "6. Forecast a table of your own: four weeks of daily visits, after two years"
python - << 'END'
import numpy as np
import pandas as pd

days = pd.date_range("2024-01-01", periods=730, freq="D")
noise = np.random.default_rng(0).normal(size=730)
visits = 100 + 30 * np.sin(2 * np.pi * np.arange(730) / 7) + 5 * noise
pd.DataFrame({"ds": days, "visits": visits.round(1)}).to_csv("visits.csv", index=False)
END
vssm forecast visits.csv --horizon 28 --max-steps 100 --out forecast.csv

step "7. Serve: a page for the browser, and HTTP for programs"
vssm serve mnist-best-small --port 0 > server.log 2>&1 &
server=$!
trap 'kill "$server" 2> /dev/null' EXIT
until grep -q 'http://' server.log; do
  kill -0 "$server" || { cat server.log && exit 1; }
  sleep 1
done
url=$(grep -o 'http://[0-9.:]*' server.log | head -n 1)
python - "$url" << 'END'
import json
import sys
from urllib.request import Request, urlopen

body = json.dumps({"num": 2, "length": 28}).encode()
request = Request(f"{sys.argv[1]}/v1/generate", body, {"Content-Type": "application/json"})
answer = json.load(urlopen(request))
print(f"{len(answer['x'])} sequences of {len(answer['x'][0])} steps came over HTTP")
END
if [ -t 0 ]; then
  read -rp "Draw on the page at $url, then press Enter to stop the server. "
fi
step "Done. Your files are in $PWD. Read on in docs/guide.md."
