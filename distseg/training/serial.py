"""The serial program: what every layout is compared with.

One process, the whole images of one optimizer step, the module as its author wrote it, run by PyTorch, but that norms
and losses are their textbook formulas on whole images. It shares no code with the distributed step but the mask of a
dropout, which is a definition (:mod:`distseg.layers.dropout`), and the optimizer, which is PyTorch's.
"""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from distseg.config.settings import Config, LossConfig
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
    """A whole image of a step: pixels (C, *size), labels (*size), or (1, ...) that of the image, its number in the epoch and its place in the step."""

    pixels: Tensor
    labels: Tensor
    number: int
    group: int
    micro_batch: int


@dataclass(frozen=True)
class Outcome:
    """What a step yields; the dicts are keyed by the model's own names.

    ``gradients`` are of what is trained: zeros of the ``unused``, on which the loss does not depend, and none of a parameter whose ``requires_grad`` is off.
    """

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    unused: tuple[str, ...] = ()


def serial_step(
    model: nn.Module, images: list[Image], config: Config, epoch: int = 0, dropouts: Dropouts = None
) -> Outcome:
    """One optimizer step over ``images`` with a copy of ``model``, in the model's own precision.

    Args:
        dropouts: of the calls of dropout functions in a forward pass, by number, the layer that each is (:class:`distseg.models.network.Network`); by default
            the module that calls it.
    """
    return SerialProgram(model, config, dropouts).step(images, epoch)


class SerialProgram:
    """Optimizer steps with a copy of a model, one after another.

    Attributes:
        model: the copy, as the steps up to now have left it.
    """

    def __init__(self, model: nn.Module, config: Config, dropouts: Dropouts = None):
        self.config, self.dropouts = config, dropouts
        self.model = copy.deepcopy(model).train()
        self._parameters, self._buffers = (
            dict(self.model.named_parameters()),
            dict(self.model.named_buffers()),
        )
        self._update = WeightUpdate(self._parameters, config)

    def step(self, images: list[Image], epoch: int = 0) -> Outcome:
        """Return what an optimizer step over ``images`` yields; its weights and buffers are the model's own, and change with the next step."""
        self.model.zero_grad(set_to_none=True)
        loss, whole = _forward(self.model, images, self.config, epoch, self.dropouts)
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
        """Go on from the weights and buffers of another program, so that a later step is not compared by what rounding made of this one."""
        take_over(self._parameters, outcome.weights)
        take_over(self._buffers, outcome.buffers)


