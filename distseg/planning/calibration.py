"""Measure the rates of a machine, for a profile that predicts the steps of any network on it.

All ranks of the job measure at the same time, because they share the memory and the caches of a
node in training too. The slowest rank counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from distseg.comm.collective import add
from distseg.comm.communicator import as_communicator
from distseg.comm.waits import waits_of
from distseg.planning.cost import DTYPES
from distseg.planning.rates import ARITHMETIC, TRAFFIC, Rate, Rates, Shape, Timing
from distseg.planning.roofline import counted, fastest

# (channels, side of the image) of the operations that are measured, by kind.
_SHAPES = {
    "convolution": [(c, side) for c in (8, 32, 128) for side in (32, 128, 384)],
    "transposed": [(c, side) for c in (16, 64) for side in (32, 128)],
    "norm": [(32, side) for side in (32, 128, 512)],
    "elementwise": [(32, side) for side in (32, 128, 512)],
    "copy": [(32, side) for side in (32, 128, 512)],
    "pooling": [(32, side) for side in (32, 128, 512)],
    "resampling": [(32, side) for side in (32, 128, 512)],
}
# The operations whose rates stand for all shapes where a profile has room for one number.
TYPICAL = {
    "arithmetic": Shape("convolution", 64, 128**2, 0),
    "traffic": Shape("copy", 64, 512**2, 0),
}
_REPEATS = 2  # timed calls of an operation, of which the fastest counts
_BYTES = (8, 2**10, 2**15, 2**18, 2**20, 2**23)  # sizes of the messages that are measured


def operation_rates(
    world, device: torch.device, precisions: Sequence[str], seconds: float
) -> tuple[Rates, int]:
    """Measure how fast convolutions, norms and copies run, within about ``seconds`` seconds.

    Cheap operations are measured first. An operation is left out if it would end too late at the
    speed of the one before it of its kind. All ranks of ``world`` must call this function together.

    Args:
        world: the communicator of the ranks.
        device: the device of this rank.
        precisions: the number types to measure.
        seconds: the time within which all operations are measured.

    Returns:
        The rates, and the number of operations that were left out for lack of time.
    """
    cases = [
        (channels ** (1 + (kind in ARITHMETIC)) * side**2, kind, precision, channels, side)
        for kind, shapes in _SHAPES.items()
        for channels, side in shapes
        for precision in precisions
    ]
    cases.sort()
    began, found = time.perf_counter(), []
    pace: dict[tuple[str, str], float] = {}  # by kind and number type: seconds for a unit of work
    for work, kind, precision, channels, side in cases:
        spent = max(world.allgather(time.perf_counter() - began))
        if spent + work * pace.get((kind, precision), 0.0) > seconds:
            continue
        call = _operation(kind, channels, side, DTYPES[precision], device)
        _, measured = counted(call)
        shapes = [shape for shape in measured.shapes if shape.kind == kind]
        world.Barrier()
        took = max(world.allgather(fastest(call, _REPEATS, device)))
        # The operation ran to be counted and to warm up, too.
        pace[kind, precision] = (2 + _REPEATS) * took / work
        rate = sum(shape.work for shape in shapes) / took
        found.append(Rate(kind, precision, channels, max(s.cells for s in shapes), rate))
    return Rates(tuple(found)), len(cases) - len(found)


def _operation(
    kind: str, channels: int, side: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """Return a function that runs an operation once on a random image.

    A convolution runs forward and backward.

    Args:
        kind: the kind of operation (:mod:`distseg.planning.rates`).
        channels: the number of channels of the image, and of a convolution's result.
        side: the height and the width of the image.
        dtype: the number type.
        device: the device that computes.
    """
    x = torch.randn(1, channels, side, side, device=device, dtype=dtype)
    if kind in TRAFFIC:
        calls: dict[str, Callable[[], object]] = {
            "norm": partial(F.instance_norm, x),
            "elementwise": partial(F.leaky_relu, x, 0.01),
            "copy": x.clone,
            "pooling": partial(F.max_pool2d, x, 2),
            "resampling": partial(F.interpolate, x, scale_factor=2),
        }
        return calls[kind]
    width = 2 if kind == "transposed" else 3
    weight = torch.randn(channels, channels, width, width, device=device, dtype=dtype)
    for tensor in (x, weight):
        tensor.requires_grad_()
    if kind == "transposed":
        forward = partial(F.conv_transpose2d, x, weight, stride=2)
    else:
        forward = partial(F.conv2d, x, weight, padding=1)

    def both() -> None:
        y = forward()
        torch.autograd.grad(y, (x, weight), y.detach())

    return both


def call_seconds(device: torch.device) -> float:
    """Return the seconds that a layer takes if it has nearly nothing to compute."""
    layer = torch.nn.Conv2d(1, 1, 1).to(device)
    x = torch.ones(1, 1, 1, 1, device=device)

    def many() -> None:
        with torch.no_grad():
            for _ in range(100):
                layer(x)

    return fastest(many, 3, device) / 100


def message_timings(world) -> tuple[Timing, ...]:
    """Measure how long messages and sums of several sizes take; on one rank return no result.

    All ranks of ``world`` must call this function together. For a message, each rank sends to the
    next rank at the same time.

    Args:
        world: the communicator of the ranks.
    """
    return tuple(_timed(world)) if world.size > 1 else ()


def _timed(world) -> Iterator[Timing]:
    for size in _BYTES:
        times = max(1, min(50, 2**20 // size))
        for kind, call in (
            ("message", partial(_to_the_next, world, torch.zeros(size, dtype=torch.uint8))),
            ("sum", partial(add, torch.zeros(size // 8, dtype=torch.float64), world)),
        ):
            mine = fastest(partial(_repeat, call, times), 2) / times
            yield Timing(kind, world.size, size, max(world.allgather(mine)))


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def _to_the_next(world, message: Tensor) -> None:
    comm, waits = as_communicator(world), waits_of(world)
    received = torch.empty_like(message)
    source, dest = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    requests = [comm.Irecv(received, source, _TAG), comm.Isend(message, dest, _TAG)]
    for request in requests:
        waits.wait(request, f"a message of {message.nbytes} bytes")


_TAG = 7


def latency_and_link(timings: Sequence[Timing]) -> tuple[float, float]:
    """Return the latency in seconds and the bytes/s that follow from measured messages.

    The latency is the duration of the smallest message. The bytes/s follow from the time that the
    largest message takes in addition.
    """
    messages = [one for one in timings if one.kind == "message"]
    small, large = min(messages, key=_size), max(messages, key=_size)
    return small.seconds, large.bytes / max(1e-9, large.seconds - small.seconds)


def _size(timing: Timing) -> float:
    return timing.bytes


def typical(rates: Rates, name: str, precision: str) -> float:
    """Return the one measured rate that a profile states as ``arithmetic`` or as ``traffic``.

    Args:
        rates: the measured rates.
        name: ``arithmetic`` or ``traffic``.
        precision: the number type.

    Raises:
        ValueError: no operation of this kind was measured.
    """
    found = rates.rate(TYPICAL[name], precision)
    if found is None:
        raise ValueError(
            f"the time was over before any {TYPICAL[name].kind} was measured, after "
            f"{len(rates.rows)} operations: give --seconds a larger number, such as 60"
        )
    return found[0]
