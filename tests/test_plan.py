"""What layers and stages cost: predictions against what PyTorch does, memory by hand, and `distseg plan`."""

import json

import pytest
import torch
from test_cli import run
from torch import nn

from distseg.config.sizes import parse_bytes
from distseg.models.layers import Pop, Stash
from distseg.models.unet import unet
from distseg.models.zoo import ZOO
from distseg.planning import stage_report
from distseg.planning.cost import measured, modelled
from distseg.planning.held import Held, Policy, holdings, largest_holdings
from distseg.planning.roofline import Device, Work
from distseg.planning.stage_report import costs_of, plan, tensors_of_stages, window_of
from distseg.planning.stages import stage_seconds

DEVICE = Device("one of each", 1.0, float("inf"))  # its seconds are FLOPs
SIZE = (33, 47)
PAPERS = [name for name, entry in ZOO.items() if entry.balance]


def test_flops_of_convolutions():
    """2 * 9 * c_in * c_out * pixels forward, twice that backward; the first layer's input needs no gradient."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.LeakyReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
    )
    first, activation, _, last = modelled(model, (32, 48), 5, DEVICE).layers
    assert (first.forward, first.backward) == (2 * 9 * 3 * 8 * 32 * 48 * 5,) * 2
    assert (last.forward, last.backward) == (
        2 * 9 * 8 * 16 * 16 * 24 * 5,
        4 * 9 * 8 * 16 * 16 * 24 * 5,
    )
    assert (activation.forward, activation.backward) == (0, 0)
    # The first layer computes no gradient of the image, so all of its backward pass can wait.
    assert (first.put_off, activation.put_off, last.put_off) == (1, 0, 0.5)
    assert (first.parameters, last.parameters, last.output) == (
        3 * 8 * 9 + 8,
        8 * 16 * 9,
        4 * 5 * 16 * 16 * 24,
    )


def test_traffic_of_kernels():
    """In planes of the feature map: an activation reads and writes one, backward reads two; a norm reads its input twice."""
    plane = 4 * 8 * 32 * 32
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.LeakyReLU(),
        nn.BatchNorm2d(8, affine=False),
        Stash("a"),
        nn.Conv2d(8, 8, 1),
        Pop("a"),
    )
    _, activation, norm, stash, _, pop = modelled(
        model, (32, 32), device=Device("wire", float("inf"), 1.0)
    ).layers
    assert (activation.forward / plane, activation.backward / plane) == (2, 3)
    assert (norm.forward / plane, norm.backward / plane) == pytest.approx(
        (3, 5 + 3), abs=0.02
    )  # the gradients of its two readers are added
    assert (stash.forward / plane, stash.backward / plane) == (0, 0)
    assert (pop.forward / plane, pop.backward / plane) == (4, 0)  # backward: views


def test_float64_takes_twice_the_bytes():
    single, double = (
        modelled(unet(1, 1, 4, 3, 2, dropout=0.0).to(dtype), SIZE)
        for dtype in (torch.float32, torch.float64)
    )
    assert [layer.output for layer in double.layers] == [
        2 * layer.output for layer in single.layers
    ]


def test_the_slower_of_arithmetic_and_traffic():
    assert (
        Device("", 10.0, 2.0).seconds(Work(100, 4)) == 10
        and Device("", 10.0, 2.0).seconds(Work(10, 4)) == 2
    )


def test_measured_costs_leave_the_model_alone():
    model = unet(1, 1, 4, 3, 2, norm="batch").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    costs = measured(model, SIZE, repeats=1)
    assert costs.source == "measured on cpu" and all(layer.forward > 0 for layer in costs.layers)
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "schedule, recompute, expected",  # the most on each of 3 stages with 4 micro-batches: full, inputs only
    [
        ("gpipe", "never", ["4+0", "4+0", "4+0"]),
        ("gpipe", "always", ["1+3", "1+3", "1+3"]),
        ("gpipe", "except_last", ["1+3", "1+3", "1+3"]),
        ("1f1b", "never", ["3+0", "2+0", "1+0"]),
        ("1f1b", "always", ["1+2", "1+1", "1+0"]),
        (
            "1f1b",
            "except_last",
            ["1+2", "1+1", "1+0"],
        ),  # only on the last stage a backward pass comes next
    ],
)
def test_micro_batches_in_flight(schedule, recompute, expected):
    policy = Policy(4, schedule, recompute)
    most = [
        max(holdings(stage, 3, policy), key=lambda held: (held.full + held.inputs, held.full))
        for stage in range(3)
    ]
    assert [f"{held.full}+{held.inputs}" for held in most] == expected


def test_room_is_made_ahead():
    """Middle stage under 1F1B, F0 F1 B0 F2 B1 B2: during F1 for the gradient of 0 and the input of 2, during B1 for the last gradient."""
    found = holdings(1, 3, Policy(3, "1f1b"))
    assert {
        Held(2, 0, arriving=1, returning=1, copied=1),
        Held(2, 0, returning=1, backward=True, copied=1),
        Held(1, 0, backward=True),
    } <= found


def test_outputs_leave_once_the_next_stage_is_there():
    """First of 2 stages under GPipe, all recomputed: in the last forward pass again, its output and its gradient are on their way."""
    assert Held(1, 2, returning=3, leaving=1) in holdings(0, 2, Policy(3, "gpipe", "always"))
    assert all(held.leaving == 0 for held in holdings(1, 2, Policy(3, "gpipe", "always")))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
def test_the_largest_holdings_have_every_peak(schedule, recompute):
    for stages in (1, 2, 3, 5):
        for micro_batches in (1, 2, 3, 7, 16, 40):
            policy = Policy(micro_batches, schedule, recompute)
            for stage in range(stages):
                largest = largest_holdings(stage, stages, policy)
                every = holdings(stage, stages, policy)
                assert largest <= every
                for one in every:
                    assert any(all(a >= b for a, b in zip(other, one)) for other in largest)


@pytest.mark.parametrize(
    "schedule, recompute, passes",  # forward passes a micro-batch on each of 3 stages with 4 micro-batches
    [
        ("gpipe", "never", [1, 1, 1]),
        ("gpipe", "except_last", [1.75] * 3),
        ("1f1b", "except_last", [2, 2, 1]),
        ("1f1b", "always", [2, 2, 2]),
    ],
)
def test_what_is_computed_again(schedule, recompute, passes):
    assert [Policy(4, schedule, recompute).forward_passes(stage, 3) for stage in range(3)] == passes


def test_seconds_of_a_stage():
    costs = modelled(unet(1, 1, 4, 3, 2), SIZE)
    forward, backward = sum(costs.forward[3:7]), sum(costs.backward[3:7])
    for recompute, passes in (("never", 1), ("except_last", 1.75), ("always", 2)):
        found = stage_seconds(costs, Policy(4, recompute=recompute), 2)[:, 3, 7]
        assert found == pytest.approx(passes * forward + backward)


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_splits_are_beaten(name):
    assert len(ZOO[name].balance) == 6
    size = (1434, 1434)
    costs, tensors = costs_of(name, size, 1), tensors_of_stages(name, size, 1)
    splits = plan(name, costs, tensors, 6, Policy(2))["splits"]
    assert list(splits) == ["ours", "even", "torchgpipe", "paper"]
    assert (
        splits["paper"]["ratio"] < 0.9
        and splits["even"]["ratio"] < 0.95
        and splits["torchgpipe"]["ratio"] <= 1
    )


def test_command(capsys):
    code, out, _ = run(
        capsys,
        "plan",
        "--model",
        "tiny",
        "--tile",
        "33x47",
        "--stages",
        "3",
        "--micro-batches",
        "4",
        "--memory",
        "1MiB",
    )
    assert code == 0 and out.startswith(
        "tiny: costs modelled for v100; 4 micro-batches, gpipe, recompute never; at most 0.0009766 GiB a stage"
    )
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["ours", "even", "torchgpipe"]
    assert "  enc0_conv0  " in out and out.splitlines()[-3].endswith("yes")


def test_command_as_json(capsys):
    code, out, _ = run(
        capsys,
        "plan",
        "--model",
        "summit-small",
        "--stages",
        "6",
        "--schedule",
        "1f1b",
        "--recompute",
        "always",
        "--json",
    )
    found = json.loads(out)
    assert code == 0 and found["splits"]["paper"]["balance"] == [14, 24, 30, 22, 12, 7]
    for split in found["splits"].values():
        assert sum(stage["parameters"] for stage in split["stages"]) == 72_301_856
        assert split["slowest"] == max(stage["seconds"] for stage in split["stages"])


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--memory", "1GB"], "no split into 6 stages fits"),
        (["--memory", "lots"], "got 'lots' (DS104)"),
        (["--stages", "200"], "109 layers cannot be cut into 200 stages"),
        (["--device", "k80"], "unknown --device 'k80': choose v100, cpu"),
        (["--costs", "measured", "--device", "v100"], "leave it out"),
        (["--model", "resnet"], "unknown model 'resnet'"),
        (
            ["--micro-batches", "0"],
            "--micro-batches must be a whole number from 1 to 1000000, got 0",
        ),
    ],
)
def test_command_refuses(capsys, arguments, words):
    code, _, err = run(capsys, "plan", *arguments)
    assert code == 2 and words in err and "Traceback" not in err


def test_bytes_and_windows_as_people_write_them():
    assert [parse_bytes(text) for text in (None, "16GB", "15.5 GiB", "1000")] == [
        None,
        16e9,
        15.5 * 2**30,
        1000,
    ]
    assert (str(window_of((1434,))), str(window_of((5, 7)))) == ("1434x1434", "5x7")


def test_without_torchgpipe_its_split_is_left_out(monkeypatch):
    def missing(*_):
        raise ImportError("no torchgpipe")

    monkeypatch.setattr(stage_report, "torchgpipe_split", missing)
    costs = costs_of("summit-small", (64, 64), 1)
    assert "torchgpipe" not in stage_report.others(
        "summit-small", costs, 2, Policy(2, "gpipe", "never")
    )
