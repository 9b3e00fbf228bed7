"""A forward pass that draws random numbers, or leaves something behind, is refused by name: captured, and as the user's module on whole images."""

import array
import contextvars
import ctypes
import datetime
import enum
import gc
import io
import itertools
import logging
import os
import random
import re
import statistics
import threading
import time
import uuid
import warnings
from collections import Counter, deque
from dataclasses import replace
from functools import partial
from os import urandom
from types import SimpleNamespace

import made_random
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.random import default_rng
from test_exact import TOLERANCE, config
from torch import nn

from distseg.comm.alone import Alone
from distseg.comm.launch import JointFailure
from distseg.config.settings import ModelConfig
from distseg.config.sizes import Size
from distseg.layers.context import Context
from distseg.layers.kernels import norm as compiled
from distseg.models.capture.capture import as_network, capture
from distseg.models.capture.checks import check_apart, check_exact
from distseg.models.capture.trace import CanNotCapture, Hidden
from distseg.models.network import is_followed, refusals
from distseg.models.zoo import plain_model
from distseg.runtime.swap_layers import parallelize
from distseg.tiling.tile import Box, ReceptiveField, TilePlacement
from distseg.training.verify import verify

P = 0.001  # so rare that a pass hardly ever shows it
CALLS, METER, LAST, TURN, SCALES = (
    0,
    SimpleNamespace(passes=0),
    {},
    [False],
    itertools.cycle([1.0, 1.5]),
)
DICE = random.Random(3)


class Helper:
    """What a module keeps, or a file has: its methods count elsewhere."""

    count = 0

    def tick(self):
        type(self).count += 1

    def globally(self):
        global CALLS
        CALLS += 1

    def __call__(self, *_):
        self.globally()

    def __getitem__(self, key):
        self.globally()

    @property
    def next(self):
        METER.passes += 1


class Other(nn.Module):
    """A class of modules, of which no network has one."""

    count = 0


HELPER = HOOK = Helper()


class Kept(nn.Module):
    """A convolution, a function that does something besides, and another convolution."""

    count = 0
    passes: list = []

    def __init__(self, function, attends=False):
        super().__init__()
        self.first, self.block, self.last = (
            nn.Conv2d(2, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, 2, 1),
        )
        self.function, self.attends, self.drop, self.norm = (
            function,
            attends,
            nn.Dropout2d(0.1),
            nn.BatchNorm2d(4),
        )
        self.register_buffer("ema", torch.ones(1, 4, 1, 1))
        self.register_buffer("steps", torch.zeros(()))
        self.n, self.rate, self.flag, self.last_size, self.cache, self.center = (
            0,
            0.1,
            True,
            None,
            {},
            0.0,
        )
        self.history, self.recent, self.seen, self.counter, self.kinds = (
            [],
            deque(maxlen=3),
            set(),
            itertools.count(),
            Counter(),
        )
        self.meter, self.nested = SimpleNamespace(total=0.0), {"a": [{"passes": 0}]}
        self.pythons, self.numpys, self.old, self.torchs = (
            random.Random(0),
            default_rng(0),
            np.random.RandomState(0),
            torch.Generator(),
        )
        self.sobol = torch.quasirandom.SobolEngine(1)
        self.plain, self.array = torch.zeros(3), np.zeros(3)
        self.helper, self.kind = Helper(), Helper
        if function is by_a_hook:
            self.last.register_forward_hook(HOOK)

    def forward(self, x):
        x = self.function(self, F.relu(self.first(x)))
        if self.attends:  # which is not followed, so that images stay whole
            x = x * x.flatten(2).sort(-1).values.view_as(x)
        return self.last(self.norm(x))

    def kept(self, x, dropped):
        """A layer that is left out now and then."""
        return x if dropped else x + F.relu(self.block(x))


def assigned(m, x):
    m.center = 0.9 * m.center + 0.1 * x.detach().mean()
    return x - m.center


def in_training(m, x):
    m.n += m.training
    return x * 2 if m.n > 40 else x


