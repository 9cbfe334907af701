"""Bytes of what one rank's step keeps for backward, and of what a block needs while it is differentiated.

Of C features, H heads and K key heads of size D, I inner features, e bytes per number that is computed with;
per token of all rows of the batch. Norms compute in float32, whose input is a copy unless e is 4 already.

=======================================  =========================================================
norm before a projection                 input 4C, root 4, what is multiplied with the weight eC (4C
                                         of gemma, which multiplies in float32), output eC
norm within heads (qwen3)                the same of q and k, without the output
attention                                q, k, v, out and lse: 2 e HD + 2 e KD + 4 H
MLP                                      gate, its activation, up and their product: 4 e I
experts (mixtral, by grouped products)   r (2 e C + 4 e I + 40) + 4 E + 4 of r experts among E
=======================================  =========================================================

Heads, inner features and the vocabulary are divided by tensor-parallel ranks; features are not.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_cp.errors import ConfigError
from lightning_cp.planner.model import Model

RECOMPUTE = ("none", "blocks", "keep_attention")
"""What of its blocks a step computes again in backward."""
WIDE = 4
"""Bytes of float32."""
_INT64 = 8


@dataclass(frozen=True)
class RankStep:
    """What one rank computes in one step, and how."""

    model: Model
    tokens: int
    """Of this rank, of all rows of the batch."""
    cp_size: int = 1
    """Ranks that share a row."""
    tp_size: int = 1
    itemsize: int = 2
    """Bytes of a number that is computed with."""
    parameter_itemsize: int = 2
    recompute: str = "none"
    offload: bool = False
    """What is kept of recomputed blocks waits in the host's memory."""
    chunked_loss: int = 0
    """Tokens of a chunk; 0: all logits are made."""
    pytorch_loss: bool = True
    """PyTorch has a loss in chunks, as it does from 2.13 on."""
    tiled_mlp: int = 0
    """Tokens of a tile, of all rows; 0: all at once."""
    attention: tuple[int, int] = (0, 0)
    """Peaks of an attention call in forward and in backward, of ``layout.memory.attention_memory``."""
    engine: str = "ddp"
    shard_ranks: int = 1
    """Ranks that a parameter is cut for, with an engine that shards."""
    reduce_itemsize: int = 0
    """Bytes of a number of gradients while they are added; 0: as they are."""

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise ConfigError(
                f"recompute must be one of {', '.join(RECOMPUTE)}, got {self.recompute!r}. "
                "Choose one of these."
            )

    @property
    def recomputes(self) -> bool:
        """True if blocks are computed again."""
        return self.recompute != "none"

    @property
    def keeps_attention(self) -> bool:
        """Alone, a rank has no communication to save."""
        return self.recompute == "keep_attention" and self.cp_size > 1

    @property
    def tiles(self) -> bool:
        """True if the MLP is run on some tokens at a time: short sequences are left alone."""
        return 0 < self.tiled_mlp < self.tokens and not self.model.experts

    @property
    def capped(self) -> bool:
        """True if logits are capped."""
        return self.model.family == "gemma2"

    @property
    def vocabulary(self) -> int:
        """Entries of a token's logits on this rank."""
        return self.model.vocabulary // self.tp_size

    @property
    def of_features(self) -> int:
        """Bytes of a token's features: of the residual stream, and of its gradient."""
        return self.itemsize * self.model.features

    @property
    def of_inner(self) -> int:
        """Bytes of one of the MLP's tensors, per token."""
        return self.itemsize * self.model.inner // self.tp_size

    @property
    def of_queries(self) -> int:
        """Bytes of a token's queries."""
        return self.itemsize * self.model.heads * self.model.head_dim // self.tp_size

    @property
    def of_out(self) -> int:
        """Bytes of what attention gives for a token."""
        return self.itemsize * self.model.heads * self.model.value_dim // self.tp_size

    @property
    def of_pair(self) -> int:
        """Bytes of a token's keys and values."""
        dims = self.model.head_dim + self.model.value_dim
        return self.itemsize * self.model.kv_heads * dims // self.tp_size

    @property
    def of_lse(self) -> int:
        """Bytes of a token's logarithms of sums."""
        return WIDE * self.model.heads // self.tp_size

    @property
    def of_rotary(self) -> int:
        """Bytes of a token's cosines and sines."""
        return 2 * self.itemsize * self.model.head_dim


