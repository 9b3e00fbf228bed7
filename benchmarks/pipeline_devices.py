"""What each way to run the stages of a model costs on the same cores: a process a stage, one process with torchgpipe, and no stages at all.

On CPUs one process has one device, whatever it is called: torchgpipe's stages then take turns, each with all threads. So
two cores tell what the two ways cost, not what torchgpipe's stages gain from devices of their own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from benchmarks.harness import Reading, Results, measure, parent, repeats_of, report, run_ranks
from benchmarks.pipeline_steps import Step, config_of
from benchmarks.rows import Rows
from benchmarks.steps import CLASSES, Setting, fastest_step, timed
from distseg.comm.collective import Alone
from distseg.comm.launch import keep_freed_memory, world
from distseg.config.sizes import Size
from distseg.models.network import flat_layers
from distseg.models.zoo import build_model
from distseg.runtime.optimizer import make_optimizer
from distseg.training.verify import RandomImages

QUESTION = "What do stages cost: over two ranks, on two devices of one process with torchgpipe, and one stage beside plain PyTorch?"
RANKS = 2
PUBLISHED = {
    ("one device", "except_last"): 0.858
}  # torchgpipe's documentation: U-Net, one partition, on a GPU
PUBLISHED_MICRO_BATCHES = 2


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    setting = Setting(options.size, options.depth, 2, options.base)
    if options.quick:
        setting, options.micro_batches, options.patience = Setting(Size((32, 32)), 1, 1, 4), 2, 0.0
    keep_freed_memory()
    if options.worker:
        return _worker(setting, options)
    modes = ["never"] if options.quick else ["never", "except_last"]
    groups = {
        (RANKS, options.micro_batches): _on_two_cores,
        (1, PUBLISHED_MICRO_BATCHES): _on_one_core,
    }
    found = {
        (threads, m): measure(
            cases(setting, m, options, modes),
            repeats_of(options),
            warmup=0 if options.quick else 1,
            baseline="plain",
        )
        for (threads, m), cases in groups.items()
    }
    rows = [
        _row(threads, m, case, results)
        for (threads, m), results in found.items()
        for case in results.samples
    ]
    parameters = {
        "setting": setting.as_dict(),
        "micro-batches": options.micro_batches,
        "ranks": RANKS,
    }
    notes = (
        f"U-Net of depth {setting.depth}, 2 convs a level, base {setting.base_channels}, instance norm, dropout 0.1, fp32, AdamW; a step is m "
        f"micro-batches of one window of {setting.size}\n"
        "speed: plain / case, median of the turns, with its range; plain: the same step in PyTorch, micro-batch after micro-batch;\n"
        "2 ranks: placement linear, 1f1b, one thread each; devices: placement devices on cpu (cpu, cpu), GPipe; recompute except_last,\n"
        "torchgpipe's default, computes all forward passes but the last twice; published: torchgpipe's own, a larger U-Net on a GPU, one partition"
    )
    samples = {
        f"{threads} threads, m = {m}": results.as_dict() for (threads, m), results in found.items()
    }
    report(
        "pipeline_devices", QUESTION, Rows(rows, {"samples": samples}), options, parameters, notes
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(5)])
    parser.add_argument(
        "--size", type=Size, default=Size((192, 192)), help="of a window (default: %(default)s)"
    )
    parser.add_argument("--depth", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument(
        "--base", type=int, default=32, help="channels of the first level (default: %(default)s)"
    )
    parser.add_argument(
        "--micro_batches", type=int, default=4, help="of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=10.0,
        help="seconds a case waits for a quiet machine (default: %(default)s)",
    )
    parser.add_argument(
        "--worker", default=None, metavar="RECOMPUTE", help="be one rank of the pipeline over ranks"
    )
    return parser.parse_args(arguments)


def _on_two_cores(
    setting: Setting, m: int, options: argparse.Namespace, modes: list[str]
) -> dict[str, Callable[[], Reading]]:
    """Name -> the seconds of a step of ``m`` micro-batches with two threads in all."""
    cases = {"plain": _seconds(plain(setting, m), options, RANKS)}
    for recompute in modes:
        cases[f"2 ranks, {recompute}"] = lambda recompute=recompute: _over_ranks(options, recompute)
        cases[f"2 devices, {recompute}"] = _pipeline(
            setting,
            m,
            options,
            RANKS,
            placement="devices",
            devices=["cpu"] * RANKS,
            recompute=recompute,
        )
    return cases


def _on_one_core(
    setting: Setting, m: int, options: argparse.Namespace, modes: list[str]
) -> dict[str, Callable[[], Reading]]:
    """The same with one thread and one stage."""
    layers = len(flat_layers(build_model(setting.config().model)))
    cases = {"plain": _seconds(plain(setting, m), options, 1)}
    for recompute in modes:
        cases[f"one stage, {recompute}"] = _pipeline(
            setting, m, options, 1, balance=[layers], recompute=recompute
        )
        cases[f"one device, {recompute}"] = _pipeline(
            setting, m, options, 1, placement="devices", devices=["cpu"], recompute=recompute
        )
    return cases


def _pipeline(
    setting: Setting, m: int, options: argparse.Namespace, threads: int, **pipeline
) -> Callable[[], Reading]:
    config = config_of(setting, m, **pipeline)
    return _seconds(Step.of(config, setting, world()), options, threads)


def _seconds(step: Callable, options: argparse.Namespace, threads: int) -> Callable[[], Reading]:
    """The case that runs ``step`` once to warm up, then measures it, with so many threads."""

    def case() -> Reading:
        torch.set_num_threads(threads)
        return Reading(_fastest(step, Alone(), options))

    return case


def _fastest(step: Callable, comm, options: argparse.Namespace) -> float:
    step()
    found = timed(step, comm, 1 if options.quick else 2, options.patience)
    return fastest_step(found)


def _over_ranks(options: argparse.Namespace, recompute: str) -> Reading:
    given = {
        name: getattr(options, name)
        for name in ("size", "depth", "base", "micro_batches", "patience")
    }
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    return Reading(
        run_ranks(
            RANKS,
            [
                "-m",
                "benchmarks.pipeline_devices",
                "--worker",
                recompute,
                *flags,
                *["--quick"] * options.quick,
            ],
        )["seconds"]
    )


def _worker(setting: Setting, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    comm = world()
    seconds = _fastest(
        Step.of(
            config_of(setting, options.micro_batches, RANKS, recompute=options.worker),
            setting,
            comm,
        ),
        comm,
        options,
    )
    if comm.rank == 0:
        print(json.dumps({"seconds": seconds}))


def plain(setting: Setting, micro_batches: int) -> Callable[[], float]:
    """The step as a PyTorch user writes it: gradients of the micro-batches add up, then AdamW."""
    config = setting.config()
    model = build_model(config.model).train()
    parameters = list(model.parameters())
    optimizer = make_optimizer(config.optim, dict(model.named_parameters()))
    images = RandomImages(setting.size, config.model.in_channels, CLASSES, config.loss)
    batches = [(x.float()[None], y[None]) for x, y in map(images.whole, range(micro_batches))]
    valid = sum((y != config.loss.ignore_index).sum().item() for _, y in batches)

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for x, y in batches:
            loss = (
                F.cross_entropy(model(x), y, ignore_index=config.loss.ignore_index, reduction="sum")
                / valid
            )
            loss.backward()
            total += loss.item()
        torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()
        optimizer.step()
        return total

    return step


def _row(threads: int, m: int, case: str, results: Results) -> dict:
    name, _, recompute = case.partition(", ")
    spread, speed = results.spread(case), results.speedup(case)
    return {
        "threads": threads, "m": m, "case": name, "recompute": recompute or "-", "min [s]": spread.min, "median [s]": spread.median,
        "speed / plain": speed.median, "from": speed.min, "to": speed.max, "published": PUBLISHED.get((name, recompute)),
    }  # fmt: skip


if __name__ == "__main__":
    main()
