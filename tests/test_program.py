"""The operations of a rank as text, their order, and the memory that they take; nothing is computed."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
from made_graphs import CONV, line
from test_exact import config as exact_config
from torch import nn

from distseg.cli.plan_program import PipelineProgram
from distseg.config.sizes import Size
from distseg.models.zoo import outline_model
from distseg.runtime.actions import Backward, Forward, Weight
from distseg.runtime.interleaved import can_interleave, interleaved
from distseg.runtime.kept_graphs import Weighed, keeping
from distseg.runtime.operations import (
    BackwardTile,
    Drop,
    DropGradient,
    ForwardTile,
    KeptTile,
    Measure,
    OutputTile,
    SendRows,
    TileOperation,
    text,
)
from distseg.runtime.partition import Edge
from distseg.runtime.schedule import orders
from distseg.runtime.stage_program import operations, recomputed
from distseg.runtime.tile_program import (
    StagePlan,
    all_operations,
    backward,
    extra_forward,
    forward,
    peak,
    step,
)
from distseg.tiling.graph import Graph, Node
from distseg.tiling.layout import Layout
from distseg.tiling.segment import rows_read, segments_of
from distseg.tiling.tile import Box, boxes_of

ROWS, HEIGHT = 3, 4  # of tiles, and each tile's
IMAGE = Box.whole((ROWS * HEIGHT, 8))


def plan(
    layers: int = 3,
    active=(),
    points=(),
    cuts=None,
    balance=(),
    rank=0,
    blocks=1,
    back=True,
    graph=None,
    number=0,
) -> StagePlan:
    """Convolutions, by default a segment each, on an image of three rows of tiles."""
    graph = graph or line(*((f"conv{i}", CONV) for i in range(layers)), dims=2)
    starts = [sum(balance[:i]) for i in range(len(balance))]
    stages = [range(a, a + n) for a, n in zip(starts, balance)]
    segments = segments_of(graph, range(1, len(graph)) if cuts is None else cuts, stages)
    mine = [n for n, s in enumerate(segments) if s.stage == rank]
    makers = {s.result: s.stage for s in segments}
    readers = {p: sorted({s.stage for s in segments if p in s.sources} - {rank}) for p in makers}
    first = {segments[n].sources[-1] for n in mine}
    return StagePlan(
        segments,
        mine,
        set(active) & first,
        set(points) & first,
        makers,
        readers,
        Rows(graph, segments, blocks),
        back,
        number,
    )


@dataclass(frozen=True)
class Rows:
    """Three tiles one above the other, of every map."""

    graph: Graph
    segments: list
    blocks: int

    def tiles(self, block, segment):
        return boxes_of(IMAGE, (HEIGHT, 8))

    def rows(self, block, segment, rows):
        return rows_read(
            Layout(self.graph, IMAGE.size, [(0, n) for n in IMAGE.size], "all"),
            self.segments[segment],
            rows,
        )

    def computed(self, block, tensor_id):
        return IMAGE


def picture(operations) -> str:
    """The segments of tiles, and a bar where a statistic is taken."""
    return " ".join(
        str(op.segment) if isinstance(op, TileOperation) else "|"
        for op in operations
        if isinstance(op, TileOperation)
        or op.verb in ("statistic", "finalize", "halo", "halo grad")
    )


@pytest.mark.parametrize(
    "active, wanted",
    [
        ((), "0 0 1 0 1 2 1 2 2"),
        ((1,), "0 0 0 | 1 1 2 1 2 2"),
        ((1, 2), "0 0 0 | 1 1 1 | 2 2 2"),
        ((0, 1, 2), "| 0 0 0 | 1 1 1 | 2 2 2"),
    ],
)
def test_tiles_go_forward_as_far_along_as_can_be(active, wanted):
    """Of a stage that is not the last."""
    assert picture(forward(plan(4, active, balance=(3, 1)), 0)) == wanted


@pytest.mark.parametrize(
    "active, wanted",
    [
        ((), "2 2 1 2 1 0 1 0 0"),
        ((2,), "2 2 2 | 1 1 0 1 0 0"),
        ((1, 2), "2 2 2 | 1 1 1 | 0 0 0"),
        ((0, 1, 2), "2 2 2 | 1 1 1 | 0 0 0 |"),
    ],
)
def test_and_back(active, wanted):
    assert picture(backward(plan(4, active, balance=(3, 1)), 0)) == wanted


def test_images_follow_one_another():
    order = [
        (op.segment, op.block)
        for op in forward(plan(3, balance=(2, 1), blocks=2), 0)
        if isinstance(op, ForwardTile)
    ]
    assert order == [
        (0, 0),
        (0, 0),
        (1, 0),
        (0, 0),
        (1, 0),
        (1, 0),
        (0, 1),
        (0, 1),
        (1, 1),
        (0, 1),
        (1, 1),
        (1, 1),
    ]


def test_as_text():
    """Two ranks, a stage each; the first has an active norm, the second takes a map and a skip of its own."""
    graph = line(
        ("a", CONV), ("b", CONV), ("stash",), ("c", CONV), ("pop", "pop"), ("d", CONV), dims=2
    )
    first, second = (
        plan(active=(1,), cuts=[1], balance=(3, 3), rank=rank, graph=graph) for rank in (0, 1)
    )
    assert text(all_operations(first)) == FIRST.strip()
    assert text(all_operations(second)) == SECOND.strip()
    assert (
        peak(first, lambda block, tensor_id: 10**tensor_id) == 10 + 100 + 1000 + (100 + 1000) + 0
    )  # the maps, and what the second returns
    assert peak(second, lambda block, tensor_id: 10**tensor_id) == 2 * (100 + 1000)


def test_a_single_segment_stores_nothing():
    found = replace(plan(cuts=()), grid=None)  # none of its tiles is listed
    assert peak(found, lambda block, tensor_id: 1) == 0


FIRST = """
m0  forward   segment 0  [0:4, 0:8] ... [8:12, 0:8]  (3 tiles)
m0  statistic map 1
m0  forward   segment 1  [0:4, 0:8]
m0  send      map 2  rows before 4
m0  forward   segment 2  [0:4, 0:8]
m0  send      map 3  rows before 4
m0  forward   segment 1  [4:8, 0:8]
m0  send      map 2  rows before 8
m0  forward   segment 2  [4:8, 0:8]
m0  send      map 3  rows before 8
m0  forward   segment 1  [8:12, 0:8]
m0  send      map 2  rows before 12
m0  forward   segment 2  [8:12, 0:8]
m0  send      map 3  rows before 12
m0  recv      gradient of map 2 from rank 1
m0  recv      gradient of map 3 from rank 1
m0  drop      map 3
m0  backward  segment 2  [0:4, 0:8]
m0  backward  segment 1  [0:4, 0:8]
m0  backward  segment 2  [4:8, 0:8]
m0  backward  segment 1  [4:8, 0:8]
m0  backward  segment 2  [8:12, 0:8]
m0  drop grad map 3
m0  drop      map 2
m0  backward  segment 1  [8:12, 0:8]
m0  drop grad map 2
m0  finalize  map 1
m0  drop      map 1
m0  backward  segment 0  [0:4, 0:8] ... [8:12, 0:8]  (3 tiles)
m0  drop grad map 1
"""
SECOND = """
m0  recv      map 2
m0  recv      map 3
m0  output    segment 3  [0:4, 0:8]  and back
m0  send grad map 2  rows before 3
m0  send grad map 3  rows before 2
m0  output    segment 3  [4:8, 0:8]  and back
m0  send grad map 2  rows before 7
m0  send grad map 3  rows before 6
m0  output    segment 3  [8:12, 0:8]  and back
m0  send grad map 3  rows before 12
m0  drop      map 3
m0  send grad map 2  rows before 12
m0  drop      map 2
"""


def test_the_loss_comes_between_where_it_takes_all_tiles():
    """A first pass through the last segment, for the loss alone."""
    plans = [plan(2, number=m) for m in range(2)]
    found = step(plans, orders("gpipe", (0,), 2)[0], linear=False)
    verbs = [op.verb for op in found if op.verb not in ("drop", "drop grad")]
    assert verbs == ["forward"] * 3 + ["output"] * 3 + ["forward"] * 3 + ["output"] * 3 + [
        "loss"
    ] + 2 * (["output"] * 3 + ["backward"] * 3)
    assert [op.back for op in found if isinstance(op, OutputTile)] == [False] * 6 + [True] * 6


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 2), (0, 1, 0), (0, 1, 2, 1, 0)])
@pytest.mark.parametrize("active", [(), (2, 5, 7), range(10)])
def test_ranks_agree(name, placement, active):
    """All ranks of a pipeline come to the end of their programs: none waits for rows that are never sent; every tile goes there and back, every map goes."""
    balance = [10 // len(placement) + (s < 10 % len(placement)) for s in range(len(placement))]
    ranks = range(max(placement) + 1)
    plans = {
        rank: [placed(active, balance, placement, rank, m) for m in range(3)] for rank in ranks
    }
    programs = {
        rank: step(plans[rank], orders(name, placement, 3)[rank], linear=True) for rank in ranks
    }
    for rank, program in programs.items():
        tiles = Counter((type(op), op.segment) for op in program if isinstance(op, TileOperation))
        last = {s: plans[rank][0].is_last(s) for s in plans[rank][0].mine}
        assert tiles == {
            (kind, s): 3 * ROWS
            for s in last
            for kind in ([OutputTile] if last[s] else [ForwardTile, BackwardTile])
        }
        kept = {
            (op.micro_batch, plans[rank][0].stop(op.segment))
            for op in program
            if isinstance(op, ForwardTile)
        }
        assert kept <= {(op.micro_batch, op.tensor_id) for op in program if isinstance(op, Drop)}
        assert kept == {
            (op.micro_batch, op.tensor_id) for op in program if isinstance(op, DropGradient)
        }
    assert stuck(programs, plans) == {}


@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 2), (0, 1, 0), (0, 1, 2, 1, 0)])
@pytest.mark.parametrize("active", [(), (2, 5, 7)])
def test_ranks_agree_on_forward_passes_that_go_first(placement, active):
    """Every tile goes through once, every map goes, and none waits for ever."""
    balance = [10 // len(placement) + (s < 10 % len(placement)) for s in range(len(placement))]
    plans = {
        rank: [placed(active, balance, placement, rank, m) for m in range(3)]
        for rank in range(max(placement) + 1)
    }
    programs = {
        rank: extra_forward(those, orders("1f1b", placement, 3)[rank])
        for rank, those in plans.items()
    }
    for rank, program in programs.items():
        tiles = Counter(op.segment for op in program if isinstance(op, TileOperation))
        assert tiles == dict.fromkeys(plans[rank][0].mine, 3 * ROWS) and not any(
            op.back for op in program if isinstance(op, OutputTile)
        )
        kept = {
            (op.micro_batch, plans[rank][0].stop(op.segment))
            for op in program
            if isinstance(op, ForwardTile)
        }
        gone = [(op.micro_batch, op.tensor_id) for op in program if isinstance(op, Drop)]
        assert kept <= set(gone) and len(gone) == len(set(gone))
    assert stuck(programs, plans) == {}


@pytest.mark.covering(cases=3)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("cuts", [(), None])
@pytest.mark.parametrize("blocks", [1, 2])
def test_tiles_of_stages_go_back_in_turn(ranks, cuts, blocks):
    """Every tile goes there and back, none waits for ever, and where a stage is one segment a few are under way."""
    plans = stages_of(ranks, 10, cuts, 4, blocks)
    assert can_interleave([those[0] for those in plans])
    programs = interleaved(plans)
    assert stuck(dict(enumerate(programs)), dict(enumerate(plans))) == {}
    for _those, program, alone in zip(
        plans,
        programs,
        [
            step(w, orders("1f1b", tuple(range(ranks)), 4)[r], linear=True)
            for r, w in enumerate(plans)
        ],
    ):
        assert Counter(program) == Counter(alone)
        most = max(
            accumulate(isinstance(op, ForwardTile) - isinstance(op, BackwardTile) for op in program)
        )
        if cuts == () and ranks == 2:
            assert most < 4 * ROWS * blocks
    for program in programs:
        assert [op for op in program if isinstance(op, BackwardTile)] == sorted(
            (op for op in program if isinstance(op, BackwardTile)), key=lambda op: op.micro_batch
        )


def test_turns_as_text():
    """The gradient of three rows is final once the second tile went back, as its window reaches into the first: so three tiles, and two more, are under way."""
    first, last = interleaved(stages_of(2, 2, (), 2))

    def tile(op):
        return f"{ROWS * op.micro_batch + op.box.start[0] // HEIGHT}{chr(39) * isinstance(op, BackwardTile)}"

    assert (
        " ".join(tile(op) for op in first if isinstance(op, TileOperation))
        == "0 1 2 3 4 0' 5 1' 2' 3' 4' 5'"
    )
    assert " ".join(tile(op) for op in last if isinstance(op, TileOperation)) == "0 1 2 3 4 5"


def test_what_can_not_go_back_in_turn():
    """One rank, two stages on a rank, a norm that waits for all tiles, borders that are exchanged."""
    assert not can_interleave([plan(3)])
    assert not can_interleave([placed((), [3, 4, 3], (0, 1, 0), rank, 0) for rank in range(2)])
    assert not can_interleave([plan(4, (2,), balance=(2, 2), rank=rank) for rank in range(2)])
    assert not can_interleave(
        [plan(4, points=(1,), balance=(2, 2), rank=rank) for rank in range(2)]
    )


def stages_of(ranks, layers, cuts, micro_batches, blocks=1) -> list[list[StagePlan]]:
    """By rank and micro-batch, without active norms."""
    balance = [layers // ranks + (s < layers % ranks) for s in range(ranks)]
    return [
        [
            plan(layers, balance=balance, cuts=cuts, rank=rank, number=m, blocks=blocks)
            for m in range(micro_batches)
        ]
        for rank in range(ranks)
    ]


def test_tiles_are_kept_as_far_as_there_is_room():
    """At every moment for those that wait for their way back and the one at hand; both passes of a tile say the same."""
    program = interleaved(stages_of(2, 4, (), 2))[0]

    def weights(op):
        return Weighed(kept=2.0, most=3.0 + (op.box.start[0] == 0))

    tiles = [op for op in program if isinstance(op, ForwardTile)]
    for budget, wanted in ((3.9, 0), (6.0, None), (8.0, None), (math.inf, len(tiles))):
        found, held = keeping(program, weights, budget), 0.0
        for op in found:
            if isinstance(op, BackwardTile) and op.kept:
                held -= 2.0
            assert (
                held + weights(op).most <= budget or not held
                if isinstance(op, TileOperation)
                else True
            )
            if isinstance(op, ForwardTile) and op.kept:
                held += 2.0
        kept = [op for op in found if isinstance(op, KeptTile) and op.kept]
        assert Counter((op.micro_batch, op.box) for op in kept) == Counter(
            dict.fromkeys(((op.micro_batch, op.box) for op in kept), 2)
        )
        assert len(kept) == 2 * wanted if wanted is not None else 0 < len(kept) < 2 * len(tiles)


def placed(active, balance, placement, rank, number) -> StagePlan:
    """As :func:`plan`, with stages on the ranks of a placement."""
    found = plan(10, active, balance=balance, number=number)
    mine = [n for n, s in enumerate(found.segments) if placement[s.stage] == rank]
    makers = {s.result: placement[s.stage] for s in found.segments}
    readers = {
        p: sorted({placement[s.stage] for s in found.segments if p in s.sources} - {rank})
        for p in makers
    }
    return replace(
        found,
        mine=mine,
        makers=makers,
        readers=readers,
        active=set(active) & {found.segments[n].sources[-1] for n in mine},
    )


def stuck(programs, plans) -> dict[int, str]:
    """The operation at which each rank stands when none can go on."""
    at, sent = dict.fromkeys(programs, 0), {}
    while True:
        before = dict(at)
        for rank, program in programs.items():
            while at[rank] < len(program) and all(
                sent.get(key, 0) >= rows for key, rows in awaited(program[at[rank]], plans[rank][0])
            ):
                op = program[at[rank]]
                if isinstance(op, SendRows):  # a gradient too
                    sent[op.verb, op.micro_batch, op.block, op.tensor_id] = op.final
                at[rank] += 1
        if at == before:
            return {
                rank: programs[rank][n].line for rank, n in at.items() if n < len(programs[rank])
            }


def awaited(op, plan) -> list[tuple[tuple, int]]:
    """The rows that an operation takes of maps and gradients from other ranks."""
    there, found = lambda p, rows, block: (("send", op.micro_batch, block, p), rows), []
    if isinstance(op, (Measure, Drop)) and op.tensor_id in plan.elsewhere:
        found += [there(op.tensor_id, ROWS * HEIGHT, block) for block in range(plan.blocks)]
    if isinstance(op, TileOperation):
        rows = op.box.start[0], op.box.stop[0]
        found += [
            there(p, span[1], op.block)
            for p, span in plan.grid.rows(op.block, op.segment, rows).items()
            if p in plan.elsewhere
        ]
    if isinstance(op, BackwardTile):
        found += [
            (("send grad", op.micro_batch, op.block, plan.stop(op.segment)), rows[1])
            for _ in plan.readers[plan.stop(op.segment)]
        ]
    return found


def test_stages_as_text():
    """The second of two stages: what it receives and hands on, and a forward pass that is repeated while the gradient travels; nothing, with the first."""
    edges = [Edge("x", 0, 1), Edge("skip0", 0, 1, gradient=False), Edge("x", 1, 2)]
    order = [Forward(1, 0), Forward(1, 1), Backward(1, 0), Weight(1, 0), Backward(1, 1)]
    assert text(operations(order, edges, "always")) == STAGES.strip()
    assert recomputed(
        [Forward(1, 0), Backward(1, 0), Forward(1, 1), Forward(1, 2)], "except_last"
    ) == {(1, 1), (1, 2)}


STAGES = """
m0  recv      x of stage 0 for stage 1
m0  recv      skip0 of stage 0 for stage 1
m0  forward   stage 1
m0  send      x of stage 1 for stage 2
m1  recv      x of stage 0 for stage 1
m1  recv      skip0 of stage 0 for stage 1
m1  forward   stage 1
m1  send      x of stage 1 for stage 2
m0  recompute stage 1
m0  recv      gradient of x of stage 1 for stage 2
m0  backward  stage 1
m0  send      gradient of x of stage 0 for stage 1
m0  weight    stage 1
m1  recompute stage 1
m1  recv      gradient of x of stage 1 for stage 2
m1  backward  stage 1
m1  send      gradient of x of stage 0 for stage 1
"""


def planned(**settings) -> list[tuple[str, str]]:
    config = exact_config(num_convs=1, depth=1, **settings)
    return list(PipelineProgram(config, outline_model(config.model), (64, 96)).texts())


def test_the_program_of_a_config():
    """What ``distseg plan --program`` prints: of each rank of the pipeline what its stages or segments are, and what it does."""
    (first, _), (second, done) = planned(stages=2, balance=[6, 11], tiles="1x2", exchange_every="1")
    assert first.splitlines() == [
        "stage 0: enc0_conv0 to enc0_pool",
        "         halos exchanged before enc0_conv0",
        "         statistics at enc0_norm0",
    ]
    assert second.splitlines()[1:] == [
        "         halos exchanged before mid_conv0, dec0_conv0",
        "         statistics at mid_norm0, dec0_norm0",
    ]
    assert done.splitlines() == [
        "m0  recv      x of stage 0 for stage 1", "m0  recv      skip0 of stage 0 for stage 1", "m0  forward   stage 1", "m0  backward  stage 1",
        "m0  send      gradient of x of stage 0 for stage 1", "m0  send      gradient of skip0 of stage 0 for stage 1",
    ]  # fmt: skip


def test_the_program_of_tiles_streaming_that_exchange():
    ((legend, done),) = planned(tiles="1x2", exchange_every="1", streamed=Size("3x1"))
    assert legend.splitlines()[:2] == [
        "segment 0: enc0_conv0 to enc0_drop0",
        "segment 1: enc0_norm0 to enc0_pool",
    ]
    there = [
        line
        for line in done.splitlines()
        if ("halo" in line and "grad" not in line) or "statistic" in line
    ]
    assert there == [
        "m0  statistic map 2",
        "m0  halo      map 6",
        "m0  statistic map 8",
        "m0  halo      map 12",
        "m0  statistic map 14",
    ]
    back = [line for line in done.splitlines() if "halo grad" in line or "finalize" in line]
    assert back == [
        "m0  finalize  map 14",
        "m0  halo grad map 12",
        "m0  finalize  map 8",
        "m0  halo grad map 6",
        "m0  finalize  map 2",
    ]


def test_devices_have_no_program_of_ours():
    with pytest.raises(ValueError, match="because torchgpipe schedules the stages"):
        planned(placement="devices", balance=[6, 11])


def test_a_network_in_one_piece_has_a_program():
    config = exact_config()
    ((legend, done),) = PipelineProgram(config, Residual(), (32, 32)).texts()
    assert legend == "stage 0: the whole network" and done.splitlines() == [
        "m0  forward   stage 0",
        "m0  backward  stage 0",
    ]


def test_layers_are_named_by_their_place():
    """In Sequentials inside the network, and a layer that stands at two places."""
    conv = nn.Conv2d(3, 3, 3, padding=1)
    nested = nn.Sequential(
        nn.Sequential(conv, nn.InstanceNorm2d(3)),
        nn.Sequential(conv, nn.ReLU()),
        nn.Conv2d(3, 2, 1),
    )
    config = exact_config(tiles="1x2", exchange_every="1")
    ((legend, _),) = PipelineProgram(config, nested, (32, 32)).texts()
    assert legend.splitlines() == [
        "stage 0: 0.0 to 2",
        "         halos exchanged before 0.0, 1.0",
        "         statistics at 0.1",
    ]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.head(x + self.conv(x))


@pytest.mark.parametrize("balance, rank", [((), 0), ((3, 1), 0), ((3, 1), 1)])
def test_maps_stay_until_all_have_read_them(balance, rank):
    """Without backward passes: two segments read one map, and the one that is numbered last may be through first."""
    access_patterns = (CONV, CONV)
    graph = Graph(
        [
            Node("stem", (0,), access_patterns),
            Node("around", (1,), access_patterns),
            Node("main", (1,), access_patterns),
            Node("sum", (3, 2)),
        ]
    )
    found = plan(graph=graph, cuts=[1, 2, 3], balance=balance, rank=rank, back=False)
    dropped = set()
    for op in all_operations(found):
        if isinstance(op, TileOperation):
            assert not dropped & set(found.sources(op.segment)), (op, dropped)
        if isinstance(op, Drop):
            dropped.add(op.tensor_id)
    assert dropped == {p for s in found.mine for p in found.sources(s)} - {0}


@pytest.mark.parametrize("messages, words", [("transport", "buffered."), ("nccl", "in order.")])
def test_the_proof_follows_what_carries_halos(messages, words):
    settings = dict(tiles="1x2", stages=2, exchange_every="1", messages=messages)
    config = exact_config(num_convs=1, depth=1, **settings)
    said = PipelineProgram(config, outline_model(config.model), (64, 96)).order_of_messages()
    assert said.startswith("The messages of all 4 ranks cannot deadlock") and said.endswith(words)
