"""Search for tensors that user code computes from the image's size and parameters alone.

An example is a map of coordinates. For such a tensor, a *plan*
(:class:`distseg.models.capture.positions.Plan`) lists the recorded calls that compute it. A layer
:class:`distseg.models.capture.positions.Positions` of the captured network repeats these calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distseg.models.axes import Axis, places_of
from distseg.models.capture.constants import FILLS
from distseg.models.capture.positions import LIKE, MOVES, Labels, Number, Plan, Positions
from distseg.models.capture.trace import EMPTY, IMAGE, Called, Kept, Made, found_in
from distseg.models.capture.values import Sizes, Value
from distseg.models.pointwise import POINTWISE_FUNCTIONS

if TYPE_CHECKING:
    from distseg.models.capture.reader import Reader

RANDOM = {
    "rand",
    "randn",
    "rand_like",
    "randn_like",
    "bernoulli",
    "normal",
    "uniform",
    "randint",
    "randperm",
    "multinomial",
    "rrelu",
    "alpha_dropout",
    "gumbel_softmax",
}
_UNKNOWN = RANDOM | EMPTY | {"dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"}
_CELLWISE = {
    "add",
    "mul",
    "multiply",
    "div",
    "true_divide",
    "divide",
    "contiguous",
    "clone",
    "__pow__",
    *MOVES,
} - {"to", "type_as"}
_TURNING = {"permute", "transpose", "unsqueeze", "movedim", "moveaxis", "swapaxes", "to", "type_as"}
_SHAPING = FILLS | {"expand", "repeat", "tile", "view", "reshape", "broadcast_to", "unflatten"}
_JOINING = {"cat", "concat", "concatenate", "stack"}


def plan_of(reader: Reader, x: Made, sizes: Sequence[tuple[int, ...]]) -> Plan | None:
    """Return the recorded calls that compute a tensor from the image's size alone, as a plan.

    An example is a map of coordinates. The tensor may also depend on parameters. Return None if it
    depends on the image's values or on random numbers, or if it does not depend on the image's
    size.

    Args:
        x: reference to the tensor.
        sizes: for each traced image size, the size of the map whose positions the tensor has; empty
            if the caller only asks if there is a plan.
    """
    numbers: set[int] = set()
    if not _collect(reader, x, numbers) or not any(_follows(reader, n) for n in numbers):
        return None
    calls = tuple(sorted(numbers))
    labels = {
        Made(n, part): _labels(reader, n, part, sizes)
        for n in calls
        for part in range(len(reader.traces[0].calls[n].shapes))
    }
    return Plan(x, calls, labels, frozenset(n for n in calls if _is_cellwise(reader, n, labels)))


def _collect(reader: Reader, x: Made, numbers: set[int]) -> bool:
    """Add to ``numbers`` the indices of the calls on which the tensor ``x`` depends.

    Return True, or False if the tensor depends on the image's values or on random numbers.
    """
    if x.call in numbers:
        return True
    if x == IMAGE:
        return False
    call = reader.traces[0].calls[x.call]
    if call.name in _UNKNOWN or call.draws:
        return False
    numbers.add(x.call)
    return all(_collect(reader, made, numbers) for made in _looked_at(call))


def _follows(reader: Reader, number: int) -> bool:
    """Return True if the arguments or output shapes of call ``number`` differ between traces."""
    first, *others = (trace.calls[number] for trace in reader.traces)
    return any(
        (call.args, call.kwargs, call.shapes) != (first.args, first.kwargs, first.shapes)
        for call in others
    )


def _looked_at(call: Called) -> list[Made]:
    """Return the references to those arguments of a call whose values the call uses.

    ``zeros_like(x)``, for example, uses only the size and type of ``x``.
    """
    given = found_in((call.args, call.kwargs), Made)
    if call.name in MOVES:
        return found_in(call.args[:1], Made)
    if call.name in LIKE:
        return []
    return (
        [made for made in given if made != call.args[0]] if call.name.startswith("new_") else given
    )


def _labels(reader: Reader, number: int, part: int, sizes: Sequence[tuple[int, ...]]) -> Labels:
    lengths = (
        zip(*(trace.calls[number].shapes[part] for trace in reader.traces))
        if len({len(t.calls[number].shapes[part]) for t in reader.traces}) == 1
        else ()
    )
    return tuple(_label(each, sizes) for each in lengths)


def _label(lengths: Sequence[int], sizes: Sequence[tuple[int, ...]]) -> int | None:
    """Return the spatial dim along which a dim of a tensor runs; -1 if it runs along all of them.

    The dim is recognized by its length, which equals the map's size along one spatial dim, or the
    product of all sizes (flattened). Return None if it equals neither.

    Args:
        lengths: the length of the dim for each traced image size.
        sizes: the size of the map for each traced image size.
    """
    if not sizes:
        return None
    along = [*zip(*sizes)]
    if (
        found := next((d for d, each in enumerate(along) if each == tuple(lengths)), None)
    ) is not None:
        return found
    return (
        -1
        if all(n == _product(size) for n, size in zip(lengths, sizes)) and len(along) > 1
        else None
    )


def _product(size: Sequence[int]) -> int:
    found = 1
    for n in size:
        found *= n
    return found


def _is_cellwise(reader: Reader, number: int, labels: dict[Made, Labels]) -> bool:
    """Return True if a tile can run a call on its part of the arguments alone.

    In such a call, for example a pointwise one, a part of the result depends only on the same part
    of the arguments.

    Args:
        number: index of the call in the traces.
        labels: for each tensor, the spatial dims that its dims run along.
    """
    call, mine = reader.traces[0].calls[number], labels[Made(number)]
    if not _looked_at(call) or len(call.shapes) != 1:
        return False
    if call.name in _CELLWISE or call.name in POINTWISE_FUNCTIONS or call.name in _TURNING:
        return True
    if call.name in _JOINING:
        dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else 0)
        return isinstance(dim, int) and mine[dim] is None
    if call.name == "repeat":
        times = call.args[1] if isinstance(call.args[1], tuple) else call.args[1:]
        return all(n == 1 or place is None for n, place in zip(times, mine))
    if call.name == "__getitem__":
        index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
        return all(i is None or i is Ellipsis or i == slice(None) for i in index)
    return False


def with_positions(reader: Reader, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Replace the arguments of a pointwise call that depend on the image's size alone.

    For each of them, such as a map of coordinates, add a layer that computes it. Return (args,
    kwargs) with the outputs of these layers in their place.
    """
    maps = found_in((args, kwargs), Value)
    if not maps or reader.source is None:
        return args, kwargs
    beside = max(maps, key=lambda x: (x.rank, not x.vector))
    ranks = [
        len(reader.traces[0].calls[x.call].shapes[x.part]) for x in found_in((args, kwargs), Made)
    ]
    if beside.rank < max(ranks, default=0):
        return args, kwargs

    def there(tree, way):
        return _placed(reader, tree, beside, way)

    return tuple(there(x, ("args", n)) for n, x in enumerate(args)), {
        key: there(x, ("kwargs", key)) for key, x in kwargs.items()
    }


