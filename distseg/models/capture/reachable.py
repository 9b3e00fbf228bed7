"""Search for values outside a module that the code of its forward pass reads.

These are globals, attributes of classes and files, and closure variables. The code is read, not
run: the names in its byte code are looked up where Python would look them up, and in every class
and file that the search reaches. The search also follows the attributes of objects and the
functions of their classes.
"""

from __future__ import annotations

import collections
import dis
import functools
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from distseg.models.passes import is_library, is_users

ITSELF = "itself"
"""Name by which a function's :class:`Home` holds the function with its closure and defaults."""
_FEW = 100  # the items of a container with more items are not followed
_MANY = 100_000  # largest number of values that are followed
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    Tensor,
    np.ndarray,
    np.generic,
)
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_MADE = {
    "__init__",
    "__new__",
    "__init_subclass__",
    "__del__",
    "__reduce__",
    "__reduce_ex__",
    "__deepcopy__",
    "__copy__",
    "__getstate__",
    "__setstate__",
}
"""Special methods that a pass does not call on existing modules."""
_FIXED = (type, types.ModuleType, types.FunctionType, staticmethod, classmethod, property)
_OURS = {"torch", "distseg", "builtins", "numpy", "abc", "typing"}


@dataclass
class Home:
    """Class, function or source file outside a model from which its forward pass reads values.

    Attributes:
        owner: name of the class, function or file in messages.
        holder: mapping from names to values, such as the globals of the file.
        names: keys of ``holder`` that the code reads and whose values may change. Functions,
            classes and Python modules are left out.
        which: number that distinguishes classes or files of the same name.
    """

    owner: str
    holder: Mapping[str, Any]
    names: dict[str, None] = field(default_factory=dict)
    which: int = 0


def homes_of(model: nn.Module) -> list[Home]:
    """Return the classes, functions and source files outside a model that its forward pass uses.

    Each :class:`Home` lists those of its names whose values may change, such as a global counter.
    """
    search = _Search()
    search.follow(model.modules())
    search.run()
    return list(search.homes.values())


def fields_of(x: Any) -> dict[str, Any]:
    """Return an object's own attributes by name, from ``__dict__`` and ``__slots__``."""
    found = dict(getattr(x, "__dict__", None) or {})
    return found | {name: getattr(x, name) for name in _slot_names(type(x)) if hasattr(x, name)}


@functools.cache
def _slot_names(kind: type) -> tuple[str, ...]:
    listed = (
        (slots,) if isinstance(slots, str) else tuple(slots)
        for slots in (vars(base).get("__slots__", ()) for base in kind.__mro__)
    )
    return tuple(
        name for names in listed for name in names if name not in ("__dict__", "__weakref__")
    )


