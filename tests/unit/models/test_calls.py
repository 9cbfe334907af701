"""What models pass to attention, and how steps call models: understood, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.layout import SequenceLayout
from lightning_cp.models import StepState, SwapHandle, swap_attention
from lightning_cp.models.hf.masks import Visibility, make_note
from lightning_cp.models.hf.swap import IGNORED_ARGUMENTS, SPEC_ARGUMENTS, attention_function
from tests.helpers.models.mesh import MESH

Q = torch.zeros(1, 4, 8, 16)
CAUSAL = Visibility(causal=True)


class Recorder(SwapHandle):
    """Keeps the spec of the last call."""

    def __init__(self) -> None:
        super().__init__(MESH)
        self.spec: Any = None

    def attention(self, q_BLHD: Any, k_BLKD: Any, v_BLKD: Any, spec: Any) -> torch.Tensor:
        self.spec = spec
        return q_BLHD


class SomeAttention(nn.Module):
    """What transformers passes as ``module``."""

    is_causal = True


class SomeCrossAttention(nn.Module):
    is_causal = False


def attend(
    visible: Visibility | None = CAUSAL, key: Any = Q, before: str = "sdpa", **kwargs: Any
) -> Any:
    handle = Recorder()
    note = None if visible is None else make_note(visible, (1, 1, 8, 8), "cpu")
    module = kwargs.pop("module", SomeAttention())
    mask = kwargs.pop("attention_mask", note)
    attention_function(handle, before)(module, Q, key, key, mask, **kwargs)
    return handle.spec


def test_what_becomes_the_spec() -> None:
    sinks = torch.zeros(4)
    spec = attend(
        Visibility(True, (6, -1)), sliding_window=7, scaling=0.3, softcap=5.0, s_aux=sinks
    )
    assert (spec.causal, spec.window, spec.softmax_scale, spec.softcap) == (True, (6, -1), 0.3, 5.0)
    assert spec.sinks is sinks


def test_a_window_that_only_the_mask_has() -> None:
    assert attend(Visibility(True, (6, -1))).window == (6, -1)
    spec = attend(Visibility(False, (6, 6)), is_causal=False, sliding_window=7)
    assert (spec.causal, spec.window) == (False, (6, 6))


def test_harmless_arguments_are_accepted() -> None:
    harmless: dict[str, Any] = dict.fromkeys(IGNORED_ARGUMENTS, 1)
    attend(**harmless)
    attend(position_bias=None, indices=None, anything=None, other=False)
    assert not SPEC_ARGUMENTS & IGNORED_ARGUMENTS.keys()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"position_bias": Q}, "SomeAttention passes position_bias= to attention"),
        ({"indices": Q, "block_indices": Q}, "passes block_indices=, indices= to attention"),
        ({"my_bias": 0.5}, "passes my_bias=.*ignoring it could be silently wrong"),
        ({"cache": 1}, "passes cache="),
        ({"visible": None}, "SomeAttention was given no mask"),
        ({"attention_mask": Q}, r"dense attention mask of shape \(1, 4, 8, 16\)"),
        ({"key": Q[:, :, :5]}, r"SomeAttention attends to another sequence \(8 queries, 5 keys\)"),
        ({"module": SomeCrossAttention()}, "SomeCrossAttention attends to another sequence"),
        ({"is_causal": False}, "is_causal=False, but its mask is causal"),
        ({"visible": Visibility(False)}, "is_causal=True, but its mask is bidirectional"),
        (
            {"sliding_window": 7},
            "sliding_window=7 in its attention call, but its mask has no window",
        ),
        ({"visible": Visibility(True, (3, -1)), "sliding_window": 7}, "mask has a window of 4"),
        (
            {"visible": Visibility(True, (3, -1)), "before": "flash_attention_2"},
            "sliding_window=None",
        ),
        ({"dropout": 0.1}, r"attention dropout must be 0\.0"),
    ],
)
def test_what_cannot_be_sharded_is_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        attend(**given)


def test_cross_attention_by_attribute() -> None:
    module = SomeAttention()
    module.is_cross_attention = True  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="cross-attention is not sharded"):
        attend(module=module)


# -- whole models -----------------------------------------------------------------------------------


def test_models_with_two_sequences_are_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        swap_attention(T5ForConditionalGeneration(config), MESH)


def test_learned_biases_are_refused() -> None:
    """An encoder alone has one sequence, and T5's bias between all pairs of tokens."""
    from transformers import T5Config, T5EncoderModel

    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    model = T5EncoderModel(
        T5Config(vocab_size=40, dropout_rate=0.0, **sizes, is_encoder_decoder=False)
    )
    if not model._can_set_attn_implementation():  # before transformers 5.15
        with pytest.raises(
            ConfigError, match=r"T5EncoderModel does not use .* attention interface"
        ):
            swap_attention(model, MESH)
        return
    handle = swap_attention(model, MESH)
    handle.activate(StepState(SequenceLayout(8), torch.arange(8)[None]))
    try:
        with pytest.raises(ConfigError, match="T5Attention passes position_bias= to attention"):
            model(input_ids=torch.ones(1, 8, dtype=torch.long))
    finally:
        handle.undo()


def test_weights_that_are_never_made_are_refused() -> None:
    from tests.helpers.models.steps import Case, make_model

    model = make_model(Case())
    handle = swap_attention(model, MESH)
    handle.activate(StepState(SequenceLayout(8), torch.arange(8)[None]))
    ids = torch.ones(1, 8, dtype=torch.long)
    try:
        with pytest.raises(
            ConfigError, match="LlamaForCausalLM is called with output_attentions=True"
        ):
            model(input_ids=ids, output_attentions=True)
        model.config._output_attentions = True
        with pytest.raises(ConfigError, match="output_attentions=True, but no rank has"):
            model(input_ids=ids)
    finally:
        handle.undo()
