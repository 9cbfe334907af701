"""CPU-seconds of a step: they are what they say they are made of, and grow with what there is more of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.plan_validation.cpu_seconds import CpuSeconds, SendCost, cpu_seconds, send_costs
from lightning_cp.errors import ConfigError
from lightning_cp.layout import Mask, SequenceLayout, schedule
from lightning_cp.planner.attention import attention_cost, interpolate_rate, mean_tile_rates
from lightning_cp.planner.job import Job, MeshSizes, PlanCase, TrainingMethod
from lightning_cp.planner.machines import TileRate, machine_of_hardware
from lightning_cp.planner.model import model_from_config
from tests.helpers.planner.measured import MEASURED

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
RING, ULYSSES = MeshSizes(ring=2), MeshSizes(ulysses=2)
MACHINE, SENDING = machine_of_hardware(MEASURED), send_costs(MEASURED)


def spent(
    mesh: MeshSizes,
    tokens: int = 1024,
    *,
    exchange: str = "ring",
    machine: Any = MACHINE,
    engine: str = "ddp",
    sending: Sequence[SendCost] = SENDING,
    **changes: Any,
) -> CpuSeconds:
    model = model_from_config({**LLAMA, **changes}, "a Llama")
    job = Job(model, machine, mesh.devices, tokens, mesh.data, "fp32", "adamw")
    case = PlanCase(job, TrainingMethod(mesh, engine, exchange))
    attention = {window: attention_cost(case, window) for window in model.windows}
    return cpu_seconds(case, attention, sending)


def test_terms_by_hand() -> None:
    """A ring of two ranks with 512 tokens each; 2 layers, of which each sends 256 numbers a key.

    Of the first rank the other one needs the first half: it goes out in both passes, and the gradients of
    all that came go home.
    """
    found = spent(RING)
    products = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024
    head = 512 * 256
    assert found.products == pytest.approx(6 * 1024 * (2 * products + head) / 0.13e12)
    keys = 512 * 256 * 4
    sent = 2 * keys * 0.4e-9 + 3 * 0.5e-3
    assert found.exchange == pytest.approx(2 * 2 * sent)
    parameters = 2 * (products + 2 * 256) + head + 256
    assert found.optimizer == pytest.approx(2 * parameters * 4 * 7 / 7e9)
    # To buckets and back, each read and written; two ranks send all of it once.
    assert found.gradients == pytest.approx(2 * parameters * 4 * (4 / 7e9 + 0.6e-9))
    assert found.fixed == pytest.approx(2 * (2 * 1e-3 + 2e-3 + 2e-3))
    assert found.total == pytest.approx(sum(vars(found).values()))


def test_attention_by_its_tiles() -> None:
    """Rank by rank a causal tile of its own tokens and a full one of half of them, at their own rates."""
    forward = [
        interpolate_rate("causal", 512, MACHINE.tiles)[0],
        interpolate_rate("full", 2**0.5 * 256, MACHINE.tiles)[0],
    ]
    backward = [
        interpolate_rate("causal", 512, MACHINE.tiles)[1],
        interpolate_rate("full", 2**0.5 * 256, MACHINE.tiles)[1],
    ]
    pairs = [512 * 513 // 2, 512 * 256]
    each = [4 * 256 * p / rate for p, rate in zip(pairs, forward, strict=True)]
    each += [10 * 256 * p / rate for p, rate in zip(pairs, backward, strict=True)]
    assert spent(RING).attention == pytest.approx(2 * 2 * sum(each))


def test_a_rate_between_lengths() -> None:
    rates = (TileRate("causal", 100, 1.0, 2.0), TileRate("causal", 10_000, 3.0, 2.0))
    assert interpolate_rate("causal", 1000, rates)[0] == pytest.approx(
        1.5
    )  # half of 1 and 1/3 seconds
    assert interpolate_rate("causal", 1000, rates)[1] == pytest.approx(2.0)
    assert interpolate_rate("causal", 10, rates)[0] == pytest.approx(1.0)
    assert interpolate_rate("causal", 10**6, rates)[0] == pytest.approx(3.0)
    assert interpolate_rate("full", 1000, rates)[0] == pytest.approx(1.5)  # was not measured


def test_equal_rates_are_the_rate_of_all_tiles() -> None:
    rates = tuple(TileRate(mask, 512, 3.0, 2.0) for mask in ("causal", "full"))
    plan = schedule(SequenceLayout(4096, 4, kind="zigzag"), None, Mask())
    assert mean_tile_rates(plan, rates) == pytest.approx((3.0, 2.0))


def test_published_machines_have_one_rate() -> None:
    flat = replace(MACHINE, tiles=())
    pairs = 1024 * 1025 // 2
    per_pair = 256 * (4 / 0.08e12 + 10 / 0.1e12)
    assert spent(ULYSSES, machine=flat).attention == pytest.approx(2 * pairs * per_pair)


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_more_of_anything_takes_longer(exchange: str) -> None:
    least = spent(RING, exchange=exchange)
    longer = spent(RING, 2048, exchange=exchange)
    deeper = spent(RING, exchange=exchange, num_hidden_layers=3)
    wider = spent(RING, exchange=exchange, vocab_size=1024)
    more = spent(MeshSizes(ring=4), exchange=exchange)
    assert min(one.total for one in (longer, deeper, wider, more)) > least.total
    assert longer.attention > 2 * least.attention  # pairs grow with the square, rates a little
    assert longer.products == pytest.approx(2 * least.products)
    assert deeper.exchange == pytest.approx(1.5 * least.exchange)
    assert more.exchange > least.exchange
    assert more.products == pytest.approx(least.products)


def test_alone_nothing_is_exchanged() -> None:
    found = spent(MeshSizes())
    assert found.exchange == 0
    assert found.fixed == pytest.approx(2 * 1e-3 + 2e-3)


def test_costs_of_sending_are_those_measured() -> None:
    (p2p,) = (x for x in SENDING if (x.collective, x.ranks) == ("p2p", 2))
    assert (p2p.call_seconds, p2p.seconds_per_byte) == (0.5e-3, 0.4e-9)


def test_bytes_that_cost_more_cost_more() -> None:
    dear = [replace(x, seconds_per_byte=2 * x.seconds_per_byte) for x in SENDING]
    keys = 2 * 512 * 256 * 4
    added = spent(RING, sending=dear).exchange - spent(RING).exchange
    assert added == pytest.approx(2 * 2 * keys * 0.4e-9)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="got fsdp and tp=1"):
        spent(RING, engine="fsdp")
    with pytest.raises(
        ConfigError, match="what p2p takes of a processor was not measured on a CPU"
    ):
        spent(RING, sending=())
