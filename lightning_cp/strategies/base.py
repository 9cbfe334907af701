"""Common parts of the Trainer's strategy and Fabric's: their arguments, and how they wrap models.

Two strategies of two Lightning classes differ in who calls them, and in nothing else: each puts this class
in front of its own ``DDPStrategy``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing.util import Finalize
from typing import Any, ClassVar
from weakref import finalize

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_cp import error_display as console
from lightning_cp.checkpoint.pretrained.export import guard_save_pretrained
from lightning_cp.checkpoint.pretrained.meta_init import check_has_values
from lightning_cp.checkpoint.pretrained.strategy_argument import Pretrained
from lightning_cp.config import explicit_cp_size
from lightning_cp.consistency.finite import FiniteGuard, Step
from lightning_cp.consistency.settings import require_same_start
from lightning_cp.engines.base import engine
from lightning_cp.engines.ddp_options import ARGUMENTS as HOOK
from lightning_cp.engines.ddp_options import CommHook, require_ddp, require_known, without_defaults
from lightning_cp.engines.tensor_parallel import is_shared
from lightning_cp.errors import ConfigError
from lightning_cp.launch.library_warnings import LibraryWarnings
from lightning_cp.launch.ranks import check_ranks, check_start_method, refuse_foreign_launcher
from lightning_cp.launch.rendezvous import MeetsAnew, let_gloo_rest_at_exit
from lightning_cp.launch.worker_results import reporting
from lightning_cp.layout import LayoutChoice
from lightning_cp.layout.axes import Flat
from lightning_cp.loaders.synchronized import LoadsTogether
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.randomness.token_draws import Per, draw_per
from lightning_cp.runtime.runtime import ContextParallelCore
from lightning_cp.strategies.validation import check_backend, check_group_timeout, checked
from lightning_cp.utils.patching import PatchSet
from lightning_cp.watchdog.watch import name_of

# Questions to a strategy: who a rank is, whole tensors and one process's values.


class Answers:
    """Comes before a ``DDPStrategy``; asks the core."""

    _core: ContextParallelCore

    @property
    def mesh(self) -> ContextParallelMesh:
        """The process groups; available from setup on, earlier if the number of heads is given."""
        return self._core.mesh

    @property
    def layout_choice(self) -> LayoutChoice | None:
        """With ``layout="auto"``: the layout of the current batch, and what each was predicted to cost."""
        return self._core.layout_choice

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks with different samples: what samplers shard over, not the world size."""
        return self._core.settings.data_parallel_size

    @property
    def data_rank(self: Any) -> int:
        """The number of this rank's sample, of ``data_parallel_size`` ones."""
        return self._core.data_rank(self.global_rank, self.world_size)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks that share a sample draw the same one."""
        return {"num_replicas": self.data_parallel_size, "rank": self.data_rank}

    def explain(self) -> str:
        """The kernel of each kind of attention call so far, and why each other one was passed over."""
        return self._core.explain()

    def unshard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """A local tensor of the current step, whole, in original order and length, on every rank.

        Differentiable. A loss of it is the same on every rank, and its gradients are those of one process.
        """
        return self._core.unshard_tensor(x, dim)

    def count_targets(self, counted: torch.Tensor | float) -> torch.Tensor:
        """Declare what the loss of this step counts, where that is not the batch's labels.

        For targets that the step draws or leaves out, for weights of classes or of tokens, and for a mean by
        hand. Every rank calls it, before backward; a Hugging Face model that is given ``labels=`` is
        called after it. Averages of the step follow it too. Each call adds up one number per rank on the
        device, which the host does not wait for (with ``token_weighting="global"`` it does).

        Args:
            counted: a mask of this rank's tokens, their weights, or how many targets this rank counts. All
                leave out padding, see ``token_mask``: it is refused before a weight changes.

        Returns:
            The count of this rank, and 1 where it is 0: what a sum over targets is to be divided by.

        Raises:
            ConfigError: no count, or a second one for the same loss; in validation, one of padding.
        """
        return self._core.count_targets(counted)

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over the group, weighted by targets: what one process would show of this step."""
        return self._core.average(value)

    def token_mean(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """(sum of totals) / (sum of counts) over the group: the mean that one process would show.

        Args:
            total: a scalar, the sum over what this rank holds; not looked at where ``count`` is 0.
            count: a scalar, how many it is the sum of.
        """
        return self._core.token_mean(total, count)

    def token_positions(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """int64 [B or 1, L]: the positions of a step's tokens in the whole sequence, 0 for padding."""
        return self._core.token_positions(x, dim)

    def token_mask(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """bool [1, L]: true for tokens of the sequence, false for padding that the strategy added.

        For masks that a step draws or makes of inputs. Padding of the batch's own is true.
        """
        return self._core.token_mask(x, dim)

    def draw_per(self, what: Per) -> AbstractContextManager[None]:
        """A block within which random numbers are of each ``"token"``, or of each ``"row"`` of the batch.

        For dropout and random functions of tensors whose shape does not tell: numbers of tokens differ
        between ranks that share a sample, those of rows (of parameters, of layers) are equal on them.
        """
        return draw_per(what)


# Before the first batch: processes are there, know each other, and have a mesh.


class Processes:
    """Comes before a ``DDPStrategy``, which has the launcher and the environment."""

    _ends_watch = False
    """Its end is the watch's, too."""

    def tell_rank(self: Any) -> None:
        """Have Lightning know which rank a worker is, before it says anything as the first one."""
        tell = getattr(self, "set_world_ranks", None) or self._set_world_ranks  # Fabric's
        tell()

    def _hide_library_warnings(self: Any) -> None:
        """On ranks that are not the first; also those of loggers that were made since the last call."""
        if self.global_rank > 0:
            self._library_warnings.hide()

    def _check_ranks(self: Any) -> None:
        """Where no sample is shared, whoever trains finds out, as with DDP."""
        if self._settings.context_parallel_size != 1:
            check_ranks(
                *(self.cluster_environment, self._start_method, self.num_processes, self.num_nodes)
            )

    def _configure_launcher(self: Any) -> None:
        parent: Any = super()
        parent._configure_launcher()
        self._launcher = reporting(self._launcher)

    def _begin_watch(self: Any, trainer: Any = None) -> None:
        settings, started = self._core.settings, bool(getattr(self.launcher, "procs", None))
        name = name_of(self.global_rank, self.world_size, settings)
        console.set_place(
            console.ProcessPlace(self.global_rank, name, self.num_processes, launches=started)
        )
        require_same_start(settings, trainer, self._chosen_besides())
        address = self.cluster_environment.main_address
        handles = trainer is not None  # the Trainer stops all ranks at one step
        self._core.watch.begin(settings, address, self.launcher, handles_sigterm=handles)
        if not self._ends_watch:  # there may be many stages
            self._ends_watch = True
            # Not the core's method: the core knows the model, that the Trainer, and that this strategy.
            # Nor weakref.finalize: a forked process ends without atexit, and would be taken for killed.
            Finalize(self, self._core.watch.stop, exitpriority=1)
            Finalize(self, self._core.progress.forget, exitpriority=1)
            let_gloo_rest_at_exit()

    def _chosen_besides(self: Any) -> dict[str, object]:
        """Settings of Lightning's that ranks have to agree on."""
        plugin = self.precision_plugin if hasattr(self, "precision_plugin") else self.precision
        precision = (type(plugin).__qualname__, getattr(plugin, "precision", None))
        return {**self._ddp_options, **vars(self._comm_hook), "precision": precision}

    def _check_launcher(self: Any) -> None:
        check_backend(self._process_group_backend)
        processes = self.num_nodes * self.num_processes
        refuse_foreign_launcher(self.cluster_environment, self._start_method, processes)

    def _check_world(self: Any) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        if world != self.world_size:
            raise ConfigError(
                f"the Trainer wants {self.world_size} processes, but torch.distributed was initialised with "
                f"{world} before. Start a fresh process for each run."
            )
        if rank != self.global_rank:  # a worker that was forked with its parent's group
            raise ConfigError(
                f"this process is rank {self.global_rank}, but torch.distributed was initialised as rank "
                f"{rank} before. Start a fresh process for each run."
            )

    def _build_mesh(
        self: Any, model: nn.Module | None = None, num_heads: int | None = None
    ) -> None:
        if model is not None and is_shared(model):
            model = None  # it tells of a rank's own heads; they were looked at when it was shared
        self._hide_library_warnings()
        self._core.end_other_steps()
        factors = self._core.build_mesh(
            self.world_size, self.root_device.type, self.num_processes, model, num_heads
        )
        if factors is not None:
            rank_zero_info(
                f"context parallel: ulysses {factors.ulysses_size} x ring {factors.ring_size} "
                f"({factors.why}), data parallel {self.data_parallel_size}, layout "
                f"{self._core.settings.layout}"
            )


class ContextParallelFront(MeetsAnew, Processes, LoadsTogether, Answers):
    """Puts the sequence on a mesh axis: Ulysses inside, a ring outside, data parallel around both.

    An unmodified ``training_step`` gives the loss, gradients and weights of one process.

    Args:
        context_parallel_size: ranks that share a sample; ``auto``: all that the others leave.
        mode: ``auto`` (Ulysses as far as the heads allow, ring for the rest), ``ulysses``, ``ring``,
            ``hybrid``, or ``zigzag_llama3`` (a ring axis with ``exchange="all_gather"``; also around
            Ulysses, with ``ulysses_size``); ``ulysses_only`` and ``ring_only`` are aliases.
        ulysses_size: ranks that trade sequence for heads; must divide the number of heads.
        ring_size: ranks that K/V travel around.
        num_heads: query heads, if the mesh is wanted before the model exists or the model does not tell.
        exchange: how keys and values move on the ring axis: ``ring`` (hop by hop, only what somebody needs)
            ``all_gather`` (all at once), or ``ring_flash_attn`` (the package of that name, where it is
            exact).
        forward_execution: of ``all_gather``: ``two_kernel`` (a kernel call per chunk of queries, least
            memory) or ``fused`` (one call, with copies of the keys that several chunks see).
        backward_execution: likewise.
        kv_heads_per_gather: of ``all_gather``: K/V heads gathered at a time, which bounds its memory;
            ``None`` gathers all heads at once.
        data_parallel: how parameters are kept: ``ddp`` (whole on every rank), ``fsdp`` (sharded over all
            ranks), ``hsdp`` (sharded within groups of ranks that have a copy each), ``zero1`` (optimizer
            state and gradients sharded, parameters whole from a step's forward to its backward).
        data_parallel_size: groups of ranks with different samples.
        data_parallel_replicate_size: of ``hsdp``: copies of the model; must divide ``data_parallel_size``.
        tensor_parallel_size: ranks that share each layer, next to each other; with ``fsdp`` or ``hsdp``.
        layout: which tokens a rank holds: ``contiguous``, ``zigzag`` (even work on one causal document),
            ``balanced`` (even work on packed and padded rows), or ``auto``: the one that is predicted to be
            the fastest for each batch. All are exact.
        kernel: ``auto``, ``aten``, ``reference``, or one kernel's own name.
        token_weighting: ``micro_batch``: the loss is the mean over each micro-batch, and data ranks and the
            micro-batches of an accumulation window weigh the same. ``global``: every target does.
        loss_reduction: ``mean`` over targets.
        labels: ``auto`` (Hugging Face models that are called with labels: shifted on the whole sequence),
            ``shift`` (the same, and the step takes its targets from ``batch["shift_labels"]``) or
            ``aligned`` (labels[i] is the target of token i), which any other module must declare.
        label_key: dotted name of the labels in a batch; an index for tuples: ``"1"``.
        sequence_dims: dotted name of a batch tensor -> its sequence dimension, ``None`` to replicate it.
        padding: pad sequences that do not divide, which is exact; ``False`` refuses them.
        batch_sync: ``check``: every rank reads, and all compare what they read; ``broadcast``: the first rank
            of each cp group reads, and the others are given its batches.
        parity_check: ``first_batch``: before the first step, a prefix of its batch goes through the user's
            step once on one process and once context parallel, and losses, logits and gradients are
            compared, and once more before the third; ``every_<n>``: again each n-th optimizer step; ``off``
            or ``None``. With Fabric nothing is, until the loop calls ``check_parity``.
        parity_tokens: of that prefix, all rows together.
        profile: a training step, or several, to be recorded, counted from 1: who computes, communicates and
            waits when. ``None`` records nothing.
        profile_folder: where a folder ``step-3`` is made for each; by default ``profile`` in the Trainer's
            log folder, or with Fabric in the working directory.
        pretrained: weights to begin with: the path of a Hugging Face checkpoint (safetensors), or a mapping
            with ``path`` and options of ``load_pretrained`` (``dtype``, ``strict``, ``keys``, ...). The model
            may be on the meta device.
        check_finite: NaN or inf in a loss or a gradient of any rank is an error on all ranks, before any of
            them steps. A ``GradScaler``, which expects them, is left alone. ``False`` steps all the same.
        checkpoint: ``full``: one file that plain PyTorch and Lightning read; ``sharded``: a folder in which
            every rank writes what it holds.
        async_save: write checkpoints while training goes on, from a copy in memory.
        tensor_parallel_plan: which layers are shared, and how: ``None`` finds those of llama-like models; or
            patterns of module names with styles (``{"layers.*.mlp.up_proj": "colwise"}``), or a function of
            (module, device_mesh).
        wrap_modules: of engines that shard: what is gathered together, as class names or patterns of module
            names (``"LlamaDecoderLayer"``, ``"model.layers.*"``); ``None`` finds the blocks.
        mixed_precision: of engines that shard: the dtype in which parameters are gathered and used
            (``"bfloat16"``; gradients are then added in float32), or a ``MixedPrecisionPolicy``.
        cpu_offload: of engines that shard: parameters, gradients and optimizer state in host memory.
        bucket_cap_mb: of ``ddp``: MiB of gradients that are reduced together, or ``"per_parameter"``.
        chunked_loss: the loss of a Hugging Face model with a language-modelling head is computed for so many
            tokens at a time, and its logits are never made; ``True``: 1024.
        tiled_mlp: the MLP of each block is computed for so many tokens at a time, forward and again in
            backward, and nothing inside is kept; ``True``: 4096.
        mlp_modules: class names or patterns of module names that ``tiled_mlp`` is of; ``None`` finds them.
        activation_checkpointing: ``"blocks"`` are computed again in backward, and their inputs alone kept;
            ``"keep_attention"``: and attention's results, so that no communication is repeated.
        activation_offload: what activation checkpointing keeps waits in (pinned) host memory.
        step_timeout: seconds within a step after which ranks that make no progress end, naming the one that
            they wait for; ``None``: ranks do not watch each other at all.
        first_step_timeout: the same for the first step, and for all that is outside of steps; ``None``: no
            limit there.
        **kwargs: as for ``DDPStrategy`` (``process_group_backend``, ``timeout``, ``start_method``, ...).

    Raises:
        ConfigError: a setting that is unknown, not available yet, or contradicts another one.
    """

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
        token_weighting: str = "micro_batch",  # noqa: S107 - no password
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
        step_timeout: float | None = 120.0,
        first_step_timeout: float | None = 600.0,
        **kwargs: Any,
    ) -> None:
        settings = checked(locals())
        check_group_timeout(kwargs.get("timeout"))
        super().__init__(**kwargs)  # written like this, LightningCLI finds DDPStrategy's arguments
        hook = {name: kwargs.get(name) for name in (*HOOK, "model_averaging_period")}
        self._ddp_kwargs = {  # Fabric's has no arguments for hooks
            name: x for name, x in self._ddp_kwargs.items() if name not in hook
        }
        self._ddp_options = without_defaults(self._ddp_kwargs)
        require_known(self._ddp_options)
        require_ddp(data_parallel, self._ddp_options, hook)
        check_start_method(self._start_method)
        self._settings = settings
        self._comm_hook = CommHook.of(hook, explicit_cp_size(settings))
        self._prepare()

    def _prepare(self) -> None:
        """Make what one run uses."""
        settings = self._settings
        self._core = ContextParallelCore(settings)
        self._engine = engine(settings, self._comm_hook)
        self._engine.before_data = self._core.before_data
        self._core.follow_unreduced(self._engine.unreduced)
        self._pretrained = Pretrained(settings.pretrained, offload=settings.cpu_offload)
        self._guard = FiniteGuard(settings.check_finite, self._core.counts)
        self._replaced = PatchSet()
        self._library_warnings = LibraryWarnings()
        finalize(self, self._library_warnings.show)
        self._prepare_saves()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and what Lightning keeps; groups, threads and files are of this run."""
        parent: Any = super()
        state: dict[str, Any] = parent.__getstate__()
        return {name: x for name, x in state.items() if name not in self._of_a_run}

    def __setstate__(self, state: dict[str, Any]) -> None:
        take: Any = getattr(super(), "__setstate__", vars(self).update)
        take(state)
        self._prepare()

    _of_a_run: ClassVar[frozenset[str]] = frozenset(
        {
            *("_adopted", "_announced", "_before", "_callback", "_core", "_ends_watch", "_engine"),
            *(
                "_guard",
                "_library_warnings",
                "_loaders",
                "_pretrained",
                "_replaced",
                "_resume",
                "_saved_kinds",
            ),
            *("_saved_names", "_saver", "_trains_on", "parity"),
        }
    )
    """Attributes that are made again in a copy, by ``_prepare`` or in its own run."""
    _ddp_kwargs: dict[str, Any]  # a DDPStrategy's, as all else that is looked up on `self: Any`
    _start_method: str
    _prepare_saves: Callable[[], None]

    def __repr__(self) -> str:
        """Lightning shows it where it is given another Lightning's strategy."""
        kind = type(self)
        return f"<{kind.__module__}.{kind.__qualname__}, for {self._made_for}>"

    _made_for: ClassVar[str]
    """Whose strategy this is, and which one is for the other."""

    def _wrap(self: Any, module: nn.Module, methods: Sequence[str] = ("forward",)) -> nn.Module:
        self._load_whole(module)
        options = self._ddp_options
        wrapped = self._engine.wrap(module, self.mesh, self.root_device, options, methods)
        if not self._whole:
            self._pretrained.load(module, self.root_device)
            guard_save_pretrained(module)
        self._core.follow_progress(wrapped)
        return wrapped

    @property
    def _whole(self: Any) -> bool:
        """True if every rank holds whole parameters."""
        return not self._engine.shards

    def _load_whole(self: Any, module: nn.Module) -> None:
        """Pretrained weights, before a module is moved and wrapped; what is sharded gets them afterwards."""
        if self._whole:
            self._pretrained.load(module, self.root_device)
            check_has_values(module, self._engine.name)

    def _note_loss(self, loss: torch.Tensor, optimizers: Iterable[Optimizer]) -> None:
        """Before a backward: with no gradient left, notes are of a window that an error has ended."""
        if self._guard.has_notes and not self._has_gradients(optimizers):
            self._guard.forget()
        self._guard.note_loss(self._core.own_loss(loss))

    def _has_gradients(self, optimizers: Iterable[Optimizer]) -> bool:
        groups = (group for each in optimizers for group in each.param_groups)
        filled = any(p.grad is not None for group in groups for p in group["params"])
        return filled or any(True for _ in self._engine.unreduced())

    def _before_step(
        self: Any, number: int, optimizer: Optimizer, model: nn.Module, precision: object
    ) -> None:
        """Gradients have their final size: all ranks look at what they have, before anything is changed."""
        sample = (self.mesh.data_rank, self.mesh.sample_size)
        step = Step(number, optimizer, model, self._core.batch, sample)
        group = self.mesh.everyone if self.world_size > 1 else None
        self._guard.before_step(step, group, getattr(precision, "scaler", None))

    def _counted_once(self, group: Any, reduce_op: Any) -> Any:
        """The ranks of a sum over all: tensor-parallel ranks have the same values."""
        sums = isinstance(reduce_op, str) and reduce_op.lower() == "sum"
        if group is None and sums and self._core.settings.tensor_parallel_size > 1:
            return self.mesh.group(Flat.LOSS)
        return group
