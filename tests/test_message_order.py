"""The order of messages: proved free of deadlocks for the programs of whole jobs, and found again in jobs that run."""

import random
from collections import Counter

import pytest
import torch
from made_transports import over
from test_exact import config

from distseg.comm import reducer
from distseg.comm.launch import gathered
from distseg.comm.mesh import Mesh, MeshShape
from distseg.config.sizes import Size
from distseg.models.capture.capture import as_network
from distseg.runtime.message_order import (
    HALOS_IN_STREAM,
    MESSAGES,
    STREAM,
    Collective,
    Message,
    Start,
    Wait,
    check_order,
    in_batches,
)
from distseg.training.engine import Engine
from distseg.training.programs import StepPrograms
from distseg.training.step_messages import messages_of_all_ranks, prove_order
from distseg.training.verify import own_pieces, prepare

SMALL = dict(num_convs=1, base_channels=2, dropout=0.0)


def planned(image: str, **settings) -> StepPrograms:
    """The operations of all ranks of a job."""
    found = prepare(config(**SMALL, **settings), Size(image))
    return StepPrograms(found.config, as_network(found.model), found.size)


# The rules, on steps written by hand


def x(source: int, target: int, name: str = "x") -> Message:
    return Message("pipeline", source, target, 0, name)


def both(message: Message) -> list:
    return [Start((message,)), Wait((message,))]


A, B = x(0, 1, "a"), x(1, 0, "b")


def test_sends_that_cross_need_a_transport_that_goes_on_meanwhile():
    crossing = [[Start((A,)), *both(B), Wait((A,))], [Start((B,)), *both(A), Wait((B,))]]
    check_order(crossing, MESSAGES)
    with pytest.raises(
        ValueError,
        match=r"over NCCL these ranks wait for each other: rank 0 waits for rank 1 \(a, from rank 0 to rank 1\); "
        r"rank 1 waits for rank 0 \(b, from rank 1 to rank 0\)$",
    ):
        check_order(crossing, STREAM)
    check_order([in_batches(steps, rank) for rank, steps in enumerate(crossing)], STREAM)


def test_a_send_is_complete_only_when_it_is_received():
    """Each rank waits for its send before it receives: nothing but a buffer would let it go on."""
    with pytest.raises(ValueError, match="over MPI and gloo these ranks wait .* rank 0 .* rank 1"):
        check_order([both(A) + both(B), both(B) + both(A)])


def test_a_circle_of_three_names_its_ranks_and_no_other():
    circle = [both(x(r, (r + 1) % 3)) + both(x((r - 1) % 3, r)) for r in range(3)]
    waits = [Start((x(3, 0),)), Wait((x(3, 0),))]
    circle[0] += [Start((x(3, 0),))]
    with pytest.raises(ValueError) as error:
        check_order([*circle, waits])
    assert [f"rank {r} waits for rank {(r + 1) % 3}" in str(error.value) for r in range(4)] == [
        True,
        True,
        True,
        False,
    ]


def test_two_messages_of_one_way_in_two_orders():
    other = x(0, 1, "other")
    inverted = [[Start((A,)), Start((other,))], [*both(other), *both(A)]]
    text = "as message 1 on pipeline over .*, rank 0 sends a, but rank 1 receives other"
    with pytest.raises(ValueError, match=text):
        check_order(inverted)
    with pytest.raises(ValueError, match=text):
        check_order(inverted, STREAM)
    tagged = [
        [Start((A,)), Start((other._replace(tag=1),))],
        [*both(other._replace(tag=1)), *both(A)],
    ]
    check_order(tagged)  # MPI and gloo tell them apart.
    with pytest.raises(ValueError, match=text):
        check_order(tagged, STREAM)


def test_a_message_that_nobody_receives():
    with pytest.raises(ValueError, match="rank 0 sends a, but rank 1 receives nothing"):
        check_order([[Start((A,))], []])


def test_collectives_in_two_orders():
    one, other = (Collective("replicas", (0, 1), what) for what in ("norm", "loss"))
    with pytest.raises(
        ValueError, match="collective 1 on replicas, rank 0 has norm, but rank 1 has loss"
    ):
        check_order([[one, other], [other, one]])
    with pytest.raises(ValueError, match="collective 2 .* rank 0 has loss, but rank 1 has nothing"):
        check_order([[one, other], [one]])


