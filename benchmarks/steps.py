"""One optimizer step as a case, distseg's or plain PyTorch's; as a program, the seconds of a step on the ranks of a job.

    python -m benchmarks.steps --tiles 1x2 --size 768x768 --depth 3      # usually through harness.run_ranks

Data lie in memory in the step's dtype and memory format, so that a case is forward, backward, gradient norm and update.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from distseg.comm.launch import keep_freed_memory, peak_memory, world
from distseg.comm.mesh import Mesh
from distseg.config.settings import Config, DataConfig, MeshConfig, ModelConfig, SpatialConfig
from distseg.config.sizes import Size
from distseg.layers import conv
from distseg.models.capture.capture import as_network
from distseg.models.zoo import build_model
from distseg.runtime.optimizer import make_optimizer
from distseg.runtime.own_part import autocast, place_model
from distseg.tiling.tile import owned_tiles
from distseg.tiling.tile_batch import TileBatch
from distseg.training.engine import Engine
from distseg.training.verify import RandomImages

CLASSES = 3
_DISTURBED = 0.05  # of a step's time: processor time that others took meanwhile
_TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Setting:
    """What a step works on: images of ``size``, one a sample group, and a U-Net of the paper's form, or ``model``, a function ``package.module:function``."""

    size: Size = Size((256, 256))
    depth: int = 4
    num_convs: int = 2
    base_channels: int = 32
    norm: str = "instance"
    dropout: float = 0.1
    precision: str = "fp32"
    channels_last: bool = False
    samples: int = 1
    tiles: Size = Size((1, 1))
    exchange_every: str = "all"
    model: str = "unet"

    def config(self, reducer: str = "auto") -> Config:
        model = ModelConfig(self.model, in_channels=4, out_channels=CLASSES) if ":" in self.model else ModelConfig(
            depth=self.depth, num_convs=self.num_convs, base_channels=self.base_channels, in_channels=4, out_channels=CLASSES,
            norm=self.norm, dropout=self.dropout,
        )  # fmt: skip
        return Config(
            model=model,
            mesh=MeshConfig(self.samples, self.tiles, reducer=reducer),
            data=DataConfig(images=1),
            spatial=SpatialConfig(exchange_every=self.exchange_every),
        )

    def as_dict(self) -> dict:
        return {
            name: str(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


def distributed_step(
    setting: Setting, comm=None, reducer: str = "auto", device=torch.device("cpu")
) -> tuple[Callable[[], float], Engine]:
    """distseg's step on the ranks of ``comm`` (by default this one)."""
    config = setting.config(reducer)
    mesh = Mesh(comm or world(), setting.samples, setting.tiles)
    engine = Engine(
        config,
        mesh,
        as_network(build_model(config.model)),
        setting.size,
        device,
        precision=setting.precision,
        channels_last=setting.channels_last,
    )
    images = RandomImages(setting.size, 4, CLASSES, config.loss)
    pieces = [
        engine.to_device(p)
        for p in images.mine([mesh.sample], setting.tiles, (1, 1), mesh.tile, engine.reading)
    ]

    def step() -> float:
        loss = engine.backward([[TileBatch(p.pixels, p.labels, p.place) for p in pieces]])
        engine.update(1e-3)
        return loss

    return step, engine


def plain_step(setting: Setting, device=torch.device("cpu")) -> Callable[[], float]:
    """The same step as a PyTorch user writes it: the same layers, loss, optimizer, dtype and memory format."""
    config = setting.config()
    model = build_model(config.model).train()
    place_model(model, device, setting.precision, setting.channels_last)
    parameters = list(model.parameters())
    optimizer = make_optimizer(config.optim, dict(model.named_parameters()))
    cast = autocast(setting.precision, device)
    x, labels = RandomImages(setting.size, 4, CLASSES, config.loss).whole(0)
    labels = labels.to(device)
    x = (
        x.float()[None]
        .to(device)
        .contiguous(
            memory_format=torch.channels_last if setting.channels_last else torch.contiguous_format
        )
    )

    def step() -> float:
        optimizer.zero_grad()
        with cast():
            logits = model(x)
        loss = F.cross_entropy(logits.float(), labels[None], ignore_index=config.loss.ignore_index)
        loss.backward()
        torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()
        optimizer.step()
        return loss.item()

    return step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, value in asdict(Setting()).items():
        kind = Size if isinstance(value, tuple) else type(value)
        flag = {"action": "store_true"} if kind is bool else {"type": kind, "default": value}
        parser.add_argument(f"--{name}", **flag)


def arguments_of(setting: Setting) -> list[str]:
    """The command line that :func:`main` reads back."""
    given = ["-m", "benchmarks.steps"]
    for name, value in setting.as_dict().items():
        given += [f"--{name}"] * value if isinstance(value, bool) else [f"--{name}", str(value)]
    return given


def timed(
    step: Callable[[], float],
    comm,
    steps: int,
    patience: float,
    before_step: Callable[[int], None] = lambda number: None,
) -> dict:
    """Seconds of the slowest rank for each of ``steps`` steps while nobody else used the machine.

    After a disturbed step all ranks sleep until the machine is quiet; after ``patience`` seconds what there is must do.
    ``before_step`` is called with the number of each step before it.
    """
    undisturbed, every, deadline = [], [], time.monotonic() + patience
    while comm.bcast(
        len(undisturbed) < steps and (len(every) < steps or time.monotonic() < deadline)
    ):
        if len(every) > len(undisturbed):
            _sleep_until_quiet(comm, deadline)
        before_step(len(every))
        comm.Barrier()
        busy, own, start = _busy(), time.process_time(), time.perf_counter()
        step()
        wall, own = time.perf_counter() - start, time.process_time() - own
        walls, owns = zip(*comm.allgather((wall, own)))
        others = _busy() - busy - sum(owns)
        every.append(max(walls))
        if comm.bcast(others <= _DISTURBED * max(walls) + 2 * _TICK):
            undisturbed.append(every[-1])
    return {"undisturbed": undisturbed, "every": every}


def fastest_step(times: dict) -> float:
    """Return the seconds of a job's fastest step, of the undisturbed ones if there are any.

    Args:
        times: the result of such a job, with the lists ``undisturbed`` and ``every``.
    """
    return min(times["undisturbed"] or times["every"])


def _sleep_until_quiet(comm, deadline: float) -> None:
    quiet = False
    while not comm.bcast(quiet or time.monotonic() > deadline):
        before = _busy()
        time.sleep(1.0)
        quiet = _busy() - before < 0.1


def _busy() -> float:
    """Processor seconds that all cores of this machine have worked (Linux; elsewhere 0)."""
    try:
        ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return 0.0
    return (sum(ticks[:3]) + sum(ticks[5:8])) * _TICK  # all but idle and waiting for a disk


def peak() -> int:
    """Bytes of this process's resident set at most so far."""
    return peak_memory(torch.device("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument(
        "--alone",
        action="store_true",
        help="every rank a job of its own: what the machine gives to ranks that exchange nothing",
    )
    parser.add_argument("--reducer", default="auto")
    parser.add_argument(
        "--sums_in_turns",
        action="store_true",
        help="sums of gradients start after the backward pass in steps 0, 2, 4, ..., and during it in the others",
    )
    parser.add_argument(
        "--idle_waits", action="store_true", help="waits are not filled with weight gradients"
    )
    parser.add_argument(
        "--system_malloc", action="store_true", help="leave glibc's allocator as it is"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--patience", type=float, default=0.0, help="seconds to wait for a quiet machine"
    )
    parser.add_argument("--warmup", type=int, default=2)
    given = vars(parser.parse_args())
    names = (
        *("alone", "reducer", "sums_in_turns", "idle_waits", "system_malloc"),
        *("steps", "patience", "warmup"),
    )
    alone, reducer, turns, idle, system, steps, patience, warmup = (
        given.pop(name) for name in names
    )
    torch.set_num_threads(1)
    if not system:
        keep_freed_memory()
    if idle:
        conv.later = lambda work: False
    comm = world()
    step, engine = distributed_step(
        Setting(**given), comm.Split(comm.rank) if alone else comm, reducer
    )
    before = peak()
    for _ in range(warmup):
        step()

    def before_step(number: int) -> None:
        if turns:
            engine.reducer.early = number % 2 == 1

    cpu = time.process_time()
    found = timed(step, comm, steps, patience, before_step)
    found["processor"] = (time.process_time() - cpu) / len(
        found["every"]
    )  # seconds a step on this rank
    found["memory"] = max(
        comm.allgather(peak() - before)
    )  # bytes of the largest rank, without what it held before the first step
    window = sum(comm.allgather(_window_pixels(engine, Setting(**given))))
    if comm.rank == 0:
        owned = math.prod(given["size"]) * (comm.size if alone else given["samples"])
        print(
            json.dumps(
                found
                | {
                    "redundancy": window / owned,
                    "reducer": engine.reducer.name,
                    "halo": list(engine.reach.halo),
                }
            )
        )


def _window_pixels(engine: Engine, setting: Setting) -> int:
    """Pixels of this rank's window."""
    return sum(
        window.pixels
        for _, window in owned_tiles(
            setting.size, setting.tiles, (1, 1), engine.mesh.tile, engine.reading
        )
    )


if __name__ == "__main__":
    main()
