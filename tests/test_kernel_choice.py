"""Choice of the kernels that compute a norm: Triton's only where they are asked for and can be imported."""

import sys

import pytest
import torch

from distseg.layers.kernels import choice, plain
from distseg.layers.kernels import norm as compiled


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    monkeypatch.setattr(compiled, "available", lambda x: False)
    choice._triton_norm.cache_clear()
    yield
    choice._triton_norm.cache_clear()


@pytest.fixture
def triton_norm(monkeypatch):
    """A module in the place of the Triton kernels, so that Triton need not be installed."""
    module = type(sys)("triton_norm")
    monkeypatch.setitem(sys.modules, "distseg.layers.kernels.triton_norm", module)
    monkeypatch.setattr("distseg.layers.kernels.triton_norm", module, raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return module


X = torch.zeros(1, 2, 3, 3)


@pytest.mark.parametrize("value", [None, "0", ""])
def test_triton_is_off_by_default(value, monkeypatch, triton_norm):
    if value is None:
        monkeypatch.delenv("DISTSEG_TRITON_NORMS", raising=False)
    else:
        monkeypatch.setenv("DISTSEG_TRITON_NORMS", value)
    assert choice.kernels(X) is plain and choice.triton_kernels(X) is None


def test_triton_where_it_is_asked_for(monkeypatch, triton_norm):
    monkeypatch.setenv("DISTSEG_TRITON_NORMS", "1")
    assert choice.kernels(X) is triton_norm
    assert choice.kernels(X.to(torch.complex64)) is plain
    assert choice.kernels(torch.zeros(1, 2, 1, 1, 1, 1)) is plain
    monkeypatch.delenv("TRITON_INTERPRET")
    assert choice.kernels(X) is plain, "a CPU tensor, without the interpreter"


def test_compiled_kernels_come_first(monkeypatch, triton_norm):
    monkeypatch.setenv("DISTSEG_TRITON_NORMS", "1")
    monkeypatch.setattr(compiled, "available", lambda x: True)
    assert choice.kernels(X) is compiled


def test_a_missing_triton_is_named(monkeypatch):
    monkeypatch.setenv("DISTSEG_TRITON_NORMS", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "distseg.layers.kernels.triton_norm", raising=False)
    monkeypatch.delattr("distseg.layers.kernels.triton_norm", raising=False)
    with pytest.warns(UserWarning, match="DISTSEG_TRITON_NORMS is 1.*pip install triton"):
        assert choice.kernels(X) is plain
