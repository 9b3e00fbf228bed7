"""Check that a module's forward pass does nothing but compute its result.

A pass must not draw random numbers or change the module's state. Ranks and tiles run another
number of passes than the serial program, in another order. So a pass must have the same result, and
leave the module in the same state, whether or not other passes ran before it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from distseg.models.bands import bands_of
from distseg.models.capture.draws import Draws, global_generators, is_generator, system_draws
from distseg.models.capture.guarded import Readings, begin_pass, guarded, moving_norms
from distseg.models.capture.outside_reads import ASKS, asked
from distseg.models.capture.state import WHOLE, Picture, Slot, picture_of, print_of
from distseg.models.capture.trace import (
    DRAWS,
    DRAWS_WHOLE,
    IN_ATTENTION,
    INSTEAD,
    KEEP_NOTHING,
    Hidden,
    calling,
    returned,
)
from distseg.models.layers import skip_store
from distseg.models.modified import modification_of
from distseg.models.network import inexact, is_followed, refusals
from distseg.models.passes import (
    checkpoints_ignored,
    eager,
    generators_kept,
    is_library,
    is_users,
    last_line_of,
    run,
    shown,
    user_line,
)
from distseg.models.user_errors import user_error

Pass = Callable[[nn.Module], Any]
"""Function that runs a forward pass of a module and returns something that can be compared."""


def picture(model: nn.Module, loose: bool = False) -> Picture:
    """Return a snapshot of a module's state and of the global random generators.

    The running statistics of norms are left out, since a pass may update them.

    Args:
        loose: True if the snapshot will be compared with the snapshot of a copy of the module. The
            snapshot then also leaves out what differs between copies, such as object ids
            (:func:`distseg.models.capture.state.picture_of`).
    """
    found = picture_of(model, loose).without(_statistics(model))
    for slot in global_generators():
        found.slots[slot.key], found.prints[slot.key] = slot, print_of(slot.value())
    return found


def _statistics(model: nn.Module) -> set[tuple[str, str]]:
    """Return the snapshot keys (module name, buffer name) of statistics that a pass may update.

    These are the running statistics of PyTorch's batch and instance norms. A norm on the meta
    device, or a modified norm, may update only its counter ``num_batches_tracked``.
    """
    found = set()
    for name, layer in model.named_modules():
        if isinstance(layer, _NORMS):
            whole = not any(b.is_meta for b in layer.buffers()) and modification_of(layer) is None
            found |= {(name or WHOLE, own) for own in (_RUNNING if whole else _RUNNING[:1])}
    return found


_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_RUNNING = ("num_batches_tracked", "running_mean", "running_var")


def check_left(
    made: Callable[[], nn.Module],
    before: Picture,
    after: Picture,
    last: Pass,
    others: Sequence[Pass],
    alike: Callable[[Any, Any], bool],
) -> None:
    """Refuse a module whose forward pass changes its state in a way that affects later passes.

    A changed parameter or buffer is always refused. Another change, such as that of a counter, is
    accepted if the pass has the same result and leaves the same state when it runs again, even
    after passes over other images.

    Args:
        made: function that makes a copy of the module in which no pass has run.
        before, after: the state of a copy before and after its first pass, which was ``last``.
        last: function that runs the checked pass in a copy of the module, and returns the result.
            It is called twice for one new copy, and after each function in ``others`` for another
            new copy.
        others: functions that run passes over other images.
        alike: function that returns True if the results of two passes are equal.

    Raises:
        Hidden: the message names the attribute, its module and the line that changes it, and says
            how to fix it.
    """
    changed = before.changed(after)
    if not changed:
        return
    kept = [slot for slot in changed if slot.tensor]
    if not kept:
        used, fresh = made(), made()
        wanted = last(fresh)
        there = picture(fresh, loose=True)
        same = alike(last(fresh), wanted)
        kept += there.changed(picture(fresh, loose=True))
        for other in others:
            # The module may not accept images of other sizes.
            with suppress(Exception):
                other(used)
            same = alike(last(used), wanted) and same
            kept += there.changed(picture(used, loose=True))
        if same and not kept:
            return
    raise Hidden(_message((kept or changed)[0], made(), last))


def _message(slot: Slot, model: nn.Module, run_pass: Pass) -> str:
    """Return the error message about a part of the module's state that a pass changes.

    Args:
        slot: the part of the state, such as an attribute.
        model: a copy of the module, in which the pass is run to find the line.
        run_pass: the pass.
    """
    line = _line_that_changes(slot.slot_in(model), model, run_pass)
    where = f" ({line})" if line else ""
    if is_generator(slot):
        return (
            f"the forward pass draws random numbers by {slot}{where}, which differ between ranks "
            f"and between parts of an image: {INSTEAD}"
        )
    return f"the forward pass changes {slot}{where}: {KEEP_NOTHING}"


def _line_that_changes(slot: Slot, model: nn.Module, run_pass: Pass) -> str | None:
    """Return the line of user code in a pass that changes one part of a module's state.

    Return None if the pass does not change it, or runs no line of user code.

    Args:
        slot: the part of the state, such as an attribute.
        model: a module in which no pass has run.
        run_pass: the pass.
    """
    found: list[str | None] = []
    begun, last = print_of(slot.value()), None

    def look(frame: FrameType, event: str, _: Any):
        nonlocal last
        if not is_users(frame.f_code) or is_library(frame.f_code.co_filename):
            return None
        if not found and print_of(slot.value()) != begun:
            found.append(last)
        last = shown(frame.f_code.co_filename, frame.f_lineno)
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        with suppress(Exception):
            run_pass(model)
    finally:
        sys.settrace(before)
    if found:
        return found[0]
    return last if print_of(slot.value()) != begun else None


def check_real(model: nn.Module) -> None:
    """Refuse complex parameters and buffers, because a cast would drop their imaginary part.

    Raises:
        ValueError: the message names the parameter or buffer, and says how to fix it.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_complex():
            raise ValueError(
                f"{name} is of {tensor.dtype}, but networks are computed in real numbers: store "
                f"real numbers (..., 2), and call torch.view_as_complex on them in forward"
            )


