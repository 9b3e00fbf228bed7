"""The engine's step on a CUDA device that computes nothing: no mixed devices, nobody early, and how often the host waits for the GPU.

The waits of a step are held exactly: whoever saves some writes the lower number here, and nobody adds any unseen.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fakecuda import library

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parent


def case(
    waits,
    *,
    tile=(0, 0),
    image="64x64",
    precision="fp32",
    last=False,
    direct=False,
    loss="cross_entropy",
    norm="instance",
    reach=None,
    predict=None,
    **sections,
) -> dict:
    """A step; ``waits`` of each stage's rank.

    Args:
        direct: MPI takes pointers to a GPU's memory.
        reach: halo and stride of a network for which they take long to find.
        predict: in tiles of this size, once the step is done; its waits are those of the prediction.
    """
    network = dict(
        depth=1,
        num_convs=1,
        base_channels=4,
        in_channels=2,
        out_channels=3,
        norm=norm,
        dropout=0.1,
        groups=2 if norm == "group" else None,
    )
    config = {
        "model": {**network, **sections.pop("model", {})},
        "mesh": {"reducer": "mpi", **sections.pop("mesh", {})},
        **sections,
    }
    config["loss"] = {"name": loss, **sections.pop("loss_fields", {})}
    config.pop("loss_fields", None)
    more = {"predict": predict} if predict else {}
    return {
        **more,
        "waits": waits,
        "config": config,
        "image": image,
        "tile": tile,
        "precision": precision,
        "channels_last": last,
        "direct": direct,
        "reach": reach,
    }


SUMMIT = dict(
    model=dict(
        name="summit-small",
        norm=None,
        depth=None,
        num_convs=None,
        base_channels=None,
        in_channels=None,
        out_channels=None,
        dropout=None,
        groups=None,
    )
)
PAPER = dict(loss="binary_cross_entropy", precision="bf16", last=True, reach=(190, 32), **SUMMIT)
MIDDLE = dict(tile=(1, 1), image="96x96")  # of 3x3 tiles
GRID = dict(tiles="3x3")
NCCL = dict(tiles="3x3", reducer="nccl")
WEIGHTS = dict(class_weights=[1.0, 2.0, 3.0])

CASES = {
    # one tile: the gradient's norm and the table of the loss
    "instance": case([2]),
    "instance, nothing folded into it": case(
        [2], precision="bf16", last=True, model=dict(dropout=0.0), loss="cross_entropy + 0.5*dice"
    ),
    "batch": case([2], norm="batch", loss="binary_cross_entropy", precision="bf16", last=True),
    "batch, frozen": case([2], norm="batch", loss="dice", spatial=dict(frozen_norm=True)),
    "group": case([2], norm="group", loss="focal", loss_fields=WEIGHTS, precision="fp64"),
    "group, nothing folded into it": case(
        [2], norm="group", model=dict(dropout=0.0), precision="bf16"
    ),
    "no norm": case(
        [2], norm="none", loss="dice", precision="bf16", last=True, optim=dict(clip=1.0, name="sgd")
    ),
    "micro-batches": case([3], norm="batch", train=dict(accumulate=3), loss_fields=WEIGHTS),
    "the paper's network": case([2], image="256x256", **PAPER),
    # windows
    "middle window": case([9], norm="batch", loss="focal", last=True, mesh=GRID, **MIDDLE),
    "middle window, statistics of all groups": case(
        [9],
        norm="batch",
        loss="dice",
        mesh=dict(samples=2, tiles="3x3"),
        spatial=dict(norm_scope="step"),
        **MIDDLE,
    ),
    "middle window, statistics of its own": case(
        [3],
        norm="instance",
        mesh=GRID,
        approximate=dict(norms="window"),
        precision="bf16",
        last=True,
        **MIDDLE,
    ),
    "several windows": case(
        [9],
        norm="group",
        mesh=GRID,
        spatial=dict(tiles_per_rank="2x2"),
        tile=(1, 1),
        image="128x128",
        precision="fp64",
    ),
    "gradients in half": case(
        [9], mesh=dict(tiles="3x3"), approximate=dict(gradients="fp16"), **MIDDLE
    ),
    # borders
    "borders": case(
        [14], mesh=GRID, spatial=dict(exchange_every="1"), precision="bf16", last=True, **MIDDLE
    ),
    "borders, straight": case(
        [14],
        norm="group",
        loss="dice",
        mesh=GRID,
        spatial=dict(exchange_every="1"),
        direct=True,
        **MIDDLE,
    ),
    "borders of a level": case(
        [14],
        norm="batch",
        loss="focal",
        mesh=GRID,
        spatial=dict(exchange_every="level"),
        precision="fp64",
        **MIDDLE,
    ),
    "the paper's network, borders": case(
        [98], mesh=GRID, spatial=dict(exchange_every="1"), tile=(1, 1), image="768x768", **PAPER
    ),
    # halos and statistics by NCCL: no wait for a layer
    "halos by NCCL": case(
        [2],
        mesh=NCCL,
        spatial=dict(exchange_every="1", messages="nccl"),
        precision="bf16",
        last=True,
        **MIDDLE,
    ),
    "halos by NCCL, statistics of all groups": case(
        [2],
        norm="batch",
        loss="dice",
        mesh=dict(samples=2, **NCCL),
        spatial=dict(exchange_every="level", norm_scope="step", messages="nccl"),
        precision="fp64",
        **MIDDLE,
    ),
    "windows, statistics by NCCL": case(
        [2], norm="group", mesh=NCCL, spatial=dict(messages="nccl"), **MIDDLE
    ),
    "the paper's network, halos by NCCL": case(
        [2],
        mesh=NCCL,
        spatial=dict(exchange_every="1", messages="nccl"),
        tile=(1, 1),
        image="768x768",
        **PAPER,
    ),
    "stages and tiles, halos by NCCL": case(
        [3, 4],
        mesh=dict(stages=2, **NCCL),
        spatial=dict(exchange_every="1", messages="nccl"),
        **MIDDLE,
    ),
    # in time
    "streamed tiles, computed again": case(
        [3], norm="none", streaming=dict(tiles="2x2"), precision="bf16", last=True
    ),
    "streamed tiles, stored": case(
        [31], streaming=dict(tiles="2x2", scratch="memory"), loss="dice"
    ),
    # prediction: each of four tiles is copied to the host
    "prediction": case(
        [4], norm="batch", image="64x64", predict="32x32", precision="bf16", last=True
    ),
    # stages
    "stages": case(
        [7, 9], mesh=dict(stages=2), train=dict(accumulate=3), precision="bf16", last=True
    ),
    "stages, straight": case(
        [4, 7, 6],
        norm="batch",
        mesh=dict(stages=3),
        train=dict(accumulate=3),
        pipeline=dict(schedule="1f1b", recompute="always"),
        direct=True,
    ),
    "stages in a V": case(
        [7, 5],
        norm="none",
        mesh=dict(stages=2),
        pipeline=dict(placement="v-shaped"),
        train=dict(accumulate=2),
    ),
    "stages and tiles": case(
        [9, 11], mesh=dict(stages=2, tiles="3x3"), spatial=dict(exchange_every="1"), **MIDDLE
    ),
}

BORDERS = dict(mesh=GRID, spatial=dict(exchange_every="1"), **MIDDLE)
MORE = "one more number read"
DEVICES, RACE = "found at least two devices, cuda:0 and cpu", "Race: "

PLANTED = {  # fault: a step that has it, and what tells it
    "a tensor of the host in the loss": (case([], norm="none"), DEVICES),
    "what the CPU's kernel alone takes": (
        case([], **BORDERS),
        "save_mean and save_invstd should always be defined",
    ),
    "sent before it is computed": (
        case([], **BORDERS),
        f"{RACE}MPI reads memory that something queued has yet to write",
    ),
    "received where it is still read": (
        case([], norm="none", model=dict(num_convs=3), **BORDERS),
        f"{RACE}MPI writes memory that something queued has yet to touch",
    ),
    "received into fresh memory": (
        case([], direct=True, **BORDERS),
        f"{RACE}MPI writes memory that something queued has yet to touch",
    ),
    "looked at before it is copied": (
        case([], mesh=dict(samples=2)),
        f"{RACE}the host reads memory that something queued has yet to write",
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What a process of its own found in all cases."""
    try:
        device = library.build(tmp_path_factory.mktemp("device"))
    except (OSError, subprocess.SubprocessError) as e:
        pytest.skip(f"no compiler for PyTorch's headers: {e}")
    return play(
        device,
        {
            **CASES,
            **{name: {**step, "plant": name} for name, (step, _) in PLANTED.items()},
            MORE: {**CASES["instance"], "plant": MORE},
        },
    )


def play(device: Path, cases: dict) -> dict:
    path = os.pathsep.join(
        filter(None, (str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")))
    )
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "fakecuda", str(device)],
        env=environment,
        input=json.dumps(cases),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_a_step(found, name):
    outcome = found[name]
    assert outcome["error"] is None, outcome["error"]
    lines = "\n".join(f"{sum(stage.values())}: {stage}" for stage in outcome["waits"])
    assert [sum(stage.values()) for stage in outcome["waits"]] == CASES[name]["waits"], lines


@pytest.mark.parametrize("name", PLANTED)
def test_faults_are_found(found, name):
    assert re.search(PLANTED[name][1], found[name]["error"] or "none"), found[name]


def test_one_more_wait_is_counted(found):
    before, after = (sum(found[name]["waits"][0].values()) for name in ("instance", MORE))
    assert after == before + 1
