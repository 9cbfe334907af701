"""FLOPs of a model's step: the parameters that multiply each token, and the attention calls.

A parameter in a matrix product costs every token one multiply-add, 2 FLOPs, in the forward, another 2 in the
backward for the gradient of the input, and 2 for its own: 6 in all (Kaplan et al. 2020, "Scaling Laws for
Neural Language Models", section 2.1; Chowdhery et al. 2022, "PaLM", appendix B). A frozen one has no gradient
of its own: 4; and 2 if nothing trained comes before it, so that backward does not pass it. "Before" is the
order in which modules are registered. A count of parameters misses layers that tokens pass more than once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.batch import BatchRules, CountedBatch, read_batch
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.models.structure import expected_heads
from lightning_cp.models.swap import config_value, hf_models
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.throughput.step_flops import (
    AttentionCall,
    StepWork,
    ThroughputOptions,
    is_compiled,
    observe_calls,
    shared_call,
)
from lightning_cp.utils.autograd_notes import in_backward
from lightning_cp.utils.patching import PatchSet, add_hook


@dataclass(frozen=True)
class ActiveParameters:
    """Numbers of parameters that multiply one token."""

    trained: int = 0
    frozen: int = 0
    """Frozen parameters that gradients pass through."""
    first: int = 0
    """Frozen parameters before all trained ones."""
    unknown: tuple[str, ...] = ()
    """Parameters that multiply a token an unknown number of times."""

    @property
    def flops(self) -> int:
        """FLOPs of one token, forward and backward."""
        return 6 * self.trained + 4 * self.frozen + 2 * self.first

    @property
    def parameters(self) -> int:
        """All counted parameters."""
        return self.trained + self.frozen + self.first


def count_active_parameters(model: nn.Module) -> ActiveParameters:
    """Count the parameters that multiply each token: whole ones, however many ranks share them.

    Embeddings are lookups and do not count; an output projection does, also with the embedding's weight.
    Vectors (biases, norms) are not matrix products. Of experts, the number that a token is routed to counts,
    by the config of a Hugging Face model. A module that is called twice counts once.
    """
    routed = _Experts(model)
    counts = {"trained": 0, "frozen": 0, "first": 0}
    unknown: list[str] = []
    gradients_pass = False
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            kind = "trained" if parameter.requires_grad else "frozen" if gradients_pass else "first"
            gradients_pass |= parameter.requires_grad
            active = _active(module, name, parameter, routed)
            if active is None:
                unknown.append(name)
            else:
                counts[kind] += active
    return ActiveParameters(**counts, unknown=tuple(unknown))


def _active(module: nn.Module, name: str, parameter: Any, routed: _Experts) -> int | None:
    """Return the number of a parameter's values that multiply one token; ``None`` if unknown."""
    size, last = parameter.numel(), name.rpartition(".")[2]
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or parameter.dim() < 2:
        return 0
    if "bias" in last:  # of experts: [experts, features]
        return 0
    share = routed.share(name, parameter)
    if share is not None:
        active, experts = share
        return size * active // experts
    is_matrix = parameter.dim() == 2 and (last == "weight" or last.startswith("in_proj"))
    is_matrix |= parameter.dim() == 2 and last in (
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
    )
    return size if is_matrix and not routed.is_expert(name) else None


class _Experts:
    """The experts of the Hugging Face models inside a module."""

    def __init__(self, model: nn.Module) -> None:
        self._lists: dict[str, tuple[int, int] | None] = dict(_lists_of_experts(model))
        self._known = set(_numbers(model))

    def is_expert(self, name: str) -> bool:
        """True if a parameter is one expert's, of a list of them."""
        return any(name.startswith(prefix) for prefix in self._lists)

    def share(self, name: str, parameter: Any) -> tuple[int, int] | None:
        """Return (experts of a token, experts) for a parameter of experts, if known."""
        for prefix, share in self._lists.items():
            if name.startswith(prefix):
                return share
        if parameter.dim() != 3:
            return None
        return next((known for known in self._known if known[1] == parameter.shape[0]), None)


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token")


def _numbers(model: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield (experts of a token, experts) from the configs."""
    configs = [root.config for root in hf_models(model)]
    configs += [getattr(config, "text_config", None) for config in configs]
    for config in configs:
        active = [config_value(config, name) for name in _ACTIVE]
        experts = [config_value(config, name) for name in _EXPERTS]
        for some in active:
            for every in experts:
                if type(some) is int and type(every) is int and 0 < some <= every:
                    yield some, every


def _lists_of_experts(model: nn.Module) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """Yield the name prefix and the share of experts that are separate modules."""
    known = set(_numbers(model))
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts":
            share = next((pair for pair in known if pair[1] == len(module)), None)
            yield f"{name}.", share


class RepeatedLayers:
    """Counts the rows that each linear layer of a model receives during one batch.

    Shared layers (ALBERT), or a model that is called twice in a step, receive twice the batch's rows. A head
    that is called chunk by chunk does not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rows: Counter[str] = Counter()
        self._hooks = PatchSet()
        if is_compiled(model):
            return
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                hook = self._counter(name)
                self._hooks.add(add_hook(module.register_forward_pre_hook, hook))

    def _counter(self, name: str) -> Callable[..., None]:
        def count(module: nn.Linear, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], torch.Tensor) and not in_backward():
                self._rows[name] += args[0].numel() // max(args[0].shape[-1], 1)

        return count

    def forget(self) -> None:
        """Reset the counts at the beginning of the batch."""
        self._rows.clear()

    def end(self, tokens: int) -> str:
        """Stop counting; return a layer that the (padded, local) tokens passed twice, or ``""``."""
        self._hooks.undo()
        return next((name for name, rows in self._rows.items() if rows >= 2 * tokens), "")


