"""Take snapshots of a module's state, to find out whether two passes leave the same state.

A snapshot has a *slot* for each attribute of each module, each parameter and buffer, and each
global number or container that the modules' code reads (:mod:`distseg.models.capture.reachable`).
For each slot it has a *print*, which is equal for equal values.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import hashlib
import random
import sys
import threading
import types
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from distseg.models.capture.reachable import ITSELF, fields_of, homes_of

_DEPTH = 12  # deepest nesting of containers that is followed
_MANY = 200_000  # largest number of values that are followed in one slot
# Largest number of elements for which a tensor's print is a digest of all numbers.
_SMALL = 10_000
_PLAIN = {type(None), bool, int, str}
_EMPTY = {dict, list, tuple, set, collections.OrderedDict}
_ATOMS = (
    type(None),
    bool,
    int,
    str,
    bytes,
    range,
    slice,
    type,
    types.ModuleType,
    types.CodeType,
    torch.dtype,
    torch.device,
    torch.layout,
    np.dtype,
    enum.Enum,
)
_FUNCTIONS = (types.FunctionType, types.LambdaType)
# Atoms whose subclasses can have attributes.
_SUBCLASSED = (int, str, bytes, float, complex, enum.Enum)
# Types without further attributes.
_BARE = (
    *_PLAIN,
    *_EMPTY,
    float,
    complex,
    bytes,
    np.ndarray,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
)
_FOREIGN = {"torch", "threading", "_thread", "logging", "weakref", "multiprocessing"}
# Types of the modules in _FOREIGN that are followed nevertheless.
_OPEN = (nn.Module, threading.local, torch.quasirandom.SobolEngine)
# Larger buffers, in bytes, are compared by id.
_LARGE = 10_000_000
# Types whose subclasses may add attributes.
_VALUES = (
    *_SUBCLASSED,
    Mapping,
    list,
    tuple,
    set,
    frozenset,
    collections.deque,
    np.ndarray,
    Tensor,
)
GENERATORS = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    torch.Generator,
)


class TensorPrint(NamedTuple):
    """Fingerprint (*print*) of a tensor, which shows whether a forward pass has changed the tensor.

    Attributes:
        shape, dtype, requires_grad: the tensor's attributes of these names.
        content: a digest of the tensor's numbers. For a large tensor it is the sum of its bytes,
            its id and its version; for a tensor on the meta device its id and version. Id and
            version are None if copies of a module are compared.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    content: Hashable


@dataclass(frozen=True)
class Slot:
    """One value of a module's state: an attribute, parameter or buffer, or a global of its code.

    Attributes:
        owner: name, in messages, of the module, class, function or file that holds the value.
        holder: the mapping in which ``name`` is looked up.
        name: the value's key in ``holder``, such as the name of the attribute.
        field: the module's mapping: ``__dict__``, ``_parameters``, ``_buffers`` or ``_modules``;
            None if the owner is not a module.
        which: number that distinguishes classes, functions or files of the same name.
    """

    owner: str
    holder: Mapping[str, Any]
    name: str
    field: str | None = None
    which: int = 0

    @property
    def key(self) -> Hashable:
        """Key of the slot in snapshots. A copy of the module has a slot with the same key."""
        return (self.owner, self.name, self.which) if self.which else (self.owner, self.name)

    @property
    def tensor(self) -> bool:
        """True if the slot holds a parameter or buffer."""
        return self.field in ("_parameters", "_buffers")

    def slot_in(self, copied: nn.Module) -> Slot:
        """Return the slot of the same name in a copy of the model.

        A slot outside modules, such as a global, is not copied, so return the slot itself.
        """
        if self.field is None:
            return self
        module = copied.get_submodule("" if self.owner == WHOLE else self.owner)
        return Slot(
            self.owner,
            _Children(module) if self.field == "_modules" else getattr(module, self.field),
            self.name,
            self.field,
        )

    def value(self) -> Any:
        """Return the value that the slot holds now; a marker for "absent" if there is none."""
        return self.holder.get(self.name, _ABSENT)

    def __str__(self) -> str:
        return (
            f"a variable that {self.owner} holds"
            if self.name == ITSELF
            else f"{self.name} of {self.owner}"
        )


_ABSENT = type("absent", (), {})
WHOLE = "the model"
"""Name of the outermost module in messages."""


