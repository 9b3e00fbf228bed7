"""Write a commented config for the images of a store: ``distseg init STORE``."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import yaml

from distseg.cli.first_config import Choice, Computer, FirstConfig, TrainingData, first_config
from distseg.cli.planned_training import EXCHANGE
from distseg.comm.threads import choose_threads, own_limits
from distseg.config.settings import DataConfig
from distseg.config.sizes import Size
from distseg.config.units import si
from distseg.data.formats.plausible import memory_limit
from distseg.data.sampler import epoch_samples
from distseg.data.store.store import Store
from distseg.planning.machine import Machine, load_machine
from distseg.planning.roofline import CORE
from distseg.training.conflicts import check_settings
from distseg.training.verify import prepare

# Upper bound of the bytes of a process with PyTorch and its libraries, without tensors.
_BASE = 0.6e9
# The seconds that calling a layer takes at least, in the order of what distseg plan measures.
_CALL = 1e-4
# Number of crops in which the pixels of each class are counted.
_CROPS_COUNTED = 64
# Profiles by a part of a GPU's name. An unknown GPU counts as the slowest of them.
_PROFILES = {"H100": "h100", "H200": "h100", "A100": "a100", "V100": "dgx1-v100"}


def init(store: str, output: str, network: str | None, minutes: float) -> list[str]:
    """Write a config for training on a store, and return the lines to print.

    Args:
        store: the path of the store.
        output: the config file to write.
        network: the value of ``model.name``; None to choose one.
        minutes: the time that training should take; the number of epochs is chosen for it.

    Raises:
        ValueError, OSError: there is no store, its training images have no labels, no network fits
            the data, or ``output`` exists.
    """
    _check_new(output)
    opened = Store(store)
    data, run = training_data(opened), f"runs/{Path(store).stem}"
    count_near = partial(counts_near, opened)
    found = first_config(data, this_computer(), network, minutes, run, count_near)
    model = prepare(found.config, None).model
    check_settings(found.config, model)
    text = as_yaml(found.choices, description(data))
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    with open(output, "x", encoding="utf-8") as file:  # refuses a file that appeared meanwhile
        file.write(text)
    return [description(data), *_closing(found, output)]


def _check_new(output: str) -> None:
    if Path(output).exists() or Path(output).is_symlink():
        raise ValueError(
            f"--output is {output}, which exists, and init overwrites nothing: name another file, "
            "or remove this one"
        )


def training_data(store: Store) -> TrainingData:
    """Return the facts about a store, such as image sizes, from which settings are chosen.

    Raises:
        ValueError: the store has no training images, or none of them has a label.
    """
    names = store.split("train")
    if store.of_images:
        labels = [store.label(name) for name in names]
        numbers = len(store.classes) == 1
        counts = (len(labels),) if numbers else _counts(labels, len(store.classes))
    else:
        labelled = [store.class_counts(name) for name in names if store.has_labels(name)]
        counts = tuple(map(sum, zip(*labelled)))
        if not sum(counts):
            raise ValueError(
                f"no training image of {store.path} has labels, so nothing can be learnt: prepare "
                "the store with --masks or --labels"
            )
    return TrainingData(
        store.path,
        tuple(store.size(name) for name in names),
        store.bands,
        tuple(store.classes),
        counts,
        store.of_images,
        tuple(store.splits),
    )


def counts_near(store: Store, crop: Size, focus: str) -> tuple[int, ...]:
    """Return the number of pixels of each class in random crops that are placed near one class.

    The crops are drawn as training draws them with ``data.focus_class``. They are the same ones at
    each call.

    Args:
        store: the store; its labels are read in these crops only.
        crop: the crop size.
        focus: the name of the class near which the crops are placed.
    """
    settings = DataConfig(crop=crop, focus_class=focus, focus_share=1.0)
    counts = np.zeros(len(store.classes), np.int64)
    for sample in epoch_samples(store, "train", settings, seed=0, epoch=0, batch=_CROPS_COUNTED)[0]:
        labels = store.labels(sample.image, sample.box).ravel()
        counts += np.bincount(labels, minlength=len(counts))[: len(counts)]
    return tuple(counts.tolist())


def _counts(labels: Sequence[int | float], classes: int) -> tuple[int, ...]:
    return tuple(sum(label == k for label in labels) for k in range(classes))


def this_computer() -> Computer:
    """Return the cores or GPUs of this machine, with their memory and constants for their speed."""
    gpus = torch.cuda.device_count()
    if gpus:
        shown = torch.cuda.get_device_properties(0)
        profile = next((p for part, p in _PROFILES.items() if part in shown.name), "dgx1-v100")
        name = f"{gpus} {shown.name}" if gpus > 1 else shown.name
        return Computer(name, gpus, float(shown.total_memory), load_machine(profile), True)
    limits = own_limits()
    # Without the variables of the environment: they set the threads of a rank, and this the ranks.
    cores = choose_threads(None, {}, [limits], 0).count
    name = f"{cores} CPU core{'s' if cores > 1 else ''}"
    return Computer(name, cores if _launcher(2) else 1, float(memory_limit()), _core())


def _core() -> Machine:
    """Return one CPU core as a machine of the planner, with the speeds in :data:`CORE`.

    The speed of messages is guessed.
    """
    return Machine(
        "a CPU core of 90 GFLOP/s",
        CORE.flops_per_second,
        CORE.bytes_per_second,
        _CALL,
        latency=2e-5,
        link=2e9,
        network=2e9,
        memory=1.0,
        base=_BASE,
        ranks=1,
        exchange=EXCHANGE,
    )


def _launcher(ranks: int) -> str | None:
    """Return the command that starts ``ranks`` ranks; ``""`` for one rank, None without a launcher.

    mpirun needs mpi4py. Without it, torchrun starts the ranks.
    """
    if ranks == 1:
        return ""
    if shutil.which("mpirun") and find_spec("mpi4py"):
        return f"mpirun -n {ranks} "
    return f"torchrun --nproc-per-node {ranks} -m " if shutil.which("torchrun") else None


def description(data: TrainingData) -> str:
    """Return one line about a store: number, size and bands of its images, and its classes."""
    sizes = sorted(set(data.sizes), key=lambda size: (Size(size).volume, size))
    size = " to ".join(str(Size(s)) for s in dict.fromkeys((sizes[0], sizes[-1])))
    many = len(data.sizes)
    words = (
        f"{data.path}: {many} training {'image' if many == 1 else 'images'} of {size}, "
        f"{data.bands} band{'' if data.bands == 1 else 's'}"
    )
    if data.numbers:
        return f"{words}, labels are numbers ({data.classes[0]})"
    shares = [f"{name} {100 * share:.3g} %" for name, share in zip(data.classes, data.shares)]
    shown = shares if len(shares) <= _SHOWN else [*shares[:_SHOWN], f"{len(shares)} classes in all"]
    return f"{words}; {', '.join(shown)}"


_SHOWN = 8  # classes in the description of a store


def as_yaml(choices: Sequence[Choice], first: str) -> str:
    """Return the text of a config: sections with their settings, and a comment for each setting.

    Args:
        choices: the settings, in the order of the sections.
        first: the line about the data, for the head of the file.
    """
    lines = [
        "# Written by distseg init. Change what you like: docs/settings.md, distseg train --help.",
        f"# {_printable(first)}",
    ]
    entries = [
        f"  {choice.setting.partition('.')[2]}: {_value(choice.value)}" for choice in choices
    ]
    width = min(_WIDEST, max(map(len, entries)))
    section = ""
    for choice, entry in zip(choices, entries):
        name = choice.setting.partition(".")[0]
        if name != section:
            section = name
            lines.append(f"{name}:")
        lines.append(f"{entry:{width}}  # {_printable(choice.why)}")
    return "\n".join([*lines, ""])


_WIDEST = 40  # columns of a setting before its comment


def _value(value) -> str:
    plain = str(value) if isinstance(value, Size) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _printable(text: str) -> str:
    """Return a text in which ``?`` replaces line breaks and other characters not allowed in YAML.

    Such a character could end a comment.
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _closing(found: FirstConfig, output: str) -> list[str]:
    """Return the lines to print: the file, the expected time and memory, and the next command."""
    config, name = found.config, shlex.quote(output)
    lines = [
        f"wrote {output}: {config.model.name}, {config.step_images} "
        f"image{'s' if config.step_images > 1 else ''} a step, {config.train.epochs} epochs"
    ]
    if found.estimate is not None:
        why = next(choice.why for choice in found.choices if choice.setting == "train.epochs")
        lines.append(f"{why}; up to {si(found.estimate.memory, 'B')} of memory a rank")
    ranks = config.mesh.samples
    return [*lines, f"next: {_launcher(ranks)}distseg train {name}"]
