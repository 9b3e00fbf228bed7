"""The Triton kernels of norms, against float64 and against PyTorch's kernels: any layout, size and number of channels.

Triton's interpreter runs them on the CPU. With DISTSEG_TEST_DEVICE=cuda they are compiled and run on a GPU.
"""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from conftest import DEVICE

triton = pytest.importorskip("triton", reason="triton is not installed: pip install triton")
import triton.language as tl  # noqa: E402

from distseg.layers.kernels import choice, plain, triton_norm  # noqa: E402
from distseg.layers.kernels import norm as compiled  # noqa: E402
from distseg.layers.kernels.norm import Affine  # noqa: E402
from distseg.tiling.tile import Box  # noqa: E402

TYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
SIZES = {1: (90,), 2: (7, 13), 3: (5, 4, 7)}


@triton.jit
def _counted(to, n):
    i = 0
    for _ in range(n):
        i += 1
    tl.store(to, i)


def _refusal() -> str | None:
    """Return what Triton's interpreter says of a loop, or None if it runs it: those before 3.9 do not take NumPy 2.4."""
    to = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    try:
        _counted[(1,)](to, 3)
    except Exception as e:
        return f"{e!r}"
    return None


REFUSAL = _refusal()
pytestmark = pytest.mark.skipif(
    REFUSAL is not None, reason=f"triton {triton.__version__} cannot run a loop here: {REFUSAL}"
)


@pytest.fixture(params=["large blocks", "small blocks"])
def blocks(request, monkeypatch):
    """Set the size of blocks; small ones cut a small image into several rows, and a program sums several."""
    small = dict(_BLOCK=32, _LANES=4, _COLUMNS=4, _FEW=8, _PROGRAMS=6)
    for name, value in small.items() if request.param == "small blocks" else ():
        monkeypatch.setattr(triton_norm, name, value)
    triton_norm._plan.cache_clear()
    yield
    triton_norm._plan.cache_clear()


