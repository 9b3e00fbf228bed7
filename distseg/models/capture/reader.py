"""Reads the calls of a forward pass one after another, and makes the layers of a network of them.

What a call is, is said by a rule (:mod:`distseg.models.capture.rules`); here is what rules are written with: maps as values, layers that join the network,
refusals that name the call. Rules that keep numbers and give them another form: :mod:`distseg.models.capture.arranging`; that take statistics of the image:
:mod:`distseg.models.capture.reducing`.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any, Callable, Mapping, Sequence

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
from distseg.models.capture.lining import lines_spread, told_by_size
from distseg.models.capture.measures import measured
from distseg.models.capture.placing import plan_of, with_positions
from distseg.models.capture.trace import (
    DRAWS,
    EMPTY,
    Called,
    CanNotCapture,
    Kept,
    Made,
    Trace,
    found_in,
)
from distseg.models.capture.trace import IMAGE as PIXELS
from distseg.models.capture.values import Sizes, Value
from distseg.models.joined import outputs_of
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
from distseg.tiling.resize import Follow


class Differ(Exception):
    """Two traces are not of the same calls."""


class Reader:
    """The layers of some traces of one network.

    Args:
        shapes: of its parameters and buffers, by name.
        sizes: of the image of each trace.
        rule: what the call at hand makes of its arguments, in which maps are values (:func:`distseg.models.capture.rules.made`).
        source: makes a trace of an image of any size.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], sizes: Sequence[tuple[int, ...]], traces: Sequence[Trace], rule: Callable[["Reader", tuple, dict], Any],
        source: Callable[[tuple[int, ...]], Trace] | None = None,
    ):  # fmt: skip
        self.shapes, self.dims, self.sizes, self.traces, self._rule = (
            shapes,
            len(sizes[0]),
            tuple(sizes),
            traces,
            rule,
        )
        self.told: dict[str, Any] = {}  # of layers by name, how their sizes follow others
        self.source = source
        self.positions: dict[
            tuple, Value
        ] = {}  # what was made of the image's size alone, by what it is and the dims that it has
        self.layers: dict[
            str, tuple[Callable[[Callable[[str], Tensor]], nn.Module], tuple[str, ...]]
        ] = {}
        self.names: dict[str, str] = {}
        self.lines: dict[str, str] = {}
        self.folding: Folding | None = None  # of the map of the call at hand
        self._detached: dict[Made, Value] = {}
        self.keepers: dict[
            str, str
        ] = {}  # of running means by name, the module whose calls change them
        self.dropouts: dict[int, Dropped] = {}
        self._claimed: set[int] = set()  # the calls whose random numbers are those of dropouts
        self.divisors: dict[str, float] = {}  # of layers that divide a map by a number
        self.maxima: dict[
            str, tuple[int, ...]
        ] = {}  # of layers that tell which place of a window is the largest, the window
        self.stacks: dict[
            str, tuple[Value, ...]
        ] = {}  # of layers that stack maps along a new first dim
        calls = traces[0].calls
        if len({(len(t.calls), t.result) for t in traces}) > 1:
            raise CanNotCapture(DIFFERENT)
        needed = _needed(traces[0])
        numbers = _of_image(traces, needed)
        self._modules = {
            ".".join(path[: depth + 1])
            for n in numbers
            for path in [calls[n].module.split(".")]
            for depth in range(len(path))
        }
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
                f"its result, of {calls[traces[0].result.call]}, is computed without gradients "
                f"(torch.no_grad): leave that to evaluation"
            )
        result = self.values.get(traces[0].result)
        self.of_image = result is not None and result.vector
        if result is None or not _is_result(result, sizes):
            made = "x".join(
                map(str, traces[0].calls[traces[0].result.call].shapes[traces[0].result.part])
            )
            raise CanNotCapture(
                f"it makes {made} of images of {'x'.join(map(str, sizes[0]))} pixels, but a "
                f"segmentation network keeps the size, and one for whole images makes a vector "
                f"of each"
            )
        self._let_go_of_unread(result)
        if result.name != next(reversed(self.layers), IMAGE):  # the last call is not the result's
            self._add("result", lambda tensor: nn.Identity(), [result])

    def _check_draws(self, needed: Sequence[int]) -> None:
        """Refuse random numbers that the result depends on, and that are no dropout's."""
        for number in needed:
            if number not in self._claimed and any(t.calls[number].draws for t in self.traces):
                raise CanNotCapture(f"{self.traces[0].calls[number]} {DRAWS}")

    def network(self, model: nn.Module) -> Network:
        """With the model's own parameters and buffers."""
        tensors = dict(
            [
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            ]
        )
        layers = {name: make(tensors.__getitem__) for name, (make, _) in self.layers.items()}
        if (outputs := outputs_of(model)) > 1:
            layers[self._unique("main_output")] = MainOutput(outputs)
        network = Network(layers, {name: reads for name, (_, reads) in self.layers.items()})
        used = set(self.names.values())
        unused = {
            name: tensor
            for name, tensor in tensors.items()
            if name not in used and tensor.is_floating_point()
        }
        held = {name: f"{number}_{name.replace('.', '_')}" for number, name in enumerate(unused)}
        network.hold_unused({held[name]: tensor for name, tensor in unused.items()})
        self.names.update({f"{UNUSED}.{held[name]}": name for name in unused})
        network.names = {own: user for own, user in self.names.items() if own != user}
        network.dropouts, network.of_image, network.lines = self.dropouts, self.of_image, self.lines
        return network

    def _let_go_of_unread(self, result: Value) -> None:
        """Leave out the layers that the result does not depend on: those of which the code asks for the size alone, or one of several results."""
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

    def differs(self, other: "Reader") -> str | None:
        """Return a layer that another reader of this network, with more traces, makes otherwise; None if there is none."""
        mine, theirs = (
            {name: (reads, reader.told.get(name)) for name, (_, reads) in reader.layers.items()}
            for reader in (self, other)
        )
        return next(
            (name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)), None
        )

    # the call that is read

    @property
    def call(self) -> Called:
        return self.current[0]

    def _read(self) -> None:
        if len({c.name for c in self.current}) > 1:
            raise Differ
        args, kwargs = (
            self._merged([c.args for c in self.current]),
            self._merged([c.kwargs for c in self.current]),
        )
        if not found_in((args, kwargs), Value) and not follows_size(self.current):
            return  # nothing of the image is in it
        if self.call.name in EMPTY:
            return  # what is put into it counts
        if self.call.name in _RANDOM:
            raise self.refusal(DRAWS)
        kwargs = {_AS_NUMPY.get(name, name): x for name, x in kwargs.items()}
        if kwargs.get("out", True) is None:
            del kwargs["out"]
        if kwargs.get("dtype", 0) in (
            None,
            torch.float32,
            torch.float64,
        ):  # precision is a setting of the run
            del kwargs["dtype"]
        if self.call.name not in FACTORIES and any(
            name in kwargs and kwargs[name] is not None for name in ("dtype", "out")
        ):
            raise self.refusal(
                "is told a type, or a tensor, for its result: leave types to train.precision"
            )
        try:
            made = self._rule(self, args, kwargs)
        except CanNotCapture:
            if plan_of(self, Made(self.number), ()) is None:
                raise
            return  # it is computed of the image's size, where something joins it with a map
        except TypeError as e:
            if "argument" not in str(e):
                raise
            raise self.refusal(
                f"is called in a way that is not known ({_signature_error(e)})"
            ) from None
        for part, value in enumerate(made if isinstance(made, tuple) else (made,)):
            if value is not None:
                self.values[Made(self.number, part)] = self._typed(value, part)

    def _typed(self, value: Value, part: int) -> Value:
        """The value with its type, where that is no floating point number."""
        dtype = self.call.dtypes[part]
        return value if dtype.is_floating_point else replace(value, dtype=dtype)

    def _merged(self, each: Sequence[Any]) -> Any:
        """What all traces have alike, maps as values; numbers that differ as sizes."""
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
        """Return the value that the current call is given. A value computed under torch.no_grad is detached if the current call has gradients."""
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
        return CanNotCapture(f"{self.call} {why}", everywhere)

    def map(self, x: Any) -> Value:
        """An argument that is to be a map (N, C, *size)."""
        x = self.value(x)
        if not x.plain:
            self.unfold(x)
            raise self.refusal(
                f"takes {x!r}, where a map (N, C, {', '.join('DHW'[-self.dims :])}) is expected"
            )
        return x

    def unfold(self, x: Value) -> None:
        """Begin the rule at hand anew where its map has more than images in the dim of the batch, in a way that is known.

        Raises:
            Folded, Deep: which :func:`distseg.models.capture.rules.made` takes.
        """
        if self.folding is None and is_deep(x, self.call.name):
            raise Deep(x)
        folding = Folding.of(x)
        if folding is not None and self.folding is None and knows(self.call.name, folding):
            raise Folded(x, folding)

    def value(self, x: Any) -> Value:
        """An argument that is to be a map or a vector of the image, in any form."""
        if not isinstance(x, Value):
            what = (
                "what is computed of parameters and numbers alone"
                if isinstance(x, (Made, Kept))
                else repr(x)
            )
            raise self.refusal(f"takes {what} where a map of the image is expected")
        return x

    def fixed(self, x: Any, what: str) -> Any:
        """A setting, which must not follow the image's size."""
        if has_sizes(x):
            raise self.refusal(f"has a {what} that depends on the image's size")
        return x

    def fixed_all(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {name: self.fixed(x, name) for name, x in settings.items()}

    def dims_of(self, dim: Any, x: Value) -> tuple[int, ...]:
        """The dims of the user's tensor that a function is told, counted from the first; None: all."""
        given = (
            tuple(range(x.rank))
            if dim is None or dim == ()
            else dim
            if isinstance(dim, tuple)
            else (dim,)
        )
        if not all(isinstance(d, int) and -x.rank <= d < x.rank for d in given):
            raise self.refusal(f"is told dim {dim} of {x!r}")
        return tuple(d % x.rank for d in given)

    def of_channels(self, dim: Any, x: Value) -> bool:
        """Whether dims are those of channels alone; an error where images of the batch are among them."""
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
        """An argument that is to be a parameter, or computed from such."""
        if isinstance(x, Value):
            raise self.refusal("has a weight that is computed from the image")
        return (
            self.shapes[x.name]
            if isinstance(x, Kept)
            else self.traces[0].calls[x.call].shapes[x.part]
        )

    def axes_of(self, x: Any) -> Axes:
        """The axes of a value, or of a parameter, whose dims are channels."""
        return x.axes if isinstance(x, Value) else tuple(Axis(cell=n) for n in self.shape_of(x))

    def learns(self, x: Made | Kept) -> bool:
        """Return True if a tensor is a parameter, or is computed from one or from the image: a gradient may go there."""
        if isinstance(x, Kept):
            return x.name in self.traces[0].parameters
        call = self.traces[0].calls[x.call] if x != PIXELS else None
        return call is None or any(map(self.learns, found_in((call.args, call.kwargs), Made, Kept)))

    def made(self, like: Value, part: int = 0) -> Axes:
        """What the dims of the call's result are, which has the places of the map that it is ``like``, or none."""
        shape = self.call.shapes[part]
        told = line_of if like.vector else axes_of
        axes = told(
            [c.shapes[part] for c in self.current], [t.batch for t in self.traces], like.sizes
        )
        if axes is None:
            raise self.refusal(
                f"makes a tensor of {shape} of {like!r}, whose dims are neither images, "
                f"channels nor places: that is not known here"
            )
        if sum(axis.batch for axis in axes) != 1 and (of_images(axes) or of_images(like.axes)):
            raise self.refusal(_OF_BATCH.format("of each other"))
        places = places_of(axes)
        if places and places != tuple(range(self.dims)):
            whole = len(set(places)) == self.dims
            raise self.refusal(
                f"makes {shape} of {like!r}: it "
                f"{'turns the image, or joins all places with all' if whole else 'takes rows or columns of the image together'}, "
                f"which is not known here"
            )
        return axes

    # what layers are made of

    def emit(
        self, make: Callable[[dict[str, Tensor]], nn.Module], reads: Sequence[Value], tensors: Mapping[str, Kept] = {}, part: int = 0, axes: Axes | None = None, what: str = "",
        sizes: Sequence[tuple[int, ...]] = (),
    ) -> Value:  # fmt: skip
        """A layer.

        Args:
            make: is given its tensors by their names in the layer.
            part: which of the call's results it makes.
            axes: of the result, where it has the places of ``reads``, or none; by default the call makes a map (N, C, *size) of any size.
            what: one of several layers that the call is; its name ends so.
            sizes: of the map, in each trace, where ``axes`` are given and it has other places than ``reads``.
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
                    f"makes a tensor of {shapes[0]} of {reads[0]!r}, which is no map of as "
                    f"many images, with channels that do not depend on the image's size"
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

    def followed(self, x: Value, sizes: tuple[tuple[int, ...], ...]) -> tuple[Value, list[Follow]]:
        """A map, and how sizes follow its own; ``x``: what is to get them."""
        if (found := followed(sizes, x, (v for v in self.values.values() if not v.vector))) is None:
            raise self.refusal(
                f"makes {'x'.join(map(str, sizes[0]))} places of "
                f"{'x'.join(map(str, x.sizes[0]))}, as many as no other map has, and no "
                f"fraction of one"
            )
        return found

    def following(
        self,
        make: Callable[[], nn.Module],
        x: Value,
        like: Value,
        rules: Sequence[Follow],
        more: tuple = (),
        **settings,
    ) -> Value:
        """A layer whose size follows that of the map ``like`` by ``rules``.

        Args:
            more: what else of it was found by comparing sizes.
            settings: of :meth:`emit`.
        """
        made = self.emit(lambda _: make(), [x, like], **settings)
        self.told[made.name] = (*rules, *more)
        return made

    def applied(
        self,
        function: Callable[..., Tensor],
        operands: Sequence[Any],
        what: str,
        axes: Axes | None = None,
    ) -> Value:
        """A function of single cells that the user's call is made of, besides others.

        Args:
            function: gets the maps as the user's code has them; a function of a module, or ``partial`` of one.
            operands: its arguments: maps, vectors, parameters and what is computed of these, numbers.
            what: the layer's name ends so.
            axes: of the result; by default those of the first map.
        """
        maps = [x for x in operands if isinstance(x, Value)] or [self.value(operands[0])]
        if len({x.sizes for x in maps if not x.vector}) > 1:
            raise self.refusal(f"joins {' and '.join(map(repr, maps))}, whose places are not alike")
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
        self, steps: Sequence[Step], given: Sequence[Read], part: int | None, axes: Axes, maps: Sequence[Value], own: Mapping[str, Kept], what: str = ""
    ) -> Value:  # fmt: skip
        """A layer of functions of some maps, the steps; of lines it looks at the size of the map that they are of."""
        kind, steps = Formula, tuple(steps)
        if is_line(axes) or any(x.line for x in maps):
            kind, maps = OfLines, [self.map_of_lines(maps, axes), *maps]
        return self.emit(
            lambda found: kind(steps, given, found, part, axes), maps, own, part or 0, axes, what
        )

    def map_of_lines(self, lines: Sequence[Value], axes: Axes = ()) -> Value:
        """A map of the size that lines follow, of which functions of them look at the size."""
        if not all(x.vector for x in lines):
            raise self.refusal(
                f"joins {' and '.join(map(repr, lines))} in a way that is not known here: "
                f"multiplied or added, place by place, they are known"
            )
        if {d for axis in axes for _, dims in axis.whole for d in dims} == set(
            range(self.dims)
        ) and not _is_sum(axes):
            raise self.refusal(
                f"makes {self.call.shapes[0]} of {lines[0]!r}, a map that each rank would have "
                f"as a whole: made by adding or multiplying lines it is known"
            )
        found = self.same_places(lines[0].sizes)
        if found is None:
            raise self.refusal(f"is of {lines[0]!r}, which has the places of no map any longer")
        return found

    def _add(self, name: str, make, reads: Sequence[Value]) -> None:
        assert name not in self.layers, name
        self.layers[name] = make, tuple(x.name for x in reads)
        self.lines[name] = self.call.line

    def _name(self) -> str:
        """The module's, for the call that has its weights, or its only one; else its name and the function's."""
        module, function = self.call.module, self.call.name.strip("_")
        if module in self._homes:
            name = module if self._homes[module] == self.number else f"{module}_{function}"
        else:
            name = f"{module}.{function}".lstrip(".")
        return self._unique(self._allowed(name))

    def _allowed(self, name: str) -> str:
        """Return the name of a layer in which no part is one that networks have themselves."""
        theirs, parts = (
            {part for module in self._modules for part in module.split(".")},
            name.split("."),
        )
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
        """One of PyTorch's own, or of ours, with the user's tensors, or with weights that are computed from them; ``axes``: as of :meth:`emit`."""
        tensors = {name: value for name, value in tensors.items() if value is not None}
        if any(isinstance(value, Value) for value in tensors.values()):
            raise self.refusal("has a weight that is computed from the image")
        plain = lambda: kind(*args, **kwargs, **({"device": "meta"} if tensors else {}))
        convolves = issubclass(kind, nn.modules.conv._ConvNd)
        if not any(isinstance(value, Made) for value in tensors.values()) and not (
            self.folding and convolves
        ):
            return self.emit(lambda found: _with_tensors(plain(), found), [x], tensors, axes=axes)
        if not convolves:
            raise self.refusal(
                "has running statistics that are computed: parameters or buffers are known"
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
        """Make a norm with the user's weight and bias: each a parameter, a buffer, or computed from such.

        Args:
            args: those of the layer's class up to ``affine``, but for that.
        """
        if isinstance(weight, Value) or isinstance(bias, Value):
            raise self.refusal("has a weight that is computed from the image")
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
                f"normalises {x!r} with a weight alone, a bias alone, or one that is computed: "
                f"of maps that is known"
            )
        return self.scaled(
            self.layer(kind, x, *args, False, tensors=tensors, axes=x.axes, **kwargs), weight, bias
        )

    def scaled(self, x: Value, weight: Any, bias: Any) -> Value:
        """Multiply the channels of a map by a weight (C,), and add a bias (C,); either may be None."""
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
        """Of a function that looks at single cells, of tensors that are broadcast."""
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
                    f"joins {' and '.join(map(repr, dict.fromkeys(maps)))}, whose dims are not "
                    f"alike"
                )
            places = any(axis.batch or axis.places or axis.whole for axis in there)
            for x, shape in others:
                if places and len(shape) >= back and shape[-back] != 1:
                    raise self.refusal(_EACH_PLACE.format(shape))
        if any(len(shape) > rank for _, shape in others):
            raise self.refusal(
                f"joins {maps[0]!r} with a tensor of "
                f"{max((shape for _, shape in others), key=len)}, which has more dims"
            )
        return self.formula(args, kwargs, part)

    def formula(self, args: tuple, kwargs: dict, part: int | None = None) -> Value:
        """Of a function that is known to look at single cells."""
        args, kwargs, maps = self._met(args, kwargs)
        own: dict[str, Kept] = {}
        steps: list[Step] = []
        places: dict[Made, int] = {}
        given = {key: x for key, x in kwargs.items() if key not in ("inplace", "out")}
        last = tuple(
            self._written(tree, maps, own, steps, places) for tree in (args, given)
        )  # what it is computed from comes before
        steps.append(Step(out_of_place(self.call.function), *last))
        like = next((x for x in maps if not x.vector), maps[0])
        axes, given = self.made(like, part or 0), tuple(map(_read_as, maps))
        if not like.vector and not places_of(axes):
            raise self.refusal(
                f"makes {self.call.shapes[part or 0]} of {like!r}: it takes places of the "
                f"image together in a way that is not known here"
            )
        if any(axis.mixed and not any(axis in x.axes for x in maps) for axis in axes):
            raise self.refusal(
                f"makes {self.call.shapes[part or 0]} of {like!r}: single cells alone are known"
            )
        return self._emit_formula(steps, given, part, axes, maps, own)

    def _met(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, list[Value]]:
        """The arguments, with vectors where the maps are that they are joined with, and the maps among them."""
        maps = list(dict.fromkeys(found_in((args, kwargs), Value)))
        if len({x.sizes for x in maps if not x.vector}) > 1:
            raise self.refusal(f"joins {' and '.join(map(repr, maps))}, whose places are not alike")
        there = dict(zip(maps, self.meeting(maps)))
        return (
            self.replaced(args, there),
            self.replaced(kwargs, there),
            list(dict.fromkeys(there.values())),
        )

    def _computed(self, value: Made | Kept, own: dict[str, Kept]) -> tuple[Step, ...]:
        """How a weight comes of parameters, which join ``own``."""
        steps: list[Step] = []
        written = self._written(value, (), own, steps, {})
        return tuple(steps) if isinstance(written, Map) else (*steps, Step(_itself, (written,), {}))

    def _written(
        self,
        tree: Any,
        maps: Sequence[Value],
        own: dict[str, Kept],
        steps: list[Step],
        places: dict[Made, int],
    ) -> Any:
        """Arguments as a layer keeps them; what is computed of parameters alone joins ``steps``, once each: ``places`` tell where."""
        again = lambda x: self._written(x, maps, own, steps, places)
        match tree:
            case Value():
                if tree not in maps:
                    raise self.refusal(
                        f"takes a weight, or another tensor of its own, that is computed from "
                        f"the image ({tree!r}): that is not known here"
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
                        f"takes what {call} makes, which "
                        f"{'has no value yet: use zeros' if 'empty' in call.name else DRAWS}"
                    )
                if (found := constant_of(self.traces[0].calls, tree)) is not None:
                    others = [constant_of(t.calls, tree) for t in self.traces[1:]]
                    if not all(other is not None and torch.equal(found, other) for other in others):
                        raise self.refusal(
                            f"takes what {call} makes, which has other values with other sizes "
                            f"of images: {POSITIONS}"
                        )
                    return Fixed(found)
                if call.name in _CASTS:
                    raise self.refusal(
                        f"takes what {call} makes, a cast: keep that parameter or buffer in "
                        f"floating point, and leave types to train.precision"
                    )
                if not found_in((call.args, call.kwargs), Kept, Made):
                    raise self.refusal(
                        f"takes what {call} makes, which is neither computed of the image nor "
                        f"of parameters, and depends on the image's size: {POSITIONS}"
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
                    and (told := told_by_size(tree.each, maps[0].sizes)) is not None
                ):
                    return told
                raise self.refusal(f"has a number that depends on the image's size {tree}")
        return tree

    # kinds of call

    def drop(self, kind: type, x: Any, p: float, training: bool) -> Any:
        """A dropout."""
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
                f"drops numbers of {x!r}: of a map (N, C, {', '.join('DHW'[-self.dims :])}), "
                f"or one whose channels come last, that is known"
            )
        made = self.layer(VectorDropout if x.vector else kind, x, p, axes=x.axes)
        self._claim(self.number, made, not x.vector and order == last and order != first)
        return made

    def dropped_images(self, x: Value, factor: Made) -> Value | None:
        """Stochastic depth: a map by a random 0 or 1 for each image, perhaps divided by how often it is 1."""
        found, calls = factor, self.traces[0].calls
        divided = None
        if calls[found.call].name in ("div", "true_divide") and isinstance(
            calls[found.call].args[0], Made
        ):
            found, divided = calls[found.call].args
        call = calls[found.call]
        if call.name == "bernoulli" and len(call.args) > 1 and isinstance(call.args[1], float):
            draw, keep = found, call.args[1]
        elif (
            call.name == "floor" and calls[call.args[0].call].name == "add"
        ):  # of a number from 0 to 1, and how often it is kept
            parts = calls[call.args[0].call].args
            draw, keep = (
                next((x for x in parts if isinstance(x, Made)), None),
                next((x for x in parts if isinstance(x, float)), None),
            )
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
                f"leaves out images by {calls[draw.call]}, as another function does: one draw "
                f"at several places is not known here: draw for each of them, or multiply "
                f"their sum or torch.cat"
            )
        before = self.divisors.get(x.name)  # x / keep * mask, which is x in evaluation
        kept, evaluated = (
            (1.0 if divided is None else 1 / keep),
            (keep if before == keep and divided is None else 1.0),
        )
        made = self.emit(lambda _: DropImage(1 - keep, kept, evaluated), [x], axes=x.axes)
        self._claim(draw.call, made, False)
        return made

    def _claim(self, number: int, made: Value, last: bool) -> None:
        """Have the random numbers of a call be those of a layer."""
        self._claimed.add(number)
        self.dropouts[self._draws[number]] = Dropped(made.name, last)

    def same_places(self, sizes: tuple[tuple[int, ...], ...]) -> Value | None:
        """A map with so many places."""
        return next(
            (v for v in reversed(self.values.values()) if not v.vector and v.sizes == sizes), None
        )

    def like(self, sizes: tuple[tuple[int, ...], ...]) -> Value:
        """The same; made by a pooling where there is none."""
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
            f"spreads a vector of the image over {'x'.join(map(str, sizes[0]))} places, as "
            f"many as no other map has"
        )

    def resized(self, x: Value, sizes: tuple[tuple[int, ...], ...]) -> Value:
        """A vector, where maps have as many places as ``sizes`` say."""
        if sizes == x.sizes:
            return x
        if x.line:
            raise self.refusal(
                f"joins {x!r} with what has other places than the map that it was made of"
            )
        like, rules = self.followed(x, sizes)
        name = self._unique(f"{self._name()}_places")
        self._add(name, lambda _: VectorAt(rules), [x, like])
        self.told[name] = tuple(rules)
        return replace(
            x, name=name, shapes=tuple((*shape[:2], *size) for shape, size in zip(x.shapes, sizes))
        )

    def meeting(self, maps: Sequence[Value]) -> list[Value]:
        """Vectors among maps, or among others of a smaller one's size, where those they are joined with are."""
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
        if isinstance(tree, tuple):
            return tuple(self.replaced(x, by) for x in tree)
        if isinstance(tree, dict):
            return {key: self.replaced(x, by) for key, x in tree.items()}
        return by.get(tree, tree) if isinstance(tree, Value) else tree

    def each(self, n: Any) -> Any:
        """A setting for each dim."""
        return (
            n
            if isinstance(n, str) or isinstance(n, tuple) and len(n) > 1
            else (n[0] if isinstance(n, tuple) else n,) * self.dims
        )


DIFFERENT = (
    "it calls other functions with other sizes of images: what its code does must not depend "
    "on them"
)
POSITIONS = "values of its own for each place of the image are not known here"
_EACH_PLACE = (
    "takes a tensor of {} with a value of its own for each place of the image, or for each "
    "image of the batch, which parts of an image do not know"
)
_OF_BATCH = (
    "joins the images of a batch {}, which are computed apart from each other: leave that out, "
    "or use a batch norm"
)
_DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_dropout",
    "rand",
    "bernoulli",
)  # as distseg.training.serial counts them
_CASTS = {"to", "type", "float", "double", "half", "bfloat16"}
_OVER_PLACES = FILLS | {"expand", "expand_as", "broadcast_to", "repeat", "tile"}
_AS_NUMPY = {"axis": "dim", "keepdims": "keepdim"}
_RANDOM = {
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
    "empty",
    "rrelu",
    "alpha_dropout",
    "gumbel_softmax",
    "new_empty",
    "empty_like",
}


