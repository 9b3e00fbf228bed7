"""A georeferenced gigapixel from file to file: ``distseg predict`` on a tiled GeoTIFF, with class map and polygons as GIS programs read them.

The image is drawn: smooth hills with noise, in three bands, in a CRS of UTM. A small U-Net learns water, grass and rock from crops of the same kind. Six questions:
what the process takes beyond PyTorch itself (``import torch`` and one convolution, a process of its own) as images grow; how fast it is beside a plain loop over
windows with the same network, halo, tile, precision and threads; what ``distseg trace`` takes for a class map whose objects span the map; what the files take that are written after the last tile; whether a prediction that is interrupted and killed writes the same bytes as one that is not; and
whether rasterio, pyogrio (or geopandas) and, where it is installed, rio-cogeo read the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.harness import parent, repeats_of, report
from benchmarks.ranks import job_environment, last_json
from benchmarks.rows import Rows
from distseg.comm.launch import keep_freed_memory, peak_memory, reset_peak_memory
from distseg.config.sizes import Size
from distseg.data.class_files import FORMS, Classes, form_of, paths_of
from distseg.data.class_map import PartialMap
from distseg.data.formats.readers import open_image
from distseg.data.store.store import StoreWriter
from distseg.layers.graph import receptive_field
from distseg.models.unet import unet
from distseg.tiling.tile import Box, tiles, window
from distseg.training.run_config import load

QUESTION = "In what memory and how fast does a georeferenced gigapixel become a class map and polygons that GIS programs read?"
CLASSES = ("water", "grass", "rock")
PARTS = ("peak", "trace", "files", "plain", "stop")
NETWORK = {"depth": 2, "num_convs": 1, "base_channels": 8, "norm": "batch"}
PLACE = {"crs": "EPSG:32633", "transform": (10.0, 0.0, 4e5, 0.0, -10.0, 5.4e6)}
EDGE = 512  # of the image's TIFF tiles
_WAVES = 12  # that the hills are a sum of
_NOISE = 16  # levels of noise in a band
_ROUGH = 0.03  # noise of the hills where a class map is drawn
_MOST_ENDED = 20  # predictions that may end before they are stopped
# The largest resident memory of the process itself: what exec found before it does not count in VmHWM.
_PEAK = "next(int(line.split()[1]) << 10 for line in open('/proc/self/status') if line.startswith('VmHWM'))"
_TORCH = f"""
import json, torch
torch.set_num_threads({{threads}})
with torch.no_grad():
    torch.nn.Conv2d(3, 8, 3)(torch.zeros(1, 3, 64, 64))