def rate(m, x):
    m.rate += 0.01
    return F.dropout2d(x, m.rate, m.training)


def rate_of_a_layer(m, x):
    m.drop.p = min(0.5, m.drop.p + 0.01)
    return m.drop(x)


def globally(m, x):
    global CALLS
    CALLS += 1
    return x


def helper():
    METER.passes += 1


def by_helper(m, x):
    helper()
    return x


def of_class(m, x):
    type(m).count += 1
    return x


def of_a_class_of_modules(m, x):
    Other.count += 1
    return x


def of_a_class_attribute(m, x):
    m.kind.count += 1
    return x


def imports(m, x):
    import made_outside

    made_outside.tick()
    return x


def imports_from(m, x):
    from made_outside import tick

    tick()
    return x


def imports_by_name(m, x):
    __import__("made_outside").tick()
    return x


def by_a_hook(m, x):
    return x


def in_turn(m, x):
    TURN[0] = not TURN[0]
    return x * (1 + TURN[0])


def of_a_library(m, x):
    statistics.passes = getattr(statistics, "passes", 0) + 1
    return x


def of_a_library_class(m, x):
    nn.Conv2d.passes = getattr(nn.Conv2d, "passes", 0) + 1
    return x


def first_pass(m, x):
    if m.flag:
        m.flag = False
        return x * 2
    return x


def alternating(m, x):
    m.flag = not m.flag
    return x * (2 if m.flag else 1)


def saturating(m, x):
    m.n = min(m.n + 1, 3)
    return x * m.n


def swapped(m, x):
    y = m.block(x)
    m.block = nn.Conv2d(4, 4, 3, padding=1, device=x.device, dtype=x.dtype)
    return y


def frozen(m, x):
    m.block.weight.requires_grad_(False)
    return m.block(x)


def registered(m, x):
    m.register_buffer("mask", torch.ones_like(x[:1, :, :1, :1]))
    return x


def renamed(m, x):
    m._buffers["ema"] = m.ema * 0.5
    return x * 2


def by_setattr(m, x):
    m.ema = m.ema * 0.5
    return x


def without_gradient(m, x):
    with torch.no_grad():
        m.ema.mul_(0.9).add_(0.1 * x.mean((0, 2, 3), keepdim=True))
    return x / (m.ema + 1)


def data_of(m, x):
    m.ema.data = 0.9 * m.ema + 1
    return x


def weight_data(m, x):
    m.block.weight.data = m.block.weight.detach().clamp(-0.1, 0.1)
    return m.block(x)


def data_in_place(m, x):
    m.block.weight.data.mul_(0.5)
    return m.block(x)


def closure():
    passes = 0

    def counted(m, x):
        nonlocal passes
        passes += 1
        return x

    return counted


def default(m, x, found=[]):  # noqa: B006  (kept from call to call: what the test is about)
    found.append(1)
    return x


def attribute(m, x):
    attribute.passes = getattr(attribute, "passes", 0) + 1
    return x


def hook(m, x):
    m.block.register_forward_hook(lambda *_: None)
    return x


