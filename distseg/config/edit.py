"""Change settings in the text of a YAML config, and keep its comments and its order.

A value that is there is replaced in its place. A new field becomes the first one of its section,
and a new section comes last::

    mesh:                               mesh:
      samples: 2  # as many as nodes      samples: 4  # as many as nodes
    loss:                        ->     loss:
      name: dice                          name: dice

                                        pipeline:
                                          recompute: always
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from distseg.config.sizes import Size


def with_settings(text: str, settings: Mapping[str, Any]) -> str:
    """Return the text of a YAML config in which ``settings`` have new values.

    The caller must read the new text and check that it has these settings. A text with YAML anchors
    or braces may have other settings than expected.

    Args:
        text: the text of a valid config; it may be empty.
        settings: the new values by the name of the setting, such as ``{"mesh.stages": 2}``.

    Raises:
        ValueError: the text is no longer YAML after a change, because its form is unusual.
    """
    for name, value in settings.items():
        section, _, field = name.partition(".")
        try:
            text = _with_setting(text, section, field, _as_text(value))
        except yaml.YAMLError as e:
            raise ValueError(f"the text is no YAML before {name} is set: {e}") from None
    return text


def _with_setting(text: str, section: str, field: str, value: str) -> str:
    """Return the text of a config in which one setting has another value, or is added."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    content = _entry(root, section)
    if content is None:
        before = text if not text or text.endswith("\n") else f"{text}\n"
        return f"{before}{before and chr(10)}{section}:\n  {field}: {value}\n"
    known = _entry(content, field)
    if known is not None:
        start = known.start_mark.index
        space = " " * text[:start].endswith(":")
        return text[:start] + space + value + text[_end(known) :]
    start = content.start_mark.index
    if not isinstance(content, yaml.MappingNode):  # the section has no fields
        return f"{text[:start]}\n  {field}: {value}{text[start:]}"
    if content.flow_style:
        comma = ", " if content.value else ""
        return f"{text[: start + 1]}{field}: {value}{comma}{text[start + 1 :]}"
    indent = " " * content.start_mark.column
    return f"{text[:start]}{field}: {value}\n{indent}{text[start:]}"


def _entry(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """Return the value of a key in a YAML mapping; None if the key or the mapping is missing."""
    entries = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for name, value in entries if name.value == key), None)


def _end(node: yaml.Node) -> int:
    """Return the index of the character in the text at which a value ends.

    PyYAML's end mark of a list or a mapping in block style lies behind the comments that follow it,
    so the end of its last entry is taken instead.
    """
    if isinstance(node, yaml.ScalarNode) or node.flow_style:
        return node.end_mark.index
    last = node.value[-1]
    return _end(last[1] if isinstance(last, tuple) else last)


def _as_text(value: Any) -> str:
    """Return a value as YAML text on one line, for a config."""
    if isinstance(value, Size):
        return str(value)
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
