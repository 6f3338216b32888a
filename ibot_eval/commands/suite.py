"""Run many protocols on one checkpoint, from one extraction of features."""

from __future__ import annotations

import dataclasses
import json as jsonlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ibot_eval import cli, recipes, registry
from ibot_eval.errors import ConfigError, UserError, suggest
from ibot_eval.settings import CheckpointSettings, DataSettings, EngineSettings, OutputSettings, RunSettings

if TYPE_CHECKING:
    from ibot_eval.suite_material import Member


@dataclass(frozen=True)
class Suite:
    """Run many protocols from one pass over the images; the same command again runs only what is missing or failed."""

    protocols: tuple[str, ...] = ("frozen",)
    """frozen (all that need no more than features), all, or names: knn linear, or knn,linear."""
    recipes: tuple[str, ...] = ()
    """Recipes of single protocols (knn/imagenet_vits16), or files as PROTOCOL=FILE, at most one per protocol: the way
    to change a protocol's own settings here. Flags win."""
    overwrite: Literal["never", "failed", "always"] = "failed"
    """Which protocols that have a record already are run again: none, those that did not end well, or all. Their
    earlier runs are kept in the folder replaced/."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    data: DataSettings = field(default_factory=DataSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    output: OutputSettings = field(default_factory=OutputSettings)

    def run(self) -> int:
        from ibot_eval import distributed, reporting, runner, suite

        settings = runner.with_defaults(RunSettings(self.checkpoint, self.data, self.engine, self.output))
        members = self._members(settings)
        try:
            outcome = suite.run_suite(members, settings, self.overwrite)
            if distributed.is_main():
                if self.output.json:
                    print(jsonlib.dumps([r.as_dict() for r in outcome.records], indent=2, ensure_ascii=False))
                else:
                    print(reporting.suite_table(outcome.records, outcome.folder))
                if outcome.failed:
                    print(f"ibot-eval: failed: {', '.join(outcome.failed)}", file=sys.stderr)
        except KeyboardInterrupt:
            print("suite: the same command goes on with what is missing", file=sys.stderr)
            raise
        except runner.Interrupted as error:
            print(f"ibot-eval: {error}; the same command goes on with what is missing", file=sys.stderr)
            return 143
        finally:
            distributed.shutdown()
        return 2 if outcome.failed else 0

    def _members(self, settings: RunSettings) -> list[Member]:
        """The protocols with their settings; what is wrong with these is found out before anything is computed."""
        from ibot_eval.suite_material import Member

        names = list(self._chosen())
        by_owner = self._recipes_by_owner(names)
        given = {group: _given(value) for group, value in vars(settings).items()}
        members = []
        for name in names:
            argv = ["--recipe", by_owner[name]] if name in by_owner else []
            call = cli.parse_protocol(name, argv)
            own = RunSettings(
                **{
                    group: dataclasses.replace(getattr(call.settings, group), **changes)
                    for group, changes in given.items()
                }
            )
            try:
                protocol = call.kind(call.config)
            except UserError as error:
                raise type(error)(f"{name}: {error.what}", where=error.where, todo=error.todo) from None
            flags = tuple(recipes.flags(recipes.find(by_owner[name]))) if name in by_owner else ()
            asked = frozenset(call.asked).union(*given.values())
            members.append(Member(name, protocol, own, asked, flags))
        return members

    def _chosen(self) -> Iterator[str]:
        from ibot_eval.protocol import FrozenProtocol

        points = registry.entries("protocols")
        names = list(dict.fromkeys(name.strip() for name in ",".join(self.protocols).split(",") if name.strip()))
        if names not in (["frozen"], ["all"]):
            if not names:
                raise ConfigError("no protocol is named", where="--protocols", todo=suggest("", points))
            for name in names:
                registry.load_protocol(name)
            yield from names
            return
        for name in points:
            try:
                kind = registry.load_protocol(name)
            except Exception as error:  # noqa: BLE001 - whatever a plug-in's import raises; nobody asked for it by name
                if os.environ.get("RANK", "0") == "0":
                    print(f"suite: {name} is left out: {str(error).partition(chr(10))[0]}", file=sys.stderr)
                continue
            if names == ["all"] or issubclass(kind, FrozenProtocol):
                yield name

    def _recipes_by_owner(self, names: list[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for text in self.recipes:
            named, _, file = text.partition("=")
            owner, recipe = (named, file) if file else (text.partition("/")[0], text)
            if not file and recipe not in recipes.names():
                raise ConfigError(
                    f"no recipe is called {recipe!r}",
                    where="--recipes",
                    todo=f"{suggest(recipe, (r for name in names for r in recipes.names(name)))}; "
                    "a file is given as PROTOCOL=FILE",
                )
            if owner not in names:
                raise ConfigError(
                    f"the recipe {recipe} is for {owner!r}, which is not among the protocols of the suite",
                    where="--recipes",
                    todo=suggest(owner, names),
                )
            if owner in found:
                raise ConfigError(
                    f"two recipes for {owner}: {found[owner]} and {recipe}",
                    where="--recipes",
                    todo="give one, and run the other as a suite of its own",
                )
            found[owner] = recipe
        return found


def _given(settings: Any) -> dict[str, Any]:
    """The settings of one group that the user gave: other values than the defaults, and those typed all the same."""
    typed, default = cli.flag_names(sys.argv[1:]), type(settings)()
    return {
        f.name: getattr(settings, f.name)
        for f in dataclasses.fields(settings)
        if f.name in typed or getattr(settings, f.name) != getattr(default, f.name)
    }
