"""The demo fits two screens, and leaves pictures, runs and a report."""

import re

import vssm.lab.demo
from vssm.lab.demo import demo


def test_demo_opens_with_pictures_and_the_race(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vssm.lab.demo, "_EPOCHS", {"vssm": 1})
    monkeypatch.setattr(vssm.lab.demo, "_LENGTHS", (4, 8))
    demo(tmp_path / "demo")
    folder = (tmp_path / "demo").relative_to(tmp_path)
    lines = capsys.readouterr().out.replace(str(tmp_path), "").splitlines()
    assert len(lines) + 2 <= 50, "two more models are trained usually"
    assert "mnist-one-shot.png" in lines[1] and lines[6].startswith("Race")
    assert lines[7].split() == ["T", "vssm", "ssm", "transformer"]
    assert re.fullmatch(r"  vssm +\d+ +-?\d+\.\d\d +-?\d+\.\d\d", lines[13])
    pictures = {path.name for path in folder.glob("*.png")}
    names = ("one-shot", "completed", "labels", "filled")
    assert pictures == {f"mnist-{name}.png" for name in names}
    page = (folder / "report.html").read_text()
    assert "completed of vssm" in page
