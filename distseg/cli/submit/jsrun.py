"""Check the rules of jsrun's resource sets (LSF with JSM, as on Summit) before a job is queued.

jsrun divides nodes into resource sets, each with its own cores and GPUs, and starts tasks in the
sets::

    jsrun -n 4 -r 2 -a 3 -c 21 -g 3
    node 0                                   node 1
    [set 0: tasks 0-2, 21 cores, 3 GPUs]     [set 2: tasks 6-8, ...]
    [set 1: tasks 3-5, 21 cores, 3 GPUs]     [set 3: tasks 9-11, ...]

The rules are those of the Summit user guide of OLCF (docs.olcf.ornl.gov): a set never spans nodes;
the sets of a node share neither cores nor GPUs.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

_NUMBERS = {
    "n": "nrs",
    "a": "tasks_per_rs",
    "c": "cpu_per_rs",
    "g": "gpu_per_rs",
    "r": "rs_per_host",
    "p": "np",
}
_WORDS = {"b": "bind", "l": "latency_priority", "d": "launch_distribution"}
_FLAGS = {**_NUMBERS, **_WORDS}
_TAKE_A_VALUE = ("E", "M", "h", "k", "o", "e", "X")  # other short options that take a value
_ALONE = ("--immediate", "--verbose", "-v", "-i")
_FORMS = {
    "bind": r"none|rs|(proportional-)?packed(:smt)?(:\d+)?",
    "latency_priority": r"((gpu|cpu|mem)-(gpu|cpu|mem),?)+",
    "launch_distribution": r"packed|cyclic|plane:\d+",
}
_HINTS = {
    "bind": "none, rs or packed:N",
    "latency_priority": "gpu-cpu, cpu-cpu or a list of such",
    "launch_distribution": "packed, cyclic or plane:N",
}


@dataclass(frozen=True)
class ResourceSets:
    """Options of a jsrun command that concern resource sets, with jsrun's defaults.

    The attributes have the names of jsrun's long options. If ``nrs`` or ``rs_per_host`` is None,
    jsrun makes as many sets as fit. If both ``tasks_per_rs`` and ``np`` are None, a set has one
    task.
    """

    nrs: int | str | None = None
    tasks_per_rs: int | None = None
    cpu_per_rs: int | str = 1
    gpu_per_rs: int | str = 0
    rs_per_host: int | None = None
    np: int | None = None
    bind: str = "packed:1"
    latency_priority: str = "gpu-cpu,cpu-mem,cpu-cpu"
    launch_distribution: str = "packed"


def parse(line: str) -> ResourceSets:
    """Return the resource sets that a command ``jsrun OPTIONS PROGRAM ...`` asks for.

    An option is written ``-n12``, ``-n 12``, ``--nrs 12`` or ``--nrs=12``.

    Raises:
        ValueError: an option is unknown, or has a wrong value.
    """
    words = iter(shlex.split(line.replace("\\\n", " ")))
    if (first := next(words, "")).rpartition("/")[2] != "jsrun":
        raise ValueError(f"a jsrun line starts with jsrun, got {first!r}")
    asked = {}
    for word in words:
        if not word.startswith("-"):
            break  # the program
        name, value = _option(word, words)
        if name is not None:
            asked[name] = _value(name, value)
    return ResourceSets(**asked)


def _option(word: str, words) -> tuple[str | None, str | None]:
    """Return (name, value) of an option; (None, value) if it does not concern resource sets.

    If the option is written without ``=``, its value is taken from ``words``.

    Args:
        word: the word with the option.
        words: iterator over the words after it.

    Raises:
        ValueError: the short option ``word`` is unknown, so it may or may not take a value.
    """
    if word in _ALONE:
        return None, None
    if word.startswith("--"):
        name, given, value = word[2:].partition("=")
        value = value if given else next(words, None)
        return (name, value) if name in _FLAGS.values() else (None, value)
    letter, value = word[1:2], word[2:]
    if letter not in _FLAGS and letter not in _TAKE_A_VALUE:
        raise ValueError(
            f"jsrun option {word!r} is unknown to distseg: write its long form, --option=value"
        )
    value = value or next(words, None)
    return _FLAGS.get(letter), value


def _value(name: str, text: str | None) -> int | str:
    """Return the value of an option: an int, or a text if the option takes a text."""
    if text is None:
        raise ValueError(f"jsrun --{name} has no value: give a value, or leave the option out")
    if name in _FORMS:
        if not re.fullmatch(_FORMS[name], text.lower()):
            raise ValueError(f"jsrun --{name} is {text!r}: it takes {_HINTS[name]}")
        return text.lower()
    if text in ("ALL_CPUS", "ALL_GPUS", "ALL_HOSTS"):
        return text
    least = 0 if name == "gpu_per_rs" else 1
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"jsrun --{name} is {text!r}: it takes a whole number from {least} on")
    return int(text)


def check(line: str, nodes: int, cores: int, gpus: int, tasks: int) -> ResourceSets:
    """Check a jsrun command against the nodes of a job and the size of its mesh.

    Return the resource sets that the command asks for.

    Args:
        line: the jsrun command.
        nodes: the number of nodes.
        cores: cores on each node.
        gpus: GPUs on each node.
        tasks: the number of processes that the mesh needs.

    Raises:
        ValueError: the command breaks a rule. The message names the first such rule, both numbers
            and how to fix it.
    """
    asked = parse(line)
    cpu = cores if asked.cpu_per_rs == "ALL_CPUS" else asked.cpu_per_rs
    gpu = gpus if asked.gpu_per_rs == "ALL_GPUS" else asked.gpu_per_rs
    _fits_a_node(asked, cpu, gpu, cores, gpus)
    per_node = asked.rs_per_host or min(cores // cpu, gpus // gpu if gpu else cores)
    sets = nodes if asked.nrs == "ALL_HOSTS" else asked.nrs or nodes * per_node
    if sets > nodes * per_node:
        why = (
            f"{asked.rs_per_host} a node (--rs_per_host)"
            if asked.rs_per_host
            else f"{per_node} a node, which is what fits"
        )
        raise ValueError(
            f"jsrun asks for {sets} resource sets (--nrs), but {_count(nodes, 'node')} hold "
            f"{nodes * per_node}, {why}: "
            f"set --nrs to {nodes * per_node} at most, or take {-(-sets // per_node)} nodes"
        )
    started = _started(asked, sets)
    if started != tasks:
        per = asked.tasks_per_rs
        repair = (
            f"set --nrs to {tasks // per}"
            if per and tasks % per == 0
            else f"set --nrs and --tasks_per_rs to a product of {tasks}"
        )
        raise ValueError(
            f"jsrun starts {started} tasks ({sets} resource sets of {_share(started, sets)}), "
            "but the mesh needs"
            f" {tasks}: {repair}, or change the mesh"
        )
    _binds(asked, started, sets, cpu)
    return asked


def _fits_a_node(asked: ResourceSets, cpu: int, gpu: int, cores: int, gpus: int) -> None:
    """Refuse resource sets that need more cores or GPUs than a node has.

    Args:
        asked: the options of the jsrun command.
        cpu, gpu: the cores and the GPUs of a resource set.
        cores, gpus: the cores and the GPUs of a node.
    """
    per_host = asked.rs_per_host or 1
    for what, flag, each, have in (
        ("cores", "cpu_per_rs", cpu, cores),
        ("GPUs", "gpu_per_rs", gpu, gpus),
    ):
        if each > have:
            raise ValueError(
                f"jsrun asks for resource sets of {each} {what} (--{flag}), but a node has "
                f"{have} and a resource set"
                f" never spans nodes: set --{flag} to {have} at most"
            )
        if per_host * each > have:
            raise ValueError(
                f"jsrun asks for {per_host} resource sets a node (--rs_per_host) of {each} "
                f"{what} (--{flag}), which is"
                f" {per_host * each}, but a node has {have}: set --rs_per_host to {have // each} "
                f"at most, or --{flag}"
                f" to {have // per_host}"
            )


def _started(asked: ResourceSets, sets: int) -> int:
    """Return the number of tasks that the command starts in ``sets`` resource sets."""
    if asked.np is None:
        return sets * (asked.tasks_per_rs or 1)
    if asked.tasks_per_rs is not None and asked.np != sets * asked.tasks_per_rs:
        raise ValueError(
            f"jsrun is given {asked.np} tasks (--np), but {sets} resource sets of "
            f"{asked.tasks_per_rs} (--tasks_per_rs)"
            f" start {sets * asked.tasks_per_rs}: leave one of them out"
        )
    return asked.np


def _binds(asked: ResourceSets, started: int, sets: int, cpu: int) -> None:
    """Refuse ``--bind`` if the tasks of a resource set need more cores than its ``cpu`` cores."""
    found = re.fullmatch(r".*packed:(?:smt:)?(\d+)", asked.bind)
    most = -(-started // sets)  # tasks of the resource set with the most tasks
    if found and ":smt" not in asked.bind and int(found[1]) * most > cpu:
        raise ValueError(
            f"jsrun binds {most} tasks of a resource set to {found[1]} cores each (--bind "
            f"{asked.bind}), together"
            f" {int(found[1]) * most}, but a resource set has {cpu} (--cpu_per_rs): set --bind to"
            f" packed:{max(1, cpu // most)}, or --cpu_per_rs to {int(found[1]) * most}"
        )


def _share(started: int, sets: int) -> str:
    return f"{started // sets}" if started % sets == 0 else f"up to {-(-started // sets)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
