"""Tokens and model FLOPs of a data rank's training steps, over whole samples; the settings of their count.

FLOPs come from observed attention calls. Ranks of a run add exact sums; the peak of MFU is its devices'.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple

import lightning.fabric.strategies as of_fabric
import lightning.pytorch.strategies as of_trainer
import torch
import torch.distributed as dist
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from torch import nn

from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.batch import CountedBatch
from lightning_cp.comm.reduce import all_sum
from lightning_cp.engines.checks import mixed_precision_policy
from lightning_cp.errors import ConfigError
from lightning_cp.layout import Mask, visible_pairs
from lightning_cp.layout.axes import Flat
from lightning_cp.models.sdpa import observe_sdpa
from lightning_cp.models.structure import module_mask
from lightning_cp.models.swap import config_value, hf_models
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.utils.autograd_notes import in_backward
from lightning_cp.utils.patching import PatchSet, add_hook

_LIMB = 2**40
"""FLOPs travel as two numbers, so that sums over up to 8,192 ranks are exact in float64."""


class AttentionCall(NamedTuple):
    """The properties of a call that determine its FLOPs, together with the batch's documents."""

    rows: int
    length: int
    """Length of the whole sequence."""
    mask: Mask | None
    """``None``: a dense mask was given, which is not inspected."""
    heads: int
    """Query heads of all ranks."""
    query_dim: int
    value_dim: int

    def flops(self, pairs: int) -> int:
        """Return the FLOPs of a forward over visible pairs of all rows: q.k and p.v, 2 per multiply-add."""
        return 2 * self.heads * (self.query_dim + self.value_dim) * pairs


Tell = Callable[[AttentionCall, torch.Tensor], None]
"""Receives a call and its output."""


def shared_call(
    plan: AttentionPlan, q_BLHD: torch.Tensor, out_BLHD: torch.Tensor, sharing: int
) -> AttentionCall:
    """Return the record of a context-parallel call.

    Args:
        plan: the call's plan.
        q_BLHD: this rank's queries, before Ulysses.
        out_BLHD: the output, as wide as the values.
        sharing: the number of tensor-parallel ranks with different heads.
    """
    rows, _, heads, dim = q_BLHD.shape
    length, mask = plan.schedule.layout.seq_len, plan.schedule.mask
    return AttentionCall(rows, length, mask, heads * sharing, dim, out_BLHD.shape[3])


def observe_calls(model: nn.Module, tell: Tell) -> Callable[[], None]:
    """Report the attention calls of an unswapped model to ``tell``; return a function that ends that.

    Attention modules of Hugging Face models have causality, window and heads for each layer; for other models
    calls of ``scaled_dot_product_attention`` are observed. Compiled models are skipped: their calls are not
    made from Python.
    """
    if is_compiled(model):
        return lambda: None
    inside: list[nn.Module] = []

    def enter(module: nn.Module, *_: Any) -> None:
        inside.append(module)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inside.pop()
        out = output[0] if isinstance(output, tuple) else output
        if isinstance(out, torch.Tensor):  # not so where the module has raised
            tell(_call_of(module, out), out)

    def direct(query: Any, key: Any, attn_mask: Any, is_causal: bool, out: torch.Tensor) -> None:
        if inside or query.dim() != 4:
            return
        rows, heads, length, dim = query.shape
        is_known = attn_mask is None and length == key.shape[2]
        mask = Mask(is_causal) if is_known else None
        tell(AttentionCall(rows, length, mask, heads, dim, out.shape[3]), out)

    hooks = PatchSet()
    hooks.add(observe_sdpa(direct))
    for root in hf_models(model):
        for module in _attention_modules(root):
            hooks.add(add_hook(module.register_forward_pre_hook, enter))
            ends = {"with_kwargs": True, "always_call": True}
            hooks.add(add_hook(module.register_forward_hook, leave, **ends))
    return hooks.undo


def is_compiled(model: nn.Module) -> bool:
    """True if a part of a model is compiled, or the whole model by the Trainer."""
    return any(
        type(part).__name__ == "OptimizedModule"
        or part._compiled_call_impl is not None
        or getattr(part, "_compiler_ctx", None) is not None
        for part in model.modules()
    )