STATE = {
    "a buffer that is assigned": (by_setattr, "changes ema of the model"),
    "a buffer in its dict": (renamed, "changes ema of the model"),
    "a buffer overwritten": (
        without_gradient,
        r"changes ema with each forward pass|changes ema of the model",
    ),
    "a buffer counted": (
        lambda m, x: (m.steps.add_(1), x)[1],
        "changes steps with each forward pass|changes steps of the model",
    ),
    "a buffer's data": (data_of, "replaces the data of ema|changes ema of the model"),
    "a weight's data": (weight_data, "replaces the data of block.weight|changes weight of block"),
    "a weight's data in place": (
        data_in_place,
        "changes the data of block.weight|changes weight of block",
    ),
    "a buffer set": (
        lambda m, x: (m.ema.set_(m.ema * 2), x)[1],
        "replaces the data of ema|changes ema of the model",
    ),
    "a new buffer": (registered, "changes mask of the model"),
    "a running mean": (assigned, "changes center of the model|takes a tensor of"),
    "a counter": (in_training, "changes n of the model"),
    "a rate": (rate, "changes rate of the model"),
    "a rate of a layer": (rate_of_a_layer, "changes p of drop"),
    "a list": (lambda m, x: (m.history.append(x.mean()), x)[1], "changes history of the model"),
    "a dict": (lambda m, x: (m.kinds.update([x.shape[1]]), x)[1], "changes kinds of the model"),
    "a set": (lambda m, x: (m.seen.add(len(m.seen)), x)[1], "changes seen of the model"),
    "a full deque": (
        lambda m, x: (m.recent.append(len(m.recent) + m.n), m.nested["a"].append(0), x)[2],
        "changes (recent|nested) of the model",
    ),
    "nested": (
        lambda m, x: (m.nested["a"][0].update(passes=m.nested["a"][0]["passes"] + 1), x)[1],
        "changes nested of the model",
    ),
    "an object": (
        lambda m, x: (setattr(m.meter, "total", m.meter.total + 1), x)[1],
        "changes meter of the model",
    ),
    "an iterator": (lambda m, x: x * (1 + (next(m.counter) > 100)), "changes counter of the model"),
    "a plain tensor": (
        lambda m, x: (m.plain.add_(1), x)[1],
        "changes plain of the model|takes a tensor of",
    ),
    "an array": (lambda m, x: (m.array.__iadd__(1), x)[1], "changes array of the model"),
    "a global": (globally, r"changes CALLS of test_hidden_state.py"),
    "an object of the file, in a helper": (by_helper, r"changes METER of test_hidden_state.py"),
    "a dict of the file": (
        lambda m, x: (LAST.update(n=LAST.get("n", 0) + 1), x)[1],
        "changes LAST of test_hidden_state.py",
    ),
    "a class attribute": (of_class, "changes count of class Kept"),
    "a list of the class": (
        lambda m, x: (m.passes.append(1), x)[1],
        "changes passes of class Kept",
    ),
    "a closure": (
        closure(),
        "changes (a variable that function closure.*counted holds|function of the model)",
    ),
    "a default": (
        default,
        "changes (a variable that function default.* holds|function of the model)",
    ),
    "an attribute of a function": (
        attribute,
        "changes (a variable that function attribute.* holds|attribute of|function of the model)",
    ),
    "the first pass": (first_pass, "changes flag of the model"),
    "every other pass": (alternating, "changes flag of the model"),
    "a few passes": (saturating, "changes n of the model"),
    "a layer": (swapped, "draws random numbers"),
    "what is trained": (frozen, "changes weight of block"),
    "a hook": (hook, "changes _forward_hooks of block"),
    "a mode": (lambda m, x: (m.history.append(m.training), x)[1], "changes history of the model"),
}


class Named(dict):
    """A dict with attributes of its own."""


class Modes(enum.Enum):
    PLAIN = 1


NAMED, NUMBERS, BYTES, PLACE = Named(), array.array("i", [0]), io.BytesIO(), threading.local()
NUMBER, CONTEXT = ctypes.c_int(0), contextvars.ContextVar("passes", default=0)


def counted(holder, m, x):
    """Count in an attribute."""
    holder = holder(m)
    holder.passes = getattr(holder, "passes", 0) + 1
    return x


def of_an_array(m, x):
    NUMBERS[0] += 1
    return x


def of_c(m, x):
    NUMBER.value += 1
    return x


