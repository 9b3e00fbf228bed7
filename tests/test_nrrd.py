"""NRRD volumes are read as pynrrd reads them and lie where NIfTI puts the same voxels; other kinds are refused by name."""

import gzip
import sys

import numpy as np
import pytest

from distseg.cli.main import main
from distseg.data import class_files
from distseg.data.class_files import Classes, are_there, paths_of
from distseg.data.formats.georeference import matrix_of, of_matrix
from distseg.data.formats.readers import open_image, open_mask
from distseg.data.store.store import Store
from distseg.tiling.tile import Box

nrrd = pytest.importorskip("nrrd")
RANDOM = np.random.default_rng(0)
VOLUME = RANDOM.integers(-300, 300, (7, 9, 11)).astype(np.int16)  # (z, y, x)
LPS = dict(space="left-posterior-superior", kinds=["domain"] * 3)
LPS["space directions"] = np.array([[0.0, -0.7, 0], [0.8, 0, 0], [0, 0, 2.5]])
LPS["space origin"] = np.array([10.0, -20, 5])
AFFINE = [[0, -0.8, 0, -10], [0.7, 0, 0, 20], [0, 0, 2.5, 5], [0, 0, 0, 1.0]]  # the same in RAS


def made(path, array=VOLUME, order="C", **about):
    nrrd.write(str(path), array, about, index_order=order)
    return path


def run(*arguments):
    """Run the command line in this process and return its exit code."""
    try:
        return main([str(argument) for argument in arguments]) or 0
    except SystemExit as e:
        return e.code


@pytest.mark.parametrize("encoding", ["raw", "gzip"])
@pytest.mark.parametrize("dtype", ["uint8", ">i2", "uint32", "int64", "float32", ">f8"])
def test_boxes_are_those_of_pynrrd(tmp_path, encoding, dtype):
    array = VOLUME.astype(dtype)
    path = made(tmp_path / "a.nrrd", array, encoding=encoding, **LPS)
    assert np.array_equal(nrrd.read(str(path), index_order="C")[0], array)
    reader, box = open_image(path), Box((1, 2, 3), (6, 9, 10))
    assert (reader.size, reader.bands, reader.notes) == ((7, 9, 11), 1, ())
    assert reader.dtype == np.dtype(dtype).newbyteorder("=")
    assert np.array_equal(reader.read(box)[0], array[box.slices])
    assert matrix_of(reader.place) == AFFINE


def test_lines_of_a_header_may_end_as_on_windows(tmp_path):
    header, blank, voxels = (
        made(tmp_path / "a.nrrd", encoding="raw", **LPS).read_bytes().partition(b"\n\n")
    )
    (tmp_path / "b.nrrd").write_bytes((header + blank).replace(b"\n", b"\r\n") + voxels)
    reader = open_image(tmp_path / "b.nrrd")
    assert np.array_equal(reader.read(Box.whole(reader.size))[0], VOLUME)


