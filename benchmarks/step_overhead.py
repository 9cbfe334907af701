"""The strategy's cost in a training step besides attention: sharding, agreement, bookkeeping.

    python -m benchmarks.step_overhead

A small Llama (``configs/model/llama_small.yaml``) trains with the Trainer, in every mode, on one document
and on packed ones that differ in every step. All times are CPU-seconds of all threads, summed over ranks.

*own*: time within the strategy's own functions over the time of the whole step, from one batch's end to the
next one's; the mean over the steps of a repeat, of the repeat with the least. *by hand*: a loop that gets the
Trainer run's sharded batches, layouts and attention plans, scales the loss, calls the same attention,
averages gradients with the same DistributedDataParallel, clips and steps. The Trainer's additional time is
the strategy's and Lightning's together, and as noisy as the steps. The first step of a run is excluded: it
makes and compiles objects that stay.
"""

from __future__ import annotations

import functools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.markdown import markdown_head
from lightning_cp.attention.function import attend
from lightning_cp.attention.plan import AttentionPlan, make_plan
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.batch import ShardedBatch
from lightning_cp.bench.methods import log_normal
from lightning_cp.bench.processes import on_ranks
from lightning_cp.bench.timers import Figure
from lightning_cp.callback import ContextParallelCallback
from lightning_cp.comm import consensus as agreement
from lightning_cp.engines.ddp import DDPEngine
from lightning_cp.layout.axes import Flat
from lightning_cp.loaders.iterator import SynchronizedIterator
from lightning_cp.logging import reduce as ranks
from lightning_cp.logging.module_logger import ModuleLog
from lightning_cp.logging.reduce import StepLog
from lightning_cp.loss.weighting import loss_scale
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models import handle
from lightning_cp.models.hf import swap as hf
from lightning_cp.models.hf.forward import CallCheck
from lightning_cp.models.hf.labels import LossWatch
from lightning_cp.resume.trainer import TrainerResume
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.strategies.trainer import UlyssesRingStrategy
from lightning_cp.utils import console as table
from lightning_cp.utils.command_help import argument_parser
from lightning_cp.utils.console import quiet_lightning
from lightning_cp.utils.labels import IGNORED_LABEL


class OwnTime:
    """Seconds spent in watched functions by name, as ``clock`` counts them.

    A watched function counts from its call to its return, without the watched functions that it calls: these
    count under their own name, or under none.
    """

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._clock = clock
        self._names: list[str | None] = []
        self._since = 0.0
        self._undo: list[Callable[[], None]] = []

    def watch(self, owner: Any, attribute: str, name: str | None) -> None:
        """Count calls of ``owner.attribute`` under a name; ``None``: under none.

        Args:
            owner: a module or a class; callers have to look the attribute up there.
            attribute: a function or method.
            name: the name under which its own time counts.
        """
        self.replace(owner, attribute, self.counted(getattr(owner, attribute), name))

    def replace(self, owner: Any, attribute: str, other: Any) -> None:
        """Replace an attribute until :meth:`unwatch`."""
        missing = object()
        before = vars(owner).get(attribute, missing)

        def undo() -> None:
            delattr(owner, attribute) if before is missing else setattr(owner, attribute, before)

        setattr(owner, attribute, other)
        self._undo.append(undo)

    def counted(self, function: Callable[..., Any], name: str | None) -> Callable[..., Any]:
        """Return the function with its time counted under a name."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.during(name):
                return function(*args, **kwargs)

        return call

    @contextmanager
    def during(self, name: str | None) -> Iterator[None]:
        """Count the block under a name."""
        self._charge()
        self._names.append(name)
        try:
            yield
        finally:
            self._charge()
            self._names.pop()

    def unwatch(self) -> None:
        """Restore every function."""
        while self._undo:
            self._undo.pop()()

    def _charge(self) -> None:
        """Add the time since the last call or return to the function that was running."""
        now = self._clock()
        if self._names and self._names[-1] is not None:
            self.seconds[self._names[-1]] += now - self._since
        self._since = now


LOADER, SHARDING, MESSAGES, RESUME = "loader", "sharding", "messages", "resume"
CALLS, LOGGING, STEP = "model calls", "logging", "step"
NAMES = (LOADER, SHARDING, MESSAGES, RESUME, CALLS, LOGGING, STEP)
_WATCHED: tuple[tuple[Any, str, str | None], ...] = (
    (SynchronizedIterator, "__next__", LOADER),
    (SynchronizedIterator, "_fetch", None),  # the user's loader
    (ContextParallelRuntime, "shard", SHARDING),
    (agreement, "gather_objects", MESSAGES),
    (ranks, "all_gather", MESSAGES),
    (dist, "all_reduce", MESSAGES),
    (TrainerResume, "start_batch", RESUME),
    (CallCheck, "_complete", CALLS),
    (LossWatch, "_leave", CALLS),
    (handle.SwapHandle, "attention", CALLS),
    (handle, "attend", None),  # attention itself
    (handle.StepState, "note_gradient", CALLS),
    (ModuleLog, "log", LOGGING),
    (StepLog, "settle", LOGGING),
    (LightningModule, "log", None),
    (ModuleLog, "end_hook", LOGGING),
    (ModuleLog, "begin_hook", LOGGING),
    (ContextParallelCallback, "on_train_batch_end", LOGGING),
    (DDPEngine, "_note_forward", STEP),
    *(
        pair
        for method in ("batch_to_device", "training_step", "optimizer_step", "reduce")
        for pair in ((UlyssesRingStrategy, method, STEP), (DDPStrategy, method, None))
    ),
    (UlyssesRingStrategy, "_backward", STEP),
    (Precision, "backward", None),
    (UlyssesRingStrategy, "_finalize_gradients", STEP),
)
"""The strategy's functions in a training step, by purpose.

