"""Ratios of measurements: speed-up, and the efficiency of a pipeline, each with its range.

The functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distseg.cli.bench.results import Measurement


class Range(NamedTuple):
    """Middle, smallest and largest value of a figure."""

    middle: float
    low: float
    high: float


def ratio(factor: float, a: Measurement, b: Measurement) -> Range:
    """Return ``factor`` times the seconds of ``a`` over those of ``b``.

    The range goes from the fastest repeat of ``a`` over the slowest of ``b`` to the opposite.
    """
    return Range(
        factor * a.median / b.median,
        factor * min(a.seconds) / max(b.seconds),
        factor * max(a.seconds) / min(b.seconds),
    )


def speed_up(one: Measurement, reference: Measurement) -> Range:
    """Return how many times as fast as one rank a case computes pixels.

    The reference counts as ideal: its speed-up is its number of ranks. The range is from the
    slowest repeat of the case beside the fastest of the reference, to the opposite.
    """
    return ratio(reference.ranks * one.pixels / reference.pixels, reference, one)


def predicted_speed_up(one: Measurement, reference: Measurement) -> float | None:
    """Return the predicted counterpart of :func:`speed_up`, or None without predictions."""
    if not one.predicted or not reference.predicted:
        return None
    factor = reference.ranks * one.pixels / reference.pixels
    return factor * reference.predicted["seconds"] / one.predicted["seconds"]


class Staged(NamedTuple):
    """Step of a pipeline beside the same step on one stage.

    Attributes:
        one: the measurement with several stages.
        schedule: the schedule.
        micro_batches: number of micro-batches m of a step.
        stages: number of stages S.
        efficiency: the rank-seconds on one stage over those of the pipeline.
        predicted: the predicted counterpart of ``efficiency``; None without predictions.
    """

    one: Measurement
    schedule: str
    micro_batches: int
    stages: int
    efficiency: Range
    predicted: float | None

    @property
    def ideal(self) -> float:
        """Efficiency m / (m + S - 1) of equal stages and free messages."""
        return self.micro_batches / (self.micro_batches + self.stages - 1)


def pipelines(measurements: Sequence[Measurement]) -> list[Staged]:
    """Return the steps with several stages, each beside the same step on one stage.

    Raises:
        ValueError: the same step was not measured on one stage.
    """
    alone = {one.layout["micro_batches"]: one for one in measurements if one.layout["stages"] == 1}
    staged = [one for one in measurements if one.layout["stages"] > 1]
    if lacks := next((one for one in staged if one.layout["micro_batches"] not in alone), None):
        raise ValueError(
            f"the measurement {lacks.name!r} has {lacks.layout['micro_batches']} micro-batches, "
            "but no measurement on one stage has as many: measure again by distseg bench pipeline"
        )
    return [_beside(one, alone[one.layout["micro_batches"]]) for one in staged]


def _beside(one: Measurement, alone: Measurement) -> Staged:
    factor, predicted = alone.ranks / one.ranks, None
    if one.predicted and alone.predicted:
        predicted = factor * alone.predicted["seconds"] / one.predicted["seconds"]
    layout = one.layout
    return Staged(
        one,
        layout["schedule"],
        layout["micro_batches"],
        layout["stages"],
        ratio(factor, alone, one),
        predicted,
    )
