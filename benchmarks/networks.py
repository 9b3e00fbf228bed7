"""Networks that are not ours, in every way to distribute them, against the eager module on whole images in float64.

Each is captured from its own code (:mod:`distseg.models.capture.capture`). A cell of the table is the largest relative error of loss, gradients, updated weights and
running statistics, or why it is refused. Those of other packages are needed here only:
pip install --no-deps segmentation-models-pytorch==0.6.0 timm monai==1.6.1 torchvision==0.28.0
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.harness import RESULTS, parent, report, run_ranks
from benchmarks.machine import ROOT, git_commit
from benchmarks.rows import Rows
from distseg.comm.launch import world
from distseg.config.settings import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    SpatialConfig,
    StreamingConfig,
    TrainConfig,
)
from distseg.config.sizes import Size
from distseg.models.capture.capture import as_network
from distseg.models.layers import Pop, Stash
from distseg.models.unet import unet
from distseg.training.serial import Image, serial_step
from distseg.training.verify import prepare, relative_errors, verify

QUESTION = "Which networks of other people are computed exactly, in which ways?"

WAYS = {  # name: (ranks, settings by section)
    "whole": (1, {}),
    "tiles": (2, dict(mesh=dict(tiles=Size((1, 2))))),
    "exchange 1": (2, dict(mesh=dict(tiles=Size((2, 1))), spatial=dict(exchange_every="1"))),
    "exchange level": (
        2,
        dict(mesh=dict(tiles=Size((1, 2))), spatial=dict(exchange_every="level")),
    ),
    "in time": (1, dict(streaming=dict(tiles=Size((2, 2))))),
    "stages": (2, dict(mesh=dict(stages=2), train=dict(accumulate=2))),
    "samples": (2, dict(mesh=dict(samples=2))),
    "all at once": (
        4,
        dict(
            mesh=dict(stages=2, tiles=Size((1, 2))),
            spatial=dict(exchange_every="1"),
            train=dict(accumulate=2),
        ),
    ),
}
SECTIONS = dict(
    mesh=MeshConfig,
    spatial=SpatialConfig,
    streaming=StreamingConfig,
    train=TrainConfig,
    pipeline=PipelineConfig,
)


class Example(nn.Module):
    """A small network as one writes it: functions, a residual block with squeeze and excitation, a resize to the skip's size."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.stem, self.conv, self.norm = (
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
        )
        self.squeeze, self.excite, self.head = (
            nn.Conv2d(8, 2, 1),
            nn.Conv2d(2, 8, 1),
            nn.Conv2d(16, out_channels, 3, padding=1),
        )

    def forward(self, x):
        skip = F.relu(self.stem(x))
        y = F.max_pool2d(skip, 2)
        z = F.relu(self.norm(self.conv(y)))
        y = y + z * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(z, 1)))))
        return self.head(
            torch.cat(
                (skip, F.interpolate(y, size=skip.shape[2:], mode="bilinear", align_corners=True)),
                1,
            )
        )


class Module(nn.Module):
    """A flat U-Net as a module of one's own writing, that is to be captured."""

    def __init__(self, flat: nn.Sequential):
        super().__init__()
        self.layers = nn.ModuleList(flat)

    def forward(self, x):
        skips = {}
        for layer in self.layers:
            if isinstance(layer, Stash):
                skips[layer.name] = x
            else:
                x = torch.cat((skips.pop(layer.name), x), 1) if isinstance(layer, Pop) else layer(x)
        return x


def summit_small(in_channels: int, out_channels: int) -> nn.Sequential:
    """The paper's network of 72,301,856 parameters."""
    return unet(
        depth=5, num_convs=2, base_channels=64, in_channels=in_channels, out_channels=out_channels
    )


def summit_small_module(in_channels: int, out_channels: int) -> nn.Module:
    return Module(summit_small(in_channels, out_channels))


