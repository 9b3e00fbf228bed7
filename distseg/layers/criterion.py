"""Interface of losses, which are functions of sums over pixels.

Each image contributes a row of partial sums. The rows of all tiles and ranks are added up in a
table S (images x sums), and the loss is a function L(S) of the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from distseg.layers.packed_targets import TargetForm, unpack


class Outputs(NamedTuple):
    """Number of channels and dims of a network's output.

    Attributes:
        channels: number of channels of the output.
        dims: number of spatial dims of the images.
        whole: True if the network returns one vector for each image, False if it returns values for
            each pixel.
        dtype: the dtype in which losses are computed, float32 or float64.
    """

    channels: int
    dims: int
    whole: bool = False
    dtype: torch.dtype = torch.float64


class Criterion:
    """Base class of losses, each a function L(S) of the partial sums S (images, K) of a step.

    Each image has K sums over its pixels, such as the sum of -log p and the number of valid pixels.
    The sums of all its tiles are added up before L is computed. Criteria can be added and
    multiplied by numbers: ``PixelLoss(f) + 0.5 * SumLoss(g, value)``. The loss modules of PyTorch
    and the names of losses can be added to a criterion: ``nn.MSELoss() + 0.5 * PixelLoss(f)``.

    Attributes:
        sums: the number K.
        linear: True if dL/dS can be computed from the targets alone, for all those sums S that
            depend on logits. The backward pass of a tile then need not wait for the forward passes
            of other tiles.
        ignore_index: integer target of invalid pixels, or None.
    """

    sums: int
    linear: bool
    ignore_index: int | None = None

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the K partial sums of each image's tile, (B, K), with autograd graph.

        Args:
            logits: the network's output on the tile, (B, C, *size).
            target: the target on the same pixels, (B, *size), (B, C', *size), or (B, 1, ...) for
                one label of each image.
        """
        raise NotImplementedError

    def counts(self, target: Tensor) -> Tensor:
        """Return the partial sums that follow from the target alone, such as counts of pixels.

        The result is (B, K) float64, with 0 in place of the sums that also depend on logits. If the
        criterion is not :attr:`linear`, all sums may be 0: its gradient needs logits in any case.

        Args:
            target: the target on a tile, as in :meth:`rows`.
        """
        raise NotImplementedError

    def value(self, table: Tensor) -> Tensor:
        """Return the loss L(S) of a whole step, a tensor ().

        Args:
            table: the partial sums S of all images of the step, (images, K).
        """
        raise NotImplementedError

    def check(self, outputs: Outputs, target: Tensor) -> None:
        """Try the criterion on examples, and refuse it if it cannot be computed tile by tile.

        Args:
            outputs: number of channels and of spatial dims of the network's output.
            target: an example of a target, (B, *size) or (B, C', *size).

        Raises:
            ValueError: the criterion cannot be computed tile by tile. The message says why.
        """

    def check_values(self, target: Tensor) -> None:
        """Refuse a target with a value that the criterion cannot take, before a step.

        Args:
            target: the target on a tile, as in :meth:`rows`.

        Raises:
            ValueError: a value, such as a label that is no class, does not fit. The message names
                the values of the target.
        """

    def loss_grad(self, table: Tensor) -> tuple[float, Tensor]:
        """Return the loss L(S) of a step and its gradient dL/dS (images, K).

        Args:
            table: the partial sums S of all images of the step, (images, K).
        """
        with torch.enable_grad():
            table = table.detach().requires_grad_()
            value = self.value(table)
            (gradient,) = torch.autograd.grad(value, table)
        return value.item(), gradient

    def __add__(self, other: Criterion | nn.Module | str) -> WeightedSum:
        if not isinstance(other, _TERMS):
            return NotImplemented
        return WeightedSum([(1.0, self), (1.0, other)])

    def __radd__(self, other: nn.Module | str | int) -> Criterion:
        if isinstance(other, _TERMS):
            return WeightedSum([(1.0, other), (1.0, self)])
        return self if other == 0 else NotImplemented  # for sum(...)

    def __mul__(self, weight: float) -> WeightedSum:
        return WeightedSum([(float(weight), self)])

    __rmul__ = __mul__

    def __neg__(self) -> WeightedSum:
        return self * -1.0

    def __sub__(self, other: Criterion) -> WeightedSum:
        return self + -other

    def __truediv__(self, number: float) -> WeightedSum:
        return self * (1 / number)

    def __call__(self, output, target) -> Tensor:
        """Return the loss of a step, computed from the outputs of a distributed model on all ranks.

        All ranks must call it together.

        Args:
            output: the result of ``model(model.shard(images))``.
            target: the result of ``model.shard(target)``.
        """
        if not hasattr(target, "model"):
            raise ValueError(
                f"the target is a {type(target).__name__}, but it must be this rank's part of the "
                "target: give model.shard(target)"
            )
        return target.model.loss(output, target, self)


_TERMS = Criterion, nn.Module, str  # what a criterion can be added to


def sum_tensors(values: Iterable[Tensor]) -> Tensor:
    """Return the sum of at least one tensor, added up in order."""
    return reduce(add, values)


