"""One training step of a Hugging Face model, in one process and context parallel, without a Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_cp import ContextParallelMesh, keep_attention
from lightning_cp.config import StrategyConfig
from lightning_cp.models.hf.labels import label_alignment
from lightning_cp.runtime.runtime import ContextParallelRuntime
from tests.helpers.models.litgpt_zoo import LITGPT_ZOO
from tests.helpers.models.zoo import ZOO

VOCAB, ROWS, LENGTH = 43, 3, 37
CUTS = [[0, 5, 6, 30, LENGTH], [0, 18, LENGTH], [0, LENGTH]]
"""Where the documents of packed rows begin, and the last ends."""

Options = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What is computed. ``batch``: plain, padded on the right, left or both sides, or packed (with positions
    that restart; with ``segment_ids``; ``declared``: with both)."""

    model: str = "llama"
    batch: str = "plain"
    attention: str = "sdpa"
    checkpoint: str = ""
    use_cache: bool = True
    """As models come. One process then reads restarting positions as one document."""
    window: int = 0
    """Sliding window of the models that have one; 0 is wider than any sequence."""
    call: str = "logits"
    """How the step computes its loss: see ``CALLS``."""


@dataclass
class Outcome:
    """What is compared."""

    loss: float
    gradients: dict[str, torch.Tensor]
    logits: torch.Tensor
    calls: int = 0


def make_model(case: Case) -> Any:
    """The same weights every time, float64 inside wherever the model allows it."""
    torch.manual_seed(3)
    makers = {"llama": make_llama, "gpt2": make_gpt2, "bert": make_bert, **ZOO, **LITGPT_ZOO}
    model = makers[case.model](case)
    model.double().train()
    if case.checkpoint:
        options: dict[str, Any] = {"use_reentrant": case.checkpoint == "reentrant"}
        if case.checkpoint == "keep":
            options["context_fn"] = keep_attention
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # new, old
        next(getattr(model, name) for name in names if hasattr(model, name))(options)
    return model


