"""Read files of results, and refuse those that are damaged or of another version."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from distseg.cli.bench.kinds import MEASURED
from distseg.cli.bench.results import FORMAT, VERSION, Measurement, Result

_REPAIR = "measure again by distseg bench, or name another file"


def read_result(path: Path) -> Result:
    """Return the result in a file.

    Raises:
        ValueError: the file is damaged, of another version or no result. The message names the
            file, what is wrong, and how to fix it.
        OSError: the file cannot be read.
    """
    given = _object_in(path)
    if given.get("format") != FORMAT:
        raise ValueError(f"{path} is no result of distseg bench (it has no format): {_REPAIR}")
    if given.get("version") != VERSION:
        raise ValueError(
            f"{path} has the version {given.get('version')!r}, but this distseg reads version "
            f"{VERSION}: {_REPAIR}"
        )
    values = {key: value for key, value in given.items() if key not in ("format", "version")}
    _check_fields(str(path), values, Result, _RESULT)
    if values["kind"] not in MEASURED:
        raise ValueError(
            f"{path} has the kind {values['kind']!r}, not one of {', '.join(MEASURED)}: {_REPAIR}"
        )
    if not values["measurements"]:
        raise ValueError(f"{path} has no measurements: {_REPAIR}")
    measurements = []
    for number, one in enumerate(values["measurements"]):
        _check_measurement(f"measurement {number + 1} of {path}", one, values["kind"])
        measurements.append(Measurement(**one))
    if not _is_positive(values["environment"].get("ranks")):
        raise ValueError(f"{path} does not say on how many ranks it was measured: {_REPAIR}")
    return Result(**{**values, "measurements": tuple(measurements)})


def _object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. NaN and Infinity, which JSON does not have, are refused."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no number")

    try:
        given = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except ValueError as e:
        raise ValueError(f"{path} is not whole JSON ({e}): {_REPAIR}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{path} is no result of distseg bench (it is no object): {_REPAIR}")
    return given


_TEXT, _NUMBERS = {"kind", "axis", "command", "precision", "data", "machine"}, (int, float)
_RESULT: dict[str, Any] = {
    **dict.fromkeys(_TEXT, str),
    **dict.fromkeys(("environment", "config", "network"), dict),
    **dict.fromkeys(("repeats", "warmup"), int),
    "measurements": list,
}
_MEASUREMENT: dict[str, Any] = {
    **dict.fromkeys(("name", "image", "note"), str),
    **dict.fromkeys(("ranks", "pixels", "images", "bytes"), int),
    **dict.fromkeys(("seconds", "memory"), list),
    **dict.fromkeys(("layout", "parts", "busiest", "traffic"), dict),
    "redundancy": _NUMBERS,
    "predicted": (dict, type(None)),
}
# Entries of objects in a measurement that is not empty.
_INNER = {
    "layout": ("samples", "tiles", "stages", "exchange", "micro_batches", "schedule"),
    "busiest": ("rank", "host", "computing", "mean"),
    "predicted": ("seconds", "memory", "parts"),
}


def _check_measurement(what: str, given: Any, kind: str) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"{what} is {given!r}, not an object: {_REPAIR}")
    _check_fields(what, given, Measurement, _MEASUREMENT)
    seconds = given["seconds"]
    if not seconds or not all(map(_is_positive, seconds)):
        raise ValueError(
            f"{what} ({given['name']}) has the seconds {seconds!r}, but a measurement has numbers "
            f"above 0: {_REPAIR}"
        )
    for name, entries in _INNER.items():
        missing = [entry for entry in entries if entry not in (given[name] or entries)]
        if missing:
            raise ValueError(f"{what} ({given['name']}) has {name} without {missing[0]}: {_REPAIR}")
    if kind != "io" and not given["layout"]:
        raise ValueError(f"{what} ({given['name']}) has no layout: {_REPAIR}")
    if given["ranks"] < 1:
        raise ValueError(f"{what} ({given['name']}) has the ranks {given['ranks']!r}: {_REPAIR}")


def _check_fields(what: str, given: Mapping, form: type, types: Mapping[str, Any]) -> None:
    """Refuse a JSON object with missing or unknown entries, or with an entry of a wrong type.

    Args:
        what: the name of the object, for the message.
        given: the object.
        form: the dataclass with these entries.
        types: the type of each entry.
    """
    names = {f.name for f in fields(form)}
    if wrong := sorted(names ^ set(given)):
        lacks = "lacks" if wrong[0] in names else "has the unknown entry"
        raise ValueError(f"{what} {lacks} {wrong[0]}: {_REPAIR}")
    if odd := next((name for name in types if not isinstance(given[name], types[name])), None):
        raise ValueError(f"{what} has a value of a wrong type, {odd} {given[odd]!r}: {_REPAIR}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, _NUMBERS) and math.isfinite(value) and value > 0