class CountedModel:
    """Reads batches and attention calls of one model, from a strategy's runtime or by itself.

    Args:
        model: the user's module.
        runtime: the runtime of this package's strategy; ``None`` under another strategy.
        options: the user's options.
    """

    def __init__(
        self, model: nn.Module, runtime: ContextParallelRuntime | None, options: ThroughputOptions
    ) -> None:
        self._model = model
        self._runtime = runtime if runtime is not None and runtime.enabled else None
        self._active = options.active_parameters
        self._trained: tuple[bool, ...] = ()
        self._multiplied = ActiveParameters()
        self._watched: RepeatedLayers | None = RepeatedLayers(model)
        self._repeated = ""
        self._tokens = 0
        self.work = StepWork()
        dims = dict(options.sequence_dims or {})
        if runtime is not None:
            dims = {**runtime.binding.rules.sequence_dims, **dims}
        self._rules = BatchRules(sequence_dims=dims, reads_masks=bool(hf_models(model)))
        self._hooks = PatchSet()
        if self._runtime is not None:
            self._hooks.add(self._runtime.listen(self._note_shared))
        else:
            self._hooks.add(observe_calls(model, self._note))

    @property
    def multiplied(self) -> ActiveParameters:
        """The parameters that multiply one token; recounted after a parameter was frozen or unfrozen."""
        trained = tuple(p.requires_grad for p in self._model.parameters())
        if trained != self._trained:
            self._trained, self._multiplied = trained, count_active_parameters(self._model)
        return self._multiplied

    @property
    def flops_per_token(self) -> int | None:
        """FLOPs of a token outside attention, forward and backward; ``None`` if unknown."""
        if self._active is not None:
            return 6 * self._active
        found = self.multiplied
        return None if found.unknown or self._repeated else found.flops

    @property
    def reason(self) -> str:
        """The reason why FLOPs are unknown; empty if they are known."""
        names = () if self._active is not None else self.multiplied.unknown
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            return (
                f"it is unknown how often {', '.join(names[:3])}{more} multiply a token. "
                "active_parameters= says how many parameters do"
            )
        if self._active is None and self._repeated:
            return (
                f"tokens go through {self._repeated} more than once in a step. active_parameters= says how "
                "many parameters multiply each token, counted as often as they do"
            )
        return self.work.reason

    def begin(self, batch: Any) -> None:
        """Begin a micro-batch of training, sharded by a runtime or not sharded.

        Raises:
            ConfigError: its tokens cannot be counted.
        """
        counted, tokens = self._read(batch)
        if self._watched is not None and self.work.counts:
            self._end_watch()
        if self._watched is not None:
            self._watched.forget()  # calls of a check before the first batch
            self._tokens = tokens
        self.work.begin(counted, self.flops_per_token)

    def end_batch(self) -> None:
        """End the micro-batch."""
        if self._watched is not None:
            self._end_watch()
        self.work.end_batch()

    def end(self) -> None:
        """Remove all hooks from the model."""
        if self._watched is not None:
            self._watched.end(0)
            self._watched = None
        self._hooks.undo()

    def _end_watch(self) -> None:
        assert self._watched is not None
        self._repeated = self._watched.end(self._tokens)
        self._watched = None
        if self._repeated:
            self.work.forget_flops()

    def _read(self, batch: Any) -> tuple[CountedBatch, int]:
        """Return the counted batch, and this rank's number of (padded) tokens."""
        if self._runtime is not None:
            part = self._runtime.part
            if part is None:
                raise ConfigError(
                    "the tokens of a batch are counted once it was sharded: with Fabric, "
                    "batch = fabric.strategy.shard_batch(batch) comes first."
                )
            return CountedBatch.of_shard(part, self._rules), part.rows * part.layout.local_len
        try:
            whole = read_batch(batch, self._rules, needs_labels=False)
        except (ConfigError, ShapeError) as error:
            raise ConfigError(f"the tokens of this batch cannot be counted: {error}") from error
        return CountedBatch.of_whole(whole, self._rules), whole.rows * whole.seq_len

    def _note(self, call: AttentionCall, out: torch.Tensor) -> None:
        self.work.note_call(call, out)

    def _note_shared(
        self, plan: AttentionPlan, q_BLHD: torch.Tensor, out_BLHD: torch.Tensor
    ) -> None:
        if not self.work.counts:
            return
        call = shared_call(plan, q_BLHD, out_BLHD, 1)
        size = plan.mesh.tp_size
        if size > 1:
            call = self._with_heads(call, size)
        self.work.note_call(call, out_BLHD)

    def _with_heads(self, call: AttentionCall, tp_size: int) -> AttentionCall:
        """Return the call with the heads of all tensor-parallel ranks, which may be sharded or replicated."""
        assert self._runtime is not None
        expected = expected_heads(self._model)
        heads = self._runtime.settings.num_heads or (None if expected is None else expected.query)
        if heads not in (call.heads, call.heads * tp_size):
            return call._replace(mask=None)
        return call._replace(heads=heads)
