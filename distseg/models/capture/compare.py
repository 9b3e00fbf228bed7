"""Compare a captured network with the module from which it was captured, in float64.

Both run on small images, in training without dropout and in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from distseg.models.capture.checks import check_left, equal, picture, run_pass
from distseg.models.capture.trace import DRAWS, CanNotCapture, Hidden
from distseg.models.capture.wide import call_wide, unnarrowed
from distseg.models.layers import copied_with
from distseg.models.network import Network
from distseg.models.user_errors import user_error

TOLERANCE = 1e-10
"""Largest accepted difference, relative to the largest number of the result.

A larger difference is accepted if rounding errors explain it.
"""
# Largest difference that rounding explains, as a multiple of the change in the result when the last
# bits of the image change.
_TIMES = 10
_DIFFERS = {
    False: "the network computes something different in evaluation than in training; only norms "
    "and dropout may differ (stochastic depth is supported if its mask is divided, as in "
    "y * (mask / keep))",
    True: "in training without dropout, the network's result differs from that of the layers that "
    "distseg found in it: the result may depend on the image's values, or on state that the "
    "network's code keeps",
}


class TooSmall(CanNotCapture):
    """Error for a module that fails on a test image, perhaps because the image is too small."""


class _Wide(TorchFunctionMode):
    """``TorchFunctionMode`` in which user code computes in float64 and without dropout.

    In this mode the user's module is compared with the captured network. Casts to float32 are
    ignored. In training, dropout keeps all values and stochastic depth keeps all images.

    Args:
        training: True if the module is in training mode.
    """

    def __init__(self, training: bool):
        super().__init__()
        self.training = training

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function, args, kwargs = unnarrowed(function, args, kwargs or {})
        if not self.training:
            return call_wide(function, args, kwargs)
        if function in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if function is Tensor.bernoulli_:
            return args[0].fill_(1)
        if function is torch.rand:
            return torch.ones(
                *args, **{name: value for name, value in kwargs.items() if name != "generator"}
            )
        return call_wide(function, args, kwargs)


_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.feature_dropout}


@torch.no_grad()
def check_same(
    model: nn.Module, network_of: Callable[[nn.Module], Network], channels: int, size: Sequence[int]
) -> None:
    """Compare the results of a captured network and its module; refuse the network if they differ.

    Both run in float64 on random images, with a copy of the module's weights, in evaluation and in
    training. A model on the meta device is not compared.

    Args:
        model: the user's module.
        network_of: function that takes a copy of the module and returns the captured network with
            the weights of this copy.
        channels, size: shape of the images (2, channels, *size).

    Raises:
        TooSmall: the module fails at this size.
        CanNotCapture: the results differ; the message names the mode.
    """
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return
    copied = doubled(model)
    network = network_of(copied)
    generator = torch.Generator().manual_seed(0)
    # In training, a batch norm of vectors needs at least two images.
    image = torch.randn(2, channels, *size, generator=generator, dtype=torch.float64).to(
        next(copied.parameters()).device
    )
    # Clamps show in large numbers only.
    wide = image * 10 ** (2 * torch.rand(image.shape, generator=generator, dtype=torch.float64)).to(
        image
    )
    _check_mode(copied.eval(), network.eval(), image, _evaluated(model, copied, image))
    _check_mode(copied, network, wide)
    # In training, norms in deep layers may need larger images than these. A run refuses images that
    # are too small itself.
    with suppress(RuntimeError):
        _check_mode(copied.train(), network.train(), image)
        _check_mode(copied, network, wide)


def doubled(model: nn.Module) -> nn.Module:
    """Return a copy of a module in float64, with noise in parameters whose elements are all equal.

    Without the noise, a parameter whose elements are all zero would hide errors in the tensors with
    which it is multiplied. Integer and bool tensors keep their dtype.
    """
    generator = torch.Generator().manual_seed(0)

    def weights(p: Tensor) -> nn.Parameter:
        found = _double(p)
        if p.numel() and p.is_floating_point() and bool((p == p.flatten()[0]).all()):
            found += 0.1 * torch.randn(p.shape, generator=generator).to(found)
        return nn.Parameter(found, p.requires_grad)

    tensors: dict[int, Any] = {id(p): weights(p) for p in model.parameters()}
    return copied_with(model, tensors | {id(b): _double(b) for b in model.buffers()})


def _double(x: Tensor) -> Tensor:
    return x.detach().to(torch.float64 if x.is_floating_point() else x.dtype, copy=True)


def _evaluated(model: nn.Module, copied: nn.Module, image: Tensor) -> Any:
    """Run a copy of a network in evaluation mode, and return its result.

    Refuse a network whose forward pass changes its own state.

    Args:
        model: the user's module, of which fresh copies are made for the check of its state.
        copied: the copy of ``model`` in float64.
        image: the images (2, C, *size).

    Raises:
        Hidden: the pass draws random numbers or changes the module's state.
        TooSmall: the pass fails, most likely because the images are too small.
    """
    before = picture(copied.eval())
    last, *others = (partial(_result, image * scale) for scale in (1.0, 0.5, 2.0))
    try:
        made = last(copied)
    except Hidden as e:
        hint = (
            "; F.dropout needs training=self.training to be off in evaluation"
            if DRAWS in str(e)
            else ""
        )
        raise Hidden(f"the forward pass fails a check in evaluation mode: {e}{hint}") from None
    except Exception as e:
        # User code may raise anything.
        size = "x".join(map(str, image.shape[2:]))
        raise TooSmall(
            f"in evaluation mode, without gradients, the forward pass of {type(copied).__name__} "
            f"fails on an image of {size} pixels with {user_error(e)}"
        ) from e
    check_left(lambda: doubled(model).eval(), before, picture(copied), last, others, equal)
    return made


def _result(image: Tensor, module: nn.Module) -> Any:
    """Return the result of ``module`` for ``image``, in float64 and without dropout.

    Raises:
        Hidden: the pass still draws random numbers, or reads the machine's state, such as clocks
            and files.
    """
    with _Wide(module.training):
        return run_pass(image, module)


def _check_mode(copied: nn.Module, network: Network, image: Tensor, wanted: Any = None) -> None:
    """Refuse a network whose result for ``image`` differs from that of the module ``copied``.

    The mode of both, training or evaluation, is not changed.

    Args:
        copied: the module, whose weights the network shares.
        image: the images (2, C, *size) on which both run.
        wanted: the module's result if it is already known; None to compute it.
    """
    wanted, found = _result(image, copied) if wanted is None else wanted, _result(image, network)
    same = (
        isinstance(wanted, Tensor)
        and wanted.shape[:2] == found.shape[:2]
        and (network.of_image or wanted.shape == found.shape)
    )
    if same and _close(wanted.view_as(found), found, TOLERANCE):
        return
    if same:
        bits = torch.randint(-1, 2, image.shape, generator=torch.Generator().manual_seed(1)).to(
            image
        )
        # The network may have changed buffers that it shares with the module, so both pass again.
        again = _result(image, copied)
        moved = _result(image * (1 + bits * torch.finfo(image.dtype).eps), copied)
        rounding = float((moved - again).abs().max() / again.abs().max())
        if _close(wanted.view_as(found), found, _TIMES * rounding):
            return
    raise CanNotCapture(_DIFFERS[network.training])


def _close(wanted: Tensor, found: Tensor, tolerance: float) -> bool:
    """Return True if ``found`` differs from ``wanted`` by at most a tolerance.

    Also return True if ``wanted`` has infinities or NaN, which cannot be compared.

    Args:
        tolerance: the largest difference, divided by the largest absolute number in ``wanted``.
    """
    return not bool(wanted.isfinite().all()) or bool(
        (found - wanted).abs().max() <= tolerance * wanted.abs().max()
    )
