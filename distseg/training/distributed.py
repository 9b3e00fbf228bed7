"""A module of the user that is distributed over a mesh of ranks, for a training loop in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import accumulate
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from distseg.comm.collective import add
from distseg.comm.consistency import differences
from distseg.comm.launch import JointFailure, raise_jointly
from distseg.comm.reducer import clip_factor
from distseg.comm.replicas import broadcast
from distseg.comm.staging import upload
from distseg.config.sizes import Size
from distseg.data.arrays import Arrays, OutputTargets, Stacked, widened
from distseg.data.sampler import Rows
from distseg.inference.image_source import ImageSource
from distseg.inference.predictor import Predictor
from distseg.layers.criterion import Criterion, OfOutputs, Outputs, sum_tensors
from distseg.layers.own_loss import criterion_of, mark_of, named_by_text
from distseg.layers.packed_targets import TargetForm, pack
from distseg.models.network import check_calls, check_size, user_name, user_names
from distseg.models.output_layers import parameters_of_outputs
from distseg.tiling.tile import Box, TilePlacement, boxes_of, check_grid, owned_tiles
from distseg.tiling.tile_batch import LazyTileBatch, TileBatch, labels_of_images, on_tile
from distseg.training.engine import Engine
from distseg.training.module_changes import ModuleChanges
from distseg.training.partial_gradients import refuse_partial_gradients

T = TypeVar("T")
P = ParamSpec("P")
Key = str | int  # name or number of an output, as the user gave it
_CHECKED_PIXELS = 1 << 20  # pixels of each image whose labels are read at once to check them
_MOST_CRITERIA = 16  # criteria that are kept, for loops that make a new one in each step


class Shard(NamedTuple):
    """This rank's part of images or targets, an argument of ``model(shard)`` and of a criterion.

    :meth:`DistributedModel.shard` returns it. The pixels of this rank's tile are cut out of the
    images only when they are used.

    Attributes:
        model: the model whose :meth:`~DistributedModel.shard` returned this object.
        given: the images or targets of this sample group, as the user gave them.
    """

    model: DistributedModel
    given: object

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Refuse functions of PyTorch, such as a loss that would see this rank's tile only."""
        raise ValueError(
            f"{getattr(function, '__name__', function)} got this rank's part of an image or a "
            "target (model.shard), which only distseg's losses and model(...) take: give the "
            "outputs and model.shard(target) to distseg.PixelLoss(function), or call "
            "model.backward(image, target, criterion)"
        )


class _Given(NamedTuple):
    """Criterion that a user's argument stands for, after its check.

    Attributes:
        argument: the user's argument. It is kept, so that no other object gets its id.
        criterion: the criterion.
        mark: a text by which ranks see that they have the same criterion.
        form: the dtypes and the channels of the targets with which it was checked last.
    """

    argument: object
    criterion: Criterion
    mark: str
    form: tuple