Time begins to count where Lightning, PyTorch, the model or the user's step calls the package, and stops where
the package calls back (parents' methods, the user's step, backward, attention itself). Sums of small tensors
and agreements count as messages, whatever calls them.
"""


def watch_strategy(time_of: OwnTime) -> None:
    """Start counting the strategy's own time; call this before a Trainer is made."""
    for owner, attribute, name in _WATCHED:
        time_of.watch(owner, attribute, name)
    for factory in ("attention_function", "mask_function"):  # they return what the model calls
        _watch_made(time_of, hf, factory, CALLS)


def _watch_made(time_of: OwnTime, owner: Any, factory: str, name: str) -> None:
    make = getattr(owner, factory)

    def counted(*args: Any, **options: Any) -> Any:
        return time_of.counted(make(*args, **options), name)

    time_of.replace(owner, factory, counted)


VOCAB = 256
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """A Llama over bytes, as in ``configs/model/llama_small.yaml``, trained on random rows."""

    tokens: int = 4096
    packed: int = 0
    """Documents of log-normal lengths in each row, different in every row; 0 is one document."""
    hidden: int = 256
    layers: int = 2
    heads: int = 8
    kv_heads: int = 2
    seed: int = 0
    hooks: bool = False
    """True: add a callback with a hook at batch ends, which could log."""
    states: int = 0
    """Callbacks with a state of ``History.LENGTH`` numbers."""

    def network(self) -> Any:
        """Return the model, always with the same weights."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(self.seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.tokens,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    def rows(self, count: int) -> list[Batch]:
        """Return samples; packed ones have positions that restart, without a target where they do."""
        generator = torch.Generator().manual_seed(self.seed)
        found: list[Batch] = []
        for index in range(count):
            ids = torch.randint(0, VOCAB, (self.tokens,), generator=generator)
            row = {"input_ids": ids, "labels": ids.clone()}
            if self.packed:
                documents = log_normal(self.tokens, self.packed, self.seed + index, sigma=1.5)
                positions = torch.cat([torch.arange(e - s) for s, e in documents.rows[0]])
                row["labels"][positions == 0] = IGNORED_LABEL
                row["position_ids"] = positions
            found.append(row)
        return found


CLIP = 1.0


@dataclass
class StepTimes:
    """CPU time of a run's steps on one rank."""

    cpu: list[float] = field(default_factory=list)
    """CPU-seconds of the process, all threads, by step."""
    own: list[dict[str, float]] = field(default_factory=list)
    """CPU-seconds within the strategy's functions by name, by step."""


class Module(pl.LightningModule):
    """The main job's step: the model's own loss, logged."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The mean cross-entropy."""
        loss = self.network(**batch).loss
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with the main job's settings."""
        return _optimizer(self.network)


def train_by_trainer(job: Job, settings: dict[str, Any], steps: int) -> Recorder:
    """Train on this rank; the first step sets up and is excluded."""
    _set_launch_variables()
    time_of = OwnTime()
    recorder = Recorder(time_of)
    recorder.watch()
    try:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=UlyssesRingStrategy(**settings, parity_check="off"),  # it repeats itself once
            max_steps=steps + 1,
            gradient_clip_val=CLIP,
            callbacks=[*([Hooks()] if job.hooks else []), *map(History, range(job.states))],
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader: Any = DataLoader(job.rows(steps + 1), batch_size=1)  # type: ignore[arg-type]
        recorder.network = job.network()
        trainer.fit(Module(recorder.network), loader)
        recorder.trainer = trainer  # its strategy destroys the mesh when it is garbage-collected
    finally:
        time_of.unwatch()
    return recorder


