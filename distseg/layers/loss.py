"""Losses as functions of sums over pixels, so that parts of an image add up to the global loss.

No loss here is a mean of means. Each image contributes a row of partial sums (of -log p, of class
weights, of overlaps). The rows of all tiles and ranks are added. The loss is a function L(S) of the
table S (images x sums) of the whole step. By the chain rule, a tile's part of the gradient is the
loss gradient dL/dS, equal on every rank, times the gradients of the tile's own rows.

Definitions, with labels y; a pixel is valid if y != ignore_index:

    cross_entropy         sum w_y * -log p_y / sum w_y     (PyTorch's, label smoothing included)
    binary_cross_entropy  mean over valid pixels (and classes, one against the rest)
    focal                 mean of w_y * (1 - p_y)^gamma * -log p_y        (Lin et al., 2017)
    mse, l1               mean of (z - y)^2 or |z - y|; each image has one number z and one y
    dice                  mean over classes of 1 - (2 sum p t + s) / (sum p + sum t + s),
                          with sums over each image or over all images of the step
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from distseg.comm.staging import upload
from distseg.config.settings import LossConfig
from distseg.config.spelling import did_you_mean
from distseg.layers.criterion import Criterion, extremes, sum_tensors


class Term:
    """Base class of the terms of a loss, such as cross-entropy.

    Attributes:
        sums: the number of partial sums of an image.
        linear: True if the gradient of the loss by these sums can be computed from the labels alone
            (:class:`Loss`).
        takes: the names of the settings that this term uses and some other terms do not, such as
            ``class_weights``.
    """

    sums: int
    linear: bool
    takes: tuple[str, ...] = ()

    def __init__(self, config: LossConfig, classes: int):
        raise NotImplementedError

    def partial_sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the partial sums of one image's tile, (sums,).

        Args:
            logits: one output of the network on the tile, (1, C, *size).
            labels: the labels of the same pixels, (1, *size).
        """
        raise NotImplementedError

    def counts(self, labels: Tensor) -> Tensor:
        """Return the partial sums that follow from labels alone, (sums,) float64.

        The other sums are 0. A term that is not linear may return zeros only.
        """
        raise NotImplementedError

    def value(self, table: Tensor) -> Tensor:
        """Return the term, a tensor (), for the partial sums (images, sums) of a whole step."""
        raise NotImplementedError

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return this term's partial sums of each image over a tile's pixels, (B, sums).

        Args:
            logits: one output of the network on the tile, (B, C, *size).
            labels: the labels of the same pixels, (B, *size).
        """
        return torch.stack(
            [self.partial_sums(logits[b : b + 1], labels[b : b + 1]) for b in range(len(logits))]
        )


class CrossEntropy(Term):
    """Cross-entropy of the softmax, averaged over valid pixels as in ``F.cross_entropy``.

    With class weights it is the sum of w * -log p over valid pixels, divided by the sum of w.
    """

    sums, linear = 2, True
    takes = ("class_weights", "label_smoothing")

    def __init__(self, config: LossConfig, classes: int):
        if classes < 2:
            raise ValueError(
                f"cross_entropy needs at least 2 classes, but the model has {classes} output: use "
                "binary_cross_entropy or dice"
            )
        self.config = config
        self.weights = _class_weights(config, classes)

    def partial_sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        c = self.config
        weights = (
            None if self.weights is None else upload(self.weights, logits.device, logits.dtype)
        )
        total = F.cross_entropy(
            logits,
            labels.long(),
            weights,
            ignore_index=c.ignore_index,
            reduction="sum",
            label_smoothing=c.label_smoothing,
        )
        return torch.stack((total, self.counts(labels)[1].to(total)))

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.weights is not None or labels[0].numel() > 1:
            return super().rows(logits, labels)
        c, labels = self.config, labels.flatten()
        total = F.cross_entropy(
            logits.flatten(1),
            labels.long(),
            ignore_index=c.ignore_index,
            reduction="none",
            label_smoothing=c.label_smoothing,
        )
        return torch.stack((total, (labels != c.ignore_index).to(total)), 1)

    def counts(self, labels: Tensor) -> Tensor:
        valid = labels != self.config.ignore_index
        if self.weights is None:
            return _beside_a_sum(valid.count_nonzero())
        # Indexing with `valid` would synchronise with a GPU: `valid` determines the result's size.
        weights = upload(self.weights, labels.device)[labels.where(valid, 0).long()]
        return _beside_a_sum(weights.where(valid, 0).sum())

    def value(self, table: Tensor) -> Tensor:
        return _ratio(table[:, 0].sum(), table[:, 1].sum())


class PixelMean(Term):
    """Base class of terms that are the plain mean of one value per valid pixel.

    A subclass computes these values in :meth:`each`.
    """

    sums, linear = 2, True

    def __init__(self, config: LossConfig, classes: int):
        self.config, self.classes = config, classes

    def counts(self, labels: Tensor) -> Tensor:
        return _beside_a_sum(self.valid(labels).count_nonzero())

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the value of each pixel, (B, *size); the values of invalid pixels do not count.

        Args:
            logits: one output of the network, (B, C, *size).
            labels: the labels of the same pixels, (B, *size), with 0 at invalid pixels.
        """
        raise NotImplementedError

    def valid(self, labels: Tensor) -> Tensor:
        """Return the mask of valid pixels, (B, *size) bool."""
        return labels != self.config.ignore_index

    def partial_sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        valid = self.valid(labels)
        count = valid.count_nonzero()
        # Skip the masking if all pixels are valid, the usual case. On a GPU this test would
        # synchronise, which costs more than the masking.
        if labels.device.type == "cpu" and count == labels.numel():
            total = self.each(logits, labels).sum()
        else:
            total = self.each(logits, labels.where(valid, 0)).where(valid, 0).sum()
        return torch.stack((total, count.to(total)))

    def value(self, table: Tensor) -> Tensor:
        return _ratio(table[:, 0].sum(), table[:, 1].sum())


