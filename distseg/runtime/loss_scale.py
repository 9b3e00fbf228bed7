"""Scales the gradients of fp16 steps, so that small gradients are not rounded to 0."""

from __future__ import annotations

import math
from dataclasses import dataclass

_FIRST = 2.0**16
_STEPS = 2000  # with finite gradients until the scale is doubled


@dataclass
class LossScale:
    """Factor of the loss gradient in fp16 training, which adapts to the gradients.

    The smallest number above 0 of fp16 is 6e-8, but one pixel of an image of 1e8 pixels has a
    gradient of about 1e-8. So a backward pass starts with the loss gradient times this factor, and
    the gradients of the weights, which are float32, are divided by it. The factor is a power of 2,
    so neither the product nor the quotient is rounded. Factor and rule are those of
    ``torch.amp.GradScaler``: a step whose gradient is not finite is left out and the factor is
    halved; after 2000 finite steps it is doubled.

    The gradient's norm decides, and all ranks know the same norm. So all ranks have the same
    factor, and leave out the same steps, without a message.

    Attributes:
        value: the factor.
        steps: number of steps with finite gradients since the factor last changed.
    """

    value: float = _FIRST
    steps: int = 0

    def follow(self, norm: float) -> bool:
        """Adapt the factor to the gradient of a step, and return True if the gradient is finite.

        If it is not finite, the optimizer must leave the step out.

        Args:
            norm: the norm of the gradient, already divided by the factor.
        """
        if not math.isfinite(norm):
            self.value, self.steps = self.value / 2, 0
            return False
        self.steps += 1
        if self.steps == _STEPS:
            self.value, self.steps = self.value * 2, 0
        return True
