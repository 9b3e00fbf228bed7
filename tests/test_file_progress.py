"""Progress of files: phase by phase, on the screen and for the guardian."""

import re

import pytest

from distseg.data import file_progress
from distseg.data.class_files import progress_of
from distseg.data.file_progress import FileProgress


@pytest.fixture
def beats(monkeypatch):
    found = []
    monkeypatch.setattr(file_progress, "heartbeat", found.append)
    return found


def test_phases_follow_each_other(beats, monkeypatch, capsys):
    monkeypatch.setattr(file_progress, "_SHOWN", 0)
    monkeypatch.setattr(file_progress, "_MEGA", 10)
    with FileProgress("a.gpkg", ("objects", "polygons"), 100) as shown:
        for pixels in (60, 80, 0, 60, 5):  # the second part ends one phase and begins the next
            shown(pixels)
    assert beats == [
        "a.gpkg, objects, 60%",
        "a.gpkg, objects, 100%",
        "a.gpkg, polygons, 40%",
        "a.gpkg, polygons, 100%",
    ]
    lines = re.sub(r" in .*", "", capsys.readouterr().err).splitlines()
    assert lines == ["a.gpkg, objects: 10/10 megapixels", "a.gpkg, polygons: 10/10 megapixels"]


def test_a_phase_that_is_interrupted_says_so(beats, monkeypatch, capsys):
    monkeypatch.setattr(file_progress, "_SHOWN", 0)
    monkeypatch.setattr(file_progress, "_MEGA", 10)
    with pytest.raises(KeyboardInterrupt), FileProgress("a.tif", ("classes",), 100) as shown:
        shown(35)
        raise KeyboardInterrupt
    assert capsys.readouterr().err.startswith("a.tif, classes: stopped at 3/10 megapixels after")


def test_small_files_are_reported_to_the_guardian_only(tmp_path, beats, capsys):
    with progress_of(tmp_path / "a.cog.tif", 100) as shown:
        shown(200)
    assert beats == ["a.cog.tif, classes, 100%", "a.cog.tif, overviews, 100%"]
    assert not capsys.readouterr().err
