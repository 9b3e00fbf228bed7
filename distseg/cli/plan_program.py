"""List the operations that each rank of a pipeline runs in a step, without running them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from distseg.config.settings import Config
from distseg.models.network import flat_layers
from distseg.runtime.message_order import HALOS_IN_STREAM, MESSAGES
from distseg.runtime.operations import text
from distseg.training.programs import StepPrograms
from distseg.training.step_messages import prove_order


@dataclass(frozen=True)
class PipelineProgram:
    """Operations that each rank of one pipeline runs in a step.

    If the mesh has several pipelines, the operations are those of the pipeline that computes the
    first tile of the first image.

    Attributes:
        config: the settings of the training.
        model: the plain model, which may be on the meta device.
        image: the size in pixels of all images of the step.
    """

    config: Config
    model: nn.Module
    image: Sequence[int]

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield two texts for each rank of the pipeline: a legend, and the rank's operations.

        The legend says which layers the rank's stages or segments hold.

        Raises:
            ValueError: the model cannot be trained with these settings.
        """
        step = StepPrograms(self.config, self.model, self.image)
        for rank in range(self.config.mesh.stages):
            yield _streaming(step, rank) if self.config.streaming.active else _stages(step, rank)

    def order_of_messages(self) -> str:
        """Return a sentence that says for how many ranks a deadlock is impossible.

        It is empty for a job of one rank, which sends no messages.

        Raises:
            ValueError: ranks could wait for each other for ever. The message names them.
        """
        by_nccl = self.config.spatial.messages == "nccl"
        rules = HALOS_IN_STREAM if by_nccl else MESSAGES
        messages = prove_order(StepPrograms(self.config, self.model, self.image), rules)
        if len(messages) == 1:
            return ""
        return (
            f"The messages of all {len(messages)} ranks cannot deadlock, even if no message is "
            f"buffered{' and NCCL carries halos in order' * by_nccl}."
        )


def _streaming(step: StepPrograms, rank: int) -> tuple[str, str]:
    """Return two texts for a rank that streams tiles: a legend, and the rank's operations."""
    found = step.streamed(0, rank)
    plan = found.plans[0]
    mine = [f"segment {n}: {found.executor.name_of(plan.segments[n])}" for n in plan.mine]
    return "\n".join(mine), text([*found.extra_forward, *found.step])


def _stages(step: StepPrograms, rank: int) -> tuple[str, str]:
    """Return two texts for a rank without streaming: a legend, and the rank's operations."""
    legend = _legend(step, rank) if step.flat else ["stage 0: the whole network"]
    return "\n".join(legend), text(step.kept(rank))


def _legend(step: StepPrograms, rank: int) -> Iterator[str]:
    """Yield lines of text about each stage of a rank.

    The text names the stage's first and last layer, the layers before which ranks exchange halos,
    and the norms for which ranks exchange statistics.

    Args:
        step: the programs of the step.
        rank: the rank in its pipeline.
    """
    names = [name for name, _ in flat_layers(step.model)]
    exchange, partition = step.exchange(0), step.stages
    layout = exchange.layout(step.image) if exchange else None
    points = sorted(layout.points) if layout else []
    for stage in partition.stages_of(rank):
        layers = partition.ranges[stage] or range(len(names))
        exchanged = ", ".join(names[p] for p in points if p in layers)
        norms = ", ".join(names[p] for p in step.active if p in layers)
        yield f"stage {stage}: {names[layers.start]} to {names[layers.stop - 1]}"
        if exchanged:
            yield f"         halos exchanged before {exchanged}"
        if norms:
            yield f"         statistics at {norms}"
