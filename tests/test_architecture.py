"""No file imports upwards: the list in docs/architecture.md is the order, and the README's map names what there is. No two files import each other."""

import ast
import graphlib
import re
from pathlib import Path

import distseg

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "distseg"


def order() -> list[str]:
    """Return the rooms, lowest first, as the page lists them."""
    block = re.search(
        r"## Rooms of the code.*?```\n(.*?)```",
        (ROOT / "docs" / "architecture.md").read_text(),
        re.S,
    ).group(1)
    return [line.split()[0] for line in block.splitlines()]


def rooms() -> set[str]:
    """Return the folders of the package."""
    return {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def imported(path: Path) -> set[str]:
    """Return the modules of distseg that a file imports, wherever in it, but for type checkers alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("distseg.")}


def test_the_page_lists_every_room_once():
    assert sorted(order()) == sorted(rooms())


def test_no_module_lies_outside_of_a_room():
    assert {path.name for path in PACKAGE.glob("*.py")} <= {"__init__.py", "__main__.py", "api.py"}


def test_no_file_imports_upwards():
    place = {name: n for n, name in enumerate(order())}
    upwards = []
    for room in rooms():
        for path in (PACKAGE / room).rglob("*.py"):
            others = {name.split(".")[1] for name in imported(path)} & set(place)
            upwards += [
                f"{path.relative_to(ROOT)} imports {other}"
                for other in others
                if place[other] > place[room]
            ]
    assert not upwards


def test_no_files_import_each_other_in_a_circle():
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
        if path.stem != "__init__"
    }
    sorter = graphlib.TopologicalSorter(
        {name: imported(path) & set(files) - {name} for name, path in files.items()}
    )
    sorter.prepare()  # raises CycleError, which names the files


def test_the_readme_names_every_room():
    text = re.search(
        r"## Where things are.*?```\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    ).group(1)
    assert rooms() <= set(re.findall(r"\w+", text))


def test_files_that_the_page_names_are_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"\b((?:\w+/)?\w+\.py)\b", text))
    files = [
        path.relative_to(ROOT).as_posix()
        for folder in ("distseg", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert not {
        name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)
    }


def test_below_training_functions_take_the_settings_that_they_need():
    whole = {"Config", "PatchConfig"}
    places = order()
    takes = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for room in places[places.index("config") + 1 : places.index("training")]
        for path in (PACKAGE / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        for argument in node.args.args + node.args.kwonlyargs
        if argument.annotation and whole & set(re.findall(r"\w+", ast.unparse(argument.annotation)))
    ]
    assert not takes


def test_type_checkers_see_all_public_names():
    """They read the imports under TYPE_CHECKING; the program takes the names from the table."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == distseg._HOME
