"""Losses against their textbook formulas on whole maps, and against themselves in pieces."""

import math

import pytest
import torch
import torch.nn.functional as F

from distseg.config.settings import LossConfig
from distseg.layers.criterion import extremes, extremes_on_device
from distseg.layers.loss import _TERMS, Loss, parse

IGNORE = 255
NAMES = ["cross_entropy", "binary_cross_entropy", "focal", "dice"]


def of(name: str, **settings) -> LossConfig:
    """``settings`` as far as a term of ``name`` takes them."""
    taken = {field for _, term in parse(name) for field in _TERMS[term].takes}
    return LossConfig(name, **{field: value for field, value in settings.items() if field in taken})


def maps(classes: int, images: int = 2, size=(6, 7), ignored: float = 0.2):
    """Logits (I, C, H, W) float64 and labels (I, H, W)."""
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(images, classes, *size, generator=draw, dtype=torch.float64) * 2
    y = torch.randint(0, max(2, classes), (images, *size), generator=draw)
    y[torch.rand(y.shape, generator=draw) < ignored] = IGNORE
    return z, y


def value(config: LossConfig, z, y):
    loss = Loss(config, z.shape[1])
    return loss.value(loss.rows(z, y))


def valid(z, y):
    """(n, C) and (n,) of the pixels that count."""
    return z.movedim(1, -1)[y != IGNORE], y[y != IGNORE]


def torch_cross_entropy(config, z, y):
    weights = (
        None
        if config.class_weights is None
        else torch.tensor(config.class_weights, dtype=torch.float64)
    )
    return F.cross_entropy(
        z, y, weights, ignore_index=IGNORE, label_smoothing=config.label_smoothing
    )


def torch_binary(config, z, y):
    z, y = valid(z, y)
    return F.binary_cross_entropy_with_logits(
        z, y[:, None].double() if z.shape[1] == 1 else F.one_hot(y, z.shape[1]).double()
    )


def by_pixel_focal(config, z, y):
    """Lin et al. 2017, equation 5, pixel by pixel."""
    z, y = valid(z, y)
    total = 0.0
    for logits, label in zip(z.tolist(), y.tolist()):
        logits = [0.0, *logits] if len(logits) == 1 else logits
        p = math.exp(logits[label]) / sum(map(math.exp, logits))
        weight = config.class_weights[label] if config.class_weights else 1
        total += -weight * (1 - p) ** config.gamma * math.log(p)
    return torch.tensor(total / len(y), dtype=torch.float64)


def textbook_dice(config, z, y):
    def of(z, y):
        z, y = valid(z, y)
        p, t = (
            (z.sigmoid(), y[:, None])
            if z.shape[1] == 1
            else (z.softmax(1), F.one_hot(y, z.shape[1]))
        )
        each = [
            1
            - (2 * (p[:, c] * t[:, c]).sum() + config.smooth)
            / (p[:, c].sum() + t[:, c].sum() + config.smooth)
            for c in range(z.shape[1])
        ]
        return sum(each) / len(each)

    if config.dice_over == "batch":
        return of(z, y)
    return sum(of(z[i : i + 1], y[i : i + 1]) for i in range(len(z))) / len(z)


CASES = [
    ("cross_entropy", 3, {}, torch_cross_entropy),
    ("cross_entropy", 3, dict(class_weights=[0.2, 1.0, 3.0]), torch_cross_entropy),
    ("cross_entropy", 3, dict(label_smoothing=0.1), torch_cross_entropy),
    (
        "cross_entropy",
        3,
        dict(label_smoothing=0.1, class_weights=[0.2, 0.0, 3.0]),
        torch_cross_entropy,
    ),
    ("binary_cross_entropy", 1, {}, torch_binary),
    ("binary_cross_entropy", 3, {}, torch_binary),
    ("focal", 3, {}, by_pixel_focal),
    ("focal", 1, {}, by_pixel_focal),
    ("focal", 3, dict(gamma=0.5, class_weights=[0.2, 1.0, 3.0]), by_pixel_focal),
    ("focal", 1, dict(gamma=1.5, class_weights=[0.2, 1.0]), by_pixel_focal),
    ("dice", 3, {}, textbook_dice),
    ("dice", 1, dict(smooth=0.25), textbook_dice),
    ("dice", 3, dict(dice_over="batch"), textbook_dice),
]


