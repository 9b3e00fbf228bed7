"""Pack images and masks into a store, as the flags of ``distseg prepare`` say."""

from __future__ import annotations

from distseg.config.sizes import Size
from distseg.data.nodata import parse
from distseg.report.closing import closing_of_preparation


def run_prepare(arguments) -> int:
    """Write a store from folders of images or from an example data set; return the exit status.

    Args:
        arguments: the parsed flags.
    """
    if arguments.size and arguments.source not in ("gigapixel", "ultramnist"):
        raise ValueError(
            f"--size is for the sources gigapixel and ultramnist, not for {arguments.source}: "
            "leave --size out"
        )
    if arguments.source == "ultramnist":
        from distseg.data.examples.ultramnist import prepare_ultramnist

        least, most = _numbers("--digits", arguments.digits, "-", 2)
        counts = _numbers("--images", arguments.images, ",", 3)
        prepare_ultramnist(
            arguments.output,
            arguments.size or Size((512, 512)),
            counts,
            (least, most),
            arguments.seed,
            arguments.overwrite,
            arguments.sum_below,
            arguments.noise,
        )
        return 0
    if arguments.source == "gigapixel":
        from distseg.data.examples.gigapixel import prepare_gigapixel

        prepare_gigapixel(
            arguments.output, arguments.size or Size((16000, 64000)), overwrite=arguments.overwrite
        )
        return 0
    if arguments.source == "blue-marble":
        from distseg.data.examples.blue_marble import prepare_blue_marble

        prepare_blue_marble(arguments.output, overwrite=arguments.overwrite)
        return 0
    nodata = None if arguments.nodata is None else parse(arguments.nodata)
    if arguments.labels is not None:
        from distseg.data.labelled import prepare_labelled

        table, classes = (
            None if arguments.labels == "folders" else arguments.labels,
            arguments.classes and arguments.classes.split(","),
        )
        prepare_labelled(
            arguments.source,
            table,
            arguments.output,
            classes,
            _shares(arguments.split),
            arguments.seed,
            arguments.overwrite,
            nodata,
            arguments.alpha,
            arguments.pages,
            arguments.reference,
            arguments.level,
        )
        print(closing_of_preparation(arguments.output))
        return 0
    from distseg.data.masks import MaskForm, named_colours
    from distseg.data.prepare import prepare_folder

    if arguments.classes is None:
        raise ValueError(
            "prepare needs --classes, the names in the order of their labels, such as "
            "background,road"
        )
    classes, colours = named_colours(arguments.classes.split(","))
    if colours is not None and arguments.instances is not None:
        raise ValueError(
            f"--instances {arguments.instances} is for masks of object ids, but "
            "--classes names colours: leave one of them out"
        )
    values, names = _values(arguments["values"], arguments.attribute)  # .values is a method
    prepare_folder(
        arguments.source,
        arguments.masks,
        arguments.output,
        classes=classes,
        form=MaskForm(colours, arguments.instances, arguments.attribute, names),
        dry=arguments.dry_run,
        nested=arguments.recursive,
        ignore=arguments.ignore,
        values=values,
        splits=_shares(arguments.split),
        seed=arguments.seed,
        overwrite=arguments.overwrite,
        nodata=nodata,
        absent=arguments.absent.split(",") if arguments.absent else (),
        alpha=arguments.alpha,
        pages=arguments.pages,
        reference=arguments.reference,
        level=arguments.level,
        parts=arguments.parts and Size(arguments.parts),
    )
    if not arguments.dry_run:
        print(closing_of_preparation(arguments.output))
    return 0


def _values(
    text: str | None, attribute: str | None
) -> tuple[dict[int, int], tuple[tuple[str, int], ...]]:
    """Return the labels that ``--values`` gives to mask values, and to values of an attribute.

    Args:
        text: the text of the flag; None without it.
        attribute: the attribute of polygons that holds their class. With it, the flag may give
            labels to texts: ``forest=2,water=0``.

    Returns:
        A dict from mask values to labels, and pairs (value of the attribute, label).

    Raises:
        ValueError: the text is not of this form, or a value has two labels.
    """
    pairs = [tuple(pair.split("=")) for pair in text.split(",")] if text is not None else []
    try:
        labels = [(value, int(label)) for value, label in pairs]
        if attribute is None:
            labels = [(int(value), label) for value, label in labels]
    except ValueError:
        raise ValueError(
            f"--values must be written as 255=1,128=2 (mask value=label), got {text!r}"
            + ("; names of classes in the place of mask values need --attribute")
            * (attribute is None)
        ) from None
    values: dict[int | str, int] = {}
    for value, label in labels:
        if value in values:
            raise ValueError(
                f"--values {text} gives the mask value {value} two labels, {values[value]} and "
                f"{label}: leave one of them out"
            )
        values[value] = label
    if attribute is not None:
        return {}, tuple(values.items())
    return values, ()


def _numbers(flag: str, text: str, between: str, count: int) -> list[int]:
    """Return the ``count`` whole numbers of a text, separated by ``between``.

    If ``count`` is 2 and the text has one number, this number is returned twice.

    Args:
        flag: the flag that has this text, for the message.
        text: the text.
        between: the character between two numbers.
        count: how many numbers the text must have.

    Raises:
        ValueError: the text is not of this form.
    """
    parts = text.split(between)
    parts = parts * 2 if count == 2 and len(parts) == 1 else parts
    if len(parts) != count or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(
            f"{flag} must be written as {'3-5' if count == 2 else '2000,250,500'}, got {text!r}"
        )
    return list(map(int, parts))


def _shares(text: str) -> tuple[float, ...]:
    """Return the fractions of train, val and test in the text of ``--split``: ``0.8,0.1,0.1``.

    Raises:
        ValueError: the text is not of this form, or the fractions do not add up to 1.
    """
    try:
        shares = tuple(float(v) for v in text.split(","))
    except ValueError:
        shares = ()
    if len(shares) != 3 or not all(share >= 0 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(
            "--split must be three shares that add up to 1, for train, val and test, such as "
            f"0.8,0.1,0.1, got {text!r}"
        )
    return shares
