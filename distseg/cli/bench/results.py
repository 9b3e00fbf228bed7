"""Results of measurements: what a file holds, and how it is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from distseg.report.disk import atomic_write

FORMAT, VERSION = "distseg bench", 1


@dataclass(frozen=True)
class Measurement:
    """Measured figures of one case, which is one layout on a number of ranks.

    Attributes:
        name: the name of the case, unique in its result.
        ranks: number of ranks that worked.
        seconds: the duration of each repeat, until the last rank had finished.
        layout: the values of a :class:`distseg.planning.mesh_layout.MeshLayout` by name.
        image: the size of an image, such as ``512x512``.
        pixels: pixels of all images of a step.
        images: number of images of a step.
        parts: mean seconds that a rank spent on each kind of work (``forward``, ``halo``, ...), in
            one traced step after the repeats.
        busiest: the rank that computed longest in the traced step: ``rank`` and ``host``, its
            seconds (``computing``), and the mean seconds of all ranks (``mean``).
        traffic: messages and bytes that all ranks sent in a step
            (:class:`distseg.comm.counted.Traffic`), and ``largest_rank``, the bytes of the rank
            that sent the most.
        memory: peak bytes of each rank; empty if the system does not give them.
        redundancy: computed pixels of input windows / pixels of the images.
        bytes: bytes that all ranks read in a repeat (``io`` only).
        predicted: ``seconds``, ``memory`` and ``parts`` of the planner; None without a prediction.
        note: the reason if there is no prediction.
    """

    name: str
    ranks: int
    seconds: Sequence[float]
    layout: Mapping[str, Any] = field(default_factory=dict)
    image: str = ""
    pixels: int = 0
    images: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    busiest: Mapping[str, Any] = field(default_factory=dict)
    traffic: Mapping[str, int] = field(default_factory=dict)
    memory: Sequence[int] = ()
    redundancy: float = 1.0
    bytes: int = 0
    predicted: Mapping[str, Any] | None = None
    note: str = ""

    @property
    def median(self) -> float:
        """Median of the measured seconds."""
        return median(self.seconds)

    @property
    def sent(self) -> int:
        """Bytes that all ranks gave to messages and collectives in a step."""
        return self.traffic.get("message_bytes", 0) + self.traffic.get("collective_bytes", 0)

    def share(self, *kinds: str) -> float:
        """Return the fraction of the traced step that a rank spent on some kinds of work.

        Args:
            kinds: the kinds, such as ``halo`` or ``wait``.
        """
        whole = sum(self.parts.values())
        return sum(self.parts.get(kind, 0.0) for kind in kinds) / whole if whole else 0.0


@dataclass(frozen=True)
class Result:
    """Result of one run of ``distseg bench``: the figures, the settings and the environment.

    Attributes:
        kind: one of ``MEASURED``.
        axis: the axis of the mesh that grows; empty if no axis grows.
        command: the command line.
        environment: hardware and software
            (:func:`distseg.cli.bench.environment.describe_environment`).
        config: the settings by section.
        network: ``name`` and ``parameters`` of the network.
        precision: the number type of the steps, such as ``fp32``.
        data: ``random images``, or the store.
        repeats, warmup: numbers of measured and of unmeasured steps of a case.
        machine: the planner's machine, by its name; empty without predictions.
        measurements: the figures.
    """

    kind: str
    axis: str
    command: str
    environment: Mapping[str, Any]
    config: Mapping[str, Mapping[str, Any]]
    network: Mapping[str, Any]
    precision: str
    data: str
    repeats: int
    warmup: int
    machine: str
    measurements: Sequence[Measurement]

    @property
    def title(self) -> str:
        """Kind of measurement and growing axis of the mesh, such as ``strong, tiles``."""
        return f"{self.kind}, {self.axis}" if self.axis else self.kind

    @property
    def notes(self) -> list[str]:
        """Sentences that say why predictions are missing."""
        return list(dict.fromkeys(one.note for one in self.measurements if one.note))

    @property
    def ranks(self) -> int:
        """Number of ranks of the job."""
        return self.environment["ranks"]


def file_name(kind: str, axis: str, ranks: int) -> str:
    """Return the name of a result's file, such as ``strong-tiles-4.json``."""
    return "-".join(filter(None, (kind, axis, str(ranks)))) + ".json"


def write_result(result: Result, path: Path) -> None:
    """Write a result as JSON to a file, which appears only when it is complete.

    Raises:
        ValueError: a figure is not a finite number.
    """
    try:
        text = json.dumps(
            {"format": FORMAT, "version": VERSION, **asdict(result)}, indent=1, allow_nan=False
        )
    except ValueError as e:
        raise ValueError(
            f"a figure of the measurement {result.title} is not finite ({e}), so {path} is not "
            "written: measure again on a quiet machine"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as growing:
        growing.write_text(text + "\n", encoding="utf-8")
