"""Check the size in an image's header before memory is reserved for it.

A file must have enough bytes for the size that its header declares, and memory must hold it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from distseg.config.sizes import Size
from distseg.config.units import si

# Largest possible number of bytes of pixels per byte of a file. Deflate's longest match, 258 bytes,
# takes two bits. A JPEG takes at least one bit for 64 pixels of a band with Huffman coding;
# arithmetic coding, which few files have, can take less.
MOST_PACKED = {"PNG": 1032, "JPEG": 8 * 64 * 64, "MPO": 8 * 64 * 64, "BMP": 1032}
_CGROUPS = Path("/sys/fs/cgroup")


def check_bytes(path: Path, size, pixel_bits: int, packed: int) -> None:
    """Refuse an image whose file has too few bytes for its size.

    Args:
        path: the file.
        size: the size of the image in its header.
        pixel_bits: number of bits of a pixel, all bands together, or a lower bound of it.
        packed: largest possible number of bytes of pixels per byte of the file.

    Raises:
        ValueError: the file is too small; the message names the declared size, and the largest
            size that the file can hold.
    """
    stored, claimed = os.path.getsize(path), -(-Size(size).volume * pixel_bits // 8)
    if claimed > stored * packed:
        raise ValueError(
            f"{path} says that it has {Size(size)} pixels, {si(claimed, 'B')}, but a file of "
            f"{stored} bytes holds at most {si(stored * packed, 'B')}, so it is damaged or no "
            "image: copy it again, or remove it"
        )


def check_memory(path: Path, what: str, needed: int) -> None:
    """Refuse to decode an image that does not fit into memory.

    Args:
        path: the file.
        what: the subject and verb of the message, such as ``its 97x131 pixels are``.
        needed: bytes of memory for decoding.

    Raises:
        ValueError: too few bytes are free; the message names the needed and the free bytes.
    """
    if needed > (free := free_memory()):
        raise ValueError(
            f"{path}: {what} decoded at once, which takes {si(needed, 'B')} of memory, but "
            f"{si(free, 'B')} are free: "
            "convert it to tiled TIFF or npy, which are read in parts"
        )


def free_memory() -> int:
    """Return how many bytes of memory this process may still use.

    This is the smallest of the free memory of the machine, of the process's control groups (its
    job), and of the process's own limit.
    """
    return min(_of_machine(), _of_job(), _of_process())


def _of_machine() -> int:
    try:
        known = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(known["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 1 << 62


def _of_job() -> int:
    """Return how many bytes of memory the limits of this process's control groups leave free.

    Inactive files in the page cache count as free. Without a limit the result is a huge number.
    """
    return min([left for group in _groups() if (left := _of_group(*group)) is not None] + [1 << 62])


def memory_limit() -> int:
    """Return the bytes of memory of this machine, or the limit of this process's job if lower.

    The job's limit is that of the process's control groups. Unlike :func:`free_memory`, the number
    does not depend on what runs at the moment.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group, most, *_ in _groups():
        with suppress(OSError, ValueError):  # "max": no limit
            limits.append(int((group / most).read_text()))
    return min(limits)


def _groups() -> Iterator[tuple[Path, str, str, str]]:
    """Yield where the kernel says how much memory each control group of this process may use.

    The control groups above these are included. For each, the result is (folder, limit, use,
    cache). ``limit`` and ``use`` are the names of the files in the folder that hold the limit and
    the use of memory in bytes. ``cache`` is the name of the line in the file ``memory.stat`` that
    holds the bytes of inactive files in the page cache.
    """
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        lines = []
    for _, controllers, path in lines:
        if controllers == "":
            top, names = _CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = (
                _CGROUPS / "memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        folder = top / path.lstrip("/")
        yield from (
            (group, *names) for group in (folder, *folder.parents) if group.is_relative_to(top)
        )


def _of_group(group: Path, most: str, used: str, cached: str) -> int | None:
    try:
        limit = int((group / most).read_text())
        known = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - int((group / used).read_text()) + int(known.get(cached, 0)))
    except (OSError, ValueError):  # "max": no limit
        return None


def _of_process() -> int:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return 1 << 62
    return max(
        0, limit - int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    )
