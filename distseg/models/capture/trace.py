"""Traces: the calls of PyTorch functions that a forward pass of user code makes.

The network runs on the meta device under a ``TorchFunctionMode``, which sees each call with its
settings (F.conv2d, not its kernels). Hooks, parametrizations and subclasses are therefore recorded
by the calls that they make.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, resolve_name

from distseg.models.capture.draws import Draws, system_draws
from distseg.models.capture.state import print_of
from distseg.models.capture.wide import unnarrowed, widened
from distseg.models.layers import skip_store
from distseg.models.meta import all_on_meta, as_computed, found_in, of_sequence
from distseg.models.passes import (
    checkpoints_ignored,
    eager,
    is_users,
    last_line_of,
    replaced,
    run,
    user_line,
)
from distseg.models.user_errors import user_error


class CanNotCapture(ValueError):
    """Error that says why a network cannot be captured.

    Args:
        why: the error message.
        everywhere: True if each output pixel depends on the whole image, so that no halo is large
            enough.
    """

    def __init__(self, why: str, everywhere: bool = False):
        super().__init__(why)
        self.everywhere = everywhere


class Hidden(CanNotCapture):
    """Error for code that keeps state or draws random numbers, and cannot be trained exactly.

    Not even whole images on each rank would help. For example, if a forward pass changes a buffer,
    the buffers of the ranks differ, because each rank runs other passes.
    """


@dataclass(frozen=True)
class Made:
    """Reference to a tensor that a recorded call made, or to the image.

    Attributes:
        call: index of the call in :attr:`Trace.calls`; -1 for the image (:data:`IMAGE`).
        part: index of the tensor among the call's results.
    """

    call: int
    part: int = 0


IMAGE = Made(-1)


@dataclass(frozen=True)
class Kept:
    """Reference to a parameter or buffer of the network. It holds the name of this tensor."""

    name: str


@dataclass(frozen=True)
class Called:
    """A recorded call: a function, its arguments and the shapes of its results.

    Attributes:
        name: name of the function, without the trailing underscore of an in-place one.
        args: arguments, in which :class:`Made` and :class:`Kept` stand for tensors. ``kwargs`` has
            the keyword arguments in the same form.
        shapes: shapes of the resulting tensors; ``dtypes`` has the dtypes of these tensors.
        module: name of the module whose code makes the call; ``line`` is the line of that code.
        graded: True if the call was made with gradients enabled.
        draws: True if the call draws random numbers.
    """

    name: str
    function: Callable
    args: tuple
    kwargs: dict
    shapes: tuple[tuple[int, ...], ...]
    module: str
    line: str
    graded: bool
    dtypes: tuple[torch.dtype, ...] = ()
    draws: bool = False

    def __str__(self) -> str:
        return f"{self.name} in {self.module or 'the model'} ({self.line})"


@dataclass
class Trace:
    """All calls of PyTorch functions in one forward pass over images of one size.

    Attributes:
        result: reference to the network's output.
        batch: number of images in the traced batch, each with ``channels`` channels.
        parameters: names of the parameters; the other tensors of the network are buffers.
    """

    calls: list[Called]
    result: Made
    batch: int
    channels: int
    parameters: frozenset[str] = frozenset()

    @property
    def fingerprint(self) -> str:
        """Digest of all recorded calls, by which ranks check that they recorded the same calls."""
        text = repr([(c.module, c.name, c.shapes, c.args, c.kwargs) for c in self.calls])
        return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", text).encode()).hexdigest()[:12]


@torch.enable_grad()
def trace(model: nn.Module, channels: int, size: Sequence[int], batch: int = 2) -> Trace:
    """Run a forward pass in training mode, and return its trace.

    Args:
        model: a model on the meta device (:func:`distseg.models.layers.on_meta`). If it is in
            float64, tensors that its code makes in float32 become float64.
        channels, size, batch: the image has the shape (batch, channels, *size).

    Raises:
        CanNotCapture: the model fails at this size, or does something that cannot be traced.
    """
    model.train()
    image = torch.empty(
        batch,
        channels,
        *size,
        device="meta",
        dtype=next((p.dtype for p in model.parameters()), torch.float32),
    )
    recorder = _Recorder(model, image)
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        # Parameters that are frozen now may be trained later.
        with _recording(model, recorder), _gradients_enabled(frozen):
            result = run(model, image)
    except CanNotCapture:
        raise
    except Exception as e:
        raise CanNotCapture(
            f"the forward pass of {type(model).__name__} fails on an image of "
            f"{'x'.join(map(str, size))} pixels with {user_error(e)}"
        ) from e
    check_statistics(recorder.calls)
    if not isinstance(result, Tensor):
        raise CanNotCapture(returned(result, last_line_of(lambda: run(model, image))))
    value = recorder.value_of(result, "the network's result")
    if not isinstance(value, Made):
        raise CanNotCapture(
            "the network's result does not depend on the image: return a tensor that forward "
            "computes from the image"
        )
    parameters = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))
    return Trace(recorder.calls, value, batch, channels, parameters)


def alike(a: Trace, b: Trace) -> bool:
    """Return True if two traces record the same calls with the same arguments and result."""
    return a.result == b.result and list(map(_print_of_call, a.calls)) == list(
        map(_print_of_call, b.calls)
    )


def _print_of_call(call: Called) -> tuple:
    settings = print_of((call.function, call.args, call.kwargs), loose=True)
    return call.name, call.shapes, call.dtypes, call.graded, settings


def returned(result: Any, line: str | None = None) -> str:
    """Return the error message for a network that returns ``result``, which is not one tensor.

    Args:
        result: what the network's forward pass returned.
        line: the line of code that returns the result, if known.
    """
    names: list = []
    if isinstance(result, dict):
        names = list(result)
    elif isinstance(result, (tuple, list)):
        names = list(getattr(result, "_fields", range(len(result))))
    kind, example = f"a {type(result).__name__}", ""
    if names:
        count = str(len(names)) if names[0] == 0 else ", ".join(map(repr, names))
        weights = ", ".join(f"{name}: {weight}" for name, weight in zip(names, (1.0, 0.4)))
        kind, example = f"{kind} of {count}", f", such as {{{weights}}}"
    where = f" ({line})" if line else ""
    return (
        f"the network returns {kind}{where}, but it must return one tensor: name in model.outputs "
        "(in Python: the argument outputs of distribute) the outputs to train and the weights of "
        f"their losses{example}, or write a module around the network whose forward returns one "
        "tensor"
    )


def check_statistics(calls: Sequence[Called]) -> None:
    """Raise an error if a pass reads running statistics that a norm of the same pass updates.

    distseg updates running statistics once in each optimizer step, but a step has several passes,
    one for each tile or micro-batch. One exception is accepted: a norm that is called in evaluation
    mode before its call in training mode. The first call then reads the statistics of the last
    step.

    Args:
        calls: the calls of one forward pass.

    Raises:
        Hidden: a call reads statistics that another call updates. The message names the call.
    """
    moved: set[str] = set()
    for call in calls:
        given = dict(zip(_OF_BATCH_NORM, call.args)) | call.kwargs
        if call.name == "batch_norm":
            running = {
                x.name
                for x in (given.get("running_mean"), given.get("running_var"))
                if isinstance(x, Kept)
            }
            if not given.get("training") and running & moved:
                raise Hidden(f"{call} {EVALUATED_BEHIND}")
            moved |= running if given.get("training") else set()
    moved |= {f"{name.rpartition('.')[0]}.num_batches_tracked".lstrip(".") for name in moved}
    for call in calls:
        read = [
            kept.name for kept in found_in((call.args, call.kwargs), Kept) if kept.name in moved
        ]
        counts = getattr(call.function, "__name__", "") in ("add_", "__iadd__") and all(
            name.endswith("num_batches_tracked") for name in read
        )
        if read and call.name != "batch_norm" and not counts:
            raise Hidden(
                f"{call} reads {read[0]}, which a norm updates once per step, but a step has "
                f"several passes: move this computation to the training loop"
            )


_OF_BATCH_NORM = (
    "input",
    "running_mean",
    "running_var",
    "weight",
    "bias",
    "training",
    "momentum",
    "eps",
)


@contextmanager
def _gradients_enabled(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let frozen parameters require gradients inside the context; freeze them again after it."""
    for p in parameters:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(False)


