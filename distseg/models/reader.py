"""Reads the calls of a forward pass one after another, and makes the layers of a network of them.

What a call is, is said by a rule (:mod:`distseg.models.rules`); here is what rules are written with: maps as values, the forms in which the user's code has
them, layers that join the network, refusals that name the call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distseg.models.layers import CutTo, Derived, DropImage, Formula, Map, Own, Restride, Spread, Step, VectorDropout, register
from distseg.models.network import IMAGE, Dropped, Network
from distseg.models.trace import IMAGE as PIXELS
from distseg.models.trace import CanNotCapture, Called, Kept, Made, Trace, found_in


@dataclass(frozen=True)
class Sizes:
    """In the place of a number that follows the size of the image, or of the batch."""

    each: tuple


class Differ(Exception):
    """Two traces are not of the same calls."""


@dataclass(frozen=True)
class Value:
    """A map: what the layer ``name`` makes.

    Attributes:
        shapes: (N, C, *size) in each trace.
        form: in which the user's code has it at this point (:class:`distseg.models.layers.Formula`).
        cell: what it has there in the place of the dim C, such as (groups, C / groups).
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    cell: tuple[int, ...]
    form: str = "maps"

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(shape[2:] for shape in self.shapes)

    @property
    def channels(self) -> int:
        return self.shapes[0][1]

    @property
    def plain(self) -> bool:
        """Whether its channels are one dim."""
        return len(self.cell) == 1


@dataclass(frozen=True)
class Stack:
    """Maps side by side in a new first dim."""

    maps: tuple[Value, ...]


