"""Tables of measured rates: what lies between the measured shapes, what beyond, and who uses them."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

from distseg.cli.calibrate import calibrate, text
from distseg.cli.main import main
from distseg.comm.alone import Alone
from distseg.config.settings import RunConfig
from distseg.planning import calibration, roofline
from distseg.planning.cost import modelled
from distseg.planning.machine import as_profile, load_machine
from distseg.planning.rates import SHAPED, Curve, Rate, Rates, Shape, Timing, rates_of
from distseg.planning.roofline import ARITHMETIC, Device, kernel_seconds

TABLE = [
    Rate("convolution", "fp32", 4, 100, 1.0),
    Rate("convolution", "fp32", 4, 10_000, 100.0),
    Rate("convolution", "fp32", 16, 100, 4.0),
    Rate("norm", "fp32", 8, 1000, 5.0),
]


@pytest.mark.parametrize(
    "channels, cells, rate, inside",
    [
        (4, 100, 1, True),
        (4, 1000, 10, True),
        (8, 100, 2, True),
        (4, 10, 1, False),
        (4, 10**6, 100, False),
        (2, 1000, 10, False),
        (16, 100, 4, True),
        (16, 200, 4, False),
        (64, 100, 4, False),
    ],
)
def test_rates_lie_between_the_measured_ones(channels, cells, rate, inside):
    found = Rates(tuple(TABLE)).rate(Shape("convolution", channels, cells, 1), "fp32")
    assert found == (pytest.approx(rate), inside)


def test_kinds_and_number_types_that_were_not_measured():
    rates = Rates(tuple(TABLE))
    norm = Shape("norm", 8, 1000, 1)
    assert rates.rate(norm, "fp32") == (pytest.approx(5), True)
    assert rates.rate(norm, "bf16") == (pytest.approx(5), False)
    assert rates.rate(norm._replace(kind="copy"), "fp32") is None
    device = Device("", 7.0, 3.0, rates)
    assert device._rate(Shape("transposed", 4, 100, 1), "fp32") == (7.0, False)
    assert device._rate(Shape("copy", 4, 100, 1), "fp32") == (3.0, False)


def test_a_table_of_one_rate_is_that_rate():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1))
    rates = Rates((Rate("convolution", "fp32", 8, 1000, 2e9),))
    single = modelled(model, (32, 48), 1, Device("", 2e9, 1e30))
    table = modelled(model, (32, 48), 1, Device("", 1.0, 1e30, rates))
    assert table.forward == pytest.approx(single.forward)
    assert table.backward == pytest.approx(single.backward)
    assert (single.outside, table.outside) == (0, 1)


def test_the_share_of_the_flops_outside():
    model = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 16, 1, bias=False))
    rates = Rates(tuple(Rate("convolution", "fp32", 4, n, 1e9) for n in (100, 10_000)))
    found = modelled(model, (20, 20), 1, Device("", 1.0, 1e30, rates))
    # The second layer has 16 channels, which were not measured; the first has no input gradient.
    assert found.outside == pytest.approx(3 * 4 / (3 * 4 + 2))


def test_transposed_convolutions_have_their_own_rate():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 2, stride=2))
    speeds = zip(ARITHMETIC, (1.0, 10.0))
    rates = tuple(Rate(kind, "fp32", 4, 400, speed) for kind, speed in speeds)
    conv, up = modelled(model, (20, 20), 1, Device("", 1.0, 1e30, Rates(rates))).layers
    assert conv.forward == pytest.approx(2 * 16 * 400, rel=1e-6)
    assert up.forward == pytest.approx(2 * 16 * 4 * 400 / 10, rel=1e-6)


def test_a_step_gives_rates_of_what_is_not_as_fast_as_memory():
    found = rates_of(
        [
            (Shape("convolution", 8, 64, 100), 2.0),
            (Shape("convolution", 8, 64, 300), 3.0),
            (Shape("pooling", 8, 16, 10), 5.0),
            (Shape("norm", 8, 64, 10), 1.0),
            (Shape("transposed", 8, 64, 0), 1.0),
        ],
        "fp32",
    )
    assert found.rows == (
        Rate("convolution", "fp32", 8, 64, 80.0),
        Rate("pooling", "fp32", 8, 16, 2.0),
    )
    assert [row.rate for row in found.divided(2).rows] == [40, 1]


def test_each_kernel_of_a_step_is_timed(monkeypatch):
    """The n-th reading of the clock is n² / 2, so that the first run of a kernel is the fastest."""
    readings = iter(range(1000))
    monkeypatch.setattr(
        roofline, "time", SimpleNamespace(perf_counter=lambda: next(readings) ** 2 / 2)
    )
    model = nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.Conv2d(4, 3, 1), nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
    )
    x = torch.ones(1, 2, 4, 4)
    found = kernel_seconds(lambda: model(x).sum().backward(), 2, torch.device("cpu"))
    shaped = [(*shape[:3], seconds) for shape, seconds in found if shape.kind in SHAPED]
    convolutions = [one for one in shaped if one[0] == "convolution"]
    assert [one[1:3] for one in convolutions] == [(4, 16), (3, 16), (3, 16), (4, 16)]
    assert [one[:3] for one in shaped if one not in convolutions] == [
        ("pooling", 3, 4),
        ("resampling", 3, 16),
        ("resampling", 3, 4),
        ("resampling", 3, 16),
    ]
    assert convolutions[0][3] == 0.5


def test_messages_take_the_measured_time():
    curve = Curve([(10, 1.0), (1000, 100.0), (100, 20.0), (200, 5.0)])
    assert [curve.seconds(n) for n in (1, 10, 100, 200)] == pytest.approx([1, 1, 20, 20])
    assert curve.seconds(4000) == pytest.approx(400)
    times = [curve.seconds(n) for n in range(1, 5000, 7)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))
    machine = load_machine("a100")
    timings = (Timing("sum", 4, 10, 1.0), Timing("sum", 4, 1000, 2.0), Timing("message", 4, 8, 3.0))
    measured = replace(machine, timings=timings)
    assert measured.sum(4, 10) == pytest.approx(1) and measured.sum(4, 1000) == pytest.approx(2)
    assert measured.sum(8, 10) == machine.sum(8, 10) and measured.sum(1, 10) == 0
    assert measured.message(2, 24, 3) == pytest.approx(9)
    assert measured.message(machine.ranks + 1, 24) == machine.message(machine.ranks + 1, 24)


def test_messages_without_a_table_share_links_and_the_network():
    """Let a node have 2 ranks: 10 B/s between them, and 4 B/s of a node to the other nodes."""
    machine = replace(load_machine("a100"), latency=1.0, link=10.0, network=4.0, ranks=2)
    assert machine.message(2, 20, 3) == 3 + 20 / 10
    assert machine.message(4, 20, 3) == 3 + 20 / (4 / 2)
    assert machine.sum(2, 20) == 2 * 1 / 2 * 20 / 10 + 2 * 1  # a ring all-reduce
    assert machine.sum(4, 20) == 2 * 3 / 4 * 20 / 4 + 2 * 2


def test_latency_is_that_of_the_smallest_message_and_not_in_the_link():
    sizes = ((512, 3.0), (8, 1.0), (1008, 11.0))
    timings = [Timing("message", 2, size, seconds) for size, seconds in sizes]
    other = Timing("sum", 2, 4096, 0.1)
    assert calibration.latency_and_link([*timings, other]) == (1.0, 1008 / 10)


def filled():
    timings = (Timing("sum", 4, 8, 1e-5), Timing("message", 4, 8, 1e-5))
    return replace(
        load_machine("a100"),
        spread=1.5,
        exchange=2e-4,
        sharing=1e11,
        forward=1.25,
        rates=Rates(tuple(TABLE)),
        timings=timings,
        precision="bf16",
    )


def test_a_profile_keeps_its_numbers_and_tables(tmp_path):
    (tmp_path / "p.yaml").write_text(as_profile(filled()))
    assert load_machine(str(tmp_path / "p.yaml")) == filled()


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda p: p.update(version=5),
            "has the version 5, but this distseg reads versions up to 4",
        ),
        (lambda p: p["latency"].update(table=[]), "latency must have the fields value, unit"),
        (
            lambda p: p["link"].update(table=3),
            "row 1 of the table of link must have the fields kind",
        ),
        (lambda p: p["link"]["table"][1].pop("ranks"), "row 2 of the table of link must have"),
        (
            lambda p: p["arithmetic"]["table"][0].update(kind="norm"),
            "row 1 of the table of arithmetic must have a kind among convolution, transposed and a pr",
        ),
        (
            lambda p: p["traffic"]["table"][0].update(precision="int8"),
            "a precision among fp64, fp32, bf16",
        ),
        (lambda p: p["traffic"]["table"][0].update(rate=-1), "has rate -1: give a number above 0"),
        (lambda p: p["traffic"]["table"][0].update(cells="x"), "has cells 'x': give a number"),
    ],
)
def test_wrong_tables_are_refused(tmp_path, change, message):
    entries = yaml.safe_load(as_profile(filled()))
    change(entries)
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(entries))
    with pytest.raises(ValueError, match=message):
        load_machine(str(tmp_path / "p.yaml"))


def run(words) -> int:
    """Run the command line in this process and return its exit code."""
    try:
        return main(words) or 0
    except SystemExit as e:
        return e.code or 0


@pytest.fixture
def few(monkeypatch):
    shapes = {"convolution": [(2, 8), (4, 8)], "transposed": [(2, 8)], "norm": [(2, 8)]}
    shapes |= {kind: [(2, 8)] for kind in ("copy", "elementwise", "pooling", "resampling")}
    monkeypatch.setattr(calibration, "_SHAPES", shapes)
    monkeypatch.setattr(calibration, "_BYTES", (8, 4096))


def test_the_command_measures_this_machine(few, tmp_path, capsys):
    path = str(tmp_path / "here.yaml")
    assert not run(["calibrate", "--save", path, "--run.threads", "1"])
    said, found = capsys.readouterr().out, load_machine(path)
    measured = {(row.kind, row.precision, row.channels, row.cells) for row in found.rates.rows}
    assert {
        ("convolution", "fp32", 2, 64),
        ("convolution", "fp32", 4, 64),
        ("transposed", "fp32", 2, 256),
        *((kind, "fp32", 2, 64) for kind in ("norm", "copy", "elementwise")),
        ("pooling", "fp32", 2, 16),
        ("resampling", "fp32", 2, 256),
    } <= measured
    assert not found.timings and found.kinds["link"] == "guess"
    assert "convolution" in said and "network, ranks" in said
    (tmp_path / "c.yaml").write_text("model: {name: unet, depth: 1, base_channels: 4}")
    words = [
        str(tmp_path / "c.yaml"),
        "--ranks",
        "2",
        "--image",
        "64x64",
        "--train.accumulate",
        "2",
    ]
    assert not run(["plan", *words, "--machine", path])
    assert "% of the FLOPs lie outside the measured shapes" in capsys.readouterr().out


def test_too_little_time_is_told(few, monkeypatch, refused):
    clock = iter(range(1000))
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: float(next(clock)))
    said = refused("calibrate", "--seconds", "1e-6")
    assert "before any convolution was measured, after" in said and "--seconds" in said


def test_operations_that_would_end_too_late_are_left_out(monkeypatch):
    """An operation on 8x8 cells takes 25.6 s here, so one on 16x16 is expected to take 102.4 s."""
    monkeypatch.setattr(calibration, "_SHAPES", {"copy": [(1, 16), (1, 8)], "norm": [(1, 8)]})
    spent = [0.0]

    def slow(call, repeats, device):
        spent[0] += 25.6
        return 6.4

    monkeypatch.setattr(calibration, "fastest", slow)
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: spent[0])
    small = [("copy", 64), ("norm", 64)]
    for seconds, sizes in (100, small), (200, [("copy", 64), ("copy", 256), ("norm", 64)]):
        spent[0] = 0.0
        rates, left = calibration.operation_rates(Alone(), torch.device("cpu"), ["fp32"], seconds)
        assert sorted((row.kind, row.cells) for row in rates.rows) == sizes
        assert left == 3 - len(sizes)


@pytest.mark.parallel([2, 3])
@pytest.mark.covering(cases=1)
def test_ranks_measure_their_messages(few, comm):
    found = calibrate(RunConfig(device="cpu", threads=1), comm, 600.0)
    assert {(one.kind, one.ranks, one.bytes) for one in found.timings} == {
        (kind, comm.size, size) for kind in ("message", "sum") for size in (8, 4096)
    }
    assert found.kinds["link"] == "measured" and found.ranks == comm.size
    assert found.sum(comm.size, 8) > 0 and "exchange" in text(found)
    assert found.exchange > 0 and 0 < found.sharing <= found.traffic
    assert len(set(comm.allgather(found.rates))) == 1
