"""Bad input is refused at once, on every rank, with what was asked, what was got and what would work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelCallback, ContextParallelMixin, UlyssesRingStrategy
from lightning_cp.errors import (
    BatchMismatchError,
    ConfigError,
    NonFiniteError,
    RankFailure,
    ShapeError,
    UndeclaredError,
)
from lightning_cp.strategies.validation import check_backend
from tests.helpers.pool import RankError, expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.plain_llama import PlainLlama

Batch = Any
RING2 = {"ring_size": 2, "ulysses_size": 1, "labels": "aligned"}


class Module(pl.LightningModule):
    """One step of a tiny Llama; subclasses do something wrong."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = PlainLlama(num_heads=4, num_kv_heads=2, layers=1)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        logits = self.model(batch["input_ids"], batch["position_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sample(length: int = 32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 48, (length,), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def fit(
    world_size: int,
    module: pl.LightningModule,
    data: list[Any],
    settings: dict[str, Any] | None = None,
    callbacks: list[Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=UlyssesRingStrategy(**(RING2 if settings is None else settings)),
        plugins=[PoolEnvironment()],
        max_steps=len(data),
        callbacks=callbacks or [],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=1, collate_fn=collate))  # type: ignore[arg-type]
    return trainer


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"mode": "both"},
            "mode must be one of auto, ulysses, ring, hybrid, zigzag_llama3, got 'both'",
        ),
        ({"batch_sync": "off"}, "batch_sync must be one of check, broadcast, got 'off'"),
        (
            {"data_parallel": "deepspeed"},
            "data_parallel must be one of ddp, fsdp, hsdp, zero1, got 'deepspeed'",
        ),
        ({"layout": "striped"}, "layout must be one of auto, contiguous, zigzag, balanced"),
        ({"labels": "shifted"}, "labels must be one of auto, aligned, shift, none, got 'shifted'"),
        ({"kernel": "fast"}, "kernel must be one of auto, aten"),
        ({"ring_size": 0}, "ring_size must be an integer of at least 1, got 0"),
        ({"ulysses_size": -2}, "ulysses_size must be an integer of at least 1, got -2"),
        ({"ulysses_size": 2.0}, r"ulysses_size must be an integer of at least 1, got 2\.0"),
        ({"data_parallel_size": True}, "data_parallel_size must be an integer"),
        ({"context_parallel_size": "all"}, "context_parallel_size must be an integer"),
        ({"context_parallel_size": None}, "context_parallel_size is None. Leave it out"),
        (
            {"context_parallel_size": 8, "ulysses_size": 2, "ring_size": 2},
            "context_parallel_size=8 contradicts ulysses_size=2 x ring_size=2 = 4",
        ),
        ({"mode": "ulysses", "ring_size": 2}, "mode='ulysses' has ring_size=1, got ring_size=2"),
        ({"mode": "hybrid", "ring_size": 1}, "mode='hybrid' needs both axes larger than 1"),
        (
            {"ulyses_size": 2},
            r"unknown argument\(s\) ulyses_size\. Did you mean ulysses_size instead of ulyses_size\?$",
        ),
        (
            {"qqqq": 2},
            r"unknown argument\(s\) qqqq\. Settings of this strategy: context_parallel_size, mode, .*"
            "Others are DDPStrategy's",
        ),
        ({"find_unused_params": True}, "Did you mean find_unused_parameters instead"),
        ({"time_out": 5}, "Did you mean timeout instead"),
        ({"xyz": 5}, r"unknown argument\(s\) xyz\. Settings of this strategy"),
        (
            {"exchange": "mail"},
            "exchange must be one of ring, rotation, all_gather, ring_flash_attn, got 'mail'",
        ),
        (
            {"forward_execution": "one"},
            "forward_execution must be one of two_kernel, fused, got 'one'",
        ),
        (
            {"forward_execution": "fused"},
            "forward_execution='fused' says how gathered keys .* but exchange='ring' gathers none.*"
            "mode='zigzag_llama3'",
        ),
        (
            {"kv_heads_per_gather": 2},
            "kv_heads_per_gather=2 says how many .* exchange='ring' gathers",
        ),
        ({"mode": "hybrid", "backward_execution": "fused"}, "backward_execution='fused' says how"),
        (
            {"kv_heads_per_gather": 0},
            "kv_heads_per_gather must be an integer of at least 1, or None for all heads at once, got 0",
        ),
        (
            {"mode": "zigzag_llama3", "ring_size": 1},
            "gathers keys over the ring axis, got ring_size=1",
        ),
        (
            {"data_parallel": "hsdp", "data_parallel_size": 4},
            r"keeps a copy in each: say how many with data_parallel_replicate_size= .*dividing "
            r"data_parallel_size=4\)",
        ),
        (
            {
                "data_parallel": "hsdp",
                "data_parallel_size": 6,
                "data_parallel_replicate_size": 4,
            },
            "data_parallel_replicate_size=4 does not divide data_parallel_size=6.* can be 2, 3, 6",
        ),
        (
            {"data_parallel": "hsdp", "data_parallel_replicate_size": 2},
            "=2 does not divide data_parallel_size=1.* use data_parallel_size=2, or a multiple",
        ),
        *(
            (
                {"data_parallel": name, "data_parallel_replicate_size": 2},
                f"data_parallel={name!r} does not choose.*Use data_parallel='hsdp'",
            )
            for name in ("ddp", "fsdp", "zero1")
        ),
        ({"wrap_modules": "Block"}, "wrap_modules='Block' is for engines that shard .*'fsdp'"),
        ({"cpu_offload": True}, "cpu_offload=True is for engines that shard parameters"),
        ({"cpu_offload": 1}, "cpu_offload must be True or False, got 1"),
        (
            {"mixed_precision": "bfloat16"},
            "mixed_precision='bfloat16' is for engines that shard .*precision='bf16-mixed'",
        ),
        (
            {"data_parallel": "fsdp", "mixed_precision": "bf16"},
            "mixed_precision must be one of bfloat16, float16, float32, a .*, got 'bf16'",
        ),
        ({"data_parallel": "fsdp", "wrap_modules": []}, r"wrap_modules must be .*, got \[\]"),
        ({"data_parallel": "fsdp", "wrap_modules": 3}, "wrap_modules must be .*, got 3"),
        (
            {"data_parallel": "fsdp", "bucket_cap_mb": 25},
            "bucket_cap_mb=25 is the size of DistributedDataParallel's buckets, .*'fsdp'",
        ),
        (
            {"chunked_loss": 0},
            "chunked_loss must be a number of tokens .*True .1024. or False, got 0",
        ),
        ({"chunked_loss": -4}, "chunked_loss must be .* got -4"),
        ({"chunked_loss": 2.0}, "chunked_loss must be .* got 2.0"),
        ({"chunked_loss": None}, "chunked_loss must be .* got None"),
        ({"chunked_loss": "auto"}, "chunked_loss must be .* got 'auto'"),
        (
            {"chunked_loss": True, "data_parallel": "fsdp", "tensor_parallel_size": 2},
            "chunked_loss=True does not go with tensor_parallel_size=2: .* part of the vocabulary",
        ),
        ({"tiled_mlp": 0}, "tiled_mlp must be .* an MLP is computed at once.*True .4096. .* got 0"),
        ({"tiled_mlp": "auto"}, "tiled_mlp must be .* got 'auto'"),
        (
            {"tiled_mlp": 64, "data_parallel": "fsdp", "tensor_parallel_size": 2},
            "tiled_mlp=64 does not go with tensor_parallel_size=2: .* communicate for every tile",
        ),
        ({"mlp_modules": "LlamaMLP"}, "which modules tiled_mlp= is of, got tiled_mlp=False"),
        ({"tiled_mlp": True, "mlp_modules": []}, r"mlp_modules must be class names .*, got \[\]"),
        ({"tiled_mlp": True, "mlp_modules": 3}, "mlp_modules must be class names .*, got 3"),
        (
            {"activation_checkpointing": "full"},
            "activation_checkpointing must be one of none, blocks, keep_attention, got 'full'",
        ),
        ({"activation_checkpointing": True}, "activation_checkpointing must be .*got True"),
        ({"activation_offload": 1}, "activation_offload must be True or False, got 1"),
        (
            {"activation_offload": True},
            "got activation_checkpointing='none', which keeps everything. Use 'blocks' or",
        ),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be a number of MiB larger than 0, 'per_param"),
        ({"bucket_cap_mb": "each"}, "bucket_cap_mb must be a number .*, got 'each'"),
        ({"bucket_cap_mb": True}, "bucket_cap_mb must be a number .*, got True"),
        (
            {"data_parallel": "fsdp", "find_unused_parameters": True},
            "find_unused_parameters: an option of data_parallel='ddp', .* it needs none",
        ),
        (
            {"data_parallel": "zero1", "static_graph": True},
            "static_graph: an option of data_parallel='ddp', got data_parallel='zero1'",
        ),
        (
            {"data_parallel": "fsdp", "ddp_comm_hook": print},
            "ddp_comm_hook: an option of data_parallel='ddp'",
        ),
        ({"token_weighting": "step"}, "token_weighting must be one of micro_batch, global"),
        ({"loss_reduction": "sum"}, "must be one of mean, got 'sum'.*sequence_sum"),
        ({"parity_check": "first"}, "must be 'first_batch', 'off', or 'every_<n>' .*, got 'first'"),
        ({"parity_check": "every_0"}, "parity_check must be .*'every_100', got 'every_0'"),
        ({"parity_check": "every_n"}, "parity_check must be .*, got 'every_n'"),
        ({"parity_check": True}, "parity_check must be .*, got True"),
        ({"parity_tokens": 0}, "parity_tokens must be a number of tokens .*, got 0"),
        ({"parity_tokens": "all"}, "parity_tokens must be a number of tokens .*, got 'all'"),
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size=2 does not go with data_parallel='ddp': DistributedDataParallel "
            r"cannot wrap layers that are sharded \(DTensors\). Use data_parallel='fsdp' or 'hsdp'",
        ),
        ({"tensor_parallel_size": None}, "tensor_parallel_size must be an integer of at least 1"),
        (
            {"tensor_parallel_size": 0},
            "tensor_parallel_size must be an integer of at least 1, got 0",
        ),
        (
            {"tensor_parallel_plan": {"layers.*.up": "colwise"}},
            "but tensor_parallel_size=1 shares none",
        ),
        ({"tensor_parallel_plan": {}}, "must map names of modules to styles, at least one, got {}"),
        (
            {
                "tensor_parallel_plan": {"up": "diagonal"},
                "tensor_parallel_size": 2,
                "data_parallel": "fsdp",
            },
            r"tensor_parallel_plan\['up'\] must be .* one of colwise, rowwise.*got 'diagonal'",
        ),
        ({"tensor_parallel_plan": {1: "colwise"}}, "must map names of modules to styles"),
        ({"context_parallel_size": "all"}, "must be an integer of at least 1 or 'auto', got 'all'"),
        ({"label_key": ""}, "label_key must be the dotted name of the labels .* got ''"),
        ({"label_key": ["labels"]}, r"label_key must be .* got \['labels'\]"),
        ({"sequence_dims": ["a"]}, r"sequence_dims must map names to dimensions, got \['a'\]"),
        ({"sequence_dims": {"a": "1"}}, "sequence_dims must map .* got 'a': '1'"),
        ({"sequence_dims": {"a": 1.5}}, "sequence_dims must map .* got 'a': 1.5"),
        ({"timeout": 5}, "timeout must be a datetime.timedelta.*step_timeout is in seconds"),
        ({"tensor_parallel_plan": "colwise"}, "tensor_parallel_plan must be None .*got 'colwise'"),
        ({"data_parallel_replicate_size": 0}, "must be an integer of at least 1, got 0"),
    ],
)
def test_settings_are_refused_before_any_process_starts(
    settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        UlyssesRingStrategy(**settings)


def test_a_backend_that_nobody_registered() -> None:
    """Refused before processes connect, as a program may register its own after it made the strategy."""
    strategy = UlyssesRingStrategy(process_group_backend="glo")
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, logger=False, max_epochs=1
    )
    with pytest.raises(ConfigError, match=r"process_group_backend must be .*gloo.* got .glo"):
        trainer.fit(Module(), [sample()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "glo"])
        check_backend("cpu:glo,cuda:nccl")


