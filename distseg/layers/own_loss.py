"""Losses that users write: functions of one pixel, or of sums over pixels.

A tile has only a part of an image, so other functions have no tile-wise form. Whether a user's
function is of one of these kinds is tried on small random maps before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from distseg.config.settings import LossConfig
from distseg.layers.criterion import Criterion, OfOutputs, Outputs
from distseg.layers.loss import Loss

_SIDES = 5, 7, 6  # sizes of the maps on which a user's function is tried


class PixelLoss(Criterion):
    """Mean over all valid pixels of a function of one pixel's logits and target.

    It equals PyTorch's ``reduction="mean"`` over the pixels of all images and ranks::

        PixelLoss(functools.partial(F.cross_entropy, reduction="none"))
        PixelLoss(lambda logits, target: (logits - target) ** 2)

    If the function returns several values per pixel, the mean is over all of them.

    Args:
        function: takes logits (B, C, *size) and a target, and returns one value per pixel, (B,
            *size), or several, (B, K, *size), without a reduction over pixels. If the network
            returns a vector of each image, it takes (B, C) and (B,), and returns (B,) or (B, K).
        ignore_index: value of integer targets whose pixels do not count; None if all count. Pixels
            of floating-point targets do not count where the target is NaN. The function sees 0
            there.
        weight: takes the target and returns a weight per pixel, of the shape that ``function``
            returns. The sum of the function's values is divided by the sum of these weights, as
            PyTorch's cross-entropy with class weights does. The function applies the weights
            itself.
    """

    sums, linear = 2, True

    def __init__(
        self,
        function: Callable[[Tensor, Tensor], Tensor],
        ignore_index: int | None = -100,
        weight: Callable[[Tensor], Tensor] | None = None,
    ):
        if not callable(function):
            raise ValueError(
                f"PixelLoss takes a function of logits and target, got {type(function).__name__}"
            )
        self.function, self.ignore_index, self.weight = function, ignore_index, weight
        self._returned = Outputs(1, 2)
        self._values = 1  # values per pixel; 0: one for all channels of the target

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        valid = self._valid(target)
        each = self._each(logits, _filled(target, valid))
        total = each.where(self._mask(valid, each.shape), 0).flatten(1).sum(1)
        return torch.stack((total, self.counts(target)[:, 1].to(total)), 1)

    def counts(self, target: Tensor) -> Tensor:
        valid = self._valid(target)
        if self.weight is not None:
            weights = self.weight(_filled(target, valid))
            count = weights.where(self._mask(valid, weights.shape), 0)
        else:
            count = (
                valid if self._values or target.dim() == self._returned.dims + 1 else valid.all(1)
            )
        count = count.flatten(1).sum(1, dtype=torch.float64) * max(1, self._values)
        return torch.stack((torch.zeros_like(count), count), 1)

    def value(self, table: Tensor) -> Tensor:
        total, count = table[:, 0].sum(), table[:, 1].sum()
        return torch.where(count > 0, total / count.where(count > 0, 1), 0)

    def check(self, outputs: Outputs, target: Tensor) -> None:
        self._returned, dims = outputs, outputs.dims
        if outputs.whole and self.ignore_index is None and not target.is_floating_point():
            raise ValueError(
                "a network that returns a vector of each image needs a PixelLoss with an "
                "ignore_index: all tiles but the first of an image get it as target"
            )
        logits, sample = _example(outputs, target)
        sample = _filled(sample, self._valid(sample))
        found = self._tried(logits, sample)
        multiple = sample.dim() == dims + 2
        pixels = (len(sample), *sample.shape[-dims:])
        if tuple(found.shape) == pixels:
            self._values = 0 if multiple else 1
        elif found.dim() == dims + 2 and (len(found), *found.shape[2:]) == pixels:
            self._values = 1 if multiple else found.shape[1]
        if tuple(found.shape) != pixels and (
            found.dim() != dims + 2
            or (len(found), *found.shape[2:]) != pixels
            or (multiple and found.shape != sample.shape)
        ):
            raise ValueError(
                f"the function of PixelLoss returns {tuple(found.shape)} for logits "
                f"{tuple(logits.shape)} and a target {tuple(sample.shape)}, but it must return "
                'one value for each pixel: leave the reduction out (reduction="none")'
            )
        self._compare(self._tried(logits, sample), found, "draws random numbers")
        one = self._tried(logits[:1], sample[:1])
        self._compare(one, found[:1], "depends on the other images of the batch")
        if not outputs.whole:
            part = (..., *(slice(0, n - 2) for n in logits.shape[2:]))
            self._compare(
                self._tried(logits[part], sample[part]),
                found[part],
                "depends on other pixels, or on their number",
            )

    def _tried(self, logits: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            return self._each(logits.clone(), target.clone())

    @staticmethod
    def _compare(again: Tensor, found: Tensor, why: str) -> None:
        if not torch.allclose(again, found, rtol=1e-9, atol=1e-12, equal_nan=True):
            raise ValueError(
                f"the function of PixelLoss is not of one pixel alone: it {why}, of which a tile "
                "knows nothing; let it use one pixel's logits and target, or give sums over "
                "pixels as distseg.SumLoss"
            )

    def _each(self, logits: Tensor, target: Tensor) -> Tensor:
        if self._returned.whole:
            each = self.function(logits.flatten(1), target.flatten())
            ones = (1,) * (logits.dim() - 2)
            return each.view(*each.shape, *ones) if each.dim() < 3 else each
        return self.function(logits, target)

    def _mask(self, valid: Tensor, shape: torch.Size) -> Tensor:
        """Return which of the function's values count, as a mask that fits their shape."""
        if valid.dim() == len(shape):
            return valid
        return valid.all(1) if valid.dim() > len(shape) else valid.unsqueeze(1)

    def _valid(self, target: Tensor) -> Tensor:
        if target.is_floating_point():
            return ~target.isnan()
        if self.ignore_index is None:
            return torch.ones_like(target, dtype=torch.bool)
        return target != self.ignore_index


