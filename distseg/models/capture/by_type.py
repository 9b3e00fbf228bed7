"""Search for numbers in user code that depend on a tensor's type.

An example is ``torch.finfo(x.dtype).eps``. The search compares traces (the recorded calls of a
forward pass) in several types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from distseg.models.capture.trace import Called, CanNotCapture, Trace
from distseg.models.layers import ByType

WIDE = torch.float64
"""Type of the traces from which networks are made."""
_CASTS = {"to", "type", "float", "double"}

Numbers = dict[int, tuple[tuple, dict]]
"""Arguments (args, kwargs) of calls, by the index of the call in the trace.

In them, a :class:`ByType` stands for each number that depends on a tensor's type.
"""


def numbers_by_type(traces: Mapping[torch.dtype, Trace]) -> Numbers:
    """Find, in the arguments of recorded calls, numbers that depend on the dtype of the images.

    An example of such a number is ``torch.finfo(x.dtype).eps``.

    Args:
        traces: for each dtype, a trace: the recorded calls of a forward pass. All traces have
            images of the same size. One of the dtypes must be float64 (:data:`WIDE`).

    Returns:
        a dict from the index of a call in the trace to its (args, kwargs), in which a
            :class:`ByType` replaces each number that depends on the dtype. Calls without such a
            number are left out.

    Raises:
        CanNotCapture: the passes make different calls; the message names the first of these calls.
    """
    found: Numbers = {}
    for number, calls in enumerate(zip_longest(*(trace.calls for trace in traces.values()))):
        of_types = dict(zip(traces, calls))
        call = of_types[WIDE] or next(filter(None, calls))
        if None in calls:
            raise CanNotCapture(
                f"{call} is called for one dtype only: call the same functions whatever dtype a "
                f"tensor has"
            )
        if other := next((c for c in calls if not _same_function(c, call)), None):
            raise CanNotCapture(
                f"{call} is replaced by {other} for another dtype: call the same functions "
                f"whatever dtype a tensor has"
            )
        merged = _merged({dtype: (c.args, c.kwargs) for dtype, c in of_types.items()})
        if merged != (call.args, call.kwargs):
            found[number] = merged
    for dtype, trace in traces.items():
        if trace.result != traces[WIDE].result:
            raise CanNotCapture(
                f"the network returns the result of {_returned(traces[WIDE])} for images of "
                f"{WIDE}, but that of {_returned(trace)} for images of {dtype}: return the result "
                "of the same call for every dtype"
            )
    return found


def _returned(trace: Trace) -> str:
    """Return the name of the call whose result the network returns, for messages."""
    return str(trace.calls[trace.result.call]) if trace.result.call >= 0 else "no call"


def _same_function(a: Called, b: Called) -> bool:
    return a.name == b.name or {a.name, b.name} <= _CASTS


def _merged(each: Mapping[torch.dtype, Any]) -> Any:
    """Return an argument in which :class:`ByType` replaces each number that depends on the dtype.

    Args:
        each: by dtype, the argument in the trace of this dtype: nested tuples and dicts, or a
            single object.
    """
    wide = each[WIDE]
    if isinstance(wide, tuple) and all(
        isinstance(x, tuple) and len(x) == len(wide) for x in each.values()
    ):
        return tuple(_merged({dtype: x[n] for dtype, x in each.items()}) for n in range(len(wide)))
    if isinstance(wide, dict) and all(
        isinstance(x, dict) and x.keys() == wide.keys() for x in each.values()
    ):
        return {key: _merged({dtype: x[key] for dtype, x in each.items()}) for key in wide}
    numbers = all(isinstance(x, (int, float)) for x in each.values())
    return (
        ByType(tuple(each.items())) if numbers and any(x != wide for x in each.values()) else wide
    )


def with_numbers(trace: Trace, numbers: Numbers) -> Trace:
    """Return ``trace`` with a :class:`ByType` in place of each number that depends on the dtype.

    Args:
        trace: a trace in float64 (:data:`WIDE`), of images of any size.
        numbers: the result of :func:`numbers_by_type`: for each call with such numbers, its
            arguments.

    Raises:
        CanNotCapture: a number depends on both the dtype and the image's size.
    """
    if not numbers:
        return trace
    calls = list(trace.calls)
    for number, typed in numbers.items():
        if number < len(calls):
            call = calls[number]
            args, kwargs = _put(call, (call.args, call.kwargs), typed)
            calls[number] = replace(call, args=args, kwargs=kwargs)
    return replace(trace, calls=calls)


def _put(call: Called, tree: Any, typed: Any) -> Any:
    """Return the argument ``tree`` with numbers replaced by the :class:`ByType` in ``typed``.

    Args:
        call: the call, for messages.
        tree: the argument in a trace in float64: a value, or nested tuples and dicts.
        typed: the same argument as :func:`_merged` returns it.

    Raises:
        CanNotCapture: a number depends on both the dtype and the image's size.
    """
    if isinstance(typed, ByType):
        if tree != typed.number(WIDE):
            raise CanNotCapture(
                f"{call} takes a number that depends on both the dtype of a tensor and the image's "
                f"size: use a fixed number, such as 1e-6 instead of torch.finfo(x.dtype).eps"
            )
        return typed
    if isinstance(tree, tuple) and isinstance(typed, tuple) and len(tree) == len(typed):
        return tuple(_put(call, a, b) for a, b in zip(tree, typed))
    if isinstance(tree, dict) and isinstance(typed, dict):
        return {key: _put(call, x, typed.get(key)) for key, x in tree.items()}
    return tree
