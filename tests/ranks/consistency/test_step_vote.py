"""NaN and infinity: every rank raises at that step, and nothing has changed."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from lightning_cp import UlyssesRingStrategy
from lightning_cp.errors import ConfigError, NonFiniteError
from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.plain_llama import PlainLlama
from tests.helpers.strategies.small import (
    RING,
    ULYSSES,
    VOCAB,
    Settings,
    Small,
    loader,
    samples,
    trainer_of,
)
from tests.ranks.runtime.test_released import ENGINES

AT = 2
"""The step that is spoilt, counted from 1; the one before it goes well."""
WHERES = ("input", "loss", "gradient", "infinite gradient")


class Spoilt:
    """Puts something that is not finite into step ``AT`` of one rank, and remembers that it did."""

    def __init__(self, where: str, rank: int | None, of: torch.nn.Module) -> None:
        self.where, self.rank, self.step, self.fired = where, rank, 0, False
        self.weight = dict(of.named_parameters())["head.weight"]
        self.weight.register_hook(self.gradient)
        of.head.register_forward_hook(self.follow)  # type: ignore[attr-defined]
        of.embed.register_forward_hook(lambda *found: self.input(found[2]))  # type: ignore[attr-defined]

    def now(self, where: str) -> bool:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        hit = self.where.endswith(where) and self.step == AT and self.rank in (None, rank)
        self.fired |= hit
        return hit

    def input(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(x.size(-1)) == 1, math.nan, x) if self.now("input") else x

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return x + math.nan if self.now("loss") else x

    def follow(self, head: torch.nn.Linear, args: Any, logits: torch.Tensor) -> None:
        """Where the weight was sharded since, it is another, without hooks."""
        if head.weight is not self.weight:
            logits.register_hook(self.gradient)

    def gradient(self, x: torch.Tensor) -> torch.Tensor:
        wrong = math.inf if self.where == "infinite gradient" else math.nan
        return torch.full_like(x, wrong) if self.now("gradient") else x


class Module(Small):
    """Adam, and something wrong at one step."""

    manual = False

    def __init__(self, where: str, rank: int | None) -> None:
        super().__init__()
        self.spoilt = Spoilt(where, rank, self.model)
        self.automatic_optimization = not self.manual
        self.before: Any = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.spoilt.step += 1
        if self.spoilt.step == AT:
            self.before = snapshot(self.model, self.trainer.optimizers[0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.spoilt.loss(self.loss(batch))
        if not self.manual:
            return loss
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="value")
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ManualModule(Module):
    manual = True


def snapshot(model: torch.nn.Module, optimizer: Any) -> Any:
    """Whole tensors: within a window of zero1 parameters are whole, and not after an error."""
    state = (dict(model.state_dict()), optimizer.state_dict()["state"])
    return copy.deepcopy(tree_map_only(DTensor, lambda x: x.full_tensor(), state))


def equal(got: Any, want: Any) -> bool:
    """Bit by bit."""
    if isinstance(got, torch.Tensor):
        return torch.equal(got, want)
    if isinstance(got, dict):
        return got.keys() == want.keys() and all(equal(got[key], want[key]) for key in got)
    if isinstance(got, tuple):
        return all(map(equal, got, want))
    return got == want


def train(
    rank: int, world_size: int, kind: type[Module], where: str, at: int | None, options: Any
) -> Any:
    """The error, and whether the module fired and is as it was."""
    options = dict(options)
    settings = options.pop("settings", RING)
    module = kind(where, at)
    trainer = trainer_of(world_size, settings, **options)
    error = ""
    try:
        trainer.fit(module, loader(12))
    except NonFiniteError as refused:
        error = str(refused)
    optimizer = trainer.optimizers[0] if trainer.optimizers else None
    same = optimizer is not None and equal(snapshot(module.model, optimizer), module.before)
    return error, module.spoilt.fired, same, trainer.global_step


CASES = {
    "by norm": (Module, {"gradient_clip_val": 0.5}),
    "by value": (Module, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}),
    "manual": (ManualModule, {"settings": ULYSSES}),
}


@pytest.mark.quick("by norm-loss", "by norm-gradient", "manual-infinite gradient")
@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize("case", CASES)
def test_a_trainer_stops(case: str, where: str) -> None:
    kind, options = CASES[case]
    ranks = run_ranks(2, train, kind, where, 1, options)
    assert [fired for _, fired, _, _ in ranks] == [False, True]
    for error, _, same, steps in ranks:
        assert error.startswith(f"step {AT}: NaN or inf in ")
        assert same
        assert steps == AT - 1
    assert ranks[0][0] == ranks[1][0]
    said = ranks[0][0]
    if where == "loss":
        assert "in the loss of rank 1." in said
    elif where == "input":  # seen by the ranks that attend to it
        assert "in the loss of rank" in said
        assert "gradients on ranks 0 and 1" in said
    else:  # averaged already
        assert "in gradients on ranks 0 and 1, first that of model.head.weight." in said


SPREAD = [name for name in ENGINES if name != "ddp"]


@pytest.mark.nightly
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize("engine", SPREAD)
def test_a_trainer_stops_where_parameters_are_spread(
    engine: str, where: str, accumulate: int
) -> None:
    count, settings = ENGINES[engine]
    options = {"settings": settings, "accumulate_grad_batches": accumulate}
    ranks = run_ranks(count, train, Module, where, 1, options, timeout=120)
    assert [fired for _, fired, _, _ in ranks] == [rank == 1 for rank in range(count)]
    step = AT if accumulate == 1 else 1  # AT is within the first window
    for error, _, same, steps in ranks:
        assert error.startswith(f"step {step}: NaN or inf in ")
        assert same
        assert steps == step - 1


@pytest.mark.nightly
@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize("engine", SPREAD)
def test_a_loop_stops_where_parameters_are_spread(engine: str, where: str, tmp_path: Path) -> None:
    count, settings = ENGINES[engine]
    ranks = run_ranks(count, loop, where, {"max_norm": 0.5}, tmp_path, settings, timeout=120)
    assert [fired for _, fired, _, _ in ranks] == [rank == 0 for rank in range(count)]
    for error, _, same, in_step in ranks:
        assert error.startswith(f"step {AT}: NaN or inf in ")
        assert (same, in_step) == (True, False)


def test_every_rank_may_be_wrong_in_an_accumulation_window() -> None:
    options = {"accumulate_grad_batches": 3}  # AT is within the first window
    for error, fired, same, steps in run_ranks(2, train, Module, "loss", None, options):
        assert error.startswith("step 1: NaN or inf in the loss of ranks 0 and 1")
        assert (fired, same, steps) == (True, True, 0)


def test_a_single_process_stops_too() -> None:
    ((error, fired, same, _),) = run_ranks(1, train, Module, "gradient", 0, {"settings": {}})
    assert error.startswith(f"step {AT}: NaN or inf in gradients on rank 0, first that of model.")
    assert fired
    assert same


@pytest.mark.quick("fp16 scaler")
@pytest.mark.parametrize("precision", ["32-true", "fp16 scaler"])
def test_left_alone(precision: str) -> None:
    settings = {**RING, "check_finite": precision != "32-true"}
    ranks = run_ranks(2, scaled, settings, precision)
    assert [fired for _, fired, _, _ in ranks] == [False, True]
    for error, _, same, _ in ranks:
        assert not error
        assert same == (precision != "32-true")  # the scaler has skipped the step by itself


def scaled(rank: int, world_size: int, settings: Any, precision: str) -> Any:
    """With a scaler whose factor is 1, or without any."""
    from lightning.pytorch.plugins import MixedPrecision

    class Scaled(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.spoilt.step == AT:
                self.trainer.should_stop = True

    module = Scaled("gradient", 1)
    torch.set_default_dtype(torch.float32)
    module.float()
    options: dict[str, Any] = {}
    if precision != "32-true":
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        options["plugins"] = [PoolEnvironment(), plugin]
    trainer = trainer_of(world_size, settings, **options)
    trainer.fit(module, loader(12))
    now = snapshot(module.model, trainer.optimizers[0])
    return "", module.spoilt.fired, equal(now, module.before), trainer.global_step


def loop(
    rank: int,
    world_size: int,
    where: str,
    clip: dict[str, float],
    folder: Path,
    settings: Settings = RING,
) -> Any:
    """A loop of the user's; what happened, and whether the model is a plain model afterwards."""
    torch.manual_seed(11)
    torch.set_default_dtype(torch.float64)
    strategy = FabricStrategy(labels="aligned", **settings)
    plugins: Any = [PoolEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    plain = PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=1)
    spoilt = Spoilt(where, 0, plain)
    setup: Any = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    model, optimizer = setup
    before: Any = None
    for batch in fabric.setup_dataloaders(loader(12), use_distributed_sampler=False):  # type: ignore[union-attr]
        spoilt.step += 1
        before = snapshot(plain, optimizer.optimizer)
        local = strategy.shard_batch(batch)
        logits = model(local["input_ids"], local["position_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), local["labels"].flatten())
        fabric.backward(spoilt.loss(loss))
        try:
            if clip:
                fabric.clip_gradients(model, optimizer, **clip)  # type: ignore[arg-type]
            optimizer.step()
        except NonFiniteError as error:
            same = equal(snapshot(plain, optimizer.optimizer), before)
            return str(error), spoilt.fired, same, strategy.runtime.in_step
        optimizer.zero_grad()
    return "", spoilt.fired, False, strategy.runtime.in_step


@pytest.mark.quick("input-{}", "gradient-{'clip_val': 0.5}")
@pytest.mark.parametrize("clip", [{}, {"max_norm": 0.5}, {"clip_val": 0.5}], ids=str)
@pytest.mark.parametrize("where", WHERES)
def test_a_loop_stops(where: str, clip: dict[str, float], tmp_path: Path) -> None:
    ranks = run_ranks(2, loop, where, clip, tmp_path)
    assert [fired for _, fired, _, _ in ranks] == [True, False]
    for error, _, same, in_step in ranks:
        assert error.startswith(f"step {AT}: NaN or inf in ")
        assert same
        assert not in_step


def floats(rank: int, world_size: int) -> str:
    """A batch with NaN in a field of its own."""
    module = Module("nowhere", None)
    rows = [{**row, "weight": torch.ones(29)} for row in samples(4)]
    rows[2]["weight"][1] = math.nan
    module.loss = lambda batch: Small.loss(module, batch) * batch["weight"].mean()  # type: ignore[method-assign]
    settings = {**RING, "sequence_dims": {"weight": None}}
    with pytest.raises(NonFiniteError) as refused:
        trainer_of(world_size, settings).fit(module, DataLoader(rows))  # type: ignore[arg-type]
    return str(refused.value)


@pytest.mark.nightly
def test_the_field_of_the_batch_is_named() -> None:
    for said in run_ranks(2, floats):
        assert "step 3: NaN or inf in the loss of ranks 0 and 1, and in gradients on ranks" in said
        assert "The batch holds NaN or inf in 'weight' on ranks 0 and 1." in said


def test_large_is_not_infinite() -> None:
    assert run_ranks(2, large) == [2, 2]


def large(rank: int, world_size: int) -> int:
    """Gradients whose squares overflow."""
    module = Small()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1e-200)  # type: ignore[method-assign]
    module.loss = lambda batch: Small.loss(module, batch) * 1e200  # type: ignore[method-assign]
    trainer = trainer_of(world_size, RING)
    trainer.fit(module, loader(4))
    return trainer.global_step


class Passes(TorchDispatchMode):
    """Counts norms of lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function.overloadpacket is torch.ops.aten._foreach_norm
        return function(*args, **(kwargs or {}))


def passes_of_steps(rank: int, world_size: int, settings: Settings) -> list[int]:
    """The passes over gradients of each optimizer step."""
    found: list[int] = []

    class Counted(Small):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            with Passes() as passes:
                super().optimizer_step(*args, **kwargs)
            found.append(passes.count)

    trainer = trainer_of(world_size, settings, gradient_clip_val=0.5)
    trainer.fit(Counted(), loader(4))
    return found


def passes_of_a_loop(rank: int, world_size: int, settings: Settings) -> list[int]:
    """The same of a loop that clips and steps."""
    strategy = FabricStrategy(labels="aligned", **settings)
    plugins: Any = [PoolEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    plain = PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=1)
    setup: Any = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    model, optimizer = setup
    found: list[int] = []
    for batch in fabric.setup_dataloaders(loader(4), use_distributed_sampler=False):  # type: ignore[union-attr]
        local = strategy.shard_batch(batch)
        logits = model(local["input_ids"], local["position_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), local["labels"].flatten())
        fabric.backward(loss)
        with Passes() as passes:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
        found.append(passes.count)
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("steps", [passes_of_steps, passes_of_a_loop])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_clipped_step_reads_its_gradients_twice(engine: str, steps: Any) -> None:
    """For the vote, and to clip; once for all parameters."""
    settings: Settings = {**RING, "data_parallel": engine}
    assert run_ranks(2, steps, settings) == [[2, 2], [2, 2]]


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_check_finite_is_a_boolean(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"check_finite must be True or False, got"):
        UlyssesRingStrategy(check_finite=value)