@dataclass(frozen=True)
class Picture:
    """Snapshot of a module's state: a fingerprint of each attribute, parameter, buffer and global.

    Attributes:
        slots: a :class:`Slot` for each of these values, by :attr:`Slot.key`.
        prints: the fingerprint (*print*) of each value, by the same keys.
        values: the values, kept alive so that no new object gets the same id.
    """

    slots: dict[Hashable, Slot]
    prints: dict[Hashable, Hashable]
    values: list[Any]

    def changed(self, later: Picture) -> list[Slot]:
        """Return the slots whose values have changed in a later snapshot of the same module."""
        keys = dict.fromkeys([*self.prints, *later.prints])
        differ = [
            key for key in keys if self.prints.get(key, _ABSENT) != later.prints.get(key, _ABSENT)
        ]
        return [later.slots.get(key) or self.slots[key] for key in differ]

    def without(self, keys: Collection[Hashable]) -> Picture:
        """Return a copy of the snapshot without the slots whose :attr:`Slot.key` is in ``keys``."""
        left = {key: slot for key, slot in self.slots.items() if key not in keys}
        return Picture(left, {key: self.prints[key] for key in left}, self.values)


def picture_of(model: nn.Module, loose: bool = False) -> Picture:
    """Return a snapshot of a module's state.

    Args:
        loose: True if the snapshot will be compared with that of another copy of the module. It
            then ignores the ids of objects. Of tensors on the meta device it holds only shape,
            dtype and ``requires_grad``.
    """
    slots = {slot.key: slot for slot in slots_of(model)}
    values, known = [slot.value() for slot in slots.values()], frozenset(map(id, model.modules()))
    prints = {key: print_of(value, loose, known) for key, value in zip(slots, values)}
    return Picture(slots, prints, values)


def slots_of(model: nn.Module) -> list[Slot]:
    """Return the slots of a model: the places where a forward pass may keep state.

    These are the attributes, parameters and buffers of the model and its submodules, and the
    globals, class attributes and functions that their code reads.
    """
    found = []
    for name, module in model.named_modules():
        owner = name or WHOLE
        for attribute, value in vars(module).items():
            if attribute == "_modules":
                found.append(Slot(owner, _Children(module), attribute, attribute))
            elif attribute in ("_parameters", "_buffers"):
                found += [Slot(owner, value, own, attribute) for own in value]
            else:
                found.append(Slot(owner, vars(module), attribute, "__dict__"))
    return found + [
        Slot(home.owner, home.holder, name, None, 0 if name == ITSELF else home.which)
        for home in homes_of(model)
        for name in home.names
    ]


class _Children(Mapping):
    """Mapping with a single entry, which holds the names and ids of a module's children.

    It lets a :class:`Slot` hold the children as one value, which changes if a child is replaced.
    """

    def __init__(self, module: nn.Module):
        self._module = module

    def __getitem__(self, name: str) -> tuple:
        return tuple((child, _Itself(module)) for child, module in self._module._modules.items())

    def __iter__(self):
        return iter(("_modules",))

    def __len__(self) -> int:
        return 1


class _Itself(NamedTuple):
    """Wrapper of an object whose fingerprint is to hold the object's id instead of its content."""

    object: Any


def print_of(value: Any, loose: bool = False, known: frozenset[int] = frozenset()) -> Hashable:
    """Return the fingerprint (*print*) of a value; equal values have equal prints.

    Comparing prints shows if a pass has changed a value. A print covers numbers, tensors,
    containers, generators and plain objects.

    Args:
        loose: True to leave out the ids of objects (:func:`picture_of`).
        known: ids of modules that have slots of their own; their contents are left out.
    """
    return Printer(loose, known)(value, _DEPTH)


