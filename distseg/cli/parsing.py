"""Read the words of a command line: a command's flags, its config file, and a run's settings.

Every setting of a config is a flag. What comes later overrides what came before: the settings of a
run, then the config file, then the flags.
"""

from __future__ import annotations

import re
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import wraps

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from jsonargparse.typing import register_type

from distseg.cli.completion import add_completers, completing
from distseg.cli.flag_checks import check_given
from distseg.comm.launch import JointFailure
from distseg.config.file import (
    Setting,
    check_value,
    listed,
    read_settings,
    renamed_value,
    sections,
    settings_of,
    suggestion,
)
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import AUGMENTATION_LIMITS, Config, ModelConfig
from distseg.config.sizes import Size
from distseg.config.spelling import did_you_mean

register_type(Size, serializer=str, deserializer=Size)

HELP = {"-h", "--help"}


def joint(read: Callable) -> Callable:
    """Decorate a function that reads a command line so that its errors become JointFailures.

    All ranks read the same command line. A JointFailure is reported once, not by every rank.
    """

    @wraps(read)
    def joint(*arguments):
        try:
            return read(*arguments)
        except BrokenPipeError:  # the reader of our output closed it
            raise
        except (ValueError, OSError) as e:
            raise JointFailure(str(e)) from e

    return joint


class Parser(ArgumentParser):
    """Parser of the arguments of one command, such as ``distseg train``.

    Attributes:
        kind: the class of the config whose settings are flags; None if there is no config.
    """

    kind: type | None = None

    def add_settings(self, kind: type) -> None:
        """Add a flag for each setting of a config of this class."""
        self.kind = kind
        self.add_argument(
            "--config",
            action="config",
            help="A YAML file with the sections below. It may also be the first argument, without "
            "--config.",
        )
        for section in fields(kind):
            self.add_class_arguments(section.default_factory, section.name)

    @property
    def settings(self) -> dict[str, tuple[str, ...]]:
        """Names of the fields of each section, by the section's name."""
        return sections(self.kind) if self.kind else {}


def command_parser(command: str, kind: type | None = Config) -> Parser:
    """Return a parser for the flags of a command.

    Args:
        command: the command. If it takes a run, ``RUN`` follows, as in ``predict RUN``.
        kind: the class of the config whose settings are flags; None for no settings.
    """
    parser = Parser(
        prog=f"distseg {command}", exit_on_error=False, default_env=False, allow_abbrev=False
    )
    if kind:
        parser.add_settings(kind)
    return parser


def parse(parser: Parser, arguments: list[str], given: list[Setting] | None = None) -> Namespace:
    """Return the values of a command's flags, by name.

    If the first argument has no dash, it is the config file. ``--memory`` stands for
    ``--streaming.memory``, and ``--mesh auto`` for ``--mesh.layout auto``.

    Args:
        parser: the parser of the command.
        arguments: the arguments as the user wrote them.
        given: settings of lower priority, such as those of a run, which the arguments override.
    """
    if given is None:
        given = []
    arguments = [
        re.sub(r"^--memory(?==|$)", "--streaming.memory", argument) for argument in arguments
    ]
    for place, (flag, value) in enumerate(zip(arguments, [*arguments[1:], ""])):
        if flag == "--mesh=auto" or (flag, value) == ("--mesh", "auto"):
            arguments[place] = flag.replace("--mesh", "--mesh.layout")
    if completing():
        parser.add_argument("file", nargs="?")  # the first argument of the command
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--config", *arguments]
    if HELP & set(arguments):
        _print_head(parser)
        arguments, given = ["--help"], []
    typed = {argument.partition("=")[0] for argument in arguments}
    arguments, read = _without_files(arguments, parser.kind)
    places = {
        setting.name: setting.place
        for setting in [*given, *read]
        if f"--{setting.name}" not in typed
    }
    return parse_plain(parser, [*(setting.flag for setting in given), *arguments], places)


def _print_head(parser: Parser) -> None:
    """Print the first part of a command's help: usage, examples and the most important flags.

    The flags of all settings follow later.
    """
    from distseg.cli.help import head

    _, command, *run = parser.prog.split()
    config = [] if "RUN" in run else ["[CONFIG.yaml]"]
    words = " ".join(["distseg", command, *run, *config, "[--section.field VALUE ...]"])
    known = {f"--{name}" for name in settings_flags(parser)} | {
        "--help",
        "--config",
        "--print_config",
    }
    own = {}
    for action in parser._actions:
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        if flags and flags[0].rstrip("+") not in known:
            own[", ".join(flags)] = action.help or ""
    print(f"usage: {words}\n\n{head(command, own, parser.kind)}")
    parser.usage = SUPPRESS


