"""Image files that are damaged or made to do harm: one clear error that names the file, at once, whatever their headers promise."""

import io
import os
import resource
import struct
import zlib

import numpy as np
import pytest
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from distseg.data.formats import plausible, readers
from distseg.data.formats.readers import open_image, open_mask
from distseg.data.prepare import prepare_folder
from distseg.tiling.tile import Box

RANDOM = np.random.default_rng(0)
RGB = RANDOM.integers(0, 256, (45, 61, 3)).astype(np.uint8)
STACK = RANDOM.integers(0, 60000, (5, 45, 61)).astype(np.uint16)


def coded(write, *arguments, **options) -> bytes:
    file = io.BytesIO()
    write(file, *arguments, **options)
    return file.getvalue()


def png(width, height, data=b"", depth=8, colour=2, chunks=()):
    def chunk(kind, content):
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + b"".join(chunk(*c) for c in chunks)
        + chunk(b"IDAT", zlib.compress(data))
        + chunk(b"IEND", b"")
    )


def npy(shape, dtype="<f4", data=b""):
    head = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + data


def tiff(
    tags: dict[int, tuple[int, tuple]], following: int = 0, data: bytes = b"", pages: int = 1
) -> bytes:
    """Little-endian pages one after another with the same tags, (type, values) each; the last one leads to byte ``following``."""
    sizes = {3: "H", 4: "I"}
    length = 2 + 12 * len(tags) + 4
    out, far_at = b"II*\0" + struct.pack("<I", 8), 8 + pages * length
    far = b""
    for page in range(pages):
        out += struct.pack("<H", len(tags))
        for tag, (kind, values) in sorted(tags.items()):
            packed = struct.pack(f"<{len(values)}{sizes[kind]}", *values)
            if len(packed) > 4:
                packed, far = struct.pack("<I", far_at + len(far)), far + packed
            out += struct.pack("<HHI", tag, kind, len(values)) + packed.ljust(4, b"\0")
        out += struct.pack("<I", following if page == pages - 1 else 8 + (page + 1) * length)
    return (out + far).ljust(512 * bool(data), b"\0") + data


def page(width, height, compression=8, tile=None, offsets=(8,), counts=(10,), **more):
    tags = {
        256: (4, (width,)),
        257: (4, (height,)),
        258: (3, (8,)),
        259: (3, (compression,)),
        262: (3, (1,)),
        277: (3, (1,)),
    }
    if tile:
        return tags | {
            322: (4, (tile[1],)),
            323: (4, (tile[0],)),
            324: (4, offsets),
            325: (4, counts),
        }
    return tags | {273: (4, offsets), 278: (4, (more.get("rows", height),)), 279: (4, counts)}


