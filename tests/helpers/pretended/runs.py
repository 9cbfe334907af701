"""Training on pretended devices, by the Trainer and by Fabric, and the same on one CPU.

Float64 and the reference kernel, so that losses are those of one process to the last digits; with ``flash``
bfloat16 and the operators of CUDA, whose calls are those of a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch.accelerators import Accelerator
from torch import nn
from torchmetrics import MeanMetric

from lightning_cp import ContextParallelMixin
from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from lightning_cp.optim import Muon, QKClip
from lightning_cp.utils.dtensor import local_part
from tests.helpers.kernels.emulated import cuda_operators_on_cpu
from tests.helpers.optim.qk_models import llama
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.pretended.device import PretendedDevice, Wait, current
from tests.helpers.strategies import runs
from tests.helpers.strategies.small import VOCAB, Small, alone, trainer_of, whole

STEPS, ROWS, LENGTH = 3, 2, 29
MODES: dict[str, dict[str, Any]] = {
    "ulysses": {"mode": "ulysses"},
    "ring": {"mode": "ring"},
    "hybrid": {"ring_size": 2, "ulysses_size": 2},
    "zigzag_llama3": {"mode": "zigzag_llama3"},
}
ALONE = "alone"
"""The mode of one rank."""
_PLAN = {
    **{f"*blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up", "gate")},
    **{f"*blocks.*.{name}": "rowwise" for name in ("o", "down")},
}
"""Of tensor parallelism, without the vocabulary: C++ knows one class of a tensor's logits only."""


@dataclass(frozen=True)
class Cell:
    """One run; ``engine=None`` is one process on the CPU."""

    engine: str | None = None
    mode: str = "ring"
    sequences: str = "dense"
    driver: str = "trainer"
    tp: int = 1
    optimizer: str = "sgd"
    model: str = "plain"
    """Or ``hf``: transformers' Llama, which gets the labels and computes the loss."""
    rows: bool = False
    """The loss has terms of whole rows beside its mean over labels."""
    declares: str = ""
    """The loss is a mean over tokens that the step draws: it declares a ``mask``, or a ``number``."""
    flash: bool = False
    stages: bool = False
    """Validate while training; predict after it, and train on."""
    resumes: bool = False
    """Save after the first step, and continue in another Trainer."""
    accumulate: int = 1
    value_looks: int = 8
    """Batches whose logged values are compared with the losses."""
    moves: bool = True
    """Fabric's loaders move whole batches to the device, which is its default."""
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def cp(self) -> int:
        return {"hybrid": 4, ALONE: 1}.get(self.mode, 2)

    @property
    def data(self) -> int:
        """Data ranks: the copies of hsdp."""
        return 2 if self.engine == "hsdp" else 1

    @property
    def ranks(self) -> int:
        return self.cp * self.tp * self.data if self.engine else 1

    @property
    def settings(self) -> dict[str, Any]:
        """The strategy's."""
        if self.engine is None:  # the clip needs a strategy
            return {"context_parallel_size": 1, "labels": "aligned"}
        replicas = {"data_parallel_replicate_size": 2} if self.engine == "hsdp" else {}
        return {
            **({"context_parallel_size": 1} if self.mode == ALONE else MODES[self.mode]),
            **replicas,
            "labels": "aligned" if self.model == "plain" else "auto",
            "data_parallel": self.engine,
            "data_parallel_size": self.data,
            "tensor_parallel_size": self.tp,
            "kernel": "auto" if self.flash else "reference",
            "process_group_backend": "gloo",
            "parity_check": "off",
            **({"tensor_parallel_plan": _PLAN} if self.tp > 1 else {}),
            **dict(self.more),
        }

    @property
    def alone(self) -> Cell:
        """The run of one process with the same losses, which accumulates over the samples of data ranks."""
        return replace(
            Cell(),
            sequences=self.sequences,
            driver=self.driver,
            optimizer=self.optimizer,
            model=self.model,
            rows=self.rows,
            declares=self.declares,
            stages=self.stages,
            accumulate=self.accumulate * self.data,
        )

    def __str__(self) -> str:
        return f"{self.engine} {self.mode} {self.sequences} {self.driver}"


