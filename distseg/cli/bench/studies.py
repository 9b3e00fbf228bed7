"""Studies: results of ``distseg bench`` that belong together, such as a job for each rank count.

The functions are pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from distseg.cli.bench.results import Measurement, Result


@dataclass(frozen=True)
class Study:
    """Results that belong together, such as those of jobs with different numbers of ranks.

    Attributes:
        results: the results, by increasing number of ranks.
    """

    results: Sequence[Result]

    @property
    def whole(self) -> Result:
        """Copy of the result of the largest job, which has the measurements of all jobs."""
        every = [one for result in self.results for one in result.measurements]
        return replace(self.results[-1], measurements=every)


def studies_of(results: Sequence[Result]) -> list[Study]:
    """Group results of ``distseg bench`` into studies. The report shows a study as one table.

    Results belong to one study if they measure the same on the same kind of machine, and if no case
    (a layout that is measured) occurs in two results. For example, the results of jobs that measure
    one number of ranks each (``--ranks job``) are one study. But each repetition of a measurement
    is in a study of its own.

    Args:
        results: the results, each of one run of ``distseg bench``.
    """
    found: list[tuple[Hashable, list[Result]]] = []
    for result in sorted(results, key=lambda one: one.ranks):
        key, names = _key(result), _names(result.measurements)
        for known, members in found:
            if known == key and not any(names & _names(m.measurements) for m in members):
                members.append(result)
                break
        else:
            found.append((key, [result]))
    return [Study(members) for _, members in found]


def _names(measurements: Sequence[Measurement]) -> set[str]:
    return {one.name for one in measurements}


def _key(result: Result) -> Hashable:
    """Return a key that is equal for results which may belong to one study.

    It has the settings, the network, the work and the hardware and software.
    """
    machine, first = result.environment, result.measurements[0]
    # In weak scaling, the work of a rank is equal, in all other kinds the image.
    work = first.pixels / first.ranks if result.kind == "weak" else first.image
    return repr(
        (
            (result.title, result.network, result.precision, result.data, result.config, work),
            [sorted(machine.get(name) or {}) for name in ("processors", "devices")],
            [machine.get(name) for name in ("threads", "transport", "versions", "commit")],
        )
    )