def joined_positions(reader: Reader, tensors: tuple) -> tuple:
    """Replace the tensors of a concatenation that depend on the image's size alone.

    For each of them, such as a map of coordinates, add a layer that computes it. Return the tensors
    with the outputs of these layers in their place.
    """
    maps = [x for x in tensors if isinstance(x, Value)]
    if not maps or reader.source is None:
        return tensors
    return tuple(_placed(reader, x, maps[0], ()) for x in tensors)


def _placed(reader: Reader, x: Any, beside: Value, way: tuple) -> Any:
    """Add a layer for an argument that depends on the image's size alone, and return its output.

    Return any other argument unchanged.

    Args:
        x: an argument of the current call.
        beside: the map or vector with which the call combines the argument.
        way: where the argument is in the current call: ("args", index) or ("kwargs", name). It is
            empty for an argument that need not be replaced if it is a number.
    """
    if (
        isinstance(x, Sizes)
        and way
        and all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in x.each)
    ):
        axes = tuple(axis if axis.batch and axis == Axis(True) else Axis() for axis in beside.axes)
        plan = Plan(Number(reader.number, way), (), {}, frozenset())
        return x if sum(axis.batch for axis in axes) != 1 else emitted(reader, plan, beside, axes)
    if not isinstance(x, Made):
        return x
    for like in _likes(reader, beside):
        plan = plan_of(reader, x, like.sizes)
        if plan is None:
            return x
        axes = _aligned(reader, plan.labels[x], x, beside)
        if axes is not None:
            made = emitted(reader, plan, like, axes)
            dtype = reader.traces[0].calls[x.call].dtypes[x.part]
            return made if dtype.is_floating_point else replace(made, dtype=dtype)
    return x


def _likes(reader: Reader, beside: Value) -> list[Value]:
    """Return one feature map of each size, to try which of them a tensor is aligned with.

    Such a tensor, for example a map of coordinates, depends on the image's size alone. So it may
    belong to a feature map of any size. Of several feature maps of a size, ``beside`` is taken if
    it is one of them, else the newest. Sizes that first occur late in the network come first.

    Args:
        beside: the feature map or vector with which a call combines the tensor.
    """
    maps = [x for x in (beside, *reversed(reader.values.values())) if not x.vector]
    return list({x.sizes: x for x in reversed(maps)}.values())[::-1]