PRINTED = {
    "an attribute of a weight": (
        partial(counted, lambda m: m.block.weight),
        "changes weight of block",
    ),
    "an attribute of a buffer": (partial(counted, lambda m: m.ema), "changes ema of the model"),
    "an attribute of a dict": (
        partial(counted, lambda m: NAMED),
        "changes NAMED of test_hidden_state.py",
    ),
    "an attribute of an enum": (
        partial(counted, lambda m: Modes.PLAIN),
        "changes PLAIN of class Modes",
    ),
    "of a thread": (partial(counted, lambda m: PLACE), "changes PLACE of test_hidden_state.py"),
    "an array of Python's": (of_an_array, "changes NUMBERS of test_hidden_state.py"),
    "a number of C's": (of_c, "changes NUMBER of test_hidden_state.py"),
    "a file in memory": (
        lambda m, x: (BYTES.write(b"0"), x)[1],
        "changes BYTES of test_hidden_state.py",
    ),
    "a context": (
        lambda m, x: (CONTEXT.set(CONTEXT.get() + 1), x)[1],
        "changes CONTEXT of test_hidden_state.py",
    ),
    "Sobol's points": (lambda m, x: x * (1 + m.sobol.draw(1).item()), "changes sobol of the model"),
}
REACHED = PRINTED | {
    "a method of an attribute": (
        lambda m, x: (m.helper.tick(), x)[1],
        "changes count of class Helper",
    ),
    "a method of a global": (
        lambda m, x: (HELPER.globally(), x)[1],
        "changes CALLS of test_hidden_state.py",
    ),
    "an operator": (lambda m, x: (m.helper[0], x)[1], "changes CALLS of test_hidden_state.py"),
    "a property": (lambda m, x: (HELPER.next, x)[1], "changes METER of test_hidden_state.py"),
    "an object as a hook": (by_a_hook, "changes CALLS of test_hidden_state.py"),
    "a class as an attribute": (of_a_class_attribute, "changes count of class Helper"),
    "a class of modules": (of_a_class_of_modules, "changes count of class Other"),
    "a file that is imported": (imports, "changes passes of made_outside.py"),
    "a function that is imported": (imports_from, "changes passes of made_outside.py"),
    "a file that is imported by name": (imports_by_name, "changes passes of made_outside.py"),
    "a library": (of_a_library, "changes passes of statistics"),
    "a class of PyTorch's": (of_a_library_class, "changes passes of class Conv2d"),
    "every other pass, of the file": (in_turn, "changes TURN of test_hidden_state.py"),
    "in turn": (lambda m, x: x * next(SCALES), "changes SCALES of test_hidden_state.py"),
}
DRAWN = {
    "rand": lambda: torch.rand(()) < P,
    "item": lambda: torch.rand(1).item() < P,
    "bool": lambda: bool(torch.bernoulli(torch.tensor(P))),
    "uniform": lambda: torch.empty(()).uniform_() < P,
    "randint": lambda: torch.randint(0, 1000, (1,)).item() == 0,
    "random": lambda: torch.zeros(()).random_(0, 1000) == 0,
    "normal": lambda: torch.normal(0.0, 1.0, (1,)) > 3,
    "randn": lambda: torch.randn(()) > 3,
    "exponential": lambda: torch.empty(()).exponential_() > 7,
    "geometric": lambda: torch.empty(()).geometric_(0.5) > 10,
    "poisson": lambda: torch.poisson(torch.ones(())) > 5,
    "multinomial": lambda: torch.multinomial(torch.tensor([P, 1.0]), 1).item() == 0,
    "randperm": lambda: torch.randperm(1000)[0] == 0,
    "dropout": lambda: F.dropout(torch.ones(()), P) == 0,
    "distribution": lambda: torch.distributions.Bernoulli(P).sample().item() == 1,
    "python": lambda: random.random() < P,
    "python's choice": lambda: random.choice(range(1000)) == 0,
    "numpy": lambda: np.random.rand() < P,
    "numpy's integers": lambda: np.random.randint(1000) == 0,
    "a new generator": lambda: default_rng().random() < P,
    "a new one of Python's": lambda: random.Random().random() < P,
    "the system": lambda: random.SystemRandom().random() < P,
    "of the file": lambda: DICE.random() < P,
}
OWN = {
    "python": (lambda m: m.pythons.random() < P, "by pythons of the model"),
    "numpy": (lambda m: m.numpys.random() < P, "by numpys of the model"),
    "old numpy": (lambda m: m.old.rand() < P, "by old of the model"),
    "torch": (lambda m: torch.rand((), generator=m.torchs) < P, "rand in the model"),
}


