"""Student and teacher: a timm backbone through its adapter, a masked embedding, and a projection head."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ibot_eval.backbone import Backbone
from ibot_eval.errors import ConfigError
from ibot_eval.heads import ProjectionHead
from ibot_eval.heads import Sharing as HeadSharing
from ibot_eval.models import wrap
from ibot_eval.models.transformer import TransformerBackbone
from pretrain.config import NetworkSettings, PretrainSettings

EPS = 1e-6
"""Of every LayerNorm, as in the published networks."""

VITS = {"vit_tiny": (192, 12, 3), "vit_small": (384, 12, 6), "vit_base": (768, 12, 12), "vit_large": (1024, 24, 16)}
"""Width, depth, heads."""

SHARING: dict[str, tuple[HeadSharing, HeadSharing]] = {
    "vanilla": ("separate", "separate"),
    "shared": ("shared", "shared"),
    "semi-shared": ("separate", "shared"),
    "semi-shared-2": ("last-separate", "shared"),
}
"""What the student's and the teacher's head share between [CLS] and patch tokens."""


class Tokens(NamedTuple):
    """Last-block tokens after the last norm."""

    cls: Tensor
    """(n, D); the mean of the patches where there is no [CLS]."""
    patches: Tensor
    """(n, N, D), rows of the grid first; (M, D) where only some were asked for."""


class Trunk(nn.Module):
    """A backbone whose patches may be masked; ``forward`` is what torch.compile sees."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        # BEiT and iBOT start it at zero; for Swin see build.
        self.masked_embed = nn.Parameter(torch.zeros(1, embed_width(backbone)))

    def compile(self, *arguments: Any, **settings: Any) -> None:
        """As every module's, but for each size of images by itself: with sizes left open it takes minutes."""
        super().compile(*arguments, **{"dynamic": False, **settings})

    def forward(self, images: Tensor, masks: Tensor | None = None, positions: Tensor | None = None) -> Tokens:
        """
        Args:
            images: (n, 3, H, W).
            masks: (n, h', w') bool, True where the masked embedding takes the place of a patch; cells may span several
                embedded patches (Swin: 8 x 8).
            positions: (M,) int64 into the n * N patch tokens, the only ones wanted; M may be 0. Default: all.
        """
        patches = self.backbone.embed(images)
        if masks is not None:
            rows, columns = patches.shape[1] // masks.shape[1], patches.shape[2] // masks.shape[2]
            cells = masks.repeat_interleave(rows, 1).repeat_interleave(columns, 2) if rows * columns > 1 else masks
            patches = torch.where(cells.unsqueeze(-1), self.masked_embed.to(patches.dtype), patches)
        if positions is not None and isinstance(self.backbone, TransformerBackbone) and self.backbone.has_cls:
            wanted = self.backbone.final_norm(self.backbone.encode_at(patches, positions))
            return Tokens(wanted[: len(images)], wanted[len(images) :])
        output = self.backbone.encode(patches)
        tokens = self.backbone.final_norm(output.patches.flatten(1, 2))
        cls = self.backbone.final_norm(output.cls) if self.backbone.has_cls else tokens.mean(dim=1)
        if positions is not None:
            tokens = tokens.flatten(0, 1).index_select(0, positions)
        return Tokens(cls, tokens)


class Network(nn.Module):
    """Backbone, masked embedding and head of a student or a teacher."""

    def __init__(self, trunk: Trunk, head: ProjectionHead) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    @property
    def backbone(self) -> Backbone:
        return self.trunk.backbone


class StudentOutputs(NamedTuple):
    """Logits before the temperature."""

    cls: Tensor
    """(crops * B, K): all global crops, then all local ones; crop-major."""
    patches: Tensor | None
    """(M, K) at the positions asked for, those of local crops after those of global ones."""
    tokens: Tensor | None
    """(crops * B, N, D) patch tokens of the global crops, before the head, where they were asked for."""


