"""Read a YAML config file as a list of flags, without trusting the file.

A file may come from an unknown source. So no tag in it may construct a Python object, no alias may
expand to a tree of values, and its size and depth are limited. The result is a list of settings.
Each has a section, a field, a value (number, text or list), and the line in which it stands::

    mesh:             ->  --mesh.tiles=1x2
      tiles: 1x2      ->  "demo.yaml, line 2"
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Container, Iterator
from dataclasses import Field, dataclass, fields

import yaml

from distseg.config.patchgd import PatchConfig
from distseg.config.refusal import SettingError
from distseg.config.settings import Config
from distseg.config.spelling import closest

MOST_BYTES = 2**18  # largest size of a file; a usual config has a few thousand bytes
_DEEPEST = 4  # root, section, list; one more level is parsed, so that an error can name its line
_TAGS = {
    f"tag:yaml.org,2002:{kind}"
    for kind in ("null", "bool", "int", "float", "str", "timestamp", "seq", "map", "merge", "value")
}
_WORD = re.compile(r"[\w.+-]+")  # text that needs no quotes in a list
_NAMES = re.compile(r"[^\W\d][\w .:+-]*(,\s*[^\W\d][\w .:+-]*)*")  # names separated by commas


@dataclass(frozen=True)
class Setting:
    """One setting of a config file.

    Attributes:
        name: ``section.field``.
        value: the value as it is written after a flag.
        place: the file and line, for error messages.
    """

    name: str
    value: str
    place: str

    @property
    def flag(self) -> str:
        """The setting as a flag of the command line, such as ``--mesh.tiles=1x2``."""
        return f"--{self.name}={self.value}"


def sections(kind: type = Config) -> dict[str, tuple[str, ...]]:
    """Return the names of the fields of each section of a config.

    Args:
        kind: the class of the config, :class:`Config` or :class:`PatchConfig`.
    """
    return {
        section.name: tuple(field.name for field in fields(_class_of(section)))
        for section in fields(kind)
    }


def _class_of(section: Field) -> type:
    """Return the class of a section of a config, which makes the section's default."""
    assert isinstance(section.default_factory, type)
    return section.default_factory


def _types_of(kind: type) -> dict[str, str]:
    """Return the type of each field of a section as text, by name, such as ``int | None``."""
    return {field.name: str(field.type) for field in fields(kind)}


def is_mapping(name: str) -> bool:
    """Return True if the setting ``name``, such as ``model.args``, maps names to values."""
    section, _, field = name.partition(".")
    made = {part.name: _class_of(part) for kind in (PatchConfig, Config) for part in fields(kind)}
    return "dict[" in _types_of(made[section])[field]


def listed(name: str, value: str) -> str:
    """Return the value of a flag, with brackets added if it is a list of names without brackets.

    So ``cog,gpkg`` is read as ``["cog", "gpkg"]``, and ``gpkg`` as ``["gpkg"]``. The value of a
    setting that is no list of names is returned unchanged.

    Args:
        name: the flag without dashes, such as ``predict.formats``; it may be no setting.
        value: the value that the user wrote.
    """
    section, _, field = name.partition(".")
    kinds = {
        types[field]
        for kind in (PatchConfig, Config)
        for part in fields(kind)
        if part.name == section and field in (types := _types_of(_class_of(part)))
    }
    of_names = any(kind.startswith(("list[str", "list[Literal")) for kind in kinds)
    if not of_names or value == "null" or not _NAMES.fullmatch(value):
        return value
    return json.dumps([part.strip() for part in value.split(",")], ensure_ascii=False)


def read_settings(path: str, kind: type = Config) -> list[Setting]:
    """Return the settings of a YAML file, in the order of the file.

    Args:
        path: the file.
        kind: the class of the config, :class:`Config` or :class:`PatchConfig`.

    Raises:
        ValueError: the file does not exist, is not UTF-8 text, is not YAML of sections and fields,
            or is larger or deeper than allowed. The message names the file, the line and how to
            fix it.
    """
    root = _root(path)
    if root is None:
        raise SettingError(
            "DS301",
            f"{path} is empty: write sections such as 'model:' with fields, or leave the file out",
        )
    return list(_settings(path, root, kind))


def sections_in(path: str) -> set[str]:
    """Return the names of all sections of a YAML file, unknown ones included.

    Raises:
        ValueError: the file cannot be read, in the cases of :func:`read_settings`.
    """
    root = _root(path)
    return (
        {str(key.value) for key, _ in root.value} if isinstance(root, yaml.MappingNode) else set()
    )


