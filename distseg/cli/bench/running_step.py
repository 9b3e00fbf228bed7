"""Training step of one case, whose time, messages and parts are measured."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from distseg.cli.profile import COMPUTING, KINDS, own_seconds, watch
from distseg.comm.counted import CountedComm, Traffic
from distseg.comm.launch import JointFailure
from distseg.tiling.tile_batch import TileBatch
from distseg.training.engine import Engine


@dataclass(frozen=True)
class RunningStep:
    """Training step that runs on the ranks of a case.

    All ranks of ``comm`` must call each method together.

    Attributes:
        engine: the engine of the step.
        own: this rank's tile batches, a list for each micro-batch.
        comm: the communicator of the step's ranks, which counts the messages of the step.
        device: the device of this rank.
    """

    engine: Engine
    own: list[list[TileBatch]]
    comm: CountedComm
    device: torch.device

    def seconds(self) -> float:
        """Run the step, and return the seconds until the last rank had finished it."""
        self.comm.Barrier()
        start = self._now()
        loss, _ = self.engine.step(self.own, self.engine.config.optim.lr)
        seconds = self._now() - start
        _check_loss(loss)
        return max(self.comm.allgather(seconds))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def redundancy(self) -> float:
        """Return the number of pixels in all input windows, divided by the pixels of the images.

        It is above 1 if windows have halos, because halos overlap other windows.
        """
        places = [piece.place for pieces in self.own for piece in pieces]
        read = self.comm.allreduce(sum(len(p.images) * p.window.pixels for p in places))
        owned = self.comm.allreduce(sum(len(p.images) * p.tile.pixels for p in places))
        return read / owned

    def traced(self) -> dict[str, Any]:
        """Run the step with a trace, and return ``parts`` and ``busiest`` as a dict.

        :class:`distseg.cli.bench.results.Measurement` has fields with these names.
        """
        engine, comm = self.engine, self.comm
        trace = watch(engine, comm)
        engine.backward(self.own)
        with trace.span("update", engine.config.optim.name):
            engine.update(engine.config.optim.lr)
        spent = own_seconds(trace.spans)
        ranks = comm.allgather((dict(spent), trace.now(), platform.node()))
        times, ends, hosts = zip(*ranks)
        return {"parts": mean_parts(times, max(ends)), "busiest": busiest_rank(times, hosts)}

    def total_traffic(self, sent: Traffic, steps: int) -> dict[str, int]:
        """Return the messages and bytes that all ranks sent in a step, as a dict.

        The dict is the field ``traffic`` of a measurement.

        Args:
            sent: the messages that this rank sent through the communicators of distseg.
            steps: the number of steps in which these messages were sent.
        """
        own = {name: number // steps for name, number in asdict(sent).items()}
        if self.engine.reducer.name in ("horovod", "nccl"):  # which have connections of their own
            own["collectives"] += len(self.engine.gradients.buckets)
            own["collective_bytes"] += sum(b.nbytes for b in self.engine.gradients.buckets)
        ranks = self.comm.allgather(own)
        total = {name: sum(one[name] for one in ranks) for name in own}
        largest = max(one["message_bytes"] + one["collective_bytes"] for one in ranks)
        return {**total, "largest_rank": largest}


def mean_parts(times: Sequence[dict[str, float]], seconds: float) -> dict[str, float]:
    """Return the mean seconds that a rank spent on each kind of work in a step.

    Args:
        times: for each rank, its seconds by kind of work, such as ``forward``.
        seconds: the duration of the step. The time that no kind covers is returned as ``other``.
    """
    parts = {kind: sum(one.get(kind, 0.0) for one in times) / len(times) for kind in KINDS}
    return {**parts, "other": max(0.0, seconds - sum(parts.values()))}


def busiest_rank(times: Sequence[dict[str, float]], hosts: Sequence[str]) -> dict[str, Any]:
    """Return the rank that computed longest, its host, its seconds and the mean of all ranks.

    Args:
        times: for each rank, its seconds by kind of work.
        hosts: the host of each rank.
    """
    computing = [sum(one.get(kind, 0.0) for kind in COMPUTING) for one in times]
    rank = max(range(len(computing)), key=computing.__getitem__)
    mean = sum(computing) / len(computing)
    return {"rank": rank, "host": hosts[rank], "computing": computing[rank], "mean": mean}


def _check_loss(loss: float) -> None:
    if not math.isfinite(loss):
        raise JointFailure(
            f"the loss of a measured step is {loss}, and the times of such a step are not those "
            "of training: lower optim.lr, or measure fewer steps (--repeats, --warmup)"
        )
