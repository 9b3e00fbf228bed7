"""Count the tensors that a stage holds on a tile, by walking its layers forward and backward.

The walk follows what the executor does with one micro-batch. Forward, a feature map lives until its
last reader has run, and longer if autograd keeps it. Backward, the layers run in reverse order.
Each one frees what autograd kept for it, and turns the gradient of its result into gradients of its
inputs. The peak of a pass is the most bytes that live at once::

    layer            conv0   norm0   conv1   loss
    kept             {x}     {a}     {b}     {log p}          maps x, a, b, c = logits
    backward, live   {x}     {x a}   {x a b} {x a b log p}    + gradients of result and input

Layers are those that a rank runs, not those of the plain network: a norm computes the activation
behind it as well, and an activation overwrites its input where that is safe
(:mod:`distseg.runtime.swap_layers`). benchmarks/layout_memory.py compares the walk with the tensors
of real steps.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from distseg.layers.criterion import Criterion
from distseg.layers.graph import reach_for
from distseg.layers.layer_table import fuses
from distseg.layers.norm import NORMS, tracks
from distseg.models.layers import Cat, Pop, Stash
from distseg.models.network import calls_of, flat_layers
from distseg.planning.cost import DTYPES
from distseg.planning.held import Held
from distseg.planning.layerwise import Numbers, alone, copied, random_input
from distseg.planning.live_bytes import LiveBytes
from distseg.runtime.own_part import AUTOCAST
from distseg.runtime.swap_layers import Folded, parallelize
from distseg.tiling.graph import last_readings

LABEL = 8  # bytes of a label, which is int64
# Numbers in float64 that a norm keeps for each channel of an image: moments, the coefficients that
# follow from them, and dropout masks.
_NUMBERS = 16
# Tables of float64 with a number for each image of a step and each partial sum of the loss: the
# sums, the loss gradient, and their copies.
_TABLES = 4


@dataclass(frozen=True)
class LayerTensors:
    """Tensors that one layer makes and keeps for a micro-batch of whole images.

    The number of a tensor is its index in :attr:`NetworkTensors.sizes`.

    Attributes:
        inputs: the numbers of the tensors that the layer reads.
        result: the number of the layer's result. A layer that overwrites or returns an input has
            the number of this input here.
        kept: the numbers of the tensors that autograd keeps for the layer's backward pass, without
            parameters.
        forward: bytes of tensors that live only inside the layer's forward pass.
        backward: bytes of tensors that live only inside the layer's backward pass. Gradients of
            weights are included, gradients of the layer's result and inputs are not.
        views: the positions in ``inputs`` of the inputs whose gradients are views of the gradient
            of the layer's result.
        noted: bytes of batch statistics that a norm stores until it updates its running statistics.
        buffers: bytes of the layer's buffers, and of the counts of steps that the optimizer keeps
            for the layer's parameters.
        parameters: the number of the layer's parameters.
        fuses: True if the layer and its halo exchange are one autograd function, whose backward
            pass computes the gradients of weights later (:mod:`distseg.layers.conv`).
        convolves: True if the layer has convolutions, whose weight gradients ZB-H1 postpones.
    """

    inputs: tuple[int, ...]
    result: int
    kept: frozenset[int]
    forward: int
    backward: int
    views: frozenset[int]
    noted: int
    buffers: int
    parameters: int
    fuses: bool
    convolves: bool


class LossTensors(NamedTuple):
    """Bytes of the tensors that the loss makes for a micro-batch of whole images.

    Attributes:
        kept: bytes of the tensors that autograd keeps for the backward pass of the loss.
        forward: bytes at the peak of the forward pass of the loss, without the network's result.
        backward: bytes at the peak of the backward pass of the loss, without the kept tensors. The
            gradient of the network's result is included.
        row: bytes that the tables of partial sums of the loss have for each image of a step.
    """

    kept: int
    forward: int
    backward: int
    row: int


@dataclass(frozen=True)
class NetworkTensors:
    """Tensors of all layers of a network for a micro-batch of whole images.

    Attributes:
        layers: the tensors of each layer.
        reads: for each layer, the numbers of the feature maps that it reads.
        sizes: bytes of each tensor. The index of a tensor is its number; tensor 0 is the image.
        owners: for each tensor, the number of the feature map whose cells its size is proportional
            to, or None if its size does not depend on the size of the image.
        loss: the tensors of the loss.
        pixels: bytes of the images of a micro-batch, and bytes of their labels. The images include
            their copy in channels_last, if this is the memory format.
        weight_bytes: bytes of a weight, of its gradient, or of a value that the optimizer keeps.
        cast_bytes: bytes of one weight in the copy that autocast makes (bf16 and fp16), else 0.
        images: the number of images of a micro-batch.
    """

    layers: tuple[LayerTensors, ...]
    reads: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    owners: tuple[int | None, ...]
    loss: LossTensors
    pixels: tuple[int, int]
    weight_bytes: int
    cast_bytes: int
    images: int

    def of_map(self, source: int) -> int:
        """Return the number of the tensor that holds feature map ``source``; map 0 is the image."""
        return self.layers[source - 1].result if source else 0

    @cached_property
    def last_read(self) -> dict[int, list[int]]:
        """For each layer, the numbers of the feature maps that it is the last layer to read."""
        return last_readings(self.reads, range(len(self.reads)))

    @cached_property
    def readers(self) -> dict[int, list[tuple[int, int]]]:
        """For each feature map, its readers: the layer, and the place among the layer's inputs."""
        found: dict[int, list[tuple[int, int]]] = {}
        for number, reads in enumerate(self.reads):
            for place, source in enumerate(reads):
                found.setdefault(source, []).append((number, place))
        return found

    def least_of_stages(self, tile: TileSizes) -> StageTensors:
        """Return lower bounds of the bytes of tensors that stages hold, for all possible stages.

        For a given stage, :func:`stage_tensors` computes the bytes themselves.

        When the backward pass computes layer l, autograd has freed what it kept for later layers.
        A stage with layers a..b-1 then holds at least the tensors kept for layers a..l, the
        gradients of the inputs of layer l, and the gradient of layer l's result or of all feature
        maps that the stage has sent. The largest sum over l is the bound of the stage's peak.

        Args:
            tile: the sizes of feature maps on a tile.

        Returns:
            Arrays (n + 1, n + 1) for n layers. Entry [a, b] belongs to a stage with layers a..b-1.
            Only ``full``, ``inputs``, ``received``, ``sent`` and ``working`` are computed; the
            others are 0.
        """
        least, n = list(tile.maps), len(self.layers)
        for reads, frame in zip(self.reads, tile.frames):
            if frame:
                least[reads[0]] = min(least[reads[0]], frame)
        sizes = np.array(self.sizes, dtype=float)
        sizes *= [1.0 if owner is None else least[owner] for owner in self.owners]
        if not self.cast_bytes:
            sizes[0] = 0.0  # The images of all micro-batches are counted together.
        tables = (table.bytes_of(sizes) for table in self._held_by_stages)
        full, inputs, received, sent = tables
        results, made = sizes[[layer.result for layer in self.layers]], np.zeros(n)
        for number, (layer, reads) in enumerate(zip(self.layers, self.reads)):
            new = [source for place, source in enumerate(reads) if place not in layer.views]
            made[number] = sum(sizes[self.of_map(source)] for source in new if source)
        upper = np.tri(n, dtype=bool).T
        moments = np.where(upper, full[:-1, 1:] + made, 0.0)
        working = np.zeros_like(full)
        working[:-1, 1:] = np.maximum(
            np.maximum.accumulate(np.where(upper, moments + results, 0.0), axis=1),
            np.maximum.accumulate(moments, axis=1) + sent[:-1, 1:],
        )
        received[0] = 0.0  # The first stage reads the images.
        working = np.maximum(working - full, 0.0)
        return StageTensors(full, inputs, received, sent, 0.0, 0.0, working, 0.0)

    @cached_property
    def _held_by_stages(self) -> tuple[_StageRanges, ...]:
        """Four lists of tensors: held after the forward pass, inputs, received and sent.

        For each tensor, a list has the possible stages (ranges of layers) that hold, read, receive
        or send the tensor. If one tensor contains two feature maps, the first two lists have one
        entry for the tensor. The lists of received and of sent tensors have an entry for each
        feature map, because each feature map is a message.
        """
        layers = len(self.layers)
        full, inputs, received, sent = tables = tuple(_StageRanges(layers) for _ in range(4))
        read: dict[int, list[tuple[int, int]]] = {}  # by tensor: (layer, least first layer)
        for source, readers in self.readers.items():
            places = [(number, source) for number, _ in readers]
            one, last = self.of_map(source), places[-1][0]
            sent.add(one, range(source), range(source, last + 1))
            received.add_first(one, places)
            read.setdefault(one, []).extend(places)
        held = {one: list(places) for one, places in read.items()}
        for number, layer in enumerate(self.layers):
            for one in layer.kept:
                held.setdefault(one, []).append((number, 0))
        for table, found in ((inputs, read), (full, held)):
            for one, places in found.items():
                table.add_first(one, places)
        return tables


