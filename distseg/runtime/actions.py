"""The passes of a pipeline schedule: forward, backward, and the gradients of weights that were put off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distseg.runtime.operations import Operation


@dataclass(frozen=True)
class Action(Operation):
    """A pass of one micro-batch through one stage."""

    stage: int
    micro_batch: int
    kind: ClassVar[str]

    @property
    def verb(self) -> str:
        return self.kind

    def _what(self) -> str:
        return f"stage {self.stage}"

    @property
    def name(self) -> str:
        """F_ij or B_ij as in torchgpipe's paper: micro-batch i, stage j; W_ij likewise."""
        return f"{self.kind[0].upper()}{self.micro_batch},{self.stage}"


class Forward(Action):
    kind = "forward"

    def __str__(self) -> str:
        return str(self.micro_batch)


class Backward(Action):
    """The gradient of the inputs; of the weights too, but for those that a :class:`Weight` computes."""

    kind = "backward"

    def __str__(self) -> str:
        return f"{self.micro_batch}'"


class Weight(Action):
    """The gradients of the weights that the backward pass of this micro-batch has put off."""

    kind = "weight"

    def __str__(self) -> str:
        return f'{self.micro_batch}"'
