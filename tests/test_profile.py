"""A step watched on several ranks: its table, picture and trace; and the table's arithmetic by hand."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from mpirunner.transport import NAME as TRANSPORT
from test_cli import run
from torch import nn

from distseg.cli.profile import KINDS, own_seconds, profile, row_names
from distseg.comm.alone import Alone
from distseg.comm.mesh import Mesh, MeshShape
from distseg.config.settings import (
    Config,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
    SpatialConfig,
    StreamingConfig,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.models.network import calls_of
from distseg.models.zoo import outline_model, plain_model
from distseg.planning.pass_times import StagePasses, costs_of, of_tiles
from distseg.runtime.partition import Partition
from distseg.runtime.schedule import orders
from distseg.runtime.spans import Span, Trace, TracedComm
from distseg.tiling.tile import Box, TilePlacement
from distseg.training.engine import Engine
from distseg.training.verify import prepare

CONFIG = Config(
    model=ModelConfig(depth=2, num_convs=1, base_channels=4, norm="instance", out_channels=2),
    train=TrainConfig(accumulate=3, precision="fp32"),
    pipeline=PipelineConfig(recompute="always"),
)
MESHES = {  # by ranks, with the kinds of work that each rank must show
    2: (MeshConfig(stages=2), {"forward", "backward", "recompute", "wait", "update"}),
    4: (
        MeshConfig(tiles="1x2", stages=2, reducer=TRANSPORT),
        {"forward", "backward", "recompute", "wait", "norm-exchange", "reduce", "update"},
    ),
}


@pytest.mark.parallel([2, 4])
def test_files_and_table(comm, shared_path):
    mesh, kinds = MESHES[comm.size]
    found = profile(
        prepare(replace(CONFIG, mesh=mesh), Size("64x96")),
        comm,
        steps=2,
        output=str(shared_path / "profile"),
    )
    assert (found is None) == (comm.rank > 0)
    if not found:
        return
    assert (
        found.title == f"{MeshShape(1, mesh.tiles, 2)}, 1f1b, linear"
        and found.details == "3 micro-batches, recompute always, cpu, fp32"
    )
    assert (shared_path / "profile" / "timeline.png").stat().st_size > 10_000
    events = json.loads((shared_path / "profile" / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == list(found.names)
    for rank in range(comm.size):
        mine = [e for e in events if e["ph"] == "X" and e["tid"] == rank]
        assert kinds <= {e["cat"] for e in mine}
        assert {e["name"] for e in mine if e["cat"] == "forward"} == {
            f"F{m},{rank % 2}" for m in range(3)
        }
        assert all(0 <= e["ts"] and e["ts"] + e["dur"] <= 1e6 * found.seconds for e in mine)
    for row in found.rows():
        assert sum(row[kind] for kind in (*KINDS, "other")) == pytest.approx(found.seconds)
        assert all(row[kind] >= 0 for kind in KINDS) and row["other"] >= -1e-9
    compared = {(row["pass"], row["of"]): row for row in found.compared()}
    assert set(compared) == {
        (kind, f"stage {s}") for kind in ("forward", "recompute", "backward") for s in range(2)
    }
    assert all(row["times"] == 3 * comm.size // 2 for row in compared.values())
    assert sum(
        row["times"] * (row["measured [ms]"] - row["modelled [ms]"]) for row in compared.values()
    ) == pytest.approx(0, abs=1e-6)
    assert (
        found.simulated(found.factor).makespan < found.seconds * 1.5
        and "step simulated with the modelled times: " in found.text()
    )
    header, _, *lines = found.text().split("\n\n")[1].splitlines()
    assert [line.split("  ")[0] for line in lines] == [*found.names, "mean share"] and (
        "norm-exchange [ms]" in header
    ) == (comm.size == 4)


@pytest.mark.parallel(2)
def test_waits_for_borders_are_seen_and_weight_gradients_that_fill_them_are_work(comm, tmp_path):
    settings = replace(
        CONFIG,
        mesh=MeshConfig(tiles="1x2", reducer=TRANSPORT),
        spatial=SpatialConfig(exchange_every=1),
    )
    found = profile(prepare(settings, Size("64x96")), comm, steps=2, output=str(tmp_path))
    if found:
        names = {(s.kind, s.name) for s in found.spans}
        assert ("weight", "put off") in names
        assert ("halo", "the halo at layer enc0_conv0 from rank 1 of the image's tiles") in names
        assert (
            "halo",
            "the gradient of the halo at layer mid_conv0 from rank 1 of the image's tiles",
        ) in names


@pytest.mark.parallel(2)
def test_gradients_of_weights_are_seen_by_micro_batch(comm, tmp_path):
    """At their action, or before it in waits: either way under its name."""
    settings = replace(CONFIG, mesh=MeshConfig(stages=2), pipeline=PipelineConfig(schedule="zb-h1"))
    found = profile(prepare(settings, Size("64x96")), comm, steps=2, output=str(tmp_path))
    if found:
        assert found.title.endswith(", zb-h1, linear")
        for stage in range(2):
            assert {s.name for s in found.spans if (s.kind, s.rank) == ("weight", stage)} == {
                f"W{m},{stage}" for m in range(3)
            }
        assert all(row["weight"] > 0 and row["other"] > -1e-9 for row in found.rows())


@pytest.mark.parallel(2)
def test_as_a_command_without_a_pipeline(comm, capsys, shared_path):
    model = [
        "--model.depth",
        "1",
        "--model.num_convs",
        "1",
        "--model.base_channels",
        "2",
        "--model.norm",
        "batch",
    ]
    given = [
        "profile",
        "--image",
        "16x20",
        "--steps",
        "1",
        "--output",
        str(shared_path),
        "--mesh.samples",
        "2",
        "--mesh.reducer",
        TRANSPORT,
        *model,
    ]
    code, out, err = run(capsys, *given)
    assert (code, err) == (0, "")
    if comm.rank == 0:
        assert (
            out.startswith("2 samples x (1x1) tiles x 1 stages, 1 micro-batches, cpu, ")
            and "\nsample 1  " in out
        )
        assert (shared_path / "timeline.png").exists() and (shared_path / "trace.json").exists()


@pytest.mark.parallel(1)
def test_what_can_not_be_profiled(comm, capsys):
    code, _, err = run(capsys, "profile", "--image", "16x20", "--steps", "0")
    assert code == 2 and "--steps must be a whole number from 1 to 1000000, got 0" in err
    code, _, err = run(
        capsys,
        "profile",
        "--image",
        "16x20",
        "--pipeline.placement",
        "devices",
        "--pipeline.devices",
        "[cpu, cpu]",
    )
    assert code == 2 and "torchgpipe's threads cannot be watched" in err
    code, _, err = run(capsys, "profile")
    assert code == 2 and "there are no images: give --image 97x131" in err


def test_inner_spans_count_for_themselves():
    """A forward pass with two exchanges inside, a wait in the second; then, at once, a backward pass."""
    spans = [
        Span(0, "norm-exchange", "", 1.0, 2.0), Span(0, "wait", "", 4.0, 4.5), Span(0, "norm-exchange", "", 3.0, 5.0),
        Span(0, "forward", "F0,0", 0.0, 6.0), Span(0, "backward", "B0,0", 6.0, 9.0),
    ]  # fmt: skip
    assert own_seconds(spans) == {
        "forward": 3.0,
        "norm-exchange": 2.5,
        "wait": 0.5,
        "backward": 3.0,
    }


def test_ranks_are_named_by_the_axes_that_are_split():
    assert row_names(MeshShape()) == ["rank 0"]
    assert row_names(MeshShape(stages=3)) == ["stage 0", "stage 1", "stage 2"]
    assert row_names(MeshShape(2, Size("2x2"), 2))[-3:] == [
        "sample 1 tile 2 stage 1",
        "sample 1 tile 3 stage 0",
        "sample 1 tile 3 stage 1",
    ]


def test_a_traced_communicator_is_one():
    class Request:
        questions = 0

        def Test(self):
            self.questions += 1
            return self.questions == 3

    class Comm:
        size, rank = 2, 1

        def Isum(self, memory):
            return Request()

    ticks = iter([0.0, 1.0, 7.0])
    trace = Trace(5, clock=lambda: next(ticks))
    comm = TracedComm(Comm(), trace, "reduce")
    request = comm.Isum("memory")
    assert (comm.size, comm.rank) == (2, 1) and [request.Test() for _ in range(3)] == [
        False,
        False,
        True,
    ]
    assert trace.spans == [Span(5, "reduce", "sum", 1.0, 7.0)]


@pytest.mark.parallel(2)
def test_tiles_streaming_show_what_they_read_compute_and_store(comm, tmp_path):
    found = Config(
        model=ModelConfig(depth=2, num_convs=1, base_channels=4), mesh=MeshConfig(tiles=Size("1x2")),
        streaming=StreamingConfig(tiles=Size("2x2")), train=TrainConfig(precision="fp32"),
    )  # fmt: skip
    result = profile(prepare(found, Size("64x96")), comm, 2, str(tmp_path / "p"))
    if comm.rank == 0:
        for row in result.rows():
            assert all(
                row[kind] > 0
                for kind in ("forward", "recompute", "backward", "read", "scratch", "norm-exchange")
            )
            assert row["other"] < 0.5 * result.seconds
        rows = result.compared()
        assert {
            kind: sum(row["pass"] == kind for row in rows)
            for kind in ("forward", "recompute", "backward")
        } == {"forward": 6, "recompute": 5, "backward": 6}  # segments
        assert all(row["times"] == 2 * 4 for row in rows)


def test_passes_of_stages_are_modelled():
    """All of a network's layers on all micro-batches, whichever way it is cut; half of what may wait of the backward passes is a pass of its own."""
    model = outline_model(ModelConfig(depth=2, num_convs=1, base_channels=4))
    costs = costs_of(model, (32, 48), 1, "cpu")
    there, back = sum(costs.costs.forward), sum(costs.costs.backward)
    for schedule, kinds in (
        ("1f1b", {"forward", "backward", "recompute"}),
        ("zb-h1", {"forward", "backward", "recompute", "weight"}),
    ):
        partition = Partition.from_balance(calls_of(model), [10, len(costs.costs.layers) - 10])
        passes = StagePasses(costs, partition, orders(schedule, (0, 1), 3), "always", 32 * 24)
        ranks = [passes.of_rank(rank) for rank in range(2)]
        assert {kind for kind, _ in ranks[0]} == kinds and all(
            of == f"stage {rank}" for rank in range(2) for _, of in ranks[rank]
        )
        total = sum(map(Counter, ranks), Counter())

        def of(*kinds):
            return sum(seconds for (kind, _), seconds in total.items() if kind in kinds)

        assert (
            of("forward") == pytest.approx(1.5 * there)
            and of("recompute") == pytest.approx(1.5 * there)
            and of("backward", "weight") == pytest.approx(1.5 * back)
        )
        waits = sum(layer.backward * layer.put_off for layer in costs.costs.layers)
        assert of("weight") == pytest.approx(1.5 * waits if "weight" in kinds else 0)
        busy = [sum(passes.values()) for passes in ranks]
        assert max(busy) <= passes.simulated(1.0).makespan <= sum(busy)


def test_tiles_are_modelled_by_their_cells():
    """Without overlap, as where all convolutions see one pixel, tiles cost together what the image does; a streamed tile goes forward twice."""
    given = Config(
        model=ModelConfig(f"{__name__}:points"), streaming=StreamingConfig(tiles=Size("2x2"))
    )
    engine = Engine(given, Mesh(Alone()), plain_model(given.model), (30, 42))
    costs = costs_of(plain_model(given.model), (30, 42), given.data.images, "cpu")
    executor, place = (
        engine.streaming.executor,
        TilePlacement((30, 42), Box.whole((30, 42)), Box.whole((30, 42)), (0,), (0,)),
    )
    plans = [executor.plan([place])]
    found = of_tiles(costs, executor, (30, 42), engine.streaming.program(plans, [[place]]), plans)

    def of(kind):
        return sum(seconds for (k, _), seconds in found.items() if k == kind)

    last = found["forward", executor.name_of(plans[0].segments[-1])]
    assert of("forward") == pytest.approx(sum(costs.costs.forward)) and of(
        "backward"
    ) == pytest.approx(sum(costs.costs.backward))
    assert of("recompute") == pytest.approx(sum(costs.costs.forward) - last)


def points(**unused) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
