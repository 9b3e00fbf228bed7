"""Rasters of GDAL's other formats are read as rasterio reads them: VRT, JPEG 2000, Erdas Imagine, ENVI, ..."""

import os
import sys

import numpy as np
import pytest
from test_georeference import UTM, geotiff
from test_masks import run

from distseg.data.formats.readers import open_image, open_mask
from distseg.data.store.store import Store
from distseg.inference.image_source import file_image
from distseg.tiling.tile import Box

rasterio, shutil = pytest.importorskip("rasterio"), pytest.importorskip("rasterio.shutil")
pytestmark = pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
SIZE = (45, 61)
BOX = Box((7, 3), (33, 60))
SERVICE = (
    "<GDAL_WMS><Service name='WMS'><ServerUrl>http://127.0.0.1:9</ServerUrl></Service></GDAL_WMS>"
)
JP2 = dict(QUALITY=100, REVERSIBLE="YES")


def pixels_of(seed=0, bands=3, dtype=np.uint8, most=250):
    return np.random.default_rng(seed).integers(0, most, (bands, *SIZE)).astype(dtype)


def vrt(path, source, bands=1, extra="", dtype="Byte"):
    """Write a VRT over a TIFF file, as gdalbuildvrt does."""
    simple = "<SimpleSource><SourceFilename relativeToVRT='1'>{}</SourceFilename><SourceBand>{}</SourceBand></SimpleSource>"
    inner = "".join(
        f"<VRTRasterBand dataType='{dtype}' band='{k}'>{extra}{simple.format(source, k)}</VRTRasterBand>"
        for k in range(1, bands + 1)
    )
    transform = "<GeoTransform>400000, 10, 0, 5400000, 0, -10</GeoTransform><SRS>EPSG:32633</SRS>"
    path.write_text(
        f"<VRTDataset rasterXSize='{SIZE[1]}' rasterYSize='{SIZE[0]}'>{transform}{inner}</VRTDataset>"
    )


def in_format(folder, ending, driver, pixels, **options):
    """Write pixels as a GeoTIFF and copy it into another format; return both paths."""
    geotiff(folder / "source.tif", pixels, **UTM, nodata=7)
    path = folder / f"a{ending}"
    if driver == "VRT":
        extra = "<NoDataValue>7</NoDataValue>"
        vrt(
            path,
            "source.tif",
            len(pixels),
            extra,
            {"uint8": "Byte"}.get(pixels.dtype.name, "Int16"),
        )
    else:
        shutil.copy(folder / "source.tif", path, driver=driver, **options)
    return folder / "source.tif", path


@pytest.mark.parametrize(
    "ending, driver, dtype, options",
    [
        (".vrt", "VRT", np.int16, {}),
        (".jp2", "JP2OpenJPEG", np.uint8, JP2),
        (".img", "HFA", np.int16, {}),
        (".bsq", "ENVI", np.float32, {}),
        (".bil", "EHdr", np.uint8, {}),
    ],
)
def test_a_raster_is_read_like_its_geotiff(tmp_path, ending, driver, dtype, options):
    source, path = in_format(tmp_path, ending, driver, pixels_of(dtype=dtype), **options)
    expected, found = open_image(source), open_image(path)
    assert (found.size, found.bands, found.dtype) == (SIZE, 3, np.dtype(dtype))
    assert found.nodata == expected.nodata == 7
    assert found.place.transform == expected.place.transform
    from distseg.data.vector.world import world_of

    crs = world_of(found.place, "a").crs
    assert crs is not None and (driver == "EHdr" or crs == rasterio.CRS.from_string(UTM["crs"]))
    assert np.array_equal(found.read(BOX), expected.read(BOX))
    assert np.array_equal(found.read(Box.whole(SIZE)), pixels_of(dtype=dtype))


