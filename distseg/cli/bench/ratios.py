"""Ratios of measurements: speed-up, and the efficiency of a pipeline, each with its range.

The functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distseg.cli.bench.results import Measurement


class Range(NamedTuple):
    """Middle, smallest and largest value of a measured figure, such as a speed-up."""

    middle: float
    low: float
    high: float


def ratio(factor: float, a: Measurement, b: Measurement) -> Range:
    """Return ``factor`` times the seconds of ``a`` divided by the seconds of ``b``.

    The smallest value divides the fastest repeat of ``a`` by the slowest of ``b``. The largest
    value divides the slowest repeat of ``a`` by the fastest of ``b``.
    """
    return Range(
        factor * a.median / b.median,
        factor * min(a.seconds) / max(b.seconds),
        factor * max(a.seconds) / min(b.seconds),
    )


def speed_up(one: Measurement, reference: Measurement) -> Range:
    """Return the speed-up of a case: its pixels a second, divided by those of one rank.

    The speed-up of the reference is set to its number of ranks. The smallest value compares the
    slowest repeat of the case with the fastest of the reference, the largest value the reverse.
    """
    return ratio(reference.ranks * one.pixels / reference.pixels, reference, one)


def predicted_speed_up(one: Measurement, reference: Measurement) -> float | None:
    """Return the speed-up (:func:`speed_up`) by predicted times, or None without predictions."""
    if not one.predicted or not reference.predicted:
        return None
    factor = reference.ranks * one.pixels / reference.pixels
    return factor * reference.predicted["seconds"] / one.predicted["seconds"]


class Staged(NamedTuple):
    """Measured step of a pipeline, compared with the same step on one stage.

    Attributes:
        one: the measurement with several stages.
        schedule: the schedule.
        micro_batches: number of micro-batches m of a step.
        stages: number of stages S.
        efficiency: seconds times ranks on one stage, divided by seconds times ranks of the
            pipeline.
        predicted: the efficiency that the planner predicts; None without predictions.
    """

    one: Measurement
    schedule: str
    micro_batches: int
    stages: int
    efficiency: Range
    predicted: float | None

    @property
    def ideal(self) -> float:
        """Efficiency m / (m + S - 1) of a pipeline with equal stages and no time for messages."""
        return self.micro_batches / (self.micro_batches + self.stages - 1)


def pipelines(measurements: Sequence[Measurement]) -> list[Staged]:
    """Return the measured steps with several stages, each compared with the step on one stage.

    Raises:
        ValueError: the same step was not measured on one stage.
    """
    alone = {one.layout["micro_batches"]: one for one in measurements if one.layout["stages"] == 1}
    staged = [one for one in measurements if one.layout["stages"] > 1]
    if lacks := next((one for one in staged if one.layout["micro_batches"] not in alone), None):
        raise ValueError(
            f"the measurement {lacks.name!r} has {lacks.layout['micro_batches']} micro-batches, "
            "but no measurement on one stage has this number of micro-batches: measure again by "
            "distseg bench pipeline"
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
