"""The command line: ``ibot-eval COMMAND``.

Commands and protocols are found through entry points. A command is a dataclass whose fields are flags and whose
``run()`` returns the exit code. tyro is used in this module only; torch is imported by the commands that need it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import sys
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import tyro

from ibot_eval import recipes, registry
from ibot_eval.errors import ConfigError, UserError, suggest
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, OutputSettings, RunSettings

if TYPE_CHECKING:
    from ibot_eval.protocol import EvalProtocol

Positional = tyro.conf.Positional
Repeatable = tyro.conf.UseAppendAction

T = TypeVar("T")


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 2 for a mistake that is explained, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    debug = "--debug" in argv
    try:
        return dispatch(argv)
    except UserError as error:
        if debug:
            traceback.print_exc()
        if os.environ.get("RANK", "0") == "0":
            print(f"ibot-eval: error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # `ibot-eval report runs | head` is no fault; the interpreter must not try to flush the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # Full disks, folders that may not be written: the machine's state, not a fault of ours.
        if debug:
            raise
        where = f": {error.filename}" if error.filename else ""
        print(f"ibot-eval: error: {error.strerror or error}{where} (--debug shows where)", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ibot-eval: interrupted", file=sys.stderr)
        return 130
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 2


def dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if argv[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"ibot-eval {version('ibot-eval')}")
        return 0
    name, rest = argv[0], argv[1:]
    commands, protocols = registry.entries("commands"), registry.entries("protocols")
    if both := commands.keys() & protocols.keys():
        raise ConfigError(f"{', '.join(sorted(both))}: registered both as a command and as a protocol")
    if name in commands:
        command = parse(registry.load("commands", name), expand_recipe(rest, name), name)
        engine = getattr(command, "engine", None)
        return start_processes(engine, argv) if engine and engine.launch else command.run()
    if name in protocols:
        return run_protocol(name, rest)
    raise ConfigError(f"no command {name!r}", todo=f"{suggest(name, [*commands, *protocols])} (see ibot-eval --help)")


def overview() -> str:
    """The text of ``ibot-eval --help``."""
    groups = {"protocols": registry.entries("protocols"), "commands": registry.entries("commands")}
    width = max((len(name) for points in groups.values() for name in points), default=8)
    lines = [
        "ibot-eval: every number of the iBOT paper for any self-supervised ViT checkpoint",
        "",
        "usage: ibot-eval COMMAND [OPTIONS]      ibot-eval COMMAND --help shows its options",
    ]
    for title, points in groups.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<{width}}  {registry.summary(point)}".rstrip() for name, point in points.items()]
    lines += [
        "",
        "first steps:",
        "  ibot-eval knn                                     the embedded demonstration",
        "  ibot-eval inspect --ckpt FILE                     what a checkpoint holds",
        "  ibot-eval knn --ckpt FILE --data FOLDER           k-NN accuracy; FOLDER has train/ and val/",
        "  ibot-eval pretrain --recipe pretrain/digits       train a small network on the embedded digits",
        "  ibot-eval app                                     look at attention, patterns and results in a browser",
    ]
    return "\n".join(lines)


def parse(kind: type[T], argv: list[str], name: str, description: str | None = None) -> T:
    """``argv`` as an instance of the dataclass ``kind``; mistakes print suggestions and exit with code 2."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            return tyro.cli(
                kind,
                args=argv,
                prog=f"ibot-eval {name}",
                description=description or (kind.__doc__ or "").strip(),
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
            )
    finally:
        # Settings without a value say what that means in their help; "(default: None)" or "(default: )" after it would
        # contradict it.
        text = re.sub(r"\(default:([\s│]+)None\)", r"         \1     ", printed.getvalue())
        print(re.sub(r"\(default:([\s│]+)\)", r"         \1 ", text), end="")


def expand_recipe(argv: list[str], command: str | None = None) -> list[str]:
    """Puts the flags of ``--recipe NAME`` before the user's own; refuses a recipe that belongs to another command."""
    for position, token in enumerate(argv):
        if token == "--recipe":
            if position + 1 == len(argv):
                raise ConfigError("--recipe needs a name or path", todo=suggest("", recipes.names()))
            name = argv[position + 1]
        elif token.startswith("--recipe="):
            name = token.partition("=")[2]
        else:
            continue
        owner = name.partition("/")[0]
        if command is not None and name in recipes.names() and owner != command:
            raise ConfigError(
                f"the recipe {name} belongs to `ibot-eval {owner}`", todo=suggest(name, recipes.names(command))
            )
        return [*recipes.flags(recipes.find(name)), *argv]
    return argv


def flag_names(argv: list[str]) -> set[str]:
    """Names of the settings that flags in ``argv`` set, with underscores."""
    names = {token[2:].partition("=")[0].replace("-", "_") for token in argv if token.startswith("--")}
    return names | {name.removeprefix("no_") for name in names}


@dataclasses.dataclass(frozen=True)
class RecipeSettings:
    """Settings from a file."""

    recipe: str | None = None
    """Name of a recipe that ships with ibot-eval (ibot-eval list shows them) or path of a YAML file. Flags win."""


class ProtocolCall(NamedTuple):
    """A protocol's command line, parsed."""

    kind: type[EvalProtocol[Any]]
    config: Any
    settings: RunSettings
    asked: set[str]
    """Names of the settings that flags or the recipe set."""


def parse_protocol(name: str, argv: list[str]) -> ProtocolCall:
    """``argv`` of ``ibot-eval NAME``, its recipe included, as settings."""
    kind = registry.load_protocol(name)
    argv = expand_recipe(argv, name)
    groups = {
        "checkpoint": CheckpointSettings,
        "data": DataSettings,
        "engine": EngineSettings,
        "output": OutputSettings,
    }
    own = name.replace("-", "_")
    command = dataclasses.make_dataclass(
        "Command",
        [
            (group, kind_of_group, dataclasses.field(default_factory=kind_of_group))
            for group, kind_of_group in {own: kind.config_type, **groups, "recipe": RecipeSettings}.items()
        ],
        frozen=True,
    )
    description = (sys.modules[kind.__module__].__doc__ or kind.__doc__ or "").strip()
    parsed: Any = parse(command, argv, name, description=description)
    settings = RunSettings(**{group: getattr(parsed, group) for group in groups})
    return ProtocolCall(kind, getattr(parsed, own), settings, flag_names(argv))


def start_processes(engine: EngineSettings, argv: list[str]) -> int:
    """Runs ``argv`` in as many processes as ``--launch`` says."""
    from ibot_eval.launch import launch, without_launch

    assert engine.launch is not None
    return launch(engine.launch, without_launch(argv))


def run_protocol(name: str, argv: list[str]) -> int:
    """``ibot-eval PROTOCOL …``: parse, run (here or through the launcher), print."""
    kind, config, settings, asked = parse_protocol(name, argv)
    protocol = kind(config)
    if (text := protocol.instead(settings)) is not None:
        if os.environ.get("RANK", "0") == "0":
            print(text)
        return 0
    if settings.engine.launch:
        return start_processes(settings.engine, [name, *argv])

    from ibot_eval import distributed, reporting, runner

    try:
        record = runner.run(name, protocol, runner.with_defaults(settings), asked=asked)
        if distributed.is_main():
            folder = settings.output.output / record.run
            print(record.as_json() if settings.output.json else reporting.run_table(record, folder))
    except runner.Interrupted as error:
        print(f"ibot-eval: {error}", file=sys.stderr)
        return 143
    finally:
        distributed.shutdown()
    return 0