class Student(Network):
    """One call per step, so that a data-parallel wrapper sees all of its parameters in use."""

    def forward(
        self,
        global_images: Tensor,
        local_images: Tensor | None,
        masks: Tensor | None = None,
        positions: Tensor | None = None,
        local_masks: Tensor | None = None,
        local_positions: Tensor | None = None,
        keep_tokens: bool = False,
    ) -> StudentOutputs:
        """
        Args:
            global_images: (G * B, 3, S, S), crop-major.
            local_images: (L * B, 3, s, s), or None.
            masks: (G * B, h, w) bool.
            positions: (M,) int64 into the G * B * h * w patch tokens: where patch logits are wanted. Padding may repeat
                a position.
            local_masks, local_positions: likewise for the local crops.
            keep_tokens: whether the tokens of all patches are wanted too.
        """
        nothing = torch.empty(0, dtype=torch.int64, device=global_images.device)
        here = nothing if positions is None else positions
        if self.trunk._compiled_call_impl is not None:
            # The number of masked tokens changes from step to step; it alone is left open.
            for given in (positions, local_positions):
                if given is not None:
                    torch._dynamo.maybe_mark_dynamic(given, 0)
        tokens = self.trunk(global_images, masks, None if keep_tokens else here)
        patches = tokens.patches.flatten(0, 1).index_select(0, here) if keep_tokens else tokens.patches
        cls, wanted = [tokens.cls], [patches]
        if local_images is not None:
            local = self.trunk(local_images, local_masks, nothing if local_positions is None else local_positions)
            cls.append(local.cls)
            wanted.append(local.patches)
        asked = positions is not None or local_positions is not None
        logits = head_logits(self.head, torch.cat(cls), torch.cat(wanted) if asked else None)
        return StudentOutputs(*logits, tokens.patches if keep_tokens else None)