def check_seen(model: nn.Module) -> None:
    """Raise the error with which the capture of a network failed, if it rules out exact training.

    A network with complex parameters or buffers is refused too (:func:`check_real`). This function
    runs no forward pass.

    Raises:
        ValueError: the message names the function, the module and the line.
    """
    check_real(model)
    if model in inexact:
        raise ValueError(f"this network cannot be trained exactly: {refusals[model]}")


def check_exact(model: nn.Module, size: Sequence[int]) -> None:
    """Refuse to train a network whose passes draw random numbers or change its state.

    Only a network whose layer calls distseg does not know is run for this check.

    Args:
        size: image size in training.

    Raises:
        ValueError: the message names the function, the module and the line. It also gives the
            reason if distseg tried to capture the network and failed.
    """
    check_seen(model)
    if is_followed(model):
        return
    try:
        check_module(model, size)
    except Hidden as e:
        why = str(refusals.get(model, ""))
        followed = f"; and its capture failed: {why}" if why and why != str(e) else ""
        raise ValueError(f"this network cannot be trained exactly: {e}{followed}") from e


def check_module(
    model: nn.Module, size: Sequence[int], modes: Sequence[bool] = (True, False)
) -> None:
    """Refuse an uncaptured module whose forward pass does more than return one tensor.

    Passes must not draw random numbers or change the module's state. In this check, dropout layers
    return their input, and norms restore their running statistics, because distributed counterparts
    replace both in training (:mod:`distseg.models.capture.guarded`). Small images are tried first,
    then one of ``size``.

    Args:
        size: image size in training.
        modes: modes to check, True for training and False for evaluation.

    Raises:
        Hidden: a pass does more, or the module accepts none of the images. The message names what
            the pass does and the line, and says how to fix it.
    """
    if any(p.is_meta for p in model.parameters()):
        return
    if model in _checked:
        return _check_at(model, tuple(size), modes)
    dims, failed = len(size), None
    for at in dict.fromkeys([*((side,) * dims for side in _TRIED), tuple(size)]):
        try:
            _check_modes(model, at, modes)
        except Hidden:
            raise
        except Exception as e:
            # User code may raise anything.
            failed = e
        else:
            _checked.setdefault(model, set()).add((at, tuple(modes)))
            return _check_at(model, tuple(size), modes)
    raise Hidden(
        f"the forward pass of {type(model).__name__} fails on an image of "
        f"{'x'.join(map(str, size))} pixels, the size in training, with {user_error(failed)}: "
        f"forward must accept images of this size"
    ) from failed


