"""Read GDAL's metadata file NAME.EXT.aux.xml (PAM), which GDAL writes beside other formats.

The file may hold the number for no data and a georeference.
"""

from __future__ import annotations

import re
from pathlib import Path

_MOST = 1 << 20  # bytes of the file that are read
_NODATA = re.compile(r"<NoDataValue[^>]*>([^<]*)</NoDataValue>")
_PLACE = re.compile(r"<(?:GeoTransform|SRS)\b")


def beside(path: Path) -> Path:
    """Return the path of GDAL's metadata file for the image ``path``; it need not exist."""
    return Path(f"{path}.aux.xml")


def nodata_values(path: Path) -> list[str]:
    """Return the pixel values that mean "no data", from GDAL's metadata file of an image.

    Bands may have different values. The list has each value once, as text. It is empty if there is
    no metadata file.

    Args:
        path: the image.
    """
    return list(dict.fromkeys(text.strip() for text in _NODATA.findall(_text(path))))


def has_place(path: Path) -> bool:
    """Return True if GDAL's metadata file of the image ``path`` exists and has a georeference."""
    return bool(_PLACE.search(_text(path)))


def _text(path: Path) -> str:
    there = beside(path)
    if not there.is_file():
        return ""
    with open(there, "rb") as file:
        return file.read(_MOST).decode("utf-8", "replace")
