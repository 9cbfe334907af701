"""What attention holds in memory: nothing longer than it is needed."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.no_comm import one_rank
from benchmarks.step_memory import PeakBytes
from lightning_cp.attention import function
from lightning_cp.attention.checkpointing import DeviceStore, Stash
from lightning_cp.attention.keys import Keys, split_pair
from lightning_cp.attention.ulysses import make_loadable
from lightning_cp.bench.methods import AttentionCase, ContextParallelMethod

CASE = AttentionCase(512, 2, 8, dtype=torch.float32)
"""Of one rank among two, over a process group that moves nothing; gloo's thread lets go when it likes."""


def alive_when_gradients_leave(keep: bool) -> list[list[str]]:
    """Of each backward, which of its tensors are there when its last message is made."""
    held: dict[str, weakref.ref[torch.UntypedStorage]] = {}
    alive: list[list[str]] = []
    backward = function.BACKWARD["ring"]

    def watched(dout: Any, q: Any, keys: Keys, out: Any, *rest: Any) -> Any:
        named = {"dout": dout, "q": q, "kv": keys.tensors[0], "out": out}
        held.update((name, weakref.ref(x.untyped_storage())) for name, x in named.items())
        return backward(dout, q, keys, out, *rest)

    class Sent(function.GradientsToTokens):
        def __init__(self, *args: Any) -> None:
            alive.append([name for name, storage in held.items() if storage() is not None])
            super().__init__(*args)

    with (
        one_rank(ContextParallelMethod(2, 1), CASE, 0) as alone,
        mock.patch.dict(function.BACKWARD, ring=watched),
        mock.patch.object(function, "GradientsToTokens", Sent),
    ):
        inputs = [x.requires_grad_() for x in alone.inputs]
        out, *_ = function.ContextParallelAttention.apply(*inputs, None, alone.plan, None)
        if keep:
            torch.autograd.grad(out, inputs, alone.dout, retain_graph=True)
        torch.autograd.grad(out, inputs, alone.dout)
    return alive


def test_what_forward_saved_is_gone_while_gradients_travel() -> None:
    """Unless the graph is kept: then until a backward does not keep it."""
    assert alive_when_gradients_leave(keep=False) == [[]]
    assert alive_when_gradients_leave(keep=True) == [["q", "kv", "out"], []]


def test_recomputed_keys_are_gone_once_they_were_exchanged() -> None:
    """Around ``keep_attention``: q, k and v of this rank's tokens, of which backward has those by heads."""
    backward, alive = function.BACKWARD["ring"], []

    def watched(*args: Any) -> Any:
        alive.extend(name for name, storage in held.items() if storage() is not None)
        return backward(*args)

    with (
        one_rank(ContextParallelMethod(2, 1), CASE, 0) as alone,
        mock.patch.dict(function.BACKWARD, ring=watched),
    ):
        inputs = [x.requires_grad_() for x in alone.inputs]
        made = [x * 1 for x in inputs]
        held = {n: weakref.ref(x.untyped_storage()) for n, x in zip("qkv", made, strict=True)}
        stash = Stash([], replaying=False, place=DeviceStore())
        out, *_ = function.ContextParallelAttention.apply(*made, None, alone.plan, stash)
        del made
        torch.autograd.grad(out, inputs, alone.dout)
    assert alive == []


@pytest.mark.parametrize("at", range(3), ids="qkv")
def test_what_was_changed_after_the_call_is_not_differentiated(at: int) -> None:
    """Without Ulysses backward reads what it was given."""
    with one_rank(ContextParallelMethod(1, 2), CASE, 0) as alone:
        inputs = [x.requires_grad_() for x in alone.inputs]
        made = [x * 1 for x in inputs]
        out, *_ = function.ContextParallelAttention.apply(*made, None, alone.plan, None)
        made[at].mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            torch.autograd.grad(out, inputs, alone.dout)


def test_what_cuda_could_not_load_at_once_is_copied() -> None:
    """Rows at an odd place, odd rows or repeated ones; a copy begins a storage of its own."""
    shape, dense = (2, 8, 3, 16), (384, 48, 16, 1)
    with FakeTensorMode():
        memory = torch.empty(1000, dtype=torch.bfloat16, device="cuda")
        odd = memory.as_strided(shape, dense, 1)
        for x in (
            odd,
            memory.as_strided(shape, (392, 49, 16, 1)),
            memory.as_strided(shape, (384, 48, 0, 1)),
        ):
            copy = make_loadable(x)
            assert copy.is_contiguous()
            assert copy.storage_offset() == 0
        for x in (memory.as_strided(shape, dense, 8), memory.as_strided((2, 8, 3, 5), dense, 4)):
            assert make_loadable(x) is x, "it is aligned, or no copy would be"
        one_row = memory.as_strided((1, 8, 3, 16), (0, 48, 16, 1))
        assert make_loadable(one_row) is one_row
        on_cpu = torch.empty(1000).as_strided(shape, dense, 1)
        assert make_loadable(on_cpu) is on_cpu


@pytest.mark.parametrize("value_dim", [4, 2, 7])
def test_a_message_has_keys_and_values_head_by_head(value_dim: int) -> None:
    k, v = torch.randn(6, 2, 3, 4), torch.randn(6, 2, 3, value_dim)
    apart, pair = Keys((k, v), 4), Keys((torch.cat([k, v], dim=3),), 4)
    assert apart.pair_shape == pair.pair_shape == (6, 2, 3, 4 + value_dim)
    assert apart.value_dim == pair.value_dim == value_dim
    for ranges in [((1, 4),), ((0, 2), (5, 6))]:
        wanted = [torch.cat([x[a:b] for a, b in ranges]) for x in (k, v)]
        for keys in (apart, pair):
            message = keys.message(ranges)
            assert message.is_contiguous()
            assert all(map(torch.equal, split_pair(message, 4), wanted))
    assert pair.message(((1, 4),)).data_ptr() == pair.tensors[0][1:].data_ptr()  # no copy


def peak_in_queries(way: ContextParallelMethod, rank: int) -> float:
    """Peak of forward and backward above the inputs, results included, over the size of local queries."""
    with one_rank(way, CASE, rank) as alone:
        inputs = [x.requires_grad_() for x in alone.inputs]
        with PeakBytes() as found:
            out, *_ = function.ContextParallelAttention.apply(*inputs, None, alone.plan, None)
            torch.autograd.grad(out, inputs, alone.dout)
        return found.peak / inputs[0].nbytes


PEAKS = {
    # q, kv and out by heads, out, dout by heads; dq, dk and dv.
    ContextParallelMethod(2, 1): 4 + 1 + 1 + 3,
    # out, dq and own dkv; keys here, and what the operator returns for them (2 + 2.5 on the rank that needs
    # most): all other hops of two ranks are over.
    ContextParallelMethod(1, 2): 1 + 3 + 4.5,
    # out; dq, dk and dv of six heads that are done; keys, arriving keys and gradients of one head, those of
    # the one before in flight (0.5 and 0.25), and what the operator returns for it.
    ContextParallelMethod(1, 2, "all_gather"): 1 + 6 / 8 * 3 + 1 / 8 + 3 * 0.5 + 0.75 + 0.5,
}
"""Of equally many K/V heads, in float32, on two ranks."""


@pytest.mark.parametrize("way", PEAKS, ids=lambda way: way.name)
def test_peak_of_a_whole_step(way: ContextParallelMethod) -> None:
    """Autograd included; lse and its like are some more."""
    assert max(peak_in_queries(way, rank) for rank in range(2)) <= 1.02 * PEAKS[way]