def in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(os.urandom(1)))
    thread.start()
    thread.join()
    return found == [b"0"]


def seeded_anew():
    state = random.getstate()
    random.seed(time.time_ns())
    found = random.random()
    random.setstate(state)
    return found < P


ASKED = {
    "the time": (lambda: time.time_ns() % 1000 == 0, r"time\.time_ns in the model"),
    "a clock": (lambda: time.perf_counter() > 1e9, r"time\.perf_counter"),
    "the date": (lambda: datetime.datetime.now().year > 3000, r"datetime\.now"),
    "the time in a seed": (seeded_anew, r"time\.time_ns"),
    "numpy, seeded by the time": (
        lambda: default_rng(time.time_ns()).random() < P,
        r"time\.time_ns",
    ),
    "the system's numbers": (lambda: urandom(1) == b"0", r"os\.urandom"),
    "the system's numbers in a thread": (in_a_thread, r"os\.urandom"),
    "a name that is nowhere else": (lambda: uuid.uuid1().int == 0, r"uuid|time"),
    "a file": (lambda: open("/dev/null").read() == "0", "open"),
    "a file's age": (lambda: os.path.getmtime(__file__) == 0, r"os\.stat"),
    "the process": (lambda: os.getpid() == 0, r"os\.getpid"),
    "the environment": (lambda: os.environ.get("RANK") == "1", r"os\.environ"),
    "the environment again": (lambda: os.getenv("RANK") == "1", r"os\.environ"),
    "a place in memory": (lambda: id(P) == 0, "id in the model"),
    "a hash": (lambda: hash(object()) == 0, "hash in the model"),
}


def left_out(draw, m, x):
    return m.kept(x, m.training and draw())


def left_out_by_own(draw, m, x):
    return m.kept(x, m.training and draw(m))


CASES = {f"state: {name}": case for name, case in (STATE | REACHED).items()}
CASES |= {
    f"draw: {name}": (
        partial(left_out, draw),
        "draws random numbers|takes random numbers from the operating system",
    )
    for name, draw in DRAWN.items()
}
CASES |= {
    f"own generator: {name}": (partial(left_out_by_own, draw), words)
    for name, (draw, words) in OWN.items()
}
CASES |= {
    f"asked: {name}": (partial(left_out, ask), f"({words}).* reads the machine's state")
    for name, (ask, words) in ASKED.items()
}
FEW = [
    *(f"state: {name}" for name in REACHED),
    *(f"asked: {name}" for name in ASKED if name != "the time"),
]  # which whole images have by the same way
UNUSED = {
    "draw: unused": (
        lambda m, x: (torch.rand(3), x)[1],
        "rand in the model .* draws random numbers",
    )
}


EACH = [
    (name, attends)
    for name in (*CASES, *UNUSED)
    for attends in (False, True)[: 1 if name in FEW else 2]
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "name, attends",
    EACH,
    ids=[f"{name}-{'whole' if attends else 'captured'}" for name, attends in EACH],
)
def test_what_a_pass_does_besides_is_refused(name, attends):
    function, words = (CASES | UNUSED)[name]
    model = Kept(function, attends)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    network = as_network(model)
    assert not is_followed(network)
    with pytest.raises(ValueError, match=f"cannot be trained exactly: .*({words})") as refused:
        check_exact(network, (40, 56))
    assert re.search(r"(test_hidden_state|made_outside)\.py, line", str(refused.value)), (
        refused.value
    )
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])


def size_of(m, x):
    m.last_size = tuple(x.shape)
    return x


def once(m, x):
    if m.flag:
        m.flag = False
    return x


def shown(m, x):
    m.cache["features"] = x
    m.attention = x.detach().sigmoid()
    return x


def by_size(m, x):
    if m.last_size != x.shape[2:]:
        m.last_size, m.cache = x.shape[2:], {"cells": x.shape[2] * x.shape[3]}
    return x


def seeded(m, x):
    return x * (1 + default_rng(0).random())


