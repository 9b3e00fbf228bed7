"""The copy of a TIFF to a COG: what is known of its progress, and how it ends early."""

import numpy as np
import pytest
import tifffile

pytest.importorskip("rasterio")

from distseg.data.formats import cog_writer
from distseg.data.formats.cog_writer import copy_as_cog


@pytest.fixture
def plain(tmp_path):
    (tmp_path / "scratch # ?").mkdir()  # GDAL's paths are not URLs
    path = tmp_path / "scratch # ?/plain.tif"
    labels = np.random.default_rng(0).integers(0, 3, (1030, 1300)).astype(np.uint8)
    tifffile.imwrite(path, labels, tile=(256, 256), compression="deflate")
    return path


def test_gdal_reads_the_file_twice_and_keeps_its_temporary_file_in_the_scratch_folder(
    tmp_path, plain, monkeypatch
):
    read, seen, others, beside = cog_writer._WatchedFile.read, [], set(), set()

    def watched(self, size=-1):
        found = read(self, size)
        seen.append(self._source.bytes)
        others.update(p.name for p in plain.parent.iterdir())
        beside.update(p.name for p in tmp_path.iterdir())
        return found

    monkeypatch.setattr(cog_writer._WatchedFile, "read", watched)
    shown = []
    copy_as_cog(plain, tmp_path / "a.cog.tif", plain.parent, shown.append)
    assert 2 <= seen[-1] / plain.stat().st_size < 2.1
    assert shown == sorted(shown) and shown[-1] == 2
    assert len(others) == 2 and beside <= {"scratch # ?", "a.cog.tif"}
    assert [p.name for p in plain.parent.iterdir()] == ["plain.tif"]


def test_an_interrupt_ends_the_copy_before_gdal_has_read_the_file(tmp_path, plain, monkeypatch):
    sources = []

    def interrupt(times):
        raise KeyboardInterrupt

    class Source(cog_writer._Source):
        def __init__(self, path):
            super().__init__(path)
            sources.append(self)

    monkeypatch.setattr(cog_writer, "_Source", Source)
    monkeypatch.setattr(cog_writer, "_SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        copy_as_cog(plain, tmp_path / "a.cog.tif", plain.parent, interrupt)
    assert sources[0].ended and sources[0].bytes < plain.stat().st_size
