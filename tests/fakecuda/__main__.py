"""Runs the cases that standard input names, each a step of each stage's rank, and prints what was found as JSON.

    python -m fakecuda LIBRARY < {"name": {"config": {...}, "image": "64x64", "tile": [0, 0]}, ...}

Prints {"name": {"waits": [{"file:line kind": count} for each stage], "error": null or the traceback}}.
"""

import json
import sys
import traceback
from contextlib import suppress
from types import SimpleNamespace

from . import library

library.load(sys.argv[1])  # before PyTorch is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

from distseg.cli.predict import Predictor  # noqa: E402
from distseg.config import settings as sections  # noqa: E402
from distseg.config.sizes import Size  # noqa: E402
from distseg.tiling.tile import ReceptiveField  # noqa: E402
from distseg.training.engine import Engine  # noqa: E402
from distseg.training.verify import own_pieces, prepare  # noqa: E402

from .faults import planted  # noqa: E402
from .ranks import Untold, mesh_at  # noqa: E402
from .stand_ins import stand_in  # noqa: E402
from .waits import Waits  # noqa: E402


def run(case: dict) -> list[dict[str, int]]:
    """The waits of one step, stage by stage."""
    config, told = _config(case["config"]), {}
    while True:
        try:
            return [_step(config, case, stage, told) for stage in range(config.mesh.stages)]
        except Untold:
            before = len(told)
            with suppress(Untold):  # of a V's ranks each is told by the other: they go on in turn
                for stage in reversed(range(config.mesh.stages)):
                    _step(config, case, stage, told)
            if len(told) == before:
                raise


def _config(settings: dict) -> sections.Config:
    kinds = {"tiles": Size, "tiles_per_rank": Size}

    def made(name, fields):
        return getattr(sections, f"{name.capitalize()}Config")(
            **{k: kinds.get(k, lambda v: v)(v) for k, v in fields.items()}
        )

    return sections.Config(**{name: made(name, fields) for name, fields in settings.items()})


def _step(config: sections.Config, case: dict, stage: int, told: dict) -> dict[str, int]:
    prepared = prepare(config, Size(case["image"]))
    config, model, images = prepared.config, prepared.model, prepared.images()
    waits = Waits()
    mesh = mesh_at(
        config.mesh.samples,
        config.mesh.tiles,
        config.mesh.stages,
        case["tile"],
        stage,
        waits.order,
        told,
    )
    reach = ReceptiveField(*((n, n) for n in case["reach"])) if case.get("reach") else None
    with (
        stand_in(waits, case["direct"], reach),
        planted(case.get("plant")),
        FakeTensorMode(allow_non_fake_inputs=True),
        waits,
    ):
        engine = Engine(
            config,
            mesh,
            model,
            images.size,
            torch.device("cuda", 0),
            case["precision"],
            case["channels_last"],
        )
        messages = config.spatial.exchanges or config.mesh.stages > 1
        for _step in range(
            2 if messages and reach is None else 1
        ):  # the first makes the buffers that the second finds
            waits.found.clear()
            with waits.ignored():
                pieces = own_pieces(engine, images)
            engine.backward(pieces)
            engine.update(1e-3)
        if "predict" in case:
            waits.found.clear()
            _predict(engine, Size(case["image"]), Size(case["predict"]))
    for p in engine.parameters:
        assert isinstance(p, FakeTensor) and p.is_cuda and p.grad is not None and p.grad.is_cuda
    return dict(waits.found)


def _predict(engine: Engine, size: Size, tile: Size) -> None:
    """All tiles of an image."""
    channels = next(engine.model.parameters()).shape[1]
    source = SimpleNamespace(
        size=size, read=lambda box: np.zeros((channels, *box.size), np.float32)
    )
    predictor = Predictor(
        engine.model,
        engine.mesh.replicas,
        engine.devices,
        engine.autocast,
        tile,
        channels_last=engine.channels_last,
    )
    for box, logits in predictor(source):
        assert logits.shape[1:] == box.size


def main() -> None:
    found = {}
    for name, case in json.load(sys.stdin).items():
        try:
            found[name] = {"waits": run(case), "error": None}
        except Exception:
            found[name] = {"waits": [], "error": traceback.format_exc()}
    json.dump(found, sys.stdout)


main()
