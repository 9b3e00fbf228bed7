"""Describe a machine by the numbers that the time and the memory of a step depend on.

A profile is a YAML file of these numbers. Each number has its unit, its source, and a kind that
says how reliable it is: ``measured``, ``data sheet`` or ``guess``. The folder ``profiles`` has
profiles of some machines. ``distseg plan --save FILE`` writes a profile of the current machine.
The entries ``arithmetic``, ``traffic`` and ``link`` may have a table besides their number, as
``distseg calibrate`` measures them: rates of operations by kind, number type and shape, or seconds
of messages by size (:mod:`distseg.planning.rates`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from distseg.config.spelling import did_you_mean
from distseg.planning.rates import ARITHMETIC, TIMINGS, TRAFFIC, Curve, Rate, Rates, Timing
from distseg.planning.rates import PRECISIONS as RATED
from distseg.planning.roofline import Device

PROFILES = Path(__file__).parent / "profiles"
KINDS = ("measured", "data sheet", "guess")
PRECISIONS = ("fp64", "fp32", "bf16")


@dataclass(frozen=True)
class Machine:
    """A cluster of equal nodes, as one rank sees it.

    Attributes:
        name: the name of the machine.
        arithmetic: FLOP/s of convolutions.
        traffic: bytes/s between the device and its memory, reading and writing together.
        call: the shortest time in seconds that a layer takes, forward or backward, however small it
            is.
        latency: seconds until a message arrives, however small it is.
        link: bytes/s of messages between two ranks of a node, in one direction.
        network: bytes/s of messages of a node to other nodes, in one direction.
        memory: bytes of memory that a rank has.
        base: bytes that a process takes besides its tensors, for libraries, workspaces and
            communicators.
        ranks: number of ranks of a node.
        spread: bytes of memory that a process takes for each byte of activations. It is above 1,
            because kernels need scratch memory and freed blocks leave gaps.
        exchange: seconds that a rank computes for a halo exchange or for the shared statistics of a
            norm, forward or backward, however small the tensors. They are besides the messages.
        sharing: bytes/s that halo exchanges and shared statistics read and write, below ``traffic``
            because they read feature maps that are in no cache; 0 for ``traffic``.
        forward: factor by which forward passes take longer than ``arithmetic`` and ``traffic`` say.
            It depends on the network: poolings, for instance, are slow forward only.
        precision: the number type of ``arithmetic``, and of training with ``train.precision`` auto.
        rates: measured rates of operations; empty if there is only ``arithmetic``.
        timings: measured seconds of messages in a node; empty if there are only ``latency`` and
            ``link``.
        kinds: for each number by name, how it is known: one of ``KINDS``.
        sources: for each number by name, where it is from.
    """

    name: str
    arithmetic: float
    traffic: float
    call: float
    latency: float
    link: float
    network: float
    memory: float
    base: float
    ranks: int
    spread: float = 1.0
    exchange: float = 0.0
    sharing: float = 0.0
    forward: float = 1.0
    precision: str = "fp32"
    rates: Rates = Rates()
    timings: tuple[Timing, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> Device:
        """Throughput of one rank's device."""
        return Device(self.name, self.arithmetic, self.traffic, self.rates, self.forward)

    @property
    def sharing_rate(self) -> float:
        """Bytes/s of halo exchanges and shared statistics."""
        return self.sharing or self.traffic

    @cached_property
    def _curves(self) -> dict[tuple[str, int], Curve]:
        """Measured seconds as a function of size, for each (kind of message, number of ranks)."""
        points: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for one in self.timings:
            points.setdefault((one.kind, one.ranks), []).append((one.bytes, one.seconds))
        return {key: Curve(found) for key, found in points.items()}

    @property
    def guesses(self) -> list[str]:
        """Names of the numbers that are guesses: neither measured nor from a data sheet."""
        return [name for name, kind in self.kinds.items() if kind == "guess"]

    def changed(self, name: str, factor: float) -> Machine:
        """Return a copy of the machine with the number ``name`` multiplied by ``factor``."""
        return replace(self, **{name: getattr(self, name) * factor})

    def message(self, ranks: int, size: float, count: int = 1) -> float:
        """Return the seconds that ``count`` messages take, which have ``size`` bytes in total.

        Args:
            ranks: number of neighbouring ranks that send messages to one another at the same time.
                If a node has fewer ranks than this, the messages go over the network, which all
                ranks of a node share.
            size: bytes of all messages together.
            count: number of messages.
        """
        measured = [n for kind, n in self._curves if kind == "message"]
        if ranks <= self.ranks and measured:
            nearest = min(measured, key=lambda n: abs(n - ranks))
            return count * self._curves["message", nearest].seconds(size / max(1, count))
        speed = self.link if ranks <= self.ranks else self.network / self.ranks
        return count * self.latency + size / speed

    def sum(self, ranks: int, size: float) -> float:
        """Return the seconds of an all-reduce (sum) of ``size`` bytes over ``ranks`` ranks.

        If sums over this number of ranks were measured, the seconds follow from the measurement.
        Otherwise they are computed for a ring all-reduce: the time of the bytes that a rank sends,
        and the latency of its messages.
        """
        if ranks == 1:
            return 0.0
        if measured := self._curves.get(("sum", ranks)):
            return measured.seconds(size)
        speed = self.link if ranks <= self.ranks else min(self.link, self.network)
        rounds = math.ceil(math.log2(ranks))
        return 2 * (ranks - 1) / ranks * size / speed + 2 * rounds * self.latency


