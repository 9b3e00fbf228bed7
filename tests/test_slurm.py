"""A real Slurm takes what `distseg submit` writes: jobs that are cut off queue again, go on, and end as if nothing had happened."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from private_slurm import PrivateSlurm, missing

import distseg
from distseg.config.settings import TrainConfig

LOG = os.environ.get(
    "DISTSEG_SLURM_LOG"
)  # the file for the story of a run that its limit cuts off, which takes some minutes: make slurm
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(300),
]

# A training that keeps to the contract, without the training: told to end it takes its time, the ranks not equally, and is to be continued.
STAND_IN = """#!/bin/bash
echo "start ${SLURM_RESTART_COUNT:-0} rank $SLURM_PROCID of $SLURM_STEP_NUM_TASKS, until $SLURM_JOB_END_TIME: $*"
[ -n "${CODE:-}" ] && exit "$CODE"
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && { echo "end rank $SLURM_PROCID"; exit 0; }
trap 'sleep $SLURM_PROCID; echo "checkpoint rank $SLURM_PROCID"; exit 75' TERM
echo "ready rank $SLURM_PROCID"
for i in {1..600}; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def slurm():
    with PrivateSlurm(cpus=4) as running:
        running.environment |= {
            "PYTHONPATH": str(Path(distseg.__file__).parents[1]),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        inherited = ("OMPI_COMM", "PMIX_", "PRTE_")
        running.environment = {
            k: v for k, v in running.environment.items() if not k.startswith(inherited)
        }
        yield running


def submit(slurm: PrivateSlurm, folder: Path, *arguments: str, **environment: str) -> str:
    """The number of the job that `distseg submit ... --submit` hands in from the folder."""
    command = [
        sys.executable,
        "-m",
        "distseg",
        "submit",
        *arguments,
        "--system",
        "slurm",
        "--gpus",
        "0",
        "--cores",
        "2",
        "--processes",
        "2",
        "--submit",
    ]
    done = subprocess.run(
        command,
        env=slurm.environment | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done
    return re.match(r"job (\d+): ", done.stdout)[1]


@pytest.fixture
def stand_in(tmp_path):
    """A folder with a config, and with a `python` that is no training."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/python"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    (tmp_path / "c.yaml").write_text(
        "mesh: {samples: 2}\ndata: {store: c.yaml}\ntrain: {output: runs/c}\n"
    )
    return tmp_path


def wait_for(done, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_jobs_of_an_array_are_told_to_end_queue_again_and_end(slurm, stand_in):
    path = f"{stand_in / 'bin'}:{slurm.environment['PATH']}"
    start = time.time()
    job = submit(
        slurm, stand_in, "c.yaml", "--time", "00:05:00", "--sweep", "train.seed=7,8", PATH=path
    )
    logs = [stand_in / f"c.{job}_{index}.log" for index in (0, 1)]
    wait_for(
        lambda: all(log.exists() and log.read_text().count("ready") == 2 for log in logs),
        "both trainings run",
    )
    slurm.run(
        "scancel", "--signal=TERM", f"{job}_1"
    )  # the last one, whose own number is that of the array
    slurm.until(f"{job}_1", "COMPLETED", 60, restarts=1)
    assert (
        slurm.state(f"{job}_0")["JobState"] == "RUNNING" and "checkpoint" not in logs[0].read_text()
    ), "the other one is left alone"
    slurm.run("scancel", "--signal=TERM", f"{job}_0")
    for index, log in enumerate(logs):
        ended = slurm.until(f"{job}_{index}", "COMPLETED", 60, restarts=1)
        lines = log.read_text().splitlines()

        def said(start):
            return sorted(line for line in lines if line.startswith(start))

        assert (ended["Restarts"], ended["ExitCode"]) == ("1", "0:0")
        assert said("checkpoint") == ["checkpoint rank 0", "checkpoint rank 1"], (
            "no rank was killed because the other one was faster"
        )
        assert said("end") == ["end rank 0", "end rank 1"]
        begun = said("start")
        assert [line.split(",")[0] for line in begun] == [
            f"start {turn} rank {rank} of 2" for turn in (0, 1) for rank in (0, 1)
        ]
        flags = f"-m distseg train c.yaml --train.seed {7 + index} --train.output runs/c/seed={7 + index} --train.resume true"
        assert all(line.endswith(flags) for line in begun)
        limits = [int(re.search(r"until (\d+)", line)[1]) - start for line in begun]
        assert all(290 < limit < 400 for limit in limits) and limits[2] > limits[0], (
            "each turn has a limit of its own"
        )


def test_another_exit_code_ends_the_job(slurm, stand_in):
    job = submit(
        slurm, stand_in, "c.yaml", CODE="3", PATH=f"{stand_in / 'bin'}:{slurm.environment['PATH']}"
    )
    ended = slurm.until(job, "FAILED|COMPLETED", 30)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "3:0", "0")


CONFIG = """\
model: {{depth: 2, num_convs: 1, base_channels: 8, norm: batch, dropout: 0.1}}
mesh: {{tiles: 1x2}}
data: {{store: store.h5, crop: 32x32, augment: [flip, turn], epoch_samples: {steps}}}
optim: {{lr: 3.0e-3, clip: 1.0}}
train: {{epochs: 3, checkpoint_minutes: null, loggers: [], output: {output}}}
run: {{threads: 1}}
"""


def curve(run: Path) -> list[dict]:
    """What the log says of each step, without the time it took."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in ("seconds", "time")}
        for row in rows
        if row["kind"] == "step"
    ]


def pace(slurm: PrivateSlurm, folder: Path) -> float:
    """Seconds that a step takes here and now."""
    (folder / "short.yaml").write_text(CONFIG.format(steps=40, output="runs/short"))
    slurm.until(submit(slurm, folder, "short.yaml"), "COMPLETED", 600)
    rows = [json.loads(line) for line in (folder / "runs/short/log.jsonl").read_text().splitlines()]
    return next(row["seconds"] / row["step"] for row in rows if row["kind"] == "end")


def steps_done(run: Path) -> int:
    return (
        (run / "log.jsonl").read_text().count('"kind": "step"')
        if (run / "log.jsonl").exists()
        else 0
    )


@pytest.mark.timeout(3600 if LOG else 900)
@pytest.mark.skipif(
    "job_minutes" not in TrainConfig.__dataclass_fields__,
    reason="this distseg does not write checkpoints inside epochs",
)
@pytest.mark.parametrize(
    "cut",
    [
        "signal",
        pytest.param(
            "limit", marks=pytest.mark.skipif(not LOG, reason="takes minutes: make slurm runs it")
        ),
    ],
)
def test_a_training_that_is_cut_off_queues_again_and_ends_as_if_nothing_had_happened(
    slurm, tmp_path, cut
):
    from test_train import write_store

    write_store(tmp_path / "store.h5")
    limit = ["--time", "00:10:00"] if cut == "signal" else ["--time", "00:03:00", "--warn", "30"]
    steps = (
        60 if cut == "signal" else round(60 / pace(slurm, tmp_path))
    )  # of each of 3 epochs: longer than the limit, on a fast and on a busy machine
    for name in ("whole", "cut"):
        (tmp_path / f"{name}.yaml").write_text(CONFIG.format(steps=steps, output=f"runs/{name}"))
    whole = submit(slurm, tmp_path, "whole.yaml", "--time", "01:00:00")
    slurm.until(whole, "COMPLETED", 1800)
    seen: list[tuple[str, str]] = []
    job = submit(slurm, tmp_path, "cut.yaml", *limit)
    if cut == "signal":
        wait_for(lambda: steps_done(tmp_path / "runs/cut") > 20, "the training works", 120)
        slurm.run("scancel", "--signal=TERM", job)
    ended = slurm.until(job, "COMPLETED", 1800, restarts=1, watch=lambda now: note(seen, now))
    assert ended["ExitCode"] == "0:0"
    left, right = curve(tmp_path / "runs/whole"), curve(tmp_path / "runs/cut")
    assert len(left) == 3 * steps and left == right
    if cut == "limit":
        tell(Path(LOG), tmp_path, job, seen, slurm)


def note(seen: list[tuple[str, str]], now: dict) -> None:
    """Add a job's state, if it has changed."""
    state = f"{now['JobState'].lower()}{' (' + now['Reason'] + ')' if now['JobState'] == 'PENDING' else ''}, {now['Restarts']} restarts"
    if not seen or seen[-1][1] != state:
        seen.append((time.strftime("%H:%M:%S"), state))


def tell(
    path: Path, folder: Path, job: str, seen: list[tuple[str, str]], slurm: PrivateSlurm
) -> None:
    """Write what happened as a page of the documentation."""
    rows, whole = curve(folder / "runs/cut"), curve(folder / "runs/whole")
    log = "\n".join(
        line
        for line in (folder / f"cut.{job}.log").read_text().splitlines()
        if "find-available" not in line
    )
    cuts = [int(step) for step in re.findall(r"ends after step (\d+)", log)]
    pick = sorted({1, *cuts, *(step + 1 for step in cuts), len(rows)})
    table = "\n".join(
        f"| {step} | {rows[step - 1]['loss']!r} | {whole[step - 1]['loss']!r} |" for step in pick
    )
    path.write_text(STORY.format(
        version=slurm.run("sinfo", "--version").strip(), config=(folder / "cut.yaml").read_text().strip(), script=(folder / "cut.sbatch").read_text().strip(),
        states="\n".join(f"{clock}  {state}" for clock, state in seen), log=log.replace(str(folder), "..."), steps=len(rows), table=table,
    ))  # fmt: skip


STORY = """\
# A job that Slurm cuts off

A log of a true run, written by `make slurm` (`jobs/try_slurm.sh`): {version}, one node, two ranks on two cores. A training that takes longer than its job's limit of three minutes
is told so by Slurm, writes a checkpoint, ends with code 75, queues again and goes on, until all its epochs are done. A second job with the same config and an hour's limit is not cut off.

**The same loss curve**: all {steps} steps have the same loss, rate and norm of the gradient in both logs, bit for bit. The first, those on both sides of each cut, the last:

| step | loss, cut off | loss, in one go |
|---:|---:|---:|
{table}

## The job's states

```
{states}
```

## Its log

```
{log}
```

## Its config

```yaml
{config}
```

## Its script

Made and handed in by `distseg submit cut.yaml --system slurm --gpus 0 --cores 2 --processes 2 --time 00:03:00 --warn 30 --submit`.

```bash
{script}
```
"""
