"""The state that all distributed layers of one model share during a forward pass.

A layer of a plain ``nn.Sequential`` is called with a tensor and nothing else. Its distributed
counterpart must also know where that tensor lies in the image, whose sample it is, and which ranks
share statistics. The executor writes this into the context before each forward pass. Every
distributed layer of the model holds the same context object.

The fields of one forward pass are local to a thread: several threads of a rank may compute
different micro-batches at once (:mod:`distseg.runtime.devices`, autograd's own threads).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from distseg.comm.collective import Alone
from distseg.models.layers import skip_store
from distseg.tiling.layout import MapView
from distseg.tiling.tile import Box, TilePlacement


class _Pass(threading.local):
    """State of a forward pass. Each thread has a state of its own.

    The attributes are explained at the properties of the same names in :class:`Context`.
    """

    def __init__(self):
        self.places: list[TilePlacement] = []
        self.regions: list[MapView] | None = None
        self.current = 0
        self.tracking = True

    def __reduce__(self):
        # A copy or pickle of a model is in no forward pass.
        return _Pass, ()


@dataclass
class Context:
    """State that all distributed layers of one model share.

    It holds communicators, the random seed, and the windows (tiles with halo) of the current
    forward pass.
    """

    norm_comm: object = field(default_factory=Alone)
    """Ranks that share the statistics of instance and group norm: the tile group."""
    batch_comm: object = field(default_factory=Alone)
    """Ranks that share the statistics of batch norm: the tile group, or all replicas with
    ``norm_scope: step``."""
    groups_comm: object = field(default_factory=Alone)
    """Ranks that combine their batch norm statistics for the running statistics: the rank with this
    rank's tile in each sample group."""
    per_window: bool = False
    """True if statistics are taken of each window separately, halo included (``approximate.norms:
    window``), as in Seal et al. 2020."""
    whole: bool = False
    """True if all windows are whole images and it is not known which feature map a layer gets."""
    around: Callable[[dict[str, Tensor]], AbstractContextManager] = skip_store
    """Function that takes the skips of a tile batch and returns a context manager, in which all
    layers but norms are called."""
    seed: int = 0
    """The value of ``train.seed``, on which dropout masks depend."""
    epoch: int = 0
    """The number of the epoch, on which dropout masks depend."""
    _pass: _Pass = field(default_factory=_Pass, init=False, repr=False, compare=False)

    @property
    def places(self) -> list[TilePlacement]:
        """Placements of the windows of this forward pass, one for each window of this rank.

        To begin a new forward pass, assign the placements of its windows. This sets ``regions`` to
        None, because the regions of the new windows are found layer by layer.
        """
        return self._pass.places

    @places.setter
    def places(self, places: list[TilePlacement]) -> None:
        self._pass.places, self._pass.regions = places, None

    @property
    def regions(self) -> list[MapView] | None:
        """For each window, the box of the layer's input that it owns and the box that it holds.

        An executor can set these boxes before it calls a layer. Otherwise this is None, and
        :meth:`region` computes the boxes from the windows and the layer's stride.
        """
        return self._pass.regions

    @regions.setter
    def regions(self, regions: list[MapView] | None) -> None:
        self._pass.regions = regions

    def region(self, index: int, stride: tuple[int, ...], held: Sequence[int]) -> MapView:
        """Return the box of a feature map that a window owns, and the box that it holds.

        The boxes are taken from ``regions``. If that is None, they are computed from the boxes of
        the window and its tile in the image, divided by ``stride``.

        Args:
            index: index of the window in ``places``.
            stride: number of image pixels per cell of the feature map, along each dim.
            held: number of cells of the map that the window holds, along each dim.
        """
        if self.regions is not None:
            return self.regions[index]
        place = self.places[index]
        if place.tile.size == place.image:
            return MapView(tuple(held), Box.whole(held), Box.whole(held))
        whole = Box.whole(place.image)
        return MapView(
            whole.coarsened(stride).stop,
            place.tile.coarsened(stride),
            place.window.coarsened(stride),
        )

    def owns_all(self, size: tuple[int, ...]) -> bool:
        """Return True if this rank owns all cells that its first window holds.

        This holds if the owned box in ``regions`` has the size ``size``. If ``regions`` is None, it
        holds if the tile is the whole image.

        Args:
            size: number of cells of the map that the window holds, along each dim.
        """
        if self.regions is not None:
            return self.regions[0].owned.size == size
        place = self.places[0]
        return place.tile.size == place.image

    @property
    def current(self) -> int:
        """Index in ``places`` of the window that a layer is working on."""
        return self._pass.current

    @current.setter
    def current(self, current: int) -> None:
        self._pass.current = current

    @property
    def tracking(self) -> bool:
        """True if norms add the statistics of this forward pass to their running statistics.

        False if the pass repeats an earlier pass of the same images, for instance to recompute
        activations. The statistics of these images were added already.
        """
        return self._pass.tracking

    @tracking.setter
    def tracking(self, tracking: bool) -> None:
        self._pass.tracking = tracking

    @contextmanager
    def repeating(self, repeated: bool = True):
        """Keep forward passes inside this context manager from changing the running statistics.

        Args:
            repeated: if False, the forward passes change the running statistics as usual.
        """
        before, self.tracking = self.tracking, not repeated
        try:
            yield
        finally:
            self.tracking = before

    @property
    def place(self) -> TilePlacement:
        """Placement of the window that a layer is working on."""
        return self.places[self.current]
