"""distseg bench: which cases it measures, what it writes, what it makes of results."""

import json
import mmap
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_store import random_store
from made_transports import over
from test_cli import run
from test_run_report import check_page

from distseg.cli.bench import cases, layouts, ratios, rows
from distseg.cli.bench.command import command_text
from distseg.cli.bench.comparison import compare
from distseg.cli.bench.environment import performance_variables
from distseg.cli.bench.head_figures import figures_of
from distseg.cli.bench.kinds import MEASURED
from distseg.cli.bench.measurements import reducer_for
from distseg.cli.bench.report import environment_rows, joined_settings
from distseg.cli.bench.result_files import read_result
from distseg.cli.bench.results import Measurement, Result, file_name, write_result
from distseg.cli.bench.running_step import busiest_rank, mean_parts
from distseg.cli.bench.studies import studies_of
from distseg.comm.counted import CountedComm, Traffic
from distseg.comm.launch import peak_memory, release_freed_memory, reset_peak_memory
from distseg.config.settings import Config, MeshConfig
from distseg.config.sizes import Size
from distseg.planning.mesh_layout import MeshLayout

CPU = torch.device("cpu")
ONE = MeshLayout(1, Size("1x1"), 1, "all", 1, "1f1b", "never")
IMAGE = Size("64x96")
TINY = ["--model.depth", "1", "--model.num_convs", "1", "--model.base_channels", "4"]
TINY += ["--train.precision", "fp32"]
QUICK = [*TINY, "--image", "32x32", "--repeats", "2", "--warmup", "1"]


def layout(text: str) -> dict:
    """Return a layout as results hold it, of text such as ``2 1x2 3``: samples, tiles, stages."""
    samples, tiles, stages = text.split()
    one = replace(ONE, samples=int(samples), tiles=Size(tiles), stages=int(stages))
    return {**asdict(one), "tiles": tiles}


def measurement(name: str, mesh: str = "1 1x1 1", *seconds: float, **more) -> Measurement:
    """Return a measurement on the ranks of a mesh such as ``2 1x2 3``."""
    found = layout(mesh)
    ranks = found["samples"] * Size(found["tiles"]).volume * found["stages"]
    given = {"image": "64x96", "pixels": 6144, "images": 1, "memory": [100_000_000] * ranks}
    found |= {"micro_batches": more.pop("micro_batches", 1)}
    return Measurement(name, ranks, list(seconds or (1.0,)), layout=found, **{**given, **more})


def result(kind: str, *measurements: Measurement, **more) -> Result:
    axis = {"strong": "tiles", "weak": "tiles"}.get(kind, "")
    environment = {
        "ranks": max(one.ranks for one in measurements),
        "hosts": {"n1": 2},
        "processors": {"a CPU": 2},
        "devices": {"cpu": 2},
        "threads": 1,
        "cores": 2,
        "memory": 8_000_000_000,
        "launcher": "srun",
        "transport": "mpi",
        "versions": {"distseg": "1.0", "torch": "2.0"},
        "commit": None,
        "variables": {"OMP_NUM_THREADS": "1"},
        "system": "Linux x86_64",
        "date": "2026-01-02T03:04:05+00:00",
    }
    made = Result(
        kind,
        axis,
        f"srun -N 1 -n 2 distseg bench {kind}",
        environment,
        Config().as_plain(),
        {"name": "unet", "parameters": 1050},
        "fp32",
        "random images",
        1,
        0,
        "",
        measurements,
    )
    return replace(made, **more)


