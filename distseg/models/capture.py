"""From any network to a :class:`distseg.models.network.Network` of layers that are known, with the very parameters of its own.

What the network computes is seen (:mod:`distseg.models.trace`) on images of several sizes. Calls become PyTorch's layers where there is one, a
:class:`distseg.models.layers.Formula` where a function looks at single cells, and what is neither is refused by name. Numbers that follow the image's
size are told from settings by comparing the sizes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from distseg.altered import altered, known
from distseg.models.layers import Cat, Derived, Formula, Map, Own, Sum, first_convolution, hollow
from distseg.models.network import IMAGE, Dropped, Network, flat_layers, is_flat
from distseg.models.trace import IMAGE as PIXELS
from distseg.models.trace import CanNotCapture, Called, Kept, Made, Trace, trace

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout")  # functions

_MULTIPLES = (1, 2, 4, 8, 16, 32, 64)  # of pixels, that a network may want images to be
_COUNTS = ((3, 5, 4), (4, 3, 5), (7, 4, 3))  # sizes that networks are looked at, in units of 64 pixels
_ODD = ((0, 1, 0), (1, 0, 1), (1, 1, 0))  # and what is added to them, in units of the multiple


def as_network(model: nn.Module) -> nn.Module:
    """A network of layers that are known: the model itself if it is one, else what it is captured as; the model as it is where that fails (:func:`refusal_of`)."""
    if is_flat(model) and all(map(_is_known, (layer for _, layer in flat_layers(model)))):
        return model
    try:
        return capture(model)
    except CanNotCapture as e:
        _refusals[model] = str(e)
        return model


_refusals: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def refusal_of(model: nn.Module) -> str | None:
    """Why a model was not captured."""
    return _refusals.get(model)


def _is_known(layer: nn.Module) -> bool:
    """Whether a layer computes what its class, PyTorch's or ours, says."""
    return type(layer) is known(type(layer)) is not nn.Module and altered(layer) is None and (not layer._modules or isinstance(layer, Derived))


def capture(model: nn.Module) -> Network:
    """The same network as layers that are known.

    Args:
        model: (N, C, *size) -> (N, C', *size); on any device. It is not changed.

    Returns:
        a network with the very parameters and buffers of the model.

    Raises:
        CanNotCapture: naming the operation, the module that calls it, the line of code, and what would help.
    """
    first = first_convolution(model)
    dims, channels = first.weight.dim() - 2, _bands(model, first)
    empty = hollow(model)
    sizes = [tuple(64 * n for n in counts[:dims]) for counts in _COUNTS]
    traces = [trace(empty, channels, size) for size in sizes]
    multiple, found = _smallest_multiple(empty, channels, dims, sizes, traces)
    network = found.network(model)
    network.multiple = multiple
    _check_same(model, network, channels, dims)
    return network


def _smallest_multiple(model: nn.Module, channels: int, dims: int, sizes: list, traces: list[Trace]) -> tuple[int, "_Capture"]:
    """Of which the network takes images of any number of pixels, and does the same with all of them."""
    shapes = {name: tuple(x.shape) for name, x in [*model.named_parameters(), *model.named_buffers()]}
    found = _Capture(shapes, dims, sizes, traces)  # what is refused at multiples of 64 is refused
    for multiple in _MULTIPLES[:-1]:
        odd = [tuple(n + multiple * o for n, o in zip(size, add)) for size, add in zip(sizes, _ODD)]
        with suppress(CanNotCapture):
            first = trace(model, channels, odd[0])
            return multiple, _Capture(shapes, dims, sizes + odd, [*traces, first, *(trace(model, channels, size) for size in odd[1:])])
    return _MULTIPLES[-1], found


def _bands(model: nn.Module, first: nn.Module) -> int:
    """The channels of its images: those of the first convolution that is called."""
    return first.in_channels


