"""Positions of a Hugging Face model's tokens: global, its own, restarting ones; and rotary frequencies.

transformers (5.23, ``masking_utils``) isolates the documents of a row if positions restart, the model is
causal, gets no ``attention_mask`` and has no cache. With a cache, the default even in training, it takes the
row for one document. flash-attention isolates by ``position_ids`` itself, in batches of one row, cache or
not. Here the documents of the batch are always isolated, so a step whose documents one process would not
isolate is refused.

Rotary embeddings whose frequencies depend on the longest position use the largest one in a call of the
embedding, which on a rank is that of its local tokens. Hooks append one position, the largest of the batch,
and remove it from the result.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lightning_cp import error_display
from lightning_cp.batch.step_state import StepState
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import Documents, SequenceLayout
from lightning_cp.layout.documents import text_positions
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.hf.bloom_falcon import takes_no_positions
from lightning_cp.utils.patching import add_hook
from lightning_cp.utils.tensors import to_device
from lightning_cp.utils.tracing import exclude_from_compile

Parameters = dict[str, inspect.Parameter]

_MAKER = "create_position_ids_from_input_ids"
"""Name of the function by which transformers' models count from behind the padding index."""

_FROM_MASK = {"OPTLearnedPositionalEmbedding"}
"""Classes that count the tokens that are not padding: positions begin at 0 behind left padding."""

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary embedding that depend on the length."""


def parameters_of(model: Any) -> Parameters:
    """Return the parameters of ``model.forward`` by name, without ``self``."""
    if "forward" in vars(model):  # replaced on this instance, by a wrapper for example
        return dict(inspect.signature(model.forward).parameters)
    return _of_class(type(model))


@lru_cache(maxsize=256)
def _of_class(kind: type[Any]) -> Parameters:
    parameters = dict(inspect.signature(kind.forward).parameters)
    del parameters[next(iter(parameters))]
    return parameters


def takes_extra(model: Any) -> bool:
    """True if ``model.forward`` takes ``**kwargs``."""
    kinds = [parameter.kind for parameter in parameters_of(model).values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def position_counter(model: Any) -> str:
    """Return the class of a module that counts positions its own way ("RobertaEmbeddings"), or ""."""
    for module in model.modules():
        name = type(module).__name__
        if hasattr(module, _MAKER) or name in _FROM_MASK or _is_counted_by_file(module):
            return name
    return ""


def _is_counted_by_file(module: nn.Module) -> bool:
    """True for embeddings with learned positions whose file defines the maker as a function (ESM)."""
    file = sys.modules.get(type(module).__module__)
    return hasattr(file, _MAKER) and isinstance(
        getattr(module, "position_embeddings", None), nn.Module
    )


def check_positions(state: StepState, name: str) -> None:
    """Check that one process would also count positions 0, 1, 2, ...

    Raises:
        ConfigError: the batch has no ``position_ids``, and the module ``name`` would count otherwise.
    """
    if not name or not state.positions.from_zero:
        return
    layout = state.layout
    rows = layout.documents.rows if layout.documents is not None else ()
    if name in _FROM_MASK and all(not row.size or row[0, 0] == 0 for row in rows):
        return
    raise ConfigError(
        f"{name} does not count positions from 0 on (it looks at padding, or begins behind the padding "
        "index), which a rank cannot do from its own tokens. Put the position_ids that it would make "
        "into the batch (in the dataset or on_after_batch_transfer), for the whole sequence."
    )


def counts_positions_locally(models: list[Any]) -> bool:
    """True if none of these nested models takes positions, although they need them.

    A bias by distance (T5, BLOOM) needs no positions; its attention decides if it can be sharded.
    """
    if any("position_ids" in parameters_of(model) for model in models):
        return False
    if takes_no_positions(models[0]):
        return False
    return not any(hasattr(part, "relative_attention_bias") for part in models[0].modules())


def accept_default_positions(roots: list[Any]) -> bool:
    """True if all of these Hugging Face models take positions, and count 0, 1, 2, ... by default."""
    for root in roots:
        inside = [part for part in root.modules() if hasattr(part, "_can_set_attn_implementation")]
        if position_counter(root) or counts_positions_locally(inside):
            return False
    return True


def check_takes_positions(model: Any, call: dict[str, Any]) -> None:
    """Refuse a call with tokens, of a model that numbers them from 0 on every rank.

    Raises:
        ConfigError: naming the model.
    """
    if call.get("input_ids") is None and call.get("inputs_embeds") is None:
        return  # a tower for images or audio: its attention raises
    raise ConfigError(
        f"{type(model).__name__} takes no position_ids, and neither does any model inside: every rank would "
        "count its own tokens from 0, which is silently wrong. Use a model whose forward takes position_ids "
        "(in one of your own: add the argument, and number tokens by it), or a strategy without context "
        "parallelism."
    )


def positions_for(state: StepState, call: dict[str, Any]) -> torch.Tensor:
    """Return the global positions of the tokens of a call, which has the rows of the batch.

    The number of rows may differ if all count 0, 1, 2, ...: a step may join the batch with derived rows.

    Raises:
        ShapeError: another number of rows than the batch's, whose positions differ.
    """
    ours, rows = state.position_ids, num_rows(call)
    if ours.dim() != 2 or ours.shape[0] in (1, rows):
        return ours
    if state.positions.from_zero:
        return ours[:1].expand(rows, -1)
    raise ShapeError(
        f"the model is called with {rows} rows, but the batch has {ours.shape[0]}, whose positions differ. "
        "Call it with the rows of the batch, or make the others before it is sharded."
    )


def check_same_positions(state: StepState, positions: torch.Tensor | None) -> None:
    """Check that positions passed to a model are the batch's, in any shape.

    Raises:
        ConfigError: they are not, as where a rank counts its tokens from 0.
    """
    ours = state.position_ids
    if positions is None or positions is ours or positions.shape[-1] != ours.shape[-1]:
        return
    if state.positions.from_zero:
        ours = ours.flatten(0, -2)[0]  # the same in all rows
    elif not _fit(positions, ours):
        return  # an inner model's, in another form
    state.refuse_if((positions != to_device(ours, positions.device)).any(), _OTHER_POSITIONS)


def _fit(positions: torch.Tensor, ours: torch.Tensor) -> bool:
    sizes = zip(reversed(positions.shape), reversed(ours.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in sizes)


def num_rows(call: dict[str, Any]) -> int:
    """Return the number of rows of a call; 1 if it has no tokens."""
    found = [call.get("input_ids"), call.get("inputs_embeds")]
    return next((x.shape[0] for x in found if x is not None), 1)


def check_call(state: StepState, model: Any, call: dict[str, Any], before: str) -> None:
    """Check the positions of a model's call, and record if one process would make a cache.

    Args:
        state: of the active step.
        model: the model that is called.
        call: its arguments by name, as the step passed them.
        before: the attention implementation that one process uses.

    Raises:
        ConfigError: positions that are not the batch's, or documents that one process would not isolate.
    """
    check_same_positions(state, call.get("position_ids"))
    _check_flash_boundaries(state.layout, call.get("cu_seq_lens_q"))
    if not state.positions.restart:
        return
    if "flash" in before and num_rows(call) > 1:
        raise ConfigError(
            f"position_ids restart in a batch of {num_rows(call)} rows: in one process flash-attention "
            "reads packed documents only from batches of one row. Use a batch size of 1, or 'sdpa' with "
            "use_cache=False."
        )
    if "flash" not in before and _makes_cache(model, call):
        # Recorded for the models inside, which are called with use_cache=False.
        state.cached_by = type(model).__name__


def check_mask(
    state: StepState, model: str, *, causal: bool, has_mask: bool, folded: bool, before: str
) -> None:
    """Check, when a model makes its mask, that one process would isolate the same documents.

    Args:
        state: of the active step.
        model: its type, for messages.
        causal: the mask is causal.
        has_mask: the model got an ``attention_mask``.
        folded: transformers saw the (local) positions restart, and put that into the mask.
        before: the attention implementation that one process uses.

    Raises:
        ConfigError: one process would isolate other documents. With ``folded`` it depends on this
            rank's tokens whether it does.
    """
    if not state.positions.restart:
        if causal and folded and not state.cached_by and state.positions.not_sequential:
            raise ConfigError(_UNDECLARED)
    elif not causal:
        return
    elif state.cached_by:
        raise ConfigError(
            f"position_ids restart (packed documents), but {state.cached_by} is called with "
            "use_cache=True (the default of its config): in one process transformers then takes a row for "
            "one document, and every document sees the ones before it. Set model.config.use_cache = "
            "False, so that documents are isolated in one process as they are here; or take position_ids "
            "out of the batch."
        )
    elif has_mask:
        raise ConfigError(
            "position_ids restart (packed documents), but the model is given an attention_mask as well: in "
            "one process transformers then takes a row for one document. Call the model without "
            "attention_mask, or take position_ids out of the batch."
        )
    elif not folded and "flash" not in before:
        text = text_positions(state.position_ids)
        if text is not None:
            state.refuse_if((text.diff(dim=-1) != 1).any(), _UNREAD.format(model))


def warn_isolated(warned: set[str], model: str) -> None:
    """Warn once that the documents of a bidirectional model are isolated."""
    if model in warned:
        return
    warned.add(model)
    error_display.warn(
        "position_ids restart, so the documents of a row attend only to themselves; in one process "
        f"transformers takes a row of a bidirectional model ({model}) for one document."
    )


_UNDECLARED = (
    "the position_ids of the batch restart and the model is called without attention_mask, so one process "
    "would isolate packed documents; but the batch has an attention_mask, and so its rows are single "
    "documents here. Take attention_mask out of the batch, or pass it to the model."
)


_OTHER_POSITIONS = (
    "the position_ids that the model was given are not the batch's: a rank's tokens do not follow each "
    "other, and packed documents are read from the batch before it is sharded. Use batch['position_ids'], or "
    "put yours into the batch (in the dataset or on_after_batch_transfer)."
)

_UNREAD = (
    "position_ids restart (packed documents), but {} does not read them when it makes its mask: in one "
    "process it takes a row for one document. Say where documents are with segment_ids or cu_seqlens in the "
    "batch, and take position_ids out; or use batches that are not packed."
)


def _makes_cache(model: Any, call: dict[str, Any]) -> bool:
    """True if one process would make a cache, which hides packing from transformers' masks."""
    asked = call.get("use_cache")
    if asked is None:
        asked = getattr(model.config.get_text_config(), "use_cache", False)
    recomputing = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    return bool(asked) and not (model.training and recomputing)


