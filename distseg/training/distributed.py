"""A module of the user that is distributed over a mesh of ranks, for a training loop in Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from distseg.comm.collective import add
from distseg.comm.launch import JointFailure, raise_jointly
from distseg.comm.staging import upload
from distseg.config.sizes import Size
from distseg.data.arrays import Arrays, Stacked
from distseg.data.sampler import Rows
from distseg.inference.image_source import ImageSource
from distseg.inference.predictor import Predictor
from distseg.layers.criterion import Criterion, Outputs
from distseg.layers.own_loss import criterion_of
from distseg.models.network import check_calls, check_size, user_name, user_names
from distseg.tiling.tile import Box, TilePlacement, check_grid, owned_tiles
from distseg.tiling.tile_batch import LazyTileBatch, TileBatch, labels_of_images, on_tile
from distseg.training.engine import Engine

T = TypeVar("T")
_MOST_CRITERIA = 16  # criteria that are kept, for loops that make a new one in each step


class Shard(NamedTuple):
    """This rank's part of images or targets, for the eager form (:meth:`DistributedModel.shard`).

    Attributes:
        model: the model that made it.
        given: the images or targets of this sample group, as the user gave them.
    """

    model: DistributedModel
    given: object


class DistributedModel(nn.Module):
    """A module whose images, layers and batches are spread over the ranks of a mesh.

    Made by :func:`distseg.distribute`. Parameters, buffers and their names are those of the user's
    module. With several stages a rank holds those of its own stages only.

    Args:
        network: the captured module. It has this rank's layers.
        engine: the steps of the network on the mesh.
        bands: number of bands of an image.
        returned: what the whole network returns.
        outputs: names of the outputs that are trained, if the module returns several.
        inputs: number of bands of each input, if the module takes several.
        order: names of the user's tensors in the order of the user's module.
        joins_images: True if in evaluation mode the images of a batch influence each other.
    """

    def __init__(
        self,
        network: nn.Module,
        engine: Engine,
        bands: int,
        returned: Outputs,
        outputs: Sequence[str] | None = None,
        inputs: Sequence[int] | None = None,
        order: Sequence[str] = (),
        joins_images: bool = False,
    ):
        super().__init__()
        self._order = {name: number for number, name in enumerate(order)}
        self.network, self.engine, self.mesh = network, engine, engine.mesh
        self.epoch = 0
        """Epoch of the training, on which the masks of dropout depend."""
        self.images_seen = 0
        """Images of the epoch so far, of all groups, on which the masks of dropout depend too."""
        self._inputs, self._output_names = inputs, outputs
        self._bands, self._outputs, self._dims = bands, returned, returned.dims
        self._trained = set(engine.parameters)
        self._criteria: dict[object, tuple[object, Criterion]] = {}
        self._unused: dict[tuple, list[int]] = {}  # by criterion: parameters without a gradient
        self._checked: set[tuple] = set()
        self._used: tuple | None = None  # the criterion and the number of images of this step
        self._in_engine: tuple | None = None  # those that the engine computes with
        self._syncs = True
        # By parameter: the part of its gradient that is not summed over the replicas yet, with the
        # gradient and its version, by which changes of the user show.
        self._local: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._in_backward = False
        self._eager: tuple | None = None  # placement, rows and images of the last forward pass
        self._predictor: Predictor | None = None
        self._hooks, self._joins_images = _hooks_of(network), joins_images

    # Parameters and state

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank with their names and order in the user's module."""
        for name, p in self._named(self.network.named_parameters("", recurse, remove_duplicate)):
            yield f"{prefix}.{name}" if prefix else name, p

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of this rank with their names and order in the user's module."""
        for name, b in self._named(self.network.named_buffers("", recurse, remove_duplicate)):
            yield f"{prefix}.{name}" if prefix else name, b

    def _named(self, found: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
        """Return tensors of the network with their names in the user's module, in its order."""
        named = user_names(found, self.network).items()
        return sorted(named, key=lambda item: self._order.get(item[0], len(self._order)))

    def state_dict(self, *args, destination=None, prefix: str = "", keep_vars: bool = False):
        """Return the tensors of this rank, by their names in the user's module. Not collective.

        With one stage these are all tensors of the module. With several, see
        :meth:`whole_state_dict`.
        """
        found = self._named(self.network.state_dict(keep_vars=keep_vars).items())
        if self._order:  # the network saves buffers, too, that the user's module does not
            found = [(name, tensor) for name, tensor in found if name in self._order]
        target = {} if destination is None else destination
        target.update((prefix + name, tensor) for name, tensor in found)
        return target

    def whole_state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of all stages on the CPU, on every rank. Collective.

        The user's own module loads it: ``module.load_state_dict(model.whole_state_dict())``.
        """
        own = {name: tensor.detach().cpu() for name, tensor in self.state_dict().items()}
        parts = self.mesh.pipeline.allgather(
            {
                name: (t.float() if t.dtype == torch.bfloat16 else t).numpy()
                for name, t in own.items()
            }
        )
        return {
            name: own[name] if name in own else torch.from_numpy(array)
            for part in parts
            for name, array in part.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """Copy tensors of the user's module, of which this rank takes those of its layers.

        Args:
            state_dict: a state dict of the user's module, or of this rank.
            strict: refuse tensors that are missing, and those of no rank's layers.
            assign: must be False; the tensors of the model are those of its optimizer.

        Raises:
            ValueError: a name or a shape differs. It is raised on all ranks, before any is copied.
        """
        own = self.state_dict(keep_vars=True)
        with raise_jointly(self.mesh.world):
            if assign:
                raise ValueError(
                    "assign=True would part the model from its optimizer: leave it out"
                )
            for name, tensor in own.items():
                if name not in state_dict:
                    if strict:
                        raise ValueError(f"the state dict lacks {name}: load that of this network")
                elif state_dict[name].shape != tensor.shape:
                    raise ValueError(
                        f"{name} has the shape {tuple(state_dict[name].shape)} in the state dict, "
                        f"but {tuple(tensor.shape)} in the network: load that of this network"
                    )
        known = {name for names in self.mesh.world.allgather(list(own)) for name in names}
        with raise_jointly(self.mesh.world):
            if strict and (others := sorted(set(state_dict) - known)):
                raise ValueError(
                    f"the state dict has {others[0]}, which the network does not have: load that "
                    "of this network"
                )
        for name, tensor in own.items():
            if name in state_dict:
                tensor.copy_(state_dict[name])
        return nn.modules.module._IncompatibleKeys([n for n in own if n not in state_dict], [])

    def train(self, mode: bool = True) -> DistributedModel:
        """Set the mode of the eager form. :meth:`backward` trains and :meth:`predict` evaluates."""
        self.training = mode
        self.engine.model.train(mode)
        return self

    def _apply(self, fn, recurse=True):
        if all((y := fn(x)).dtype == x.dtype and y.device == x.device for x in self.parameters()):
            return self
        raise ValueError(
            "a distributed model stays on its device and in its dtype: choose them in "
            "distseg.init_mesh(device=...) and distseg.distribute(precision=...), before the "
            "optimizer is made"
        )

    # Training

    def backward(self, image, target, criterion, scale: float = 1.0) -> Tensor:
        """Add the gradient of the loss to the parameters' ``grad``; return the loss. Collective.

        The gradient is that of the serial program: of the loss over all images of all sample
        groups. All ranks of a sample group give the same images. Groups give different images, as
        many as the others. Each rank reads its part.

        Args:
            image: (B, C, *size) or (C, *size), normalised as the module takes it, or a list of
                images (C, *size) of any sizes. A tuple of these if the module takes several inputs.
            target: as many targets, (B, *size) or (B, C', *size). If the module returns a vector
                of each image: (B,) or a number.
            criterion: a :class:`distseg.PixelLoss`, a :class:`distseg.SumLoss`, a weighted sum of
                them, the name of a loss such as ``cross_entropy + 0.5*dice``, or a dict of these
                by the names of the outputs.
            scale: factor of the gradient, such as ``scaler.get_scale()`` or 1 / (number of calls
                that are accumulated). The loss is returned without it.

        Returns:
            The loss, a float64 tensor on the CPU, equal on all ranks.

        Raises:
            ValueError: images or targets do not fit, or the criterion cannot be computed tile by
                tile. It is raised on all ranks before any work.
        """
        micro_batches = self._prepared(image, target, criterion)
        self._begin()
        loss = self.engine.accumulate(micro_batches)
        self._finish(scale)
        self.engine.model.commit_statistics(unbiased=True)
        return torch.tensor(self.engine.over_stages(loss), dtype=torch.float64)

    @contextmanager
    def no_sync(self):
        """Leave the sum over replicas to the first backward pass after the block.

        Gradients of several calls of :meth:`backward` are then sent once.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the gradients to a norm of at most ``max_norm``, over all stages. Collective.

        Returns the norm before. With one stage it equals ``torch.nn.utils.clip_grad_norm_``.

        Raises:
            ValueError: gradients of :meth:`no_sync` are not summed over the replicas yet.
        """
        if self._local:
            raise ValueError(
                "gradients of calls inside no_sync are not summed over the ranks yet: call "
                "backward outside of no_sync before clip_grad_norm_"
            )
        parts = [p.grad for p in self.engine.parameters if p.grad is not None]
        own = sum(float(torch.linalg.vector_norm(g.double())) ** 2 for g in parts)
        norm = self.engine.over_stages(own) ** 0.5
        if (factor := max_norm / (norm + 1e-6)) < 1:
            for gradient in parts:
                gradient.mul_(factor)
        return norm

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, on whose number the masks of dropout depend."""
        self.epoch, self.images_seen = epoch, 0

    def _check_hooks(self) -> None:
        """Refuse hooks that were added to layers or weights after the module was distributed."""
        found = _hooks_of(self.network)
        if added := [name for name in found if found[name] > self._hooks.get(name, 0)]:
            raise ValueError(
                f"{user_name(added[0], self.network)} has got a hook since the module was "
                "distributed, but ranks and tiles have only parts of its maps and gradients: "
                "remove the hook; watch maps and gradients in the plain module"
            )

    def _prepared(self, image, target, criterion) -> list[list[TileBatch | LazyTileBatch]]:
        """Check the arguments of a step and return this rank's tile batches."""
        with raise_jointly(self.mesh.world):
            self._check_frozen()
            self._check_hooks()
            images = self._arrays(image)
            targets = self._targets(target, images)
            chosen = self._criterion(criterion, targets)
            self._check(images)
        self._check_groups(images)
        count = self.engine.config.train.accumulate
        if len(images) % count:  # all ranks have as many images
            raise JointFailure(
                f"a batch of {len(images)} images does not divide into {count} micro-batches: "
                "give distribute other micro_batches, or batches of a multiple of it"
            )
        each = len(images) // count
        self._used = chosen, each
        if self._in_engine != self._used:
            self.engine.use_loss(chosen, each)
            self._in_engine = self._used
        rows, first = self._rows(each, count)
        return [
            self._tile_batches(
                images, targets, range(m * each, (m + 1) * each), first, rows.of_micro_batch(m)
            )
            for m in range(count)
        ]

    def _rows(self, images: int, micro_batches: int) -> tuple[Rows, int]:
        """Return the places of a step's images in it, and the number of the first in the epoch."""
        rows = Rows(self.mesh.shape.samples, self.mesh.sample, micro_batches, images)
        first, self.images_seen = self.images_seen, self.images_seen + rows.total
        self.engine.context.epoch = self.epoch
        return rows, first

    def _arrays(self, given) -> Arrays | Stacked:
        if self._inputs is not None:
            if not isinstance(given, tuple) or len(given) != len(self._inputs):
                raise ValueError(
                    f"the network takes {len(self._inputs)} inputs: give a tuple of as many images"
                )
            images = Stacked([Arrays(one, self._dims, (1,), "image") for one in given])
        else:
            images = Arrays(given, self._dims, (1,), "image")
        if not len(images):
            raise ValueError("the batch has no image: give at least one")
        for image in range(len(images)):
            if images.channels(image) != self._bands:
                raise ValueError(
                    f"image {image} has {images.channels(image)} bands, but the network takes "
                    f"{self._bands}: give images (B, {self._bands}, *size)"
                )
        return images

    def _targets(self, given, images: Arrays | Stacked):
        if self._outputs.whole:
            labels = _widened(torch.as_tensor(given).flatten())
            if len(labels) != len(images):
                raise ValueError(
                    f"there are {len(images)} images, but {len(labels)} targets: give one for each"
                )
            return labels
        targets = Arrays(given, self._dims, (0, 1), "target", images.is_batch)
        if len(targets) != len(images):
            raise ValueError(
                f"there are {len(images)} images, but {len(targets)} targets: give one for each"
            )
        for image in range(len(images)):
            if targets.size(image) != images.size(image):
                raise ValueError(
                    f"image {image} has {Size(images.size(image))} pixels, but its target has "
                    f"{Size(targets.size(image))}: give a target of each pixel"
                )
        return targets

    def _criterion(self, given, targets) -> Criterion:
        """Return the criterion, tried out at its first use."""
        key = given if isinstance(given, str) else id(given)
        if key in self._criteria:
            return self._criteria[key][1]
        made = criterion_of(given, self._outputs.channels, self._output_names)
        if self._outputs.whole:
            example = targets.view(-1, *(1,) * self._dims)
        else:
            size = targets.size(0)
            example = targets.read([0], Box.whole(tuple(min(n, 64) for n in size)))
        made.check(self._outputs, example)
        # The user's object is kept, so that no other one gets its id.
        self._criteria[key] = given, made
        if len(self._criteria) > _MOST_CRITERIA:
            _, old = self._criteria.pop(next(iter(self._criteria)))
            for used in [used for used in self._unused if used[0] is old]:
                del self._unused[used]
        return made

    def _check_frozen(self) -> None:
        """Refuse a step without gradients, and parameters frozen or thawed after the start."""
        if not torch.is_grad_enabled():
            raise ValueError("gradients are off (torch.no_grad): call model.predict(image)")
        self._check_local()
        for name, p in self.network.named_parameters():
            if p.requires_grad != (p in self._trained):
                raise ValueError(
                    f"{name} has requires_grad {p.requires_grad}, but had {not p.requires_grad} "
                    "when the model was made: freeze or thaw before distseg.distribute"
                )

    def _check(self, images: Arrays | Stacked) -> None:
        for size, those in images.by_size(range(len(images))):
            key = size, len(those)
            if key in self._checked:
                continue
            check_size(self.network, size)
            check_calls(self.network, size, len(those))
            config = self.engine.config
            fine = Size(g * p for g, p in zip(config.mesh.tiles, config.owned, strict=True))
            check_grid(size, fine, self.engine.reading.stride)
            self._checked.add(key)

    def _check_groups(self, images: Arrays | Stacked) -> None:
        """Refuse other numbers of images in groups, and other sizes in one of them. Collective."""
        mine = [tuple(images.size(number)) for number in range(len(images))]
        groups: dict[int, list[tuple[int, ...]]] = {}
        for sample, sizes in self.mesh.world.allgather((self.mesh.sample, mine)):
            if sizes != (first := groups.setdefault(sample, sizes)):
                raise JointFailure(
                    f"ranks that share images give {len(first)} of {_sizes(first)} and "
                    f"{len(sizes)} of {_sizes(sizes)}: give the same images on all ranks of a "
                    "sample group"
                )
        counts = {len(sizes) for sizes in groups.values()}
        if len(counts) > 1:  # all ranks see it
            raise JointFailure(
                f"sample groups give {min(counts)} to {max(counts)} images in one step: give "
                "as many in each group (drop the last batch of an epoch, or fill it up)"
            )

    def _tile_batches(
        self, images: Arrays | Stacked, targets, those: Sequence[int], first: int, rows: list[int]
    ) -> list[TileBatch | LazyTileBatch]:
        """Return this rank's tile batches of a micro-batch.

        Args:
            those: the images of the micro-batch.
            first: the number of the step's first image in the epoch.
            rows: the place of each image in the step.
        """
        engine = self.engine
        found = []
        for size, group in images.by_size(those):
            at = tuple(image - those[0] for image in group)
            samples = tuple(first + rows[n] for n in at)
            for tile, window in owned_tiles(
                size,
                engine.config.mesh.tiles,
                engine.config.owned,
                self.mesh.tile if len(self.mesh.tile) == self._dims else (0,) * self._dims,
                engine.reading,
            ):
                place = TilePlacement(size, tile, window, at, samples)
                found.append(self._tile_batch(images, targets, group, place))
        return found

    def _tile_batch(
        self, images: Arrays | Stacked, targets, group: list[int], place: TilePlacement
    ) -> TileBatch | LazyTileBatch:
        def pixels(box: Box) -> Tensor:
            return images.read(group, box)

        def labels(box: Box) -> Tensor:
            return self._labels(targets, group, self.engine.loss, box)

        pipeline = self.engine.pipeline
        if self.engine.streaming:
            return LazyTileBatch(place, pixels, labels)
        return TileBatch(
            pixels(place.window) if pipeline.first else None,
            labels(place.tile) if pipeline.last and targets is not None else None,
            place,
        )

    def _labels(self, targets, group: list[int], criterion: Criterion, box: Box) -> Tensor:
        """Return the targets of a box of some images of one size."""
        if self._outputs.whole:
            return labels_of_images(targets[group], box, criterion.ignore_index)
        return _widened(targets.read(group, box))

    # Gradients: autograd adds this rank's part; the sum over replicas is then added to what was
    # there before.

    def _begin(self) -> None:
        """Set aside the gradients of earlier calls, and make room for this rank's part."""
        gradients, self._carried = self.engine.gradients, {}
        late = self._taken_local()
        for number, p in enumerate(self.engine.parameters):
            if p.grad is not None:
                carried = p.grad.clone()
                self._carried[number] = carried - late[number] if number in late else carried
        self._late = late
        self._probes = self._used not in self._unused
        gradients.detach() if self._probes else gradients.zero()

    def _taken_local(self) -> dict[int, Tensor]:
        """Return the parts of gradients that are not summed yet, by parameter."""
        late = {}
        for number, (part, _, _) in self._local.items():
            if self._is_unchanged(number):
                late[number] = part
        self._local = {}
        return late

    def _check_local(self) -> None:
        """Refuse gradients of :meth:`no_sync` that were changed before they were summed."""
        for number in self._local:
            now = self.engine.parameters[number].grad
            if not self._is_unchanged(number) and now is not None and now.count_nonzero():
                raise ValueError(
                    "gradients of calls inside no_sync were changed before they were summed over "
                    "the ranks: clip or scale them after a call outside of no_sync"
                )

    def _is_unchanged(self, number: int) -> bool:
        """Return True if a gradient that is not summed yet is as the last call left it."""
        _, gradient, version = self._local[number]
        now = self.engine.parameters[number].grad
        return now is gradient and now._version == version

    @torch.no_grad()
    def _finish(self, scale: float) -> None:
        """Sum the gradients over the replicas, unless inside :meth:`no_sync`. Collective."""
        engine, parameters = self.engine, self.engine.parameters
        if self._probes:
            without = {n for n, p in enumerate(parameters) if p.grad is None}
            of_all = self.mesh.replicas.allgather(without)
            if parameters and all(len(of) == len(parameters) for of in of_all):
                raise JointFailure(
                    "the backward pass has reached no parameter of the model: call "
                    "loss.backward() without inputs, and not torch.autograd.grad, which would "
                    "return this rank's part"
                )
            self._unused[self._used] = sorted(set.intersection(*map(set, of_all)))
            engine.gradients.take_in()
        engine.gradients.finish()
        if scale != 1:
            for part in engine.gradients.parts:
                part.mul_(scale)
        self._add(self._late)
        if self._syncs:
            engine.sum_gradients()
        parts = {}
        if not self._syncs and self.mesh.replicas.size > 1:
            parts = {number: p.grad.clone() for number, p in enumerate(parameters)}
        self._add(self._carried)
        if scale != 1 and self.mesh.pipeline.size > 1 and not self._all_finite():
            # A GradScaler skips a step whose gradients are not finite, here on all stages alike.
            for p in parameters:
                p.grad.fill_(torch.nan)
        for number in self._unused[self._used]:
            if number not in self._carried and number not in self._late:
                parameters[number].grad = None
                parts.pop(number, None)
        self._local = {
            number: (part, parameters[number].grad, parameters[number].grad._version)
            for number, part in parts.items()
        }
        self._carried, self._late = {}, {}

    def _all_finite(self) -> bool:
        """Return True if the gradients of all stages are finite. Collective."""
        finite = all(bool(p.grad.isfinite().all()) for p in self.engine.parameters)
        return self.engine.over_stages(float(not finite)) == 0

    def _add(self, gradients: dict[int, Tensor]) -> None:
        for number, gradient in gradients.items():
            self.engine.parameters[number].grad.add_(gradient)

    # The eager form

    def shard(self, array) -> Shard:
        """Return this rank's part of images or targets, for ``model(shard)`` and a criterion.

        Args:
            array: images or targets as for :meth:`backward`. They are read when they are used.
        """
        return Shard(self, array)

    def forward(self, shard: Shard) -> Tensor:
        """Return the logits of this rank's tile, with their graph, (B, C', *tile.size). Collective.

        A criterion computes the loss of all tiles from it, whose ``backward()`` ends with the sum
        of the gradients over the replicas::

            loss = criterion(model(model.shard(image)), model.shard(target))

        All activations of the tile stay in memory. There is one stage, one tile a rank, and no
        streaming; :meth:`backward` has no such limits.

        Raises:
            ValueError: the mesh has stages, tiles are streamed, images differ in size, or the
                argument is no shard.
        """
        with raise_jointly(self.mesh.world):
            if not isinstance(shard, Shard):
                raise ValueError(
                    f"the model is called with a {type(shard).__name__}, but each rank has a part "
                    "of an image: call model(model.shard(image)), or model.backward(image, "
                    "target, criterion)"
                )
            if self.engine.partition is not None or self.engine.streaming:
                what = "has several stages" if self.engine.partition else "streams its tiles"
                raise ValueError(
                    f"this model {what}, so no rank has a whole graph: call "
                    "model.backward(image, target, criterion)"
                )
            if torch.is_grad_enabled():
                self._check_frozen()
            images = self._arrays(shard.given)
            self._check(images)
        self._check_groups(images)
        rows, first = self._rows(len(images), 1)
        batches = self._tile_batches(
            images, None, range(len(images)), first, rows.of_micro_batch(0)
        )
        with raise_jointly(self.mesh.world):
            if len(batches) > 1:
                raise ValueError(
                    "the eager form takes images of one size and one tile a rank: call "
                    "model.backward(image, target, criterion)"
                )
        batch = self.engine.to_device(batches[0])
        with self.engine.autocast():
            (output,) = self.engine.model([batch.pixels], [batch.place])
        output = on_tile(output, batch.place)
        seen: list[Tensor] = []
        if output.requires_grad:
            output.register_hook(lambda gradient: _check_only_use(gradient, seen))
        self._eager, self._in_backward = (batch.place, rows, images, output, seen), False
        return output

    def loss(self, output: Tensor, target: Shard, criterion: Criterion) -> Tensor:
        """Return the loss of the step from this rank's output, as :class:`Criterion` calls it.

        Args:
            output: the output of :meth:`forward`.
            target: the targets of the same images.
            criterion: the loss.
        """
        if self._eager is None or output is not self._eager[3]:
            raise ValueError(
                "a criterion takes the output of the last model(shard) itself: compute with it "
                "in the criterion's function"
            )
        place, rows, images, _, seen = self._eager
        with raise_jointly(self.mesh.world):
            targets = self._targets(target.given, images)
            chosen = self._criterion(criterion, targets)
            labels = self._labels(targets, list(range(len(images))), chosen, place.tile)
        self._used = chosen, len(images)
        partial = chosen.rows(_Seen.apply(output, seen), upload(labels, output.device))
        return _LossOfAllTiles.apply(partial, self, chosen, rows)

    def _begin_once(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._begin()
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._in_backward = False
        self._finish(1.0 / self.mesh.replicas.size)
        self.engine.model.commit_statistics(unbiased=True)

    # Prediction

    def predict(self, image) -> Tensor:
        """Return the logits of whole images, on every rank. Collective.

        All ranks give the same images. Norms and dropout are in evaluation mode.

        Args:
            image: as for :meth:`backward`.

        Returns:
            (B, C', *size) or (C', *size) float32, or float64 if the network is; a list for a list
            of images. For networks that return a vector of each image: (B, C') or (C',).
        """
        with raise_jointly(self.mesh.world):
            self._check_hooks()
            arrays = self._arrays(image)
        sizes = [tuple(arrays.size(number)) for number in range(len(arrays))]
        if len(given := {tuple(found) for found in self.mesh.world.allgather(sizes)}) > 1:
            words = " and ".join(f"{len(found)} of {_sizes(found)}" for found in sorted(given))
            raise JointFailure(
                f"ranks give predict different images, {words}: all ranks give the same"
            )
        if len(arrays) > 1 and self._joins_images:
            raise JointFailure(
                "in this network the images of a batch influence each other in evaluation mode "
                f"too, but predict computes each of the {len(arrays)} images alone: give one "
                "image at a time"
            )
        found = [self._whole(arrays, number) for number in range(len(arrays))]
        if arrays.is_batch:
            return torch.stack(found)
        return found if arrays.is_batch is None else found[0]

    def predict_tiles(self, image) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield (box, logits) for this rank's tiles of one image, (C', *box.size). Collective.

        Each pixel of the image is in one tile of one rank. So a result that does not fit one node
        can be written in parts.
        """
        arrays = self._arrays(image)
        if len(arrays) > 1:
            raise ValueError(f"predict_tiles takes one image, got {len(arrays)}: call it for each")
        yield from self._tiles_of(arrays, 0)

    def _tiles_of(self, arrays: Arrays | Stacked, number: int):
        predictor = self._predictors()
        size = arrays.size(number)
        with raise_jointly(self.mesh.world):
            predictor.check(size)

        def read(box: Box) -> np.ndarray:
            return arrays.read([number], box)[0].cpu().numpy()

        yield from predictor(ImageSource(f"image {number}", size, read))

    def _whole(self, arrays: Arrays | Stacked, number: int) -> Tensor:
        mine = list(self._tiles_of(arrays, number))
        boxes = self.mesh.world.allgather([(box, y.shape, y.dtype.str) for box, y in mine])
        whole = None
        for rank, those in enumerate(boxes):
            for place, (box, shape, dtype) in enumerate(those):
                part = np.empty(shape, dtype)
                if rank == self.mesh.world.rank:
                    part = np.ascontiguousarray(mine[place][1])
                if self.mesh.world.size > 1:
                    self.mesh.world.Bcast(part, root=rank)
                if self._outputs.whole:
                    whole = torch.from_numpy(part).flatten()
                    continue
                if whole is None:
                    whole = torch.empty(
                        shape[0], *arrays.size(number), dtype=torch.from_numpy(part).dtype
                    )
                whole[(..., *box.slices)] = torch.from_numpy(part)
        return whole

    def _predictors(self) -> Predictor:
        if self._predictor is None:
            self._predictor = self.engine.predictor()
        return self._predictor


class _LossOfAllTiles(torch.autograd.Function):
    """The loss of a step, from the partial sums of this rank's tile, (B, sums) -> ()."""

    @staticmethod
    def forward(ctx, partial: Tensor, model: DistributedModel, criterion: Criterion, rows: Rows):
        table = torch.zeros(rows.total, criterion.sums, dtype=torch.float64)
        own = rows.of_micro_batch(0)
        table[own] = partial.detach().to("cpu", torch.float64)
        value, loss_grad = criterion.loss_grad(add(table, model.mesh.replicas))
        ctx.model, ctx.loss_grad = model, upload(loss_grad[own], partial.device, partial.dtype)
        return partial.new_tensor(value)

    @staticmethod
    def backward(ctx, factor: Tensor):
        ctx.model._begin_once()
        # Terms of parameters alone, such as weight decay, are equal on all ranks, whose gradients
        # are summed. So this loss counts once a rank, and the sum is divided by their number.
        return ctx.loss_grad * factor * ctx.model.mesh.replicas.size, None, None, None


def _widened(targets: Tensor) -> Tensor:
    """Return integer targets as int64, so that any label can be compared with ``ignore_index``."""
    return targets if targets.is_floating_point() else targets.long()


class _Seen(torch.autograd.Function):
    """Identity that notes the gradients which a criterion sends back to the output."""

    @staticmethod
    def forward(ctx, output: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.seen = seen
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.seen.append(gradient)
        return gradient, None


def _check_only_use(gradient: Tensor, seen: list[Tensor]) -> None:
    """Refuse a gradient of the output that did not come from criteria alone.

    Raises:
        ValueError: something else was computed from the output of one tile.
    """
    wanted = sum(seen) if seen else torch.zeros_like(gradient)
    seen.clear()
    if not torch.equal(gradient, wanted) and not torch.allclose(gradient, wanted, rtol=1e-9):
        raise ValueError(
            "the loss has terms of the output besides the criterion, which would be of one tile "
            "alone: put them into the criterion's function"
        )


def _sizes(sizes: Sequence[Sequence[int]]) -> str:
    """Return some sizes of images as text."""
    return ", ".join(dict.fromkeys(str(Size(size)) for size in sizes))


def _hooks_of(network: nn.Module) -> dict[str, int]:
    """Return the number of hooks of each layer and parameter that has some."""
    fields = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = {
        name: count
        for name, layer in network.named_modules()
        if (count := sum(len(getattr(layer, field)) for field in fields))
    }
    for name, p in network.named_parameters():
        many = (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None))
        if count := sum(len(hooks) for hooks in many if hooks):
            found[name] = count
    return found
