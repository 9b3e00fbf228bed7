"""The number of CPU threads of a rank, and the reason for it.

A rank with more threads than it has cores to itself is slower than one with a single thread: the
threads of all ranks wait for each other in busy loops. So a number that the user or the batch
script sets is kept. Without such a number, a node's cores are shared among its ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # the first one that is set is used


@dataclass(frozen=True)
class Threads:
    """Number of CPU threads of a rank, and the reason for this number.

    Attributes:
        count: the number of threads.
        why: the reason, as the words of a log line.
    """

    count: int
    why: str

    def __str__(self) -> str:
        return f"{self.count} CPU thread{'s' if self.count > 1 else ''} a rank ({self.why})"


@dataclass(frozen=True)
class CpuLimits:
    """Cores that a process may run on, and the CPU quotas of its control groups.

    Attributes:
        cores: numbers of the cores in the process's affinity mask.
        quotas: the CPU quota of each control group, in cores. The processes of a group share it.
    """

    cores: frozenset[int]
    quotas: Mapping[str, float]


def choose_threads(
    setting: int | None, environment: Mapping[str, str], node: Sequence[CpuLimits], me: int
) -> Threads:
    """Return the number of CPU threads of process ``me`` of a node.

    ``run.threads`` comes first, then OMP_NUM_THREADS, then MKL_NUM_THREADS. If none is set, the
    process gets a fair share of the node's cores, at most what its CPU quotas allow.

    Args:
        setting: the value of ``run.threads``, or None.
        environment: the environment variables.
        node: the limits of all processes of the node, by local rank.
        me: the local rank of the process.
    """
    if setting is not None:
        return Threads(setting, "run.threads")
    for name in VARIABLES:
        if (count := _count(environment.get(name))) is not None:
            return Threads(count, name)
    cores, quota = fair_cores([limits.cores for limits in node], me), fair_quota(node, me)
    count = max(1, int(min(cores, quota) + 1e-9))
    if quota < cores:
        return Threads(
            count, f"the control group allows {quota:.3g} of {len(node[me].cores)} cores"
        )
    shared = f"{len(node[me].cores)} core{'s' if len(node[me].cores) > 1 else ''}"
    ranks = sum(bool(limits.cores & node[me].cores) for limits in node)
    return Threads(count, f"{shared} shared by {ranks} ranks" if ranks > 1 else shared)


def fair_cores(cores: Sequence[frozenset[int]], me: int) -> float:
    """Return the number of cores of process ``me`` if processes of a node share each core evenly.

    Args:
        cores: for each process of the node, by local rank, the cores that it may run on.
        me: the local rank of the process.
    """
    return sum(1 / sum(core in allowed for allowed in cores) for core in cores[me])


def fair_quota(node: Sequence[CpuLimits], me: int) -> float:
    """Return the number of cores that CPU quotas allow process ``me``; infinity without quotas.

    Each quota is shared evenly among the processes of its control group.

    Args:
        node: the limits of all processes of the node, by local rank.
        me: the local rank of the process.
    """
    shares = [
        quota / sum(group in limits.quotas for limits in node)
        for group, quota in node[me].quotas.items()
    ]
    return min(shares, default=float("inf"))


def _count(text: str | None) -> int | None:
    """Return the first number of a text such as "4,2", or None if it is not a positive number.

    The environment variable OMP_NUM_THREADS may have several numbers, one for each level of nested
    parallel regions.
    """
    first = (text or "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def own_limits() -> CpuLimits:
    """Return the cores and CPU quotas of this process."""
    cores = frozenset(os.sched_getaffinity(0))
    text, namespace = _read("/proc/self/cgroup"), _namespace()
    return CpuLimits(
        cores, {f"{namespace}{k}": v for k, v in cpu_quotas(text or "", _read).items()}
    )


def cpu_quotas(cgroups: str, read: Callable[[str], str | None]) -> dict[str, float]:
    """Return the CPU quotas of a process's control groups and of the groups that enclose them.

    The key of a quota is the group's folder, the value is the quota in cores.

    Args:
        cgroups: the text of /proc/self/cgroup (versions 1 and 2).
        read: function that returns the text of a file, or None if there is no such file.
    """
    found = {}
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            homes, quota = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"), _quota_2
        elif "cpu" in controllers.split(","):
            homes, quota = (f"/sys/fs/cgroup/{controllers}", "/sys/fs/cgroup/cpu"), _quota_1
        else:
            continue
        for home in homes:
            for folder in (home, *_below(home, path)):
                if (cores := quota(folder, read)) is not None:
                    found[folder] = cores
    return found


def _below(home: str, path: str) -> list[str]:
    """Return the folders of a control group and of the groups that enclose it, outermost first.

    Args:
        home: the folder where the control groups are mounted, such as /sys/fs/cgroup.
        path: the path of the group: ``/a/b`` gives ``home/a`` and ``home/a/b``.
    """
    parts = [part for part in path.split("/") if part]
    return ["/".join([home, *parts[: depth + 1]]) for depth in range(len(parts))]


def _quota_2(folder: str, read: Callable[[str], str | None]) -> float | None:
    """Return the quota of a control group of version 2 in cores; None without a quota.

    The group's file holds quota and period in microseconds, as "150000 100000" or "max 100000".

    Args:
        folder: the folder of the control group.
        read: function that returns the text of a file, or None if there is no such file.
    """
    quota, *period = (read(f"{folder}/cpu.max") or "max").split()
    return int(quota) / int(period[0] if period else 100000) if quota.isdecimal() else None


def _quota_1(folder: str, read: Callable[[str], str | None]) -> float | None:
    """Return the quota of a control group of version 1 in cores; None without a quota.

    Args:
        folder: the folder of the control group.
        read: function that returns the text of a file, or None if there is no such file.
    """
    quota, period = (read(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota is None or period is None or int(quota) <= 0 or int(period) <= 0:
        return None
    return int(quota) / int(period)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def _namespace() -> str:
    """Return a text that identifies this process's control-group namespace.

    Two containers on a node may have control groups of the same name. The namespace tells them
    apart.
    """
    try:
        return os.readlink("/proc/self/ns/cgroup")
    except OSError:
        return ""
