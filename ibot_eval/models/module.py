"""Any nn.Module of the user's own as a Backbone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ibot_eval.backbone import IMAGENET_MEAN, IMAGENET_STD, Backbone, BlockOutput, Norm, Outputs
from ibot_eval.errors import ConfigError


class ModuleBackbone(Backbone):
    """One block, whose output is what ``module(images)`` returns.

    Args:
        module: maps (B, 3, H, W) to features (B, D) or to a map (B, D, h, w), whose mean is then ``cls``.
        dim: D, of a module that returns features. Found by one pass over a blank image when not given.
        image_size: side of that image in pixels.
        mean, std: what the module's inputs are normalised with.
        name: shown and recorded as the architecture; the class name by default.

    Raises:
        ConfigError: the trial pass fails, or the module returns something else.
    """

    family = "module"
    depth = 1
    num_heads = 0
    num_registers = 0
    patch_size = 1
    has_cls = True

    def __init__(
        self,
        module: nn.Module,
        *,
        dim: int | None = None,
        image_size: int = 224,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.architecture = name or type(module).__name__
        self.mean, self.std = mean, std
        blank = None if dim is not None else self._trial(image_size)
        self.has_patches = blank is not None and blank.ndim == 4
        self.dims = (blank.shape[1] if blank is not None else dim or 0,)

    def _trial(self, image_size: int) -> Tensor:
        training = self.module.training
        parameter = next(self.module.parameters(), torch.empty(0))
        blank = torch.zeros(1, 3, image_size, image_size, device=parameter.device, dtype=parameter.dtype)
        try:
            with torch.no_grad():
                return self._checked(self.module.eval()(blank))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self.architecture} fails on a blank image of {image_size} pixels: {error}",
                todo="give the width of its output (dim=…), or the image size it takes (image_size=…)",
            ) from error
        finally:
            self.module.train(training)

    def _checked(self, output: object) -> Tensor:
        if isinstance(output, Tensor) and output.ndim in (2, 4):
            return output
        found = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(
            f"{self.architecture} returned {found}; features (B, D) or a map (B, D, h, w) are needed",
            todo="wrap it in a module whose forward returns one of these",
        )

    def final_norm(self, tokens: Tensor) -> Tensor:
        return tokens

    def outputs(
        self,
        images: Tensor,
        blocks: Sequence[int] = (-1,),
        norm: Norm = "published",
        attention_block: int | None = None,
    ) -> Outputs:
        """As :meth:`Backbone.outputs`; ``patches`` is (B, 0, 0, D) where the module returns features only.

        Raises:
            ConfigError: attention is asked for.
        """
        for block in blocks:
            self.resolve_block(block)
        if attention_block is not None:
            raise ConfigError(
                f"attention maps of {self.architecture} are not known: it was given as a plain module",
                todo="give a timm network, or write a Backbone (ibot_eval.backbone)",
            )
        output = self._checked(self.module(images))
        if output.ndim == 4:
            patches = output.permute(0, 2, 3, 1)
            cls = patches.mean(dim=(1, 2))
        else:
            cls, patches = output, output.new_empty(len(output), 0, 0, output.shape[1])
        result = BlockOutput(cls, cls.new_empty(len(cls), 0, cls.shape[1]), patches)
        return Outputs((result,) * len(blocks), None)