class BinaryCrossEntropy(PixelMean):
    """Binary cross-entropy of the sigmoid, averaged over valid pixels.

    With several classes, each logit is a prediction of its class against the rest, and the losses
    of all classes are averaged.
    """

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(
            logits, _targets(labels, self.classes, logits), reduction="none"
        )
        return each.squeeze(1) if self.classes == 1 else each.mean(1)


class Focal(PixelMean):
    """Focal loss (Lin et al. 2017): the mean of w_y * (1 - p_y)^gamma * -log p_y.

    Here p_y is the predicted probability of the label y, and w_y the weight of its class.
    """

    takes = ("class_weights", "gamma")

    def __init__(self, config: LossConfig, classes: int):
        super().__init__(config, classes)
        self.weights = _class_weights(config, max(2, classes))

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        labels = labels.long()
        if self.classes == 1:
            log_p = F.logsigmoid(torch.where(labels.unsqueeze(1) == 1, logits, -logits)).squeeze(1)
        else:
            log_p = F.log_softmax(logits, 1).gather(1, labels.unsqueeze(1)).squeeze(1)
        # 1 - p, kept above 0: rest**gamma has an infinite gradient at 0 for gamma < 1.
        rest = (-torch.expm1(log_p)).clamp(min=torch.finfo(log_p.dtype).tiny)
        loss = -(rest**self.config.gamma) * log_p
        return (
            loss
            if self.weights is None
            else loss * upload(self.weights, loss.device, loss.dtype)[labels]
        )


class SquaredError(PixelMean):
    """Squared error of a network that predicts one number, averaged; labels of NaN are ignored."""

    def __init__(self, config: LossConfig, classes: int):
        if classes != 1:
            raise ValueError(
                f"mse and l1 predict one number, but the model has {classes} outputs: use "
                f"cross_entropy, or a model with one output"
            )
        super().__init__(config, classes)

    def valid(self, labels: Tensor) -> Tensor:
        return ~labels.isnan()

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (logits.squeeze(1) - labels) ** 2


class AbsoluteError(SquaredError):
    """Absolute error of a network that predicts one number, averaged; NaN labels are ignored."""

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (logits.squeeze(1) - labels).abs()


class Dice(Term):
    """Dice loss: 1 - (2 * overlap + s) / (predicted + true area + s), averaged over classes.

    Areas are sums of probabilities and of one-hot labels over valid pixels, and s is
    ``loss.smooth``.
    """

    linear = False
    takes = ("dice_over", "smooth")

    def __init__(self, config: LossConfig, classes: int):
        self.config, self.classes = config, classes
        self.sums = 3 * classes

    def partial_sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        valid = labels != self.config.ignore_index
        p = (logits.sigmoid() if self.classes == 1 else logits.softmax(1)) * valid.unsqueeze(1)
        t = _targets(labels.where(valid, 0), self.classes, p) * valid.unsqueeze(1)
        dims = (0, *range(2, p.dim()))
        return torch.cat(((p * t).sum(dims), p.sum(dims), t.sum(dims)))

    def counts(self, labels: Tensor) -> Tensor:
        return torch.zeros(self.sums, dtype=torch.float64, device=labels.device)

    def value(self, table: Tensor) -> Tensor:
        if self.config.dice_over == "batch":
            table = table.sum(0, keepdim=True)
        overlap, p, t = table.unflatten(1, (3, self.classes)).unbind(1)  # (I, C) each
        whole = p + t + self.config.smooth
        empty = whole == 0  # no valid pixel, and loss.smooth is 0
        return (
            (1 - (2 * overlap + self.config.smooth) / whole.masked_fill(empty, 1))
            .masked_fill(empty, 0)
            .mean()
        )


