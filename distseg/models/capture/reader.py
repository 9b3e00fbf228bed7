"""Reader of traces, which turns the recorded calls one after another into layers of a network.

The words of this module:

- A *trace* is the record of one forward pass over images of one size. Traces of several sizes are
  read together, so "in each trace" means: for each of these image sizes.
- The *current call* is the call that is being turned into layers. A *rule*, a function of
  :mod:`distseg.models.capture.rules`, does so.
- A *value* (:class:`Value`) is the output of a layer. It is a *map* (N, C, *size) or a *vector*,
  which has numbers for each image, but no positions. A *line* is a vector whose length depends on
  the image's size, such as the mean of each row.

:class:`Reader` provides what a rule needs: checks of arguments, new layers, and error messages that
name the call. :mod:`distseg.models.capture.arranging` has functions for rules that reshape,
:mod:`distseg.models.capture.reducing` has functions for statistics over the image.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from distseg.models.axes import (
    Axes,
    Axis,
    axes_of,
    channels_of,
    is_line,
    line_of,
    of_images,
    order_of,
    places_of,
    plain_axes,
)
from distseg.models.capture.constants import FACTORIES, FILLS, constant_of
from distseg.models.capture.folding import Deep, Folded, Folding, is_deep, knows
from distseg.models.capture.following import followed
from distseg.models.capture.inplace import out_of_place
from distseg.models.capture.lining import lines_spread, number_by_size
from distseg.models.capture.measures import measured
from distseg.models.capture.placing import RANDOM, plan_of, with_positions
from distseg.models.capture.trace import (
    DRAWS,
    EMPTY,
    Called,
    CanNotCapture,
    Kept,
    Made,
    Trace,
    found_in,
    itself,
)
from distseg.models.capture.trace import IMAGE as PIXELS
from distseg.models.capture.values import Sizes, Value
from distseg.models.joined import main_part
from distseg.models.layers import (
    Derived,
    DropImage,
    Fixed,
    Formula,
    MainOutput,
    Map,
    Own,
    Read,
    Step,
    VectorDropout,
    register,
    taken,
)
from distseg.models.lines import OfLines
from distseg.models.network import IMAGE, UNUSED, Dropped, Network, reserved
from distseg.models.resize import VectorAt
from distseg.tiling.resize import SizeRule


class Differ(Exception):
    """Exception raised when two traces of one network contain different calls.

    A trace is the record of one forward pass.
    """


class Reader:
    """Reader that turns several traces of one network into layers.

    A trace is the record of one forward pass. The reader goes through it call by call. The *current
    call* is the one that ``rule`` is turning into layers. Methods that refuse a call raise
    ``CanNotCapture`` with a message that names the call.

    Args:
        shapes: shapes of the network's parameters and buffers, by name.
        sizes: image size of each trace.
        traces: the traces. Their calls must be the same, except for numbers and shapes that depend
            on the image's size.
        rule: function ``rule(reader, args, kwargs)`` that adds layers for the current call and
            returns the result (:func:`distseg.models.capture.rules.made`). In ``args``, ``kwargs``
            and the result, a :class:`Value` stands for each tensor that is computed from the image.
        source: function that returns a trace of an image of a given size. Without it, tensors that
            depend on the image's size alone are not supported.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        sizes: Sequence[tuple[int, ...]],
        traces: Sequence[Trace],
        rule: Callable[[Reader, tuple, dict], Any],
        source: Callable[[tuple[int, ...]], Trace] | None = None,
    ):
        self.shapes, self.traces, self.source = shapes, traces, source
        self.dims, self.sizes = len(sizes[0]), tuple(sizes)
        self._rule = rule
        # Rules by which the size of a layer follows other sizes, by the name of the layer.
        self.size_rules: dict[str, Any] = {}
        # Values computed from the image's size alone, by (what is computed, sizes, axes).
        self.positions: dict[tuple, Value] = {}
        # Layers by name, in order. For each: a function that makes the layer, given a function from
        # names to the model's tensors; and the names of the layer's inputs.
        self.layers: dict[
            str, tuple[Callable[[Callable[[str], Tensor]], nn.Module], tuple[str, ...]]
        ] = {}
        # Names of tensors in the user's model, by their names in the network.
        self.names: dict[str, str] = {}
        # Lines of user code, by the name of the layer that they became.
        self.lines: dict[str, str] = {}
        self.folding: Folding | None = None  # describes the current call's map
        # Detached versions of values that were computed under torch.no_grad.
        self._detached: dict[Made, Value] = {}
        # Modules whose calls update a running mean, by the name of the mean.
        self.keepers: dict[str, str] = {}
        # Dropout layers, by the index of the user's dropout call among all such calls.
        self.dropouts: dict[int, Dropped] = {}
        # Numbers of the calls whose random numbers a dropout layer draws.
        self._claimed: set[int] = set()
        # Numbers by which layers divide a map, by the name of the layer.
        self.divisors: dict[str, float] = {}
        # Windows of the layers that return positions of maxima, by the name of the layer.
        self.maxima: dict[str, tuple[int, ...]] = {}
        # Maps that a layer stacks along a new first dim, by the name of the layer.
        self.stacks: dict[str, tuple[Value, ...]] = {}
        calls = traces[0].calls
        if len({(len(t.calls), t.result) for t in traces}) > 1:
            raise CanNotCapture(DIFFERENT)
        needed = _needed(traces[0])
        numbers = _image_calls(traces, needed)
        # Names of the calling modules and of the modules around them.
        self._modules: set[str] = set()
        for n in numbers:
            path = calls[n].module.split(".")
            self._modules |= {".".join(path[: depth + 1]) for depth in range(len(path))}
        self._homes = {
            module: found
            for module in {calls[n].module for n in numbers} - {""}
            if (found := _main_call(module, calls, numbers)) is not None
        }
        self._draws = {
            number: n
            for n, number in enumerate(n for n, call in enumerate(calls) if call.name in _DROPOUTS)
        }
        image = plain_axes(traces[0].channels, self.dims)
        self.values: dict[Made, Value] = {
            PIXELS: Value(
                IMAGE, tuple((t.batch, t.channels, *size) for t, size in zip(traces, sizes)), image
            )
        }
        for self.number in numbers:
            self.current = [t.calls[self.number] for t in traces]
            try:
                self._read()
            except Differ:
                raise CanNotCapture(DIFFERENT) from None
        self._check_draws(needed)
        if not calls[traces[0].result.call].graded:
            raise CanNotCapture(
                f"the network's result, made by {calls[traces[0].result.call]}, is computed "
                f"without gradients (torch.no_grad): remove torch.no_grad, as evaluation turns "
                f"gradients off itself"
            )
        result = self.values.get(traces[0].result)
        self.of_image = result is not None and result.vector
        if result is None or not _is_result(result, sizes):
            made = "x".join(
                map(str, traces[0].calls[traces[0].result.call].shapes[traces[0].result.part])
            )
            raise CanNotCapture(
                f"the network's result has the shape {made} for images of "
                f"{'x'.join(map(str, sizes[0]))} pixels, but a segmentation network keeps the "
                "size, and a network for whole images returns a vector for each image: resize the "
                "result to the image, or return (N, classes)"
            )
        self._drop_unread(result)
        # The last layer must be the one whose output is the network's result.
        if result.name != next(reversed(self.layers), IMAGE):
            self._add("result", lambda tensor: nn.Identity(), [result])

    def _check_draws(self, needed: Sequence[int]) -> None:
        """Raise an error if the result depends on random numbers that no dropout draws.

        Args:
            needed: indices of the calls that the result depends on.
        """
        for number in needed:
            if number not in self._claimed and any(t.calls[number].draws for t in self.traces):
                raise CanNotCapture(f"{self.traces[0].calls[number]} {DRAWS}")

    def network(self, model: nn.Module) -> Network:
        """Return a :class:`Network` of the layers that were made from the traces.

        Args:
            model: the user's model. The network's layers hold its parameters and buffers.
        """
        tensors = dict(
            [
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            ]
        )
        layers = {name: make(tensors.__getitem__) for name, (make, _) in self.layers.items()}
        if (part := main_part(model)) != (1, 1):
            layers[self._unique("main_output")] = MainOutput(*part)
        network = Network(layers, {name: reads for name, (_, reads) in self.layers.items()})
        used = set(self.names.values())
        unused = {name: tensor for name, tensor in tensors.items() if name not in used}
        held = {name: f"{number}_{name.replace('.', '_')}" for number, name in enumerate(unused)}
        network.hold_unused({held[name]: tensor for name, tensor in unused.items()})
        self.names.update({f"{UNUSED}.{held[name]}": name for name in unused})
        network.names = {own: user for own, user in self.names.items() if own != user}
        network.dropouts, network.of_image, network.lines = self.dropouts, self.of_image, self.lines
        return network

    def _drop_unread(self, result: Value) -> None:
        """Remove the layers that the result does not depend on.

        Such layers exist if user code reads only the size of a tensor, or one of several results.
        """
        needed = {result.name}
        for name, (_, reads) in reversed(self.layers.items()):
            if name in needed:
                needed.update(reads)
        self.layers = {name: layer for name, layer in self.layers.items() if name in needed}
        self.names = {
            own: user for own, user in self.names.items() if own.rpartition(".")[0] in needed
        }
        self.dropouts = {
            number: dropped for number, dropped in self.dropouts.items() if dropped.layer in needed
        }

    def differs(self, other: Reader) -> str | None:
        """Return the name of the first layer that differs in ``other``; None if all are equal.

        A layer differs if its inputs come from different layers than in ``other``, or if its output
        size is computed by a different formula.

        Args:
            other: a reader of the same network that has read traces of more image sizes.
        """
        mine, theirs = (
            {
                name: (reads, reader.size_rules.get(name))
                for name, (_, reads) in reader.layers.items()
            }
            for reader in (self, other)
        )
        return next(
            (name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)), None
        )

    # the current call

    @property
    def call(self) -> Called:
        """The current call in the first trace."""
        return self.current[0]

    def _read(self) -> None:
        """Add layers for the current call by its rule, and store its results in ``self.values``.

        The current call is the recorded call that is being turned into layers.
        """
        if len({c.name for c in self.current}) > 1:
            raise Differ
        args = self._merged([c.args for c in self.current])
        kwargs = self._merged([c.kwargs for c in self.current])
        if not found_in((args, kwargs), Value) and not follows_size(self.current):
            return  # the call does not depend on the image
        if self.call.name in EMPTY:
            return  # only later assignments give it content
        if self.call.name in _RANDOM:
            raise self.refusal(DRAWS)
        kwargs = {_AS_NUMPY.get(name, name): x for name, x in kwargs.items()}
        if kwargs.get("out", True) is None:
            del kwargs["out"]
        # Precision is a setting of the run.
        if kwargs.get("dtype", 0) in (None, torch.float32, torch.float64):
            del kwargs["dtype"]
        if self.call.name not in FACTORIES:
            if (dtype := kwargs.get("dtype")) is not None:
                raise self.refusal(
                    f"has dtype={dtype}: remove it, as train.precision sets the dtype"
                )
            if kwargs.get("out") is not None:
                raise self.refusal("has out=: remove it, and use the result that the call returns")
        try:
            made = self._rule(self, args, kwargs)
        except CanNotCapture:
            if plan_of(self, Made(self.number), ()) is None:
                raise
            # The result depends on the image's size alone. It is computed when a later call
            # combines it with a map.
            return
        except TypeError as e:
            if "argument" not in str(e):
                raise
            raise self.refusal(
                f"is called in an unsupported way ({_signature_error(e)}): change these arguments"
            ) from None
        for part, value in enumerate(made if isinstance(made, tuple) else (made,)):
            if value is not None:
                self.values[Made(self.number, part)] = self._typed(value, part)

    def _typed(self, value: Value, part: int) -> Value:
        """Return ``value`` with the dtype of the call's result if it is an integer or bool dtype.

        Return it unchanged if the dtype is a floating point type, whose precision the run sets.

        Args:
            value: the layer output that stands for the result.
            part: index of the result, if the call returns several.
        """
        dtype = self.call.dtypes[part]
        return value if dtype.is_floating_point else replace(value, dtype=dtype)

    def _merged(self, each: Sequence[Any]) -> Any:
        """Merge the records of one argument of the current call in all traces into one argument.

        A tensor that depends on the image becomes a :class:`Value`. A setting that differs between
        traces becomes :class:`Sizes`. For example, 4 in one trace and 8 in the other become
        ``Sizes((4, 8))``.

        Args:
            each: the argument, or a tuple or dict of arguments, as each trace records it.

        Raises:
            Differ: the traces have different tensors here, or tuples of different lengths.
        """
        first = each[0]
        if isinstance(first, tuple):
            if len({len(x) for x in each}) > 1:
                raise Differ
            return tuple(map(self._merged, zip(*each)))
        if isinstance(first, dict):
            return {key: self._merged([x[key] for x in each]) for key in first}
        if isinstance(first, Made):
            if any(x != first for x in each):
                raise Differ
            return self._given(first)
        alike = all(type(x) is type(first) and bool(x == first) for x in each)
        return first if alike else Sizes(tuple(each))

    def _given(self, made: Made) -> Value | Made:
        """Return the layer output that stands for a tensor, or ``made`` if no layer makes it.

        If the tensor was computed under ``torch.no_grad`` and the current call is not, detach the
        output.

        Args:
            made: reference to a tensor that the current call takes.
        """
        value = self.values.get(made)
        if (
            value is None
            or value.dtype is not None
            or not self.call.graded
            or made == PIXELS
            or self.traces[0].calls[made.call].graded
        ):
            return made if value is None else value
        if made not in self._detached:
            self._detached[made] = self.applied(Tensor.detach, [value], "detached")
        return self._detached[made]

    def refusal(self, why: str, everywhere: bool = False) -> CanNotCapture:
        """Return an error, to be raised by the caller, that names the current call and the reason.

        Args:
            why: the rest of the message, after the name of the call.
            everywhere: True if each output pixel depends on the whole image.
        """
        return CanNotCapture(f"{self.call} {why}", everywhere)

    def map(self, x: Any) -> Value:
        """Return ``x`` if it is a feature map (N, C, *size); raise an error if it is not."""
        x = self.value(x)
        if not x.plain:
            self.unfold(x)
            raise self.refusal(
                f"takes {x!r}, where a feature map (N, C, {', '.join('DHW'[-self.dims :])}) is "
                "expected: permute or reshape it to this form"
            )
        return x

    def unfold(self, x: Value) -> None:
        """Apply the current call's rule again with ``x`` rearranged to (N, C, *size), if possible.

        For this, raise an exception that holds ``x``. The code that catches it rearranges ``x`` and
        calls the rule again. Return None if ``x`` cannot be rearranged.

        Raises:
            Folded: the batch dim has channels or positions besides the images.
            Deep: the map is (N, C, D, *size), with a dim D between channels and spatial dims.
        """
        if self.folding is None and is_deep(x, self.call.name):
            raise Deep(x)
        folding = Folding.from_value(x)
        if folding is not None and self.folding is None and knows(self.call.name, folding):
            raise Folded(x, folding)

    def value(self, x: Any) -> Value:
        """Return ``x`` if it is a feature map or a vector; raise an error for any other argument.

        The dims of the map need not be in the order (N, C, *size).
        """
        if not isinstance(x, Value):
            what = (
                "a tensor that is computed from parameters and numbers only"
                if isinstance(x, (Made, Kept))
                else repr(x)
            )
            raise self.refusal(
                f"takes {what} where a feature map is expected: pass a tensor that is computed "
                "from the image"
            )
        return x

    def fixed(self, x: Any, what: str) -> Any:
        """Return the setting ``x`` unchanged; raise an error if it depends on the image's size.

        Args:
            x: a number, a string, a slice, or a tuple of these.
            what: name of the setting, for the error message.
        """
        if has_sizes(x):
            raise self.refusal(f"has a {what} that depends on the image's size: use a fixed one")
        return x

    def fixed_all(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return ``settings`` unchanged if all of them are independent of the image's size.

        Raises:
            CanNotCapture: a setting depends on the image's size; the message has its name.
        """
        return {name: self.fixed(x, name) for name, x in settings.items()}

    def dims_of(self, dim: Any, x: Value) -> tuple[int, ...]:
        """Return the dims of ``x`` that an argument ``dim`` of user code selects, counted from 0.

        Args:
            dim: an integer or a tuple; None or () means all dims.
            x: the value to whose dims ``dim`` refers.
        """
        if dim is None or dim == ():
            return tuple(range(x.rank))
        given = dim if isinstance(dim, tuple) else (dim,)
        if not all(isinstance(d, int) and -x.rank <= d < x.rank for d in given):
            raise self.refusal(
                f"has dim {dim}, but {x!r} has {x.rank} dims: use a dim from {-x.rank} to "
                f"{x.rank - 1}"
            )
        return tuple(d % x.rank for d in given)

    def of_channels(self, dim: Any, x: Value) -> bool:
        """Return True if each dim of ``x`` that ``dim`` names holds channels only.

        Args:
            dim: an integer or a tuple; None or () means all dims.

        Raises:
            CanNotCapture: the batch dim is among the named dims.
        """
        given = self.dims_of(dim, x)
        if any(x.axes[d].batch for d in given):
            raise self.refusal(
                _OF_BATCH.format(
                    "along dim 0"
                    if given == (0,) and x.axes[0].batch
                    else f"along all dims {given}"
                )
            )
        return all(x.axes[d].of_channels for d in given)

    def shape_of(self, x: Any) -> tuple[int, ...]:
        """Return the shape of a parameter, or of a tensor computed from parameters.

        Raises:
            CanNotCapture: ``x`` is a value, so it is computed from the image.
        """
        if isinstance(x, Value):
            raise self.refusal(
                "has a weight that is computed from the image; supported: parameters, buffers, and "
                "tensors computed from them"
            )
        return (
            self.shapes[x.name]
            if isinstance(x, Kept)
            else self.traces[0].calls[x.call].shapes[x.part]
        )

    def axes_of(self, x: Any) -> Axes:
        """Return the meaning of each dim of ``x``: images, channels or positions (:class:`Axis`).

        ``x`` is a value or a parameter. All dims of a parameter are taken for channels.
        """
        return x.axes if isinstance(x, Value) else tuple(Axis(cell=n) for n in self.shape_of(x))

    def learns(self, x: Made | Kept) -> bool:
        """Return True if a tensor can receive a gradient.

        A parameter can, and so can a tensor computed from a parameter or from the image.

        Args:
            x: reference to the tensor.
        """
        if isinstance(x, Kept):
            return x.name in self.traces[0].parameters
        call = self.traces[0].calls[x.call] if x != PIXELS else None
        return call is None or any(map(self.learns, found_in((call.args, call.kwargs), Made, Kept)))

    def made(self, like: Value, part: int = 0) -> Axes:
        """Find out what each dim of the current call's result means: images, channels or positions.

        The result's shape is compared with the image's size in all traces. The result must be a map
        of the size of ``like``, or a vector.

        Args:
            like: a map or vector that the call takes.
            part: index of the result if the call returns several.

        Raises:
            CanNotCapture: a dim of the result is neither images, channels nor positions; or the
                images are in no dim or in several; or the spatial dims are incomplete or in another
                order.
        """
        shape = self.call.shapes[part]
        read = line_of if like.vector else axes_of
        axes = read(
            [c.shapes[part] for c in self.current], [t.batch for t in self.traces], like.sizes
        )
        if axes is None:
            raise self.refusal(
                f"makes a tensor of {shape} from {like!r}, and a dim of the result is neither "
                "images, channels nor positions, which is not supported: keep images, channels "
                "and positions in separate dims"
            )
        if sum(axis.batch for axis in axes) != 1 and (of_images(axes) or of_images(like.axes)):
            raise self.refusal(_OF_BATCH.format("with each other"))
        places = places_of(axes)
        if places and places != tuple(range(self.dims)):
            whole = len(set(places)) == self.dims
            does = (
                "reorders dims of the image, or combines each position with all others"
                if whole
                else "combines rows or columns of the image"
            )
            raise self.refusal(
                f"makes a tensor of {shape} from {like!r} and {does}, which is not supported: "
                "keep all dims of the image, in their order"
            )
        return axes

    # new layers

    def emit(
        self,
        make: Callable[[dict[str, Tensor]], nn.Module],
        reads: Sequence[Value],
        tensors: Mapping[str, Kept] = {},
        part: int = 0,
        axes: Axes | None = None,
        what: str = "",
        sizes: Sequence[tuple[int, ...]] = (),
    ) -> Value:
        """Add a layer to the network and return its output.

        Args:
            make: function that makes the layer. It is given a dict of the layer's tensors, by their
                names in the layer.
            reads: inputs of the layer.
            tensors: references to the user's parameters and buffers, by their names in the layer.
            part: index of the call's result that the layer makes.
            axes: the meaning of each dim of the output, which is a vector or a map with the
                positions of ``reads``. Without ``axes``, the call's result must be a map
                (N, C, *size), of any size.
            what: suffix of the layer's name if the call becomes several layers.
            sizes: size of the output map for each traced image size, if ``axes`` are given and the
                size differs from that of ``reads``.
        """
        if axes is None:
            shapes = tuple(c.shapes[part] for c in self.current)
            if (
                any(
                    len(shape) != 2 + self.dims or shape[0] != t.batch
                    for shape, t in zip(shapes, self.traces)
                )
                or len({shape[1] for shape in shapes}) > 1
            ):
                raise self.refusal(
                    f"makes a tensor of {shapes[0]} from {reads[0]!r}, which is not supported: "
                    "let it make a feature map with the same number of images, and with a number "
                    "of channels that does not depend on the image's size"
                )
            axes = plain_axes(shapes[0][1], self.dims)
        else:
            like = next((x for x in reads if not x.vector), reads[0])
            shapes = tuple(
                (shape[0], channels_of(axes), *size)
                for shape, size in zip(like.shapes, sizes or like.sizes)
            )
        name, used = self._name(), {name: kept.name for name, kept in tensors.items()}
        name = self._unique(f"{name}_{what}") if what else name
        self._add(
            name, lambda tensor: make({own: tensor(user) for own, user in used.items()}), reads
        )
        self.names.update({f"{name}.{own}": user for own, user in used.items()})
        return Value(name, shapes, axes)

    def followed(
        self, x: Value, sizes: tuple[tuple[int, ...], ...]
    ) -> tuple[Value, list[SizeRule]]:
        """Find a map from whose size the output size of the current call can be computed.

        Return (map, rules). The rules, one for each spatial dim, compute the output size from the
        map's size; an example is half the size.

        Args:
            x: the map that is preferred among maps with equally simple rules.
            sizes: the output size for each traced image size.

        Raises:
            CanNotCapture: no rule fits.
        """
        if (found := followed(sizes, x, (v for v in self.values.values() if not v.vector))) is None:
            raise self.refusal(
                f"makes {'x'.join(map(str, sizes[0]))} positions from "
                f"{'x'.join(map(str, x.sizes[0]))}, a size that is neither that of another "
                "feature map nor a fraction of one: resize to the size of another feature map, or "
                "by a fixed factor"
            )
        return found

    def following(
        self,
        make: Callable[[], nn.Module],
        x: Value,
        like: Value,
        rules: Sequence[SizeRule],
        more: tuple = (),
        **settings,
    ) -> Value:
        """Add a layer whose output size is computed from the size of a map; return its output.

        Args:
            make: function that makes the layer.
            x: first input of the layer; the map ``like`` is the second one.
            rules: for each spatial dim, the formula that computes the output's size from that of
                ``like``.
            more: further settings of the layer that were found by comparing traces. :meth:`differs`
                compares them and ``rules``.
            settings: keyword arguments of :meth:`emit`.
        """
        made = self.emit(lambda _: make(), [x, like], **settings)
        self.size_rules[made.name] = (*rules, *more)
        return made

    def applied(
        self,
        function: Callable[..., Tensor],
        operands: Sequence[Any],
        what: str,
        axes: Axes | None = None,
    ) -> Value:
        """Add a layer that computes ``function(*operands)`` at each position; return its output.

        A rule uses it if one call of user code becomes several layers.

        Args:
            function: function of tensors, whose dims are in the order of user code. So that the
                layer can be pickled, it must be a function defined in a file, a ``partial`` of one,
                or an object of a class defined in a file.
            operands: maps, vectors, parameters, tensors computed from parameters, and numbers.
            what: suffix of the layer's name.
            axes: the meaning of each dim of the result; by default as in the first map or vector
                among the operands.
        """
        maps = [x for x in operands if isinstance(x, Value)] or [self.value(operands[0])]
        if len({x.sizes for x in maps if not x.vector}) > 1:
            raise self.refusal(
                f"combines {' and '.join(map(repr, maps))}, whose spatial sizes differ: resize or "
                f"crop one of them first"
            )
        maps = self.meeting(maps)
        own: dict[str, Kept] = {}
        steps: list[Step] = []
        places: dict[Made, int] = {}
        at = iter(map(Map, range(len(maps))))
        args = tuple(
            next(at) if isinstance(x, Value) else self._written(x, maps, own, steps, places)
            for x in operands
        )
        steps.append(Step(function, args, {}))
        axes, given = axes or maps[0].axes, tuple(map(_read_as, maps))
        return self._emit_formula(steps, given, None, axes, maps, own, what=what)

    def _emit_formula(
        self,
        steps: Sequence[Step],
        given: Sequence[Read],
        part: int | None,
        axes: Axes,
        maps: Sequence[Value],
        own: Mapping[str, Kept],
        what: str = "",
    ) -> Value:
        """Add a layer that runs ``steps`` one after another; return the result of the last step.

        A line is a vector whose length depends on the size of the image, such as row means. If
        lines are among the inputs, the layer also reads a map, whose size gives their length.

        Args:
            steps: function calls. Each may use the layer's inputs and the results of earlier steps.
            given: for each input, the order of dims and the dtype in which the steps take it.
            part: index of the layer's output, if the last step returns several results.
            axes: the meaning of each dim of the output.
            maps: inputs of the layer, which are maps or vectors.
            own: parameters and buffers of the layer, by their names in the layer.
            what: suffix of the layer's name.
        """
        kind, steps = Formula, tuple(steps)
        if is_line(axes) or any(x.line for x in maps):
            kind, maps = OfLines, [self.map_of_lines(maps, axes), *maps]
        return self.emit(
            lambda found: kind(steps, given, found, part, axes), maps, own, part or 0, axes, what
        )

    def map_of_lines(self, lines: Sequence[Value], axes: Axes = ()) -> Value:
        """Return a map from whose size the lengths of the given lines can be computed.

        A line is a vector whose length depends on the size of the image, such as row means.

        Args:
            lines: inputs of the current call. An input that is a map is refused.
            axes: the meaning of each dim of the call's result.
        """
        if not all(x.vector for x in lines):
            raise self.refusal(
                f"combines {' and '.join(map(repr, lines))} in an unsupported way; supported: "
                f"multiply or add them element by element"
            )
        if {d for axis in axes for _, dims in axis.whole for d in dims} == set(
            range(self.dims)
        ) and not _is_sum(axes):
            raise self.refusal(
                f"makes a feature map of {self.call.shapes[0]} from {lines[0]!r}, and each rank "
                "would have to hold this feature map whole; supported: make it by adding or "
                "multiplying vectors along rows and columns"
            )
        found = self.same_places(lines[0].sizes)
        if found is None:
            raise self.refusal(
                f"takes {lines[0]!r}, whose length follows the size of a feature map, but no "
                "feature map of the network has this size: compute the vector from a feature map "
                "of the network"
            )
        return found

    def _add(self, name: str, make, reads: Sequence[Value]) -> None:
        """Add a layer to the network under the name ``name``.

        Args:
            name: a name that no other layer has.
            make: function that makes the layer. Its argument is a function from names to tensors of
                the user's model.
            reads: the feature maps that the layer reads.
        """
        assert name not in self.layers, name
        self.layers[name] = make, tuple(x.name for x in reads)
        self.lines[name] = self.call.line

    def _name(self) -> str:
        """Return an unused name for the current call's layer, such as ``block.conv``.

        It is the name of the calling module, if no other call uses the module's weights, or if the
        module makes no other call. Otherwise the name of the called function is added to it.
        """
        module, function = self.call.module, self.call.name.strip("_")
        if module in self._homes:
            name = module if self._homes[module] == self.number else f"{module}_{function}"
        else:
            name = f"{module}.{function}".lstrip(".")
        return self._unique(self._allowed(name))

    def _allowed(self, name: str) -> str:
        """Return a layer name that has no part in common with the attributes of ``Network``.

        Such a part gets an underscore: ``block.forward`` becomes ``block.forward_``.
        """
        theirs = {part for module in self._modules for part in module.split(".")}
        parts = name.split(".")
        for number, part in enumerate(parts):
            if part in reserved() or name == IMAGE:
                free = (part + "_" * count for count in range(1, len(theirs) + 2))
                parts[number] = next(other for other in free if other not in theirs)
        return ".".join(parts)

    def _unique(self, name: str) -> str:
        unique, count, module = name, 1, self.call.module
        while unique in self.layers or unique in self._modules and unique != module:
            count += 1
            unique = f"{name}_{count}"
        return unique

    def layer(
        self,
        kind: type,
        x: Value,
        *args,
        tensors: Mapping[str, Any] = {},
        axes: Axes | None = None,
        **kwargs,
    ) -> Value:
        """Add a layer of the class ``kind``, such as ``nn.Conv2d``, and return its output.

        Args:
            kind: class of the layer; ``args`` and ``kwargs`` are the arguments of this class.
            x: input of the layer.
            tensors: for each parameter and buffer of the layer, by its name there, the reference to
                the user's tensor; None to leave it out. The weights of a convolution may also be
                computed from the user's tensors.
            axes: the meaning of each dim of the output, as for :meth:`emit`.
        """
        tensors = {name: value for name, value in tensors.items() if value is not None}
        if any(isinstance(value, Value) for value in tensors.values()):
            raise self.refusal(
                "has a weight that is computed from the image; supported: parameters, buffers, and "
                "tensors computed from them"
            )

        def plain():
            return kind(*args, **kwargs, **({"device": "meta"} if tensors else {}))

        convolves = issubclass(kind, nn.modules.conv._ConvNd)
        if not any(isinstance(value, Made) for value in tensors.values()) and not (
            self.folding and convolves
        ):
            return self.emit(lambda found: _with_tensors(plain(), found), [x], tensors, axes=axes)
        if not convolves:
            raise self.refusal(
                "has running statistics that your code computes: pass registered buffers, as "
                "nn.BatchNorm2d does"
            )
        own: dict[str, Kept] = {}
        weights = {name: self._computed(value, own) for name, value in tensors.items()}
        if self.folding:
            args, kwargs = self.folding.of_layer(args, kwargs)
            weights = {
                name: self.folding.of_weight(steps, name == "weight")
                for name, steps in weights.items()
            }
        return self.emit(lambda found: Derived(plain(), weights, found), [x], own, axes=axes)

    def norm(
        self,
        kind: type,
        x: Value,
        *args,
        weight: Any,
        bias: Any,
        tensors: Mapping[str, Any] = {},
        **kwargs,
    ) -> Value:
        """Add a norm with the user's weight and bias, and return its output.

        Args:
            kind: class of the layer, such as ``nn.GroupNorm``; ``x`` is its input.
            args: arguments of the layer's class that come before ``affine``; ``kwargs`` are its
                keyword arguments.
            weight: a parameter, a buffer, a tensor computed from these, or None. The same holds
                for ``bias``.
            tensors: the layer's running statistics, by their names in the layer.
        """
        if isinstance(weight, Value) or isinstance(bias, Value):
            raise self.refusal(
                "has a weight that is computed from the image; supported: parameters, buffers, and "
                "tensors computed from them"
            )
        if self.folding and kind is nn.GroupNorm:
            return self.scaled(
                self.layer(kind, x, *args, False, tensors=tensors, axes=x.axes, **kwargs),
                weight,
                bias,
            )
        if (
            (weight is None) == (bias is None)
            and not isinstance(weight, Made)
            and not isinstance(bias, Made)
        ):
            return self.layer(
                kind,
                x,
                *args,
                weight is not None,
                tensors=dict(weight=weight, bias=bias, **tensors),
                axes=x.axes,
                **kwargs,
            )
        if x.vector:
            raise self.refusal(
                f"normalises {x!r} with a weight alone, a bias alone, or a computed weight or "
                "bias, but this is supported for feature maps only: give the norm both as "
                "parameters, or neither"
            )
        return self.scaled(
            self.layer(kind, x, *args, False, tensors=tensors, axes=x.axes, **kwargs), weight, bias
        )

    def scaled(self, x: Value, weight: Any, bias: Any) -> Value:
        """Add a layer that multiplies channels by ``weight`` (C,) and adds ``bias`` (C,).

        Return its output. Weight and bias are references to tensors, or None.
        """
        own: dict[str, Kept] = {}
        steps: list[Step] = []
        written = self._written((weight, bias), (x,), own, steps, {})
        steps.append(
            Step(
                _scaled,
                (
                    Map(0),
                    *written,
                    *((self.folding.times, self.folding.each) if self.folding else (1, 1)),
                ),
                {},
            )
        )
        return self.emit(
            lambda found: Formula(tuple(steps), (Read(),), found), [x], own, axes=x.axes
        )

    def pointwise(self, args: tuple, kwargs: dict, part: int | None = None) -> Value:
        """Add a layer for a pointwise call whose arguments are broadcast, and return its output.

        Args:
            args, kwargs: arguments of the call.
            part: index of the output among the call's results, if it returns several.

        Raises:
            CanNotCapture: the dims of the arguments do not match, or a parameter has a value for
                each position or image.
        """
        args, kwargs = lines_spread(self, *with_positions(self, measured(self, args), kwargs))
        operands = found_in((args, kwargs), Value, Kept, Made)
        others = [(x, self.shape_of(x)) for x in operands if not isinstance(x, Value)]
        maps = [x for x in operands if isinstance(x, Value)]
        rank = max(x.rank for x in maps)
        for back in range(1, rank + 1):
            there = [axis for x in maps if x.rank >= back and (axis := x.axes[-back]) != Axis()]
            kinds = {(axis.batch, axis.places, axis.whole) for axis in there}
            if len(kinds) > 1:
                raise self.refusal(
                    f"combines {' and '.join(map(repr, dict.fromkeys(maps)))}, but their dims do "
                    "not match: bring them into the same order (permute or reshape), with length "
                    "1 in each dim that one of them lacks, such as (N, C, 1, 1) beside (N, C, H, W)"
                )
            places = any(axis.batch or axis.places or axis.whole for axis in there)
            for _x, shape in others:
                if places and len(shape) >= back and shape[-back] != 1:
                    raise self.refusal(_EACH_PLACE.format(shape))
        if any(len(shape) > rank for _, shape in others):
            raise self.refusal(
                f"combines {maps[0]!r} with a tensor of "
                f"{max((shape for _, shape in others), key=len)}, which has more dims: reshape "
                f"the tensor to at most {rank} dims"
            )
        return self.formula(args, kwargs, part)

    def formula(self, args: tuple, kwargs: dict, part: int | None = None) -> Value:
        """Add a layer that applies the called function at each position, and return its output.

        The caller has checked that no cell of the result depends on cells at other positions.
        An example is ``F.linear`` over channels.

        Args:
            args, kwargs: arguments of the call.
            part: index of the output among the call's results, if it returns several.
        """
        args, kwargs, maps = self._with_resized_vectors(args, kwargs)
        own: dict[str, Kept] = {}
        steps: list[Step] = []
        places: dict[Made, int] = {}
        given = {key: x for key, x in kwargs.items() if key not in ("inplace", "out")}
        # _written adds the steps that compute the arguments, so it must run before the last step
        # is added.
        last = tuple(self._written(tree, maps, own, steps, places) for tree in (args, given))
        steps.append(Step(out_of_place(self.call.function), *last))
        like = next((x for x in maps if not x.vector), maps[0])
        axes, given = self.made(like, part or 0), tuple(map(_read_as, maps))
        if not like.vector and not places_of(axes):
            raise self.refusal(
                f"makes a tensor of {self.call.shapes[part or 0]} from {like!r}, so it combines "
                "positions of the image in an unsupported way: combine positions by convolutions, "
                "poolings, means, sums or maxima"
            )
        if any(axis.mixed and not any(axis in x.axes for x in maps) for axis in axes):
            raise self.refusal(
                f"makes a tensor of {self.call.shapes[part or 0]} from {like!r}, and one dim of "
                "the result would merge the batch or a spatial dim with channels or repeated "
                "values, which is not supported: keep the batch and each spatial dim as dims of "
                "their own"
            )
        return self._emit_formula(steps, given, part, axes, maps, own)

    def _with_resized_vectors(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, list[Value]]:
        """Return the arguments of a call with all vectors fitted to the size of its maps.

        Each vector is recorded for maps of one size (:attr:`Value.shapes`). A vector for another
        size than that of the call's maps is replaced by the output of a new layer
        (:meth:`meeting`).

        Returns:
            (args, kwargs, the maps and vectors in them).
        """
        maps = list(dict.fromkeys(found_in((args, kwargs), Value)))
        if len({x.sizes for x in maps if not x.vector}) > 1:
            raise self.refusal(
                f"combines {' and '.join(map(repr, maps))}, whose spatial sizes differ: resize or "
                f"crop one of them first"
            )
        there = dict(zip(maps, self.meeting(maps)))
        return (
            self.replaced(args, there),
            self.replaced(kwargs, there),
            list(dict.fromkeys(there.values())),
        )

    def _computed(self, value: Made | Kept, own: dict[str, Kept]) -> tuple[Step, ...]:
        """Return the steps that compute a weight from the user's parameters.

        Args:
            value: reference to the weight.
            own: parameters and buffers of the layer, by their names in the layer. Further ones that
                the steps read are added.
        """
        steps: list[Step] = []
        written = self._written(value, (), own, steps, {})
        return tuple(steps) if isinstance(written, Map) else (*steps, Step(itself, (written,), {}))

    def _written(
        self,
        tree: Any,
        maps: Sequence[Value],
        own: dict[str, Kept],
        steps: list[Step],
        places: dict[Made, int],
    ) -> Any:
        """Return the arguments of a call as a :class:`Step` stores them, without tensors.

        References replace the tensors. ``Map(i)`` refers to an input of the layer or to the result
        of a step. ``Own(name)`` refers to a parameter or buffer. ``own``, ``steps`` and ``places``
        are extended in place.

        Args:
            tree: arguments of the user's call.
            maps: inputs of the layer.
            own: parameters and buffers of the layer. Further ones that occur in ``tree`` are added.
            steps: steps of the layer. Steps that compute a tensor of ``tree`` from parameters alone
                are added.
            places: the index i of ``Map(i)`` for each tensor that a step computes. Inputs have the
                first indices, and steps the next ones.
        """

        def again(x):
            return self._written(x, maps, own, steps, places)

        match tree:
            case Value():
                if tree not in maps:
                    raise self.refusal(
                        "takes a weight or another setting that is computed from the image "
                        f"({tree!r}), which is not supported: use parameters, buffers, or tensors "
                        "computed from them"
                    )
                return Map(list(maps).index(tree))
            case Kept():
                return Own(_own_name(tree, own))
            case Made():
                if tree in places:
                    return Map(places[tree])
                if tree in self.values:
                    return again(self._given(tree))
                call = self.traces[0].calls[tree.call]
                if call.name in _RANDOM:
                    raise self.refusal(
                        f"uses the result of {call}, which "
                        f"{'is not initialized: use zeros' if 'empty' in call.name else DRAWS}"
                    )
                if (found := constant_of(self.traces[0].calls, tree)) is not None:
                    others = [constant_of(t.calls, tree) for t in self.traces[1:]]
                    if not all(other is not None and torch.equal(found, other) for other in others):
                        raise self.refusal(
                            f"uses the result of {call}, whose values depend on the size of the "
                            f"image: {POSITIONS}"
                        )
                    return Fixed(found)
                if call.name in _CASTS:
                    raise self.refusal(
                        f"uses the result of {call}, which changes the dtype of a parameter or "
                        "buffer: remove this call and keep the parameter or buffer in floating "
                        "point; train.precision sets the dtype"
                    )
                if not found_in((call.args, call.kwargs), Kept, Made):
                    raise self.refusal(
                        f"uses the result of {call}, which is computed neither from the image nor "
                        f"from parameters, and depends on the image's size: {POSITIONS}"
                    )
                calls = [t.calls[tree.call] for t in self.traces]
                step = Step(
                    out_of_place(call.function),
                    again(self._merged([c.args for c in calls])),
                    again(self._merged([c.kwargs for c in calls])),
                )
                steps.append(step)
                if len(call.shapes) > 1:
                    steps.append(
                        Step(operator.getitem, (Map(len(maps) + len(steps) - 1), tree.part), {})
                    )
                if not call.graded and call.dtypes[tree.part].is_floating_point:
                    steps.append(Step(Tensor.detach, (Map(len(maps) + len(steps) - 1),), {}))
                places[tree] = len(maps) + len(steps) - 1
                return Map(places[tree])
            case tuple():
                return tuple(map(again, tree))
            case dict():
                return {key: again(x) for key, x in tree.items()}
            case slice():
                return slice(again(tree.start), again(tree.stop), again(tree.step))
            case Sizes():
                if (
                    any(x.line for x in maps)
                    and (number := number_by_size(tree.each, maps[0].sizes)) is not None
                ):
                    return number
                each = " or ".join(dict.fromkeys(map(str, tree.each)))
                raise self.refusal(
                    f"takes a number that depends on the image's size ({each}): use a fixed number"
                )
        return tree

    # kinds of call

    def drop(self, kind: type, x: Any, p: float, training: bool) -> Any:
        """Add a dropout layer and return its output; return ``x`` itself in evaluation mode.

        Args:
            kind: class of the layer for a map, such as ``nn.Dropout2d``. A vector gets a
                :class:`VectorDropout`.
            x: the map or vector to which the call applies dropout.
            p: the dropout probability.
            training: False in evaluation mode.
        """
        x, p = self.value(x), self.fixed(p, "probability")
        if not training or p == 0 and not x.plain:
            return x
        order = order_of(x.axes)
        first, last = (
            (1, "batch", x.channels, *(n for d in range(self.dims) for n in (d, 1))),
            (1, "batch", *(n for d in range(self.dims) for n in (1, d)), x.channels),
        )
        if (
            not x.axes[0].batch
            or x.axes[0].mixed
            or not x.vector
            and order not in (first, last)
            or order == last != first
            and x.axes[-1].cell != x.channels
            or x.rank < 2
        ):
            raise self.refusal(
                f"applies a dropout to {x!r}, which is not supported: permute it before the "
                f"dropout, to (N, C, {', '.join('DHW'[-self.dims :])}) or so that channels come "
                "last"
            )
        made = self.layer(VectorDropout if x.vector else kind, x, p, axes=x.axes)
        self._claim(self.number, made, not x.vector and order == last and order != first)
        return made

    def dropped_images(self, x: Value, factor: Made) -> Value | None:
        """Add a layer for stochastic depth: a product of a map and a random 0 or 1 for each image.

        The factor may also be 0 or 1 / keep, where keep is the probability of 1. Return the layer's
        output. Return None if the factor is of another kind.

        Args:
            x: the map that is multiplied.
            factor: reference to the factor.
        """
        found, calls = factor, self.traces[0].calls
        divided = None
        if calls[found.call].name in ("div", "true_divide") and isinstance(
            calls[found.call].args[0], Made
        ):
            found, divided = calls[found.call].args
        call = calls[found.call]
        if call.name == "bernoulli" and len(call.args) > 1 and isinstance(call.args[1], float):
            draw, keep = found, call.args[1]
        # floor(rand + keep) is 1 with probability keep.
        elif call.name == "floor" and calls[call.args[0].call].name == "add":
            parts = calls[call.args[0].call].args
            draw = next((x for x in parts if isinstance(x, Made)), None)
            keep = next((x for x in parts if isinstance(x, float)), None)
            if draw is None or keep is None or calls[draw.call].name != "rand":
                return None
        else:
            return None
        one_an_image = all(
            t.calls[found.call].shapes[0] == (t.batch, *(1,) * (x.rank - 1)) for t in self.traces
        )
        if not one_an_image or divided not in (None, keep) or x.vector or x.axes[0] != Axis(True):
            return None
        if draw.call in self._claimed:
            raise self.refusal(
                f"uses {calls[draw.call]} for stochastic depth, but another call uses the same "
                "random numbers, which is not supported: draw new numbers for each call, or first "
                "add or concatenate the feature maps and multiply the result once"
            )
        # User code may have divided already: x / keep * mask, which is x in evaluation.
        before = self.divisors.get(x.name)
        kept = 1.0 if divided is None else 1 / keep
        evaluated = keep if before == keep and divided is None else 1.0
        made = self.emit(lambda _: DropImage(1 - keep, kept, evaluated), [x], axes=x.axes)
        self._claim(draw.call, made, False)
        return made

    def _claim(self, number: int, made: Value, last: bool) -> None:
        """Record that a new dropout layer draws the random numbers of a dropout call in user code.

        Args:
            number: index of the call in the traces.
            made: output of the layer.
            last: True if the channels of the map are the last dim in user code.
        """
        self._claimed.add(number)
        self.dropouts[self._draws[number]] = Dropped(made.name, last)

    def same_places(self, sizes: tuple[tuple[int, ...], ...]) -> Value | None:
        """Return the newest map of a given size; None if the network has no map of this size.

        Args:
            sizes: the size of the map for each traced image size.
        """
        return next(
            (v for v in reversed(self.values.values()) if not v.vector and v.sizes == sizes), None
        )

    def like(self, sizes: tuple[tuple[int, ...], ...]) -> Value:
        """Return a map of a given size, for use by a layer that reads only the map's size.

        If the network has no map of this size, add a layer that pools a larger map to it.

        Args:
            sizes: the size of the map for each traced image size.
        """
        if found := self.same_places(sizes):
            return found
        for v in [v for v in reversed(self.values.values()) if not v.vector]:
            by = _whole_times(v.sizes, sizes)
            if by is not None:
                name = self._unique(f"{self._name()}_like")
                self._add(
                    name,
                    lambda _: (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[self.dims - 1](
                        by if self.dims > 1 else by[0]
                    ),
                    [v],
                )
                return replace(
                    v.as_plain,
                    name=name,
                    shapes=tuple((*shape[:2], *size) for shape, size in zip(v.shapes, sizes)),
                )
        raise self.refusal(
            f"spreads a vector of the image over {'x'.join(map(str, sizes[0]))} positions, a size "
            "that no feature map has: repeat it to the size of a feature map"
        )

    def resized(self, x: Value, sizes: tuple[tuple[int, ...], ...]) -> Value:
        """Return the vector ``x`` in a form that can be combined with maps of the size ``sizes``.

        Each vector is recorded for maps of one size (:attr:`Value.shapes`). If ``x`` is recorded
        for another size, add a layer that returns ``x`` unchanged, with its output recorded for
        ``sizes``. Refuse a line (a vector such as row means) for another size.

        Args:
            sizes: size of the maps for each traced image size.
        """
        if sizes == x.sizes:
            return x
        if x.line:
            raise self.refusal(
                f"combines {x!r}, which was computed from one feature map, with values of a "
                "feature map of another size: resize one of the two feature maps first"
            )
        like, rules = self.followed(x, sizes)
        name = self._unique(f"{self._name()}_places")
        self._add(name, lambda _: VectorAt(rules), [x, like])
        self.size_rules[name] = tuple(rules)
        return replace(
            x, name=name, shapes=tuple((*shape[:2], *size) for shape, size in zip(x.shapes, sizes))
        )

    def meeting(self, maps: Sequence[Value]) -> list[Value]:
        """Return the maps and vectors that a call combines, vectors fitted to the maps' size.

        Each vector is recorded for maps of one size (:attr:`Value.shapes`). A vector for another
        size is replaced by the output of a new layer (:meth:`resized`). If there is no map, the
        vectors are fitted to the size of a line among them, or else to the smallest of their sizes.

        Args:
            maps: the maps, all of one size, and the vectors.
        """
        sizes = next(
            (
                x.sizes
                for x in sorted(maps, key=lambda x: (x.vector, not x.line))
                if not x.vector or x.line
            ),
            None,
        ) or min((x.sizes for x in maps), key=lambda sizes: math.prod(sizes[0]))
        return [self.resized(x, sizes) if x.vector else x for x in maps]

    def replaced(self, tree: Any, by: Mapping[Value, Value]) -> Any:
        """Return arguments in which ``by[x]`` replaces each value x that is a key of ``by``.

        Args:
            tree: an argument, or a tuple or dict of arguments.
        """
        if isinstance(tree, tuple):
            return tuple(self.replaced(x, by) for x in tree)
        if isinstance(tree, dict):
            return {key: self.replaced(x, by) for key, x in tree.items()}
        return by.get(tree, tree) if isinstance(tree, Value) else tree

    def each(self, n: Any) -> Any:
        """Return a setting as a tuple with an entry for each spatial dim, such as (2, 2) for 2.

        A string or a longer tuple is returned unchanged.
        """
        return (
            n
            if isinstance(n, str) or isinstance(n, tuple) and len(n) > 1
            else (n[0] if isinstance(n, tuple) else n,) * self.dims
        )


DIFFERENT = (
    "the network calls different functions for different image sizes: the functions that forward "
    "calls must not depend on the image's size"
)
POSITIONS = (
    "a separate value for each position of the image is not supported here; use one value for each "
    "channel, or one value for all"
)
_EACH_PLACE = (
    "takes a tensor of {} with a separate value for each position of the image, or for each image "
    "of the batch, which is not supported: use one value for each channel, or one value for all"
)
_OF_BATCH = (
    "mixes the images of a batch {}, but images are computed separately: remove this, or use a "
    "batch norm"
)
# The serial program (distseg.training.serial) counts the same functions.
_DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_dropout",
    "rand",
    "bernoulli",
)
_CASTS = {"to", "type", "float", "double", "half", "bfloat16"}
_OVER_PLACES = FILLS | {"expand", "expand_as", "broadcast_to", "repeat", "tile"}
_AS_NUMPY = {"axis": "dim", "keepdims": "keepdim"}
_RANDOM = RANDOM | EMPTY


def follows_size(calls: Sequence[Called]) -> bool:
    """Return True if a call fills or expands a tensor to a shape that differs between traces.

    An example is ``torch.zeros(n)`` with n the height of the image.

    Args:
        calls: the same call as each trace records it, one entry for each traced image size.
    """
    return calls[0].name in _OVER_PLACES and len({call.shapes for call in calls}) > 1


def _is_result(x: Value, sizes: Sequence[Sequence[int]]) -> bool:
    """Return True if ``x`` has a shape that is supported as a network's output.

    Such a shape is that of a map of the image's size, a vector (N, C), or a vector (N, C, 1, ...).

    Args:
        sizes: the traced image sizes.
    """
    if x.vector:
        return (
            not x.line and x.rank > 1 and x.axes[0] == Axis(True) and x.axes[1].cell == x.channels
        )
    return x.plain and x.sizes == tuple(map(tuple, sizes))


def _is_sum(axes: Axes) -> bool:
    """Return True if one dim of a vector depends on the image's size, as a sum such as H or H + W.

    Return False if several dims depend on it, or if a length is a product such as H * W.

    Args:
        axes: the meaning of each dim of the vector.
    """
    return (
        not any(len(dims) > 1 for axis in axes for _, dims in axis.whole)
        and sum(bool(axis.whole) for axis in axes) == 1
    )


def _own_name(kept: Kept, own: dict[str, Kept]) -> str:
    """Return the name that a layer gives to one of the user's parameters or buffers.

    If ``own`` does not have the parameter or buffer yet, choose a name and add it.

    Args:
        kept: reference to the user's parameter or buffer.
        own: parameters and buffers of the layer, by their names in the layer.
    """
    if (found := next((name for name, other in own.items() if other == kept), None)) is not None:
        return found
    free = (
        name
        for name in (kept.name.rpartition(".")[2], kept.name.replace(".", "_"))
        if name not in own and name not in taken()
    )
    name = next(free, None) or f"{kept.name.replace('.', '_')}_{len(own)}"
    while name in own:
        name += "_"
    own[name] = kept
    return name


def _read_as(x: Value) -> Read:
    return Read(x.axes, x.dtype)


def _signature_error(e: TypeError) -> str:
    """Return the message of a TypeError without the function's name, which the user does not know.

    The error comes from a call of one of distseg's functions with the user's arguments.
    """
    return str(e).partition("() ")[2] or str(e)


def _with_tensors(layer: nn.Module, found: dict[str, Tensor]) -> nn.Module:
    """Return ``layer`` with the tensors ``found`` as its parameters and buffers."""
    for name in found:
        # The user's weight may be a buffer, and a name in _buffers may hold None.
        layer._parameters.pop(name, None)
        layer._buffers.pop(name, None)
    register(layer, found)
    if (
        "num_batches_tracked" not in found
        and getattr(layer, "num_batches_tracked", None) is not None
    ):
        layer.num_batches_tracked = torch.zeros((), dtype=torch.long)
    return layer


def _whole_times(
    large: Sequence[tuple[int, ...]], small: Sequence[tuple[int, ...]]
) -> tuple[int, ...] | None:
    """Return, for each spatial dim, the integer k with ``large // k == small`` in all traces.

    Return None if a dim has no such integer.

    Args:
        large, small: the sizes of two maps, one entry for each traced image size.
    """
    factors = [_divisor(*each) for each in zip(zip(*large), zip(*small))]
    return tuple(factors) if all(factors) else None


def _divisor(large: Sequence[int], small: Sequence[int]) -> int | None:
    """Return the integer k with ``large[i] // k == small[i]`` for every i, or None."""
    return next(
        (
            k
            for k in range(1, large[0] // max(1, small[0]) + 1)
            if all(n // k == m for n, m in zip(large, small))
        ),
        None,
    )


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, times: int, each: int) -> Tensor:
    channel = (-1, *(1 for _ in x.shape[2:]))
    x = x if weight is None else x * weight.repeat(times).repeat_interleave(each).view(channel)
    return x if bias is None else x + bias.repeat(times).repeat_interleave(each).view(channel)


def has_sizes(tree) -> bool:
    """Return True if a setting of a call is a number that differs between the traced image sizes.

    Args:
        tree: the setting, or a tuple or slice of numbers. One such number in it suffices.
    """
    if isinstance(tree, slice):
        return any(map(has_sizes, (tree.start, tree.stop, tree.step)))
    return isinstance(tree, Sizes) or isinstance(tree, tuple) and any(map(has_sizes, tree))


def _needed(found: Trace) -> list[int]:
    """Return the indices of the calls that a trace's result depends on, in ascending order."""
    needed, left = set(), [found.result.call]
    while left:
        number = left.pop()
        if number >= 0 and number not in needed:
            needed.add(number)
            left += [made.call for made in _used(found.calls[number])]
    return sorted(needed)


def _image_calls(traces: Sequence[Trace], needed: Sequence[int]) -> list[int]:
    """Return, in ascending order, the indices of the calls that depend on the image or on its size.

    Args:
        needed: indices of the calls to choose from.
    """
    of_image = {PIXELS.call}
    for number in needed:
        each = [t.calls[number] for t in traces]
        if any(made.call in of_image for made in _used(each[0])) or follows_size(each):
            of_image.add(number)
    return sorted(of_image - {PIXELS.call})


def _used(call: Called) -> list[Made]:
    return found_in((call.args, call.kwargs), Made)


def _main_call(module: str, calls: Sequence[Called], numbers: Sequence[int]) -> int | None:
    """Return the index of the only call of a module that reads the module's weights.

    If no call reads them, return the index of the module's only call. Return None if the module
    calls other modules, or if several calls qualify.

    Args:
        module: name of the module.
        numbers: indices of the calls among which the function chooses.
    """
    if any(calls[n].module.startswith(f"{module}.") for n in numbers):
        return None
    own = [n for n in numbers if calls[n].module == module]
    weighted = [
        n
        for n in own
        if any(
            kept.name.rpartition(".")[0] == module
            for kept in found_in((calls[n].args, calls[n].kwargs), Kept)
        )
    ]
    if len(weighted) == 1:
        return weighted[0]
    return own[0] if len(own) == 1 else None
