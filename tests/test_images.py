"""Labels of whole images: the exact gradient of networks that make a vector of an image, stores of such labels, and what is trained on them."""

import copy
import csv
import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import made_classifiers
import numpy as np
import pytest
import torch
from PIL import Image
from test_exact import TOLERANCE, config
from test_networks import WAYS

from distseg.cli.main import main
from distseg.cli.profile import profile
from distseg.comm.collective import Alone
from distseg.config.settings import LossConfig, ModelConfig
from distseg.config.sizes import Size
from distseg.data.examples.ultramnist import mnist, prepare_ultramnist
from distseg.data.focus import Focus
from distseg.data.store.store import Store, StoreWriter
from distseg.inference.image_source import ImageSource, file_image
from distseg.inference.images import area_under_curve, scores_of_images
from distseg.inference.metrics import confusion, quadratic_kappa
from distseg.inference.predictor import Predictor
from distseg.layers.context import Context
from distseg.layers.graph import reach_for
from distseg.models.capture.capture import as_network
from distseg.report import plots
from distseg.runtime.swap_layers import parallelize
from distseg.tiling.tile import Box
from distseg.training.patchgd import heat as heat_module
from distseg.training.patchgd.filling import Filler, PatchPredictor
from distseg.training.patchgd.heat import heat_of, picture
from distseg.training.patchgd.network import PatchNetwork
from distseg.training.run_config import load
from distseg.training.verify import prepare, verify

NAMES = ["residual", "flat", "gridded", "largest", "mixed", "normed", "levels", "pooled"]


def error_of(name, comm, settings, outputs=3, loss="cross_entropy", size=None):
    plan = replace(
        config(**settings),
        model=ModelConfig(
            f"{made_classifiers.__name__}:{name}", in_channels=3, out_channels=outputs
        ),
        loss=LossConfig(name=loss),
    )
    report = verify(plan, comm, Size(size or ("40x56" if name in ("mixed", "levels") else "41x53")))
    return comm.bcast(report and report["max_error"])


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.covering(cases=4)
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_the_eager_modules(comm, name):
    """Of three images in a batch, which batch norms of vectors want."""
    for way, (ranks, settings) in WAYS.items():
        if ranks == comm.size:
            assert error_of(name, comm, {**settings, "images": 3}) <= TOLERANCE, way


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=1)
def test_numbers_and_other_losses(comm):
    tiled = dict(streamed=(2, 2)) if comm.size == 1 else dict(tiles="1x2", stages=1)
    for outputs, loss in (
        (1, "mse"),
        (1, "mse + 0.5*l1"),
        (1, "binary_cross_entropy"),
        (3, "cross_entropy + 0.5*dice"),
        (4, "focal"),
    ):
        assert error_of("residual", comm, {**tiled, "images": 2}, outputs, loss) <= TOLERANCE, loss


@pytest.mark.parallel([1, 2])
def test_whole_images_refuse_nothing(comm):
    """What nobody can follow is trained on whole images, and refused on parts of them."""
    settings = dict(samples=comm.size, images=2)
    assert error_of("attending", comm, settings, size="24x32") <= TOLERANCE
    with pytest.raises(
        ValueError, match="is attention between all positions of the image.*or split samples only"
    ):
        error_of(
            "attending",
            comm,
            dict(tiles_per_rank=(1, 2)) if comm.size == 1 else dict(tiles="1x2"),
            size="24x32",
        )


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=1)
@pytest.mark.parametrize("name", ["flat", "residual"])
def test_plain_modules_verify_and_profile_on_random_images_and_a_store(comm, name, shared_path):
    plan = replace(
        config(tiles=f"1x{comm.size}", images=2),
        model=ModelConfig(f"{made_classifiers.__name__}:{name}"),
    )
    path = write_store(shared_path / f"{comm.rank}.h5")
    for images, size in (
        (plan, Size("40x52")),
        (replace(plan, data=replace(plan.data, store=str(path))), None),
    ):
        found = profile(prepare(images, size), comm, steps=1, output=str(shared_path / "profile"))
        assert comm.rank or found.seconds > 0
        report = verify(images, comm, size)
        assert comm.bcast(report and report["max_error"]) <= TOLERANCE