class Hooks(pl.Callback):
    """A callback with a hook at batch ends, which could log."""

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Log nothing."""


class History(pl.Callback):
    """A callback with a state, which a checkpoint within a step has as of before it.

    Args:
        index: tells it from others.
    """

    LENGTH = 100

    def __init__(self, index: int) -> None:
        self.index, self.values = index, [float(at) for at in range(self.LENGTH)]

    @property
    def state_key(self) -> str:
        """Another one for each."""
        return self._generate_state_key(index=self.index)

    def state_dict(self) -> dict[str, Any]:
        """All numbers."""
        return {"values": list(self.values)}


class Recorder:
    """Record the time and the sharded batch at the end of each step, without a user callback."""

    network: Any
    trainer: Any

    def __init__(self, time_of: OwnTime) -> None:
        self.steps = StepTimes()
        self.parts: list[ShardedBatch] = []
        self.mesh: ContextParallelMesh | None = None
        self._time_of = time_of
        self._before: tuple[float, Mapping[str, float]] | None = None

    def watch(self) -> None:
        """Start recording, until ``time_of.unwatch()``."""
        watch_strategy(self._time_of)
        own = ContextParallelCallback.on_train_batch_end

        def ended(callback: Any, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
            own(callback, trainer, *args, **kwargs)
            self.take(trainer.strategy)

        self._time_of.replace(ContextParallelCallback, "on_train_batch_end", ended)

    def take(self, strategy: Any) -> None:
        """Record the end of a step; the next one begins with fetching its batch."""
        now, own = time.process_time(), dict(self._time_of.seconds)
        if self._before is not None:
            known = self._before[1]
            self.steps.cpu.append(now - self._before[0])
            self.steps.own.append({name: own[name] - known.get(name, 0.0) for name in own})
        self._before = time.process_time(), own
        self.mesh = strategy.mesh
        self.parts.append(strategy.runtime.part)


def train_by_hand(job: Job, recorder: Recorder) -> tuple[StepTimes, Any]:
    """Train the same steps with a loop of a few lines; return the times and the trained network."""
    mesh = recorder.mesh
    assert mesh is not None
    plans = [_plan(job, mesh, part) for part in recorder.parts]
    network = job.network()
    current: list[AttentionPlan] = []
    with _attention(network, current):
        model = DistributedDataParallel(network, process_group=mesh.group(Flat.LOSS))
        optimizer = _optimizer(network)
        steps = StepTimes()
        before = time.process_time()
        for part, plan in zip(recorder.parts, plans, strict=True):
            current[:] = [plan]
            optimizer.zero_grad()
            items = max(part.valid[mesh.cp_rank], 1)
            loss = model(**part.batch, num_items_in_batch=items).loss
            (loss * loss_scale(part.valid, mesh.cp_rank)).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            optimizer.step()
            now = time.process_time()
            steps.cpu.append(now - before)
            before = now
    return StepTimes(steps.cpu[1:]), network


def _plan(job: Job, mesh: ContextParallelMesh, part: ShardedBatch) -> AttentionPlan:
    local, dim = part.layout.local_len, job.hidden // job.heads
    q, k, v = (torch.empty(1, local, heads, dim) for heads in (job.heads, *(job.kv_heads,) * 2))
    plan = make_plan(q, k, v, mesh, part.layout, AttentionSpec(), "auto")
    _ = plan.hops  # made on first use, then cached
    return plan


@contextmanager
def _attention(network: Any, current: list[AttentionPlan]) -> Iterator[None]:
    """Make the model attend with the plan in ``current``."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    def function(_: Any, *inputs: Any, **__: Any) -> tuple[torch.Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in inputs[:3])
        out = attend(q, k, v, current[0])
        assert isinstance(out, torch.Tensor)
        return out.contiguous(), None

    name = "lightning_cp_by_hand"
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
    try:
        network.set_attn_implementation(name)
        yield
    finally:
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def _optimizer(network: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def _set_launch_variables() -> None:
    """Set torchrun's variables, from which Lightning reads the ranks of the running processes."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        {
            **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world},
            **{"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
            **{"TORCHELASTIC_RUN_ID": "bench"},
        }
    )


HEAD = (
    *("ranks", "mode", "documents", "step, s", "own, ms", "own / step", "spread"),
    *(f"{name}, ms" for name in NAMES),
    *("by hand, s", "Trainer / by hand"),
)
Settings = dict[str, Any]
"""The strategy's arguments."""
Repeat = tuple[StepTimes, StepTimes]
"""The steps by the Trainer, and by hand."""


@dataclass(frozen=True)
class Share:
    """CPU-seconds of a step in one repeat, summed over ranks."""

    step: float
    own: dict[str, float]
    cpu_by_hand: float

    @classmethod
    def of(cls, ranks: Sequence[Repeat]) -> Share:
        """Average over the steps of all ranks."""
        trained, looped = zip(*ranks, strict=True)
        own = {name: sum(_mean_own(steps, name) for steps in trained) for name in NAMES}
        return cls(_cpu_of_all(trained), own, _cpu_of_all(looped))

    @property
    def share(self) -> float:
        """The strategy's share of the step."""
        return sum(self.own.values()) / self.step


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="ranks that share it")
    parser.add_argument(
        "--packed", type=int, nargs="+", default=[0, 16], help="documents of a row; 0: one"
    )
    parser.add_argument("--steps", type=int, default=6, help="of a measurement")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement")
    parser.add_argument("--hooks", action="store_true", help="a callback has a hook at batch ends")
    parser.add_argument("--hidden", type=int, default=Job.hidden, help="width of the model")
    parser.add_argument("--layers", type=int, default=Job.layers, help="of the model")
    parser.add_argument("--states", type=int, default=0, help="callbacks with a state")
    options = parser.parse_args()
    model = {name: getattr(options, name) for name in ("hidden", "layers", "hooks", "states")}
    print(markdown_head(HEAD))
    for count in options.ranks:
        jobs = [Job(options.tokens, x, **model) for x in options.packed]
        every = [(name, how, job) for name, how in modes(count).items() for job in jobs]
        found = measure_shares(count, [row[1:] for row in every], options.steps, options.repeats)
        for (name, _, job), shares in zip(every, found, strict=True):
            print(table.markdown_row((count, name, job.packed or 1, *cells(shares))), flush=True)


