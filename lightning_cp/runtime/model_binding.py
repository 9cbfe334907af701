"""The model of a run: its swapped attention, the rules for its batches, and its patches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from lightning_cp.attention.ring_flash_attn_support import DELEGATED_KERNELS
from lightning_cp.batch import BatchRules, ShardedBatch, WholeBatch, read_batch
from lightning_cp.batch.loss_calls import LossCalls
from lightning_cp.batch.sharder import LayoutRule, already_sharded, layout_of
from lightning_cp.batch.step_state import PositionInfo, StepState
from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError, UndeclaredError
from lightning_cp.kernels.auto import Tiles
from lightning_cp.kernels.protocol import Request
from lightning_cp.kernels.select import explain_kernels
from lightning_cp.layout import CostModel, SequenceLayout
from lightning_cp.layout.cost import HeadCounts
from lightning_cp.memory.activations import recompute_blocks
from lightning_cp.memory.chunked_logits import chunk_heads
from lightning_cp.memory.tiled_mlp import tile_mlps
from lightning_cp.models.blocks import attends, members
from lightning_cp.models.guards.noise import check_training_noise
from lightning_cp.models.guards.shifts import watch_shifts
from lightning_cp.models.handle import Listener, SwapHandle
from lightning_cp.models.hf.labels import label_alignment
from lightning_cp.models.hf.positions import accept_default_positions, takes_extra
from lightning_cp.models.qk_scores import MaxLogits, ScoreCallback
from lightning_cp.models.structure import expected_heads, expected_mask
from lightning_cp.models.swap import hf_models, swap_attention
from lightning_cp.optim.qk_clip import QKClip
from lightning_cp.optim.qk_layers import check_no_norms
from lightning_cp.randomness.functions import patch_random_functions
from lightning_cp.randomness.token_draws import TokenDraws
from lightning_cp.runtime.mesh_builder import MeshBuilder
from lightning_cp.utils.containers import memory_of, tensors_of
from lightning_cp.utils.patching import StepPatches, add_hook
from lightning_cp.utils.tensors import optimizer_parameters
from lightning_cp.utils.tracing import exclude_from_compile

# QK-clip: attention modules report their largest scores to the optimizers of a run.


def find_clips(optimizers: Iterable[Any]) -> list[QKClip]:
    """Return the QK-clips of optimizers, also of those in Lightning's wrappers."""
    found = (getattr(_unwrap(optimizer), "qk_clip", None) for optimizer in optimizers)
    return [clip for clip in found if isinstance(clip, QKClip)]


def remap_parameters(optimizer: Optimizer, remap: Callable[[Optimizer], object]) -> None:
    """Put an engine's sharded parameters into an optimizer and its QK-clip.

    Args:
        optimizer: the user's.
        remap: the engine's method, for the optimizer alone.
    """
    before = list(optimizer_parameters(optimizer))
    remap(optimizer)
    now = dict(zip(map(id, before), optimizer_parameters(optimizer), strict=True))
    for clip in find_clips([optimizer]):
        clip.follow(now)


def score_callbacks(
    model: nn.Module, clips: Iterable[QKClip], is_probe: Callable[[], bool]
) -> dict[nn.Module, ScoreCallback]:
    """Return the modules whose scores QK-clips need, with their callbacks.

    Modules are found by their projections: the optimizers' names for them may differ from the model's.

    Args:
        model: all modules that a step calls.
        clips: of its optimizers.
        is_probe: returns True in a step that is not a step of the run.

    Raises:
        ConfigError: a module normalises queries or keys.
    """
    callbacks: dict[nn.Module, list[ScoreCallback]] = {}
    for clip in clips:
        layers = {id(weight): (layer, name) for layer, (name, weight) in clip.weights().items()}
        for module, (layer, _) in _modules_of_projections(model, layers):
            check_no_norms(layer, (name for name, _ in module.named_children()))
            callbacks.setdefault(module, []).append(partial(_note_scores, clip, layer, is_probe))
    return {module: partial(_note_all, of) for module, of in callbacks.items()}


