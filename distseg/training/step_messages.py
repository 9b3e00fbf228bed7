"""Lists the messages of all ranks of a job in its first steps, and proves their order.

The lists follow :mod:`distseg.training.step`, in which a step begins with the loss gradient, runs
the passes and ends with the sums of gradients. These sums start while the passes still run
(:mod:`distseg.comm.gradient_sums`). They are listed where a rank waits for them, because their tags
belong to no other messages. No message is sent.

Messages have names, by which errors tell them apart. Arguments ``prefix`` are the beginning of such
a name: ``step 1, `` in the second step, and empty in the first.
"""

from __future__ import annotations

from collections.abc import Iterator

from distseg.comm.mesh import Members, MeshShape
from distseg.layers.norm import kind_of, tracks
from distseg.models.network import flat_layers
from distseg.runtime.actions import Action, Backward, Forward
from distseg.runtime.message_order import MESSAGES, Rules, Step, check_order, in_batches
from distseg.runtime.operations import Recompute
from distseg.runtime.pass_messages import PassMessages, collective
from distseg.runtime.stage_messages import StageMessages, Unit
from distseg.runtime.streamed_messages import StreamedMessages
from distseg.tiling.tile_batch import MicroBatch, TileBatch
from distseg.training.programs import StepPrograms

STEPS = 2  # In the first step, stages also send the shapes of their results.


def prove_order(programs: StepPrograms, rules: Rules = MESSAGES) -> list[list[Step]]:
    """Prove that the messages of all ranks cannot deadlock, and return these messages.

    The first two optimizer steps of a job are checked; later steps repeat the messages of the
    second. The result has, for each rank, the list of its sends, receives and waits.

    Args:
        programs: the operations of all ranks.
        rules: the rules by which the transport carries messages.

    Raises:
        ValueError: the ranks could wait for each other for ever, or the transport cannot carry the
            messages. The message names the ranks and the messages.
    """
    config = programs.config
    stages_in_stream = "pipeline" in rules.streams
    if stages_in_stream and config.streaming.active and config.mesh.stages > 1:
        raise ValueError(
            f"streaming is on with mesh.stages {config.mesh.stages}, whose stages send strips of "
            f"rows as they become final, but over {rules.transports} both ranks must know the "
            "length of each message: set run.transport to mpi or torch, or mesh.stages to 1"
        )
    messages = messages_of_all_ranks(programs)
    if stages_in_stream:
        messages = [in_batches(steps, rank) for rank, steps in enumerate(messages)]
    check_order(messages, rules)
    return messages


def messages_of_all_ranks(programs: StepPrograms) -> list[list[Step]]:
    """Return, for each rank, its sends, receives and waits in the first two optimizer steps.

    Args:
        programs: the operations of all ranks.
    """
    mesh = programs.config.mesh
    shape = MeshShape(mesh.samples, mesh.tiles, mesh.stages)
    return [list(_RankMessages(programs, shape, rank).steps()) for rank in range(shape.size)]


class _RankMessages:
    """Messages of one rank in the first two optimizer steps of a job.

    Args:
        programs: the operations of all ranks.
        shape: the shape of the mesh.
        rank: the number of the rank in the job.
    """

    def __init__(self, programs: StepPrograms, shape: MeshShape, rank: int):
        self.programs, self.rank = programs, rank
        self.stage = rank % shape.stages
        self.tile = rank // shape.stages % shape.tiles.volume
        self.members: Members = shape.members(rank)
        self.has_loss = self.stage == programs.stages.placement[-1]
        self._layers = flat_layers(programs.model) if programs.flat else []
        self._names = [name for name, _ in self._layers]
        streaming = programs.config.streaming.active
        self.passes = _Streamed(self) if streaming else _Kept(self)

    def steps(self) -> Iterator[Step]:
        """Yield this rank's sends, receives and waits in the first two optimizer steps."""
        for number in range(STEPS):
            prefix = f"step {number}, " if number else ""
            yield from self.passes.step(prefix)
            if self.passes.sums_loss_last:
                yield from self.sum_of_loss("loss", prefix)
            name = f"{prefix}sum of the gradients"
            yield from collective("replicas", self.members.replicas, name)
            for part in ("loss of the last stage", "norm of the gradient"):
                yield from collective("pipeline", self.members.pipeline, f"{prefix}{part}")
            yield from self._running_statistics(prefix)

    def sum_of_loss(self, name: str, prefix: str) -> Iterator[Step]:
        """Yield the allreduce that adds the tables of partial sums of the loss over the replicas.

        Only ranks with the last stage have such a table; other ranks yield nothing.

        Args:
            name: the name of the message.
            prefix: the name of the optimizer step, such as ``step 1, ``, to put before ``name``.
        """
        if self.has_loss:
            yield from collective("replicas", self.members.replicas, f"{prefix}{name}")

    def statistics(self) -> dict[int, str]:
        """Return the name of each active norm's communicator, by the number of its layer.

        An active norm computes its statistics from the current images. The ranks of the
        communicator sum these statistics. The dict is empty if each window has statistics of its
        own (``approximate.norms: window``).
        """
        config = self.programs.config
        if config.approximate.norms == "window":
            return {}
        of_step = config.spatial.norm_scope == "step"
        return {
            n: "replicas" if of_step and kind_of(self._layers[n][1]) == "batch" else "tiles"
            for n in self.programs.active
        }

    def _running_statistics(self, prefix: str) -> Iterator[Step]:
        """Yield the allreduce that merges running statistics of several ranks, if one is needed."""
        config, mine = self.programs.config, self.programs.layers_of(self.stage)
        tracked = any(
            n in mine and kind_of(self._layers[n][1]) == "batch" and tracks(self._layers[n][1])
            for n in self.programs.active
        )
        if tracked and config.approximate.norms == "window":
            yield from collective("replicas", self.members.replicas, f"{prefix}running statistics")
        elif tracked and config.spatial.norm_scope != "step":
            shared = self.members.groups == self.members.replicas  # one communicator (Mesh)
            name = "replicas" if shared else "groups"
            yield from collective(name, self.members.groups, f"{prefix}running statistics")

    def pass_messages(self) -> PassMessages:
        """Return an object that lists the messages of layers in a forward or backward pass."""
        exchange, image = self.programs.exchange(self.tile), self.programs.image
        tiles = []
        if exchange is not None:
            layout = exchange.layout(image)
            places = self.programs.places(self.tile)
            tiles = [(layout, layout.cell_of(place.tile)) for place in places]
        trained = (
            n
            for n, (_, x) in enumerate(self._layers)
            if any(p.requires_grad for p in x.parameters())
        )
        return PassMessages(
            self.rank,
            self.members,
            self._names,
            exchange,
            tiles,
            self.statistics(),
            next(trained, len(self._layers)),
        )

    def norms_of_maps(self, layers: set[int]) -> dict[int, list[tuple[str, str]]]:
        """Return, for each feature map, the active norms that read it, as (name, communicator).

        An active norm computes its statistics from the current images.

        Args:
            layers: the numbers of the layers whose norms are returned.
        """
        exchange = self.programs.exchange(self.tile)
        found: dict[int, list[tuple[str, str]]] = {}
        for number, comm in self.statistics().items():
            if exchange is not None and number in layers:
                first = exchange.graph[number].first
                found.setdefault(first, []).append((self._names[number], comm))
        return found


