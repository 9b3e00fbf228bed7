"""Lower bounds of the seconds of a pipeline's step, found without simulating the step.

Let stage s take f_s seconds for a forward pass and b_s for a backward pass, and let a feature map
travel l_s seconds to the next stage. Each of the m micro-batches goes there and back::

    stage 0   f_0                                   b_0      round trip of stage 0
    stage 1       l_0  f_1               b_1   l_0           round trip of stage 1
    stage 2                l_1 f_2 b_2 l_1                   round trip of stage 2

With 1F1B and ZB-H1, stage s of S starts a micro-batch only if fewer than S - s of them are on their
round trip. So the round trips of every (S - s)-th micro-batch follow one another. With GPipe, no
backward pass begins before all forward passes of the last stage have ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class PipelineTimes:
    """Seconds of the passes and messages of a pipeline with one stage on each rank.

    Attributes:
        schedule: gpipe, 1f1b or zb-h1.
        micro_batches: the number of micro-batches of a step.
        forward, backward, weight: for each stage, the seconds of a pass for one micro-batch.
            ``weight`` is the part of the weight gradients that the schedule computes later.
        again: for each stage, the seconds of a repeated forward pass; 0 without recomputation.
        links: for each pair (source, target) of stages, the seconds in which the feature maps of a
            micro-batch travel from the source to the target.
        returns: likewise for gradients, from the target (first) to the source of a feature map.
    """

    schedule: str
    micro_batches: int
    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    again: Sequence[float]
    links: Mapping[tuple[int, int], float]
    returns: Mapping[tuple[int, int], float]

    @property
    def least(self) -> float:
        """Lower bound of the seconds from the first pass to the end of the last one."""
        bounds = max((*self._busy(), *self._messages()))
        if self.schedule == "gpipe":
            return max((bounds, *self._two_phases()))
        return max((bounds, *self._round_trips()))

    @cached_property
    def _starts(self) -> list[float]:
        """For each stage, the least seconds before its first pass."""
        found: list[float] = []
        for stage in range(len(self.forward)):
            arrivals = (
                found[source] + self.forward[source] + seconds
                for (source, target), seconds in self.links.items()
                if target == stage
            )
            found.append(max(arrivals, default=0.0))
        return found

    @cached_property
    def _put_off(self) -> list[float]:
        """For each stage, the seconds of weight gradients after its last backward pass.

        With ZB-H1, stage s then computes the weight gradients of the last s + 1 micro-batches.
        """
        m = self.micro_batches
        return [min(m, stage + 1) * seconds for stage, seconds in enumerate(self.weight)]

    @cached_property
    def _ends(self) -> list[float]:
        """For each stage, the least seconds after its last backward pass."""
        found: list[float] = []
        for stage, put_off in enumerate(self._put_off):
            later = (
                seconds + self.backward[source] + found[source]
                for (target, source), seconds in self.returns.items()
                if target == stage
            )
            found.append(max(later, default=0.0))
            found[-1] = max(put_off, found[-1])
        return found

    def _busy(self) -> Iterator[float]:
        """Yield bounds that hold because a stage computes all of its micro-batches itself."""
        m = self.micro_batches
        for stage, forward in enumerate(self.forward):
            work = forward + self.again[stage] + self.backward[stage] + self.weight[stage]
            until_end = self._ends[stage] - self._put_off[stage]
            yield self._starts[stage] + m * work + until_end

    def _messages(self) -> Iterator[float]:
        """Yield bounds that hold because messages between two stages follow one another."""
        m = self.micro_batches
        for (source, target), seconds in self.links.items():
            first = self._starts[source] + self.forward[source]
            passes = self.forward[target] + self.backward[target]
            yield first + m * seconds + passes + self._ends[target]
        for (target, source), seconds in self.returns.items():
            first = self._starts[target] + self.forward[target] + self.backward[target]
            yield first + m * seconds + self.backward[source] + self._ends[source]

    def _round_trips(self) -> Iterator[float]:
        """Yield bounds that hold because a stage has few micro-batches on their round trip."""
        m, stages = self.micro_batches, len(self.forward)
        trips = [0.0] * stages
        for stage in reversed(range(stages)):
            away = (
                seconds + trips[target] + self.returns[target, stage]
                for (source, target), seconds in self.links.items()
                if source == stage and (target, stage) in self.returns
            )
            wait = max(self.again[stage], max(away, default=0.0))
            trips[stage] = self.forward[stage] + wait + self.backward[stage]
            at_once = min(m, stages - stage)
            trip, rest = -(-m // at_once), (m - 1) % at_once
            seconds = trip * trips[stage] + rest * self.backward[stage]
            yield self._starts[stage] + seconds + self._ends[stage]

    def _two_phases(self) -> Iterator[float]:
        """Yield bounds that hold because all backward passes follow all forward passes."""
        m, stages = self.micro_batches, range(len(self.forward))
        ended: list[float] = []  # the least seconds until the last forward pass of each stage ends
        for stage in stages:
            forward = self.forward[stage]
            latest = self._starts[stage] + m * forward
            for (source, target), seconds in self.links.items():
                if target == stage:
                    sent = self._starts[source] + self.forward[source] + (m - 1) * seconds
                    latest = max(latest, max(ended[source], sent) + seconds + forward)
            ended.append(latest)
        begun, done = [0.0] * len(ended), [0.0] * len(ended)  # starts and ends of backward passes
        for stage in reversed(stages):
            backward, again = self.backward[stage], self.again[stage]
            begun[stage] = ended[stage] + again
            for (target, source), seconds in self.returns.items():
                if source == stage:
                    arrival = begun[target] + self.backward[target] + seconds
                    begun[stage] = max(begun[stage], arrival)
            done[stage] = begun[stage] + m * backward + (m - 1) * again
            for (target, source), seconds in self.returns.items():
                if source == stage:
                    sent = begun[target] + self.backward[target] + (m - 1) * seconds
                    done[stage] = max(done[stage], max(done[target], sent) + seconds + backward)
        yield from done