def test_collectives_of_two_groups_that_wait_for_each_other():
    one, other = (Collective(name, (0, 1), "sum") for name in ("tiles", "replicas"))
    with pytest.raises(ValueError, match="rank 0 waits for rank 1 .sum on tiles of ranks 0, 1"):
        check_order([[one, other], [other, one]])


def test_a_batch_of_nccl_has_at_most_256_messages():
    for count in (256, 257):
        batch = tuple(x(0, 1, f"{n}") for n in range(count))
        check_order([[Start(batch)], [Start(batch)]])
        if count == 256:
            check_order([[Start(batch)], [Start(batch)]], STREAM)
        else:
            with pytest.raises(ValueError, match="rank 0 starts 257 messages at once"):
                check_order([[Start(batch)], [Start(batch)]], STREAM)


# The programs of jobs

GRIDS = ("1x1", "1x2", "2x1", "2x2", "1x4", "4x2", "8x2")
LARGE = [
    dict(samples=4, tiles="2x2", stages=4),
    dict(samples=2, tiles="4x2", stages=4, placement="v-shaped"),
    dict(samples=1, tiles="8x2", stages=4, streamed=Size("3x1"), scratch="memory"),
]


def drawn(seed: int) -> dict:
    """The settings of a job; of 1 to 8 ranks, in some cases of 64."""
    draw = random.Random(seed)
    found = dict(
        depth=draw.choice((2, 3)),
        norm=draw.choice(("instance", "batch", "group", "none")),
        loss=draw.choice(("cross_entropy", "dice")),
        accumulate=draw.choice((1, 2, 3, 4)),
    )
    if seed % 12 == 11:
        found |= LARGE[seed // 12 % 3]
    else:
        shapes = [
            dict(samples=samples, tiles=grid, stages=stages)
            for samples in (1, 2, 4)
            for grid in GRIDS
            for stages in (1, 2, 3, 4)
            if samples * Size(grid).volume * stages <= 8
        ]
        found |= draw.choice(shapes)
    if "streamed" not in found and seed % 4 == 1 and "placement" not in found:
        found |= dict(streamed=Size("3x1"), scratch="memory")
    if "streamed" in found:
        schedules = ("gpipe", "1f1b", "auto")
    else:
        schedules = ("gpipe", "1f1b", "zb-h1")
    if found["stages"] > 1:
        found["schedule"] = draw.choice(schedules)
        if "streamed" not in found:
            found["placement"] = found.get("placement") or draw.choice(("linear", "v-shaped"))
            found["recompute"] = draw.choice(("never", "except_last", "always"))
    if Size(found["tiles"]).volume > 1 or "streamed" in found:
        found["exchange_every"] = draw.choice(("1", "2", "level", "all"))
    if found["norm"] == "batch" and found["samples"] > 1:
        found["norm_scope"] = draw.choice(("group", "step"))
    return found


DRAWN = range(72)


def test_the_drawn_jobs_have_every_kind_of_message():
    jobs = [drawn(seed) for seed in DRAWN]
    staged = [job for job in jobs if job["stages"] > 1]
    streamed = [job for job in jobs if "streamed" in job]
    for name, values in {
        "schedule": {"gpipe", "1f1b", "zb-h1", "auto"},
        "placement": {"linear", "v-shaped"},
        "recompute": {"never", "except_last", "always"},
    }.items():
        assert {job[name] for job in staged if name in job} == values
    exchanges = {"1", "2", "level", "all"}
    assert {job["exchange_every"] for job in jobs if "exchange_every" in job} == exchanges
    assert {job["norm_scope"] for job in jobs if "norm_scope" in job} == {"group", "step"}
    assert {job["stages"] for job in streamed} == {1, 2, 3, 4}


def swapped(programs: list[list], draw: random.Random) -> list[list] | None:
    """Return programs in which one rank starts two messages, or collectives, the wrong way round."""
    pairs = []
    for rank, steps in enumerate(programs):
        before: dict = {}  # by sender, receiver and tag: the step with the message before
        for n, step in enumerate(steps):
            if isinstance(step, Start):
                way = step.messages[0][:4]
            elif isinstance(step, Collective):
                way = step.comm
            else:
                continue
            if way in before and steps[before[way]] != step:
                pairs.append((rank, before[way], n))
            before[way] = n
    if not pairs:
        return None
    rank, a, b = draw.choice(pairs)
    found = [list(steps) for steps in programs]
    found[rank][a], found[rank][b] = found[rank][b], found[rank][a]
    return found


@pytest.mark.covering(cases=12)
@pytest.mark.parametrize("seed", DRAWN)
def test_drawn_programs_have_no_deadlock(seed):
    """Prove the drawn programs; the proof fails if one rank has two messages the wrong way round."""
    settings = drawn(seed)
    job = planned("160x96", **settings)
    programs = prove_order(job)
    prove_order(job, HALOS_IN_STREAM)
    shape = MeshShape(settings["samples"], Size(settings["tiles"]), settings["stages"])
    assert len(programs) == shape.size
    if "streamed" in settings and settings["stages"] > 1:
        with pytest.raises(ValueError, match=f"mesh.stages {settings['stages']}.* over NCCL"):
            prove_order(job, STREAM)
    else:
        prove_order(job, STREAM)
    wrong = swapped(programs, random.Random(seed))
    assert (wrong is None) == (shape.size == 1)
    for rules in (MESSAGES, HALOS_IN_STREAM) if wrong else ():
        with pytest.raises(ValueError, match="give all ranks one order|wait for each other"):
            check_order(wrong, rules)


PIPELINE = dict(tiles="1x2", stages=2, accumulate=4, schedule="1f1b", exchange_every="1")


def test_two_messages_the_wrong_way_round_are_found_and_named():
    programs = messages_of_all_ranks(planned("64x64", **PIPELINE))
    check_order(programs)
    sends = [
        n
        for n, step in enumerate(programs[0])
        if isinstance(step, Start) and step.messages[0].name.startswith("x of stage 0")
    ]
    first, second = sends[:2]
    programs[0][first], programs[0][second] = programs[0][second], programs[0][first]
    with pytest.raises(
        ValueError,
        match="on pipeline over MPI and gloo, rank 0 sends x of stage 0 for stage 1, micro-batch 1, "
        "but rank 1 receives x of stage 0 for stage 1, micro-batch 0",
    ):
        check_order(programs)


def test_a_wait_before_its_send_is_found_and_names_the_ranks():
    """Rank 0 waits for the gradient of micro-batch 0 before it sends what this gradient is computed from."""
    programs = messages_of_all_ranks(planned("64x64", **PIPELINE))
    steps = programs[0]
    gradient = next(
        step for step in steps if isinstance(step, Wait) and "gradient of x" in str(step)
    )
    steps.remove(gradient)
    steps.insert(0, Start(gradient.messages))
    steps.insert(1, gradient)
    steps.remove(
        next(s for s in steps[2:] if isinstance(s, Start) and s == Start(gradient.messages))
    )
    with pytest.raises(ValueError) as error:
        check_order(programs)
    text = str(error.value)
    assert "rank 0 waits for rank 1 (gradient of x of stage 0 for stage 1, micro-batch 0" in text
    assert "rank 1 waits for rank 0 (shapes of x of stage 0 for stage 1, micro-batch 0" in text


def test_the_order_of_mpi_would_block_nccl():
    programs = messages_of_all_ranks(planned("64x64", **PIPELINE))
    with pytest.raises(ValueError, match="over NCCL these ranks wait for each other"):
        check_order(programs, STREAM)


def with_early_sums(steps: list, rank: int, draw: random.Random, tags: tuple[int, int]) -> list:
    """Return the steps of a rank, in which the sums of two buckets start at drawn places of each optimizer step."""
    found: list = []
    begin = 0  # of the optimizer step
    for step in steps:
        if not isinstance(step, Collective) or "sum of the gradients" not in step.name:
            found.append(step)
            continue
        rounds = [
            tuple(
                Message(step.comm, *way, tag, f"round {tag} of bucket {bucket}, {step.name}")
                for other in step.ranks
                if other != rank
                for way in ((rank, other), (other, rank))
            )
            for bucket in range(2)
            for tag in tags
        ]
        places = sorted(draw.choices(range(begin, len(found) + 1), k=2), reverse=True)
        for place, messages in zip(places, (rounds[2], rounds[0])):
            found.insert(place, Start(messages))
        for first, second in (rounds[:2], rounds[2:]):
            found += [Wait(first), Start(second), Wait(second)]
        begin = len(found)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_sums_of_gradients_may_start_anywhere_on_each_rank(seed):
    """The first messages of a sum start at any place in the program, because no other messages have their tags."""
    draw = random.Random(seed)
    programs = messages_of_all_ranks(planned("64x64", **PIPELINE | dict(norm="batch", samples=2)))
    check_order(programs)
    check_order(
        [
            with_early_sums(steps, rank, draw, reducer.TAGS_OF_SUMS)
            for rank, steps in enumerate(programs)
        ]
    )


# The same order in jobs that run


class Recorder:
    """Communicator that notes the messages and collectives that a rank starts."""

    def __init__(self, comm, name: str, ranks, noted: list):
        self.comm, self.name, self.ranks, self.noted = comm, name, ranks, noted

    def __getattr__(self, method: str):
        found = getattr(self.comm, method)
        if method in ("Isend", "isend", "Isend_part", "Irecv", "irecv", "Irecv_part"):

            def message(what, peer, tag):
                kind = method[1:5].lower()
                size = None if kind == "recv" or method == "isend" else what.numel()
                self.noted.append((kind, self.name, self.ranks[peer], tag, size))
                return found(what, peer, tag)

            return message
        if method in ("Iallgather", "Isum", "Imaximum", "allgather", "allreduce", "bcast"):

            def collective(*what):
                self.noted.append(("all", self.name))
                return found(*what)

            return collective
        return found


def recorded(comm, image: str, settings: dict, steps: int = 2) -> list[tuple]:
    """Return the messages that a rank starts in the first steps of a job.

    The sum of the gradients is one collective, noted when the rank waits for it, behind the messages of these sums.
    """
    prepared = prepare(config(**SMALL, **settings), Size(image))
    found, model, images = prepared.config, as_network(prepared.model), prepared.images()
    mesh = Mesh(comm, found.mesh.samples, found.mesh.tiles, found.mesh.stages)
    engine = Engine(found, mesh, model, images.size, torch.device("cpu"), precision="fp64")
    noted: list[tuple] = []
    members = mesh.shape.members(mesh.rank)
    for name, ranks in reversed(members._asdict().items()):
        made = getattr(mesh, name)
        assert len(ranks) == made.size and ranks[made.rank] == mesh.rank
        if not isinstance(made.comm, Recorder):  # groups and replicas may be one communicator
            made.comm = Recorder(made.comm, name, ranks, noted)

    def sum_gradients():
        engine.sums.finish()
        if mesh.replicas.size > 1:
            noted.append(("all", "replicas"))

    engine.sum_gradients = sum_gradients
    for _ in range(steps):
        engine.backward(own_pieces(engine, images))
        engine.update(0.0)
    return noted


def expected(steps, rank: int) -> list[tuple]:
    """Return the messages that a rank's steps start, in the form of :class:`Recorder` without sizes."""
    found: list[tuple] = []
    for step in steps:
        if isinstance(step, Collective):
            found.append(("all", step.comm))
        elif isinstance(step, Start):
            found += [
                ("send", m.comm, m.target, m.tag)
                if m.source == rank
                else ("recv", m.comm, m.source, m.tag)
                for m in step.messages
            ]
    return found


def is_of_sum(note: tuple) -> bool:
    """Return True if a note is a message of the sums of gradients."""
    return len(note) > 2 and note[3] in reducer.TAGS_OF_SUMS


def check_run(comm, image: str, settings: dict) -> None:
    noted = [note[:4] for note in recorded(comm, image, settings) if not is_of_sum(note)]
    steps = messages_of_all_ranks(planned(image, **settings))[comm.rank]
    assert noted and noted == expected(steps, comm.rank)


TILES = dict(tiles="1x2", exchange_every="1", norm="batch")
STAGES = dict(stages=2, accumulate=3, schedule="1f1b", loss="dice")
V = dict(stages=2, accumulate=3, placement="v-shaped", schedule="zb-h1", recompute="always")
MESH = dict(stages=2, tiles="2x1", accumulate=2, exchange_every="level", loss="dice")
GROUPS = dict(samples=2, tiles="1x2", norm="batch", norm_scope="step", loss="dice")


@pytest.mark.parallel(2)
@pytest.mark.parametrize("kind", ["mpi", "torch"])
@pytest.mark.parametrize("settings", [TILES, STAGES, V], ids=["tiles", "stages", "v"])
def test_a_job_starts_the_messages_of_its_program(comm, kind, settings):
    check_run(over(kind, comm), "64x64", settings)
    gathered(comm)


@pytest.mark.slow
@pytest.mark.parallel(4)
@pytest.mark.parametrize("settings", [MESH, GROUPS], ids=["mesh", "groups"])
def test_a_job_of_several_axes_starts_the_messages_of_its_program(comm, settings):
    check_run(comm, "64x64", settings)


@pytest.mark.slow
@pytest.mark.parallel(8)
def test_a_job_of_all_axes_starts_the_messages_of_its_program(comm):
    check_run(comm, "64x64", PIPELINE | dict(samples=2, norm="batch", recompute="always"))


@pytest.mark.parallel(2)
@pytest.mark.parametrize("kind", ["mpi", "torch"])
def test_sums_of_gradients_start_between_other_messages(comm, kind, monkeypatch):
    """On one communicator with the statistics of norms, whose order stays that of the program."""
    monkeypatch.setattr(reducer, "_BUCKET", 1)
    settings = dict(samples=2, norm="batch", norm_scope="step", reducer=kind)
    noted = recorded(over(kind, comm), "64x64", settings)
    steps = messages_of_all_ranks(planned("64x64", **settings))[comm.rank]
    others = [note[:4] for note in noted if not is_of_sum(note)]
    assert others == expected(steps, comm.rank)
    assert others and {note[1] for note in others} == {"replicas"}
    first = next(n for n, note in enumerate(noted) if is_of_sum(note))
    assert first < len(others) / 2 - 1, "other messages of the first of two steps follow"
    sent, received = (
        Counter(note[3] for note in noted if is_of_sum(note) and note[0] == way)
        for way in ("send", "recv")
    )
    assert sorted(sent) == sorted(reducer.TAGS_OF_SUMS)
    assert comm.allgather(sent)[::-1] == comm.allgather(received)
    gathered(comm)


STREAMED = dict(streamed=Size("3x1"), scratch="memory", exchange_every="1", accumulate=2)


def headers(noted: list[tuple]) -> Counter:
    """The number of feature maps that are sent on each way: each begins with a message of four numbers."""
    return Counter(
        note[2:4] for note in noted if note[:2] == ("send", "pipeline") and note[4] == 32
    )


@pytest.mark.parallel(2)
@pytest.mark.parametrize(
    "settings",
    [dict(tiles="1x2"), dict(stages=2, loss="dice"), dict(stages=2, norm="none")],
    ids=["tiles", "gpipe", "interleaved"],
)
def test_a_streamed_job_starts_the_messages_of_its_program(comm, settings):
    """Strips of rows depend on the time, so of these only the maps are counted."""
    settings = STREAMED | settings
    noted = [note for note in recorded(comm, "64x64", settings) if not is_of_sum(note)]
    steps = messages_of_all_ranks(planned("64x64", **settings))[comm.rank]
    wanted = expected(steps, comm.rank)

    def others(notes):
        return [note[:4] for note in notes if note[1] != "pipeline" or note[0] == "all"]

    assert others(noted) == others(wanted)
    maps = {
        (m.target, m.tag, m.name.split(" before row ")[0], m.name.partition("micro-batch")[2])
        for step in steps
        if isinstance(step, Start)
        for m in step.messages
        if m.source == comm.rank and m.comm == "pipeline"
    }
    assert headers(noted) == Counter(way[:2] for way in maps)