_TERMS: dict[str, type[Term]] = {
    "cross_entropy": CrossEntropy,
    "binary_cross_entropy": BinaryCrossEntropy,
    "focal": Focal,
    "dice": Dice,
    "mse": SquaredError,
    "l1": AbsoluteError,
}
_OF_NUMBERS = [name for name, term in _TERMS.items() if issubclass(term, SquaredError)]


class Loss(Criterion):
    """Loss that is given by a name: a weighted sum of terms, as in ``cross_entropy + 0.5*dice``.

    Attributes:
        sums: number K of partial sums of each image.
        linear: True if the gradient dL/dS can be computed from the labels alone, for all those sums
            S that depend on logits. This gradient is then known before any forward pass.

    Args:
        config: the settings of the loss.
        classes: number C of classes of each output.
        outputs: for each output of the network, the weight of its loss in the sum. The logits of
            all outputs are stacked along the channels.

    Raises:
        ValueError: a name is unknown, a setting is impossible, or no term uses a setting that the
            user changed.
    """

    def __init__(self, config: LossConfig, classes: int, outputs: Sequence[float] = (1.0,)):
        _check(config)
        self.outputs = tuple(outputs)
        self.config, self.ignore_index, self.classes = config, config.ignore_index, classes
        self.terms = [
            (weight, _TERMS[name](config, classes)) for weight, name in parse(config.name)
        ]
        self.sums = len(self.outputs) * sum(term.sums for _, term in self.terms)
        self.linear = is_linear(config.name)

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the K partial sums of each image's tile, (B, K), with autograd graph.

        Args:
            logits: (B, outputs * C, *size).
            labels: (B, *size), of an integer dtype, or of a floating-point dtype for mse and l1.

        Returns:
            The sums in float32 or wider: those of the first output's terms, then the second's, ...
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.cat(
            [
                term.rows(z, labels)
                for z in logits.chunk(len(self.outputs), 1)
                for _, term in self.terms
            ],
            1,
        )

    def counts(self, labels: Tensor) -> Tensor:
        """Return the partial sums that follow from labels alone, such as counts of valid pixels.

        The result is (B, K) float64. It has 0 in place of the sums that depend on logits. Terms
        whose attribute ``linear`` is False, such as dice, may have 0 in place of all sums.

        Args:
            labels: (B, *size), as in :meth:`rows`.
        """
        return torch.stack(
            [
                torch.cat([term.counts(y) for _, term in self.terms]).repeat(len(self.outputs))
                for y in labels
            ]
        )

    def check_values(self, target: Tensor) -> None:
        """Refuse labels that are no class, (B, *size); losses of numbers take any target."""
        if of_numbers(self.config.name) or (ends := extremes(target, self.ignore_index)) is None:
            return
        highest = max(2, self.classes) - 1
        if ends[0] < 0 or ends[1] > highest:
            raise ValueError(
                f"the labels of this rank's tile are from {ends[0]:g} to {ends[1]:g}, but labels "
                f"of {self.config.name} for a network of {self.classes} outputs are from 0 to "
                f"{highest}: correct the labels, or mark pixels as invalid by the label "
                f"{self.ignore_index}"
            )

    def value(self, table: Tensor) -> Tensor:
        """Return the loss L(S) of a whole step, a tensor ().

        Args:
            table: the K partial sums S of each image of the step, added up over all of its tiles,
                (images, K).
        """
        parts = table.chunk(len(self.outputs), 1)
        return sum_tensors(w * self._of_output(part) for w, part in zip(self.outputs, parts))

    def _of_output(self, table: Tensor) -> Tensor:
        parts = table.split([term.sums for _, term in self.terms], 1)
        return sum_tensors(
            weight * term.value(part) for (weight, term), part in zip(self.terms, parts)
        )


def _check(config: LossConfig) -> None:
    if not 0 <= config.label_smoothing < 1:
        raise ValueError(
            f"loss.label_smoothing must be at least 0 and below 1, got {config.label_smoothing}"
        )
    for field in ("gamma", "smooth"):
        if not 0 <= getattr(config, field) < math.inf:
            raise ValueError(
                f"loss.{field} must be a finite number of at least 0, got {getattr(config, field)}"
            )
    _check_taken(config)


