"""A step of PatchGD against a plain PyTorch program of the same arithmetic: ``python -m benchmarks.whole_images --parts step``.

The plain program holds normalised images in memory, is told which patches are drawn, and shares nothing with distseg but the modules of backbone and head as a user
writes them; distseg reads each patch from the store, checks it, normalises it and draws by itself. Both begin with the same weights, and have the same ones after
a step in float64, to 1e-12; then steps in float32 take turns, on one thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distseg.comm.launch import set_up, world
from distseg.comm.mesh import Mesh
from distseg.config.patchgd import PatchConfig, PatchgdConfig
from distseg.config.settings import DataBase, ModelBase, OptimConfig, TrainBase
from distseg.config.sizes import Size
from distseg.data.store.store import Store
from distseg.models.network import user_names
from distseg.models.zoo import plain_model
from distseg.training.patchgd.engine import PatchEngine, Patches, PatchLoader
from distseg.training.patchgd.heads import make_head
from distseg.training.run_config import network_of

_RATE, _TOLERANCE, _PATCH = 1e-3, 1e-12, 64


@dataclass(frozen=True)
class Case:
    """Setting of a step: patches of 64x64, an eighth of them in each of 8 inner iterations. Their mean gradient makes one update."""

    name: str
    model: str
    images: int
    args: tuple[tuple[str, int], ...] = ()
    side: int = 512

    def config(self, store: str, precision: str) -> PatchConfig:
        return PatchConfig(
            model=ModelBase(self.model, args=dict(self.args)),
            data=DataBase(store=store, images=self.images),
            optim=OptimConfig("adam", lr=_RATE, schedule="constant", warmup=0.0),
            train=TrainBase(precision=precision),
            patchgd=PatchgdConfig(patch=Size("64x64"), features=256, statistics="pass"),
        )


SMALL = (("base_channels", 16), ("depth", 3))
CASES = (
    Case("small backbone, 4 images", "distseg.models.classifier:residual", 4, args=SMALL),
    Case("small backbone, 16 images", "distseg.models.classifier:residual", 16, args=SMALL),
    Case("ResNet-18, 4 images", "benchmarks.patch_step:resnet18", 4),
)
QUICK = (replace(CASES[0], images=2, side=128),)


class Basic(nn.Module):
    """The block of ResNet-18 (He et al., 2016)."""

    def __init__(self, inner: int, outer: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.around = (
            None
            if stride == 1
            else nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.around is None else self.around(x)))


class ResNet18(nn.Module):
    """ResNet-18 as torchvision has it."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv1, self.bn1, self.pool = (
            nn.Conv2d(in_channels, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.MaxPool2d(3, 2, 1),
        )
        widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
        self.blocks = nn.Sequential(
            *(Basic(a, b, 1 if a == b else 2) for a, b in zip(widths, widths[1:]))
        )
        self.last = nn.Linear(512, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(self.pool(F.relu(self.bn1(self.conv1(x)))))
        return self.last(y.mean((2, 3)))


def resnet18(in_channels: int, out_channels: int) -> ResNet18:
    """Return the network by the config's fields."""
    return ResNet18(in_channels, out_channels)


class PlainLoop:
    """The paper's loop in plain PyTorch.

    Args:
        backbone, head: in training mode, with weights of their own.
        images: (B, C, *size), whole and normalised.
        patch: side of a patch, of which the size is a multiple.
        filled, drawn: (images, patches) of each round that fills Z, and of each inner iteration.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module,
        images: Tensor,
        labels: Tensor,
        patch: int,
        filled: list,
        drawn: list,
    ):
        self.backbone, self.head, self.labels, self.filled, self.drawn = (
            backbone,
            head,
            labels,
            filled,
            drawn,
        )
        self.parameters = [*backbone.parameters(), *head.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, _RATE, fused=True)
        self.images, self.patch = images, patch
        self.grid = tuple(n // patch for n in images.shape[2:])

    def features(self, patches: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
        return self.backbone(patches[at]).flatten(1)

    def step(self) -> float:
        patches = (
            self.images.unfold(2, self.patch, self.patch)
            .unfold(3, self.patch, self.patch)
            .movedim((2, 3), (1, 2))
            .flatten(1, 2)
        )
        z = self._fill(patches)
        self.optimizer.zero_grad()
        losses = []
        for at in self.drawn:
            z = z.detach()
            z[at] = self.features(patches, at)
            loss = F.cross_entropy(
                self.head(z.movedim(1, -1).unflatten(-1, self.grid)), self.labels
            )
            (loss / len(self.drawn)).backward()
            losses.append(loss.item())
        self.optimizer.step()
        return sum(losses) / len(losses)

    @torch.no_grad()
    def _fill(self, patches: Tensor) -> Tensor:
        z = None
        for at in self.filled:
            rows = self.features(patches, at)
            z = rows.new_empty(*patches.shape[:2], rows.shape[1]) if z is None else z
            z[at] = rows
        return z


def modules(case: Case, config: PatchConfig, store: Store, network: nn.Module) -> nn.ModuleDict:
    """Backbone and head as a user writes them, with the weights of ``network``, in training mode."""
    settings = config.patchgd
    backbone = plain_model(config.model, store.bands, settings.features)
    head = make_head(
        settings.head,
        settings.features,
        settings.head_channels,
        len(store.classes),
        (case.side // _PATCH,) * 2,
    )
    found = nn.ModuleDict({"backbone": backbone, "head": head})
    found.load_state_dict(user_names(network.state_dict().items(), network))
    return found.train()


def both(case: Case, path: str, precision: str) -> tuple[PatchEngine, Patches, PlainLoop]:
    """Return an engine and the images of its first step, and the plain program for the same."""
    store, config, mesh = Store(path), case.config(path, precision), Mesh(world())
    network, device = (
        network_of(config.model, config.patchgd, store.bands, len(store.classes)),
        set_up(world(), "cpu", 1).device,
    )
    dtype = torch.float64 if precision == "fp64" else torch.float32
    plain = modules(case, config, store, network).to(dtype)
    engine = PatchEngine(config, mesh, network, device, precision)
    images = next(iter(PatchLoader(store, config.data, config.train.seed, mesh).epoch(0)))
    pixels = torch.stack(
        [torch.from_numpy(store.read_normalised(s.image, s.box)) for s in images.samples]
    ).to(dtype)
    rounds = range(engine._rounds(images.sizes[0]))
    drawn = [
        [tuple(torch.tensor(engine._draw(images, what, j)).T) for j in rounds]
        for what in ("fill", "patches")
    ]
    return (
        engine,
        images,
        PlainLoop(plain["backbone"], plain["head"], pixels, images.labels, _PATCH, *drawn),
    )


def difference(case: Case, path: str) -> float:
    """Return the largest difference of a loss, weight or running statistic after a step in float64, as a share of its norm.

    Raises:
        RuntimeError: it is more than rounding.
    """
    engine, images, plain = both(case, path, "fp64")
    (loss, _), wanted = engine.step(images, _RATE), plain.step()
    found = user_names(engine.network.state_dict().items(), engine.network)
    modules = nn.ModuleDict({"backbone": plain.backbone, "head": plain.head})
    apart = [abs(loss - wanted) / wanted]
    apart += [
        ((found[name] - t).norm() / t.norm().clamp(min=1e-3)).item()
        for name, t in modules.state_dict().items()
        if t.is_floating_point()
    ]
    if max(apart) > _TOLERANCE:
        raise RuntimeError(
            f"{case.name}: the two programs differ by {max(apart):.1e} after a step, so their times say nothing"
        )
    return max(apart)


def compare(cases: Sequence[Case], repeats: int, store: Callable[[Case], str]) -> list[dict]:
    """Return a row for each case: seconds of both programs, and the median and quartiles of the ratios of neighbouring steps."""
    rows = []
    for case in cases:
        path = store(case)
        apart = difference(case, path)
        engine, images, plain = both(case, path, "fp32")
        turns = [
            (_timed(lambda: engine.step(replace(images), _RATE)), _timed(plain.step))
            for _ in range(repeats + 1)
        ][1:]
        ratios = [[a / b for a, b in zip(*turn)] for turn in turns]
        cpu, wall = ([ratio[clock] for ratio in ratios] for clock in (0, 1))
        low, middle, high = quantiles(cpu, n=4, method="inclusive") if len(cpu) > 1 else cpu * 3
        rows.append({
            "step of": case.name, "ratio": middle, "from": low, "to": high, "by the wall clock": median(wall), "seconds": median(ours[0] for ours, _ in turns),
            "plain": median(theirs[0] for _, theirs in turns), "differ by": apart,
        })  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _timed(step: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of the processor and of the wall clock."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.process_time() - cpu, time.perf_counter() - wall
