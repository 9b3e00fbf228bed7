"""Run optimizer steps serially, as the reference for every distributed layout.

One process runs the unmodified module in PyTorch on the whole images of a step. Norms and losses
are replaced by their textbook formulas on whole images. The serial program shares no code with the
distributed step, with two exceptions: PyTorch's optimizer, and the dropout masks, which both must
take from one definition (:mod:`distseg.layers.dropout`).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from distseg.config.settings import LossConfig, OptimConfig, StepSettings
from distseg.config.sizes import Size
from distseg.layers.dropout import channel_mask, dropout_key, element_mask, image_mask
from distseg.layers.loss import parse
from distseg.models.capture.trace import calling
from distseg.models.capture.wide import call_wide, unnarrowed
from distseg.models.network import Dropped
from distseg.models.passes import checkpoints_ignored, eager
from distseg.runtime.optimizer import make_optimizer, set_learning_rate
from distseg.tiling import rng
from distseg.tiling.tile import Box

Dropouts = Mapping[int, Dropped] | None


@dataclass(frozen=True)
class Image:
    """A whole image of a step.

    Attributes:
        pixels: (C, *size).
        labels: (*size), or (1, ...) for one label of the whole image.
        number: the image's number in the epoch.
        group: the index of the sample group that has the image.
        micro_batch: the index of the micro-batch that has the image.
    """

    pixels: Tensor
    labels: Tensor
    number: int
    group: int
    micro_batch: int


@dataclass(frozen=True)
class Outcome:
    """Results of an optimizer step: loss and tensors, by their names in the user's model.

    Attributes:
        loss: the loss of the step, before the weights change.
        gradients: gradients of all parameters with ``requires_grad``; zeros for unused ones.
        weights: all parameters after the step.
        buffers: floating-point buffers after the step.
        unused: names of trained parameters on which the loss does not depend.
    """

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    unused: tuple[str, ...] = ()


def serial_step(
    model: nn.Module,
    images: list[Image],
    settings: StepSettings,
    epoch: int = 0,
    dropouts: Dropouts = None,
) -> Outcome:
    """Run one optimizer step over ``images`` with a copy of ``model``, in the model's precision.

    Args:
        model: the plain model.
        images: all images of the step.
        settings: the settings of the step.
        epoch: the number of the epoch, on which dropout masks depend.
        dropouts: a dict from the index of a dropout call in the forward pass to the layer whose
            masks this call uses (:class:`distseg.models.network.Network`). By default each call
            uses the masks of the module that makes the call.
    """
    return SerialProgram(model, settings, dropouts).step(images, epoch)


class SerialProgram:
    """Optimizer steps with a copy of a model, one after another.

    Args:
        model: the plain model, which is copied.
        settings: the settings of the step.
        dropouts: a dict from the index of a dropout call in the forward pass to the layer whose
            masks the call uses, as for :func:`serial_step`.

    Attributes:
        model: the copy, with the weights after the latest step.
    """

    def __init__(self, model: nn.Module, settings: StepSettings, dropouts: Dropouts = None):
        self.settings, self.dropouts = settings, dropouts
        self.model = copy.deepcopy(model).train()
        self._parameters = dict(self.model.named_parameters())
        self._buffers = dict(self.model.named_buffers())
        self._update = WeightUpdate(self._parameters, settings.optim)

    def step(self, images: list[Image], epoch: int = 0) -> Outcome:
        """Run an optimizer step over ``images``; return its loss, gradients, weights and buffers.

        Weights and buffers in the result are not copies: the next step changes them.
        """
        self.model.zero_grad(set_to_none=True)
        loss, whole = _forward(self.model, images, self.settings, epoch, self.dropouts)
        if loss.requires_grad:
            loss.backward()
        whole.commit()
        unused = tuple(
            name for name, p in self._parameters.items() if p.requires_grad and p.grad is None
        )
        gradients = _gradients(self._parameters)
        weights = self._update(epoch)
        self._buffers = dict(self.model.named_buffers())  # a forward pass may have assigned others
        return Outcome(
            loss.item(),
            gradients,
            weights,
            {n: b for n, b in self._buffers.items() if b.is_floating_point()},
            unused,
        )

    def take_over(self, outcome: Outcome) -> None:
        """Copy the weights and buffers that the distributed program computed into the model.

        Both programs then begin the next step with the same values, so rounding errors of this step
        do not affect the comparison of the next step.
        """
        take_over(self._parameters, outcome.weights)
        take_over(self._buffers, outcome.buffers)


@torch.no_grad()
def take_over(tensors: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Copy each tensor of ``found`` into the tensor of the same name in ``tensors``."""
    for name, tensor in found.items():
        tensors[name].copy_(tensor)


