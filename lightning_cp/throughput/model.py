"""The cost of a model's step, and its watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.batch import BatchRules, CountedBatch, read_batch
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.models.calls import AttentionCall, observe_calls, shared_call
from lightning_cp.models.expected import expected_heads
from lightning_cp.models.multiplied import Multiplied, multiplied_by
from lightning_cp.models.repeated import RepeatedLayers
from lightning_cp.models.swap import hf_models
from lightning_cp.strategies.step.core import ContextParallelCore
from lightning_cp.throughput.options import Options
from lightning_cp.throughput.work import StepWork


class CountedModel:
    """Reads batches and attention calls of one model, from a strategy's core or by itself.

    Args:
        model: the user's module.
        core: of a strategy of ours; ``None`` under another.
        options: what is asked for.
    """

    def __init__(
        self, model: nn.Module, core: ContextParallelCore | None, options: Options
    ) -> None:
        self._model = model
        self._core = core if core is not None and core.enabled else None
        self._active = options.active_parameters
        self._trained: tuple[bool, ...] = ()
        self._multiplied = Multiplied()
        self._watched: RepeatedLayers | None = RepeatedLayers(model)
        self._repeated = ""
        self._tokens = 0
        self.work = StepWork()
        dims = dict(options.sequence_dims or {})
        if core is not None:
            dims = {**core.rules.sequence_dims, **dims}
        self._rules = BatchRules(sequence_dims=dims, reads_masks=bool(hf_models(model)))
        self._undo: Callable[[], None]
        if self._core is not None:
            self._undo = self._core.listen(self._note_shared)
        else:
            self._undo = observe_calls(model, self._note)

    @property
    def multiplied(self) -> Multiplied:
        """What one token is multiplied by; asked anew where something was frozen or unfrozen."""
        trained = tuple(p.requires_grad for p in self._model.parameters())
        if trained != self._trained:
            self._trained, self._multiplied = trained, multiplied_by(self._model)
        return self._multiplied

    @property
    def flops_per_token(self) -> int | None:
        """Outside of attention, forward and backward; ``None`` where it is not known."""
        if self._active is not None:
            return 6 * self._active
        found = self.multiplied
        return None if found.unknown or self._repeated else found.flops

    @property
    def reason(self) -> str:
        """Why FLOPs are not known; nothing where they are."""
        names = () if self._active is not None else self.multiplied.unknown
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            return (
                f"it is not known how often {', '.join(names[:3])}{more} multiply a token. "
                "active_parameters= says how many parameters do"
            )
        if self._active is None and self._repeated:
            return (
                f"tokens go through {self._repeated} more than once in a step. active_parameters= says how "
                "many parameters multiply each token, counted as often as they do"
            )
        return self.work.reason

    def begin(self, batch: Any) -> None:
        """A micro-batch of training begins, which a core has sharded, or nobody.

        Raises:
            ConfigError: its tokens cannot be counted.
        """
        counted, tokens = self._read(batch)
        if self._watched is not None and self.work.counts:
            self._end_watch()
        if self._watched is not None:
            self._watched.forget()  # what a check before the first batch has called
            self._tokens = tokens
        self.work.begin(counted, self.flops_per_token)

    def end_batch(self) -> None:
        """The micro-batch is over."""
        if self._watched is not None:
            self._end_watch()
        self.work.end_batch()

    def end(self) -> None:
        """Leave the model as it was."""
        if self._watched is not None:
            self._watched.end(0)
            self._watched = None
        self._undo()
        self._undo = lambda: None

    def _end_watch(self) -> None:
        assert self._watched is not None
        self._repeated = self._watched.end(self._tokens)
        self._watched = None
        if self._repeated:
            self.work.forget_flops()

    def _read(self, batch: Any) -> tuple[CountedBatch, int]:
        """What is counted, and how many (padded) tokens this rank has of it."""
        if self._core is not None:
            part = self._core.part
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
        """Of tensor-parallel ranks: each may have heads of its own, or all of them, as the plan was."""
        assert self._core is not None
        told = expected_heads(self._model)
        heads = self._core.settings.num_heads or (None if told is None else told.query)
        if heads not in (call.heads, call.heads * tp_size):
            return call._replace(mask=None)
        return call._replace(heads=heads)