def test_masks_palettes_alpha_and_scales(tmp_path):
    geotiff(tmp_path / "l.tif", pixels_of(bands=1, most=3))
    shutil.copy(tmp_path / "l.tif", tmp_path / "l.img", driver="HFA")
    assert np.array_equal(
        open_mask(tmp_path / "l.img").read(BOX)[0], pixels_of(bands=1, most=3)[0][BOX.slices]
    )
    geotiff(tmp_path / "m.tif", pixels_of(bands=4), photometric="RGB", alpha="yes")
    colours = "<ColorInterp>{}</ColorInterp>"
    vrt(tmp_path / "m.vrt", "m.tif", 4)
    text = (tmp_path / "m.vrt").read_text()
    for k, name in enumerate(("Red", "Green", "Blue", "Alpha"), 1):
        text = text.replace(f"band='{k}'>", f"band='{k}'>{colours.format(name)}<Scale>0.5</Scale>")
    (tmp_path / "m.vrt").write_text(text)
    reader = open_image(tmp_path / "m.vrt")
    found, valid = reader.read_valid(BOX)
    assert (
        np.array_equal(found, pixels_of(bands=4)[(slice(0, 3), *BOX.slices)])
        and reader.colours == "RGB"
    )
    assert np.array_equal(valid, pixels_of(bands=4)[(3, *BOX.slices)] > 0)
    assert any("declares the scale 0.5" in note for note in reader.notes)
    assert open_image(tmp_path / "m.vrt", alpha="band").bands == 4


def test_a_validity_mask_hides_pixels(tmp_path):
    geotiff(tmp_path / "m.tif", pixels_of())
    known = pixels_of(1, 1)[0] > 60
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True),
        rasterio.open(tmp_path / "m.tif", "r+") as file,
    ):
        file.write_mask(known)
    shutil.copy(tmp_path / "m.tif", tmp_path / "m.vrt", driver="VRT")
    reader = open_image(tmp_path / "m.vrt")
    found, valid = reader.read_valid(BOX)
    assert np.array_equal(found, pixels_of()[(slice(None), *BOX.slices)])
    assert np.array_equal(valid, known[BOX.slices]) and 0 < valid.sum() < valid.size
    assert any("has a validity mask" in note for note in reader.notes)


def test_prepare_and_predict_take_rasters(tmp_path):
    (tmp_path / "i").mkdir(), (tmp_path / "m").mkdir()
    for k in range(2):
        geotiff(tmp_path / f"t{k}.tif", pixels_of(k), **UTM)
        shutil.copy(tmp_path / f"t{k}.tif", tmp_path / f"i/s{k}.jp2", driver="JP2OpenJPEG", **JP2)
        geotiff(tmp_path / f"l{k}.tif", pixels_of(k, 1, most=2), **UTM)
        shutil.copy(tmp_path / f"l{k}.tif", tmp_path / f"m/s{k}.bil", driver="ENVI")
    arguments = ["prepare", tmp_path / "i", tmp_path / "s.h5", "--masks", tmp_path / "m"]
    assert run(*arguments, "--classes", "ground,house", "--split", "1,0,0") == 0
    store = Store(tmp_path / "s.h5")
    for k in range(2):
        assert np.array_equal(store.read(f"s{k}", BOX), pixels_of(k)[(slice(None), *BOX.slices)])
        assert np.array_equal(store.labels(f"s{k}", BOX), pixels_of(k, 1, most=2)[0][BOX.slices])
    manifest = {"data": {"mean": [100.0] * 3, "std": [50.0] * 3, "types": ["uint8"], "size": SIZE}}
    (tmp_path / "i/s0.jp2").rename(tmp_path / "scene")  # a file without an ending
    source = file_image(str(tmp_path / "scene"), manifest)
    expected = (pixels_of(0)[(slice(None), *BOX.slices)].astype(np.float32) - 100) / 50
    assert np.allclose(source.read(BOX), expected) and source.place is not None