@pytest.mark.parametrize(
    "name, classes, more, formula", CASES, ids=[f"{n}-{c}-{'-'.join(m)}" for n, c, m, _ in CASES]
)
def test_the_textbooks_formula(name, classes, more, formula):
    config, (z, y) = LossConfig(name, **more), maps(classes)
    z.requires_grad_()
    found = value(config, z, y)
    assert found.item() == pytest.approx(formula(config, z, y).item(), rel=1e-12)
    if formula is not by_pixel_focal:
        (gradient,), (wanted,) = (
            torch.autograd.grad(found, z),
            torch.autograd.grad(formula(config, z, y), z),
        )
        torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_images_of_one_pixel_have_the_rows_of_larger_images(smoothing):
    """Labels of whole images are summed in one call, which must know all settings."""
    loss = Loss(LossConfig(label_smoothing=smoothing), 4)
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 4, 1, 1), torch.tensor([0, 3, 255, 1, 2]).view(5, 1, 1)
    twice = loss.rows(logits.expand(5, 4, 1, 2), labels.expand(5, 1, 2))
    assert torch.allclose(2 * loss.rows(logits, labels), twice)


def test_focal_with_gamma_0_is_cross_entropy():
    z, y = maps(3)
    assert value(LossConfig("focal", gamma=0.0), z, y).item() == pytest.approx(
        value(LossConfig("cross_entropy"), z, y).item(), rel=1e-13
    )


def test_a_weighted_sum():
    z, y = maps(3)
    parts = [value(LossConfig(name), z, y) for name in ("cross_entropy", "dice", "focal")]
    found = value(LossConfig("cross_entropy + 0.5*dice + 2 * focal"), z, y)
    assert found.item() == pytest.approx(
        (parts[0] + 0.5 * parts[1] + 2 * parts[2]).item(), rel=1e-13
    )


