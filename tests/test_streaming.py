"""Streamed tiles: the serial gradient from one tile at a time, on any mesh, within a budget, and what is refused."""

from dataclasses import replace

import pytest
import torch
from test_exact import check, config
from torch import nn

from distseg.config.settings import StreamingConfig
from distseg.config.sizes import Size
from distseg.layers.graph import graph_of
from distseg.models.capture.capture import as_network
from distseg.models.layers import Pop, Stash
from distseg.models.network import channels_of_maps, flat_layers
from distseg.models.zoo import outline_model
from distseg.planning.tile_size import (
    Activations,
    BudgetTiling,
    GridTiling,
    memory_warnings,
    short_of_decoding,
)
from distseg.runtime import streaming as streaming
from distseg.runtime import transfer
from distseg.runtime.exchange import Exchange
from distseg.runtime.offload import Map
from distseg.runtime.operations import BackwardTile, KeptTile, TileOperation
from distseg.runtime.streaming import StreamingExecutor
from distseg.tiling.segment import segments_of, tile_plan
from distseg.tiling.tile import Box, boxes_of
from distseg.training.verify import verify

GRID = Size("2x3")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Strips of a few rows, as large images have them."""
    monkeypatch.setattr(transfer, "_STRIP", 4000.0)
    monkeypatch.setattr(streaming, "_CELLS", 200)
    monkeypatch.setattr(streaming, "_LABELS", 500)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "norm, loss",
    [
        ("instance", "cross_entropy"),
        ("batch", "dice"),
        ("group", "binary_cross_entropy"),
        ("none", "dice"),
    ],
)
def test_spilled(comm, norm, loss):
    check(
        comm,
        "97x131",
        tiles={1: "1x1", 2: "1x2", 4: "2x2"}[comm.size],
        norm=norm,
        loss=loss,
        streamed=GRID,
    )


@pytest.mark.parallel([1, 3])
@pytest.mark.covering(1)
@pytest.mark.parametrize("up", ["nearest", "bilinear", "transposed"])
def test_recomputed(comm, up):
    check(
        comm,
        "97x131",
        tiles={1: "1x1", 3: "3x1"}[comm.size],
        norm="none",
        up=up,
        streamed=GRID,
        scratch="memory",
    )


@pytest.mark.parallel(1)
def test_recomputed_with_frozen_batch_norm(comm):
    check(comm, "61x75", norm="batch", frozen_norm=True, streamed=GRID)


@pytest.mark.parallel(4)
@pytest.mark.parametrize(
    "norm, loss, up",
    [("batch", "cross_entropy + dice", "bilinear"), ("group", "focal", "transposed")],
)
def test_samples_times_tiles_times_tiles_streaming(comm, norm, loss, up):
    """4 ranks train 2 x 2 images of 12 tiles each, two at a time, in two micro-batches."""
    check(
        comm,
        "61x75",
        samples=2,
        tiles="1x2",
        norm=norm,
        loss=loss,
        up=up,
        images=2,
        accumulate=2,
        streamed=GRID,
        ignore_index=7,
    )


@pytest.mark.parallel(2)
@pytest.mark.parametrize("scope", ["group", "step"])
def test_batch_norm_over_sample_groups(comm, scope):
    check(comm, "33x47", samples=2, norm="batch", norm_scope=scope, streamed=Size("2x2"))


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "norm, loss, placement",
    [
        ("instance", "cross_entropy", "linear"),
        ("batch", "dice", "v-shaped"),
        ("group", "focal", "v-shaped"),
        ("none", "dice", "linear"),
    ],
)
def test_stages_times_tiles_streaming(comm, norm, loss, placement):
    """Each stage tile after tile; skips, maps and gradients travel between stages."""
    check(
        comm,
        "61x75",
        stages=comm.size,
        placement=placement,
        norm=norm,
        loss=loss,
        accumulate=2,
        streamed=GRID,
    )


@pytest.mark.parallel([2, 3])
@pytest.mark.covering(cases=2)
@pytest.mark.parametrize(
    "norm, placement", [("instance", "linear"), ("none", "linear"), ("batch", "v-shaped")]
)
def test_forward_and_backward_passes_in_turn(comm, norm, placement, monkeypatch):
    """And no rank has more micro-batches under way than there are stages behind it, itself included."""
    under_way, most, do = set(), 0, StreamingExecutor.run

    def counted(executor, operations, *more):
        nonlocal most
        ends = {op.micro_batch: place for place, op in enumerate(operations)}
        for place, op in enumerate(operations):
            if isinstance(op, TileOperation):
                under_way.add(op.micro_batch)
            most = max(most, len(under_way))
            if ends[op.micro_batch] == place:
                under_way.discard(op.micro_batch)
        return do(executor, operations, *more)

    monkeypatch.setattr(StreamingExecutor, "run", counted)
    check(
        comm,
        "41x35",
        stages=comm.size,
        placement=placement,
        schedule="1f1b",
        norm=norm,
        accumulate=5,
        streamed=Size("3x2"),
    )
    assert not under_way and most < 5
    behind = comm.size - comm.rank
    if norm == "none":
        assert (
            min(2, behind) <= most <= behind
        )  # tiles go back in turn, whatever micro-batch they are of
    else:
        assert placement != "linear" or most == behind


@pytest.mark.parallel([2, 3])
@pytest.mark.covering(cases=1)
@pytest.mark.parametrize(
    "norm, placement", [("batch", "linear"), ("instance", "v-shaped"), ("none", "linear")]
)
def test_a_loss_that_is_known_only_when_all_went_forward_in_turn(comm, norm, placement):
    """All forward passes go first, once more and alone; running statistics count once."""
    check(
        comm,
        "41x35",
        stages=comm.size,
        placement=placement,
        schedule="1f1b",
        norm=norm,
        loss="dice",
        accumulate=4,
        streamed=Size("3x2"),
    )


@pytest.mark.parallel(2)
@pytest.mark.covering(cases=5)
@pytest.mark.parametrize("start", [*range(1, 9), *range(14, 18), 20, 23, 26, 28])
def test_a_stage_begins_at_any_layer(comm, start):
    """Down a level and up again: conv drop norm act stash pool conv drop ... norm act up pop conv ... head."""
    layers = len(graph_of(outline_model(config(num_convs=1).model)))
    check(
        comm, "21x30", stages=2, num_convs=1, balance=[start, layers - start], streamed=Size("2x2")
    )


def with_the_image_as_a_skip(**unused) -> nn.Sequential:
    """A norm at once, the image itself popped two stages later, a skip past a stage, and a map that is read backwards at its end."""

    def conv(i, o, stride=1):
        return nn.Conv2d(i, o, 3, stride, padding=1)

    return nn.Sequential(
        Stash("image"), nn.InstanceNorm2d(3, affine=True), Stash("normed"), conv(3, 4, 2), nn.ReLU(), nn.InstanceNorm2d(4), conv(4, 4), nn.Upsample(scale_factor=2),
        Pop("normed"), nn.ReflectionPad2d(3), nn.Conv2d(7, 4, 7), nn.ReLU(), Pop("image"), conv(7, 3),
    )  # fmt: skip


@pytest.mark.parallel(3)
@pytest.mark.parametrize("balance", [[4, 4, 6], [1, 2, 11], [2, 8, 4], [9, 1, 4]])
def test_skips_of_all_kinds_cross_stages(comm, balance):
    found = config(stages=3, balance=balance, streamed=Size("11x2"))
    report = verify(
        replace(found, model=replace(found.model, name=f"{__name__}:with_the_image_as_a_skip")),
        comm,
        Size("26x34"),
    )
    assert comm.bcast(report and report["max_error"]) <= 1e-12


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "every, norm, loss",
    [
        ("1", "instance", "cross_entropy"),
        ("level", "batch", "dice"),
        ("2", "none", "focal"),
        ("3", "group", "dice"),
    ],
)
def test_borders_of_stored_maps_are_exchanged(comm, every, norm, loss):
    """Instead of computed by both neighbours; on the way back their gradients return."""
    grid = {1: "1x1", 2: "1x2", 3: "3x1", 4: "2x2"}[comm.size]
    check(comm, "61x75", tiles=grid, norm=norm, loss=loss, streamed=GRID, exchange_every=every)


@pytest.mark.parallel([1, 2])
def test_a_lone_stage_has_nobody_to_take_turns_with(comm):
    """Whatever order is asked for, the loss is known only when all micro-batches went forward."""
    check(
        comm,
        "41x35",
        samples=comm.size,
        schedule="1f1b",
        norm="none",
        loss="dice",
        accumulate=2,
        streamed=Size("1x2"),
    )


def whose_last_rows_are_for_another_stage(**unused) -> nn.Module:
    """A stage reads all rows of its own map but the last few, which the skip has."""

    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.down, self.deep, self.head = (
                nn.Conv2d(3, 4, 3, padding=1),
                nn.Conv2d(4, 4, 3, 3, 1),
                nn.Conv2d(4, 4, 3, padding=1),
                nn.Conv2d(8, 3, 3, padding=1),
            )

        def forward(self, x):
            a = torch.relu(self.first(x))
            b = torch.relu(self.deep(torch.relu(self.down(a))))
            return self.head(
                torch.cat(
                    [
                        nn.functional.interpolate(b, scale_factor=3.0)[
                            ..., : a.shape[-2], : a.shape[-1]
                        ],
                        a,
                    ],
                    1,
                )
            )

    return Strided()


@pytest.mark.parallel([2, 3])
def test_a_map_goes_when_it_is_made_and_read(comm):
    found = config(stages=comm.size, schedule="1f1b", loss="dice", streamed=Size("7x1"))
    report = verify(
        replace(
            found,
            model=replace(found.model, name=f"{__name__}:whose_last_rows_are_for_another_stage"),
        ),
        comm,
        Size("6x16"),
    )
    assert comm.bcast(report and report["max_error"]) <= 1e-12


@pytest.mark.parallel(2)
def test_borders_of_maps_that_ranks_made_of_single_cells(comm):
    """Of which none tells in what order its channels lie."""
    check(
        comm,
        "12x12",
        tiles="1x2",
        norm="none",
        depth=2,
        num_convs=1,
        streamed=Size("3x1"),
        exchange_every="1",
    )


def with_a_wide_skip(**unused) -> nn.Sequential:
    """At the third convolution, which looks beyond the tile, a rank has made more than it owns: the skip wants it."""

    def conv(i, o, k=3, stride=1):
        return nn.Conv2d(i, o, k, stride, padding=k // 2)

    return nn.Sequential(
        conv(3, 4), nn.ReLU(), conv(4, 4), nn.Tanh(), conv(4, 4, 5), Stash("k"), conv(4, 4, 3, 2), conv(4, 4), nn.Upsample(scale_factor=2), Pop("k"), conv(8, 4, 5), conv(4, 3),
    )  # fmt: skip


@pytest.mark.parallel(2)
@pytest.mark.parametrize("every", ["1", "2", "3"])
def test_what_a_rank_made_of_its_neighbours_part_has_no_gradient_twice(comm, every):
    found = config(tiles="1x2", streamed=GRID, exchange_every=every)
    report = verify(
        replace(found, model=replace(found.model, name=f"{__name__}:with_a_wide_skip")),
        comm,
        Size("27x53"),
    )
    assert comm.bcast(report and report["max_error"]) <= 1e-12


@pytest.mark.parallel(2)
def test_images_that_exchange_one_after_another(comm):
    check(
        comm,
        "41x35",
        tiles="2x1",
        norm="batch",
        streamed=Size("2x2"),
        exchange_every="1",
        images=2,
        accumulate=2,
    )


@pytest.mark.parallel([4, 6])
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "every, norm, placement",
    [("1", "instance", "linear"), ("level", "none", "linear"), ("2", "batch", "v-shaped")],
)
def test_stages_times_tiles_that_exchange_streaming(comm, every, norm, placement):
    check(
        comm, "61x75", tiles="1x2", stages=comm.size // 2, placement=placement, norm=norm, accumulate=2, streamed=GRID, exchange_every=every,
    )  # fmt: skip


@pytest.mark.parallel(4)
@pytest.mark.parametrize("norm", ["none", "instance"])
def test_a_margin_below_comes_from_a_neighbour_and_not_from_the_stage_before(comm, norm):
    """Windows of the upper part reach into it, and wait for no rows of a transfer that has none."""
    check(
        comm, "64x32", tiles="2x1", stages=2, norm=norm, depth=3, num_convs=1, balance=[18, 23], streamed=Size("2x2"), exchange_every="level",
    )  # fmt: skip


@pytest.mark.parallel(8)
@pytest.mark.covering(cases=1)
@pytest.mark.parametrize(
    "norm, loss, placement",
    [
        ("batch", "cross_entropy + dice", "linear"),
        ("instance", "cross_entropy", "v-shaped"),
        ("none", "focal", "linear"),
    ],
)
def test_samples_times_tiles_times_stages_times_tiles_streaming(comm, norm, loss, placement):
    check(
        comm, "61x75", samples=2, tiles="1x2", stages=2, placement=placement, norm=norm, loss=loss, images=2, accumulate=2, streamed=GRID,
        ignore_index=7,
    )  # fmt: skip


@pytest.mark.parallel(1)
def test_a_grid_finer_than_the_deepest_map(comm):
    check(comm, "17x9", depth=3, norm="instance", streamed=Size("9x9"))


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "norm, images, loss",
    [("none", 1, "cross_entropy"), ("none", 2, "focal"), ("batch", 1, "binary_cross_entropy")],
)
def test_tiles_of_stages_go_back_while_others_go_forward(comm, norm, images, loss, monkeypatch):
    """Without active norms; kept where no budget says otherwise, and the gradient is the serial one on uneven tiles, several images, all numbers of stages."""
    found, run = [], StreamingExecutor.run
    monkeypatch.setattr(
        StreamingExecutor,
        "run",
        lambda executor, operations, *more: (
            found.append(list(operations)) or run(executor, operations, *more)
        ),
    )
    check(
        comm, "97x41", stages=comm.size, norm=norm, frozen_norm=norm == "batch", loss=loss, images=images, accumulate=2, streamed=Size("7x2"),
        depth=1, num_convs=1,
    )  # fmt: skip
    kinds = [type(op) for op in found[-1] if isinstance(op, KeptTile)]
    assert all(op.kept for op in found[-1] if isinstance(op, KeptTile))
    assert comm.rank == comm.size - 1 or kinds != sorted(
        kinds, key=lambda kind: kind is BackwardTile
    ), "in turn"


def that_takes_few_sizes(**unused) -> nn.Module:
    """Mirrors more cells than a tile has, and adds maps of two levels, which wants multiples of two pixels."""

    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.pad, self.first, self.down, self.top, self.side, self.head = (
                nn.ReflectionPad2d(3), nn.Conv2d(3, 4, 7), nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 3, padding=1),
            )  # fmt: skip

        def forward(self, x):
            a = torch.relu(self.first(self.pad(x)))
            return self.head(
                self.side(a)
                + nn.functional.interpolate(self.top(torch.relu(self.down(a))), scale_factor=2.0)
            )

    return Pyramid()


@pytest.mark.parallel(2)
@pytest.mark.parametrize("tiles_per_rank", ["7x2", "13x1"])
def test_stages_are_balanced_whatever_sizes_a_network_takes(comm, tiles_per_rank):
    """Tiles may be of others."""
    found = config(stages=2, streamed=Size(tiles_per_rank))
    report = verify(
        replace(found, model=replace(found.model, name=f"{__name__}:that_takes_few_sizes")),
        comm,
        Size("34x22"),
    )
    assert comm.bcast(report and report["max_error"]) <= 1e-12


@pytest.mark.parallel(2)
def test_stages_keep_some_of_the_tiles_that_go_back_in_turn(comm, monkeypatch):
    """As where a budget has no room for more; the others are computed twice, in the same order."""

    def some(program):
        return [
            replace(op, kept=op.box.start[0] % 3 > 0) if isinstance(op, KeptTile) else op
            for op in program
        ]

    monkeypatch.setattr(streaming, "keeping_all", some)
    check(comm, "97x41", stages=2, norm="none", streamed=Size("7x2"), depth=1, num_convs=1)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("norm", ["instance", "none"])
def test_within_a_budget(comm, norm):
    found = replace(
        config(tiles="2x1", norm=norm, num_convs=1), streaming=StreamingConfig(memory="4GB")
    )
    report = verify(found, comm, Size("97x131"))
    assert comm.bcast(report and report["max_error"]) <= 1e-12


@pytest.mark.parallel(1)
def test_nothing_is_stored_without_live_norms_and_all_is_let_go_of_with(comm, monkeypatch):
    made, closed = [], []
    monkeypatch.setattr(
        streaming, "Map", lambda *a, **more: made.append(Map(*a, **more)) or made[-1]
    )
    close = Map.close
    monkeypatch.setattr(Map, "close", lambda self: closed.append(self) or close(self))
    check(comm, "33x47", norm="none", streamed=GRID)
    assert not made
    check(comm, "33x47", norm="instance", streamed=GRID)
    assert len(made) == 2 * 10 and set(made) == set(
        closed
    )  # before each of ten norms a map and its gradient


SIZE = (256, 256)


def test_a_budget_that_kernels_and_gaps_do_not_fit_into_is_told():
    assert memory_warnings(None, 4e8) == memory_warnings(600_000_000, 4e8) == []
    assert (
        "streaming.memory is 450 MB, and this process takes 400 MB before any tile"
        in memory_warnings(450_000_000, 4e8)[0]
    )


def test_a_budget_that_a_decoder_does_not_fit_into_is_told():
    assert (
        short_of_decoding(None, 4e8, "a", 10**9)
        == short_of_decoding(500_000_000, 4e8, "a", 0)
        == short_of_decoding(600_000_000, 4e8, "a", 10**8)
        == []
    )
    assert (
        "streaming.memory is 500 MB, but a can only be decoded whole, which takes 100 MB for a while beside the 400 MB"
        in short_of_decoding(500_000_000, 4e8, "a", 10**8)[0]
    )


def activations(norm="instance", last=True) -> tuple[Activations, Exchange, list]:
    model = outline_model(config(norm=norm, num_convs=1).model)
    graph = graph_of(model)
    kinds = [type(layer) for _, layer in flat_layers(model)]
    active = [p for p, kind in enumerate(kinds) if kind is torch.nn.InstanceNorm2d]
    return (
        Activations(graph, kinds, channels_of_maps(model), 4, 4, last),
        Exchange(graph, (4, 4), every="all"),
        segments_of(graph, [graph[p].first for p in active]),
    )


class TestBudget:
    def tilings(self, budget, norm="instance"):
        found, exchange, segments = activations(norm)
        layout = exchange.layout(SIZE)
        tiling = BudgetTiling(found, budget)
        for segment in segments:
            result = Box.whole(layout.sizes[segment.result])
            yield found, layout, segment, result, tiling(layout, segment, result, 1)

    @pytest.mark.parametrize("norm", ["instance", "none"])
    @pytest.mark.parametrize("budget", [3e5, 1e6, 1e7])
    def test_tiles_stay_within(self, norm, budget):
        for found, layout, segment, result, size in self.tilings(budget, norm):
            for tile in boxes_of(result, size):
                assert (
                    found.peak_bytes(tile_plan(layout, segment, tile), 1) <= 1.05 * budget
                )  # on a pooling's grid tiles of a size differ a little

    @pytest.mark.parametrize("side", [512, 1024, 2048, 4096, 8192, 16384])
    def test_tiles_of_a_prediction_are_as_large_in_any_image(self, side):
        found, _, segments = activations()
        found, layout = (
            replace(found, graph_kept=False),
            Exchange(found.graph, (4, 4), every="all").layout((side, side)),
        )
        tiling = BudgetTiling(found, 1e9)
        sizes = [
            (segment, tiling(layout, segment, Box.whole(layout.sizes[segment.result]), 1))
            for segment in segments
        ]
        bytes_ = [
            found.peak_bytes(tile_plan(layout, segment, Box((0, 0), tuple(size))), 1)
            for segment, size in sizes
        ]
        whole = [
            found.peak_bytes(tile_plan(layout, segment, Box.whole(layout.sizes[segment.result])), 1)
            for segment in segments
        ]
        assert max(bytes_) <= 16e6 and all(
            b > 8e6 for b, all_of_it in zip(bytes_, whole) if all_of_it > 16e6
        )

    def test_more_memory_takes_fewer_tiles(self):
        counts = [
            [len(boxes_of(result, size)) for *_, result, size in self.tilings(budget)]
            for budget in (3e5, 1e6, 1e8)
        ]
        assert counts[0] > counts[1] > counts[2] and set(counts[2]) == {1}

    def test_windows_are_of_one_size(self):
        """But at the map's ends: tiles begin on cells of the coarsest map."""
        for _found, layout, segment, result, size in self.tilings(1e6, "none"):
            windows = [
                tile_plan(layout, segment, tile).read[segment.sources[0]]
                for tile in boxes_of(result, size)
            ]
            inner = {
                w.size
                for w in windows
                if all(0 < a and b < n for a, b, n in zip(w.start, w.stop, SIZE))
            }
            assert len(windows) > 9 and len(inner) == 1

    def test_too_little_is_refused_with_both_numbers(self):
        with pytest.raises(
            ValueError,
            match=r"0.0 MB of streaming.memory are left .* need 0.\d MB on a tile of .* raise streaming.memory by 1 MB",
        ):
            list(self.tilings(1e4))

    def test_a_grid_is_no_finer_than_the_map(self):
        assert GridTiling((5, 2))(None, None, Box((0, 0), (3, 9)), 1) == [1, 5]


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(streamed=GRID, halo=3), r"streaming\.tiles .*approximate\.halo is 3, .*\(DS225\)"),
        (
            dict(memory="4GB", placement="devices", balance=[10, 19]),
            r"streaming\.memory is 4GB, .*pipeline\.placement .*\(DS224\)",
        ),
        (dict(streamed=GRID, scratch="/nowhere"), r"streaming\.scratch is /nowhere, .*\(DS125\)"),
        (
            dict(tiles_per_rank=GRID, memory="4GB"),
            r"streaming\.memory is 4GB, .*spatial\.tiles_per_rank .*\(DS226\)",
        ),
        (dict(memory="1MB"), r"streaming.memory is 1 MB, but a process .* takes \d+ MB already"),
        (dict(memory="many"), r"memory .*'many' \(DS104\)"),
    ],
)
@pytest.mark.parallel(1)
def test_refused(comm, settings, message):
    with pytest.raises((ValueError, OSError), match=message):
        found = config(**{k: v for k, v in settings.items() if k != "memory"})
        if "memory" in settings:
            found = replace(found, streaming=StreamingConfig(memory=settings["memory"]))
        verify(found, comm, Size("33x47"))