def _root(path: str) -> yaml.Node | None:
    """Read a YAML file and return its root node, or None if the file is empty.

    The file is refused if it is too large, nested too deep, or no YAML.
    """
    text = read_text(path)
    try:
        _check_size(path, text)
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        raise SettingError(
            "DS302",
            f"{path}, line {mark.line + 1 if mark else 1}: this is not YAML "
            f"({' '.join(filter(None, (e.context, e.problem)))}): correct the line, or name a YAML "
            "file",
        ) from None
    except yaml.YAMLError as e:
        raise SettingError(
            "DS303",
            f"{path} is not YAML ({' '.join(str(e).split())}): name a YAML file, or correct it",
        ) from None


def settings_of(tree: dict, place: str, kind: type = Config) -> list[Setting]:
    """Return the settings of a nested dictionary ``{section: {field: value}}``.

    Args:
        tree: sections and fields with plain values.
        place: the origin of the dictionary, for error messages.
        kind: the class of the config, :class:`Config` or :class:`PatchConfig`.

    Raises:
        ValueError: a name is not a setting, or a value is not a number, text or a list of them.
    """
    found = []
    for section, content in _items(place, tree):
        _check_name(place, section, kind)
        for field, value in _items(f"{place}: {section}", content or {}):
            _check_name(place, f"{section}.{field}", kind)
            if not (
                _plain(value)
                or isinstance(value, dict)
                and is_mapping(f"{section}.{field}")
                and all(map(_plain, value.values()))
            ):
                raise SettingError(
                    "DS304",
                    f"{place}: {section}.{field} is {_short(json.dumps(value))}, but a setting "
                    "must be a number, text or a list of them",
                )
            found.append(
                Setting(
                    f"{section}.{field}",
                    value if isinstance(value, str) else json.dumps(value),
                    place,
                )
            )
    return found


def _items(place: str, tree) -> list[tuple]:
    """Return the entries of ``tree``, which must be a dict; refuse anything else."""
    if not isinstance(tree, dict):
        raise SettingError(
            "DS305",
            f"{place} holds {_short(json.dumps(tree))} where names with values are expected: write "
            'them as {"name": value}',
        )
    return list(tree.items())


def _plain(value) -> bool:
    scalar = (str, bool, int, float, type(None))
    return (
        isinstance(value, scalar)
        or isinstance(value, list)
        and all(isinstance(v, scalar) for v in value)
    )


def check_value(name: str, text: str) -> None:
    """Refuse a value that is deeply nested or contains a YAML alias.

    Values such as ``[1, 2]`` are read as YAML. A deeply nested value could overflow the stack. An
    alias (``*a``) repeats another part of the value, so that it could expand to a huge tree.

    Args:
        name: the flag, for the message.
        text: the value that the user wrote after the flag.

    Raises:
        ValueError: the value is refused; the message names ``name``.
    """
    if len(text) <= _SHORT and not ("&" in text and "*" in text):
        return
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
                raise SettingError(
                    "DS306",
                    f"{name} is {_short(text)}, which is nested or refers to itself: give a "
                    "number, text or a list of them",
                )
    except yaml.YAMLError:
        return  # not YAML, so the value is read as text


_SHORT = 200  # text of this many characters cannot be nested so deep that a parser fails


_STREAMING = "streaming.memory (a limit such as 4GB) or streaming.tiles"
_RENAMED = {
    "spatial.in_time": _STREAMING,
    "spatial.streaming": _STREAMING,
    "run.memory": "streaming.memory",
    "spatial.scratch": "streaming.scratch",
    "spatial.halo": "approximate.halo",
    "mesh.compression": "approximate.gradients",
    "train.tensorboard": "train.loggers ([tensorboard], or [] for false)",
}
_RENAMED_VALUES = {
    ("pipeline.placement", "line"): "linear",
    ("pipeline.placement", "v"): "v-shaped",
    ("spatial.norm_scope", "window"): "approximate.norms: window",
}


def renamed_value(setting: str, value: str) -> str:
    """Return the end of an error message with a value's new name; ``""`` if it was not renamed.

    Args:
        setting: the setting, such as ``pipeline.placement``.
        value: the value that the user gave, such as ``line``.
    """
    new = _RENAMED_VALUES.get((setting, value))
    return f": it is called {new} now" if new else ""