def _attention_modules(root: nn.Module) -> list[nn.Module]:
    """Return the innermost modules with a flag for causality, or known to be causal (BLOOM)."""
    said = [x for x in root.modules() if isinstance(getattr(x, "is_causal", None), bool)]
    said += [x for x in root.modules() if type(x).__name__ == "BloomAttention"]
    return [x for x in said if not any(y in said for y in list(x.modules())[1:])]


def _call_of(module: Any, out_BLE: torch.Tensor) -> AttentionCall:
    rows, length = out_BLE.shape[:2]
    config = getattr(module, "config", None)
    heads = config_value(config, "num_attention_heads") or getattr(module, "num_heads", None)
    size = config_value(config, "head_dim") or getattr(module, "head_dim", None)
    if type(heads) is not int or not isinstance(size or config_value(config, "hidden_size"), int):
        return AttentionCall(rows, length, None, 0, 0, 0)
    mask = module_mask(module)
    if config_value(config, "attention_chunk_size"):  # Llama 4: neither causal nor a window
        mask = None
    own = getattr(module, "head_dim", None) or size or config_value(config, "hidden_size") // heads
    query, value = (getattr(module, name, own) for name in ("qk_head_dim", "v_head_dim"))
    return AttentionCall(rows, length, mask, heads, query, value)


@dataclass(frozen=True)
class Work:
    """Counts of finished work, as integers, so that sums over ranks and steps are exact."""

    tokens: int = 0
    flops: int = 0
    unknown: int = 0
    """Batches with unknown FLOPs."""

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens, self.flops + other.flops, self.unknown + other.unknown
        )

    @property
    def state(self) -> dict[str, int]:
        """The state for a checkpoint."""
        return {"tokens": self.tokens, "flops": self.flops, "unknown": self.unknown}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Work:
        """Restore the counts of a checkpoint."""
        return cls(*(int(state[name]) for name in ("tokens", "flops", "unknown")))


@dataclass(eq=False)
class _MicroBatch:
    batch: CountedBatch
    flops_per_token: int | None
    forward: Counter[AttentionCall] = field(default_factory=Counter)
    backward: Counter[AttentionCall] = field(default_factory=Counter)


class StepWork:
    """Counts of micro-batches, which become work when an optimizer steps with their gradients.

    An accumulation window that is never finished, or that a resumed run repeats, does not count.
    """

    def __init__(self) -> None:
        self.reason = ""
        """The reason why FLOPs are unknown; empty if they are known."""
        self._open: list[_MicroBatch] = []
        self._stepped: list[_MicroBatch] = []
        self._current: _MicroBatch | None = None

    @property
    def counts(self) -> bool:
        """True during a training batch, to which attention calls belong."""
        return self._current is not None

    def begin(self, batch: CountedBatch, flops_per_token: int | None) -> None:
        """Begin a micro-batch of training.

        Args:
            batch: the whole batch.
            flops_per_token: FLOPs outside attention, forward and backward; ``None`` if unknown.
        """
        self._current = _MicroBatch(batch, flops_per_token)
        self._open.append(self._current)

    def note_call(self, call: AttentionCall, out: torch.Tensor) -> None:
        """Count an attention call, and its backward when a gradient reaches its output.

        Recomputation in backward (checkpointing) does not count as model FLOPs.
        """
        current = self._current
        if current is None:
            return
        if not in_backward():
            current.forward[call] += 1

        def passed(_: torch.Tensor) -> None:
            current.backward[call] += 1

        if out.requires_grad:
            out.register_hook(passed)

    def end_batch(self) -> None:
        """End the batch: later calls belong to validation or callbacks, not to training."""
        self._current = None

    def abandon(self) -> None:
        """Discard the current micro-batch, which was not trained on."""
        if self._current is not None:
            self._open.remove(self._current)
        self._current = None

    def forget_flops(self) -> None:
        """Mark the FLOPs outside attention as unknown."""
        for micro in self._open:
            micro.flops_per_token = None

    def stepped(self) -> None:
        """Record that optimizers stepped with the accumulated micro-batches."""
        self.end_batch()
        self._stepped += self._open
        self._open = []

    def take(self, *, wait: bool) -> Work:
        """Return the work of steps since the last call.

        Args:
            wait: wait for copies from the device; otherwise leave missing ones for later.
        """
        done = Work()
        while self._stepped and (wait or self._stepped[0].batch.is_ready):
            done += self._work_of(self._stepped.pop(0))
        return done

    def _work_of(self, micro: _MicroBatch) -> Work:
        if micro.batch.event is not None:
            micro.batch.event.synchronize()
        tokens = micro.batch.tokens
        attention = self._attention_flops(micro)
        if attention is None or micro.flops_per_token is None:
            return Work(tokens, 0, 1)
        return Work(tokens, micro.flops_per_token * tokens + attention, 0)

    def _attention_flops(self, micro: _MicroBatch) -> int | None:
        """Return forward FLOPs plus twice that for each backward: dQ, dK, dV and dP are four products."""
        if not micro.forward:
            self.reason = _NO_CALLS
            return None
        total = 0
        for passes, factor in ((micro.forward, 1), (micro.backward, 2)):
            for call, count in passes.items():
                flops = self._flops_of(call, micro.batch)
                if flops is None:
                    return None
                total += factor * count * flops
        return total

    def _flops_of(self, call: AttentionCall, batch: CountedBatch) -> int | None:
        documents = batch.documents
        one_for_all = documents.num_rows == 1
        fits = call.length == batch.seq_len and (one_for_all or call.rows == documents.num_rows)
        if call.mask is None or not fits:
            self.reason = _OTHER_MASK if call.mask is None else _OTHER_TOKENS
            return None
        return call.flops(visible_pairs(documents, call.mask) * (call.rows if one_for_all else 1))


