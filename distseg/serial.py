"""The serial program: what every layout is compared with.

One process, the whole images of one optimizer step, the plain PyTorch layers of the model as a user writes it, norms
and losses by their textbook formulas on whole images. It shares no code with the distributed step but the mask of a
dropout, which is a definition (:mod:`distseg.spatial.dropout`), and the optimizer, which is PyTorch's.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distseg import rng
from distseg.config import Config, LossConfig
from distseg.geometry.tile import Box
from distseg.spatial.norm import NORMS
from distseg.spatial.dropout import CHANNEL_DROPOUTS, DROPOUTS, channel_mask, element_mask
from distseg.loss import parse
from distseg.train.optim import make_optimizer


@dataclass(frozen=True)
class Image:
    """A whole image of a step: pixels (C, *size), labels (*size), its number in the epoch and its place in the step."""

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


def serial_step(model: nn.Module, images: list[Image], config: Config, epoch: int = 0) -> Outcome:
    """One optimizer step over ``images`` with a copy of ``model``, in the model's own precision."""
    model = copy.deepcopy(model).train()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    loss, norms = _forward(model, images, config, epoch)
    if loss.requires_grad:
        loss.backward()
    for norm in norms:
        norm.commit()
    unused = tuple(name for name, p in parameters.items() if p.requires_grad and p.grad is None)
    gradients = _gradients(parameters)
    return Outcome(loss.item(), gradients, _stepped(parameters, config), {n: b for n, b in buffers.items() if b.is_floating_point()}, unused)