def test_a_child_process_opens_the_file_anew(tmp_path):
    _, path = in_format(tmp_path, ".img", "HFA", pixels_of())
    reader = open_image(path)
    child = os.fork()
    if not child:
        same = np.array_equal(reader.read(BOX), pixels_of()[(slice(None), *BOX.slices)])
        os._exit(0 if same and len(reader._files) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0 and len(reader._files) == 1
    assert np.array_equal(reader.read(BOX), pixels_of()[(slice(None), *BOX.slices)])


def test_a_change_of_a_source_is_a_change_of_the_image(tmp_path):
    """Results of predict are computed anew if a file changes from which a VRT takes its pixels."""
    in_format(tmp_path, ".vrt", "VRT", pixels_of())
    manifest = {"data": {"mean": [0.0] * 3, "std": [1.0] * 3}}
    before = file_image(str(tmp_path / "a.vrt"), manifest).identity
    os.utime(tmp_path / "source.tif", (1, 1))
    assert "source.tif" in before
    assert file_image(str(tmp_path / "a.vrt"), manifest).identity != before


def refused(tmp_path, kind):
    """Write a file that is refused; return its path and the words of the message."""
    path = tmp_path / "a.vrt"
    if kind == "address":
        vrt(path, "/vsicurl/http&#58;//127.0.0.1:9/a.tif")
        return (
            path,
            "a.vrt takes pixels from /vsicurl/http://127.0.0.1:9/a.tif, which is no local file",
        )
    if kind == "lost source":
        vrt(path, "gone.tif")
        return path, "a.vrt takes pixels from gone.tif, which is no local file: correct the path"
    if kind == "circle":
        vrt(path, "b.vrt")
        vrt(tmp_path / "b.vrt", "a.vrt")
        return path, "b.vrt takes pixels from a.vrt, which takes pixels from "
    if kind == "service inside":
        vrt(path, "b.vrt")
        vrt(tmp_path / "b.vrt", "c.tif")
        (tmp_path / "c.tif").write_text(SERVICE)
        return path, "a.vrt cannot be read as an image .*not recognized"
    if kind == "service":
        path.write_text(SERVICE)
        return path, "a.vrt cannot be read as an image .*not recognized"
    if kind == "types":
        geotiff(tmp_path / "t.tif", pixels_of(bands=2))
        vrt(path, "t.tif", 2)
        path.write_text(path.read_text().replace("'Byte' band='2'", "'Int16' band='2'"))
        return path, "a.vrt has bands of the types int16, uint8: write it with one type"
    path = tmp_path / "a.jp2"
    path.write_bytes(b"not a picture")
    return path, "a.jp2 cannot be read as an image"


@pytest.mark.parametrize(
    "kind", ["address", "lost source", "circle", "service", "service inside", "types", "damaged"]
)
def test_rasters_that_are_refused(tmp_path, kind):
    path, words = refused(tmp_path, kind)
    with pytest.raises(ValueError, match=words):
        open_image(path)


def test_lossy_masks_are_refused_in_a_vrt_too(tmp_path):
    geotiff(tmp_path / "l.tif", pixels_of(bands=1, most=3), compress="JPEG")
    vrt(tmp_path / "l.vrt", "l.tif")
    with pytest.raises(ValueError, match="l.vrt is a mask in JPEG, which changes labels"):
        open_mask(tmp_path / "l.vrt")
    shutil.copy(tmp_path / "l.tif", tmp_path / "l.jp2", driver="JP2OpenJPEG", QUALITY=20)
    with pytest.raises(ValueError, match="l.jp2 is a mask in JPEG 2000, which changes labels"):
        open_mask(tmp_path / "l.jp2")


def test_without_rasterio_the_line_that_installs_it_is_told(tmp_path, monkeypatch):
    _, path = in_format(tmp_path, ".img", "HFA", pixels_of())
    monkeypatch.setitem(sys.modules, "rasterio", None)
    with pytest.raises(ValueError, match=r"a.img: this needs rasterio.*'distseg\[geo\]'"):
        open_image(path)