def make_llama(case: Case) -> Any:
    """Grouped heads and rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    sizes: Options = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    heads: Options = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, **heads, use_cache=case.use_cache)
    config._attn_implementation = case.attention
    model = LlamaForCausalLM(config)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, LlamaRMSNorm):  # theirs computes in float32
                setattr(parent, name, nn.RMSNorm(child.weight.shape, eps=1e-6))
    return model


def make_gpt2(case: Case) -> Any:
    """Learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: Options = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4}
    tokens: Options = {"n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    dropout: Options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**sizes, **tokens, **dropout, use_cache=case.use_cache)
    config._attn_implementation = case.attention
    return GPT2LMHeadModel(config)


def make_bert(case: Case) -> Any:
    """Attends in both directions; labels are aligned."""
    from transformers import BertConfig, BertForMaskedLM

    sizes: Options = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    heads: Options = {
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    dropout: Options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, **heads, **dropout)
    config._attn_implementation = case.attention
    return BertForMaskedLM(config)


def make_batch(case: Case) -> dict[str, torch.Tensor]:
    """Rows of different lengths, or packed, with targets spread unevenly."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    labels = ids.clone() if case.model != "bert" else ids.roll(3, 1)
    labels[torch.rand(ROWS, LENGTH, generator=generator) < 0.4] = -100
    labels[:, 9:28] = -100  # whole ranks without a target
    batch = {"input_ids": ids, "labels": labels}
    kind = case.batch
    if kind in ("packed", "declared"):
        batch["position_ids"] = torch.stack([restarting(row) for row in CUTS])
    if kind in ("segments", "declared"):
        lengths = [torch.tensor(row).diff() for row in CUTS]
        batch["segment_ids"] = torch.stack(
            [torch.arange(len(row)).repeat_interleave(row) for row in lengths]
        )
    elif kind not in ("plain", "packed"):
        mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
        if kind in ("right", "both"):
            mask[0, -7:], mask[2, -30:] = 0, 0
        if kind in ("left", "both"):
            mask[1, :11] = 0
        batch["attention_mask"] = mask
        batch["labels"] = labels.masked_fill(mask == 0, -100)
    return batch


def restarting(cuts: list[int]) -> torch.Tensor:
    """Position ids [S] that begin anew at each cut."""
    return torch.cat([torch.arange(b - a) for a, b in pairwise(cuts)])


def step(case: Case, model: Any, batch: dict[str, torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """(loss, logits) as an ordinary training step computes them."""
    names = ("attention_mask", "position_ids")
    given = {name: batch[name] for name in names if name in make_batch(case)}
    return CALLS[case.call](model, batch, given)


def from_logits(model: Any, batch: dict[str, torch.Tensor], given: dict[str, Any]) -> Any:
    """Cross-entropy in float64; NaN where a rank has no targets."""
    logits = model(input_ids=batch["input_ids"], **given).logits
    return cross_entropy(model, logits, batch), logits


def from_hidden(model: Any, batch: dict[str, torch.Tensor], given: dict[str, Any]) -> Any:
    """The step calls the model inside, and the head by itself."""
    hidden = model.base_model(batch["input_ids"], **given).last_hidden_state
    logits = model.get_output_embeddings()(hidden)
    return cross_entropy(model, logits, batch), logits


def own_loss(model: Any, batch: dict[str, torch.Tensor], given: dict[str, Any]) -> Any:
    """The model's own loss, float32 inside."""
    output = model(input_ids=batch["input_ids"], labels=batch["labels"], **given)
    return output.loss, output.logits


def own_loss_of_everything(model: Any, batch: dict[str, torch.Tensor], given: Any) -> Any:
    """``model(**batch)``, with whatever was added to the batch."""
    output = model(**batch)
    return output.loss, output.logits


def own_loss_by_position(model: Any, batch: dict[str, torch.Tensor], given: dict[str, Any]) -> Any:
    """Arguments in the order of the signature, labels included."""
    names = list(inspect.signature(model.forward).parameters)
    wanted = {"input_ids": batch["input_ids"], "labels": batch["labels"], **given}
    last = max(names.index(name) for name in wanted)
    output = model(*(wanted.get(name) for name in names[: last + 1]))
    return output.loss, output.logits


def own_loss_by_forward(model: Any, batch: dict[str, torch.Tensor], given: dict[str, Any]) -> Any:
    """Past the hooks of the model's call, as older releases of peft do."""
    output = model.forward(input_ids=batch["input_ids"], labels=batch["labels"], **given)
    return output.loss, output.logits


def from_hidden_by_forward(model: Any, batch: dict[str, torch.Tensor], given: Options) -> Any:
    """The same of the model inside, which a checkpoint calls once more."""
    inside = model.base_model.forward
    output: Any = checkpoint(inside, batch["input_ids"], **given, use_reentrant=False)
    logits = model.get_output_embeddings()(output.last_hidden_state)
    return cross_entropy(model, logits, batch), logits


CALLS: dict[str, Callable[..., Any]] = {
    "logits": from_logits,
    "hidden": from_hidden,
    "forward": own_loss_by_forward,
    "hidden forward": from_hidden_by_forward,
    "labels": own_loss,
    "batch": own_loss_of_everything,
    "positional": own_loss_by_position,
}


def cross_entropy(model: Any, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> Any:
    """The mean over targets, shifted unless the batch brings shifted ones or the model needs none."""
    targets = batch.get("shift_labels", batch["labels"])
    if "shift_labels" not in batch and not type(model).__name__.endswith("MaskedLM"):
        targets = F.pad(targets[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def one_process(case: Case) -> Outcome:
    """The plain model on the whole batch."""
    model, batch = make_model(case), make_batch(case)
    loss, logits = step(case, model, batch)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(float(loss.detach()), gradients, logits.detach())


def start(ulysses: int, ring: int, model: Any, **settings: Any) -> ContextParallelRuntime:
    """A runtime that has swapped the model's attention."""
    if label_alignment(model) == "shift":
        settings.setdefault("labels", "shift")  # most steps here compute the loss themselves
    runtime = ContextParallelRuntime(
        StrategyConfig(ulysses_size=ulysses, ring_size=ring, **settings)
    )
    runtime.meshes.build(ulysses * ring, "cpu", None, model)
    runtime.attach(model, {}, needs_labels=True)
    return runtime


def parallel(rank: int, world_size: int, case: Case, ulysses: int, ring: int) -> Outcome:
    """The same step on the ranks of one cp group; gradients are averaged as an engine does."""
    model = make_model(case)
    runtime = start(ulysses, ring, model)
    try:
        return step_of(runtime, case, model, world_size)
    finally:
        runtime.detach()  # after a refusal too: the ranks live on


def step_of(runtime: ContextParallelRuntime, case: Case, model: Any, world_size: int) -> Outcome:
    """One step of an attached runtime."""
    return run_step(runtime, model, world_size, make_batch(case), partial(step, case))


def run_step(
    runtime: ContextParallelRuntime,
    model: Any,
    world_size: int,
    batch: dict[str, torch.Tensor],
    step: Callable[[Any, dict[str, torch.Tensor]], tuple[Any, torch.Tensor]],
) -> Outcome:
    """One step of an attached runtime, of any model; ``step`` gives (loss, logits)."""
    local = runtime.shard(batch, needs_labels=True)
    runtime.begin_step()
    loss, logits = step(model, local)
    runtime.check_step()
    runtime.step.scale_loss(loss).backward()
    runtime.step.after_backward(model.parameters())
    gradients = mean_gradients(model, world_size)
    whole = runtime.step.unshard_output(logits.detach(), {})
    state = runtime.binding.handle.state if runtime.binding.handle else None
    calls = state.calls if state is not None else 0
    return Outcome(float(runtime.step.average(loss).detach()), gradients, whole, calls)


def mean_gradients(model: nn.Module, world_size: int) -> dict[str, torch.Tensor]:
    """The mean over ranks, as an engine takes it: an expert may have tokens on some ranks only."""
    have = torch.tensor([p.grad is not None for p in model.parameters()], dtype=torch.uint8)
    dist.all_reduce(have, dist.ReduceOp.MAX)
    gradients: dict[str, torch.Tensor] = {}
    for (name, p), any_has in zip(model.named_parameters(), have.tolist(), strict=True):
        if any_has:
            gradients[name] = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(gradients[name])
            gradients[name] /= world_size
    return gradients


def mesh_of(ulysses: int, ring: int) -> ContextParallelMesh:
    """The process groups of one case."""
    return ContextParallelMesh(ring_size=ring, ulysses_size=ulysses)