def test_settings_of_later_features_are_taken_at_their_one_value() -> None:
    names = {
        "exchange": "ring",
        "forward_execution": "two_kernel",
        "backward_execution": "two_kernel",
        "token_weighting": "micro_batch",
        "loss_reduction": "mean",
        "tensor_parallel_size": 1,
        "data_parallel_replicate_size": 1,
    }
    assert UlyssesRingStrategy(**names).runtime.settings == UlyssesRingStrategy().runtime.settings
    for off in ("off", None, False):  # YAML reads a bare off as False
        assert UlyssesRingStrategy(parity_check=off).runtime.settings.parity_check == "off"  # type: ignore[arg-type]


def fit_with(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    fit(world_size, Module(), [sample()], settings)


@pytest.mark.quick(
    "4-settings0-*",
    "4-settings1-*",
    "4-settings4-*",
    "4-settings5-*",
    "3-settings6-*",
    "4-settings7-*",
    "4-settings8-*",
    "4-settings9-*",
    "4-settings10-*",
)
@pytest.mark.parametrize(
    ("world_size", "settings", "match"),
    [
        (4, {"ring_size": 2, "ulysses_size": 1}, "world size 4.*ring_size=2.*data_parallel_size=2"),
        (
            4,
            {"context_parallel_size": 3},
            "world size 4.*context_parallel_size=3.* 3 devices, .*, so that 4 ranks share a sample",
        ),
        (
            4,
            {"data_parallel_size": 3},
            r"data_parallel_size=3 does not divide the world size 4\..* can be 1, 2 or 4\.",
        ),
        (
            4,
            {"ulysses_size": 3},
            r"ulysses_size=3 does not .* 4 ranks, ulysses_size can be 1, 2 or 4",
        ),
        (4, {"ring_size": 3}, r"ring_size=3 does not .* 4 ranks, ring_size can be 1, 2 or 4"),
        (4, {"ulysses_size": 3, "num_heads": 6}, r"4 ranks, ulysses_size can be 1 or 2\."),
        (3, {"mode": "hybrid"}, "mode='hybrid' cannot split 3 ranks"),
        (4, {"mode": "ulysses", "ulysses_size": 2}, "mode='ulysses' uses one axis only"),
        (4, {"mode": "ring", "ring_size": 2}, "mode='ring' uses one axis only"),
        (4, {"mode": "zigzag_llama3", "ulysses_size": 4}, "leaves a ring of 1 of 4 ranks"),
        (4, {"exchange": "ring_flash_attn", "ulysses_size": 4}, "needs a ring, .* all 4 ranks"),
    ],
)
def test_sizes_that_do_not_fit(world_size: int, settings: dict[str, Any], match: str) -> None:
    settings = {"labels": "aligned", **settings}
    expect_on_every_rank(world_size, fit_with, settings, error=ConfigError, match=match)


class Counting(Module):
    """Says how far it came."""

    steps = 0

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        Counting.steps += 1
        return super().training_step(batch, batch_idx)


def fit_undivided(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    Counting.steps = 0
    try:
        fit(world_size, Counting(), [sample()], {"labels": "aligned", **settings})
    finally:
        assert not Counting.steps, "it was refused in a step and not at setup"


@pytest.mark.parametrize(
    "settings", [{"mode": "ulysses"}, {"ulysses_size": 3}, {"ulysses_size": 3, "ring_size": 1}]
)
def test_heads_that_do_not_divide_are_refused_at_setup(settings: dict[str, Any]) -> None:
    match = "ulysses_size=3 does not divide the model's 4 attention heads.*can be 1 and the ring"
    expect_on_every_rank(3, fit_undivided, settings, error=ConfigError, match=match)


def test_the_number_of_heads_that_is_set_goes_before_what_the_model_tells() -> None:
    settings = {"mode": "ulysses", "num_heads": 8}
    match = "ulysses_size=3 does not divide the model's 8 attention heads"
    expect_on_every_rank(3, fit_undivided, settings, error=ConfigError, match=match)


class NoHeads(Module):
    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.model = nn.Linear(4, 4)  # type: ignore[assignment]


def fit_no_heads(rank: int, world_size: int) -> None:
    fit(world_size, NoHeads(), [sample()], {"labels": "aligned"})


def test_unknown_number_of_heads() -> None:
    expect_on_every_rank(2, fit_no_heads, error=ConfigError, match="Pass num_heads=")


def fit_two_callbacks(rank: int, world_size: int) -> None:
    fit(world_size, Module(), [sample()], None, [ContextParallelCallback() for _ in range(2)])


def test_a_second_callback() -> None:
    expect_on_every_rank(
        2, fit_two_callbacks, error=ConfigError, match="has 2 ContextParallelCallbacks"
    )


def test_the_callback_refuses_a_foreign_strategy() -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[ContextParallelCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(ConfigError, match="needs the context-parallel strategy"):
        trainer.fit(Module(), DataLoader([sample()]))  # type: ignore[arg-type]


def test_the_mesh_before_launch() -> None:
    with pytest.raises(ConfigError, match="available from setup on"):
        _ = UlyssesRingStrategy().mesh


# -- batches --------------------------------------------------------------------------------------


class Opaque:
    """Something that no rule can look into, but that Lightning can move."""

    def to(self, *_: Any) -> Opaque:
        return self


def one_collate(batch: Any) -> Callable[[list[Any]], Any]:
    return lambda samples: batch


BATCHES: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "unknown type": (ConfigError, "cannot shard a batch of type Opaque", Opaque),
    "no known key": (
        ConfigError,
        r"no tensor of the batch is known.*\['tokens'\].*sequence_dims=",
        lambda: {"tokens": torch.ones(1, 32)},
    ),
    "undeclared dimension": (
        ConfigError,
        r"'weights' of shape \(1, 32\) has a dimension as long as the sequence.*sequence_dims=",
        lambda: {**whole(), "weights": torch.ones(1, 32)},
    ),
    "no labels": (
        ConfigError,
        r"no key 'labels' among \['input_ids'\]",
        lambda: {"input_ids": whole()["input_ids"]},
    ),
    "lengths differ": (
        ShapeError,
        r"one length, got \{'input_ids': 32, 'labels': 30\}.*Give labels one entry for each token",
        lambda: {**whole(), "labels": torch.ones(1, 30, dtype=torch.long)},
    ),
    "too short": (ShapeError, "a sequence of 3 tokens is too short", lambda: whole(3)),
    "opaque inside": (
        ConfigError,
        "cannot look for tensors inside 'extra', a Opaque",
        lambda: {**whole(), "extra": Opaque()},
    ),
}


def whole(length: int = 32) -> dict[str, torch.Tensor]:
    return {name: x[None] for name, x in sample(length).items()}


def fit_batch(rank: int, world_size: int, name: str) -> None:
    fit(world_size, Module(), [0], collate=one_collate(BATCHES[name][2]()))


@pytest.mark.quick("undeclared dimension", "opaque inside")
@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_cannot_be_sharded(name: str) -> None:
    error, match, _ = BATCHES[name]
    expect_on_every_rank(2, fit_batch, name, error=error, match=match)


def fit_unpadded(rank: int, world_size: int) -> None:
    fit(world_size, Module(), [sample(30)], {**RING2, "padding": False, "layout": "zigzag"})


def test_padding_refused() -> None:
    expect_on_every_rank(
        2,
        fit_unpadded,
        error=ShapeError,
        match=r"padding=False.*30 tokens.*divide by 4.*next valid length is 32",
    )


def fit_missing(rank: int, world_size: int) -> None:
    fit(world_size, Module(), [sample()], {**RING2, "sequence_dims": {"weights": 1}})


def test_a_declared_key_that_is_missing() -> None:
    match = r"sequence_dims names 'weights', but the batch has \['input_ids', 'labels'\]"
    expect_on_every_rank(2, fit_missing, error=ConfigError, match=match)


def fit_unknown_labels(rank: int, world_size: int) -> None:
    fit(world_size, Module(), [sample()], {"ring_size": 2, "ulysses_size": 1})


def test_labels_of_unknown_kind() -> None:
    match = (
        "not known how Module .*declare labels='aligned'.*declare labels='shift', .*'shift_labels'"
    )
    expect_on_every_rank(2, fit_unknown_labels, error=ConfigError, match=match)


def fit_different(rank: int, world_size: int, what: str) -> None:
    mine = sample()
    if rank == 1 and what == "values":
        mine["input_ids"][5] += 1
    if rank == 1 and what == "shape":
        mine = sample(40)
    if rank == 1 and what == "keys":
        mine["extra"] = torch.ones(1)
    fit(world_size, Module(), [mine], RING2)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("values", r"disagree on input_ids \(values\) \(rank 0: .*rank 1: .*data_parallel_size"),
        ("shape", r"disagree on sequence length \(rank 0: 32, rank 1: 40\)|targets"),
        ("keys", "different fields"),
    ],
)
def test_different_batches_inside_a_group(what: str, match: str) -> None:
    expect_on_every_rank(2, fit_different, what, error=BatchMismatchError, match=match)