@pytest.mark.parallel([1, 2])
def test_a_store_of_numbers_is_verified(comm, shared_path):
    """The serial program must train on the stored numbers, not on whole numbers."""
    plan = config(tiles=f"1x{comm.size}", images=2)
    path = write_store(shared_path / f"{comm.rank}.h5", classes=("height",))
    plan = replace(
        plan,
        model=ModelConfig(f"{made_classifiers.__name__}:residual", out_channels=1),
        loss=LossConfig("mse"),
        data=replace(plan.data, store=str(path)),
    )
    report = verify(plan, comm)
    assert comm.bcast(report and report["max_error"]) <= TOLERANCE


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=1)
def test_networks_for_one_size_are_trained_on_whole_images(comm, shared_path):
    settings = dict(samples=comm.size, images=2)
    assert error_of("fixed", comm, settings, size="24x32") <= TOLERANCE
    if comm.rank == 0:
        write_store(shared_path / "s.h5", size=(24, 32))
    comm.Barrier()
    common = [
        "--data.store",
        str(shared_path / "s.h5"),
        "--train.output",
        str(shared_path / "run"),
        "--model.name",
        "made_classifiers:fixed",
        "--train.loggers",
        "[]",
    ]
    done(
        [
            "train",
            *common,
            "--train.epochs",
            "1",
            "--mesh.samples",
            str(comm.size),
            "--data.images",
            "2",
        ]
    )
    done(["evaluate", str(shared_path / "run"), "--model.name", "made_classifiers:fixed"])


@pytest.mark.parallel(1)
def test_a_number_without_a_dim_is_refused(comm):
    with pytest.raises(
        ValueError,
        match=r"returns a tensor \(N,\) for N images, without a dim of outputs: let it return \(N, 1\)",
    ):
        verify(
            replace(
                config(images=2),
                model=ModelConfig("made_classifiers:squeezed"),
                loss=LossConfig("binary_cross_entropy"),
            ),
            comm,
            Size("40x52"),
        )


