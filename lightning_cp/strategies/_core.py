"""What the Trainer's strategy and Fabric's share: mesh, sharding, loss scale, averages.

Nothing here knows of a Trainer. A strategy calls, in this order: ``build_mesh`` once processes exist,
``attach`` once the model does, then for every batch ``shard``, ``begin_step``, in training ``require_loss``,
``scale_loss`` and ``after_backward``, then ``end_step``.
"""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_cp.batch import (
    BatchRules,
    ShardedBatch,
    WholeBatch,
    documents_of,
    read_batch,
    shard_batch,
    unshard_output,
    valid_counts,
)
from lightning_cp.comm.agreement import agree, checksum, fingerprint
from lightning_cp.comm.reduce import all_sum
from lightning_cp.containers import tensors_of
from lightning_cp.errors import ConfigError, NonFiniteError
from lightning_cp.layout import SequenceLayout
from lightning_cp.loss import average_weight, loss_scale, mute, require_connected, require_muted
from lightning_cp.mesh import ContextParallelMesh, Factors, Flat
from lightning_cp.models.hf import label_alignment
from lightning_cp.models.swap import StepState, SwapHandle, hf_models, num_heads_of, swap_attention
from lightning_cp.strategies.settings import Settings


class ContextParallelCore:
    """One run's context parallelism, independent of who drives it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rules = BatchRules()
        self._mesh: ContextParallelMesh | None = None
        self._handle: SwapHandle | None = None
        self._model: nn.Module | None = None
        self._sharded: ShardedBatch | None = None
        self._some_rank_empty = False
        self._muted: torch.Tensor | None = None
        self._loss_outside = False

    @property
    def mesh(self) -> ContextParallelMesh:
        """The mesh.

        Raises:
            RuntimeError: it does not exist yet.
        """
        if self._mesh is None:
            raise RuntimeError(
                "the mesh does not exist yet: processes start first, and the split of the "
                "context-parallel ranks "
                "may need the model. It is available from setup on, or in configure_model if num_heads, or "
                "ulysses_size and ring_size, are given to the strategy."
            )
        return self._mesh

    @property
    def enabled(self) -> bool:
        """Whether there is more than one context-parallel rank."""
        return self.mesh.cp_size > 1

    def build_mesh(
        self,
        world_size: int,
        device_type: str,
        ranks_per_node: int | None,
        model: nn.Module | None = None,
        num_heads: int | None = None,
    ) -> Factors | None:
        """Make the mesh, once; ``None`` if it exists, or if the model must be known first.

        Args:
            world_size: all ranks.
            device_type: ``cpu`` or ``cuda``.
            ranks_per_node: the largest useful Ulysses size.
            model: where the number of heads is looked for, if it is needed and not given.
            num_heads: what the model declares; the setting of the same name goes first.

        Raises:
            ConfigError: sizes that do not fit the world or the heads.
        """
        cp_size = self.settings.context_size(world_size)
        if self._mesh is not None:
            return None
        heads = self.settings.num_heads or num_heads
        needs = self.settings.needs_heads and cp_size > 1
        if heads is None and needs:
            if model is None:
                return None
            heads = num_heads_of(model)
        if cp_size == 1:
            factors = Factors(1, 1, "one rank per sample")
        else:
            factors = self.settings.factors(cp_size, heads, ranks_per_node)
        self._mesh = ContextParallelMesh(
            ring_size=factors.ring_size,
            ulysses_size=factors.ulysses_size,
            device_type=device_type,
            data_parallel_replicate_size=self.settings.data_parallel_size,
        )
        atexit.register(self._mesh.destroy)
        return factors

    def attach(
        self, model: nn.Module, options: Mapping[str, Any], *, needs_labels: bool
    ) -> list[str]:
        """Swap the model's attention and fix how batches are read; says what was swapped.

        Args:
            model: the user's module.
            options: what the mixin declares: ``sequence_dims``, ``label_key``, ``labels``, ``modules``.
            needs_labels: the run weights a loss by labels.

        Raises:
            ConfigError: attention that cannot be swapped, or labels of unknown kind.
        """
        if not self.enabled:
            return []
        self.detach()
        settings = self.settings.with_sequence_dims(options.get("sequence_dims") or {})
        declared = options.get("labels") or settings.labels
        self.rules = BatchRules(
            sequence_dims=settings.sequence_dims,
            label_key=options.get("label_key") or "labels",
            labels=label_kind(model, declared, required=needs_labels),
            padding=settings.padding,
            reads_masks=bool(hf_models(model)),
        )
        self._loss_outside = declared != "auto"
        self._model = model
        self._handle = swap_attention(model, self.mesh, settings.kernel, options.get("modules"))
        return self._handle.report

    def detach(self) -> None:
        """Give the model its own attention back."""
        if self._handle is not None:
            self._handle.undo()
        self._handle = None
        self._sharded = None

    def shard(self, batch: Any, *, needs_labels: bool) -> Any:
        """This rank's part of a batch that every rank of its cp group holds whole.

        Before anything else the ranks agree that it is the same batch, so that an error on one rank is
        an error on all.

        Raises:
            ConfigError: a batch that cannot be read.
            ShapeError: sequences that are too short, unequal, or (padding=False) do not divide.
            BatchMismatchError: ranks of a cp group hold different batches.
            RankFailure: another rank's batch was refused.
        """
        if not self.enabled:
            return batch
        self._sharded = None
        error: Exception | None = None
        facts: dict[str, int] = {}
        whole: WholeBatch | None = None
        layout: SequenceLayout | None = None
        try:
            whole = read_batch(batch, self.rules, needs_labels=needs_labels)
            layout = self.layout_of(whole)
            facts = _facts(whole, layout)
        except Exception as refused:  # any: a rank that raised alone would leave the others waiting
            error = refused
        table = self._agree_on_batch(facts, error, training=needs_labels)
        assert whole is not None
        assert layout is not None
        self._some_rank_empty = any(row["ranks without targets"] for row in table)
        if not facts["targets"]:
            warnings.warn("a batch has no valid label at all: it adds nothing.", stacklevel=2)
        self._sharded = shard_batch(whole, layout, self.mesh.cp_rank, self.rules)
        return self._sharded.batch

    def _agree_on_batch(
        self, facts: dict[str, int], error: Exception | None, *, training: bool
    ) -> list[dict[str, int]]:
        """In training all ranks agree: their gradients are averaged, so all must know of ranks without
        targets. Elsewhere only a cp group does: data ranks may have different numbers of batches."""
        size, cp = self.mesh.data_size, self.mesh.cp_size
        if not training:
            return agree(facts, self.mesh.control_group(Flat.CP), what="batch", error=error)
        groups = [range(index * cp, (index + 1) * cp) for index in range(size)]
        group = self.mesh.control_group(Flat.LOSS)
        return agree(facts, group, what="batch", within=groups, error=error)

    def layout_of(self, whole: WholeBatch) -> SequenceLayout:
        """The layout of a batch: its length, the mesh, and its documents."""
        layout = SequenceLayout(
            whole.seq_len,
            ring_size=self.mesh.ring_size,
            ulysses_size=self.mesh.ulysses_size,
            kind="contiguous" if self.settings.layout == "contiguous" else "zigzag",
            documents=documents_of(whole, self.rules),
        )
        if not self.rules.padding:
            layout.require_unpadded()
        return layout

    def begin_step(self) -> None:
        """Intercept attention from here on."""
        if not self.enabled:
            return
        if self._handle is None or self._sharded is None:
            raise ConfigError(
                "a context-parallel step began without a sharded batch. Let the strategy move the "
                "batch (do not "
                "override transfer with a step that takes dataloader_iter)."
            )
        part = self._sharded
        self._handle.activate(
            StepState(
                layout=part.layout,
                position_ids=part.position_ids,
                aligned_labels=_copy(part.aligned_labels),
                labels=_copy(part.labels),
                valid_local=part.valid[self.mesh.cp_rank],
                loss_outside=self._loss_outside,
            )
        )

    def require_intercepted(self) -> None:
        """Refuse a step in which attention stayed local."""
        if self.enabled and self._handle is not None and self._model is not None:
            self._handle.require_intercepted(self._model)

    def end_step(self) -> None:
        """The model is the plain model again."""
        if self._handle is not None:
            self._handle.deactivate()

    @property
    def in_step(self) -> bool:
        """Whether a context-parallel step is under way."""
        return self._handle is not None and self._handle.active

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on: see ``lightning_cp.loss``."""
        if not self.enabled or self._sharded is None:
            return loss
        valid, rank = self._sharded.valid, self.mesh.cp_rank
        if valid[rank]:
            return loss * loss_scale(valid, rank)
        self._muted = loss.detach()
        return mute(loss)

    def require_loss(self, loss: torch.Tensor | None) -> None:
        """Where a rank has no targets, all ranks ask whether backward will run through its model.

        Raises:
            ConfigError: a rank without targets has no loss, or one that is not computed from the model.
            RankFailure: that happened on another rank.
        """
        if not self.enabled or not self._some_rank_empty or self._sharded is None:
            return
        error: ConfigError | None = None
        if not self._sharded.valid[self.mesh.cp_rank]:
            try:
                require_connected(loss)
            except ConfigError as refused:
                error = refused
        agree({}, self.mesh.control_group(Flat.LOSS), what="loss", error=error)

    def after_backward(self, parameters: Iterable[torch.Tensor]) -> None:
        """Where a rank had no targets, all ranks ask whether its loss did add nothing.

        Raises:
            NonFiniteError: a rank without targets has a loss that cannot be made to add nothing.
            RankFailure: that happened on another rank.
        """
        if not self.enabled or not self._some_rank_empty:
            return
        error: NonFiniteError | None = None
        muted, self._muted = self._muted, None
        if muted is not None:
            try:
                require_muted(float(muted), parameters)
            except NonFiniteError as refused:
                error = refused
        agree({}, self.mesh.control_group(Flat.LOSS), what="loss", error=error)

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over the cp group, weighted by targets: what one process would have computed."""
        if not self.enabled or self._sharded is None:
            return value
        weight = average_weight(self._sharded.valid, self.mesh.cp_rank)
        part = value.detach().to(torch.float64)
        part = part * weight if weight else torch.zeros_like(part)  # 0 * NaN would be NaN
        on_host = value.device.type == "cpu"
        group = self.mesh.control_group(Flat.CP) if on_host else self.mesh.group(Flat.CP)
        return all_sum(part, group).to(value.dtype)

    def unshard(self, output: Any, dims: Mapping[str, int | None]) -> Any:
        """An output of the current step in original order and length, on every rank."""
        if not self.enabled or self._sharded is None:
            return output
        return unshard_output(output, self.mesh, self._sharded.layout, dims)


def _copy(labels: torch.Tensor | None) -> torch.Tensor | None:
    """The step may change its own, which is noticed."""
    return None if labels is None else labels.clone()


def label_kind(model: nn.Module, declared: str, *, required: bool) -> str:
    """How labels are read: ``shift``, ``aligned`` or ``ignore``.

    Raises:
        ConfigError: labels matter, and nothing says whether they are shifted.
    """
    if declared in ("aligned", "shift"):
        return declared
    kinds = {label_alignment(root) for root in hf_models(model)}
    if len(kinds) == 1 and None not in kinds:
        return str(kinds.pop())
    if not required:
        return "ignore"
    raise ConfigError(
        f"it is not known how {type(model).__name__} reads its labels. A step that shifts them itself "
        "(logits[:, :-1], labels[:, 1:]) is silently wrong at every seam between ranks, so shift them in the "
        "dataset (labels[i] is the target of token i) and declare labels='aligned'."
    )


def _facts(whole: WholeBatch, layout: SequenceLayout) -> dict[str, int]:
    """What ranks that share a sample must agree on."""
    counts = valid_counts(whole, layout)
    facts = {
        "ranks without targets": sum(1 for count in counts if not count),
        "targets": sum(counts),
        "sequence length": whole.seq_len,
        "documents": layout.documents.checksum if layout.documents else 0,
    }
    tensors = list(tensors_of(whole.batch))
    for name, x in tensors[:15]:
        facts[f"{name} (shape and dtype)"] = fingerprint((tuple(x.shape), str(x.dtype)))
        facts[f"{name} (values)"] = checksum(x)
    facts["further tensors"] = fingerprint([(name, checksum(x)) for name, x in tensors[15:]])
    return facts