@pytest.mark.parametrize("name", [*NAMES, "cross_entropy + 0.5*dice"])
def test_sums_of_pieces_add_up(name):
    loss, (z, y) = Loss(of(name, class_weights=[1.0, 2.0, 0.5]), 3), maps(3)
    whole = loss.rows(z, y)
    pieces = sum(loss.rows(z[..., a:b], y[..., a:b]) for a, b in ((0, 1), (1, 5), (5, 7)))
    torch.testing.assert_close(pieces, whole, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", [*NAMES, "cross_entropy + 0.5*dice"])
def test_rows_and_slope_make_the_gradient(name):
    """The step's way (slope of the table, then backward from the rows) gives autograd's gradient of the value."""
    loss, (z, y) = Loss(LossConfig(name), 3), maps(3)
    z.requires_grad_()
    rows = loss.rows(z, y)
    found, loss_grad = loss.loss_grad(rows)
    (gradient,) = torch.autograd.grad(rows, z, loss_grad, retain_graph=True)
    (wanted,) = torch.autograd.grad(loss.value(rows), z)
    assert found == loss.value(rows).item()
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize(
    "name", ["cross_entropy", "binary_cross_entropy", "focal", "cross_entropy + 2*focal"]
)
def test_a_linear_loss_knows_its_slope_from_labels_alone(name):
    loss, (z, y) = Loss(of(name, class_weights=[1.0, 2.0, 0.5]), 3), maps(3)
    assert loss.linear
    logit_parts = slice(0, None, 2)  # sums that depend on the logits, each followed by its count
    torch.testing.assert_close(
        loss.loss_grad(loss.counts(y))[1][:, logit_parts],
        loss.loss_grad(loss.rows(z, y))[1][:, logit_parts],
    )
    assert not Loss(LossConfig(f"{name} + dice"), 3).linear


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("smooth", [1.0, 0.0])
def test_nothing_but_ignored_pixels_is_0_without_gradient(name, classes, smooth):
    if name == "cross_entropy" and classes == 1:
        return
    z, y = maps(classes, ignored=1)
    z.requires_grad_()
    found = value(of(name, smooth=smooth), z, y)
    (gradient,) = torch.autograd.grad(found, z)
    assert found.item() == 0 and not gradient.any()


@pytest.mark.parametrize("name", [n for n in NAMES if n != "cross_entropy"])
def test_ignored_pixels_have_no_gradient_and_no_say(name):
    z, y = maps(1)
    z.requires_grad_()
    found = value(LossConfig(name), z, y)
    (gradient,) = torch.autograd.grad(found, z)
    out = (y == IGNORE).unsqueeze(1)
    assert not gradient[out].any() and gradient[~out].all()
    assert value(LossConfig(name), z.masked_fill(out, 1e4), y).item() == found.item()


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("classes", [1, 2])
def test_focal_of_a_pixel_that_is_certain_has_a_gradient(gamma, classes):
    """p = 1 in float32: (1 - p)^gamma has an infinite slope there for gamma < 1."""
    z = (
        torch.tensor([200.0] if classes == 1 else [-100.0, 100.0])
        .view(1, classes, 1, 1)
        .requires_grad_()
    )
    value(LossConfig("focal", gamma=gamma), z, torch.ones(1, 1, 1, dtype=torch.long)).backward()
    assert z.grad.isfinite().all()


def test_half_precision_logits_are_summed_in_float32():
    z, y = maps(3)
    assert Loss(LossConfig(), 3).rows(z.bfloat16(), y).dtype == torch.float32


@pytest.mark.parametrize(
    "text, terms",
    [
        ("dice", [(1, "dice")]),
        (" cross_entropy+.5*dice ", [(1, "cross_entropy"), (0.5, "dice")]),
        ("2*focal + 1e-1 * dice", [(2, "focal"), (0.1, "dice")]),
    ],
)
def test_parse(text, terms):
    assert parse(text) == terms


@pytest.mark.parametrize(
    "text, message",
    [
        ("dicee", "unknown loss 'dicee' in 'dicee': choose cross_entropy, .*, or a weighted sum"),
        ("half*dice", "'half' in 'half[*]dice' is not a number: write for example"),
        ("dice +", "unknown loss ''"),
        ("", "unknown loss ''"),
        ("0.5 dice", "unknown loss '0.5 dice'"),
        ("nan*dice", "finite|number"),
    ],
)
def test_parse_errors(text, message):
    with pytest.raises(ValueError, match=f"loss.name: .*({message})"):
        parse(text)


@pytest.mark.parametrize(
    "config, classes, message",
    [
        (
            LossConfig("cross_entropy"),
            1,
            "at least 2 classes, but the model has 1 output: use binary_cross_entropy or dice",
        ),
        (
            LossConfig("cross_entropy", class_weights=[1.0, 2.0]),
            3,
            "class_weights has 2 numbers, but the model has 3 classes",
        ),
        (
            LossConfig("focal", class_weights=[1.0]),
            1,
            "class_weights has 1 numbers, but the model has 2 classes",
        ),
        (LossConfig("cross_entropy", label_smoothing=1.5), 3, "loss.label_smoothing .*1.5"),
        (LossConfig("focal", gamma=-1.0), 3, "loss.gamma .*-1"),
        (LossConfig("dice", smooth=-1.0), 3, "loss.smooth .*-1"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(config, classes, message):
    with pytest.raises(ValueError, match=message):
        Loss(config, classes)


@pytest.mark.parametrize("ignored", [None, 255])
@pytest.mark.parametrize(
    "values", [[3, 255, 7], [255, 255], [0, 4], [1.5, math.nan, -2.0], [math.nan]]
)
def test_extremes_on_a_device_are_those_on_the_cpu(values, ignored):
    """They are computed by other functions: NumPy's on a CPU, PyTorch's on a GPU."""
    target = torch.tensor(values)
    assert extremes_on_device(target, ignored) == extremes(target, ignored)