def _modules_of_projections(
    model: nn.Module, layers: Mapping[int, tuple[str, str]]
) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
    """Find modules with a projection as a child, or as a parameter that is not called ``weight``."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if id(p) in layers and name != "weight":
                yield module, layers[id(p)]
        for child in module.children():
            # A property of the same name, as of a parametrized module, would be computed.
            p = child._parameters.get("weight")  # pyright: ignore[reportPrivateUsage]
            if id(p) in layers:
                yield module, layers[id(p)]


def _note_scores(clip: QKClip, layer: str, is_probe: Callable[[], bool], scores: MaxLogits) -> None:
    if not is_probe():
        clip.note(
            *(layer, scores.largest),
            head_dim=scores.head_dim,
            tp_rank=scores.tp_rank,
            tp_size=scores.tp_size,
        )


def _note_all(callbacks: Iterable[ScoreCallback], scores: MaxLogits) -> None:
    for note in callbacks:
        note(scores)


def _unwrap(optimizer: Any) -> Any:
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def make_step_patches(model: nn.Module, settings: StrategyConfig) -> StepPatches:
    """Return the patches of a model that save memory of long sequences within a step.

    Raises:
        ConfigError: a model without the modules to patch.
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


_OUTSIDE = (
    "{} is called with this rank's part of a batch outside of the step of that batch, so attention would be "
    "over the part alone. Call it within the step. With Fabric a step ends with the loop over its loader, "
    "with strategy.end_step(), and when another strategy is set up or begins a step: ask the loader for the "
    "next batch after the last call, or shard the whole batch once more, and have one Fabric set up all "
    "models that share a batch."
)


class StepOwner(Protocol):
    """The run that a model is bound to, with its current batch."""

    @property
    def part(self) -> ShardedBatch | None:
        """This rank's part of the current batch."""
        ...

    @property
    def in_step(self) -> bool:
        """True if a context-parallel step is current."""
        ...

    @property
    def is_probe(self) -> bool:
        """True if the current step is not a step of the run."""
        ...