class Printer:
    """Callable that computes the fingerprint (*print*) of a Python object from its content.

    Call it with the object and the depth to which nested containers and objects are followed.

    Args:
        loose: True to leave out the ids of objects.
        known: ids of modules whose contents are left out.
    """

    def __init__(self, loose: bool, known: frozenset[int]):
        self.loose, self.known, self.seen, self.left = loose, known, set(), _MANY

    def __call__(self, x: Any, depth: int) -> Hashable:
        kind = type(x)
        if kind in _PLAIN or kind in _EMPTY and not x:
            return kind, kind in _PLAIN and x
        if isinstance(x, _ATOMS) and (kind in _BARE or not isinstance(x, _SUBCLASSED)):
            return kind.__name__, x if isinstance(x, Hashable) else repr(x)
        if kind in (float, complex):
            return kind.__name__, repr(x)  # so that NaN equals NaN
        self.left -= 1
        if id(x) in self.seen or depth <= 0 or self.left <= 0:
            return "seen", type(x).__name__
        self.seen.add(id(x))

        def again(part):
            return self(part, depth - 1)

        try:
            inside = self._tensor(x) if isinstance(x, Tensor) else self._inside(x, again)
            return (
                kind.__name__,
                inside,
                again(fields)
                if kind not in _BARE and isinstance(x, _VALUES) and (fields := fields_of(x))
                else None,
            )
        finally:
            self.seen.discard(id(x))

    def _inside(self, x: Any, again: Callable[[Any], Hashable]) -> Hashable:
        """Return a fingerprint of an object's content; ``again`` computes that of each part."""
        if isinstance(x, _SUBCLASSED):
            if isinstance(x, enum.Enum):
                return x.name
            return x.real if isinstance(x, int) else repr(x)
        if isinstance(x, (np.ndarray, np.generic)):
            return (
                x.shape,
                str(x.dtype),
                again(x.tolist()) if x.dtype.hasobject else _digest(x.tobytes()),
            )
        if isinstance(x, GENERATORS):
            return _state_of(x, again)
        if isinstance(x, _Itself):
            return self._which(x.object)
        if isinstance(x, Mapping):
            return tuple((again(key), again(part)) for key, part in x.items())
        if isinstance(x, (list, tuple, collections.deque)):
            return tuple(map(again, x))
        if isinstance(x, (set, frozenset)):
            return frozenset(map(again, x))
        if isinstance(x, _FUNCTIONS):
            return (
                x.__code__,
                again(_cells(x)),
                again(x.__defaults__),
                again(x.__kwdefaults__),
                again(vars(x)),
            )
        if isinstance(x, types.MethodType):
            return again(x.__func__), again(x.__self__)
        if isinstance(x, types.BuiltinFunctionType):
            return x.__qualname__, again(x.__self__)
        if isinstance(x, functools.partial):
            return again(x.func), again(x.args), again(x.keywords)
        if isinstance(x, types.GeneratorType):
            return self._which(x), x.gi_frame and (
                x.gi_frame.f_lasti,
                again(dict(x.gi_frame.f_locals)),
            )
        return self._object(x, again)

    def _object(self, x: Any, again: Callable[[Any], Hashable]) -> Hashable:
        """Return a fingerprint of an object whose class :meth:`_inside` does not handle itself.

        The fingerprint is computed from the attributes of the object or, for a class of the
        standard library, from its content. If it has neither, the fingerprint is its id
        (:meth:`_which`), as for modules in ``known`` and most objects of PyTorch and ``logging``.

        Args:
            again: function that returns the fingerprint of a part of ``x``.
        """
        root = type(x).__module__.partition(".")[0]
        if id(x) in self.known or root in _FOREIGN and not isinstance(x, _OPEN):
            return self._which(x)
        if isinstance(x, contextvars.ContextVar):
            return again(x.get(None))
        if fields := fields_of(x):
            return again(fields)
        content = _content_of(x) if root in sys.stdlib_module_names else None
        return self._which(x) if content is None else again(content)

    def _which(self, x: Any) -> Hashable:
        """Return an object's id as its fingerprint, or the name of its type if ``loose``."""
        return type(x).__name__ if self.loose else id(x)

    def _tensor(self, x: Tensor) -> TensorPrint:
        which = None if self.loose else (id(x), x._version)
        if x.is_meta:
            content = which
        elif x.numel() <= _SMALL:
            content = _digest(_bytes_of(x))
        else:
            content = _sum_of(x), which
        return TensorPrint(tuple(x.shape), x.dtype, x.requires_grad, content)


def _content_of(x: Any) -> Any:
    """Return data that shows if an object of the standard library has changed; None without any.

    Four kinds of data are tried, and the first that the object offers is returned: its memory, its
    pickled state, the number of items that an iterator has left, the position in a file.
    """
    for ask in (_memory_of, _reduced, _remaining, _position):
        # An object may raise anything if it cannot answer.
        with suppress(Exception):
            return ask(x)
    return None


def _memory_of(x: Any) -> bytes | None:
    memory = memoryview(x)
    return memory.tobytes() if memory.nbytes <= _LARGE else None


def _reduced(x: Any) -> tuple:
    return x.__reduce_ex__(2)[1:]


def _remaining(x: Any) -> int:
    return x.__length_hint__()


def _position(x: Any) -> int:
    return x.tell()


def _cells(function: types.FunctionType) -> dict[str, Any]:
    """Return the values of a function's closure variables by name; unset ones are left out."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or ())
    return {name: cell.cell_contents for name, cell in pairs if cell != types.CellType()}


def _state_of(generator: Any, again: Callable[[Any], Hashable]) -> Hashable:
    """Return the state of a random generator in a form that can be compared.

    Args:
        generator: a generator of PyTorch, NumPy or Python.
        again: function that returns the fingerprint of an array or dict in the state.
    """
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state())
    if isinstance(generator, random.SystemRandom):
        return "system"
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return again(generator.get_state())
    return again(getattr(generator, "bit_generator", generator).state)


def _bytes_of(x: Tensor) -> bytes:
    return _octets(x).numpy().tobytes()


def _sum_of(x: Tensor) -> int:
    """Return the sum of a tensor's bytes, read as 64-bit integers.

    Up to 7 bytes at the end, which are less than one integer, are left out.
    """
    octets = _octets(x)
    return int(octets[: len(octets) // 8 * 8].view(torch.int64).sum())


def _octets(x: Tensor) -> Tensor:
    plain = x.detach().to("cpu").contiguous().reshape(-1)
    return plain.view(torch.uint8) if plain.numel() else plain.to(torch.uint8)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
