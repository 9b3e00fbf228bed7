"""Predictions end to end on real ranks: no seams, taken up, never over another's files, from stores and from image files."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import h5py
import numpy as np
import pytest
import tifffile
import torch
from made_ome_zarr import made_image
from PIL import Image
from test_train import config, write_store

from distseg.cli.evaluate import run_evaluate
from distseg.cli.main import main
from distseg.cli.predict import run_predict
from distseg.comm.alone import Alone
from distseg.comm.launch import JointFailure
from distseg.config.settings import ApproximateConfig
from distseg.config.sizes import Size
from distseg.data import class_files
from distseg.data.formats.readers import open_image
from distseg.data.store.store import Store
from distseg.data.store.writer import StoreWriter
from distseg.inference.image_source import network_identity
from distseg.inference.predictor import Predictor
from distseg.models.zoo import build_model
from distseg.tiling.tile import Box
from distseg.training.checkpoint.files import find, load_weights, read_manifest
from distseg.training.loop import train


@pytest.fixture
def folder(comm, shared_path):
    if comm.rank == 0:
        write_store(shared_path / "store.h5")
    comm.Barrier()
    return shared_path


@pytest.mark.parallel([1, 3])
@pytest.mark.covering(1)
@pytest.mark.parametrize("norm", ["batch", "instance", "group"])
def test_prediction_has_no_seams(comm, folder, norm):
    check_prediction(config(folder, tiles=f"{comm.size}x1", norm=norm, epochs=1), comm, folder)


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.covering(1)
@pytest.mark.parametrize("norm", ["batch", "instance", "none"])
def test_prediction_in_tiles_that_exchange_borders_has_no_seams(comm, folder, norm):
    mesh = {2: dict(samples=2), 3: dict(tiles="3x1"), 4: dict(tiles="2x1", stages=2)}[comm.size]
    check_prediction(config(folder, norm=norm, epochs=1, exchange_every=1, **mesh), comm, folder)


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.covering(1)
@pytest.mark.parametrize("norm", ["batch", "instance", "none"])
@pytest.mark.parametrize("placement", ["linear", "v-shaped"])
def test_prediction_through_stages_has_no_seams(comm, folder, norm, placement):
    mesh = {2: dict(stages=2), 3: dict(stages=3), 4: dict(stages=2, samples=2)}[comm.size]
    check_prediction(
        config(folder, norm=norm, epochs=1, placement=placement, accumulate=2, **mesh), comm, folder
    )


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(1)
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_an_interrupted_prediction_is_taken_up(comm, folder, monkeypatch, norm):
    """Until all tiles are there no result has its name; tiles that are there are not computed again; the result is the whole image's."""
    plan = config(folder, norm=norm, epochs=1, tiles=f"{comm.size}x1")
    train(plan, comm)
    computed, failing = [], 2
    call = Predictor.__call__

    def counted(self, source, numbers=None):
        for found in call(self, source, numbers):
            if len(computed) == failing:
                raise KeyboardInterrupt
            computed.append(found[0])
            yield found
        if failing is not None:  # a rank with no third tile
            raise KeyboardInterrupt

    monkeypatch.setattr(Predictor, "__call__", counted)
    with pytest.raises(KeyboardInterrupt):
        run_predict(str(folder / "run"), plan, comm, None, "test", str(folder / "found"))
    comm.Barrier()
    if comm.rank == 0:
        assert (
            not list((folder / "found").glob("*.h5")) and (folder / "found/image3.partial").is_dir()
        )
    first, failing = list(computed), None
    computed.clear()
    run_predict(str(folder / "run"), plan, comm, None, "test", str(folder / "found"))
    everything = comm.allgather((first, computed))
    comm.Barrier()
    if comm.rank == 0:
        before, after = ([tile for part in parts for tile in part] for parts in zip(*everything))
        assert len(before) == 2 * comm.size and not set(before) & set(after)
        with h5py.File(folder / "found/image3.h5") as f:
            taken_up = f["classes"][:]
        assert sorted(p.name for p in (folder / "found").iterdir()) == ["image3.h5", "image3.png"]
    monkeypatch.undo()
    run_predict(str(folder / "run"), plan, comm, None, "test", str(folder / "again"))
    comm.Barrier()
    if comm.rank == 0:
        with h5py.File(folder / "again/image3.h5") as f:
            assert np.array_equal(f["classes"][:], taken_up)


