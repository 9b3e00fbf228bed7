"""Hooks of MkDocs: pages from outside of docs/, generated pages, and links to files of the repository."""

import ast
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import settings  # noqa: E402

OUTSIDE = (
    "benchmarks/*.md",
    "benchmarks/results/*.png",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
)
MARK = "<!-- settings -->"


def on_files(files, config):
    """Add the Python API, and the pages and pictures that lie beside docs/."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            place = "project.md" if name == "README.md" else name
            kind = {"content": path.read_bytes()}
            files.append(File.generated(config, place, **kind))
    files.append(File.generated(config, "api.md", content=_api()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Put the settings in, and turn links that leave docs/ into links of the site or into code."""
    if MARK in markdown:
        markdown = markdown.replace(MARK, settings.tables())
    page_of = page.file.src_uri
    folder = posixpath.dirname("README.md" if page_of == "project.md" else page_of)
    # Pages of docs/ lie one folder deeper in the repository than in the site.
    base = folder if page_of.startswith(("benchmarks/", "CH", "CO", "project")) else "docs"

    def resolve(found):
        text, link, anchor = found["text"], found["link"], found["anchor"] or ""
        path = posixpath.normpath(posixpath.join(base, link))
        place = {"README.md": "project.md"}.get(path, path)
        place = place.removeprefix("docs/") if place.startswith("docs/") else place
        if files.get_file_from_path(place) is not None:
            return f"{text}({posixpath.relpath(place, folder or '.')}{anchor})"
        return f"`{path}`" if "`" not in text else text.strip("[]")

    return re.sub(
        r"(?P<text>!?\[[^\]]*\])\((?!\w+:|#)(?P<link>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)",
        resolve,
        markdown,
    )


def on_page_content(html, **_):
    """Drop the roles of cross-references in docstrings, such as ``:func:``."""
    return re.sub(r":(?:func|class|mod|meth|attr|data):(?=<code>|`)", "", html)


def _api() -> str:
    """Return a page with the documentation of each public name of ``import distseg``."""
    tree = ast.parse((ROOT / "distseg/__init__.py").read_text())
    homes = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "_HOME"
    )
    parts = [f"## distseg.{name}\n\n::: {home}.{name}\n" for name, home in sorted(homes.items())]
    return "\n".join(["# Python API\n\nThe names that `import distseg` offers.\n", *parts])
