"""Losses that users write: functions of one pixel, or of sums over pixels.

A tile has only a part of an image, so other functions cannot be computed tile by tile. Before the
first step, a user's function is called with small random maps to check that it is of one of these
kinds.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distseg.config.settings import LossConfig
from distseg.layers.criterion import (
    Criterion,
    OfOutputs,
    Outputs,
    WeightedSum,
    extremes,
    sum_tensors,
)
from distseg.layers.loss import Loss

_SIDES = 13, 17, 6  # size of the maps with which a user's function is tried, along each dim
# Losses of PyTorch whose mean over pixels is the sum of their values over that of their weights.
_MEANS = (
    nn.CrossEntropyLoss,
    nn.NLLLoss,
    nn.BCEWithLogitsLoss,
    nn.BCELoss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.SoftMarginLoss,
    nn.PoissonNLLLoss,
)
_SUM_NAME = "the function of SumLoss"
_SINGLE = 60  # about this many pixels are tried as images of one pixel


class PixelLoss(Criterion):
    """Loss that is the mean, over all valid pixels, of a function of one pixel's logits and target.

    It equals PyTorch's ``reduction="mean"`` over the pixels of all images and ranks::

        PixelLoss(functools.partial(F.cross_entropy, reduction="none"))
        PixelLoss(lambda logits, target: (logits - target) ** 2)
        PixelLoss(nn.CrossEntropyLoss())

    If the function returns several values per pixel, the mean is over all of them.

    Args:
        function: takes logits (B, C, *size) and a target, and returns one value per pixel, (B,
            *size), or several, (B, K, *size), without a reduction over pixels. If the network
            returns one vector for each image, the function takes (B, C) and (B,), and returns (B,)
            or (B, K). Or a loss module of PyTorch with ``reduction="mean"``, of which a copy
            without the reduction is used.
        ignore_index: integer target of invalid pixels, or None if all pixels are valid. If
            ``function`` has an ``ignore_index``, the default is that one. In floating-point
            targets, NaN marks invalid pixels. The function gets 0 as the target of invalid pixels.
            If no pixel is valid, the loss is 0.
        weight: takes the target and returns a weight per pixel, (B, *size), or per value, of the
            shape that ``function`` returns. The sum of the function's values is divided by the sum
            of their weights, as PyTorch's cross-entropy with class weights does. ``function`` must
            apply the weights itself. By default, the class weights of ``function`` are used if
            it is PyTorch's cross-entropy or negative log-likelihood.
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
                "PixelLoss needs a function of logits and target, but got a "
                f"{type(function).__name__}: give for example functools.partial(F.cross_entropy, "
                'reduction="none")'
            )
        if isinstance(function, _MEANS) and type(function) in _MEANS:
            function = _without_mean(function)
        own = _ignored_by(function)
        if own is not None and ignore_index == -100:
            ignore_index = own
        if weight is None:
            weight = _weight_of(function)
        self.function, self.ignore_index, self.weight = function, ignore_index, weight
        self._returned = Outputs(1, 2)
        self._channels: tuple[int, ...] = ()  # (K,) if the function returns several per pixel

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        valid = self._valid(target)
        each = self._each(logits, _filled(target, valid))
        # With a float32 target some of PyTorch's losses return float32 for logits in float64.
        each = each.to(torch.promote_types(each.dtype, logits.dtype))
        total = each.where(self._mask(valid, each.shape), 0).flatten(1).sum(1)
        return torch.stack((total, self.counts(target)[:, 1].to(total)), 1)

    def counts(self, target: Tensor) -> Tensor:
        valid = self._valid(target)
        shape = (len(target), *self._channels, *target.shape[-self._returned.dims :])
        mask, times = self._mask(valid, shape), 1
        if self.weight is not None:
            weights = self.weight(_filled(target, valid))
            if weights.dim() < len(shape):  # per pixel: each value of a pixel has its weight
                weights = weights.unsqueeze(1)
            mask = weights.expand(shape).where(mask, 0)
        elif self._channels:
            times = self._channels[0] // mask.shape[1]  # a pixel's values are valid together
        count = mask.flatten(1).sum(1, dtype=torch.float64) * times
        return torch.stack((torch.zeros_like(count), count), 1)

    def check_values(self, target: Tensor) -> None:
        size = (1,) * self._returned.dims
        _check_extremes(self._each, self._returned, target, size, self.ignore_index, self._name)

    def value(self, table: Tensor) -> Tensor:
        total, count = table[:, 0].sum(), table[:, 1].sum()
        return torch.where(count > 0, total / count.where(count > 0, 1), 0)

    def check(self, outputs: Outputs, target: Tensor) -> None:
        self._returned, dims = outputs, outputs.dims
        if outputs.whole and self.ignore_index is None and not target.is_floating_point():
            raise ValueError(
                "PixelLoss has ignore_index=None, but this network returns one vector for each "
                "image, and only one tile counts an image's target: the other tiles get the "
                "ignore_index as target. Give PixelLoss an ignore_index that no target has, such "
                "as -100"
            )
        logits, sample = _example(outputs, target)
        if isinstance(self.function, nn.BCELoss):
            logits = logits.sigmoid()  # It takes probabilities.
        sample = _filled(sample, self._valid(sample))
        found = self._called(logits, sample)
        _check_gradient(self._each, logits, sample, self._name)
        multiple = sample.dim() == dims + 2
        pixels = (len(sample), *sample.shape[-dims:])
        per_channel = found.dim() == dims + 2 and (len(found), *found.shape[2:]) == pixels
        if per_channel and multiple and sample.shape[1] not in (1, found.shape[1]):
            raise ValueError(
                f"the function of PixelLoss returns {found.shape[1]} values for each pixel, but "
                f"the target has {sample.shape[1]} channels: return one value for each pixel, or "
                "one for each channel of the target"
            )
        if tuple(found.shape) != pixels and not per_channel:
            raise ValueError(
                f"the function of PixelLoss returns a tensor of {tuple(found.shape)} for logits "
                f"{tuple(logits.shape)} and a target {tuple(sample.shape)}, but it must return "
                f"one value for each pixel, {pixels}: do not reduce over pixels (in PyTorch's "
                'losses, reduction="none")'
            )
        self._channels = (found.shape[1],) if per_channel else ()
        self._compare(self._called(logits, sample), found, "returns other values in a second call")
        self._check_apart(logits, sample, found, "function", self._called)
        if self.weight is not None:
            weights = self.weight(sample)
            if tuple(weights.shape) not in (tuple(found.shape), pixels):
                raise ValueError(
                    f"the weight function of PixelLoss returns {tuple(weights.shape)}, but the "
                    f"loss function returns {tuple(found.shape)}: let weight return a tensor of "
                    "that shape, or one weight for each pixel"
                )
            self._check_apart(logits, sample, weights, "weight", lambda z, y: self.weight(y))

    def _check_apart(self, logits: Tensor, sample: Tensor, found: Tensor, what: str, call) -> None:
        """Refuse a function whose value at a pixel depends on other pixels or images.

        The function is called again with single images and with single pixels, and must return the
        same values as for the whole batch.

        Args:
            logits, sample: example logits and target of a batch of images.
            found: the function's values for this batch.
            what: ``function`` or ``weight``, for error messages.
            call: the function, which takes logits and target.

        Raises:
            ValueError: the function returns other values, or fails for a single pixel.
        """
        for image in range(len(logits)):
            alone = call(logits[image : image + 1], sample[image : image + 1])
            self._compare(
                alone, found[image : image + 1], "depends on the other images of the batch", what
            )
        if self._returned.whole:
            return
        dims = self._returned.dims
        pixels, targets, values = (_single_pixels(x, dims) for x in (logits, sample, found))
        for number in range(0, len(pixels), max(1, len(pixels) // _SINGLE)):
            one = slice(number, number + 1)
            try:
                alone = call(pixels[one], targets[one])
            except Exception as e:  # a user's function may raise anything
                raise ValueError(
                    f"the {what} of PixelLoss fails for an image of one pixel: {e}. Let it use "
                    "only the logits and target of one pixel, or give a loss of sums over pixels "
                    "as distseg.SumLoss"
                ) from e
            why = "depends on other pixels, or on their number or position"
            self._compare(alone, values[one], why, what)

    def _called(self, logits: Tensor, target: Tensor) -> Tensor:
        """Call the user's function with copies of example logits and target, and return its values.

        Raises:
            ValueError: the function fails, returns no tensor, or uses tensors with requires_grad.
        """
        return _values_of(self._each, logits.clone(), target.clone(), self._name)

    @property
    def _name(self) -> str:
        """Words for the user's function in error messages."""
        kind = type(self.function)
        return kind.__name__ if kind in _MEANS else "the function of PixelLoss"

    def _compare(self, again: Tensor, found: Tensor, why: str, what: str = "function") -> None:
        rtol, atol = (1e-9, 1e-12) if _is_wide(found, self._returned) else (1e-4, 1e-6)
        if again.shape != found.shape or not torch.allclose(
            again, found, rtol=rtol, atol=atol, equal_nan=True
        ):
            raise ValueError(
                f"the {what} of PixelLoss must be a function of one pixel, but it {why}, so it "
                "cannot be computed tile by tile: let it use only the logits and target of one "
                "pixel, or give a loss of sums over pixels as distseg.SumLoss"
            )

    def _each(self, logits: Tensor, target: Tensor) -> Tensor:
        target = _as_precise(target, logits)
        if self._returned.whole:
            each = self.function(logits.flatten(1), target.flatten())
            ones = (1,) * (logits.dim() - 2)
            return each.view(*each.shape, *ones) if each.dim() < 3 else each
        return self.function(logits, target)

    def _mask(self, valid: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the mask of valid pixels in a form that broadcasts to ``shape``.

        If the target has channels and ``shape`` has none, a pixel is valid if all its channels are.

        Args:
            valid: True where the target is valid, (B, *size) or (B, C', *size) as the target.
            shape: the shape of the values of the user's function, (B, *size) or (B, K, *size).
        """
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
    """Loss that is a function of sums over the pixels of each image, such as your own Dice loss.

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
        self._returned = Outputs(1, 2)

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        return self._of_part(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)

    def _of_part(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.function(logits, _as_precise(target, logits))

    def counts(self, target: Tensor) -> Tensor:
        return torch.zeros(len(target), self.sums, dtype=torch.float64, device=target.device)

    def check_values(self, target: Tensor) -> None:
        size = _SIDES[: self._returned.dims]
        _check_extremes(self._of_part, self._returned, target, size, None, _SUM_NAME)

    def value(self, table: Tensor) -> Tensor:
        return self._value(table)

    def check(self, outputs: Outputs, target: Tensor) -> None:
        if outputs.whole:
            raise ValueError(
                "this network returns one vector for each image, but SumLoss needs sums over "
                "pixels: give a distseg.PixelLoss"
            )
        logits, sample = _example(outputs, target)
        self._returned = outputs
        whole = _values_of(self._of_part, logits, sample, _SUM_NAME)
        _check_gradient(self._of_part, logits, sample, _SUM_NAME)
        with torch.no_grad():
            if whole.dim() != 2 or len(whole) != len(logits):
                raise ValueError(
                    f"the function of SumLoss returns a tensor of {tuple(whole.shape)} for "
                    f"{len(logits)} images, but it must return (images, sums): for each image, "
                    "return a row of sums over its pixels"
                )
            self.sums = whole.shape[1]
            near = 1e-9 if _is_wide(whole, outputs) else 1e-3
            self._compare(
                self._of_part(logits[:1], sample[:1]),
                whole[:1],
                near,
                "depend on other images of the batch",
            )
            for dim in range(2, logits.dim()):
                at = [3, logits.shape[dim] - 3]
                parts = zip(logits.split(at, dim), sample.split(at, dim - logits.dim()))
                self._compare(
                    sum_tensors(self._of_part(x, y) for x, y in parts),
                    whole,
                    near,
                    "of parts of an image do not add up",
                )
        value = self._value(whole.detach().requires_grad_())
        if not isinstance(value, Tensor) or value.dim() or not value.requires_grad:
            raise ValueError(
                "the function that is given as value to SumLoss must return a tensor of one "
                f"number with an autograd graph, but it returns {value!r}: reduce the sums of all "
                "images to one number, and leave item(), float() and detach() out"
            )

    @staticmethod
    def _compare(again: Tensor, found: Tensor, near: float, of: str) -> None:
        if not torch.allclose(again, found, rtol=near, atol=near):
            raise ValueError(
                "the function of SumLoss must return sums over the pixels of each image, but its "
                f"results {of}: let it return sums, and take quotients and means in the function "
                "that is given as value to SumLoss"
            )


def criterion_of(
    given, channels: int, outputs: Mapping[str, int] | None = None, ignore_index: int = -100
) -> Criterion:
    """Turn a loss, in any form in which a user may give it, into a :class:`Criterion`.

    Args:
        given: a :class:`Criterion`, a loss module of PyTorch with ``reduction="mean"`` such as
            ``nn.CrossEntropyLoss()``, the name of a loss such as ``cross_entropy + 0.5*dice``, a
            :class:`distseg.config.settings.LossConfig`, or a weighted sum of these. Or a mapping
            from the name or the number of each output to one of these. Without a mapping, each
            output gets the same criterion.
        channels: number of channels of the output, if it is the only one.
        outputs: number of channels of each output by its name, if the network has named outputs.
        ignore_index: label of invalid pixels, for a loss that is given by its name.

    Raises:
        ValueError: ``given`` is none of these, or its outputs are not those of the network.
    """
    if isinstance(given, Mapping):
        names = outputs or {}
        given = named_by_text(given, "the criterion")
        if set(given) != set(names):
            raise ValueError(
                f"the criterion has the keys {', '.join(given)}, but the argument "
                f"outputs of distseg.distribute is {', '.join(names) or 'None'}: give one "
                "criterion for each name in outputs, or a single criterion instead of a dict"
            )
    elif outputs:
        given = dict.fromkeys(outputs, given)
    if outputs:
        parts = [criterion_of(given[name], n, None, ignore_index) for name, n in outputs.items()]
        return OfOutputs(parts, list(outputs.values()))
    if type(given) is WeightedSum:
        return WeightedSum(
            [(w, criterion_of(part, channels, None, ignore_index)) for w, part in given.parts]
        )
    if isinstance(given, str):
        given = LossConfig(name=given, ignore_index=ignore_index)
    if isinstance(given, LossConfig):
        return Loss(given, channels)
    if type(given) in _MEANS:  # A subclass may compute something else from the mean.
        return _mean_of(given)
    if not isinstance(given, Criterion):
        raise ValueError(
            f"the criterion is a {type(given).__name__}, which cannot be computed tile by tile: "
            "give distseg.PixelLoss(function), distseg.SumLoss(function, value), a loss of PyTorch "
            "such as torch.nn.CrossEntropyLoss(), or a name such as 'cross_entropy + 0.5*dice'"
        )
    # A check stores what it finds, such as the number of values at each pixel. Models and outputs
    # that share a criterion would change it for each other. The classes of users are not copied.
    return copy.copy(given) if isinstance(given, (PixelLoss, SumLoss)) else given


def named_by_text(given: Mapping, what: str) -> dict:
    """Return a dict of the user with its keys as text, because 0 and "0" name the same output.

    Args:
        given: one object for each output, by the name or the number of the output.
        what: words for the user's argument in error messages.

    Raises:
        ValueError: two keys name the same output.
    """
    named = {str(name): one for name, one in given.items()}
    if len(named) < len(given):
        texts = [str(name) for name in given]
        twice = next(text for text in texts if texts.count(text) > 1)
        raise ValueError(
            f"{what} has {twice} twice, as number and as text: give each output one entry"
        )
    return named


def _without_mean(loss: nn.Module) -> nn.Module:
    """Return a copy of a loss module of PyTorch that returns the value of each pixel.

    A module that computes no mean is returned unchanged.

    Args:
        loss: one of ``_MEANS``.
    """
    if loss.reduction != "mean":
        return loss
    values = copy.copy(loss)
    # PyTorch annotates attributes of modules as tensors and modules only.
    values.reduction = "none"  # type: ignore[assignment]
    return values


def _mean_of(loss: nn.Module) -> PixelLoss:
    """Return the mean over all pixels that a loss module of PyTorch computes.

    Args:
        loss: one of ``_MEANS``.

    Raises:
        ValueError: the module computes something else than a mean.
    """
    if loss.reduction != "mean":
        name = type(loss).__name__
        raise ValueError(
            f"the criterion is a {name} with reduction={loss.reduction!r}, but distseg takes only "
            f"means of PyTorch's losses: give {name} with reduction='mean', or, for a sum, "
            "distseg.SumLoss(function, value)"
        )
    return PixelLoss(loss)


def mark_of(given) -> str:
    """Return a text that tells apart losses that compute different values.

    Ranks compare it, because they must all compute the same loss. Functions are told apart by
    their name and by arguments that :func:`functools.partial` has bound.

    Args:
        given: a loss in any form that :func:`criterion_of` takes.
    """
    if isinstance(given, Mapping):
        return str({str(name): mark_of(one) for name, one in given.items()})
    if isinstance(given, WeightedSum):
        return str([(weight, mark_of(part)) for weight, part in given.parts])
    if isinstance(given, (PixelLoss, SumLoss)):
        ignored = getattr(given, "ignore_index", None)
        return f"{type(given).__name__} {ignored} {mark_of(given.function)}"
    if isinstance(given, nn.Module):
        plain = {k: v for k, v in vars(given).items() if isinstance(v, (str, int, float))}
        state = {name: mark_of(tensor) for name, tensor in given.state_dict().items()}
        return f"{type(given).__name__} {plain} {state}"
    if isinstance(given, Tensor):
        values = given.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{tuple(given.shape)} {zlib.crc32(values.numpy().tobytes())}"
    if isinstance(given, partial):
        bound = {name: mark_of(value) for name, value in given.keywords.items()}
        return f"{mark_of(given.func)} {[mark_of(one) for one in given.args]} {bound}"
    if callable(given):
        return getattr(given, "__qualname__", type(given).__name__)
    return str(given)


def _filled(target: Tensor, valid: Tensor) -> Tensor:
    """Return ``target`` with all invalid entries, where ``valid`` is False, replaced by 0."""
    return target.where(valid, torch.zeros((), dtype=target.dtype, device=target.device))


def _as_precise(target: Tensor, logits: Tensor) -> Tensor:
    """Return a floating-point target in the dtype of the logits if that is more precise.

    Some of PyTorch's losses compute in the dtype of the target, and would lose digits.
    """
    if not target.is_floating_point():
        return target
    return target.to(torch.promote_types(target.dtype, logits.dtype))


def _is_wide(values: Tensor, outputs: Outputs) -> bool:
    """Return True if a loss is computed in float64.

    With a float64 target, values that are computed in float32 may have the dtype float64.
    """
    return values.dtype == torch.float64 == outputs.dtype


def _example(outputs: Outputs, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return small random logits and targets of two images, to try a user's function with.

    Args:
        outputs: number of channels and dims of the network's output.
        target: a target, from whose values the new ones are drawn at random.

    Returns:
        The logits, (2, channels, *size), and the targets, (2, *size) or (2, C', *size).
    """
    channels, dims, whole, dtype = outputs
    generator, size = torch.Generator().manual_seed(0), (1,) * dims if whole else _SIDES[:dims]
    values = target.detach().cpu().flatten()
    shape = (2, *target.shape[1:-dims], *size)
    drawn = torch.randint(len(values), shape, generator=generator)
    logits = torch.randn(2, channels, *size, generator=generator, dtype=torch.float64)
    return logits.to(dtype), values[drawn]


def _values_of(
    function: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor, name: str
) -> Tensor:
    """Call a user's function; return its result, a tensor that must not require a gradient.

    Args:
        function: the user's function.
        logits, target: examples, with which it is called.
        name: words for the function in error messages.

    Raises:
        ValueError: the function fails, returns no tensor, or uses tensors with requires_grad (the
            example logits do not require a gradient).
    """
    try:
        with torch.enable_grad():
            found = function(logits, target)
    except Exception as e:  # a user's function may raise anything
        raise _not_computed(name, e, function, logits, target) from e
    if not isinstance(found, Tensor):
        raise ValueError(
            f"{name} returns a {type(found).__name__}, but must return a tensor: "
            "leave item() and float() out"
        )
    if found.requires_grad:
        raise ValueError(
            f"{name} uses tensors with requires_grad besides the logits, and each "
            "rank would have only a part of their gradient: use them in the forward pass of the "
            "network instead, or detach() them"
        )
    return found


def _check_gradient(
    function: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor, name: str
) -> None:
    """Refuse a user's function whose gradient cannot be computed.

    Some of PyTorch's losses, for example, take a target of another dtype than the logits in the
    forward pass, and refuse it in the backward pass.

    Args:
        function, logits, target, name: as for :func:`_values_of`.

    Raises:
        ValueError: the forward or the backward pass fails.
    """
    if (error := _failure_of(function, logits, target)) is not None:
        raise _not_computed(name, error, function, logits, target) from error


def _check_extremes(
    function: Callable[[Tensor, Tensor], Tensor],
    outputs: Outputs,
    target: Tensor,
    size: Sequence[int],
    ignore_index: int | None,
    name: str,
) -> None:
    """Refuse a target if a user's function fails with its smallest and its largest valid value.

    Args:
        function: the user's function.
        outputs: number of channels and dims of the network's output.
        target: the target on a tile.
        size: the size of the two images with which the function is tried. Their values are the
            smallest and the largest one in turns.
        ignore_index: integer value that marks invalid pixels, or None.
        name: words for the function in error messages.

    Raises:
        ValueError: the function fails.
    """
    if (ends := extremes(target, ignore_index)) is None:
        return
    shape = (2, *target.shape[1 : target.dim() - len(size)], *size)
    values = torch.tensor(ends, dtype=target.dtype, device=target.device)
    sample = values[torch.arange(math.prod(shape), device=target.device).view(shape) % 2]
    logits = torch.zeros(2, outputs.channels, *size, dtype=outputs.dtype, device=target.device)
    try:
        with torch.no_grad():
            function(logits, sample)
    except Exception as e:  # a user's function may raise anything
        ignored = "NaN" if target.is_floating_point() else str(ignore_index)
        mark = "" if ignored == "None" else f", or mark pixels as invalid by {ignored}"
        raise ValueError(
            f"{name} fails with {type(e).__name__}: {str(e).rstrip('.')}. The target of this "
            f"rank's tile has values from {ends[0]:g} to {ends[1]:g}, and the network has "
            f"{outputs.channels} channels: correct the target{mark}"
        ) from e


def _failure_of(
    function: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor
) -> Exception | None:
    """Return the error of a forward and backward pass of a user's function; None without one."""
    try:
        with torch.enable_grad():
            leaf = logits.detach().clone().requires_grad_()
            found = function(leaf.clone(), target.clone())
            if found.requires_grad:
                torch.autograd.grad(found.sum(), leaf, allow_unused=True)
    except Exception as e:  # a user's function may raise anything
        return e
    return None


def _not_computed(
    name: str,
    error: Exception,
    function: Callable[[Tensor, Tensor], Tensor],
    logits: Tensor,
    target: Tensor,
) -> ValueError:
    """Return the error for a user's function that fails with examples of logits and target.

    The repair that it names is another dtype of the target, if the function does not fail with it.

    Args:
        error: the error of the function.
        name, function, logits, target: as for :func:`_values_of`.
    """
    dtypes = [dtype for dtype in (logits.dtype, torch.int64) if dtype != target.dtype]
    fits = (d for d in dtypes if _failure_of(function, logits, target.to(d)) is None)
    repair = "change the target or the function so that they fit"
    if (dtype := next(fits, None)) is not None:
        repair = f"give a target of {_text(dtype)}, such as target.to({dtype})"
    low, high = target.min().item(), target.max().item()
    return ValueError(
        f"{name} fails with {type(error).__name__}: {str(error).rstrip('.')}. It was tried with "
        f"random logits {tuple(logits.shape)} of {_text(logits.dtype)} and a target "
        f"{tuple(target.shape)} of {_text(target.dtype)} from {low:g} to {high:g}, whose values "
        f"are drawn from your target: {repair}"
    )


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _single_pixels(x: Tensor, dims: int) -> Tensor:
    """Return each pixel as a separate image of one pixel.

    Shapes: (B, C, *size) -> (B * pixels, C, 1, ...), and (B, *size) -> (B * pixels, 1, ...).

    Args:
        dims: the number of dims of ``size``.
    """
    flat = x.flatten(x.dim() - dims).movedim(-1, 1).flatten(0, 1)
    return flat.reshape(*flat.shape, *(1,) * dims)


def _weight_of(function: Callable) -> Callable[[Tensor], Tensor] | None:
    """Return a function that maps a target to the class weight of each pixel, (B, *size).

    For labels (B, *size) it returns the weights that ``function`` has for their classes. For class
    probabilities (B, C, *size) it returns 1 for each pixel. Return None if ``function`` is not
    PyTorch's cross-entropy or negative log-likelihood with class weights.

    Args:
        function: the loss function that a user gave to :class:`PixelLoss`.
    """
    if isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss)):
        classes = function.weight
    elif isinstance(function, partial) and function.func in (F.cross_entropy, F.nll_loss):
        classes = function.keywords.get("weight")
    else:
        return None
    if classes is None:
        return None

    def weight(target: Tensor) -> Tensor:
        if target.is_floating_point():  # class probabilities: PyTorch divides by the pixel count
            return torch.ones_like(target[:, 0])
        return classes.to(target.device)[target]

    return weight


def _ignored_by(function: Callable) -> int | None:
    """Return the ``ignore_index`` that a loss function has, or None if it has none.

    A function has it as an attribute, like ``nn.CrossEntropyLoss``, or as a keyword argument of
    ``functools.partial``.
    """
    found = getattr(function, "keywords", {}).get("ignore_index")
    return getattr(function, "ignore_index", None) if found is None else found