def fit_one_broken(rank: int, world_size: int) -> None:
    fit(world_size, Module(), [sample() if rank else {"tokens": torch.ones(32)}], RING2)


def test_one_rank_refuses_and_nobody_hangs() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, fit_one_broken)
    text = str(caught.value)
    assert UndeclaredError.__name__ in text
    assert f"{RankFailure.__name__}: stopped before any data moved, because rank 0 raised" in text


# -- steps ----------------------------------------------------------------------------------------


class TokenWise(Module):
    num_heads = 4

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.model = nn.Sequential(nn.Embedding(48, 8), nn.Linear(8, 48))  # type: ignore[assignment]

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class OwnAttention(nn.Module):
    """Softmax attention that calls nothing that could be intercepted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


class NotIntercepted(TokenWise):
    def __init__(self) -> None:
        super().__init__()
        self.model.insert(1, OwnAttention())  # type: ignore[operator]


class Masked(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        q = torch.randn(1, 4, batch["input_ids"].shape[1], 8)
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum()


class Dropout(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        q = torch.randn(1, 4, batch["input_ids"].shape[1], 8)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True).sum()


class Iterating(Module):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        return torch.zeros(())


STEPS: dict[str, tuple[type[pl.LightningModule], str]] = {
    "none intercepted": (TokenWise, r"no attention call was intercepted.*\(0 calls\).*none"),
    "own attention": (NotIntercepted, r"OwnAttention\) computed attention by itself"),
    "dense mask": (Masked, r"dense attn_mask of shape \(16, 16\).*What can be expressed"),
    "dropout": (Dropout, r"must be 0\.0 under context parallelism, got 0\.1"),
    "dataloader_iter": (Iterating, "Take the batch instead"),
}


def fit_step(rank: int, world_size: int, name: str) -> None:
    warnings.filterwarnings("ignore", message=".*dataloader_iter.* step flavor")
    fit(world_size, STEPS[name][0](), [sample()], RING2)


@pytest.mark.quick("none intercepted", "dataloader_iter")
@pytest.mark.parametrize("name", STEPS)
def test_steps_that_would_be_silently_wrong(name: str) -> None:
    expect_on_every_rank(2, fit_step, name, error=ConfigError, match=STEPS[name][1])


def fit_mpt(rank: int, world_size: int) -> None:
    from transformers import MptConfig, MptForCausalLM

    class Wrapped(Module):
        def __init__(self) -> None:
            pl.LightningModule.__init__(self)
            config = MptConfig(vocab_size=48, d_model=32, n_layers=1, n_heads=4, max_seq_len=64)
            self.model = MptForCausalLM(config)  # type: ignore[assignment]

    fit(world_size, Wrapped(), [sample()], {"ring_size": 2, "ulysses_size": 1})


def test_a_model_without_the_attention_interface() -> None:
    match = "MptForCausalLM does not use transformers' attention interface"
    expect_on_every_rank(2, fit_mpt, error=ConfigError, match=match)


class ManualMean(Module):
    """A masked mean whose gradient is NaN where nothing is counted."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        logits = self.model(batch["input_ids"], batch["position_ids"])
        losses = F.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten().clamp(min=0), reduction="none"
        )
        counted = (batch["labels"].flatten() != -100).float()
        return (losses * counted).sum() / counted.sum()


