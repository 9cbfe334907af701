"""What is used of transformers besides its documented names: an upgrade that changes it fails here.

Whether the results are right is shown by the other tests; these say what has moved.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils, modeling_rope_utils
from transformers.loss import loss_utils
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from lightning_cp.memory.activations import _CACHES
from lightning_cp.models.hf.bloom_falcon import _FILES, _FORWARDS, _OWN_MASK, forward_arguments
from lightning_cp.models.hf.masks import _factory_name
from lightning_cp.models.hf.positions import _FROM_MASK, _MAKER
from lightning_cp.models.hf.swap import attention_function
from tests.helpers.models.later import transformers_version
from tests.helpers.models.steps import Case, make_model

MAKERS = {
    "causal_mask_function": (),
    "bidirectional_mask_function": (),
    "and_masks": ("mask_functions",),
    "or_masks": ("mask_functions",),
    "sliding_window_overlay": ("sliding_window",),
    "sliding_window_bidirectional_overlay": ("sliding_window",),
    "chunked_overlay": ("chunk_size",),
    "packed_sequence_mask_function": ("packed_sequence_mask",),
    "remap_positions_for_packed_sequence": ("mask_function",),
    "padding_mask_function": ("padding_mask",),
}
"""Functions of ``masking_utils`` that masks are composed of, and the closure that tells what of."""

SINCE = {
    "sliding_window_bidirectional_overlay": (5, 1),
    "remap_positions_for_packed_sequence": (5, 23),
}
"""Versions of transformers that brought them."""


@pytest.mark.parametrize("interface", [AttentionInterface, AttentionMaskInterface])
def test_functions_are_registered_and_forgotten(interface: Any) -> None:
    interface.register("lightning_cp_test", print)
    assert interface()["lightning_cp_test"] is print
    assert interface._global_mapping.pop("lightning_cp_test") is print


@pytest.mark.parametrize("name", MAKERS)
def test_masks_are_made_of_known_parts(name: str) -> None:
    if transformers_version() < SINCE.get(name, (5, 0)):
        assert not hasattr(masking_utils, name)
        return
    made = getattr(masking_utils, name)
    if not MAKERS[name]:
        assert _factory_name(made) == name
        return
    given: list[Any] = [torch.zeros(1, 4)]
    if name in ("and_masks", "or_masks"):
        given = [masking_utils.causal_mask_function]
    elif "overlay" in name:
        given = [3] if name != "chunked_overlay" else [3, torch.zeros(1, dtype=torch.long)]
    elif name.startswith("remap"):
        given = [masking_utils.causal_mask_function, torch.zeros(1, 4, dtype=torch.long)]
    function = made(*given)
    assert set(MAKERS[name]) <= set(function.__code__.co_freevars)
    assert _factory_name(function) == name


def test_masks_are_asked_for_by_these_names() -> None:
    names = set(inspect.signature(masking_utils.sdpa_mask).parameters)
    used = {"batch_size", "kv_length", "mask_function", "attention_mask"}
    used |= {"q_length"} if transformers_version() >= (5, 4) else {"cache_position"}
    assert used <= names


def test_configs_name_the_implementation() -> None:
    model = make_model(Case())
    assert model._can_set_attn_implementation()
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    model.config._attn_implementation_internal = "sdpa"
    assert model.config._attn_implementation == "sdpa"
    assert isinstance(model.config.sub_configs, dict)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_are_decided_by_the_positions_that_are_given(kind: str) -> None:
    names = list(inspect.signature(modeling_rope_utils.dynamic_rope_update).parameters)
    assert names == ["rope_forward"]
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope |= {"original_max_position_embeddings": 8}
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = LlamaConfig(
        vocab_size=8, intermediate_size=8, max_position_embeddings=8, rope_parameters=rope, **sizes
    )
    part = LlamaForCausalLM(config).model.rotary_emb
    assert part.rope_type == kind
    x, short = torch.zeros(1, 4, 8), torch.arange(4)[None]
    near = part(x, short)[0]
    far = part(x, torch.tensor([[0, 1, 2, 3, 20]]))[0]
    assert far.shape[-2] == 5
    assert not torch.equal(near, far[:, :4])


@pytest.mark.parametrize("file", _FILES)
def test_patched_attention_is_where_it_was(file: str) -> None:
    module = __import__(file, fromlist=["x"])
    found = [getattr(module, name) for name in _FORWARDS if hasattr(module, name)]
    assert found
    for kind in found:
        assert (
            forward_arguments(kind.forward)[1:] == forward_arguments(_FORWARDS[kind.__name__])[2:]
        )
    assert hasattr(module, "build_alibi_tensor")


@pytest.mark.parametrize("file", _FILES)
def test_who_makes_the_mask_of_patched_attention(file: str) -> None:
    """Their files, or the function that the files of later versions call."""
    module = __import__(file, fromlist=["x"])
    own = [kind for kind in vars(module).values() if hasattr(kind, _OWN_MASK)]
    create = list(inspect.signature(masking_utils.create_causal_mask).parameters)
    if transformers_version() >= (5, 2):
        assert not own
        assert module.create_causal_mask is masking_utils.create_causal_mask
        return
    asked = ["attention_mask", "input_tensor", "cache_position"]
    assert own
    assert create[1:5] == ["input_embeds", "attention_mask", "cache_position", "past_key_values"]
    for kind in own:
        assert list(inspect.signature(getattr(kind, _OWN_MASK)).parameters)[1:4] == asked


def test_attention_is_called_with_these_names() -> None:
    known = inspect.signature(attention_function(cast(Any, None), "sdpa")).parameters
    theirs = inspect.signature(AttentionInterface()["sdpa"]).parameters
    named = [name for name in theirs if name in known]
    assert named == ["module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal",
                     "kwargs"]  # fmt: skip


def test_losses_have_names_and_take_targets_and_their_count() -> None:
    for kind in ("ForCausalLMLoss", "ForMaskedLMLoss", "ForTokenClassification"):
        assert getattr(loss_utils, kind).__name__ == kind
    for kind in (loss_utils.ForCausalLMLoss, loss_utils.ForMaskedLMLoss):
        assert "num_items_in_batch" in inspect.signature(kind).parameters
    assert "shift_labels" in inspect.signature(loss_utils.ForCausalLMLoss).parameters
    model = make_model(Case())
    assert isinstance(inspect.getattr_static(type(model), "loss_function"), property)
    vars(model)["_loss_function"] = print
    assert model.loss_function is print


def test_modules_tell_what_is_asked_of_them() -> None:
    model = make_model(Case(model="mistral", window=7))
    attention = model.model.layers[0].self_attn
    assert attention.is_causal is True
    assert model.config.get_text_config().use_cache is True
    assert model.config.sliding_window == 7
    assert model.config.rope_parameters["rope_type"] == "default"
    assert model.get_output_embeddings() is model.lm_head
    assert any(hasattr(part, "gradient_checkpointing") for part in model.modules())
    checkpointed = make_model(Case(checkpoint="plain"))
    assert any(getattr(part, "gradient_checkpointing", False) for part in checkpointed.modules())


def test_models_that_count_positions_are_known_by_these_names() -> None:
    from transformers.models.esm import modeling_esm
    from transformers.models.opt import modeling_opt
    from transformers.models.roberta import modeling_roberta

    assert set(_FROM_MASK) <= set(vars(modeling_opt))
    assert hasattr(modeling_roberta.RobertaEmbeddings, _MAKER)
    assert hasattr(modeling_esm, _MAKER)


def test_blocks_name_their_cache() -> None:
    """Which would be filled twice where blocks are recomputed."""
    from transformers.models.bloom.modeling_bloom import BloomBlock
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    name = (
        "past_key_values" if transformers_version() < (5, 24) else "cache"
    )  # None: use_cache is off
    assert {name, "use_cache"} <= set(inspect.signature(LlamaDecoderLayer.forward).parameters)
    assert {"layer_past", "use_cache"} <= set(inspect.signature(BloomBlock.forward).parameters)
    assert {"past_key_values", "layer_past", "use_cache"} == set(_CACHES)
