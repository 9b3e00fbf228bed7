"""What GDAL keeps beside a file that cannot hold it (PAM, NAME.EXT.aux.xml): the number that stands for no data, and whether there is a place."""

from __future__ import annotations

import re
from pathlib import Path

_MOST = 1 << 20  # bytes that are looked at
_NODATA = re.compile(r"<NoDataValue[^>]*>([^<]*)</NoDataValue>")
_PLACE = re.compile(r"<(?:GeoTransform|SRS)\b")


def beside(path: Path) -> Path:
    """Return the path of the file beside an image."""
    return Path(f"{path}.aux.xml")


def nodata_values(path: Path) -> list[str]:
    """Return the numbers that stand for no data in an image's bands, each once; none where nothing says so."""
    return list(dict.fromkeys(text.strip() for text in _NODATA.findall(_text(path))))


def has_place(path: Path) -> bool:
    """Return True if the file beside an image says where on earth that is."""
    return bool(_PLACE.search(_text(path)))


def _text(path: Path) -> str:
    there = beside(path)
    if not there.is_file():
        return ""
    with open(there, "rb") as file:
        return file.read(_MOST).decode("utf-8", "replace")
