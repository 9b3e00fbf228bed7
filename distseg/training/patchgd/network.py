"""Network of PatchGD, which processes a whole image as a grid of patches.

The method is "Patch Gradient Descent: Training Neural Networks on Very Large Images" (Gupta et al.,
2023). In the symbols of that publication::

    X        an image, cut into m x n patches, which may overlap            patches_of
    theta_1  the backbone: a patch -> s features                            PatchNetwork.backbone
    Z        the features of all patches, an s x m x n block                PatchNetwork.block
    theta_2  the head: Z -> the output for the image                        PatchNetwork.head
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor, nn

from distseg.config.sizes import Size
from distseg.models.bands import record_like
from distseg.models.capture.capture import as_network
from distseg.tiling.tile import Box


def starts_of(size: Sequence[int], patch: Sequence[int], step: Sequence[int]) -> list[list[int]]:
    """Return for each dim the positions, in pixels, at which patches begin along this dim.

    A patch begins every ``step`` pixels. The last patch is moved back so that it ends where the
    image ends. If the image is smaller than ``patch``, there is one patch, which begins at 0.
    """
    return [
        [min(a, n - p) for a in range(0, max(n - p, 0) + s, s)] if n > p else [0]
        for n, p, s in zip(size, patch, step)
    ]


@lru_cache(16)
def patches_of(
    size: tuple[int, ...], patch: tuple[int, ...], step: tuple[int, ...]
) -> tuple[Box, ...]:
    """Return the boxes of the patches of an image, row by row. The patches cover the image.

    All patches have the size ``patch``. Along a dim where the image is smaller than ``patch``, they
    have the size of the image.
    """
    return tuple(
        Box(start, tuple(min(a + p, n) for a, p, n in zip(start, patch, size)))
        for start in product(*starts_of(size, patch, step))
    )


class PatchNetwork(nn.Module):
    """Network (N, C, *size) -> (N, K) that sees an image as a grid of patches.

    The backbone computes s features of each patch. The head computes the output for the image from
    the features of all patches.

    Args:
        backbone: a module (N, C, *patch) -> (N, s), or (N, s, 1, ...).
        head: a module (N, s, *grid) -> (N, K). It must take every grid, unless ``made_for`` is set.
        patch: the size of a patch in pixels.
        step: the number of pixels from the start of one patch to the start of the next, along each
            dim; None for ``patch``.
        outputs: K, the number of outputs; only stored as an attribute.
        made_for: the grid of patches that the head is made for; None if it takes any grid.
    """

    made_for: tuple[int, ...] | None = None

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module,
        patch: Sequence[int],
        step: Sequence[int] | None = None,
        outputs: int | None = None,
        made_for: Sequence[int] | None = None,
    ):
        super().__init__()
        self.outputs, self.made_for = outputs, made_for and tuple(made_for)
        self.backbone, self.head, self.patch, self.step = (
            as_network(backbone),
            as_network(head),
            tuple(patch),
            tuple(step or patch),
        )
        record_like(self, self.backbone)
        parts = {"backbone": self.backbone, "head": self.head}
        self.names = {
            f"{part}.{own}": f"{part}.{user}"
            for part, network in parts.items()
            for own, user in getattr(network, "names", {}).items()
        }

    @property
    def begun(self) -> nn.Module:
        """Part of the network that gets its first weights from ``train.init``: the backbone."""
        return self.backbone

    def patches(self, size: Sequence[int]) -> tuple[Box, ...]:
        return patches_of(tuple(size), self.patch, self.step)

    def grid(self, size: Sequence[int]) -> tuple[int, ...]:
        """Return the number of patches along each dim of an image of this size."""
        return tuple(map(len, starts_of(size, self.patch, self.step)))

    def check_grid(self, size: Sequence[int]) -> None:
        """Refuse images of ``size`` pixels if the head cannot take their grid of patches.

        Raises:
            ValueError: the grid differs from ``made_for``; the message names both.
        """
        if self.made_for not in (None, self.grid(size)):
            raise ValueError(
                f"an image of {Size(size)} pixels has a grid of {Size(self.grid(size))} patches, "
                f"but this patchgd.head is made for {Size(self.made_for)} (patchgd.grid): "
                "set patchgd.head to a head that takes any grid, such as cnn, or use images of "
                "one size"
            )

    def block(self, features: Tensor, size: Sequence[int]) -> Tensor:
        """Arrange the features of all patches, (N, patches, s), as a grid: (N, s, *grid).

        ``size`` is the size of the images in pixels.
        """
        return features.movedim(1, -1).unflatten(-1, self.grid(size))

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        self.check_grid(size)
        features = [self.backbone(x[(..., *box.slices)]).flatten(1) for box in self.patches(size)]
        return self.head(self.block(torch.stack(features, 1), size)).flatten(1)


def check_patches(size: Sequence[int], patch: Sequence[int], what: str = "an image") -> None:
    """Refuse images that are smaller than a patch.

    Args:
        size: the size of the image in pixels.
        patch: the size of a patch in pixels.
        what: the name of the image in the message.

    Raises:
        ValueError: the image is smaller than a patch, or has another number of dims. The message
            names both sizes.
    """
    if len(size) != len(patch):
        raise ValueError(
            f"{what} has {Size(size)} pixels, of {len(size)} dims, "
            f"but patchgd.patch is {Size(patch)}: give patchgd.patch a number for each dim"
        )
    if any(n < p for n, p in zip(size, patch)):
        raise ValueError(
            f"{what} has {Size(size)} pixels, but patchgd.patch is {Size(patch)}: "
            "take a smaller patch"
        )
