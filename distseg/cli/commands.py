"""Implementation of the subcommands predict, plot, prepare, check and models."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import nn

from distseg.cli.predict import check_types, load_predictor, predict, store_for
from distseg.comm.launch import first_on_node, raise_jointly, resident_memory, set_up
from distseg.comm.progress import heartbeat
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import Config, ModelBase, ModelConfig
from distseg.config.sizes import Size
from distseg.data.class_files import Classes, check_not_read, check_written, numbers_of, paths_of
from distseg.data.formats.ome_zarr_writer import keeps_place
from distseg.data.formats.readers import stem_of
from distseg.data.nodata import parse
from distseg.data.notes import notes_on
from distseg.data.picture import rgb
from distseg.data.store import hdf5
from distseg.data.store.check import check_store
from distseg.data.store.store import Store
from distseg.inference.image_source import ImageSource, file_image, network_identity, store_image
from distseg.inference.images import probabilities, vectors_of
from distseg.inference.predictor import Predictor, check_images
from distseg.layers.graph import receptive_field
from distseg.models.network import flat_layers, is_flat
from distseg.models.zoo import ZOO, outline_model
from distseg.patchgd.filling import PatchPredictor
from distseg.patchgd.heat import heat_of, picture
from distseg.planning.tile_size import short_of_decoding
from distseg.report.closing import closing_of_prediction, closing_of_preparation, notes_on_places
from distseg.report.cuts import middle_of_interest, three_cuts
from distseg.report.disk import atomic_write
from distseg.report.overlay import iou_text, plot_overlay
from distseg.report.plots import plot_curves
from distseg.report.style import class_colors
from distseg.tiling.tile import Box
from distseg.training.checkpoint.files import find
from distseg.training.run_config import load_named


def _draw_heat(
    heat: Callable,
    data: Mapping,
    sources: Mapping[str, Callable[[], ImageSource]],
    world,
    folder: Path,
) -> None:
    """Draw the heat maps of images into ``folder``; each rank draws its share of the images.

    A heat map shows the pixels on which the label of a whole image depends. All ranks must call it
    together.

    Args:
        heat: a function that yields (tile, heat) for all tiles of an image
            (:func:`distseg.patchgd.heat.heat_of`).
        data: the section of the run's manifest with the constants of normalisation.
        sources: for each image, by its name, a function that opens it.
        world: the communicator of all ranks.
        folder: the folder for the pictures.
    """
    from PIL import Image

    def path(name):
        return folder / f"{name}.heat.png"

    with raise_jointly(world):
        folder.mkdir(parents=True, exist_ok=True)  # any rank may be the first
        for name in list(sources)[world.rank :: world.size]:
            source = sources[name]()
            heartbeat(f"heat of {name}")
            drawn = picture(heat(source), source, data)
            with atomic_write(path(name)) as growing:
                Image.fromarray(drawn).save(growing, "png")
    if world.rank == 0:
        print(*map(path, sources), sep="\n")


def _predict_images(
    predictor: Predictor,
    sources: Mapping[str, Callable[[], ImageSource]],
    classes: Sequence[str],
    world,
    output: str,
) -> None:
    """Write ``images.csv``, a table with one row for each image.

    A row has the image's class and the probability of each class, or the predicted number.

    Args:
        predictor: a network with one label per image.
        sources: for each image, by its name, a function that opens it.
        classes: the names of the classes; a single name if the network predicts a number.
        world: the communicator of all ranks.
        output: the folder for the table.
    """
    opened = list(sources.values())
    vectors = vectors_of(predictor, opened, [source().size for source in opened], world, "predict")
    if world.rank == 0:
        path = Path(output) / "images.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as growing, growing.open("w", newline="") as f:
            lines = csv.writer(f)
            if len(classes) == 1:
                lines.writerow(["image", classes[0]])
                lines.writerows(
                    [name, f"{number:.9g}"] for name, (number,) in zip(sources, vectors)
                )
            else:
                likely = probabilities(vectors)
                lines.writerow(["image", "class", *(f"p({name})" for name in classes)])
                lines.writerows(
                    [name, classes[p.argmax()], *(f"{x:.6g}" for x in p)]
                    for name, p in zip(sources, likely)
                )
        print(f"{path}: {len(opened)} images")


def run_predict(
    run: str,
    config: Config | PatchConfig,
    world,
    images: list[str] | None,
    split: str,
    output: str,
    nodata: str | None = None,
    level: int = 0,
) -> int:
    """Write the class maps of image files, or of the images of a split of the store.

    For a network with one label per image, write a table instead (``images.csv``). All ranks must
    call this function together. Return the exit status of the command.

    Args:
        run: the folder of a run or of a checkpoint.
        config: the settings.
        world: the communicator of all ranks.
        images: image files; None for the images of ``split`` in the store.
        split: the split of the store.
        output: the folder for the results.
        nodata: the number that stands for no data in image files, as text; None to use the number
            that each file declares.
        level: the resolution of OME-Zarr images; 0 is the highest.
    """
    device, threads = set_up(world, config.run.device, config.run.threads)
    predictor, manifest = load_predictor(run, config, world, device)
    settings, data = config.predict, manifest["data"]
    names = data["classes"]
    classes = Classes(names, class_colors(names, data.get("colours")), data.get("ignore", 255))

    def files(source):
        return paths_of(
            Path(output), source.name, settings.formats, source.size, settings.probabilities
        )

    checks = first_on_node(world)
    with raise_jointly(world):
        classes = replace(classes, traced=numbers_of(names, settings.trace, "predict.trace"))
        checkpoint = find(run)
        network = network_identity(checkpoint, manifest, config.prediction_settings)
        if nodata is not None and not images:
            raise ValueError(
                f"--nodata is {nodata}, but a store has its own no-data value: use --nodata with "
                f"--images only"
            )
        if level and not images:
            raise ValueError(
                f"--level is {level}, but the images of a store have one resolution: use --level "
                "with --images only"
            )
        if images:
            missing = None if nodata is None else parse(nodata)
            sources = {
                stem_of(path): partial(
                    file_image, path, manifest, missing, config.data.shrink, settings.scratch, level
                )
                for path in images
            }
            inputs = [Path(path) for path in images]
            if len(sources) < len(images):
                twice = next(
                    path
                    for path in images
                    if sum(stem_of(other) == stem_of(path) for other in images) > 1
                )
                raise ValueError(
                    f"results are named after images, but several images are named "
                    f"{stem_of(twice)}, such as {twice}: predict them into different --output "
                    f"folders"
                )
        else:
            store = store_for(config.data, manifest)
            if checks:
                store.check_files()
            check_types(store, split, manifest)
            sources = {name: partial(store_image, store, name) for name in store.split(split)}
            inputs = store.files if world.rank == 0 else []
        sizes, decoding, notes, results = {}, {}, [], []
        for opened in (
            sources.values() if world.rank == 0 else ()
        ):  # all of them, before the first is computed
            source = opened()
            sizes[source.size] = source.name
            decoding[source.decoding] = source.name
            notes.append((source.name, source.notes))
            if not predictor.model.of_image:
                if settings.heat:
                    raise ValueError(
                        "predict.heat is True, which draws the pixels that the label of a whole "
                        "image depends on, but this network returns a map: leave predict.heat out"
                    )
                check_written(files(source), source.place, source.name)
                results += files(source)
            elif settings.heat and len(source.size) != 2:
                raise ValueError(
                    f"predict.heat draws pictures of images with 2 dims, but {source.name} has "
                    f"{len(source.size)} dims: leave predict.heat out"
                )
        check_not_read(results, inputs)
    sizes = world.bcast(sizes, root=0)
    with raise_jointly(world):
        check_images(predictor, sizes)
    if world.rank == 0:
        most = max(decoding, default=0)
        on_gpu = any(p.is_cuda for p in predictor.model.parameters())
        memory = None if on_gpu else config.streaming.memory
        print(
            f"network: {checkpoint}",
            threads,
            *short_of_decoding(memory, resident_memory(), decoding.get(most, ""), most),
            *notes_on(notes),
            sep="\n",
        )
    if predictor.model.of_image:
        with raise_jointly(world):
            heat = (
                heat_of(_network_of_heat(predictor, checkpoint, config.model), predictor)
                if settings.heat
                else None
            )
        _predict_images(predictor, sources, names, world, output)
        if heat:
            _draw_heat(heat, manifest["data"], sources, world, Path(output))
        return 0
    maps, placed, volumes, voxels, whole = [], {}, False, False, True
    for opened in sources.values():
        source = opened()
        paths = files(source)
        maps.append(paths[0])
        placed[source.name] = source.place is not None
        volumes = len(source.size) == 3
        if source.place is not None:
            voxels = voxels or source.place.of_voxels
            whole = whole and keeps_place(source.place)
        anew = predict(
            predictor,
            source,
            paths,
            replace(classes, place=source.place),
            settings.probabilities,
            network,
        )
        if predictor.writes:
            print(
                f"{paths[0]}: {source.name}, {'x'.join(map(str, source.size))} "
                f"pixels{'' if anew else ', is there already'}"
            )
    if world.rank == 0:
        holding = [form for form in settings.formats if form != "zarr" or whole]
        print(
            *notes_on_places(placed, holding, volumes, voxels),
            *closing_of_prediction(output, maps, None if images else config.data.store),
            sep="\n",
        )
    return 0


def _network_of_heat(predictor: Predictor, checkpoint: Path, model: ModelBase) -> nn.Module:
    """Return the network whose heat maps are drawn, as a plain module that is not distributed.

    A predictor of PatchGD holds its network as such a module. Other predictors hold distributed
    layers, so the network is loaded once more from the checkpoint.
    """
    return (
        predictor.filler.network
        if isinstance(predictor, PatchPredictor)
        else load_named(checkpoint, model)
    )


def run_plot(
    what: str, paths: list[str], store: str | None, box: str | None, output: str | None
) -> int:
    """Draw loss curves of runs, or predictions beside their images; return the exit status.

    Args:
        what: ``curves`` or ``overlay``.
        paths: for curves, folders of runs or their logs; for overlays, the predicted files NAME.h5.
        store: the store with the images (overlays only).
        box: the part of the image to draw, such as ``100:900,0:675``; None for the whole image.
        output: the picture; None for a name beside the run or prediction.
    """
    if what == "curves":
        folder = Path(paths[0]) if Path(paths[0]).is_dir() else Path(paths[0]).parent
        output = output or str(folder / "curves.png")
        plot_curves(paths, output)
        print(output)
        return 0
    if store is None:
        raise ValueError(
            "an overlay needs the image: give --store, the store whose images were predicted"
        )
    for path in paths:
        picture = (
            output if output and len(paths) == 1 else str(Path(path).with_suffix(".overlay.png"))
        )
        _overlay(path, Store(store), box, picture)
        print(picture)
    return 0


def _overlay(path: str, store: Store, box: str | None, output: str) -> None:
    name = stem_of(path)
    with hdf5.opened(path, "class map", "'distseg predict' writes them") as f:
        if "classes" not in f:
            raise ValueError(
                f"{path} is not a prediction (it has no classes): give the NAME.h5 that 'distseg "
                "predict' wrote"
            )
        classes = hdf5.dataset(f, "classes").open()
        if classes.shape != store.size(name) or classes.dtype != np.uint8:
            sizes = ("x".join(map(str, size)) for size in (classes.shape, store.size(name)))
            raise ValueError(
                f"{path} has {next(sizes)} pixels of {classes.dtype}, but the image {name} of the "
                f"store has {next(sizes)} pixels: give the store whose images were predicted"
            )
        part = _box(box, classes.shape)
        found = classes[part.slices]
    truth = store.labels(name, part) if store.has_labels(name) else None
    pixels, valid, scores = store.read(name, part), store.valid(name, part), None
    title = name
    if found.ndim == 3:
        if truth is not None:
            scores = iou_text(truth, found, store.classes, store.ignore)
        at = middle_of_interest(found if truth is None else truth)
        title = f"{name}, cut at {', '.join(str(a + n) for a, n in zip(part.start, at))}"
        valid = np.ones(found.shape, bool) if valid is None else valid
        pixels, valid = three_cuts(pixels, at, 0), three_cuts(valid, at, False)
        found = three_cuts(found, at, store.ignore)
        truth = None if truth is None else three_cuts(truth, at, store.ignore)
    plot_overlay(
        rgb(pixels, store.nodata(name), valid),
        truth,
        found,
        store.classes,
        store.colours,
        output,
        store.ignore,
        title,
        scores,
    )


def _box(text: str | None, size: tuple[int, ...]) -> Box:
    """Return the box for a text such as ``100:900,0:675``, or the whole image if the text is None.

    Raises:
        ValueError: the text is not of this form, or the box is empty or not inside ``size``.
    """
    if text is None:
        return Box.whole(size)
    try:
        ranges = [tuple(int(v) for v in part.split(":")) for part in text.split(",")]
        box = Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))
    except ValueError:
        raise ValueError(
            f"--box must be written as 100:900,0:675 (rows, columns), got {text!r}"
        ) from None
    if min(box.size, default=0) < 1:
        raise ValueError(
            f"--box {text} has no pixels: the end of each range must be larger than its start, as "
            "in 100:900,0:675"
        )
    if len(box.size) != len(size) or not Box.whole(size).contains(box):
        raise ValueError(
            f"--box {text} does not lie inside the image of {'x'.join(map(str, size))} pixels: "
            "give one range start:end inside the image for each dim"
        )
    return box


def run_prepare(arguments) -> int:
    """Write a store from folders of images or from an example data set; return the exit status.

    Args:
        arguments: the parsed flags.
    """
    if arguments.size and arguments.source not in ("gigapixel", "ultramnist"):
        raise ValueError(
            f"--size is for the sources gigapixel and ultramnist, not for {arguments.source}: "
            "leave --size out"
        )
    if arguments.source == "ultramnist":
        from distseg.data.examples.ultramnist import prepare_ultramnist

        least, most = _numbers("--digits", arguments.digits, "-", 2)
        counts = _numbers("--images", arguments.images, ",", 3)
        prepare_ultramnist(
            arguments.output,
            arguments.size or Size((512, 512)),
            counts,
            (least, most),
            arguments.seed,
            arguments.overwrite,
            arguments.sum_below,
            arguments.noise,
        )
        return 0
    if arguments.source == "gigapixel":
        from distseg.data.examples.gigapixel import prepare_gigapixel

        prepare_gigapixel(
            arguments.output, arguments.size or Size((16000, 64000)), overwrite=arguments.overwrite
        )
        return 0
    if arguments.source == "blue-marble":
        from distseg.data.examples.blue_marble import prepare_blue_marble

        prepare_blue_marble(arguments.output, overwrite=arguments.overwrite)
        return 0
    nodata = None if arguments.nodata is None else parse(arguments.nodata)
    if arguments.labels is not None:
        from distseg.data.labelled import prepare_labelled

        table, classes = (
            None if arguments.labels == "folders" else arguments.labels,
            arguments.classes and arguments.classes.split(","),
        )
        prepare_labelled(
            arguments.source,
            table,
            arguments.output,
            classes,
            _shares(arguments.split),
            arguments.seed,
            arguments.overwrite,
            nodata,
            arguments.alpha,
            arguments.pages,
            arguments.reference,
            arguments.level,
        )
        print(closing_of_preparation(arguments.output))
        return 0
    from distseg.data.masks import MaskForm, named_colours
    from distseg.data.prepare import prepare_folder

    if arguments.classes is None:
        raise ValueError(
            "prepare needs --classes, the names in the order of their labels, such as "
            "background,road"
        )
    classes, colours = named_colours(arguments.classes.split(","))
    if colours is not None and arguments.instances is not None:
        raise ValueError(
            f"--instances {arguments.instances} is for masks with numbers of objects, but "
            "--classes names colours: leave one of them out"
        )
    values, names = _values(arguments["values"], arguments.attribute)  # .values is a method
    prepare_folder(
        arguments.source,
        arguments.masks,
        arguments.output,
        classes=classes,
        form=MaskForm(colours, arguments.instances, arguments.attribute, names),
        dry=arguments.dry_run,
        nested=arguments.recursive,
        ignore=arguments.ignore,
        values=values,
        splits=_shares(arguments.split),
        seed=arguments.seed,
        overwrite=arguments.overwrite,
        nodata=nodata,
        absent=arguments.absent.split(",") if arguments.absent else (),
        alpha=arguments.alpha,
        pages=arguments.pages,
        reference=arguments.reference,
        level=arguments.level,
        parts=arguments.parts and Size(arguments.parts),
    )
    if not arguments.dry_run:
        print(closing_of_preparation(arguments.output))
    return 0


def _numbers(flag: str, text: str, between: str, count: int) -> list[int]:
    """Return the ``count`` whole numbers of a text, separated by ``between``.

    If ``count`` is 2 and the text has one number, this number is returned twice.

    Args:
        flag: the flag with this text, for the message.

    Raises:
        ValueError: the text is not of this form.
    """
    parts = text.split(between)
    parts = parts * 2 if count == 2 and len(parts) == 1 else parts
    if len(parts) != count or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(
            f"{flag} must be written as {'3-5' if count == 2 else '2000,250,500'}, got {text!r}"
        )
    return list(map(int, parts))


def run_check(path: str) -> int:
    """Check a store or a run's checkpoints, print what is damaged, and return the exit status.

    The exit status is 0 if nothing is damaged, else 2.
    """
    if not path.strip():
        raise ValueError("check reads a store or a run, but its path is empty: give a path")
    if Path(path).is_dir():
        from distseg.training.checkpoint.files import check_run

        findings = check_run(path)
    else:
        findings = check_store(path)
    for line in findings:
        print(line)
    print(f"{path}: {f'{len(findings)} damaged' if findings else 'whole'}")
    return 2 if findings else 0


def _values(
    text: str | None, attribute: str | None
) -> tuple[dict[int, int], tuple[tuple[str, int], ...]]:
    """Return the labels that ``--values`` gives to mask values, and to values of an attribute.

    Args:
        text: the text of the flag; None without it.
        attribute: the attribute of polygons that holds their class. With it, the flag may give
            labels to texts: ``forest=2,water=0``.

    Returns:
        A map from mask values to labels, and pairs (value of the attribute, label).

    Raises:
        ValueError: the text is not of this form, or a value has two labels.
    """
    pairs = [tuple(pair.split("=")) for pair in text.split(",")] if text is not None else []
    try:
        labels = [(value, int(label)) for value, label in pairs]
        if attribute is None:
            labels = [(int(value), label) for value, label in labels]
    except ValueError:
        raise ValueError(
            f"--values must be written as 255=1,128=2 (mask value=label), got {text!r}"
            + ("; names of classes in the place of mask values need --attribute")
            * (attribute is None)
        ) from None
    values: dict[int | str, int] = {}
    for value, label in labels:
        if value in values:
            raise ValueError(
                f"--values {text} gives the mask value {value} two labels, {values[value]} and "
                f"{label}: leave one of them out"
            )
        values[value] = label
    if attribute is not None:
        return {}, tuple(values.items())
    return values, ()


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(v) for v in text.split(","))
    except ValueError:
        shares = ()
    if len(shares) != 3 or not all(share >= 0 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(
            "--split must be three shares that add up to 1, for train, val and test, such as "
            f"0.8,0.1,0.1, got {text!r}"
        )
    return shares


def describe_model(name: str) -> dict:
    """Return the row of the table of ``distseg models`` about one network.

    Memory for the weights is allocated only for a user's own network.

    Args:
        name: the name of a network, or a user's own function as ``package.module:function``.

    Returns:
        ``name``, ``parameters`` (their number), ``layers`` (their number; None if the network is
            not a list of layers), ``halo`` in pixels (the largest over the dims), ``stride`` in
            pixels (a common multiple for all dims), and ``paper_halo``, the halo by the formula of
            Seal et al. 2020; None for networks without it.
    """
    model = outline_model(ModelConfig(name))
    reach = receptive_field(model)
    return {
        "name": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": len(flat_layers(model)) if is_flat(model) else None,
        "stride": math.lcm(*reach.stride),
        "halo": max(reach.halo),
        "paper_halo": ZOO[name].paper_halo if name in ZOO else None,
    }
