"""Run ``distseg predict``: write class maps of whole images to files."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from distseg.cli.load import check_types, load_predictor, store_for
from distseg.comm.launch import first_on_node, raise_jointly, resident_memory, set_up
from distseg.comm.progress import heartbeat
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import Config, ModelBase, PredictConfig
from distseg.data.class_files import (
    Classes,
    are_there,
    check_not_read,
    check_written,
    numbers_of,
    paths_of,
)
from distseg.data.class_map import PartialMap, identity_of
from distseg.data.formats.ome_zarr_writer import keeps_place
from distseg.data.formats.readers import stem_of
from distseg.data.nodata import parse
from distseg.data.notes import notes_on
from distseg.inference.image_source import ImageSource, file_image, network_identity, store_image
from distseg.inference.images import probabilities, vectors_of
from distseg.inference.metrics import most_likely
from distseg.inference.predictor import Predictor, check_images
from distseg.planning.tile_size import short_of_decoding
from distseg.report.closing import closing_of_prediction, notes_on_places
from distseg.report.disk import atomic_write
from distseg.report.progress import progress
from distseg.report.style import class_colors
from distseg.tiling.tile import Box
from distseg.training.checkpoint.files import find
from distseg.training.patchgd.filling import PatchPredictor
from distseg.training.patchgd.heat import heat_of, picture
from distseg.training.run_config import load_named


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

    def files(source: ImageSource) -> list[Path]:
        return paths_of(
            Path(output), source.name, settings.formats, source.size, settings.probabilities
        )

    checks = first_on_node(world)
    found = _Found()
    with raise_jointly(world):
        classes = replace(classes, traced=numbers_of(names, settings.trace, "predict.trace"))
        checkpoint = find(run)
        network = network_identity(checkpoint, manifest, config.prediction_settings)
        if images:
            scratch, shrink = settings.scratch, config.data.shrink
            sources = _sources_of_files(images, manifest, scratch, shrink, nodata, level)
            inputs = [Path(path) for path in images]
        else:
            _check_flags_of_store(nodata, level)
            store = store_for(config.data, manifest, config.streaming.memory)
            if checks:
                store.check_files()
            check_types(store, split, manifest)
            sources = {name: partial(store_image, store, name) for name in store.split(split)}
            inputs = store.files if world.rank == 0 else []
        if world.rank == 0:
            found = _check_sources(sources, predictor, settings.heat, files, inputs)
    sizes = world.bcast(found.sizes, root=0)
    with raise_jointly(world):
        check_images(predictor, sizes)
    if world.rank == 0:
        most = max(found.decoding, default=0)
        on_gpu = any(p.is_cuda for p in predictor.model.parameters())
        memory = None if on_gpu else config.streaming.memory
        print(
            f"network: {checkpoint}",
            threads,
            *short_of_decoding(memory, resident_memory(), found.decoding.get(most, ""), most),
            *notes_on(found.notes),
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
            _draw_heat(heat, data, sources, world, Path(output))
        return 0
    maps, notes = _predict_maps(predictor, sources, files, classes, settings, network)
    if world.rank == 0:
        read = None if images else config.data.store
        print(*notes, *closing_of_prediction(output, maps, read), sep="\n")
    return 0


def _sources_of_files(
    images: Sequence[str],
    manifest: Mapping,
    scratch: str | None,
    shrink: int,
    nodata: str | None,
    level: int,
) -> dict[str, Callable[[], ImageSource]]:
    """Return a function that opens each image file, by the name of its results.

    Args:
        images: the paths of the files.
        manifest: the manifest of the network's run.
        scratch, shrink: the settings ``predict.scratch`` and ``data.shrink``.
        nodata, level: the arguments of :func:`run_predict`.

    Raises:
        ValueError: two files have results of the same name.
    """
    missing = None if nodata is None else parse(nodata)
    names = Counter(map(stem_of, images))
    twice = next((path for path in images if names[stem_of(path)] > 1), None)
    if twice is not None:
        raise ValueError(
            f"results are named after images, but several images are named {stem_of(twice)}, such "
            f"as {twice}: predict them into different --output folders"
        )
    return {
        stem_of(path): partial(file_image, path, manifest, missing, shrink, scratch, level)
        for path in images
    }


def _check_flags_of_store(nodata: str | None, level: int) -> None:
    """Refuse flags that concern image files, because the images are those of a store.

    Raises:
        ValueError: ``nodata`` or ``level`` is given.
    """
    if nodata is not None:
        raise ValueError(
            f"--nodata is {nodata}, but a store has its own no-data value: use --nodata with "
            "--images only"
        )
    if level:
        raise ValueError(
            f"--level is {level}, but the images of a store have one resolution: use --level with "
            "--images only"
        )


@dataclass
class _Found:
    """Facts about the images to predict, for checks and messages before the first one is computed.

    Attributes:
        sizes: for each size that an image has, the name of an image with this size.
        decoding: for each number of bytes that decoding an image takes, the name of such an image.
        notes: for each image, its name and the notes on its file.
    """

    sizes: dict[tuple[int, ...], str] = field(default_factory=dict)
    decoding: dict[int, str] = field(default_factory=dict)
    notes: list[tuple[str, list[str]]] = field(default_factory=list)


def _check_sources(
    sources: Mapping[str, Callable[[], ImageSource]],
    predictor: Predictor,
    heat: bool,
    files: Callable[[ImageSource], list[Path]],
    inputs: Sequence[Path],
) -> _Found:
    """Open each image once, refuse those that cannot be predicted, and return facts about them.

    Args:
        sources: for each image, by its name, a function that opens it.
        predictor: the network.
        heat: the value of the setting ``predict.heat``.
        files: a function that returns the files to write for an image.
        inputs: the files that the images are read from.

    Raises:
        ValueError: heat maps cannot be drawn, or a file to write cannot hold the image's class map
            or is one of the files to read.
    """
    found, results = _Found(), []
    for opened in sources.values():
        source = opened()
        found.sizes[source.size] = source.name
        found.decoding[source.decoding] = source.name
        found.notes.append((source.name, source.notes))
        if not predictor.model.of_image:
            if heat:
                raise ValueError(
                    "predict.heat is True, which draws the pixels that the label of a whole image "
                    "depends on, but this network returns a map: leave predict.heat out"
                )
            check_written(files(source), source.place, source.name)
            results += files(source)
        elif heat and len(source.size) != 2:
            raise ValueError(
                f"predict.heat draws pictures of images with 2 dims, but {source.name} has "
                f"{len(source.size)} dims: leave predict.heat out"
            )
    check_not_read(results, inputs)
    return found


def _predict_maps(
    predictor: Predictor,
    sources: Mapping[str, Callable[[], ImageSource]],
    files: Callable[[ImageSource], list[Path]],
    classes: Classes,
    settings: PredictConfig,
    network: str,
) -> tuple[list[Path], list[str]]:
    """Write the class map of each image; return the first file of each, and notes on the files.

    All ranks must call it together.

    Args:
        predictor: the network, which returns maps.
        sources: for each image, by its name, a function that opens it.
        files: a function that returns the files to write for an image.
        classes: the classes, and the label of pixels without data.
        settings: the settings of the section ``predict``.
        network: the identity of the network and its settings, as for :func:`predict`.
    """
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
        located = replace(classes, place=source.place)
        anew = predict(predictor, source, paths, located, settings.probabilities, network)
        if predictor.writes:
            print(
                f"{paths[0]}: {source.name}, {'x'.join(map(str, source.size))} "
                f"pixels{'' if anew else ', is there already'}"
            )
    holding = [form for form in settings.formats if form != "zarr" or whole]
    return maps, notes_on_places(placed, holding, volumes, voxels)


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
            (:func:`distseg.training.patchgd.heat.heat_of`).
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


def predict(
    predictor: Predictor,
    source: ImageSource,
    paths: Sequence[Path],
    classes: Classes,
    probabilities: bool = False,
    network: str = "",
) -> bool:
    """Write the class map of an image, and on request the probability of each class.

    All ranks must call it together. The first rank with the last stage collects one tile from each
    rank at a time, and writes these tiles into ``NAME.partial``. The files
    (:mod:`distseg.data.class_files`) appear when they are complete. If the command is interrupted
    and started again, tiles that were written are not computed again.

    Args:
        predictor: the network.
        source: the image.
        paths: the files to write.
        classes: the classes, and the label of pixels without data.
        probabilities: True to write also the probability of each class.
        network: the identity of the network and its settings
            (:func:`distseg.inference.image_source.network_identity`).

    Returns:
        True on the rank that writes the files, if it wrote them; False on all other ranks, and if
            the files of the same network and image existed already.
    """
    ranks = predictor.replicas
    first = predictor.writes
    predictor.check(source.size)
    every = predictor.tiles_of(source.size)
    likely = predictor.outputs if probabilities else 0
    about = {
        "network": network,
        "source": source.identity,
        "classes": classes.names,
        "no data": classes.nodata,
    }
    traced = {} if classes.traced is None else {"traced": classes.traced}
    # The tiles do not depend on the classes that are traced, but files of objects do.
    of_tiles, of_files = (
        identity_of(found, source.size, every, likely) for found in (about, {**about, **traced})
    )
    partial = None
    if first and not are_there(paths, of_files):
        partial = PartialMap(
            paths[0].with_name(f"{source.name}.partial"),
            of_tiles,
            tuple(source.size),
            every,
            likely,
        )
    numbers = predictor.agree(partial.missing if partial else None)
    if numbers is None:
        return False
    if first and partial.taken_up and len(numbers) < len(every):
        print(
            f"{source.name}: {len(every) - len(numbers)} of {len(every)} tiles exist already",
            flush=True,
        )
    mine = predictor(source, numbers) if numbers else iter(())
    if not predictor.last:
        next(mine, None)  # runs this rank's stages; it yields nothing
        return False
    rounds = max(map(len, predictor.deal(source.size, numbers)))
    try:
        with progress(rounds, "round", source.name, enabled=first) as bar:
            for number in range(rounds):
                heartbeat(f"round {number + 1} of {rounds}")
                done = next(mine, None)
                parts = ranks.gather(
                    None if done is None else _part(source, *done, classes.nodata, probabilities)
                )
                for tile, found, likelihood in filter(None, parts or []):
                    partial.write(every.number_of(tile), found, likelihood)
                bar.advance(pixels=sum(part[0].pixels for part in filter(None, parts or [])))
            next(mine, None)  # ends the generator, which then leaves evaluation mode
        if first:
            partial.pack(paths, classes, of_files)
    finally:
        if first:
            partial.close()
    return first


def _part(
    source: ImageSource, tile: Box, logits: np.ndarray, nodata: int, probabilities: bool
) -> tuple[Box, np.ndarray, np.ndarray | None]:
    """Return a tile, its class numbers (*tile.size), and the probability of each class or None.

    Pixels without data have the class ``nodata`` and the probability nan.

    Args:
        source: the image.
        tile: the tile's box in the image.
        logits: the network's output on the tile, (C, *tile.size).
        nodata: the class of pixels without data.
        probabilities: True to return the probabilities, (C, *tile.size) float16; False for None.
    """
    found, likely = most_likely(logits), _likelihood(logits) if probabilities else None
    hidden = source.without_data(tile)
    if hidden is not None:
        found[hidden] = nodata
        if likely is not None:
            likely[:, hidden] = np.nan
    return tile, found, likely


def _likelihood(logits: np.ndarray) -> np.ndarray:
    z = torch.from_numpy(logits)
    return (z.sigmoid() if len(z) == 1 else z.softmax(0)).to(torch.float16).numpy()
