"""Tables of all settings, made from the dataclasses of distseg/config/settings.py.

Print them with ``python docs/site/settings.py``; ``make docs`` puts them into docs/settings.md.
"""

import ast
import inspect
import re
import sys
import textwrap
from dataclasses import MISSING, Field, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from distseg.config.patchgd import PatchConfig  # noqa: E402
from distseg.config.settings import Config  # noqa: E402


def tables() -> str:
    """Return a heading and a table (setting, type, default, meaning) for each section."""
    return "\n".join(_section(name, kind) for name, kind in sections().items())


def sections() -> dict[str, type]:
    """Return the dataclass of each section: those of exact training, then those of PatchGD alone."""
    return {
        section.name: section.default_factory
        for config in (PatchConfig, Config)  # the latter's sections have more settings
        for section in fields(config)
    }


def _section(name: str, kind: type) -> str:
    head = " ".join(inspect.getdoc(kind).split("\n\n")[0].split())
    meanings = documents(kind)
    rows = [
        f"| `{name}.{field.name}` | {_type(str(field.type))} | {_default(field)} "
        f"| {_cell(meanings[field.name])} |"
        for field in fields(kind)
    ]
    return "\n".join(
        [
            f"### {name}",
            f"\n{head}\n",
            "| setting | type | default | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def documents(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, as one line.

    Raises:
        KeyError: when a field without such a text is looked up.
    """
    bodies = [
        ast.parse(textwrap.dedent(inspect.getsource(part))).body[0].body
        for part in reversed(kind.__mro__[:-1])
    ]
    return {
        field.target.id: " ".join(inspect.cleandoc(text.value.value).split())
        for body in bodies
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _type(annotation: str) -> str:
    words = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace(", ", " | "), annotation)
    words = words.replace("Size", "size").replace(" | None", "").replace("'", "")
    return _code(words)


def _default(field: Field) -> str:
    value = field.default_factory() if field.default is MISSING else field.default
    if value is None:
        return "none"
    if isinstance(value, bool):
        return _code(str(value).lower())
    if isinstance(value, list):
        return _code(f"[{', '.join(map(str, value))}]")
    return _code(str(value))


def _code(text: str) -> str:
    return f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    print(tables())
