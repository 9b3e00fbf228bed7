"""Draw loss curves of runs, and predictions over their images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from distseg.data.formats.readers import stem_of
from distseg.data.picture import rgb
from distseg.data.store import hdf5
from distseg.data.store.store import Store
from distseg.report.cuts import middle_of_interest, three_cuts
from distseg.report.overlay import iou_text, plot_overlay
from distseg.report.plots import plot_curves
from distseg.tiling.tile import Box


def run_plot(
    what: str, paths: list[str], store: str | None, box: str | None, output: str | None
) -> int:
    """Draw loss curves of runs, or predictions beside their images; return the exit status.

    Args:
        what: ``curves`` or ``overlay``.
        paths: for curves, folders of runs or their logs; for overlays, the predicted files NAME.h5.
        store: the store with the images (overlays only).
        box: the part of the image to draw, such as ``100:900,0:675``; None for the whole image.
        output: the picture; None for a file beside the run or prediction.
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
    """Draw a predicted class map beside the image and its labels.

    Volumes are drawn as three cuts.

    Args:
        path: the prediction, NAME.h5.
        store: the store with the image NAME.
        box: the part of the image to draw, as text; None for the whole image.
        output: the picture.
    """
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
