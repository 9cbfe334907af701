"""What a rank holds of parameters, gradients and optimizer state is what the closed form says, exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_cp.engines.fsdp_internals import FsdpGroup, groups_of
from lightning_cp.planner.state import ModelShapes, StateBytes, state_bytes
from lightning_cp.utils.dtensor import local_part
from tests.helpers.planner.peak_bytes import PeakBytes, peak_bytes
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.plain_llama import PlainLlama
from tests.helpers.strategies.small import Small, loader, trainer_of


class Uneven(Small):
    """Three blocks, 47 tokens and a scalar: hardly a size divides by three ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = PlainLlama(48, num_heads=3, num_kv_heads=1, head_dim=10, layers=3)
        self.bias = nn.Parameter(torch.zeros(1, 47))
        self.scale = nn.Parameter(torch.ones(()))

    def logits(self, batch: Any) -> torch.Tensor:
        return super().logits(batch) * self.scale + self.bias.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Even(Uneven):
    """What two ranks can share the layers of; four cannot cut all that is left evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.model = PlainLlama(50, num_heads=4, num_kv_heads=2, head_dim=6, layers=3)
        self.bias = nn.Parameter(torch.zeros(1, 50))


def share(module: Uneven) -> None:
    """Have each parameter be one of two ranks' part, by hand."""
    columns = ("embed.", "head.", ".q.", ".k.", ".v.", ".gate.", ".up.")
    for name, p in module.named_parameters():
        if any(part in name for part in columns):
            p.data = p.data.chunk(2, 0)[0]
        elif ".o." in name or ".down." in name:
            p.data = p.data.chunk(2, 1)[0]


def shapes(tensor_parallel: bool = False) -> ModelShapes:
    """In the order of use."""
    module = Even() if tensor_parallel else Uneven()
    if tensor_parallel:
        share(module)
    model = module.model
    outer = [*model.norm.parameters(), *model.head.parameters(), module.scale, module.bias]
    return ModelShapes(
        before=(tuple(model.embed.weight.shape),),
        blocks=tuple(tuple(tuple(p.shape) for p in block.parameters()) for block in model.blocks),
        after=tuple(tuple(p.shape) for p in outer),
    )


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory behind tensors, of each piece of it once."""
    pieces = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(pieces.values())


def gathered_parameters(group: FsdpGroup) -> Iterator[torch.Tensor]:
    """Whole parameters, as long as this rank holds them."""
    for each in group._group.fsdp_params:
        if hasattr(each, "_unsharded_param"):
            yield local_part(each._unsharded_param)


class Watch:
    """Looks whenever a module is called, and before and after gradients of a unit are reduced."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.groups = module, groups_of(module)
        self.parameters = self.gradients = 0
        for each in module.modules():
            each.register_forward_hook(self.at_output)
        for group in self.groups:
            self._around(group._group)

    def _around(self, group: Any) -> None:
        own = group.post_backward

        def post_backward(*unused: Any) -> None:
            self.look()
            own(*unused)
            self.look()

        group.post_backward = post_backward

    def at_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """Now, and when backward comes here."""
        self.look()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: self.look())

    def look(self, *_: Any) -> None:
        """Keep the largest."""
        kept = [local_part(x) for group in self.groups for _, x in group.unreduced_gradients()]
        reduced = self.reduced()
        own = [local_part(p) for p in self.sharded()]
        gathered = [local_part(x) for group in self.groups for x in gathered_parameters(group)]
        self.parameters = max(self.parameters, held([*own, *gathered]))
        self.gradients = max(self.gradients, held([*kept, *reduced]))

    def sharded(self) -> list[torch.Tensor]:
        """The parameters that optimizers see."""
        if not self.groups:
            return [*self.module.parameters()]
        plain = [p for p in self.module.parameters() if not p.dim()]
        sharded = [p for group in self.groups for p in group.parameters() if p.requires_grad]
        return [*sharded, *plain]

    def reduced(self) -> list[torch.Tensor]:
        """Their gradients."""
        return [local_part(p.grad) for p in self.sharded() if p.grad is not None]


def measured(rank: int, world_size: int, settings: dict[str, Any]) -> tuple[StateBytes, PeakBytes]:
    """In the second step; all that is there after it, and the most that was."""
    kind = Even if settings.get("tensor_parallel_size") else Uneven
    module = kind()
    heads = module.model.blocks[0].num_heads
    trainer = trainer_of(world_size, {**settings, "num_heads": heads})
    found: dict[str, Any] = {}

    class Looking(pl.Callback):
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 1:
                found["watch"] = Watch(pl_module)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if "watch" in found:
                found["gradients"] = held(found["watch"].reduced())

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if "watch" in found:
                found["parameters"] = held(map(local_part, found["watch"].sharded()))
                states = trainer.optimizers[0].state.values()
                found["optimizer"] = held(
                    local_part(x) for state in states for key, x in state.items() if key != "step"
                )

    trainer.callbacks.append(Looking())  # pyright: ignore[reportAttributeAccessIssue]
    trainer.fit(module, loader(4))
    watch = found["watch"]
    state = StateBytes(found["parameters"], found["gradients"], found["optimizer"])
    return state, PeakBytes(watch.parameters, watch.gradients)


def predicted(
    model: ModelShapes, engine: str, *, rank: int, ranks: int
) -> tuple[StateBytes, PeakBytes]:
    """In closed form."""
    state = state_bytes(model, engine, rank=rank, ranks=ranks, itemsize=8, state_itemsize=8)
    return state, peak_bytes(model, engine, ranks=ranks, itemsize=8)


@pytest.mark.quick("zero1")
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero1", "hsdp"])
def test_a_rank_holds_what_the_closed_form_says(engine: str) -> None:
    ranks, cut = (4, 2) if engine == "hsdp" else (3, 3)
    settings: dict[str, Any] = {"data_parallel": engine}
    if engine == "hsdp":
        settings |= {"data_parallel_size": 2, "data_parallel_replicate_size": 2}
    results = run_ranks(ranks, measured, settings)
    for rank, got in enumerate(results):
        want = predicted(shapes(), engine, rank=rank % cut, ranks=cut)
        assert got == want, f"rank {rank}"


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["fsdp", "hsdp"])
def test_of_shared_layers_too(engine: str) -> None:
    """Two ranks share the layers; two or three have parts of what is left."""
    ranks, cut = (8, 2) if engine == "hsdp" else (6, 3)
    settings: dict[str, Any] = {"data_parallel": engine, "tensor_parallel_size": 2}
    if engine == "hsdp":
        settings |= {"data_parallel_size": 2, "data_parallel_replicate_size": 2}
    for rank, got in enumerate(run_ranks(ranks, measured, settings, timeout=200)):
        part = rank // 2 % cut
        want = predicted(shapes(True), engine, rank=part, ranks=cut)
        assert got == want, f"rank {rank}"
