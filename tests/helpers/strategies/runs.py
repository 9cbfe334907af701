"""Training runs that are compared: the same data and model under any strategy, in the standing ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_cp import UlyssesRingStrategy
from lightning_cp.layout.auto import layout_name
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.plain_llama import PlainLlama
from tests.helpers.strategies.small import whole

VOCAB = 48


@dataclass(frozen=True)
class Run:
    """One training run. ``strategy`` is "plain" (one process), "ddp", or the strategy's arguments."""

    strategy: Any = "plain"
    model: str = "plain"
    dtype: str = "float64"
    heads: tuple[int, int] = (8, 2)
    seq_len: int = 61
    rows: int = 2
    steps: int = 20
    accumulate: int = 1
    clip: float | None = None
    sampler: bool = False
    predict: bool = True
    packed: bool = False
    """Several documents a row: position_ids that restart, and segment_ids for the plain model."""
    precision: str | None = None
    longest: int = 15
    """Tokens of a packed document, at most."""


@dataclass
class Result:
    """What is compared."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    val_loss: float = 0.0
    predictions: list[torch.Tensor] = field(default_factory=list)
    empty_ranks: int = 0
    layouts: list[str] = field(default_factory=list)
    """Of every micro-batch."""


def execute(rank: int, world_size: int, run: Run) -> Result:
    """Train, validate and predict; runs on every rank."""
    if run.strategy == "plain":
        dist.destroy_process_group()  # a process that has never heard of others
    torch.set_default_dtype(getattr(torch, run.dtype))
    module = make_module(run)
    recorder = Recorder()
    trainer = make_trainer(run, world_size, [recorder])
    data = make_data(run)
    trainer.fit(module, loader(data, run.rows), loader(data[: 2 * run.rows], run.rows))
    result = recorder.result
    result.val_loss = float(trainer.callback_metrics["val_loss"])
    if run.predict:
        outputs: Any = trainer.predict(module, loader(data[: 2 * run.rows], run.rows))
        result.predictions = [x.double() for x in outputs]
    weights = {name: whole(x.detach()).double() for name, x in module.named_parameters()}
    result.weights = weights
    return result


def make_trainer(run: Run, world_size: int, callbacks: list[Any]) -> pl.Trainer:
    """A Trainer on the process group that exists already."""
    if run.strategy == "plain":
        strategy: Any = "auto"
    elif run.strategy == "ddp":
        strategy = DDPStrategy(process_group_backend="gloo")
    else:
        labels = {} if run.model == "hf" else {"labels": "aligned"}
        # One process does not see documents by itself, unless transformers tells its masks.
        check = "off" if run.packed and run.model != "hf" else "first_batch"
        settings: Any = {"parity_check": check, **labels, **dict(run.strategy)}
        strategy = UlyssesRingStrategy(**settings)
    return pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        plugins=[] if run.strategy == "plain" else [PoolEnvironment()],
        max_epochs=1,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=run.clip,
        precision=run.precision,  # type: ignore[arg-type]
        callbacks=callbacks,
        use_distributed_sampler=run.sampler,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def make_module(run: Run) -> pl.LightningModule:
    """The same weights on every rank and in every run."""
    torch.manual_seed(1234)
    return HFModule(run) if run.model == "hf" else PlainModule(run)


def make_data(run: Run) -> list[dict[str, torch.Tensor]]:
    """Samples whose targets are spread unevenly; some leave whole ranks without a target."""
    generator = torch.Generator().manual_seed(7)
    samples: list[dict[str, torch.Tensor]] = []
    for index in range(run.steps * run.accumulate * run.rows * (2 if run.sampler else 1)):
        ids = torch.randint(0, VOCAB, (run.seq_len,), generator=generator)
        labels = torch.randint(0, VOCAB, (run.seq_len,), generator=generator)
        if run.model == "hf":
            labels = ids.clone()
        kind = (index // run.rows) % 4
        if kind == 1:
            labels[torch.rand(run.seq_len, generator=generator) < 0.6] = -100
        elif kind == 2:  # targets in the first quarter only
            labels[run.seq_len // 4 :] = -100
        elif kind == 3:  # two targets, next to each other
            labels[: run.seq_len // 2] = -100
            labels[run.seq_len // 2 + 2 :] = -100
        sample = {"input_ids": ids, "labels": labels}
        if run.packed:
            sample["position_ids"] = _restarting(run.seq_len, generator, run.longest)
            starts = sample["position_ids"] == 0
            labels[starts] = -100  # nothing before it may predict it
            sample["segment_ids"] = starts.cumsum(0)
        samples.append(sample)
    return samples


def _restarting(length: int, generator: torch.Generator, longest: int) -> torch.Tensor:
    """Positions of a row of documents of up to ``longest`` tokens."""
    lengths: list[int] = []
    while sum(lengths) < length:
        lengths.append(int(torch.randint(1, longest + 1, (), generator=generator)))
    return torch.cat([torch.arange(n) for n in lengths])[:length]


def loader(data: list[dict[str, torch.Tensor]], rows: int) -> DataLoader[Any]:
    """Whole sequences, in order."""
    return DataLoader(data, batch_size=rows)  # type: ignore[arg-type]


class PlainModule(pl.LightningModule):
    """An ordinary module: aligned labels, torch's cross-entropy."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.model = PlainLlama(VOCAB, *run.heads)

    def logits(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """[B, L, vocab]."""
        ids = batch["input_ids"]
        positions = batch.get("position_ids", torch.arange(ids.shape[1])[None])
        return self.model(ids, positions, self.mask(batch))

    def mask(self, batch: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """[B, L, L]: who sees whom; where the strategy reads the documents, nothing but causality."""
        segments = batch.get("segment_ids")
        if segments is None or isinstance(self.trainer.strategy, UlyssesRingStrategy):
            return None
        return (segments[:, :, None] == segments[:, None, :]).tril()

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The mean over targets."""
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=1, sync_dist=True)

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.logits(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class HFModule(PlainModule):
    """transformers' Llama, called as a user would."""

    def __init__(self, run: Run) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        pl.LightningModule.__init__(self)
        heads, kv_heads = run.heads
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=8 * heads,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

        self.packed = run.packed

    def logits(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**self.inputs(batch)).logits

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**self.inputs(batch), labels=batch["labels"]).loss

    def inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Positions only where they say something: a step need not pass them on."""
        names = ("input_ids", "position_ids") if self.packed else ("input_ids",)
        return {name: batch[name] for name in names}


class Recorder(pl.Callback):
    """Loss of every micro-batch, gradient norm of every optimizer step, ranks without targets."""

    def __init__(self) -> None:
        self.result = Result()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        norms = [
            whole(p.grad).double().norm() for p in pl_module.parameters() if p.grad is not None
        ]
        self.result.grad_norms.append(float(torch.stack(norms).norm()))

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.result.losses.append(float(trainer.callback_metrics["loss"]))
        targets = batch.get("shift_labels", batch["labels"])
        self.result.empty_ranks += int((targets != -100).sum() == 0)
        if isinstance(trainer.strategy, UlyssesRingStrategy):
            part = trainer.strategy.runtime.part
            self.result.layouts.append(layout_name(part.layout) if part is not None else "")
