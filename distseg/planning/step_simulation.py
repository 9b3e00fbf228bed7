"""Simulate a step on all ranks of a job, with shared links and random delays.

The planner (:mod:`distseg.planning.mesh_search`) assumes that all tiles are as slow as the slowest
one, and that nothing else uses the links of a message. Here each rank has its own work, and its
messages share links with those of other ranks (:mod:`distseg.planning.step_tasks`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from distseg.planning.cluster import Cluster
from distseg.planning.mesh_layout import MeshLayout, Work
from distseg.planning.shared_links import Run, Task, critical_path, replay, simulate
from distseg.planning.step_tasks import step_tasks
from distseg.planning.tile_grids import TileGrids


@dataclass(frozen=True)
class Noise:
    """Random delays of computations.

    Attributes:
        spread: standard deviation of the logarithm of each computation's duration. The mean
            duration does not change.
        stragglers: the share of ranks that are slow during the whole step.
        slower: the factor by which the slow ranks are slower.
        steps: the number of steps that are simulated with random delays.
        seed: the seed of the random numbers.
    """

    spread: float = 0.0
    stragglers: float = 0.0
    slower: float = 1.0
    steps: int = 11
    seed: int = 0

    def __post_init__(self):
        if self.spread < 0 or not 0 <= self.stragglers <= 1 or self.slower < 1 or self.steps < 1:
            raise ValueError(
                f"noise has spread {self.spread}, stragglers {self.stragglers}, slower "
                f"{self.slower} and steps {self.steps}: give a spread of at least 0, a share of "
                "stragglers from 0 to 1, a factor of at least 1 and at least 1 step"
            )


class _Delays:
    """Function that draws random delays for the tasks of one step.

    It is of the type :data:`distseg.planning.shared_links.Delays`.
    """

    def __init__(self, noise: Noise):
        self.noise = noise
        self._of_rank: dict[int, np.ndarray] = {}

    def __call__(self, task: Task, random: np.random.Generator, copies: int) -> np.ndarray | float:
        noise = self.noise
        if task.rank is None:
            return 1.0
        if task.rank not in self._of_rank:
            slow = random.random(copies) < noise.stragglers
            self._of_rank[task.rank] = np.where(slow, noise.slower, 1.0)
        draws = random.standard_normal(copies)
        return self._of_rank[task.rank] * np.exp(noise.spread * draws - noise.spread**2 / 2)


@dataclass(frozen=True)
class SimulatedStep:
    """Simulated step of a job.

    Attributes:
        seconds: duration of the step without random delays.
        parts: seconds by purpose of the tasks on the critical path, which adds up to ``seconds``.
        busy: for each kind of link, the largest share of the step in which a link of this kind is
            busy: its bytes divided by its bytes/s and by the seconds of the step.
        drawn: durations of the step with random delays, the shortest first; empty without noise.
        simulated: the number of ranks that are simulated; all others are copies of them.
    """

    seconds: float
    parts: dict[str, float]
    busy: dict[str, float]
    drawn: list[float] = field(default_factory=list)
    simulated: int = 1

    @property
    def median(self) -> float:
        """Median duration with random delays, or the duration without noise."""
        return float(np.median(self.drawn)) if self.drawn else self.seconds


def simulate_step(
    work: Work,
    grids: TileGrids,
    layout: MeshLayout,
    balance: tuple[int, ...],
    cluster: Cluster,
    noise: Noise | None = None,
    bucket: float | None = None,
) -> SimulatedStep:
    """Return the simulated step of a layout.

    Args:
        work: the step.
        grids: the grids of tiles of the step.
        layout: the layout.
        balance: the number of layers of each stage.
        cluster: the nodes of the job.
        noise: random delays; None if there is none.
        bucket: least bytes of gradients that are summed together, during the last backward pass; by
            default all gradients are summed after this pass.

    Raises:
        ValueError: the cluster has another number of ranks than the layout.
    """
    found = step_tasks(work, grids, layout, balance, cluster, bucket)
    capacity = cluster.capacity(found.simulated)
    run = simulate(found.tasks, capacity)
    parts: dict[str, float] = defaultdict(float)
    for number in critical_path(found.tasks, run):
        parts[found.tasks[number].kind] += run.ends[number] - run.starts[number]
    busy: dict[str, float] = {}
    for link, size in run.carried.items():
        share = size / capacity(link) / run.seconds
        busy[link[0]] = max(share, busy.get(link[0], 0.0))
    drawn = [] if noise is None else _drawn(found.tasks, run, found.copies, noise)
    return SimulatedStep(run.seconds, dict(parts), busy, drawn, found.simulated)


def _drawn(tasks: list[Task], run: Run, copies: int, noise: Noise) -> list[float]:
    """Return the durations of steps with random delays, the shortest first."""
    random = np.random.default_rng(noise.seed)
    return sorted(replay(tasks, run, copies, _Delays(noise), random) for _ in range(noise.steps))
