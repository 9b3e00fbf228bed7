"""Choose a layout: ``distseg plan CONFIG --ranks N``.

The network is timed on the machine at hand by whole steps of the engine, or a profile describes
another machine (:mod:`distseg.planning.machine`). The layouts are those of
:mod:`distseg.planning.mesh_search`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from distseg.cli.planned_training import PlannedTraining
from distseg.cli.streamed_layout import streamed_seconds
from distseg.comm.launch import raise_jointly
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import Config
from distseg.config.sizes import Size
from distseg.config.units import duration
from distseg.models.network import flat_layers, is_flat
from distseg.planning.balance import fastest_split
from distseg.planning.cluster import Cluster
from distseg.planning.cost import modelled
from distseg.planning.layout_pictures import plot_layouts
from distseg.planning.machine import Machine, as_profile, load_machine
from distseg.planning.mesh_layout import MeshLayout, Prediction, Work
from distseg.planning.mesh_search import Planner
from distseg.planning.step_simulation import simulate_step
from distseg.planning.timeline import plot_timeline
from distseg.report.tables import table
from distseg.training.conflicts import check_auto, not_planned
from distseg.training.programs import StepPrograms

HERE = "here"
_SHOWN = 10
# Guessed numbers that are not changed to see whether another layout becomes the best.
_LEFT_ALONE = ("memory", "ranks", "base", "spread", "forward")
_STREAMED = 0.9  # share of a rank's memory for streaming, if no layout fits without it
_LIMITS = "reading images is not counted, and no message overlaps with computation"


class PlannedLayouts(NamedTuple):
    """Result of :func:`plan_layouts`.

    Attributes:
        facts: the layouts, and the conditions of the search such as the number of ranks, as a dict
            that JSON can hold.
        settings: the values of the settings of the best layout, by name.
        planner: the planner.
        sizes: the sizes of all images.
    """

    facts: dict
    settings: Mapping[str, Any]
    planner: Planner
    sizes: Collection[tuple[int, ...]]

    def draw(self, output: Path) -> list[Path]:
        """Draw the layouts, and the timeline of a step in the fastest one; return both files.

        Args:
            output: the file of the first picture. The second one is beside it, with ``-timeline``
                in its name.
        """
        planner, facts = self.planner, self.facts
        searches = list(planner.front(facts["ranks"], self.sizes))
        shown = searches or [planner.best(facts["ranks"], self.sizes)]
        layouts = {(one.layout, one.memory): one for found in shown for one in found}
        title = f"Layouts of {facts['ranks']} ranks, {facts['machine']}"
        front = [found[0] for found in searches]
        plot_layouts(list(layouts.values()), front, planner.limit, output, facts["steps"], title)
        timeline = output.with_name(f"{output.stem}-timeline{output.suffix}")
        best = shown[0][0].layout
        plot_timeline(planner.spans(best), timeline, f"A step, {best}")
        return [output, timeline]


def plan_layouts(
    training: PlannedTraining,
    world,
    ranks: int,
    machine: str = HERE,
    memory: float | None = None,
    batch: int | None = None,
    simulate: bool = False,
) -> PlannedLayouts | None:
    """Return the best layouts of a training on a number of ranks.

    All ranks of ``world`` must call it together. Only rank 0 gets the layouts, the others get None.

    Args:
        training: the training whose layout is planned.
        world: the communicator of the ranks that measure. All these ranks time the network at the
            same time, and then the messages between ranks. If it has one rank, the speed of
            messages is guessed.
        ranks: the number of ranks to plan for.
        machine: ``here``, or a profile (:func:`distseg.planning.machine.load_machine`).
        memory: the memory limit of a rank in bytes; by default the memory that the machine has.
        batch: the number of images in a step, over all sample groups; by default that of the
            config.
        simulate: True to simulate the fastest layout too (:func:`simulated`).

    Raises:
        ValueError: the network is not a list of known layers, the batch does not divide into
            micro-batches, or no layout is possible.
    """
    with raise_jointly(world):
        if not is_flat(training.model):
            raise ValueError(
                f"distseg cannot follow the layers of {training.config.model.name}, so it cannot "
                "plan stages and tiles for this network: split samples only (mesh.samples)"
            )
    found = training.measure(world) if machine == HERE else load_machine(machine)
    searches: list[tuple[Planner, list[Prediction]]] = []
    with raise_jointly(world):
        if world.rank == 0:
            for precision in training.precisions(found):
                work = training.work(found, batch, precision)
                planner = Planner(work, found, memory)
                searches.append((planner, _best(planner, ranks, training.sizes)))
    if not searches:
        return None
    planner, best = min(searches, key=_by_time)
    work, precision = planner.work, {}
    if len(searches) > 1:
        precision["train.precision"] = work.precision
        training = replace(training, config=training.config.with_values(precision))
    step = simulated(planner, best[0]) if simulate else None
    chosen, streamed = choose_layout(training, planner, ranks, best)
    if chosen is None or streamed is not None and "refused" in streamed:
        chosen = Choice(best[0].layout, "no layout fits, and this one takes the least memory")
    facts = {
        "ranks": ranks,
        "image": str(Size(training.size)),
        "batch": work.batch,
        "machine": found.name,
        "precision": work.precision,
        "notes": [
            *_left_out(training.config),
            *_about_precision(searches, work.precision),
            *notes_on(work, found),
        ],
        "limit": planner.limit,
        "fits": best[0].memory <= planner.limit,
        "steps": None if training.samples is None else max(1, training.samples // work.batch),
        "profile": as_profile(found),
        "layouts": [_plain(p) for p in best],
        "streamed": streamed,
        "chosen": chosen.settings() | precision,
        "hangs_on": sensitivity(planner, memory, ranks, best[0], training.sizes),
        "simulated": step,
    }
    return PlannedLayouts(facts, chosen.values() | precision, planner, training.sizes)


def simulated(planner: Planner, found: Prediction) -> dict:
    """Return the simulated step of a predicted layout, in types that JSON can hold.

    The entries are: the seconds of the step; the seconds of the chain of tasks that determines this
    duration, by the purpose of the tasks; and the number of simulated ranks, which stand for all
    ranks.
    """
    cluster = Cluster(planner.machine, found.layout.ranks)
    step = simulate_step(planner.work, planner.grids, found.layout, found.balance, cluster)
    return {"seconds": step.seconds, "parts": step.parts, "ranks": step.simulated}


def with_best_layout(
    config: Config | PatchConfig, world, image: Size | None = None
) -> Config | PatchConfig:
    """Return the settings with the best layout on all ranks of the job, for ``mesh.layout: auto``.

    Settings whose ``mesh.layout`` is ``given``, as always for PatchGD, are returned unchanged. All
    ranks of ``world`` must call it together; they time the network at the same time. Rank 0 prints
    the chosen layout.

    Args:
        config: the settings of the training. The layout keeps the number of images in a step.
        world: the communicator of all ranks.
        image: the size of an image in pixels; by default the size of the store's largest sample.

    Raises:
        ValueError: no layout is possible, or a setting that describes a layout, such as
            ``mesh.tiles``, is given too. It is raised on all ranks.
    """
    if config.mesh.layout == "given":
        return config
    with raise_jointly(world):
        check_auto(
            config.mesh, config.streaming, config.approximate, config.pipeline, config.spatial
        )
        training = PlannedTraining.of(config, image)
        found = None
        if not is_flat(training.model):
            layout = training.samples_only(world.size)
            found = Choice(layout, "its layers cannot be followed, so only samples are split")
    if found is None:
        _say(world, "timing the network, to choose the layout (mesh.layout auto)")
        machine = training.measure(world)
        with raise_jointly(world):
            if world.rank == 0:
                planner = Planner(training.work(machine), machine)
                best = planner.best(world.size, training.sizes)
                found, _ = choose_layout(training, planner, world.size, best)
                if found is None:
                    raise ValueError(
                        f"mesh.layout is auto, but no layout on {world.size} ranks can cut all "
                        "images: use fewer ranks, or leave small images out"
                    )
        found = world.bcast(found, root=0)
    flags = " ".join(f"--{name} {value}" for name, value in found.settings().items())
    _say(world, f"layout: {flags} ({found.why})")
    return config.with_values(found.values())


class Choice(NamedTuple):
    """Layout that was chosen.

    Attributes:
        layout: the layout.
        why: the reason in words.
        memory: bytes of a rank within which tiles are streamed; None without streaming.
        balance: number of layers of each stage; None with one stage.
    """

    layout: MeshLayout
    why: str
    memory: int | None = None
    balance: tuple[int, ...] | None = None

    def settings(self) -> dict[str, str]:
        """Return the settings to write into a config for this layout."""
        found = self.layout.settings()
        if self.memory is not None:
            found["streaming.memory"] = f"{self.memory / 1e9:.3g}GB"
        if self.balance is not None:
            found["pipeline.balance"] = f"[{','.join(map(str, self.balance))}]"
        return found

    def values(self) -> dict[str, Any]:
        """Return the values of the settings of this layout, by the name of the setting."""
        found = self.layout.values()
        if self.memory is not None:
            found["streaming.memory"] = self.memory
        if self.balance is not None:
            found["pipeline.balance"] = list(self.balance)
        return found


def choose_layout(
    training: PlannedTraining, planner: Planner, ranks: int, best: Sequence[Prediction]
) -> tuple[Choice | None, dict | None]:
    """Return the fastest layout that fits the memory limit and can cut all images of a training.

    If no layout fits, tiles are streamed. Then as many sample groups as possible share the images,
    because they repeat no work; the other ranks split each image. If the weights are too large for
    a rank, the layers are split into stages, as few as possible.

    Args:
        training: the training.
        planner: the planner of the training.
        ranks: the number of ranks.
        best: the result of :meth:`Planner.best`.

    Returns:
        The layout, or None if none can cut all images. If tiles are streamed, the prediction for it
        (``streamed`` of :attr:`PlannedLayouts.facts`), else None. It has the reason if even the
        streamed tiles do not fit.
    """
    if best and best[0].memory <= planner.limit:
        found = best[0]
        why = f"predicted: {found.seconds:.3g} s a step, {found.memory / 1e9:.3g} GB a rank"
        balance = found.balance if found.layout.stages > 1 else None
        return Choice(found.layout, why, balance=balance), None
    by_stages: dict[int, list[MeshLayout]] = {}
    for one in planner.candidates(ranks, training.sizes):
        if (one.recompute, one.exchange) == ("never", "all"):
            by_stages.setdefault(one.stages, []).append(replace(one, schedule="auto"))
    memory = int(_STREAMED * planner.limit)
    why = f"no layout without streaming fits {planner.limit / 1e9:.3g} GB a rank"
    choices: list[tuple[Choice, dict]] = []
    for stages in sorted(by_stages):
        layout = max(by_stages[stages], key=lambda one: (one.samples, one.tiles.volume))
        # Stages that take equally long may differ much in their weights.
        balances = [None] if stages == 1 else [None, _even_weights(training.model, stages)]
        for balance in balances:
            choice = Choice(layout, why, memory, balance)
            choices.append((choice, _streamed(training, planner, choice)))
            if "refused" not in choices[-1][1]:
                return choices[-1]
    return choices[0] if choices else (None, None)


def _even_weights(model: nn.Module, stages: int) -> tuple[int, ...]:
    """Return how many layers each stage has if the most weights of a stage are as few as possible.

    Args:
        model: the plain network.
        stages: the number of stages.
    """
    weights = [sum(p.numel() for p in layer.parameters()) for _, layer in flat_layers(model)]
    before = np.cumsum([0, *weights]).astype(float)
    return tuple(fastest_split(before[None, :] - before[:, None], stages))


def _say(world, line: str) -> None:
    """Print a line on rank 0, to stderr, because a command may print JSON to stdout."""
    if world.rank == 0:
        print(line, file=sys.stderr, flush=True)


def _best(planner: Planner, ranks: int, sizes: Collection[tuple[int, ...]]) -> list[Prediction]:
    """Return the layouts on a number of ranks that can cut images of all sizes, the best first.

    Raises:
        ValueError: no layout can cut the images.
    """
    work = planner.work
    if best := planner.best(ranks, sizes):
        return best
    raise ValueError(
        f"no layout on {ranks} ranks computes a step of {work.batch} images of {Size(work.image)} "
        f"pixels, with {work.images} images in a micro-batch: give another number of ranks, such "
        f"as a divisor of {work.batch // work.images} (to split samples only), or another number "
        "of images in a step"
    )


def _by_time(search: tuple[Planner, list[Prediction]]) -> tuple[bool, float]:
    """Return a sort key: first the layouts that fit the memory limit, then the fastest ones."""
    planner, best = search
    return best[0].memory > planner.limit, best[0].seconds


def _left_out(config: Config) -> list[str]:
    """Return a line for each setting of a config that the compared layouts leave out."""
    found = [
        f"{given}, but these layouts are compared without this setting"
        for given in not_planned(config.approximate, config.pipeline)
    ]
    if config.streaming.tiles is not None:
        found.append(
            f"{config.streaming.chosen}, but these layouts do not stream tiles: to stream them, "
            "choose the mesh yourself"
        )
    if config.streaming.memory is not None:
        found.append(
            f"{config.streaming.chosen}, but it does not limit these layouts, which do not stream "
            "tiles: --limit does"
        )
    return found


def _about_precision(
    searches: Sequence[tuple[Planner, list[Prediction]]], chosen: str
) -> list[str]:
    """Return a list with a line on the best layout in each other number type, such as bf16.

    The list is empty if only one number type was planned.

    Args:
        searches: for each number type, the planner and the layouts that it found.
        chosen: the number type that the printed layouts have.
    """
    others = [
        f"{duration(best[0].seconds)} in {planner.work.precision}"
        + ", which does not fit" * (best[0].memory > planner.limit)
        for planner, best in searches
        if planner.work.precision != chosen
    ]
    if not others:
        return []
    return [f"number type: {chosen}, as train.precision is auto; a step takes {'; '.join(others)}"]


def _plain(found: Prediction) -> dict:
    """Return the prediction for a layout as a dict of types that JSON can hold."""
    return {
        "settings": found.layout.settings(),
        "family": found.layout.family,
        "seconds": found.seconds,
        "memory": found.memory,
        "parts": found.parts,
        "largest_loss": found.binds,
        "balance": list(found.balance),
    }


def _streamed(training: PlannedTraining, planner: Planner, chosen: Choice) -> dict:
    """Return the prediction for a layout with streamed tiles, as a dict.

    If the layout cannot be trained, the dict has only the reason, under ``refused``.
    """
    config = training.config.with_values({**chosen.values(), "train.accumulate": 1})
    try:
        model, image = copy.deepcopy(training.model), planner.work.image
        programs = StepPrograms(config, model, image, int(planner.machine.base))
        seconds = streamed_seconds(programs, planner, chosen.layout)
    except ValueError as e:
        return {"refused": str(e)}
    return {"settings": chosen.settings(), "memory": chosen.memory, "seconds": seconds}


def notes_on(work: Work, machine: Machine) -> list[str]:
    """Return a note for each kind of work in a step whose speed was not measured.

    The measured speed of similar work is used instead, in another number type or with other tensor
    shapes.
    """
    found, precision = [], work.precision
    if precision != machine.precision and not machine.rates.has("convolution", precision):
        found.append(
            f"the profile has no FLOP/s of {precision}: those of {machine.precision} are taken; "
            "only bytes of memory and messages are those of the number type"
        )
    if work.costs.outside:
        found.append(
            f"{100 * work.costs.outside:.0f} % of the FLOPs lie outside the measured shapes: the "
            "rates of the nearest shapes are taken"
        )
    return found


def sensitivity(
    planner: Planner,
    memory: float | None,
    ranks: int,
    best: Prediction,
    sizes: Collection[tuple[int, ...]] = (),
) -> list[str]:
    """Return a text for each change of a guessed number that makes another layout the best.

    Each guessed number of the machine is made 30 % smaller and 30 % larger. A text names the
    number, the factor and the layout that is then the best.

    Args:
        planner: the planner.
        memory: the memory limit of a rank in bytes; None for the memory that the machine has.
        ranks: the number of ranks to plan for.
        best: the best layout with the guessed numbers.
        sizes: the sizes of all images, which the grid of tiles must be able to cut.
    """
    found, work = [], planner.work
    for name in planner.machine.guesses:
        if name in _LEFT_ALONE or not getattr(planner.machine, name):
            continue
        for factor in (0.7, 1.3):
            changed, costs = planner.machine.changed(name, factor), work.costs
            if changed.device != planner.machine.device:
                costs = modelled(
                    work.model, work.image, work.images, changed.device, work.precision
                )
            other = planner.on(changed, costs, memory).best(ranks, sizes)[0]
            if other.layout != best.layout:
                found.append(
                    f"{name} times {factor}: {other.layout}, {duration(other.seconds)} a step"
                )
    return found


def text(found: dict, config_path: str) -> str:
    """Return the result of :func:`plan_layouts` as text for the terminal.

    Args:
        found: the facts of the result.
        config_path: the config file, for the command that trains.
    """
    layouts = found["layouts"]
    rows = [_row(number + 1, row) for number, row in enumerate(layouts[:_SHOWN])]
    families: dict[str, dict] = {}
    for row in layouts:
        families.setdefault(row["family"], row)
    best = layouts[0]
    lines = [
        f"{found['ranks']} ranks, a step of {found['batch']} images of {found['image']}, "
        f"{found['precision']}, {found['machine']}, {found['limit'] / 1e9:.3g} GB a rank",
        "",
        table(rows),
        "",
    ]
    if not found["fits"]:
        lines += [
            f"no layout fits {found['limit'] / 1e9:.3g} GB a rank; the layouts above take the "
            "least memory. Use more ranks, or give a larger --limit",
            *_about_streaming(found["streamed"], best["seconds"]),
            "",
        ]
    for family, row in families.items():
        if row is not best:
            lines.append(
                f"{family}: its best layout takes {row['seconds'] / best['seconds']:.2f} times as "
                f"long as the first layout; most is lost by {row['largest_loss']}"
            )
    if step := found["simulated"]:
        parts = sorted(step["parts"].items(), key=lambda part: -part[1])
        lines.append(
            f"the first layout simulated, with shared links: {step['seconds']:.3g} s a step ("
            + ", ".join(f"{name} {seconds:.2g} s" for name, seconds in parts)
            + f"); {step['ranks']} simulated ranks stand for all"
        )
    lines += found["notes"]
    lines += [f"the best layout depends on a guess: {s}" for s in found["hangs_on"]]
    if found["steps"]:
        seconds = (found["streamed"] or best).get("seconds", best["seconds"])
        lines.append(f"an epoch of {found['steps']} steps: {duration(found['steps'] * seconds)}")
    flags = " ".join(f"--{name} {value}" for name, value in found["chosen"].items())
    if found["ranks"] > 1:
        start = f"mpirun -n {found['ranks']} "
    else:
        start = ""
    lines.append(f"({_LIMITS})")
    if found["fits"] or found["streamed"] and "refused" not in found["streamed"]:
        lines += ["", f"next: {start}distseg train {config_path} {flags}".rstrip()]
    return "\n".join(lines)


def _about_streaming(streamed: dict | None, seconds: float) -> list[str]:
    """Return a list with a line about streamed tiles, or an empty list.

    Args:
        streamed: the prediction (``streamed`` of :attr:`PlannedLayouts.facts`); None if streamed
            tiles were not considered, for which the list is empty.
        seconds: the seconds of a step in the first layout, which does not fit the memory limit.
    """
    if streamed is None:
        return []
    if "refused" in streamed:
        return [
            f"streaming: not possible either, with {_STREAMED:.0%} of this limit as "
            f"streaming.memory: {streamed['refused']}"
        ]
    return [
        f"streaming: fits {streamed['memory'] / 1e9:.3g} GB a rank; a step takes "
        f"{duration(streamed['seconds'])}, {streamed['seconds'] / seconds:.2f} times as long as "
        "the first layout would take (the time to offload feature maps is not counted)"
    ]


def _row(number: int, row: dict) -> dict:
    """Return the row of the printed table about one layout, as a dict from column to value.

    Args:
        number: the number of the row in the table, from 1.
        row: the entry of the layout in :attr:`PlannedLayouts.facts`.
    """
    settings = row["settings"]
    return {
        "": number,
        "samples": settings["mesh.samples"],
        "tiles": settings["mesh.tiles"],
        "stages": settings["mesh.stages"],
        "exchange": settings.get("spatial.exchange_every", ""),
        "micro-batches": settings["train.accumulate"],
        "schedule": settings.get("pipeline.schedule", ""),
        "recompute": settings["pipeline.recompute"],
        "step [s]": row["seconds"],
        "memory [GB]": row["memory"] / 1e9,
        "most is lost by": row["largest_loss"],
    }
