"""What the distributed layers of one model know about the work in hand.

A layer of a plain ``nn.Sequential`` is called with a tensor and nothing else. Its distributed twin must also know
where that tensor lies, whose sample it is and with whom statistics are shared. The executor writes it here before each
forward pass, and every twin of the model holds the same object. What belongs to one forward pass is of one thread, as
the threads of a rank may compute several micro-batches at once (:mod:`distseg.runtime.devices`, autograd's own).
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable, ContextManager, Sequence

from torch import Tensor

from distseg.comm.collective import Alone
from distseg.models.layers import skip_store
from distseg.tiling.layout import Region
from distseg.tiling.tile import Box, TilePlacement


class _Pass(threading.local):
    """The forward pass that the calling thread is in."""

    def __init__(self):
        self.places: list[TilePlacement] = []
        self.regions: list[Region] | None = None
        self.current = 0
        self.tracking = True

    def __reduce__(self):
        return _Pass, ()  # a copy of a model is in no forward pass


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
    whole: bool = False
    """All windows are whole images, of a network whose maps are not known."""
    around: Callable[[dict[str, Tensor]], ContextManager] = skip_store
    """In which layers are called, norms aside; given the skips of the piece at hand."""
    seed: int = 0
    epoch: int = 0
    _pass: _Pass = field(default_factory=_Pass, init=False, repr=False, compare=False)

    @property
    def places(self) -> list[TilePlacement]:
        """The windows of this forward pass."""
        return self._pass.places

    @places.setter
    def places(self, places: list[TilePlacement]) -> None:
        self._pass.places, self._pass.regions = places, None

    @property
    def regions(self) -> list[Region] | None:
        """What is held and owned of the feature map that a layer is called with; None, as after new places, where it follows from the windows."""
        return self._pass.regions

    @regions.setter
    def regions(self, regions: list[Region] | None) -> None:
        self._pass.regions = regions

    def region(self, index: int, stride: tuple[int, ...], held: Sequence[int]) -> Region:
        """The same of window ``index``, at a layer with this cumulative stride that has ``held`` cells of it."""
        if self.regions is not None:
            return self.regions[index]
        place = self.places[index]
        if place.tile.size == place.image:
            return Region(tuple(held), Box.whole(held), Box.whole(held))
        whole = Box.whole(place.image)
        return Region(
            whole.coarsened(stride).stop,
            place.tile.coarsened(stride),
            place.window.coarsened(stride),
        )

    def owns_all(self, size: tuple[int, ...]) -> bool:
        """Whether the first window holds a feature map of this size, and owns all of it."""
        if self.regions is not None:
            return self.regions[0].owned.size == size
        place = self.places[0]
        return place.tile.size == place.image

    @property
    def current(self) -> int:
        """The window that a layer is working on."""
        return self._pass.current

    @current.setter
    def current(self, current: int) -> None:
        self._pass.current = current

    @property
    def tracking(self) -> bool:
        """Off while a forward pass is repeated, so that running statistics count it once."""
        return self._pass.tracking

    @tracking.setter
    def tracking(self, tracking: bool) -> None:
        self._pass.tracking = tracking

    @contextmanager
    def repeating(self, repeated: bool = True):
        """Forward passes inside have been counted before, if ``repeated``."""
        before, self.tracking = self.tracking, not repeated
        try:
            yield
        finally:
            self.tracking = before

    @property
    def place(self) -> TilePlacement:
        return self.places[self.current]