def random(*size: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(DEVICE)


def image(channels: int, dtype, dims: int, last: bool, cropped: bool, seed: int) -> torch.Tensor:
    x = random(1, channels, *SIZES[dims], seed=seed).mul_(3).add_(7).to(dtype)
    if last and dims > 1:
        x = x.contiguous(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    return x[(..., *(slice(1, n - 1) for n in SIZES[dims]))] if cropped else x


def shaped(v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return v.view(1, -1, *(1 for _ in x.shape[2:]))


def pixels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def close(found: torch.Tensor, right: torch.Tensor, tolerance: float) -> None:
    assert found.shape == right.shape
    assert (found.double() - right.double()).norm() <= tolerance * right.double().norm()


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "dims, last, cropped",
    [(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 0, 1), (2, 1, 0), (2, 1, 1), (3, 0, 1), (3, 1, 0)],
)
@pytest.mark.parametrize(
    "blocks, channels",
    [("large blocks", 1), ("large blocks", 37), ("small blocks", 1), ("small blocks", 5)],
    indirect=["blocks"],
)
@pytest.mark.parametrize("slope", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("owned", ["all", "part", "none"])
def test_formulas(dtype, dims, last, cropped, channels, slope, owned, blocks):
    x, g = (image(channels, dtype, dims, last, cropped, seed) for seed in (0, 1))
    size, over = x.shape[2:], pixels(x)
    pivot, scale, bias, tilt, shift = random(5, channels, seed=2)
    affine = Affine(pivot + 7, scale, bias, slope)
    own = {
        "all": Box.whole(size),
        "part": Box(tuple(n // 3 for n in size), tuple(n - 1 for n in size)),
        "none": Box.whole((0,) * dims),
    }[owned]

    wide = torch.promote_types(dtype, torch.float32)
    rounded = [shaped(v.to(wide).double(), x) for v in (affine.pivot, scale, bias, tilt, shift)]
    d = x.double() - rounded[0]
    z = d * rounded[1] + rounded[2]
    y, passed = (torch.where(z > 0, v, slope * v) for v in (z, g.double()))
    dx = passed * rounded[1]
    dx[(..., *own.slices)] += (d * rounded[3] + rounded[4])[(..., *own.slices)]

    tolerance = TYPES[dtype]
    found = triton_norm.forward(x, affine, torch.empty_like(x))
    close(found, y, tolerance)
    close(found, plain.forward(x, affine, torch.empty_like(x)), tolerance)
    arguments = g, x, affine, tilt, shift, own
    found = triton_norm.gradient(*arguments, torch.empty_like(x))
    close(found, dx, tolerance)
    close(found, plain.gradient(*arguments, torch.empty_like(x)), tolerance)
    for found, theirs, terms in zip(
        triton_norm.sums(g, x, affine), plain.sums(g, x, affine), (passed, passed * d)
    ):
        assert found.dtype == torch.float64
        of_float = 1e-12 if dtype == torch.float64 else 1e-6
        assert ((found - terms.sum(over)).abs() <= of_float * terms.abs().sum(over)).all()
        assert ((found - theirs).abs() <= tolerance * terms.abs().sum(over)).all()
    mean, m2 = triton_norm.moments(x)
    exact = x.double().mean(over, keepdim=True)
    close(mean, exact.flatten(), 1e-13)
    close(m2, ((x.double() - exact) ** 2).sum(over), 1e-12)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("edge", ["none", "first pixel", "last pixel"])
def test_moments_keep_their_digits_beside_a_large_mean(last, edge, blocks):
    """Also beside a pixel that differs from all others, as the black corner of an image does."""
    noise = torch.round(random(1, 3, 11, 13) * 1024) / 1024
    if last:
        noise = noise.contiguous(memory_format=torch.channels_last)
    if edge != "none":
        at = 0 if edge == "first pixel" else -1
        noise[..., at, at] = -(2.0**26)
    x = noise + 2.0**26
    assert torch.equal(x - 2.0**26, noise), "the test's own numbers are exact"
    mean, m2 = triton_norm.moments(x)
    exact = noise.mean((0, 2, 3), keepdim=True)
    torch.testing.assert_close(mean, exact.flatten() + 2.0**26, rtol=1e-15, atol=0)
    torch.testing.assert_close(m2, ((noise - exact) ** 2).sum((0, 2, 3)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("slope", [0.0, 0.5, 1.0])
def test_values_that_are_not_finite(dtype, last, slope):
    """They stay where PyTorch's kernels leave them."""
    x, g = (image(5, dtype, 2, last, True, seed) for seed in (0, 1))
    x[0, 1, 2, 3], x[0, 2, 4, 5], g[0, 3, 0, 0] = float("nan"), float("inf"), float("inf")
    x[0, 4, 1, 1] = -float("inf")
    affine, tilt, shift = Affine(*random(3, 5), slope), *random(2, 5, seed=1)
    own = Box((1, 1), (4, 10))

    def both(name, *arguments):
        return [
            getattr(module, name)(*arguments, torch.empty_like(x))
            for module in (triton_norm, plain)
        ]

    for ours, theirs in (
        both("forward", x, affine),
        both("gradient", g, x, affine, tilt, shift, own),
    ):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.isinf(), theirs.isinf())
        assert torch.equal(ours[ours.isinf()], theirs[theirs.isinf()])
    for ours, theirs in zip(triton_norm.sums(g, x, affine), plain.sums(g, x, affine)):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
    for found in triton_norm.moments(x):
        assert found.isfinite().tolist() == [True, False, False, True, False]


def test_vectors_outside_of_the_owned_box_do_not_matter():
    x, g = (image(3, torch.float64, 2, False, False, seed) for seed in (0, 1))
    affine, nan, own = Affine(*random(3, 3), 0.1), random(3) * float("nan"), Box((2, 3), (5, 9))
    dx = triton_norm.gradient(g, x, affine, nan, nan, own, torch.empty_like(x))
    assert dx.isnan().sum() == 3 * own.pixels and dx[(..., *own.slices)].isnan().all()


@pytest.mark.parametrize("size", [(1,), (1, 1), (1, 1, 1), (1, 7), (7, 1), (1, 3, 1), (2, 1, 3)])
@pytest.mark.parametrize("channels", [1, 37])
@pytest.mark.parametrize("last", [False, True])
def test_tiles_of_few_pixels(size, channels, last):
    """Cut out of larger ones, so that a dim of length 1 has any stride."""
    around = tuple(n + 2 for n in size)
    x, g = (random(1, channels, *around, seed=seed) for seed in (0, 1))
    if last and len(size) > 1:
        form = torch.channels_last if len(size) == 2 else torch.channels_last_3d
        x = x.contiguous(memory_format=form)
    x, g = (v[(..., *(slice(1, -1) for _ in size))] for v in (x, g))
    affine, tilt, shift = Affine(*random(3, channels), 0.1), *random(2, channels, seed=3)
    for own in (Box.whole(size), Box.whole((0,) * len(size))):
        arguments = g, x, affine, tilt, shift, own
        found = triton_norm.gradient(*arguments, torch.empty_like(x))
        close(found, plain.gradient(*arguments, torch.empty_like(x)), 1e-14)
    close(
        triton_norm.forward(x, affine, torch.empty_like(x)),
        plain.forward(x, affine, torch.empty_like(x)),
        1e-14,
    )
    for ours, theirs in zip(triton_norm.sums(g, x, affine), plain.sums(g, x, affine)):
        close(ours, theirs, 1e-13)
    close(triton_norm.moments(x)[0], x.mean(pixels(x)), 1e-14)
    torch.testing.assert_close(
        triton_norm.moments(x)[1], x.var(pixels(x), correction=0) * x[0, 0].numel()
    )


def test_no_pixels():
    x, affine = random(1, 3, 4, 0), Affine(*random(3, 3), 0.1)
    assert triton_norm.forward(x, affine, torch.empty_like(x)).shape == x.shape
    own = Box.whole(x.shape[2:])
    triton_norm.gradient(x, x, affine, affine.bias, affine.bias, own, torch.empty_like(x))
    for found in (*triton_norm.sums(x, x, affine), *triton_norm.moments(x)):
        assert found.tolist() == [0, 0, 0]


LAYOUTS = {
    "first": lambda x: x,
    "last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "part": lambda x: torch.nn.functional.pad(x, (1, 2, 3, 4))[:, :, 3:-4, 1:-2],
    "some channels": lambda x: torch.cat((x, x), 1).contiguous(memory_format=torch.channels_last)[
        :, : x.shape[1]
    ],
    "turned": lambda x: x.mT.contiguous().mT,
}


@pytest.mark.parametrize("of_x", LAYOUTS)
@pytest.mark.parametrize("of_g", LAYOUTS)
def test_layouts_that_differ(of_x, of_g):
    x, g = LAYOUTS[of_x](random(1, 5, 4, 5)), LAYOUTS[of_g](random(1, 5, 4, 5, seed=1))
    affine, tilt, shift = Affine(*random(3, 5), 0.1), *random(2, 5, seed=3)
    own = Box((0, 1), (4, 3))
    into = LAYOUTS[of_g](torch.zeros_like(x))
    wanted = plain.forward(x, affine, torch.empty_like(x))
    close(triton_norm.forward(x, affine, into), wanted, 1e-14)
    arguments = g, x, affine, tilt, shift, own
    found = triton_norm.gradient(*arguments, into)
    assert found is into
    close(found, plain.gradient(*arguments, torch.empty_like(x)), 1e-14)
    for ours, theirs in zip(triton_norm.sums(g, x, affine), plain.sums(g, x, affine)):
        close(ours, theirs, 1e-13)
    expanded = random(1, 5, 1, 1, seed=4).expand_as(x)  # as the gradient of a sum is
    close(triton_norm.sums(expanded, x, affine)[0], plain.sums(expanded, x, affine)[0], 1e-13)
    assert triton_norm.forward(x, affine, x) is x
    close(x, wanted, 1e-14)


def test_results_lie_apart():
    """The result fills its own channels and leaves those between untouched."""
    whole = torch.full((1, 6, 5, 7), -1.0, dtype=torch.float64, device=DEVICE)
    whole = whole.contiguous(memory_format=torch.channels_last)
    x, affine = random(1, 3, 5, 7), Affine(*random(3, 3), 0.1)
    triton_norm.forward(x, affine, whole[:, :3])
    close(whole[:, :3], plain.forward(x, affine, torch.empty_like(x)), 1e-14)
    assert (whole[:, 3:] == -1).all()


def test_rounded_once():
    """To bfloat16: to the nearest on a GPU; Triton's interpreter cuts digits off. A GPU adds and multiplies in one rounding, which few values show."""
    x = image(37, torch.bfloat16, 2, True, False, 0)
    affine = Affine(*random(3, 37), 0.01)
    exact = plain.forward(x.float(), affine, torch.empty_like(x.float()))
    found = triton_norm.forward(x, affine, torch.empty_like(x))
    cut = exact.view(torch.int32).bitwise_and(-(1 << 16)).view(torch.float32)
    right = (found.float() == cut) | (found == exact.bfloat16())
    assert right.double().mean() >= (1 if DEVICE == "cpu" else 0.999)


def test_equal_sums_in_each_run():
    x, g = (image(5, torch.float32, 2, True, True, seed) for seed in (0, 1))
    affine = Affine(*random(3, 5), 0.1)
    runs = [(*triton_norm.sums(g, x, affine), *triton_norm.moments(x)) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0]))


class TestPlan:
    """Cuts of images into blocks, which the interpreter is too slow to show for large ones."""

    def plan(self, *size: int, channels: int = 64, last: bool = False, own: Box | None = None):
        image = torch.empty(1, channels, *size, device="meta")
        form = torch.channels_last if last else torch.contiguous_format
        return triton_norm._plan_of(image.contiguous(memory_format=form), own=own)

    @pytest.mark.parametrize("last", [False, True])
    def test_one_image_fills_a_gpu(self, last):
        plan = self.plan(512, 512, last=last)
        assert plan.shape[1:4] == (1, 1, 512 * 512), "a row of all pixels"
        assert plan.blocks * plan.lanes_blocks == 64 * 512 * 512 // 1024
        assert plan.programs * plan.lanes_blocks == 2048

    @pytest.mark.parametrize("size", [(1000, 1000), (129, 3), (1, 1)])
    @pytest.mark.parametrize("last", [False, True])
    @pytest.mark.parametrize("channels", [1, 3, 70])
    def test_blocks_cover_the_image(self, size, last, channels):
        plan = self.plan(*size, channels=channels, last=last, own=Box((0, 0), (1, 1)))
        _, depth, height, width, in_row = plan.shape
        rows = plan.form["pixels"] // plan.form["columns"]
        assert plan.blocks == in_row * -(-depth * height // rows)
        assert (in_row - 1) * plan.form["columns"] < width <= in_row * plan.form["columns"]
        assert plan.blocks <= plan.programs * plan.per_program
        assert (plan.programs - 1) * plan.per_program < plan.blocks
        assert plan.form["pixels"] * plan.form["lanes"] <= 1024

    def test_owned_cells_keep_dims_apart(self):
        """Rows merge if the box spans them, and the box then counts cells."""
        assert self.plan(8, 10, own=Box((2, 0), (5, 10))).own == (0, 1, 0, 1, 20, 50)
        assert self.plan(8, 10, own=Box((2, 1), (5, 10))).own == (0, 1, 2, 5, 1, 10)
        assert self.plan(8, 10, own=Box((2, 2), (2, 2))).shape[3] == 80, "an empty box spans all"


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("norm", ["instance", "batch", "group"])
def test_a_distributed_step_is_exact(comm, norm, monkeypatch):
    """Compare a step as ``DISTSEG_TRITON_NORMS=1`` computes it on GPUs, with halos, to the serial one."""
    from test_exact import check

    monkeypatch.setenv("DISTSEG_TRITON_NORMS", "1")
    monkeypatch.setattr(compiled, "available", lambda x: False)
    called = []
    for name in ("forward", "sums", "gradient", "moments"):
        function = getattr(triton_norm, name)
        monkeypatch.setattr(triton_norm, name, _noted(function, called))
    choice._triton_norm.cache_clear()
    try:
        check(
            comm,
            "21x26",
            tiles=f"1x{comm.size}",
            norm=norm,
            depth=1,
            exchange_every="1" if comm.size > 1 else "all",
        )
    finally:
        choice._triton_norm.cache_clear()
    assert set(called) == {"forward", "sums", "gradient", "moments"}


def _noted(function, called: list):
    def noting(*arguments, **named):
        called.append(function.__name__)
        return function(*arguments, **named)

    return noting


CASES = [
    f"{dtype}-{place}-{part}"
    for dtype, place, part in product(
        ("float64", "float32", "bfloat16", "float16"), ("first", "last"), ("whole", "part")
    )
]


@pytest.mark.parametrize(
    "capability, cases",
    [
        (80, ["float64-first-part", "bfloat16-last-whole"]),
        *(pytest.param(of, CASES, marks=pytest.mark.slow) for of in (70, 75, 80, 90)),
    ],
)
def test_compiled_for_gpus(capability, cases, tmp_path):
    """Triton's compiler makes machine code for a GPU without one. It finds errors that the interpreter lets pass."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    script = Path(__file__).with_name("triton_compiler.py")
    done = subprocess.run(
        [sys.executable, script, str(capability), *cases],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    made = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert set(made) == {
        f"{case}:{kernel}"
        for case, kernel in product(cases, ("_forward", "_sums", "_gradient", "_moments"))
    }
    for name, memory in made.items():
        # Images in one piece are read and written 16 bytes at a time.
        if "16-last-whole" in name:
            assert "ld.global.v4.b32" in memory, name
        if name.endswith("16-last-whole:_forward"):
            assert "st.global.v4.b32" in memory, name
