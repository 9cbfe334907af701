"""The model of a run: its attention swapped, and how its batches are read."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_cp.attention.delegate import THEIR_KERNELS
from lightning_cp.batch import BatchRules, WholeBatch, read_batch
from lightning_cp.containers import memory_of, tensors_of
from lightning_cp.errors import ConfigError
from lightning_cp.faults.position import Position
from lightning_cp.kernels.api import Request, explain_kernels
from lightning_cp.layout import CostModel, SequenceLayout
from lightning_cp.layout.cost import Heads
from lightning_cp.models.blocks import attends, members
from lightning_cp.models.expected import expected_heads, expected_mask
from lightning_cp.models.hf_positions import take_positions
from lightning_cp.models.hf_signature import takes_extra
from lightning_cp.models.noise import check_training_noise
from lightning_cp.models.patches import StepPatches
from lightning_cp.models.random_functions import follow_draws
from lightning_cp.models.shifts import watch_shifts
from lightning_cp.models.swap import Listener, SwapHandle, hf_models, swap_attention
from lightning_cp.models.token_draws import TokenDraws
from lightning_cp.module_hooks import add_hook
from lightning_cp.profile.recorder import StepRecorder
from lightning_cp.strategies.arguments.settings import Settings
from lightning_cp.strategies.step.layouts import LayoutRule, layout_of
from lightning_cp.strategies.step.losses import StepLosses
from lightning_cp.strategies.step.max_logits import clips_of, collected_modules
from lightning_cp.strategies.step.patches import patches_of
from lightning_cp.strategies.step.sharding import label_kind, shared_with
from lightning_cp.strategies.watch.progress import Progress
from lightning_cp.strategies.watch.run import RunWatch
from lightning_cp.untraced import FirstCompile, untraced

_log = logging.getLogger("lightning_cp")
_OUTSIDE = (
    "{} is called with this rank's part of a batch outside of the step of that batch, so attention would be "
    "over the part alone. Call it within the step. With Fabric a step ends with the loop over its loader, "
    "with strategy.end_step(), and when another strategy is set up or begins a step: ask the loader for the "
    "next batch after the last call, or shard the whole batch once more, and have one Fabric set up all "
    "models that share a batch."
)
_COMPILES = "torch.compile begins: the first steps take longer, often by minutes"


class AttachedModel(StepLosses):
    """Facts of a run before its first batch, and its listeners."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.rules = BatchRules()
        self._requests: dict[Request, None] = {}
        self._model: nn.Module | None = None
        self._listed: Sequence[nn.Module] | None = None
        self._patches = StepPatches()
        self._attached: tuple[nn.Module, Mapping[str, Any], bool] | None = None
        self._loss_outside = False
        self._needs_loss = True
        self._gives_positions = False  # where no rank shares a batch
        self._looks_at_labels = 3  # batches, until one tells whether its dataset shifts
        self._rule = LayoutRule(settings.layout)
        self._first_compile = FirstCompile(partial(rank_zero_info, _COMPILES))
        self.recorder = StepRecorder(
            settings.profiled_steps, Path(settings.profile_folder or "profile")
        )
        self._listeners: list[Listener] = [self.recorder.note] if settings.profiled_steps else []
        self.watch = RunWatch(Position(), settings.step_timeout, settings.first_step_timeout)
        self.progress = Progress(self.watch.position)

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
        self._say_if_nothing_is_profiled()
        self.cleared.clear()  # of another model's steps, maybe
        self.follows_factors = True
        self._attached = model, options, needs_labels
        settings = self.settings.with_sequence_dims(options.get("sequence_dims") or {})
        self._patches.end()
        self._patches = patches_of(model, settings)
        if not self.enabled:
            self._gives_positions = take_positions(hf_models(model))
            self.rules = self._rules_of(model, options, settings, needs_labels=False)
            if _declared(options, settings) == "auto" and not all(
                map(takes_extra, hf_models(model))
            ):
                self.rules = replace(
                    self.rules, labels="ignore"
                )  # it may be given all of its batch
            return []
        self._take_back()
        self.rules = self._rules_of(model, options, settings, needs_labels=needs_labels)
        self._rule = LayoutRule(settings.layout, expected_mask(model), self._cost_for(model))
        self._loss_outside = _declared(options, settings) != "auto"
        self._needs_loss = needs_labels
        self._model = model
        self._listed = options.get("modules")
        handle = self._swap(model)
        return [str(line) for line in handle.report]

    def _rules_of(
        self,
        model: nn.Module,
        options: Mapping[str, Any],
        settings: Settings,
        *,
        needs_labels: bool,
    ) -> BatchRules:
        return BatchRules(
            sequence_dims=settings.sequence_dims,
            label_key=options.get("label_key") or settings.label_key,
            labels=label_kind(model, _declared(options, settings), required=needs_labels),
            padding=settings.padding,
            reads_masks=bool(hf_models(model)),
        )

    def _swap(self, model: nn.Module) -> SwapHandle:
        settings = self.settings
        exchange = settings.attention_exchange
        handle = swap_attention(model, self.mesh, settings.kernel, self._listed, exchange=exchange)
        handle.progress = self.watch.position.progress
        handle.listeners = self._listeners
        self._handle, self._requests = handle, handle.requests
        self._collect(model, handle)
        if self.mesh.cp_size > 1:
            self._draws = TokenDraws(model, handle.in_local_module)
            undo = weakref.finalize(handle, follow_draws())
            undo.atexit = False
            handle.on_undo(undo)
        watch_shifts(handle, self._when_not_aside())
        self._watch_shards(model, handle)
        return handle

    def _watch_shards(self, model: nn.Module, handle: SwapHandle) -> None:
        """Refuse calls of what attends with a rank's part of a batch outside of its step; metrics and losses
        may be called there."""
        known = weakref.ref(self)

        def has_batch(given: Any) -> bool:
            core = known()
            part = None if core is None else core.part
            if part is None or part.layout.cp_size == 1:
                return True
            known_memory = {memory_of(x) for _, x in tensors_of(part.batch)}
            return any(memory_of(x) in known_memory for _, x in tensors_of(given))

        handle.has_batch = has_batch

        @untraced
        def refuse(module: nn.Module, args: Any, kwargs: Any) -> None:
            core = known()
            if core is None or core.in_step or not shared_with([args, kwargs], core.part):
                return
            raise ConfigError(_OUTSIDE.format(type(module).__name__))

        for module in {model, *members(model)} - handle.alone:
            if attends(module):
                hook = add_hook(module.register_forward_pre_hook, refuse, with_kwargs=True)
                handle.on_undo(hook)

    def clip_for(self, optimizers: Iterable[Optimizer]) -> None:
        """The optimizers of the run are known: those with a QK-clip are told of largest scores.

        Raises:
            ConfigError: attention whose scores its projections do not scale.
        """
        self._clips = clips_of(optimizers)
        if self._handle is not None and self._model is not None:
            self._collect(self._model, self._handle)
        elif self._clips and self._attached is not None:
            model, options, needs_labels = (
                self._attached
            )  # no sample is shared: only now is it worth it
            self.attach(model, options, needs_labels=needs_labels)

    def _collect(self, model: nn.Module, handle: SwapHandle) -> None:
        is_run = self._when_not_aside()
        modules = collected_modules(model, self._clips, lambda: not is_run())
        handle.collect(modules, extra_pass=any(clip.extra_pass for clip in self._clips))

    def _when_not_aside(self) -> Callable[[], bool]:
        """True if a step is one of the run's; it does not keep the core, which refers to its handle."""
        core = weakref.ref(self)

        def is_run() -> bool:
            found = core()
            return found is not None and not found._is_aside

        return is_run

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Tell of every attention call, of models that come later too; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def follow_progress(self, model: nn.Module) -> None:
        """A model, wrapped for data parallelism, in which signs of progress are to be seen."""
        if self.watch.is_on:
            self.progress.follow(model, attention=self._handle is None)

    def end_watch(self) -> None:
        """The run is over."""
        self.watch.stop()
        self.progress.forget()

    def _say_if_nothing_is_profiled(self) -> None:
        if self.settings.profiled_steps and self.mesh.cp_size == 1 and self.mesh.data_rank == 0:
            _log.warning(
                "profile=%s records nothing: no sample is shared between ranks, so there are no hops.",
                self.settings.profile,
            )

    def _cost_for(self, model: nn.Module) -> CostModel:
        """The cost of communication for the heads of a ring rank."""
        heads, size = expected_heads(model), self.mesh.ulysses_size
        sharing = self.mesh.tp_size
        if heads is not None and not heads.query % sharing and not heads.kv % sharing:
            heads = Heads(heads.query // sharing, heads.kv // sharing, heads.dim)
        if heads is None or heads.query % heads.kv or heads.query % size:
            return self.cost  # other attention than that one is shared, then
        return self.cost.with_heads(heads.of_ulysses_rank(size))

    def explain(self) -> str:
        """The kernel of each kind of attention call so far, and why each other one was not taken."""
        kernel = self.settings.kernel
        if self.settings.exchange == "ring_flash_attn":
            return THEIR_KERNELS
        lines = [explain_kernels(kernel, request) for request in self._requests]
        return "\n".join(lines) or "no attention call came through context parallelism yet"

    def check_trains(self) -> None:
        """Refuse what no step of training could do, before the first one.

        Raises:
            ConfigError: noise that ranks would draw otherwise than one process.
        """
        if self.enabled and self._model is not None and self._handle is not None:
            check_training_noise(self._model, self._handle.alone)

    def require_label_kind(self) -> None:
        """Refuse to train where nothing says how labels are read.

        Raises:
            ConfigError: saying what to declare.
        """
        if self.enabled and self._model is not None and self.rules.labels == "ignore":
            label_kind(self._model, self.settings.labels, required=True)

    def read(self, batch: Any) -> WholeBatch:
        """A whole batch, read; see ``read_batch``."""
        return read_batch(batch, self.rules, needs_labels=False)

    def layout_for(self, whole: WholeBatch) -> SequenceLayout:
        """The layout that a whole batch will get."""
        return layout_of(whole, self.rules, self._rule, self.mesh).layout

    @property
    def model(self) -> nn.Module | None:
        """The model with the swapped attention."""
        return self._model

    def detach(self) -> None:
        """Give the model its own attention back; what optimizers there were is forgotten."""
        self._clips, self._attached = [], None
        self._take_back()

    def _take_back(self) -> None:
        self.recorder.abandon()
        self._patches.end()
        self._first_compile.end()
        if self._handle is not None:
            self._handle.undo()
        self._handle = self._part = self._loss = self._draws = None


def _declared(options: Mapping[str, Any], settings: Settings) -> str:
    """The way labels are read: the module's own setting comes first."""
    return options.get("labels") or settings.labels