HUGE = 1 << 30
BOMB = zlib.compress(bytes(300 << 20), 9)  # 300 MB in 300 kB
HOSTILE = {
    "a PNG of 2^60 pixels": ("a.png", png(HUGE, HUGE), "says that it has 1073741824x1073741824 pixels, .*, but a file of .* bytes holds at most"),
    "a PNG of 2^31 pixels": ("a.png", png(1 << 16, 1 << 15, bytes(100)), "says that it has 32768x65536 pixels, 17.2 Gb|says that it has .* holds at most"),
    "a PNG that is cut": ("a.png", png(100, 100, bytes(1000)), "a.png cannot be read as an image"),
    "a PNG with a bomb for a text": ("a.png", png(61, 45, chunks=[(b"zTXt", b"Comment\0\0" + BOMB)]), "a.png cannot be read as an image .*(too large|[dD]ecompress)"),
    "a PNG with a bomb for a profile": ("a.png", png(61, 45, chunks=[(b"iCCP", b"p\0\0" + BOMB)]), "a.png cannot be read as an image"),
    "a JPEG of 2^32 pixels": ("a.jpg", None, "says that it has 65535x65535 pixels"),
    "a BMP of 2^60 pixels": ("a.bmp", coded(Image.fromarray(RGB).save, format="bmp"), "says that it has .* holds at most"),
    "EPS under another name": ("a.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n", "a.png cannot be read as an image"),
    "a PDF under another name": ("a.jpg", b"%PDF-1.4\n", "a.jpg cannot be read as an image"),
    "a npy of 2^60 numbers": ("a.npy", npy((HUGE, HUGE)), "its header says that it holds 1073741824x1073741824 numbers of float32, 4611686018427387904 bytes, but the file has 0"),
    "a npy whose bytes are 2^64": ("a.npy", npy((1 << 32, 1 << 32), "<u1"), "18446744073709551616 bytes, but the file has 0"),
    "a npy of less than nothing": ("a.npy", npy((-4, 10)), "a.npy cannot be read as an image"),
    "a npy of objects": ("a.npy", npy((4, 4), "|O", bytes(200)), "a.npy holds object"),
    "a npy of texts": ("a.npy", npy((4, 4), "<U5", bytes(2000)), "a.npy holds <U5"),
    "a npy of complex numbers": ("a.npy", npy((4, 4), "<c8", bytes(2000)), "a.npy holds complex64"),
    "a npz under another name": ("a.npy", coded(np.savez, a=RGB), "a.npy cannot be read as an image"),
    "a TIFF of 2^60 pixels": ("a.tif", tiff(page(HUGE, HUGE)), "a.tif"),
    "a TIFF of 2^60 pixels that are not packed": ("a.tif", tiff(page(HUGE, HUGE, 1, counts=(1 << 31,))), "a.tif"),
    "a TIFF with one tile of 2^60 pixels": ("a.tif", tiff(page(HUGE, HUGE, tile=(HUGE, HUGE))), "a.tif: a strip or tile of 1073741824x1073741824 pixels is decoded at once"),
    "a TIFF with too few tiles": ("a.tif", tiff(page(60000, 60000, tile=(256, 256))), "are in 55225 strips or tiles, but it lists 1"),
    "a TIFF whose tile is a bomb": (
        "a.tif", tiff(page(256, 256, tile=(256, 256), offsets=(512,), counts=(len(BOMB),)), data=BOMB), "bytes in the file",
    ),
    "a TIFF whose tile unpacks to more": (
        "a.tif", tiff(page(512, 512, tile=(512, 512), offsets=(512,), counts=(len(BOMB),)), data=BOMB), "should unpack to 262144 bytes, but unpacks to more",
    ),
    "a TIFF that is packed closer than can be": ("a.tif", tiff(page(6000, 6000, offsets=(512,), counts=(50,)), data=bytes(300)), "has 50 bytes in the file"),
    "a TIFF whose pages run in a circle": ("a.tif", tiff(page(8, 8, 1, offsets=(8,), counts=(64,)), following=8), "its list of pages runs in a circle, back to byte 8"),
    "a TIFF with a large circle": ("a.tif", tiff(page(8, 8, 1, offsets=(8,), counts=(64,)), following=8, pages=150), "runs in a circle"),
    "a TIFF whose no data is not a number": ("a.tif", coded(tifffile.imwrite, RGB[..., 0], extratags=[(42113, 2, 0, "none", True)]), "in its tag, the number that stands for no data must be a number .* got 'none'"),
    "a TIFF with nothing behind its header": ("a.tif", b"II*\0\x08\0\0\0", "a.tif cannot be read as an image"),
}  # fmt: skip


def content(name: str, data: bytes | None) -> bytes:
    if name == "a.jpg" and data is None:
        data = bytearray(coded(Image.fromarray(RGB).save, format="jpeg"))
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = b"\xff\xff\xff\xff"
    if name == "a.bmp":
        data = bytearray(data)
        data[18:26] = struct.pack("<ii", HUGE, HUGE)
    return bytes(data)


