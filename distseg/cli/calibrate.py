"""Write a profile of this machine: ``distseg calibrate --save FILE``."""

from __future__ import annotations

import gc

import torch

from distseg.cli.planned_training import EXCHANGE, LATENCY, LINK, memory_of_a_rank, with_sharing
from distseg.comm.launch import memory_in_use, release_freed_memory, set_up
from distseg.config.settings import RunConfig
from distseg.planning import calibration
from distseg.planning.machine import Machine
from distseg.planning.rates import ARITHMETIC
from distseg.report.tables import table
from distseg.runtime.precision import fast_bf16

_FOR_OPERATIONS = 0.7  # share of the time in which operations are measured


def calibrate(run: RunConfig, world, seconds: float) -> Machine:
    """Measure the speed of this machine, and return it as a profile.

    All ranks of ``world`` must call the function together, and measure at the same time.

    Args:
        run: the settings of section ``run``, for device and threads.
        world: the communicator of the ranks. One rank measures no messages.
        seconds: the approximate time that the measurement may take.
    """
    device = set_up(world, run.device, run.threads).device
    fast = all(world.allgather(fast_bf16(device)))
    precisions = ("fp32", "bf16") if fast else ("fp32",)
    rates, left_out = calibration.operation_rates(
        world, device, precisions, _FOR_OPERATIONS * seconds
    )
    timings = calibration.message_timings(world)
    latency, link = calibration.latency_and_link(timings) if timings else (LATENCY, LINK)
    call = max(world.allgather(calibration.call_seconds(device)))
    gc.collect()
    release_freed_memory()
    memory, ranks = memory_of_a_rank(world, device)
    source = f"distseg calibrate, {len(rates.rows)} operations on {world.size} ranks at once"
    if left_out:
        source += f"; {left_out} left out for lack of time"
    known = "measured" if timings else "guess"
    kinds = dict.fromkeys(("arithmetic", "traffic", "call", "memory", "base"), "measured")
    kinds |= dict.fromkeys(("latency", "link", "exchange", "sharing"), known)
    kinds |= dict.fromkeys(("network", "ranks", "spread"), "guess")
    sources = dict.fromkeys(("arithmetic", "traffic", "call", "base"), source)
    sources |= dict.fromkeys(
        ("latency", "link", "exchange", "sharing"),
        f"messages between {world.size} ranks" if timings else "one rank",
    )
    sources |= {"network": "as link", "memory": "of the machine", "ranks": "of this run"}
    sources["spread"] = "distseg plan --machine here measures it for a network"
    machine = Machine(
        torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU",
        calibration.typical(rates, "arithmetic", precisions[-1]),
        calibration.typical(rates, "traffic", precisions[-1]),
        call,
        latency,
        link,
        link,
        memory,
        float(max(world.allgather(memory_in_use(device)))),
        ranks,
        exchange=EXCHANGE,
        precision=precisions[-1],
        rates=rates,
        timings=timings,
        kinds=kinds,
        sources=sources,
    )
    return with_sharing(machine, world, device) if timings else machine


def text(machine: Machine) -> str:
    """Return the measured numbers of a machine as tables for the terminal."""
    rows = [
        {
            "operation": row.kind,
            "number type": row.precision,
            "channels": row.channels,
            "cells": row.cells,
            "rate": f"{row.rate / 1e9:.3g} {'GFLOP/s' if row.kind in ARITHMETIC else 'GB/s'}",
        }
        for row in machine.rates.rows
    ]
    found = [f"{machine.name}, {machine.ranks} ranks a node", table(rows)]
    if machine.timings:
        found.append(
            table(
                [
                    {"exchange": one.kind, "ranks": one.ranks, "bytes": one.bytes}
                    | {"time [us]": one.seconds * 1e6}
                    for one in machine.timings
                ]
            )
        )
    guesses = ", ".join(machine.guesses)
    return "\n\n".join([*found, f"guessed, so check these in the profile: {guesses}"])