def test_the_place_is_that_of_nifti(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(nibabel.Nifti1Image(VOLUME.T, np.array(AFFINE)), tmp_path / "a.nii")
    place = open_image(tmp_path / "a.nii").place
    assert np.allclose(
        matrix_of(place), matrix_of(open_image(made(tmp_path / "a.nrrd", **LPS)).place)
    )


@pytest.mark.parametrize(
    "space, signs",
    [
        ("right-anterior-superior", (1, 1)),
        ("LAS", (-1, 1)),
        ("LPS", (-1, -1)),
        ("scanner-xyz", (-1, -1)),
    ],
)
def test_spaces(tmp_path, space, signs):
    about = {**LPS, "space": space, "space units": ["um"] * 3}
    reader = open_image(made(tmp_path / "a.nrrd", **about))
    matrix = matrix_of(reader.place)
    assert [matrix[0][3], matrix[1][3], matrix[2][3]] == [10.0 * signs[0], -20.0 * signs[1], 5.0]
    assert reader.place.unit == 1e-6
    assert bool(reader.notes) == (space == "scanner-xyz")


def test_spacings_alone_and_no_place(tmp_path):
    reader = open_image(made(tmp_path / "a.nrrd", spacings=[0.5, 0.6, 2.0]))
    assert np.abs(np.diag(matrix_of(reader.place))).tolist() == [0.5, 0.6, 2.0, 1.0]
    assert open_image(made(tmp_path / "b.nrrd")).place is None


def test_numbers_of_a_voxel_and_times_are_bands(tmp_path):
    bands = RANDOM.integers(0, 99, (7, 9, 11, 3)).astype(np.uint8)
    steps = np.array([[np.nan] * 3, *LPS["space directions"]])
    about = {**LPS, "kinds": ["vector", *["domain"] * 3], "space directions": steps}
    reader = open_image(made(tmp_path / "a.nrrd", bands, **about))
    assert reader.bands == 3 and reader.size == (7, 9, 11)
    assert np.array_equal(reader.read(Box.whole(reader.size)), np.moveaxis(bands, -1, 0))
    assert matrix_of(reader.place) == AFFINE
    times = RANDOM.integers(0, 99, (2, 7, 9, 11)).astype(np.uint8)
    reader = open_image(made(tmp_path / "b.nrrd", times, kinds=["space"] * 3 + ["time"]))
    assert np.array_equal(reader.read(Box.whole(reader.size)), times)
    middle = made(tmp_path / "c.nrrd", times, kinds=["space", "list", "space", "space"])
    with pytest.raises(ValueError, match="3 spatial axes and 1 others"):
        open_image(middle)


def test_images_of_two_axes_and_single_slices(tmp_path):
    colours = RANDOM.integers(0, 99, (9, 11, 3)).astype(np.uint8)
    path = made(tmp_path / "a.nrrd", colours, kinds=["RGB-color", "domain", "domain"])
    assert np.array_equal(open_image(path).read(Box.whole((9, 11))), np.moveaxis(colours, -1, 0))
    path = made(tmp_path / "b.nrrd", VOLUME[:1])
    assert open_image(path).size == (9, 11) and open_image(path, 3).size == (1, 9, 11)
    with pytest.raises(ValueError, match="7 slices of 9x11"):
        open_image(made(tmp_path / "c.nrrd"), 2)


def test_masks_of_floats_are_whole_numbers(tmp_path):
    labels = (VOLUME % 3).astype(np.float32)
    mask = open_mask(made(tmp_path / "a.nrrd", labels, **LPS), 3)
    assert np.array_equal(mask.read(Box.whole(mask.size))[0], labels) and mask.dtype == np.int64
    with pytest.raises(ValueError, match="is a mask, but it holds 0.5"):
        open_mask(made(tmp_path / "b.nrrd", labels + 0.5), 3).read(Box((0, 0, 0), (1, 1, 1)))


def changed(old, new):
    return lambda content: content.replace(old, new, 1)


DAMAGES = {
    "no header": (lambda content: b"NRRD but not one" * 90, "cannot be read as an image"),
    "endless header": (lambda content: b"NRRD0005\n" + b"a:=b\n" * 300000, "no header of NRRD"),
    "too new": (changed(b"NRRD0005", b"NRRD0009"), "Unsupported NRRD file version"),
    "without sizes": (changed(b"sizes:", b"sozes:"), "header without sizes"),
    "other sizes": (changed(b"sizes: 11 9 7", b"sizes: 11 9 7 1"), "says 3 dims, but gives 4 sizes"),
    "more voxels": (changed(b"sizes: 11 9 7", b"sizes: 99999 99999 7"), "says that it has 7x99999x99999|file of"),
    "no voxels": (changed(b"sizes: 11 9 7", b"sizes: 11 0 7"), "its header says 7x0x11 voxels"),
    "block": (changed(b"type: int16", b"type: block"), "voxels are block, but must be numbers"),
    "strange type": (changed(b"type: int16", b"type: pickle"), "voxels are pickle"),
    "no byte order": (changed(b"endian: little", b"content: little"), "no byte order"),
    "text": (changed(b"encoding: gzip", b"encoding: ascii"), "encoding ascii, but distseg reads raw and gzip"),
    "other file": (changed(b"encoding: gzip", b"data file: /etc/passwd\nencoding: raw"), "detached header, whose voxels are in /etc/passwd"),
    "list of files": (changed(b"encoding: gzip", b"datafile: LIST\nencoding: raw"), "detached header"),
    "skipped bytes": (changed(b"encoding: gzip", b"byte skip: -1\nencoding: raw"), "byte skip -1"),
    "bad directions": (changed(b"space origin: (10,-20,5)", b"space origin: (10,-20)"), "do not fit together"),
    "endless origin": (changed(b"space origin: (10,-20,5)", b"space origin: (10,-20,inf)"), "do not fit together"),
    "two kinds": (changed(b"kinds: domain domain domain", b"kinds: domain domain"), "cannot be read as an image"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_other_kinds_are_refused_at_once(tmp_path, case):
    change, message = DAMAGES[case]
    content = made(tmp_path / "a.nrrd", **LPS).read_bytes()
    path = tmp_path / "b.nrrd"
    path.write_bytes(change(content))
    assert path.read_bytes() != content
    with pytest.raises(ValueError, match=message) as caught:
        open_image(path)
    assert str(path) in str(caught.value)


def test_damaged_voxels_are_told(tmp_path):
    content = made(tmp_path / "a.nrrd", **LPS).read_bytes()
    at = content.index(b"\n\n") + 2
    packed = content[at:]
    for name, damaged in (
        ("cut", packed[:-40]),
        ("short", gzip.compress(bytes(99))),
        ("flipped", packed[:300] + b"\0\0" + packed[302:]),
    ):
        (tmp_path / f"{name}.nrrd").write_bytes(content[:at] + damaged)
        with pytest.raises(ValueError, match=f"{name}.nrrd is damaged or cut off"):
            open_image(tmp_path / f"{name}.nrrd").read(Box((0, 0, 0), (1, 1, 1)))
    raw = made(tmp_path / "raw.nrrd", encoding="raw").read_bytes()
    (tmp_path / "raw.nrrd").write_bytes(raw[:-1])
    with pytest.raises(ValueError, match="raw.nrrd.*its header says 7x9x11 voxels"):
        open_image(tmp_path / "raw.nrrd")


@pytest.mark.parametrize("unit", [1e-3, 1e-6, None])
def test_class_maps_are_those_of_pynrrd_at_the_same_place(tmp_path, unit):
    found = RANDOM.integers(0, 3, (7, 9, 11)).astype(np.uint8)
    place, meaning = of_matrix(AFFINE, unit), ["a", "b", "c"]
    paths = paths_of(tmp_path, "v", ["nrrd"], found.shape, False)
    assert paths == [tmp_path / "v.nrrd"]
    before = None
    for _ in range(2):  # equal maps are equal bytes
        class_files.check_written(paths, place, "v")
        colours = np.zeros((3, 3), np.uint8)
        class_files.write(
            paths[0],
            {"classes": found},
            Classes(meaning, colours, 255, place),
            "id",
            lambda pixels: None,
            tmp_path,
        )
        assert before in (None, paths[0].read_bytes())
        before = paths[0].read_bytes()
    array, header = nrrd.read(str(paths[0]), index_order="C")
    factor = (unit or 1e-3) / 1e-3
    assert np.array_equal(array, found) and header["space"] == LPS["space"]
    assert header["space directions"] == pytest.approx(LPS["space directions"] * factor)
    assert header["space origin"] == pytest.approx(LPS["space origin"] * factor)
    assert ("space units" in header) == (unit is not None)
    assert matrix_of(open_image(paths[0]).place) == [pytest.approx(row) for row in scaled(factor)]
    assert are_there(paths, "id") and not are_there(paths, "other")
    made(paths[0], found)
    with pytest.raises(FileExistsError, match="is not a class map that distseg wrote"):
        are_there(paths, "id")
    with pytest.raises(ValueError, match="class maps of 2 dims are not written as nrrd"):
        paths_of(tmp_path, "v", ["nrrd"], (9, 11), False)


def scaled(factor):
    return [[factor * n for n in row] for row in AFFINE[:3]] + AFFINE[3:]


def test_prepare_takes_volumes_and_masks(tmp_path, capsys):
    for number in range(3):
        pixels = np.roll(VOLUME, number, 2)
        for name, array in (("i", pixels), ("m", (pixels > 0).astype(np.uint8))):
            (tmp_path / name).mkdir(exist_ok=True)
            made(tmp_path / name / f"v{number}.nrrd", array, **LPS)
    words = ["--masks", tmp_path / "m", "--classes", "a,b", "--overwrite"]
    assert run("prepare", tmp_path / "i", tmp_path / "s.h5", *words) == 0
    store, box = Store(tmp_path / "s.h5"), Box((1, 2, 3), (6, 8, 10))
    assert np.array_equal(store.read("v1", box)[0], np.roll(VOLUME, 1, 2)[box.slices])
    assert np.array_equal(store.labels("v1", box), np.roll(VOLUME, 1, 2)[box.slices] > 0)
    assert matrix_of(store.place("v1")) == AFFINE
    made(tmp_path / "m/v1.nrrd", (VOLUME > 0).astype(np.uint8), **{**LPS, "space": "right-anterior-superior"})  # fmt: skip
    assert run("prepare", tmp_path / "i", tmp_path / "s.h5", *words) == 2
    assert "lie at different places" in capsys.readouterr().err


def test_without_pynrrd_the_line_that_installs_it_is_told(tmp_path, monkeypatch):
    path = made(tmp_path / "a.nrrd")
    monkeypatch.setitem(sys.modules, "nrrd", None)
    with pytest.raises(ValueError, match=r"pip install 'distseg\[medical\]'"):
        open_image(path)
