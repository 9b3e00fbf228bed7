"""The trial of one network: a step in tiles against plain PyTorch on whole images, in float64.

distseg's own comparison (:func:`distseg.training.verify.verify`) holds the tiles against its serial program.
So that no mistake of that program hides one, the gradients are also held against a forward and a
backward pass written here.
"""

from __future__ import annotations

import json
import math
import re
import struct
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.research import Entry
from distseg.config.settings import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    SpatialConfig,
    StreamingConfig,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.training.verify import passed, verify

CLASSES, IMAGES, IGNORED = 3, 2, 255
SIZES = {1: (371,), 2: (61, 75), 3: (19, 29, 27)}
LAYOUTS = {  # name: (tiles of a rank by dims, streamed or held at once)
    "exchange": ({1: (4,), 2: (2, 3), 3: (1, 2, 3)}, False),
    "streaming": ({1: (3,), 2: (3, 2), 3: (2, 2, 1)}, True),
}
TOLERANCE = 1e-12  # of distseg's comparison
OWN_TOLERANCE = 1e-9  # of ours: PyTorch's own kernels of norms lose more digits
_MULTIPLE = re.compile(r"multiples? of (\d+)")


@dataclass(frozen=True)
class Finding:
    """The outcome of one network in one layout.

    Attributes:
        kind: exact, refused, silent or crash.
        error: largest relative error of distseg's comparison and of ours.
        said: the message of a refusal or of a crash.
    """

    kind: str
    error: float | None = None
    said: str = ""


def trial(entry: Entry, world, layouts: dict = LAYOUTS) -> dict:
    """Return the row of a network: its kind over all layouts, each one's finding, the size."""
    torch.set_num_threads(1)
    size, findings = SIZES[entry.dims], {}
    for name in layouts:
        finding = _finding(entry, name, size, world)
        if finding.kind in ("refused", "crash") and (larger := _larger(entry, finding.said, size)):
            size = larger
            finding = _finding(entry, name, size, world)
        findings[name] = finding
    order = ("silent", "crash", "refused", "exact")
    worst = min(findings.values(), key=lambda f: order.index(f.kind))
    row = {"group": entry.group, "network": entry.name, "kind": worst.kind}
    row |= {name: f.kind if f.error is None else f.error for name, f in findings.items()}
    row["only multiples"] = size != SIZES[entry.dims] and _takes(entry, SIZES[entry.dims])
    named = _names_line(entry, worst.said) if worst.kind == "refused" else None
    return row | {"size": str(Size(size)), "line named": named, "said": worst.said}


def _names_line(entry: Entry, said: str) -> bool:
    """Return True if a message names a line of the network's own file."""
    return bool(re.search(rf"\b{entry.group}\.py\W+(line )?\d+", said))