_WORDS = ("name", "precision", "rates", "timings", "kinds", "sources")
VERSION = 4  # 3 had no `sharing`; 2 had no rates of poolings and of other changes of size
# The kinds of rows that the table of a number may have.
_TABLES = {"arithmetic": ARITHMETIC, "traffic": TRAFFIC, "link": TIMINGS}
NUMBERS = tuple(f.name for f in fields(Machine) if f.name not in _WORDS)
_UNITS = {
    "arithmetic": "FLOP/s",
    "traffic": "B/s",
    "call": "s",
    "latency": "s",
    "link": "B/s",
    "network": "B/s",
    "memory": "B",
    "base": "B",
    "ranks": "ranks a node",
    "spread": "B/B",
    "exchange": "s",
    "sharing": "B/s",
    "forward": "s/s",
}
# Numbers that a profile may leave out; they then have the default of Machine.
_OPTIONAL = ("spread", "exchange", "sharing", "forward")


def profile_names() -> list[str]:
    """Return the names of the machine profiles (measured speeds) that come with distseg."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def load_machine(name: str) -> Machine:
    """Return the machine that a profile describes.

    Args:
        name: the name of a profile that comes with distseg, or the path of a YAML file.

    Raises:
        ValueError: there is no such profile, or a number is missing or wrong.
    """
    path = Path(name)
    if not name.endswith((".yaml", ".yml")):
        path = PROFILES / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(
            f"there is no profile {name}: give the path of a YAML file, or one of "
            f"{', '.join(profile_names())}{did_you_mean(name, profile_names())}"
        )
    try:
        given = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ValueError(
            f"profile {path} is not YAML ({' '.join(str(e).split())}): correct it, or "
            "name another profile"
        ) from None
    if not isinstance(given, dict):
        raise ValueError(f"profile {path} has no entries: give it name and {', '.join(NUMBERS)}")
    version = given.get("version", 1)
    if version not in range(1, VERSION + 1):
        raise ValueError(
            f"profile {path} has the version {version!r}, but this distseg reads versions up to "
            f"{VERSION}: write the profile again with distseg calibrate, or update distseg"
        )
    unknown = sorted(set(given) - {"version", "name", "precision", *NUMBERS})
    missing = [key for key in ("name", *NUMBERS) if key not in given and key not in _OPTIONAL]
    if unknown or missing:
        raise ValueError(
            f"profile {path} {'lacks ' + missing[0] if missing else 'has ' + str(unknown[0])}: "
            f"it must have the entries name, {', '.join(NUMBERS)}"
        )
    precision = given.get("precision", "fp32")
    if precision not in PRECISIONS:
        raise ValueError(
            f"profile {path} has the precision {precision!r}: give {', '.join(PRECISIONS)}, the "
            "number type of arithmetic"
        )
    values: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    sources: dict[str, str] = {}
    rows: list[Rate | Timing] = []
    for key in NUMBERS:
        if key not in given:
            kinds[key], sources[key] = "guess", "not stated"
            continue
        entry = given[key]
        if isinstance(entry, dict) and key in _TABLES and "table" in entry:
            entry = dict(entry)
            rows += _rows(path, key, entry.pop("table"))
        if not isinstance(entry, dict) or set(entry) != {"value", "unit", "kind", "source"}:
            raise ValueError(
                f"profile {path}: {key} must have the fields value, unit, kind and source, got "
                f"{entry!r}"
            )
        try:
            value = float(entry["value"])
        except (TypeError, ValueError):
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"profile {path}: {key} has the value {entry['value']!r}: give a number above 0"
            )
        if entry["kind"] not in KINDS or entry["unit"] != _UNITS[key]:
            raise ValueError(
                f"profile {path}: {key} must be in {_UNITS[key]}, and its kind one of "
                f"{', '.join(KINDS)}, got {entry['unit']!r} and {entry['kind']!r}"
            )
        values[key], kinds[key], sources[key] = value, entry["kind"], str(entry["source"])
    return Machine(
        name=str(given["name"]),
        **(values | {"ranks": max(1, int(values["ranks"]))}),
        precision=precision,
        rates=Rates(tuple(row for row in rows if isinstance(row, Rate))),
        timings=tuple(row for row in rows if isinstance(row, Timing)),
        kinds=kinds,
        sources=sources,
    )


def _rows(path: Path, key: str, table) -> list[Rate | Timing]:
    """Return the rows of the table that an entry of a profile has, after checks.

    Args:
        path: the file of the profile.
        key: the name of the entry: arithmetic, traffic or link.
        table: the rows, as the YAML file has them.

    Raises:
        ValueError: a row is wrong.
    """
    form, kinds, found = (Timing if key == "link" else Rate), _TABLES[key], []
    names = [f.name for f in fields(form)]
    for number, row in enumerate(table if isinstance(table, list) else [table]):
        if not isinstance(row, dict) or set(row) != set(names):
            raise ValueError(
                f"profile {path}: row {number + 1} of the table of {key} must have the fields "
                f"{', '.join(names)}, got {row!r}"
            )
        if row["kind"] not in kinds or row.get("precision", "fp32") not in RATED:
            raise ValueError(
                f"profile {path}: row {number + 1} of the table of {key} must have a kind among "
                f"{', '.join(kinds)}"
                + f" and a precision among {', '.join(RATED)}" * (form is Rate)
                + f", got {row!r}"
            )
        for name in names:
            if name in ("kind", "precision"):
                continue
            value = row[name]
            if not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"profile {path}: row {number + 1} of the table of {key} has {name} "
                    f"{value!r}: give a number above 0"
                )
        found.append(form(**row))
    return found


def as_profile(machine: Machine) -> str:
    """Return the text of a profile (YAML) of ``machine``, as :func:`load_machine` reads it."""
    entries: dict[str, dict[str, object]] = {
        name: {
            "value": getattr(machine, name),
            "unit": _UNITS[name],
            "kind": machine.kinds.get(name, "guess"),
            "source": machine.sources.get(name, "not stated"),
        }
        for name in NUMBERS
        if getattr(machine, name)
    }
    measured: tuple[Rate | Timing, ...] = (*machine.rates.rows, *machine.timings)
    for name, kinds in _TABLES.items():
        rows = [asdict(row) for row in measured if row.kind in kinds]
        if rows:
            entries[name]["table"] = rows
    words = {"version": VERSION, "name": machine.name, "precision": machine.precision}
    return yaml.safe_dump({**words, **entries}, sort_keys=False, width=100)