@pytest.mark.parallel(1)
def test_tiles_are_kept_if_other_classes_are_traced(comm, folder, monkeypatch):
    """A file that cannot be written costs no tiles, also if classes and formats then differ."""
    plan = config(folder, norm="batch", epochs=1)
    train(plan, comm)
    names = read_manifest(find(folder / "run"))["data"]["classes"]

    def run(traced, *formats):
        settings = replace(plan.predict, formats=list(formats), trace=traced)
        args = comm, None, "test", str(folder / "found")
        return run_predict(str(folder / "run"), replace(plan, predict=settings), *args)

    def too_large(*_):
        raise ValueError("the outline of an object is too large")

    with monkeypatch.context() as patched:
        patched.setattr(class_files, "write_objects", too_large)
        with pytest.raises(ValueError, match="too large"):
            run(names[:1], "objects", "gpkg")
    monkeypatch.setattr(Predictor, "__call__", None)  # no tile is computed
    run(names[1:], "hdf5", "gpkg")
    maps = [p.name for p in (folder / "found").iterdir()]
    assert sorted(maps) == ["image3.gpkg", "image3.h5"]
    with closing(sqlite3.connect(folder / "found/image3.gpkg")) as file:
        found = file.execute("SELECT DISTINCT name FROM objects").fetchall()
    assert {name for (name,) in found} <= set(names[1:])


@pytest.mark.parallel(1)
def test_what_a_prediction_depends_on_tells_it_from_others(comm, folder):
    """Weights of a run trained anew under the same name and step are others; where maps wait changes nothing."""
    plan = config(folder, norm="batch", epochs=1)
    train(plan, comm)
    run, manifest = find(folder / "run"), read_manifest(find(folder / "run"))
    found = network_identity(run, manifest, plan.prediction_settings)
    assert found == network_identity(
        run,
        manifest,
        replace(plan, predict=replace(plan.predict, scratch=str(folder))).prediction_settings,
    )
    for other in (
        dict(approximate=ApproximateConfig(halo=2)),
        dict(approximate=ApproximateConfig(norms="window")),
        dict(spatial=replace(plan.spatial, exchange_every="1")),
    ):
        assert found != network_identity(run, manifest, replace(plan, **other).prediction_settings)
    assert found != network_identity(
        run,
        manifest,
        replace(plan, train=replace(plan.train, precision="fp32")).prediction_settings,
    )
    train(plan, comm)
    assert read_manifest(find(folder / "run"))["step"] == manifest[
        "step"
    ] and found != network_identity(find(folder / "run"), manifest, plan.prediction_settings)


def check_prediction(plan, comm, folder):
    train(plan, comm)
    run_predict(
        str(folder / "run"),
        replace(plan, predict=replace(plan.predict, probabilities=True)),
        comm,
        None,
        "test",
        str(folder / "found"),
    )
    comm.Barrier()
    if comm.rank == 0:
        store = Store(folder / "store.h5")
        model = build_model(plan.model, 2, 2).double()
        load_weights(find(folder / "run"), model)
        whole = torch.from_numpy(
            store.read_normalised("image3", Box.whole(store.size("image3")))
        ).double()
        with torch.no_grad():
            logits = model.eval()(whole[None])[0]
        with h5py.File(folder / "found/image3.h5") as f:
            assert np.array_equal(f["classes"][:], logits.argmax(0).numpy())
            assert np.abs(f["probabilities"][:] - logits.softmax(0).numpy()).max() < 1e-3


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=1)
def test_image_files_by_the_command_line(comm, folder, capsys):
    """Named on the command line, normalised as the training images were; the second time they are there already."""
    train(config(folder, norm="batch", epochs=1, samples=comm.size), comm)
    whole = Box.whole((33, 47))
    if comm.rank == 0:
        np.save(folder / "scene.npy", Store(folder / "store.h5").read("image3", whole))
    comm.Barrier()

    def predicted(*flags: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["predict", str(folder / "run"), *flags])
        comm.Barrier()
        out, err = capsys.readouterr()
        assert not end.value.code, err
        return out

    files = ["--images", str(folder / "scene.npy"), "--output", str(folder / "found")]
    out = predicted(*files)
    assert comm.rank or out.splitlines()[-2:] == [
        f"{folder}/found/scene.h5: scene, 33x47 pixels",
        f"1 class map in {folder}/found",
    ]
    predicted("--output", str(folder / "stored"))
    out = predicted(*files)
    if comm.rank == 0:
        assert out.splitlines()[:1] + out.splitlines()[2:] == [
            f"network: {find(folder / 'run')}", f"{folder}/found/scene.h5: scene, 33x47 pixels, is there already", f"1 class map in {folder}/found"
        ]  # fmt: skip
        with h5py.File(folder / "found/scene.h5") as a, h5py.File(folder / "stored/image3.h5") as b:
            assert np.array_equal(a["classes"], b["classes"]) and set(np.unique(a["classes"])) == {
                0,
                1,
            }
            with Image.open(folder / "found/scene.png") as picture:
                assert picture.mode == "P" and np.array_equal(np.asarray(picture), a["classes"])


