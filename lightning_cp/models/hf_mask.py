"""The mask that a Hugging Face model asks for, carried to its attention calls.

transformers composes every mask from small functions (causal, sliding, packed, ...) and hands the
composition to the registered mask function, once for each kind of layer. Ours reads it, refuses what
``AttentionSpec`` cannot say, and returns a ``MaskNote`` in the place of the mask: each layer passes its
own note to its own attention call, so models with several kinds of layers need no guessing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.hf_packing import check_mask, warn_isolated
from lightning_cp.models.hf_padding import check_padding
from lightning_cp.untraced import untraced

EXPRESSIBLE = (
    "What can be expressed: causal or bidirectional attention, sliding windows, packed documents "
    "(restarting position_ids) and padding (a 2-D attention_mask of the batch)."
)


@dataclass(frozen=True)
class Visible:
    """Visibility within a document; ``window`` as in ``AttentionSpec``."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)

    def __and__(self, other: Visible) -> Visible:
        left, right = (
            min((side for side in sides if side >= 0), default=-1)
            for sides in zip(self.window, other.window, strict=True)
        )
        causal = self.causal or other.causal
        return Visible(causal, (left, -1 if causal else right))


def read_mask(function: Callable[..., Any], seq_len: int) -> Visible:
    """The visibility that a mask function of transformers allows.

    Args:
        function: composed by ``transformers.masking_utils``.
        seq_len: tokens of the whole sequence: longer windows and chunks hide nothing.

    Raises:
        ConfigError: a part of it is not causality, a window or packing.
    """
    inside = _inside(function)
    match _maker(function):
        case "causal_mask_function":
            return Visible(causal=True)
        case "bidirectional_mask_function":
            return Visible()
        case "and_masks":
            found = Visible()
            for part in inside["mask_functions"]:
                found = found & read_mask(part, seq_len)
            return found
        case "sliding_window_overlay":  # its window counts the query itself
            return Visible(window=(int(inside["sliding_window"]) - 1, -1))
        case "sliding_window_bidirectional_overlay":
            reach = int(inside["sliding_window"])
            return Visible(window=(reach, reach))
        case "packed_sequence_mask_function":
            return Visible()  # of the shard's positions; the documents are in the layout
        case "remap_positions_for_packed_sequence":
            return read_mask(inside["mask_function"], seq_len)
        case "chunked_overlay" if int(inside["chunk_size"]) >= seq_len:
            return Visible()
        case "chunked_overlay":
            raise ConfigError(
                f"the model attends in chunks (attention_chunk_size={int(inside['chunk_size'])}), which is "
                f"not sharded beyond one chunk, and the sequence has {seq_len} tokens. {EXPRESSIBLE} Use "
                "sequences of at most one chunk, or a strategy without context parallelism."
            )
        case _ if _is_true(function):
            return Visible()
        case made:
            raise ConfigError(
                f"the model's attention mask has a part that is not sharded: {_named(made, function)}. "
                f"{EXPRESSIBLE} Use inputs for which the model adds no such mask (often: text only), or a "
                "strategy without context parallelism."
            )


_MEANINGS = {
    "or_masks": "or_mask_function or block_sequence_ids, as for images or prefixes that see each other",
    "blockwise_overlay": "block_sequence_ids, blocks of tokens that see each other",
    "padding_mask_function": "a padding mask made by the model itself",
}


_TRUE: Callable[..., Any] = lambda *args: torch.tensor(True, dtype=torch.bool)  # noqa: E731


def _is_true(function: Callable[..., Any]) -> bool:
    """True if it is what files of transformers 5.2 to 5.14 add to a mask, to have one made (Falcon)."""
    code, true = getattr(function, "__code__", None), _TRUE.__code__
    parts = ("co_code", "co_consts", "co_names")
    return all(getattr(code, part, None) == getattr(true, part) for part in parts)


def _maker(function: Callable[..., Any]) -> str:
    """The function of transformers.masking_utils that made ``function``, or its full name if none did."""
    where, name = (
        getattr(function, "__module__", ""),
        getattr(function, "__qualname__", repr(function)),
    )
    return (
        name.split(".<locals>")[0] if where == "transformers.masking_utils" else f"{where}.{name}"
    )


def _inside(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that a mask function was made with."""
    names = function.__code__.co_freevars if hasattr(function, "__code__") else ()
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _makers(function: Callable[..., Any]) -> list[str]:
    """The makers of the parts of an intersection."""
    if _maker(function) != "and_masks":
        return [_maker(function)]
    return [name for part in _inside(function)["mask_functions"] for name in _makers(part)]


def _named(made: str, function: Callable[..., Any]) -> str:
    if made != "or_masks":
        return f"{made} ({_MEANINGS.get(made, 'and_mask_function or a mask function of its own')})"
    parts = " | ".join(_maker(part) for part in _inside(function)["mask_functions"])
    return f"{parts} ({_MEANINGS[made]})"


def mask_function(handle: SwapHandle, before: str, *, dims: int = 4) -> Any:
    """The function that is registered as transformers' mask function.

    Args:
        handle: holds the active step.
        before: the attention implementation that one process uses.
        dims: of the notes: Falcon adds its bias to masks of four.
    """

    @untraced
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
                "(cross-attention, prefixes, memories, an image tower) is not sharded."
            )
        visible = read_mask(mask_function, state.layout.seq_len)
        model = getattr(kwargs.get("config"), "model_type", "the model")

        def check() -> None:
            check_padding(state, handle.mesh.cp_rank, attention_mask, causal=visible.causal)
            check_mask(
                state,
                model,
                causal=visible.causal,
                given=attention_mask is not None,
                folded="packed_sequence_mask_function" in _makers(mask_function),
                before=before,
            )

        if attention_mask is None and not state.positions.count_anew:
            check()  # nothing of this rank's own is looked at
        else:
            handle.checks.agreed(f"attention mask of {model}", check)
        if state.positions.restart and not visible.causal:
            warn_isolated(handle.warned, model)
        return make_note(visible, (batch_size, 1, q_length, kv_length)[-dims:], device)

    return mask


class MaskNote(torch.Tensor):
    """Stands where a 4-D mask would, and holds only what it would have said.

    It has the shape, so that models pass it on, and no values: whatever would read or change them is
    refused.
    """

    visible: Visible

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
            if (
                result.shape == args[0].shape
            ):  # all of it: models cut masks to the length of a cache
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
"""What torch.compile looks at in a tensor that it hands on to what it does not trace."""


def make_note(visible: Visible, shape: tuple[int, ...], device: Any) -> MaskNote:
    """A note of the given shape, with the memory of one element."""
    plain = torch.zeros(1, dtype=torch.bool, device=device).expand(shape)
    note = cast(MaskNote, torch.Tensor._make_subclass(MaskNote, plain))
    note.visible = visible
    return note