def suggestion(name: str, known, kind: type = Config) -> str:
    """Return the end of an error message on an unknown setting; ``""`` if no setting is similar.

    The text gives the new name of a renamed setting, the command that has the setting, or the most
    similar name in ``known``, such as ``: did you mean model.depth?``.

    Args:
        name: the unknown section or setting, as the user wrote it.
        known: the names that are allowed in its place.
        kind: the class of the config, :class:`Config` or :class:`PatchConfig`.
    """
    bare = name.removeprefix("--")
    section = bare.partition(".")[0]
    if bare == "train.method" or kind is Config and section == "patchgd":
        return ": PatchGD has a command and a config of its own, distseg patchgd CONFIG"
    if kind is PatchConfig and bare == "spatial.norm_scope":
        return ": PatchGD has patchgd.norm_scope instead"
    if kind is PatchConfig and (bare in sections() or bare in _known(section, Config)):
        of_this = f"of exact training (distseg train), and PatchGD has no {bare}: leave it out"
        return f": it is a {'setting' if '.' in bare else 'section'} {of_this}"
    new = _RENAMED.get(bare)
    if new:
        return f": it is called {new} now"
    elsewhere = _fields_named(bare, known if name.startswith("--") else None, kind)
    close = [found] if not elsewhere and (found := closest(name, known, _SIMILAR)) else elsewhere
    if not close:
        return ""
    *others, last = close
    return f": did you mean {' or '.join([', '.join(others), last] if others else [last])}?"


def _fields_named(bare: str, flags: Container[str] | None, kind: type) -> list[str]:
    """Return the settings that a user may have meant by an unknown name.

    The result has each setting ``section.field`` whose field is the last part of the unknown name.
    So ``epochs`` and ``model.epochs`` give ``train.epochs``. If no field has this name, and the
    unknown name has no section, the most similar field is taken. The list is empty if no field is
    similar.

    Args:
        bare: the unknown name, without dashes.
        flags: the flags of the command, to which the result is limited; None for a config file.
        kind: the class of the config.
    """
    dashes = "" if flags is None else "--"
    named: dict[str, list[str]] = {}
    for section, own in sections(kind).items():
        for field in own:
            if flags is None or f"--{section}.{field}" in flags:
                named.setdefault(field, []).append(f"{dashes}{section}.{field}")
    section, _, last = bare.replace("-", "_").rpartition(".")
    last = _ELSEWHERE.get(last, last)
    if last not in named and not section and bare not in sections(kind):
        if closest(bare, sections(kind), _SIMILAR) is None:
            last = closest(bare, named, _SIMILAR) or ""
    return named.get(last, [])


# Names that other programs use, and the fields of distseg.
_ELSEWHERE = {"learning_rate": "lr", "batch_size": "images", "patch_size": "crop"}
_SIMILAR = 0.75  # least similarity of a name that is suggested


