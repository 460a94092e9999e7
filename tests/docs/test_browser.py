"""The page without a server makes the samples of `vssm.fill`, in Node and in Chromium."""

import functools
import http.server
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import vssm
from tests.serving import save_models
from vssm.data import Meta

HERE = Path(__file__).parent
EXPORT = HERE.parent.parent / "docs" / "browser" / "export.py"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
LABELLED = Meta(
    name="squares",
    features=8,
    length=6,
    suggested_head="gaussian",
    image_shape=(6, 5, 1),
    classes=3,
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    if shutil.which("npm") is None:
        pytest.skip("needs npm, which has the package that runs the model")
    folder = tmp_path_factory.mktemp("page")
    sizes = {"width": 16, "layers": 1, "latents": 4, "classes": 5, "levels": 2, "spans": (3, 1)}
    sizes |= {"known": "any", "window": 6, "given": 3}
    [source] = save_models(folder, ["vssm"], meta=LABELLED, **sizes)
    command = [sys.executable, str(EXPORT), str(folder / "page"), source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "'npm', 'pack'" in done.stderr:
        pytest.skip("npm could not download onnxruntime-web")
    assert done.returncode == 0, done.stderr[-500:]
    return source, folder / "page"


def image():
    """Returns an image of class 1, half of whose pixels are known, and which entries are known."""
    x = torch.zeros(6, 8)
    x[:, :5] = torch.linspace(0, 1, 30).view(6, 5)
    x[:, 6] = 1
    known = torch.ones(6, 8, dtype=torch.bool)
    known[:, :5] = torch.arange(30).view(6, 5) % 7 < 3
    return x, known


def filled(source, seed, passes, num=3):
    x, known = image()
    options = {"num": num, "passes": passes, "temperature": 0.7, "seed": seed}
    return vssm.fill(vssm.load(source).eval(), x[None], known=known[None], **options)[0]


@pytest.mark.parametrize(("seed", "passes"), [(0, 1), (7, 4), (-(2**40) - 3, 2)])
def test_one_seed_gives_the_sample_of_fill(page, seed, passes):
    source, folder = page
    x, known = image()
    pairs = zip(x.tolist(), known.tolist(), strict=True)
    rows = [[v if k else None for v, k in zip(*pair, strict=True)] for pair in pairs]
    ask = {"x": rows, "num": 3, "passes": passes, "temperature": 0.7, "seed": seed}
    command = ["node", str(HERE / "fill.mjs"), str(folder), json.dumps(ask)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    answer = json.loads(done.stdout)
    made, order = torch.tensor(answer["x"]), torch.tensor(answer["order"])
    torch.testing.assert_close(made, filled(source, seed, passes), atol=1e-5, rtol=0)
    assert torch.equal(order >= 0, ~known.expand(3, -1, -1))
    assert sorted(order.unique().tolist()) == list(range(-1, passes))


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
def test_the_page_fills_in_a_browser(page):
    sync_api = pytest.importorskip("playwright.sync_api")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(page[1]))
    read = "document.querySelector('#made canvas').getContext('2d').getImageData(0, 0, 5, 6).data"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
            tab, wrong = browser.new_page(), []
            tab.on("pageerror", lambda error: wrong.append(str(error)))
            tab.goto(f"http://127.0.0.1:{server.server_port}/")
            tab.wait_for_function("/pass 1 of 1/.test(document.body.textContent)", timeout=30_000)
            first = list(tab.evaluate(f"Array.from({read})"))
            assert tab.locator("#made canvas").count() == 16
            assert any(first[-20 * 3 :: 4]), "the lower rows, which were not given, are black"
            tab.fill("#seed", "5")
            tab.evaluate("$('passes').value = 3; $('go').click()")
            tab.wait_for_function("/pass 3 of 3/.test(document.body.textContent)", timeout=30_000)
            assert list(tab.evaluate(f"Array.from({read})")) != first
            assert not tab.is_visible("text=API documentation")
            tab.goto((page[1] / "index.html").as_uri())
            tab.wait_for_selector("#alert:not([hidden])")
            assert "Run python -m http.server -d site" in tab.inner_text("#alert")
            assert not wrong
            browser.close()
        server.shutdown()
