"""The documents are true: snippets run, commands and configs are read, links lead somewhere, the tutorial works."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest
from made_store import random_store

import distseg.cli.predict  # noqa: F401  before a test replaces what it imports
import distseg.training.run_config  # noqa: F401
from distseg.cli import main as command_line
from distseg.cli.bench.kinds import MEASURED
from distseg.cli.parsing import Parser
from distseg.config.file import sections
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import Config
from distseg.training.conflicts import RULES

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "jobs/*.md", "distseg/*.md")
    for path in ROOT.glob(pattern)
)
GUIDES = [page for page in PAGES if page.startswith("docs/") or page == "README.md"]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)


def blocks(page: str, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in these languages."""
    return [text for kind, text in FENCE.findall((ROOT / page).read_text()) if kind in languages]


def prose(page: str) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", (ROOT / page).read_text())


# What a test replaces in each tutorial, so that it takes little time.
TUTORIALS = {
    "docs/tutorial.md": {
        "120 if": "4 if",
        "else 12": "else 1",
        "epochs: 4": "epochs: 1",
        "validate_every: 2": "validate_every: 1",
    },
    "docs/georeferenced.md": {"init buildings.h5": "init buildings.h5 --minutes 0.02"},
    "docs/medical.md": {"--minutes 0.5": "--minutes 0.02"},
    "docs/microscopy.md": {"init nuclei.h5": "init nuclei.h5 --minutes 0.02"},
}

# --- links --------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists() or anchor and path.suffix == ".md" and anchor not in anchors(path):
            broken.append(link)
    assert not broken


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_every_page_is_in_the_contents():
    """docs/README.md links to every guide; the site's menu has the same pages."""
    linked = set(re.findall(r"\]\((\w[\w./]*\.md)", (ROOT / "docs/README.md").read_text()))
    menu = set(re.findall(r": (\w[\w./]*\.md)", (ROOT / "docs/site/mkdocs.yml").read_text()))
    guides = {page.removeprefix("docs/") for page in GUIDES} - {"README.md"}
    generated = {"api.md", "README.md", "benchmarks/README.md", "benchmarks/performance.md"}
    assert linked == guides
    assert menu - generated == guides


# --- the site ------------------------------------------------------------------------------------


def test_the_tables_of_settings_are_complete(monkeypatch):
    """Each setting has a row with a meaning; the page of the site has them, made when it is built."""
    monkeypatch.syspath_prepend(ROOT / "docs/site")
    import settings

    rows = re.findall(
        r"^\| `(\w+\.\w+)` \| `[^`]+` \| (?:`[^`]*`|none) \| (.+) \|$", settings.tables(), re.M
    )
    assert all(meaning.endswith(".") for _, meaning in rows)
    assert [name for name, _ in rows] == [
        f"{section}.{field.name}"
        for section, kind in settings.sections().items()
        for field in fields(kind)
    ]
    assert set(settings.sections()) == set(sections(Config)) | set(sections(PatchConfig))
    assert "<!-- settings -->" in (ROOT / "docs/settings.md").read_text()


@pytest.mark.slow
def test_the_site_is_built(tmp_path):
    """Build the site where mkdocs is installed, as `make docs` installs it beside."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    subprocess.run(
        [*command, "-f", ROOT / "docs/site/mkdocs.yml", "-d", tmp_path / "site"], check=True
    )


# --- settings -----------------------------------------------------------------------------------

_FILES = {"safetensors", "pt2", "onnx", "json", "yaml", "py", "md", "h5"}


@pytest.mark.parametrize("page", sorted({*GUIDES} - {"docs/python.md"}))  # it has attributes
def test_settings_that_a_page_names_exist(page):
    known = sections(PatchConfig) | sections(Config)
    unknown = [
        f"{section}.{name}"
        for text in re.findall(r"`([^`\n]+)`", prose(page))
        for section, name in re.findall(r"(?<![\w./:])(?:--)?([a-z]+)\.([a-z_]+)(?![\w(:])", text)
        if section in known and name not in known[section] and name not in _FILES
    ]
    assert not unknown


def test_the_page_of_settings_names_those_of_every_rule():
    text = (ROOT / "docs/settings.md").read_text()
    named = {name for rule in RULES for name in (rule.setting, rule.other)}
    assert not {name for name in named if not re.search(rf"`{re.escape(name)}\b", text)}


@pytest.mark.parametrize(
    "page, text", [(page, text) for page in GUIDES for text in blocks(page, "yaml")]
)
def test_configs_are_read(page, text, folder):
    (folder / "page.yaml").write_text(text)
    if "launcher:" in text:
        from distseg.cli.submit.sites import site_of

        assert site_of("page.yaml")
    else:
        read(["train", "page.yaml"])


# --- commands -----------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """Return the commands of distseg in a shell block, each as a list of words without ``distseg``."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"^\$ ", "", line.strip())
        if re.match(r"(\w+=\S+ )*((mpirun|torchrun) .*?)?(python -m )?distseg \w", line):
            words = shlex.split(line, comments=True)
            found.append(words[words.index("distseg") + 1 :])
    return found


