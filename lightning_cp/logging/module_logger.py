"""A module's ``log`` under context parallelism: every value is the one that one process would log.

Calls inside a step, in the hooks from there to the end of its batch, and in the hooks that end an epoch
wait in a ``StepLog`` until the ranks exchange values at the end of that step or hook. Calls anywhere else
are shown at once, and compared at the next exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial, wraps
from numbers import Integral, Real
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric, Metric

from lightning_cp import error_display
from lightning_cp.comm.consensus import gather_by_vote
from lightning_cp.comm.reduce import all_sum, any_rank
from lightning_cp.layout.axes import Flat
from lightning_cp.logging.metrics import ReplicatedMetrics
from lightning_cp.logging.reduce import (
    STEP_LOSS,
    LogCall,
    ReductionRule,
    StepLog,
    StepRanks,
    raise_refused,
)
from lightning_cp.loss.averages import RATIO_HOOK, Options, as_logged, log_token_ratio, stage_means
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.utils.patching import PatchSet, do_nothing

# Functions put in front of a module's own methods, and the hooks in which a module may log.


BATCH_ENDS = ("on_train_batch_end", "on_validation_batch_end", "on_test_batch_end")
EPOCH_ENDS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end")
_BETWEEN = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "backward",
)
"""Hooks of a training batch after its step."""


def hooks_may_log(trainer: Trainer, module: LightningModule) -> bool:
    """True if the module or a callback has hooks after the step; Lightning's own callbacks do not log
    there."""
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    own = (
        "lightning.",
        "lightning_cp.callback",
        "lightning_cp.launch.",
        "lightning_cp.strategies.",
    )
    theirs = [x for x in callbacks if not type(x).__module__.startswith(own)]
    owners = [(module, LightningModule), *((callback, Callback) for callback in theirs)]
    return any(
        hasattr(parent, hook) and is_overridden(hook, owner, parent)
        for owner, parent in owners
        for hook in (*_BETWEEN, *BATCH_ENDS)
    )


MAX_COMPARISONS = 8
"""Number of times that a metric that averages numbers is compared between ranks."""


class LoggedRun(Protocol):
    """The run whose values are logged."""

    @property
    def enabled(self) -> bool: ...
    @property
    def in_step(self) -> bool: ...
    @property
    def mesh(self) -> ContextParallelMesh: ...
    @cached_property
    def step(self) -> StepRanks: ...


class RunLog:
    """Logging of one run: of its module and its metrics, from setup until it is released.

    Args:
        run: whose steps end with one process's values.
    """

    def __init__(self, run: LoggedRun) -> None:
        self._run = run
        self._log: ModuleLog | None = None
        self._replicated: ReplicatedMetrics | None = None

    def begin(
        self, trainer: Trainer, module: LightningModule, replicated_metrics: Iterable[str]
    ) -> None:
        """Make the module log the values of one process, unless it does, or nothing is shared.

        Args:
            trainer: that runs the module.
            module: the user's.
            replicated_metrics: dotted names of metrics whose inputs are equal on ranks that share a sample.

        Raises:
            ConfigError: the module declares metrics that it does not have.
        """
        if self._run.enabled and self._log is None:
            self._replicated = ReplicatedMetrics(module, replicated_metrics, self._run.mesh)
            self._log = ModuleLog(trainer, module, self._run)

    def during_step(self) -> AbstractContextManager[None]:
        """Return a context for a step function: its logged values are reduced to one when it ends."""
        if self._log is None or not self._run.in_step:
            return nullcontext()
        return self._log.during_step()

    def note_loss(self, loss: torch.Tensor, show: Callable[[torch.Tensor], None]) -> None:
        """Note a step's loss inside ``during_step``; ``show`` receives the value of one process."""
        if self._log is not None:
            self._log.note_loss(loss, show)

    def begin_hook(self, hook: str) -> None:
        """Begin a hook: values logged in it, or in later callbacks, are reduced after all callbacks ran."""
        if self._log is not None:
            self._log.begin_hook(hook)

    def release(self) -> None:
        """Restore the module and its metrics."""
        if self._log is not None:
            self._log.release()
        if self._replicated is not None:
            self._replicated.release()
        self._log = self._replicated = None