def told(m, x):
    logging.getLogger("networks").debug("a pass of %s", x.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("a pass", stacklevel=1)
    return x * len(os.path.join("a", "b"))


HARMLESS = {
    "told": told,
    "size": size_of,
    "flag": once,
    "features": shown,
    "size again": by_size,
    "seeded": seeded,
    "dropout that nothing uses": lambda m, x: (F.dropout(x, 0.2, m.training), x)[1],
}


@pytest.mark.covering(cases=3)
@pytest.mark.parametrize("name", HARMLESS)
def test_what_no_pass_depends_on_is_no_alarm(name):
    network = as_network(Kept(HARMLESS[name]))
    assert is_followed(network), refusals[network]
    if "nothing uses" not in name:  # of a module that is not followed nobody knows
        network = as_network(Kept(HARMLESS[name], attends=True))
        assert not is_followed(network)
        check_exact(network, (40, 56))


def test_collections_of_garbage_are_no_alarm():
    """Whoever watches them, as some test tools do, asks for the time wherever they come."""
    times, threshold = [], gc.get_threshold()
    gc.callbacks.append(watcher := lambda phase, info: times.append(time.perf_counter()))
    gc.set_threshold(1)
    try:
        check_exact(as_network(Kept(shown, attends=True)), (40, 56))
    finally:
        gc.callbacks.remove(watcher)
        gc.set_threshold(*threshold)
    assert times


UNFOLLOWED = {
    "a rate that is read": (
        made_random.rate_of_the_layer,
        nn.Dropout(0.3),
        "bernoulli in the model .* draws random numbers",
    ),
    "attention": (
        made_random.attention_dropout,
        nn.Dropout(0.3),
        "(dropout|bernoulli|attention).* in the model .* draws random numbers",
    ),
    "noise of large images": (
        made_random.large_images_alone,
        None,
        "randn_like in the model .* draws random numbers",
    ),
    "windows": (
        made_random.windows,
        nn.Dropout(0.3),
        "drop .* applies dropout to a tensor of .* the first dim must be the batch of 2 images",
    ),
    "frames": (
        made_random.frames,
        nn.Dropout2d(0.3),
        "drop .* applies dropout to a tensor of .* the first dim must be the batch of 2 images",
    ),
    "all images": (
        made_random.of_all_images,
        nn.Dropout(0.3),
        "drop .* applies dropout to a tensor of .* the first dim must be the batch of 2 images",
    ),
    "an image by Dropout3d": (
        made_random.once,
        nn.Dropout3d(0.3),
        "drop .* nn.Dropout3d, .* 4 dims",
    ),
    "a vector by Dropout1d": (
        made_random.vector,
        nn.Dropout1d(0.3),
        "drop .* nn.Dropout1d, .* 2 dims",
    ),
    "a norm behind itself": (
        made_random.evaluated_behind,
        None,
        "norm .* in evaluation after a call in training",
    ),
    "a norm behind itself, unseen": (
        made_random.evaluated_unseen,
        None,
        "norm .* in evaluation after a call in training",
    ),
    "statistics, unseen": (
        made_random.statistics_read_unseen,
        None,
        "view .* reads norm.running_mean, which a norm updates once per step",
    ),
    "a norm by its function": (made_random.norm_by_function, None, "changes running_mean of norm"),
}


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_masks_and_statistics_of_whole_images_that_would_be_others_are_refused(name):
    function, drop, words = UNFOLLOWED[name]
    network = as_network(made_random.Around(function, True, drop))
    assert not is_followed(network)
    with pytest.raises(ValueError, match=f"cannot be trained exactly: .*{words}") as refused:
        check_exact(network, (64, 320))
    assert "made_random.py, line" in str(refused.value), refused.value


@pytest.mark.parametrize(
    "function, drop",
    [
        ("once", nn.Dropout(0.3)),
        ("tokens", nn.Dropout(0.3)),
        ("tokens", nn.Dropout1d(0.3)),
        ("vector", nn.Dropout(0.3)),
        ("twice", nn.Dropout2d(0.3)),
        ("evaluated_before", None),
    ],
)
def test_masks_of_whole_images_that_are_known_are_no_alarm(function, drop):
    network = as_network(made_random.Around(getattr(made_random, function), True, drop))
    assert not is_followed(network)
    check_exact(network, (64, 320))


FOLLOWED = {
    "a draw at two places": (
        made_random.both_modalities,
        None,
        "uses bernoulli in the model .* another call uses the same random numbers",
    ),
    "a draw at two scales": (
        made_random.both_scales,
        None,
        "uses bernoulli in the model .* another call uses the same random numbers",
    ),
    "an image by Dropout3d": (
        made_random.once,
        nn.Dropout3d(0.3),
        "dropout3d in drop .* of 4 dims",
    ),
    "a vector by Dropout1d": (
        made_random.vector,
        nn.Dropout1d(0.3),
        "dropout1d in drop .* of 2 dims",
    ),
    "a norm behind itself": (
        made_random.evaluated_behind,
        None,
        "batch_norm in norm .* in evaluation after a call in training",
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_masks_and_statistics_of_layers_that_would_be_others_are_refused(name):
    function, drop, words = FOLLOWED[name]
    network = as_network(made_random.Around(function, False, drop))
    assert not is_followed(network)
    assert re.search(words, refusals[network]) and "made_random.py, line" in refusals[network], (
        refusals[network]
    )
    with pytest.raises(ValueError, match="cannot be trained exactly"):
        check_exact(network, (64, 64))


def test_a_norm_in_evaluation_before_its_own_pass_is_followed():
    network = as_network(made_random.Around(made_random.evaluated_before))
    assert is_followed(network), refusals[network]


@pytest.mark.parametrize("drop", [nn.Dropout3d(0.3), nn.Dropout1d(0.3)], ids=["3d", "1d"])
def test_dropouts_of_other_dims_in_a_list_of_layers_are_refused(drop):
    network = as_network(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), drop, nn.Conv2d(4, 2, 1)))
    assert not is_followed(network)
    with pytest.raises(ValueError, match="[dD]ropout[13]d"):
        check_exact(network, (40, 56))


def test_a_dropout_at_several_places_of_whole_images_has_a_mask_at_each():
    torch.manual_seed(0)
    context = Context(seed=1)
    model = (
        parallelize(
            made_random.Around(made_random.twice, True, nn.Dropout2d(0.5)),
            ReceptiveField((0, 0), (1, 1)),
            context,
            whole=True,
        )
        .double()
        .train()
    )
    image = torch.randn(1, 2, 32, 32, dtype=torch.float64)
    (place,) = [TilePlacement((32, 32), Box.whole((32, 32)), Box.whole((32, 32)), (0,), (0,))]
    made = [model([image], [place])[0] for _ in range(2)]
    bias = model.model.last.bias.view(1, -1, 1, 1)
    assert not torch.allclose(made[0], bias.expand_as(made[0])) and torch.equal(*made)


@pytest.mark.parallel(2)
def test_a_dropout_at_several_places_is_exact_on_groups_of_whole_images(comm):
    plan = replace(
        config(samples=2),
        model=ModelConfig(f"{made_random.__name__}:twice_network", in_channels=3, out_channels=3),
    )
    report = verify(plan, comm, Size("32x48"), steps=2)
    assert comm.bcast(report and report["max_error"]) <= TOLERANCE


def test_random_numbers_of_the_constructor_are_those_of_the_seed():
    """All ranks, and those that resume the run, have the same network."""
    before = random.getstate(), np.random.get_state()[1].tolist()
    first, second, other = (
        plain_model(ModelConfig("made_random:Wired", in_channels=3, out_channels=3, seed=seed))
        for seed in (0, 0, 1)
    )
    assert (first.order, first.scale) == (second.order, second.scale) != (other.order, other.scale)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("name", ["less_its_batch", "by_their_number", "once", "norm"])
def test_images_that_other_means_than_norms_join_are_of_one_group(name):
    network = as_network(made_random.Around(getattr(made_random, name), True, nn.Dropout(0.3)))
    assert not is_followed(network)
    check_exact(network, (64, 64))
    if name in ("once", "norm"):
        check_apart(network, (64, 64))
    else:
        with pytest.raises(
            ValueError,
            match="spatial.norm_scope is step.* mixes the images of a batch.* set spatial.norm_scope to group",
        ):
            check_apart(network, (64, 64))


@pytest.mark.parallel(2)
def test_images_that_other_means_join_are_refused_in_a_batch_of_groups(comm):
    plan = replace(
        config(samples=2, norm_scope="step"),
        model=ModelConfig(f"{made_random.__name__}:joined_network", in_channels=3, out_channels=3),
    )
    with pytest.raises(ValueError, match="spatial.norm_scope is step"):
        verify(plan, comm, Size("32x48"))


@pytest.mark.parallel([1, 2])
@pytest.mark.covering(cases=4)
@pytest.mark.parametrize(
    "kind, frozen, scope",
    [
        ("batch", False, "group"),
        ("batch", False, "step"),
        ("batch", True, "step"),
        ("instance", False, "step"),
        ("group", False, "step"),
    ],
)
def test_norms_of_frames_of_whole_images_are_exact(comm, kind, frozen, scope, monkeypatch):
    """Also by PyTorch's kernels, as on a GPU."""
    for available in (None, lambda x: False):
        if available:
            monkeypatch.setattr(compiled, "available", available)
        plan = replace(
            config(samples=comm.size, norm_scope=scope, images=2),
            model=ModelConfig(
                f"{made_random.__name__}:frames_network",
                {"kind": kind, "frozen": frozen},
                in_channels=3,
                out_channels=3,
            ),
        )
        report = verify(plan, comm, Size("32x48"), steps=2)
        assert comm.bcast(report and report["max_error"]) <= TOLERANCE


def numpy_view(m):
    m.view = m.block[0].weight.detach().numpy()
    return lambda m, x: x * float(abs(m.view).mean())


def numpy_view_in_a_list(m):
    m.views = [{"w": m.block[0].weight.detach().numpy()[::-1, :1]}]
    return lambda m, x: x * float(m.views[0]["w"].max())


def numpy_view_around(m):
    view = m.block[0].bias.detach().numpy()
    return lambda m, x: x + float(view.sum())


def memory_view(m):
    m.view = memoryview(m.block[0].bias.detach().numpy())
    return lambda m, x: x + m.view[0]


def numpy_copy(m):
    m.view = m.block[0].weight.detach().numpy().copy()
    return lambda m, x: x * float(abs(m.view).mean())


class Viewing(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())
        self.rule = made(self)

    def forward(self, x):
        return self.rule(self, self.block(x))


@pytest.mark.parametrize(
    "made",
    [numpy_view, numpy_view_in_a_list, numpy_view_around, memory_view],
    ids=lambda f: f.__name__,
)
def test_weights_that_are_read_as_numpy_arrays_are_refused(made):
    with pytest.raises(Hidden, match="shares the memory of block.0.(weight|bias)"):
        capture(Viewing(made))
    capture(Viewing(numpy_copy))


class Around(nn.Module):
    """A block whose forward pass is a function around another block, or a method."""

    def __init__(self, method: bool = False):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
        block = self.b
        self.rule = self.by_method if method else lambda x: torch.tanh(block(x))

    def by_method(self, x):
        return torch.tanh(self.b(x))

    def forward(self, x):
        return self.rule(self.a(x))


def around_network(method=False, in_channels=3, out_channels=3):
    return Around(method)


def test_functions_around_layers_are_named():
    """A copy of the module would call the layers of the original."""
    with pytest.raises(CanNotCapture, match="rule of the model is a function that holds b"):
        capture(Around())
    capture(Around(method=True))
    plan = replace(config(), model=ModelConfig(f"{__name__}:around_network", in_channels=3))
    with pytest.raises(JointFailure, match="is a function that holds b"):
        verify(plan, Alone(), Size("9x8"))