@dataclass
class Outcome:
    """A run's numbers in float64, and what its device noted."""

    losses: list[float] = field(default_factory=list)
    validated: float = 0.0
    predictions: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)
    copied: Counter[tuple[str, str]] = field(default_factory=Counter)

    def ours(self, phase: str) -> Counter[tuple[str, str]]:
        """Waits of the package in a phase, by (place, kind)."""
        return Counter((w.place, w.kind) for w in self.waits if w.is_ours and w.phase == phase)


def compare(cell: Cell, timeout: float = 240) -> list[Outcome]:
    """Run a cell, and compare each rank's numbers with those of one process on the CPU."""
    want = run_ranks(1, execute, cell.alone, timeout=timeout)[0]
    outcomes = run_ranks(cell.ranks, execute, cell, timeout=timeout)
    close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
    if cell.model == "hf":
        close = {"rtol": 1e-5, "atol": 1e-6}  # float32
    if cell.flash:
        close = {"rtol": 0.02, "atol": 0.05}  # bfloat16
    for rank, outcome in enumerate(outcomes):
        sample = rank // (cell.cp * cell.tp)
        of_micro_batches = torch.tensor(want.losses[sample :: cell.data])
        torch.testing.assert_close(torch.tensor(outcome.losses), of_micro_batches, **close)
        assert list(outcome.weights) == list(want.weights)
        for name, weight in outcome.weights.items():
            torch.testing.assert_close(weight, want.weights[name], **close)
        if cell.stages:
            torch.testing.assert_close(outcome.validated, want.validated, **close)
            of_sample = want.predictions[sample :: cell.data]
            torch.testing.assert_close(outcome.predictions, of_sample, **close)
    assert max(want.losses) - min(want.losses) > 0.01, "steps with one loss would show nothing"
    return outcomes


