"""Mask of a Hugging Face model, passed to its attention calls as a note instead of a tensor.

transformers composes every mask from small functions (causal, sliding, packed, ...) and passes the
composition to the registered mask function, once for each kind of layer. The function here reads it, refuses
what ``AttentionSpec`` cannot express, and returns a ``MaskNote`` in the place of the mask: each layer passes
its own note to its own attention call, so models with several kinds of layers need no guessing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from lightning_cp.batch.step_state import StepState
from lightning_cp.errors import ConfigError
from lightning_cp.layout import SequenceLayout
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.hf.positions import check_mask, warn_isolated
from lightning_cp.utils.tensors import to_device
from lightning_cp.utils.tracing import exclude_from_compile

EXPRESSIBLE = (
    "What can be expressed: causal or bidirectional attention, sliding windows, packed documents "
    "(restarting position_ids) and padding (a 2-D attention_mask of the batch)."
)

_MEANINGS = {
    "or_masks": "or_mask_function or block_sequence_ids, as for images or prefixes that see each other",
    "blockwise_overlay": "block_sequence_ids, blocks of tokens that see each other",
    "padding_mask_function": "a padding mask made by the model itself",
}
"""Explanations of unsupported mask functions, by factory."""

_OTHER_MASK = (
    "the attention_mask that the model was given is not the batch's: what a token may see is taken from the "
    "batch before it is sharded, so a mask that is made or changed in the step would be ignored. Put "
    "attention_mask into the batch (in the dataset or on_before_batch_transfer)."
)

_OTHER_ROWS = (
    "the model was given an attention_mask of {} rows in a step whose batch has {}: what a token may see is "
    "taken from the rows of the batch, in their order. Call the model with all of them, and take rows of its "
    "output; or shard a batch of these rows alone."
)

_TRUE: Callable[..., Any] = lambda *args: torch.tensor(True, dtype=torch.bool)  # noqa: E731


def check_padding(
    state: StepState, cp_rank: int, mask: torch.Tensor | None, *, causal: bool
) -> None:
    """Check that the padding mask of the model is the batch's, from which the layout is made.

    Args:
        state: of the active step.
        cp_rank: rank of the local tokens.
        mask: bool [B, L], the model's mask of the local tokens, if it has one.
        causal: no token sees padding behind its row, so the mask may be missing.

    Raises:
        ConfigError: the layout treats other tokens as padding than the model would; a mask of other rows.
    """
    layout = state.layout
    if mask is None:
        if _is_padding_visible(layout, causal):
            raise ConfigError(
                "the batch has an attention_mask with padding, but the model was called without it, so one "
                "process would attend to padding. Pass attention_mask=batch['attention_mask'] to the model, "
                "or take it out of the batch."
            )
        return
    if state.tokens is None:
        state.tokens = to_device(_token_flags(layout, cp_rank), mask.device)
    real, kept = state.tokens
    if len(mask) != len(kept) and 1 not in (len(mask), len(kept)):
        raise ConfigError(_OTHER_ROWS.format(len(mask), len(kept)))
    state.refuse_if(((mask.bool() != kept) & real).any(), _OTHER_MASK)


def _is_padding_visible(layout: SequenceLayout, causal: bool) -> bool:
    """True if a token would see padding without a mask."""
    if layout.documents is None:
        return False
    for row in layout.documents.rows:
        if not row.shape[0]:
            continue
        before_or_between = int(row[-1, 1]) - int((row[:, 1] - row[:, 0]).sum())
        behind = layout.seq_len - int(row[-1, 1])
        if before_or_between or (behind and not causal):
            return True
    return False


def _token_flags(layout: SequenceLayout, cp_rank: int) -> torch.Tensor:
    """Return bool [2, rows, L]: local tokens within the sequence, and within a document."""
    rows = layout.documents.rows if layout.documents is not None else ()
    kept = torch.full((max(len(rows), 1), layout.padded_len), layout.documents is None)
    for index, row in enumerate(rows):
        for start, end in row.tolist():
            kept[index, start:end] = True
    positions = layout.positions(cp_rank)
    real = (positions < layout.seq_len).expand(kept.shape[0], -1)
    return torch.stack([real, kept[:, positions]])


@dataclass(frozen=True)
class Visibility:
    """Visible keys within a document; ``window`` as in ``AttentionSpec``."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    packed: bool = field(default=False, compare=False)
    """transformers saw positions restart, and hides the documents from each other."""

    def __and__(self, other: Visibility) -> Visibility:
        left, right = map(_narrower, self.window, other.window)
        causal = self.causal or other.causal
        window = (left, -1 if causal else right)
        return Visibility(causal, window, self.packed or other.packed)


