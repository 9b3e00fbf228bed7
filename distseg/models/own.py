"""Build a user's own network from ``package.module:function``.

Errors in user code are reported with their file and line. Three mistakes that look similar in
Python get different messages: a missing module, an error inside a module, and arguments that the
function does not take.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import Tensor, nn

from distseg.models.bands import bands_of, dims_of, fitting, is_recorded, record_images
from distseg.models.joined import WrongEnds, joined, measure_outputs
from distseg.models.layers import on_meta, outline, skip_store
from distseg.models.meta import OnMeta
from distseg.models.passes import eager, scripted
from distseg.models.user_errors import user_error, user_errors


def own_builder(name: str, setting: str = "model.name") -> Callable[..., nn.Module]:
    """Return the user's function that a setting names as ``package.module:function``.

    The working directory is searched first, as by ``python -m``.

    Args:
        name: ``package.module:function``.
        setting: the name of the setting, for error messages.

    Raises:
        ValueError: the module or function does not exist, or the import of the module fails.
    """
    module, _, function = name.partition(":")
    what = "model" if setting == "model.name" else setting
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise ValueError(
            f"{setting} is {name!r}, but your own function is written as package.module:function, "
            "such as nets.mine:unet"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = import_module(module)
    except (Exception, SystemExit) as e:
        if (
            isinstance(e, ModuleNotFoundError)
            and e.name is not None
            and (module == e.name or module.startswith(e.name + "."))
        ):
            raise ValueError(
                f"{what} {name!r} cannot be imported: there is no module {e.name}: start in the "
                f"folder that holds it (the current one is {os.getcwd()}), "
                "or put that folder on PYTHONPATH"
            ) from None
        raise ValueError(
            f"{what} {name!r} cannot be imported: its module fails with {user_error(e)}: fix it, "
            "or install what it needs"
        ) from e
    builder = getattr(found, function, None)
    if not callable(builder):
        found_instead = (
            f"there is no {function}"
            if builder is None
            else f"{function} is a {type(builder).__name__}, not a function,"
        )
        where = getattr(found, "__file__", None) or f"the folder {module}"
        raise ValueError(
            f"{what} {name!r} cannot be imported: {found_instead} in {where}: {_choices(found)}"
        )
    return builder


def _choices(module) -> str:
    """Return the end of the error message for a missing function, such as ``choose unet, fpn``.

    It names the public functions and classes that the file of ``module`` defines. If there are
    none, the advice is to define the function.
    """
    own = [
        name
        for name, value in vars(module).items()
        if callable(value)
        and getattr(value, "__module__", None) == module.__name__
        and not name.startswith("_")
    ]
    return (
        f"choose {', '.join(own[:8])}{' or another' if len(own) > 8 else ''}"
        if own
        else "define it there"
    )


def built(
    name: str,
    builder: Callable[..., nn.Module],
    arguments: dict,
    own: dict | None = None,
    inputs: Sequence[int] | None = None,
    outputs: Sequence[str] | None = None,
    any_channels: bool = False,
) -> nn.Module:
    """Return the network that a user's function builds.

    Args:
        name: ``package.module:function``, for error messages.
        builder: the function.
        arguments: the fields of the section ``model`` that are set, with ``in_channels`` and
            ``out_channels`` from the data.
        own: the arguments in the setting ``model.args``, which replace ``arguments`` of the same
            meaning.
        inputs, outputs: see :func:`distseg.models.joined.joined`.
        any_channels: True if the outputs may differ in their number of channels.

    Raises:
        ValueError: the function does not take the arguments, fails, or returns something that is
            no network or cannot be distributed.
    """
    if own is None:
        own = {}
    wanted, arguments = arguments, _called(builder, arguments, own)
    _check_arguments(name, builder, arguments)
    with user_errors(f"model {name!r} cannot be built"):
        model = builder(**arguments)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model {name!r} returns a value of type {type(model).__name__}, but it must return a "
            f"torch.nn.Module, such as an nn.Sequential"
        )
    if (script := scripted(model)) is not None:
        raise ValueError(
            f"model {name!r} cannot be distributed: it cannot be copied, as {script} is "
            "TorchScript (torch.jit.script or trace), whose calls distseg cannot see: write it in "
            "plain PyTorch"
        )
    joined(model, inputs, outputs)
    record_images(
        model,
        wanted.get("in_channels") or sum(inputs or ()),
        guesses=_bands_given(builder, arguments),
    )
    _make_lazy(name, model)
    _check_leaves(name, model)
    try:
        on_meta(model)
    except Exception as e:  # copying runs user code, which may raise anything
        raise ValueError(
            f"model {name!r} cannot be distributed: it cannot be copied ({type(e).__name__}: "
            f"{' '.join(str(e).split())[:200]}), as TorchScript and some parametrizations cannot: "
            "write it in plain PyTorch"
        ) from e
    if outputs is not None:
        if any_channels:
            _measure_outputs(model)
        _check_outputs(name, model)
    return model


_CALLED = {
    "in_channels": ("in_channels", "in_chans", "n_channels", "num_channels"),
    "out_channels": ("out_channels", "classes", "num_classes", "n_classes"),
}


def _called(builder: Callable, arguments: dict, own: dict) -> dict:
    """Return the keyword arguments with which a user's function is called.

    The numbers of bands and classes get the names that the function uses for them. A function with
    the parameter ``num_classes``, for example, gets ``out_channels`` under this name.

    Args:
        builder: the function.
        arguments: the fields of the section ``model`` that are set, with ``in_channels`` and
            ``out_channels`` from the data.
        own: the user's ``model.args``, which are added unchanged and replace ``arguments``. If
            they have a number of bands or classes, under any of the known names, it replaces the
            number from the data.
    """
    try:
        takes = inspect.signature(builder).parameters
    except (TypeError, ValueError):
        takes = {}
    found = {}
    for field, value in arguments.items():
        names = _CALLED.get(field, ())
        if not any(name in own for name in names):
            found[next((name for name in names if name in takes), field)] = value
    return found | own


def _bands_given(builder: Callable, arguments: dict) -> list[int]:
    """Return the numbers of bands among the arguments of a user's function or their defaults.

    The result has the positive integers given for ``in_channels``, ``in_chans`` and so on. These
    numbers are guesses, since the layer that reads the image may take another number of bands.

    Args:
        builder: the function.
        arguments: the keyword arguments with which it is called.
    """
    try:
        takes = inspect.signature(builder).parameters
    except (TypeError, ValueError):
        takes = {}
    names = _CALLED["in_channels"]
    values = [arguments.get(name, takes[name].default if name in takes else None) for name in names]
    return [value for value in values if isinstance(value, int) and value > 0]


@torch.no_grad()
def _make_lazy(name: str, model: nn.Module) -> None:
    """Give lazy layers, such as ``nn.LazyConv2d``, their weights by a pass over an image of zeros.

    A model without lazy layers is left as it is.

    Raises:
        ValueError: the number of bands is not known, or the forward pass fails.
    """
    lazy = [
        layer
        for layer in model.modules()
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params()
    ]
    if not lazy:
        return
    kind = type(lazy[0]).__name__
    if not is_recorded(model):
        raise ValueError(
            f"model {name!r} has a {kind}, whose weights can be made only if the number of bands "
            "is known: set model.in_channels"
        )
    training = model.training
    try:
        with skip_store({}):
            model.eval()(torch.zeros(1, bands_of(model), *(_LAZY_SIDE,) * dims_of(model)))
    except Exception as e:
        raise ValueError(
            f"model {name!r} has a {kind}, whose weights are made by a first forward pass, but "
            f"this pass fails on an image of {bands_of(model)} bands: {user_error(e)}: correct "
            "this error, or set model.in_channels if the network takes another number of bands"
        ) from e
    model.train(training)


_LAZY_SIDE = 64  # side in pixels of the image for the first forward pass


def _check_leaves(name: str, model: nn.Module) -> None:
    """Refuse weights that hooks compute, as the hooks of torch.nn.utils.weight_norm do.

    A model with such weights cannot be copied.

    Raises:
        ValueError: a layer has such a weight. The message names the layer and the weight.
    """
    for place, layer in model.named_modules():
        made = next(
            (
                field
                for field, value in vars(layer).items()
                if isinstance(value, Tensor) and not value.is_leaf
            ),
            None,
        )
        if made:
            raise ValueError(
                f"model {name!r} cannot be distributed: the {made} of its layer {place} "
                f"({type(layer).__name__}) is computed by hooks, as torch.nn.utils.weight_norm "
                f"does: use torch.nn.utils.parametrizations.weight_norm"
            )


@torch.no_grad()
def _measure_outputs(model: nn.Module) -> None:
    """Run :func:`distseg.models.joined.measure_outputs` with an image of 256 pixels along each dim.

    Args:
        model: the network, changed by :func:`distseg.models.joined.joined`.
    """
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    size = (256,) * dims_of(model)
    with skip_store({}), eager(), OnMeta():
        image = torch.empty(2, bands_of(model), *size, device="meta", dtype=dtype)
        measure_outputs(model, outline, image)


@torch.no_grad()
def _check_outputs(name: str, model: nn.Module) -> None:
    """Refuse a network whose result does not fit the setting ``model.outputs``.

    Nothing is checked if the network's shapes cannot be computed on the meta device.

    Args:
        name: ``package.module:function``, for error messages.
        model: the network, changed by :func:`distseg.models.joined.joined`.

    Raises:
        ValueError: the network does not return an output that the setting names, or, in training,
            an output has another shape than the first one.
    """
    for training in (True, False):
        shadow = outline(model).train(training)
        try:
            with skip_store({}):
                shadow(torch.empty(2, bands_of(model), *(256,) * dims_of(model), device="meta"))
        except WrongEnds as e:
            raise ValueError(f"model {name!r}: {e}") from None
        except Exception:
            return  # the network may need another size; other errors are reported later


@torch.no_grad()
def check_channels(name: str, model: nn.Module, bands: int | None, classes: int | None) -> None:
    """Refuse a network that does not take or return the needed number of channels.

    Nothing is checked if the network's shapes cannot be computed on the meta device.

    Args:
        name: ``package.module:function``, for error messages.
        model: the network.
        bands: the needed number of bands; None if every number is right.
        classes: the needed number of classes; None if every number is right.

    Raises:
        ValueError: the network takes another number of bands, or returns another number of classes.
    """
    if bands is None and classes is None:
        return
    try:
        with skip_store({}), OnMeta():
            given = bands or bands_of(model)
            y = outline(model)(torch.empty(1, given, *(256,) * dims_of(model), device="meta"))
    except Exception as e:
        other = fitting(model) if bands else None
        if other is not None and other.bands != bands:
            raise ValueError(
                f"model {name!r} does not take images of {bands} bands: it takes {other.bands} "
                f"({user_error(e)}): let it take the argument in_channels"
            ) from e
        return  # the network may need another size; other errors are reported later
    if classes is not None and isinstance(y, Tensor) and y.dim() > 1 and y.shape[1] != classes:
        raise ValueError(
            f"model {name!r} returns {y.shape[1]} channels, but {classes} are needed, one for each "
            "class: let it take the argument out_channels"
        )


def _check_arguments(name: str, builder: Callable, arguments: dict) -> None:
    """Refuse arguments that the signature of a user's function does not take."""
    try:
        signature = inspect.signature(builder)
    except (TypeError, ValueError):
        return  # the function has no signature that Python can read
    try:
        signature.bind(**arguments)
    except TypeError as e:
        given = (
            ", ".join(f"{field}={value!r}" for field, value in arguments.items()) or "no arguments"
        )
        raise ValueError(
            f"model {name!r} takes {signature}, but is called with {given} ({e}): its arguments "
            "are model.args, the fields of the model section that are set, and in_channels and "
            "out_channels (or classes) from the data; let it take these arguments, or "
            "leave out of the config what it does not take"
        ) from None