# --- cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, ranks, multiple, found",
    [
        (None, 1, 1, [1]),
        (None, 6, 1, [1, 2, 4, 6]),
        (None, 12, 3, [3, 6, 12]),
        ("job", 6, 2, [6]),
        ("4, 2", 8, 2, [2, 4]),
        ("3,4", 8, 2, "3 ranks do not fit the mesh: its axes that do not grow take 2 ranks"),
        ("2,16", 8, 1, "--ranks names 16 ranks, but the job has 8: start 16 ranks"),
        ("2,two", 8, 1, "--ranks must be distinct numbers above 0, such as 1,2,4, got '2,two'"),
        (None, 3, 2, "3 ranks do not fit the mesh"),
    ],
)
def test_the_numbers_of_ranks(text, ranks, multiple, found):
    if isinstance(found, list):
        assert layouts.rank_counts(text, ranks, multiple) == found
    else:
        with pytest.raises(ValueError, match=found):
            layouts.rank_counts(text, ranks, multiple)


def test_the_layout_of_a_config():
    config = Config(mesh=MeshConfig(samples=2, tiles="2x2"))
    found = layouts.base_layout(config.mesh, config.pipeline, "2", 3, linear=True)
    assert found == MeshLayout(2, Size("2x2"), 1, "2", 3, "1f1b", "never")
    # A loss that labels alone do not determine would take 1f1b an extra forward pass.
    alone = Config()
    assert layouts.base_layout(alone.mesh, alone.pipeline, "1", 1, linear=False).schedule == "gpipe"


def shown(found: list[cases.Case]) -> list[tuple]:
    return [(str(c.layout), c.layout.micro_batches, c.layout.exchange, str(c.image)) for c in found]


def test_strong_scaling_keeps_the_step():
    found = cases.strong_cases(ONE, [1, 2, 4], "tiles", IMAGE, "1")
    assert shown(found) == [
        ("1 samples x 1x1 tiles x 1 stages", 1, "all", "64x96"),
        ("1 samples x 1x2 tiles x 1 stages", 1, "1", "64x96"),
        ("1 samples x 2x2 tiles x 1 stages", 1, "1", "64x96"),
    ]
    assert [case.name for case in found] == ["1 rank", "2 ranks", "4 ranks"]
    by_samples = cases.strong_cases(replace(ONE, micro_batches=4), [1, 4], "samples", IMAGE, "1")
    assert [case.layout.micro_batches for case in by_samples] == [4, 1]
    with pytest.raises(ValueError, match="a step of 1 micro-batches does not divide among 2 sampl"):
        cases.strong_cases(ONE, [1, 2], "samples", IMAGE, "1")


def test_weak_scaling_grows_the_image_or_the_number_of_images():
    by_tiles = cases.weak_cases(ONE, [1, 4], "tiles", IMAGE, "level")
    assert shown(by_tiles) == [
        ("1 samples x 1x1 tiles x 1 stages", 1, "all", "64x96"),
        ("1 samples x 2x2 tiles x 1 stages", 1, "level", "128x192"),
    ]
    by_samples = cases.weak_cases(ONE, [1, 4], "samples", IMAGE, "all")
    assert shown(by_samples)[1] == ("4 samples x 1x1 tiles x 1 stages", 1, "all", "64x96")


def test_a_pipeline_is_measured_beside_one_stage():
    found = cases.pipeline_cases(ONE, 3, [1, 4], ["1f1b", "zb-h1"], IMAGE)
    assert [(c.name, c.layout.stages) for c in found] == [
        ("1 stage, 1 micro-batch", 1),
        ("1f1b, 1 micro-batch", 3),
        ("zb-h1, 1 micro-batch", 3),
        ("1 stage, 4 micro-batches", 1),
        ("1f1b, 4 micro-batches", 3),
        ("zb-h1, 4 micro-batches", 3),
    ]
    with pytest.raises(ValueError, match="a pipeline needs two stages or more, but 1 rank and 1"):
        cases.pipeline_cases(ONE, 1, [1], ["1f1b"], IMAGE)