print(json.dumps({{{{"peak": {_PEAK}}}}}))
"""
_DISTSEG = f"""
import atexit, json, sys, time
atexit.register(lambda: print(json.dumps({{"peak": {_PEAK}, "cpu": time.process_time()}}), flush=True))
from distseg.__main__ import main
main()
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(3)])
    parser.add_argument(
        "--sides",
        type=int,
        nargs="*",
        default=[4096, 16384, 32768],
        help="of the images whose peaks are compared (default: %(default)s)",
    )
    parser.add_argument(
        "--side",
        type=int,
        default=8192,
        help="of the image for the plain loop and the interruptions (default: %(default)s)",
    )
    parser.add_argument(
        "--parts", nargs="*", choices=PARTS, default=PARTS, help="(default: %(default)s)"
    )
    parser.add_argument("--memory", default="450MB", help="of the command (default: %(default)s)")
    parser.add_argument(
        "--tile", type=int, default=512, help="of the plain loop and of what is compared with it"
    )
    parser.add_argument(
        "--trace",
        nargs="*",
        default=["water", "rock"],
        choices=CLASSES,
        help="classes of the polygons, none for a class map only: grass is one object across the image (default: %(default)s)",
    )
    parser.add_argument(
        "--kills", type=int, default=5, help="predictions that are stopped (default: %(default)s)"
    )
    parser.add_argument(
        "--stops",
        type=Stop.parse,
        nargs="*",
        default=[],
        metavar="SIGNAL:WHERE",
        help="stops at chosen places instead of --kills at random moments: WHERE is the share of finished tiles such as 0.3, or a file such as cog+5, 5 seconds after the command began it. Example: INT:0.2 KILL:0.6 TERM:0.9 KILL:cog+5 TERM:gpkg+20",
    )
    parser.add_argument(
        "--network", type=json.loads, default=NETWORK, help="(JSON, default: %(default)s)"
    )
    parser.add_argument(
        "--period",
        type=int,
        help=f"side of a drawn square, a multiple of {EDGE}, that larger images repeat; its tiles are in a file once (default: all pixels are drawn)",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--scratch", type=Path, help="folder for images and results, 5 GB a gigapixel"
    )
    parser.add_argument("--job", type=json.loads, help="internal: what a process does")
    options = parser.parse_args(arguments)
    options.formats = "cog,gpkg" if options.trace else "cog"
    torch.set_num_threads(options.threads)
    if options.job:
        print(json.dumps(_JOBS[options.job.pop("name")](**options.job)))
        return
    if options.quick:
        options.sides, options.side, options.tile, options.kills = [128], 128, 64, 1
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="distseg-geo-") as folder:
        bench = Bench(Path(folder), options)
        rows = [bench.peak_of(side) for side in options.sides if "peak" in options.parts]
        rows += [bench.traced(side) for side in options.sides if "trace" in options.parts]
        rows += [bench.files_of(side) for side in options.sides if "files" in options.parts]
        rows += [bench.beside_plain(repeats_of(options))] if "plain" in options.parts else []
        if "stop" in options.parts:
            rows.append(
                bench.stopped_at() if options.stops else bench.interrupted(random.Random(0))
            )
    notes = (
        f"U-Net, {options.network}; uint8 x 3 in deflated tiles of {EDGE}x{EDGE}; formats {options.formats}, polygons of {' and '.join(options.trace) or 'no class'}; "
        f"--memory {options.memory}; {options.threads} thread(s)\n"
        f"beyond: peak of the whole command less {bench.torch / 1e6:.0f} MB of PyTorch alone; Mpx/s: of the whole command, start, COG and polygons included\n"
        f"/ plain: seconds of the whole command, fp32, tiles of {options.tile}x{options.tile}, over those of a loop over the same windows that writes a plain GeoTIFF, neighbours in time; CPU / plain: the same of CPU seconds; differ: pixels of the two class maps"
    )
    parameters = {
        "sides": options.sides, "side": options.side, "tile": options.tile, "memory": options.memory,
        "trace": options.trace, "kills": options.kills, "threads": options.threads, "torch": bench.torch, "network": options.network, "period": options.period, "stops": list(map(str, options.stops)),
    }  # fmt: skip
    report("geo_gigapixel", QUESTION, Rows(rows), options, parameters, notes)
    if not all(row.get("same bytes", True) for row in rows):
        sys.exit(1)


@dataclass(frozen=True)
class Stop:
    """Signal and the place of a prediction at which the command gets it.

    Attributes:
        sign: the signal.
        share: share of the finished tiles; 1 for a stop in a file.
        form: the file that is being written, such as ``cog``; empty for a stop between tiles.
        seconds: the time after the command began the file.
    """

    sign: signal.Signals
    share: float = 1.0
    form: str = ""
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Stop:
        """Return the stop of a text such as ``KILL:0.6`` or ``TERM:gpkg+20``."""
        sign, where = text.split(":")
        form, _, seconds = where.partition("+")
        if form in FORMS:
            return cls(signal.Signals[f"SIG{sign}"], 1.0, form, float(seconds or 0))
        return cls(signal.Signals[f"SIG{sign}"], float(where))

    def __str__(self) -> str:
        place = f"{self.form}+{self.seconds:g}" if self.form else f"{self.share:g}"
        return f"{self.sign.name[3:]}:{place}"

    def reached(self, output: Path, process: int) -> bool:
        """Return True if a process is at this place (``seconds`` apart)."""
        if self.form:  # the temporary file has the number of the process in its name
            return any(output.glob(f".image{FORMS[self.form]}.*-{process}-*.writing"))
        done, tiles = finished(output)
        return tiles > 0 and done >= self.share * tiles