class SumLoss(Criterion):
    """Function of sums over the pixels of each image, such as a Dice loss of your own.

    Args:
        function: takes logits (B, C, *size) and a target, and returns sums over the pixels of each
            image, (B, K). The sums of two parts of an image must add up to those of the image.
        value: takes the sums of all images of the step, (images, K), and returns the loss.
    """

    linear = False

    def __init__(
        self, function: Callable[[Tensor, Tensor], Tensor], value: Callable[[Tensor], Tensor]
    ):
        self.function, self._value, self.sums = function, value, 0

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.function(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)

    def counts(self, target: Tensor) -> Tensor:
        return torch.zeros(len(target), self.sums, dtype=torch.float64, device=target.device)

    def value(self, table: Tensor) -> Tensor:
        return self._value(table)

    def check(self, outputs: Outputs, target: Tensor) -> None:
        if outputs.whole:
            raise ValueError(
                "this network returns a vector of each image, and SumLoss is of sums over "
                "pixels: give a distseg.PixelLoss"
            )
        logits, sample = _example(outputs, target)
        with torch.no_grad():
            whole = self.function(logits, sample)
            if whole.dim() != 2 or len(whole) != len(logits):
                raise ValueError(
                    f"the function of SumLoss returns {tuple(whole.shape)} for {len(logits)} "
                    "images, but it must return (images, sums)"
                )
            self.sums = whole.shape[1]
            self._compare(self.function(logits[:1], sample[:1]), whole[:1], "each image alone")
            for dim in range(2, logits.dim()):
                at = [3, logits.shape[dim] - 3]
                parts = zip(logits.split(at, dim), sample.split(at, dim - logits.dim()))
                self._compare(
                    sum(self.function(x, y) for x, y in parts), whole, "the parts of an image"
                )
            value = self._value(whole)
        if value.dim():
            raise ValueError(
                f"the value of SumLoss has the shape {tuple(value.shape)}, but a loss is one number"
            )

    @staticmethod
    def _compare(again: Tensor, found: Tensor, of: str) -> None:
        if not torch.allclose(again, found, rtol=1e-9, atol=1e-9):
            raise ValueError(
                "the function of SumLoss does not return sums over pixels: its values of "
                f"{of} do not add up to those of the whole; let it return sums, and take "
                "quotients and means in value"
            )


def criterion_of(
    given, channels: int, outputs: Sequence[str] | None = None, ignore_index: int = -100
) -> Criterion:
    """Return the criterion that a user gave.

    Args:
        given: a :class:`Criterion`; a loss of distseg by its name, such as ``cross_entropy +
            0.5*dice``, or as a :class:`distseg.config.settings.LossConfig`; or one of these for
            each output by its name.
        channels: number of channels of one output.
        outputs: names of the network's outputs, if it has several.
        ignore_index: label of pixels that do not count, for a loss that is given by its name.

    Raises:
        ValueError: ``given`` is none of these, or names other outputs than the network has.
    """
    if isinstance(given, Mapping):
        if set(given) != set(outputs or ()):
            raise ValueError(
                f"the criterion names the outputs {', '.join(map(str, given))}, but the network "
                f"was distributed with outputs {', '.join(outputs or ()) or 'None'}: give a "
                "criterion for each of them"
            )
        return OfOutputs(
            [(1.0, criterion_of(given[name], channels, None, ignore_index)) for name in outputs]
        )
    if outputs and len(outputs) > 1:
        one = criterion_of(given, channels, None, ignore_index)
        return OfOutputs([(1.0, one) for _ in outputs])
    if isinstance(given, str):
        given = LossConfig(name=given, ignore_index=ignore_index)
    if isinstance(given, LossConfig):
        return Loss(given, channels)
    if not isinstance(given, Criterion):
        raise ValueError(
            f"the criterion is a {type(given).__name__}, but a loss must be known pixel by pixel: "
            "give distseg.PixelLoss(function), distseg.SumLoss(function, value), or a name such "
            "as 'cross_entropy + 0.5*dice'"
        )
    return given


def _filled(target: Tensor, valid: Tensor) -> Tensor:
    """Return a target with 0 in pixels that do not count."""
    return target.where(valid, torch.zeros((), dtype=target.dtype, device=target.device))


def _example(outputs: Outputs, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return small random logits, float64, and a target with values of ``target``."""
    channels, dims, whole = outputs
    generator, size = torch.Generator().manual_seed(0), (1,) * dims if whole else _SIDES[:dims]
    values = target.detach().cpu().flatten()
    shape = (2, *target.shape[1:-dims], *size)
    drawn = torch.randint(len(values), shape, generator=generator)
    logits = torch.randn(2, channels, *size, generator=generator, dtype=torch.float64)
    return logits, values[drawn]