def _few_pixels(arrays: Arrays | Stacked, number: int) -> list[bytes]:
    """Return the first, the middle and the last pixel of an image, by which images are compared."""
    size = arrays.size(number)
    places = [tuple((n - 1) * part // 2 for n in size) for part in (0, 1, 2)]
    boxes = (Box(place, tuple(at + 1 for at in place)) for place in places)
    return [arrays.read([number], box).float().cpu().numpy().tobytes() for box in boxes]


class _Forward(NamedTuple):
    """A forward pass of the eager form.

    Attributes:
        place: the position of this rank's tile in the images.
        rows: the indices, in the step, of this sample group's images.
        images: the images that the user gave.
        given: what the user got, one tensor or a dict of ``tensors`` by the keys of the outputs.
        tensors: the logits of each output. A network with one output has it under None.
        seen: for each output, the gradients that criteria have sent back to it.
    """

    place: TilePlacement
    rows: Rows
    images: Arrays | Stacked
    given: Tensor | dict[Key, Tensor]
    tensors: dict[str | None, Tensor]
    seen: dict[str | None, list[Tensor]]


class _Unsummed(NamedTuple):
    """Gradient of a parameter after a backward pass in a ``no_sync`` block.

    Attributes:
        part: this rank's part, which is not summed over the replicas yet.
        earlier: the whole gradient of passes before the block, equal on all replicas; None if
            there was none.
        gradient: ``part`` + ``earlier``, the parameter's ``grad``.
        version: the version of ``gradient``, which shows if the user changed it since.
    """

    part: Tensor
    earlier: Tensor | None
    gradient: Tensor
    version: int


def _joint_call(
    method: Callable[Concatenate[DistributedModel, P], T],
) -> Callable[Concatenate[DistributedModel, P], T]:
    """Run a method of a distributed model, which all ranks call, in :meth:`Mesh.joint_call`."""

    @wraps(method)
    def called(self: DistributedModel, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.mesh.joint_call():
            return method(self, *args, **kwargs)

    return called


class DistributedModel(nn.Module):
    """A module whose images, layers and batches are spread over the ranks of a mesh.

    :func:`distseg.distribute` makes it. It has the parameters and buffers of the user's module,
    under the same names. With several stages, a rank holds only the tensors of its own stages.

    Args:
        network: the captured module, with the layers of this rank only.
        engine: the steps of the network on the mesh.
        bands: number of bands of an image.
        returned: description of the output of the whole network, such as its channels.
        outputs: number of channels of each output that is trained, by its name or number as the
            user gave it, if the module returns several.
        inputs: number of bands of each input, if the module takes several.
        order: names of the tensors of the user's module, in the order of its state dict.
        joins_images: True if the images of a batch influence each other even in evaluation mode.
        evaluates_all: True if the network's result has all ``outputs`` in evaluation mode too, and
            not the first one only.
        changes: finds changes that are made to the user's module later; None to look for none.
    """

    def __init__(
        self,
        network: nn.Module,
        engine: Engine,
        bands: int,
        returned: Outputs,
        outputs: Mapping[Key, int] | None = None,
        inputs: Sequence[int] | None = None,
        order: Sequence[str] = (),
        joins_images: bool = False,
        evaluates_all: bool = False,
        changes: ModuleChanges | None = None,
    ):
        super().__init__()
        self._order = {name: number for number, name in enumerate(order)}
        self.network, self.engine, self.mesh = network, engine, engine.mesh
        # A module that contains this one, such as AveragedModel, lists tensors through these two
        # dicts. It passes over the same tensors of the network's layers, whose order is that of the
        # calls.
        self._parameters.update(self.named_parameters())
        self._buffers.update(self.named_buffers())
        self.epoch = 0
        """Number of the current epoch, on which the masks of dropout depend."""
        self.images_seen = 0
        """Number of images that all sample groups have used in this epoch, before the next step.

        The masks of dropout depend on it too.
        """
        self._inputs = inputs
        self._keys: dict[str, Key] = {str(key): key for key in outputs or ()}
        """The name or number of each output as the user gave it, by its text."""
        self._named_outputs: dict[str, int] | None = None
        if outputs:
            self._named_outputs = {str(key): n for key, n in outputs.items()}
        self._evaluates_all = evaluates_all
        self._bands, self._outputs, self._dims = bands, returned, returned.dims
        self._trained = set(engine.parameters)
        # The engine fills grad with zeros. As in PyTorch, an unused parameter shall keep None.
        engine.gradients.detach()
        self._criteria: dict[object, _Given] = {}
        self._unused: dict[tuple, list[int]] = {}  # by criterion: parameters without a gradient
        self._checked: set[tuple] = set()
        self._used: tuple | None = None  # the criterion and the number of images of this step
        self._in_engine: tuple | None = None  # the criterion and number that the engine has
        self._syncs = True
        self._local: dict[int, _Unsummed] = {}  # by parameter
        self._in_backward = False
        self._eager: _Forward | None = None  # the last forward pass
        self._reached: set[str] | None = None  # outputs that a backward pass of the eager form used
        self._predictor: Predictor | None = None
        self._hooks, self._joins_images = _hooks_of(network), joins_images
        self._changes = changes
        self._refuse_partial_gradients()

    def __getstate__(self) -> dict:
        # The mesh comes first: it refuses to be pickled with a message that names the repair.
        # The autograd graph of the last forward pass cannot be copied, so a copy begins without it.
        return {"mesh": self.mesh, **self.__dict__, "_eager": None}

    def __setstate__(self, state) -> None:
        super().__setstate__(state)  # of a copied model
        self._refuse_partial_gradients()

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"a distributed model has no attribute {name}: take the attributes of your module "
                "from the module that you gave to distseg.distribute"
            ) from None

    def _refuse_partial_gradients(self) -> None:
        if self.mesh.shape.stages > 1:
            refuse_partial_gradients(self.parameters())

    # Parameters and state

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's (name, parameter) pairs, named and ordered as in the user's module."""
        for name, p in self._named(self.network.named_parameters("", recurse, remove_duplicate)):
            yield f"{prefix}.{name}" if prefix else name, p

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's (name, buffer) pairs, named and ordered as in the user's module."""
        for name, b in self._named(self.network.named_buffers("", recurse, remove_duplicate)):
            yield f"{prefix}.{name}" if prefix else name, b

    def _named(self, found: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
        """Return (name, tensor) pairs of the network, named and ordered as in the user's module.

        Args:
            found: (name, tensor) pairs, with the names of the captured network.
        """
        named = user_names(found, self.network).items()
        return sorted(named, key=lambda item: self._position(item[0]))

    def _position(self, name: str) -> int:
        """Return the index of a tensor in the state dict of the user's module, as a sort key.

        Tensors that are not in the state dict come last.
        """
        return self._order.get(name, len(self._order))

    def state_dict(self, *args, destination=None, prefix: str = "", keep_vars: bool = False):
        """Return the tensors of this rank, by their names in the user's module.

        One rank may call it alone. With one stage the result has all tensors of the module. With
        several stages, :meth:`whole_state_dict` returns all tensors.
        """
        found = self._named(self.network.state_dict(keep_vars=keep_vars).items())
        if self._order:  # the network saves buffers, too, that the user's module does not
            found = [(name, tensor) for name, tensor in found if name in self._order]
        target = {} if destination is None else destination
        target.update((prefix + name, tensor) for name, tensor in found)
        return target

    @_joint_call
    def whole_state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of all stages on the CPU, on every rank.

        All ranks must call it together. The user's own module can load the result:
        ``module.load_state_dict(model.whole_state_dict())``.
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

    @_joint_call
    @torch.no_grad()
    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """Copy the values of a state dict into the tensors of this rank's layers.

        All ranks must call it together. If replicas give different values, all replicas get the
        values of the first one.

        Args:
            state_dict: a state dict of the user's module, or of this rank.
            strict: True to refuse a state dict that lacks a tensor of this rank, or that has a
                tensor which no rank has.
            assign: must be False, because the optimizer updates the tensors that the model has now.

        Returns:
            The names of missing and of unexpected tensors, as from a PyTorch module. With several
            stages they are those of all stages, on every rank.

        Raises:
            ValueError: a name or a shape differs, or ``assign`` is True. It is raised on all ranks,
                before any tensor is copied.
        """
        own = self.state_dict(keep_vars=True)
        with raise_jointly(self.mesh.world):
            self._check_assign(assign)
            for name, tensor in own.items():
                if name not in state_dict:
                    if strict:
                        repair = "load the state dict of this network"
                        if f"module.{name}" in state_dict:
                            repair = (
                                "its names begin with 'module.', as those of a wrapper such as "
                                "DistributedDataParallel: remove this from the names"
                            )
                        raise ValueError(f"the state dict lacks {name}: {repair}")
                elif state_dict[name].shape != tensor.shape:
                    raise ValueError(
                        f"{name} has the shape {tuple(state_dict[name].shape)} in the state dict, "
                        f"but {tuple(tensor.shape)} in the network: load the state dict of this "
                        "network"
                    )
        of_all = self.mesh.world.allgather({name: name in state_dict for name in own})
        known = {name for found in of_all for name in found}
        lacking = {name for found in of_all for name in found if not found[name]}
        unexpected = [name for name in state_dict if name not in known]
        with raise_jointly(self.mesh.world):
            if strict and unexpected:
                raise ValueError(
                    f"the state dict has the entry {min(unexpected)}, but the network has none of "
                    "this name: load the state dict of this network"
                )
        for name, tensor in own.items():
            if name in state_dict:
                tensor.copy_(state_dict[name])
        broadcast(self.network, self.mesh.replicas)
        return nn.modules.module._IncompatibleKeys(sorted(lacking, key=self._position), unexpected)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors
    ) -> None:
        """Add the tensors of a state dict to it under the names of the network's layers.

        The layers then load their tensors. PyTorch calls this method in ``load_state_dict`` of a
        module that contains this one. Its arguments are those of the method of ``nn.Module``.

        Raises:
            ValueError: the state dict is loaded with ``assign=True``.
        """
        self._check_assign(local_metadata.get("assign_to_params_buffers", False))
        names = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
        unexpected += [prefix + name for name in names if name not in self._order]
        for name, own in self.network.state_dict().items():
            given = prefix + user_name(name, self.network)
            if given not in state_dict and given.removeprefix(prefix) in self._order:
                missing.append(given)
            state_dict[f"{prefix}network.{name}"] = state_dict.get(given, own)

    def _check_assign(self, assign: bool) -> None:
        """Refuse ``assign=True``, which would replace the tensors that the optimizer updates."""
        if assign:
            raise ValueError(
                "assign=True would give the model tensors that its optimizer does not update: "
                "leave assign out"
            )

    def train(self, mode: bool = True) -> DistributedModel:
        """Set training or evaluation mode of the layers, and return the model.

        :meth:`predict` always computes in evaluation mode.
        """
        self.training = mode
        self.engine.model.train(mode)
        return self

    def _apply(self, fn, recurse=True):
        if all((y := fn(x)).dtype == x.dtype and y.device == x.device for x in self.parameters()):
            return self
        raise ValueError(
            "a distributed model cannot be moved to another device or dtype: choose the device in "
            "distseg.init_mesh(device=...) and the dtype in distseg.distribute(precision=...), "
            "before the optimizer is made"
        )

    # Training

    @_joint_call
    def backward(self, image, target, criterion, scale: float = 1.0) -> Tensor:
        """Add the gradient of the loss to the parameters' ``grad``, and return the loss.

        All ranks must call it together. The gradient equals that of the serial program, whose loss
        is over all images of all sample groups. All ranks of a sample group give the same images,
        of which each rank reads its part. Different groups give different images, and every group
        the same number of images. After ``eval()`` batch norms use their running statistics and
        dropouts do nothing, as in PyTorch.

        Args:
            image: (B, C, *size) or (C, *size), normalised as the module takes it, or a list of
                images (C, *size) of any sizes. A tuple of these if the module takes several inputs.
            target: one target for each image: (B, *size), or (B, C', *size) for C' values at each
                pixel. If the module returns one vector per image: (B,) or a number. A dict from the
                names of outputs to one of these if outputs have different targets.
            criterion: a :class:`distseg.PixelLoss`, a :class:`distseg.SumLoss`, a loss of PyTorch
                such as ``nn.CrossEntropyLoss()``, a weighted sum of these, the name of a loss such
                as ``cross_entropy + 0.5*dice``, or a dict from the names of outputs to one of
                these.
            scale: factor of the gradient, such as ``scaler.get_scale()`` or 1 / (number of calls
                whose gradients are accumulated). The backward pass begins with it. The returned
                loss is not scaled.

        Returns:
            The loss, a float64 tensor on the CPU, equal on all ranks.

        Raises:
            ValueError: images or targets do not fit the network, or the criterion cannot be
                computed tile by tile. It is raised on all ranks before any work.
        """
        micro_batches = self._prepared(image, target, criterion)
        self._begin()
        loss = self.engine.accumulate(micro_batches, scale)
        self._finish(scaled=scale != 1)
        self.engine.model.commit_statistics(unbiased=True)
        return torch.tensor(self.engine.over_stages(loss), dtype=torch.float64)

    @contextmanager
    def no_sync(self):
        """Return a context manager in which backward passes do not sum gradients over replicas.

        The first backward pass after the block also sums the gradients of the passes in the block.
        So several calls of :meth:`backward` need only one sum over ranks.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the gradients of all stages so that their common norm is at most ``max_norm``.

        Return the norm before scaling. All ranks must call the method together. With one stage it
        does what ``torch.nn.utils.clip_grad_norm_`` does.

        Raises:
            ValueError: gradients of a :meth:`no_sync` block are not summed over the replicas yet.
        """
        if self._local:
            raise ValueError(
                "gradients of calls inside no_sync are not summed over the ranks yet: call "
                "backward outside of no_sync before clip_grad_norm_"
            )
        parts = [p.grad for p in self.engine.parameters if p.grad is not None]
        own = sum(float(torch.linalg.vector_norm(g.double())) ** 2 for g in parts)
        with self.mesh.joint_call():
            norm = self.engine.over_stages(own) ** 0.5
        if (factor := clip_factor(max_norm, norm)) < 1:
            for gradient in parts:
                gradient.mul_(factor)
        return norm

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch ``epoch``, on which dropout masks depend; count images from 0 again."""
        self.epoch, self.images_seen = epoch, 0

    def _check_changes(self) -> None:
        """Refuse hooks and changes of the user's module, made after the module was distributed.

        Refuse an autocast of the user, too, if it would change the precision of the model.
        """
        kind, precision = self.mesh.device.type, self.engine.precision
        wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        if torch.is_autocast_enabled(kind) and precision != "fp64":  # it leaves float64 alone
            if (dtype := torch.get_autocast_dtype(kind)) != wanted:
                raise ValueError(
                    f"torch.autocast is on with {str(dtype).removeprefix('torch.')}, but this "
                    f"model has the precision {precision}: leave torch.autocast, or choose "
                    "precision in distseg.distribute"
                )
        found = _hooks_of(self.network)
        if added := [name for name in found if found[name] > self._hooks.get(name, 0)]:
            raise ValueError(
                f"{user_name(added[0], self.network)} has got a hook since the module was "
                "distributed, but a hook would only see the parts of feature maps and gradients "
                "that one rank or tile has: remove the hook, and add it to the plain module instead"
            )
        if self._changes is not None:
            self._changes.check()

    def _prepared(self, image, target, criterion) -> list[list[TileBatch | LazyTileBatch]]:
        """Check the arguments of :meth:`backward`, set the engine's loss, and return tile batches.

        The result has, for each micro-batch, a list of this rank's tile batches.
        """
        count = self.engine.config.train.accumulate
        with raise_jointly(self.mesh.world):
            self._check_frozen()
            self._check_changes()
            images = self._arrays(image)
            targets = self._targets(target, images)
            known = self._criterion(criterion, targets)
            self._check(images)
            each = len(images) // count
            rows = self._rows(each, count)
            # Images and targets are read and checked here, because all ranks raise an error of
            # this context. Later the other ranks would wait for a rank that has raised an error.
            micro_batches = [
                self._tile_batches(
                    images, targets, range(m * each, (m + 1) * each), rows, m, known.criterion
                )
                for m in range(count)
            ]
        self._check_groups(images, known.mark)
        if len(images) % count:  # all ranks have the same number of images
            raise JointFailure(
                f"a batch of {len(images)} images does not divide into {count} micro-batches: "
                f"change micro_batches of distseg.distribute, or give batches of a multiple of "
                f"{count} images"
            )
        self._used = known.criterion, each
        if self._in_engine != self._used:
            self.engine.use_loss(*self._used)
            self._in_engine = self._used
        self._count_images(rows)
        return micro_batches

    def _rows(self, images: int, micro_batches: int) -> Rows:
        """Return the indices, in a step, of this sample group's images.

        Args:
            images: number of images of a sample group in a micro-batch.
            micro_batches: number of micro-batches in the step.
        """
        return Rows(self.mesh.shape.samples, self.mesh.sample, micro_batches, images)

    def _count_images(self, rows: Rows) -> None:
        """Begin a step: add its images to the count ``images_seen``.

        Args:
            rows: the indices, in the step, of this sample group's images.
        """
        self.images_seen += rows.total
        self.engine.context.epoch = self.epoch

    def _arrays(self, given) -> Arrays | Stacked:
        """Return the images that the user gave, or refuse them if they do not fit the network."""
        images: Arrays | Stacked
        if self._inputs is not None:
            if not isinstance(given, tuple) or len(given) != len(self._inputs):
                raise ValueError(
                    f"the network takes {len(self._inputs)} inputs: give a tuple with images for "
                    "each input"
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

    def _targets(self, given, images: Arrays | Stacked) -> Arrays | Tensor | OutputTargets:
        """Return the targets that the user gave, or refuse them if they do not fit the images.

        The result is a tensor (images,) if the module returns one vector per image.
        """
        if isinstance(given, Mapping):
            return self._targets_of_outputs(given, images)
        if self._outputs.whole:
            labels = widened(torch.as_tensor(given).flatten())
            if len(labels) != len(images):
                raise ValueError(
                    f"there are {len(images)} images, but {len(labels)} targets: give one target "
                    "for each image"
                )
            return labels
        targets = Arrays(given, self._dims, (0, 1), "target", images.is_batch)
        if len(targets) != len(images):
            raise ValueError(
                f"there are {len(images)} images, but {len(targets)} targets: give one target for "
                "each image"
            )
        for image in range(len(images)):
            if targets.size(image) != images.size(image):
                raise ValueError(
                    f"image {image} has {Size(images.size(image))} pixels, but its target has "
                    f"{Size(targets.size(image))}: give one target value for each pixel"
                )
        return targets

    def _targets_of_outputs(self, given: Mapping, images: Arrays | Stacked) -> OutputTargets:
        """Return the targets of all outputs, which the user gave by the names of the outputs."""
        named = named_by_text(given, "the target")
        names = self._named_outputs or {}
        if set(named) != set(names):
            raise ValueError(
                f"the target has the keys {', '.join(named)}, but the argument outputs of "
                f"distseg.distribute is {', '.join(names) or 'None'}: give one target for each "
                "name in outputs, or a single target for all outputs"
            )
        parts, forms = [], []
        for name in names:
            part = self._targets(named[name], images)
            assert not isinstance(part, OutputTargets)
            parts.append(part)
            forms.append(
                TargetForm(part.dtype, None) if isinstance(part, Tensor) else part.target_form
            )
        return OutputTargets(parts, forms)

    def _criterion(
        self, given, targets: Arrays | Tensor | OutputTargets, output: str | None = None
    ) -> _Given:
        """Return the criterion that the user's argument stands for.

        It is checked at its first use, and again when targets have another dtype or other channels.

        Args:
            given: the user's argument ``criterion`` of :meth:`backward`.
            targets: the targets of the step. The check computes the criterion on a part of the
                targets.
            output: the only output that the criterion gets; None for all outputs.
        """
        key = given if isinstance(given, str) else id(given), output
        form = _form_of(targets)
        known, mark = self._criteria.get(key), mark_of(given)
        if known is not None and known.mark != mark:  # the user has changed a setting of the loss
            self._forget_criterion(key)
            known = None
        if known is None:
            named = self._named_outputs if output is None else None
            made = criterion_of(given, self._channels_of(output), named)
            known = _Given(given, made, mark, form)
        elif known.form == form:
            return known
        if isinstance(known.criterion, OfOutputs):
            known.criterion.forms = form if isinstance(targets, OutputTargets) else None
        returned = self._outputs._replace(channels=self._channels_of(output))
        known.criterion.check(returned, self._example(targets))
        self._criteria[key] = known = known._replace(form=form)
        if len(self._criteria) > _MOST_CRITERIA:
            self._forget_criterion(next(iter(self._criteria)))
        return known

    def _channels_of(self, output: str | None) -> int:
        """Return the number of channels of an output; None stands for the first one."""
        if output is None:
            return self._outputs.channels
        assert self._named_outputs is not None
        return self._named_outputs[output]

    def _forget_criterion(self, key: object) -> None:
        """Remove a criterion of earlier steps.

        Args:
            key: its key in ``self._criteria``.
        """
        old = self._criteria.pop(key).criterion
        for used in [used for used in self._unused if used[0] is old]:
            del self._unused[used]

    def _example(self, targets: Arrays | Tensor | OutputTargets) -> Tensor:
        """Return a part of the targets, with which a criterion is checked."""
        if isinstance(targets, OutputTargets):
            return pack([self._example(part) for part in targets.parts], targets.forms)
        if isinstance(targets, Tensor):
            return targets.view(-1, *(1,) * self._dims)
        size = targets.size(0)
        return widened(targets.read([0], Box.whole(tuple(min(n, 64) for n in size))))

    def _check_frozen(self) -> None:
        """Refuse a step under ``no_grad``, or after ``requires_grad`` of a parameter changed.

        Raises:
            ValueError: gradients are off, ``requires_grad`` of a parameter changed after
                ``distseg.distribute``, or the user changed gradients of a :meth:`no_sync` block
                before they were summed over the replicas.
        """
        if not torch.is_grad_enabled():
            raise ValueError(
                "gradients are off (torch.no_grad): leave torch.no_grad for training, or call "
                "model.predict(image)"
            )
        self._check_local()
        for name, p in self.network.named_parameters():
            if p.requires_grad != (p in self._trained):
                raise ValueError(
                    f"{user_name(name, self.network)} has requires_grad {p.requires_grad}, but had "
                    f"{not p.requires_grad} when the model was made: set requires_grad before "
                    "distseg.distribute, or load model.whole_state_dict() into a new module, set "
                    "requires_grad there, and distribute it"
                )

    def _check(self, images: Arrays | Stacked) -> None:
        """Refuse images whose size the network or the grid of tiles cannot compute exactly."""
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

    def _check_groups(self, images: Arrays | Stacked, mark: str = "") -> None:
        """Check that all ranks of a sample group give the same images, and all ranks one criterion.

        All groups must give the same number of images. All ranks must call this method together.
        Only the numbers and sizes of images are compared.

        Args:
            images: the images that this rank got.
            mark: the result of :func:`distseg.layers.own_loss.mark_of` for the criterion.

        Raises:
            JointFailure: numbers, sizes or criteria differ. It is raised on all ranks.
        """
        mine = [tuple(images.size(number)) for number in range(len(images))]
        groups: dict[int, list[tuple[int, ...]]] = {}
        every = self.mesh.world.allgather((self.mesh.sample, mine, mark))
        self._check_marks([one for _, _, one in every])
        for sample, sizes, _ in every:
            if sizes != (first := groups.setdefault(sample, sizes)):
                raise JointFailure(
                    f"ranks of a sample group give different images, {len(first)} of "
                    f"{_sizes(first)} pixels and {len(sizes)} of {_sizes(sizes)} pixels: give the "
                    "same images on all ranks of a sample group"
                )
        counts = {len(sizes) for sizes in groups.values()}
        if len(counts) > 1:  # all ranks see it
            raise JointFailure(
                f"sample groups give {min(counts)} to {max(counts)} images in one step: give "
                "the same number in each group (drop the last batch of an epoch, or fill it up)"
            )

    def _check_marks(self, marks: Sequence[str]) -> None:
        """Raise a JointFailure if the ranks have different criteria.

        Args:
            marks: for each rank, the mark of its criterion.
        """
        if found := differences([{"the criterion": mark} for mark in marks]):
            raise JointFailure(
                f"ranks give different criteria, {found[0]}: make the same criterion on all ranks"
            )

    def _tile_batches(
        self,
        images: Arrays | Stacked,
        targets: Arrays | Tensor | OutputTargets | None,
        chosen: Sequence[int],
        rows: Rows,
        micro_batch: int,
        criterion: Criterion | None,
    ) -> list[TileBatch | LazyTileBatch]:
        """Return this rank's tile batches of a micro-batch.

        Args:
            images: the images of this sample group in the step.
            targets: the targets of ``images``, or None.
            chosen: the indices in ``images`` of the micro-batch's images.
            rows: the indices, in the step, of this sample group's images.
            micro_batch: the number of the micro-batch in the step.
            criterion: the loss; None without targets.
        """
        engine = self.engine
        found = []
        numbers = rows.of_micro_batch(micro_batch)
        for size, group in images.by_size(chosen):
            at = tuple(image - chosen[0] for image in group)
            samples = tuple(self.images_seen + numbers[n] for n in at)
            for tile, window in owned_tiles(
                size,
                engine.config.mesh.tiles,
                engine.config.owned,
                self.mesh.tile if len(self.mesh.tile) == self._dims else (0,) * self._dims,
                engine.reading,
            ):
                place = TilePlacement(size, tile, window, at, samples)
                found.append(self._tile_batch(images, targets, group, place, criterion))
        return found

    def _tile_batch(
        self,
        images: Arrays | Stacked,
        targets: Arrays | Tensor | OutputTargets | None,
        group: list[int],
        place: TilePlacement,
        criterion: Criterion | None,
    ) -> TileBatch | LazyTileBatch:
        """Return the pixels and labels of one tile of several images of equal size.

        If tiles are streamed, pixels and labels are read later, when they are needed. Labels are
        read here too, box by box, to check their values.

        Args:
            images, targets: all images and targets of the step.
            group: the indices of the images of this tile batch.
            place: the tile and its window.
            criterion: the loss; None without targets.

        Raises:
            ValueError: the criterion cannot take the value of a label.
        """

        def pixels(box: Box) -> Tensor:
            return images.read(group, box)

        def labels(box: Box) -> Tensor:
            assert targets is not None and criterion is not None
            return self._labels(targets, group, criterion, box)

        pipeline = self.engine.pipeline
        counted = criterion if pipeline.last else None
        if self.engine.streaming:
            # Vectors of an image have few labels, whatever the box.
            side = int(_CHECKED_PIXELS ** (1 / self._dims))
            sides = place.tile.size if self._outputs.whole else (side,) * self._dims
            if counted is not None:
                for box in boxes_of(place.tile, sides):
                    counted.check_values(labels(box))
            return LazyTileBatch(place, pixels, labels)
        found = None
        if counted is not None:
            counted.check_values(found := labels(place.tile))
        return TileBatch(pixels(place.window) if pipeline.first else None, found, place)

    def _labels(self, targets, group: list[int], criterion: Criterion, box: Box) -> Tensor:
        """Return the targets of the images ``group`` inside a box, (images, ..., *box.size).

        If the module returns one vector per image, the result is (images, 1, ...). Then only the
        box at the origin has the labels, so that each image counts once.

        Args:
            targets: the targets of all images of the step.
            group: the indices of the wanted images, which all have the same size.
            criterion: the loss, whose ``ignore_index`` marks labels that do not count.
            box: the box of pixels.
        """
        if isinstance(targets, OutputTargets):
            assert isinstance(criterion, OfOutputs)
            parts = zip(targets.parts, criterion.of_each, strict=True)
            return pack([self._labels(part, group, one, box) for part, one in parts], targets.forms)
        if isinstance(targets, Tensor):
            return labels_of_images(targets[group], box, criterion.ignore_index)
        return widened(targets.read(group, box))

    # Gradients: autograd adds up this rank's part. The sum of all parts over the replicas is then
    # added to the gradients of earlier calls.

    def _begin(self, factor: float = 1.0) -> None:
        """Move the gradients of earlier backward passes out of ``grad``, and empty ``grad``.

        In the backward pass that begins now, ``grad`` then gets only this rank's part of the new
        gradient. :meth:`_finish` adds the earlier gradients again.

        Args:
            factor: factor of the gradients of this backward pass.
        """
        gradients, self._carried, self._factor = self.engine.gradients, {}, factor
        late = self._taken_local()
        for number, p in enumerate(self.engine.parameters):
            if number in late:
                # Not grad - part: its rounding would differ between replicas.
                if (earlier := late[number].earlier) is not None:
                    self._carried[number] = earlier
            elif p.grad is not None:
                self._carried[number] = p.grad.clone()
        self._late = {self.engine.parameters[number]: one.part for number, one in late.items()}
        self._probes = self._used not in self._unused or self._reached is not None
        gradients.detach() if self._probes else gradients.zero()
        self.engine.sums.begin(self._complete, early=self._syncs and not self._probes)

    def _taken_local(self) -> dict[int, _Unsummed]:
        """Return and forget this rank's gradient parts that :meth:`no_sync` left unsummed.

        The keys are indices of parameters. Parameters whose ``grad`` the user has changed since,
        for example set to None, are left out.
        """
        late = {number: one for number, one in self._local.items() if self._is_unchanged(number)}
        self._local = {}
        return late

    def _check_local(self) -> None:
        """Refuse gradients of a :meth:`no_sync` block that were changed before they were summed.

        Gradients that the user set to None or to 0 are accepted.

        Raises:
            ValueError: a gradient was changed in another way, such as clipped or scaled.
        """
        for number in self._local:
            now = self.engine.parameters[number].grad
            if not self._is_unchanged(number) and now is not None and now.count_nonzero():
                raise ValueError(
                    "gradients of calls inside no_sync were changed before they were summed over "
                    "the ranks: clip or scale them after a call outside of no_sync"
                )

    def _is_unchanged(self, number: int) -> bool:
        """Return True if the user has not changed a gradient since the last backward pass.

        Args:
            number: the index of a parameter whose gradient is not summed over the replicas yet.
        """
        before, now = self._local[number], self.engine.parameters[number].grad
        return now is before.gradient and now._version == before.version

    def _complete(self, gradients: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Multiply gradients by ``self._factor``, and add the parts from :meth:`no_sync` blocks.

        Args:
            gradients: the gradients of ``parameters`` in one tensor.
            parameters: the parameters.
        """
        if self._factor != 1:
            gradients.mul_(self._factor)
        for p in parameters:
            if p in self._late:
                _grad(p).add_(self._late[p])

    @torch.no_grad()
    def _finish(self, scaled: bool = False, eager: bool = False) -> None:
        """End a backward pass: sum its gradients over the replicas, then add earlier gradients.

        The sum includes this rank's parts from passes in a :meth:`no_sync` block. The earlier
        gradients are sums over all replicas already, so they are added afterwards. Inside
        :meth:`no_sync` nothing is summed. All ranks must call the method together.

        Args:
            scaled: True if the loss was scaled before the backward pass, as by a GradScaler.
            eager: True if the user has run the backward pass, and may have run it wrongly.
        """
        engine, parameters = self.engine, self.engine.parameters
        assert self._used is not None
        unused = self._unused.get(self._used, [])
        if self._probes:
            without = {n for n, p in enumerate(parameters) if p.grad is None} | self._without_loss()
            of_all = self.mesh.replicas.allgather(without)
            if eager and parameters and all(len(of) == len(parameters) for of in of_all):
                raise JointFailure(
                    "the backward pass has reached no parameter of the model: call "
                    "loss.backward() without inputs=..., and not torch.autograd.grad, which would "
                    "return only this rank's part of the gradient"
                )
            unused = sorted(set.intersection(*map(set, of_all)))
            if self._reached is None:
                self._unused[self._used] = unused
            engine.gradients.take_in()
        engine.gradients.finish()
        if self._syncs:
            engine.sum_gradients()
        else:
            for part, members in zip(engine.gradients.parts, engine.gradients.members):
                self._complete(part, members)
        parts = {}
        if not self._syncs and self.mesh.replicas.size > 1:
            parts = {number: _grad(p).clone() for number, p in enumerate(parameters)}
        for number, earlier in self._carried.items():
            _grad(parameters[number]).add_(earlier)
        if scaled and self.mesh.pipeline.size > 1 and not self._all_finite():
            # A GradScaler skips a step whose gradients are not finite. All stages must skip it.
            for p in parameters:
                _grad(p).fill_(torch.nan)
        for number in unused:
            if number not in self._carried and parameters[number] not in self._late:
                parameters[number].grad = None
                parts.pop(number, None)
        self._local = {
            number: _Unsummed(part, self._carried.get(number), gradient, gradient._version)
            for number, part in parts.items()
            if (gradient := parameters[number].grad) is not None
        }
        self._carried, self._late, self._reached = {}, {}, None

    def _without_loss(self) -> set[int]:
        """Return the indices of parameters of those outputs that had no loss in the eager form.

        Their gradient is 0, because the outputs are parts of one tensor. In PyTorch it is None.
        """
        names = list(self._named_outputs or ())
        if self._reached is None or self._reached == set(names):
            return set()
        if (of_outputs := parameters_of_outputs(self.network, len(names))) is None:
            return set()
        used = set().union(*(of for n, of in zip(names, of_outputs) if n in self._reached))
        return {
            number
            for number, p in enumerate(self.engine.parameters)
            if p not in used and (p.grad is None or not p.grad.count_nonzero())
        }

    def _all_finite(self) -> bool:
        """Return True if the gradients of all stages are finite numbers.

        All ranks of the pipeline must call this method together.
        """
        finite = all(bool(_grad(p).isfinite().all()) for p in self.engine.parameters)
        return self.engine.over_stages(float(not finite)) == 0

    # The eager form

    def shard(self, array) -> Shard:
        """Return this rank's part of images or targets, for ``model(shard)`` and a criterion.

        Args:
            array: images or targets in a form that :meth:`backward` takes. The pixels are read when
                the shard is used.
        """
        return Shard(self, array)

    @_joint_call
    def forward(self, shard: Shard) -> Tensor | dict[Key, Tensor]:
        """Return the logits of this rank's tile with their autograd graph, (B, C', *tile.size).

        C' is the number of channels of the network's output. If ``outputs`` was given to
        :func:`distseg.distribute`, the result is a dict from its names or numbers to the logits of
        each output. A criterion takes the logits of one output with their target, or the whole dict
        with the targets of all outputs.

        All ranks must call it together. A criterion takes the logits and returns the loss of all
        tiles. The loss's ``backward()`` ends with the sum of the gradients over the replicas::

            loss = criterion(model(model.shard(image)), model.shard(target))

        All activations of the tile stay in memory. The mesh must have one stage, each rank one
        tile, and tiles must not be streamed. :meth:`backward` has no such limits.

        Raises:
            ValueError: the mesh has several stages, a rank has several tiles, tiles are streamed,
                images differ in size, or the argument is no shard.
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
                    f"this model {what}, so no rank has the whole autograd graph: call "
                    "model.backward(image, target, criterion)"
                )
            if torch.is_grad_enabled():
                self._check_frozen()
            self._check_changes()
            images = self._arrays(shard.given)
            self._check(images)
            rows = self._rows(len(images), 1)
            batches = self._tile_batches(images, None, range(len(images)), rows, 0, None)
            if len(batches) > 1:
                raise ValueError(
                    "model(shard) takes images of one size, with one tile on each rank: for other "
                    "images or tiles call model.backward(image, target, criterion)"
                )
        self._check_groups(images)
        self._count_images(rows)
        assert isinstance(batches[0], TileBatch)  # tiles are not streamed
        batch = self.engine.to_device(batches[0])
        with self.engine.autocast():
            (output,) = self.engine.model([batch.pixels], [batch.place])
        output = on_tile(output, batch.place)
        tensors = self._split(output)
        seen: dict[str | None, list[Tensor]] = {name: [] for name in tensors}
        for name, logits in tensors.items():
            if logits.requires_grad:
                logits.register_hook(partial(_check_only_use, seen=seen[name]))
        given: Tensor | dict[Key, Tensor] = output
        if self._named_outputs:
            given = {self._keys[name]: z for name, z in tensors.items() if name is not None}
        self._eager = _Forward(batch.place, rows, images, given, tensors, seen)
        self._in_backward = False
        return given

    def _split(self, output: Tensor) -> dict[str | None, Tensor]:
        """Return the logits of each output by its name; by None if the module returns one output.

        In evaluation mode some networks return the first output only.

        Args:
            output: the network's result, (B, C', *size), which has all outputs along its channels.
        """
        if not self._named_outputs:
            return {None: output}
        each = list(self._named_outputs.values())
        if output.shape[1] != sum(each):
            each = each[:1]
        names: list[str | None] = [*self._named_outputs]
        return dict(zip(names, output.split(each, 1)))

    def loss(
        self, output: Tensor | dict[Key, Tensor], target: Shard, criterion: Criterion
    ) -> Tensor:
        """Return the loss of the step, computed from the outputs of all ranks.

        A call ``criterion(output, shard)`` calls this method. All ranks must call it together.

        Args:
            output: the result of :meth:`forward` on this rank, or one output of it.
            target: this rank's part of the targets of the same images. If ``output`` is one of
                several, its target, or a dict that has its target by its name.
            criterion: the loss.
        """
        last = self._eager
        if last is not None and output is last.given:
            return self._loss(None, target, criterion)
        for name, logits in {} if last is None else last.tensors.items():
            if output is logits:
                return self._loss(name, target, criterion)
        several = ""
        if self._keys:
            several = (
                f". The output is a dict of {', '.join(self._keys)}: give it or one of its tensors"
            )
        raise ValueError(
            "a criterion must get the unchanged output of the last model(shard): do any "
            f"computation with the output inside the criterion's function{several}"
        )

    @_joint_call
    def _loss(self, output: str | None, target: Shard, criterion: Criterion) -> Tensor:
        """Return the loss of the step.

        Args:
            output: the name of the output that the criterion gets; None for all outputs.
            target, criterion: as for :meth:`loss`.
        """
        assert self._eager is not None
        place, rows, images, _, tensors, seen = self._eager
        with raise_jointly(self.mesh.world):
            targets = self._targets(self._target_of(output, target.given), images)
            known = self._criterion(criterion, targets, output)
            chosen = known.criterion
            labels = self._labels(targets, list(range(len(images))), chosen, place.tile)
            chosen.check_values(labels)
            names = list(self._named_outputs or (None,)) if output is None else [output]
            if lacking := [name for name in names if name not in tensors]:
                raise ValueError(
                    f"in evaluation mode the network returns {next(iter(tensors))} only, but the "
                    f"criterion needs {lacking[0]} too: give it the output of one name"
                )
        self._check_marks(self.mesh.world.allgather(f"{known.mark} of {output}" * bool(known.mark)))
        self._used = chosen, len(images)
        parts = [_Seen.apply(tensors[name], seen[name]) for name in names]
        logits = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        partial_sums = chosen.rows(logits, upload(labels, logits.device))
        return _LossOfAllTiles.apply(partial_sums, self, chosen, rows, names)

    def _target_of(self, output: str | None, given):
        """Return the target of an output, if the user gave the targets of several outputs.

        Raises:
            ValueError: the targets have none for this output.
        """
        if output is None or not isinstance(given, Mapping):
            return given
        named = named_by_text(given, "the target")
        if output not in named:
            raise ValueError(
                f"the target has the keys {', '.join(named)}, which lack {output}, the output that "
                "the criterion gets: give the target of this output"
            )
        return named[output]

    def _begin_once(self, outputs: Sequence[str | None]) -> None:
        """Begin the backward pass of the eager form, if it has not begun yet.

        Args:
            outputs: the names of the outputs whose loss the backward pass has reached.
        """
        begins, self._in_backward = not self._in_backward, True
        if self._named_outputs:
            reached = set() if begins or self._reached is None else self._reached
            self._reached = reached | {name for name in outputs if name is not None}
        if begins:
            # The user may add terms of the parameters, such as weight decay. Every rank computes
            # them whole, so the sum over ranks has them once for each rank. The scale divides the
            # sum by the number of ranks, and _LossOfAllTiles makes up for this division.
            self._begin(1.0 / self.mesh.replicas.size)
            self._last_pass = self.engine.sums.last_pass(self.engine.parameters)
            self._last_pass.__enter__()
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._in_backward = False
        self._last_pass.__exit__(None, None, None)
        del self._last_pass  # it could not be copied with the model
        self._finish(eager=True)
        self.engine.model.commit_statistics(unbiased=True)

    # Prediction

    @overload
    def predict(self, image: list) -> list[Tensor]: ...

    @overload
    def predict(self, image: Tensor | np.ndarray) -> Tensor: ...

    @overload
    def predict(self, image: object, outputs: Sequence[Key]) -> dict[Key, Tensor]: ...

    @overload
    def predict(self, image: object) -> Tensor | list[Tensor]: ...

    @_joint_call
    @torch.inference_mode(
        False
    )  # tensors of this mode, which the user may be in, allow no training
    @torch.no_grad()
    def predict(self, image, outputs=None):
        """Return the logits of whole images, on every rank.

        All ranks must call it together, with the same images. Norms and dropout are in evaluation
        mode.

        Args:
            image: as for :meth:`backward`.
            outputs: names or numbers of the outputs to return, if the module returns several. The
                result is then a dict from each of these, as given, to the logits. By default the
                logits of the first output in ``outputs`` of :func:`distseg.distribute` are
                returned.

        Returns:
            (B, C', *size) for a batch, (C', *size) for one image, and a list of these for a list of
            images. C' is the number of channels of the output. If the network returns one vector
            per image: (B, C') or (C',). The dtype is float64 if the network is in float64, else
            float32.

        Raises:
            ValueError: the images do not fit the network or differ between ranks, or the network
                does not return one of ``outputs`` in evaluation mode.
        """
        with raise_jointly(self.mesh.world):
            self._check_changes()
            arrays = self._arrays(image)
            parts = self._parts(outputs)
            sizes = [tuple(arrays.size(number)) for number in range(len(arrays))]
            marks = [_few_pixels(arrays, number) for number in range(len(arrays))]
        every = self.mesh.world.allgather((sizes, outputs and [*map(str, parts)], marks))
        if len(given := {tuple(found) for found, *_ in every}) > 1:
            words = " and ".join(
                f"{len(found)} of {_sizes(found)} pixels" for found in sorted(given)
            )
            raise JointFailure(
                f"ranks call predict with different images, {words}: give the same images on all "
                "ranks"
            )
        if any(found != marks for *_, found in every):
            raise JointFailure(
                "ranks call predict with images of the same sizes, but with different pixels: give "
                "the same images on all ranks, also of different sample groups"
            )
        if len(given := {str(names) for _, names, _ in every}) > 1:
            raise JointFailure(
                f"ranks call predict with different outputs, {' and '.join(sorted(given))}: give "
                "the same names on all ranks"
            )
        if len(arrays) > 1 and self._joins_images:
            raise JointFailure(
                "in this network the images of a batch influence each other in evaluation mode "
                f"too, but predict computes each of the {len(arrays)} images alone: give one "
                "image at a time"
            )
        found = [self._whole(arrays, number, [*parts.values()]) for number in range(len(arrays))]
        results = [
            _in_form_of(arrays, [of_image[n] for of_image in found]) for n in range(len(parts))
        ]
        return results[0] if outputs is None else dict(zip(parts, results, strict=True))

    @torch.inference_mode(False)
    @torch.no_grad()
    def predict_tiles(self, image) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield (box, logits) for each of this rank's tiles of one image; logits (C', *box.size).

        All ranks must call it together. Each pixel of the image is in one tile of one rank. So each
        rank can write its tiles of a result that does not fit into the memory of one node. If the
        module returns several outputs, the logits are those of the first one.
        """
        arrays = self._arrays(image)
        if len(arrays) > 1:
            raise ValueError(
                f"predict_tiles takes one image, got {len(arrays)}: call it once for each image"
            )
        (channels,) = self._parts(None).values()
        with self.mesh.joint_call():
            for box, logits in self._tiles_of(arrays, 0):
                yield box, logits[channels]

    def _parts(self, names: Sequence[Key] | None) -> dict[Key, slice]:
        """Return the channels of outputs in the network's result in evaluation, as asked for.

        Args:
            names: names or numbers of the outputs; None for the first one.

        Raises:
            ValueError: the network does not return an output of this name in evaluation, or
                ``names`` is no list of different names.
        """
        known = self._named_outputs or {"": self._outputs.channels}
        there = list(known) if self._evaluates_all else list(known)[:1]
        if names is not None and (not isinstance(names, (list, tuple)) or not names):
            raise ValueError(
                f"outputs is {names!r}: give a list of names or numbers of outputs, such as "
                f"{[next(iter(self._keys.values()), 0)]}"
            )
        wanted = there[:1] if names is None else [str(name) for name in names]
        if doubled := [name for name in wanted if wanted.count(name) > 1]:
            raise ValueError(
                f"outputs is {names!r}, which names {doubled[0]} twice: name each output once"
            )
        ends = dict(zip(known, accumulate(known.values())))
        for name in wanted:
            if name not in known:
                raise ValueError(
                    f"predict is asked for the output {name}, but the argument outputs of "
                    f"distseg.distribute is {', '.join(self._named_outputs or ()) or 'None'}: give "
                    "names of that argument"
                )
            if name not in there:
                raise ValueError(
                    f"predict is asked for the output {name}, but in evaluation mode the network "
                    f"returns {there[0]} only: let the module's forward pass return all outputs "
                    "in evaluation mode too"
                )
        slices = [slice(ends[name] - known[name], ends[name]) for name in wanted]
        return dict(zip(wanted if names is None else names, slices))

    def _tiles_of(self, arrays: Arrays | Stacked, number: int):
        """Yield (box of the tile, logits) for this rank's tiles of image ``number``."""
        predictor = self._predictors()
        size = arrays.size(number)
        with raise_jointly(self.mesh.world):
            predictor.check(size)

        def read(box: Box) -> np.ndarray:
            return arrays.read([number], box)[0].cpu().numpy()

        yield from predictor(ImageSource(f"image {number}", size, read))

    def _whole(self, arrays: Arrays | Stacked, number: int, parts: Sequence[slice]) -> list[Tensor]:
        """Return logits of a whole image on every rank; each rank computes its tiles.

        Args:
            arrays: the images.
            number: the index of the image.
            parts: the channels of each tensor of the result.
        """
        mine = [
            (box, np.concatenate([logits[part] for part in parts]))
            for box, logits in self._tiles_of(arrays, number)
        ]
        boxes = self.mesh.world.allgather([(box, y.shape, y.dtype.str) for box, y in mine])
        whole: Tensor | None = None
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
        assert whole is not None  # an image has at least one tile
        return list(whole.split([part.stop - part.start for part in parts]))

    def _predictors(self) -> Predictor:
        if self._predictor is None:
            self._predictor = self.engine.predictor()
        return self._predictor


def _in_form_of(arrays: Arrays | Stacked, results: list[Tensor]):
    """Return results of images as a batch, as one tensor or as a list, as the user gave images."""
    if arrays.is_batch:
        return torch.stack(results)
    return results if arrays.is_list else results[0]


def _grad(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter that has one."""
    assert parameter.grad is not None
    return parameter.grad


class _LossOfAllTiles(torch.autograd.Function):
    """Autograd function that computes the loss of a step from this rank's partial sums (B, sums).

    Partial sums are sums over the pixels of a tile. The forward pass adds the partial sums of all
    ranks and returns the loss, a scalar tensor, equal on all ranks. The backward pass returns the
    gradient of this rank's partial sums.
    """

    @staticmethod
    def forward(
        ctx,
        partial: Tensor,
        model: DistributedModel,
        criterion: Criterion,
        rows: Rows,
        outputs: Sequence[str | None],
    ):
        table = torch.zeros(rows.total, criterion.sums, dtype=torch.float64)
        own = rows.of_micro_batch(0)
        table[own] = partial.detach().to("cpu", torch.float64)
        value, loss_grad = criterion.loss_grad(add(table, model.mesh.replicas))
        ctx.model, ctx.outputs = model, outputs
        ctx.loss_grad = upload(loss_grad[own], partial.device, partial.dtype)
        return partial.new_tensor(value)

    @staticmethod
    def backward(ctx, factor: Tensor):
        ctx.model._begin_once(ctx.outputs)
        # The number of ranks makes up for the scale that _begin_once sets.
        return ctx.loss_grad * factor * ctx.model.mesh.replicas.size, None, None, None, None


class _Seen(torch.autograd.Function):
    """Autograd function that returns its input, and records the gradient in the backward pass.

    It stands between the model's output and a criterion, and appends the gradient that the
    criterion sends back to the list ``seen``. :func:`_check_only_use` compares these gradients with
    the whole gradient of the output.
    """

    @staticmethod
    def forward(ctx, output: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.seen = seen
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.seen.append(gradient)
        return gradient, None


def _check_only_use(gradient: Tensor | None, seen: list[Tensor]) -> None:
    """Refuse a loss that depends on the model's output in other ways than through a criterion.

    The output is that of one tile, so another term of the loss would miss the rest of the image. A
    loss has other terms if the output's gradient is not the sum of the criteria's gradients.

    Args:
        gradient: the gradient of the output; None for one of several outputs that has no loss.
        seen: the gradients that criteria sent back to the output.

    Raises:
        ValueError: the gradient of the output is not the sum of ``seen``.
    """
    if gradient is None:
        return
    wanted = sum_tensors(seen) if seen else torch.zeros_like(gradient)
    seen.clear()
    if not torch.equal(gradient, wanted) and not torch.allclose(gradient, wanted, rtol=1e-9):
        raise ValueError(
            "besides the criterion, the loss has terms of the model's output, but each rank has "
            "only the output of one tile: compute these terms in the criterion's function"
        )


def _form_of(targets: Arrays | Tensor | OutputTargets) -> tuple:
    """Return the dtypes and the channels of targets, with which a criterion must be checked."""
    if isinstance(targets, OutputTargets):
        return tuple(targets.forms)
    return (str(targets.dtype), ()) if isinstance(targets, Tensor) else targets.form


def _sizes(sizes: Sequence[Sequence[int]]) -> str:
    """Return the distinct sizes of images as text, separated by commas."""
    return ", ".join(dict.fromkeys(str(Size(size)) for size in sizes))


def _hooks_of(network: nn.Module) -> dict[str, int]:
    """Return the number of hooks by name, for each layer and parameter that has hooks."""
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
