"""The number of CPU threads: settings and variables are kept, else cores and quotas are shared."""

import os
import subprocess
import sys

import pytest

from distseg.comm.threads import CpuLimits, choose_threads, cpu_quotas


def node(*cores: str, quotas: dict = None) -> list[CpuLimits]:
    if quotas is None:
        quotas = {}
    return [CpuLimits(frozenset(each), quotas) for each in cores]


def chosen(limits, me=0, setting=None, **environment) -> str:
    found = choose_threads(setting, environment, limits, me)
    return f"{found.count} {found.why}"


@pytest.mark.parametrize(
    "cores, threads",
    [
        (["0123", "0123"], [2, 2]),
        (["0123", "0123", "0123"], [1, 1, 1]),
        (["01", "23"], [2, 2]),
        (["0123"], [4]),
        (["0", "0", "0"], [1, 1, 1]),
        (["0123", "01"], [3, 1]),
    ],
)
def test_each_core_is_shared_evenly(cores, threads):
    found = [choose_threads(None, {}, node(*cores), me).count for me in range(len(cores))]
    assert found == threads


def test_what_the_user_sets_comes_first():
    limits, both = node("0123", "0123"), {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "4"}
    assert chosen(limits, setting=5, **both) == "5 run.threads"
    assert chosen(limits, **both) == "3 OMP_NUM_THREADS"
    assert chosen(limits, OMP_NUM_THREADS="8,2,1") == "8 OMP_NUM_THREADS"
    assert chosen(limits, MKL_NUM_THREADS="4") == "4 MKL_NUM_THREADS"
    assert (
        chosen(limits, OMP_NUM_THREADS="no", MKL_NUM_THREADS="0") == "2 4 cores shared by 2 ranks"
    )
    assert chosen(node("0")) == "1 1 core"


def test_a_quota_is_shared_by_the_ranks_of_its_control_group():
    limits = node("01234567", "01234567", quotas={"/job": 5.0})
    assert chosen(limits) == "2 the control group allows 2.5 of 8 cores"
    apart = [CpuLimits(frozenset("0123"), {group: 1.5}) for group in ("/a", "/b")]
    assert [chosen(apart, me)[0] for me in (0, 1)] == ["1", "1"]
    assert chosen(node("01", quotas={"/wide": 64.0})) == "2 2 cores"


@pytest.mark.parametrize(
    "cgroups, files, found",
    [
        ("0::/a/b", {"/sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, {"/sys/fs/cgroup/a": 1.5}),
        ("0::/a", {"/sys/fs/cgroup/a/cpu.max": "max 100000\n"}, {}),
        ("0::/", {"/sys/fs/cgroup/cpu.max": "200000 100000"}, {"/sys/fs/cgroup": 2.0}),
        (
            "4:cpu,cpuacct:/job\n3:memory:/job",
            {
                "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n",
                "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            {"/sys/fs/cgroup/cpu,cpuacct/job": 3.0},
        ),
    ],
)
def test_quotas_of_both_versions_are_read(cgroups, files, found):
    assert cpu_quotas(cgroups, files.get) == found


def test_a_command_keeps_to_the_variable():
    source = (
        "import torch; from distseg.comm.launch import set_up, world; "
        "print(set_up(world(), 'cpu').threads, torch.get_num_threads())"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | {"OMP_NUM_THREADS": "3"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "3 CPU threads a rank (OMP_NUM_THREADS) 3\n", done
