"""Actions of a pipeline schedule: forward and backward passes, and postponed weight gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distseg.runtime.operations import Operation


@dataclass(frozen=True)
class Action(Operation):
    """Action of a pipeline schedule: the work of one stage on one micro-batch.

    Attributes:
        stage: the index of the stage.
        micro_batch: the index of the micro-batch.
        kind: ``forward``, ``backward`` or ``weight``.
    """

    stage: int
    micro_batch: int
    kind: ClassVar[str]

    @property
    def verb(self) -> str:
        """Kind of this action (forward, backward or weight), for texts and error messages."""
        return self.kind

    def _what(self) -> str:
        return f"stage {self.stage}"

    @property
    def name(self) -> str:
        """Short name, such as ``F3,0`` for the forward pass of micro-batch 3 in stage 0.

        Kim et al. 2020 write F_ij and B_ij.
        """
        return f"{self.kind[0].upper()}{self.micro_batch},{self.stage}"


class Forward(Action):
    """Forward pass of a micro-batch."""

    kind = "forward"

    def __str__(self) -> str:
        return str(self.micro_batch)


class Backward(Action):
    """Backward pass of a micro-batch, which computes gradients of the inputs and of the weights.

    If the schedule has :class:`Weight` actions, these compute some of the weight gradients later.
    """

    kind = "backward"

    def __str__(self) -> str:
        return f"{self.micro_batch}'"


class Weight(Action):
    """Computation of the weight gradients that the backward pass of a micro-batch postponed."""

    kind = "weight"

    def __str__(self) -> str:
        return f'{self.micro_batch}"'