def test_halos_are_measured_between_all_ranks():
    found = cases.halo_cases(replace(ONE, samples=2), 8, ["all", "1"], IMAGE)
    assert [(str(c.layout.tiles), c.layout.exchange) for c in found] == [
        ("2x2", "all"),
        ("2x2", "1"),
    ]
    with pytest.raises(
        ValueError,
        match="two tiles or more, but 3 ranks and 2 ranks of samples and stages leave 1.5: start",
    ):
        cases.halo_cases(replace(ONE, samples=2), 3, ["all"], IMAGE)


def test_memory_is_measured_along_each_axis_that_divides():
    names = [c.name for c in cases.memory_cases(ONE, 2, layouts.AXES, "1", IMAGE)]
    assert names == [
        "1 samples x (1x2) tiles x 1 stages, 1 micro-batch, exchange 1",
        "1 samples x (1x1) tiles x 2 stages, 1 micro-batch, 1f1b",
    ]
    two = replace(ONE, micro_batches=2)
    assert len(cases.memory_cases(two, 2, layouts.AXES, "1", IMAGE)) == 3


def test_a_case_changes_only_the_layout():
    config = Config().with_values({"optim.lr": 0.5, "spatial.tiles_per_rank": "2x2"})
    (case,) = cases.weak_cases(ONE, [2], "samples", IMAGE, "all")
    found = config.with_values(case.changes(config.mesh, config.pipeline, config.spatial))
    assert (found.mesh.samples, found.optim.lr) == (2, 0.5)
    assert found.spatial.tiles_per_rank == Size("2x2")
    (case,) = cases.strong_cases(ONE, [2], "tiles", IMAGE, "1")
    found = config.with_values(case.changes(config.mesh, config.pipeline, config.spatial))
    assert (found.spatial.exchange_every, found.spatial.tiles_per_rank) == ("1", Size("2x2"))


# --- figures of a step ---------------------------------------------------------------------------


@pytest.mark.parallel(2)
@pytest.mark.parametrize("kind", ["mpi", "torch"])
def test_messages_are_counted(comm, kind):
    counted = CountedComm(over(kind, comm))
    part = counted.group([0, 1])
    other = 1 - part.rank
    request = part.Irecv(torch.empty(3, dtype=torch.uint8), other, 7)
    sent = part.Isend(torch.ones(3, dtype=torch.uint8), other, 7)
    total = part.Isum(np.ones(4, np.float32))
    while not (request.Test() and sent.Test() and total.Test()):
        pass
    assert counted.traffic == Traffic(1, 3, 1, 16)
    alone = counted.group([counted.rank])
    alone.Isum(np.ones(4, np.float32))
    assert counted.traffic == Traffic(1, 3, 1, 16)  # one rank sends nothing