class _Search:
    """Search for all Python objects that the code of some modules can reach.

    The search follows attributes, items of containers, closures and globals. The object of an
    expression such as ``a.b`` is not known, so each name in the code is looked up in every class
    and Python module found so far (``_spaces``). The results are in ``homes``.
    """

    def __init__(self):
        self.homes: dict[int, Home] = {}
        self._queue: collections.deque[Any] = collections.deque()
        # The values are kept alive so that no other gets the same id.
        self._done: dict[int, Any] = {}
        self._names: dict[str, None] = {}
        self._spaces: list[type | types.ModuleType] = []
        self._noted: set[tuple[int, str]] = set()

    def follow(self, values: Iterable[Any]) -> None:
        self._queue.extend(value for value in values if not isinstance(value, _PLAIN))

    def run(self) -> None:
        while self._queue:
            while self._queue:
                self._look(self._queue.popleft())
            for space in self._spaces:
                self._in_class(space) if isinstance(space, type) else self._in_module(space)

    def _look(self, value: Any) -> None:
        """Visit one object: queue the objects to which it refers, such as a function's globals.

        Classes and Python modules are added to ``_spaces``, user functions to ``homes``. An object
        is visited once. Empty containers are skipped.
        """
        empty = (
            isinstance(value, _CONTAINERS)
            and not value
            and type(value).__module__ in ("builtins", "collections")
        )
        if empty or id(value) in self._done or len(self._done) > _MANY:
            return
        self._done[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._in_function(value)
        elif isinstance(value, (type, types.ModuleType)):
            self._spaces.append(value)
            self.follow([type(value)] if type(value) is not type else [])
        elif isinstance(value, (staticmethod, classmethod)):
            self.follow([value.__func__])
        elif isinstance(value, types.MethodType):
            self.follow([value.__func__, value.__self__])
        elif isinstance(value, types.BuiltinFunctionType):
            self.follow([value.__self__])
        elif isinstance(value, property):
            self.follow([value.fget, value.fset])
        elif isinstance(value, functools.partial):
            self.follow([value.func, *value.args, *value.keywords.values()])
        else:
            self._in_object(value)

    def _in_object(self, value: Any) -> None:
        """Queue an object's class and attributes, and the items of a container, for the search.

        Containers of more than 100 items are left out. Of the objects of libraries, only modules
        (``nn.Module``) have their class and attributes queued.
        """
        kind = type(value)
        if isinstance(value, _CONTAINERS) and len(value) <= _FEW:
            self.follow(value.values() if isinstance(value, dict) else list(value))
        if (
            isinstance(value, nn.Module)
            or kind.__module__ == "types"
            or not _is_library_class(kind)
        ):
            self.follow([kind, *fields_of(value).values()])
        elif isinstance(value, functools._lru_cache_wrapper):
            self.follow([value.__wrapped__])

    def _in_function(self, function: types.FunctionType) -> None:
        """Queue the objects that a user's function refers to; record the globals that it reads."""
        if not is_users(function.__code__) or is_library(function.__code__.co_filename):
            self.follow([getattr(function, "__wrapped__", None)])
            return
        self.homes[id(function)] = Home(
            f"function {function.__qualname__}", {ITSELF: function}, {ITSELF: None}
        )
        self.follow(
            cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()
        )
        self.follow(
            [
                *(function.__defaults__ or ()),
                *(function.__kwdefaults__ or {}).values(),
                *vars(function).values(),
            ]
        )
        self.follow(_imported(function))
        file = function.__code__.co_filename.rpartition("/")[2]
        for name in dict.fromkeys(
            name for code in _codes(function.__code__) for name in code.co_names
        ):
            self._names[name] = None
            if name in function.__globals__:
                self._note(file, function.__globals__, name, function.__globals__[name])

    def _in_class(self, kind: type) -> None:
        """Queue those attributes of a class and its bases that user code may read.

        These are ``forward``, special methods, and values whose name occurs in code found so far.
        Names of values that may change are recorded in ``homes``.
        """
        for base in kind.__mro__:
            if _is_library_class(base):
                self._in_library(f"class {base.__name__}", base)
                continue
            for name, value in list(vars(base).items()):
                if name in self._names or name == "forward" or _is_operator(name, value):
                    if name not in _MADE or not issubclass(kind, nn.Module):
                        self._note(f"class {base.__name__}", base, name, value)

    def _in_module(self, module: types.ModuleType) -> None:
        if not _is_plain_module(module):
            self._in_library(module.__name__, module)
            return
        for name in self._names.keys() & vars(module).keys():
            self._note(module.__name__, vars(module), name, vars(module)[name])

    def _in_library(self, owner: str, holder: type | types.ModuleType) -> None:
        """Record the numbers, strings and containers of a library that user code mentions by name.

        Such values are recorded, because a forward pass of the user's network may change them. The
        code of the library itself is not searched.

        Args:
            owner: name of ``holder`` in messages.
            holder: class or module of the library.
        """
        for name in self._names.keys() & vars(holder).keys():
            if isinstance(vars(holder)[name], _SET):
                self._note(
                    owner,
                    holder if isinstance(holder, type) else vars(holder),
                    name,
                    vars(holder)[name],
                )

    def _note(self, owner: str, holder: Any, name: str, value: Any) -> None:
        """Queue a value for the search, and record its name in ``homes``.

        The name of a function, property, class or Python module is not recorded.

        Args:
            owner: name of ``holder`` in messages.
            holder: the class, or the dict of a Python module, that has the value.
            name: the value's name in ``holder``.
        """
        if (id(holder), name) in self._noted:
            return
        self._noted.add((id(holder), name))
        self.follow([value])
        if not isinstance(value, _FIXED):
            mapping = holder if isinstance(holder, dict) else vars(holder)
            self.homes.setdefault(id(holder), Home(owner, mapping, which=id(holder))).names[
                name
            ] = None


_SET = (bool, int, float, str, *_CONTAINERS)


def _is_operator(name: str, value: Any) -> bool:
    return (
        name.startswith("__")
        and name.endswith("__")
        and isinstance(value, (types.FunctionType, staticmethod, classmethod, property))
    )


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and all code objects nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _imported(function: types.FunctionType) -> Iterator[types.ModuleType]:
    """Yield the Python modules that a function imports when it is called, if they are loaded.

    These are the modules in import statements in the function. In code that calls ``__import__`` or
    ``import_module``, they are also the modules whose names are string constants.
    """
    for code in _codes(function.__code__):
        if _IMPORT in code.co_code[::2]:
            steps = list(dis.get_instructions(code))
            for n, step in enumerate(steps):
                if step.opcode == _IMPORT:
                    package = function.__globals__.get("__package__")
                    name = _imported_name(step.argval, steps[n - 2].argval, package)
                    yield from _there(name, name.partition(".")[0])
        if {"__import__", "import_module"} & {*code.co_names}:
            yield from _there(
                *(constant for constant in code.co_consts if isinstance(constant, str))
            )


def _imported_name(name: str, level: int, package: str | None) -> str:
    """Return the full name of an imported module; empty if it cannot be found out.

    Args:
        name: the module's name in the import statement.
        level: the number of dots before the name; 0 for an absolute import.
        package: the package of the importing code; None if it is unknown.
    """
    if not level:
        return name
    return importlib.util.resolve_name("." * level + name, package) if package else ""


def _there(*names: str) -> Iterator[types.ModuleType]:
    return (
        sys.modules[name] for name in names if isinstance(sys.modules.get(name), types.ModuleType)
    )


_IMPORT = dis.opmap["IMPORT_NAME"]


def _is_library_class(kind: type) -> bool:
    root = str(kind.__module__).partition(".")[0]
    return root in _OURS or root in sys.stdlib_module_names


def _is_plain_module(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return bool(file) and module.__name__.partition(".")[0] not in _OURS and not is_library(file)
