"""ContextParallelMixin: optional settings and helpers for a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.loss.averages import RATIO_HOOK, log_token_ratio, zero_where_uncounted
from lightning_cp.loss.sequence import Index, SequenceTokens, check_same_rows, gather_rows
from lightning_cp.loss.terms import declared_count, divisor
from lightning_cp.utils.tensors import to_device


class ContextParallelMixin:
    """Mixin that customises context parallelism for one LightningModule; the strategy works without it too.

    Override only what differs from the defaults::

        class Model(ContextParallelMixin, L.LightningModule):
            context_parallel_labels = "aligned"
            context_parallel_sequence_dims = {"tokens": 1, "weights": None}
    """

    context_parallel_sequence_dims: ClassVar[Mapping[str, int | None]] = {}
    """Dotted name of a batch tensor -> its sequence dimension; ``None``: every rank gets all of it."""

    context_parallel_label_key: ClassVar[str | None] = None
    """Dotted name of the labels in a batch; ``None``: the strategy's setting (default ``labels``)."""

    context_parallel_labels: ClassVar[str | None] = None
    """``"aligned"``: labels[i] is the target of token i; ``None``: the strategy's setting."""

    context_parallel_num_heads: ClassVar[int | None] = None
    """Number of query heads, if no attribute of the model has it; ``None``: read from the model."""

    context_parallel_output_dims: ClassVar[Mapping[str, int | None]] = {}
    """Dotted name of an output of ``predict_step`` -> its sequence dimension; ``None``: not unsharded."""

    context_parallel_replicated_metrics: ClassVar[Sequence[str]] = ()
    """Dotted names of metrics whose inputs are whole values (``self.unshard(...)``), equal on all ranks that
    share a sample; the inputs of all other metrics are a rank's own tokens."""

    def context_parallel_modules(self) -> Iterable[nn.Module] | None:
        """Return the modules whose attention runs along the sequence, Hugging Face or others; ``None``: all.

        All other attention stays local: it sees the tokens of its rank only.
        """
        return None

    def unshard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return the whole tensor for a local one of the current step, in original order and length.

        Differentiable. Every rank calls it, and gets the same; a loss of it has the gradients of one process.
        """
        strategy = _strategy_of(self)
        return strategy.unshard(x, dim=dim) if hasattr(strategy, "unshard") else x

    def sequence_sum(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sums of a rank's values over whole rows, ``[B, ...]``; in a packed batch over documents.

        Differentiable. Every rank calls it and gets the same; a loss of it has one process's gradients::

            logps = self.sequence_sum(token_logps, mask)  # [B], as for DPO

        Args:
            x: ``[B, L, ...]``, a value for each of this rank's tokens.
            mask: ``[B, L]``, bool or weights of tokens; ``None``: all count. Padding never counts. Without
                this strategy, no padding is known: pass the mask.

        Raises:
            ShapeError: values of other tokens than those of the step.
        """
        return _of_sequences(self, "sequence_sum", x, mask)

    def sequence_mean(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the means of a rank's values over whole rows or documents, as ``sequence_sum``.

        A row of which nothing counts has the mean 0.
        """
        return _of_sequences(self, "sequence_mean", x, mask)

    def sequence_pick(
        self, x: torch.Tensor, index: Index, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the values of one token of each row or document, ``[B, ...]``, as ``sequence_sum``.

        Args:
            x: ``[B, L, ...]``, values of this rank's tokens.
            index: one place for all, or one for each row (``[B]``) or document, equal on all ranks. It counts
                the tokens of that row or document; -1 is the last one that is not padding.
            mask: ``[B, L]``; tokens where it is 0 have no place, as padding has none. ``None``: all others
                have one. Ranks exchange it. Without this strategy, no padding is known: pass the mask.

        Raises:
            BatchMismatchError: another index on another rank.
            ConfigError: a place that is not there, or is padding.
        """
        strategy = _strategy_of(self)
        if hasattr(strategy, "sequence_pick"):
            return strategy.sequence_pick(x, index, mask)
        tokens = SequenceTokens.whole(*x.shape[:2], device=x.device, mask=mask)
        return tokens.pick(x, index).over(None)

    def draw_whole(
        self, draw: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dim: int = 1
    ) -> torch.Tensor:
        """Return this rank's part of ``draw(x)``, drawn for the whole sequence as one process does.

        Use it for the noise of a diffusion model: ``noise = self.draw_whole(torch.randn_like, latents)``.
        Ranks that share a sample draw the same numbers for the whole row, and keep their tokens'.

        Args:
            draw: returns random numbers of the shape, dtype and device of the tensor that it is given.
            x: a tensor of this rank's tokens.
            dim: its sequence dimension.
        """
        strategy = _strategy_of(self)
        return strategy.draw_whole(draw, x, dim) if hasattr(strategy, "draw_whole") else draw(x)

    def gather_data(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows ``[B, ...]`` of all data ranks, in their order; differentiable.

        Use it for losses that compare rows of different data ranks (contrastive losses, group statistics).
        ``x`` is equal on ranks that share a sample, as values of ``sequence_mean`` are. Every rank calls it.
        With another strategy (``"ddp"``, ``"fsdp"``) the data ranks are all ranks.

        Raises:
            ShapeError: ranks have other numbers of rows.
            ConfigError: another strategy, with ranks that share rows.
        """
        strategy = _strategy_of(self)
        if hasattr(strategy, "gather_data"):
            return strategy.gather_data(x)
        group = _data_group(strategy)
        if group is not None:
            check_same_rows(x, group, x.device.type)
        return gather_rows(x, group)

    def count_targets(self, counted: torch.Tensor | float) -> torch.Tensor:
        """Declare the targets that the loss of this step counts, if they are not the batch's labels.

        Use it for targets that the step draws or leaves out, for weights of classes or of tokens, and for a
        mean by hand::

            masked = (torch.rand(ids.shape) < 0.15) & self.token_mask(ids)
            loss = (token_losses * masked).sum() / self.count_targets(masked)

        Every rank calls it, before backward, and before it calls a Hugging Face model with ``labels=``.
        Without context parallelism it only counts.

        Args:
            counted: a mask of this rank's tokens, their weights, or the number of targets on this rank.
                Padding must not count, see ``token_mask``: it is refused before a weight changes.

        Returns:
            The count of this rank, or 1 where it is 0: the divisor of a sum over targets.
        """
        strategy = _strategy_of(self)
        if hasattr(strategy, "count_targets"):
            return strategy.count_targets(counted)
        return divisor(declared_count(counted))

    def token_positions(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return int64 [B or 1, L]: positions of the step's tokens in the whole sequence, 0 for padding.

        Use it in a model that would count its tokens, if the batch is not a dict and so has no
        ``position_ids``. Without context parallelism: 0, 1, 2, ... along dimension ``dim`` of ``x``.
        """
        strategy = _strategy_of(self)
        if hasattr(strategy, "token_positions"):
            return strategy.token_positions(x, dim=dim)
        return torch.arange(x.size(dim), device=x.device)[None]

    def token_mask(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return bool [1, L]: true for tokens of the sequence, false for padding that the strategy added.

        The strategy pads a sequence whose length does not divide among ranks. Masks that a step draws or
        computes must exclude that padding: ``mask & self.token_mask(mask)``. The batch's own padding is true.
        Without context parallelism all is true, along dimension ``dim`` of ``x``.
        """
        strategy = _strategy_of(self)
        if hasattr(strategy, "token_mask"):
            return strategy.token_mask(x, dim=dim)
        return torch.ones(1, x.size(dim), dtype=torch.bool, device=x.device)

    def draw_per(self, what: Literal["token", "row"]) -> AbstractContextManager[None]:
        """Set the unit of random numbers within the block: each ``"token"``, or each ``"row"`` of the batch.

        Use it for dropout and random functions whose tensor's shape does not show the unit: numbers of tokens
        differ between ranks that share a sample, those of rows (of parameters, of layers) are equal on them.
        """
        strategy = _strategy_of(self)
        return strategy.draw_per(what) if hasattr(strategy, "draw_per") else nullcontext()

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over ranks that share a sample, weighted by their targets: one process's mean.

        Use it for values of local tokens that do not go to ``self.log`` directly: values for the end of the
        epoch, metrics that average losses, functions of the loss. Every rank calls it.
        """
        strategy = _strategy_of(self)
        return strategy.average(value) if hasattr(strategy, "average") else value

    def cp_log(self, name: str, total: Any, count: Any, **log_options: Any) -> None:
        """Log total / count, where both are sums over this rank's tokens: the mean of one process.

        The step's value is the sum of totals over the sum of counts of the ranks that share the sample; in
        training, of all ranks, as they step together. The epoch's value is the same over all batches and all
        ranks, so every token has the same weight; ``sync_dist`` makes no difference. If nothing was counted,
        the step shows NaN, and the epoch is not affected. A rank need not call it: it then counts nothing.
        Without context parallelism the value is that of ``self.log(name, total / count, batch_size=count)``,
        and the epoch's mean is over all ranks.

        Args:
            name: as for ``self.log``.
            total: a number or a tensor with one element; ignored where ``count`` is 0.
            count: number of tokens (or predictions, documents, ...) that ``total`` is the sum of.
            **log_options: ``prog_bar``, ``logger``, ``on_step``, ``on_epoch``, ``add_dataloader_idx``.

        Raises:
            ConfigError: an unknown option, or values that are not scalars.
        """
        module: Any = self
        log_options.pop("sync_dist", None)
        options = _log_options(log_options)
        total, count = (_scalar(name, value, module.device) for value in (total, count))
        total = zero_where_uncounted(total, count)
        take = module.__dict__.get(RATIO_HOOK)
        if take is not None:
            take(name, total, count, options)
        elif module._fabric is not None:
            strategy = module._fabric.strategy
            mean = strategy.token_mean if hasattr(strategy, "token_mean") else torch.divide
            module.log(name, mean(total, count), **dict(options))
        elif module._trainer is None:
            module.log(name, total / count)
        else:
            log_token_ratio(module, module.log, name, total, count, (total, count), options)


def _of_sequences(module: Any, name: str, x: torch.Tensor, argument: Any) -> torch.Tensor:
    """Call a method of the strategy; without it, this process has all tokens of the rows."""
    strategy = _strategy_of(module)
    if hasattr(strategy, name):
        return getattr(strategy, name)(x, argument)
    tokens = SequenceTokens.whole(*x.shape[:2], device=x.device)
    return getattr(tokens, name.removeprefix("sequence_"))(x, argument).over(None)


def _strategy_of(module: Any) -> Any:
    """Return the strategy of the Trainer or of Fabric; ``None`` without either, in one process.

    Raises:
        ConfigError: it is DeepSpeed's; or there is none, although several processes may share a sample.
    """
    if module._trainer is None and module._fabric is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(_NO_TRAINER.format(name=type(module).__name__))
        return None
    strategy = module.trainer.strategy
    check_not_deepspeed(strategy, "ContextParallelMixin")
    return strategy


def _data_group(strategy: Any) -> dist.ProcessGroup | None:
    """Return the ranks of another strategy, if each has its own rows; ``None``: there is one.

    Raises:
        ConfigError: ranks share rows, or do not exchange data by ``torch.distributed``.
    """
    if getattr(strategy, "world_size", 1) == 1:
        return None
    sampling: Any = getattr(strategy, "distributed_sampler_kwargs", None) or {}
    joined = dist.is_available() and dist.is_initialized()
    if not joined or sampling.get("num_replicas") != dist.get_world_size():
        raise ConfigError(_NO_DATA_RANKS.format(name=type(strategy).__name__))
    return dist.group.WORLD


_NO_DATA_RANKS = (
    "gather_data does not know which ranks of {name} have other rows. Use UlyssesRingStrategy, or a strategy "
    "whose ranks all have their own rows, such as 'ddp' or 'fsdp'."
)
_NO_TRAINER = (
    "{name} is attached to neither a Trainer nor Fabric, and there are several ranks, so that its methods do "
    "not know which tokens this one has. Call them on the module that is given to trainer.fit or "
    "fabric.setup; with Fabric those of fabric.strategy do the same."
)


def check_not_deepspeed(strategy: object, what: str) -> None:
    """Check that the strategy is not DeepSpeed's, which has its own engine, groups and checkpoints.

    Args:
        strategy: the strategy.
        what: the caller, for the message.

    Raises:
        ConfigError: naming the engines that correspond to DeepSpeed's stages.
    """
    names = {kind.__name__ for kind in type(strategy).__mro__}
    if "DeepSpeedStrategy" in names:
        raise ConfigError(
            f"{what} does not work with {type(strategy).__name__}: DeepSpeed brings its own engine, groups "
            "and checkpoints. Use UlyssesRingStrategy(data_parallel='zero1') for its stage 1, 'fsdp' "
            "for its stages 2 and 3 (cpu_offload=True keeps state in host memory)."
        )


def _scalar(name: str, value: Any, device: torch.device) -> torch.Tensor:
    """Return a float64 scalar on the module's device, for a sum over ranks."""
    tensor = torch.as_tensor(value)
    if tensor.numel() != 1 or tensor.is_complex():
        raise ConfigError(
            f"cp_log({name!r}, total, count) takes two scalars, got a value of shape {tuple(tensor.shape)} "
            f"and type {tensor.dtype}: pass sums over what this rank holds."
        )
    return to_device(tensor.detach().to(torch.float64).reshape(()), device)


def _log_options(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    known = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise ConfigError(
            f"cp_log does not take {', '.join(unknown)}: it is a mean, weighted by its counts, over all "
            f"ranks. It takes {', '.join(known)}."
        )
    return tuple(sorted(options.items()))


def options_of(module: object) -> dict[str, Any]:
    """Return the options that a module declares; empty without the mixin."""
    if not isinstance(module, ContextParallelMixin):
        return {}
    return {
        "sequence_dims": module.context_parallel_sequence_dims,
        "label_key": module.context_parallel_label_key,
        "labels": module.context_parallel_labels,
        "num_heads": module.context_parallel_num_heads,
        "output_dims": module.context_parallel_output_dims,
        "modules": module.context_parallel_modules(),
        "replicated_metrics": module.context_parallel_replicated_metrics,
    }