def head_logits(head: ProjectionHead, cls: Tensor, patches: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """[CLS] tokens (n, D) and patch tokens (m, D) -> logits (n, K) and (m, K), float32; shared layers run once on both.

    The last layer runs in float32 whatever autocast says: a logit in bfloat16 is off by up to 0.004, which the
    teacher's temperature of 0.04 would make 0.1.
    """
    if patches is None:
        return prototypes(head.last_layer, head.bottleneck_cls(cls)), None
    if head.mlp2 is not None:
        first, second = head.bottleneck_cls(cls), head.bottleneck_patches(patches)
    else:
        joint = head.bottleneck_cls(torch.cat([cls, patches]))
        if head.last_layer2 is None:
            logits = prototypes(head.last_layer, joint)
            return logits[: len(cls)], logits[len(cls) :]
        first, second = joint[: len(cls)], joint[len(cls) :]
    return prototypes(head.last_layer, first), prototypes(head.patch_layer, second)


def prototypes(layer: nn.Module, bottleneck: Tensor) -> Tensor:
    """(…, bottleneck) -> (…, K) in float32."""
    with torch.autocast(bottleneck.device.type, enabled=False):
        return layer(bottleneck.float())


def embed_width(backbone: Backbone) -> int:
    """Width of the embedded patches; that of the first block."""
    return backbone.dims[0]


def mask_cell(backbone: Backbone) -> int:
    """Side in pixels of what one mask bit covers: one token of the last block (32 px for Swin)."""
    return backbone.patch_size


def build_backbone(settings: NetworkSettings, image_size: int, drop_path: float) -> Backbone:
    """A backbone with random weights from torch's generator.

    Raises:
        ConfigError: an image size that patches or windows do not fit.
    """
    patch = settings.patch
    if settings.arch == "swin_tiny":
        cell = patch * 8
        if image_size % cell:
            raise ConfigError(f"--global-size {image_size} is not a multiple of {cell}, the cell of Swin's last stage")
        net: nn.Module = SwinTransformer(
            img_size=image_size,
            patch_size=patch,
            num_classes=0,
            embed_dim=96,
            depths=(2, 2, 6, 2),
            num_heads=(3, 6, 12, 24),
            window_size=settings.window,
            drop_path_rate=drop_path,
            strict_img_size=False,
            norm_layer=partial(nn.LayerNorm, eps=EPS),  # pyright: ignore[reportArgumentType]
        )
        return wrap(net, family="swin")
    if image_size % patch:
        raise ConfigError(f"--global-size {image_size} is not a multiple of the patch size {patch}")
    width, depth, heads = VITS.get(settings.arch) or (settings.width or 0, settings.depth or 0, settings.heads or 0)
    vit = VisionTransformer(
        img_size=image_size,
        patch_size=patch,
        num_classes=0,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        drop_path_rate=drop_path,
        norm_layer=partial(nn.LayerNorm, eps=EPS),  # pyright: ignore[reportArgumentType]
    )
    # timm starts [CLS] at 1e-6; the published networks start it as they start the positions.
    nn.init.trunc_normal_(vit.cls_token, std=0.02)  # pyright: ignore[reportArgumentType]
    nn.init.trunc_normal_(vit.pos_embed, std=settings.position_std)  # pyright: ignore[reportArgumentType]
    if settings.init_gain > 0:
        for weight in (p for p in vit.blocks.parameters() if p.ndim == 2):
            nn.init.trunc_normal_(weight, std=settings.init_gain / weight.shape[1] ** 0.5)
    return wrap(vit, family="ibot")


def build(settings: PretrainSettings, patch_prototypes: int | None = None) -> tuple[Student, Network]:
    """Student and teacher with equal random weights, in float32 on the CPU; they share no storage.

    Args:
        settings: of the run; ``engine.seed`` decides the weights.
        patch_prototypes: K of the patch tokens where a tokenizer decides it.
    """
    head, net = settings.head, settings.network
    of_student, of_teacher = SHARING[head.sharing]
    patch_k = patch_prototypes or head.patch_prototypes
    if patch_k not in (None, head.prototypes) and of_student == "shared":
        of_student = "last-separate"  # a tokenizer's K is another one, and only the student predicts it
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.engine.seed)
        backbone = build_backbone(net, settings.crops.global_size, net.drop_path)
        width = backbone.dims[-1]
        shape: Any = {"hidden": head.hidden, "bottleneck": head.bottleneck}
        train_gain = not head.norm_last_layer
        student_head = ProjectionHead(
            width, head.prototypes, patch_prototypes=patch_k, sharing=of_student, train_gain=train_gain, **shape
        )
        teacher_k = patch_k if of_teacher == "separate" else None
        teacher_head = ProjectionHead(width, head.prototypes, patch_prototypes=teacher_k, sharing=of_teacher, **shape)
        teacher_backbone = build_backbone(net, settings.crops.global_size, drop_path=0.0)
        masked = torch.zeros(1, embed_width(backbone))
        if not backbone.has_cls:
            # A Swin adds no positions: windows of zeros would stay zero through whole stages, and every LayerNorm on
            # the way back multiply their gradient by 1 / sqrt(EPS), up to infinity.
            nn.init.trunc_normal_(masked, std=0.02)
    teacher_backbone.load_state_dict(backbone.state_dict())
    backbone.keep_positions = teacher_backbone.keep_positions = False
    weights = student_head.state_dict()
    if of_student == "last-separate" and of_teacher == "shared" and patch_k in (None, head.prototypes):
        # The published code writes both of the student's last layers into the teacher's one, that of patches last; the
        # moving average then follows the one of [CLS].
        weights |= {f"last_layer.{part}": weights[f"last_layer2.{part}"] for part in ("weight_g", "weight_v")}
    teacher_head.load_state_dict({name: weights[name] for name in teacher_head.state_dict()})
    student = Student(Trunk(backbone), student_head)
    teacher = Network(Trunk(teacher_backbone), teacher_head)
    for network in (student, teacher):
        network.trunk.masked_embed.data.copy_(masked)
    teacher.requires_grad_(False)
    return student, teacher


def freeze_unused(student: Student, settings: PretrainSettings) -> None:
    """Takes the gradient from parameters that no loss reaches, for which a data-parallel wrapper would wait."""
    goal, head = settings.objective, student.head
    if goal.patch_objective != "mim" or max(settings.masks.pred_ratio) <= 0:
        student.trunk.masked_embed.requires_grad_(False)
    if goal.patch_weight == 0:
        for module in (head.mlp2, head.last_layer2):
            if module is not None:
                module.requires_grad_(False)
    if goal.cls_weight == 0 and head.mlp2 is not None:
        head.mlp.requires_grad_(False)
    if goal.cls_weight == 0 and head.last_layer2 is not None:
        head.last_layer.requires_grad_(False)
