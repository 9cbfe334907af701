"""ContextParallelStrategy: arguments, components and public methods of both strategies.

The Trainer's strategy and Fabric's differ only in their callers: each puts this class in front of its
``DDPStrategy``, and overrides the hooks of that in one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast
from weakref import finalize

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_cp import error_display
from lightning_cp.checkpoint.pretrained.strategy_argument import Pretrained
from lightning_cp.config import (
    AttentionSettings,
    BatchSettings,
    CheckpointSettings,
    DiagnosticsSettings,
    MemorySettings,
    MeshSettings,
    ShardingSettings,
    explicit_cp_size,
)
from lightning_cp.consistency.settings import check_same_start
from lightning_cp.consistency.step_vote import OptimizerStep, StepVote
from lightning_cp.engines.base import engine
from lightning_cp.engines.ddp_comm_hook import ARGUMENTS as HOOK
from lightning_cp.engines.ddp_comm_hook import (
    CommHook,
    check_ddp_only,
    check_known_options,
    without_defaults,
)
from lightning_cp.errors import ConfigError
from lightning_cp.launch.library_warnings import LibraryWarnings
from lightning_cp.launch.ranks import (
    check_ranks,
    check_start_method,
    check_sweep_launcher,
    wait_for_gloo_at_exit,
)
from lightning_cp.layout import LayoutChoice
from lightning_cp.layout.axes import Flat
from lightning_cp.loaders.shared_loader import LoaderSynchronizer
from lightning_cp.loss.sequence import Index
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.randomness.token_draws import Per, draw_per
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.strategies.validation import check_backend, check_group_timeout, make_config
from lightning_cp.utils.patching import PatchSet
from lightning_cp.watchdog.watch import name_of

if TYPE_CHECKING:
    from lightning_cp.checkpoint.manager import CheckpointManager


class LightningStrategy(Protocol):
    """Attributes of Lightning's two ``DDPStrategy`` classes that this file reads."""

    cluster_environment: Any
    launcher: Any
    num_nodes: int
    num_processes: int
    _start_method: str
    _process_group_backend: str | None

    @property
    def world_size(self) -> int: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def root_device(self) -> torch.device: ...