_TRIED = (64, 96, 256)  # sides in pixels of the images that are tried first
# Sizes and modes for which a module has passed the checks.
_checked: WeakKeyDictionary[nn.Module, set[tuple]] = WeakKeyDictionary()


def check_apart(model: nn.Module, size: Sequence[int]) -> None:
    """Refuse an uncaptured module in which the images of a batch influence each other.

    Batch norms are exempt. A result that depends on the number of images is refused too.

    Args:
        size: image size in training.

    Raises:
        Hidden: the images influence each other; the message says how to fix it.
    """
    if joins_images(model, size, training=True):
        raise Hidden(
            "spatial.norm_scope is step, but outside of its batch norms this network mixes the "
            "images of a batch, or uses their number, and each rank has only the images of its "
            "own sample group: set spatial.norm_scope to group, or mesh.samples to 1"
        )


def joins_images(model: nn.Module, size: Sequence[int], training: bool) -> bool:
    """Return True if the images of a batch influence each other's results.

    Batch norms are ignored in training. In evaluation, return True for a batch norm without running
    statistics. An uncaptured module is also run on random images; the result is False if it accepts
    none of these images, or if its parameters are on the meta device. A captured module is not run,
    because none of its other layers joins images.

    Args:
        size: image size in training.
        training: the mode of the module.
    """
    if not training and any(
        isinstance(layer, _NORMS[0]) and not layer.track_running_stats for layer in model.modules()
    ):
        return True
    if is_followed(model) or any(p.is_meta for p in model.parameters()):
        return False
    for at in dict.fromkeys([*((side,) * len(size) for side in _TRIED), tuple(size)]):
        # The module may not accept images of this size, or may not return one tensor.
        with (
            suppress(ValueError, RuntimeError, TypeError, IndexError, AttributeError),
            generators_kept(),
            torch.no_grad(),
        ):
            tried = copy.deepcopy(model).double().train(training)
            return not _is_apart(guarded(tried, 0, apart=True), at)
    return False


def _is_apart(model: nn.Module, size: Sequence[int]) -> bool:
    """Return True if an image has the same result alone and in batches with other images.

    A random image is passed alone, as the first of two images, and as the first of three. The
    results may differ by rounding.

    Args:
        size: the size of the image.
    """
    images, others = _noise(model, size, 0), _noise(model, size, 1)
    alone, *beside = (
        run_pass(x, model)[:1] for x in (images[:1], images, torch.cat((images[:1], others)))
    )
    return all(
        alone.shape == y.shape
        and torch.allclose(alone, y, rtol=0, atol=1e-9 * float(alone.abs().max()))
        for y in beside
    )


def _check_modes(
    model: nn.Module, size: Sequence[int], modes: Sequence[bool], images: int = 2
) -> None:
    with generators_kept(), torch.enable_grad():
        for training in modes:
            _check_mode(model, size, training, images)