def updated_weights(model: nn.Module, gradients: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The weights after the optimizer's step on these gradients, whoever computed them."""
    parameters = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    for name, gradient in gradients.items():
        parameters[name].grad = gradient.clone()
    return _stepped(parameters, config)


def rounding_of_gradients(model: nn.Module, images: list[Image], config: Config, wanted: dict[str, Tensor], epoch: int = 0) -> dict[str, float]:
    """How far rounding moves each gradient: the norm of ``wanted`` less a third of the gradient of thrice the loss.

    The same sums over the same images, but no product in them rounds as before.
    """
    model = copy.deepcopy(model).train()
    parameters = dict(model.named_parameters())
    (3 * _forward(model, images, config, epoch)[0]).backward()
    again = _gradients(parameters)
    return {name: (again[name] / 3 - w).norm().item() for name, w in wanted.items()}


def _forward(model: nn.Module, images: list[Image], config: Config, epoch: int) -> tuple[Tensor, list[_SerialNorm]]:
    """The loss, with its graph, and the norms that took statistics. The model's dropouts and norms are swapped for serial ones."""
    dropouts = _swap(model, DROPOUTS, lambda name, layer: _SerialDropout(layer, name, config.train.seed, epoch))
    norms = _swap(model, NORMS, lambda _, layer: _SerialNorm(layer, config.spatial.frozen_norm))
    logits: dict[int, Tensor] = {}
    for batch in _batches(model, images, config.spatial.norm_scope):
        for d in dropouts:
            d.numbers = [image.number for image in batch]
        for image, output in zip(batch, model(torch.stack([image.pixels for image in batch]))):
            logits[image.number] = output
    return serial_loss(config.loss, [logits[i.number] for i in images], [i.labels for i in images]), norms


def _gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    for p in parameters.values():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    return {name: p.grad.clone() for name, p in parameters.items() if p.requires_grad}


def _stepped(parameters: dict[str, nn.Parameter], config: Config) -> dict[str, Tensor]:
    """The parameters after an optimizer step on their gradients."""
    trained = [p for p in parameters.values() if p.requires_grad]
    if config.optim.clip:
        torch.nn.utils.clip_grad_norm_(trained, config.optim.clip)
    make_optimizer(config.optim, trained).step()
    return {name: p.detach() for name, p in parameters.items()}


def _batches(model: nn.Module, images: list[Image], norm_scope: str) -> list[list[Image]]:
    """The images that go through the network together: one by one, but for batch norm those it sees together."""
    if not any(isinstance(m, _SerialNorm) and isinstance(m.norm, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        return [[image] for image in images]
    batches: dict = {}
    for image in images:
        batches.setdefault(image.micro_batch if norm_scope == "step" else (image.group, image.micro_batch), []).append(image)
    for batch in batches.values():
        sizes = {tuple(image.pixels.shape[1:]) for image in batch}
        if len(sizes) > 1:
            apart = "spatial.norm_scope to group" if norm_scope == "step" else "data.images to 1"
            raise ValueError(f"plain batch norm has no meaning for images of different sizes in one batch ({sorted(sizes)}): set data.crop, or {apart}")
    return list(batches.values())


class _SerialDropout(nn.Module):
    """Dropout on whole images with the keyed masks."""

    def __init__(self, dropout: nn.Module, name: str, seed: int, epoch: int):
        super().__init__()
        self.p, self.name, self.seed, self.epoch = dropout.p, name, seed, epoch
        self.by_channel = isinstance(dropout, CHANNEL_DROPOUTS)
        self.numbers: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return x * self.masks(x.shape[1], tuple(x.shape[2:])).to(x) if self.p else x

    def masks(self, channels: int, size: tuple[int, ...]) -> Tensor:
        keys = [rng.key(self.seed, self.epoch, number, self.name, "dropout") for number in self.numbers]
        if self.by_channel:
            return torch.stack([channel_mask(self.p, k, channels).view(-1, *(1 for _ in size)) for k in keys])
        return torch.stack([element_mask(self.p, k, channels, size, Box.whole(size), None) for k in keys])


class _SerialNorm(nn.Module):
    """Instance, group or batch norm of whole images by its formula.

    PyTorch's own CPU kernels add tens of thousands of numbers one after another, which costs even float64 enough digits
    (about 3e-12 of a gradient at 97x131) that the order of two images in a batch shows. torch.mean adds in pairs.
    """

    def __init__(self, norm: nn.Module, frozen: bool):
        super().__init__()
        self.norm, self.frozen = norm, frozen
        self.running = isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.track_running_stats
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        channel = (1, -1, *(1 for _ in x.shape[2:]))
        if self.frozen and self.running:
            y = (x - self.norm.running_mean.view(channel)) / (self.norm.running_var.view(channel) + self.norm.eps).sqrt()
        else:
            y = self._normalised(x)
        if self.norm.weight is not None:
            y = y * self.norm.weight.view(channel) + self.norm.bias.view(channel)
        return y

    def _normalised(self, x: Tensor) -> Tensor:
        if isinstance(self.norm, nn.modules.batchnorm._BatchNorm):
            values = x.transpose(0, 1)
            self.seen.append(x.detach().transpose(0, 1).flatten(1))
        elif isinstance(self.norm, nn.GroupNorm):
            values = x.reshape(-1, x.shape[1] // self.norm.num_groups, *x.shape[2:])
        else:
            values = x.reshape(-1, 1, *x.shape[2:])
        dims = tuple(range(1, values.dim()))
        deviation = values - values.mean(dims, keepdim=True)
        y = deviation / ((deviation**2).mean(dims, keepdim=True) + self.norm.eps).sqrt()
        return y.transpose(0, 1) if isinstance(self.norm, nn.modules.batchnorm._BatchNorm) else y.reshape(x.shape)

    def commit(self) -> None:
        """Running statistics by the definition of deferred batch norm: mean and biased variance of all images of the step."""
        if not (self.running and self.seen):
            return
        values = torch.cat(self.seen, 1)  # (C, all pixels of all images of the step)
        for running, found in ((self.norm.running_mean, values.mean(1)), (self.norm.running_var, values.var(1, correction=0))):
            running.copy_((1 - self.norm.momentum) * running + self.norm.momentum * found)


def _swap(model: nn.Module, kinds, make) -> list[nn.Module]:
    """Replace every layer of these kinds by ``make(name, layer)``; returns the replacements."""
    found = []
    for name, layer in list(model.named_modules()):
        if isinstance(layer, kinds):
            found.append(make(name, layer))
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, found[-1])
    return found


def serial_loss(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    """The loss of whole images: logits (C, *size) and labels (*size) each."""
    return sum(weight * _FORMULAS[name](config, logits, labels) for weight, name in parse(config.name))


def _flat(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The valid pixels of all images: (n, C) and (n,)."""
    z = torch.cat([z.flatten(1).t() for z in logits])
    y = torch.cat([y.flatten() for y in labels])
    return z[y != config.ignore_index], y[y != config.ignore_index]


def _weights(config: LossConfig, like: Tensor) -> Tensor | None:
    return None if config.class_weights is None else torch.tensor(config.class_weights, dtype=torch.float64).to(like)


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


def _dice(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    if config.dice_over == "image":
        return sum(_dice_of(config, [z], [y]) for z, y in zip(logits, labels)) / len(logits)
    return _dice_of(config, logits, labels)


def _dice_of(config: LossConfig, logits: list[Tensor], labels: list[Tensor]) -> Tensor:
    z, y = _flat(config, logits, labels)
    p, t = (z.sigmoid(), y.unsqueeze(1).to(z)) if z.shape[1] == 1 else (z.softmax(1), F.one_hot(y, z.shape[1]).to(z))
    overlap, total = (p * t).sum(0), p.sum(0) + t.sum(0)
    whole = total + config.smooth
    return torch.where(whole > 0, 1 - (2 * overlap + config.smooth) / whole.where(whole > 0, 1), 0).mean()


_FORMULAS = {"cross_entropy": _cross_entropy, "binary_cross_entropy": _binary_cross_entropy, "focal": _focal, "dice": _dice}