class ModelBinding:
    """The model of a run: its swapped attention, the rules for its batches, and its step patches.

    Args:
        settings: the user's.
        meshes: source of the mesh.
        progress: callback of every attention call, before any communication for it.
        listeners: callbacks of every attention call; the list may grow later.
        owner: the run, which is not kept alive.
    """

    def __init__(
        self,
        settings: StrategyConfig,
        meshes: MeshBuilder,
        progress: Callable[[], None],
        listeners: list[Listener],
        owner: StepOwner,
    ) -> None:
        self._settings, self._meshes = settings, meshes
        self._progress, self._listeners = progress, listeners
        self._owner = weakref.ref(owner)
        self.model: nn.Module | None = None
        """The model whose attention is swapped."""
        self.handle: SwapHandle | None = None
        self.draws: TokenDraws | None = None
        """Random numbers per token, if ranks share a sequence."""
        self.rules = BatchRules()
        self.layout_rule = LayoutRule(settings.layout)
        self.patches = StepPatches()
        self.clips: list[QKClip] = []
        self.adds_positions = False
        """True if batches get positions also where no rank shares them."""
        self._listed: Sequence[nn.Module] | None = None
        self._attached: tuple[nn.Module, Mapping[str, Any], bool] | None = None
        self._requests: dict[Request, Tiles] = {}
        self._loss_outside, self._needs_loss = False, True

    # -- attach and detach ---------------------------------------------------------------------------

    def attach(
        self,
        model: nn.Module,
        options: Mapping[str, Any],
        *,
        needs_labels: bool,
        is_shared: bool,
    ) -> list[str]:
        """Swap the model's attention and fix how batches are read; return lines about what was swapped.

        Args:
            model: the user's module.
            options: declarations of the mixin: ``sequence_dims``, ``label_key``, ``labels``, ``modules``.
            needs_labels: the run weights a loss by labels.
            is_shared: context parallelism has something to do; else only batches are read.

        Raises:
            ConfigError: attention that cannot be swapped, or labels of unknown kind.
        """
        self._attached = model, options, needs_labels
        settings = self._settings.with_sequence_dims(options.get("sequence_dims") or {})
        self.patches.end()
        self.patches = make_step_patches(model, settings)
        if not is_shared:
            self._read_only(model, options, settings)
            return []
        self.release()
        self.rules = self._rules_of(model, options, settings, needs_labels=needs_labels)
        self.layout_rule = LayoutRule(settings.layout, expected_mask(model), self._cost_for(model))
        self._loss_outside = _declared(options, settings) != "auto"
        self._needs_loss = needs_labels
        self.model = model
        self._listed = options.get("modules")
        return [str(line) for line in self.swap(model).report]

    def _read_only(
        self, model: nn.Module, options: Mapping[str, Any], settings: StrategyConfig
    ) -> None:
        """Read batches as one process does; a model may get all entries of its batch."""
        self.adds_positions = accept_default_positions(hf_models(model))
        self.rules = self._rules_of(model, options, settings, needs_labels=False)
        if _declared(options, settings) == "auto" and not all(map(takes_extra, hf_models(model))):
            self.rules = replace(self.rules, labels="ignore")

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
            labels=resolve_labels(model, _declared(options, settings), required=needs_labels),
            padding=settings.padding,
            reads_masks=bool(hf_models(model)),
        )

    def attach_clips(self, optimizers: Iterable[Optimizer]) -> bool:
        """Connect the QK-clips of optimizers; return True if that needs ``attach_again``.

        Raises:
            ConfigError: attention whose scores its projections do not scale.
        """
        self.clips = find_clips(optimizers)
        if self.handle is not None and self.model is not None:
            self._collect(self.model, self.handle)
            return False
        return bool(self.clips) and self._attached is not None

    def attach_again(self) -> None:
        """Attach the model again, to collect its scores."""
        assert self._attached is not None
        model, options, needs_labels = self._attached
        self.attach(model, options, needs_labels=needs_labels, is_shared=True)

    def detach(self) -> None:
        """Restore the model's own attention; forget its optimizers."""
        self.clips, self._attached = [], None
        self.release()

    def release(self) -> None:
        """Restore the model's own attention."""
        self.patches.end()
        if self.handle is not None:
            self.handle.undo()
        self.handle = self.draws = None

    # -- attention ---------------------------------------------------------------------------------------

    def swap(self, model: nn.Module) -> SwapHandle:
        """Swap the model's attention on the current mesh."""
        settings, mesh = self._settings, self._meshes.mesh
        exchange = settings.attention_exchange
        handle = swap_attention(model, mesh, settings.kernel, self._listed, exchange=exchange)
        handle.progress = self._progress
        handle.listeners = self._listeners
        self.handle, self._requests = handle, handle.ranks.requests
        self._collect(model, handle)
        if mesh.cp_size > 1:
            self.draws = TokenDraws(model, handle.in_local_module)
            undo = weakref.finalize(handle, patch_random_functions())
            undo.atexit = False
            handle.on_undo(undo)
        in_probe = self._in_probe
        watch_shifts(handle, lambda: not in_probe())
        self._watch_shards(model, handle)
        return handle

    def swap_again(self) -> None:
        """Swap the attention of the same model, on another mesh than before."""
        assert self.handle is not None
        assert self.model is not None
        self.handle.undo()
        self.swap(self.model)

    def _watch_shards(self, model: nn.Module, handle: SwapHandle) -> None:
        """Refuse calls of modules with attention on a rank's part of a batch outside of its step.

        Metrics and losses are allowed there.
        """
        owner = self._owner

        def has_batch(given: Any) -> bool:
            run = owner()
            part = None if run is None else run.part
            if part is None or part.layout.cp_size == 1:
                return True
            known_memory = {memory_of(x) for _, x in tensors_of(part.batch)}
            return any(memory_of(x) in known_memory for _, x in tensors_of(given))

        handle.has_batch = has_batch

        @exclude_from_compile
        def refuse(module: nn.Module, args: Any, kwargs: Any) -> None:
            run = owner()
            if (
                run is None
                or run.in_step
                or not already_sharded(dict(tensors_of([args, kwargs])), run.part)
            ):
                return
            raise ConfigError(_OUTSIDE.format(type(module).__name__))

        for module in {model, *members(model)} - handle.local_modules:
            if attends(module):
                hook = add_hook(module.register_forward_pre_hook, refuse, with_kwargs=True)
                handle.on_undo(hook)

    def _collect(self, model: nn.Module, handle: SwapHandle) -> None:
        modules = score_callbacks(model, self.clips, self._in_probe)
        handle.collect(modules, extra_pass=any(clip.extra_pass for clip in self.clips))

    @property
    def _in_probe(self) -> Callable[[], bool]:
        """A function that returns True outside of the run's steps; it does not keep the run alive."""
        owner = self._owner

        def in_probe() -> bool:
            run = owner()
            return run is None or run.is_probe

        return in_probe

    def _cost_for(self, model: nn.Module) -> CostModel:
        """Return the cost of communication for the heads of a ring rank."""
        mesh, cost = self._meshes.mesh, self._meshes.cost
        heads, size = expected_heads(model), mesh.ulysses_size
        if heads is not None and not heads.query % mesh.tp_size and not heads.kv % mesh.tp_size:
            heads = HeadCounts(heads.query // mesh.tp_size, heads.kv // mesh.tp_size, heads.dim)
        if heads is None or heads.query % heads.kv or heads.query % size:
            return cost  # other attention is shared then
        return cost.with_heads(heads.of_ulysses_rank(size))

    def explain(self) -> str:
        """Return the kernel of each kind of attention call so far, and the reasons against other kernels."""
        if self._settings.exchange == "ring_flash_attn":
            return DELEGATED_KERNELS
        kernel = self._settings.kernel
        lines = [explain_kernels(kernel, *call) for call in self._requests.items()]
        return "\n".join(lines) or "no attention call came through context parallelism yet"

    # -- batches and steps ---------------------------------------------------------------------------------

    def state_of(
        self,
        part: ShardedBatch,
        positions: PositionInfo,
        cp_rank: int,
        *,
        trains: bool = True,
        losses: LossCalls | None = None,
    ) -> StepState:
        """Make the state of a step on a part of a batch."""
        return StepState(
            layout=part.layout,
            position_ids=part.position_ids,
            # Copies, to detect a step that changes its labels.
            aligned_labels=None if part.aligned_labels is None else part.aligned_labels.clone(),
            labels=None if part.labels is None else part.labels.clone(),
            valid_local=part.valid[cp_rank],
            real_local=part.layout.real_len(cp_rank),
            loss_outside=self._loss_outside,
            positions=positions,
            labels_read=self.rules.labels,
            needs_loss=self._needs_loss or trains,
            trains=trains,
            losses=losses,
        )

    def read(self, batch: Any) -> WholeBatch:
        """Read a whole batch by the run's rules; see ``read_batch``."""
        return read_batch(batch, self.rules, needs_labels=False)

    def layout_of(self, whole: WholeBatch) -> SequenceLayout:
        """Return the layout that a whole batch will get."""
        return layout_of(whole, self.rules, self.layout_rule, self._meshes.mesh).layout

    def check_trains(self) -> None:
        """Check, before the first step, that the model can be trained.

        Raises:
            ConfigError: noise that ranks would not draw as one process does.
        """
        if self.model is not None and self.handle is not None:
            check_training_noise(self.model, self.handle.local_modules)

    def check_labels_declared(self) -> None:
        """Check that the meaning of the labels is known, for training.

        Raises:
            ConfigError: naming the setting to declare.
        """
        if self.model is not None and self.rules.labels == "ignore":
            resolve_labels(self.model, self._settings.labels, required=True)


def _declared(options: Mapping[str, Any], settings: StrategyConfig) -> str:
    """Return the declared meaning of the labels: the module's, or else the strategy's."""
    return options.get("labels") or settings.labels


def resolve_labels(model: nn.Module, declared: str, *, required: bool) -> str:
    """Return the meaning of the labels: ``shift``, ``aligned``, ``none`` or ``ignore``.

    Raises:
        UndeclaredError: labels matter, and it is unknown whether they are shifted.
    """
    if declared in ("aligned", "shift", "none"):
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
        "target. Without labels of tokens (a reward, a class, a pair of answers), declare labels='none'."
    )
    raise UndeclaredError([question], {"labels": "aligned"})