_NO_CALLS = (
    "no attention call was seen (Hugging Face models and scaled_dot_product_attention are; compiled ones "
    "under context parallelism only)"
)
_OTHER_MASK = (
    "attention got a dense mask, so the visible pairs are unknown; those of causality, windows, "
    "packed documents and padding are"
)
_OTHER_TOKENS = "attention runs over other tokens than the batch's"


@dataclass(frozen=True)
class RunRanks:
    """The ranks of a run."""

    devices: int
    counts: bool
    """True if this rank counts its sample; the other ranks that share it do not."""
    group: dist.ProcessGroup | None
    """The group of all ranks; ``None`` for one rank."""
    device: torch.device
    """The device of messages."""

    def total(self, work: Work, seconds: float) -> tuple[Work, float]:
        """Return all ranks' work and mean time, by one message of 40 bytes; all ranks must call this."""
        if self.group is None:
            return work, seconds
        high, low = divmod(work.flops, _LIMB)
        own = [work.tokens, high, low, work.unknown] if self.counts else [0] * 4
        numbers = [*own, seconds / self.devices]
        sums = all_sum(torch.tensor(numbers, dtype=torch.float64, device=self.device), self.group)
        tokens, high, low, unknown, mean = sums.tolist()
        return Work(int(tokens), int(high) * _LIMB + int(low), int(unknown)), mean


def runtime_of(strategy: Any) -> ContextParallelRuntime | None:
    """Return the runtime of this package's strategy, ``None`` for another strategy."""
    runtime = getattr(strategy, "runtime", None)
    return runtime if isinstance(runtime, ContextParallelRuntime) else None


_PLAIN = (
    of_trainer.SingleDeviceStrategy,
    of_trainer.DDPStrategy,
    of_fabric.SingleDeviceStrategy,
    of_fabric.DDPStrategy,
)


def check_countable(strategy: object) -> None:
    """Check that tokens can be counted under a strategy.

    Raises:
        ConfigError: it is unknown which ranks share a sample, or parameters.
    """
    if runtime_of(strategy) is None and not isinstance(strategy, _PLAIN):
        raise ConfigError(
            f"throughput is not counted under {type(strategy).__name__}: it is unknown which of its ranks "
            "share a sample, and parameters may be in parts. What works: strategy='ulysses_ring' (with "
            "data_parallel='fsdp', 'hsdp' or 'zero1' for parameters that are sharded), 'ddp', and one device."
        )