@pytest.mark.parallel([1, 2])
def test_ome_zarr_in_and_out(comm, folder):
    """The class map of an OME-Zarr image equals that of the same pixels in the store, whoever computes its tiles."""
    zarr = pytest.importorskip("zarr")
    train(config(folder, norm="batch", epochs=1, samples=comm.size), comm)
    if comm.rank == 0:
        pixels = Store(folder / "store.h5").read("image3", Box.whole((33, 47)))
        made_image(folder / "scene.ome.zarr", pixels, "cyx")
    comm.Barrier()
    words = ["--output", str(folder / "found"), "--predict.tile", "16x16", "--predict.formats"]
    for flags in (["[hdf5]"], ["[zarr]", "--images", str(folder / "scene.ome.zarr")]):
        with pytest.raises(SystemExit) as end:
            main(["predict", str(folder / "run"), *words, *flags])
        assert not end.value.code
        comm.Barrier()
    if comm.rank == 0:
        found = zarr.open_group(folder / "found/scene.ome.zarr", mode="r")
        with h5py.File(folder / "found/image3.h5") as known:
            assert np.array_equal(found["0"][...], known["classes"][...])
        assert open_image(folder / "found/scene.ome.zarr").place == open_image(folder / "scene.ome.zarr").place  # fmt: skip


@pytest.mark.parallel(1)
def test_what_would_be_lost_or_wrong_is_refused_before_anything_is_computed(
    comm, folder, monkeypatch
):
    plan = config(folder, norm="batch", epochs=1)
    train(plan, comm)
    pixels = np.zeros((2, 33, 47), np.float32)
    for name in ("a/scene.npy", "b/scene.npy", "bands.npy", "hole.npy"):
        (folder / name).parent.mkdir(exist_ok=True)
        np.save(folder / name, pixels[:1] if name == "bands.npy" else pixels)
    Image.fromarray(np.zeros((33, 47), np.uint8)).save(folder / "a/scene.png")
    # An image in a file that looks as if distseg had written it.
    (folder / "c").mkdir()
    about = json.dumps({"distseg_identity": "abc"})
    tifffile.imwrite(folder / "c/scene.tif", pixels, description=about, metadata=None)

    def refused(words: str, *images: str, output="found", **predict):
        paths = [str(folder / name) for name in images]
        with pytest.raises((JointFailure, ValueError), match=words):
            run_predict(
                str(folder / "run"),
                replace(plan, predict=replace(plan.predict, **predict)),
                comm,
                paths,
                "test",
                str(folder / output),
            )

    with monkeypatch.context() as patched:
        patched.setattr(Predictor, "__call__", lambda *_: pytest.fail("computed"))
        refused(
            "a/scene.png exists and is not a class map that distseg wrote: move it",
            "a/scene.npy",
            output="a",
        )
        refused(
            "the result .*c/scene.tif would replace .*c/scene.tif, which this command reads",
            "c/scene.tif",
            output="c",
            formats=["tiff"],
        )
        refused("several images are named scene", "a/scene.npy", "b/scene.npy")
        refused(
            "bands.npy has 1 bands, but the network was trained on 2", "a/scene.npy", "bands.npy"
        )
        refused(
            "probabilities are written to HDF5 and OME-Zarr only, but predict.formats is tiff",
            "a/scene.npy",
            formats=["tiff"],
            probabilities=True,
        )
        assert not (folder / "found").exists()
    for value, text in ((np.nan, "nan"), (-3.4e38, r"-3\S*e\+38")):
        pixels[1, 20, 30] = value
        np.save(folder / "hole.npy", pixels)
        refused(rf"hole.npy: band 1 is {text} at \(20, 30\): replace this value", "hole.npy")
    assert not list((folder / "found").glob("hole.*5"))


