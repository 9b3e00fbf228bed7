"""The compiled norm kernels against their formulas in float64: any layout, any number of channels, parts of images."""

import os
import subprocess
import sys
import warnings
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from distseg.layers.dropout import channel_mask
from distseg.layers.kernels import build, plain
from distseg.layers.kernels import norm as kernels
from distseg.layers.kernels.norm import Affine
from distseg.tiling import rng
from distseg.tiling.tile import Box

TYPES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def compiled():
    if build.library() is None:
        pytest.skip("no compiler")


def image(
    channels: int, dtype, last: bool, cropped: bool, dims: int = 2, seed: int = 0
) -> torch.Tensor:
    size = (19, 45) if dims == 2 else (5, 9, 14)[:dims] if dims == 3 else (200,)
    x = (
        torch.randn(
            1, channels, *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        .mul_(3)
        .add_(7)
        .to(dtype)
    )
    if last and dims > 1:
        x = x.contiguous(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    return x[(..., *(slice(1, n - 2) for n in size))] if cropped else x


def shaped(v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return v.view(1, -1, *(1 for _ in x.shape[2:]))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "dims, last, cropped",
    [(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 0, 1), (2, 1, 0), (2, 1, 1), (3, 0, 1), (3, 1, 1)],
)
@pytest.mark.parametrize("channels", [1, 2, 5, 24, 32, 100])
def test_formulas(dtype, dims, last, cropped, channels):
    x, g = (image(channels, dtype, last, cropped, dims, seed) for seed in (0, 1))
    size, over = x.shape[2:], [0, *range(2, x.dim())]

    def random():
        return (
            torch.rand(channels, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
            + 0.5
        )

    affine = Affine(random() + 6, random(), random() - 1, 0.1)
    own = Box(tuple(n // 4 for n in size), tuple(n - 1 for n in size))
    wide = x.double()
    d = wide - shaped(affine.pivot.to(torch.promote_types(dtype, torch.float32)).double(), x)
    z = d * shaped(affine.scale, x) + shaped(affine.bias, x)
    passed = torch.where(z > 0, g.double(), 0.1 * g.double())
    dx = passed * shaped(affine.scale, x)
    dx[(..., *own.slices)] += (d * shaped(random(), x) + shaped(affine.bias, x))[(..., *own.slices)]

    def close(found, right):
        assert (found.double() - right).norm() <= TYPES[dtype] * right.norm()

    mean, m2 = kernels.moments(x)
    close(mean, wide.mean(over))
    close(m2, ((wide - wide.mean(over, keepdim=True)) ** 2).sum(over))
    close(kernels.forward(x, affine, torch.empty_like(x)), torch.where(z > 0, z, 0.1 * z))
    total, weighted = kernels.sums(g, x, affine)
    for found, terms in ((total, passed), (weighted, passed * d)):
        assert ((found - terms.sum(over)).abs() <= TYPES[dtype] * terms.abs().sum(over)).all()
    arguments = g, x, affine, random(), affine.bias, own
    close(kernels.gradient(*arguments, torch.empty_like(x)), dx)
    close(plain.gradient(*arguments, torch.empty_like(x)), dx)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "dims, last, cropped", [(1, 0, 0), (2, 0, 1), (2, 1, 0), (2, 1, 1), (3, 0, 0), (3, 1, 1)]
)
@pytest.mark.parametrize("groups, joint", [(0, False), (3, False), (0, True)])
@pytest.mark.parametrize("drops", [False, True])
def test_a_norm_of_whole_images(dtype, dims, last, cropped, groups, joint, drops):
    """Dropout, norm and activation of a batch in one call, there and back, against the layers that a user writes, in float64."""
    x, g = (
        torch.cat([image(6, dtype, last, False, dims, seed) for seed in seeds])
        for seeds in ((0, 1, 2), (3, 4, 5))
    )
    if cropped:
        x = x[(..., *(slice(1, n - 2) for n in x.shape[2:]))]
        g = g[(..., *(slice(2, n - 1) for n in g.shape[2:]))]
    weight, bias = (
        torch.rand(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
            torch.promote_types(dtype, torch.float32)
        )
        + 0.5
        for seed in (6, 7)
    )
    keys = [rng.key(image, "dropout") for image in range(3)]
    norm = kernels.Norm(groups, joint, 1e-3, 0.1, 0.4 if drops else 0.0, keys if drops else None)
    wide, w, b = (v.detach().double().requires_grad_() for v in (x, weight, bias))
    masks = (
        torch.stack([channel_mask(0.4, k, 6) for k in keys])
        if drops
        else torch.ones(3, 6, dtype=torch.float64)
    )
    dropped = wide * masks.view(3, 6, *(1 for _ in x.shape[2:]))
    values = (
        dropped.transpose(0, 1).reshape(1, 6, -1)
        if joint
        else dropped.reshape(3 * (groups or 6), -1)
    )
    over = (0, 2) if joint else (1,)
    mean, m2 = (
        values.mean(over),
        values.var(over, correction=0) * (values.numel() / values.mean(over).numel()),
    )
    z = (
        F.batch_norm(dropped, None, None, w, b, True, 0.1, 1e-3)
        if joint
        else F.group_norm(dropped, groups or 6, w, b, 1e-3)
    )
    y = F.leaky_relu(z, 0.1)
    y.backward(g.double(), retain_graph=True)

    def close(found, right, tolerance=TYPES[dtype]):
        assert (found.double() - right).norm() <= tolerance * right.norm()

    found, statistics, numbers = kernels.norm_forward(x, norm, weight, bias)
    close(found, y)
    close(statistics[0].flatten(), mean.flatten(), min(1e-5, TYPES[dtype]))
    close(statistics[1].flatten(), m2.flatten(), min(1e-5, TYPES[dtype]))
    for gradient, right in zip(
        kernels.norm_backward(g, x, norm, weight, numbers), (wide.grad, w.grad, b.grad)
    ):
        close(gradient, right, 4 * TYPES[dtype])
    plain_found, _, numbers = kernels.norm_forward(x, norm, None, None)
    close(plain_found, F.leaky_relu((z - shaped(b, x)) / shaped(w, x), 0.1))
    close(
        kernels.norm_backward(g, x, norm, None, numbers)[0],
        torch.autograd.grad(F.leaky_relu(_again(dropped, groups, joint), 0.1), wide, g.double())[0],
        4 * TYPES[dtype],
    )


def _again(x, groups, joint):
    return (
        F.batch_norm(x, None, None, None, None, True, 0.1, 1e-3)
        if joint
        else F.group_norm(x, groups or 6, None, None, 1e-3)
    )


@pytest.mark.parametrize("last", [0, 1])
def test_moments_keep_their_digits_beside_a_large_mean(last):
    x = image(7, torch.float64, last, False) + 3e4
    mean, m2 = kernels.moments(x.float())
    exact = x.float().double()
    torch.testing.assert_close(mean, exact.mean((0, 2, 3)), rtol=1e-9, atol=0)
    torch.testing.assert_close(
        m2, ((exact - exact.mean((0, 2, 3), keepdim=True)) ** 2).sum((0, 2, 3)), rtol=1e-5, atol=0
    )


def test_the_gradient_lies_as_the_image_does_whatever_its_own_layout():
    x, g = image(8, torch.float32, True, False), image(8, torch.float32, False, False, seed=1)
    one = torch.ones(8)
    affine, own = Affine(0 * one, one, 0 * one, 0.5), Box.whole(x.shape[2:])
    dx = kernels.gradient(g, x, affine, 0 * one, 0 * one, own, torch.empty_like(x))
    assert dx.stride() == x.stride()
    torch.testing.assert_close(dx, torch.where(x > 0, g, 0.5 * g))


LAYOUTS = {
    "first": lambda c, h, w: torch.randn(1, c, h, w),
    "last": lambda c, h, w: torch.randn(1, c, h, w).contiguous(memory_format=torch.channels_last),
    "part, first": lambda c, h, w: torch.randn(1, c, h + 3, w + 4)[:, :, 1 : 1 + h, 2 : 2 + w],
    "part, last": lambda c, h, w: torch.randn(1, c, h + 3, w + 4).contiguous(
        memory_format=torch.channels_last
    )[:, :, 1 : 1 + h, 2 : 2 + w],
    "some channels": lambda c, h, w: torch.randn(1, c + 3, h, w).contiguous(
        memory_format=torch.channels_last
    )[:, 1 : 1 + c],
}


@pytest.mark.parametrize("of_x", LAYOUTS)
@pytest.mark.parametrize("of_g", LAYOUTS)
def test_layouts_that_differ_on_maps_of_a_few_pixels(of_x, of_g):
    """Where a lone pixel lies is channels first and last at once."""
    torch.manual_seed(0)
    for channels, height, width in product((1, 2, 8), (1, 2, 3), (1, 2, 3)):
        x, g = LAYOUTS[of_x](channels, height, width), LAYOUTS[of_g](channels, height, width)
        affine, tilt = (
            Affine(*torch.randn(3, channels).double(), 0.1),
            torch.randn(channels).double(),
        )
        own = Box((0, 0), (height, max(1, width - 1)))

        def both(name, *a):
            return [getattr(k, name)(*a) for k in (kernels, plain)]

        def made(name, *a):
            return [getattr(k, name)(*a, torch.empty_like(x)) for k in (kernels, plain)]

        torch.testing.assert_close(*made("forward", x, affine))
        torch.testing.assert_close(*made("gradient", g, x, affine, tilt, tilt, own))
        torch.testing.assert_close(
            *both("sums", g, x, affine), rtol=1e-4, atol=1e-5, check_dtype=False
        )
        torch.testing.assert_close(kernels.moments(x)[0], x.double().mean((0, 2, 3)))


@pytest.mark.parametrize("dims", [2, 3])
def test_results_lie_apart(dims):
    """Half of the channels of a map in channels_last, as frames that lie in its channels: their rows are no runs of pixels, and the result is written all the same."""
    whole = image(6, torch.float64, last=True, cropped=False, dims=dims)
    x, g = (
        whole[:1, :3],
        image(6, torch.float64, last=True, cropped=False, dims=dims, seed=1)[:1, :3],
    )
    affine, (tilt, shift) = (
        Affine(*torch.rand(3, 3, dtype=torch.float64), 0.5),
        torch.rand(2, 3, dtype=torch.float64),
    )
    own = Box((1,) * dims, x.shape[2:])

    def into():
        return torch.full_like(whole[:1], float("nan"))[:, :3]

    assert not x.is_contiguous() and into().stride() == x.stride()
    torch.testing.assert_close(
        kernels.forward(x, affine, into()),
        plain.forward(x, affine, torch.empty(x.shape, dtype=x.dtype)),
    )
    wanted = plain.gradient(
        g.contiguous(),
        x.contiguous(),
        affine,
        tilt,
        shift,
        own,
        torch.empty(x.shape, dtype=x.dtype),
    )
    torch.testing.assert_close(kernels.gradient(g, x, affine, tilt, shift, own, into()), wanted)


def test_nan_stays_nan():
    x = image(4, torch.bfloat16, True, False)
    x[0, 1, 3, 4] = float("nan")
    one = torch.ones(4)
    y = kernels.forward(x, Affine(0 * one, one, 0 * one), torch.empty_like(x))
    assert y.isnan().sum() == 1 and torch.equal(y[:, 0], x[:, 0])


def test_without_a_compiler_pytorch_does_it(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="no-such-compiler.*|CXX"):
        assert build.library.__wrapped__() is None
    assert not list(tmp_path.rglob("*.so"))


class TestCache:
    """What may be loaded: whole, and written by nobody but this user or root."""

    @pytest.fixture
    def cache(self, monkeypatch, tmp_path) -> Path:
        """With a library that was built before. No compiler and no loader: a loaded file must not be cut in its process's hands."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(build, "ctypes", SimpleNamespace(CDLL=_looked_at))
        self.builds = []

        def compiled(compiler, place):
            self.builds.append(place)
            (place / "norm.so").write_bytes(b"library")
            (place / "norm.so").chmod(0o755)
            return place / "norm.so"

        monkeypatch.setattr(build, "_compiled", compiled)
        self.load()
        assert len(self.builds) == 1
        return tmp_path / "distseg" / "kernels"

    def load(self) -> None:
        with warnings.catch_warnings(action="error"):
            assert build.library.__wrapped__() == b"library"

    def the_file(self, cache: Path) -> Path:
        (found,) = cache.glob("*.so")
        return found

    def built_anew(self, cache: Path) -> bool:
        """Whether it is, and kept for the next time."""
        before = len(self.builds)
        self.load()
        now = len(self.builds)
        self.load()
        assert len(self.builds) == now and build._whole(self.the_file(cache))
        return now > before

    def test_built_once_a_machine(self, cache):
        before = self.the_file(cache).stat().st_mtime_ns
        assert not self.built_anew(cache)
        assert self.the_file(cache).stat().st_mtime_ns == before
        assert cache.stat().st_mode & 0o77 == 0 and sorted(
            p.name for p in cache.iterdir()
        ) == sorted([self.the_file(cache).name, "lock"])

    def test_cut(self, cache):
        os.truncate(self.the_file(cache), 3)
        assert self.built_anew(cache)

    def test_another_content(self, cache):
        with open(self.the_file(cache), "ab") as file:
            file.write(b", and more")  # which would load
        assert self.built_anew(cache)

    @pytest.mark.parametrize("mode", [0o775, 0o757])
    def test_a_file_that_others_may_write(self, cache, mode):
        self.the_file(cache).chmod(mode)
        assert self.built_anew(cache)

    def test_a_file_of_somebody_else(self, cache, monkeypatch):
        real = os.fstat
        monkeypatch.setattr(
            build.os,
            "fstat",
            lambda handle: _of(12345, real(handle)) if len(self.builds) == 1 else real(handle),
        )
        assert self.built_anew(cache)

    def test_a_planted_link_is_not_followed(self, cache, tmp_path):
        """Neither to a library, though its content be right, nor where something is written."""
        good, victim = tmp_path / "elsewhere.so", tmp_path / "victim"
        victim.write_text("precious")
        name = self.the_file(cache)
        name.rename(good)
        name.symlink_to(good)
        assert self.built_anew(cache) and good.exists() and not self.the_file(cache).is_symlink()
        (cache / "lock").unlink()
        (cache / "lock").symlink_to(victim)
        self.the_file(cache).unlink()
        self.load()
        assert victim.read_text() == "precious"

    def test_a_pipe_holds_nobody(self, cache):
        name = self.the_file(cache)
        name.unlink()
        os.mkfifo(name)
        assert self.built_anew(cache)

    def test_a_library_that_does_not_load_is_built_anew(self, cache):
        """As of another system's compiler; its checksum is right."""
        path = self.the_file(cache)
        name = path.stem.rpartition("-")[0]
        path.unlink()
        (cache / f"{name}-{build._digest(b'nothing')}.so").write_bytes(b"nothing")
        assert self.built_anew(cache)

    def test_an_own_cache_that_others_may_write_is_closed_to_them(self, cache):
        for folder in (cache, cache.parent):
            folder.chmod(0o777)
        assert (
            not self.built_anew(cache)
            and not (cache.stat().st_mode | cache.parent.stat().st_mode) & 0o77
        )

    def test_below_a_folder_that_others_may_write(self, cache, tmp_path):
        above = tmp_path
        above.chmod(0o777)
        with pytest.warns(
            UserWarning,
            match=f"compiled for this process only: other users can write to {above}: .*chmod go-w.*, or set the environment variable XDG_CACHE_HOME",
        ):
            assert build.library.__wrapped__() is not None
        assert (
            len(self.builds) == 2
            and not self.builds[1].exists()
            and cache not in self.builds[1].parents
        )

    def test_a_cache_that_can_not_be_written(self, cache, monkeypatch):
        """A private folder, which is gone when the library is loaded; told by nobody, as it is so on every rank of some clusters."""
        self.the_file(cache).unlink()
        monkeypatch.setattr(build, "_alone", _refusing)
        self.load()
        assert (
            not self.builds[-1].exists()
            and cache not in self.builds[-1].parents
            and not list(cache.glob("*.so"))
        )

    def test_no_home_at_all(self, cache, monkeypatch, tmp_path):
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        self.load()
        assert not self.builds[-1].exists()

    def test_what_a_killed_build_left_goes(self, cache):
        self.the_file(cache).unlink()
        old, young = cache / "building-old", cache / "building-young"
        for folder in (old, young):
            folder.mkdir()
            (folder / "norm.o").touch()
        os.utime(old, (0, 0))
        self.load()
        assert not old.exists() and young.exists()


def _looked_at(path: str) -> bytes:
    """In the place of the loader: what is in a file, if it is a library."""
    content = Path(path).read_bytes()
    if not content.startswith(b"lib"):
        raise OSError(f"{path}: invalid ELF header")
    return content


def _of(owner: int, status: os.stat_result) -> os.stat_result:
    fields = list(status)
    fields[4] = owner
    return os.stat_result(fields)


def _refusing(folder):
    raise PermissionError(13, "Permission denied", str(folder))


def test_ranks_of_a_machine_build_once(tmp_path):
    """Four processes start at once with an empty cache."""
    compiler, log, cache = tmp_path / "compiler", tmp_path / "log", tmp_path / "cache"
    compiler.write_text(
        f'#!/bin/sh\necho call >> {log}\nexec {os.environ.get("CXX", "c++")} "$@"\n'
    )
    compiler.chmod(0o755)
    cache.mkdir()
    (tmp_path / "short.cpp").write_text(
        "int main_of_nothing() { return 1; }"
    )  # norm.cpp takes seconds
    script = f"import runpy, pathlib; f = runpy.run_path({build.__file__!r})['_built']; p = pathlib.Path; "
    script += f"f.__globals__['SOURCE'] = p('{tmp_path}/short.cpp'); print(f(['{compiler}'], p('{cache}')))"
    ranks = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    (found,) = {rank.communicate()[0].strip() for rank in ranks}
    assert log.read_text() == "call\n" * 2, "it is compiled and linked once"
    assert build._whole(Path(found)) and [p.name for p in cache.glob("*norm*")] == [
        Path(found).name
    ]


def test_no_second_openmp_runtime():
    """Two would each have their own threads, spinning against each other."""
    script = "import torch, distseg.layers.kernels.build as b; b.library(); print(sum('gomp' in l.split('/')[-1] and 'r-xp' in l for l in open('/proc/self/maps')))"
    found = subprocess.run(
        [sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, check=True
    ).stdout
    assert int(found) <= 1, found


def test_cells_beyond_the_map_are_refused():
    """Where they would be written to lies somebody else's memory."""
    x, own = image(3, torch.float64, False, False), Box((0, 90), (2, 90))
    with pytest.raises(ValueError, match="the box of owned cells, .* reaches beyond a feature map"):
        kernels.gradient(
            x,
            x,
            Affine(*torch.ones(3, 3, dtype=torch.float64)),
            torch.ones(3),
            torch.ones(3),
            own,
            torch.empty_like(x),
        )


@pytest.mark.parametrize("size", [(1, 3), (2, 2), (4, 4), (3, 7), (6, 6), (8, 8), (16, 18)])
def test_many_small_maps(size):
    """The kernel takes rows of a channel in groups, and some lengths of rows have their own loop."""
    x, g = (
        torch.randn(40, 3, *size, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        for k in (0, 1)
    )
    weight, bias = torch.tensor([[0.5, 1.0, -2.0], [0.1, -0.2, 0.3]], dtype=torch.float64)
    inputs = [t.clone().requires_grad_() for t in (x, weight, bias)]
    wanted = F.leaky_relu(F.batch_norm(inputs[0], None, None, *inputs[1:], training=True), 0.1)
    wanted.backward(g)
    norm = kernels.Norm(0, True, 1e-5, 0.1)
    y, _, numbers = kernels.norm_forward(x, norm, weight, bias)
    found = [y, *kernels.norm_backward(g, x, norm, weight, numbers)]
    for ours, theirs in zip(found, (wanted, *(t.grad for t in inputs)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("last", [False, True])
def test_sums_over_parts_of_images_in_16_bits_are_not_rounded(last):
    torch.manual_seed(0)
    form = torch.channels_last if last else torch.contiguous_format
    whole = torch.randn(2, 4, 40, 50).bfloat16().contiguous(memory_format=form)
    g, x = whole[:1, ..., 3:-2], whole[1:, ..., 3:-2]
    affine = Affine(*torch.rand(3, 4).double(), 0.1)
    wanted = plain.sums(g.double(), x.double(), affine)
    found = plain.sums(g, x, affine)
    dense = plain.sums(g.clone(), x.clone(), affine)
    for a, b, c in zip(found, dense, wanted):
        assert (a - c).abs().max() <= 1.01 * (b - c).abs().max() + 1e-3
