"""Read and write safetensors files, with a checksum of each tensor.

The safetensors library reads the files. Its writer is not used for four reasons: it sorts tensors
by name, holds a second copy of all of them, creates files that only their owner may read, and on a
full disk its error names neither the file nor the needed bytes.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distseg.comm.memory_format import as_bytes
from distseg.report.disk import disk_full_errors

# Names of the dtypes in a safetensors file.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] = {},
    note: Callable[[int], None] = lambda count: None,
) -> dict[str, str]:
    """Write tensors to a file, flush it to the disk, and return the checksum of each tensor.

    Tensors on a GPU are copied to the host one at a time.

    Args:
        path: the file.
        tensors: the tensors by name. Those with more bytes per element are written first, such as
            float64 before float32. Otherwise they keep the order of this dict.
        metadata: strings for the header of the file.
        note: a function that is called with the number of bytes of each tensor after it is written.

    Raises:
        OSError: the file cannot be written. If the disk is full, the message names the file, the
            needed bytes and the free bytes.
    """
    # Larger dtypes come first, so that every tensor is aligned to its element size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header, offset = {"__metadata__": dict(metadata)} if metadata else {}, 0
    for name, tensor in ordered.items():
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sums = {}
    with disk_full_errors(path, path, 8 + len(text) + offset), open(path, "wb") as file:
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
    """Yield name, tensor and checksum of the wanted tensors of a file.

    The checksum is computed from the tensor that was read.

    Args:
        path: the file.
        wanted: a function that takes the name of a tensor and returns True to read it. By default
            all tensors are read.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged or of another format.
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
    """Return the names of a file's tensors.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged or of another format.
    """
    for _ in read_tensors(path, lambda name: False):
        pass
    with safe_open(path, "pt") as file:
        return list(file.keys())


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's tensors by name, without reading the tensors.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged or of another format.
    """
    names = names_in(path)
    with safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(as_bytes(tensor.detach().cpu().contiguous()).numpy())


def _checksum(tensor: Tensor, content: memoryview) -> str:
    """Return the CRC-32 of a tensor's dtype, shape and content, in hexadecimal.

    It detects damage, but it is no protection against forgery.
    """
    form = f"{DTYPES[tensor.dtype]} {tuple(tensor.shape)}"
    return f"{zlib.crc32(content, zlib.crc32(form.encode())):08x}"