def _check_flash_boundaries(layout: SequenceLayout, boundaries: torch.Tensor | None) -> None:
    if boundaries is None:
        return
    documents = layout.documents or Documents.single(layout.seq_len)
    said = [[a, b] for a, b in pairwise(boundaries.flatten().tolist()) if b > a]
    if documents.shared and documents.rows[0].tolist() == said:
        return
    raise ConfigError(
        "cu_seq_lens_q does not describe the documents of the batch, which are read from restarting "
        "position_ids, cu_seqlens or segment_ids. Put one of these into the batch, and leave cu_seq_lens_q "
        "and cu_seq_lens_k away."
    )


def patch_length_dependent_rope(model: Any, configs: Iterable[Any], handle: SwapHandle) -> None:
    """Give length-dependent rotary embeddings the length of the whole batch, while a step is active.

    Raises:
        ConfigError: a config has such a kind, but no module of the model does.
    """
    found = [part for part in model.modules() if _kinds(getattr(part, "rope_type", None))]
    kinds = {kind for config in configs for kind in _config_kinds(config)}
    if kinds and not found:
        raise ConfigError(
            f"{type(model).__name__} has rope_type={sorted(kinds)[0]!r}, whose frequencies depend on the "
            "largest position that a rank holds, and no module of it has such a rope_type, so it cannot "
            "receive that of the whole batch. What works: default, linear, yarn and llama3."
        )
    for part in found:
        _patch_rope(part, handle)