def done(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert not end.value.code


def write_store(path, count=12, classes=("dark", "bright"), size=(29, 43)) -> Path:
    """Noise with a few bright pixels, or none; with one class how many there are."""
    generator = np.random.default_rng(0)
    with StoreWriter(path, list(classes), 2, numbers=len(classes) == 1) as writer:
        for k in range(count):
            pixels, bright = generator.integers(0, 100, (2, *size)).astype(np.uint8), k % 2
            pixels[:, 3 : 3 + 10 * bright, 5:15] = 255
            label = bright if len(classes) > 1 else 2.5 * bright - 1
            writer.add_image(
                f"image{k:02}",
                size,
                np.uint8,
                ("train", "train", "val", "test")[k // 2 % 4 if k < 8 else 0],
                False,
                label=label,
            ).write(Box.whole(size), pixels)
    return Path(path)


def test_a_store_keeps_labels_of_images(tmp_path):
    store = Store(write_store(tmp_path / "s.h5"))
    assert (
        store.of_images
        and not store.has_labels("image00")
        and [store.label(f"image0{k}") for k in range(4)] == [0, 1, 0, 1]
    )
    numbers = Store(write_store(tmp_path / "n.h5", classes=("height",)))
    assert numbers.of_images and numbers.label("image01") == 1.5


def test_labels_that_can_not_be(tmp_path):
    def add(classes, **more):
        with StoreWriter(tmp_path / "s.h5", classes, 1, numbers=len(classes) == 1) as writer:
            writer.add_image("first", (8, 8), np.uint8, "train", False, label=1).write(
                Box.whole((8, 8)), np.zeros((1, 8, 8), np.uint8)
            )
            writer.add_image("second", (8, 8), np.uint8, "train", **more)

    for classes, more, why in [
        (["a", "b"], dict(labels=True), "labels of pixels.* or labels of whole images"),
        (
            ["a", "b"],
            dict(labels=False, label=2),
            "has the label 2, but it must be 0 to 1 for 2 classes",
        ),
        (
            ["a"],
            dict(labels=False, label=float("nan")),
            "has the label nan, but it must be a number",
        ),
    ]:
        with pytest.raises(ValueError, match=why):
            add(classes, **more)
        assert not list(tmp_path.iterdir())


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=1)
def test_the_command_line_trains_evaluates_and_predicts(comm, shared_path, monkeypatch, capsys):
    """Streamed tiles on one rank, tiles in space on two; the answers are the plain module's."""
    place = Path(shared_path)
    if comm.rank == 0:
        write_store(place / "s.h5")
    comm.Barrier()
    name = "made_classifiers:residual"
    way = ["--streaming.tiles", "2x2"] if comm.size == 1 else ["--mesh.tiles", "1x2"]
    common = ["--model.name", name, "--predict.tile", "16x16"]
    padded = ["--model.pad", "4"]
    done(
        [
            "train",
            "--data.store",
            str(place / "s.h5"),
            "--train.output",
            str(place / "run"),
            "--train.epochs",
            "6",
            "--data.images",
            "2",
            "--optim.lr",
            "0.02",
            "--train.precision",
            "fp32",
            *common,
            *padded,
            *way,
        ]
    )
    if comm.rank == 0:
        shutil.copytree(
            place / "run", place / "copied"
        )  # somebody else's: not in the folder of the training
    comm.Barrier()
    with pytest.raises(SystemExit):
        main(["evaluate", str(place / "copied")])
    if comm.rank == 0:
        assert (
            "If you trust it, add --model.name made_classifiers:residual" in capsys.readouterr().err
        )
    done(["evaluate", str(place / "run"), *common, "--output", str(place / "scores.json")])
    done(["predict", str(place / "run"), *common, "--output", str(place / "out")])
    comm.Barrier()
    found, store = json.loads((place / "scores.json").read_text())["network"], Store(place / "s.h5")
    assert found["accuracy"] in (0.0, 0.5, 1.0) and found["classes"]["bright"]["images"] == 1
    rows = list(csv.DictReader(open(place / "out" / "images.csv")))
    module = load(place / "run", made_classifiers.residual(2, 2), normalise=False)
    for row in rows:
        x = torch.from_numpy(store.read_normalised(row["image"], Box.whole((29, 43))))[None]
        assert abs(float(row["p(bright)"]) - float(module(x).softmax(1)[0, 1])) < 1e-4
    assert len(rows) == len(store.split("test"))


@pytest.mark.parallel(2)
def test_stages_evaluate_what_one_rank_does(comm, shared_path, capsys):
    """Of a residual network, whose first stage hands on two maps."""
    place = Path(shared_path)
    if comm.rank == 0:
        write_store(place / "s.h5")
    comm.Barrier()
    common = ["--model.name", "made_classifiers:residual", "--predict.tile", "16x16"]
    done(
        [
            "train",
            "--data.store",
            str(place / "s.h5"),
            "--train.output",
            str(place / "run"),
            "--train.epochs",
            "1",
            "--mesh.stages",
            "2",
            "--train.accumulate",
            "2",
            "--train.precision",
            "fp32",
            *common,
        ]
    )
    done(["predict", str(place / "run"), *common, "--output", str(place / "out")])
    if comm.rank == 0:
        module, store = (
            load(place / "run", made_classifiers.residual(2, 2), normalise=False),
            Store(place / "s.h5"),
        )
        for row in csv.DictReader(open(place / "out" / "images.csv")):
            x = torch.from_numpy(store.read_normalised(row["image"], Box.whole((29, 43))))[None]
            assert abs(float(row["p(bright)"]) - float(module(x).softmax(1)[0, 1])) < 1e-4


def test_what_does_not_fit_is_refused(tmp_path, refused):
    write_store(tmp_path / "s.h5"), write_store(tmp_path / "n.h5", classes=("height",))
    with StoreWriter(tmp_path / "pixels.h5", ["a", "b"], 2) as writer:
        writer.add_image("x", (29, 43), np.uint8, "train", True).write(
            Box.whole((29, 43)), np.zeros((2, 29, 43), np.uint8), np.zeros((29, 43), int)
        )
    for store, model, more, why in [
        ("s.h5", "unet", [], r"a map .*s\.h5 .*\(DS404\)"),
        ("pixels.h5", "made_classifiers:residual", [], r"a vector .*pixels\.h5 .*\(DS404\)"),
        ("n.h5", "made_classifiers:residual", [], r"loss\.name .*n\.h5 .*\(height\).*\(DS405\)"),
        (
            "s.h5",
            "made_classifiers:residual",
            ["--loss.name", "mse", "--model.out_channels", "1"],
            r"loss\.name is mse, .*s\.h5 .*\(DS405\)",
        ),
    ]:
        err = refused(
            "train",
            "--data.store",
            str(tmp_path / store),
            "--train.output",
            str(tmp_path / "run"),
            "--model.name",
            model,
            *more,
        )
        assert re.search(why, err), err


def test_shrunken_images_are_means(tmp_path):
    """Of blocks, wherever a window lies; what has no mean is refused."""
    path = write_store(tmp_path / "s.h5")
    store, small = Store(path), Store(path, shrink=4)
    assert small.size("image01") == (7, 10)
    whole = (
        store.read("image01", Box.whole((29, 43)))[:, :28, :40]
        .astype(np.float64)
        .reshape(2, 7, 4, 10, 4)
        .mean((2, 4))
    )
    assert abs(small.read("image01", Box((2, 1), (6, 9))) - whole[:, 2:6, 1:9]).max() < 1e-4
    expected = (whole - store.mean[:, None, None]) / store.std[:, None, None]
    assert abs(small.read_normalised("image01", Box.whole((7, 10))) - expected).max() < 1e-4
    with StoreWriter(tmp_path / "p.h5", ["a", "b"], 1) as writer:
        writer.add_image("x", (8, 8), np.uint8, "train", True).write(
            Box.whole((8, 8)), np.zeros((1, 8, 8), np.uint8), np.zeros((8, 8), int)
        )
    with pytest.raises(
        ValueError, match="data.shrink is 2, but image 'x' of .* has labels of pixels"
    ):
        Store(tmp_path / "p.h5", shrink=2)
    with pytest.raises(
        ValueError, match="data.shrink is 30, but image 'image00' of .* has 29x43 pixels"
    ):
        Store(path, shrink=30)


def _kappa(truth, said, classes):
    """The definition, image by image: the squared errors that there are, over those of all pairs of a label and a prediction."""
    made = np.mean([(a - b) ** 2 for a, b in zip(truth, said)])
    return 1 - made / np.mean([(a - b) ** 2 for a in truth for b in said])


def test_kappa_is_weighted_by_squares():
    """Against the definition, and a textbook matrix by hand; none where nothing could be wrong."""
    generator = np.random.default_rng(2)
    truth, said = generator.integers(0, 6, (2, 300))
    said = np.where(generator.random(300) < 0.6, truth, said)
    assert quadratic_kappa(confusion(truth, said, 6, -1)) == pytest.approx(
        _kappa(truth, said, 6), abs=1e-12
    )
    by_hand = np.array(
        [[2, 1, 0], [0, 1, 1], [0, 0, 1]]
    )  # 2 errors of one class; expected: (3 * 2 + 2 * 2 + 2 * 2 + 1 * 2 + 4 * (3 * 2 + 1 * 2)) / 6
    assert quadratic_kappa(by_hand) == pytest.approx(1 - 2 / (48 / 6))
    assert (
        quadratic_kappa(np.diag([4, 0, 0])) is None and quadratic_kappa(np.diag([4, 2, 1])) == 1.0
    )


def test_scores_are_their_textbook_formulas():
    generator = np.random.default_rng(1)
    scores, positive = generator.integers(0, 6, 40), generator.random(40) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    assert area_under_curve(scores, positive) == pytest.approx(np.mean(pairs))
    assert area_under_curve(scores, np.ones(40, bool)) is None
    found = scores_of_images(
        np.array([[2.0, 0, 0], [0, 1, 0], [0, 3, 0], [0, 0, 1]]),
        np.array([0, 1, 0, 1]),
        ["a", "b", "c"],
    )
    assert found["accuracy"] == 0.5 and found["classes"]["a"] == {
        "accuracy": 0.5,
        "precision": 1.0,
        "auc": pytest.approx(0.5),
        "images": 2,
    }
    assert found["classes"]["c"]["accuracy"] is None and found["mean_accuracy"] == 0.5
    assert found["kappa"] == pytest.approx(_kappa([0, 1, 0, 1], [0, 1, 1, 2], 3))
    numbers = scores_of_images(np.array([[1.0], [2.0]]), np.array([2.0, 4.0]), ["height"])
    assert (numbers["mae"], numbers["rmse"], numbers["r2"]) == (
        1.5,
        pytest.approx(2.5**0.5),
        pytest.approx(1 - 5 / 2),
    )


@pytest.mark.slow
def test_ultramnist_is_digits_that_add_up(tmp_path, capsys):
    """The label is the sum of the digits that were drawn; images do not depend on others, nor on how they are written."""
    pool = mnist()
    assert {split: len(values) for split, (_, values) in pool.items()} == {
        "train": 50000,
        "val": 10000,
        "test": 10000,
    }
    few = prepare_ultramnist(tmp_path / "few.h5", Size("96x128"), (3, 1, 0), seed=4)
    more = prepare_ultramnist(tmp_path / "more.h5", Size("96x128"), (6, 1, 2), seed=4)
    whole = Box.whole((96, 128))
    assert few.of_images and len(few.classes) == 28
    for name in few.split("train"):
        assert (few.read(name, whole) == more.read(name, whole)).all() and few.label(
            name
        ) == more.label(name)
        assert few.read(name, whole).max() > 200
    one = prepare_ultramnist(tmp_path / "one.h5", Size("64x64"), (20, 0, 0), digits=(1, 1))
    assert len(one.classes) == 10 and len({one.label(name) for name in one.split("train")}) > 4


def test_ultramnist_of_the_patchgd_paper(tmp_path, capsys):
    """Ten classes of equally many images of three to five digits, on black."""
    done(
        [
            "prepare",
            "ultramnist",
            str(tmp_path / "s.h5"),
            "--size",
            "64x64",
            "--images",
            "30,10,0",
            "--sum-below",
            "10",
            "--noise",
            "0",
        ]
    )
    store = Store(tmp_path / "s.h5")
    assert store.classes == [str(total) for total in range(10)]
    assert np.bincount([store.label(name) for name in store.split("train")]).tolist() == [3] * 10
    assert np.bincount([store.label(name) for name in store.split("val")]).tolist() == [1] * 10
    pixels = np.stack([store.read(name, Box.whole((64, 64))) for name in store.split("train")])
    assert np.median(pixels) == 0 and pixels.max(axis=(1, 2, 3)).min() > 100


@pytest.mark.parametrize(
    "flags, why",
    [
        (
            ["ultramnist", "--sum-below", "29"],
            "--sum-below is 29, but 3 to 5 digits have the sums 0 to 27: give 2 to 28",
        ),
        (["ultramnist", "--noise", "300"], "--noise is 300, but pixels are 0 to 255"),
        (
            ["blue-marble", "--sum-below", "10"],
            "--sum-below is for the source ultramnist, not for blue-marble: leave the flag out",
        ),
    ],
)
def test_sums_and_noise_that_can_not_be(tmp_path, refused, flags, why):
    assert why in refused("prepare", flags[0], str(tmp_path / "s.h5"), *flags[1:])


def test_folders_and_tables_of_labels(tmp_path, capsys):
    generator = np.random.default_rng(0)
    for k in range(6):
        for place in (tmp_path / "folders" / ("cat", "dog")[k % 2], tmp_path / "flat"):
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 255, (20, 30, 3)).astype(np.uint8)).save(
                place / f"{k}.png"
            )
    done(
        [
            "prepare",
            str(tmp_path / "folders"),
            str(tmp_path / "a.h5"),
            "--labels",
            "folders",
            "--split",
            "0.5,0.25,0.25",
        ]
    )
    store = Store(tmp_path / "a.h5")
    assert (
        store.classes == ["cat", "dog"]
        and store.label("dog-3") == 1
        and set(store.splits) == {"train", "val", "test"}
    )
    table = tmp_path / "labels.csv"
    table.write_text(
        "image,label,split\n"
        + "".join(f"{k}.png,{k / 2},{'train' if k < 4 else 'val'}\n" for k in range(6))
    )
    done(
        [
            "prepare",
            str(tmp_path / "flat"),
            str(tmp_path / "b.h5"),
            "--labels",
            str(table),
            "--classes",
            "age",
        ]
    )
    store = Store(tmp_path / "b.h5")
    assert store.label("3") == 1.5 and store.split("val") == ["4", "5"]
    for text, why in [
        ("image,label\n9.png,1\n", "line 2: there is no image '9.png'"),
        ("image,label\n0.png,1\n0.png,1\n", "line 3: image '0.png' already has a label"),
        ("image,label\n0.png,1\n", "5 images of .* have no line"),
        ("name,label\n", "name, label: a table of labels must have the columns image and label"),
        (
            "image,label\n" + "".join(f"{k}.png,{'x' if k else 1}\n" for k in range(6)),
            "has the label 'x', but with one class, age, labels must be numbers",
        ),
    ]:
        table.write_text(text)
        with pytest.raises(SystemExit):
            main(
                [
                    "prepare",
                    str(tmp_path / "flat"),
                    str(tmp_path / "c.h5"),
                    "--labels",
                    str(table),
                    "--classes",
                    "age",
                ]
            )
        assert re.search(why, capsys.readouterr().err)
    assert not (tmp_path / "c.h5").exists()
    table.write_text("image,label\n" + "".join(f"{k}.png, {k % 3 * 5} \n" for k in range(6)))
    done(["prepare", str(tmp_path / "flat"), str(tmp_path / "d.h5"), "--labels", str(table)])
    assert (
        Store(tmp_path / "d.h5").classes == ["0", "5", "10"]
        and "were taken as 3 classes: if they measure a quantity, name this quantity"
        in capsys.readouterr().out
    )
    for path, arguments, why in [
        (tmp_path / "folders" / "cat", ["folders"], "has no folders"),
        (
            tmp_path / "one",
            ["folders"],
            "all 6 images of .* have the label 'a', but a single class gives nothing to learn",
        ),
        (tmp_path / "flat", [str(table)], "labels.csv is not in UTF-8"),
    ]:
        (tmp_path / "one").mkdir(exist_ok=True)
        if not (tmp_path / "one" / "a").exists():
            (tmp_path / "one" / "a").symlink_to(tmp_path / "flat")
        table.write_bytes("image,label\n0.png,ch\xe2t\n".encode("latin-1"))
        with pytest.raises(SystemExit):
            main(["prepare", str(path), str(tmp_path / "e.h5"), "--labels", *arguments])
        assert re.search(why, capsys.readouterr().err)
    with pytest.raises(
        ValueError, match="has labels of whole images, so that no pixel belongs to a class"
    ):
        Focus(store, "train", {"age": 1.0}, "focus_class")


