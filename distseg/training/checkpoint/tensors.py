"""Files of named tensors in the safetensors format, with a checksum of each tensor.

The library reads them; it does not write them, because its writer sorts by name, holds a second copy of everything, makes
files that only their owner may read, and says of a full disk neither which file nor how much room it wanted.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Callable, Iterator, Mapping

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distseg.comm.memory_format import as_bytes
from distseg.report.disk import room_told

_KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] = {},
    note: Callable[[int], None] = lambda count: None,
) -> dict[str, str]:
    """Write tensors in their order, larger numbers first, and bring them to the disk; returns the checksum of each.

    Args:
        note: told the bytes written, tensor by tensor.

    Raises:
        OSError: naming the file, what it takes and what is free.
    """
    ordered = dict(
        sorted(tensors.items(), key=lambda item: -item[1].element_size())
    )  # so that each lies where its numbers may
    header, offset = {"__metadata__": dict(metadata)} if metadata else {}, 0
    for name, tensor in ordered.items():
        header[name] = {
            "dtype": _KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sums = {}
    with room_told(path, path, 8 + len(text) + offset), open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in ordered.items():
            content = _bytes(tensor)
            sums[name] = _checksum(tensor, content)
            file.write(content)
            note(tensor.nbytes)
        file.flush()
        os.fsync(file.fileno())
    return sums


def read_tensors(
    path: Path, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor, str]]:
    """The wanted tensors of a file, one by one, with their names and checksums.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: damaged, or another format.
    """
    try:
        with safe_open(path, "pt") as file:
            for name in filter(wanted, file.keys()):
                tensor = file.get_tensor(name)
                yield name, tensor, _checksum(tensor, _bytes(tensor))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing") from None
    except (SafetensorError, OSError, OverflowError) as e:
        raise ValueError(f"{path} is damaged or cut off ({e})") from None


def names_in(path: Path) -> list[str]:
    """The names of a file's tensors; errors as of :func:`read_tensors`."""
    for _ in read_tensors(path, lambda name: False):
        pass
    with safe_open(path, "pt") as file:
        return list(file.keys())


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's tensors by name, none of which is read; errors as of :func:`read_tensors`."""
    names = names_in(path)
    with safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(as_bytes(tensor.contiguous()).numpy())


def _checksum(tensor: Tensor, content: memoryview) -> str:
    """CRC-32 of what a tensor is and holds: finds damage, at a gigabyte a second or more; it is no signature."""
    return f"{zlib.crc32(content, zlib.crc32(f'{_KINDS[tensor.dtype]} {tuple(tensor.shape)}'.encode())):08x}"