def check_rotary_takes_positions(model: Any) -> None:
    """Check that no rotary embedding numbers its input tokens itself, without positions.

    Raises:
        ConfigError: naming the class.
    """
    for part in model.modules():
        name = type(part).__name__
        if "Rotary" in name and list(inspect.signature(part.forward).parameters) == ["q", "k"]:
            raise ConfigError(
                f"{name} of {type(model).__name__} takes no positions: every rank would count its own tokens "
                "from 0, which is silently wrong. ESM takes positions from transformers 5.6 on. Otherwise "
                "use another model, or a strategy without context parallelism."
            )


def _patch_rope(part: nn.Module, handle: SwapHandle) -> None:
    signature = inspect.signature(part.forward)
    if "position_ids" not in signature.parameters:
        raise ConfigError(
            f"{type(part).__name__} looks at the longest position (rope_type={_kinds(part.rope_type)[0]!r}) "
            f"and takes no position_ids, but {list(signature.parameters)}, so it cannot receive that of the "
            "whole batch. Use a version of transformers that this package was tested with."
        )

    @exclude_from_compile
    def lengthen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if handle.state is None:
            return None
        call = signature.bind(*args, **kwargs).arguments
        positions = call["position_ids"]
        longest = positions.new_full((*positions.shape[:-1], 1), handle.state.positions.longest)
        extra = call.pop("kwargs", {})
        return (), {**call, "position_ids": torch.cat([positions, longest], dim=-1), **extra}

    @exclude_from_compile
    def shorten(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if handle.state is None:
            return None
        expected = kwargs["position_ids"].shape[-1]
        parts = output if isinstance(output, tuple) else (output,)
        for x in parts:
            if x.shape[-2] != expected:
                raise ConfigError(
                    f"{type(part).__name__} was given {expected} positions and returned {tuple(x.shape)}, "
                    "whose last dimension but one should be these. Use a version of transformers that this "
                    "package was tested with."
                )
        cut = tuple(x[..., :-1, :] for x in parts)
        return cut if isinstance(output, tuple) else cut[0]

    handle.on_undo(add_hook(part.register_forward_pre_hook, lengthen, with_kwargs=True))
    handle.on_undo(add_hook(part.register_forward_hook, shorten, with_kwargs=True))


def _config_kinds(config: Any) -> list[str]:
    found: list[str] = []
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None) or {}
        for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            found += _kinds(part.get("rope_type", part.get("type")))
    return found


def _kinds(rope_type: Any) -> list[str]:
    """Return the length-dependent kinds in ``rope_type``, which is a dict where layers differ."""
    every = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return [
        kind for kind in every if isinstance(kind, str) and any(x in kind for x in LENGTH_DEPENDENT)
    ]