def tensors_of(
    model: nn.Module,
    size: Sequence[int],
    images: int,
    precision: str,
    channels_last: bool,
    loss: Criterion,
) -> NetworkTensors:
    """Return the tensors of a network that is trained on whole images.

    Each layer runs forward and backward on the meta device, which allocates no memory.

    Args:
        model: a list of layer calls, on any device. It is not changed.
        size: the size of an image in pixels.
        images: the number of images of a micro-batch.
        precision: the number type in which the network computes: fp64, fp32, bf16 or fp16.
        channels_last: True if feature maps have the memory format channels_last.
        loss: the loss of the training.
    """
    dtype = DTYPES[precision]

    def outline(t: Tensor) -> Tensor:
        wanted = dtype if t.is_floating_point() else None
        return torch.empty_like(t, device="meta", dtype=wanted)

    network = _as_run(copied(model, outline), copied(model, outline))
    numbers, x = Numbers(network), random_input(network, size, images, "meta")
    numbers.number(x)
    found: list[LayerTensors] = []
    owners: list[int | None] = [0]
    calls = calls_of(network)
    for number, (_, call) in enumerate(alone(network, x)):
        call.readers = 1  # The walk adds up the gradients of several readers.
        kept: list[Tensor] = []
        with LiveBytes("meta", call.inputs) as there, _recorded(kept):
            output = call.forward()
        with LiveBytes("meta", [output, *kept]) as back:
            gradients = call.backward()
        layer, maps = call.layer, [numbers.number(t) for t in call.inputs]
        keeps = {numbers.number(t) for t in kept if not numbers.is_weight(t)}
        made = {_key(g): g.untyped_storage().nbytes() for g in gradients}
        shared = made.pop(_key(output), None) is not None
        result = numbers.number(output)
        owners += [number + 1] * (len(numbers.sizes) - len(owners))
        norm = isinstance(layer, NORMS)
        if norm:
            keeps.add(len(owners))
            owners.append(None)
            numbers.sizes.append(_NUMBERS * 8 * images * output.shape[1])
        found.append(
            LayerTensors(
                tuple(maps),
                result,
                frozenset(keeps),
                there.peak - there.bytes,
                back.peak - sum(made.values()),
                _views(layer, len(maps), channels_last) if shared else frozenset(),
                2 * 8 * output.shape[1] if norm and tracks(layer) else 0,
                sum(b.nbytes for b in layer.buffers()) + 4 * len(list(layer.parameters())),
                sum(p.numel() for p in layer.parameters()),
                fuses(layer),
                any(isinstance(m, nn.modules.conv._ConvNd) for m in layer.modules()),
            )
        )
    pixels = images * x[0, 0].numel()
    return NetworkTensors(
        tuple(found),
        tuple(call.reads for call in calls),
        tuple(numbers.sizes),
        tuple(owners),
        _of_loss(loss, output.detach(), precision),
        # The copy in channels_last is made beside the images as they were read.
        (
            (1 + channels_last) * pixels * x.shape[1] * (8 if precision == "fp64" else 4),
            pixels * LABEL,
        ),
        8 if precision == "fp64" else 4,
        2 if precision in AUTOCAST else 0,
        images,
    )