def read_text(path: str) -> str:
    """Return the text of a config file.

    Raises:
        ValueError: the file does not exist, is not UTF-8 text, or is too large.
    """
    try:
        kind = os.stat(path).st_mode
        if not stat.S_ISREG(kind):
            raise SettingError(
                "DS307",
                f"config file {path!r} is a "
                f"{'folder' if stat.S_ISDIR(kind) else 'pipe or device'}: name a YAML file",
            )
        with open(path, "rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as e:
        raise SettingError(
            "DS308",
            f"config file {path!r} cannot be read ({e.strerror}): name a YAML file, such as "
            "jobs/own.yaml",
        ) from None
    if len(raw) > MOST_BYTES:
        raise SettingError(
            "DS309",
            f"config file {path!r} has more than {MOST_BYTES} bytes, but a config has a few "
            "thousand: name another file",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise SettingError(
            "DS310",
            f"config file {path!r} is not UTF-8 text (byte {e.start} is {raw[e.start]:#04x}): save "
            "it as UTF-8, or name another file",
        ) from None


def _check_size(path: str, text: str) -> None:
    """Refuse YAML text that is nested too deep, or has a tag such as ``!!python/object``.

    ``yaml.compose`` recurses as deep as the text is nested and could overflow the stack. So the
    nesting is checked before, in the stream of parser events.

    Args:
        path: the file, for messages.
        text: the content of the file.

    Raises:
        ValueError: the message names the line.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = f"{path}, line {event.start_mark.line + 1}"
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > _DEEPEST:
            raise SettingError(
                "DS311",
                f"{line}: values are nested deeper than a config's can be: sections have fields, "
                "and fields have numbers, text or lists",
            )
        tag = getattr(event, "tag", None)
        if tag is not None and tag not in _TAGS and tag != "!":
            raise SettingError(
                "DS312",
                f"{line}: the tag {_short(tag)} is refused, because a config has plain values "
                "only: leave it out",
            )


def _settings(path: str, root: yaml.Node, kind: type) -> Iterator[Setting]:
    """Yield the settings of a config file, in the order of the file."""
    for section, content, place in _fields(path, root, "a section"):
        _check_name(place, section, kind)
        if content.tag == "tag:yaml.org,2002:null":
            continue  # a section whose fields are all commented out
        for field, value, place in _fields(path, content, f"a field of {section}"):
            _check_name(place, f"{section}.{field}", kind)
            yield Setting(f"{section}.{field}", _value(value, place, f"{section}.{field}"), place)


def _fields(path: str, node: yaml.Node, what: str) -> Iterator[tuple[str, yaml.Node, str]]:
    """Yield (key, value, place) for each entry of a mapping; refuse a key that occurs twice.

    The place is the file and line of the key, for messages.

    Args:
        path: the file.
        node: the mapping.
        what: what a key names, such as ``a section``, for messages.
    """
    if not isinstance(node, yaml.MappingNode):
        raise SettingError(
            "DS313",
            f"{path}, line {node.start_mark.line + 1}: a {what.partition(' ')[2]} is missing here: "
            f"write NAME: VALUE, indented below its section",
        )
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        place = f"{path}, line {line}"
        if not isinstance(key, yaml.ScalarNode):
            raise SettingError(
                "DS314",
                f"{place}: the name of {what} must be text, but it is a list or has fields: write "
                "NAME: VALUE",
            )
        if key.value in seen:
            raise SettingError(
                "DS315",
                f"{place}: {_short(key.value)} is {what} that line {seen[key.value]} sets already: "
                "leave one of them out",
            )
        seen[key.value] = line
        yield key.value, value, place


def _known(section: str, kind: type) -> tuple[str, ...]:
    return tuple(f"{section}.{field}" for field in sections(kind).get(section, ()))


def _check_name(place: str, name: str, kind: type) -> None:
    """Refuse a name of a section or setting that the config does not have."""
    section, dot, _ = str(name).partition(".")
    known = _known(section, kind) if dot else tuple(sections(kind))
    if name not in known:
        what = "setting" if "." in str(name) else "section"
        others = (
            suggestion(str(name), known, kind)
            or f": choose {', '.join(k.rpartition('.')[2] for k in known)}"
        )
        raise SettingError("DS316", f"{place}: {_short(str(name))} is not a {what}{others}")


def _value(node: yaml.Node, place: str, name: str) -> str:
    """Return the value of a setting in a YAML file as the text that a flag would have.

    Args:
        node: the value in the file.
        place: the file and line, for messages.
        name: the setting, such as ``model.depth``.

    Raises:
        ValueError: the value is not a number, text, a list of them, or (for settings such as
            ``model.args``) a mapping of names to these.
    """
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if isinstance(node, yaml.SequenceNode) and all(
        isinstance(v, yaml.ScalarNode) for v in node.value
    ):
        return (
            "["
            + ", ".join(
                text if _WORD.fullmatch(text) else json.dumps(text)
                for text in map(_scalar, node.value)
            )
            + "]"
        )
    if isinstance(node, yaml.MappingNode) and is_mapping(name):
        written = {
            key: _inner(value, f"{place}: {name}", key)
            for key, value, place in _fields(
                place.rpartition(", line ")[0], node, f"a name of {name}"
            )
        }
        return (
            "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in written.items()) + "}"
        )
    raise SettingError(
        "DS317",
        f"{place}: {name} holds fields or lists of lists, but a setting must be a number, text "
        "or a list of them",
    )


def _inner(node: yaml.Node, place: str, name: str) -> str:
    """Return a value inside a mapping as YAML text, in which strings have quotes.

    Without quotes, a string such as ``1`` or ``true`` would be read as a number or a bool.

    Args:
        node: the value.
        place: the file, the line and the setting, for the message.
        name: the key of the value in the mapping, for the message.

    Raises:
        ValueError: the value is itself a mapping, or a list with a mapping.
    """
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str":
        return json.dumps(node.value)
    if isinstance(node, yaml.SequenceNode):
        return "[" + ", ".join(_inner(value, place, name) for value in node.value) + "]"
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    raise SettingError(
        "DS318",
        f"{place}: {name} holds fields, but each value here must be a number, text or a list of "
        "them",
    )


def _scalar(node: yaml.ScalarNode) -> str:
    return "null" if node.tag == "tag:yaml.org,2002:null" else node.value


def _short(text: str) -> str:
    return repr(text if len(text) < 80 else text[:77] + "...")
