"""Lower bounds of the seconds of a pipeline's step, found without simulating the step.

Let stage s take f_s seconds for a forward pass and b_s for a backward pass, and let a feature map
travel l_s seconds to the next stage. Each of the m micro-batches goes there and back::

    stage 0   f_0                                   b_0      round trip of stage 0
    stage 1       l_0  f_1               b_1   l_0           round trip of stage 1
    stage 2                l_1 f_2 b_2 l_1                   round trip of stage 2

With 1F1B and ZB-H1, a stage computes forward and backward passes in turn. So round trips from stage
s to stage e and back follow one another (:meth:`PipelineTimes._round_trips`). With GPipe, no
backward pass begins before all forward passes of the last stage have ended.
"""

from __future__ import annotations

import math
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
        returns: for each pair (target, source) of stages, the seconds in which the gradients of
            these feature maps travel back from the target to the source.
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
        """Lower bound of the seconds from the start of the first pass to the end of the last."""
        bounds = max((*self._busy(), *self._messages()))
        if self.schedule == "gpipe":
            return max((bounds, *self._two_phases()))
        return max((bounds, *self._round_trips()))

    @cached_property
    def _starts(self) -> list[float]:
        """For each stage, a lower bound of the seconds before its first pass begins."""
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
        """For each stage, the seconds of weight gradients that follow its last backward pass.

        With ZB-H1, these are the weight gradients of the last s + 1 micro-batches on stage s.
        """
        m = self.micro_batches
        return [min(m, stage + 1) * seconds for stage, seconds in enumerate(self.weight)]

    @cached_property
    def _ends(self) -> list[float]:
        """For each stage, a lower bound of the seconds from its last backward pass to the end."""
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
        """Yield, for each stage, a bound of the step's seconds from all passes that it computes."""
        m = self.micro_batches
        for stage, forward in enumerate(self.forward):
            work = forward + self.again[stage] + self.backward[stage] + self.weight[stage]
            until_end = self._ends[stage] - self._put_off[stage]
            yield self._starts[stage] + m * work + until_end

    def _messages(self) -> Iterator[float]:
        """Yield bounds of the step's seconds from messages between two stages.

        Messages from one stage to another follow one another.
        """
        m = self.micro_batches
        for (source, target), seconds in self.links.items():
            first = self._starts[source] + self.forward[source]
            passes = self.forward[target] + self.backward[target]
            yield first + m * seconds + passes + self._ends[target]
        for (target, source), seconds in self.returns.items():
            first = self._starts[target] + self.forward[target] + self.backward[target]
            yield first + m * seconds + self.backward[source] + self._ends[source]

    def _round_trips(self) -> Iterator[float]:
        """Yield bounds of the step's seconds from round trips, for 1F1B and ZB-H1.

        In a round trip a micro-batch goes from stage s to a later stage e and back.
        Stage e computes the backward pass of micro-batch i right after the forward pass of
        micro-batch i + S - 1 - e. Stage s <= e has the forward pass of micro-batch i + S - s after
        the backward pass of micro-batch i. So the round trips from stage s to stage e of every
        (e - s + 1)-th micro-batch follow one another.
        """
        m, stages = self.micro_batches, len(self.forward)
        for first in range(stages):
            forward, backward = self.forward[first], self.backward[first]
            for last, trip in enumerate(self._trips(first), first):
                ahead, every = min(stages - 1 - last, m - 1), last - first + 1
                more, rest = divmod(m - 1 - ahead, every)
                # With ZB-H1, stage s puts off the weight gradients of the first s micro-batches.
                apart = max(0, more - -(-first // every)) * self.weight[first]
                seconds = ahead * forward + (1 + more) * trip + apart + (ahead + rest) * backward
                yield self._starts[first] + seconds + self._ends[first]

    @cached_property
    def _links_by_target(self) -> list[tuple[int, int, float]]:
        """Links as (target, source, seconds), sorted by target.

        So all links into a stage come before the links out of it.
        """
        return sorted((target, source, s) for (source, target), s in self.links.items())

    @cached_property
    def _returns_by_target(self) -> list[tuple[int, int, float]]:
        """Messages of gradients as (target, source, seconds), sorted by target.

        The target is the stage that sends the gradient, as in ``returns``.
        """
        return sorted((target, source, s) for (target, source), s in self.returns.items())

    def _trips(self, first: int) -> list[float]:
        """Return lower bounds of the seconds that a micro-batch takes to other stages and back.

        The list has a number for each stage from ``first`` on: the forward pass goes from stage
        ``first`` to that stage, the backward pass goes back. The number is -inf if no feature map
        gets to that stage, or no gradient returns from it.
        """
        there, back = ([-math.inf] * len(self.forward) for _ in range(2))
        there[first], back[first] = self.forward[first], self.backward[first]
        for target, source, seconds in self._links_by_target:
            there[target] = max(there[target], there[source] + seconds + self.forward[target])
        for target, source, seconds in self._returns_by_target:
            back[target] = max(back[target], back[source] + seconds + self.backward[target])
        return [sum(each) for each in zip(there, self.again, back)][first:]

    def _two_phases(self) -> Iterator[float]:
        """Yield bounds of the step's seconds for GPipe.

        With GPipe, the last stage runs all forward passes before any backward pass.
        """
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
