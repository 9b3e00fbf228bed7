"""Sums of a step's gradients over the replicas, which start while the backward pass still runs.

The gradients live in buckets, from the last layer to the first (:mod:`distseg.comm.reducer`). The
backward pass completes them in about this order. A bucket's sum starts once its gradients are
complete and the sums of all earlier buckets have started::

    backward pass      layers 9 8 7    layers 6 5 4    layers 3 2 1
    sums                             | bucket 0      | bucket 1      | bucket 2

So all replicas start the sums in the same order. A rank waits for them only after the backward
pass, and buckets whose gradients are not complete before start then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from distseg.comm.mesh import Mesh
from distseg.comm.reducer import Gradients, Reducer

Prepare = Callable[[Tensor, Sequence[nn.Parameter]], None]


class GradientSums:
    """Sums of a step's gradients over the replicas, which start during the backward passes.

    A step calls :meth:`begin`, runs its backward passes, and calls :meth:`finish`. A backward pass
    after which the gradients of some parameters are complete runs in :meth:`last_pass`.

    Args:
        gradients: the gradients.
        reducer: sums a bucket (a flat tensor with the gradients of several parameters).
        mesh: the mesh, whose wait policy defers weight gradients.
    """

    def __init__(self, gradients: Gradients, reducer: Reducer, mesh: Mesh):
        self.gradients, self.reducer, self.mesh = gradients, reducer, mesh
        self._prepare: Prepare | None = None
        # Parameters of each bucket to whose gradients autograd may still add. Empty outside of
        # steps, and if sums must not start during the backward pass.
        self._incomplete: list[set[nn.Parameter]] = []
        self._versions: list[int] = []  # of each bucket at the start of its sum
        # Nodes of autograd with their hooks. Autograd keeps a node only while a graph has it.
        self._hooks: list[tuple[Node, RemovableHandle]] = []

    def begin(self, prepare: Prepare | None = None, early: bool = True) -> None:
        """Begin a step: from now on, sums may start.

        Args:
            prepare: called with a bucket and its parameters before the sum of the bucket starts.
            early: False to start no sum before :meth:`finish`.

        Raises:
            RuntimeError: the backward pass of the last step failed after sums had started.
        """
        self._remove_hooks()
        if self._versions:
            raise RuntimeError(
                f"the last backward pass ended with an error after {len(self._versions)} of "
                f"{len(self.gradients.parts)} sums of gradients had started, and other ranks may "
                "have started another number of them: end the job and start it again"
            )
        self._prepare = prepare
        early = early and self.reducer.early
        self._incomplete = [set(those) for those in self.gradients.members] if early else []

    @contextmanager
    def last_pass(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Return a context manager for the last backward pass of a step that uses ``parameters``.

        Inside, autograd adds to the gradient of each of these parameters at most once. The gradient
        is then complete, unless deferred work (:mod:`distseg.comm.waits`) will still add to it.
        """
        parameters = [p for p in parameters if p.requires_grad] if self._incomplete else []
        for p in parameters:
            # Unlike a hook of the parameter, a hook of this node also runs if all gradients of the
            # parameter are deferred.
            node = get_gradient_edge(p).node
            self._hooks.append((node, node.register_hook(partial(self._passed, p))))
        yield
        self._remove_hooks()
        for p in parameters:  # Autograd does not pass a parameter that the pass did not use.
            self._passed(p)

    def _passed(self, p: nn.Parameter, *_) -> None:
        """Record that autograd adds no more to the gradient of ``p``; start sums if possible."""
        for those in self._incomplete:
            those.discard(p)
        self.advance()

    def _remove_hooks(self) -> None:
        for _, hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def advance(self) -> None:
        """Start the sums of complete buckets, and advance all running sums, without waiting."""
        while len(self._versions) < len(self._incomplete) and self._is_complete():
            self._start(self.gradients.buckets[len(self._versions)])
        self.reducer.advance()

    def _is_complete(self) -> bool:
        """Return True if all gradients in the next bucket to sum are complete."""
        number = len(self._versions)
        deferred = map(self.mesh.waits.adds_to, self.gradients.members[number])
        return not self._incomplete[number] and not any(deferred)

    @torch.no_grad()
    def _start(self, bucket: Tensor) -> None:
        """Start the sum of ``bucket``, which is the next one in order, over the replicas."""
        if self._prepare:
            self._prepare(bucket, self.gradients.members[len(self._versions)])
        self._versions.append(bucket._version)
        self.reducer.start(bucket)

    def finish(self) -> None:
        """End a step: start the remaining sums, and wait until all sums are complete.

        Raises:
            RuntimeError: a gradient was changed after the sum of its bucket had started.
        """
        parts = self.gradients.parts
        for part in parts[len(self._versions) :]:
            self._start(part)
        self.reducer.finish()
        changed = [n for n, part in enumerate(parts) if part._version != self._versions[n]]
        self._incomplete, self._versions = [], []
        if changed:
            raise RuntimeError(
                f"gradients of bucket {changed[0]} of {len(parts)} were changed after their sum "
                "over the replicas had started, so the gradient is wrong: this is an error in "
                "distseg, please report it"
            )
