"""The projection head of DINO and iBOT, for evaluation and for pre-training."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ibot_eval.errors import CheckpointError

Sharing = Literal["shared", "last-separate", "separate"]


class Prototypes(nn.Module):
    """Weight-normalised linear layer without bias: row k has direction ``weight_v[k]`` and length ``weight_g[k]``.

    Args:
        bottleneck: input width.
        num_prototypes: K, output width.
        train_gain: whether the lengths are trained; otherwise they stay at 1 (``norm_last_layer`` of the papers).
    """

    def __init__(self, bottleneck: int, num_prototypes: int, *, train_gain: bool = False) -> None:
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(num_prototypes, 1), requires_grad=train_gain)
        self.weight_v = nn.Parameter(torch.empty(num_prototypes, bottleneck))
        # What nn.Linear starts from, as in the published code.
        nn.init.kaiming_uniform_(self.weight_v, a=5**0.5)

    def weight(self) -> Tensor:
        """(K, bottleneck) effective weight."""
        # torch's own kernel, behind torch.nn.utils.weight_norm: its backward pass takes a sixth of that of the formula.
        return torch._weight_norm(self.weight_v, self.weight_g, 0)  # pyright: ignore[reportPrivateImportUsage]

    def forward(self, x: Tensor) -> Tensor:
        """(…, bottleneck) -> (…, K)."""
        return F.linear(x, self.weight())


class ProjectionHead(nn.Module):
    """Three-layer MLP, l2-normalised bottleneck, weight-normalised last layer (DINO; iBOT section 3).

    The parameters are named as in the published checkpoints: ``mlp.N``, ``last_layer.weight_g``, ``…weight_v``, and for
    patches, where separate, ``mlp2.N`` and ``last_layer2``.

    Args:
        width: D of the tokens.
        num_prototypes: K for [CLS].
        patch_prototypes: K for patch tokens; as for [CLS] by default.
        hidden: width of the first two layers.
        bottleneck: width of the third.
        layers: number of linear layers of the MLP.
        batch_norm: a batch norm after each hidden layer.
        sharing: "shared" uses everything for both kinds of tokens, "last-separate" gives patches a last layer of their
            own, "separate" a whole head of their own.
        train_gain: whether the lengths of the last layer's rows are trained.
    """

    def __init__(
        self,
        width: int,
        num_prototypes: int = 8192,
        *,
        patch_prototypes: int | None = None,
        hidden: int = 2048,
        bottleneck: int = 256,
        layers: int = 3,
        batch_norm: bool = False,
        sharing: Sharing = "shared",
        train_gain: bool = False,
    ) -> None:
        super().__init__()
        patch_prototypes = num_prototypes if patch_prototypes is None else patch_prototypes
        if sharing == "shared" and patch_prototypes != num_prototypes:
            raise ValueError(f"a shared last layer has one K, not {num_prototypes} and {patch_prototypes}")
        self.num_prototypes, self.patch_prototypes = num_prototypes, patch_prototypes
        self.hidden, self.bottleneck, self.sharing = hidden, bottleneck, sharing
        self.mlp = _mlp(width, hidden, bottleneck, layers, batch_norm)
        self.last_layer = Prototypes(bottleneck, num_prototypes, train_gain=train_gain)
        self.mlp2 = _mlp(width, hidden, bottleneck, layers, batch_norm) if sharing == "separate" else None
        self.last_layer2 = None
        if sharing != "shared":
            self.last_layer2 = Prototypes(bottleneck, patch_prototypes, train_gain=train_gain)

    def bottleneck_cls(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, bottleneck), of length 1: what the last layer multiplies."""
        return _project(self.mlp, x)

    def bottleneck_patches(self, x: Tensor) -> Tensor:
        """As :meth:`bottleneck_cls`, for patch tokens."""
        return _project(self.mlp if self.mlp2 is None else self.mlp2, x)

    @property
    def patch_layer(self) -> Prototypes:
        """The last layer that patch tokens go through."""
        return self.last_layer if self.last_layer2 is None else self.last_layer2

    def forward_cls(self, x: Tensor) -> Tensor:
        """[CLS] tokens (B, D) -> logits (B, K), before any temperature or centre."""
        return self.last_layer(self.bottleneck_cls(x))

    def forward_patches(self, x: Tensor) -> Tensor:
        """Patch tokens (…, D) -> logits (…, K)."""
        return self.patch_layer(self.bottleneck_patches(x))

    def forward(self, cls: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Both at once, so that a data-parallel wrapper sees one call."""
        return self.forward_cls(cls), self.forward_patches(patches)

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, Tensor]) -> ProjectionHead:
        """A head with the shape and weights of published tensors.

        Args:
            tensors: names as in the class docstring. ``last_layer`` may also come as torch's newer
                ``parametrizations.weight.original0 / original1`` or as a plain ``weight``; a ``last_layer2`` equal to
                ``last_layer`` is taken for the shared layer that it is.

        Raises:
            CheckpointError: the layers do not form such a head.
        """
        state = {_published_name(name): tensor for name, tensor in tensors.items()}
        for layer in ("last_layer", "last_layer2"):
            if f"{layer}.weight" in state:
                weight = state.pop(f"{layer}.weight")
                state[f"{layer}.weight_v"], state[f"{layer}.weight_g"] = weight, weight.norm(dim=1, keepdim=True)
        if _same(state, "last_layer.", "last_layer2.") and not any(name.startswith("mlp2.") for name in state):
            state = {name: tensor for name, tensor in state.items() if not name.startswith("last_layer2.")}
        linear = sorted(
            (int(match[1]), tensor)
            for name, tensor in state.items()
            if (match := re.fullmatch(r"mlp\.(\d+)\.weight", name)) and tensor.ndim == 2
        )
        if len(linear) < 2 or "last_layer.weight_v" not in state:
            raise CheckpointError(
                "the projection head has no MLP of at least two layers with a weight-normalised last layer",
                where=", ".join(sorted(state)) or "no tensors",
                todo="evaluate without the head, or convert it to the layout of the published iBOT code",
            )
        second = state.get("last_layer2.weight_v")
        separate = any(name.startswith("mlp2.") for name in state)
        sharing: Sharing = "separate" if separate else "shared" if second is None else "last-separate"
        head = cls(
            linear[0][1].shape[1],
            state["last_layer.weight_v"].shape[0],
            patch_prototypes=None if second is None else second.shape[0],
            hidden=linear[0][1].shape[0],
            bottleneck=linear[-1][1].shape[0],
            layers=len(linear),
            batch_norm=any(name.endswith("running_mean") for name in state),
            sharing=sharing,
        )
        try:
            head.load_state_dict({name: tensor.float() for name, tensor in state.items()})
        except RuntimeError as error:
            raise CheckpointError(
                "the projection head's tensors do not fit together", where=str(error).replace("\n\t", " ")
            ) from error
        return head


def _mlp(width: int, hidden: int, bottleneck: int, layers: int, batch_norm: bool) -> nn.Sequential:
    parts: list[nn.Module] = []
    widths = [width, *[hidden] * (layers - 1), bottleneck]
    for before, after in itertools.pairwise(widths):
        linear = nn.Linear(before, after)
        nn.init.trunc_normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)
        norm = [nn.BatchNorm1d(after)] if batch_norm else []
        parts += [linear, *norm, nn.GELU()]
    while not isinstance(parts[-1], nn.Linear):
        parts.pop()
    return nn.Sequential(*parts)


def _project(mlp: nn.Module, x: Tensor) -> Tensor:
    # Batch norm counts every token as one sample, whatever shape the tokens come in.
    return F.normalize(mlp(x.flatten(0, -2)), dim=-1, p=2).unflatten(0, x.shape[:-1])


def _published_name(name: str) -> str:
    name = name.replace("parametrizations.weight.original0", "weight_g")
    return name.replace("parametrizations.weight.original1", "weight_v")


def _same(state: Mapping[str, Tensor], first: str, second: str) -> bool:
    pairs = [(state[name], state.get(first + name[len(second) :])) for name in state if name.startswith(second)]
    return bool(pairs) and all(b is not None and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
