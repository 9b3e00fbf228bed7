"""Flags of ``distseg bench KIND``, and the checks of their values.

Nothing heavy is imported, so ``distseg bench strong --help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distseg.cli.bench.kinds import MEASURED
from distseg.config.settings import SpatialConfig
from distseg.config.sizes import Size
from distseg.config.spelling import did_you_mean

_SCHEDULES = ("gpipe", "1f1b", "zb-h1")
_STEPS = tuple(kind for kind in MEASURED if kind != "io")  # kinds that measure training steps


@dataclass(frozen=True)
class _Flag:
    """Flag of ``distseg bench`` that one or more kinds of measurement have.

    Attributes:
        names: the flag and its synonyms.
        kinds: the kinds that have the flag.
        default: its value if the user gives none.
        text: its help.
        type: the type of its value.
        more: further arguments of ``add_argument``.
    """

    names: tuple[str, ...]
    kinds: Sequence[str]
    default: Any
    text: str
    type: Any = str
    more: Mapping[str, Any] = field(default_factory=dict)


_FLAGS = (
    _Flag(
        ("--network",),
        tuple(MEASURED),
        None,
        "The network, a name of distseg models or package.module:function, in place of model.name "
        "of the config.",
        str | None,
    ),
    _Flag(
        ("--image", "--size"),
        _STEPS,
        None,
        "Size of random images, such as 512x512; by default the images are those of the store. In "
        "weak scaling along tiles it is the size of a tile.",
        Size | None,
    ),
    _Flag(("--warmup",), _STEPS, 2, "Number of steps before the measured ones.", int),
    _Flag(
        ("--machine",),
        _STEPS,
        "here",
        "The machine of the predictions beside the measurements: here, to time the network first; "
        "none; or a profile as for distseg plan.",
    ),
    _Flag(("--repeats",), tuple(MEASURED), 5, "Number of measured repeats.", int),
    _Flag(
        ("--ranks",),
        ("strong", "weak", "io"),
        None,
        "Numbers of ranks, such as 1,2,4, or job for all ranks only; by default 1, 2, 4, ... up to "
        "those of the job. The other ranks wait meanwhile.",
        str | None,
    ),
    _Flag(
        ("--axis",),
        ("strong",),
        "tiles",
        "The axis of the mesh that grows; the config gives the others.",
        more={"choices": ["tiles", "samples", "stages"]},
    ),
    _Flag(
        ("--axis",),
        ("weak",),
        "tiles",
        "The axis of the mesh that grows: tiles for larger images, samples for more images.",
        more={"choices": ["tiles", "samples"]},
    ),
    _Flag(
        ("--micro-batches",),
        ("pipeline",),
        "1,2,4,8",
        "Numbers of micro-batches of a step.",
        more={"dest": "micro_batches"},
    ),
    _Flag(("--schedules",), ("pipeline",), "1f1b", "Schedules, such as gpipe,1f1b,zb-h1."),
    _Flag(
        ("--every",),
        ("halo",),
        "all,level,4,2,1",
        "Values of spatial.exchange_every. The first one is the reference of the ratios.",
    ),
    _Flag(("--crops",), ("io",), 64, "Number of crops that all ranks read together.", int),
    _Flag(("--output",), tuple(MEASURED), "bench", "Folder for the result and its picture."),
)


def add_flags(parser, *kinds: str) -> None:
    """Add the flags of some kinds of measurement to a parser, which has the flags of all settings.

    Args:
        parser: a parser of jsonargparse.
        kinds: the kinds, some of ``MEASURED``. If several kinds have flags of the same name, the
            first of these flags is added.
    """
    found: dict[str, _Flag] = {}
    for flag in _FLAGS:
        if set(kinds) & set(flag.kinds):
            found.setdefault(flag.names[0], flag)
    for flag in found.values():
        given = dict(flag.more) if "choices" in flag.more else {"type": flag.type, **flag.more}
        parser.add_argument(*flag.names, default=flag.default, help=flag.text, **given)
    parser.add_argument(
        "--overwrite", action="store_true", help="Replace an existing result of the same name."
    )


def check_kind(kind: str, known: Sequence[str]) -> None:
    """Refuse a word after ``distseg bench`` that names no kind of measurement and no other task."""
    if kind not in known:
        raise ValueError(
            f"distseg bench has no {kind!r}: choose {', '.join(known)}{did_you_mean(kind, known)}"
        )


def positive_numbers(flag: str, text: str) -> list[int]:
    """Return the numbers of a list such as ``1,2,4``.

    Raises:
        ValueError: the text is not a list of distinct numbers above 0.
    """
    parts = [part.strip() for part in text.split(",")]
    known = all(part.isdecimal() and int(part) > 0 for part in parts)
    if not known or len(set(map(int, parts))) < len(parts):
        raise ValueError(f"{flag} must be distinct numbers above 0, such as 1,2,4, got {text!r}")
    return [int(part) for part in parts]


def distinct_words(flag: str, text: str) -> list[str]:
    """Return the words of a list such as ``gpipe,1f1b``.

    Raises:
        ValueError: a word is empty or repeated.
    """
    words = [word.strip() for word in text.split(",")]
    if any(not word or words.count(word) > 1 for word in words):
        raise ValueError(f"{flag} is {text!r}: give distinct words, joined by commas")
    return words


def schedules(text: str) -> list[str]:
    """Return the schedules of a list such as ``gpipe,1f1b``.

    Raises:
        ValueError: a schedule is unknown or repeated.
    """
    words = distinct_words("--schedules", text)
    if wrong := next((word for word in words if word not in _SCHEDULES), None):
        raise ValueError(
            f"--schedules has {wrong!r}: choose {', '.join(_SCHEDULES)}, joined by commas"
            f"{did_you_mean(wrong, _SCHEDULES)}"
        )
    return words


def check_flags(kind: str, flags: Mapping[str, Any], store: str | None) -> None:
    """Refuse values of flags that contradict each other or the settings.

    Args:
        kind: one of ``MEASURED``.
        flags: the values of the kind's flags by name.
        store: the setting ``data.store``.

    Raises:
        ValueError: values contradict each other. The message names the flag, its value and how to
            fix it.
    """
    checks: dict[str, Callable[[Mapping[str, Any], str | None], None]] = {
        "pipeline": _check_pipeline,
        "halo": _check_halo,
        "io": _check_reading,
        "weak": _check_weak,
    }
    if kind in checks:
        checks[kind](flags, store)


def _check_pipeline(flags: Mapping[str, Any], store: str | None) -> None:
    positive_numbers("--micro-batches", flags["micro_batches"])
    schedules(flags["schedules"])


def _check_halo(flags: Mapping[str, Any], store: str | None) -> None:
    for word in distinct_words("--every", flags["every"]):
        SpatialConfig(exchange_every=word)


def _check_reading(flags: Mapping[str, Any], store: str | None) -> None:
    if store is None:
        raise ValueError(
            "bench io reads the crops of a store, but there is none: give --data.store PATH"
        )


def _check_weak(flags: Mapping[str, Any], store: str | None) -> None:
    if flags["axis"] == "tiles" and flags["image"] is None and store is not None:
        raise ValueError(
            "weak scaling along tiles enlarges the image, but the images of a store have their "
            "sizes: give --image 512x512 for random images, or --axis samples"
        )
