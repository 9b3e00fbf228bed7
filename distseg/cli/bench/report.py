"""Gather the results in a folder for one HTML page: ``distseg bench report FOLDER``."""

from __future__ import annotations

import json
import tempfile
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distseg.cli.bench.head_figures import figures_of
from distseg.cli.bench.pictures import draw_result
from distseg.cli.bench.result_files import read_result
from distseg.cli.bench.results import Result
from distseg.cli.bench.rows import rows_of
from distseg.cli.bench.studies import Study, studies_of
from distseg.config.settings import Config
from distseg.config.units import many, si
from distseg.report.bench_page import BenchPage, StudyPart, bench_page
from distseg.report.disk import atomic_write
from distseg.report.page import Panel, settings_beside
from distseg.report.style import need_matplotlib
from distseg.report.tables import format_column

# Title of the part about a kind, and what its picture and table show.
_WORDS = {
    "strong": (
        "Strong scaling",
        "The same step on more and more ranks. The speed-up is the time on the smallest number of "
        "ranks over the time of a case, times that number; the efficiency is the speed-up over the "
        "number of ranks, and ideally 1.",
    ),
    "weak": (
        "Weak scaling",
        "A step whose work grows with the ranks. The speed-up compares pixels per second with the "
        "smallest number of ranks; the efficiency is the speed-up over the number of ranks, and "
        "ideally 1.",
    ),
    "pipeline": (
        "Pipeline",
        "The network in S stages, beside the same step on one stage. The efficiency is t(1 stage) "
        "/ (S t(S stages)). If stages are equal and messages take no time, m micro-batches have "
        "the efficiency m / (m + S - 1); the bubble is the rest. Waiting is the mean share of the "
        "step in which a rank waits for other stages.",
    ),
    "halo": (
        "Halo exchange",
        "Tiles of one image on all ranks. With all, tiles are read with their halos, and nothing "
        "is exchanged; with a number n, halos are exchanged after every n layers. Halo is the "
        "share of the step that the exchange takes. Pixels read are those of the input windows "
        "over those of the images.",
    ),
    "memory": (
        "Memory",
        "The step in layouts that split all ranks along one axis of the mesh. Memory is the peak "
        "of a rank.",
    ),
    "io": (
        "Reading",
        "The ranks read crops of the store as training does, from the disk and then from memory.",
    ),
}


def run_report(folder: str, output: str | None) -> int:
    """Write the page about the results in a folder, and return the exit status.

    Args:
        folder: the folder with the JSON files.
        output: the HTML file; None for ``report.html`` in the folder.
    """
    need_matplotlib()
    page = page_of(Path(folder).resolve().name, results_in(Path(folder)))
    path = Path(output) if output else Path(folder) / "report.html"
    text = bench_page(page)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as growing:
        growing.write_text(text, encoding="utf-8")
    size = si(len(text.encode()), "B")
    print(f"{path}: {size}; open it in a browser, or send it as it is")
    return 0


def results_in(folder: Path) -> list[Result]:
    """Return the results in a folder.

    Raises:
        ValueError: the folder has no result, or a JSON file in it is damaged or is no result.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder: give the folder of results, the --output of distseg bench"
        )
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(
            f"{folder} has no result (*.json): measure first, such as by distseg bench strong "
            f"--output {folder}"
        )
    return [read_result(path) for path in paths]


def page_of(name: str, results: Sequence[Result]) -> BenchPage:
    """Return the content of the HTML page about results of ``distseg bench``.

    Args:
        name: the title.
        results: the results.
    """
    studies = studies_of(results)
    kinds = list(_WORDS)
    studies.sort(key=lambda study: kinds.index(study.results[0].kind))
    wholes = [study.whole for study in studies]
    networks = dict.fromkeys(network_text(one) for one in wholes)
    dates = sorted(str(one.environment.get("date", ""))[:10] for one in results)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return BenchPage(
        name=name,
        summary=f"{'; '.join(networks)}. Up to {max(one.ranks for one in results)} ranks, {when}.",
        figures=[figure for one in wholes for figure in figures_of(one)],
        studies=[part_of(study) for study in studies],
        facts=environment_rows([one.environment for one in results]),
        settings=settings_beside(
            joined_settings([one.config for one in results]), Config().as_plain()
        ),
    )


def network_text(result: Result) -> str:
    """Return a text with the name of the measured network and its number of parameters.

    For results of ``distseg bench io``, which measures reading, the text names the store instead.
    """
    if result.kind == "io":
        return f"store {result.data}"
    return f"{result.network['name']}, {result.network['parameters']:,} parameters"


def part_of(study: Study) -> StudyPart:
    """Return the part of the page about one study."""
    result = study.whole
    rows = rows_of(result.kind, result.measurements)
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    texts = [format_column([row[name] for row in rows]) for name in columns]
    title, about = _WORDS[result.kind]
    return StudyPart(
        f"{title}, {result.axis}" if result.axis else title,
        about,
        facts_text(result),
        columns,
        list(zip(*texts)),
        list(dict.fromkeys(one.command for one in study.results)),
        picture_of(result),
        [f"No prediction: {note}." for note in result.notes],
    )


def facts_text(result: Result) -> str:
    """Return a sentence about what was measured: network, data, image size, precision, repeats."""
    first = result.measurements[0]
    found = [network_text(result), result.data, f"images of {first.image}", result.precision]
    found.append(f"{many(result.repeats, 'repeat')} after {many(result.warmup, 'step')}")
    if result.machine:
        found.append(f"predicted for {result.machine}")
    return ", ".join(dict.fromkeys(found)) + "."


def picture_of(result: Result) -> Panel:
    """Return a panel with the picture of a result, which is embedded as a data URI."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        draw_result(result, path)
        source = "data:image/png;base64," + b64encode(path.read_bytes()).decode("ascii")
    return Panel(result.title, source, f"Picture of the figures in the table: {result.title}")


def environment_rows(environments: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (label, value) for each part of the hardware and software of several jobs.

    Values that differ between jobs are joined by " | ".
    """
    names = dict.fromkeys(name for one in environments for name in one if name != "date")
    found = []
    for name in names:
        values = dict.fromkeys(_plain(name, one.get(name)) for one in environments)
        found.append((name, " | ".join(values)))
    return found


def _plain(name: str, value: Any) -> str:
    if name == "memory" and value:
        return si(value, "B")
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items()) or "none"
    if isinstance(value, str):
        return value
    return "unknown" if value is None else json.dumps(value)


def joined_settings(
    configs: Sequence[Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, Any]]:
    """Return the settings of all jobs; values that differ are joined by " | "."""
    found: dict[str, dict[str, Any]] = {}
    for section, values in configs[0].items():
        found[section] = {}
        for name, value in values.items():
            every = dict.fromkeys(str(one.get(section, {}).get(name)) for one in configs)
            found[section][name] = value if len(every) == 1 else " | ".join(every)
    return found
