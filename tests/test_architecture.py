"""No file imports upwards: the list in docs/architecture.md is the order, and the README's map names what there is."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "distseg"


def order() -> list[str]:
    """Folders and lone files, lowest first, as the page lists them."""
    block = re.search(r"## Layers of the code.*?```\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.S).group(1)
    return [name for line in block.splitlines() for name in line.split("  ")[0].split()]


def units() -> set[str]:
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__", "__version__"}
    return files | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def imports(path: Path) -> set[str]:
    """The modules of distseg that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "distseg":
            found |= {f"distseg.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith("distseg.")}


def test_the_page_lists_every_folder_and_file_once():
    assert sorted(order()) == sorted(units())


def test_no_file_imports_upwards():
    place = {name: n for n, name in enumerate(order())}
    upwards = []
    for path in PACKAGE.rglob("*.py"):
        unit = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if unit in place:
            upwards += [f"{path.relative_to(ROOT)} imports {other}" for other in imports(path) if other in place and place[other] > place[unit]]
    assert not upwards


def test_the_readme_names_every_folder():
    text = re.search(r"## Where things are.*?```\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= set(re.findall(r"\w+", text))


def test_files_that_the_page_names_are_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"\b((?:\w+/)?\w+\.py)\b", text))
    there = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")} | {path.name for path in PACKAGE.rglob("*.py")} | {f"tests/{p.name}" for p in (ROOT / "tests").glob("*.py")}
    assert not {name for name in named if name not in there}