class _Kept:
    """Messages in the forward and backward passes of a rank that does not stream tiles.

    The rank's stages keep autograd graphs in memory from the forward to the backward pass.
    """

    def __init__(self, of: _RankMessages):
        self.of, programs = of, of.programs
        self._passes = of.pass_messages()
        self._prefix, self._knows_loss = "", True
        # Otherwise the first backward pass finds the loss too.
        self.sums_loss_last = programs.needs_loss_grad_first
        places = programs.places(of.tile)
        pieces = [TileBatch(None, None, place) for place in places]
        batches = [pieces] if programs.together else [[piece] for piece in pieces]
        self._units = [
            Unit(MicroBatch(0, batch).signature, len(batch))
            for _ in range(programs.config.train.accumulate)
            for batch in batches
        ]
        self._messages = StageMessages(of.stage, of.members.pipeline, programs.stages, self._inside)

    def step(self, prefix: str) -> Iterator[Step]:
        """Yield the messages of an optimizer step, up to its last forward or backward pass.

        Args:
            prefix: the beginning of the messages' names, such as ``step 1, ``.
        """
        of, programs = self.of, self.of.programs
        self._knows_loss = programs.needs_loss_grad_first
        if programs.needs_loss_grad_first:
            if not programs.loss.linear:
                yield from self._run(f"{prefix}extra forward pass, ", only_forward=True)
            yield from of.sum_of_loss("loss gradient", prefix)
        yield from self._run(prefix)

    def _run(self, prefix: str, only_forward: bool = False) -> list[Step]:
        self._prefix = prefix
        program = self.of.programs.kept(self.of.stage, only_forward)
        return self._messages.steps(program, self._units, prefix)

    def _inside(self, op: Action | Recompute) -> Iterator[Step]:
        """Yield the halo exchanges and collectives of layers inside a pass of a stage."""
        programs = self.of.programs
        name = f"{self._prefix}{op.verb} {op.micro_batch},{op.stage}"
        layers = programs.stages.ranges[op.stage] or range(len(self._passes.names))
        if isinstance(op, (Forward, Recompute)):
            yield from self._passes.forward(layers, name)
        elif isinstance(op, Backward):
            if op.stage == programs.stages.stages - 1 and not self._knows_loss:
                self._knows_loss = True
                yield from self.of.sum_of_loss("loss gradient", self._prefix)
            yield from self._passes.backward(layers, name)


class _Streamed:
    """Messages in the forward and backward passes of a rank that streams tiles."""

    sums_loss_last = True

    def __init__(self, of: _RankMessages):
        self.of = of
        found = [
            of.programs.streamed(of.tile, rank) for rank in range(of.programs.config.mesh.stages)
        ]
        own = found[of.stage]
        self._extra = [each.extra_forward for each in found]
        self._programs = [each.step for each in found]
        plan = own.plans[0]
        layers = {number for s in plan.mine for number in plan.segments[s].nodes}
        self._messages = StreamedMessages(
            of.stage,
            of.members,
            [each.plans for each in found],
            own.executor.halos,
            of.norms_of_maps(layers),
        )

    def step(self, prefix: str) -> Iterator[Step]:
        """Yield the messages of an optimizer step, up to its last forward or backward pass.

        Args:
            prefix: the beginning of the messages' names, such as ``step 1, ``.
        """
        loss = list(self.of.sum_of_loss("loss gradient", prefix))
        if self.of.programs.loss.linear or any(self._extra):
            if any(self._extra):
                yield from self._messages.steps(self._extra, f"{prefix}extra forward pass, ")
            yield from loss
        yield from self._messages.steps(self._programs, prefix, loss)
