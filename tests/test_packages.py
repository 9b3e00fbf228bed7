"""Optional packages: the module, or one message that names what needs it and the line that installs it."""

import sys

import pytest

from distseg.data.class_files import check_written
from distseg.data.formats.georeference import Georeference
from distseg.data.packages import _EXTRAS, _INSTALLED_AS, optional
from distseg.data.vector.world import world_of

PLACE = Georeference(((33550, (1.0, 1.0, 0.0)), (33922, (0.0,) * 6)))


@pytest.mark.parametrize("package", _EXTRAS)
def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(package, monkeypatch):
    pytest.importorskip(package)
    assert optional("a.tif", package).__name__ == package
    monkeypatch.setitem(sys.modules, package, None)
    line = rf"pip install 'distseg\[{_EXTRAS[package]}\]', or pip install {_INSTALLED_AS.get(package, package)}$"
    with pytest.raises(ValueError, match=f"^a.tif: this needs {package}, .*: {line}"):
        optional("a.tif", package)


def test_submodules_are_imported_with_their_package():
    assert optional("a.tif", "rasterio", "features").features.rasterize


@pytest.mark.parametrize("package", ["rasterio.shutil", "pyogrio.errors"])
def test_a_package_without_a_submodule_is_as_good_as_missing(package, monkeypatch):
    name, part = package.split(".")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"this needs {name}, .*{part}"):
        optional("a.tif", name, part)


@pytest.mark.parametrize(
    "ending, package",
    [("cog.tif", "rasterio"), ("nii.gz", "nibabel"), ("nrrd", "nrrd"), ("ome.zarr", "zarr")],
)
def test_files_that_need_a_package_are_refused_before_any_work(
    ending, package, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"^class maps as .*: this needs {package}"):
        check_written([tmp_path / f"a.{ending}"], None, "a")


def test_coordinates_without_rasterio_are_refused_like_other_files(monkeypatch):
    monkeypatch.setitem(sys.modules, "rasterio", None)
    with pytest.raises(ValueError, match="^the coordinates of a: this needs rasterio"):
        world_of(PLACE, "a")