def modes(ranks: int) -> dict[str, Settings]:
    """Return the strategy's arguments in each mode."""
    found: dict[str, Settings] = {
        "ring": {"ring_size": ranks, "ulysses_size": 1},
        "ulysses": {"ring_size": 1, "ulysses_size": ranks},
    }
    if ranks % 2 == 0 and ranks > 2:
        found["hybrid"] = {"ring_size": 2, "ulysses_size": ranks // 2}
    return found


def measure_shares(
    ranks: int, runs: Sequence[tuple[Settings, Job]], steps: int, repeats: int
) -> list[list[Share]]:
    """Measure all runs in the same processes; return one share per repeat for each run."""
    of_ranks = on_ranks(ranks, _measure_runs, runs, steps, repeats)
    return [
        [Share.of(of_repeat) for of_repeat in zip(*of_run, strict=True)]
        for of_run in zip(*of_ranks, strict=True)
    ]


def _measure_runs(
    runs: Sequence[tuple[Settings, Job]], steps: int, repeats: int
) -> list[list[Repeat]]:
    with quiet_lightning():
        return [[_repeat(how, job, steps, at) for at in range(repeats)] for how, job in runs]


def _repeat(settings: Settings, job: Job, steps: int, index: int) -> Repeat:
    this = replace(job, seed=1000 * index)  # new documents, which no cache knows
    recorder = train_by_trainer(this, settings, steps)
    return recorder.steps, train_by_hand(this, recorder)[0]


def cells(shares: Sequence[Share]) -> list[str]:
    """Return a row's cells: the repeat with the least share, and the spread of the repeats."""
    best = min(shares, key=lambda share: share.share)
    spread = Figure.of([share.share for share in shares]).spread
    ratio = min(share.step for share in shares) / min(share.cpu_by_hand for share in shares)
    return [
        f"{best.step:.3f}",
        f"{1e3 * sum(best.own.values()):.1f}",
        f"{best.share:.2%}",
        table.percent(spread),
        *(f"{1e3 * best.own[name]:.2f}" for name in NAMES),
        f"{best.cpu_by_hand:.3f}",
        f"{ratio:.3f}",
    ]


def _mean_own(steps: StepTimes, name: str) -> float:
    return mean(own.get(name, 0.0) for own in steps.own)


def _cpu_of_all(ranks: Sequence[StepTimes]) -> float:
    """Return CPU-seconds of a step, summed over ranks."""
    return sum(mean(steps.cpu) for steps in ranks)


if __name__ == "__main__":
    main()
