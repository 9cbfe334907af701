"""Bytes that one rank's step saves for backward, and that a block needs during its backward.

For C features, H heads and K key heads of size D, I inner features, e bytes per number of the compute dtype;
per token of all rows of the batch. Norms compute in float32; their input is a copy unless e is 4.

=======================================  =========================================================
norm before a projection                 input 4C, root 4, factor of the weight eC (4C of gemma, which
                                         multiplies in float32), output eC
norm within heads (qwen3)                the same for q and k, without the output
attention                                q, k, v, out and lse: 2 e HD + 2 e KD + 4 H
MLP                                      gate, its activation, up and their product: 4 e I
experts (mixtral, by grouped products)   r (2 e C + 4 e I + 40) + 4 E + 4 of r experts among E
=======================================  =========================================================

Heads, inner features and the vocabulary are divided by tensor-parallel ranks; features are not.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_cp.errors import ConfigError
from lightning_cp.planner.job import PlanCase
from lightning_cp.planner.model import Model

RECOMPUTE_MODES = ("none", "blocks", "keep_attention")
"""Recomputation of blocks in backward."""
FLOAT32_BYTES = 4
"""Bytes of float32."""
_INT64_BYTES = 8


@dataclass(frozen=True)
class RankStep:
    """One rank's work in one step, and the settings of memory."""

    model: Model
    tokens: int
    """Tokens of this rank, over all rows of the batch."""
    cp_size: int = 1
    """Ranks that share a row."""
    tp_size: int = 1
    itemsize: int = 2
    """Bytes of a number of the compute dtype."""
    parameter_itemsize: int = 2
    recompute: str = "none"
    offload: bool = False
    """Saved tensors of recomputed blocks are in host memory."""
    chunked_loss: int = 0
    """Tokens of a chunk; 0: all logits at once."""
    pytorch_loss: bool = True
    """PyTorch has a chunked loss (2.13 and later)."""
    tiled_mlp: int = 0
    """Tokens of a tile, of all rows; 0: all at once."""
    attention: tuple[int, int] = (0, 0)
    """Peaks of an attention call in forward and in backward, from ``layout.attention_memory``."""
    engine: str = "ddp"
    shard_ranks: int = 1
    """Ranks over which an engine shards a parameter."""
    reduce_itemsize: int = 0
    """Bytes of a number of gradients during their reduction; 0: those of the gradients."""

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE_MODES:
            raise ConfigError(
                f"recompute must be one of {', '.join(RECOMPUTE_MODES)}, got {self.recompute!r}. "
                "Choose one of these."
            )

    @property
    def recomputes(self) -> bool:
        """True if blocks are recomputed."""
        return self.recompute != "none"

    @property
    def keeps_attention(self) -> bool:
        """True if attention's results are stored; a single rank has no communication to avoid."""
        return self.recompute == "keep_attention" and self.cp_size > 1

    @property
    def tiles(self) -> bool:
        """True if the MLP runs in tiles of tokens, which short sequences do not."""
        return 0 < self.tiled_mlp < self.tokens and not self.model.experts

    @property
    def capped(self) -> bool:
        """True if logits are capped."""
        return self.model.family == "gemma2"

    @property
    def vocabulary(self) -> int:
        """Logits of a token on this rank."""
        return self.model.vocabulary // self.tp_size

    @property
    def of_features(self) -> int:
        """Bytes of a token in the residual stream, or in its gradient."""
        return self.itemsize * self.model.features

    @property
    def of_inner(self) -> int:
        """Bytes of one inner tensor of the MLP, per token."""
        return self.itemsize * self.model.inner // self.tp_size

    @property
    def of_queries(self) -> int:
        """Bytes of a token's queries."""
        return self.itemsize * self.model.heads * self.model.head_dim // self.tp_size

    @property
    def of_out(self) -> int:
        """Bytes of a token's attention output."""
        return self.itemsize * self.model.heads * self.model.value_dim // self.tp_size

    @property
    def of_pair(self) -> int:
        """Bytes of a token's keys and values."""
        dims = self.model.head_dim + self.model.value_dim
        return self.itemsize * self.model.kv_heads * dims // self.tp_size

    @property
    def of_lse(self) -> int:
        """Bytes of a token's log-sum-exps."""
        return FLOAT32_BYTES * self.model.heads // self.tp_size

    @property
    def of_rotary(self) -> int:
        """Bytes of a token's cosines and sines."""
        return 2 * self.itemsize * self.model.head_dim


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes per token that a layer saves for backward, by place."""

    norm: int
    """One norm: its input in float32, its root, and the factor of its weight."""
    norms_behind: int
    """Both norms after attention and the MLP (gemma2)."""
    norm_output: int
    """Input of the projections of attention, or of the MLP: the norm's output."""
    attention: int
    mlp: int

    @property
    def total(self) -> int:
        """Bytes of the layer."""
        return 2 * (self.norm + self.norm_output) + self.norms_behind + self.attention + self.mlp


