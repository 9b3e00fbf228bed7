"""One image through a pipeline whose stages compute it tile after tile, against one rank that does: the bound is each rank's share of the work.

Without live norms tiles go back in turn while others go forward, each computed once: two perfectly balanced stages could be twice as fast, but for the first
tiles and the last. With live norms, or where no tile is kept, the first stage computes its tiles twice, for (2 f + b) + (f + b) of what one rank does in f + b.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Reading, measure, parent, repeats_of, report, run_ranks
from benchmarks.rows import Rows
from distseg.config.settings import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
    StreamingConfig,
    TrainConfig,
)
from distseg.config.sizes import Size

QUESTION = "How much faster do two stages compute an image tile after tile than one rank?"
ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(3)])
    parser.add_argument(
        "--size", type=Size, default=Size((1536, 512)), help="of the image (default: %(default)s)"
    )
    parser.add_argument(
        "--tiles",
        type=Size,
        default=Size((12, 1)),
        help="that it is cut into (default: %(default)s)",
    )
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument(
        "--images", type=int, default=1, help="micro-batches of a step (default: %(default)s)"
    )
    parser.add_argument("--norms", nargs="*", default=["none", "instance"])
    parser.add_argument(
        "--steps",
        type=int,
        default=2,
        help="of a job, after one; the fastest counts (default: %(default)s)",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FOLDER",
        help="another checkout, whose two stages are timed too",
    )
    parser.add_argument("--job", help="internal: norm and stages of one job")
    options = parser.parse_args(arguments)
    if options.job:
        return job(options)
    if options.quick:
        options.size, options.tiles, options.depth, options.channels, options.steps = (
            Size((48, 32)),
            Size((3, 1)),
            1,
            4,
            1,
        )
    found = {
        norm: measure(_cases(norm, options), repeats_of(options), warmup=0)
        for norm in options.norms
    }
    rows = [
        _row(norm, case, results) for norm, results in found.items() for case in results.samples
    ]
    notes = "one thread a rank; of each job the fastest step; speed-up: against one rank in the same turn, median and range"
    parameters = {
        "network": f"U-Net, depth {options.depth}, {options.channels} channels",
        "image": str(options.size),
        "tiles": str(options.tiles),
        "images": options.images,
    }
    report(
        "stages_streaming",
        QUESTION,
        Rows(rows, {"samples": {norm: results.as_dict() for norm, results in found.items()}}),
        options,
        parameters,
        notes,
    )


def _cases(norm: str, options: argparse.Namespace) -> dict:
    given = [
        "--size",
        str(options.size),
        "--tiles",
        str(options.tiles),
        "--channels",
        str(options.channels),
        "--depth",
        str(options.depth),
    ]
    given += ["--images", str(options.images), "--steps", str(options.steps)]

    def seconds(stages: int, checkout: Path = ROOT) -> Reading:
        start = f"import runpy, sys; sys.path.insert(0, {str(checkout)!r}); runpy.run_path({__file__!r}, run_name='__main__')"
        return Reading(
            run_ranks(stages, ["-c", start, "--job", f"{norm} {stages}", *given])["seconds"]
        )

    cases = {"one rank": lambda: seconds(1), "two stages": lambda: seconds(2)}
    return cases | (
        {"two stages before": lambda: seconds(2, options.against.resolve())}
        if options.against
        else {}
    )


def _row(norm: str, case: str, results) -> dict:
    spread, faster = results.spread(case), results.speedup(case)
    return {
        "norm": norm,
        "case": case,
        "min [s]": spread.min,
        "median [s]": spread.median,
        "speed-up": faster.median,
        "from": faster.min,
        "to": faster.max,
    }


def job(options: argparse.Namespace) -> None:
    import torch

    from benchmarks.steps import timed
    from distseg.comm.launch import keep_freed_memory, world
    from distseg.comm.mesh import Mesh
    from distseg.models.zoo import outline_model
    from distseg.training.engine import Engine
    from distseg.training.verify import RandomImages, own_pieces

    torch.set_num_threads(1)
    keep_freed_memory()
    norm, stages = options.job.split()
    model = ModelConfig(
        depth=options.depth,
        num_convs=2,
        base_channels=options.channels,
        in_channels=4,
        out_channels=3,
        norm=norm,
        dropout=0.1,
    )
    config = Config(
        model=model, mesh=MeshConfig(stages=int(stages)), data=DataConfig(images=1), train=TrainConfig(accumulate=options.images), pipeline=PipelineConfig(schedule="1f1b"),
        streaming=StreamingConfig(tiles=options.tiles, scratch="memory"),
    )  # fmt: skip
    comm = world()
    mesh = Mesh(comm, 1, Size((1, 1)), int(stages))
    engine = Engine(config, mesh, outline_model(config.model), options.size)
    own = own_pieces(engine, RandomImages(options.size, 4, 3, config.loss))

    def step() -> float:
        loss = engine.backward(own)
        engine.update(1e-3)
        return loss

    step()
    found = timed(step, comm, options.steps, 0.0)["every"]
    if comm.rank == 0:
        print(json.dumps({"seconds": min(found)}))


if __name__ == "__main__":
    main(sys.argv[1:])