def test_a_peak_of_memory_begins_anew():
    if not reset_peak_memory(CPU):
        pytest.skip("the system does not reset the peak of a process")
    before = peak_memory(CPU)
    with mmap.mmap(-1, 80_000_000) as memory:  # unlike an array's, never freed memory
        memory[::4096] = bytes(-(-80_000_000 // 4096))
    assert peak_memory(CPU) > before + 75e6
    release_freed_memory()  # which other tests may have let the process keep
    reset_peak_memory(CPU)
    assert peak_memory(CPU) < before + 40e6


def test_parts_of_a_step_and_its_busiest_rank():
    times = [{"forward": 1.0, "wait": 2.0}, {"forward": 2.0, "backward": 1.0}]
    parts = mean_parts(times, 4.0)
    assert (parts["forward"], parts["wait"], parts["backward"], parts["other"]) == (1.5, 1, 0.5, 1)
    found = busiest_rank(times, ["a", "b"])
    assert found == {"rank": 1, "host": "b", "computing": 3.0, "mean": 2.0}


def test_the_command_that_repeats_a_measurement():
    words = ["bench", "strong", "my config.yaml"]
    command = "distseg bench strong 'my config.yaml'"
    assert command_text(words, {"a": 1}, "none") == command
    assert command_text(words, {"a": 4}, "Open MPI's mpirun") == f"mpirun -n 4 {command}"
    assert command_text(words, {"a": 4, "b": 4}, "srun") == f"srun -N 2 -n 8 {command}"
    assert (
        command_text(words, {"a": 4, "b": 4}, "torchrun")
        == f"torchrun --nnodes 2 --nproc-per-node 4 -m {command}"
    )


def test_variables_that_change_the_speed_are_kept_and_secrets_are_not():
    given = {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "WARN", "HOME": "/home/a", "NCCL_API_KEY": "x"}
    assert performance_variables(given) == {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "2"}


# --- the command ---------------------------------------------------------------------------------


def measured(capsys, folder: Path, kind: str, *words: str) -> tuple[Result | None, str]:
    """Run a measurement; return its result on the rank that printed it, and its output."""
    code, out, err = run(capsys, "bench", kind, *words, "--output", str(folder))
    assert code == 0, err
    path = re.search(r"^result: (\S+\.json), \S+\.png$", out, re.M)
    return (read_result(Path(path[1])) if path else None), out


@pytest.mark.parallel(2)
def test_strong_scaling_as_a_command(comm, capsys, shared_path):
    found, out = measured(capsys, shared_path, "strong", *QUICK, "--machine", "a100")
    assert (found is None) == (comm.rank > 0)
    if found is None:
        return
    path = shared_path / "strong-tiles-2.json"
    assert out.endswith(f"next: distseg bench report {shared_path}\n") and path.is_file()
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert found.environment["ranks"] == sum(found.environment["hosts"].values()) == 2
    assert found.precision == "fp32" and found.network["parameters"] > 0
    assert found.config["model"]["base_channels"] == 4
    one, two = found.measurements
    assert (one.name, one.ranks, two.name, two.ranks) == ("1 rank", 1, "2 ranks", 2)
    assert two.layout["tiles"] == "1x2" and one.pixels == two.pixels == 32 * 32
    assert len(two.seconds) == 2 and len(two.memory) in (0, 2)
    assert one.sent == 0 and two.sent > two.traffic["largest_rank"] > 0
    assert two.parts["forward"] > 0 and two.busiest["rank"] in (0, 1)
    assert two.predicted["seconds"] > 0 and two.predicted["memory"] > 0
    assert one.redundancy == 1 and two.redundancy > 1


KINDS = {
    "weak": ([*QUICK, "--axis", "samples"], "2 x (1x1) x 1"),
    "pipeline": ([*QUICK, "--micro-batches", "1,2", "--machine", "a100"], "m / (m + S - 1)"),
    "halo": ([*QUICK, "--every", "all,1", "--machine", "none"], "pixels read"),
    "memory": ([*QUICK, "--machine", "none"], "largest rank [MB]"),
    "io": ([*TINY, "--data.crop", "16x16", "--repeats", "2", "--crops", "3"], "from memory"),
}


@pytest.mark.slow
@pytest.mark.parallel(2)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_as_a_command(comm, capsys, shared_path, kind):
    words, text = KINDS[kind]
    if kind == "io":
        if comm.rank == 0:
            random_store(shared_path / "store.h5", train=[(32, 48)], val=[(32, 32)])
        comm.Barrier()
        words = [*words, "--data.store", str(shared_path / "store.h5")]
    found, out = measured(capsys, shared_path / "results", kind, *words)
    if found is not None:
        assert text in out and found.kind == kind
        predicted = [one.predicted is not None for one in found.measurements]
        assert all(predicted) if kind in ("weak", "pipeline") else not any(predicted)


def test_every_kind_has_a_test():
    assert {"strong", *KINDS} == set(MEASURED)


@pytest.mark.parallel(2)
def test_ranks_that_do_not_fit_are_refused_by_all_ranks(comm, capsys, shared_path):
    words = ["bench", "strong", *QUICK, "--mesh.samples", "4", "--output", str(shared_path / "new")]
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "") and not (shared_path / "new").exists()
    told = err.startswith("distseg: error: 2 ranks do not fit the mesh: its axes that do not grow")
    assert told if comm.rank == 0 else err == ""


def test_gradients_are_summed_alike_in_all_cases():
    assert reducer_for("auto", 1, 2, "mpi") == "mpi"
    assert reducer_for("auto", 1, 2, "torch") == reducer_for("auto", 2, 2, "mpi") == "auto"
    assert reducer_for("horovod", 2, 2, "mpi") == "horovod"
    with pytest.raises(ValueError, match="connects all ranks of a job, but some cases have fewer"):
        reducer_for("horovod", 1, 2, "mpi")


@pytest.mark.parallel(1)
def test_a_result_is_replaced_only_if_asked(comm, capsys, tmp_path):
    path = tmp_path / file_name("strong", "tiles", 1)
    path.write_text("mine")
    code, _, err = run(capsys, "bench", "strong", *QUICK, "--output", str(tmp_path))
    assert code == 2 and f"{path} exists: give another --output, or replace it" in err
    assert path.read_text() == "mine"


@pytest.mark.parallel(1)
def test_one_rank_without_matplotlib(comm, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["strong", *QUICK, "--machine", "none", "--output", str(tmp_path)]
    code, out, _ = run(capsys, "bench", *words)
    assert code == 0 and "no picture: pictures need matplotlib" in out
    assert [path.name for path in tmp_path.iterdir()] == ["strong-tiles-1.json"]
    (one,) = read_result(tmp_path / "strong-tiles-1.json").measurements
    assert (one.ranks, one.sent, one.predicted, one.note) == (1, 0, None, "")


# --- files ---------------------------------------------------------------------------------------


def test_a_result_is_read_as_it_was_written(tmp_path):
    made = result("strong", measurement("1 rank"), measurement("2 ranks", "1 1x2 1", 0.5, 0.6))
    write_result(made, tmp_path / "a" / "b.json")
    assert read_result(tmp_path / "a" / "b.json") == made
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.json"]


def test_a_figure_that_is_no_number_is_not_written(tmp_path):
    made = result("strong", measurement("1 rank", "1 1x1 1", float("nan")))
    with pytest.raises(ValueError, match="strong, tiles is not finite .* measure again"):
        write_result(made, tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


DAMAGED = {
    "truncated": (lambda text: text[: len(text) // 2], "is not whole JSON"),
    "empty": (lambda text: "", "is not whole JSON"),
    "a list": (lambda text: "[]", "is no object"),
    "of another program": (lambda text: "{}", "it has no format"),
    "another version": (lambda text: text.replace('"version": 1', '"version": 2'), "version 2, bu"),
    "another kind": (lambda text: text.replace('"strong"', '"fast"'), "the kind 'fast', not one"),
    "NaN": (lambda text: text.replace("1.5", "NaN"), "NaN is no number"),
    "no seconds": (lambda text: re.sub(r'"seconds": \[.*?\]', '"seconds": []', text, flags=re.S),
                   r"measurement 1 of .* \(1 rank\) has the seconds \[\], but"),
    "negative": (lambda text: text.replace("1.5", "-1.5"), r"has the seconds \[-1.5\], but"),
    "an entry less": (lambda text: text.replace('"pixels": 6144,', ""), "lacks pixels"),
    "an entry more": (lambda text: text.replace('"pixels"', '"x": 1, "pixels"'), "unknown entry x"),
    "another type": (lambda text: text.replace("6144", '"many"'), "of a wrong type, pixels 'many'"),
    "half a prediction": (lambda text: text.replace('"predicted": null', '"predicted": {"memory": 1}'),
                          "has predicted without seconds"),
    "half a layout": (lambda text: text.replace('"stages": 1,', ""), "has layout without stages"),
    "no layout": (lambda text: re.sub(r'"layout": {.*?}', '"layout": {}', text, flags=re.S),
                  "has no layout"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_result_is_refused(tmp_path, damage):
    change, message = DAMAGED[damage]
    path = tmp_path / "a.json"
    write_result(result("strong", measurement("1 rank", "1 1x1 1", 1.5)), path)
    whole = path.read_text()
    path.write_text(change(whole))
    assert path.read_text() != whole
    with pytest.raises(ValueError, match=message) as refused:
        read_result(path)
    assert "a.json" in str(refused.value) and "measure again by distseg bench" in str(refused.value)


def test_the_schema_of_a_result(tmp_path):
    """Hold the names that other programs read. A change of them needs another VERSION."""
    write_result(result("strong", measurement("1 rank")), tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())
    assert (
        list(found)
        == (
            "format version kind axis command environment config network precision data repeats "
            "warmup machine measurements"
        ).split()
    )
    assert (found["format"], found["version"]) == ("distseg bench", 1)
    assert (
        list(found["measurements"][0])
        == (
            "name ranks seconds layout image pixels images parts busiest traffic memory redundancy "
            "bytes predicted note"
        ).split()
    )


# --- tables -------------------------------------------------------------------------


def test_scaling_by_hand():
    one = measurement("1 rank", "1 1x1 1", 8.0, 10.0, 9.0, predicted={"seconds": 6.0})
    two = measurement("2 ranks", "1 1x2 1", 5.0, 6.0, 4.0, predicted={"seconds": 4.0})
    first, second = rows.scaling_rows([two, one])
    assert (first["speed-up"], first["efficiency"]) == (1, 1)
    assert (second["speed-up"], second["from"], second["to"]) == (9 / 5, 8 / 6, 10 / 4)
    assert second["efficiency"] == pytest.approx(0.9)
    assert second["predicted [s]"] == 4 and second["measured / predicted"] == 5 / 4
    assert ratios.predicted_speed_up(two, one) == 1.5
    assert ratios.predicted_speed_up(replace(two, predicted=None), one) is None
    (only,) = rows.scaling_rows([two])  # has nothing to be compared with
    assert only["speed-up"] is only["efficiency"] is None
    # In weak scaling the work grows too.
    weak = replace(two, pixels=2 * one.pixels)
    assert ratios.speed_up(weak, one).middle == pytest.approx(3.6)


def test_a_pipeline_by_hand():
    alone = measurement("1 stage, 4 micro-batches", "1 1x1 1", 8.0, micro_batches=4)
    staged = measurement(
        "1f1b, 4 micro-batches",
        "1 1x1 2",
        5.0,
        micro_batches=4,
        parts={"forward": 3, "wait": 1},
        busiest={"rank": 1, "host": "n2", "computing": 3.0, "mean": 2.0},
    )
    (row,) = rows.pipeline_rows([alone, staged])
    assert row["efficiency"] == 8 / (2 * 5) and row["m / (m + S - 1)"] == 4 / 5
    assert row["busiest rank"] == "1 on n2, 1.50 x mean"
    assert row["waiting"] == 1 / 4 and row["bubble, ideal"] == pytest.approx(1 / 5)
    with pytest.raises(ValueError, match="'1f1b, 4 micro-batches' has 4 micro-batches, but no"):
        rows.pipeline_rows([staged])


def test_other_tables_by_hand():
    halos = [
        measurement("every all", "1 1x2 1", 2.0, parts={"forward": 2.0}),
        measurement("every 1", "1 1x2 1", 1.0, parts={"forward": 0.75, "halo": 0.25}),
    ]
    first, second = rows.rows_of("halo", halos)
    assert (first["/ all"], second["/ all"]) == (1, 0.5) and second["halo"] == 0.25
    memory = measurement("a", "1 1x2 1", memory=[3_000_000, 1_000_000])
    (row,) = rows.rows_of("memory", [memory])
    assert (row["largest rank [MB]"], row["smallest rank [MB]"]) == (3, 1)
    assert row["measured / predicted"] is None
    read = Measurement("1 rank, from the disk", 1, [2.0], pixels=4_000_000, bytes=6_000_000)
    (row,) = rows.rows_of("io", [read])
    assert (row["MB/s"], row["Mpx/s"]) == (3, 2)


def examples() -> dict[str, Result]:
    """Return a small result of each kind, and one of a single number of ranks, with predictions where there may be some."""
    known = {"predicted": {"seconds": 1.0, "memory": 9e7, "parts": {}}}
    two = measurement("2 ranks", "1 1x2 1", 0.6, 0.7, **known)
    one = measurement("1 rank", "1 1x1 1", 1.0, 1.1, **known)
    staged = measurement("1f1b, 1 micro-batch", "1 1x1 2", 0.8, 0.9, **known)
    return {
        "strong": result("strong", one, two),
        "alone": result("strong", replace(one, image="32x32")),
        "weak": result("weak", one, replace(two, pixels=2 * two.pixels)),
        "pipeline": result("pipeline", replace(one, name="1 stage, 1 micro-batch"), staged),
        "halo": result("halo", two, replace(two, name="every 1")),
        "memory": result("memory", two, replace(staged, memory=())),
        "io": result("io", Measurement("1 rank, from memory", 1, [2.0], pixels=4, bytes=6)),
    }


# --- comparing results ---------------------------------------------------------------------------


def test_two_results_are_compared_by_hand():
    first = result(
        "strong",
        measurement("1 rank", "1 1x1 1", 2.0, 2.0, 2.2),
        measurement("2 ranks", "1 1x2 1", 1.0, 1.2),
        measurement("4 ranks", "1 2x2 1", 0.5),
    )
    second = replace(
        first,
        measurements=(
            measurement("1 rank", "1 1x1 1", 1.0, 1.0, 1.1),
            measurement("2 ranks", "1 1x2 1", 0.9, 1.4),
            measurement("8 ranks", "1 2x4 1", 0.25),
        ),
    )
    found = compare(first, second)
    one, two = found.rows
    assert (one["case"], one["B / A"], one["B is"]) == ("1 rank", 0.5, "faster")
    assert (one["from"], one["to"]) == (1.0 / 2.2, 1.1 / 2.0)
    assert two["B / A"] == pytest.approx(1.15 / 1.1) and two["B is"] == "no different"
    assert found.missing == ["only in A: 4 ranks", "only in B: 8 ranks"]
    assert found.environment == [] and "environment: equal" in found.text()
    assert compare(second, first).rows[0]["B is"] == "slower"


def test_what_else_differs_is_told():
    first = result("halo", measurement("every all", "1 1x2 1"))
    versions = {"distseg": "1.0", "torch": "2.1"}
    config = Config().with_values({"optim.lr": 0.5}).as_plain()
    second = replace(
        first,
        environment={**first.environment, "versions": versions, "date": "2027", "hosts": {"n2": 2}},
        config=config,
        precision="bf16",
    )
    found = compare(first, second)
    assert found.environment == [
        {"what": "hosts.n1", "A": "2", "B": None},
        {"what": "versions.torch", "A": "2.0", "B": "2.1"},
        {"what": "hosts.n2", "A": None, "B": "2"},
    ]
    assert [row["what"] for row in found.settings] == ["precision", "optim.lr"]
    assert "environment differs:\nwhat" in found.text()


@pytest.mark.parametrize(
    "other, message",
    [
        (result("weak", measurement("1 rank")), "A measures strong, tiles, but B measures weak"),
        (result("strong", measurement("3 ranks")), "A has the cases 1 rank, but B has 3 ranks"),
    ],
)
def test_results_that_do_not_compare_are_refused(other, message):
    with pytest.raises(ValueError, match=message):
        compare(result("strong", measurement("1 rank")), other)


def test_compare_as_a_command(capsys, tmp_path):
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path in paths:
        write_result(result("strong", measurement("1 rank")), Path(path))
    assert run(capsys, "bench", "compare", *paths)[1].splitlines()[0].split()[0] == "case"
    code, out, _ = run(capsys, "bench", "compare", *paths, "--json")
    assert code == 0 and json.loads(out)["rows"][0]["B / A"] == 1


# --- the page ------------------------------------------------------------------------------------


def test_jobs_of_one_study_are_joined():
    one = result("strong", measurement("1 rank"))
    two = result("strong", measurement("2 ranks", "1 1x2 1", 0.5))
    again = result("strong", measurement("1 rank", "1 1x1 1", 3.0))
    larger = result("strong", measurement("4 ranks", "1 2x2 1", image="64x64"))
    groups = studies_of([two, one, again, larger])
    assert [[len(study.results), study.whole.ranks] for study in groups] == [[2, 2], [1, 1], [1, 4]]
    assert [m.name for m in groups[0].whole.measurements] == ["1 rank", "2 ranks"]
    other = replace(two, environment={**two.environment, "devices": {"a GPU": 2}})
    assert len(studies_of([one, other])) == 2
    # In weak scaling the image grows, and the work of a rank does not.
    one = result("weak", measurement("1 rank", "1 1x1 1", image="8x8", pixels=64))
    two = result("weak", measurement("2 ranks", "1 1x2 1", image="8x16", pixels=128))
    assert len(studies_of([one, two])) == 1


@pytest.mark.parametrize(
    "kinds",
    [["strong", "pipeline"], pytest.param([*MEASURED, "alone"], marks=pytest.mark.slow)],
    ids=["two", "all"],
)
def test_the_page_shows_every_kind(tmp_path, capsys, kinds):
    folder = tmp_path / "<b>mine"
    for kind in kinds:
        write_result(examples()[kind], folder / f"{kind}.json")
    code, out, _ = run(capsys, "bench", "report", str(folder))
    assert code == 0 and out.startswith(f"{folder / 'report.html'}: ")
    page = check_page((folder / "report.html").read_text())
    assert len(page.tags("img")) == len(kinds) and "<b>mine" in page.texts
    titles = {"strong": "Strong scaling, tiles", "weak": "Weak scaling, tiles", "io": "Reading"}
    titles |= {"pipeline": "Pipeline", "halo": "Halo exchange", "memory": "Memory"}
    assert {titles[kind] for kind in kinds if kind != "alone"} <= set(page.texts)
    for text in ("srun -N 1 -n 2 distseg bench strong", "81%", "torch 2.0"):
        assert any(text in each for each in page.texts), text
    assert sorted(path.suffix for path in folder.iterdir()) == [".html"] + [".json"] * len(kinds)


def test_figures_at_the_head_of_the_page():
    found = {label: value for one in examples().values() for label, value in figures_of(one)}
    assert figures_of(examples()["alone"]) == []
    assert found["strong, tiles: efficiency on 2 ranks"] == "81%"
    assert found["efficiency, 2 stages, 1 micro-batch, 1f1b"] == "62% (ideal 50%)"
    assert found["peak memory of a rank, 1 x (1x2) x 1"] == "100 MB"
    assert figures_of(result("memory", measurement("a", memory=()))) == []


def test_environments_and_settings_of_several_jobs():
    first = result("strong", measurement("1 rank")).environment
    found = dict(environment_rows([first, {**first, "hosts": {"n2": 2}, "commit": "abc"}]))
    assert (found["hosts"], found["commit"]) == ("n1 2 | n2 2", "unknown | abc")
    assert found["memory"] == "8 GB"
    assert "date" not in found
    config = Config().as_plain()
    other = Config().with_values({"mesh.tiles": "2x2"}).as_plain()
    assert joined_settings([config, other])["mesh"]["tiles"] == "1x1 | 2x2"
    assert joined_settings([config, config]) == config