def predictor_of(model: torch.nn.Module, **settings) -> Predictor:
    network = as_network(copy.deepcopy(model).double())
    tiled = parallelize(network, reach_for(network, True), Context(), whole=True).eval()
    return Predictor(
        tiled,
        Alone(),
        [torch.device("cpu")],
        nullcontext,
        **{"tile": Size("16x24"), "scratch": "memory", **settings},
    )


def scene_of(x: torch.Tensor) -> ImageSource:
    return ImageSource(
        "x", tuple(x.shape[2:]), lambda box: x[0][(slice(None), *box.slices)].numpy()
    )


def whole_heat(heat, source) -> np.ndarray:
    found = np.full(source.size, np.nan)
    for box, part in heat(source):
        found[box.slices] = part
    return found


@pytest.mark.parametrize(
    "name, pooled",
    [
        ("residual", lambda m: m.blocks),
        ("largest", lambda m: m[5]),
        ("gridded", lambda m: m[5]),
        ("normed", None),
        ("mixed", lambda m: m.coarse),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"tile": Size("64x64")}, {"budget": 3e5}])
@pytest.mark.covering(1)
def test_heat_in_tiles_is_grad_cam_of_the_eager_module(name, pooled, settings):
    """By hooks on the module, of the whole image; of sizes that are no multiples of cells the last ones go on to the border."""
    torch.manual_seed(0)
    model = getattr(made_classifiers, name)(3, 3).double().eval()
    x = torch.randn(1, 3, 48, 64, dtype=torch.float64)
    source, heat = scene_of(x), heat_of(model, predictor_of(model, **settings))
    found = whole_heat(heat, source)
    assert (found >= 0).all()
    odd = scene_of(x[..., :45, :61])
    assert np.isfinite(whole_heat(heat, odd)).all() and picture(
        heat(odd), odd, {"mean": [0.0] * 3, "std": [1.0] * 3}
    ).shape == (45, 61, 3)
    if pooled:
        maps = []
        pooled(model).register_forward_hook(
            lambda module, given, made: maps.append(made) or made.retain_grad()
        )
        model(x).max().backward()
        slopes = maps[0].grad.sum((2, 3), keepdim=True)
        wanted = (maps[0] * slopes).sum(1, keepdim=True).relu()
        scale = round(48 / wanted.shape[2])
        wanted = torch.nn.functional.pad(
            wanted,
            (0, 64 // scale - wanted.shape[3], 0, 48 // scale - wanted.shape[2]),
            mode="replicate",
        )
        wanted = torch.nn.functional.interpolate(
            wanted, scale_factor=scale, mode="bilinear", align_corners=False
        )[0, 0]
        assert (
            np.abs(found - wanted.detach().numpy()).max() <= TOLERANCE * wanted.max()
            and wanted.max() > 0
        )


def test_heat_of_maps_that_share_the_image_evenly():
    """Where a network resizes by a fraction, its cells are no whole number of pixels."""
    torch.manual_seed(0)

    def conv(n):
        return torch.nn.Conv2d(n, 4, 3, padding=1)

    model = (
        torch.nn.Sequential(
            conv(3),
            torch.nn.Upsample(scale_factor=0.7, mode="bilinear"),
            conv(4),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(4, 3),
        )
        .double()
        .eval()
    )
    x = torch.randn(1, 3, 45, 61, dtype=torch.float64)
    found = whole_heat(heat_of(model, predictor_of(model)), scene_of(x))
    cells = model[:3](x)
    slopes = model[5].weight[model(x).argmax()].view(1, -1, 1, 1) / cells[0, 0].numel()
    wanted = torch.nn.functional.interpolate(
        (cells * slopes).sum(1, keepdim=True).relu() * cells[0, 0].numel(),
        size=(45, 61),
        mode="bilinear",
    )[0, 0].detach()
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-10, atol=1e-12)