def _narrower(side: int, other: int) -> int:
    """Return the narrower of two sides of a window; -1 is unbounded."""
    return min(side, other) if min(side, other) >= 0 else max(side, other, -1)


def read_mask(function: Callable[..., Any], seq_len: int) -> Visibility:
    """Return the visibility that a mask function of transformers describes.

    Args:
        function: composed by ``transformers.masking_utils``.
        seq_len: tokens of the whole sequence: longer windows and chunks hide nothing.

    Raises:
        ConfigError: a part of it is neither causality, nor a window, nor packing.
    """
    match _factory_name(function):
        case "causal_mask_function":
            return Visibility(causal=True)
        case "bidirectional_mask_function":
            return Visibility()
        case "and_masks":
            found: Visibility | None = None
            for part in _closure_arguments(function)["mask_functions"]:
                visible = read_mask(part, seq_len)
                found = visible if found is None else found & visible
            return found or Visibility()
        case "sliding_window_overlay":  # its window counts the query itself
            return Visibility(window=(int(_closure_arguments(function)["sliding_window"]) - 1, -1))
        case "sliding_window_bidirectional_overlay":
            reach = int(_closure_arguments(function)["sliding_window"])
            return Visibility(window=(reach, reach))
        case "packed_sequence_mask_function":
            # It reads the shard's positions; the documents are in the layout.
            return Visibility(packed=True)
        case "remap_positions_for_packed_sequence":
            return replace(
                read_mask(_closure_arguments(function)["mask_function"], seq_len), packed=False
            )
        case "chunked_overlay" if int(_closure_arguments(function)["chunk_size"]) >= seq_len:
            return Visibility()
        case "chunked_overlay":
            size = int(_closure_arguments(function)["chunk_size"])
            raise ConfigError(
                f"the model attends in chunks (attention_chunk_size={size}), which is "
                f"not sharded beyond one chunk, and the sequence has {seq_len} tokens. {EXPRESSIBLE} Use "
                "sequences of at most one chunk, or a strategy without context parallelism."
            )
        case _ if _is_always_true(function):
            return Visibility()
        case made:
            raise ConfigError(
                "the model's attention mask has a part that is not sharded: "
                f"{_describe_part(made, function)}. {EXPRESSIBLE} Use inputs for which the model adds no "
                "such mask (often: text only), or a strategy without context parallelism."
            )


def _is_always_true(function: Callable[..., Any]) -> bool:
    """True for the constant function that transformers 5.2 to 5.14 add to force a mask (Falcon)."""
    code, true = getattr(function, "__code__", None), _TRUE.__code__
    parts = ("co_code", "co_consts", "co_names")
    return all(getattr(code, part, None) == getattr(true, part) for part in parts)


def _factory_name(function: Callable[..., Any]) -> str:
    """Return the factory in transformers.masking_utils that made ``function``, or its full name otherwise."""
    where, name = (
        getattr(function, "__module__", ""),
        getattr(function, "__qualname__", repr(function)),
    )
    return (
        name.split(".<locals>")[0] if where == "transformers.masking_utils" else f"{where}.{name}"
    )