class Read(BaseException):
    """Raised where a command has read all its words and would begin to work."""


def read(words: list[str]) -> None:
    """Let the command line read a command, but do no work.

    A placeholder that stands for a config file is an empty file.
    """
    for word in words[1:]:
        if word.endswith(".yaml") or word == "CONFIG":
            path = Path(word)
            path.parent.mkdir(parents=True, exist_ok=True)
            source = ROOT / word
            if not path.exists():
                path.write_text(source.read_text() if source.exists() else "run: {}\n")
    try:
        command_line.command(words[0])(words[1:])
    except Read:
        return
    except SystemExit as end:  # --help
        assert end.code == 0
        return
    pytest.fail(f"distseg {shlex.join(words)} worked instead of being read")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory, where commands are read and do no work."""

    @contextmanager
    def no_job(settle, *_):
        settle()
        raise Read
        yield

    parse = Parser.parse_args

    def after(parser, *arguments):
        parsed = parse(parser, *arguments)
        if not _JOBS & set(parser.prog.split()):
            raise Read
        return parsed

    monkeypatch.setattr(Parser, "parse_args", after)
    for name in _COMMANDS:
        monkeypatch.setattr(f"distseg.cli.commands.{name}.job", no_job)
    monkeypatch.setattr("distseg.training.checkpoint.files.find", Path)
    monkeypatch.setattr(
        "distseg.training.checkpoint.files.read_manifest",
        lambda path: {"config": {"model": {"name": "unet"}}},
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Commands that run as a job; patchgd runs train's function.
_COMMANDS = {"train", "verify", "profile", "bench", "evaluate", "predict"}
_JOBS = _COMMANDS - {"bench"} | {"patchgd", *MEASURED}


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=f"{page}: {shlex.join(words)}"[:90])
        for page in GUIDES
        for text in blocks(page, "", "bash", "console")
        if "distseg: error" not in text
        for words in commands(text)
        if "..." not in words
    ],
)
def test_commands_are_read(words, folder):
    read(words)


@pytest.mark.parametrize("page", GUIDES)
def test_commands_in_the_text_are_read(page, folder):
    for text in re.findall(r"`([^`\n]+)`", prose(page)):
        for words in commands(text):
            assert words[0] in command_line.COMMANDS, text
            if len(words) > 1 and not {"...", "COMMAND"} & set(words):
                read(words)


# --- snippets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page, text",
    [
        (page, text)
        for page in GUIDES
        if page not in (*TUTORIALS, "docs/own_networks.md")  # which have tests of their own
        for text in blocks(page, "python")
    ],
)
def test_snippets_run(page, text, tmp_path, monkeypatch):
    random_store(tmp_path / "store.h5", train=[(32, 48)], val=[(32, 32)])
    monkeypatch.chdir(tmp_path)
    exec(compile(text, page, "exec"), {"__name__": "snippet"})


# --- the tutorials ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_works(page, mpirun, tmp_path, monkeypatch, capfd):
    """Every file and command of the page, in its order, on little data or for a few steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tutorial"])
    text, replaced = (ROOT / page).read_text(), set()
    for title, kind, body in re.findall(
        r"(?:`([\w.]+)`:\n\n)?^```(\w+)\n(.*?)^```", text, re.M | re.S
    ):
        for old, new in TUTORIALS[page].items():
            if old in body:
                body = body.replace(old, new)
                replaced.add(old)
        if title:
            Path(title).write_text(body)
        elif kind == "python":
            exec(compile(body, "tutorial", "exec"), {})
        elif kind == "bash":
            for line in body.replace("\\\n", " ").splitlines():
                _run(line, mpirun, tmp_path)
    assert replaced == set(TUTORIALS[page])


def _run(line: str, mpirun, folder: Path) -> None:
    """Run a line of a shell block: as a job, or where nothing speaks against it in this process."""
    words = shlex.split(line, comments=True)
    if not words or words[0] == "pip" and "--target" not in words:
        return
    if words[0] == "pip":
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"the data cannot be downloaded: {done.stderr[-200:]}")
    elif words[0] in ("mkdir", "rio"):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run(words, check=True, env={**os.environ, "PATH": path})
    elif words[0] == "distseg" and "--memory" not in words:  # this process has too much already
        with pytest.raises(SystemExit) as end:
            command_line.main(words[1:])
            raise SystemExit(0)
        assert end.value.code in (0, None), line
    elif words[0] == "python":
        exec(compile(Path(words[1]).read_text(), words[1], "exec"), {})
    else:
        ranks = int(words[words.index("-n") + 1]) if "-n" in words else 1
        arguments = words[words.index("distseg") + 1 :]
        done = mpirun(ranks, "-m", "distseg", *arguments, cwd=folder, env={"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, f"{line}\n{done}"