def follows_size(calls: Sequence[Called]) -> bool:
    """Return True if a tensor of one number, or a parameter that is expanded, has places of the image, or a number for each image."""
    return calls[0].name in _OVER_PLACES and len({call.shapes for call in calls}) > 1


def _is_result(x: Value, sizes: Sequence[Sequence[int]]) -> bool:
    """Whether a value is what a network may make: a map of the image's size, or (N, C) or (N, C, 1, ...)."""
    if x.vector:
        return (
            not x.line and x.rank > 1 and x.axes[0] == Axis(True) and x.axes[1].cell == x.channels
        )
    return x.plain and x.sizes == tuple(map(tuple, sizes))


def _is_sum(axes: Axes) -> bool:
    """Return True if places of several dims of the image are concatenated along one dim of the tensor."""
    return (
        not any(len(dims) > 1 for axis in axes for _, dims in axis.whole)
        and sum(bool(axis.whole) for axis in axes) == 1
    )


def _own_name(kept: Kept, own: dict[str, Kept]) -> str:
    """Return the name that a layer has a parameter or buffer by, which joins its ``own``."""
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
    """What a rule was called with that it does not take, without the rule's own name."""
    return str(e).partition("() ")[2] or str(e)


def _with_tensors(layer: nn.Module, found: dict[str, Tensor]) -> nn.Module:
    for name in found:
        layer._parameters.pop(
            name, None
        )  # a weight of the user's may be a buffer, and a buffer's name may hold None
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
    """By which all sizes are larger than others, along each dim, rests left out; None where that is no whole number, or not the same one."""
    factors = [_divisor(*each) for each in zip(zip(*large), zip(*small))]
    return tuple(factors) if all(factors) else None