class Infinite(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        empty = bool((batch["labels"] == -100).all())
        return loss.nan_to_num() + float("inf") if empty else loss


class FromCrossEntropy(Module):
    """torch's own mean: NaN over nothing, with a gradient of exactly zero."""


def fit_empty(rank: int, world_size: int, name: str) -> int:
    data = sample()
    data["labels"][8:24] = -100  # ring rank 1 of 2 holds the middle
    modules = {"manual": ManualMean, "infinite": Infinite, "torch": FromCrossEntropy}
    module = modules[name]()
    fit(world_size, module, [data], RING2)
    return int(all(bool(torch.isfinite(p).all()) for p in module.parameters()))


@pytest.mark.parametrize(
    ("name", "value"), [("manual", "the loss is nan"), ("infinite", "the loss is inf")]
)
def test_a_loss_on_an_empty_shard_that_cannot_be_muted(name: str, value: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, fit_empty, name)
    text = str(caught.value)
    assert NonFiniteError.__name__ in text
    assert value in text
    assert "on a rank whose part of the sequence has no valid label" in text
    assert "RankFailure" in text


@pytest.mark.nightly
def test_cross_entropy_on_an_empty_shard_adds_nothing() -> None:
    assert run_ranks(2, fit_empty, "torch") == [1, 1]


class Declared(ContextParallelMixin, Module):
    """Says by itself what the strategy would otherwise have to be told."""

    context_parallel_labels = "aligned"
    context_parallel_sequence_dims = {"weights": 1, "table": None}  # noqa: RUF012


def fit_declared(rank: int, world_size: int) -> list[int]:
    data = {**sample(), "weights": torch.ones(32), "table": torch.ones(32)}
    seen: list[int] = []

    class Watch(Declared):
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            seen.extend([batch["weights"].shape[1], batch["table"].shape[1]])
            return super().training_step(batch, batch_idx)

    fit(world_size, Watch(), [data], {**RING2, "parity_check": "off"})
    return seen


def test_the_mixin_declares_keys_and_labels() -> None:
    assert run_ranks(2, fit_declared) == [[16, 32], [16, 32]]


def asked_without_a_trainer(rank: int, world_size: int, name: str) -> torch.Tensor:
    if world_size > 1:
        dist.barrier()  # ranks that are connected
    return getattr(Declared(), name)(torch.ones(2, 3))


@pytest.mark.parametrize("name", ["unshard", "average", "token_mask"])
def test_the_mixin_without_a_trainer(name: str) -> None:
    """One process has all tokens; several ranks do not know which they have."""
    (got,) = run_ranks(1, asked_without_a_trainer, name)
    assert torch.equal(
        got, torch.ones(1, 3, dtype=torch.bool) if "mask" in name else torch.ones(2, 3)
    )
    match = "Declared is attached to neither a Trainer nor Fabric.*trainer.fit or fabric.setup"
    expect_on_every_rank(2, asked_without_a_trainer, name, error=ConfigError, match=match)
