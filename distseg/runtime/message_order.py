"""Proves that the messages of all ranks of a job cannot deadlock.

Each rank has a list of steps. In a step the rank computes, starts messages, waits for messages, or
takes part in a collective. The messages of one step start together; they are called a *group* here.
The proof assumes that nothing is buffered: a message is complete once both of its
ranks have started it (a rendezvous). Every message has one sender and one receiver, so it does not
matter which rank runs first: if one run of the steps comes to its end, every run does.

Rules say what a transport does with the messages of a communicator:

- MPI and gloo: messages travel in the background, and tags tell them apart.
- NCCL: a rank runs its steps one after another on one *stream*, so messages that it starts must be
  complete before its next step. Messages have no tags: messages from one rank to another are
  matched in the order in which both ranks start them. One group has at most 256 messages.

``MESSAGES`` is a job without NCCL, ``HALOS_IN_STREAM`` one whose halos are carried by NCCL
(``spatial.messages: nccl``), and ``STREAM`` one whose stages would use NCCL too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distseg.comm.nccl import MOST_MESSAGES


class Message(NamedTuple):
    """Message from one rank to another, as the proof against deadlocks sees it.

    Sender and receiver each have the message in their list of steps, with equal attributes.

    Attributes:
        comm: the name of the communicator.
        source, target: the numbers of the sending and the receiving rank in the job.
        tag: the tag of the message.
        name: the name of the message. It must differ from the name of any other message from this
            source to this target, because a send is matched with its receive by the name.
    """

    comm: str
    source: int
    target: int
    tag: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}, from rank {self.source} to rank {self.target}"


@dataclass(frozen=True)
class Start:
    """Step of a rank that starts some sends and receives together.

    A step is an entry in a rank's list of messages, waits, collectives and passes.

    Attributes:
        messages: the messages that this rank sends or receives.
    """

    messages: tuple[Message, ...]

    def __str__(self) -> str:
        return " and ".join(map(str, self.messages))


@dataclass(frozen=True)
class Wait:
    """Step of a rank that waits until certain messages, which it has started, are complete.

    Attributes:
        messages: the messages.
    """

    messages: tuple[Message, ...]

    def __str__(self) -> str:
        return " and ".join(map(str, self.messages))


@dataclass(frozen=True)
class Collective:
    """Step of a rank that is a collective: all ranks of a communicator take part together.

    Attributes:
        comm: the name of the communicator.
        ranks: the numbers of its ranks in the job.
        name: the name of what is gathered or summed.
    """

    comm: str
    ranks: tuple[int, ...]
    name: str

    def __str__(self) -> str:
        return f"{self.name} on {self.comm} of ranks {_numbers(self.ranks)}"


@dataclass(frozen=True)
class Pass:
    """Step of a rank in which it computes and waits for no other rank.

    Attributes:
        name: the name of the pass, for errors.
        reads: True if the pass reads tensors that other ranks of the pipeline have sent.
    """

    name: str
    reads: bool = True


Step = Start | Wait | Collective | Pass


@dataclass(frozen=True)
class Rules:
    """Rules by which a transport carries messages.

    Attributes:
        transports: the names of the transports, for errors.
        streams: the names of the communicators whose messages NCCL carries. A rank does not go on
            before they are complete, they have no tags, and at most ``MOST_MESSAGES`` may start
            together (:class:`Start`).
    """

    transports: str
    streams: frozenset[str] = frozenset()


MESSAGES = Rules("MPI and gloo")
HALOS_IN_STREAM = Rules("NCCL", frozenset({"tiles"}))
STREAM = Rules("NCCL", frozenset({"pipeline", "tiles"}))


def check_order(programs: Sequence[Sequence[Step]], rules: Rules = MESSAGES) -> None:
    """Refuse the steps of a job's ranks if the ranks could wait for each other for ever.

    A step starts messages, waits for messages, computes, or is a collective.

    Args:
        programs: the steps of each rank, in order. The rank is the index.
        rules: the rules by which the transport carries messages.

    Raises:
        ValueError: if ranks have different orders of collectives, if a message is sent but not
            received (or the reverse), if messages are sent in another order than they are received,
            if one step starts too many messages for the transport, or if ranks deadlock. The error
            names the ranks and what each of them waits for.
    """
    _check_collectives(programs)
    _check_matches(programs, rules)
    _check_batches(programs, rules)
    _DeadlockSearch(programs, rules).to_the_end()


def _check_collectives(programs: Sequence[Sequence[Step]]) -> None:
    """Refuse a job in which the ranks of a communicator call collectives in different orders."""
    orders: dict[tuple[str, tuple[int, ...]], dict[int, list[str]]] = {}
    for rank, program in enumerate(programs):
        for step in program:
            if isinstance(step, Collective):
                group = orders.setdefault((step.comm, step.ranks), {r: [] for r in step.ranks})
                group[rank].append(step.name)
    for (comm, ranks), of_rank in orders.items():
        for rank in ranks[1:]:
            _check_alike(
                of_rank[ranks[0]],
                of_rank[rank],
                f"in collective {{}} on {comm}, rank {ranks[0]} has {{}}, but rank {rank} has {{}}",
            )


def _check_matches(programs: Sequence[Sequence[Step]], rules: Rules) -> None:
    """Refuse messages that are not received, or not in the order in which they are sent."""
    sent: dict[tuple, list[str]] = defaultdict(list)
    received: dict[tuple, list[str]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for message in _started(program):
            tag = None if message.comm in rules.streams else message.tag
            way = (message.comm, message.source, message.target, tag)
            (sent if message.source == rank else received)[way].append(message.name)
    for way in {**sent, **received}:
        comm, source, target, _ = way
        assert len(set(sent[way])) == len(sent[way]), "messages of one way need different names"
        _check_alike(
            sent[way],
            received[way],
            f"as message {{}} on {comm} over {rules.transports}, rank {source} sends {{}}, "
            f"but rank {target} receives {{}}",
        )


def _check_alike(one: Sequence[str], other: Sequence[str], text: str) -> None:
    """Refuse two lists of messages that differ.

    Args:
        one, other: the names of the messages. A missing entry at the end of the shorter list is
            called ``nothing`` in the error.
        text: the error, with three ``{}`` for the position (from 1) and the two differing entries.
    """
    for place in range(max(len(one), len(other))):
        a, b = (each[place] if place < len(each) else "nothing" for each in (one, other))
        if a != b:
            raise ValueError(
                f"give all ranks one order of messages: {text.format(place + 1, a, b)}"
            )


def _check_batches(programs: Sequence[Sequence[Step]], rules: Rules) -> None:
    """Refuse a step that starts more messages at once than the transport allows."""
    for rank, program in enumerate(programs):
        for step in program:
            if not isinstance(step, Start) or step.messages[0].comm not in rules.streams:
                continue
            if len(step.messages) > MOST_MESSAGES:
                raise ValueError(
                    f"rank {rank} starts {len(step.messages)} messages at once "
                    f"({step.messages[0]}, ...), but {rules.transports} takes at most "
                    f"{MOST_MESSAGES}: use fewer tiles for each image"
                )


class _DeadlockSearch:
    """Simulation that runs the steps of all ranks without data, to find deadlocks.

    Args:
        programs: the steps of each rank: starts of messages, waits, collectives and passes.
        rules: the rules by which the transport carries messages.
    """

    def __init__(self, programs: Sequence[Sequence[Step]], rules: Rules):
        self.programs, self.rules = programs, rules
        self._at = [0] * len(programs)
        self._begun = [-1] * len(programs)  # The last step of each rank that has begun.
        self._ends: Counter[Message] = Counter()  # How many of a message's ranks have started it.
        # How many ranks have begun the n-th collective of a communicator, by (communicator, n).
        self._present: Counter[tuple] = Counter()
        # How many collectives a rank has begun, by (rank, communicator).
        self._collectives: Counter[tuple] = Counter()

    def to_the_end(self) -> None:
        """Run all steps.

        Raises:
            ValueError: if ranks wait for each other for ever.
        """
        moved = True
        while moved:
            # Not `any(...)`, which would stop at the first rank that moved: try every rank.
            moved = False
            for rank in range(len(self.programs)):
                moved = self._advance(rank) or moved
        stuck = [rank for rank, steps in enumerate(self.programs) if self._at[rank] < len(steps)]
        if stuck:
            raise ValueError(
                "change the order of the messages, because over "
                f"{self.rules.transports} these ranks wait for each other: "
                + "; ".join(
                    f"rank {rank} waits for rank {other} ({step})"
                    for rank, other, step in self._cycle(stuck[0])
                )
            )

    def _advance(self, rank: int) -> bool:
        """Run the next steps of a rank until a step must wait; return True if any step began."""
        moved, program = False, self.programs[rank]
        while self._at[rank] < len(program):
            step = program[self._at[rank]]
            if self._begun[rank] < self._at[rank]:
                self._begin(rank, step)
                self._begun[rank], moved = self._at[rank], True
            if next(self._lacks(rank, step), None) is not None:
                break
            self._at[rank] += 1
            moved = True
        return moved

    def _begin(self, rank: int, step: Step) -> None:
        if isinstance(step, Start):
            self._ends.update(step.messages)
        elif isinstance(step, Collective):
            group = step.comm, step.ranks
            self._collectives[rank, group] += 1
            self._present[group, self._collectives[rank, group]] += 1

    def _lacks(self, rank: int, step: Step) -> Iterator[tuple[int, str]]:
        """Yield (other rank, text) for each other rank that a step of ``rank`` waits for.

        The text names the message or the collective. Nothing is yielded if the step is complete.
        """
        if isinstance(step, Collective):
            group = step.comm, step.ranks
            number = self._collectives[rank, group]
            if self._present[group, number] < len(step.ranks):
                yield from (
                    (other, str(step))
                    for other in step.ranks
                    if self._collectives[other, group] < number
                )
        elif isinstance(step, (Start, Wait)):
            yield from (
                (message.target if rank == message.source else message.source, str(message))
                for message in step.messages
                if self._ends[message] < 2
                and (isinstance(step, Wait) or message.comm in self.rules.streams)
            )

    def _cycle(self, rank: int) -> list[tuple[int, int, str]]:
        """Return ranks that wait for each other in a circle, as (rank, awaited rank, text)."""
        way: list[tuple[int, int, str]] = []
        while rank not in (place := [each[0] for each in way]):
            other, what = next(self._lacks(rank, self.programs[rank][self._at[rank]]))
            way.append((rank, other, what))
            rank = other
        return way[place.index(rank) :]


def in_batches(steps: Sequence[Step], rank: int) -> list[Step]:
    """Return a rank's steps, changed so that messages between two passes start together.

    Only messages between pipeline stages are moved.

    NCCL needs this order: if two ranks first send to each other and receive only then, they
    deadlock. So a rank starts the sends of a pass together with the receives of its next pass, as
    ``send_forward_recv_backward`` of Megatron-LM does. Passes that read nothing from other ranks
    (repeated passes, weight gradients) run after these messages.

    Args:
        steps: the steps of the rank over MPI or gloo.
        rank: the number of the rank in the job.
    """
    found: list[Step] = []
    batch: list[Message] = []
    after: list[Step] = []  # Passes that read nothing, with the messages inside them.

    def end_batch() -> None:
        if batch:
            found.extend((Start(tuple(batch)), Wait(tuple(batch))))
        found.extend(after)
        batch.clear()
        after.clear()

    for step in steps:
        if isinstance(step, (Start, Wait)) and all(m.comm == "pipeline" for m in step.messages):
            sends = isinstance(step, Start)
            batch.extend(m for m in step.messages if (m.source == rank) == sends)
        elif isinstance(step, Pass) and not step.reads or after and not isinstance(step, Pass):
            after.append(step)
        else:
            end_batch()
            found.append(step)
    end_batch()
    return found


def _started(program: Sequence[Step]) -> Iterator[Message]:
    return (message for step in program if isinstance(step, Start) for message in step.messages)


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