def test_heat_of_patches_is_where_the_answer_comes_from():
    """A network that sums bright pixels says where they are."""
    body = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 1, bias=False),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
    )
    torch.nn.init.constant_(body[0].weight, 1.0)
    last = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(last.weight, 1.0), torch.nn.init.constant_(last.bias, 0.0)
    model = PatchNetwork(
        body, torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), last), (8, 8)
    )
    x = torch.zeros(1, 1, 32, 48)
    x[..., 16:24, 32:40] = 5.0
    heat = heat_of(
        model,
        PatchPredictor(
            Filler(model, Context(), Context(), torch.device("cpu"), "fp32", False, 4), Alone()
        ),
    )
    found = whole_heat(heat, scene_of(x))
    found /= found.max()
    assert found[18:22, 34:38].min() > 0.5 and found[:8].max() < 0.2 and found[:, :16].max() < 0.2
    drawn = picture(heat(scene_of(x)), scene_of(x), {"mean": [0.0], "std": [1.0]})
    assert (
        drawn.shape == (32, 48, 3)
        and drawn.dtype == np.uint8
        and drawn[20, 36, 0] > 150 > drawn[2, 2, 0]
    )


@pytest.mark.parametrize("size, shrunken", [((64, 64), (64, 64)), ((67, 90), (33, 45))])
def test_large_pictures_of_heat_are_shrunken(monkeypatch, size, shrunken):
    """By a whole number, each tile into its place."""
    monkeypatch.setattr(heat_module, "_MOST", 4096)
    rows = np.arange(size[0])[:, None] + np.zeros(size)
    source = ImageSource("x", size, lambda box: rows[box.slices][None])
    boxes = [
        Box((a, b), (min(a + 9, size[0]), min(b + 14, size[1])))
        for a in range(0, size[0], 9)
        for b in range(0, size[1], 14)
    ]
    drawn = picture(
        iter([(box, rows[box.slices]) for box in boxes]), source, {"mean": [0.0], "std": [1.0]}
    )
    assert (
        drawn.shape == (*shrunken, 3)
        and (np.diff(drawn[..., 0].astype(int), axis=0) >= 0).all()
        and (drawn == drawn[:, :1]).all()
    )