@pytest.fixture
def little_memory():
    """No more than 250 MB beyond what this process has mapped."""
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (250 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_made_to_do_harm(tmp_path, kind, little_memory):
    name, data, words = HOSTILE[kind]
    path = tmp_path / name
    path.write_bytes(content(name, data))
    with pytest.raises(ValueError, match=words) as found:
        reader = open_image(path)
        reader.read(Box((0,) * len(reader.size), tuple(min(n, 300) for n in reader.size)))
    assert str(path) in str(found.value)


def test_ghostscript_is_not_reached(tmp_path, monkeypatch):
    from PIL import EpsImagePlugin

    monkeypatch.setattr(
        EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was called")
    )
    for suffix in readers.SUFFIXES:
        path = tmp_path / f"a{suffix}"
        path.write_bytes(HOSTILE["EPS under another name"][1])
        for opened in (open_image, open_mask):
            with pytest.raises(
                ValueError, match=f"a{suffix} cannot be read as an image|a{suffix} is beyond Pillow"
            ):
                opened(path)


def test_a_large_image_of_one_colour_is_believed(tmp_path):
    """In as few bytes as deflate can do with."""
    Image.new("1", (16000, 4000)).save(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size < 8_000_000 / 1000
    reader = open_image(tmp_path / "a.png")
    assert reader.size == (4000, 16000) and reader.bands == 1


def test_what_does_not_fit_into_memory_is_told_before_it_is_decoded(tmp_path, monkeypatch):
    Image.fromarray(RGB).save(tmp_path / "a.png")
    monkeypatch.setattr(plausible, "free_memory", lambda: 10_000)
    with pytest.raises(
        ValueError,
        match="a.png: its 45x61 pixels are decoded at once, which takes 11 kB of memory, but 10 kB are free: convert it to tiled TIFF or npy",
    ):
        open_image(tmp_path / "a.png")


def test_free_memory_is_what_the_tightest_limit_leaves(tmp_path, monkeypatch):
    """A job's control group inside another; files in the page cache make room."""
    outer, inner = tmp_path / "slurm", tmp_path / "slurm/job"
    inner.mkdir(parents=True)
    for group, limit, used, cached in (
        (outer, "9000000", 5_000_000, 1_000_000),
        (inner, "max", 4_000_000, 0),
        (tmp_path, "max", 1, 0),
    ):
        (group / "memory.max").write_text(limit + "\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\n")
    read = plausible.Path.read_text
    monkeypatch.setattr(plausible, "_CGROUPS", tmp_path)
    monkeypatch.setattr(
        plausible.Path,
        "read_text",
        lambda path: "0::/slurm/job\n" if str(path) == "/proc/self/cgroup" else read(path),
    )
    assert plausible.free_memory() == 5_000_000
    (inner / "memory.max").write_text("4100000\n")
    assert plausible.free_memory() == 100_000


def test_a_store_that_the_disk_has_no_room_for_is_told_before_it_is_begun(tmp_path, monkeypatch):
    (tmp_path / "i").mkdir()
    with open(tmp_path / "i/a.npy", "wb") as file:
        file.write(npy((1 << 20, 1 << 16), "|u1"))
        file.truncate(file.tell() + (1 << 36))  # a hole
    monkeypatch.setattr("distseg.report.disk.free_bytes", lambda path: 1 << 35)
    with pytest.raises(
        OSError,
        match="s.h5 has too little space for the pixels of the store: it takes 68.7 GB, 34.4 GB are free",
    ):
        prepare_folder(tmp_path / "i", None, tmp_path / "s.h5", ["x", "y"], splits=(1, 0, 0))
    assert [p.name for p in tmp_path.iterdir()] == ["i"]


# bytes changed at random

SEEDS = {
    "a.png": coded(Image.fromarray(RGB).save, format="png"),
    "palette.png": coded(Image.fromarray(RGB[..., 0]).convert("P").save, format="png"),
    "a.jpg": coded(Image.fromarray(RGB).save, format="jpeg"),
    "progressive.jpg": coded(Image.fromarray(RGB).save, format="jpeg", progressive=True),
    "a.webp": coded(Image.fromarray(RGB).save, format="webp", lossless=True),
    "a.bmp": coded(Image.fromarray(RGB).save, format="bmp"),
    "mapped.tif": coded(tifffile.imwrite, STACK[0]),
    "tiles.tif": coded(
        tifffile.imwrite,
        RGB,
        photometric="rgb",
        compression="zlib",
        tile=(16, 32),
        extratags=[(42113, 2, 0, "0", True)],
    ),
    "pages.tif": coded(tifffile.imwrite, STACK, metadata={"axes": "ZYX"}, compression="zlib"),
    "big.tif": coded(tifffile.imwrite, STACK, bigtiff=True, compression="zlib"),
    "lzw.tif": coded(Image.fromarray(RGB).save, format="tiff", compression="tiff_lzw"),
    "a.npy": coded(np.save, STACK),
}
NUMBERS = [0, 1, 0x7F, 0xFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF]


@st.composite
def changed(draw, data: bytes) -> bytes:
    """Bits flipped, numbers written over, pieces copied, ends cut off; half of it in the first bytes, where headers are."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.one_of(st.integers(0, min(300, len(data) - 1)), st.integers(0, len(data) - 1)))
        how = draw(st.sampled_from(["flip", "number", "copy", "cut"]))
        if how == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "number":
            data[at : at + 4] = draw(st.sampled_from(NUMBERS)).to_bytes(
                4, draw(st.sampled_from(["big", "little"]))
            )
        elif how == "copy":
            start = draw(st.integers(0, len(data) - 1))
            data[at : at + 8] = data[start : start + 8]
        else:
            data = data[: max(2, at)]
    return bytes(data)


@pytest.mark.parametrize("name", SEEDS)
@settings(
    max_examples=40,
    deadline=4000,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_bytes_changed_at_random(tmp_path, little_memory, name, data):
    """Read, or refused with the name of the file, within seconds and without much memory."""
    path = tmp_path / name
    path.write_bytes(data.draw(changed(SEEDS[name])))
    for opened in (open_image, open_mask):
        try:
            reader = opened(path)
            box = Box((0,) * len(reader.size), tuple(min(n, 200) for n in reader.size))
            assert reader.read(box).shape == (reader.bands, *box.size)
        except ValueError as e:
            assert str(path) in str(e)
    os.unlink(path)
