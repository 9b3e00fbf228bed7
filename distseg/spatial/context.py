"""What the distributed layers of one model know about the work in hand.

A layer of a plain ``nn.Sequential`` is called with a tensor and nothing else. Its distributed twin must also know
where that tensor lies, whose sample it is and with whom statistics are shared. The executor writes it here before each
forward pass, and every twin of the model holds the same object.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from distseg.comm.collective import Alone
from distseg.geometry.tile import Place


@dataclass
class Context:
    norm_comm: object = field(default_factory=Alone)
    """Ranks that share the statistics of instance and group norm: the tile group."""
    batch_comm: object = field(default_factory=Alone)
    """Ranks that share those of batch norm: the tile group, or all replicas (``norm_scope: step``)."""
    groups_comm: object = field(default_factory=Alone)
    """Ranks whose batch norm statistics enter the running ones: those with this rank's tile in each sample group."""
    per_window: bool = False
    """Statistics of single windows, halo included, as the paper ran it: an approximation (``norm_scope: window``)."""
    seed: int = 0
    epoch: int = 0
    tracking: bool = True
    """Off while a forward pass is repeated, so that running statistics count it once."""
    places: list[Place] = field(default_factory=list)
    """The windows of this forward pass."""
    current: int = 0
    """The one that a layer is working on."""

    @property
    def place(self) -> Place:
        return self.places[self.current]