def _views(layer: nn.Module, inputs: int, channels_last: bool) -> frozenset[int]:
    """Return which inputs of a layer have gradients that are views of its result's gradient.

    The result is a set of positions in the list of the layer's inputs.

    Args:
        layer: a layer whose backward pass in PyTorch returns views as gradients of all inputs.
        inputs: the number of inputs.
        channels_last: True for the memory format channels_last, in which a concatenation copies all
            gradients but that of the first map (:mod:`distseg.layers.skip`).
    """
    if channels_last and isinstance(layer, Pop):
        return frozenset({inputs - 1})  # the skip
    return frozenset({0}) if channels_last and isinstance(layer, Cat) else frozenset(range(inputs))


def _recorded(kept: list[Tensor]) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context that appends each tensor that autograd keeps in it to the list ``kept``."""

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors in the same storage."""
    return tensor.untyped_storage()._cdata


def _as_run(model: nn.Module, other: nn.Module) -> nn.Module:
    """Change a plain network so that it makes the same tensors as a rank's network; return it.

    A layer becomes an identity if another layer does its work on a rank, such as an activation
    that a norm computes. An activation overwrites its input if it does so on a rank.

    Args:
        model: the network, changed in place.
        other: a copy of the network, from which this function makes the rank's network.
    """
    tiled = parallelize(other, reach_for(other, True))
    for (name, layer), run in zip(list(flat_layers(model)), tiled.layers or ()):
        parent, _, child = name.rpartition(".")
        if isinstance(run, Folded) and not isinstance(layer, Stash):
            setattr(model.get_submodule(parent), child, nn.Identity())
        elif getattr(run, "inplace", False):
            # PyTorch annotates attributes of modules as tensors and modules only.
            layer.inplace = True  # type: ignore[assignment]
    return model


