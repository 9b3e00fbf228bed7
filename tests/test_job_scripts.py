"""jobs/train.sbatch and jobs/train.jsrun, with a stand-in for the cluster's launcher that prints what it is asked to run."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"train.sbatch": ("srun", 8, "2"), "train.jsrun": ("jsrun", 12, "3")}


def run(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    launcher, processes, _ = SCRIPTS[script]
    stand_in = folder / launcher
    stand_in.write_text('#!/bin/sh\necho "OMP=$OMP_NUM_THREADS $*"\n')
    stand_in.chmod(0o755)
    slurm = {"SLURM_NTASKS": str(processes), "SLURM_CPUS_PER_TASK": "7"}
    env = {"PATH": f"{folder}:{os.environ['PATH']}"} | slurm | environment
    return subprocess.run(["bash", f"jobs/{script}"], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_command(script, tmp_path):
    done = run(script, tmp_path)
    samples = SCRIPTS[script][2]
    command = f"python -m distseg train jobs/demo.yaml --mesh.samples {samples} --mesh.tiles 2x2 --mesh.stages 1 --train.resume false"
    assert done.returncode == 0 and done.stdout.strip().endswith(command) and done.stdout.startswith("OMP=7 ")


@pytest.mark.parametrize("script", SCRIPTS)
def test_config_mesh_and_resume_come_from_the_environment(script, tmp_path):
    half = str(SCRIPTS[script][1] // 2)
    done = run(script, tmp_path, CONFIG="mine.yaml", SAMPLES="1", TILES=f"1x{half}", STAGES="2", RESUME="true")
    assert done.stdout.strip().endswith(
        f"train mine.yaml --mesh.samples 1 --mesh.tiles 1x{half} --mesh.stages 2 --train.resume true"
    ), done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_mesh_of_another_size_is_refused_before_the_launch(script, tmp_path):
    done = run(script, tmp_path, SAMPLES="5")
    assert done.returncode == 1 and done.stdout == ""
    assert f"mesh 5 x 2x2 x 1 is 20 processes, but the job has {SCRIPTS[script][1]}" in done.stderr