def execute(rank: int, world_size: int, cell: Cell) -> Outcome:
    """Train; runs on every rank."""
    torch.set_default_dtype(torch.float64)
    count = STEPS * ROWS * cell.accumulate * cell.data
    packed = cell.sequences == "packed"
    run = runs.Run(steps=1, rows=count, seq_len=LENGTH, packed=packed, model=cell.model)
    batches = list(runs.loader(runs.make_data(run), ROWS))
    if cell.sequences == "padded":
        batches = [padded_batch(batch) for batch in batches]
    if cell.engine is not None:
        batches = batches[rank // (cell.cp * cell.tp) :: cell.data]
    with ExitStack() as stack:
        device = None
        if cell.engine is not None:
            device = stack.enter_context(PretendedDevice(rank).use())
        if cell.flash:
            stack.enter_context(cuda_operators_on_cpu())
        looks = mock.patch("lightning_cp.runtime.records._VALUE_LOOKS", cell.value_looks)
        stack.enter_context(looks)
        train = _by_trainer if cell.driver == "trainer" else _by_fabric
        module, outcome = train(world_size, cell, batches)
        outcome.weights = {
            name: whole(x.detach()).cpu().double() for name, x in module.named_parameters()
        }
        if device is not None:
            outcome.waits, outcome.copied = device.waits, device.copied
    return outcome


def padded_batch(batch: Any) -> Any:
    """The last row ends in padding."""
    mask = torch.ones_like(batch["input_ids"])
    mask[-1, -5:] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return {**batch, "labels": labels, "attention_mask": mask}


class Module(ContextParallelMixin, Small):
    """Two layers; documents by a mask in one process, by the strategy where ranks share a sample."""

    def __init__(self, cell: Cell) -> None:
        pl.LightningModule.__init__(self)
        self.cell = cell
        self.model = llama() if cell.model == "plain" else hf_llama()
        if cell.flash:
            self.bfloat16()
        self.shown: list[torch.Tensor] = []
        self.strategy: Any = None
        """Of Fabric, whose methods replace the mixin's."""

    def logits(self, batch: Any) -> torch.Tensor:
        """[B, L, vocab]."""
        ids = batch["input_ids"]
        positions = batch.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        segments = batch.get("segment_ids")
        mask = None
        if segments is not None and self.cell.engine is None:
            mask = (segments[:, :, None] == segments[:, None, :]).tril()
        return self.model(ids, positions, mask)

    def loss(self, batch: Any) -> torch.Tensor:
        """The mean over targets."""
        if self.cell.declares:
            return self.of_declared(batch)
        if self.cell.model == "plain":
            return super().loss(batch) + (self.of_rows(batch) if self.cell.rows else 0)
        more = {"packed": ["position_ids"], "padded": ["attention_mask"]}
        names = ("input_ids", "labels", *more.get(self.cell.sequences, []))
        return self.model(**{name: batch[name] for name in names}).loss

    def of_declared(self, batch: Any) -> torch.Tensor:
        """The mean over even tokens."""
        ids, logits = batch["input_ids"], self.logits(batch)
        owner = self.strategy or self
        mask = (ids % 2 == 0) & owner.token_mask(ids)
        with _users_waits(self.cell):
            counted = mask if self.cell.declares == "mask" else int(mask.sum())
        count = owner.count_targets(counted)
        losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
        return 0.5 * (losses * mask.flatten()).sum() / count

    def of_rows(self, batch: Any) -> torch.Tensor:
        """A sum, a mean and a pick, of two rows."""
        x = self.logits(batch)
        sums = self.sequence_sum(x.logsumexp(-1), batch["input_ids"] % 2 == 0)
        means, last = self.sequence_mean(x.tanh()), self.sequence_pick(x, -1)
        return F.softplus(sums[0] - sums[1]) + (means * last).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.cp_log("ratio", loss.detach(), 2)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.shown.append(outputs["loss"].detach() * self.cell.accumulate)
        _begin_phase(self.cell, batch_idx + 1)

    def on_train_start(self) -> None:
        _begin_phase(self.cell, self.trainer.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.cell.optimizer == "muon":
            clip = QKClip(tau=20.0, query="q", key="k")
            return Muon(self.named_parameters(), lr=2e-3, ns_dtype="float64", qk_clip=clip)
        if self.cell.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def hf_llama() -> nn.Module:
    """Transformers' Llama, as large as the plain one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Staged(Module):
    """Validates as well, and makes tensors on the module's device."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        assert cell_device(self.cell) == self.device
        self.log("one", 1.0)
        return loss + torch.zeros(1, device=self.device).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, batch_size=1, sync_dist=True)
        self.mean.update(self.average(loss))
        self.log("val_mean", self.mean, batch_size=1)

    def on_validation_start(self) -> None:
        if self.cell.engine is not None:
            current().phase = "validation"


def cell_device(cell: Cell) -> torch.device:
    """The device that a cell trains on."""
    return torch.device("cpu") if cell.engine is None else current().device


@contextmanager
def _users_waits(cell: Cell) -> Iterator[None]:
    """A block whose waits are the user's."""
    phase = "" if cell.engine is None else current().phase
    if cell.engine is not None:
        current().phase = "user"
    yield
    if cell.engine is not None:
        current().phase = phase


def _begin_phase(cell: Cell, batch: int) -> None:
    if cell.engine is not None:
        current().phase = f"batch {batch}"


def _by_trainer(world_size: int, cell: Cell, batches: list[Any]) -> tuple[Any, Outcome]:
    outcome = Outcome()
    first = 1 if cell.resumes else STEPS
    module, trainer = _fit(world_size, cell, batches, first)
    if cell.resumes:
        path = str(Path("saved.ckpt").absolute())
        trainer.save_checkpoint(path)
        before = module.shown
        module, trainer = _fit(world_size, cell, batches, STEPS, path)
        module.shown[:0] = before
    if cell.stages:
        _check_place(cell, module)
        outcome.validated = float(trainer.callback_metrics["val_loss"])
        assert float(trainer.callback_metrics["val_mean"]) == pytest.approx(outcome.validated, 1e-6)
        few = _loader(batches[: 2 * cell.accumulate])
        predicted: Any = trainer.predict(module, few)
        outcome.predictions = [x.cpu().double() for x in predicted]
        trainer.fit_loop.epoch_loop.max_steps *= 2
        trainer.fit(module, _loader(batches), few)
    outcome.losses = [float(x) for x in module.shown]
    return module, outcome


def _check_place(cell: Cell, module: Module) -> None:
    """Check that shards stay on the device between the Trainer's stages."""
    for name, x in module.named_parameters() if cell.engine not in (None, "ddp") else ():
        assert local_part(x).is_cuda, f"{name} has left the device"


def _fit(
    world_size: int, cell: Cell, batches: list[Any], steps: int, path: str | None = None
) -> tuple[Module, pl.Trainer]:
    module = Staged(cell) if cell.stages else Module(cell)
    options: dict[str, Any] = {}
    if cell.engine is not None:
        options["accelerator"] = PretendedAccelerator()
        if cell.engine != "ddp":
            module.model.to(current().device)  # FSDP2 would put memory of one class into another
    trainer = trainer_of(
        world_size,
        cell.settings if cell.engine or cell.optimizer == "muon" else None,
        max_steps=steps,
        precision="bf16-true" if cell.flash else "64-true",
        gradient_clip_val=None if cell.optimizer == "muon" else 1.0,
        accumulate_grad_batches=cell.accumulate,
        limit_val_batches=2 * cell.accumulate if cell.stages else 0,
        **options,
    )
    validated = _loader(batches[: 2 * cell.accumulate]) if cell.stages else None
    trainer.fit(module, _loader(batches), validated, ckpt_path=path)
    if ("parity_check", "first_batch") in cell.more:
        strategy: Any = trainer.strategy
        assert strategy.parity.report is not None, strategy.parity.skip_reason
    return module, trainer


def _loader(batches: list[Any]) -> Any:
    return torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def _by_fabric(world_size: int, cell: Cell, batches: list[Any]) -> tuple[Any, Outcome]:
    if cell.engine is None:
        alone()
        fabric = Fabric(accelerator="cpu", devices=1)
    else:
        fabric = Fabric(
            accelerator=PretendedAccelerator(),  # type: ignore[arg-type]
            devices=world_size,
            strategy=FabricStrategy(**cell.settings),
            plugins=[PoolEnvironment()],
            precision="bf16-true" if cell.flash else None,
        )
    fabric.launch()
    strategy: Any = fabric.strategy
    module = Module(cell)
    module.to(
        fabric.device
    )  # before there is an optimizer: a pretended device makes new parameters
    setup: Any = fabric.setup(module.model, module.configure_optimizers())
    model, optimizer = setup
    module.model = model
    module.strategy = strategy if cell.engine else None
    shown: list[torch.Tensor] = []
    loader: Any = fabric.setup_dataloaders(
        _loader(batches), use_distributed_sampler=False, move_to_device=cell.moves
    )
    for index, batch in enumerate(loader):
        _begin_phase(cell, index)
        last = index % cell.accumulate == cell.accumulate - 1
        part = strategy.shard_batch(batch) if cell.engine else batch
        unsynchronized = fabric.no_backward_sync(model, enabled=not last)
        with unsynchronized if cell.engine else nullcontext():
            loss = module.loss(part)
            fabric.backward(loss / cell.accumulate)
        shown.append((strategy.average(loss) if cell.engine else loss).detach())
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model.module, Outcome([float(x) for x in shown])


class PretendedAccelerator(Accelerator):
    """Devices ``cuda:0``, ``cuda:1``, ..., without a driver."""

    def setup_device(self, device: torch.device) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    def teardown(self) -> None: ...

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cuda", index) for index in range(int(devices))]

    @staticmethod
    def auto_device_count() -> int:
        return 8

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "pretended"
