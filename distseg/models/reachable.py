"""What the code of a module's forward pass reads outside the module: globals, attributes of its classes, variables of functions around.

Code is read, not run: the names in its byte code are looked up where Python would look them up.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass, field
from typing import Any, Iterator, Mapping

from torch import nn

from distseg.models.passes import is_library, is_users

ITSELF = "itself"
"""The name under which a function is found in its own home: with its closure, its defaults and its attributes."""
_FEW = 100  # parts of a container in which functions are looked for
_BEGINS = ("forward", "__call__", "__getattr__", "__setattr__")


@dataclass
class Home:
    """A mapping in which code finds values by name.

    Attributes:
        owner: the class, function or file, as messages have it.
        names: of values that may change; not of functions, classes and modules.
    """

    owner: str
    holder: Mapping[str, Any]
    names: dict[str, None] = field(default_factory=dict)


def homes_of(model: nn.Module) -> list[Home]:
    """Return the mappings outside a model's modules that the code of their forward passes reads, with the names it reads there."""
    search = _Search()
    for kind in dict.fromkeys(map(type, model.modules())):
        search.in_class(kind, _BEGINS)
    for module in model.modules():
        for value in vars(module).values():
            for function in _functions_in(value):
                search.in_function(function, type(module))
    return list(search.homes.values())


class _Search:
    def __init__(self):
        self.homes: dict[int, Home] = {}
        self._done: set[tuple[int, int]] = set()

    def in_class(self, kind: type, names: tuple[str, ...]) -> None:
        """Look up names in a class and what it comes from."""
        for base in kind.__mro__:
            if not _is_ours(base.__module__):
                for name in names:
                    if name in vars(base):
                        self._note(f"class {base.__name__}", base, name, vars(base)[name], kind)

    def _note(self, owner: str, holder: Any, name: str, value: Any, kind: type | None) -> None:
        """Go on in functions; keep the names of other values."""
        for function in _functions_in(value):
            self.in_function(function, kind)
        if isinstance(value, (type, types.ModuleType, types.FunctionType, staticmethod, classmethod, property)):
            return
        mapping = holder if isinstance(holder, dict) else vars(holder)
        self.homes.setdefault(id(holder), Home(owner, mapping)).names[name] = None

    def in_function(self, function: types.FunctionType, kind: type | None) -> None:
        if (id(function), id(kind)) in self._done or not is_users(function.__code__) or is_library(function.__code__.co_filename):
            return
        self._done.add((id(function), id(kind)))
        self.homes.setdefault(id(function), Home(f"function {function.__qualname__}", {ITSELF: function}, {ITSELF: None}))
        for cell in function.__closure__ or ():
            if cell != types.CellType():
                for inner in _functions_in(cell.cell_contents):
                    self.in_function(inner, kind)
        names = tuple(dict.fromkeys(_names(function.__code__)))
        if kind is not None:
            self.in_class(kind, names)
        file = function.__code__.co_filename.rpartition("/")[2]
        for name in names:
            if name in function.__globals__:
                self._in_global(file, function.__globals__, name, names)

    def _in_global(self, file: str, holder: dict, name: str, names: tuple[str, ...]) -> None:
        value = holder[name]
        if isinstance(value, type):
            if not issubclass(value, nn.Module):  # modules of the model are looked at by themselves
                self.in_class(value, (*names, *_BEGINS))
        elif isinstance(value, types.ModuleType):
            if _is_plain_module(value):
                for inner in names:
                    if inner in vars(value):
                        self._note(value.__name__, vars(value), inner, vars(value)[inner], None)
        else:
            self._note(file, holder, name, value, None)


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions that a value of a class or module stands for, or holds, as a dict of hooks does."""
    if isinstance(value, types.FunctionType):
        yield value
        yield from _functions_in(getattr(value, "__wrapped__", None))
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        yield from _functions_in((value.fget, value.fset))
    elif isinstance(value, functools.partial):
        yield from _functions_in((value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, (dict, list, tuple)) and 0 < len(value) <= _FEW:
        for part in value.values() if isinstance(value, dict) else value:
            if callable(part) and not isinstance(part, type):
                yield from _functions_in(part)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code, and code inside it, looks up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "distseg", "builtins", "numpy", "abc", "typing")


def _is_plain_module(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return bool(file) and not _is_ours(module.__name__) and not is_library(file)