class WeightUpdate:
    """Optimizer of the serial program, which updates parameters with given gradients.

    Args:
        parameters: the parameters by name, which the steps change in place.
        optim: the optimizer settings.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], optim: OptimConfig):
        self.parameters, self._clip, self._rate = parameters, optim.clip, optim.lr
        self._trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self._optimizer = make_optimizer(optim, self._trained, fused=False)

    @classmethod
    def on_copies(cls, model: nn.Module, optim: OptimConfig) -> WeightUpdate:
        """Return an object that updates copies of a model's parameters, not the model itself."""
        return cls(
            {
                name: nn.Parameter(p.detach().clone(), p.requires_grad)
                for name, p in model.named_parameters()
            },
            optim,
        )

    def __call__(self, epoch: int, gradients: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Clip the gradients, step the optimizer, and return the parameters by name.

        Args:
            epoch: the number of the epoch, on which the learning rate of some parameters depends
                (setting ``optim.thaw``).
            gradients: gradients by name; by default the ``grad`` of each parameter.
        """
        set_learning_rate(self._optimizer, self._rate, epoch)
        for name, gradient in (gradients or {}).items():
            self.parameters[name].grad = gradient.clone()
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self._trained.values(), self._clip)
        self._optimizer.step()
        return {name: p.detach() for name, p in self.parameters.items()}


def rounding_of_gradients(
    model: nn.Module,
    images: list[Image],
    settings: StepSettings,
    wanted: dict[str, Tensor],
    epoch: int = 0,
    dropouts: Dropouts = None,
) -> dict[str, float]:
    """Return the 2-norm of the rounding error of each gradient, by the parameter's name.

    The error is measured with the gradient of 3 * loss, divided by 3. In exact arithmetic this is
    the gradient of the loss, but every product rounds differently. The result is the norm of its
    difference from ``wanted``, the gradient of the loss.

    Args:
        model: the plain model before the step.
        images: all images of the step.
        settings: the settings of the step.
        wanted: the gradient of the loss by the parameter's name.
        epoch: the number of the epoch, on which dropout masks depend.
        dropouts: a dict from the index of a dropout call in the forward pass to the layer whose
            masks the call uses, as for :func:`serial_step`.
    """
    model = copy.deepcopy(model).train()
    parameters = dict(model.named_parameters())
    (3 * _forward(model, images, settings, epoch, dropouts)[0]).backward()
    again = _gradients(parameters)
    return {name: (again[name] / 3 - w).norm().item() for name, w in wanted.items()}


def rounding_of_step(
    model: nn.Module,
    images: list[Image],
    settings: StepSettings,
    epoch: int = 0,
    dropouts: Dropouts = None,
) -> Outcome:
    """Run :func:`serial_step` with random rounding errors, and return the results of the step.

    Every result of a torch function gets a random relative error of up to half the machine epsilon.
    The difference from a step without these errors shows how exact a comparison can be. The
    arguments are those of :func:`serial_step`.
    """
    with _Rounding():
        return serial_step(model, images, settings, epoch, dropouts)


# Relative rounding errors of equal probability, in units of the machine epsilon; their mean is 0.
# The next number below 1 is half an epsilon away, the next one above a whole epsilon.
_ROUNDING = (-0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


class _Rounding(TorchFunctionMode):
    """TorchFunctionMode that adds random rounding errors to the results of torch functions.

    Parameters, and results that share memory with an argument, stay unchanged.
    """

    def __init__(self):
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if (
            not isinstance(made, Tensor)
            or not made.is_floating_point()
            or made.is_leaf
            and made.requires_grad
        ):
            return made
        given = {
            x.untyped_storage().data_ptr()
            for x in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        if made.untyped_storage().data_ptr() in given or made._base is not None:
            return made
        errors = made.new_tensor(_ROUNDING) * torch.finfo(made.dtype).eps
        drawn = torch.randint(len(errors), made.shape, generator=self._generator)
        return made * (1 + errors[drawn])


def _forward(
    model: nn.Module, images: list[Image], settings: StepSettings, epoch: int, dropouts: Dropouts
) -> tuple[Tensor, _Whole]:
    """Run the forward passes of a step on whole images.

    Returns:
        The loss with its autograd graph, and the mode :class:`_Whole` in which the passes ran. This
        object has recorded the inputs of batch norms, from which its method ``commit`` updates the
        running statistics.
    """
    logits = {}
    whole = _Whole(model, settings.frozen_norm, settings.seed, epoch, dropouts)
    for batch in _batches(model, images, settings):
        with whole.for_batch(batch):
            outputs = model(torch.stack([image.pixels for image in batch]))
        logits.update(zip((image.number for image in batch), outputs))
    labels, weights = [i.labels for i in images], (settings.outputs or {"": 1.0}).values()
    # One tuple per output of the network, with the logits of all images.
    outputs = zip(*(logits[i.number].chunk(len(weights)) for i in images))
    loss = sum(
        weight * serial_loss(settings.loss, list(each), labels)
        for weight, each in zip(weights, outputs)
    )
    return loss, whole


def _gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    for p in parameters.values():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    return {name: p.grad.clone() for name, p in parameters.items() if p.requires_grad}


def _batches(model: nn.Module, images: list[Image], settings: StepSettings) -> list[list[Image]]:
    """Return the images of a step in batches, each of which goes through the network together.

    A batch is a micro-batch of one sample group, or of all groups if ``norm_scope`` is step. If the
    images of a batch differ in size and no batch norm takes statistics of them, every image of the
    step is a batch of its own.

    Raises:
        ValueError: the images of a batch differ in size, and a batch norm takes statistics of them.
    """
    batches: dict = {}
    step = settings.norm_scope == "step"
    for image in images:
        batches.setdefault(
            image.micro_batch if step else (image.group, image.micro_batch), []
        ).append(image)
    apart = settings.frozen_norm or not any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()
    )
    for batch in batches.values():
        sizes = {Size(image.pixels.shape[1:]) for image in batch}
        if len(sizes) > 1 and apart:
            return [[image] for image in images]
        if len(sizes) > 1:
            scope = " and spatial.norm_scope to group" if step else ""
            raise ValueError(
                "the serial program cannot compute batch norm over images of different sizes, but "
                f"those of a batch have {', '.join(map(str, sorted(sizes)))} pixels: "
                "set data.images to 1"
                f"{scope}, or give all samples one size by data.crop, without data.context and at "
                "most as large as the smallest image"
            )
    return list(batches.values())


class _Whole(TorchFunctionMode):
    """TorchFunctionMode in which norms compute by formulas, and dropout uses distseg's own masks.

    It replaces PyTorch's functions for norms and dropout, whichever code calls them. The seed, the
    epoch, the image and the layer determine a dropout mask (:func:`dropout_key`). The formulas of
    norms use torch.mean, which adds pairwise. PyTorch's CPU kernels of norms add tens of thousands
    of numbers one after another. Even in float64 this loses so many digits that the result depends
    visibly on the order of the images in a batch.

    Args:
        model: the copy of the user's module that runs in this mode.
        frozen: the value of ``spatial.frozen_norm``.
        seed: the value of ``train.seed``.
        epoch: the number of the epoch.
        dropouts: a dict from the index of a dropout call in the forward pass to the layer whose
            masks the call uses, as for :func:`serial_step`.
    """

    def __init__(self, model: nn.Module, frozen: bool, seed: int, epoch: int, dropouts: Dropouts):
        super().__init__()
        self.seed, self.epoch = seed, epoch
        self.frozen, self.dropouts = frozen, dropouts
        self.model, self.wide = model, any(p.dtype == torch.float64 for p in model.parameters())
        # Running mean, running variance and momentum. The key is the id of the running mean, and
        # how many times the same forward pass has used it before.
        self.running: dict[tuple[int, int], tuple[Tensor, Tensor, float]] = {}
        self.seen: dict[tuple[int, int], list[Tensor]] = {}

    @contextmanager
    def for_batch(self, batch: list[Image]):
        """Return a context manager in which the model runs one forward pass.

        Inside the context, PyTorch's functions for norms and dropout are replaced. Dropout masks
        depend on the number of each image and on the index of the dropout call, counted from 0.

        Args:
            batch: the images that go through the model in this pass.
        """
        self.numbers, self.calls, self.inside = [image.number for image in batch], 0, []
        self.times: Counter[int] = Counter()
        # Number of dropout calls so far of each module that the network does not list as a layer.
        self.turns: Counter[str] = Counter()
        with calling(self.model, self.inside), checkpoints_ignored(), eager(), self:
            yield

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.wide:
            function, args, kwargs = unnarrowed(function, args, kwargs)
        rule = _OF_WHOLE.get(function)
        function = function if rule is None else partial(rule, self)
        return call_wide(function, args, kwargs) if self.wide else function(*args, **kwargs)

    # Dropout. Signatures are those of PyTorch's functions.

    def elements(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Compute F.dropout or torch.dropout with distseg's mask, which drops single elements."""

        def masks(x: Tensor, keys: list[int]) -> Tensor:
            size = tuple(x.shape[2:])
            return torch.stack(
                [element_mask(p, k, x.shape[1], size, Box.whole(size), None) for k in keys]
            )

        return self._dropped(input, p, training, masks, inplace)

    def channels(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Compute a channel dropout with distseg's mask, which drops whole channels of an image.

        This replaces F.dropout1d, F.dropout2d, F.dropout3d and torch.feature_dropout.
        """

        def masks(x: Tensor, keys: list[int]) -> Tensor:
            shape = (-1, *(1 for _ in x.shape[2:]))
            return torch.stack([channel_mask(p, k, x.shape[1]).view(shape) for k in keys])

        return self._dropped(input, p, training, masks, inplace)

    def _dropped(
        self,
        input: Tensor,
        p: float,
        training: bool,
        masks: Callable[[Tensor, list[int]], Tensor],
        inplace: bool,
    ) -> Tensor:
        """Return ``input`` multiplied by the masks of the current dropout call.

        Args:
            input, p, training, inplace: the arguments of the dropout function.
            masks: returns the masks for (input, keys of the images).
        """
        known = self._known()
        if not (training and p):
            return input
        keys = (
            self._keys(known.layer, 0)
            if known
            else self._keys(self.inside[-1], self.turns[self.inside[-1]])
        )
        self.turns[self.inside[-1]] += known is None
        mask = (
            masks(input.movedim(-1, 1), keys).to(input).movedim(1, -1)
            if known and known.last
            else masks(input, keys).to(input)
        )
        return input.mul_(mask) if inplace else input * mask

    def rand(self, *size, **more) -> Tensor:
        """Compute torch.rand, but with distseg's own random numbers for stochastic depth.

        If a layer of stochastic depth makes the call, return a tensor (images, 1, ...). The seed,
        the epoch, the image and the layer determine its numbers. Any other call returns the result
        of torch.rand.
        """
        known = self._known()
        if known is None:
            return torch.rand(*size, **more)
        return torch.tensor(
            [rng.uniform(k, 1)[0] for k in self._keys(known.layer)], dtype=torch.float64
        ).view(-1, *(1 for _ in (size[0] if len(size) == 1 else size)[1:]))

    def bernoulli(self, input: Tensor, p: float = 0.5, **more) -> Tensor:
        """Compute Tensor.bernoulli_, but with distseg's own random numbers for stochastic depth.

        If a layer of stochastic depth makes the call, fill the tensor with 1 for the images that
        are kept and with 0 for the others. Any other call does what Tensor.bernoulli_ does.
        """
        known = self._known()
        if known is None:
            return input.bernoulli_(p, **more)
        kept = torch.stack([image_mask(1 - p, k) for k in self._keys(known.layer)])
        return input.copy_(kept.view(-1, *(1 for _ in input.shape[1:])).expand_as(input))

    def _known(self) -> Dropped | None:
        """Return the entry of ``dropouts`` for the current call: the layer whose masks it uses.

        Return None if ``dropouts`` is None or has no entry for this call. The method counts the
        calls that draw random numbers in a forward pass, because ``dropouts`` identifies a call by
        its index. So it must be called exactly once for each such call.
        """
        number, self.calls = self.calls, self.calls + 1
        return None if self.dropouts is None else self.dropouts.get(number)

    def _keys(self, name: str, turn: int = 0) -> list[int]:
        return [dropout_key(self.seed, self.epoch, image, name, turn) for image in self.numbers]

    # Norms. Signatures are those of PyTorch's functions.

    def batch(
        self,
        input,
        running_mean,
        running_var,
        weight=None,
        bias=None,
        training=False,
        momentum=0.1,
        eps=1e-5,
    ) -> Tensor:
        """Compute F.batch_norm by its formula.

        An active norm computes its statistics from the current ``input``, which is recorded for
        :meth:`commit`. A frozen norm uses its running statistics.
        """
        channel = _by_channel(input)
        if running_mean is not None and (self.frozen or not training):
            y = (input - running_mean.view(channel)) / (running_var.view(channel) + eps).sqrt()
        else:
            values = input.transpose(0, 1)
            if running_mean is not None:
                key = id(running_mean), self.times[id(running_mean)]
                self.times[id(running_mean)] += 1
                self.running[key] = running_mean, running_var, momentum
                self.seen.setdefault(key, []).append(values.detach().flatten(1))
            y = _normalised(values, eps).transpose(0, 1)
        return _scaled(y, weight, bias)

    def instance(
        self,
        input,
        running_mean=None,
        running_var=None,
        weight=None,
        bias=None,
        use_input_stats=True,
        momentum=0.1,
        eps=1e-5,
    ) -> Tensor:
        """Compute F.instance_norm by its formula, always with the statistics of ``input``."""
        y = _normalised(input.reshape(-1, 1, *input.shape[2:]), eps)
        return _scaled(y.reshape(input.shape), weight, bias)

    def group(self, input, num_groups, weight=None, bias=None, eps=1e-5) -> Tensor:
        """Compute F.group_norm by its formula."""
        y = _normalised(input.reshape(-1, input.shape[1] // num_groups, *input.shape[2:]), eps)
        return _scaled(y.reshape(input.shape), weight, bias)

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running statistics of batch norms, once after all forward passes of a step.

        The running statistics move towards the mean and the biased variance of all images of the
        step. PyTorch instead updates them in each forward pass, with the unbiased variance.
        """
        for key, (mean, var, momentum) in self.running.items():
            values = torch.cat(self.seen[key], 1)  # (C, all pixels of all images of the step)
            for running, found in ((mean, values.mean(1)), (var, values.var(1, correction=0))):
                running.copy_((1 - momentum) * running + momentum * found)


_OF_WHOLE = {
    F.batch_norm: _Whole.batch,
    F.instance_norm: _Whole.instance,
    F.group_norm: _Whole.group,
    F.dropout: _Whole.elements,
    torch.dropout: _Whole.elements,
    torch.rand: _Whole.rand,
    Tensor.bernoulli_: _Whole.bernoulli,
    F.dropout1d: _Whole.channels,
    F.dropout2d: _Whole.channels,
    F.dropout3d: _Whole.channels,
    torch.feature_dropout: _Whole.channels,
}


def _by_channel(x: Tensor) -> tuple[int, ...]:
    return (1, -1, *(1 for _ in x.shape[2:]))


def _normalised(values: Tensor, eps: float) -> Tensor:
    """Return ``values`` shifted and scaled to mean 0 and variance 1 over all dims but the first.

    The mean and the variance are computed separately for each index of the first dim. ``eps`` is
    added to the variance.
    """
    dims = tuple(range(1, values.dim()))
    deviation = values - values.mean(dims, keepdim=True)
    return deviation / ((deviation**2).mean(dims, keepdim=True) + eps).sqrt()


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight.view(_by_channel(y))
    return y if bias is None else y + bias.view(_by_channel(y))


def serial_loss(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    """Return the loss of whole images by its textbook formula.

    Args:
        config: the ``loss`` settings.
        logits: for each image a tensor (C, *size), or (C,) if there is one output per image.
        labels: for each image a tensor (*size), or (1, ...) if there is one label per image.
    """
    return sum(
        weight * _FORMULAS[name](config, logits, labels) for weight, name in parse(config.name)
    )


def _flat(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits (n, C) and labels (n,) of the n valid pixels of all images.

    A pixel is valid if its label is not ``config.ignore_index``.
    """
    z = torch.cat([z.reshape(len(z), -1).t() for z in logits])
    y = torch.cat([y.flatten() for y in labels])
    return z[y != config.ignore_index], y[y != config.ignore_index]


def _mean(losses: Tensor) -> Tensor:
    """Return the mean of the losses of the valid pixels; 0 if there is none, as in training."""
    return losses.sum() / max(1, losses.numel())


def _weights(config: LossConfig, like: Tensor) -> Tensor | None:
    return (
        None
        if config.class_weights is None
        else torch.tensor(config.class_weights, dtype=torch.float64).to(like)
    )


def _cross_entropy(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    z, y = _flat(config, logits, labels)
    if not len(y):  # PyTorch returns NaN for no pixel.
        return z.sum()
    return F.cross_entropy(z, y, _weights(config, z), label_smoothing=config.label_smoothing)


def _binary_cross_entropy(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    z, y = _flat(config, logits, labels)
    targets = y.unsqueeze(1) if z.shape[1] == 1 else F.one_hot(y, z.shape[1])
    return _mean(F.binary_cross_entropy_with_logits(z, targets.to(z), reduction="none"))


def _focal(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    z, y = _flat(config, logits, labels)
    if z.shape[1] == 1:
        z = torch.cat((torch.zeros_like(z), z), 1)
    p = z.softmax(1)[torch.arange(len(y)), y]
    w = _weights(config, z)
    return _mean((1 if w is None else w[y]) * (1 - p) ** config.gamma * -p.log())


def _mse(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    return F.mse_loss(
        torch.cat([z.flatten() for z in logits]), torch.cat([y.flatten() for y in labels])
    )


def _l1(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    return F.l1_loss(
        torch.cat([z.flatten() for z in logits]), torch.cat([y.flatten() for y in labels])
    )


def _dice(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    if config.dice_over == "image":
        return sum(_dice_of(config, [z], [y]) for z, y in zip(logits, labels)) / len(logits)
    return _dice_of(config, logits, labels)


def _dice_of(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    """Return the Dice loss of whole images, averaged over the classes."""
    z, y = _flat(config, logits, labels)
    p, t = (
        (z.sigmoid(), y.unsqueeze(1).to(z))
        if z.shape[1] == 1
        else (z.softmax(1), F.one_hot(y, z.shape[1]).to(z))
    )
    overlap, total = (p * t).sum(0), p.sum(0) + t.sum(0)
    whole = total + config.smooth
    return torch.where(
        whole > 0, 1 - (2 * overlap + config.smooth) / whole.where(whole > 0, 1), 0
    ).mean()


_FORMULAS = {
    "cross_entropy": _cross_entropy,
    "binary_cross_entropy": _binary_cross_entropy,
    "focal": _focal,
    "dice": _dice,
    "mse": _mse,
    "l1": _l1,
}
