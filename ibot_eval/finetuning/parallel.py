"""The network as processes train it together: alone, a copy for each (DDP), or shared out among them (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ibot_eval import distributed
from ibot_eval.finetuning.adaptation import blocks_of
from ibot_eval.finetuning.network import Classifier

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)


class Parallel:
    """A network and what processes exchange of it. Every method is a collective.

    Build the optimiser afterwards: sharing out replaces the parameters.

    Args:
        network: the same on every rank; on ``device``, or on the CPU where it is to be shared out.
        device: of this process.
        sharded: whether weights, gradients and the optimiser's state are shared out, and gathered block by block. In
            one process nothing is.
    """

    def __init__(self, network: Classifier, device: torch.device, *, sharded: bool) -> None:
        self.network: nn.Module = network
        world = distributed.world_size()
        self.sharded = sharded and world > 1
        if self.sharded:
            mesh = init_device_mesh(device.type, (world,))
            for block in blocks_of(cast(Any, network.backbone)):
                fully_shard(block, mesh=mesh)
            fully_shard(network, mesh=mesh)
        elif world > 1:
            self.network = DistributedDataParallel(network, gradient_as_bucket_view=True)
        self._plain = network

    def __call__(self, images: Tensor) -> Tensor:
        return self.network(images)

    def exchange(self, wanted: bool) -> None:
        """Whether the next backward pass averages the gradients over the ranks, or only adds them up here."""
        if isinstance(self.network, DistributedDataParallel):
            self.network.require_backward_grad_sync = wanted
        elif isinstance(self.network, FSDPModule):
            self.network.set_requires_gradient_sync(wanted)

    def clip_(self, limit: float) -> Tensor:
        """Scales all gradients together to at most the norm ``limit``; 0 leaves them. Returns the norm before, ()."""
        parameters = [p for p in self._plain.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if limit > 0:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @contextmanager
    def whole(self) -> Iterator[None]:
        """While the block runs, every rank has all weights, and may run the network as often as it likes."""
        shared = [module for module in self._plain.modules() if isinstance(module, FSDPModule)]
        for module in shared:
            module.set_reshard_after_forward(False)
            module.unshard()
        try:
            yield
        finally:
            for module in shared:
                module.reshard()
                module.set_reshard_after_forward(module is not self._plain)

    def weights(self) -> dict[str, Tensor]:
        """All of them by name; those that are shared out on the CPU of rank 0, and {} on the others."""
        return cast(
            Any, get_model_state_dict(self._plain, options=_WHOLE) if self.sharded else self._plain.state_dict()
        )

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Takes what :meth:`weights` gave to rank 0."""
        if self.sharded:
            # A backbone's last norm has two names, and torch hands out tensors under one; hence not strict.
            plain = self._plain
            once = {name for name, _ in [*plain.named_parameters(), *plain.named_buffers()]}
            own: dict[str, Any] = {name: tensor for name, tensor in weights.items() if name in once}
            set_model_state_dict(plain, own, options=_FROM_RANK_0)
        else:
            self._plain.load_state_dict(weights)

    def optimiser_state(self, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
        """What :meth:`load_optimiser` takes, on rank 0."""
        if self.sharded:
            return get_optimizer_state_dict(self._plain, optimiser, options=_WHOLE)
        return optimiser.state_dict()

    def load_optimiser(self, optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Takes what :meth:`optimiser_state` gave."""
        if self.sharded:
            set_optimizer_state_dict(self._plain, optimiser, state, options=_FROM_RANK_0)
        else:
            optimiser.load_state_dict(state)