@torch.no_grad()
def take_over(tensors: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Give tensors the numbers of others of the same names."""
    for name, tensor in found.items():
        tensors[name].copy_(tensor)


class WeightUpdate:
    """The optimizer's steps on the gradients of some parameters, whoever computed them."""

    def __init__(self, parameters: dict[str, nn.Parameter], config: Config):
        self.parameters, self._clip, self._rate = parameters, config.optim.clip, config.optim.lr
        self._trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self._optimizer = make_optimizer(config.optim, self._trained, fused=False)

    @classmethod
    def of(cls, model: nn.Module, config: Config) -> "WeightUpdate":
        """Return the steps of copies of a model's parameters."""
        return cls(
            {
                name: nn.Parameter(p.detach().clone(), p.requires_grad)
                for name, p in model.named_parameters()
            },
            config,
        )

    def __call__(self, epoch: int, gradients: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the parameters behind a step on these gradients, or on those that they have."""
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
    config: Config,
    wanted: dict[str, Tensor],
    epoch: int = 0,
    dropouts: Dropouts = None,
) -> dict[str, float]:
    """How far rounding moves each gradient: the norm of ``wanted`` less a third of the gradient of thrice the loss.

    The same sums over the same images, but no product in them rounds as before.
    """
    model = copy.deepcopy(model).train()
    parameters = dict(model.named_parameters())
    (3 * _forward(model, images, config, epoch, dropouts)[0]).backward()
    again = _gradients(parameters)
    return {name: (again[name] / 3 - w).norm().item() for name, w in wanted.items()}


def rounding_of_step(
    model: nn.Module, images: list[Image], config: Config, epoch: int = 0, dropouts: Dropouts = None
) -> Outcome:
    """The step of :func:`serial_step`, whose every function's result is off by up to half of its last bit more."""
    with _Rounding():
        return serial_step(model, images, config, epoch, dropouts)


class _Rounding(TorchFunctionMode):
    """In which new tensors differ in their last bits."""

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
        return made * (
            1
            + (torch.rand(made.shape, generator=self._generator, dtype=made.dtype) - 0.5)
            * torch.finfo(made.dtype).eps
        )


def _forward(
    model: nn.Module, images: list[Image], config: Config, epoch: int, dropouts: Dropouts
) -> tuple[Tensor, "_Whole"]:
    """The loss, with its graph, and what norms have seen."""
    whole, logits = _Whole(model, config, epoch, dropouts), {}
    for batch in _batches(model, images, config.spatial.norm_scope):
        with whole.of(batch):
            outputs = model(torch.stack([image.pixels for image in batch]))
        logits.update(zip((image.number for image in batch), outputs))
    labels, weights = [i.labels for i in images], (config.model.outputs or {"": 1.0}).values()
    outputs = zip(
        *(logits[i.number].chunk(len(weights)) for i in images)
    )  # of each, the logits of all images
    return sum(
        weight * serial_loss(config.loss, list(each), labels)
        for weight, each in zip(weights, outputs)
    ), whole


def _gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    for p in parameters.values():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    return {name: p.grad.clone() for name, p in parameters.items() if p.requires_grad}


def _batches(model: nn.Module, images: list[Image], norm_scope: str) -> list[list[Image]]:
    """The images that go through the network together: those of a micro-batch, or one by one where their sizes differ and there is no batch norm."""
    batches: dict = {}
    for image in images:
        batches.setdefault(
            image.micro_batch if norm_scope == "step" else (image.group, image.micro_batch), []
        ).append(image)
    batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    for batch in batches.values():
        sizes = {tuple(image.pixels.shape[1:]) for image in batch}
        if len(sizes) > 1 and not batch_norm:
            return [[image] for image in images]
        if len(sizes) > 1:
            apart = "spatial.norm_scope to group" if norm_scope == "step" else "data.images to 1"
            raise ValueError(
                f"plain batch norm has no meaning for images of different sizes in one batch ({sorted(sizes)}): set data.crop, or {apart}"
            )
    return list(batches.values())


class _Whole(TorchFunctionMode):
    """Inside, functions of norms compute by their formulas, and those of dropout with the keyed masks, on whole images, whichever code calls them.

    PyTorch's own CPU kernels of norms add tens of thousands of numbers one after another, which costs even float64 enough digits
    (about 3e-12 of a gradient at 97x131) that the order of two images in a batch shows. torch.mean adds in pairs.
    """

    def __init__(self, model: nn.Module, config: Config, epoch: int, dropouts: Dropouts):
        super().__init__()
        self.seed, self.epoch, self.frozen, self.dropouts = (
            config.train.seed,
            epoch,
            config.spatial.frozen_norm,
            dropouts,
        )
        self.model, self.wide = model, any(p.dtype == torch.float64 for p in model.parameters())
        self.running: dict[
            tuple[int, int], tuple[Tensor, Tensor, float]
        ] = {}  # by the identity of a running mean, and how often a pass used it before
        self.seen: dict[tuple[int, int], list[Tensor]] = {}

    @contextmanager
    def of(self, batch: list[Image]):
        """Of a forward pass with these images."""
        self.numbers, self.calls, self.inside = [image.number for image in batch], 0, []
        self.times: Counter[int] = Counter()
        self.turns: Counter[str] = Counter()  # of the dropouts of a module that is not followed
        with calling(self.model, self.inside), checkpoints_ignored(), eager(), self:
            yield

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function, args, kwargs = (
            unnarrowed(function, args, kwargs or {})
            if self.wide
            else (function, args, kwargs or {})
        )
        rule = _OF_WHOLE.get(function)
        function = function if rule is None else partial(rule, self)
        return call_wide(function, args, kwargs) if self.wide else function(*args, **kwargs)

    # dropout

    def elements(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        def masks(x: Tensor, keys: list[int]) -> Tensor:
            size = tuple(x.shape[2:])
            return torch.stack(
                [element_mask(p, k, x.shape[1], size, Box.whole(size), None) for k in keys]
            )

        return self._dropped(input, p, training, masks, inplace)

    def channels(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        masks = lambda x, keys: torch.stack(
            [channel_mask(p, k, x.shape[1]).view(-1, *(1 for _ in x.shape[2:])) for k in keys]
        )
        return self._dropped(input, p, training, masks, inplace)

    def _dropped(
        self,
        input: Tensor,
        p: float,
        training: bool,
        masks: Callable[[Tensor, list[int]], Tensor],
        inplace: bool,
    ) -> Tensor:
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
        """A number for each image, where that is a layer's: stochastic depth."""
        known = self._known()
        if known is None:
            return torch.rand(*size, **more)
        return torch.tensor(
            [rng.uniform(k, 1)[0] for k in self._keys(known.layer)], dtype=torch.float64
        ).view(-1, *(1 for _ in (size[0] if len(size) == 1 else size)[1:]))

    def bernoulli(self, input: Tensor, p: float = 0.5, **more) -> Tensor:
        """In place: whether an image is kept."""
        known = self._known()
        if known is None:
            return input.bernoulli_(p, **more)
        kept = torch.stack([image_mask(1 - p, k) for k in self._keys(known.layer)])
        return input.copy_(kept.view(-1, *(1 for _ in input.shape[1:])).expand_as(input))

    def _known(self) -> Dropped | None:
        """The layer that this call is."""
        number, self.calls = self.calls, self.calls + 1
        return None if self.dropouts is None else self.dropouts.get(number)

    def _keys(self, name: str, turn: int = 0) -> list[int]:
        return [dropout_key(self.seed, self.epoch, image, name, turn) for image in self.numbers]

    # norms

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
        return _scaled(
            _normalised(input.reshape(-1, 1, *input.shape[2:]), eps).reshape(input.shape),
            weight,
            bias,
        )

    def group(self, input, num_groups, weight=None, bias=None, eps=1e-5) -> Tensor:
        return _scaled(
            _normalised(
                input.reshape(-1, input.shape[1] // num_groups, *input.shape[2:]), eps
            ).reshape(input.shape),
            weight,
            bias,
        )

    @torch.no_grad()
    def commit(self) -> None:
        """Running statistics by the definition of deferred batch norm: mean and biased variance of all images of the step."""
        for key, (mean, var, momentum) in self.running.items():
            values = torch.cat(self.seen[key], 1)  # (C, all pixels of all images of the step)
            for running, found in ((mean, values.mean(1)), (var, values.var(1, correction=0))):
                running.copy_((1 - momentum) * running + momentum * found)


_OF_WHOLE = {
    F.batch_norm: _Whole.batch, F.instance_norm: _Whole.instance, F.group_norm: _Whole.group, F.dropout: _Whole.elements, torch.dropout: _Whole.elements,
    torch.rand: _Whole.rand, Tensor.bernoulli_: _Whole.bernoulli, F.dropout1d: _Whole.channels, F.dropout2d: _Whole.channels, F.dropout3d: _Whole.channels, torch.feature_dropout: _Whole.channels,
}  # fmt: skip


def _by_channel(x: Tensor) -> tuple[int, ...]:
    return (1, -1, *(1 for _ in x.shape[2:]))


def _normalised(values: Tensor, eps: float) -> Tensor:
    """All but the first dim together."""
    dims = tuple(range(1, values.dim()))
    deviation = values - values.mean(dims, keepdim=True)
    return deviation / ((deviation**2).mean(dims, keepdim=True) + eps).sqrt()


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight.view(_by_channel(y))
    return y if bias is None else y + bias.view(_by_channel(y))


def serial_loss(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    """The loss of whole images: logits (C, *size), or (C,) of the image, and labels (*size), or (1, ...), each."""
    return sum(
        weight * _FORMULAS[name](config, logits, labels) for weight, name in parse(config.name)
    )


def _flat(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The valid pixels of all images: (n, C) and (n,)."""
    z = torch.cat([z.reshape(len(z), -1).t() for z in logits])
    y = torch.cat([y.flatten() for y in labels])
    return z[y != config.ignore_index], y[y != config.ignore_index]


def _weights(config: LossConfig, like: Tensor) -> Tensor | None:
    return (
        None
        if config.class_weights is None
        else torch.tensor(config.class_weights, dtype=torch.float64).to(like)
    )


def _cross_entropy(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    z, y = _flat(config, logits, labels)
    return F.cross_entropy(z, y, _weights(config, z), label_smoothing=config.label_smoothing)


def _binary_cross_entropy(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    z, y = _flat(config, logits, labels)
    targets = y.unsqueeze(1) if z.shape[1] == 1 else F.one_hot(y, z.shape[1])
    return F.binary_cross_entropy_with_logits(z, targets.to(z))


def _focal(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    z, y = _flat(config, logits, labels)
    if z.shape[1] == 1:
        z = torch.cat((torch.zeros_like(z), z), 1)
    p = z.softmax(1)[torch.arange(len(y)), y]
    w = _weights(config, z)
    return ((1 if w is None else w[y]) * (1 - p) ** config.gamma * -p.log()).mean()


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
