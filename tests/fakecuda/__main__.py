"""Runs the cases that standard input names, each a step of each stage's rank, and prints what was found as JSON.

    python -m fakecuda LIBRARY < {"name": {"config": {...}, "image": "64x64", "tile": [0, 0]}, ...}

Prints {"name": {"waits": [{"file:line kind": count} for each stage], "error": null or the traceback}}.
"""

import json
import sys
import traceback

from . import library

library.load(sys.argv[1])  # before PyTorch is imported

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

from distseg import config as sections  # noqa: E402
from distseg.extents import Extents  # noqa: E402
from distseg.train import engine as engines  # noqa: E402
from distseg.train.engine import Engine  # noqa: E402
from distseg.verify import own_pieces, prepare  # noqa: E402

from .ranks import mesh_at  # noqa: E402
from .stand_ins import stand_in  # noqa: E402
from .waits import Waits  # noqa: E402


def run(case: dict) -> list[dict[str, int]]:
    """The waits of one step, stage by stage."""
    config, told = _config(case["config"]), {}
    return [_step(config, case, stage, told) for stage in range(config.mesh.stages)]


def _config(settings: dict) -> sections.Config:
    kinds = {"tiles": Extents, "tiles_per_rank": Extents}
    made = lambda name, fields: getattr(sections, f"{name.capitalize()}Config")(**{k: kinds.get(k, lambda v: v)(v) for k, v in fields.items()})
    return sections.Config(**{name: made(name, fields) for name, fields in settings.items()})


def _step(config: sections.Config, case: dict, stage: int, told: dict) -> dict[str, int]:
    config, model, images = prepare(config, Extents(case["image"]))
    waits = Waits()
    mesh = mesh_at(config.mesh.samples, config.mesh.tiles, config.mesh.stages, case.get("tile", (0, 0)), stage, waits.order, told)
    with stand_in(waits), FakeTensorMode(allow_non_fake_inputs=True), waits:
        engine = Engine(config, mesh, model, images.size, torch.device("cuda", 0), case.get("precision", "fp32"), case.get("channels_last", False))
        plant(engine, case.get("plant"))
        for step in range(2):  # the first makes what later ones find made
            waits.found.clear()
            with waits.ignored():
                pieces = own_pieces(config, mesh, images, engine.reading)
            engine.backward(pieces)
            engine.update(1e-3)
    for p in engine.parameters:
        assert isinstance(p, FakeTensor) and p.is_cuda and p.grad is not None and p.grad.is_cuda
    return dict(waits.found)


def plant(engine: Engine, what: str | None) -> None:
    """Put in a fault that must be found."""
    if what == "a mask on the host":
        engine.loss.rows = lambda logits, labels, rows=engine.loss.rows: rows(logits + torch.ones(logits.shape), labels)


def main() -> None:
    found = {}
    for name, case in json.load(sys.stdin).items():
        try:
            found[name] = {"waits": run(case), "error": None}
        except Exception:
            found[name] = {"waits": [], "error": traceback.format_exc()}
    json.dump(found, sys.stdout)


main()