def ranks_of(strategy: Any) -> RunRanks:
    """Return the ranks of a strategy whose process group is initialised."""
    runtime, devices = runtime_of(strategy), getattr(strategy, "world_size", 1)
    if runtime is not None:
        group = runtime.mesh.control_group(Flat.LOSS) if devices > 1 else None
        return RunRanks(devices, runtime.mesh.sample_rank == 0, group, torch.device("cpu"))
    group = dist.group.WORLD if devices > 1 else None
    return RunRanks(devices, True, group, strategy.root_device)


@dataclass(frozen=True)
class ThroughputOptions:
    """The user's options; see ``ThroughputCallback``."""

    every_n_steps: int = 50
    warmup_steps: int = 1
    peak_flops: float | None = None
    active_parameters: int | None = None
    sequence_dims: Mapping[str, int | None] | None = None

    def __post_init__(self) -> None:
        _check_count("every_n_steps", self.every_n_steps, 1, "50 logs every 50 optimizer steps")
        _check_count("warmup_steps", self.warmup_steps, 0, "1 leaves out the first, 0 none")
        if self.active_parameters is not None:
            what = "None counts the model's own; a dense model of 7e9 would say 7_000_000_000"
            _check_count("active_parameters", self.active_parameters, 1, what)
        peak: Any = self.peak_flops
        is_number = isinstance(peak, Real) and not isinstance(peak, bool)
        if peak is not None and not (is_number and 0 < float(peak) < math.inf):
            raise ConfigError(
                f"peak_flops must be the FLOP/s of one device, a positive number, got {peak!r}. 989e12 is an "
                "H100 SXM in bfloat16; None looks the device up."
            )
        dims: Any = self.sequence_dims
        if dims is not None and not isinstance(dims, Mapping):
            raise ConfigError(
                f"sequence_dims must map names of a batch's tensors to sequence dimensions, got {dims!r}. "
                "{'tokens': 1, 'weights': None} would do; None where the strategy knows them."
            )

    def with_dims(self, declared: Mapping[str, int | None]) -> ThroughputOptions:
        """Return the options with a module's declared dims; the user's take precedence."""
        return replace(self, sequence_dims={**declared, **(self.sequence_dims or {})})


def _check_count(name: str, value: object, least: int, works: str) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(
            f"{name} must be a whole number of at least {least}, got {value!r}. {works}."
        )


@dataclass(frozen=True)
class Peak:
    """The FLOP/s of one device."""

    flops: float | None
    where: str
    """The source of the peak, or the device whose peak is unknown."""


def peak_of(
    options: ThroughputOptions,
    device: torch.device,
    precision: object,
    strategy: Any,
    model: nn.Module,
) -> Peak:
    """Return the FLOP/s that MFU is a share of: the user's value, or Lightning's table of devices.

    Args:
        options: the user's options.
        device: this rank's device.
        precision: the plugin of a Trainer or a Fabric.
        strategy: has the dtype of layers that an engine casts.
        model: has the dtype of its own weights.
    """
    if options.peak_flops is not None:
        return Peak(float(options.peak_flops), "peak_flops=")
    if device.type != "cuda":
        return Peak(None, device.type)
    dtype = dtype_of(precision, strategy, model)
    name = torch.cuda.get_device_name(device)
    with warnings.catch_warnings():  # the meter reports it, once
        warnings.simplefilter("ignore")
        try:
            found = get_available_flops(device, dtype)
        except Exception:  # an unknown form of device name
            found = None
    return Peak(found, f"{name} in {str(dtype).removeprefix('torch.')}")


def dtype_of(precision: Any, strategy: Any, model: nn.Module) -> torch.dtype:
    """Return the dtype of matrix products."""
    runtime = runtime_of(strategy)
    cast = (
        None
        if runtime is None
        else mixed_precision_policy(runtime.settings.mixed_precision).param_dtype
    )
    if cast is not None:
        return cast
    asked = _plugin_to_compute_dtype(precision)
    if asked is not torch.float32:
        return asked
    matrix = next((p for p in model.parameters() if p.dim() > 1 and p.is_floating_point()), None)
    return asked if matrix is None else matrix.dtype
