"""Write a checkpoint in another layout: that of the published iBOT code, timm's, or our own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ibot_eval.errors import ConfigError
from ibot_eval.settings import CheckpointSettings

if TYPE_CHECKING:
    from ibot_eval.checkpoint import LoadedCheckpoint

ENDINGS = {"ibot": (".pth", ".pt"), "timm": (".safetensors", ".pth", ".pt"), "ibot-eval": (".safetensors",)}
ROLES = ("student", "teacher")


@dataclass(frozen=True)
class Convert:
    """Write a checkpoint as the published iBOT code saves it, under timm's names, or as pre-training here does."""

    out: Path | None = None
    """File to write: .pth for the iBOT layout; .safetensors or .pth for timm's; .safetensors for our own."""
    layout: Literal["ibot", "timm", "ibot-eval"] = "ibot"
    """ibot: student and teacher (or the one that --key names) with their projection heads; timm: one backbone, for
    load_state_dict of a timm network without classifier; ibot-eval: one network with its head and all that its tensors
    do not tell (with --half, half the size)."""
    half: bool = False
    """Write float16 instead of float32."""
    overwrite: bool = False
    """Replace the file if it exists."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    debug: bool = False
    """Show tracebacks."""

    def run(self) -> int:
        out = self._checked_out()
        import torch

        from ibot_eval.export import Exported, own_metadata, write_network, write_published, write_timm

        networks = self._load()
        dtype = torch.float16 if self.half else None
        try:
            if self.layout == "ibot":
                count = write_published(
                    out,
                    {
                        role: Exported(loaded.backbone, loaded.projection_head, loaded.masked_embed)
                        for role, loaded in networks.items()
                    },
                    dtype,
                )
            elif self.layout == "timm":
                (loaded,) = networks.values()
                count = write_timm(out, loaded.backbone, dtype)
            else:
                (loaded,) = networks.values()
                count = write_network(
                    out,
                    backbone=loaded.backbone,
                    head=loaded.projection_head,
                    masked_embed=loaded.masked_embed,
                    metadata=own_metadata(loaded.report.path),
                    dtype=dtype,
                )
        except OSError as error:
            raise ConfigError(
                f"cannot write {out}: {error.strerror}", todo="name a file in a folder that can be written, with space"
            ) from None
        first = next(iter(networks.values()))
        what = "bare backbone" if self.layout == "timm" else " and ".join(networks)
        print(f"{out}: {first.backbone.architecture}, {what}, {count} tensors in {'float16' if dtype else 'float32'}")
        for line in self._remarks(networks):
            print(line)
        return 0

    def _checked_out(self) -> Path:
        """``--out``; raises ConfigError before anything is read where it cannot be meant."""
        endings = ENDINGS[self.layout]
        if self.out is None or self.out.suffix not in endings:
            raise ConfigError(
                "--out is missing"
                if self.out is None
                else f"{self.out} has the wrong ending for --layout {self.layout}",
                todo=f"name a file that ends in {' or '.join(endings)}: --out network{endings[0]}",
            )
        if self.checkpoint.ckpt is None:
            raise ConfigError("--ckpt is missing", todo="name a checkpoint: ibot-eval convert --ckpt FILE --out …")
        if self.out.is_dir():
            raise ConfigError(f"{self.out} is a folder", todo="name a file")
        if self.out.exists() and not self.overwrite:
            raise ConfigError(f"{self.out} exists already", todo="choose another name, or add --overwrite")
        return self.out

    def _load(self) -> dict[str, LoadedCheckpoint]:
        """The networks to write, by the role they are written under; a network of no known role is a teacher."""
        from ibot_eval.checkpoint import load_checkpoint

        loaded = load_checkpoint(self.checkpoint)
        both = self.layout == "ibot" and self.checkpoint.key is None and set(ROLES) <= {*loaded.report.available_keys}
        if both:
            return {role: load_checkpoint(replace(self.checkpoint, key=role)) for role in ROLES}
        return {"student" if loaded.report.key == "student" else "teacher": loaded}

    def _remarks(self, networks: dict[str, LoadedCheckpoint]) -> list[str]:
        from ibot_eval.export import described

        first = next(iter(networks.values()))
        about, size = described(first.backbone), first.report.image_size
        left_out = {
            "the classifier": first.classifier is not None,
            "the projection head": self.layout == "timm" and first.projection_head is not None,
            "the masked embedding": self.layout == "timm" and first.masked_embed is not None,
            "the other networks of the checkpoint": len(first.report.available_keys) > len(networks),
        }
        untold = [f"{first.backbone.num_heads} heads"] if "heads" in about else []
        untold += [f"LayerNorm eps {about['eps']:g}"] if "eps" in about else []
        untold += [f"images of {size[0]}x{size[1]} px"] if size else []
        untold += [f"{name} {' '.join(f'{value:g}' for value in about[name])}" for name in ("mean", "std")]
        lines = [f"left out: {', '.join(name for name, is_out in left_out.items() if is_out) or 'nothing'}"]
        if self.layout != "ibot-eval":
            lines.append(f"not told by the tensors: {', '.join(untold)}")
            if "heads" in about:
                lines.append(f"reading it back here may need: --heads {about['heads']}")
        heads = [loaded.projection_head for loaded in networks.values() if loaded.projection_head is not None]
        if self.layout == "ibot" and any(head.sharing == "separate" for head in heads):
            lines.append(
                "the published code has no MLP of its own for patches: head.mlp2 is this project's name for it"
            )
        return lines