def settings_flags(parser: Parser) -> list[str]:
    """Return the names of the flags of all settings, without dashes.

    These are the names of sections and fields, such as ``model`` and ``model.name``.
    """
    return [
        name
        for section, names in parser.settings.items()
        for name in (section, *(f"{section}.{field}" for field in names))
    ]


def _without_files(arguments: list[str], kind: type) -> tuple[list[str], list[Setting]]:
    """Replace each config file among the arguments by flags with the file's settings.

    Args:
        arguments: the arguments; ``--config PATH`` names a file.
        kind: the class of the config.

    Returns:
        The new arguments, and the settings of all files.
    """
    found, read, rest = [], [], iter(arguments)
    for argument in rest:
        flag, equals, path = argument.partition("=")
        if flag.startswith("--") and flag[2:] in sections(kind):
            example = f"{flag}.{sections(kind)[flag[2:]][0]}"
            raise ValueError(
                f"{flag} is a section, which takes no value: give its fields, such as {example} "
                "VALUE, or give a config file as the first argument"
                + ("; --mesh auto chooses the mesh" if flag == "--mesh" else "")
            )
        if flag != "--config":
            found.append(argument)
            continue
        settings = read_settings(path if equals else next(rest, ""), kind)
        read += settings
        found += [setting.flag for setting in settings]
    return found, read


def config_from(parsed: Namespace, kind: type = Config) -> Config | PatchConfig:
    """Return the config (of class ``kind``) with the settings that are among the parsed flags."""
    return kind(
        **{
            section.name: section.default_factory(**vars(parsed[section.name]))
            for section in fields(kind)
        }
    )


def own_flags(parsed: Namespace, kind: type = Config) -> dict:
    """Return the values of a command's own flags (those that are no settings), by name.

    Args:
        parsed: the values of all flags.
        kind: the class of the config, which has the settings.
    """
    return {
        name: value
        for name, value in vars(parsed).items()
        if name not in sections(kind) and name != "config"
    }


def parse_run(parser: Parser, arguments: list[str]) -> tuple[Config | PatchConfig, dict]:
    """Return the config of a command whose first argument is a run, and the command's other flags.

    The config has the class of the run's config: Config for exact training, PatchConfig for
    PatchGD. Its values come from the run, and the user's flags override them. Two entries are added
    to the other flags: ``run``, the folder of the checkpoint, and ``left``, a list of texts such as
    ``run.threads 4``, one for each setting of the training that the config does not take over.
    """
    if not arguments or arguments[0].startswith("-"):
        parser.add_settings(Config)
        parse(parser, arguments)  # --help ends here
        raise ValueError(
            f"give the folder of a run or of a checkpoint as the first argument: {parser.prog} ..."
        )
    from distseg.training.checkpoint.files import find, read_manifest
    from distseg.training.run_config import (
        check_head,
        check_model,
        check_named,
        kind_of,
        left_behind,
        taken_over,
    )

    run, *flags = arguments
    checkpoint = find(run)  # searched once, because a training may write a better one meanwhile
    trained = read_manifest(checkpoint).get("config")
    taken = taken_over(trained, run)
    if not any(flag.partition("=")[0] in ("--model.name", "--config") for flag in flags) and all(
        flag.startswith("-") for flag in flags[:1]
    ):
        check_named(trained, ModelConfig.name, run)
    kind = kind_of(trained)
    parser.add_settings(kind)
    parsed = parse(parser, flags, settings_of(taken, f"{run}, config in manifest.json", kind))
    config = config_from(parsed, kind)
    check_given(config.mesh, " ".join(parser.prog.split()[:2]))
    check_model(trained, config.model, run)
    if isinstance(config, PatchConfig):
        check_head(trained, config.patchgd.head, run)
    return config, {
        "run": str(checkpoint),
        "left": left_behind(trained, asdict(kind())),
        **own_flags(parsed, kind),
    }


def print_ignored(left: list[str], comm) -> None:
    """Print on rank 0 which settings of the training this command does not use.

    Args:
        left: the settings, such as ``run.threads 4``; empty to print nothing.
        comm: the communicator of all ranks.
    """
    if left and comm.rank == 0:
        print(
            f"distseg: settings of the machine that trained the run are not used: "
            f"{', '.join(left)}; set them for this machine with flags",
            file=sys.stderr,
            flush=True,
        )


