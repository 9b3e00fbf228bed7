"""Recognise whole-slide images, and read the size of their pixels.

A slide in Aperio's SVS format is a TIFF file, which :mod:`distseg.data.formats.tiff` reads.
"""

from __future__ import annotations

import re

from distseg.data.formats.georeference import Georeference, of_matrix
from distseg.data.formats.ngff import UNITS

SUFFIXES = (".svs",)
_MAKER = "Aperio"
_PIXEL = re.compile(r"\|\s*MPP\s*=\s*(\d+\.?\d*|\.\d+)\s*(?:\||$)")  # micrometres per pixel


def place_of_slide(description: str) -> Georeference | None:
    """Return the pixel size of a whole-slide image as a georeference; None if it is unknown.

    Args:
        description: the text in the tag ImageDescription of the image's TIFF page.
    """
    found = _PIXEL.search(description) if description.startswith(_MAKER) else None
    if found is None or not float(found[1]):
        return None
    side = float(found[1])
    matrix = [[side, 0, 0, 0], [0, side, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    return of_matrix(matrix, UNITS["micrometer"])