class Bench:
    """A folder with a trained network, images and results."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.folder, self.options = folder, options
        self.run = folder / "run"
        self._train()
        self.torch = self._ran(["-c", _TORCH.format(threads=options.threads)])["peak"]

    def peak_of(self, side: int) -> dict:
        """Predict one image; return its row, after GIS programs have read the results."""
        image = self.image(side)
        output = self.folder / "out"
        start = time.perf_counter()
        peak = self._ran(self._predict(image, output, self.options.formats))["peak"]
        seconds = time.perf_counter() - start
        found = checked(image, output)
        shutil.rmtree(output)
        if side != self.options.side:
            image.unlink()
        return self._said(
            {
                "case": f"{side}x{side}",
                "Mpx/s": side * side / seconds / 1e6,
                "peak [MB]": peak / 1e6,
                "beyond [MB]": (peak - self.torch) / 1e6,
                **found,
            }
        )

    def traced(self, side: int) -> dict:
        """Trace the polygons of all classes of a drawn class map; return its row."""
        path, output = self.folder / "map.tif", self.folder / "traced"
        draw_map(path, side)
        start = time.perf_counter()
        peak = self._ran(
            ["-c", _DISTSEG, "trace", str(path), "--output", str(output), "--formats", "gpkg"]
        )["peak"]
        seconds = time.perf_counter() - start
        count = _vector(output / "map.gpkg")[1]
        shutil.rmtree(output)
        return self._said(
            {
                "case": f"{side}x{side}, trace",
                "Mpx/s": side * side / seconds / 1e6,
                "peak [MB]": peak / 1e6,
                "objects": count,
            }
        )

    def files_of(self, side: int) -> dict:
        """Write the files of a drawn class map, which no network made; return its row."""
        output = self.folder / "files"
        job = {"name": "files", "output": str(output), "side": side}
        job |= {"formats": self.options.formats.split(","), "traced": self.options.trace}
        found = self._ran(["-m", "benchmarks.geo_gigapixel", "--threads", str(self.options.threads), "--job", json.dumps(job)])  # fmt: skip
        checked(output / "place.tif", output)
        shutil.rmtree(output)
        row = {"case": f"{side}x{side}, files"}
        for form, its in found.items():
            row |= {
                f"{form} [s]": its["seconds"],
                f"{form} CPU [s]": its["cpu"],
                f"{form} beyond [MB]": (its["peak"] - self.torch) / 1e6,
                f"{form} file [MB]": its["bytes"] / 1e6,
            }
        return self._said(row)

    def beside_plain(self, repeats: int) -> dict:
        """Predict a plain GeoTIFF, and a COG with polygons, in turns with a plain loop."""
        image, side = self.image(self.options.side), self.options.side
        output, plain = self.folder / "out", self.folder / "plain.tif"
        loop = {
            "name": "plain",
            "run": str(self.run),
            "image": str(image),
            "tile": self.options.tile,
        }
        loop["network"] = self.options.network
        job = ["-m", "benchmarks.geo_gigapixel", "--threads", str(self.options.threads)]
        job += ["--job", json.dumps({**loop, "output": str(plain)})]
        tile = f"{self.options.tile}x{self.options.tile}"
        flags = ["--predict.tile", tile, "--train.precision", "fp32"]
        ratios: dict[str, list[float]] = {"tiff": [], "cog,gpkg": []}
        differ, cpu = 0, []
        for _ in range(repeats):
            base, base_cpu = self._times_of(job)
            for formats, found in ratios.items():
                seconds, seconds_cpu = self._times_of(self._predict(image, output, formats, flags))
                found.append(seconds / base)
                if formats == "tiff":
                    cpu.append(seconds_cpu / base_cpu)
                    differ += _different(plain, output / "image.tif")
                shutil.rmtree(output)
        return self._said(
            {
                "case": f"{side}x{side}, tiff",
                "/ plain": median(ratios["tiff"]),
                "from": min(ratios["tiff"]),
                "to": max(ratios["tiff"]),
                "CPU / plain": median(cpu),
                "with cog, gpkg": median(ratios["cog,gpkg"]),
                "differ": differ,
            }
        )

    def interrupted(self, chance: random.Random) -> dict:
        """Stop a prediction at random moments, by SIGINT and SIGKILL, and compare its bytes.

        A moment is drawn from the time that the command still needs after it wrote first. A command
        that ends before its moment is no stop: its bytes are compared, and the prediction begins
        anew, with earlier moments, until ``--kills`` commands were stopped.

        Raises:
            RuntimeError: almost all commands end before their moments.
        """
        image, side = self.image(self.options.side), self.options.side
        whole, parts = self.folder / "whole", self.folder / "parts"
        seconds = self._seconds(self._predict(image, whole))
        start = self._seconds(self._predict(image, whole))  # everything is there already
        needed, ended, stopped, same = max(seconds - start, 0.1), 0, [], True
        left = needed
        while len(stopped) < self.options.kills:
            sign = (signal.SIGINT, signal.SIGKILL)[len(stopped) % 2]
            moment = chance.uniform(0.1, 0.6) * left
            if self._stopped(self._predict(image, parts), parts, moment, sign):
                stopped.append(f"{sign.name} after {moment:.1f} s")
                left -= moment
                continue
            same = same and _digests(whole) == _digests(parts)
            shutil.rmtree(parts)
            ended += 1
            left = needed / 2**ended
            if ended == _MOST_ENDED:
                raise RuntimeError(
                    f"{ended} predictions ended before they could be stopped, and only "
                    f"{len(stopped)} of {self.options.kills} were stopped: choose a larger --side"
                )
        self._seconds(self._predict(image, parts))
        same = same and _digests(whole) == _digests(parts)
        case = f"{side}x{side}, stopped {len(stopped)} times"
        return self._said(
            {"case": case, "same bytes": same, "stopped": ", ".join(stopped), "ended before": ended}
        )

    def stopped_at(self) -> dict:
        """Stop a prediction at the places of ``--stops`` and compare its bytes; return its row.

        Raises:
            RuntimeError: a command ends before it is at its place.
        """
        image, side = self.image(self.options.side), self.options.side
        whole, parts = self.folder / "whole", self.folder / "parts"
        seconds = self._seconds(self._predict(image, whole))
        self._said({"case": f"{side}x{side}, not stopped", "seconds": seconds})
        places, start = [], time.perf_counter()
        for stop in self.options.stops:
            code = self._stop_at(stop, self._predict(image, parts), parts)
            done, tiles = finished(parts)
            there = [path.name for path in sorted(parts.glob("image.*")) if path.is_file()]
            places.append(f"{stop}: exit {code}, {done} of {tiles} tiles, files {there}")
            print(places[-1], file=sys.stderr, flush=True)
        self._seconds(self._predict(image, parts))
        return self._said(
            {
                "case": f"{side}x{side}, stopped {len(places)} times",
                "same bytes": _digests(whole) == _digests(parts),
                "stopped": "; ".join(places),
                "seconds": seconds,
                "with stops [s]": time.perf_counter() - start,
                "hidden files": sum(path.name[0] == "." for path in parts.rglob("*")),
            }
        )

    def _begun(self, arguments: list[str]) -> subprocess.Popen:
        """Start Python with these arguments; what it prints is dropped."""
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=job_environment(self.options.threads),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _stop_at(self, stop: Stop, arguments: list[str], output: Path) -> int:
        """Send a signal to Python when it is at the place of ``stop``; return its exit code.

        Raises:
            RuntimeError: the command ends before.
        """
        job = self._begun(arguments)
        while job.poll() is None and not stop.reached(output, job.pid):
            time.sleep(0.02)
        with suppress(subprocess.TimeoutExpired):
            job.wait(stop.seconds)
        if job.poll() is not None:
            raise RuntimeError(f"a prediction ended before {stop}: stop it earlier")
        job.send_signal(stop.sign)
        return job.wait()

    def _stopped(
        self, arguments: list[str], output: Path, seconds: float, sign: signal.Signals
    ) -> bool:
        """Send a signal to Python some seconds after it first changes a file in ``output``.

        Return False if Python ended by itself.
        """
        before = _times(output)
        job = self._begun(arguments)
        while job.poll() is None and _times(output) == before:
            time.sleep(0.02)
        try:
            job.wait(seconds)
            return False
        except subprocess.TimeoutExpired:
            job.send_signal(sign)
            return job.wait() != 0

    def image(self, side: int) -> Path:
        """Return the image of this side, which is drawn if it is not there."""
        path = self.folder / str(side) / "image.tif"
        if not path.exists():
            path.parent.mkdir()
            draw_image(path, side, self.options.period)
        return path

    def _predict(
        self,
        image: Path,
        output: Path,
        formats: str = "cog,gpkg",
        flags: Sequence[str] | None = None,
    ) -> list[str]:
        """Return the arguments of Python for ``distseg predict``."""
        trace = (
            ["--predict.trace", f"[{','.join(self.options.trace)}]"] if "gpkg" in formats else []
        )
        flags = ["--memory", self.options.memory] if flags is None else flags
        return [
            "-c", _DISTSEG, "predict", str(self.run), "--images", str(image), "--output", str(output),
            "--predict.formats", f"[{formats}]", *trace, *flags, "--run.threads", str(self.options.threads),
        ]  # fmt: skip

    def _train(self) -> None:
        side = 64 if self.options.quick else 512
        with StoreWriter(self.folder / "store.h5", CLASSES, ("red", "green", "blue")) as writer:
            for split, corner in (("train", 0), ("val", side)):
                pixels, labels = drawn(Box((corner, corner), (corner + side, corner + side)))
                target = writer.add_image(split, (side, side), np.uint8, split, labels=True)
                target.write(Box.whole((side, side)), pixels, labels)
        flags = [f"--model.{name}={value}" for name, value in self.options.network.items()]
        self._ran([
            "-c", _DISTSEG, "train", "--data.store", str(self.folder / "store.h5"), *flags, "--data.crop", f"{side // 4}x{side // 4}",
            "--train.epochs", "1" if self.options.quick else "30", "--data.images", "4", "--optim.lr", "0.01", "--train.output", str(self.run),
            "--run.threads", str(self.options.threads),
        ])  # fmt: skip

    def _ran(self, arguments: list[str]) -> dict:
        """Run Python to its end; return the peak and the CPU seconds that it prints."""
        done = subprocess.run(
            [sys.executable, *arguments],
            env=job_environment(self.options.threads),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(
                f"{arguments[1:]} ended with {done.returncode}:\n{done.stderr}{done.stdout}"
            )
        return last_json(done.stdout)

    def _times_of(self, arguments: list[str]) -> tuple[float, float]:
        """Run Python to its end; return its seconds and its CPU seconds."""
        start = time.perf_counter()
        cpu = self._ran(arguments)["cpu"]
        return time.perf_counter() - start, cpu

    def _seconds(self, arguments: list[str]) -> float:
        return self._times_of(arguments)[0]

    def _said(self, row: dict) -> dict:
        print(row, file=sys.stderr, flush=True)
        return row


def hills(box: Box) -> np.ndarray:
    """Return the height of the endless image's hills in a box, (*size), about -1 to 1."""
    random_ = np.random.default_rng(0)
    lengths = random_.uniform(60, 900, (2, _WAVES))  # pixels of a wave
    phases = random_.uniform(0, 2 * np.pi, (2, _WAVES))
    y, x = (
        np.sin(2 * np.pi * np.arange(a, b)[:, None] / length + phase).astype(np.float32)
        for a, b, length, phase in zip(box.start, box.stop, lengths, phases)
    )
    return y @ x.T / np.sqrt(_WAVES)