class ContextParallelStrategy:
    """Puts the sequence on a mesh axis: Ulysses inside, a ring outside, data parallel around both.

    An unmodified ``training_step`` gives the loss, gradients and weights of one process.

    Args:
        context_parallel_size: ranks that share a sample; ``auto``: all ranks that the other sizes leave.
        mode: division of a sequence: ``ulysses`` (an all-to-all trades sequence for heads), ``ring`` (keys
            and values travel from rank to rank), ``hybrid`` (a ring of Ulysses groups), ``zigzag_llama3``
            (a ring axis with ``exchange="all_gather"``, also around Ulysses, with ``ulysses_size``), or
            ``auto`` (as much Ulysses as the heads allow, ring for the rest). ``ulysses_only`` and
            ``ring_only`` are aliases.
        ulysses_size: ranks that trade sequence for heads; must divide the number of heads.
        ring_size: ranks that K/V travel around.
        num_heads: query heads, for a mesh that is made before the model, or for a model that does not
            declare them.
        exchange: movement of keys and values on the ring axis: ``ring`` (hop by hop, only those that
            another rank needs), ``rotation`` (all of them, from each rank to the next: for nodes with few
            network cards), ``all_gather`` (all at once), or ``ring_flash_attn`` (by that package, where it
            is exact).
        forward_execution: forward with gathered keys: ``two_kernel`` (one kernel call per chunk of queries,
            with the least memory) or ``fused`` (one call, with copies of the keys that several chunks see).
        backward_execution: the same for backward.
        kv_heads_per_gather: K/V heads that are gathered at a time, which bounds the memory; ``None``: all
            heads at once.
        data_parallel: storage of the model: ``ddp`` (whole on every rank), ``fsdp`` (sharded over all
            ranks), ``hsdp`` (sharded within groups of ranks, with one copy per group), or ``zero1``
            (optimizer state and gradients sharded, parameters whole from a step's forward to its backward).
        data_parallel_size: groups of ranks with different samples.
        data_parallel_replicate_size: copies of the model with ``hsdp``; must divide ``data_parallel_size``.
        tensor_parallel_size: ranks that share each layer, next to each other; with ``fsdp`` or ``hsdp``.
        layout: tokens that each rank holds: ``contiguous`` (one stretch of the sequence), ``zigzag`` (even
            work on one causal document), ``balanced`` (even work on packed and padded rows), or ``auto``
            (the layout that is predicted to be the fastest, for each batch). Every layout is exact.
        kernel: kernel of attention: ``aten`` (PyTorch's own operators), ``flash_attn`` (the packages), the
            name of one kernel, such as ``triton`` (ours) or ``reference``, or ``auto`` (the first kernel
            that can do the call).
        token_weighting: weights of targets: ``micro_batch`` (the loss is the mean over each micro-batch, as
            with DDP; data ranks and the micro-batches of an accumulation window have equal weights) or
            ``global`` (all targets have equal weights, over data ranks and over an accumulation window).
        loss_reduction: reduction of the loss over its targets; ``mean`` is the only one. A step computes a
            sum with ``sequence_sum``.
        labels: meaning of the labels: ``auto`` (for Hugging Face models that are called with ``labels=``:
            labels are shifted on the whole sequence), ``shift`` (the same, and the step takes its targets
            from ``batch["shift_labels"]``), ``aligned`` (``labels[i]`` is the target of token i; any other
            module must declare this), or ``none`` (no labels of tokens: a loss of whole sequences, or of
            ``count_targets``).
        label_key: dotted name of the labels in a batch; an index for a tuple, such as ``"1"``.
        sequence_dims: dotted name of a batch tensor -> its sequence dimension, for names that are not
            known; ``None`` as the dimension: every rank gets the whole tensor.
        padding: pad sequences that do not divide, which is exact, and free in attention; ``False`` refuses
            them.
        batch_sync: reading of batches: ``check`` (every rank reads, and all ranks compare what they read)
            or ``broadcast`` (the first rank of each cp group reads for the group).
        parity_check: comparison with one process: ``first_batch`` (before the first step and before the
            third, a prefix of the batch goes through the user's step on one process and context parallel; a
            difference of losses, logits or gradients stops the run), ``every_<n>`` (again after every n
            optimizer steps), or ``off`` or ``None``. With Fabric a check is made only when the loop calls
            ``check_parity``.
        parity_tokens: tokens of the parity check's prefix, all rows together.
        profile: a training step, or several, to record, counted from 1: when each rank computes,
            communicates and waits. ``None`` records nothing.
        profile_folder: folder for the records, with a folder such as ``step-3`` for each; ``None``:
            ``profile`` in the Trainer's log folder, or with Fabric in the working directory.
        pretrained: weights to begin with: the path of a Hugging Face checkpoint (safetensors), or a mapping
            with ``path`` and options of ``load_pretrained`` (``dtype``, ``strict``, ``keys``, ...). Each
            rank reads only what it holds. The model may be on the meta device.
        check_finite: stop all ranks before any rank steps, if a loss or a gradient of one rank is NaN or
            inf. A ``GradScaler``, which expects them, is left alone. ``False``: step all the same.
        checkpoint: form of checkpoints: ``full`` (one file that plain PyTorch and Lightning read) or
            ``sharded`` (a folder to which every rank writes what it holds).
        async_save: write checkpoints during training, from a copy in memory.
        tensor_parallel_plan: layers that tensor parallelism shares, and how: ``None`` (those of llama-like
            models), a mapping from patterns of module names to styles
            (``{"layers.*.mlp.up_proj": "colwise"}``), or a function of (module, device_mesh).
        wrap_modules: modules whose parameters engines that shard gather together, as class names or
            patterns of module names (``"LlamaDecoderLayer"``, ``"model.layers.*"``). ``None`` finds the
            blocks.
        mixed_precision: dtype in which engines that shard gather and use parameters (``"bfloat16"``;
            gradients are then added in float32), or a ``MixedPrecisionPolicy``.
        cpu_offload: engines that shard keep parameters, gradients and optimizer state in host memory.
        bucket_cap_mb: MiB of gradients that ``ddp`` reduces together, or ``"per_parameter"``; ``None``:
            PyTorch's 25.
        chunked_loss: compute the loss of a Hugging Face model with a language-modelling head for this many
            tokens at a time, so that only their logits exist; ``True``: 1024.
        tiled_mlp: compute the MLP of each block for this many tokens at a time, forward and again in
            backward, and keep nothing inside; ``True``: 4096.
        mlp_modules: modules that ``tiled_mlp`` is for, as class names or patterns of module names; ``None``
            finds the MLPs of the blocks.
        activation_checkpointing: layers that are computed again in backward: ``none``, ``blocks`` (only
            their inputs are kept), or ``keep_attention`` (blocks, but the results of attention are kept as
            well, so that no communication is repeated).
        activation_offload: keep in (pinned) host memory what activation checkpointing keeps.
        step_timeout: seconds within a step after which ranks that make no progress end, and name the rank
            that they wait for; ``auto``: 120, and 360 on CUDA; ``None``: ranks do not watch each other.
        first_step_timeout: the same for the first step, and for everything outside of steps; ``None``: no
            limit there.
        key_gradients: dtype in which a ring sends gradients of keys and values home: ``accumulate`` (that
            of their sums, float32 for 16-bit inputs) or ``compute`` (that of the inputs: half the bytes,
            and each hop's part is rounded once).
        mesh: ``MeshSettings``, or a mapping of its settings, in place of single arguments.
        attention: ``AttentionSettings``, or a mapping of its settings, in place of single arguments.
        batch: ``BatchSettings``, or a mapping of its settings, in place of single arguments.
        sharding: ``ShardingSettings``, or a mapping of its settings, in place of single arguments.
        memory: ``MemorySettings``, or a mapping of its settings, in place of single arguments.
        checkpoints: ``CheckpointSettings``, or a mapping of its settings, in place of single arguments.
        diagnostics: ``DiagnosticsSettings``, or a mapping of its settings, in place of single arguments.
        **kwargs: as for ``DDPStrategy`` (``process_group_backend``, ``timeout``, ``start_method``, ...).

    Raises:
        ConfigError: a setting that is unknown, not available yet, or contradicts another one.
    """

    # docs/generate_settings.py writes the settings here and above.
    def __init__(
        self,
        context_parallel_size: int | str = "auto",
        mode: str = "auto",
        ulysses_size: int | None = None,
        ring_size: int | None = None,
        num_heads: int | None = None,
        exchange: str = "ring",
        forward_execution: str = "two_kernel",
        backward_execution: str = "two_kernel",
        kv_heads_per_gather: int | None = 1,
        data_parallel: str = "ddp",
        data_parallel_size: int = 1,
        data_parallel_replicate_size: int = 1,
        tensor_parallel_size: int = 1,
        layout: str = "auto",
        kernel: str = "auto",
        token_weighting: str = "micro_batch",
        loss_reduction: str = "mean",
        labels: str = "auto",
        label_key: str = "labels",
        sequence_dims: Mapping[str, int | None] | None = None,
        padding: bool = True,
        batch_sync: str = "check",
        parity_check: str | None = "first_batch",
        parity_tokens: int = 4096,
        profile: int | Sequence[int] | None = None,
        profile_folder: str | None = None,
        pretrained: Any = None,
        check_finite: bool = True,
        checkpoint: str = "full",
        async_save: bool = False,
        tensor_parallel_plan: Any = None,
        wrap_modules: str | Sequence[str] | None = None,
        mixed_precision: Any = None,
        cpu_offload: bool = False,
        bucket_cap_mb: float | str | None = None,
        chunked_loss: bool | int = False,
        tiled_mlp: bool | int = False,
        mlp_modules: str | Sequence[str] | None = None,
        activation_checkpointing: str = "none",
        activation_offload: bool = False,
        step_timeout: float | str | None = "auto",
        first_step_timeout: float | None = 600.0,
        key_gradients: str = "accumulate",
        *,
        mesh: MeshSettings | Mapping[str, Any] | None = None,
        attention: AttentionSettings | Mapping[str, Any] | None = None,
        batch: BatchSettings | Mapping[str, Any] | None = None,
        sharding: ShardingSettings | Mapping[str, Any] | None = None,
        memory: MemorySettings | Mapping[str, Any] | None = None,
        checkpoints: CheckpointSettings | Mapping[str, Any] | None = None,
        diagnostics: DiagnosticsSettings | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        settings = make_config(locals())
        check_group_timeout(kwargs.get("timeout"))
        super().__init__(**kwargs)  # written like this, LightningCLI finds DDPStrategy's arguments
        hook = {name: kwargs.get(name) for name in (*HOOK, "model_averaging_period")}
        self._ddp_kwargs = {  # Fabric's has no arguments for hooks
            name: x for name, x in self._ddp_kwargs.items() if name not in hook
        }
        self._ddp_options = without_defaults(self._ddp_kwargs)
        check_known_options(self._ddp_options)
        check_ddp_only(settings.data_parallel, self._ddp_options, hook)
        check_start_method(self._lightning._start_method)
        self._settings = settings
        self._comm_hook = CommHook.of(hook, explicit_cp_size(settings))
        self._make_components()

    # -- components of a run -------------------------------------------------------------------------

    def _make_components(self) -> None:
        """Make everything that belongs to one run; a copy of the strategy makes its own."""
        lasting = set(vars(self))
        settings = self._settings
        self._patches = PatchSet()
        self.runtime = ContextParallelRuntime(settings)
        self.engine = engine(settings, self._comm_hook)
        self.engine.before_exchange = self.runtime.before_data
        self.runtime.follow_unreduced(self.engine.unreduced_gradients)
        self._pretrained = Pretrained(settings.pretrained, offload=settings.cpu_offload)
        self._vote = StepVote(settings.check_finite, self.runtime.losses.counts)
        self._loaders = LoaderSynchronizer(self.runtime)
        self._library_warnings = LibraryWarnings()
        finalize(self, self._library_warnings.show)
        self._watch_ends_with_process = False
        self._make_own_components()
        self._components = (
            {*vars(self)} - lasting | {"_components"} | _made_on_first_use(type(self))
        )

    @cached_property
    def _manager(self) -> CheckpointManager:
        from lightning_cp.checkpoint.manager import CheckpointManager

        settings = self._settings
        return CheckpointManager(settings.checkpoint, in_background=settings.async_save)

    def _make_own_components(self) -> None:
        """Make the components that the other strategy does not have."""
        raise NotImplementedError

    _ddp_kwargs: dict[str, Any]  # of Lightning's class
    _components: set[str]
    """Names of the attributes that ``_make_components`` makes."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings and Lightning's attributes; groups, threads and files belong to this run."""
        parent: Any = super()
        state: dict[str, Any] = parent.__getstate__()
        return {name: x for name, x in state.items() if name not in self._components}

    def __setstate__(self, state: dict[str, Any]) -> None:
        take: Any = getattr(super(), "__setstate__", vars(self).update)
        take(state)
        self._make_components()

    def __repr__(self) -> str:
        """Return the class and its twin: Lightning shows it if it gets the wrong one."""
        kind = type(self)
        return f"<{kind.__module__}.{kind.__qualname__}, for {self._made_for}>"

    _made_for: ClassVar[str]
    """Caller of this strategy, and the strategy for the other caller."""

    @property
    def _lightning(self) -> LightningStrategy:
        """This strategy, as Lightning's class."""
        return cast("LightningStrategy", self)

    # -- public questions ----------------------------------------------------------------------------

    @property
    def mesh(self) -> ContextParallelMesh:
        """The process groups, from setup on; earlier if the number of heads is given."""
        return self.runtime.mesh

    @property
    def layout_choice(self) -> LayoutChoice | None:
        """With ``layout="auto"``: the layout of the current batch, and the predicted cost of each."""
        return self.runtime.records.layout_choice

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks with different samples: samplers shard over these, not over the world size."""
        return self._settings.data_parallel_size

    @property
    def data_rank(self) -> int:
        """The number of this rank's sample, below ``data_parallel_size``."""
        own = self._lightning
        return self.runtime.meshes.data_rank(own.global_rank, own.world_size)

    def explain(self) -> str:
        """Return the kernel of each kind of attention call so far, and the reasons against other kernels."""
        return self.runtime.binding.explain()

    def unshard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return the whole tensor for a local one of the current step, in original order and length.

        Differentiable. Every rank calls it, and gets the same; a loss of it has the gradients of one process.
        """
        return self.runtime.step.unshard(x, dim)

    def sequence_sum(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return sums over whole rows or packed documents, as ``ContextParallelMixin.sequence_sum``."""
        return self.runtime.step.sequence_sum(x, mask)

    def sequence_mean(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return means over whole rows or packed documents, as ``ContextParallelMixin.sequence_mean``."""
        return self.runtime.step.sequence_mean(x, mask)

    def sequence_pick(
        self, x: torch.Tensor, index: Index, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return one token of each row or document, as ``ContextParallelMixin.sequence_pick``."""
        return self.runtime.step.sequence_pick(x, index, mask)

    def draw_whole(
        self, draw: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dim: int = 1
    ) -> torch.Tensor:
        """Return this rank's part of whole random numbers, as ``ContextParallelMixin.draw_whole``."""
        return self.runtime.step.draw_whole(draw, x, dim)

    def gather_data(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of all data ranks, as ``ContextParallelMixin.gather_data``."""
        return self.runtime.step.gather_data(x)

    def count_targets(self, counted: torch.Tensor | float) -> torch.Tensor:
        """Declare the targets that the step's loss counts, as ``ContextParallelMixin.count_targets``.

        Averages of the step use it, too. Each call adds one number per rank on the device; the host waits for
        the sum only with ``token_weighting="global"``.

        Raises:
            ConfigError: not a count, or a second count for the same loss; in validation, a count of padding.
        """
        return self.runtime.step.count_targets(counted)

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over the group, weighted by targets: the value of one process in this step."""
        return self.runtime.step.average(value)

    def token_mean(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return (sum of totals) / (sum of counts) over the group: the mean of one process.

        Args:
            total: a scalar, a sum over this rank's tokens; ignored where ``count`` is 0.
            count: a scalar, the number of summands.
        """
        return self.runtime.token_mean(total, count)

    def token_positions(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return int64 [B or 1, L]: the positions of a step's tokens in the whole sequence, 0 for padding."""
        return self.runtime.step.token_positions(x, dim)

    def token_mask(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return bool [1, L]: tokens without added padding, as ``ContextParallelMixin.token_mask``."""
        return self.runtime.step.token_mask(x, dim)

    def draw_per(self, what: Per) -> AbstractContextManager[None]:
        """Set the unit of random numbers within the block: each ``"token"``, or each ``"row"`` of the batch.

        Use it for dropout and random functions whose tensor's shape does not show the unit: numbers of tokens
        differ between ranks that share a sample, those of rows (of parameters, of layers) are equal on them.
        """
        return draw_per(what)

    def progress(self) -> None:
        """Report progress of this rank: call it during long work of yours, from any thread, at any rate.

        The watch ends a run without progress on any rank for ``first_step_timeout`` outside of steps, or
        ``step_timeout`` within a step. It does not see work outside of the strategy, such as the preparation
        of data, an evaluation, or an upload.
        """
        self.runtime.watch.position.progress()

    def wait_for_saves(self) -> None:
        """Wait until the save in the background is complete. Collective.

        Raises:
            CheckpointError: on every rank: it failed on some.
        """
        self._manager.finish()

    # -- processes -----------------------------------------------------------------------------------

    def _check_ranks(self) -> None:
        """Check that all ranks have started; without shared samples, training shows it, as with DDP."""
        own = self._lightning
        if self._settings.context_parallel_size != 1:
            check_ranks(
                own.cluster_environment, own._start_method, own.num_processes, own.num_nodes
            )

    def _hide_library_warnings(self) -> None:
        """Hide warnings on all ranks but the first, also of loggers made since the last call."""
        if self._lightning.global_rank > 0:
            self._library_warnings.hide()

    def _check_launcher(self) -> None:
        own = self._lightning
        check_backend(own._process_group_backend)
        processes = own.num_nodes * own.num_processes
        check_sweep_launcher(own.cluster_environment, own._start_method, processes)

    def _check_world(self) -> None:
        world, rank, own = dist.get_world_size(), dist.get_rank(), self._lightning
        if world != own.world_size:
            raise ConfigError(
                f"the Trainer wants {own.world_size} processes, but torch.distributed was initialised with "
                f"{world} before. Start a fresh process for each run."
            )
        if rank != own.global_rank:  # a worker that was forked with its parent's group
            raise ConfigError(
                f"this process is rank {own.global_rank}, but torch.distributed was initialised as rank "
                f"{rank} before. Start a fresh process for each run."
            )

    def _begin_watch(self, precision: object, trainer: Any = None) -> None:
        own, runtime, settings = self._lightning, self.runtime, self._settings
        name = name_of(own.global_rank, own.world_size, settings)
        launches = bool(getattr(own.launcher, "procs", None))
        error_display.set_place(
            error_display.ProcessPlace(own.global_rank, name, own.num_processes, launches=launches)
        )
        check_same_start(settings, trainer, self._compared_options(precision))
        address = own.cluster_environment.main_address
        handles = trainer is not None  # the Trainer stops all ranks at one step
        runtime.watch.begin(
            settings, address, own.launcher, handles_sigterm=handles, device=own.root_device
        )
        if not self._watch_ends_with_process:  # there may be many stages
            self._watch_ends_with_process = True
            # Not a method of the runtime: that refers to the model, the Trainer and so to this strategy.
            # Nor weakref.finalize: a forked process ends without atexit, and would look killed.
            Finalize(self, runtime.watch.stop, exitpriority=1)
            Finalize(self, runtime.progress.forget, exitpriority=1)
            wait_for_gloo_at_exit()

    def _compared_options(self, precision: object) -> dict[str, object]:
        """Return options of Lightning's that must be equal on all ranks."""
        kind = (type(precision).__qualname__, getattr(precision, "precision", None))
        return {**self._ddp_options, **vars(self._comm_hook), "precision": kind}

    def _build_mesh(self, model: nn.Module | None = None, num_heads: int | None = None) -> None:
        from lightning_cp.engines.tensor_parallel import is_shared

        if model is not None and is_shared(model):
            model = (
                None  # it has a rank's heads only, which were checked when its layers were sharded
            )
        self._hide_library_warnings()
        self.runtime.end_other_steps()
        own = self._lightning
        factors = self.runtime.meshes.build(
            own.world_size, own.root_device.type, own.num_processes, model, num_heads
        )
        if factors is not None:
            rank_zero_info(
                f"context parallel: ulysses {factors.ulysses_size} x ring {factors.ring_size} "
                f"({factors.why}), data parallel {self.data_parallel_size}, layout "
                f"{self._settings.layout}"
            )

    # -- the model -------------------------------------------------------------------------------------

    def _wrap(self, module: nn.Module, methods: Sequence[str] = ("forward",)) -> nn.Module:
        self._load_whole(module)
        device, options = self._lightning.root_device, self._ddp_options
        wrapped = self.engine.wrap(module, self.mesh, device, options, methods)
        if self.engine.shards:
            from lightning_cp.checkpoint.pretrained.adapters import guard_merge
            from lightning_cp.checkpoint.pretrained.export import guard_save_pretrained

            self._pretrained.load(module, device)
            guard_save_pretrained(module)
            guard_merge(module)
        self.runtime.follow_progress(wrapped)
        return wrapped

    def _load_whole(self, module: nn.Module) -> None:
        """Load pretrained weights before a module is moved and wrapped; sharded modules load them later."""
        if not self.engine.shards:
            from lightning_cp.checkpoint.pretrained.meta_init import check_has_values

            self._pretrained.load(module, self._lightning.root_device)
            check_has_values(module, self.engine.name)

    def _remap_optimizer(self, optimizer: Optimizer) -> None:
        """Put sharded parameters into an optimizer in place of the whole ones."""
        from lightning_cp.runtime.model_binding import remap_parameters

        remap_parameters(optimizer, self.engine.remap_optimizer)

    # -- a step ------------------------------------------------------------------------------------------

    def _note_loss(self, loss: torch.Tensor, optimizers: Iterable[Optimizer]) -> None:
        """Note a loss before its backward; without gradients, drop the notes of a failed window."""
        if self._vote.has_records and not self._has_gradients(optimizers):
            self._vote.forget()
        self._vote.note_loss(self.runtime.step.local_loss(loss))

    def _has_gradients(self, optimizers: Iterable[Optimizer]) -> bool:
        groups = (group for each in optimizers for group in each.param_groups)
        filled = any(p.grad is not None for group in groups for p in group["params"])
        return filled or any(True for _ in self.engine.unreduced_gradients())

    def _check_finite(
        self, number: int, optimizer: Optimizer, model: nn.Module, precision: object
    ) -> None:
        """Check that complete gradients are finite on all ranks, before the step. Collective."""
        mesh = self.runtime.meshes.mesh
        sample = (mesh.data_rank, mesh.sample_size)
        step = OptimizerStep(number, optimizer, model, self.runtime.step.batch, sample)
        group = mesh.everyone if self._lightning.world_size > 1 else None
        self._vote.before_step(step, group, getattr(precision, "scaler", None))

    def _group_of_sum(self, group: Any, reduce_op: Any) -> Any:
        """Return the group of a sum over all ranks: tensor-parallel ranks have the same values."""
        sums = isinstance(reduce_op, str) and reduce_op.lower() == "sum"
        if group is None and sums and self._settings.tensor_parallel_size > 1:
            return self.mesh.group(Flat.LOSS)
        return group


def _made_on_first_use(kind: type) -> set[str]:
    """Return the names of a class's cached properties."""
    of_all = (item for each in kind.__mro__ for item in vars(each).items())
    return {name for name, x in of_all if isinstance(x, cached_property)}


def integers_to_float64(x: Any, reduce_op: Any) -> Any:
    """Return integers as float64 for a mean over ranks, which Lightning would truncate.

    Its epoch means divide by the mean of the ranks' batch sizes.
    """
    mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    integer = isinstance(x, torch.Tensor) and not (x.is_floating_point() or x.is_complex())
    return x.to(torch.float64) if mean and integer else x
