"""Tests on several ranks run under a plain pytest: see mpirunner/__init__.py."""

import os
import tempfile
from functools import wraps
from typing import Callable

import pytest

# Tests are small: a second thread costs more than it helps, most of all where ranks outnumber cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The user's own state folder has the runs that he trained; tests leave nothing in it.
os.environ["XDG_STATE_HOME"] = os.path.join(tempfile.gettempdir(), f"distseg-tests-state-{os.getuid()}")

pytest_plugins = ("mpirunner.plugin",)


def remembered(plan: Callable) -> Callable:
    """``plan(model, ...)``, worked out once for models alike."""
    found = {}

    @wraps(plan)
    def once(model, *more):
        key = (_settings(model), *more)
        if key not in found:
            found[key] = plan(model, *more)
        return found[key]

    return once


def _settings(model) -> tuple:
    """All that a plan can depend on: the layers, what is set in them, and the shapes of their weights."""
    plain = (bool, int, float, str, tuple)
    return tuple(
        (name, type(layer), str(getattr(layer, "reads", "")), *((k, str(v)) for k, v in vars(layer).items() if isinstance(v, plain)), *((k, w.shape, w.dtype) for k, w in layer.named_parameters(recurse=False)))
        for name, layer in model.named_modules(remove_duplicate=False)
    )


@pytest.fixture(autouse=True, scope="session")
def plans_are_remembered():
    """Plans take longer than the steps of small networks, and most tests train the same few. Those of planning itself ask the functions."""
    from distseg.planning import stages
    from distseg.runtime import parallelize
    from distseg.training import engine

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((engine, "reach_for"), (stages, "modelled"), (parallelize, "cumulative_strides")):
            patch.setattr(module, name, remembered(getattr(module, name)))
        yield


@pytest.fixture
def refused(capsys):
    """``refused(*words)``: what is said of a command that is refused."""

    def said(*words: str) -> str:
        from distseg.cli.main import main

        with pytest.raises(SystemExit) as end:
            main([*words])
        assert end.value.code == 2
        return capsys.readouterr().err

    return said
