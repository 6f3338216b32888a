"""Draw what a backbone sees: attention, patterns, correspondences or principal components."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ibot_eval.cli import Positional
from ibot_eval.errors import ConfigError
from ibot_eval.settings import CheckpointSettings, DataSettings

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from ibot_eval.checkpoint import LoadedCheckpoint
    from ibot_eval.visual.pictures import Picture, Source


class Drawn(NamedTuple):
    """One figure."""

    name: str
    """Of the file, without its ending."""
    figure: Figure
    pictures: tuple[str, ...]
    """Names of the images in it."""


@dataclass(frozen=True)
class Draw:
    """Draw attention, patterns, correspondence or pca for pictures of your own, for --data, or for two photographs that
    come with scikit-learn. The files tell the checkpoint, the settings and this command."""

    what: Positional[Literal["attention", "patterns", "correspondence", "pca"]]
    """Which figure."""
    pictures: Positional[tuple[Path, ...]] = ()
    """Image files, or folders of them. Default: images of --data, or the photographs that come with scikit-learn."""
    out: Path = Path("figures")
    """Folder for the figures; files of the same name are replaced."""
    format: Literal["png", "svg"] = "png"
    """File format."""
    dpi: int = 300
    """Pixels per inch of the file."""
    side: int = 224
    """Shorter side of a picture in pixels, rounded to whole patches."""
    max_tokens: int = 4096
    """Larger grids of patches are reduced to so many."""
    block: int = -1
    """Block to look at; negative ones count from the last."""
    count: int | None = None
    """How many: images of --data (8), spread over its classes; or prototypes (20), where none are named."""
    query: tuple[int, int] | None = None
    """attention, correspondence: row and column of the patch to ask for. Default: [CLS]; the strongest patches."""
    show_heads: tuple[int, ...] | None = None
    """attention: which heads. Default: all."""
    mass: float = 0.6
    """attention: share of the attention inside of the outline, or coloured."""
    style: Literal["heads", "overlay", "activation"] = "heads"
    """attention: a panel a head; all heads in colours over the picture; or, for any network, how strongly it
    responds."""
    smooth: bool = False
    """attention: smooth maps instead of squares."""
    pairs: Literal["given", "views", "class"] | None = None
    """correspondence: given (pictures one after the other), views (two parts of each picture), class (two images of a
    class of --data). Default: given, and views for a single picture or none."""
    similarity: Literal["dot", "cosine"] = "dot"
    """correspondence: how patches are compared. dot (published) favours patches of large norm, so that even a picture
    with itself need not match patch by patch; with cosine it does."""
    mutual: bool = False
    """correspondence: only pairs of which each is the other's best."""
    top: int = 12
    """correspondence: how many matches are drawn, those of the most attended patches."""
    left_box: tuple[float, float, float, float] | None = None
    """correspondence: left, top, right, bottom of the left view, as fractions. Default: 0 0 0.8 0.8 of two views."""
    right_box: tuple[float, float, float, float] | None = None
    """correspondence: the same of the right view. Default: 0.2 0.2 1 1 of two views."""
    flip: bool = False
    """correspondence: mirror the right view."""
    foreground: bool = True
    """pca: leave out the background, by the first component."""
    patterns: Path | None = None
    """patterns: the file that ibot-eval patterns wrote. Default: made of --data now, and not kept."""
    prototypes: tuple[int, ...] | None = None
    """patterns: which ones. Default: the largest, or by --sort."""
    sort: Literal["size", "purity"] = "size"
    """patterns: which prototypes come first."""
    per_prototype: int = 36
    """patterns: how many patches of each."""
    context: int = 5
    """patterns: patches on each side of the square around a patch; odd."""
    min_brightness: float = 40.0
    """patterns: skip patches whose mean V (0 to 255) is not above this."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    cache: Path | None = None
    """Folder where the hashes of checkpoints are remembered. Default: $IBOT_EVAL_CACHE, else ~/.cache/ibot-eval."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    data: DataSettings = field(default_factory=DataSettings)
    debug: bool = False
    """Show tracebacks."""

    def run(self) -> int:
        self._check()
        from dataclasses import replace

        from ibot_eval import distributed
        from ibot_eval.cache import BankCache
        from ibot_eval.files import atomic_write_bytes
        from ibot_eval.provenance import command_line
        from ibot_eval.recording import say
        from ibot_eval.runner import load_any
        from ibot_eval.visual.export import figure_bytes, provenance

        device = distributed.init(self.device)
        checkpoint = replace(self.checkpoint, ckpt=self.checkpoint.ckpt or "demo")
        loaded = load_any(checkpoint, BankCache(self.cache), seed=0)
        loaded.backbone.to(device)
        say(loaded.report.notes)
        command = shlex.join(command_line())
        told: set[str] = set()
        for drawn in self._drawn(loaded, device):
            about = provenance(self.what, loaded, self._settings(), drawn.pictures, command)
            path = self.out / f"{drawn.name}.{self.format}"
            number = 2
            while str(path) in told:
                path = self.out / f"{drawn.name}-{number}.{self.format}"
                number += 1
            told.add(str(path))
            atomic_write_bytes(path, figure_bytes(drawn.figure, about, self.format, self.dpi))
            print(path)
        return 0

    def _check(self) -> None:
        if self.data.data is not None and self.checkpoint.ckpt is None:
            raise ConfigError("--data is given, but no --ckpt", todo="name a checkpoint, or `--ckpt demo`")
        if self.pictures and (self.data.data is not None or self.what == "patterns"):
            raise ConfigError(
                "patterns are drawn from a data set, not from single pictures"
                if self.what == "patterns"
                else "pictures are named, and --data as well",
                todo="give --patterns FILE, or --data" if self.what == "patterns" else "give one of them",
            )
        for name, value, least in (("dpi", self.dpi, 10), ("count", self.count, 1), ("side", self.side, 1)):
            if value is not None and value < least:
                raise ConfigError(f"--{name} {value} is too small", todo=f"give at least {least}")
        if self.dpi > 2400:
            raise ConfigError(f"--dpi {self.dpi} is beyond print", todo="300 is print quality")
        if self.pairs == "class" and self.data.data is None:
            raise ConfigError("--pairs class takes images of a data set", todo="give --data FOLDER")
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"{self.out} is not a folder", todo="name a folder with --out")

    def _settings(self) -> dict[str, Any]:
        """What the file says of how it was drawn: the settings that shape this figure."""
        names = {
            "attention": ("side", "block", "query", "style", "show_heads", "mass", "smooth"),
            "correspondence": (
                *("side", "block", "query", "pairs", "similarity", "mutual", "top", "left_box", "right_box", "flip"),
            ),
            "pca": ("side", "block", "foreground"),
            "patterns": ("patterns", "prototypes", "sort", "per_prototype", "context", "min_brightness"),
        }
        return {name: getattr(self, name) for name in names[self.what]}

    def _drawn(self, loaded: LoadedCheckpoint, device: torch.device) -> Iterator[Drawn]:
        if self.what == "attention":
            return self._attention(loaded)
        if self.what == "correspondence":
            return self._correspondence(loaded)
        return self._pca(loaded) if self.what == "pca" else self._patterns(loaded, device)

    def _attention(self, loaded: LoadedCheckpoint) -> Iterator[Drawn]:
        from ibot_eval.visual.attention import activation_map, attention_maps
        from ibot_eval.visual.attention_figures import activation_figure, attention_figure, overlay_figure

        pictures = self._prepared(loaded)
        backbone, heads = loaded.backbone, self.show_heads
        if self.style == "overlay":
            rows = [(picture, attention_maps(backbone, picture, self.block, self.query)) for picture in pictures]
            yield Drawn("attention-overlay", overlay_figure(rows, heads=heads, mass=self.mass), _names(pictures))
            return
        for picture in pictures:
            if self.style == "activation":
                strength = activation_map(backbone, picture, self.block)
                figure = activation_figure(picture, strength, backbone.resolve_block(self.block))
            else:
                maps = attention_maps(backbone, picture, self.block, self.query)
                figure = attention_figure(picture, maps, heads=heads, mass=self.mass, smooth=self.smooth)
            kind = "activation" if self.style == "activation" else "attention"
            yield Drawn(f"{kind}-{Path(picture.name).stem}", figure, (picture.name,))

    def _correspondence(self, loaded: LoadedCheckpoint) -> Iterator[Drawn]:
        from ibot_eval.visual.correspondence import match, strongest, tokens_of
        from ibot_eval.visual.correspondence_figures import correspondence_figure
        from ibot_eval.visual.views import accuracy_in_words, with_geometry

        drawn = []
        for left, right in self._pairs(loaded):
            found = match(
                tokens_of(loaded.backbone, left, self.block),
                tokens_of(loaded.backbone, right, self.block),
                self.similarity,
                mutual=self.mutual,
            )
            if left.source.sha256 == right.source.sha256:
                found = with_geometry(found, left, right)
                print(f"{left.name}: {accuracy_in_words(found, left, right, mutual=self.mutual)}")
            if self.query is not None:
                left.check_patch(self.query)
                found = found.take((found.left == self.query).all(axis=1))
            else:
                found = strongest(found, self.top)
            drawn.append((left, right, found))
        names = tuple(dict.fromkeys(picture.name for left, right, _ in drawn for picture in (left, right)))
        yield Drawn("correspondence", correspondence_figure(drawn), names)

    def _pairs(self, loaded: LoadedCheckpoint) -> Iterator[tuple[Picture, Picture]]:
        from ibot_eval.visual.pictures import WHOLE, view

        sources = self._sources()
        kind = self.pairs or ("views" if len(sources) == 1 or not self.pictures else "given")
        if kind == "views":
            pairs = [(source, source) for source in sources]
            boxes = self.left_box or (0.0, 0.0, 0.8, 0.8), self.right_box or (0.2, 0.2, 1.0, 1.0)
        else:
            if len(sources) % 2:
                raise ConfigError(
                    f"{len(sources)} pictures do not make pairs", todo="name an even number, or use --pairs views"
                )
            pairs = list(zip(sources[::2], sources[1::2], strict=True))
            boxes = self.left_box or WHOLE, self.right_box or WHOLE
        for left, right in pairs:
            yield (
                view(left, loaded.backbone, boxes[0], side=self.side, max_tokens=self.max_tokens),
                view(right, loaded.backbone, boxes[1], flip=self.flip, side=self.side, max_tokens=self.max_tokens),
            )

    def _pca(self, loaded: LoadedCheckpoint) -> Iterator[Drawn]:
        from ibot_eval.recording import say
        from ibot_eval.visual.components import components, components_figure
        from ibot_eval.visual.correspondence import tokens_of

        pictures = self._prepared(loaded)
        tokens = [tokens_of(loaded.backbone, picture, self.block) for picture in pictures]
        found = components(tokens, foreground=self.foreground)
        say(found.notes)
        yield Drawn("pca", components_figure(pictures, found), _names(pictures))

    def _patterns(self, loaded: LoadedCheckpoint, device: torch.device) -> Iterator[Drawn]:
        from ibot_eval.recording import say
        from ibot_eval.visual.pattern_bank import open_bank
        from ibot_eval.visual.pattern_layouts import LAYOUTS, BankImages, layout_figure
        from ibot_eval.visual.pattern_making import make

        bank = make(loaded, self.data, device) if self.patterns is None else open_bank(self.patterns)
        bank.check(loaded)
        images = BankImages.open(bank, self.data)
        say([*bank.about["notes"], *images.notes])
        ranked = bank.by_purity() if self.sort == "purity" else bank.by_size()
        chosen = list(self.prototypes) if self.prototypes is not None else ranked[: self.count or LAYOUTS].tolist()
        if self.prototypes is None and not chosen:
            raise ConfigError("no prototype has items of 10 images, so none can be called pure", todo="--sort size")
        shown = {"n": self.per_prototype, "context": self.context, "min_brightness": self.min_brightness}
        columns = max(1, round(self.per_prototype**0.5))
        yield Drawn(
            f"patterns-{bank.about['level']}", layout_figure(bank, images, chosen, columns=columns, **shown), ()
        )

    def _prepared(self, loaded: LoadedCheckpoint) -> list[Picture]:
        from ibot_eval.recording import say
        from ibot_eval.visual.pictures import prepare

        pictures = [
            prepare(source, loaded.backbone, self.side, max_tokens=self.max_tokens) for source in self._sources()
        ]
        say(f"{picture.name}: {note}" for picture in pictures for note in picture.notes)
        return pictures

    def _sources(self) -> list[Source]:
        from ibot_eval.visual.pictures import image_files, open_path, sample_sources
        from ibot_eval.visual.spread import spread_sources

        if self.pictures:
            return [open_path(path) for path in image_files(self.pictures, self.count)]
        if self.data.data is None:
            return sample_sources()
        return spread_sources(self.data, self.count or 8, of_class=2 if self.pairs == "class" else 1)


def _names(pictures: list[Picture]) -> tuple[str, ...]:
    return tuple(picture.name for picture in pictures)
