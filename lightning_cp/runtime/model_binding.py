"""The model of a run: its attention swapped, and how its batches are read."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_cp.attention.ring_flash_attn_support import DELEGATED_KERNELS
from lightning_cp.batch import BatchRules, WholeBatch, read_batch
from lightning_cp.batch.sharder import LayoutRule, already_sharded, layout_of
from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError, UndeclaredError
from lightning_cp.kernels.protocol import Request
from lightning_cp.kernels.select import explain_kernels
from lightning_cp.layout import CostModel, SequenceLayout
from lightning_cp.layout.cost import HeadCounts
from lightning_cp.memory.activations import recompute_blocks
from lightning_cp.memory.chunked_logits import chunk_heads
from lightning_cp.memory.tiled_mlp import tile_mlps
from lightning_cp.models.blocks import attends, members
from lightning_cp.models.guards.label_shifts import watch_shifts
from lightning_cp.models.guards.training_noise import check_training_noise
from lightning_cp.models.handle import Listener, SwapHandle
from lightning_cp.models.hf.labels import label_alignment
from lightning_cp.models.hf.positions import accept_default_positions, takes_extra
from lightning_cp.models.qk_scores import MaxLogits, ScoreCallback
from lightning_cp.models.structure import expected_heads, expected_mask
from lightning_cp.models.swap import hf_models, swap_attention
from lightning_cp.optim.qk_clip import QKClip
from lightning_cp.optim.qk_layers import check_no_norms
from lightning_cp.profile.recorder import StepRecorder
from lightning_cp.randomness.functions import patch_random_functions
from lightning_cp.randomness.token_draws import TokenDraws
from lightning_cp.runtime.step_context import StepLosses
from lightning_cp.utils.containers import memory_of, tensors_of
from lightning_cp.utils.module_hooks import add_hook
from lightning_cp.utils.patching import StepPatches
from lightning_cp.utils.tracing import FirstCompile, exclude_from_compile
from lightning_cp.watchdog.phase import Position, ProgressHooks
from lightning_cp.watchdog.watch import RunWatch

# Attention modules that tell the optimizers of a run of their largest scores (QK-clip).


def clips_of(optimizers: Iterable[Any]) -> list[QKClip]:
    """The QK-clips of optimizers, Lightning's wrappers taken off."""
    found = (getattr(_unwrapped(optimizer), "qk_clip", None) for optimizer in optimizers)
    return [clip for clip in found if isinstance(clip, QKClip)]


def adopted(optimizer: Optimizer, adopt: Callable[[Optimizer], object]) -> None:
    """Have an engine put sharded parameters into an optimizer, and its QK-clip know them.

    Args:
        optimizer: the user's.
        adopt: what the engine does.
    """
    before = list(_parameters(optimizer))
    adopt(optimizer)
    now = dict(zip(map(id, before), _parameters(optimizer), strict=True))
    for clip in clips_of([optimizer]):
        clip.follow(now)


def collected_modules(
    model: nn.Module, clips: Iterable[QKClip], is_aside: Callable[[], bool]
) -> dict[nn.Module, ScoreCallback]:
    """The modules whose attention is collected, and who is told.

    They are found by the projections that they hold: names depend on what optimizers were given.

    Args:
        model: everything that is called in a step.
        clips: of its optimizers.
        is_aside: whether a step is none of the run's.

    Raises:
        ConfigError: a module normalises queries or keys.
    """
    tells: dict[nn.Module, list[ScoreCallback]] = {}
    for clip in clips:
        layers = {id(weight): (layer, name) for layer, (name, weight) in clip.weights().items()}
        for module, (layer, _) in _holders(model, layers):
            check_no_norms(layer, (name for name, _ in module.named_children()))
            tells.setdefault(module, []).append(partial(_tell, clip, layer, is_aside))
    return {module: partial(_tell_all, of) for module, of in tells.items()}