def _closure_arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments that a mask function was made with, from its closure."""
    names = function.__code__.co_freevars if hasattr(function, "__code__") else ()
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _describe_part(made: str, function: Callable[..., Any]) -> str:
    if made != "or_masks":
        return f"{made} ({_MEANINGS.get(made, 'and_mask_function or its own mask function')})"
    parts = " | ".join(
        _factory_name(part) for part in _closure_arguments(function)["mask_functions"]
    )
    return f"{parts} ({_MEANINGS[made]})"


def mask_function(handle: SwapHandle, before: str, *, dims: int = 4) -> Any:
    """Return the function to register as transformers' mask function.

    Args:
        handle: holds the active step.
        before: the attention implementation that one process uses.
        dims: number of dimensions of the notes: Falcon adds its bias to masks of four.
    """

    @exclude_from_compile
    def mask(
        batch_size: int,
        kv_length: int,
        mask_function: Callable[..., Any],
        attention_mask: torch.Tensor | None = None,
        q_length: int | None = None,
        device: Any = "cpu",
        **kwargs: Any,
    ) -> MaskNote:
        state = handle.state
        assert state is not None  # the configs name this function only while a step is active
        if q_length is None:  # until transformers 5.3
            q_length = len(kwargs["cache_position"])
        if q_length != kv_length or q_length != state.layout.local_len:
            raise ConfigError(
                f"the model made an attention mask of {q_length} queries and {kv_length} keys, but a rank's "
                f"part of the sequence has {state.layout.local_len} tokens. Attention to another sequence "
                "(cross-attention, prefixes, memories, an image tower) is not sharded, and a step has no "
                "key/value cache. Call the model with this rank's whole part, and generate between steps."
            )
        visible = read_mask(mask_function, state.layout.seq_len)
        model = getattr(kwargs.get("config"), "model_type", "the model")

        def check() -> None:
            check_padding(state, handle.mesh.cp_rank, attention_mask, causal=visible.causal)
            check_mask(
                state,
                model,
                causal=visible.causal,
                has_mask=attention_mask is not None,
                folded=visible.packed,
                before=before,
            )

        if attention_mask is None and not state.positions.not_sequential:
            check()  # it does not depend on this rank's tokens
        else:
            handle.ranks.checks.run(f"attention mask of {model}", check)
        if state.positions.restart and not visible.causal:
            warn_isolated(handle.warned, model)
        return make_note(visible, (batch_size, 1, q_length, kv_length)[-dims:], device)

    return mask


class MaskNote(torch.Tensor):
    """Placeholder for a 4-D mask, which holds its visibility.

    It has the mask's shape, so that models pass it on, and no values: an operation that would read or change
    them is refused.
    """

    visible: Visibility

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name in _MOVES:
            return args[0]
        if name in _METADATA or name in _COMPILER or name == "__getitem__":
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            if name != "__getitem__":
                return result
            if result.shape == args[0].shape:  # models cut masks to the length of a cache
                return args[0]
        raise ConfigError(
            f"the model changes its attention mask after making it ({name}), so what it asks for is not "
            f"known. {EXPRESSIBLE}"
        )

    def __repr__(self, **kwargs: Any) -> str:
        return f"MaskNote({self.visible})"


_MOVES = {"detach", "to", "contiguous", "cuda", "cpu", "bool"}
_METADATA = {
    *(
        "grad",
        "shape",
        "ndim",
        "dtype",
        "device",
        "layout",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
    ),
    *("requires_grad", "is_leaf", "grad_fn", "is_nested", "dim", "size", "numel", "get_device"),
    *("is_floating_point", "is_complex", "__hash__", "__len__", "is_contiguous", "is_quantized"),
}
_COMPILER = {
    *("_base", "_is_view", "_version", "stride", "storage_offset", "untyped_storage"),
    *("is_mkldnn", "is_inference", "is_conj", "is_neg", "names", "itemsize", "element_size"),
}
"""Attributes that torch.compile reads of a tensor which it passes to code that it does not trace."""


def make_note(visible: Visibility, shape: tuple[int, ...], device: Any) -> MaskNote:
    """Return a note of the given shape, with the memory of one element."""
    plain = torch.zeros(1, dtype=torch.bool, device=device).expand(shape)
    note = cast(MaskNote, torch.Tensor._make_subclass(MaskNote, plain))
    note.visible = visible
    return note