def extremes(target: Tensor, ignore_index: int | None) -> tuple[float, float] | None:
    """Return the smallest and the largest valid value of a target; None if no value is valid.

    Args:
        target: the target, of any shape; NaN marks invalid values.
        ignore_index: integer value that marks invalid values, or None.
    """
    if target.device.type != "cpu":
        return extremes_on_device(target, ignore_index)
    # NumPy's minimum under a mask is many times faster than PyTorch's on a CPU.
    values = (target.float() if target.dtype == torch.bfloat16 else target).numpy()
    if target.is_floating_point():
        low, high = (end.reduce(values, axis=None).item() for end in (np.fmin, np.fmax))
        return None if math.isnan(low) else (low, high)
    low, high = values.min(), values.max()
    if low == high == ignore_index:
        return None
    if low == ignore_index:
        low = values.min(where=values != ignore_index, initial=high)
    if high == ignore_index:
        high = values.max(where=values != ignore_index, initial=low)
    return low.item(), high.item()


def extremes_on_device(target: Tensor, ignore_index: int | None) -> tuple[float, float] | None:
    """Return :func:`extremes` of a target on a GPU, from which only two numbers are copied."""
    ends: torch.finfo | torch.iinfo
    if target.is_floating_point():
        valid, ends = ~target.isnan(), torch.finfo(target.dtype)
    else:
        everywhere = torch.ones_like(target, dtype=torch.bool)
        valid = everywhere if ignore_index is None else target != ignore_index
        ends = torch.iinfo(target.dtype)
    found = target.where(valid, ends.max).amin(), target.where(valid, ends.min).amax()
    low, high = torch.stack(found).tolist()
    return None if low > high else (low, high)


class WeightedSum(Criterion):
    """Weighted sum of criteria (losses) that all get the same logits and target.

    A sum that a user writes may also have losses of PyTorch and names of losses as terms. It cannot
    be computed before :func:`distseg.layers.own_loss.criterion_of` has replaced them.

    Args:
        parts: pairs (weight, criterion), one for each term of the sum.
    """

    def __init__(self, parts: Sequence[tuple[float, Any]]):
        self.parts = list(parts)

    @property
    def sums(self) -> int:
        """Number of partial sums of all criteria together."""
        return sum(part.sums for _, part in self.parts)

    @property
    def linear(self) -> bool:
        """True if all criteria are linear (:attr:`Criterion.linear`)."""
        return all(part.linear for _, part in self.parts)

    @property
    def ignore_index(self) -> int | None:
        """The ``ignore_index`` of the criteria; None if they have different ones."""
        found = {part.ignore_index for _, part in self.parts}
        return found.pop() if len(found) == 1 else None

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        return torch.cat([part.rows(logits, target) for _, part in self.parts], 1)

    def counts(self, target: Tensor) -> Tensor:
        return torch.cat([part.counts(target) for _, part in self.parts], 1)

    def value(self, table: Tensor) -> Tensor:
        tables = table.split([part.sums for _, part in self.parts], 1)
        return sum_tensors(weight * part.value(t) for (weight, part), t in zip(self.parts, tables))

    def check_values(self, target: Tensor) -> None:
        for _, part in self.parts:
            part.check_values(target)

    def check(self, outputs: Outputs, target: Tensor) -> None:
        for _, part in self.parts:
            part.check(outputs, target)
        self._check_ignored(outputs, target)

    def _check_ignored(self, outputs: Outputs, target: Tensor) -> None:
        """Refuse criteria of several ``ignore_index`` if they get the same labels of images."""
        ignored = [part.ignore_index for _, part in self.parts]
        if outputs.whole and len(set(ignored)) > 1 and not target.is_floating_point():
            raise ValueError(
                f"the losses of the sum have the ignore_index {' and '.join(map(str, ignored))}, "
                "but this network returns one vector for each image, and only one tile counts an "
                "image's target: the other tiles get the ignore_index as target. Give all losses "
                "one ignore_index that no target has, such as -100"
            )


class OfOutputs(WeightedSum):
    """Sum of criteria (losses), one for each output of a network with several outputs.

    The logits hold the outputs one after another along the channels. All outputs have the same
    target, or each output has its own one.

    Args:
        parts: the criterion of each output.
        channels: the number of channels of each output.

    Attributes:
        forms: the dtype and channels of the target of each output, whose targets are packed into
            one tensor (:mod:`distseg.layers.packed_targets`); None if all outputs have one target.
    """

    def __init__(self, parts: Sequence[Criterion], channels: Sequence[int]):
        super().__init__([(1.0, part) for part in parts])
        self.channels = list(channels)
        self.forms: Sequence[TargetForm] | None = None

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        outputs = logits.split(self.channels, 1)
        return torch.cat(
            [part.rows(z, t) for part, z, t in zip(self.of_each, outputs, self._targets(target))], 1
        )

    def counts(self, target: Tensor) -> Tensor:
        targets = self._targets(target)
        return torch.cat([part.counts(t) for part, t in zip(self.of_each, targets)], 1)

    def check_values(self, target: Tensor) -> None:
        for part, own in zip(self.of_each, self._targets(target)):
            part.check_values(own)

    def check(self, outputs: Outputs, target: Tensor) -> None:
        targets = self._targets(target)
        for part, channels, own in zip(self.of_each, self.channels, targets):
            part.check(outputs._replace(channels=channels), own)
        if self.forms is None:
            self._check_ignored(outputs, target)

    @property
    def of_each(self) -> list[Criterion]:
        """The criterion of each output."""
        return [part for _, part in self.parts]

    def _targets(self, target: Tensor) -> list[Tensor]:
        """Return the target of each output."""
        if self.forms is None:
            return [target] * len(self.parts)
        return unpack(target, self.forms)