@torch.no_grad()
def _check_same(model: nn.Module, network: Network, channels: int, dims: int) -> None:
    """Refuse a network that computes something else in evaluation than what was seen in training."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(t.is_meta for t in tensors):
        return
    like, generator = next(model.parameters()), torch.Generator().manual_seed(0)
    x = torch.randn(1, channels, *(64,) * dims, generator=generator).to(like)
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval(), network.eval()
        wanted, found = model(x), network(x)
    except Exception as e:
        raise CanNotCapture(f"in evaluation it fails on an image of {'x'.join(['64'] * dims)} pixels: {' '.join(str(e).split())[:300]}") from e
    finally:
        for module, training in modes:
            module.training = training
        network.train(model.training)
    same = isinstance(wanted, Tensor) and wanted.shape == found.shape
    if not same or (wanted.isfinite().all() and not torch.allclose(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))):
        raise CanNotCapture("in evaluation it computes something else than in training: the difference must lie in norms and dropout alone")


@dataclass(frozen=True)
class Sizes:
    """A number, or several, that follow the size of the image: as it was with each."""

    each: tuple


class _Differ(Exception):
    """Two traces are not of the same calls."""


@dataclass(frozen=True)
class _Value:
    """A map: what the layer ``name`` makes.

    Attributes:
        shapes: (N, C, *size) in each trace.
        last: whether the user's code has its channels last at this point.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    last: bool = False

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(shape[2:] for shape in self.shapes)

    @property
    def channels(self) -> int:
        return self.shapes[0][1]