@contextmanager
def _recording(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Record in ``recorder`` the calls of a forward pass of ``model`` inside the context.

    Inside, ``torch.utils.checkpoint`` and ``torch.compile`` have no effect, and draws of random
    numbers are recorded too.
    """
    with ExitStack() as stack:
        for context in (
            skip_store({}),
            checkpoints_ignored(),
            eager(),
            saved_tensors_noted(recorder.refuse_saved),
        ):
            stack.enter_context(context)
        for context in (
            calling(model, recorder.inside),
            system_draws(recorder.note_system),
            recorder,
            Draws(recorder.note_draw),
        ):
            stack.enter_context(context)
        yield


@contextmanager
def saved_tensors_noted(note: Callable[[], None]) -> Iterator[None]:
    """Call ``note`` when code inside the context installs ``saved_tensors_hooks``.

    Such hooks may change the numbers that autograd saves for the backward pass. ``save_on_cpu``
    installs them too, but does not change the numbers, so it is ignored.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks
    enter = hooks.__enter__

    def entered(self) -> None:
        if not isinstance(self, torch.autograd.graph.save_on_cpu):
            note()
        enter(self)

    with replaced(hooks, {"__enter__": entered}):
        yield


@contextmanager
def calling(model: nn.Module, inside: list[str]) -> Iterator[None]:
    """Keep the list ``inside`` up to date: the names of the modules whose forward is running.

    The modules are ``model`` and its submodules. A name is added when the forward begins and
    removed when it ends, so the outermost module comes first.
    """
    # A module with several names is recorded by the first one.
    names = {
        id(module): name
        for name, module in reversed(list(model.named_modules(remove_duplicate=False)))
    }

    # A hook must return None: another value would replace the module's result.
    def left(*_) -> None:
        inside.pop()

    hooks = [
        register_module_forward_pre_hook(
            lambda module, _: inside.append(names.get(id(module), type(module).__name__))
        ),
        register_module_forward_hook(left, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class _Known:
    """A tensor of the forward pass, and the reference that stands for it in recorded calls.

    The tensor is kept alive so that no other tensor gets the same ``id``. The reference ``value``
    is None if the tensor was overwritten through another view, so that its content is unknown.
    """

    tensor: Tensor
    value: Made | Kept | None
    version: int = field(init=False)

    def __post_init__(self):
        self.version = self.tensor._version


class _Recorder(TorchFunctionMode):
    """``TorchFunctionMode`` that records every call of a PyTorch function as a :class:`Called`."""

    def __init__(self, model: nn.Module, image: Tensor):
        super().__init__()
        self.calls: list[Called] = []
        self._model = model
        self._wide = image.dtype == torch.float64
        self._known: dict[int, _Known] = {}
        # For the id of each view that indexing made: the indexed tensor, and the index.
        self._views: dict[int, tuple[Tensor, Any]] = {}
        # Known tensors by their storage, then by their id.
        self._sharing: dict[int, dict[int, _Known]] = {}
        # For each storage: the ids of tensors that user code read as x.data, with the line of code.
        # A change of such a tensor does not raise the version of x.
        self._apart: dict[int, dict[int, str]] = {}
        self.inside: list[str] = []
        norms = {
            name: m
            for name, m in model.named_modules()
            if isinstance(m, nn.modules.batchnorm._NormBase)
            and m.training
            and m.track_running_stats
        }
        self._counted = {
            f"{name}.{own}".lstrip(".") for name, m in norms.items() for own in m._buffers
        }
        self._autocast = torch.is_autocast_enabled("cpu")
        # For each draw of the current call, True if user code can read the drawn numbers; None
        # between calls.
        self._drawn: list[bool] | None = None
        self._know(image, IMAGE)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self._know(tensor, Kept(name))

    @property
    def _where(self) -> str:
        """The running module and line of user code, such as "block.conv (net.py, line 12)"."""
        return f"{self.inside and self.inside[-1] or 'the model'} ({user_line()})"

    def note_draw(self, name: str, made: Any) -> None:
        """Note that the recorded call draws random numbers; refuse a draw outside of any call.

        Args:
            name: name of the function that draws.
            made: result of this function.

        Raises:
            Hidden: no call of a PyTorch function is being recorded, and user code can read the
                numbers.
            CanNotCapture: no call is being recorded, but the numbers are on the meta device, so
                user code cannot read them.
        """
        seen = any(not x.is_meta for x in found_in(made, Tensor))
        if self._drawn is None:
            raise (Hidden if seen else CanNotCapture)(f"{name} in {self._where} {DRAWS}")
        self._drawn.append(seen)

    def note_system(self, line: str) -> None:
        """Raise :class:`Hidden`, as user code takes random numbers from the operating system.

        Args:
            line: the line of user code, for the message.
        """
        module = self.inside and self.inside[-1] or "the model"
        raise Hidden(
            f"{module} ({line}) takes random numbers from the operating system, as a generator "
            f"without a seed does: {INSTEAD}"
        )

    def refuse_saved(self) -> None:
        """Raise ``CanNotCapture``, because user code installs ``saved_tensors_hooks``."""
        raise CanNotCapture(
            f"saved_tensors_hooks in {self._where} may change the tensors of the backward pass: "
            f"remove it"
        )

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._wide:
            function, args, kwargs = unnarrowed(function, args, kwargs)
        name = _name_of(function)
        if name.endswith("_") and isinstance(function, torch._ops.OpOverload):
            raise CanNotCapture(
                f"{name} in {self._where} changes a tensor in place inside TorchScript: write "
                f"this code in plain PyTorch"
            )
        given = {id(x): x for x in found_in((args, kwargs), Tensor)}
        versions = {key: x._version for key, x in given.items()}
        self._drawn = []
        try:
            result = self._result(function, name, args, kwargs)
        except (RuntimeError, TypeError) as e:  # NotImplementedError is a RuntimeError
            if "meta" in str(e).lower() and any(x.is_meta for x in given.values()):
                raise CanNotCapture(
                    f"{_plain(name).strip('_')} in {self._where} "
                    f"{self._looked_at(list(given.values()))}"
                ) from e
            raise
        finally:
            drawn, self._drawn = self._drawn, None
        made = found_in(result, Tensor)
        changed = {key for key, x in given.items() if x._version != versions[key]}
        self._check_types(name)
        self._check_graded(name, [given[key] for key in changed])
        self._check(name, args, drawn)
        if _plain(name) == "__setitem__" and isinstance(
            self._value_or_none(args[0]), (Made, type(None))
        ):
            self._assign(args[0], args[1], args[2])
            return result
        if not made and not changed:
            return result  # no tensor, but a size or a type
        if name.endswith("data.__get__"):
            function, name = Tensor.detach, "detach"
            self._apart.setdefault(_memory(result), {})[id(result)] = user_line()
        if name.endswith("__get__") or not given and not made:
            name = getattr(getattr(function, "__self__", None), "__name__", name)
        called = Called(
            _plain(name),
            function,
            self._written(args, name),
            self._written(kwargs, name),
            tuple(tuple(x.shape) for x in made),
            self.inside[-1] if self.inside else "",
            user_line(),
            torch.is_grad_enabled(),
            tuple(x.dtype for x in made),
            bool(drawn),
        )
        if (
            name.endswith(("fill_", "zero_"))
            and not any(isinstance(x, Tensor) for x in args[1:])
            and isinstance(self._value_or_none(args[0]), Made)
        ):
            called = self._filled(args[0], args[1] if len(args) > 1 else kwargs.get("value", 0.0))
        number = len(self.calls)
        self.calls.append(called)
        in_place = (
            is_in_place(name)
            or _plain(name) in _DROPOUTS
            and bool(kwargs.get("inplace") or args[3:4] == (True,))
        )
        for part, x in enumerate(made):
            self._note(x, Made(number, part), changed | (set(given) if in_place else set()))
        if (
            in_place
            and made
            and args
            and isinstance(args[0], Tensor)
            and id(args[0]) in self._known
            and not isinstance(self._known[id(args[0])].value, Kept)
        ):
            self._know(args[0], Made(number))
        if index := _index_of(_plain(name), args, kwargs):
            self._views[id(result)] = args[0], index[0]
        if changed:
            sources = (
                self._change_sources(args[0], Made(number))
                if in_place and isinstance(args[0], Tensor)
                else set()
            )
            self._look_for_changes(called, changed, {id(x) for x in made} | sources)
        return result

    def _looked_at(self, given: Sequence[Tensor]) -> str:
        """Return the end of the error message for a call that needs a tensor's numbers in Python.

        Examples are ``float(x)`` and ``x.tolist()``, which fail on the meta device.

        Args:
            given: the tensors among the call's arguments. The message names the first parameter or
                buffer among them.

        Raises:
            Hidden: one of the tensors is a running statistic.
        """
        kept = next(
            (
                known.value.name
                for x in given
                if (known := self._known.get(id(x))) and isinstance(known.value, Kept)
            ),
            None,
        )
        if kept in self._counted:
            raise Hidden(
                f"{self._where} reads {kept}, which a norm updates once per step, but a step has "
                f"several passes: move this computation to the training loop"
            )
        return f"reads the values of {kept or 'a tensor'} in Python: {BY_VALUE}"

    def _check(self, name: str, args: tuple, drawn: list[bool]) -> None:
        """Raise an error for a call that cannot be repeated for each part of an image.

        Such a call replaces the data of a tensor, adds a hook to gradients, returns random numbers
        to user code, or runs under a transform of ``torch.func``.

        Args:
            name: name of the function.
            drawn: for each draw of the call, True if user code can read the drawn numbers.
        """
        if any(
            isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)
            for x in args
        ):
            raise CanNotCapture(
                f"{_plain(name)} in {self._where} is called by a function of torch.func (vmap, "
                f"grad, jvp): write the code for whole batches without them"
            )
        if any(drawn):
            raise Hidden(f"{_plain(name)} in {self._where} {DRAWS}")
        if (
            name.endswith("data.__set__")
            or _plain(name) == "set"
            and args
            and isinstance(args[0], Tensor)
        ):
            known = self._known.get(id(args[0]))
            kept = known.value.name if known and isinstance(known.value, Kept) else "a tensor"
            raise (Hidden if known and isinstance(known.value, Kept) else CanNotCapture)(
                f"{self._where} replaces the data of {kept} in the forward pass: {KEEP_NOTHING}"
            )
        if (
            _plain(name) in _HOOKS
            or name.endswith("grad_fn.__get__")
            and is_users(sys._getframe(2).f_code)
        ):
            what = "grad_fn" if name.endswith("__get__") else _plain(name)
            raise CanNotCapture(
                f"{what} in {self._where} changes gradients by a hook, which would run on each "
                f"part of an image separately: remove the hook"
            )

    def _check_types(self, name: str) -> None:
        """Raise an error if user code uses its own autocast, or reads ``x.grad`` or ``x.data_ptr``.

        The counter ``x._version`` is refused too.

        Args:
            name: name of the called function.
        """
        if torch.is_autocast_enabled("cpu") != self._autocast:
            raise CanNotCapture(
                f"{_plain(name)} in {self._where} runs under its own autocast: remove it, as "
                f"train.precision sets the dtype"
            )
        if name.endswith(".grad.__get__") and is_users(sys._getframe(2).f_code):
            raise Hidden(
                f"{self._where} reads the gradient of a tensor, which depends on what was "
                f"computed before: read it in the training loop"
            )
        read = name.removesuffix(".__get__").rpartition(".")[2]
        if read in _OF_MEMORY and is_users(sys._getframe(2).f_code):
            raise Hidden(
                f"{self._where} reads {read} of a tensor, {_OF_MEMORY[read]}: compute with the "
                f"tensor's values alone"
            )

    def _check_graded(self, name: str, changed: Sequence[Tensor]) -> None:
        """Raise an error if a call under no_grad changed, in place, a tensor that autograd tracks.

        Autograd would not see the change and would compute the gradient for the old content.

        Args:
            name: name of the called function.
            changed: tensors that the call changed.
        """
        if not torch.is_grad_enabled() and any(x.grad_fn is not None for x in changed):
            raise CanNotCapture(
                f"{_plain(name)} in {self._where} changes a tensor in place without gradients "
                f"(torch.no_grad), so that autograd does not see it: use detach() or clone()"
            )

    def _value_or_none(self, x: Tensor) -> Made | Kept | None:
        known = self._known.get(id(x))
        return None if known is None else known.value

    def _assign(self, x: Tensor, index: Any, value: Any) -> None:
        """Record the assignment ``x[index] = value`` as a call whose result is the changed ``x``.

        An uninitialized tensor, such as ``torch.empty`` returns, is recorded as zeros first.
        """
        known = self._known.get(id(x))
        if (
            known is not None
            and isinstance(known.value, Made)
            and known.value != IMAGE
            and self.calls[known.value.call].name in EMPTY
        ):
            self.calls.append(self._filled(x, 0.0))
            self._know(x, Made(len(self.calls) - 1))
        called = self._record_change(
            self._written(x, "__setitem__"),
            self._written(index, "__setitem__"),
            self._written(value, "__setitem__"),
            x,
        )
        self._know(x, Made(len(self.calls) - 1))
        self._look_for_changes(
            called, {id(x)}, {id(x)} | self._change_sources(x, Made(len(self.calls) - 1))
        )

    def _filled(self, x: Tensor, value: float) -> Called:
        """Return the record of a ``torch.full`` call that makes a tensor like ``x``."""
        where = self.inside[-1] if self.inside else ""
        return Called(
            "full",
            torch.full,
            (tuple(x.shape), value),
            {"dtype": x.dtype},
            (tuple(x.shape),),
            where,
            user_line(),
            torch.is_grad_enabled(),
            (x.dtype,),
        )

    def _change_sources(self, x: Tensor, value: Made) -> set[int]:
        """Record that a change of the view ``x`` also changed the tensors that it views.

        For example, after ``y = x[0]; y.add_(1)`` record the assignment ``x[0] = y``.

        Args:
            value: reference to the new value of the view.

        Returns:
            ``id`` of each tensor of which ``x`` is a view; empty if ``x`` is no view by an index.
        """
        found: set[int] = set()
        while id(x) in self._views:
            source, index = self._views[id(x)]
            before = self._value_or_none(source)
            if not isinstance(before, Made):
                break
            self._record_change(before, self._written(index, "__setitem__"), value, source)
            x, value = source, Made(len(self.calls) - 1)
            self._know(x, value)
            found.add(id(x))
        return found

    def _record_change(self, before: Made, index: Any, value: Any, x: Tensor) -> Called:
        """Record the assignment ``before[index] = value`` as a call that makes a new tensor.

        Args:
            before: reference to the tensor before the assignment.
            index: the index, as in user code.
            value: the assigned number, or the reference to the assigned tensor.
            x: the tensor that the user's code changes.
        """
        called = Called(
            "changed",
            changed,
            (before, index, value),
            {},
            (tuple(x.shape),),
            self.inside[-1] if self.inside else "",
            user_line(),
            torch.is_grad_enabled(),
            (x.dtype,),
        )
        self.calls.append(called)
        return called

    def _result(self, function: Callable, name: str, args: tuple, kwargs: dict):
        """Call a function on the meta device, and return its result, a tensor without values.

        PyTorch infers the output shapes of norms and of smooth resizing by hundreds of small
        operations. To avoid these, norms are not called, because their output has the shape of
        their input. Smooth resizing runs in the mode nearest, which gives the same shape.
        """
        if _plain(name) in _NORMS:
            return as_computed(args[0] if args else kwargs["input"])
        if (made := of_sequence(name, args)) is not None:
            return made
        args, kwargs = all_on_meta(args, kwargs)
        if _plain(name) == "interpolate":
            given = (
                dict(
                    zip(
                        (
                            "input",
                            "size",
                            "scale_factor",
                            "mode",
                            "align_corners",
                            "recompute_scale_factor",
                            "antialias",
                        ),
                        args,
                    )
                )
                | kwargs
            )
            if given.get("mode") in _SMOOTH:
                return function(**given | dict(mode="nearest", align_corners=None, antialias=False))
        result = function(*args, **kwargs)
        return widened(result, args, kwargs) if self._wide else result

    def _note(self, x: Tensor, value: Made, rebound: set[int]) -> None:
        known = self._known.get(id(x))
        if known is None or id(x) in rebound:
            if known is not None and isinstance(known.value, Kept):
                return  # checked in _look_for_changes
            self._know(x, value)

    def _look_for_changes(self, called: Called, changed: set[int], made: set[int]) -> None:
        """Mark all tensors that share memory with an overwritten tensor as unknown.

        A later call that takes a tensor marked as unknown is refused.

        Args:
            called: the call that overwrote tensors.
            changed: ids of the tensors that the call overwrote.
            made: ids of the tensors whose new value is recorded already. These tensors stay known.

        Raises:
            Hidden: the call changes a parameter or buffer that is not a norm's running statistic.
        """
        for memory in {
            _memory(self._known[key].tensor) for key in changed if key in self._known
        }.intersection(self._apart):
            self._check_apart(called, changed, memory)
        for key, known in self._sharing_with(changed):
            if known.tensor._version == known.version:
                if _memory(known.tensor) in self._apart:
                    known.value = None if isinstance(known.value, Made) else known.value
                continue
            known.version = known.tensor._version
            if isinstance(known.value, Kept):
                if not _updates_norm(called, known.value.name):
                    raise Hidden(
                        f"{called} changes {known.value.name} with each forward pass, as spectral "
                        f"norm does, but each window or tile is a separate pass: remove this "
                        f"change, or use weight_norm"
                    )
            elif key not in made:
                known.value = None

    def _sharing_with(self, changed: set[int]) -> list[tuple[int, _Known]]:
        """Return all recorded tensors that share memory with one of the tensors ``changed``.

        The result includes the tensors ``changed`` themselves.

        Args:
            changed: ids of tensors; ids of tensors that are not recorded are ignored.

        Returns:
            pairs (id, :class:`_Known`).
        """
        found: list[tuple[int, _Known]] = []
        for key in changed:
            if key in self._known:
                found += self._sharing[_memory(self._known[key].tensor)].items()
        return found

    def _check_apart(self, called: Called, changed: set[int], memory: int) -> None:
        """Raise an error if a call changed a tensor ``x`` through ``x.data``.

        Autograd does not see such a change.

        Args:
            called: the call, which the message names.
            changed: ids of the tensors that the call changed.
            memory: key of the storage that the tensors share (:func:`_memory`).

        Raises:
            Hidden: ``x`` is a parameter or buffer.
            CanNotCapture: ``x`` is another tensor.
        """
        there = self._sharing[memory]
        line = next(
            (
                line
                for key, line in self._apart[memory].items()
                if key in changed or there[key].tensor._version != there[key].version
            ),
            None,
        )
        if line is not None:
            kept = next(
                (known.value.name for known in there.values() if isinstance(known.value, Kept)),
                None,
            )
            raise (Hidden if kept else CanNotCapture)(
                f"{called} changes the data of {kept or 'a tensor'} ({line}) so that "
                f"autograd does not see it: {KEEP_NOTHING if kept else 'use clone()'}"
            )

    def _know(self, x: Tensor, value: Made | Kept) -> None:
        self._known[id(x)] = self._sharing.setdefault(_memory(x), {})[id(x)] = _Known(x, value)

    def value_of(self, x: Tensor, what: str) -> Made | Kept:
        """Return the reference to a tensor: to the call that made it, or to a parameter or buffer.

        Args:
            x: a tensor that a call takes, or the network's result.
            what: for error messages, the call that takes the tensor, or "the network's result".

        Raises:
            CanNotCapture: the tensor comes from no recorded call, is an attribute that is neither a
                parameter nor a buffer, or was overwritten through another view.
        """
        known = self._known.get(id(x))
        if known is None and (attribute := _attribute(self._model, x)) is not None:
            place, name = attribute
            raise CanNotCapture(
                f"{what} takes {name} of {place}, which is neither a parameter nor a buffer, so it "
                f"would not move with the network to other devices and dtypes: write "
                f"self.register_buffer({name!r}, ...)"
            )
        if known is None and not x.is_meta and not x.requires_grad and x.grad_fn is None:
            return self._constant(x)
        if known is None:
            raise CanNotCapture(
                f"{what} takes a tensor of {tuple(x.shape)} that is neither a parameter, a buffer "
                f"nor the result of a PyTorch function: if your own autograd.Function makes it, "
                f"write it with PyTorch's functions; if a list keeps it, use self.register_buffer"
            )
        if (
            isinstance(known.value, Made)
            and known.value != IMAGE
            and x.grad_fn is not None
            and not self.calls[known.value.call].graded
        ):
            raise CanNotCapture(
                f"{what} uses the result of {type(x.grad_fn).__name__.removesuffix('Backward')}, "
                f"your own autograd.Function, whose gradient cannot be followed: write it with "
                f"PyTorch's functions, "
                "as y + (z - y).detach() for a result z with the gradient of y"
            )
        if known.value is None:
            raise CanNotCapture(
                f"{what} reads a tensor that was overwritten in place through a view of it: "
                f"leave out the in-place operation"
            )
        return known.value

    def _constant(self, x: Tensor) -> Made:
        """Record a constant as a call without arguments; return the reference to this call.

        A constant is a tensor with values that no recorded call made, such as the result of
        ``torch.from_numpy``.
        """
        found = widened(x.detach().clone()) if self._wide else x.detach().clone()
        self.calls.append(
            Called(
                "tensor",
                partial(itself, found),
                (),
                {},
                (tuple(x.shape),),
                self.inside[-1] if self.inside else "",
                user_line(),
                True,
                (found.dtype,),
            )
        )
        self._know(x, Made(len(self.calls) - 1))
        return Made(len(self.calls) - 1)

    def _written(self, tree: Any, name: str) -> Any:
        """Return arguments in which references (:class:`Made`, :class:`Kept`) replace the tensors.

        Args:
            tree: arguments of a call: a tensor, a number, or a tuple, list or dict of these.
            name: name of the called function, for error messages.
        """
        if isinstance(tree, Tensor):
            return self.value_of(tree, f"{_plain(name)} in {self._where}")
        if isinstance(tree, (tuple, list)):
            return tuple(self._written(x, name) for x in tree)
        if isinstance(tree, dict):
            return {key: self._written(x, name) for key, x in tree.items()}
        return tree


def _attribute(model: nn.Module, x: Tensor) -> tuple[str, str] | None:
    """Return (module name, attribute name) of a tensor that is a plain attribute of a module.

    A plain attribute is neither a parameter nor a buffer. Return None if no module of ``model``
    has this tensor as one.
    """
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            if value is x:
                return place or "the model", name
    return None


def _memory(x: Tensor) -> int:
    """Return a key of a tensor's storage; a tensor and its views have the same key."""
    return x.untyped_storage()._cdata


_OF_MEMORY = {
    "_version": "which counts its changes in place, and so the steps of training",
    "data_ptr": "its address, which differs between ranks",
}
"""Attributes of a tensor that tell something other than its values, and what each one tells."""

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


def _name_of(function: Callable) -> str:
    """Return a function's name without ``torch.``, such as ``nn.functional.conv2d``."""
    if isinstance(function, torch._ops.OpOverload):  # TorchScript calls operators
        return function.overloadpacket.__name__
    return (resolve_name(function) or getattr(function, "__name__", str(function))).rpartition(
        "torch."
    )[2]


def is_in_place(name: str) -> bool:
    """Return True if a function works in place, judged by its name.

    The name decides, because some in-place functions, such as ``detach_``, do not change a tensor's
    version counter.
    """
    name = name.rpartition(".")[2]
    return (
        name.endswith("_")
        and not name.startswith("__")
        or name.startswith("__i")
        and name not in ("__invert__", "__index__", "__int__")
    )


def _plain(name: str) -> str:
    """Return the bare name of a function: conv2d for nn.functional.conv2d, add for Tensor.add_."""
    name = name.rpartition(".")[2]
    return name if name.startswith("__") else name.rstrip("_")


_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout")
_SMOOTH = ("linear", "bilinear", "bicubic", "trilinear")
EMPTY = {"empty", "new_empty", "empty_like"}
"""Functions that make an uninitialized tensor."""
_NORMS = ("batch_norm", "instance_norm", "group_norm", "layer_norm")


def _updates_norm(called: Called, name: str) -> bool:
    """Return True if a change of the buffer ``name`` by this call is a norm's usual update.

    Batch and instance norms may change any buffer. Every call may change the counter
    ``num_batches_tracked``.
    """
    return called.name in ("batch_norm", "instance_norm") or name.endswith("num_batches_tracked")


def changed(x: Tensor, index: Any, value: Any) -> Tensor:
    """Return a copy of ``x`` after ``x[index] = value``."""
    y = x.clone()
    y[index] = value
    return y


def itself(x: Tensor) -> Tensor:
    """Return ``x``.

    A trace holds only calls. So a tensor that no recorded call made is recorded as a call of
    ``partial(itself, tensor)``, which returns the tensor and takes no arguments.
    """
    return x


def _index_of(name: str, args: tuple, kwargs: dict) -> tuple | None:
    """Return (index,) if a call makes the view ``x[index]`` of its first argument ``x``; else None.

    For example, ``x.select(1, 0)`` has the index ``(slice(None), 0)``. The tuple is needed because
    an index may be None.

    Args:
        name: bare name of the function (:func:`_plain`).
        args, kwargs: arguments of the call.
    """
    if kwargs or not args or not isinstance(args[0], Tensor) or len(args) < 2:
        return None
    x, *more = args

    def along(dim, what):
        return (*(slice(None) for _ in range(dim % x.dim())), what)

    if name == "__getitem__":
        return (more[0],)
    if name == "select" and len(more) == 2:
        return (along(more[0], more[1]),)
    if name == "narrow" and len(more) == 3:
        return (along(more[0], slice(more[1], more[1] + more[2])),)
    return None


INSTEAD = (
    "use nn.Dropout, whose masks belong to pixels; for stochastic depth, multiply a layer's result "
    "by 0 or 1 for each image, and divide this mask, not the product, by keep: "
    "y * (x.new_empty(len(x), 1, 1, 1).bernoulli_(keep) / keep), as timm's DropPath does"
)
IN_ATTENTION = (
    "drops attention weights at random, which differ between ranks and between parts of an image: "
    "set its dropout to 0"
    " (nn.TransformerEncoderLayer and nn.TransformerDecoderLayer have 0.1), and use nn.Dropout "
    "on its result"
)
DRAWS = f"draws random numbers, which differ between ranks and between parts of an image: {INSTEAD}"
DRAWS_WHOLE = (
    "draws random numbers, which differ between ranks: use nn.Dropout, nn.Dropout1d, nn.Dropout2d "
    "or nn.Dropout3d, whose masks belong to pixels and channels; in networks that are not followed "
    "layer by layer no other random numbers are supported, so stochastic depth and F.dropout must "
    "be switched off"
)
BY_VALUE = (
    "a part of an image does not have the values of the whole image, so code must not depend on "
    "them; compute with tensors alone, for example by torch.where or masks"
)
EVALUATED_BEHIND = (
    "is called in evaluation after a call in training and reads the running statistics that this "
    "call updates, but norms update them once per step, not with each pass: make the call in "
    "evaluation first, or use a separate layer"
)
KEEP_NOTHING = (
    "state that a pass leaves behind differs between ranks and with the number of passes; compute "
    "it in the training loop, or use a norm's running statistics"
)