def _aligned(reader: Reader, labels: Labels, x: Made, beside: Value) -> tuple[Axis, ...] | None:
    """Find the dim of ``beside`` with which each dim of a tensor is broadcast.

    Return the meaning of the tensor's dims, as an :class:`Axis` for each dim of ``beside``. Return
    None if the dims of the two cannot be matched.

    Args:
        labels: for each dim of the tensor, the spatial dim that it runs along.
        x: reference to the tensor.
        beside: the map or vector with which the call combines the tensor.
    """
    lengths = list(zip(*(t.calls[x.call].shapes[x.part] for t in reader.traces)))
    missing = beside.rank - len(lengths)
    if missing < 0:
        return None
    lengths, labels = [(1,) * len(reader.traces)] * missing + lengths, (None,) * missing + labels
    batches, found = tuple(t.batch for t in reader.traces), []
    for each, label, other in zip(lengths, labels, beside.axes):
        if label is not None:
            axis = Axis(places=tuple(range(reader.dims)) if label < 0 else (label,))
        elif set(each) == {1}:
            axis = other if not other.of_channels and other.cell == 1 else Axis()
        elif each == batches and other.batch:
            axis = Axis(True)
        elif len(set(each)) == 1:
            axis = Axis(cell=each[0])
        else:
            return None
        if (
            axis != other
            and other != Axis()
            and axis != Axis()
            and not (axis.of_channels and other.of_channels)
        ):
            return None
        if other != Axis() and axis == Axis() and not other.of_channels:
            return None
        found.append(axis)
    whole = tuple(range(reader.dims))
    places = places_of(tuple(found))
    return (
        tuple(found)
        if sum(axis.batch for axis in found) == 1
        and places in ((), whole)
        and (places or beside.vector or not any(places_of(beside.axes)))
        else None
    )


def _check_batch(reader: Reader, plan: Plan) -> None:
    """Raise an error if a tensor depends on the number of images in the batch.

    Args:
        plan: the calls that compute the tensor.
    """
    for trace, size in zip(reader.traces, reader.sizes):
        alone = reader.source(size)
        if alone.batch == trace.batch or len(alone.calls) != len(trace.calls):
            continue
        for number in plan.calls:
            one, other = alone.calls[number], trace.calls[number]
            if one.name not in _SHAPING and (one.args, one.kwargs) != (other.args, other.kwargs):
                raise reader.refusal(
                    f"uses the result of {one}, which depends on the number of images in the "
                    f"batch; this number differs between tiles and micro-batches: compute it "
                    f"without the batch size"
                )
        if isinstance(plan.wanted, Number) and plan.wanted.value(alone.calls) != plan.wanted.value(
            trace.calls
        ):
            raise reader.refusal(
                "takes a number that depends on the number of images in the batch, which differs "
                "between tiles and micro-batches: compute it without the batch size"
            )


def emitted(reader: Reader, plan: Plan, like: Value, axes: tuple[Axis, ...]) -> Value:
    """Add a layer that computes a tensor from the image's size and parameters; return its output.

    If the network already has a layer for the same tensor, size and axes, return its output.

    Args:
        plan: the tensor, and the recorded calls that compute it.
        like: map at whose positions the tensor has its values.
        axes: the meaning of each dim of the output.
    """
    key = plan.wanted, like.sizes, axes
    if key not in reader.positions:
        _check_batch(reader, plan)
        names: dict[str, Kept] = {}
        calls = reader.traces[0].calls
        for number in plan.calls:
            for kept in found_in((calls[number].args, calls[number].kwargs), Kept):
                names.setdefault(kept.name.replace(".", "_"), kept)
        users = {own: kept.name for own, kept in names.items()}
        source = reader.source

        def make(found):
            return Positions(_Calls(source), plan, axes, users, found)

        made = reader.emit(
            make, [like, reader.values[IMAGE]], names, axes=axes, sizes=like.sizes, what="places"
        )
        reader.positions[key] = made
    return reader.positions[key]


class _Calls:
    """Callable that takes an image size and returns the recorded calls of a pass over such images.

    A deep copy of a layer shares the callable with the original: it is not copied.
    """

    def __init__(self, source):
        self._source = source

    def __call__(self, size: tuple[int, ...]) -> Sequence[Called]:
        return self._source(size).calls

    def __deepcopy__(self, memo) -> _Calls:
        return self