class _Capture:
    """The layers of some traces of one network."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dims: int, sizes: Sequence[tuple[int, ...]], traces: Sequence[Trace]):
        self.shapes, self.dims, self.traces = shapes, dims, traces
        self.layers: dict[str, tuple[Callable[[Callable[[str], Tensor]], nn.Module], tuple[str, ...]]] = {}
        self.names: dict[str, str] = {}
        self.dropouts: dict[int, Dropped] = {}
        self._taken: set[str] = set()
        self.values: dict[Made, _Value] = {}
        calls = traces[0].calls
        try:
            if len({len(t.calls) for t in traces}) > 1 or len({t.result for t in traces}) > 1:
                raise _Differ
            needed = _needed(traces[0])
            self._alone = _alone(calls, needed)
            self._draws = {number: n for n, number in enumerate(n for n, call in enumerate(calls) if call.name in DROPOUTS)}
            self.values[PIXELS] = _Value(IMAGE, tuple((2, -1, *size) for size in sizes))
            for number in needed:
                self.current = [t.calls[number] for t in traces]
                if len({c.name for c in self.current}) > 1:
                    raise _Differ
                self.number = number
                self._see(number)
        except _Differ:
            raise CanNotCapture("it computes something else with other sizes of images: its code must not depend on them") from None
        result = self.values.get(traces[0].result)
        if result is None or result.last or result.sizes != tuple(map(tuple, sizes)):
            raise CanNotCapture(f"its result is no map of the image's size: {self.current[0].shapes} of an image of {sizes[0]}")
        if result.name != next(reversed(self.layers), IMAGE):
            self._emit(lambda tensor: nn.Identity(), [result], "result")

    def network(self, model: nn.Module) -> Network:
        """With the model's own parameters and buffers."""
        tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
        layers = {name: make(tensors.__getitem__) for name, (make, _) in self.layers.items()}
        network = Network(layers, {name: reads for name, (_, reads) in self.layers.items()})
        network.names = {own: user for own, user in self.names.items() if own != user}
        network.dropouts = self.dropouts
        return network

    # one call

    def _see(self, number: int) -> None:
        call = self.current[0]
        args, kwargs = self._merged([c.args for c in self.current]), self._merged([c.kwargs for c in self.current])
        rule = getattr(_Rules, call.name, None)
        try:
            if rule is not None:
                made = rule(self, *args, **kwargs)
            elif call.name in _POINTWISE:
                made = self.formula(args, kwargs)
            else:
                raise self.refusal("is not known to look at single cells, nor as any other layer")
        except TypeError as e:
            if "argument" not in str(e):
                raise
            raise self.refusal(f"is called in a way that is not known ({e})") from None
        for part, value in enumerate(made if isinstance(made, tuple) else (made,)):
            self.values[Made(number, part)] = value

    def _merged(self, each: Sequence[Any]) -> Any:
        """What all traces have alike; numbers that differ as :class:`Sizes`."""
        first = each[0]
        if isinstance(first, tuple):
            if len({len(x) for x in each}) > 1:
                raise _Differ
            merged = tuple(self._merged(x) for x in zip(*each))
            return merged
        if isinstance(first, dict):
            return {key: self._merged([x[key] for x in each]) for key in first}
        if isinstance(first, Made):
            if any(x != first for x in each):
                raise _Differ
            return self._value(first)
        if all(type(x) is type(first) and _alike(x, first) for x in each):
            return first
        return Sizes(tuple(each))

    def _value(self, made: Made) -> Any:
        return self.values.get(made, made)

    def refusal(self, why: str) -> CanNotCapture:
        return CanNotCapture(f"{self.current[0]} {why}")

    def map(self, x: Any, last: bool = False) -> _Value:
        """An argument that is to be a map."""
        if not isinstance(x, _Value):
            raise self.refusal(f"takes {'what is computed of parameters alone' if isinstance(x, (Made, Kept)) else repr(x)} where a map of the image is expected")
        if x.last != last:
            raise self.refusal(f"takes a map whose channels come {'last' if x.last else 'first'} where they are to come {'last' if last else 'first'}")
        return x

    def shape_of(self, x: Any) -> tuple[int, ...]:
        """An argument that is to be a parameter, or computed from such."""
        if isinstance(x, _Value):
            raise self.refusal("has a weight that is computed from the image")
        return self.shapes[x.name] if isinstance(x, Kept) else self.traces[0].calls[x.call].shapes[x.part]

    def drop(self, kind: type, x: Any, p: float, training: bool) -> Any:
        """A dropout."""
        if not training:
            return x
        last = getattr(x, "last", False)
        made = self.layer(kind, self.map(x, last), p)
        self.dropouts[self._draws[self.number]] = Dropped(made.name, last)
        return made

    def fixed_all(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {name: self.fixed(x, name) for name, x in settings.items()}

    def axis(self, dim: int | None, x: _Value) -> int | None:
        """Of a map (N, C, *size), whichever layout the user's code has it in."""
        if dim is None:
            return None
        order = [0, *range(2, self.dims + 2), 1] if x.last else range(self.dims + 2)
        return order[dim]

    def turned(self, input: Any, order: Sequence[int]) -> _Value:
        """Its channels elsewhere."""
        if not isinstance(input, _Value):
            raise self.refusal("turns what is no map of the image")
        order, dims = [d % (self.dims + 2) for d in order], range(self.dims + 2)
        now = [self.axis(d, input) for d in order]
        if now in (list(dims), [0, *dims[2:], 1]):
            return replace(input, last=now[1] != 1)
        raise self.refusal("turns a map: of its dims, channels alone may come last")

    def parts(self, input: Any, args: tuple, dim: int) -> tuple[_Value, ...]:
        x = self.map(input, getattr(input, "last", False))
        if self.axis(dim, x) != 1:
            raise self.refusal("cuts the image into parts: along its channels it is known")
        return tuple(self.formula(args, {}, part) for part in range(len(self.current[0].shapes)))

    def check_affine(self, weight: Any, bias: Any) -> None:
        if (weight is None) != (bias is None):
            raise self.refusal("has a weight without a bias, or a bias without a weight: give it both or neither")

    def fixed(self, x: Any, what: str) -> Any:
        """A setting, which must not follow the image's size."""
        if _has_sizes(x):
            raise self.refusal(f"has a {what} that depends on the image's size")
        return x

    # what layers are made of

    def emit(self, make: Callable[[dict[str, Tensor]], nn.Module], reads: Sequence[_Value], tensors: Mapping[str, Kept] = {}, part: int | None = None, last: bool = False) -> _Value:
        """A layer: ``make`` is given its tensors by their names in the layer; ``part``: which of the call's results it makes."""
        present = {name: kept.name for name, kept in tensors.items()}
        name = self._emit(lambda tensor: make({own: tensor(user) for own, user in present.items()}), reads, self._name())
        self.names.update({f"{name}.{own}": user for own, user in present.items()})
        shapes = tuple(c.shapes[part or 0] for c in self.current)
        return _Value(name, tuple(_first(s) for s in shapes) if last else shapes, last)

    def _emit(self, make, reads: Sequence[_Value], name: str) -> str:
        self.layers[name] = make, tuple(x.name for x in reads)
        return name

    def _name(self) -> str:
        """The module's, where that does nothing else; else its name and the function's."""
        call = self.current[0]
        name = call.module if call.module and self._alone[call.module] == 1 else f"{call.module}.{call.name}".lstrip(".").replace("__", "")
        unique, count = name, 1
        while unique in self._taken:
            count += 1
            unique = f"{name}_{count}"
        self._taken.add(unique)
        return unique

    def layer(self, kind: type, x: _Value, *args, tensors: Mapping[str, Any] = {}, **kwargs) -> _Value:
        """One of PyTorch's own, with the user's tensors, or with weights that are computed from them."""
        tensors = {name: value for name, value in tensors.items() if value is not None}
        if any(isinstance(value, _Value) for value in tensors.values()):
            raise self.refusal("has a weight that is computed from the image")
        plain = lambda: kind(*args, **kwargs, **({"device": "meta"} if tensors else {}))
        if not any(isinstance(value, Made) for value in tensors.values()):
            return self.emit(lambda found: _with_tensors(plain(), found), [x], tensors, last=x.last)
        if not issubclass(kind, nn.modules.conv._ConvNd):
            raise self.refusal("has a weight that is computed from parameters: of convolutions that is known")
        own: dict[str, Kept] = {}
        weights = {name: self._steps(value, own) for name, value in tensors.items()}
        return self.emit(lambda found: Derived(plain(), weights, found), [x], own)

    def _steps(self, value: Made | Kept, own: dict[str, Kept]) -> list[tuple[Callable, tuple, dict]]:
        """The functions by which a weight is computed; their parameters join ``own``."""
        steps: list[tuple[Callable, tuple, dict]] = []
        places: dict[Made, int] = {}

        def written(tree):
            if isinstance(tree, Kept):
                return Own(self._own_name(tree, own))
            if isinstance(tree, Made):
                return Map(place_of(tree))
            if isinstance(tree, tuple):
                return tuple(map(written, tree))
            return {key: written(x) for key, x in tree.items()} if isinstance(tree, dict) else tree

        def place_of(made: Made) -> int:
            if made not in places:
                call = self.traces[0].calls[made.call]
                if made.part or not _made_in((call.args, call.kwargs)) and not _kept_in((call.args, call.kwargs)) or call.name in _RANDOM:
                    raise self.refusal(f"has a weight that is made by {call}, which is not known")
                args, kwargs = written(call.args), written(call.kwargs)
                steps.append((_OUT_OF_PLACE.get(call.function, call.function), args, kwargs))
                places[made] = len(steps) - 1
            return places[made]

        if isinstance(value, Kept):
            return [(_itself, (written(value),), {})]
        place_of(value)
        return steps

    def _own_name(self, kept: Kept, own: dict[str, Kept]) -> str:
        """Of a tensor in a layer that has several."""
        name = kept.name.rpartition(".")[2]
        if own.setdefault(name, kept) != kept:
            name = kept.name.replace(".", "_")
            own[name] = kept
        return name

    def formula(self, args: tuple, kwargs: dict, part: int | None = None) -> _Value:
        """Of a function that looks at single cells."""
        maps: list[_Value] = []
        tensors: dict[str, Kept] = {}

        def written(tree):
            if isinstance(tree, _Value):
                if tree not in maps:
                    maps.append(tree)
                return Map(maps.index(tree))
            if isinstance(tree, Kept):
                return Own(self._own_name(tree, tensors))
            if isinstance(tree, Made):
                raise self.refusal("takes what is computed of parameters alone, or of random numbers: this is not captured yet")
            if isinstance(tree, tuple):
                return tuple(map(written, tree))
            if isinstance(tree, dict):
                return {key: written(x) for key, x in tree.items()}
            return self.fixed(tree, "number")

        args, kwargs = written(args), {key: x for key, x in written(kwargs).items() if key not in ("inplace", "out")}
        if not maps:
            raise self.refusal("does not depend on the image")
        last = {x.last for x in maps}
        if len(last) > 1 or len({x.sizes for x in maps}) > 1:
            raise self.refusal(f"joins maps of other sizes or other layouts: {' and '.join(str(x.shapes[0]) for x in maps)}")
        (last,) = last
        for c, x in zip(self.current, range(len(self.current))):
            made = c.shapes[part or 0]
            if (_first(made) if last else made)[2:] != maps[0].shapes[x][2:] or made[0] != 2:
                raise self.refusal(f"makes {made} of {maps[0].shapes[x]}, which is no map of the same size")
        if self.current[0].name not in _WEIGHTS_BY_CHANNEL:
            for kept in tensors.values():
                shape = self.shapes[kept.name]
                places = shape[:-1] if last else shape[-self.dims :]
                if any(n != 1 for n in places):
                    raise self.refusal(f"takes {kept.name} of {shape}, which has a value for each place: positions are not captured yet")
        function = _OUT_OF_PLACE.get(self.current[0].function, self.current[0].function)
        make = lambda found: Formula(function, args, kwargs, {own: found[own] for own in found}, part, last)
        return self.emit(make, maps, tensors, part, last)


def _with_tensors(layer: nn.Module, found: dict[str, Tensor]) -> nn.Module:
    for name, tensor in found.items():
        if name in layer._buffers:
            layer._buffers[name] = tensor
        else:
            setattr(layer, name, tensor)
    if getattr(layer, "num_batches_tracked", None) is not None:
        layer.num_batches_tracked = torch.zeros((), dtype=torch.long)
    return layer


def _itself(x: Tensor) -> Tensor:
    return x


_RANDOM = {"rand", "randn", "rand_like", "randn_like", "bernoulli", "normal", "uniform", "randint", "randperm", "multinomial"}
_OUT_OF_PLACE = {getattr(Tensor, f"{name}_"): getattr(Tensor, name) for name in dir(Tensor) if not name.startswith("_") and hasattr(Tensor, f"{name}_")}
_OUT_OF_PLACE |= {getattr(torch, f"{name}_"): getattr(torch, name) for name in dir(torch) if not name.startswith("_") and callable(getattr(torch, f"{name}_", None))}


def _first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(N, *size, C) -> (N, C, *size)."""
    return (shape[0], shape[-1], *shape[1:-1])


def _alike(x, y) -> bool:
    same = x == y
    return bool(same) if not isinstance(same, Tensor) else False


def _has_sizes(tree) -> bool:
    return isinstance(tree, Sizes) or isinstance(tree, tuple) and any(map(_has_sizes, tree))


def _needed(found: Trace) -> list[int]:
    """The calls that the result depends on, in order."""
    needed, left = set(), [found.result]
    while left:
        made = left.pop()
        if isinstance(made, Made) and made.call >= 0 and made.call not in needed:
            needed.add(made.call)
            left += _made_in((found.calls[made.call].args, found.calls[made.call].kwargs))
    image = {PIXELS}
    of_image = []
    for number in sorted(needed):
        call = found.calls[number]
        if any(made in image or Made(made.call) in image for made in _made_in((call.args, call.kwargs))):
            image |= {Made(number, part) for part in range(len(call.shapes))}
            of_image.append(number)
    return of_image


def _made_in(tree) -> list[Made]:
    if isinstance(tree, Made):
        return [tree]
    if isinstance(tree, Kept):
        return []
    if isinstance(tree, tuple):
        return [x for part in tree for x in _made_in(part)]
    return [x for part in tree.values() for x in _made_in(part)] if isinstance(tree, dict) else []


def _kept_in(tree) -> list[Kept]:
    if isinstance(tree, Kept):
        return [tree]
    if isinstance(tree, tuple):
        return [x for part in tree for x in _kept_in(part)]
    return [x for part in tree.values() for x in _kept_in(part)] if isinstance(tree, dict) else []


def _alone(calls: Sequence[Called], needed: Sequence[int]) -> dict[str, int]:
    """How many calls each module makes, those of the modules inside it included."""
    counts: dict[str, int] = {}
    for number in needed:
        path = calls[number].module.split(".")
        for depth in range(len(path)):
            name = ".".join(path[: depth + 1])
            counts[name] = counts.get(name, 0) + 1
    return counts


_WEIGHTS_BY_CHANNEL = ("prelu", "layer_norm", "linear")


def _by_dims(dims: int, *kinds: type) -> type:
    return kinds[dims - 1]


class _Rules:
    """By the name of a function, the layer that it is. Arguments are those of the function."""

    def conv2d(self: _Capture, input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        x = self.map(input)
        kernel = self.shape_of(weight)
        each = lambda n: n if isinstance(n, (tuple, str)) and len(n) > 1 else (n[0] if isinstance(n, tuple) else n,) * self.dims
        settings = dict(stride=each(stride), padding=padding if isinstance(padding, str) else each(padding), dilation=each(dilation), groups=groups)
        kind = _by_dims(self.dims, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        return self.layer(kind, x, kernel[1] * groups, kernel[0], kernel[2:], bias=bias is not None, tensors=dict(weight=weight, bias=bias), **self.fixed_all(settings))

    conv1d = conv3d = conv2d

    def conv_transpose2d(self: _Capture, input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
        x, kernel = self.map(input), self.shape_of(weight)
        each = lambda n: n if isinstance(n, tuple) and len(n) > 1 else (n[0] if isinstance(n, tuple) else n,) * self.dims
        settings = dict(stride=each(stride), padding=each(padding), output_padding=each(output_padding), dilation=each(dilation), groups=groups)
        kind = _by_dims(self.dims, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        return self.layer(kind, x, kernel[0], kernel[1] * groups, kernel[2:], bias=bias is not None, tensors=dict(weight=weight, bias=bias), **self.fixed_all(settings))

    conv_transpose1d = conv_transpose3d = conv_transpose2d

    def batch_norm(self: _Capture, input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        x = self.map(input)
        if not training and running_mean is not None:
            raise self.refusal("takes its running statistics in training: set spatial.frozen_norm, which does that for all batch norms, or let it train")
        tensors = dict(weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
        self.check_affine(weight, bias)
        kind = _by_dims(self.dims, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        return self.layer(kind, x, x.channels, eps, momentum, weight is not None, running_mean is not None, tensors=tensors)

    def instance_norm(self: _Capture, input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5):
        x = self.map(input)
        if running_mean is not None or not use_input_stats:
            raise self.refusal("has running statistics, which instance norms have none of here: set track_running_stats=False")
        self.check_affine(weight, bias)
        kind = _by_dims(self.dims, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
        return self.layer(kind, x, x.channels, eps, momentum, weight is not None, tensors=dict(weight=weight, bias=bias))

    def group_norm(self: _Capture, input, num_groups, weight=None, bias=None, eps=1e-5):
        x = self.map(input)
        self.check_affine(weight, bias)
        return self.layer(nn.GroupNorm, x, num_groups, x.channels, eps, weight is not None, tensors=dict(weight=weight, bias=bias))

    def layer_norm(self: _Capture, input, normalized_shape, weight=None, bias=None, eps=1e-5):
        x = self.map(input, last=True)
        if tuple(normalized_shape) != (x.channels,):
            raise self.refusal(f"takes statistics over {normalized_shape}: over channels alone it is known")
        return self.formula((x, normalized_shape, weight, bias, eps), {})

    def linear(self: _Capture, input, weight, bias=None):
        return self.formula((self.map(input, last=True), weight, bias), {})

    def relu(self: _Capture, input, inplace=False):
        return self.formula((input,), {}) if isinstance(input, _Value) and input.last else self.layer(nn.ReLU, self.map(input))

    def leaky_relu(self: _Capture, input, negative_slope=0.01, inplace=False):
        return self.layer(nn.LeakyReLU, self.map(input), negative_slope)

    def dropout(self: _Capture, input, p=0.5, training=True, inplace=False):
        return self.drop(nn.Dropout, input, p, training)

    def dropout2d(self: _Capture, input, p=0.5, training=True, inplace=False):
        return self.drop(_by_dims(self.dims, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), self.map(input), p, training)

    dropout1d = dropout3d = feature_dropout = dropout2d

    def max_pool2d(self: _Capture, input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
        kind = _by_dims(self.dims, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
        if return_indices:
            raise self.refusal("returns the places of the maxima, which are those of a tile, not of the image")
        settings = dict(kernel_size=kernel_size, stride=stride or kernel_size, padding=padding, dilation=dilation)
        return self.layer(kind, self.map(input), ceil_mode=ceil_mode, **self.fixed_all(settings))

    max_pool1d = max_pool3d = max_pool2d

    def avg_pool2d(self: _Capture, input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
        kind = _by_dims(self.dims, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
        settings = dict(kernel_size=kernel_size, stride=stride or kernel_size, padding=padding)
        more = {} if self.dims == 1 else dict(divisor_override=divisor_override)
        return self.layer(kind, self.map(input), ceil_mode=ceil_mode, count_include_pad=count_include_pad, **more, **self.fixed_all(settings))

    avg_pool1d = avg_pool3d = avg_pool2d

    def interpolate(self: _Capture, input, size=None, scale_factor=None, mode="nearest", align_corners=None, recompute_scale_factor=None, antialias=False):
        x = self.map(input)
        if align_corners and mode not in ("nearest", "nearest-exact"):
            raise self.refusal("has align_corners=True, by which each pixel depends on the image's size: not captured yet; set it to False")
        factors = {tuple(m / n for m, n in zip(c.shapes[0][2:], had)) for c, had in zip(self.current, x.sizes)}
        if len(factors) > 1 or antialias:
            raise self.refusal("resizes by a factor that depends on the image's size")
        (factors,) = factors
        if all(f == 1 for f in factors):
            return x
        if any(f != int(f) for f in factors):
            raise self.refusal(f"resizes by {factors}: whole factors are known")
        return self.layer(nn.Upsample, x, scale_factor=tuple(float(f) for f in factors), mode=mode)

    upsample = interpolate

    def pixel_shuffle(self: _Capture, input, upscale_factor):
        return self.layer(nn.PixelShuffle, self.map(input), upscale_factor)

    def pad(self: _Capture, input, pad, mode="constant", value=None):
        x = self.map(input)
        pad = self.fixed(tuple(pad), "padding")
        if not any(pad):
            return x
        if len(pad) > 2 * self.dims and any(pad[2 * self.dims :]):
            return self.formula((x, pad, mode, value), {})
        sides = (*pad[: 2 * self.dims], *(0,) * (2 * self.dims - len(pad)))
        name = {"constant": "Constant", "reflect": "Reflection", "replicate": "Replication", "circular": "Circular"}[mode]
        return self.layer(getattr(nn, f"{name}Pad{self.dims}d"), x, sides, *((value or 0.0,) if mode == "constant" else ()))

    def cat(self: _Capture, tensors, dim=0):
        maps = [x for x in tensors]
        axis = self.axis(dim, maps[0])
        if axis != 1 or any(not isinstance(x, _Value) or x.last != maps[0].last or x.sizes != maps[0].sizes for x in maps):
            raise self.refusal("joins what are no maps of one size, or along another dim than that of channels")
        return self.emit(lambda _: Cat(), maps, last=maps[0].last)

    concat = concatenate = cat

    def add(self: _Capture, input, other, alpha=1):
        maps = [input, other]
        if alpha == 1 and all(isinstance(x, _Value) for x in maps) and maps[0].shapes == maps[1].shapes and maps[0].last == maps[1].last:
            return self.emit(lambda _: Sum(), maps, last=maps[0].last)
        return self.formula((input, other), {} if alpha == 1 else {"alpha": alpha})

    def contiguous(self: _Capture, input, memory_format=None):
        return input

    clone = contiguous

    def permute(self: _Capture, input, *dims):
        dims = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple) else dims
        return self.turned(input, dims)

    def transpose(self: _Capture, input, dim0, dim1):
        dims = list(range(self.dims + 2))
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
        return self.turned(input, dims)

    swapaxes = transpose

    def movedim(self: _Capture, input, source, destination):
        dims = [d for d in range(self.dims + 2) if d != source % (self.dims + 2)]
        dims.insert(destination % (self.dims + 2), source % (self.dims + 2))
        return self.turned(input, dims)

    moveaxis = movedim

    def softmax(self: _Capture, input, dim=None, **more):
        if self.axis(dim, self.map(input, getattr(input, "last", False))) != 1:
            raise self.refusal("runs over places of the image: over channels it is known")
        return self.formula((input,), dict(dim=dim))

    log_softmax = softmax

    def chunk(self: _Capture, input, chunks, dim=0):
        return self.parts(input, (input, chunks, dim), dim)

    def split(self: _Capture, tensor, split_size, dim=0):
        return self.parts(tensor, (tensor, split_size, dim), dim)

    def __getitem__(self: _Capture, input, index):
        index = index if isinstance(index, tuple) else (index,)
        place = self.map(input, getattr(input, "last", False))
        every = lambda i: i == slice(None) or i is Ellipsis
        axis = self.dims + 1 if place.last else 1
        fitting = len(index) <= self.dims + 2 and all(every(i) for d, i in enumerate(index) if d != axis) and Ellipsis not in index[:axis]
        if not fitting or _has_sizes(index) or not all(isinstance(i, slice) for i in index if i is not Ellipsis):
            raise self.refusal("takes a part of the image, or of the batch: of the channels, as x[:, 2:5], it is known")
        return self.formula((input, index), {})


_POINTWISE = {
    *("relu6 elu selu celu gelu silu mish softplus softsign hardtanh hardswish hardsigmoid sigmoid logsigmoid tanh tanhshrink softshrink hardshrink").split(),
    *("exp expm1 log log1p log2 log10 sqrt rsqrt square reciprocal abs neg negative sin cos tan atan erf clamp clamp_min clamp_max relu sign").split(),
    *("add sub subtract rsub mul multiply div divide true_divide pow maximum minimum lerp addcmul where __rsub__ __rtruediv__ __rdiv__ __rpow__ __pow__").split(),
    *("prelu detach threshold float double half to type_as atan2 hypot logaddexp nan_to_num").split(),
}