class Reader:
    """The layers of some traces of one network.

    Args:
        shapes: of its parameters and buffers, by name.
        sizes: of the image of each trace.
        rule: what the call at hand makes of its arguments, in which maps are values (:func:`distseg.models.rules.made`).
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], sizes: Sequence[tuple[int, ...]], traces: Sequence[Trace], rule: Callable[["Reader", tuple, dict], Any]):
        self.shapes, self.dims, self.traces, self._rule = shapes, len(sizes[0]), traces, rule
        self.layers: dict[str, tuple[Callable[[Callable[[str], Tensor]], nn.Module], tuple[str, ...]]] = {}
        self.names: dict[str, str] = {}
        self.dropouts: dict[int, Dropped] = {}
        self._flattened: dict[Value, CanNotCapture] = {}  # what is to be said where they are read in a way that is not known
        self.divisors: dict[str, float] = {}  # of layers that divide a map by a number
        calls = traces[0].calls
        if len({(len(t.calls), t.result) for t in traces}) > 1:
            raise CanNotCapture(DIFFERENT)
        numbers = _of_image(traces[0])
        self._modules = {".".join(path[: depth + 1]) for n in numbers for path in [calls[n].module.split(".")] for depth in range(len(path))}
        self._homes = {module: found for module in {calls[n].module for n in numbers} - {""} if (found := _main_call(module, calls, numbers)) is not None}
        self._draws = {number: n for n, number in enumerate(n for n, call in enumerate(calls) if call.name in _DROPOUTS)}
        self.values: dict[Made, Value] = {PIXELS: Value(IMAGE, tuple((t.batch, t.channels, *size) for t, size in zip(traces, sizes)), (traces[0].channels,))}
        for self.number in numbers:
            self.current = [t.calls[self.number] for t in traces]
            try:
                self._read()
            except Differ:
                raise CanNotCapture(DIFFERENT) from None
        result = self.values.get(traces[0].result)
        self.of_image = result is not None and result.form in ("vector", "place")
        if result is None or not result.plain or not (self.of_image or result.form == "maps" and result.sizes == tuple(map(tuple, sizes))):
            made = "x".join(map(str, traces[0].calls[traces[0].result.call].shapes[traces[0].result.part]))
            raise CanNotCapture(
                f"it makes {made} of images of {'x'.join(map(str, sizes[0]))} pixels, but a segmentation network keeps the size, and one for whole images makes a vector of each"
            )
        if result.name != next(reversed(self.layers), IMAGE):  # the last call is not the result's
            self._add("result", lambda tensor: nn.Identity(), [result])

    def network(self, model: nn.Module) -> Network:
        """With the model's own parameters and buffers."""
        tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
        layers = {name: make(tensors.__getitem__) for name, (make, _) in self.layers.items()}
        network = Network(layers, {name: reads for name, (_, reads) in self.layers.items()})
        used = set(self.names.values())
        unused = {name: tensor for name, tensor in tensors.items() if name not in used and tensor.is_floating_point()}
        network.hold_unused({name.replace(".", "_"): tensor for name, tensor in unused.items()})
        self.names.update({f"unused.{name.replace('.', '_')}": name for name in unused})
        network.names = {own: user for own, user in self.names.items() if own != user}
        network.dropouts, network.of_image = self.dropouts, self.of_image
        return network

    # the call that is read

    @property
    def call(self) -> Called:
        return self.current[0]

    def _read(self) -> None:
        if len({c.name for c in self.current}) > 1:
            raise Differ
        args, kwargs = self._merged([c.args for c in self.current]), self._merged([c.kwargs for c in self.current])
        if self.call.name in _FRESH or not found_in((args, kwargs), Value, Stack):
            return  # nothing of the image is in it
        if self.call.name in _RANDOM:
            raise self.refusal(DRAWS)
        if kwargs.get("out", True) is None:
            del kwargs["out"]
        if any(name in kwargs and kwargs[name] is not None for name in ("dtype", "out")):
            raise self.refusal("is told a type, or a tensor, for its result: leave types to train.precision")
        if not self.call.graded:
            raise self.refusal("runs without gradients (torch.no_grad, or an autograd.Function of your own, whose gradient is not known): that is not known here; use detach()")
        try:
            made = self._rule(self, args, kwargs)
        except TypeError as e:
            if "argument" not in str(e):
                raise
            raise self.refusal(f"is called in a way that is not known ({str(e).replace('Rules.', '')})") from None
        for part, value in enumerate(made if isinstance(made, tuple) else (made,)):
            self.values[Made(self.number, part)] = value

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
            return self.values.get(first, first)
        alike = all(type(x) is type(first) and bool(x == first) for x in each)
        return first if alike else Sizes(tuple(each))

    def refusal(self, why: str) -> CanNotCapture:
        return CanNotCapture(f"{self.call} {why}")

    def map(self, x: Any, *forms: str) -> Value:
        """An argument that is to be a map with one dim of channels, in one of these forms."""
        x = self.cells(x, *forms or ("maps",))
        if not x.plain:
            raise self.refusal(f"takes {FORMS[x.form]} whose channels are {x.cell}: one dim of them is expected")
        return x

    def cells(self, x: Any, *forms: str) -> Value:
        """An argument that is to be a map, in one of these forms, whatever its cells are."""
        if not isinstance(x, Value):
            what = "what is computed of parameters alone" if isinstance(x, (Made, Kept)) else "stacked maps" if isinstance(x, Stack) else repr(x)
            raise self.refusal(f"takes {what} where a map of the image is expected")
        if x.form == "flat" and "flat" not in forms:
            raise self._flattened[x]
        if x.form not in (forms or FORMS):
            raise self.refusal(f"takes {FORMS[x.form]}, of which it is not known")
        return x

    def any_form(self, x: Any) -> Value:
        return self.map(x, *(form for form in FORMS if form != "flat"))

    def fixed(self, x: Any, what: str) -> Any:
        """A setting, which must not follow the image's size."""
        if has_sizes(x):
            raise self.refusal(f"has a {what} that depends on the image's size")
        return x

    def fixed_all(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {name: self.fixed(x, name) for name, x in settings.items()}

    def axis(self, dim: int, x: Value) -> int:
        """Of (N, C, *size), whichever form the user's code has it in; 1 for each dim of a cell."""
        cell, places = [1] * len(x.cell), {"vector": [], "flat": [2]}.get(x.form, list(range(2, self.dims + 2)))
        order = [0, *places, *cell] if x.form in LAST else [0, *cell, *places]
        if not isinstance(dim, int) or not -len(order) <= dim < len(order):
            raise self.refusal(f"is told dim {dim} of {len(order)}")
        return order[dim]

    def all_of_cell(self, dim: Any, x: Value) -> bool:
        """Whether a dim, or several, are those of channels."""
        return dim is not None and all(self.axis(d, x) == 1 for d in (dim if isinstance(dim, tuple) else (dim,)))

    def shape_of(self, x: Any) -> tuple[int, ...]:
        """An argument that is to be a parameter, or computed from such."""
        if isinstance(x, Value):
            raise self.refusal("has a weight that is computed from the image")
        return self.shapes[x.name] if isinstance(x, Kept) else self.traces[0].calls[x.call].shapes[x.part]

    def learns(self, x: Made | Kept) -> bool:
        """Return True if a tensor is a parameter, or is computed from one or from the image: a gradient may go there."""
        if isinstance(x, Kept):
            return x.name in self.traces[0].parameters
        call = self.traces[0].calls[x.call] if x != PIXELS else None
        return call is None or any(map(self.learns, found_in((call.args, call.kwargs), Made, Kept)))

    def made(self, form: str, like: Value, part: int = 0) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """(N, C, *size) of what the call makes in a form, in each trace, and its cell; of one place, at all places of the map that it is ``like``."""
        found, cells, places = [], set(), 0 if form == "vector" else self.dims
        for call, trace, shape in zip(self.current, self.traces, like.shapes):
            batch, *rest = call.shapes[part] or (0,)
            size, cell = (rest[:places], rest[places:]) if form in LAST else (rest[len(rest) - places :], rest[: len(rest) - places])
            if form in VECTORS:
                size = shape[2:] if all(n == 1 for n in size) else None
            if batch != trace.batch or len(rest) < places or size is None:
                raise self.refusal(f"makes {call.shapes[part]} of {FORMS[form]} of {shape}, which is none")
            found.append((batch, math.prod(cell), *size))
            cells.add(tuple(cell))
        if len(cells) > 1:
            raise self.refusal(f"makes maps of {' and '.join(map(str, cells))} channels, as many as the image's size says: that is not known here")
        return tuple(found), cells.pop()

    # what layers are made of

    def emit(self, make: Callable[[dict[str, Tensor]], nn.Module], reads: Sequence[Value], tensors: Mapping[str, Kept] = {}, part: int = 0, form: str | None = None) -> Value:
        """A layer: ``make`` is given its tensors by their names in the layer; ``part``: which of the call's results it makes."""
        form = form or reads[0].form
        shapes, cell = self.made(form, reads[0], part)
        name, used = self._name(), {name: kept.name for name, kept in tensors.items()}
        self._add(name, lambda tensor: make({own: tensor(user) for own, user in used.items()}), reads)
        self.names.update({f"{name}.{own}": user for own, user in used.items()})
        return Value(name, shapes, cell, form)

    def applied(self, function: Callable[[Tensor], Tensor], x: Value, what: str) -> Value:
        """A function of single numbers that the user's call is made of, besides others; ``what`` its layer is named after."""
        name = self._unique(f"{self._name()}_{what}")
        self._add(name, lambda _: Formula((Step(function, (Map(0),), {}),), (None,)), [x])
        return replace(x, name=name)

    def _add(self, name: str, make, reads: Sequence[Value]) -> None:
        assert name not in self.layers, name
        self.layers[name] = make, tuple(x.name for x in reads)

    def _name(self) -> str:
        """The module's, for the call that has its weights, or its only one; else its name and the function's."""
        module, function = self.call.module, self.call.name.strip("_")
        if module in self._homes:
            name = module if self._homes[module] == self.number else f"{module}_{function}"
        else:
            name = f"{module}.{function}".lstrip(".")
        return self._unique(name)

    def _unique(self, name: str) -> str:
        unique, count, module = name, 1, self.call.module
        while unique in self.layers or unique in self._modules and unique != module:
            count += 1
            unique = f"{name}_{count}"
        return unique

    def layer(self, kind: type, x: Value, *args, tensors: Mapping[str, Any] = {}, **kwargs) -> Value:
        """One of PyTorch's own, or of ours, with the user's tensors, or with weights that are computed from them."""
        tensors = {name: value for name, value in tensors.items() if value is not None}
        if any(isinstance(value, Value) for value in tensors.values()):
            raise self.refusal("has a weight that is computed from the image")
        plain = lambda: kind(*args, **kwargs, **({"device": "meta"} if tensors else {}))
        if not any(isinstance(value, Made) for value in tensors.values()):
            return self.emit(lambda found: _with_tensors(plain(), found), [x], tensors)
        if not issubclass(kind, nn.modules.conv._ConvNd):
            raise self.refusal("has running statistics that are computed: parameters or buffers are known")
        own: dict[str, Kept] = {}
        weights = {name: self._computed(value, own) for name, value in tensors.items()}
        return self.emit(lambda found: Derived(plain(), weights, found), [x], own)

    def norm(self, kind: type, x: Value, *args, weight: Any, bias: Any, tensors: Mapping[str, Any] = {}, **kwargs) -> Value:
        """Make a norm with the user's weight and bias: each a parameter, a buffer, or computed from such.

        Args:
            args: those of the layer's class up to ``affine``, but for that.
        """
        if isinstance(weight, Value) or isinstance(bias, Value):
            raise self.refusal("has a weight that is computed from the image")
        if (weight is None) == (bias is None) and not isinstance(weight, Made) and not isinstance(bias, Made):
            return self.layer(kind, x, *args, weight is not None, tensors=dict(weight=weight, bias=bias, **tensors), **kwargs)
        if x.form != "maps":
            raise self.refusal(f"normalises {FORMS[x.form]} with a weight alone, a bias alone, or one that is computed: of maps that is known")
        return self.scaled(self.layer(kind, x, *args, False, tensors=tensors, **kwargs), weight, bias)

    def scaled(self, x: Value, weight: Any, bias: Any) -> Value:
        """Multiply the channels of a map by a weight (C,), and add a bias (C,); either may be None."""
        own: dict[str, Kept] = {}
        steps: list[Step] = []
        written = self._written((weight, bias), (x,), own, steps, {})
        steps.append(Step(_scaled, (Map(0), *written), {}))
        return self.emit(lambda found: Formula(tuple(steps), (None,), found), [x], own)

    def formula(self, args: tuple, kwargs: dict, part: int | None = None) -> Value:
        """Of a function that looks at single cells."""
        maps = list(dict.fromkeys(found_in((args, kwargs), Value)))
        forms = {x.form for x in maps}
        spread = forms in ({"maps", "place"}, {"last", "last place"})
        if (spread or forms <= set(VECTORS)) and len({x.sizes for x in maps}) > 1:
            there = dict(zip(maps, self.meeting(maps)))
            args, kwargs = self._replaced(args, there), self._replaced(kwargs, there)
            maps = list(dict.fromkeys(found_in((args, kwargs), Value)))
        if forms == {"vector", "place"} and all(self.is_grid(x) for x in maps if x.form == "vector"):
            there = {x: replace(x, form="vector", cell=(*x.cell, *(1,) * self.dims)) for x in maps if x.form == "place"}
            args, kwargs, forms = self._replaced(args, there), self._replaced(kwargs, there), {"vector"}
            maps = list(dict.fromkeys(found_in((args, kwargs), Value)))
        form = forms.pop() if len(forms) == 1 else min(forms, key=len) if spread else None
        if form is None or len({x.sizes for x in maps}) > 1 or len({len(x.cell) for x in maps}) > 1:
            raise self.refusal(f"joins {' and '.join(f'{FORMS[x.form]} of {self.shown(x)}' for x in maps) or 'no map'}")
        own: dict[str, Kept] = {}
        steps: list[Step] = []
        if self.call.name not in _WEIGHTS_BY_CHANNEL:
            for x in found_in((args, kwargs), Made, Kept):
                shape = self.shape_of(x)
                behind = len(maps[0].cell) if form in (*LAST, "vector") else 0  # of the dims of places
                if any(n != 1 for n in (shape[: len(shape) - behind] if behind else shape[-self.dims :])):
                    raise self.refusal(f"takes a tensor of {shape} with a value for each place of the image: positions are not known here")
        places: dict[Made, int] = {}
        written = lambda tree: self._written(tree, maps, own, steps, places)
        given = {key: x for key, x in kwargs.items() if key not in ("inplace", "out")}
        last = written(args), written(given)  # what it is computed from comes before
        steps.append(Step(_out_of_place(self.call.function), *last))
        cells = tuple(None if x.plain else x.cell for x in maps)
        make = lambda found: Formula(tuple(steps), cells, found, part, "last" if form in LAST else form)
        made = self.emit(make, maps, own, part or 0, form)
        if made.sizes != maps[0].sizes:
            raise self.refusal(f"makes {self.call.shapes[part or 0]} of {FORMS[form]} of {self.shown(maps[0])}: single cells alone are known")
        if form == "vector" and made.cell[1:] == (1,) * self.dims:  # a grid of one place
            return replace(made, form="place", cell=made.cell[:1])
        return made

    def shown(self, x: Value) -> tuple[int, ...]:
        """Its shape as the user's code has it."""
        batch, size = x.shapes[0][0], (1,) * self.dims if x.form in VECTORS else x.sizes[0]
        return (batch, *x.cell) if x.form == "vector" else (batch, *size, *x.cell) if x.form in LAST else (batch, *x.cell, *size)

    def _computed(self, value: Made | Kept, own: dict[str, Kept]) -> tuple[Step, ...]:
        """How a weight comes of parameters, which join ``own``."""
        steps: list[Step] = []
        written = self._written(value, (), own, steps, {})
        return (*steps, Step(_itself, (written,), {})) if isinstance(value, Kept) else tuple(steps)

    def _written(self, tree: Any, maps: Sequence[Value], own: dict[str, Kept], steps: list[Step], places: dict[Made, int]) -> Any:
        """Arguments as a layer keeps them; what is computed of parameters alone joins ``steps``, once each: ``places`` tell where."""
        again = lambda x: self._written(x, maps, own, steps, places)
        match tree:
            case Value():
                return Map(list(maps).index(tree))
            case Kept():
                name = tree.name.rpartition(".")[2]
                if own.setdefault(name, tree) != tree:
                    own[name := tree.name.replace(".", "_")] = tree
                return Own(name)
            case Made():
                if tree in places:
                    return Map(places[tree])
                if tree in self.values:
                    raise self.refusal("takes a tensor of its own that is like a map of the image: that is not known here")
                call = self.traces[0].calls[tree.call]
                if call.name in _RANDOM:
                    raise self.refusal(f"takes what {call} makes, which {'is a tensor of its own: that is not known here' if 'empty' in call.name else DRAWS}")
                if not call.graded and self.learns(tree):
                    raise self.refusal(f"takes what {call} makes without gradients (torch.no_grad, or an autograd.Function of your own): that is not known here; use detach()")
                if call.name in _CASTS:
                    raise self.refusal(f"takes what {call} makes, a cast: keep that parameter or buffer in floating point, and leave types to train.precision")
                if tree.part or not found_in((call.args, call.kwargs), Kept, Made):
                    raise self.refusal(f"takes what {call} makes, which is neither a map nor computed of parameters: positions are not known here")
                step = Step(_out_of_place(call.function), again(call.args), again(call.kwargs))
                places[tree] = len(maps) + len(steps)
                steps.append(step)
                return Map(places[tree])
            case tuple():
                return tuple(map(again, tree))
            case dict():
                return {key: again(x) for key, x in tree.items()}
            case Sizes():
                raise self.refusal("has a number that depends on the image's size")
        return tree

    # kinds of call

    def drop(self, kind: type, x: Any, p: float, training: bool) -> Any:
        """A dropout."""
        x = self.any_form(x)
        if not training or x.form in VECTORS and p == 0:
            return x
        made = self.layer(VectorDropout if x.form in VECTORS else kind, x, p)
        self.dropouts[self._draws[self.number]] = Dropped(made.name, x.form == "last")
        return made

    def dropped_images(self, x: Value, factor: Made) -> Value | None:
        """Stochastic depth: a map by a random 0 or 1 for each image, perhaps divided by how often it is 1."""
        found, calls = factor, self.traces[0].calls
        divided = None
        if calls[found.call].name in ("div", "true_divide") and isinstance(calls[found.call].args[0], Made):
            found, divided = calls[found.call].args
        call = calls[found.call]
        if call.name == "bernoulli" and len(call.args) > 1 and isinstance(call.args[1], float):
            draw, keep = found, call.args[1]
        elif call.name == "floor" and calls[call.args[0].call].name == "add":  # of a number from 0 to 1, and how often it is kept
            parts = calls[call.args[0].call].args
            draw, keep = next((x for x in parts if isinstance(x, Made)), None), next((x for x in parts if isinstance(x, float)), None)
            if draw is None or keep is None or calls[draw.call].name != "rand":
                return None
        else:
            return None
        one_an_image = all(t.calls[found.call].shapes[0] == (t.batch, *(1,) * (self.dims + 1)) for t in self.traces)
        if not one_an_image or divided not in (None, keep) or x.form != "maps":
            return None
        before = self.divisors.get(x.name)  # x / keep * mask, which is x in evaluation
        kept, evaluated = (1.0 if divided is None else 1 / keep), (keep if before == keep and divided is None else 1.0)
        made = self.emit(lambda _: DropImage(1 - keep, kept, evaluated), [x])
        self.dropouts[self._draws[draw.call]] = Dropped(made.name, False)
        return made

    def turned(self, x: Any, order: Sequence[int]) -> Value:
        """Its channels elsewhere."""
        x = self.cells(x)
        rank = 1 + len(x.cell) + (0 if x.form == "vector" else self.dims)
        order = [d % rank for d in order]
        now, cell, places = [self.axis(d, x) for d in order], [1] * len(x.cell), list(range(2, 2 + rank - 1 - len(x.cell)))
        first, last = ("place", "last place") if x.form in VECTORS else ("maps", "last")
        form = "vector" if x.form == "vector" else first
        if now == [0, *places, *cell] and form != "vector":
            form = last
        elif now != [0, *cell, *places]:
            raise self.refusal("turns a map: of its dims, channels may come last, and be turned among themselves")
        inner = [d for d in order if self.axis(d, x) == 1]
        if inner == sorted(inner):
            return replace(x, form=form)
        rest = iter(inner)  # the user's form stays, its cells are turned
        return self.turned_cells(x, tuple(next(rest) if self.axis(d, x) == 1 else d for d in range(rank)), form)

    def turned_cells(self, x: Value, order: tuple[int, ...], form: str) -> Value:
        """The dims of its cells among themselves."""
        first = min(d for d in range(len(order)) if self.axis(d, x) == 1)
        cell = tuple(x.cell[d - first] for d in order if self.axis(d, x) == 1)
        make = lambda _: Formula((Step(torch.permute, (Map(0), order), {}),), (x.cell,), {}, None, "last" if x.form in LAST else x.form)
        name = self._name()
        self._add(name, make, [x])
        return replace(x, name=name, cell=cell, form=form)

    def reshaped(self, x: Any) -> Value:
        """The same numbers in another form."""
        x = self.cells(x, *FORMS)
        if x.form == "flat" and x.sizes == tuple(c.shapes[0][2:] for c in self.current):
            return replace(x, form="maps")
        if x.form == "maps" and self.is_flattened(x):
            made = replace(x, form="flat")
            self._flattened[made] = self.refusal(_ONE_DIM)
            return made
        forms = sorted(VECTORS, key=lambda form: form != x.form or form == "vector") if x.form in VECTORS else (x.form,)
        for form in forms:
            try:
                shapes, cell = self.made(form, x)
                if shapes == x.shapes:
                    return replace(x, form=form, cell=cell)
            except CanNotCapture:
                continue
        if x.form not in VECTORS and math.prod(x.sizes[0]) in self.call.shapes[0]:
            raise self.refusal(_ONE_DIM)
        raise self.refusal(f"gives {FORMS[x.form]} another shape, {self.call.shapes[0]}: that is not known here")

    def is_flattened(self, x: Value) -> bool:
        """Whether the call makes one dim of the places of a map, behind that of channels."""
        return x.plain and all(c.shapes[0] == (*shape[:2], math.prod(shape[2:])) for c, shape in zip(self.current, x.shapes)) and self.dims > 1

    def is_grid(self, x: Any) -> bool:
        """Whether it is a grid of an image, (N, C, *grid)."""
        return isinstance(x, Value) and x.form == "vector" and len(x.cell) == 1 + self.dims

    def spread(self, x: Value, **settings) -> Value:
        """A vector as the map that the call makes of it; a grid by these ``settings``."""
        grid, shapes = x.cell[1:] if settings else (), [c.shapes[0] for c in self.current]
        cell = x.cell[:1] if settings else x.cell
        if any(shape[: 1 + len(cell)] != (n, *cell) or len(shape) != 1 + len(cell) + self.dims for shape, (n, *_) in zip(shapes, x.shapes)):
            raise self.refusal("spreads what is alike at all places in a way that is not known here")
        if settings and (settings["mode"] == "area" or set(shape[2:] for shape in shapes) == {grid}):
            raise self.refusal("resizes a grid of the image by mode area, or to another grid: nearest, bilinear and bicubic are known, to a map")
        sizes = tuple(shape[1 + len(cell) :] for shape in shapes)
        like, vector = self.like(sizes), self.resized(x, sizes)
        name = self._name()
        self._add(name, lambda _: Spread(grid, **settings), [like, vector])
        return Value(name, tuple((n, math.prod(cell), *size) for (n, *_), size in zip(x.shapes, sizes)), cell)

    def same_places(self, sizes: tuple[tuple[int, ...], ...]) -> Value | None:
        """A map with so many places."""
        return next((v for v in reversed(self.values.values()) if isinstance(v, Value) and v.form == "maps" and v.sizes == sizes), None)

    def like(self, sizes: tuple[tuple[int, ...], ...]) -> Value:
        """The same; made by a pooling where there is none."""
        if found := self.same_places(sizes):
            return found
        for v in [v for v in reversed(self.values.values()) if isinstance(v, Value) and v.form == "maps"]:
            by = _whole_times(v.sizes, sizes)
            if by is not None:
                name = self._unique(f"{self._name()}_like")
                self._add(name, lambda _: (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[self.dims - 1](by if self.dims > 1 else by[0]), [v])
                return replace(v, name=name, shapes=tuple((*shape[:2], *size) for shape, size in zip(v.shapes, sizes)))
        raise self.refusal(f"spreads what is alike at all places over {sizes[0]}, as many as no other map has")

    def resized(self, x: Value, sizes: tuple[tuple[int, ...], ...]) -> Value:
        """A vector, where maps have whole times as many, or as few, places."""
        if sizes == x.sizes:
            return x
        for fewer, by in ((False, _whole_times(sizes, x.sizes)), (True, _whole_times(x.sizes, sizes))):
            if by is not None:
                name = self._unique(f"{self._name()}_places")
                self._add(name, lambda _, by=by, fewer=fewer: Restride(by, fewer), [x])
                return replace(x, name=name, shapes=tuple((*shape[:2], *size) for shape, size in zip(x.shapes, sizes)))
        raise self.refusal(f"spreads what is alike at all places of {x.shapes[0]} over a map of {sizes[0]}: whole times as many places, or as few, are known")

    def meeting(self, maps: Sequence[Value]) -> list[Value]:
        """Vectors among maps, or among others of a smaller one's size, where those they are joined with are."""
        sizes = next((x.sizes for x in maps if x.form not in VECTORS), min((x.sizes for x in maps), key=lambda sizes: math.prod(sizes[0])))
        return [self.resized(x, sizes) if x.form in VECTORS else x for x in maps]

    def _replaced(self, tree: Any, by: Mapping[Value, Value]) -> Any:
        if isinstance(tree, tuple):
            return tuple(self._replaced(x, by) for x in tree)
        if isinstance(tree, dict):
            return {key: self._replaced(x, by) for key, x in tree.items()}
        return by.get(tree, tree) if isinstance(tree, Value) else tree

    def parts(self, x: Any, args: tuple, dim: int) -> tuple[Value, ...]:
        if self.axis(dim, self.cells(x)) != 1:
            raise self.refusal("cuts the image into parts: along its channels it is known")
        return tuple(self.formula(args, {}, part) for part in range(len(self.call.shapes)))

    def of_channels(self, x: Value, index: list) -> bool:
        """Whether an index takes all of the batch and of the places."""
        every = _whole_index(tuple(index), self.rank(x))
        if every is None or has_sizes(tuple(every)):
            return False
        return len(every) == self.rank(x) and all(i == slice(None) for d, i in enumerate(every) if self.axis(d, x) != 1)

    def rank(self, x: Any) -> int:
        """Dims of the user's tensor."""
        x = self.cells(x)
        return 1 + len(x.cell) + (0 if x.form == "vector" else self.dims)

    def over_dims(self, args: tuple, kwargs: dict) -> Value:
        """Of a function that is told dims."""
        dim = kwargs.get("dim", kwargs.get("dims", args[1] if len(args) == 2 or len(args) > 1 and isinstance(args[1], tuple) else args[1:] or None))
        if not self.all_of_cell(dim, self.cells(args[0])):
            raise self.refusal(f"runs over dims {dim}, and so over places of the image: over channels it is known")
        return self.formula(args, kwargs)

    def over_channels(self, x: Any, args: tuple, dim: int, why: str = "runs over places of the image: over channels it is known") -> Value:
        x = self.cells(x)
        if self.axis(dim, x) != 1:
            raise self.refusal(why)
        return self.formula(args, {})

    def over_last(self, x: Any, normalized_shape: Sequence[int]) -> tuple[Value, tuple[int, ...]]:
        """A map whose channels come last, and the last of their dims, which statistics are taken over."""
        x, over = self.cells(x, *LAST, "vector"), tuple(normalized_shape)
        if over != x.cell[len(x.cell) - len(over) :]:
            raise self.refusal(f"takes statistics over {normalized_shape}: over channels alone it is known")
        return x, over

    def reduced(self, make: Callable[[], nn.Module], x: Value, dim: Any, keepdim: bool, what: str, known: str = "over all places, or over channels") -> Value:
        """What a function makes that is told dims: of channels, or by a layer of all of the image's; ``what`` it takes, and where that is ``known``."""
        return self.formula((x, dim, keepdim), {}) if self.all_of_cell(dim, x) else self.over_places(make, x, dim, keepdim, what, known)

    def over_places(self, make: Callable[[], nn.Module], x: Value, dim: Any, keepdim: bool, what: str, known: str = "over all places, or over channels") -> Value:
        over = {self.axis(d, x) for d in (dim if isinstance(dim, tuple) else (dim,)) if d is not None}
        if x.form == "flat" and over == {2} and not keepdim:
            return self.of_image(make, x, "vector")
        if x.form not in ("maps", "last") or over != set(range(2, self.dims + 2)):
            raise self.refusal(f"takes {what} over {dim}: {known}, it is known")
        return self.of_image(make, x, "last place" if x.form == "last" and keepdim else "place" if keepdim else "vector")

    def of_image(self, make: Callable[[], nn.Module], x: Value, form: str) -> Value:
        """A mean over the image, or what is like one."""
        made = self.emit(lambda _: make(), [replace(x, form="maps")], form=form)
        if made.shapes != x.shapes or made.cell != x.cell:
            raise self.refusal(f"makes {self.call.shapes[0]}, which is no mean of {x.shapes[0]}")
        return made

    def whole(self, kernel: Any, x: Value) -> bool:
        """Whether a kernel is as large as the image."""
        return all(self.each(of_trace(kernel, n)) == size for n, size in enumerate(x.sizes))

    def filled(self, x: Value, pad: tuple) -> int | None:
        """The multiple up to which a padding fills the image from behind, where it depends on its size so."""
        if not has_sizes(pad):
            return None
        each = [(*of_trace(pad, n), *(0,) * (2 * self.dims - len(pad))) for n in range(len(x.sizes))]
        pairs = [(n, behind) for size, sides in zip(x.sizes, each) for n, behind in zip(reversed(size), sides[1::2])]
        if any(any(sides[::2]) or len(sides) > 2 * self.dims for sides in each):
            return None
        return next((m for m in range(2, _LARGEST_MULTIPLE + 1) if all(-n % m == behind for n, behind in pairs)), None)

    def cut_to(self, x: Value, index: list) -> Value | None:
        """The part from the first place on, of the size of another map."""
        each = [_whole_index(of_trace(tuple(index), n), self.rank(x)) for n in range(len(x.sizes))]
        first = lambda i: isinstance(i, slice) and i.start in (None, 0) and i.step in (None, 1) and (i.stop is None or i.stop >= 0)
        if x.form != "maps" or any(i is None or not all(map(first, i)) or any(s.stop is not None for s in i[: -self.dims]) for i in each):
            return None
        sizes = tuple(c.shapes[0][-self.dims :] for c in self.current)
        if sizes == x.sizes:
            return x
        like, name = self.same_places(sizes), self._name()
        if like is None:
            return None
        self._add(name, lambda _: CutTo(), [x, like])
        return Value(name, tuple((*shape[:2], *size) for shape, size in zip(x.shapes, sizes)), x.cell)

    def each(self, n: Any) -> Any:
        """A setting for each dim."""
        return n if isinstance(n, str) or isinstance(n, tuple) and len(n) > 1 else (n[0] if isinstance(n, tuple) else n,) * self.dims


DIFFERENT = "it calls other functions with other sizes of images: what its code does must not depend on them"
DRAWS = "draws random numbers, other ones on each rank and for each part of an image: use nn.Dropout, whose masks belong to pixels"
FORMS = {"maps": "a map", "flat": "a map whose places are one dim", "last": "a map whose channels come last", "place": "what is alike at all places", "last place": "what is alike at all places, with channels last", "vector": "a vector of the image"}
_ONE_DIM = "makes one dim of all places, as attention between places does: that is not known here; leave it out"
_LARGEST_MULTIPLE = 256  # that a padding is looked at for
LAST, VECTORS = ("last", "last place"), ("place", "last place", "vector")
_WEIGHTS_BY_CHANNEL = ("prelu", "layer_norm", "rms_norm", "linear", "matmul", "__matmul__", "einsum", "conv1d", "conv2d", "conv3d", "group_norm")
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "rand", "bernoulli")  # as distseg.serial counts them
_FRESH = {"new_empty", "empty_like", "new_zeros", "zeros_like", "new_ones", "ones_like", "new_full", "full_like"}
_CASTS = {"to", "type", "float", "double", "half", "bfloat16"}
_RANDOM = {"rand", "randn", "rand_like", "randn_like", "bernoulli", "normal", "uniform", "randint", "randperm", "multinomial", "empty", "rrelu", "alpha_dropout", "gumbel_softmax", "new_empty", "empty_like"}


def _with_tensors(layer: nn.Module, found: dict[str, Tensor]) -> nn.Module:
    for name in found:
        layer._parameters.pop(name, None)  # a weight of the user's may be a buffer, and a buffer's name may hold None
        layer._buffers.pop(name, None)
    register(layer, found)
    if "num_batches_tracked" not in found and getattr(layer, "num_batches_tracked", None) is not None:
        layer.num_batches_tracked = torch.zeros((), dtype=torch.long)
    return layer


def _whole_times(large: Sequence[tuple[int, ...]], small: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """By which all sizes are larger than others, along each dim; None where that is no whole number, or not the same one."""
    factors = {tuple(n // m if n % m == 0 else 0 for n, m in zip(*pair)) for pair in zip(large, small)}
    return factors.pop() if len(factors) == 1 and all(next(iter(factors))) else None


def _whole_index(index: tuple, rank: int) -> list | None:
    """With an entry for each of so many dims; None where it has others than slices and numbers."""
    if sum(i is Ellipsis for i in index) > 1 or not all(i is Ellipsis or isinstance(i, (slice, int)) for i in index):
        return None
    at = next((n for n, i in enumerate(index) if i is Ellipsis), len(index))
    return [*index[:at], *[slice(None)] * (rank - len(index) + (at < len(index))), *index[at + 1 :]]


def _itself(x: Tensor) -> Tensor:
    return x


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    channel = (-1, *(1 for _ in x.shape[2:]))
    x = x if weight is None else x * weight.view(channel)
    return x if bias is None else x + bias.view(channel)


def _property(name: str, x: Tensor, *_) -> Tensor:
    return getattr(x, name)


def _out_of_place(function: Callable) -> Callable:
    name = getattr(function, "__name__", "")
    if name == "__get__":  # of a property, which can't be copied
        return partial(_property, function.__self__.__name__)
    if name.startswith("__i") and name.endswith("__"):
        return getattr(Tensor, f"__{name[3:]}")
    if name.endswith("_") and not name.startswith("__"):
        for home in (Tensor, torch, F):
            if getattr(home, name, None) is function:
                return getattr(home, name[:-1])
    return function


def has_sizes(tree) -> bool:
    if isinstance(tree, slice):
        return any(map(has_sizes, (tree.start, tree.stop, tree.step)))
    return isinstance(tree, Sizes) or isinstance(tree, tuple) and any(map(has_sizes, tree))


def of_trace(tree, number: int):
    """As it was in one trace."""
    if isinstance(tree, tuple):
        return tuple(of_trace(x, number) for x in tree)
    return tree.each[number] if isinstance(tree, Sizes) else tree


def _of_image(found: Trace) -> list[int]:
    """The calls that depend on the image and that the result depends on, in order."""
    used = lambda call: found_in((call.args, call.kwargs), Made)
    needed, left = set(), [found.result.call]
    while left:
        number = left.pop()
        if number >= 0 and number not in needed:
            needed.add(number)
            left += [made.call for made in used(found.calls[number])]
    of_image = {PIXELS.call}
    for number in sorted(needed):
        if any(made.call in of_image for made in used(found.calls[number])):
            of_image.add(number)
    return sorted(of_image - {PIXELS.call})


def _main_call(module: str, calls: Sequence[Called], numbers: Sequence[int]) -> int | None:
    """The call of a module, which calls no others, that its weights go into; of one without weights its only call."""
    if any(calls[n].module.startswith(f"{module}.") for n in numbers):
        return None
    own = [n for n in numbers if calls[n].module == module]
    weighted = [n for n in own if any(kept.name.rpartition(".")[0] == module for kept in found_in((calls[n].args, calls[n].kwargs), Kept))]
    return weighted[0] if len(weighted) == 1 else own[0] if len(own) == 1 else None