class ModuleLog:
    """The logger between one module and Lightning, until released; made on all ranks together."""

    def __init__(self, trainer: Trainer, module: LightningModule, run: LoggedRun) -> None:
        self._trainer = trainer
        self._module = module
        self._run = run
        self._own_log = module.log
        self._patches = PatchSet()
        self._comparisons: Counter[str] = Counter()
        self._calls = StepLog(rank_zero_only(error_display.warn), self._join)
        (self._hooks_log,) = any_rank(
            [hooks_may_log(trainer, module)], self._run.mesh.control_group(Flat.LOSS)
        )
        self._install()

    # -- from the module ---------------------------------------------------------------------------

    def log(self, name: str, value: Any, options: dict[str, Any]) -> None:
        """Handle one call of ``self.log``."""
        value = whole(value)
        rule = rule_of(value, options)
        self._compare_metric(name, value)
        shown = self._step_value(value, options) if rule is ReductionRule.METRIC else value
        if rule is None or shown is None or self._module._current_fx_name is None:
            self._own_log(name, value, **options)
            return
        if not isinstance(shown, torch.Tensor):
            shown = torch.tensor(float(shown), dtype=torch.float64)
        values, where = [shown.reshape(())], self._current_hook
        if self._is_deferred(options):
            emit = self._emitter(where, name, value, options)
            self._calls.add(LogCall(name, rule, values, emit, where))
            return
        self._own_log(name, value, **self._grouped(options))
        if not options.get("rank_zero_only"):
            self._calls.add(LogCall(name, ReductionRule.SHOWN, values, do_nothing, where))

    def _compare_metric(self, name: str, value: Any) -> None:
        """Compare a metric that averages numbers between ranks, the first few times."""
        if (
            not isinstance(value, MeanMetric)
            or not self._calls.is_open
            or self._comparisons[name] >= MAX_COMPARISONS
        ):
            return
        self._comparisons[name] += 1
        self._calls.add(
            LogCall(
                name,
                ReductionRule.MEAN_METRIC,
                [numbers_in(value)],
                do_nothing,
                self._current_hook,
            )
        )

    def log_ratio(
        self, name: str, total: torch.Tensor, count: torch.Tensor, options: Options
    ) -> None:
        """Handle one call of ``cp_log``."""
        if self._calls.is_open:
            self._calls.add(self._ratio(self._current_hook, name, total, count, options))
        else:
            self._show_ratio(name, total, count, (total, count), options)

    def note_loss(self, loss: torch.Tensor, show: Callable[[torch.Tensor], None]) -> None:
        """Record a step's loss; it is reduced together with the step's logged values.

        Args:
            loss: this rank's loss.
            show: called with one process's value, unless some rank has no such loss.
        """

        def emit(value: torch.Tensor | None = None) -> None:
            if value is not None:
                show(value.to(loss))

        name = f"of shape {tuple(loss.shape)}"
        where = STEP_LOSS if loss.requires_grad else f"{STEP_LOSS}, without a graph"
        self._calls.add(LogCall(name, ReductionRule.MEAN, [loss], emit, where))

    # -- from the strategy and the callback --------------------------------------------------------

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Context of a step function: settle its calls at its end."""
        training = bool(self._trainer.training)
        to_backward = training and self._module.automatic_optimization
        self._calls.open()
        try:
            with self._run.step.gathering():
                yield
        except BaseException as error:
            self._calls.drop()
            refused = self._run.step.pop_refused()
            if to_backward and refused is not None and error is refused:
                raise_refused(refused, self._run.step)
            raise
        self._reduce_step(training, to_backward)
        self._calls.is_open = training and self._hooks_log

    def _reduce_step(self, training: bool, to_backward: bool) -> None:
        try:
            self._calls.settle(
                self._run.step, of_a_batch=True, together=training, to_backward=to_backward
            )
        except BaseException:
            self._calls.drop()
            raise

    def begin_hook(self, hook: str) -> None:
        """Begin a hook that ends a batch or an epoch (in the first callback)."""
        if hook in EPOCH_ENDS:
            self._calls.open()
        elif self._hooks_log:
            if self._calls.is_open:  # values logged since the step, for callbacks that monitor them
                self._calls.settle(self._run.step, of_a_batch=True, together=True)
            self._calls.open()

    def end_hook(self, hook: str) -> None:
        """End the hook (in the module, which is called last)."""
        if not self._calls.is_open:
            return
        training = hook.startswith("on_train")
        self._calls.settle(self._run.step, of_a_batch=hook in BATCH_ENDS, together=training)
        self._calls.is_open = False
        if hook in EPOCH_ENDS:
            self._reduce_means()

    def drop(self) -> None:
        """Drop the waiting calls."""
        self._calls.drop()

    def release(self) -> None:
        """Restore the module's own methods."""
        self._patches.undo()

    # -- helpers -----------------------------------------------------------------------------------

    @property
    def _current_hook(self) -> str:
        return str(self._module._current_fx_name)

    def _is_deferred(self, options: dict[str, Any]) -> bool:
        """True if the call waits; at an epoch's end, ``rank_zero_only`` logs rank 0's own value at
        once."""
        alone = options.get("rank_zero_only") and self._current_hook in EPOCH_ENDS
        return self._calls.is_open and not alone

    def _install(self) -> None:
        module, connector = self._module, self._trainer._logger_connector
        own_end = connector.epoch_end_reached

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            self.log(name, value, {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs})

        def log_ratio(*args: Any) -> None:
            self.log_ratio(*args)

        def epoch_end_reached() -> None:
            own_end()
            self._reduce_means()  # before Lightning, or a user's hook, asks for the values

        self._patches.put_method(module, "log", log)
        self._patches.put_method(module, RATIO_HOOK, log_ratio)
        self._patches.put_method(connector, "epoch_end_reached", epoch_end_reached)
        for hook in (*BATCH_ENDS, *EPOCH_ENDS):
            self._patches.replace(module, hook, partial(self._ending, hook))

    def _ending(self, hook: str, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def ending(*args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            self.end_hook(hook)
            return result

        return ending

    def _emitter(
        self, where: str, name: str, value: Any, options: dict[str, Any]
    ) -> Callable[..., None]:
        options = self._grouped(options)
        cache = value._forward_cache if isinstance(value, Metric) else None
        if isinstance(value, torch.Tensor) and not options.get("enable_graph"):
            value = value.detach().clone()  # the module may reuse the tensor
        elif not isinstance(
            value, (torch.Tensor, Metric)
        ):  # Lightning's dtype of the step, not of its end
            value = as_logged(torch.tensor(value, dtype=torch.float64, device=self._module.device))

        def emit(shown: torch.Tensor | None = None) -> None:
            with self._in_hook(where):
                if isinstance(value, Metric):
                    show_metric(self._own_log, name, value, cache, shown, options)
                elif shown is None:
                    self._own_log(name, value, **options)
                else:
                    self._own_log(name, in_type_of(shown, value), **options)

        return emit

    def _ratio(
        self, where: str, name: str, total: torch.Tensor, count: torch.Tensor, options: Options
    ) -> LogCall:
        def emit(*sums: torch.Tensor) -> None:
            with self._in_hook(where):
                self._show_ratio(name, total, count, sums, options)

        return LogCall(name, ReductionRule.RATIO, [total, count], emit, where, options)

    def _show_ratio(self, name: str, *values: Any) -> None:
        log_token_ratio(self._module, self._own_log, name, *values, sync_on_compute=False)

    def _reduce_means(self) -> None:
        """Sum totals and counts over all ranks; a rank that never logged a name adds zeros."""
        mesh, own = self._run.mesh, {str(k): x for k, x in stage_means(self._trainer).items()}
        group = mesh.control_group(Flat.LOSS)
        names = sorted(set().union(*gather_by_vote(sorted(own), group, what="means")))
        if not names:
            return
        sums = torch.zeros(len(names), 2, dtype=torch.float64, device=mesh.device_type)
        for at, name in enumerate(names):
            if name in own:
                sums[at] = torch.stack([own[name].total, own[name].count])
        for name, both in zip(names, all_sum(sums, mesh.group(Flat.LOSS)), strict=True):
            if name in own:
                own[name].of_all = both

    def _join(self, where: str, name: str, options: Options) -> LogCall:
        nothing = torch.zeros((), dtype=torch.float64, device=self._module.device)
        return self._ratio(where, name, nothing, nothing, options)

    def _step_value(self, metric: Metric, options: dict[str, Any]) -> torch.Tensor | None:
        """Return the value that a metric shows at this step, if it does."""
        cache, on_step = metric._forward_cache, options.get("on_step")
        if on_step is None:
            on_step = self._trainer.training and self._current_hook not in EPOCH_ENDS
        shown = on_step and isinstance(cache, torch.Tensor) and cache.numel() == 1
        return cache if shown and self._calls.is_open else None

    def _grouped(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return options that synchronise what remains once the cp group agrees: ranks with other
        samples."""
        if options.get("sync_dist_group") is not None:
            return options
        mesh = self._run.mesh
        if mesh.data_size == 1:  # no synchronization remains, and Lightning must not recommend it
            options = {**options, "sync_dist": True}
        # by name: Lightning keeps it with the Trainer, which may be copied
        return {**options, "sync_dist_group": Flat.DATA}

    @contextmanager
    def _in_hook(self, where: str) -> Iterator[None]:
        """Context in which Lightning files values under the hook that logged them."""
        now = self._module._current_fx_name
        self._module._current_fx_name = where
        try:
            yield
        finally:
            self._module._current_fx_name = now


# Kinds of values passed to ``self.log``, and their form after the reduction.


ARGUMENTS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
    "metric_attribute",
    "rank_zero_only",
)
"""Arguments of ``LightningModule.log`` after the value, by position."""


def show_metric(
    log: Callable[..., None],
    name: str,
    metric: Metric,
    cache: Any,
    shown: torch.Tensor | None,
    options: dict[str, Any],
) -> None:
    """Log a metric that shows at this step its value of then (``cache``), or the reduced one."""
    now = metric._forward_cache
    metric._forward_cache = cache if shown is None else as_logged(shown)
    try:
        log(name, metric, **options)
    finally:
        metric._forward_cache = now


def numbers_in(metric: MeanMetric) -> torch.Tensor:
    """Return the sum of a metric's numbers; 0 if it was updated with several values at a time."""
    total, weight = (torch.as_tensor(x).detach() for x in (metric.mean_value, metric.weight))
    return torch.where(weight == metric._update_count, total, 0.0).reshape(())


def in_type_of(shown: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the reduced value in the type of the original one."""
    shown = shown.to(value)
    if not value.requires_grad:
        return shown
    return shown + torch.nan_to_num(value.reshape(()) - value.detach().reshape(()))  # enable_graph


def whole(value: Any) -> Any:
    """Return a sharded value as a plain tensor on every rank, such as the norm of sharded gradients."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def rule_of(value: Any, options: dict[str, Any]) -> ReductionRule | None:
    """Return how ranks' values are combined; ``None``: not a loggable value, Lightning raises."""
    if isinstance(value, Metric):
        return ReductionRule.METRIC
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            return None
        flag, integer = value.dtype == torch.bool, not value.is_floating_point()
    elif isinstance(value, Real):  # also NumPy's float64
        flag, integer = isinstance(value, bool), isinstance(value, Integral)
    else:
        return None
    if flag or integer:
        return ReductionRule.FLAG if flag else ReductionRule.COUNT
    reduction = options.get("reduce_fx")
    if isinstance(reduction, str):
        reduction = reduction.lower()
    for rule, known in _REDUCTIONS.items():
        if reduction in known:
            return rule
    return ReductionRule.MEAN


_REDUCTIONS: dict[ReductionRule, tuple[Any, ...]] = {
    ReductionRule.SUM: ("sum", torch.sum, sum),
    ReductionRule.LARGEST: ("max", torch.max, max),
    ReductionRule.SMALLEST: ("min", torch.min, min),
}