@pytest.mark.parametrize(
    "kinds, title", [(("accuracy", "auc"), "Validation"), (("mae", "rmse"), "Validation error")]
)
def test_curves_of_networks_for_whole_images(tmp_path, monkeypatch, kinds, title):
    log = [{"kind": "step", "step": k, "epoch": 0, "loss": 1.0, "lr": 0.1} for k in range(4)] + [
        {"kind": "validation", "step": 3, "epoch": 0, **dict.fromkeys(kinds, 0.5)}
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    titles = []
    drawn = plots._draw_validation
    monkeypatch.setattr(
        plots,
        "_draw_validation",
        lambda axis, *more: (
            drawn(axis, *more),
            titles.append(
                (axis.get_title(loc="left"), [line.get_label() for line in axis.get_lines()])
            ),
        ),
    )
    plots.plot_curves([tmp_path / "log.jsonl"], tmp_path / "curves.png")
    assert (
        titles == [(title, [f"{kind} 0.500" for kind in kinds])]
        and (tmp_path / "curves.png").exists()
    )


def test_a_file_without_data_is_not_shrunken(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 8, 8), np.uint8))
    facts = {"data": {"mean": [0.0, 0.0], "std": [1.0, 1.0]}}
    assert file_image(str(tmp_path / "a.npy"), facts, shrink=2).read(Box.whole((4, 4))).shape == (
        2,
        4,
        4,
    )
    with pytest.raises(ValueError, match="data.shrink is 2, but .*a.npy has pixels without data"):
        file_image(str(tmp_path / "a.npy"), facts, nodata=0, shrink=2)
