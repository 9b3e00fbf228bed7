"""What a stream, the host and MPI may do to one memory at a time: the rules of distseg.comm.staging, checked as steps run.

A clock counts what is queued on the stream. Each memory remembers when it was last written and last touched by something
queued; a wait moves ``done``, up to which the stream has come. So whoever comes too early is seen, without a GPU to lose a race on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import Tensor


class Race(AssertionError):
    """Memory is touched by two at a time."""


@dataclass
class _Memory:
    written: int = 0  # by what was queued then; 0 never
    touched: int = 0
    pinned: bool = False
    messages: list = field(default_factory=list)  # under way, from or into bytes of it


class Order:
    """The stream of one device.

    Attributes:
        clock: of the last thing queued; ``done``: of the last that is known to be done.
    """

    def __init__(self):
        self.clock = self.done = 0
        self._memories: WeakKeyDictionary = WeakKeyDictionary()

    def of(self, x: Tensor) -> _Memory:
        return self._memories.setdefault(x.untyped_storage(), _Memory())

    # what is queued

    def queue(self, reads: list[Tensor], writes: list[Tensor]) -> None:
        """A kernel, or a copy that the host does not wait for."""
        self.clock += 1
        for x, writing in [(x, False) for x in reads] + [(x, True) for x in writes]:
            memory = self.of(x)
            self._check_messages(memory, x, writing, "something queued")
            memory.touched = self.clock
            if writing:
                memory.written = self.clock

    def fresh(self, x: Tensor) -> None:
        """A GPU's memory from the allocator: a tensor that was freed may have had it, whose kernels are still queued."""
        self.clock += 1
        self.of(x).touched = self.clock

    def settle(self, until: int | None = None) -> None:
        """The host waits for the stream, or for a mark of it."""
        self.done = max(self.done, self.clock if until is None else until)

    # what happens at once

    def host(self, reads: list[Tensor], writes: list[Tensor]) -> None:
        """The host reads and writes."""
        for x, writing in [(x, False) for x in reads] + [(x, True) for x in writes]:
            memory = self.of(x)
            self._check_done(memory, writing, "the host")
            self._check_messages(memory, x, writing, "the host")

    def send(self, x: Tensor, request) -> None:
        memory = self.of(x)
        self._check_done(memory, False, "MPI")
        memory.messages.append((request, False, _bytes(x)))

    def receive(self, x: Tensor, request) -> None:
        memory = self.of(x)
        self._check_done(memory, True, "MPI")
        self._check_messages(memory, x, True, "MPI")
        memory.messages.append((request, True, _bytes(x)))

    def _check_done(self, memory: _Memory, writing: bool, who: str) -> None:
        last = memory.touched if writing else memory.written
        if last > self.done:
            raise Race(
                f"{who} {'writes' if writing else 'reads'} memory that something queued has yet to {'touch' if writing else 'write'}"
            )

    def _check_messages(self, memory: _Memory, x: Tensor, writing: bool, who: str) -> None:
        memory.messages = [message for message in memory.messages if not message[0].complete]
        mine = _bytes(x)
        if any(
            (into or writing) and mine.start < its.stop and its.start < mine.stop
            for _, into, its in memory.messages
        ):
            raise Race(
                f"{who} {'writes' if writing else 'reads'} memory of a message that is under way"
            )


def _bytes(x: Tensor) -> range:
    """Return the bytes of its storage between the first and the last one of a tensor."""
    first = x.storage_offset()
    cells = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride())) if x.numel() else 0
    return range(first * x.element_size(), (first + cells) * x.element_size())