def _check_at(model: nn.Module, size: tuple[int, ...], modes: Sequence[bool]) -> None:
    """Refuse a module that passed the checks on small images but fails them at the training size.

    One image is passed. If the forward pass itself raises an error, return without a refusal.

    Args:
        size: image size in training.
        modes: modes to check, True for training and False for evaluation.
    """
    if (size, tuple(modes)) in _checked[model] or min(size) < 1:
        return
    try:
        _check_modes(model, size, modes, images=1)
    except Hidden:
        raise
    except Exception:
        # For example, a batch norm of vectors refuses a single image in training. The training step
        # reports errors of the forward pass itself.
        return
    _checked[model].add((size, tuple(modes)))


def _check_mode(model: nn.Module, size: Sequence[int], training: bool, images: int = 2) -> None:
    """Refuse a module whose forward pass in this mode does more than return a tensor.

    Passes must not draw random numbers, change the module's state or read running statistics.

    Args:
        training: True for training mode, False for evaluation.
        images: the number of images in a pass.
    """

    def made() -> nn.Module:
        return guarded(copy.deepcopy(model).train(training), images)

    *others, last = (
        partial(run_pass, _noise(model, size, number, images), draws=DRAWS_WHOLE)
        for number in range(3)
    )
    probe = made()
    before = picture(probe)
    result = last(probe)
    if not isinstance(result, Tensor):
        mode = "" if training else " (in evaluation)"
        raise Hidden(f"{returned(result, last_line_of(lambda: last(made())))}{mode}")
    check_left(made, before, picture(probe), last, others, equal)
    moving = frozenset(moving_norms(probe))
    copied = guarded(copy.deepcopy(model).train(training), images, moves=moving)
    with Readings(copied, moving) as readings:
        same = not moving or equal(last(copied), result)
    if not same:
        reading = (
            readings.first
            or f"the forward pass reads the running statistics of {' or '.join(sorted(moving))}"
        )
        raise Hidden(
            f"{reading}, which a norm updates once per step, not with each pass: use running "
            f"statistics in the training loop, not in the forward pass"
        )


def _noise(model: nn.Module, size: Sequence[int], number: int, images: int = 2) -> Tensor:
    """Return random images (images, C, *size), seeded with ``number``, of the model's dtype."""
    like, channels = next(p for p in model.parameters() if p.is_floating_point()), bands_of(model)
    generator = torch.Generator().manual_seed(number)
    return torch.randn(images, channels, *size, generator=generator).to(like)


def run_pass(image: Tensor, model: nn.Module, draws: str = DRAWS) -> Any:
    """Run a forward pass of ``model`` over the batch ``image`` (N, C, *size); return its result.

    A result that is a tensor is detached.

    Args:
        draws: end of the error message about random numbers. The message begins with the name of
            the function that draws them, its module and its line.

    Raises:
        Hidden: the pass draws random numbers from PyTorch or the system, or reads the machine's
            state, such as clocks and files.
    """
    inside: list[str] = []
    drawn: list[str] = []
    modules = dict(model.named_modules())

    def note(name: str, line: str, does: str = draws) -> None:
        where = inside and inside[-1] or WHOLE
        does = IN_ATTENTION if isinstance(modules.get(where), nn.MultiheadAttention) else does
        drawn.append(f"{name} in {where} ({line}) {does}")

    with ExitStack() as stack:
        for context in (skip_store({}), checkpoints_ignored(), eager(), calling(model, inside)):
            stack.enter_context(context)
        stack.enter_context(system_draws(partial(note, "a generator without a seed")))
        stack.enter_context(Draws(lambda name, _: note(name, user_line())))
        stack.enter_context(asked(partial(note, does=ASKS)))
        begin_pass(model)
        result = run(model, image.clone())
    if drawn:
        raise Hidden(drawn[0])
    return result.detach() if isinstance(result, Tensor) else result


def equal(a: Tensor, b: Tensor) -> bool:
    """Return True if two results have the same shape and numbers; NaN counts as equal to NaN."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
