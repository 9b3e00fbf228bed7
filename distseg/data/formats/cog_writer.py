"""Copy a tiled GeoTIFF to a cloud-optimised GeoTIFF (COG), which GDAL writes with its overviews.

GDAL reads the file through Python, so that the progress is known. It works in a thread of its own,
so that an interrupt ends the copy soon and need not wait until GDAL is done.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from pathlib import Path

from distseg.data.packages import optional

_GDAL_CACHE = 64  # MB of blocks that GDAL keeps; its own default is 5 % of the memory
_SECONDS = 0.2  # between two calls that show the progress


def copy_as_cog(plain: Path, path: Path, scratch: Path, advance: Callable[[float], None]) -> None:
    """Copy a tiled GeoTIFF of class numbers to a COG with overviews.

    A pixel of an overview has the most frequent class of the pixels that it covers in the next
    finer level.

    Args:
        plain: the GeoTIFF.
        path: the file to write.
        scratch: the folder of GDAL's temporary file, which holds the overviews.
        advance: called with the number of times, from 0 to 2, that GDAL has read the GeoTIFF. It
            reads the file once for the overviews, and once more for the copy.
    """
    size, source = plain.stat().st_size, _Source(plain)
    with ThreadPoolExecutor(1) as pool:
        # rasterio keeps its settings in variables of the context.
        job = pool.submit(copy_context().run, _copied, source, path, scratch)
        try:
            while not wait([job], _SECONDS).done:
                advance(min(source.bytes / size, 2))
            job.result()
        except BaseException:
            source.ended = True
            raise
    advance(2)


def _copied(source: _Source, path: Path, scratch: Path) -> None:
    """Copy the file of ``source`` to a COG, with GDAL's temporary file in ``scratch``."""
    rasterio = optional("class maps as COG", "rasterio", "errors", "shutil")
    with rasterio.Env(GDAL_CACHEMAX=_GDAL_CACHE, CPL_TMPDIR=str(scratch)):
        with warnings.catch_warnings():  # a class map may have no georeference
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            dataset = rasterio.open(source.path, opener=source.opened)
        with dataset:
            rasterio.shutil.copy(
                dataset,
                path,
                driver="COG",
                compress="deflate",
                overview_resampling="mode",
                bigtiff="if_safer",
            )


class _Source:
    """File that GDAL reads through Python, and how much of it has been read.

    Attributes:
        path: the file.
        bytes: number of bytes that were read; bytes that were read twice count twice.
        ended: True to let all further reads find no bytes, so that GDAL stops with an error.
    """

    def __init__(self, path: Path):
        self.path, self.bytes, self.ended = path, 0, False

    def opened(self, path: str, mode: str = "rb") -> io.FileIO:
        """Open a file for GDAL to read; GDAL also looks for other files beside the source."""
        watched = Path(path).name == self.path.name
        return _WatchedFile(path, self) if watched else io.FileIO(path)


class _WatchedFile(io.FileIO):
    """The file of a :class:`_Source`, open to be read."""

    def __init__(self, path: str, source: _Source):
        super().__init__(path)
        self._source = source

    def read(self, size: int | None = -1) -> bytes:
        """Return up to ``size`` bytes, or none if the source is ended."""
        if self._source.ended:
            return b""
        found = super().read(size) or b""
        self._source.bytes += len(found)
        return found