@dataclass(frozen=True)
class LayerBytes:
    """Per token, what a layer's backward finds, by where it is."""

    norm: int
    """Of one norm: its input in float32, its root, and what its weight multiplies."""
    norms_behind: int
    """Of norms behind attention and the MLP (gemma2): both."""
    given: int
    """What the projections of attention, or of the MLP, are given: the norm's output."""
    attention: int
    mlp: int

    @property
    def total(self) -> int:
        """Of the layer."""
        return 2 * (self.norm + self.given) + self.norms_behind + self.attention + self.mlp


def layer_bytes(step: RankStep) -> LayerBytes:
    """Of a layer that is not recomputed, or once it is."""
    norm = norm_bytes(step)
    behind = 2 * norm if step.model.family == "gemma2" else 0
    attention = step.of_queries + step.of_out + step.of_pair + step.of_lse
    if step.model.family == "qwen3":
        heads = (step.model.heads + step.model.kv_heads) // step.tp_size
        attention += heads * ((WIDE + step.itemsize) * step.model.head_dim + WIDE)
    mlp = _experts(step) if step.model.experts else 4 * step.of_inner
    return LayerBytes(norm, behind, step.of_features, attention, 0 if step.tiles else mlp)


def norm_bytes(step: RankStep) -> int:
    """What one norm keeps of a token, without its output."""
    multiplied = WIDE if step.model.family.startswith("gemma") else step.itemsize
    return (WIDE + multiplied) * step.model.features + WIDE


def _experts(step: RankStep) -> int:
    """Of each of r experts: its token, gate and up in one, the activation and the product, what comes out;
    its number, its place in the order of experts and back, and its token's; its weight, in both orders. Of
    the router: probabilities, and the sum of the largest."""
    each = 2 * step.of_features + 4 * step.of_inner + 4 * _INT64 + 2 * WIDE
    return step.model.experts_per_token * each + WIDE * (step.model.experts + 1)


def kept_per_layer(step: RankStep) -> int:
    """Bytes that forward keeps per token and layer."""
    if not step.recomputes:
        return layer_bytes(step).total
    return step.of_features + (kept_of_attention(step) if step.keeps_attention else 0)


def kept_of_attention(step: RankStep) -> int:
    """Out and lse."""
    return step.of_out + step.of_lse


def kept_beside(step: RankStep) -> int:
    """Bytes that forward keeps per token besides layers.

    The last norm and the head's input; rotary rows; the logarithms of all probabilities, ``4 V`` (and of a
    cap, what it makes, ``e V``), or a chunked loss's targets, which of them count, and its lse (PyTorch's own
    loss, which float32 has, keeps none).
    """
    return norm_bytes(step) + step.of_features + step.of_rotary + kept_by_loss(step)


def kept_by_loss(step: RankStep) -> int:
    """Bytes per token."""
    if step.chunked_loss:
        return _INT64 + 1 + (0 if uses_pytorch_loss(step) else WIDE)
    capped = step.itemsize if step.capped else 0
    return (WIDE + capped) * step.vocabulary


def uses_pytorch_loss(step: RankStep) -> bool:
    """Where a chunked loss is PyTorch's: in float32, without a cap."""
    wide = step.itemsize == step.parameter_itemsize == WIDE
    return step.pytorch_loss and wide and not step.capped


def batch_bytes(step: RankStep) -> int:
    """Integers per token: ids, positions, labels and targets, and :func:`checked_bytes`; where ranks compare
    what they were given, the factors of a checksum of whole rows."""
    if step.cp_size == 1:
        return 4 * _INT64
    return (4 + step.cp_size) * _INT64 + checked_bytes(step)


def checked_bytes(step: RankStep) -> int:
    """Copies of labels and targets, by which a step of several ranks sees that nobody changed them."""
    return 2 * _INT64 if step.cp_size > 1 else 0
