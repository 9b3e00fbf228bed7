"""Check that each weight has its own dense memory.

PyTorch's fused optimizers walk through the memory of a weight, its gradient and its momenta side by
side and never read their strides. So training would go wrong without an error if a weight has gaps,
if two weights share memory, or if a gradient has another memory order than its weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distseg.comm.memory_format import lies_alike
from distseg.models.network import user_names


class _Named(NamedTuple):
    """A tensor of a model with its name, and the range ``start`` to ``stop`` of its addresses."""

    name: str
    tensor: Tensor
    start: int
    stop: int


def own_memory(model: nn.Module) -> None:
    """Copy weights that have gaps, such as ``nn.Parameter(filters[:, :3])``, into dense memory.

    The model keeps its parameter objects. Only their ``data`` is replaced.

    Raises:
        ValueError: two weights, or two numbers of one weight, share memory, so that an update of
            one changes the other.
    """
    check_own_memory(model)
    for p in model.parameters():
        if not p.is_meta and not is_dense(p):
            p.data = p.data.clone()


def check_own_memory(model: nn.Module) -> None:
    """Refuse a model in which the update of one weight changes another number.

    Raises:
        ValueError: two tensors, or two numbers of one weight, share memory; the message names them.
    """
    for name, p in user_names(model.named_parameters(), model).items():
        if p.requires_grad and not p.is_meta and _repeats(p):
            raise ValueError(
                f"several numbers of the weight {name} ({'x'.join(map(str, p.shape))}) share one "
                "place in memory, as after expand, so an update of one would change the others: "
                "give each number its own memory, nn.Parameter(weight.expand(...).clone())"
            )
    for one, other in _overlapping(model):
        raise ValueError(
            f"{one.name} and {other.name} are two tensors of the model in the same memory, so an "
            "update of one would change the other: make them one parameter, or copy the second, "
            "nn.Parameter(weight.detach().clone())"
        )


def is_dense(x: Tensor) -> bool:
    """Return True if the elements of ``x`` fill a range of memory without gaps, each only once."""
    return lies_alike(torch.empty_like(x, device="meta"), x)


def _repeats(x: Tensor) -> bool:
    return not is_dense(x) and int(_marks(x).sum()) < x.numel()


def _overlapping(model: nn.Module) -> Iterator[tuple[_Named, _Named]]:
    """Yield each pair of tensors that share memory and of which at least one is trained."""
    tensors = user_names([*model.named_parameters(), *model.named_buffers()], model).items()
    spans = [_named(name, x) for name, x in tensors if not x.is_meta and x.numel()]
    before: list[_Named] = []
    for span in sorted(spans, key=_start):
        before = [other for other in before if other.stop > span.start]
        for other in before:
            trained = span.tensor.requires_grad or other.tensor.requires_grad
            if trained and _meet(other.tensor, span.tensor):
                yield other, span
        before.append(span)


def _named(name: str, x: Tensor) -> _Named:
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
    return _Named(name, x, x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size())


def _start(named: _Named) -> int:
    return named.start


def _meet(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors whose memory ranges overlap share at least one element.

    Ranges may overlap without a common element, as those of the even and the odd columns of a
    matrix. If the storages or the dtypes differ, return True without a check.
    """
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr() or x.dtype != y.dtype:
        return True
    marks = _marks(x)
    return bool(marks.as_strided(y.shape, y.stride(), y.storage_offset()).any())


def _marks(x: Tensor) -> Tensor:
    """Return a mask of the storage of ``x``, (length,): True for the elements that ``x`` views."""
    marks = torch.zeros(x.untyped_storage().nbytes() // x.element_size(), dtype=torch.bool)
    marks.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
    return marks