@pytest.mark.parallel(1)
def test_another_store_is_normalised_as_the_training_images_were(comm, folder):
    """Of a store with other means and deviations a network sees the pixels that it would see in its own."""
    plan = config(folder, norm="batch", epochs=1)
    train(plan, comm)
    own, whole = Store(folder / "store.h5"), Box.whole((33, 47))
    with StoreWriter(folder / "other.h5", own.classes, 2) as writer:
        for name, split, gain in (("dark", "train", 0.1), ("image3", "test", 1)):
            pixels = gain * own.read("image3", whole)
            writer.add_image(name, (33, 47), np.float32, split, labels=split == "test").write(
                whole,
                pixels.astype(np.float32),
                own.labels("image3", whole) if split == "test" else None,
            )
    for store in ("store", "other"):
        other = replace(plan, data=replace(plan.data, store=str(folder / f"{store}.h5")))
        run_predict(str(folder / "run"), other, comm, None, "test", str(folder / store))
        run_evaluate(str(folder / "run"), other, comm, "test", str(folder / f"{store}.json"), 3)
    with h5py.File(folder / "store/image3.h5") as a, h5py.File(folder / "other/image3.h5") as b:
        assert np.array_equal(a["classes"], b["classes"])
    found, other = (
        json.loads((folder / f"{store}.json").read_text()) for store in ("store", "other")
    )
    assert "colour" in found and "colour" not in other  # its training images have no labels
    assert all(other[key] == found[key] for key in ("network", "confusion", "images"))


@pytest.mark.parallel(1)
def test_a_halo_of_the_config_s_own(comm, folder):
    """Approximate windows go through every layer whole, in training, validation and prediction; one that is large enough changes nothing."""
    plan = config(folder, norm="batch", epochs=1)
    train(plan, comm)
    run_predict(str(folder / "run"), plan, comm, None, "test", str(folder / "exact"))
    maps = []
    for halo in (2, 64):
        own = replace(
            plan,
            approximate=ApproximateConfig(halo=halo),
            train=replace(plan.train, output=str(folder / f"run{halo}")),
        )
        if halo == 2:
            train(own, comm)
        run_predict(str(folder / "run"), own, comm, None, "test", str(folder / f"halo{halo}"))
        with (
            h5py.File(folder / f"halo{halo}/image3.h5") as f,
            h5py.File(folder / "exact/image3.h5") as exact,
        ):
            maps.append((f["classes"][:] == exact["classes"][:]).mean())
    assert maps[0] < 1 and maps[1] == 1


@pytest.mark.parallel(2)
def test_a_run_in_stages_on_ranks_that_these_do_not_divide(comm, folder, capfd):
    """With layers dealt to stages by hand; one rank alone then holds them all."""

    plan = config(folder, norm="batch", epochs=1, stages=2, balance=[14, 15])
    train(plan, comm)
    run_predict(str(folder / "run"), plan, comm, None, "test", str(folder / "two"))
    comm.Barrier()
    if comm.rank == 0:
        capfd.readouterr()
        run_predict(
            str(folder / "run"),
            replace(plan, mesh=replace(plan.mesh, tiles=Size((2, 1)))),
            Alone(),
            None,
            "test",
            str(folder / "one"),
        )
        told = capfd.readouterr().out
        assert (
            "the 2 stages of the training do not divide 1 process, so each process holds the whole network"
            in told
            and "mesh.tiles 2x1: without effect here" in told
        )
        with h5py.File(folder / "one/image3.h5") as one, h5py.File(folder / "two/image3.h5") as two:
            assert np.array_equal(one["classes"], two["classes"])
