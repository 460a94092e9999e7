"""Writes the page that fills digits without a server.

    python docs/browser/export.py FOLDER [MODEL]

The folder gets the page of `vssm serve`, one pass of a model as an ONNX file, and onnxruntime-web,
which runs it in the browser. `local.js` does what a server would do.
"""

import json
import logging
import shutil
import subprocess
import sys
import tarfile
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import vssm.serve
from vssm.distributions import Latents
from vssm.models import AnyPart
from vssm.models.anypart import Part
from vssm.nn import mamba
from vssm.runs import pretrained
from vssm.runs.config import SavedConfig
from vssm.serve.models import Served

HERE = Path(__file__).parent
MODEL = "mnist-any-small"
RUNTIME = "onnxruntime-web@1.30.0"
RUNTIME_FILES = "ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"
MOST = 64  # samples at a time


class Pass(nn.Module):
    """One pass of `vssm.fill`: the mean of p(x_R | z, x_K), with z drawn by uniform numbers u."""

    def __init__(self, model: AnyPart) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, x: Tensor, known: Tensor, made: Tensor, u: Tensor, temperature: Tensor
    ) -> Tensor:
        """Maps x, known and made (B, T, D), u (B, T, Z) and temperature (1,) to (B, T, D)."""
        draws = u.chunk(self.model.config.levels, -1)

        def draw(level: int, p_z: Latents, query: Tensor) -> Tensor:
            own = draws[level][:, :: self.model.spans[level]]
            return draw_one_hot(p_z.raw / temperature, own)

        return self.model.descend(Part(x, known, made), draw)[0].mean


def draw_one_hot(logits: Tensor, u: Tensor) -> Tensor:
    """Draws what `vssm.ops.draws.inverse_cdf` draws, one-hot and with operators of ONNX."""
    cumulative = (logits.softmax(-1) * 2**30).int().cumsum(-1, dtype=torch.int32)
    total = cumulative[..., -1:]
    beyond = cumulative > torch.minimum((u[..., None] * total).int(), total - 1)
    before = torch.cat([torch.zeros_like(beyond[..., :1]), beyond[..., :-1]], -1)
    return (beyond & ~before).float()


def export_pass(model: AnyPart, path: Path) -> None:
    """Writes one pass, over one window of any number of sequences, as an ONNX file."""
    x = torch.zeros(2, model.config.window, model.config.features)
    u = torch.full((*x.shape[:2], model.config.latents), 0.5)
    inputs = {"x": x, "known": x.bool(), "made": x.bool(), "u": u, "temperature": torch.ones(1)}
    batch = torch.export.Dim("batch")
    sizes = {name: {0: batch} if t.ndim > 1 else None for name, t in inputs.items()}
    fast = {name: getattr(mamba, name) for name in ("selective_scan", "causal_conv_silu")}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # torchvision is not needed
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            for name, function in fast.items():  # ONNX knows no kernels
                setattr(mamba, name, partial(function, backend="reference"))
            program = torch.export.export(
                Pass(model), (), inputs, dynamic_shapes=sizes, strict=True
            )
        finally:
            vars(mamba).update(fast)
        made = torch.onnx.export(program, output_names=["values"], verbose=False)
    assert made is not None
    for node in made.model.graph:
        node.metadata_props.clear()  # where in the source it comes from: a third of the file
    made.save(path)


def get_runtime(out: Path) -> None:
    """Downloads onnxruntime-web from npm, and copies what the page loads."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", RUNTIME]
        name = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        with tarfile.open(Path(folder) / name.stdout.strip()) as archive:
            for file in RUNTIME_FILES:
                data = archive.extractfile(f"package/dist/{file}")
                assert data is not None
                (out / file).write_bytes(data.read())


def write_page(source: str, out: Path) -> None:
    """Writes the page for a model of images that knows any part."""
    out.mkdir(parents=True, exist_ok=True)
    folder = pretrained.find(source)
    model = vssm.load(folder).eval()
    assert isinstance(model, AnyPart)
    export_pass(model, out / "pass.onnx")
    get_runtime(out)
    described = Served(Path(source).name, model, SavedConfig.read(folder).meta()).describe()
    described |= {"length": model.config.window, "latents": model.config.latents}
    limits = {"max_num": MOST, "max_length": model.config.window}
    (out / "models.json").write_text(json.dumps({"models": [described], "limits": limits}))
    shutil.copy(HERE / "local.js", out)
    page = Path(vssm.serve.__file__).parent / "page.html"
    text = page.read_text().replace("<script>", '<script src="local.js"></script>\n<script>', 1)
    text = text.replace('<p><a href="/docs">API documentation</a></p>\n', "")  # of the server
    (out / "index.html").write_text(text)


if __name__ == "__main__":
    out, *model = sys.argv[1:]
    write_page(*model or [MODEL], out=Path(out))