def _larger(entry: Entry, said: str, size: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return a larger size of images to try, or None.

    It is what a refusal asks for, or one that the plain network takes.
    """
    correction = _MULTIPLE.search(said)
    if not correction and _takes(entry, size):
        return None
    for multiple in [int(correction[1])] if correction else (2, 4, 8, 16):
        larger = tuple(-(-n // multiple) * multiple for n in size)
        if larger != size and (correction or _takes(entry, larger)):
            return larger
    return None


def _takes(entry: Entry, size: tuple[int, ...]) -> bool:
    """Return True if the plain network makes a vector, or a map of that size, of such images."""
    try:
        model, x = entry.make(entry.bands, CLASSES), torch.randn(IMAGES, entry.bands, *size)
        made = _outputs(model(x))[0]
    except RuntimeError:
        return False
    return made.dim() == 2 or tuple(made.shape[2:]) == size


def plain_failure(entry: Entry) -> str:
    """Return why the network is no valid example in plain PyTorch; an empty text if it is one."""
    for multiple in (1, 2, 4, 8, 16):
        size = tuple(-(-n // multiple) * multiple for n in SIZES[entry.dims])
        try:
            model = entry.make(entry.bands, CLASSES).double()
            x = torch.randn(IMAGES, entry.bands, *size).double()
            outputs = _outputs(model(x))
            made = outputs[0]
            sum(y.square().mean() for y in outputs).backward()
        except RuntimeError as e:
            why = f"{Size(size)}: {e}"
            continue
        if not made.isfinite().all():
            return "not finite"
        if made.shape[1] == CLASSES and (made.dim() == 2 or tuple(made.shape[2:]) == size):
            return ""
        why = f"{tuple(made.shape)} of {tuple(x.shape)}"
    return why


def _finding(entry: Entry, layout: str, size: tuple[int, ...], world) -> Finding:
    seeds = (0, 1, 2) if _is_random(entry) else (0,)  # one draw may hide what another shows
    found = [_once(entry, layout, size, world, seed, oracle=len(seeds) == 1) for seed in seeds]
    return next((f for f in found if f.kind != "exact"), max(found, key=lambda f: f.error or 0.0))


def _once(entry: Entry, layout: str, size, world, seed: int, oracle: bool) -> Finding:
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "step.safetensors"
        try:
            config = _config(entry, layout, seed)
            report = verify(config, world, Size(size), dump=str(dump) if oracle else None)
        except ValueError as e:
            return _stopped(e)
        except Exception as e:
            where = traceback.extract_tb(e.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            return Finding("crash", said=f"{type(e).__name__} at {place}: {_one_line(e)}")
        own, moves = own_error(entry, dump, report["loss"]["distributed"]) if oracle else (0.0, 0.0)
    error = report["max_error"]
    if not passed(report, max(TOLERANCE, moves)):
        return Finding(
            "silent",
            error,
            f"against distseg's serial program {error:.1e}, against plain PyTorch {own:.1e}",
        )
    if not own <= max(OWN_TOLERANCE, moves):
        return Finding(
            "silent", own, f"against plain PyTorch {own:.1e}; distseg's comparison says {error:.1e}"
        )
    return Finding("exact", error)


def _stopped(error: ValueError) -> Finding:
    """Return the finding of a refusal, or of a crash passed on as the text of a traceback."""
    said = str(error)
    if "Traceback (most recent call last)" not in said:
        return Finding("refused", said=_one_line(error))
    places = re.findall(r'File "[^"]*/([^/"]+)", line (\d+)', said)
    file, line = places[-1] if places else ("?", "?")
    return Finding("crash", said=f"{said.strip().splitlines()[-1]} at {file}:{line}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _config(entry: Entry, layout: str, seed: int) -> Config:
    tiles, streamed = LAYOUTS[layout]
    own = Size(tiles[entry.dims])
    return Config(
        model=ModelConfig(
            entry.target, in_channels=entry.bands, out_channels=CLASSES, outputs=_weights(entry)
        ),
        data=DataConfig(images=IMAGES),
        mesh=MeshConfig(tiles=Size((1,) * entry.dims)),
        spatial=SpatialConfig()
        if streamed
        else SpatialConfig(tiles_per_rank=own, exchange_every="1"),
        streaming=StreamingConfig(tiles=own, scratch="memory") if streamed else StreamingConfig(),
        optim=OptimConfig("sgd"),
        train=TrainConfig(seed=seed),
    )


def _weights(entry: Entry) -> dict[str, float] | None:
    """Return the weight 1 for each output of a network that returns several, as a user says it."""
    size = tuple(-(-n // 16) * 16 for n in SIZES[entry.dims])
    made = entry.make(entry.bands, CLASSES).train()(torch.randn(IMAGES, entry.bands, *size))
    if isinstance(made, Tensor):
        return None
    return {str(name): 1.0 for name in (made if isinstance(made, dict) else range(len(made)))}


def _is_random(entry: Entry) -> bool:
    """Return True if two forward passes of the plain network differ in training mode."""
    model = entry.make(entry.bands, CLASSES).train()
    x = torch.randn(IMAGES, entry.bands, *(-(-n // 16) * 16 for n in SIZES[entry.dims]))
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made.append(_outputs(model(x))[0])
    return not torch.equal(*made)


def own_error(entry: Entry, dump: Path, loss: float) -> tuple[float, float]:
    """Return the largest relative error against plain PyTorch, and ten times what rounding moves.

    The second is how far PyTorch's own gradients move when the last bits of the pixels do: as far
    as that, no program knows them better.

    Args:
        dump: what ``verify`` wrote: initial weights, images, labels and gradients in tiles.
        loss: of the step in tiles.
    """
    tensors = read_safetensors(dump)
    model = entry.make(entry.bands, CLASSES).double()
    initial = {
        n.partition("/")[2]: t for n, t in tensors.items() if n[:8] in ("weights/", "buffers/")
    }
    pixels, labels = tensors["input"], tensors["labels"]
    wanted_loss, wanted = _plain_step(model, initial, pixels, labels)
    found = {name: tensors[f"gradients/{name}"] for name in wanted}
    error = max(_distance(found, wanted), abs(loss / wanted_loss - 1), key=_badness)
    bits = 1 + 2.0**-52 * torch.randint(-1, 2, pixels.shape).double()
    return error, 10 * _distance(_plain_step(model, initial, pixels * bits, labels)[1], wanted)


def _plain_step(model: nn.Module, initial: dict[str, Tensor], pixels: Tensor, labels: Tensor):
    """Return the loss and the gradients by name of one forward and backward pass."""
    model.load_state_dict(initial, strict=False)
    model.train().zero_grad()
    with _all_float64():
        loss = sum(_loss(logits, labels) for logits in _outputs(model(pixels)))
    loss.backward()
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return loss.item(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained}


@contextmanager
def _all_float64() -> Iterator[None]:
    """Let casts by ``x.float()`` leave float64 as it is, as precision is a setting of a run."""
    cast, Tensor.float = Tensor.float, Tensor.double
    try:
        yield
    finally:
        Tensor.float = cast


def _distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest relative difference, of tensors of at least 1e-3 of the largest norm."""
    least = 1e-3 * max((g.norm().item() for g in wanted.values()), default=0.0)
    sizes = {name: max(g.norm().item(), least, 1e-300) for name, g in wanted.items()}
    errors = [(found[name] - g).norm().item() / sizes[name] for name, g in wanted.items()]
    return max(errors, key=_badness, default=0.0)


def _badness(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _outputs(made) -> list[Tensor]:
    if isinstance(made, dict):
        return list(made.values())
    return list(made) if isinstance(made, (list, tuple)) else [made]


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    labels = labels.flatten() if logits.dim() == 2 else labels
    if logits.shape[2:] != labels.shape[1:]:
        mode = ("linear", "bilinear", "trilinear")[logits.dim() - 3]
        logits = F.interpolate(logits, size=labels.shape[1:], mode=mode)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file of float32, float64 and int64."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    kinds = {"F64": np.float64, "F32": np.float32, "I64": np.int64}
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            array = np.frombuffer(body[begin:end], kinds[entry["dtype"]]).reshape(entry["shape"])
            found[name] = torch.from_numpy(array.copy())
    return found