def _divisor(large: Sequence[int], small: Sequence[int]) -> int | None:
    return next(
        (
            k
            for k in range(1, large[0] // max(1, small[0]) + 1)
            if all(n // k == m for n, m in zip(large, small))
        ),
        None,
    )


def _itself(x: Tensor) -> Tensor:
    return x


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, times: int, each: int) -> Tensor:
    channel = (-1, *(1 for _ in x.shape[2:]))
    x = x if weight is None else x * weight.repeat(times).repeat_interleave(each).view(channel)
    return x if bias is None else x + bias.repeat(times).repeat_interleave(each).view(channel)


def has_sizes(tree) -> bool:
    if isinstance(tree, slice):
        return any(map(has_sizes, (tree.start, tree.stop, tree.step)))
    return isinstance(tree, Sizes) or isinstance(tree, tuple) and any(map(has_sizes, tree))


def _needed(found: Trace) -> list[int]:
    """Return the calls that the result depends on, in order."""
    needed, left = set(), [found.result.call]
    while left:
        number = left.pop()
        if number >= 0 and number not in needed:
            needed.add(number)
            left += [made.call for made in _used(found.calls[number])]
    return sorted(needed)


def _of_image(traces: Sequence[Trace], needed: Sequence[int]) -> list[int]:
    """Return those of some calls that depend on the image, or have its places."""
    of_image = {PIXELS.call}
    for number in needed:
        each = [t.calls[number] for t in traces]
        if any(made.call in of_image for made in _used(each[0])) or follows_size(each):
            of_image.add(number)
    return sorted(of_image - {PIXELS.call})


def _used(call: Called) -> list[Made]:
    return found_in((call.args, call.kwargs), Made)


def _main_call(module: str, calls: Sequence[Called], numbers: Sequence[int]) -> int | None:
    """The call of a module, which calls no others, that its weights go into; of one without weights its only call."""
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
    return weighted[0] if len(weighted) == 1 else own[0] if len(own) == 1 else None
