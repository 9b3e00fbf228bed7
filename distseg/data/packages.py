"""Import of the optional packages that read and write some formats."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXTRAS = {
    "nibabel": "medical",
    "nrrd": "medical",
    "pyogrio": "geo",
    "rasterio": "geo",
    "shapely": "geo",
    "zarr": "microscopy",
}
_INSTALLED_AS = {"nrrd": "pynrrd", "zarr": "'zarr>=3'"}  # where pip needs another name


def optional(what: object, package: str, *submodules: str) -> Any:
    """Return the module of an optional package.

    Args:
        what: the file or the task that needs the package, for the message.
        package: the name of the package, such as ``rasterio``.
        submodules: names of submodules of the package that are imported, too.

    Raises:
        ValueError: the package cannot be imported; the message names the line that installs it.
    """
    try:
        for name in submodules:
            import_module(f"{package}.{name}")
        return import_module(package)
    except ImportError as e:
        raise ValueError(
            f"{what}: this needs {package}, which cannot be imported ({e}): pip install "
            f"'distseg[{_EXTRAS[package]}]', or pip install {_INSTALLED_AS.get(package, package)}"
        ) from e
