"""Volumes go the way of images: prepare, train, evaluate, predict, plot; from npy, TIFF and NIfTI."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from distseg.cli.main import main
from distseg.data.class_files import paths_of
from distseg.data.formats.readers import open_image, open_mask, stem_of
from distseg.data.store.store import Store
from distseg.report.cuts import middle_of_interest, three_cuts
from distseg.tiling.tile import Box

nibabel = pytest.importorskip("nibabel")
AFFINE = np.array([[0, -0.8, 0, 10], [0.7, 0, 0, -20], [0, 0, 2.5, 5], [0, 0, 0, 1.0]])


def run(*arguments):
    """Run the command line in this process and return its exit code."""
    try:
        return main([str(argument) for argument in arguments]) or 0
    except SystemExit as e:
        return e.code


def volume(number):
    """Return a volume of noise with bright balls, and its labels."""
    random, size = np.random.default_rng(number), (17, 19 + number, 23)
    places, labels = np.indices(size), np.zeros(size, np.uint8)
    for _ in range(3):
        middle = random.integers(3, 15, 3).reshape(3, 1, 1, 1)
        labels[((places - middle) ** 2).sum(0) < random.integers(6, 30)] = 1
    return (random.normal(100, 10, size) + 60 * labels).astype(np.float32), labels


def written(folder, form, count=5):
    """Write volumes and their masks in a form; return the arguments of prepare."""
    (folder / "i").mkdir(), (folder / "m").mkdir()
    for number in range(count):
        pixels, labels = volume(number)
        for name, array in (("i", pixels), ("m", labels)):
            path = folder / name / f"v{number}"
            if form == "npy":
                np.save(f"{path}.npy", array)
            elif form == "tif":
                tifffile.imwrite(f"{path}.tif", array, photometric="minisblack", metadata=None)
            else:
                ending = ".nii" if number == 0 else ".nii.gz"
                stored = array.astype(np.float32) if name == "m" and number == 1 else array
                nibabel.save(nibabel.Nifti1Image(stored.T, AFFINE), f"{path}{ending}")
    masks = ["--masks", folder / "m", "--classes", "ground,ball", "--split", "0.6,0.2,0.2"]
    return ["prepare", folder / "i", folder / "s.h5", *masks]


@pytest.mark.parametrize(
    "stored, dtype",
    [("i2", "f4"), ("u2", "f4"), ("f4", "f4"), ("i4", "f8"), ("u4", "f8"), ("f8", "f8")],
)
def test_scaled_voxels_keep_their_precision(tmp_path, stored, dtype):
    """Whole numbers above 2^24 are not rounded to float32."""
    largest = 2**24 + 3 if np.dtype(stored).itemsize > 2 else 2**14 + 3
    array = np.arange(largest, largest + 24).reshape(2, 3, 4).astype(stored)
    header = nibabel.Nifti1Header()
    header.set_data_dtype(stored)
    header.set_slope_inter(0.5, 1)
    image = nibabel.Nifti1Image(array, None, header)
    image.to_filename(tmp_path / "a.nii")
    with open(tmp_path / "a.nii", "r+b") as file:  # the scale alone: nibabel would undo it
        raw = nibabel.Nifti1Header.from_fileobj(file)
        raw["scl_slope"], raw["scl_inter"] = 0.5, 1
        file.seek(0)
        file.write(raw.binaryblock)
        file.seek(int(raw["vox_offset"]))
        file.write(array.T.tobytes("C"))
    reader = open_image(tmp_path / "a.nii")
    assert reader.dtype == dtype
    found = reader.read(Box.whole(reader.size))
    assert np.array_equal(found[0], array.T * 0.5 + 1)


@pytest.mark.parametrize("form", ["npy", "tif", "nii"])
def test_prepare_keeps_every_voxel(tmp_path, form, capsys):
    arguments = written(tmp_path, form)
    if form != "nii":
        assert run(*arguments) == 2
        assert "--pages volume if they are the slices of a volume" in capsys.readouterr().err
        assert not (tmp_path / "s.h5").exists()
        arguments += ["--pages", "volume"]
    assert run(*arguments) == 0
    store = Store(tmp_path / "s.h5")
    assert sum(len(store.split(split)) for split in store.splits) == 5
    for number in range(5):
        pixels, labels = volume(number)
        box = Box((1, 2, 3), (16, 18, 20))
        assert np.array_equal(store.read(f"v{number}", box)[0], pixels[box.slices])
        assert np.array_equal(store.labels(f"v{number}", box), labels[box.slices])


def test_pages_may_be_images_which_stay_in_one_split(tmp_path):
    assert run(*written(tmp_path, "npy"), "--pages", "images") == 0
    store = Store(tmp_path / "s.h5")
    assert sum(len(store.split(split)) for split in store.splits) == 5 * 17
    splits = {}
    for split in store.splits:
        for name in store.split(split):
            splits.setdefault(name[:2], set()).add(split)
    assert all(len(found) == 1 for found in splits.values()) and len(splits) == 5
    pixels, labels = volume(3)
    box = Box((1, 2), (19, 20))
    assert np.array_equal(store.read("v3_0011", box)[0], pixels[11][box.slices])
    assert np.array_equal(store.labels("v3_0011", box), labels[11][box.slices])


def test_pages_that_a_file_names_bands_are_no_volume(tmp_path, capsys):
    (tmp_path / "i").mkdir()
    tifffile.imwrite(tmp_path / "i/a.tif", np.zeros((6, 14, 18), np.uint8), imagej=True)
    words = ["prepare", tmp_path / "i", tmp_path / "s.h5", "--classes", "a,b", "--pages", "volume"]
    assert run(*words) == 2
    assert "its file says that it is one image with 6 bands" in capsys.readouterr().err


def test_many_pages_may_be_bands(tmp_path):
    (tmp_path / "i").mkdir()
    np.save(tmp_path / "i/a.npy", np.random.default_rng(0).normal(size=(7, 20, 30)))
    arguments = ["prepare", tmp_path / "i", tmp_path / "s.h5", "--classes", "x,y"]
    assert run(*arguments) == 2
    assert run(*arguments, "--pages", "bands") == 0
    assert Store(tmp_path / "s.h5").bands == 7


def test_from_files_to_maps(tmp_path, capsys, monkeypatch):
    """The network has the dims of the data; the class map has the affine of its volume."""
    monkeypatch.chdir(tmp_path)
    assert run(*written(tmp_path, "nii")) == 0
    net = ["--model.depth", 1, "--model.base_channels", 4, "--train.loggers", "[]"]
    crops = ["--data.crop", "12x12x16", "--data.augment", "[flip, turn]", "--train.epochs", 2]
    assert run("train", "--data.store", "s.h5", "--train.output", "run", *net, *crops) == 0
    assert run("evaluate", "run") == 0
    forms = ["--predict.formats", "[nifti, nrrd, hdf5]", "--predict.tile", "9x11x13"]
    image = next(Path("i").glob("v2*"))
    capsys.readouterr()
    assert run("predict", "run", "--images", image, "--output", "found", *forms) == 0
    assert run("predict", "run", "--images", image, "--output", "found", *forms) == 0
    assert "is there already" in capsys.readouterr().out
    found = nibabel.load("found/v2.nii.gz")
    affine = nibabel.load(image).affine  # AFFINE in single precision
    assert np.array_equal(found.affine, affine) and found.get_data_dtype() == np.uint8
    assert found.shape == volume(2)[0].shape[::-1]
    same = open_image("found/v2.nrrd")
    assert np.array_equal(same.read(Box.whole(same.size))[0], np.asarray(found.dataobj).T)
    # The store's image has the same map, and its affine too.
    name = Store("s.h5").split("test")[0]
    assert run("predict", "run", "--output", "stored", *forms) == 0
    image = next(Path("i").glob(f"{name}.*"))
    assert run("predict", "run", "--images", image, "--output", "again", *forms) == 0
    stored, again = (nibabel.load(f"{folder}/{name}.nii.gz") for folder in ("stored", "again"))
    assert np.array_equal(stored.dataobj, again.dataobj)
    assert np.array_equal(stored.affine, affine)
    assert run("plot", "overlay", f"stored/{name}.h5", "--store", "s.h5") == 0
    with Image.open(f"stored/{name}.overlay.png") as picture:
        assert min(picture.size) > 300


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize(
    "flags",
    [
        {2: ["--mesh.tiles", "1x1x2"], 4: ["--mesh.tiles", "2x1x2"]},
        {
            2: ["--mesh.tiles", "2x1x1", "--spatial.exchange_every", "1"],
            4: ["--mesh.tiles", "1x2x1", "--mesh.stages", "2"],
        },
        {
            2: ["--mesh.samples", "2", "--model.norm", "batch"],
            4: ["--mesh.stages", "2", "--mesh.samples", "2", "--pipeline.schedule", "1f1b"],
        },
        {
            2: ["--mesh.stages", "2", "--spatial.tiles_per_rank", "2x1x2"],
            4: ["--mesh.tiles", "2x2x1", "--loss.name", "dice", "--model.up", "transposed"],
        },
    ],
    ids=["tiles", "exchange", "samples", "parts"],
)
def test_built_in_networks_are_exact_on_volumes(comm, flags, capsys):
    image = ["verify", "--image", "13x17x11", "--model.depth", "1", "--model.base_channels", "4"]
    assert run(*image, *flags[comm.size]) == 0
    if comm.rank == 0:
        assert "exact: largest relative error" in capsys.readouterr().out


def test_scaled_voxels_and_times(tmp_path):
    """Scale and offset of the header apply; times are bands; a single slice is an image."""
    random = np.random.default_rng(0)
    stored = random.integers(-1000, 1000, (5, 6, 7, 3)).astype(np.int16)
    image = nibabel.Nifti1Image(stored, AFFINE)
    image.header.set_slope_inter(0.5, 10)
    nibabel.save(image, tmp_path / "a.nii.gz")
    reader, known = open_image(tmp_path / "a.nii.gz"), nibabel.load(tmp_path / "a.nii.gz")
    assert (reader.size, reader.bands, reader.dtype) == ((7, 6, 5), 3, np.float32)
    expected = np.asarray(known.dataobj, np.float32).T
    box = Box((1, 0, 2), (6, 6, 4))
    assert np.array_equal(reader.read(box), expected[(slice(None), *box.slices)])
    nibabel.save(nibabel.Nifti1Image(stored[:, :, :1, 0], AFFINE), tmp_path / "b.nii")
    flat = open_image(tmp_path / "b.nii")
    assert flat.size == (6, 5)
    assert np.array_equal(flat.read(Box.whole(flat.size))[0], stored[:, :, 0, 0].T)


def test_damaged_files_are_refused_by_name(tmp_path):
    pixels, labels = volume(0)
    nibabel.save(nibabel.Nifti1Image(pixels.T, AFFINE), tmp_path / "a.nii")
    whole = (tmp_path / "a.nii").read_bytes()
    (tmp_path / "b.nii").write_bytes(whole[:2000])
    with pytest.raises(ValueError, match="b.nii.*its header says 17x19x23 voxels"):
        open_image(tmp_path / "b.nii")
    packed = gzip.compress(whole)
    (tmp_path / "c.nii.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match="c.nii.gz is damaged or cut off"):
        open_image(tmp_path / "c.nii.gz").read(Box((0, 0, 0), (1, 1, 1)))
    for name, damaged in (("e", packed[:-8]), ("f", packed[:-8] + b"\1" + packed[-7:])):
        (tmp_path / f"{name}.nii.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{name}.nii.gz is damaged or cut off"):
            open_image(tmp_path / f"{name}.nii.gz").read(Box((0, 0, 0), (1, 1, 1)))
    (tmp_path / "d.nii").write_bytes(b"no volume at all" * 50)
    with pytest.raises(ValueError, match="d.nii cannot be read as an image"):
        open_image(tmp_path / "d.nii")
    nibabel.save(nibabel.Nifti1Image(labels.T + np.float32(0.5), AFFINE), tmp_path / "e.nii")
    with pytest.raises(ValueError, match="e.nii is a mask, but it holds 0.5"):
        open_mask(tmp_path / "e.nii", 3).read(Box((0, 0, 0), (1, 1, 1)))


def test_masks_that_lie_elsewhere_are_refused(tmp_path, capsys):
    """Such as a mask whose voxels run the other way along an axis."""
    arguments, labels = written(tmp_path, "nii"), volume(2)[1]
    flipped = AFFINE @ np.diag([-1, 1, 1, 1.0])
    nibabel.save(nibabel.Nifti1Image(labels.T, flipped), tmp_path / "m/v2.nii.gz")
    assert run(*arguments) == 2
    assert "v2.nii.gz lie at different places: their last pixels lie at" in capsys.readouterr().err


def test_names_and_formats():
    assert [stem_of(name) for name in ("a.nii.gz", "b/c.d.NII.GZ", "e.tif", ".nii")] == [
        "a",
        "c.d",
        "e",
        ".nii",
    ]
    folder = Path("out")
    assert paths_of(folder, "v", ["hdf5", "png", "nifti"], (3, 4, 5), False) == [
        folder / "v.h5",
        folder / "v.nii.gz",
    ]
    for formats, size in ((["tiff", "hdf5"], (3, 4, 5)), (["nifti"], (4, 5))):
        with pytest.raises(ValueError, match="are not written as"):
            paths_of(folder, "v", formats, size, False)


def test_cuts_show_the_planes_through_a_voxel():
    labels = np.zeros((3, 4, 5), np.uint8)
    assert middle_of_interest(labels) == (1, 2, 2)
    labels[2, 3, 1] = 7
    assert middle_of_interest(labels) == (2, 3, 1)
    values = np.arange(60).reshape(3, 4, 5)
    found = three_cuts(values, (2, 3, 1), -1)
    assert found.shape == (4 + 2 + 3, 5 + 2 + 3)
    assert np.array_equal(found[:4, :5], values[2])
    assert np.array_equal(found[6:, :5], values[:, 3])
    assert np.array_equal(found[:4, 7:], values[:, :, 1].T)
    assert (found[4:6] == -1).all() and (found[6:, 5:] == -1).all()