def _check_taken(config: LossConfig) -> None:
    """Refuse a loss setting that a user changed but that no term of the loss uses.

    Raises:
        ValueError: a setting differs from its default and is not used. The message names it and the
            terms that use it.
    """
    names, default = [name for _, name in parse(config.name)], LossConfig()
    for field in sorted({field for term in _TERMS.values() for field in term.takes}):
        value = getattr(config, field)
        if value != getattr(default, field) and not any(
            field in _TERMS[name].takes for name in names
        ):
            takers = " or ".join(name for name, term in _TERMS.items() if field in term.takes)
            raise ValueError(
                f"loss.{field} is {value}, but no term of loss.name {config.name!r} uses it: add "
                f"{takers} to loss.name, or leave loss.{field} out"
            )


def of_numbers(name: str) -> bool:
    """Return True for losses of a predicted number (mse, l1), False for losses of classes.

    Args:
        name: the setting ``loss.name``, such as ``cross_entropy + 0.5*dice``.

    Raises:
        ValueError: the loss has terms of both kinds.
    """
    kinds = {term in _OF_NUMBERS for _, term in parse(name)}
    if len(kinds) > 1:
        raise ValueError(
            f"loss.name {name!r} mixes losses of numbers ({', '.join(_OF_NUMBERS)}) with losses of "
            f"classes (all others): use losses of one kind"
        )
    return kinds.pop()


def is_linear(name: str) -> bool:
    """Return True if the gradient of a loss by its partial sums depends on the labels alone.

    This holds if every term is linear (:class:`Loss`), that is, if no term is dice.

    Args:
        name: the setting ``loss.name``, such as ``cross_entropy + 0.5*dice``.
    """
    return all(_TERMS[term].linear for _, term in parse(name))


def parse(text: str) -> list[tuple[float, str]]:
    """Split the setting ``loss.name`` into the weight and name of each term.

    ``cross_entropy + 0.5*dice`` gives [(1.0, 'cross_entropy'), (0.5, 'dice')].

    Raises:
        ValueError: a weight is no number or not above 0, or a name is unknown.
    """
    terms = []
    for part in text.split("+"):
        weight, _, name = part.strip().rpartition("*")
        name = name.strip()
        try:
            value = float(weight) if weight else 1.0
            if not math.isfinite(value):
                raise ValueError
        except ValueError:
            raise ValueError(
                f"loss.name: {weight.strip()!r} in {text!r} is not a number: write for example "
                "'cross_entropy + 0.5*dice'"
            ) from None
        if value <= 0:
            raise ValueError(
                f"loss.name: the weight {weight.strip()} of {name} in {text!r} is not above 0: "
                "leave the term out, or give it a weight above 0"
            )
        if name not in _TERMS:
            raise ValueError(
                f"loss.name: unknown loss {name!r} in {text!r}: choose {', '.join(_TERMS)}, or a "
                f"weighted sum of them{did_you_mean(name, _TERMS)}"
            )
        terms.append((value, name))
    return terms


def _targets(labels: Tensor, classes: int, like: Tensor) -> Tensor:
    """Expand labels (B, *size) to one-hot targets (B, C, *size).

    With one class, the targets are the labels themselves, 0 or 1, as (B, 1, *size).

    Args:
        classes: C.
        like: a tensor (B, C, *size) that has the dtype and device of the result.
    """
    if classes == 1:
        return labels.unsqueeze(1).to(like.dtype)
    return torch.zeros_like(like).scatter_(1, labels.unsqueeze(1).long(), 1)


def _beside_a_sum(count: Tensor) -> Tensor:
    """Return the partial sums (0, count) of a mean, whose first sum is not known yet, as float64.

    A mean has two partial sums: the sum of values over pixels, and the count of pixels. The count
    is known from the labels. The sum of values needs the logits, so 0 stands for it.

    Args:
        count: the number of valid pixels, or the sum of their class weights, ().
    """
    return torch.stack((torch.zeros_like(count), count)).double()


def _ratio(total: Tensor, count: Tensor) -> Tensor:
    """Return the mean total / count, or 0 if count is 0, as in a step without a valid pixel.

    Args:
        total: the sum over the pixels of all images of the step, ().
        count: the number of these pixels, or the sum of their class weights, ().
    """
    return total / count if count > 0 else total * 0


def _class_weights(config: LossConfig, classes: int) -> Tensor | None:
    if config.class_weights is None:
        return None
    if len(config.class_weights) != classes:
        raise ValueError(
            f"loss.class_weights has {len(config.class_weights)} numbers, but the model has "
            f"{classes} classes: give one number for each class"
        )
    return torch.tensor(config.class_weights, dtype=torch.float64)