def parse_plain(parser: Parser, arguments: list[str], places: Mapping[str, str] = {}) -> Namespace:
    """Return the values of a command's flags, by name; the arguments name no config file.

    Args:
        parser: the parser of the command.
        arguments: the flags.
        places: the file and line of each setting that comes from a file, by the setting's name.

    Raises:
        ValueError: a flag is unknown or has a wrong value.
    """
    if completing():
        add_completers(parser)
    for before, argument in zip(["", *arguments], arguments):
        flag, equals, value = argument.partition("=")
        check_value(*(flag, value) if equals and flag.startswith("--") else (before, argument))
    try:
        return parser.parse_args(_with_brackets(arguments))
    except (ArgumentError, ValueError, TypeError, KeyError, RecursionError, OSError) as e:
        raise ValueError(_with_flag_hint(e, parser, places)) from e


def _with_brackets(arguments: list[str]) -> list[str]:
    """Return the arguments with brackets around lists of names: ``a,b`` becomes ``[a,b]``."""
    found = []
    for before, argument in zip(["", *arguments], arguments):
        flag, equals, value = argument.partition("=")
        if equals and flag.startswith("--"):
            found.append(f"{flag}={listed(flag[2:], value)}")
        else:
            found.append(listed(before[2:], argument) if before.startswith("--") else argument)
    return found


def _with_flag_hint(error: Exception, parser: Parser, places: Mapping[str, str]) -> str:
    """Return an error's message with the setting's file and line, or with the most similar flag.

    Args:
        error: the error of jsonargparse.
        parser: the parser of the command.
        places: the file and line of each setting that comes from a file.
    """
    text = _in_a_line(error)
    flag = re.match(r"--([\w.]*\w)", text)
    if flag and flag[1] in places:
        return f"{places[flag[1]]}: {text[2:]}"
    unknown = re.search(r"(?i)unrecognized arguments: (--[^\s=]+)", text)
    known = parser._option_string_actions
    near = suggestion(unknown[1], known, parser.kind or Config) if unknown else ""
    if re.search(r"(?i)unrecognized arguments: [^-\s]\S*\.ya?ml\b", text):
        near = "; the config file must be the first argument, or follow --config"
    return f"{text}{near} ({parser.prog} --help lists the flags)"


def _in_a_line(error: Exception) -> str:
    """Return a one-line message for an error of jsonargparse about a wrong value.

    The message names the flag, the kind of value that it takes, and the value that was given.
    """
    text = " ".join(str(error).split())
    key = re.match(r'Parser key "([^"]+)": ', text)
    if key is None:
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", text)
        near = did_you_mean(choice[1], re.findall(r"[^', ]+", choice[2])) if choice else ""
        return _cut(text) + near
    flag, text = f"--{key[1]}", text[key.end() :]
    if own := re.search(r"Not of type \w+: (.*?)(?= - Expected a| Given value type:|$)", text):
        return f"{flag}: {_cut(own[1])}"
    if "integer string conversion" in text:
        return f"{flag} is a whole number of thousands of digits: give a smaller number"
    kinds = re.findall(r"Expected an? (?:typing\.)?(Literal\[[^]]*\]|<class '[^']*'>)", text)
    given = re.search(r"Given value:(.*)$", text) or re.search(r"Got value:(.*)$", text)
    if not kinds:
        return f"{flag}: {_cut(text)}"
    words = dict.fromkeys(
        _KINDS.get(kind) or kind.replace("Literal[", "one of ").rstrip("]") for kind in kinds
    )
    if key[1].removeprefix("data.") in AUGMENTATION_LIMITS:
        words = dict.fromkeys(("a range of two numbers [from, to]", "null"))
    value = given[1].strip() if given else ""
    end = renamed_value(key[1], value) or did_you_mean(
        value, re.findall(r"'([^']*)'", "".join(words))
    )
    return f"{flag} takes {' or '.join(words)}, got {_cut(value)!r}{end}"


_KINDS = {
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a number",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "text",
    "<class 'list'>": "a list such as [a, b]",
    "<class 'dict'>": "a mapping such as {name: value}",
    "<class 'NoneType'>": "null",
}


def _cut(text: str) -> str:
    """Return a text, shortened to its first 380 and last 20 characters if it has more than 400.

    The end is kept because it has the code of the error.
    """
    return text if len(text) <= 400 else f"{text[:380]}...{text[-20:]}"