class Result(nn.Module):
    """The one tensor of a module that returns several."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x):
        y = self.model(x)
        return y["out"] if isinstance(y, dict) else y[0]


def _smp(architecture: str, encoder: str, **more) -> Callable[[int, int], nn.Module]:
    def build(in_channels: int, out_channels: int) -> nn.Module:
        import segmentation_models_pytorch as smp

        return getattr(smp, architecture)(
            encoder, encoder_weights=None, in_channels=in_channels, classes=out_channels, **more
        )

    return build


def _monai(
    architecture: str, *arguments, first: bool = False, **more
) -> Callable[[int, int], nn.Module]:
    def build(in_channels: int, out_channels: int) -> nn.Module:
        import monai.networks.nets as nets

        model = getattr(nets, architecture)(
            *arguments, spatial_dims=2, in_channels=in_channels, out_channels=out_channels, **more
        )
        return Result(model) if first else model

    return build


def _torchvision(name: str, **more) -> Callable[[int, int], nn.Module]:
    def build(in_channels: int, out_channels: int) -> nn.Module:
        import torchvision.models.segmentation as models

        return Result(
            getattr(models, name)(
                weights=None, weights_backbone=None, num_classes=out_channels, **more
            )
        )

    return build


_THIN = dict(decoder_channels=(32, 16, 16, 8, 8))
_ENCODERS = (
    "resnet18", "resnet34", "resnext50_32x4d", "se_resnet50", "se_resnext50_32x4d", "mobilenet_v2", "efficientnet-b0", "timm-efficientnet-b0", "densenet121", "vgg11", "vgg11_bn",
    "vgg16_bn", "dpn68", "timm-regnetx_002", "timm-regnety_002", "timm-res2net50_26w_4s", "timm-resnest14d", "timm-skresnet18", "timm-mobilenetv3_small_100", "inceptionv4", "xception",
    "timm-gernet_s", "mobileone_s0", "timm-tf_efficientnet_lite0", "tu-resnet26d", "tu-rexnet_100", "tu-ghostnet_100", "tu-hrnet_w18_small", "mit_b0",
)  # fmt: skip
NETWORKS: dict[str, Callable[[int, int], nn.Module]] = {
    "example": Example,
    **{
        f"smp_Unet_{encoder.replace('-', '_')}": _smp("Unet", encoder, **_THIN)
        for encoder in _ENCODERS
    },
    "smp_Unet_convnext_atto": _smp(
        "Unet", "tu-convnext_atto", encoder_depth=4, decoder_channels=(32, 16, 16, 8)
    ),
    **{
        f"smp_{name}": _smp(name, "resnet18")
        for name in (
            "UnetPlusPlus",
            "Linknet",
            "FPN",
            "PSPNet",
            "PAN",
            "DeepLabV3",
            "DeepLabV3Plus",
            "MAnet",
            "UPerNet",
        )
    },
    "smp_Unet_scse": _smp("Unet", "resnet18", decoder_attention_type="scse"),
    "smp_Linknet_mobilenet": _smp("Linknet", "mobilenet_v2"),
    "smp_FPN_cat": _smp("FPN", "resnet18", decoder_merge_policy="cat"),
    "smp_Segformer": _smp("Segformer", "mit_b0"),
    "monai_UNet": _monai(
        "UNet", channels=(8, 16, 32), strides=(2, 2), num_res_units=2, dropout=0.2
    ),
    "monai_UNet_plain": _monai(
        "UNet", channels=(8, 16, 32), strides=(2, 2), act="GELU", norm="BATCH"
    ),
    "monai_UNet_group": _monai(
        "UNet", channels=(8, 16, 32), strides=(2, 2), norm=("GROUP", {"num_groups": 4})
    ),
    "monai_HighResNet": _monai("HighResNet"),
    "monai_BasicUNet_batch": _monai(
        "BasicUNet", features=(8, 8, 16, 32, 64, 8), norm="batch", upsample="nontrainable"
    ),
    "monai_BasicUNet": _monai("BasicUNet", features=(8, 8, 16, 32, 64, 8)),
    "monai_BasicUNetPlusPlus": _monai(
        "BasicUNetPlusPlus", features=(8, 8, 16, 32, 64, 8), first=True
    ),
    "monai_DynUNet": _monai(
        "DynUNet",
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[8, 16, 32],
    ),
    "monai_SegResNet": _monai("SegResNet", init_filters=8),
    "monai_SegResNetDS": _monai("SegResNetDS", init_filters=8),
    "monai_AttentionUnet": _monai("AttentionUnet", channels=(8, 16, 32), strides=(2, 2)),
    "monai_FlexibleUNet": _monai("FlexibleUNet", backbone="resnet18", pretrained=False),
    "torchvision_fcn": _torchvision("fcn_resnet50"),
    "torchvision_deeplabv3": _torchvision("deeplabv3_resnet50"),
    "torchvision_deeplabv3_mobilenet": _torchvision("deeplabv3_mobilenet_v3_large"),
    "torchvision_lraspp": _torchvision("lraspp_mobilenet_v3_large"),
}
_MULTIPLES = {
    "smp_PAN": 2
}  # times the size that others are tried with: it wants multiples of 128 pixels
_IMAGES = {
    "smp_Unet_timm_skresnet18": 3,
    "smp_UPerNet": 3,
}  # a batch norm of two vectors gives 1 and -1 whatever they are: what comes back through it is rounding
_TOLERANCE = 1e-12
_PACKAGES = {"smp": "segmentation_models_pytorch", "monai": "monai", "torchvision": "torchvision"}


def __getattr__(name: str):
    """As ``model.name`` has it: ``benchmarks.networks:smp_FPN``."""
    if name in NETWORKS:
        return lambda in_channels, out_channels: NETWORKS[name](in_channels, out_channels)
    raise AttributeError(name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(1)])
    parser.add_argument(
        "--size", type=Size, default=Size((64, 128)), help="of the images (default: %(default)s)"
    )
    parser.add_argument("--images", type=int, default=2, help="in a batch (default: %(default)s)")
    parser.add_argument(
        "--networks",
        nargs="*",
        default=list(NETWORKS),
        metavar="NAME",
        help="of the table; those whose package is not installed are left out",
    )
    parser.add_argument(
        "--job", help="internal: the network whose ways on this number of ranks are tried"
    )
    parser.add_argument(
        "--last-bit",
        action="store_true",
        help="internal: of that network, how far the eager module's gradient moves with the last bit of the pixels",
    )
    parser.add_argument(
        "--go-on", action="store_true", help="leave networks as they are that the table has already"
    )
    options = parser.parse_args(arguments)
    if options.job:
        return last_bit(options) if options.last_bit else job(options)
    if options.quick:
        options.networks, options.size = ["example"], Size((16, 24))
    there = [
        name
        for name in options.networks
        if importlib.util.find_spec(_PACKAGES.get(name.partition("_")[0], "torch"))
    ]
    known = {} if options.quick else _before(options)
    for name in there:
        if name not in known or not options.go_on:
            known[name] = {**_row(name, options), "commit": git_commit(ROOT)}
            print(known[name], file=sys.stderr, flush=True)
            _report([known[name] for name in NETWORKS if name in known], options)


def _before(options: argparse.Namespace) -> dict[str, dict]:
    """The rows of earlier calls, by network: a table takes two hours."""
    path = (options.output or RESULTS) / "networks.json"
    return (
        {row["network"]: row for row in json.loads(path.read_text())["results"]["rows"]}
        if path.exists()
        else {}
    )


def _report(rows: list[dict], options: argparse.Namespace) -> None:
    exact = sum(all(row[way] != "refused" for way in WAYS) for row in rows)
    wrong = [
        f"{row['network']}, {way}"
        for row in rows
        for way in WAYS
        if row[way] != "refused"
        and not float(row[way]) <= max(_TOLERANCE, 10 * float(row["last bit"] or 0))
    ]
    notes = (
        f"{len(rows)} networks: {exact} computed in all {len(WAYS)} ways, {len(rows) - exact} refused in some or all, {len(wrong)} wrong{': ' if wrong else ''}{'; '.join(wrong)}; {options.images} images of "
        f"{options.size} a batch, float64; a number: the largest relative error of loss, gradients, weights and running statistics against the eager module; "
        f"last bit: where that is above {_TOLERANCE:.0e}, how far the eager module's own gradient moves when the last bit of its pixels does"
    )
    report(
        "networks",
        QUESTION,
        Rows(rows),
        options,
        {"image": str(options.size), "images": options.images},
        notes,
    )


def _row(name: str, options: argparse.Namespace) -> dict:
    found: dict[str, float | str] = {}
    for ranks in sorted({ranks for ranks, _ in WAYS.values()}):
        size = Size(n * _MULTIPLES.get(name, 1) for n in options.size)
        given = [
            "--job",
            name,
            "--size",
            str(size),
            "--images",
            str(max(options.images, _IMAGES.get(name, 0))),
        ]
        try:
            found |= run_ranks(ranks, ["-m", "benchmarks.networks", *given], timeout=1200)
        except Exception as e:
            found |= {way: f"FAILED {str(e)[-300:]}" for way, (n, _) in WAYS.items() if n == ranks}
    refused = next((text for text in found.values() if isinstance(text, str)), "")
    moved = ""
    if any(isinstance(error, float) and not error <= _TOLERANCE for error in found.values()):
        moved = f"{run_ranks(1, ['-m', 'benchmarks.networks', *given, '--last-bit'], timeout=1200)['moved']:.0e}"
    return {
        "network": name,
        **{
            way: f"{found[way]:.0e}" if isinstance(found[way], float) else "refused" for way in WAYS
        },
        "last bit": moved,
        "refused": refused,
    }


def _config(options: argparse.Namespace) -> Config:
    return Config(
        model=ModelConfig(f"benchmarks.networks:{options.job}", in_channels=3, out_channels=2),
        data=DataConfig(images=options.images),
        optim=OptimConfig("sgd"),
    )


def last_bit(options: argparse.Namespace) -> None:
    """Prints the largest relative change of a gradient: deep networks with batch norms of few values multiply what rounding leaves."""
    torch.set_num_threads(1)
    prepared = prepare(_config(options), options.size)
    settings, images = prepared.config.step, prepared.images()
    dropouts = getattr(as_network(copy.deepcopy(prepared.model)), "dropouts", {})
    model = prepared.model.double()
    wholes = [
        Image(*images.whole(n), number=n, group=0, micro_batch=0) for n in range(options.images)
    ]
    generator = torch.Generator().manual_seed(0)

    def bit(x):
        return x * (1 + 2.0**-52 * torch.randint(-1, 2, x.shape, generator=generator).double())

    moved = [replace(whole, pixels=bit(whole.pixels)) for whole in wholes]
    one, other = (
        serial_step(copy.deepcopy(model), those, settings, dropouts=dropouts).gradients
        for those in (wholes, moved)
    )
    print(json.dumps({"moved": max(relative_errors(other, one).values())}))


def job(options: argparse.Namespace) -> None:
    comm, found = world(), {}
    torch.set_num_threads(1)
    base = _config(options)
    for way, (ranks, sections) in WAYS.items():
        if ranks != comm.size:
            continue
        config = replace(
            base, **{name: SECTIONS[name](**fields) for name, fields in sections.items()}
        )
        try:
            result = verify(config, comm, options.size)
            found[way] = comm.bcast(result and float(result["max_error"]))
        except ValueError as e:
            found[way] = str(e)
    if comm.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