def classes(heights: np.ndarray) -> np.ndarray:
    """Return the class of each height, uint8."""
    return (heights > -0.2).astype(np.uint8) + (heights > 0.4)


def drawn(box: Box) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (3, *size) uint8 and labels (*size) uint8 of a box of the endless image."""
    height = hills(box)
    noise = np.random.default_rng(box.start).integers(0, _NOISE, (3, *box.size), np.uint8)
    bands = [np.clip(128 + slope * height, 0, 255 - _NOISE) for slope in (60, -40, 90)]
    return np.stack(bands).astype(np.uint8) + noise, classes(height)


def rough(box: Box) -> np.ndarray:
    """Return the classes of a box of the endless image, with borders as rough as a network's."""
    noise = np.random.default_rng(box.start).random(box.size, np.float32)
    return classes(hills(box) + _ROUGH * noise)


def draw_image(path: Path, side: int, period: int | None = None) -> None:
    """Write a tiled GeoTIFF, rows of tiles at a time.

    Args:
        path: the file.
        side: side of the image.
        period: side of the square that the image repeats; None for an image without repetition.
    """
    import rasterio

    if period is not None and period < side:
        draw_image(path, period)
        repeat(path, period // EDGE, side)
        return
    with rasterio.Env(GDAL_CACHEMAX=64), rasterio.open(
        path, "w", driver="GTiff", width=side, height=side, count=3, dtype="uint8", tiled=True, blockxsize=EDGE, blockysize=EDGE,
        compress="deflate", zlevel=1, interleave="pixel", bigtiff="if_safer", crs=PLACE["crs"], transform=rasterio.Affine(*PLACE["transform"]),
    ) as file:  # fmt: skip
        for box in _cells(side, EDGE * 4):
            (top, left), (bottom, right) = box.start, box.stop
            pixels, _ = drawn(box)
            file.write(
                pixels, window=rasterio.windows.Window(left, top, right - left, bottom - top)
            )


def repeat(path: Path, tiles: int, side: int) -> None:
    """Enlarge a square TIFF to ``side`` pixels a side; its tiles, ``tiles`` a side, repeat.

    The directory of the enlarged image refers to each tile of the file many times.
    """
    import tifffile

    at = np.arange(-(-side // EDGE)) % tiles
    again = (at[:, None] * tiles + at).ravel()
    with tifffile.TiffFile(path, mode="r+b") as file:
        tags = file.pages.first.tags
        for name in ("TileOffsets", "TileByteCounts"):
            tags[name].overwrite(np.array(tags[name].value)[again].tolist())
        for name in ("ImageWidth", "ImageLength"):
            tags[name].overwrite(side, dtype="I")  # uint32: GDAL wrote uint16


def draw_map(path: Path, side: int) -> None:
    """Write a tiled GeoTIFF of the classes, with borders as rough as a network's.

    Grass, and often the other classes too, is an object across the map.
    """
    import rasterio

    with rasterio.Env(GDAL_CACHEMAX=64), rasterio.open(
        path, "w", driver="GTiff", width=side, height=side, count=1, dtype="uint8", tiled=True, blockxsize=EDGE, blockysize=EDGE,
        compress="deflate", zlevel=1, bigtiff="if_safer", crs=PLACE["crs"], transform=rasterio.Affine(*PLACE["transform"]),
    ) as file:  # fmt: skip
        for box in _cells(side, EDGE * 4):
            (top, left), (bottom, right) = box.start, box.stop
            window_ = rasterio.windows.Window(left, top, right - left, bottom - top)
            file.write(rough(box), 1, window=window_)


def _cells(side: int, edge: int) -> Iterator[Box]:
    for top in range(0, side, edge):
        for left in range(0, side, edge):
            yield Box((top, left), (min(top + edge, side), min(left + edge, side)))


def checked(image: Path, output: Path) -> dict:
    """Compare the georeference of the results with the image's, and validate them.

    Raises:
        ValueError: a transform or CRS differs, polygons lie outside of the image, or the COG is not one.
    """
    import rasterio

    found = {}
    with rasterio.open(image) as given, rasterio.open(output / "image.cog.tif") as cog:
        if (given.transform, given.crs, given.shape) != (cog.transform, cog.crs, cog.shape):
            raise ValueError(
                f"the COG has {cog.transform} in {cog.crs}, but the image {given.transform} in {given.crs}"
            )
        bounds, crs = given.bounds, given.crs
    try:
        from rio_cogeo import cog_validate
    except ImportError:
        found["rio cogeo"] = "not installed"
    else:
        valid, errors, warnings = cog_validate(output / "image.cog.tif", quiet=True)
        if not valid or warnings:
            raise ValueError(f"rio cogeo validate: {errors} {warnings}")
        found["rio cogeo"] = "valid"
    if not (output / "image.gpkg").exists():
        return found
    reader, count, covered, its_crs = _vector(output / "image.gpkg")
    inside = (
        bounds.left <= covered[0] < covered[2] <= bounds.right
        and bounds.bottom <= covered[1] < covered[3] <= bounds.top
    )
    if rasterio.crs.CRS.from_user_input(its_crs) != crs or not inside:
        raise ValueError(
            f"{reader}: polygons cover {covered} in {its_crs}, but the image {bounds} in {crs}"
        )
    found["objects"], found["read by"] = count, f"rasterio, {reader}"
    return found


def _vector(path: Path) -> tuple[str, int, np.ndarray, str]:
    """Return the reader's name, the number of objects, their bounds and their CRS."""
    try:
        import geopandas
    except ImportError:
        import pyogrio

        about = pyogrio.read_info(path, layer="objects")
        return "pyogrio", about["features"], np.array(about["total_bounds"]), about["crs"]
    frame = geopandas.read_file(path, layer="objects")
    return "geopandas", len(frame), frame.total_bounds, frame.crs.to_wkt()


def _plain(run: str, image: str, tile: int, output: str, network: dict) -> dict:
    """Predict as a user would by hand: windows with the exact halo, read and written by rasterio."""
    import rasterio
    from rasterio.windows import Window

    module = load(run)
    reach = receptive_field(unet(in_channels=3, out_channels=len(CLASSES), **network))
    with rasterio.open(image) as given, torch.no_grad():
        size = given.shape
        grid = Size(-(-n // tile) for n in size)
        profile = {**given.profile, "count": 1, "compress": "deflate", "interleave": "band"}
        with rasterio.open(output, "w", **profile) as target:
            for own in tiles(size, grid, reach.stride):
                seen = window(own, size, reach)
                (top, left), (bottom, right) = seen.start, seen.stop
                pixels = given.read(window=Window(left, top, right - left, bottom - top))
                logits = module(torch.from_numpy(pixels)[None].float())[0]
                inner = tuple(
                    slice(a - b, c - b) for a, b, c in zip(own.start, seen.start, own.stop)
                )
                (top, left), (height, width) = own.start, own.size
                target.write(
                    logits[(slice(None), *inner)].argmax(0).byte().numpy(),
                    1,
                    window=Window(left, top, width, height),
                )
    return {"cpu": time.process_time()}


def _files(output: str, side: int, formats: list[str], traced: list[str]) -> dict:
    """Write the files of a drawn class map as ``distseg predict`` does after the last tile.

    Return the seconds, the CPU seconds, the peak of the process and the bytes of each file.
    """
    import rasterio

    folder, found = Path(output), {}
    folder.mkdir()
    with rasterio.open(
        folder / "place.tif", "w", driver="GTiff", width=side, height=side, count=1, dtype="uint8",
        sparse_ok=True, tiled=True, bigtiff="if_safer", crs=PLACE["crs"], transform=rasterio.Affine(*PLACE["transform"]),
    ):  # fmt: skip
        pass
    place = open_image(folder / "place.tif").place
    numbers = tuple(map(CLASSES.index, traced))
    about = Classes(list(CLASSES), np.zeros((len(CLASSES), 3), np.uint8), 255, place, numbers)

    class Timed(PartialMap):
        def _write_file(self, path, *about):
            reset_peak_memory(torch.device("cpu"))
            start, cpu = time.perf_counter(), time.process_time()
            super()._write_file(path, *about)
            found[form_of(path)] = {
                "seconds": time.perf_counter() - start,
                "cpu": time.process_time() - cpu,
                "peak": peak_memory(torch.device("cpu")),
                "bytes": path.stat().st_size,
            }

    cells = list(_cells(side, EDGE * 4))
    partial = Timed(folder / "image.partial", "drawn", (side, side), cells)
    keep_freed_memory()
    for number, box in enumerate(cells):
        partial.write(number, rough(box))
    partial.pack(paths_of(folder, "image", formats, (side, side), False), about)
    return found


_JOBS = {"plain": _plain, "files": _files}


def _different(one: Path, other: Path) -> int:
    """Return in how many pixels two class maps differ."""
    import rasterio

    with closing(rasterio.open(one)) as a, closing(rasterio.open(other)) as b:
        return sum(
            int((a.read(1, window=window_) != b.read(1, window=window_)).sum())
            for _, window_ in a.block_windows(1)
        )


def finished(output: Path) -> tuple[int, int]:
    """Return how many tiles of an unfinished prediction are recorded, and how many there are."""
    try:
        record = np.fromfile(output / "image.partial" / "done", np.uint64)
    except FileNotFoundError:
        return 0, 0
    return np.count_nonzero(record), len(record)


def _times(folder: Path) -> list[int]:
    """Return when each file in a folder was last changed, in nanoseconds."""
    found = []
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):
            found.append(path.stat().st_mtime_ns)
    return found


def _digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file in a folder.

    Hidden files are left out: a killed command may leave one, which a later command removes.
    """
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name[0] != "."):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            for block in iter(partial(file.read, 1 << 20), b""):
                digest.update(block)
        found[os.path.relpath(path, folder)] = digest.hexdigest()
    return found


if __name__ == "__main__":
    main()
