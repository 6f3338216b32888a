"""List protocols, recipes and plug-ins."""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass

from ibot_eval import recipes, registry


@dataclass(frozen=True)
class List:
    """List the protocols, recipes and backbones that are installed; nothing heavy is imported."""

    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        protocols = {
            name: {
                "summary": registry.summary(point),
                "package": point.dist.name if point.dist else None,
                "recipes": recipes.names(name),
            }
            for name, point in registry.entries("protocols").items()
        }
        commands = {
            name: {"summary": registry.summary(point), "recipes": recipes.names(name)}
            for name, point in registry.entries("commands").items()
            if recipes.names(name)
        }
        backbones = {name: registry.summary(point) for name, point in registry.entries("backbones").items()}
        if self.json:
            print(jsonlib.dumps({"protocols": protocols, "commands": commands, "backbones": backbones}, indent=2))
            return 0
        for name, about in (protocols | commands).items():
            owner = "" if about.get("package") in (None, "ibot-eval") else f"  [from {about['package']}]"
            print(f"{name}: {about['summary']}{owner}")
            for recipe in about["recipes"]:
                print(f"    --recipe {recipe}")
        for name, text in backbones.items():
            print(f"--ckpt {name}:…  {text}")
        return 0