def _of_loss(loss: Criterion, output: Tensor, precision: str) -> LossTensors:
    """Return the bytes of the tensors that the loss makes for all images of a micro-batch.

    Args:
        loss: the loss.
        output: the network's result, on the meta device.
        precision: the number type of the network; with bf16 and fp16 the loss is computed in fp32.
    """
    copy = 2 * output.nbytes if precision in AUTOCAST else 0  # in fp32, twice as large
    logits = (output.float() if precision in AUTOCAST else output).detach().requires_grad_()
    shape = (len(output), *(output.shape[2:] if output.dim() > 2 else (1,)))
    labels = torch.zeros(shape, dtype=torch.int64, device="meta")
    kept: list[Tensor] = []
    with LiveBytes("meta", [logits, labels]) as there, _recorded(kept):
        rows = loss.rows(logits, labels)
    with LiveBytes("meta", [logits, labels, rows, *kept]) as back:
        torch.autograd.grad(rows, logits, torch.empty_like(rows))
    found = {_key(t): t.untyped_storage().nbytes() for t in kept}
    found.pop(_key(labels), None)
    held = sum(found.values())
    return LossTensors(held, there.peak + copy, back.peak + copy // 2, _TABLES * 8 * loss.sums)


@dataclass(frozen=True, eq=False)
class TileSizes:
    """Sizes of tensors on a tile. Numbers of cells are fractions of whole feature maps.

    Attributes:
        maps: for each feature map, the cells that the tile holds; the image comes first.
        frames: for each layer, the cells of its input with the halo that other tiles send; 0
            without an exchange before the layer.
        read: for each layer, the cells of its input that it reads, or 0 if it reads all cells that
            the tile holds.
        cut: for each layer, True if its result is only a part of the tensor that its kernel makes.
        between: for each layer, a number for each feature map that it reads: the cells of a
            temporary tensor in the backward pass. If the layer reads a part of the map that is
            smaller along two dims or more, PyTorch extends the gradient to the map dim by dim, and
            makes such a tensor. Else the number is 0.
        owned: the pixels that the tile owns, as a fraction of the image.
        buffers: bytes of the buffers of halo messages.
    """

    maps: tuple[float, ...]
    frames: tuple[float, ...]
    read: tuple[float, ...]
    cut: tuple[bool, ...]
    between: tuple[tuple[float, ...], ...]
    owned: float
    buffers: float = 0.0

    @classmethod
    def whole(cls, layers: int) -> TileSizes:
        """Return the sizes of a tile that is the whole image, for this number of layers."""
        none = (0.0,) * layers
        return cls((1.0,) * (layers + 1), none, none, (False,) * layers, ((),) * layers, 1.0)


class _StageRanges:
    """List of tensors, with the possible stages of a network that hold each tensor.

    A possible stage has layers a..b-1, for any a < b.

    Args:
        layers: the number of layers of the network.
    """

    def __init__(self, layers: int):
        self._side = layers + 2
        self._corners: list[tuple[int, int, int]] = []  # (tensor, index of a and b, sign)

    def add(self, tensor: int, first: range, stop: range) -> None:
        """Add a tensor that stages with layers a..b-1 hold, for all a in first and b in stop."""
        for a, b, sign in (
            (first.start, stop.start, 1),
            (first.start, stop.stop, -1),
            (first.stop, stop.start, -1),
            (first.stop, stop.stop, 1),
        ):
            self._corners.append((tensor, a * self._side + b, sign))

    def add_first(self, tensor: int, places: Sequence[tuple[int, int]]) -> None:
        """Add a tensor that a stage holds if it has one of some layers.

        Args:
            tensor: the number of the tensor.
            places: pairs (layer, least). A stage with layers a..b-1 holds the tensor if, for one of
                the pairs, it has the layer and a is at least ``least``.
        """
        first, last = 0, max(layer for layer, _ in places)
        while first <= last:
            layers = [layer for layer, least in places if least <= first <= layer]
            # For the same first layers, the tensor is held from the same layer on.
            ends = [least for layer, least in places if first < least <= layer]
            stop = min([*(layer + 1 for layer in layers), *ends])
            if layers:
                self.add(tensor, range(first, stop), range(min(layers) + 1, self._side - 1))
            first = stop

    @cached_property
    def _columns(self) -> np.ndarray:
        """The three columns of ``_corners``."""
        return np.array(self._corners).T

    def bytes_of(self, sizes: np.ndarray) -> np.ndarray:
        """Return the bytes of the listed tensors that each possible stage holds.

        Args:
            sizes: the bytes of each tensor of the network.

        Returns:
            (n + 1, n + 1) for n layers. Entry [a, b] belongs to a stage with layers a..b-1.
        """
        tensors, corners, signs = self._columns
        changes = np.bincount(corners, sizes[tensors] * signs, self._side**2)
        return changes.reshape(self._side, self._side).cumsum(0).cumsum(1)[:-1, :-1]


Bytes = float | np.ndarray


class StageTensors(NamedTuple):
    """Bytes of tensors of one stage on one tile, for one micro-batch.

    If the bytes are computed for all possible stages together, each attribute is an array
    (:meth:`NetworkTensors.least_of_stages`).

    Attributes:
        full: bytes that the stage holds between its forward and its backward pass.
        inputs: bytes of the stage's inputs, which are held until the backward pass.
        received: bytes of the tensors that the stage receives from others in the forward pass.
        sent: bytes of the tensors that the stage sends to others in the forward pass.
        building: bytes at the peak of a forward pass that keeps activations, beyond ``full``.
        passing: bytes at the peak of a forward pass that keeps nothing, beyond ``inputs``; 0 if
            there is no such pass.
        working: bytes at the peak of a backward pass, beyond ``full``; at least ``building``.
        put_off: bytes that are held after the backward pass until the weight gradients are
            computed, if the schedule computes them later (ZB-H1).
        copied: bytes of the copy that is made to send a part of the stage's result, where the
            other stages read less of it than the tile holds; else 0.
    """

    full: Bytes
    inputs: Bytes
    received: Bytes
    sent: Bytes
    building: Bytes
    passing: Bytes
    working: Bytes
    put_off: Bytes
    copied: Bytes = 0.0

    def load(self, held: Held) -> Bytes:
        """Return the bytes that a stage holds at one moment, over all micro-batches.

        Args:
            held: the numbers of micro-batches at that moment, by the kind of their tensors.
        """
        found = held.full * self.full + held.inputs * self.inputs + held.arriving * self.received
        found += (held.returning + held.leaving) * self.sent + held.put_off * self.put_off
        found += held.copied * self.copied
        found += self.passing if held.passing else 0.0
        if held.backward:
            return found + self.working
        return found + self.building if held.full else found


def stage_tensors(
    tensors: TileTensors,
    layers: range,
    incoming: Collection[int],
    outgoing: Collection[int],
    apart: bool,
    repeats: bool = False,
) -> StageTensors:
    """Return the bytes of the tensors of a stage on a tile, for one micro-batch.

    Args:
        tensors: the tensors of the network on the tile.
        layers: the layers of the stage.
        incoming: the numbers of the feature maps that the stage receives from other stages.
        outgoing: the numbers of the feature maps that the stage sends to other stages.
        apart: True for a schedule that computes weight gradients later (ZB-H1).
        repeats: True if activations are recomputed, so that a first forward pass keeps nothing.
    """
    walk = _Walk(tensors, layers, incoming, outgoing)
    inputs = walk.bytes
    passing = 0.0
    if repeats:
        passing = _Walk(tensors, layers, incoming, outgoing).forward(False) - inputs
    building = walk.forward(True)
    full = walk.bytes
    working = walk.backward(apart)
    return StageTensors(
        full,
        inputs,
        sum(tensors.maps[source] for source in incoming),
        sum(tensors.maps[source] for source in outgoing),
        building - full,
        passing,
        max(building, working) - full,
        walk.postponed,
        walk.copied(),
    )


class _InputGradient(NamedTuple):
    """Gradient that a layer gives to one of the feature maps that it reads.

    Attributes:
        source: the number of the feature map.
        size: bytes of the feature map's gradient.
        made: bytes of the tensor that the layer makes; None if the gradient is a view of the
            gradient of the layer's result.
        besides: bytes of a tensor that lives only while the gradient is made.
        added: True if the layer adds feature maps of the same size. All of them then have the same
            gradient tensor.
    """

    source: int
    size: float
    made: float | None
    besides: float
    added: bool


class TileTensors:
    """Bytes of the tensors of a network on a tile. They do not depend on the stages.

    Args:
        network: the tensors of the network.
        tile: the sizes of feature maps on the tile.

    Attributes:
        sizes: bytes of each tensor. The image (tensor 0) counts 0 bytes, because the images of all
            micro-batches are counted elsewhere. It counts only with autocast, which copies the
            images of a micro-batch to another number type.
        maps: bytes of each feature map; the image comes first.
        frames: for each layer, bytes of its input with its halo; 0 without a halo exchange.
        kept: for each layer, (key, bytes) of each tensor that autograd keeps for it.
        gradients: for each layer, the gradients that it gives to the feature maps that it reads.
        scratch: for each layer, bytes of tensors that live only inside its backward pass.
        weights: for each layer, bytes of the gradients of its weights.
    """

    def __init__(self, network: NetworkTensors, tile: TileSizes):
        self.network, self.tile = network, tile
        self.sizes = [
            size * (1.0 if owner is None else tile.maps[owner])
            for size, owner in zip(network.sizes, network.owners)
        ]
        if not network.cast_bytes:
            self.sizes[0] = 0.0
        self.maps = [network.sizes[network.of_map(n)] * part for n, part in enumerate(tile.maps)]
        self.frames = [
            network.sizes[layer.inputs[0]] * part
            for layer, part in zip(network.layers, tile.frames)
        ]
        layers = range(len(network.layers))
        self.kept = [self._kept(number) for number in layers]
        self.gradients = [self._gradients(number) for number in layers]
        self.scratch = [self._scratch(number) for number in layers]
        self.weights = [
            layer.parameters * (network.weight_bytes + network.cast_bytes)
            for layer in network.layers
        ]

    def _kept(self, number: int) -> list[tuple[Hashable, float]]:
        """Return (key, bytes) of each tensor that autograd keeps for layer ``number``."""
        layer, frame = self.network.layers[number], self.frames[number]
        found: list[tuple[Hashable, float]] = []
        if self.network.cast_bytes and layer.convolves and layer.parameters:
            found.append((("cast", number), self.network.cast_bytes * layer.parameters))
        for one in layer.kept:
            if frame and one == layer.inputs[0]:
                found.append((("frame", number), frame))
            else:
                found.append((one, self.sizes[one]))
        return found

    def _scratch(self, number: int) -> float:
        """Return the bytes of tensors that live only inside the backward pass of a layer."""
        network, tile, layer = self.network, self.tile, self.network.layers[number]
        # The gradient of a part is made first, and then copied into that of the whole.
        read = max((tile.read[number], *tile.between[number][:1]))
        scratch = layer.backward * tile.maps[number + 1] + network.sizes[layer.inputs[0]] * read
        return scratch + (self.maps[number + 1] if tile.cut[number] else 0.0)

    def _gradients(self, number: int) -> list[_InputGradient]:
        """Return the gradients that layer ``number`` gives to the feature maps that it reads."""
        network, tile, layer = self.network, self.tile, self.network.layers[number]
        reads, frame, found = network.reads[number], self.frames[number], []
        for place, source in enumerate(reads):
            size, view = self.maps[source], place in layer.views
            part = tile.maps[source] > tile.maps[number + 1]
            whole = network.sizes[network.of_map(source)] == network.sizes[layer.result]
            made: float | None = size if source else 0.0
            besides = 0.0
            if view and not (part and len(layer.inputs) > 1):
                made = None
            elif place == 0 and frame:
                made, besides = frame, size  # The owned part may be copied out of it.
            elif source and tile.between[number]:
                besides = network.sizes[network.of_map(source)] * tile.between[number][place]
            added = view and len(reads) > 1 and whole
            found.append(_InputGradient(source, size, made, besides, added))
        return found


class _Walk:
    """Simulation of a stage's passes for a micro-batch, which counts the bytes of live tensors.

    Each tensor has a key and a number of holders. It is freed when its last holder drops it.
    """

    def __init__(
        self,
        tensors: TileTensors,
        layers: range,
        incoming: Collection[int],
        outgoing: Collection[int],
    ):
        self.tensors, self.network, self.tile = tensors, tensors.network, tensors.tile
        self.layers, self.incoming, self.outgoing = layers, incoming, outgoing
        self.bytes = self.peak = self.postponed = 0.0
        self._sizes: dict[Hashable, float] = {}
        self._holders: dict[Hashable, int] = {}
        self._made = 0
        self._given = set(incoming) if layers.start else {0, *incoming}  # Map 0 is the image.
        for source in self._given:
            self._hold_tensor(self.network.of_map(source))

    def copied(self) -> float:
        """Return the bytes of the copy that is made to send a part of the stage's result, or 0.

        The result of the last layer is cut to what the layers of other stages read of it. Other
        feature maps are sent whole.
        """
        network, tile, result = self.network, self.tile, self.layers.stop
        if result not in self.outgoing:
            return 0.0
        parts = [
            tile.read[reader] if place == 0 else tile.maps[reader + 1]
            for reader, place in network.readers[result]
        ]
        whole = not all(0 < part < tile.maps[result] for part in parts)
        return 0.0 if whole else network.sizes[network.of_map(result)] * max(parts)

    def _hold(self, key: Hashable, size: float) -> Hashable:
        holders = self._holders.get(key, 0)
        self._holders[key] = holders + 1
        if not holders:
            self._sizes[key] = size
            self.bytes += size
            self._note()
        return key

    def _hold_tensor(self, number: int) -> None:
        self._hold(number, self.tensors.sizes[number])

    def _note(self, more: float = 0.0) -> None:
        """Raise the peak if the live tensors and ``more`` bytes for a moment exceed it."""
        if self.bytes + more > self.peak:
            self.peak = self.bytes + more

    def _drop(self, key: Hashable) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            self.bytes -= self._sizes[key]

    def _new(self, size: float) -> Hashable:
        """Add a gradient of ``size`` bytes to the live tensors, and return its key."""
        self._made += 1
        return self._hold(("gradient", self._made), size)

    def forward(self, keep: bool) -> float:
        """Simulate the forward pass; return the bytes of live tensors at its peak.

        Args:
            keep: True if autograd keeps tensors for a backward pass.
        """
        network, self.peak = self.network, self.bytes
        # Autocast keeps the copies of weights until the pass has ended.
        casts = sum(network.layers[n].parameters for n in self.layers) * network.cast_bytes
        self._hold("casts", 0.0 if keep else casts)
        for number in self.layers:
            layer, frame = network.layers[number], self.tensors.frames[number]
            if frame:
                self._hold(("frame", number), frame)
            self._hold_tensor(layer.result)
            self._note(layer.forward * self.tile.maps[number + 1])
            if keep:
                for key, size in self.tensors.kept[number]:
                    self._hold(key, size)
            if frame:
                self._drop(("frame", number))
            for source in network.last_read[number]:
                if source not in self._given:
                    self._drop(network.of_map(source))
        if self.layers.stop == len(network.layers):
            loss, owned = network.loss, self.tile.owned
            self._note(loss.forward * owned)
            if keep:
                self._hold("loss", loss.kept * owned)
            self._drop(network.of_map(self.layers.stop))
        self._drop("casts")
        return self.peak

    def backward(self, apart: bool) -> float:
        """Simulate the backward pass; return the bytes of live tensors at its peak.

        Args:
            apart: True if the weight gradients of all convolutions are postponed to a later pass.
        """
        network, tensors, self.peak = self.network, self.tensors, self.bytes
        pending: dict[int, Hashable] = {}
        if self.layers.stop == len(network.layers):
            self._note(network.loss.backward * self.tile.owned)
            self._drop("loss")
            pending[self.layers.stop] = self._new(tensors.maps[self.layers.stop])
        for source in self.outgoing:
            pending[source] = self._new(tensors.maps[source])
            self._holders[pending[source]] += 1  # The stage holds it until the pass has ended.
        waiting: list[tuple[list[Hashable], float]] = []
        for number in reversed(self.layers):
            layer, kept = network.layers[number], [key for key, _ in tensors.kept[number]]
            gradient = pending.pop(number + 1, None)
            if gradient is None:
                for key in kept:
                    self._drop(key)
                continue
            for one, made in zip(tensors.gradients[number], self._gradients(number, gradient)):
                self._add(pending, one, made)
            later = layer.convolves and (apart or self.tile.frames[number] and layer.fuses)
            weights = tensors.weights[number]
            self._note(0.0 if later else max(tensors.scratch[number], weights))
            if later:
                while waiting and not apart:
                    self._end(*waiting.pop())
                waiting.append(([gradient, *kept], weights))
            else:
                for key in (gradient, *kept):
                    self._drop(key)
        self.postponed = sum(self._sizes[key] for key in {k for ks, _ in waiting for k in ks})
        while waiting:
            self._end(*waiting.pop())
        return self.peak

    def _end(self, keys: list[Hashable], weights: float) -> None:
        """Count a postponed weight gradient for a moment, and free the tensors that it needs.

        Args:
            keys: the tensors from which the gradient is computed.
            weights: bytes of the gradient.
        """
        self._note(weights)
        for key in keys:
            self._drop(key)

    def _gradients(self, number: int, gradient: Hashable) -> list[Hashable]:
        """Add the gradients of the inputs of layer ``number`` to the live tensors.

        Args:
            number: the index of the layer.
            gradient: the key of the gradient of the layer's result.

        Returns:
            A key for each input. It is ``gradient`` if the input's gradient is a view of that.
        """
        found = []
        for one in self.tensors.gradients[number]:
            if one.added and self._is_only_reader(one.source):
                # The stage's input needs a gradient of its own, so PyTorch copies the gradient.
                found.append(self._new(one.size))
            elif one.made is None:
                self._holders[gradient] += 1
                found.append(gradient)
            else:
                found.append(self._new(one.made))
                self._note(one.besides)
        return found

    def _is_only_reader(self, source: int) -> bool:
        """Return True if exactly one layer of the stage reads a map, and the stage receives it."""
        readers = {number for number, _ in self.network.readers[source]}
        return source in self.incoming and sum(number in self.layers for number in readers) == 1

    def _add(self, pending: dict[int, Hashable], gradient: _InputGradient, made: Hashable) -> None:
        """Add a gradient of a feature map to the gradients that wait for their layers.

        If another reader of the map has given a gradient, both are replaced by their sum.

        Args:
            pending: for each feature map, the key of its gradient.
            gradient: the new gradient.
            made: the key of the new gradient.
        """
        if gradient.source not in pending:
            pending[gradient.source] = made
            return
        total = self._new(gradient.size)
        self._drop(pending[gradient.source])
        self._drop(made)
        pending[gradient.source] = total