def layer_bytes(step: RankStep) -> ActivationBytes:
    """Return the bytes of a layer without recomputation, or after it."""
    norm = norm_bytes(step)
    behind = 2 * norm if step.model.family == "gemma2" else 0
    attention = step.of_queries + step.of_out + step.of_pair + step.of_lse
    if step.model.family == "qwen3":
        heads = (step.model.heads + step.model.kv_heads) // step.tp_size
        attention += heads * ((FLOAT32_BYTES + step.itemsize) * step.model.head_dim + FLOAT32_BYTES)
    mlp = _expert_bytes(step) if step.model.experts else 4 * step.of_inner
    return ActivationBytes(norm, behind, step.of_features, attention, 0 if step.tiles else mlp)


def norm_bytes(step: RankStep) -> int:
    """Return the bytes per token that one norm saves, without its output."""
    multiplied = FLOAT32_BYTES if step.model.family.startswith("gemma") else step.itemsize
    return (FLOAT32_BYTES + multiplied) * step.model.features + FLOAT32_BYTES


def _expert_bytes(step: RankStep) -> int:
    """Return the bytes per token that experts save.

    For each of r experts: its input, gate and up in one tensor, activation and product, output; its index,
    its places in the order of experts and back, and its token's index; its weight, in both orders. For the
    router: probabilities, and the sum of the largest.
    """
    each = 2 * step.of_features + 4 * step.of_inner + 4 * _INT64_BYTES + 2 * FLOAT32_BYTES
    return step.model.experts_per_token * each + FLOAT32_BYTES * (step.model.experts + 1)


def saved_per_layer(step: RankStep) -> int:
    """Return the bytes that forward saves per token and layer."""
    if not step.recomputes:
        return layer_bytes(step).total
    return step.of_features + (saved_by_attention(step) if step.keeps_attention else 0)


def saved_by_attention(step: RankStep) -> int:
    """Return the bytes per token of out and lse."""
    return step.of_out + step.of_lse


def saved_outside_layers(step: RankStep) -> int:
    """Return the bytes that forward saves per token outside of layers.

    The last norm and the head's input; rotary rows; the logarithms of all probabilities, ``4 V`` (and the
    output of a cap, ``e V``), or a chunked loss's targets, their mask, and its lse (which PyTorch's own loss,
    used with float32, does not save).
    """
    return norm_bytes(step) + step.of_features + step.of_rotary + saved_by_loss(step)


def saved_by_loss(step: RankStep) -> int:
    """Return the bytes per token that the loss saves."""
    if step.chunked_loss:
        return _INT64_BYTES + 1 + (0 if uses_pytorch_loss(step) else FLOAT32_BYTES)
    capped = step.itemsize if step.capped else 0
    return (FLOAT32_BYTES + capped) * step.vocabulary


def uses_pytorch_loss(step: RankStep) -> bool:
    """Return True if a chunked loss is PyTorch's: in float32, without a cap."""
    wide = step.itemsize == step.parameter_itemsize == FLOAT32_BYTES
    return step.pytorch_loss and wide and not step.capped


def batch_bytes(step: RankStep) -> int:
    """Return the bytes per token of the batch's integers.

    These are ids, positions, labels and targets; where ranks compare their batches, also the factors of a
    checksum of whole rows, and :func:`label_copy_bytes`.
    """
    if step.cp_size == 1:
        return 4 * _INT64_BYTES
    return (4 + step.cp_size) * _INT64_BYTES + label_copy_bytes(step)


def label_copy_bytes(step: RankStep) -> int:
    """Return the bytes per token of copies of labels and targets, which detect changes in a shared step."""
    return 2 * _INT64_BYTES if step.cp_size > 1 else 0


def rank_step(case: PlanCase, attention: tuple[int, int] = (0, 0)) -> RankStep:
    """Return a rank's step of one sequence of a case; ``attention`` are an attention call's peaks."""
    job, choice = case.job, case.choice
    shards = choice.engine != "ddp"
    return RankStep(
        job.model,
        case.local_tokens,
        choice.mesh.cp,
        choice.mesh.tp,
        itemsize=job.compute_itemsize,
        parameter_itemsize=job.itemsize,
        recompute=choice.checkpointing,
        offload=choice.offload,
        chunked_loss=choice.chunked_loss,
        tiled_mlp=choice.tiled_mlp,
        attention=attention,
        engine=choice.engine,
        shard_ranks=choice.shard_ranks,
        reduce_itemsize=job.reduced_itemsize if shards else 0,
    )