def one_name_twice(in_channels, out_channels, **_):
    """Residual blocks whose skips have the same name, across norms."""

    def conv(a, b):
        return nn.Conv2d(a, b, 3, padding=1, bias=False)

    def block(channels):
        return (
            Stash("r"),
            conv(channels, 4),
            nn.InstanceNorm2d(4, affine=True),
            nn.ReLU(),
            conv(4, 4),
            nn.BatchNorm2d(4),
            Pop("r"),
        )

    return nn.Sequential(conv(in_channels, 4), *block(4), *block(8), conv(12, out_channels))


@pytest.mark.parallel([1, 2])
def test_a_name_of_a_skip_is_used_again(comm):
    found = config(streamed=GRID, tiles=f"1x{comm.size}")
    report = verify(
        replace(found, model=replace(found.model, name=f"{__name__}:one_name_twice")),
        comm,
        Size("26x34"),
    )
    assert comm.bcast(report and report["max_error"]) <= 1e-12


class Root(nn.Module):
    """Pointwise, of no number for some inputs, and with a dropout of nothing."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return self.drop(x.sqrt())


def test_layers_that_draw_nothing_are_taken():
    graph = graph_of(
        as_network(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Root(), nn.Conv2d(4, 2, 1)))
    )
    assert [bool(node.access_patterns) for node in graph] == [True, False, True]
