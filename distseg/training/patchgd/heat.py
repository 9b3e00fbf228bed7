"""Compute heat maps, which show the parts of an image that a network's output depends on most.

The method is Grad-CAM (gradient-weighted class activation maps, Selvaraju et al., 2017). A is the
feature map before the last pooling over the image. In a network of patches, A is the block Z, the
features of all patches. y is the logit of the likeliest class::

    heat = max(0, sum over channels c of A_c * mean over positions of dy/dA_c)

The result is resized to the image, bilinearly. Images need not fit into memory, because the heat is
computed in two passes over the tiles of an image (:mod:`distseg.inference.predictor`):

1. The network up to the pooling computes the pooled values. The backward pass of a pooling gives
   all cells the same gradient, so the mean of dy/dA_c is dy/d(pooled) except for a constant factor.
2. The layers up to A, followed by a layer that weighs the channels by this mean, compute the heat.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

import numpy as np
import torch
from torch import Tensor, nn

from distseg.comm.collective import Alone
from distseg.data.picture import rgb
from distseg.data.store.store import shrunken
from distseg.inference.image_source import ImageSource
from distseg.inference.predictor import Predictor
from distseg.layers.context import Context
from distseg.layers.graph import graph_of, reach_for
from distseg.models.bands import record_like
from distseg.models.capture.capture import as_network
from distseg.models.layers import CutTo, MainOutput, Mean, Spread
from distseg.models.network import IMAGE, Network, channels_of_maps
from distseg.models.resize import ResizeTo
from distseg.runtime.own_part import place_model
from distseg.runtime.swap_layers import parallelize
from distseg.tiling.layout import Layout, scales_of
from distseg.tiling.resize import SizeRule
from distseg.tiling.tile import Box, strips
from distseg.training.patchgd.filling import PatchPredictor
from distseg.training.patchgd.network import PatchNetwork

_MOST = 1 << 24  # largest number of pixels of a picture
_STRIP = 1 << 20  # number of pixels that are computed at a time
_NO_POOLING = (
    "predict.heat draws the feature map before the last pooling over the image, "
    "but distseg finds no such pooling in this network: leave predict.heat out"
)


def heat_of(
    model: nn.Module, predictor: Predictor | PatchPredictor
) -> Callable[[ImageSource], Iterator[tuple[Box, np.ndarray]]]:
    """Return a function that computes the heat map of an image: it yields (tile, heat).

    A heat map (Grad-CAM) shows on which parts of the image the network's output depends most. The
    heat of a tile is (h, w) float32 and not negative. Images may have any size. The function needs
    no other rank.

    Args:
        model: a plain network with its weights.
        predictor: a predictor of the same network. The returned function uses its device,
            precision, tile size and memory budget.

    Raises:
        ValueError: distseg finds no pooling over the image in the network.
    """
    return _OfPatches(predictor) if isinstance(model, PatchNetwork) else _OfPooled(model, predictor)


class _OfPatches:
    """Heat map of an image, for a network that sees the image as patches.

    An object of this class is a function of an image that yields (tile, heat). The heat is computed
    from the features of all patches.
    """

    def __init__(self, predictor: PatchPredictor):
        self.network, self.predictor = predictor.filler.network, predictor

    def __call__(self, source: ImageSource) -> Iterator[tuple[Box, np.ndarray]]:
        size = tuple(source.size)
        features = self.predictor.features(source)
        self.network.head.eval()
        (gradients,) = _logit_gradients(
            [features], lambda features: self.predictor.filler.logits([features], [size])
        )
        heat = self.network.block((features @ gradients.mean(0))[None, :, None], size)[:, 0].relu()
        spread = Spread(heat.shape[1:], mode="bilinear", align_corners=False)
        for rows in strips(Box.whole(size), _STRIP):
            places = [range(a, b) for a, b in zip(rows.start, rows.stop)]
            yield (
                rows,
                spread.part(heat.reshape(1, -1, 1, 1), size, places)[0, 0].float().cpu().numpy(),
            )


class _OfPooled:
    """Heat map of an image, for a network with a pooling over the whole image.

    An object of this class is a function of an image that yields (tile, heat). The heat is computed
    from the feature map that the last such pooling reads.
    """

    def __init__(self, model: nn.Module, predictor: Predictor):
        self.network, self.predictor = as_network(model).eval(), predictor
        reads = self.network.reads if isinstance(self.network, Network) else {}
        # If the network has several outputs, only the first output and its poolings count.
        if reads and isinstance(self.network.get_submodule(last := [*reads][-1]), MainOutput):
            self.network = self._up_to(reads[reads[last][0]][0])
            reads = self.network.reads
        pools = [name for name in reads if isinstance(self.network.get_submodule(name), Mean)]
        if not pools:
            raise ValueError(_NO_POOLING)
        self.source = reads[pools[-1]][0]
        self.pools = [name for name in pools if reads[name][0] == self.source]
        self.after: list[str] = []  # the layers from the pooled values to the output
        for name in reads:
            if name not in self.pools and set(self.network.cells_read(name)) & {
                *self.pools,
                *self.after,
            }:
                self.after.append(name)
        vectors = {source for name in self.after for source in self.network.cells_read(name)} - set(
            self.after
        ) | set(self.pools)
        channels = dict(zip((IMAGE, *reads), channels_of_maps(self.network)))
        if any(channels[name] for name in vectors):
            raise ValueError(_NO_POOLING)
        self.channels, self.graph, self.number = (
            channels[self.source],
            graph_of(self.network),
            (IMAGE, *reads).index(self.source),
        )
        self._vectors = {name: self._predictor(self._up_to(name)) for name in sorted(vectors)}

    def __call__(self, source: ImageSource) -> Iterator[tuple[Box, np.ndarray]]:
        found = {name: self._vector(predictor, source) for name, predictor in self._vectors.items()}

        def answer(*pooled: Tensor) -> Tensor:
            there = found | dict(zip(self.pools, pooled))
            for name in self.after:
                there[name] = self.network.get_submodule(name)(
                    *(there[source] for source in self.network.cells_read(name))
                )
            return there[(*self.pools, *self.after)[-1]]

        size = tuple(source.size)
        cells = Layout(self.graph, size, [(0, n) for n in size], "all").sizes[self.number]
        gradients = torch.zeros(self.channels)
        for name, gradient in zip(
            self.pools, _logit_gradients([found[name] for name in self.pools], answer)
        ):
            gradients = gradients + gradient.view(self.channels, -1).sum(1) * (
                math.prod(cells) if self.network.get_submodule(name).total else 1
            )
        for box, heat in self._predictor(self._drawing(gradients, size, cells))(source):
            yield box, heat[0]

    def _vector(self, predictor: Predictor, source: ImageSource) -> Tensor:
        for _, vector in predictor(source):  # each tile yields the same vector
            found = vector
        return torch.from_numpy(found)[None].to(next(self.network.parameters()).dtype)

    def _drawing(self, gradients: Tensor, size: tuple[int, ...], cells: tuple[int, ...]) -> Network:
        """Return a network whose output for an image is its heat map, (1, 1, *size).

        Args:
            gradients: the weight of each channel in the heat, (C,). The channels are those of the
                feature map ``source``, which the last pooling over the image reads.
            size: the size of the image in pixels.
            cells: the size of the feature map ``source``.
        """
        weigh = nn.Conv2d(self.channels, 1, 1, bias=False)
        weigh.weight.data = gradients.view(1, -1, 1, 1)
        if self.graph.sized:  # the cells of the feature map divide the image evenly
            to_image = ResizeTo([SizeRule()] * len(size), "bilinear", False)
            return self._up_to(
                self.source,
                {"heat.weigh": weigh, "heat.positive": nn.ReLU(), "heat.resized": to_image},
                {"heat.resized": ("heat.positive", IMAGE)},
            )
        scales = [int(scales_of(self.graph, dim)[self.number]) for dim in range(len(size))]
        missing = [max(0, -(-n // scale) - cell) for n, cell, scale in zip(size, cells, scales)]
        more = {
            "weigh": weigh,
            "positive": nn.ReLU(),
            "beside": nn.ReplicationPad2d((0, missing[1], 0, missing[0])),
        }
        more |= {
            "resized": nn.Upsample(
                scale_factor=tuple(map(float, scales)), mode="bilinear", align_corners=False
            ),
            "cut": CutTo(),
        }
        return self._up_to(
            self.source,
            {
                f"heat.{name}": layer
                for name, layer in more.items()
                if name != "beside" or any(missing)
            },
            {"heat.cut": ("heat.resized", IMAGE)},
        )

    def _up_to(
        self,
        last: str,
        more: Mapping[str, nn.Module] = {},
        reads: Mapping[str, tuple[str, ...]] = {},
    ) -> Network:
        """Return a network of copies of the layers up to ``last``, followed by ``more``.

        Args:
            last: the name of the last layer to copy. Layers that it does not depend on are left
                out.
            more: further layers by name, in order. The first one reads the result of ``last``, and
                each other one reads the result of the layer before it.
            reads: for a layer of ``more`` that reads other results: the names of the layers whose
                results it reads.
        """
        wanted = {last}
        for name in reversed(list(self.network.reads)):
            wanted |= set(self.network.reads[name]) if name in wanted else set()
        layers = {
            name: copy.deepcopy(self.network.get_submodule(name))
            for name in self.network.reads
            if name in wanted
        }
        first = {next(iter(more)): (last,)} if more else {}
        found = Network(
            {**layers, **more},
            {name: self.network.reads[name] for name in layers} | first | dict(reads),
        )
        found.of_image = not more
        return record_like(found, self.network).eval()

    def _predictor(self, network: Network) -> Predictor:
        """Return a predictor of ``network`` that runs on this rank alone."""
        like = self.predictor
        place_model(
            network,
            like.devices[0],
            "fp64" if like.dtype == torch.float64 else "fp32",
            like.channels_last,
        )
        model = parallelize(network, reach_for(network, True), Context(), whole=True)
        return Predictor(
            model.eval(),
            Alone(),
            like.devices[:1],
            like.autocast,
            like.tile,
            like.scratch,
            like.channels_last,
            neighbours=like.neighbours,
            budget=like.budget,
        )


@torch.enable_grad()
def _logit_gradients(given: Sequence[Tensor], answer: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """Return the gradient of the likeliest class's logit with respect to each tensor in ``given``.

    If the network has a single logit, its sign says which class is likelier. A negative logit is
    then negated first.

    Args:
        given: the tensors that ``answer`` takes.
        answer: a function of these tensors that returns the logits of one image.
    """
    given = [x.detach().requires_grad_() for x in given]
    logits = answer(*given).flatten()
    return torch.autograd.grad(
        logits.max() if len(logits) > 1 else logits[0] * logits[0].detach().sign(), given
    )


def picture(
    heat: Iterator[tuple[Box, np.ndarray]], source: ImageSource, data: Mapping
) -> np.ndarray:
    """Draw an image with its heat map over it, in red to yellow, as a picture (H, W, 3) uint8.

    The higher the heat is, the more its color hides the image. Images of more than 16 million
    pixels are shrunk by an integer factor.

    Args:
        heat: the tiles of the image, each with its heat (h, w).
        source: the image.
        data: the section ``data`` of a run's manifest. Its ``mean`` and ``std``, one number per
            band, undo the normalization of the pixels.
    """
    by = next(k for k in count(1) if math.prod(n // k for n in source.size) <= _MOST)
    size = tuple(n // by for n in source.size)
    warmth, pixels = (
        np.zeros(size, np.float32),
        np.zeros((min(3, len(data["mean"])), *size), np.float32),
    )
    for box, part in heat:
        first, stop = (
            tuple(min(n, max(0, -(-(a - by // 2) // by))) for a, n in zip(corner, size))
            for corner in (box.start, box.stop)
        )
        inside = tuple(slice(i * by + by // 2 - a, None, by) for i, a in zip(first, box.start))
        warmth[Box(first, stop).slices] = part[inside][
            tuple(slice(b - a) for a, b in zip(first, stop))
        ]

    def by_band(numbers):
        return np.asarray(numbers[: len(pixels)], np.float32)[:, None, None]

    for rows in strips(Box.whole(size), _STRIP / by**2):
        read = source.read(
            Box(tuple(by * a for a in rows.start), tuple(by * b for b in rows.stop))
        )[: len(pixels)]
        pixels[(slice(None), *rows.slices)] = shrunken(read, by) * by_band(data["std"]) + by_band(
            data["mean"]
        )
    image = rgb(
        np.rint(pixels).clip(0, 255).astype(np.uint8) if data.get("types") == ["uint8"] else pixels
    )
    return drawn_over(image, warmth / max(warmth.max(), np.finfo(np.float32).tiny))


def drawn_over(image: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Draw a heat map, in red to yellow, over a pale image; return the picture (H, W, 3) uint8.

    Args:
        image: the colours of the image, (H, W, 3) uint8.
        heat: the heat of each pixel, (H, W), from 0 to 1.
    """
    warm = np.stack((np.ones_like(heat), heat, 0.2 * heat), -1)
    share = (0.75 * heat)[..., None]
    return (
        np.rint(255 * (share * warm + (1 - share) * (0.2 + 0.8 * image / 255.0 * 0.9)))
        .clip(0, 255)
        .astype(np.uint8)
    )
