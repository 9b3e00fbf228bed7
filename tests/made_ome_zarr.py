"""Small OME-Zarr images, written by zarr itself."""

import numpy as np

TYPES = {"t": "time", "c": "channel", "z": "space", "y": "space", "x": "space"}
SCALES = {"z": 2.5, "y": 0.65, "x": 0.325}


def axes_of(names, unit="micrometer"):
    units = {"unit": unit} if unit else {}
    return [
        {"name": name, "type": TYPES[name], **(units if name in SCALES else {})} for name in names
    ]


def steps_of(names, factor=1.0, shift=None):
    """Return the coordinate transformations of a level."""
    steps = [{"type": "scale", "scale": [SCALES.get(name, 1.0) * factor for name in names]}]
    if shift:
        steps.append(
            {"type": "translation", "translation": [shift.get(name, 0.0) for name in names]}
        )
    return steps


def made_image(
    path,
    array,
    names,
    version=3,
    unit="micrometer",
    chunks=None,
    shift=None,
    attributes=None,
    **about,
):
    """Write an image with a second level and return its folder."""
    import zarr

    group = zarr.open_group(path, mode="w", zarr_format=version)
    chunks = chunks or tuple(min(n, 7) for n in array.shape)
    level = group.create_array("0", shape=array.shape, dtype=array.dtype, chunks=chunks, **about)
    level[...] = array
    low = array[(..., slice(None, None, 2), slice(None, None, 2))]
    group.create_array("1", shape=low.shape, dtype=low.dtype, chunks=chunks)[...] = low
    image = {
        "axes": axes_of(names, unit),
        "datasets": [
            {"path": "0", "coordinateTransformations": steps_of(names, 1.0, shift)},
            {"path": "1", "coordinateTransformations": steps_of(names, 2.0, shift)},
        ],
    }
    if version == 3:
        group.attrs["ome"] = {"version": "0.5", "multiscales": [image]}
    else:
        group.attrs["multiscales"] = [{"version": "0.4", **image}]
    group.attrs.update(attributes or {})
    return path


def noise(shape, dtype="uint16", seed=0):
    random = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return random.normal(size=shape).astype(dtype)
    return random.integers(0, 200, shape).astype(dtype)