def _holders(
    model: nn.Module, layers: Mapping[int, tuple[str, str]]
) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
    """Modules that have a projection as a child; or as a parameter of their own, under another name than
    ``weight``."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if id(p) in layers and name != "weight":
                yield module, layers[id(p)]
        for child in module.children():
            p = child._parameters.get("weight")
            if id(p) in layers:
                yield module, layers[id(p)]


def _tell(clip: QKClip, layer: str, is_aside: Callable[[], bool], told: MaxLogits) -> None:
    if not is_aside():
        clip.note(
            *(layer, told.largest),
            head_dim=told.head_dim,
            tp_rank=told.tp_rank,
            tp_size=told.tp_size,
        )


def _tell_all(tells: Iterable[ScoreCallback], told: MaxLogits) -> None:
    for tell in tells:
        tell(told)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _unwrapped(optimizer: Any) -> Any:
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


# Replacements in a model while a step is active, besides attention.


def patches_of(model: nn.Module, settings: StrategyConfig) -> StepPatches:
    """For the settings that save memory of long sequences.

    Raises:
        ConfigError: a model that does not have what is to be replaced.
    """
    patches = StepPatches()
    if settings.loss_chunk_tokens is not None:
        for head in chunk_heads(hf_models(model), settings.loss_chunk_tokens):
            patches.add(head.enter, head.report)
    if settings.mlp_tile_tokens is not None:
        for mlp in tile_mlps(model, settings.mlp_tile_tokens, settings.mlp_modules):
            patches.add(mlp.enter)
    if settings.activation_checkpointing != "none":
        blocks = recompute_blocks(
            model,
            keeps_attention=settings.activation_checkpointing == "keep_attention",
            offloads=settings.activation_offload,
        )
        patches.add(blocks.enter, blocks.report)
    return patches


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

    def __init__(self, settings: StrategyConfig) -> None:
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
        self.progress = ProgressHooks(self.watch.position)

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
            self._gives_positions = accept_default_positions(hf_models(model))
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
        settings: StrategyConfig,
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
            undo = weakref.finalize(handle, patch_random_functions())
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

        @exclude_from_compile
        def refuse(module: nn.Module, args: Any, kwargs: Any) -> None:
            core = known()
            if core is None or core.in_step or not already_sharded([args, kwargs], core.part):
                return
            raise ConfigError(_OUTSIDE.format(type(module).__name__))

        for module in {model, *members(model)} - handle.local_modules:
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
            heads = HeadCounts(heads.query // sharing, heads.kv // sharing, heads.dim)
        if heads is None or heads.query % heads.kv or heads.query % size:
            return self.cost  # other attention than that one is shared, then
        return self.cost.with_heads(heads.of_ulysses_rank(size))

    def explain(self) -> str:
        """The kernel of each kind of attention call so far, and why each other one was not taken."""
        kernel = self.settings.kernel
        if self.settings.exchange == "ring_flash_attn":
            return DELEGATED_KERNELS
        lines = [explain_kernels(kernel, request) for request in self._requests]
        return "\n".join(lines) or "no attention call came through context parallelism yet"

    def check_trains(self) -> None:
        """Refuse what no step of training could do, before the first one.

        Raises:
            ConfigError: noise that ranks would draw otherwise than one process.
        """
        if self.enabled and self._model is not None and self._handle is not None:
            check_training_noise(self._model, self._handle.local_modules)

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


def _declared(options: Mapping[str, Any], settings: StrategyConfig) -> str:
    """The way labels are read: the module's own setting comes first."""
    return options.get("labels") or settings.labels


def label_kind(model: nn.Module, declared: str, *, required: bool) -> str:
    """The way labels are read: ``shift``, ``aligned`` or ``ignore``.

    Raises:
        UndeclaredError: labels matter, and nothing says whether they are shifted.
    """
    if declared in ("aligned", "shift"):
        return declared
    kinds = {label_alignment(root) for root in hf_models(model)}
    if len(kinds) == 1 and None not in kinds:
        return str(kinds.pop())
    if not required:
        return "ignore"
    names = [
        type(part).__name__ for part in (model if isinstance(model, nn.ModuleList) else [model])
    ]
    question = (
        f"it is not known how {', '.join(names)} reads its labels. A step that shifts them itself "
        "(logits[:, :-1], labels[:, 1:]) is silently wrong at every seam between ranks. Shift them in the "
        "dataset (labels[i] is the target of token i) and declare labels='aligned'; or leave the dataset as "
        "it is, declare labels='shift', and compute the loss of all logits with batch['shift_labels'], which "
        "is there where ranks share a sequence. There must be one label per token, -100 where there is no "
        "target; a label per sequence cannot be weighted."
    )
    raise UndeclaredError([question], {"labels": "aligned"})
