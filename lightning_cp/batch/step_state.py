"""State of the current step: facts of its batch for attention calls and the model's forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn

import torch
from torch import nn

from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.batch.loss_calls import LossCalls
from lightning_cp.errors import ConfigError
from lightning_cp.layout import Documents, SequenceLayout
from lightning_cp.layout.documents import text_positions
from lightning_cp.utils.labels import IGNORED_LABEL
from lightning_cp.utils.tensors import to_list

ONE_BATCH = (
    "There is one batch for each backward. For a loss of several (chosen and rejected answers), join their "
    "rows in one batch, padded to one length with an attention_mask, shard that one, and split the outputs."
)


@dataclass(frozen=True)
class PositionInfo:
    """Facts of the positions of the whole batch, read before it is sharded and equal on every rank.

    A rank sees its own tokens only. A check of these alone could raise on one rank, and the others would wait
    for it in a collective.
    """

    from_zero: bool = True
    """Positions are 0, 1, 2, ... in every row; also where the batch has none."""
    not_sequential: bool = False
    """Text positions are not 0, 1, 2, ... plus a constant; in packed rows, not 0, 1, 2, ..."""
    packed: bool = False
    """A row has several documents, by any declaration."""
    longest: int = -1
    """The largest position of all; -1 if unknown."""

    @cached_property
    def restart(self) -> bool:
        """True if the batch is packed, and positions count within documents."""
        return self.packed and self.not_sequential


def position_info(position_ids: torch.Tensor | None, layout: SequenceLayout) -> PositionInfo:
    """Read the positions of a batch.

    Args:
        position_ids: integers [..., S], of the whole sequence, if the batch has any.
        layout: of the batch, with its documents.
    """
    packed = _packed(layout.documents)
    if position_ids is None:
        return PositionInfo(packed=packed, longest=layout.seq_len - 1)
    ahead = position_ids - torch.arange(layout.seq_len, device=position_ids.device)
    text = text_positions(ahead)
    anew = ahead.new_zeros(()) if text is None else (text != (0 if packed else text[..., :1])).any()
    said = (ahead.any().long(), anew.long(), position_ids.max())
    moved, anew, longest = to_list(torch.stack(said))  # in one copy: each copy waits for the GPU
    return PositionInfo(not moved, bool(anew), packed, longest)


def _packed(documents: Documents | None) -> bool:
    return documents is not None and any(row.shape[0] > 1 for row in documents.rows)


@dataclass
class StepState:
    """State of a step, for the attention calls and the model's forward."""

    layout: SequenceLayout
    position_ids: torch.Tensor
    """int64 [B or 1, L]: global positions of the local tokens, 0 where padded."""
    positions: PositionInfo = field(default_factory=PositionInfo)
    """Facts of the whole batch's positions."""
    aligned_labels: torch.Tensor | None = None
    """[B, L]: the target of each local token, -100 where there is none."""
    labels: torch.Tensor | None = None
    """[B, L]: a copy of the labels that the step gets (not shifted), to detect changes."""
    valid_local: int = 0
    """Targets on this rank that are not -100."""
    real_local: int | None = None
    """Local tokens of the sequence, before its padding; ``None``: all."""
    padding_asked: bool = False
    """The step called ``token_mask``."""
    padding_gradients: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """One flag per attention call that backward reached: its gradient on padding is not 0."""
    refusals: list[tuple[str, torch.Tensor]] = field(default_factory=list[tuple[str, torch.Tensor]])
    """Errors with flags on the device, which are read before the optimizer's step."""
    counted: torch.Tensor | None = None
    """Targets on this rank by ``count_targets``, in place of ``valid_local``."""
    loss_outside: bool = False
    """The run declares how the step reads labels, so the step may compute the loss itself."""
    labels_read: str = ""
    """Reading of labels: ``shift`` or ``aligned``; any other value is not checked."""
    needs_loss: bool = True
    """The step trains or evaluates; false for prediction."""
    trains: bool = True
    """The step trains."""
    labels_taken: bool = False
    """A model got the labels, and computes the loss."""
    model_called: bool = False
    """A module that could attend was called."""
    left: bool = False
    """The loop over batches went past this batch before any module was called."""
    waits: bool = False
    """After ``left``, no call had a tensor of the batch: the step is suspended."""
    calls: int = 0
    """Number of intercepted attention calls."""
    begun_calls: dict[nn.Module, list[int]] = field(default_factory=dict[nn.Module, list[int]])
    """Value of ``calls`` at each call of a module with attention that has not returned: recomputation may
    call a module within another call of it."""
    need_gradients: list[str] = field(default_factory=list[str])
    """For each attention call its kind, if its output requires a gradient; else an empty text."""
    compared: int = -1
    """Number of attention calls when ranks last compared ``need_gradients``; -1: never."""
    plans: dict[tuple[object, ...], tuple[AttentionSpec, AttentionPlan]] = field(
        default_factory=dict[tuple[object, ...], tuple[AttentionSpec, AttentionPlan]]
    )
    """Plans of this batch's attention calls, shared by layers that make the same call."""
    first_gradient: torch.Tensor | None = None
    """Largest entry of the first gradient that reached an attention call, on a rank without targets: it
    comes from this rank's own loss alone, and should be 0."""
    tokens: torch.Tensor | None = None
    """bool [2, rows, L], made on first use: local tokens within the sequence, and within a document."""
    cached_by: str = ""
    """Class of a model that would make a key/value cache in one process, hiding packing from its masks."""

    losses: LossCalls | None = None
    """Record of loss functions, if logged values are compared with them."""
    weighted: bool = False
    """A loss of this step got its weight, as in the strategy's ``backward``."""
    ended: bool = False
    """Another step has begun, or the swap was deactivated."""

    @property
    def targets(self) -> torch.Tensor | int:
        """Number of targets that this rank's loss is a mean over."""
        return self.valid_local if self.counted is None else self.counted

    @property
    def has_target(self) -> torch.Tensor | None:
        """bool [B, L]: this rank's tokens with a label; ``None`` without labels of that shape."""
        labels = self.aligned_labels
        return None if labels is None or labels.dim() != 2 else labels != IGNORED_LABEL

    def refuse_if(self, found: torch.Tensor, message: str) -> None:
        """Refuse the step if a check found something; on a GPU, in training, before the optimizer's step.

        A forward would wait for the device.

        Args:
            found: bool, the result of the check.
            message: of the error.

        Raises:
            ConfigError: the check found something, and its flag can be read now.
        """
        if self.trains and found.is_cuda:
            self.refusals.append((message, found))
        elif found:
            raise ConfigError(message)

    def take_refusals(self) -> list[tuple[str, torch.Tensor]]:
        """Remove and return errors whose flags were not read."""
        taken, self.refusals = self.refusals, []
        return taken

    def note_gradient(self, gradient: torch.Tensor) -> None:
        """Check and record the gradient of an attention output (a hook).

        Raises:
            ConfigError: ``backward`` was called on a loss without its weight, or in another step.
        """
        if self.ended:
            raise ConfigError(
                "backward came to a batch whose step has ended: another batch was sharded before its "
                f"backward. {ONE_BATCH}"
            )
        if not self.weighted:
            raise ConfigError(
                "backward was called on a loss that was not weighted by this rank's share of the targets, so "
                "gradients would not be those of one process. Use self.manual_backward(loss) in a "
                "LightningModule, fabric.backward(loss) with Fabric, and not loss.backward(). In place of "
                "torch.autograd.grad call the same with retain_graph=True, and take the gradients from .grad "
                "of parameters (copy them, then zero_grad())."
            )
        if not self.valid_local and self.first_gradient is None:
            self.first_gradient = gradient.detach().abs().amax()
        if self.real_local is not None and self.real_local < gradient.shape[1]:
            of_padding = gradient.detach()[:, self.real_local :]
            self.padding_gradients.append(of_padding.nan_to_num().any())  # NaN is refused as such

    def take_padding_gradients(self) -> torch.Tensor | None:
        """Remove and return the flag of gradients on padding, on the device; ``None`` without any."""
        found, self.padding_gradients = self.padding_gradients, []
        return torch.stack(found).any() if found else None


def raise_gradient_mismatch(every: Mapping[int, Sequence[str]]) -> NoReturn:
    """Raise for a backward that reaches different attention calls on ranks that share a sample.

    Args:
        every: per rank, the kind of each attention call that backward reaches, or an empty text.

    Raises:
        ConfigError: always.
    """
    calls = list(zip(*every.values(), strict=False))
    other = next((at for at, kinds in enumerate(calls) if all(kinds) and len({*kinds}) > 1), None)
    if other is not None:
        kinds = "; ".join(f"rank {rank}: {of[other]}" for rank, of in every.items())
        raise ConfigError(
            f"attention call {other} of a step differs between ranks that share a sample ({kinds}), so their "
            "parts of the result do not fit together. Make the same calls on all of them, with the same "
            "settings."
        )
    reached = {rank: [call for call, needs in enumerate(of) if needs] for rank, of in every.items()}
    shown = ", ".join(f"rank {rank}: calls {calls}" for rank, calls in reached.items())
    raise ConfigError(
        "backward comes through other attention calls on some context-parallel ranks than on the others "
        f"({shown}), so ranks would wait for each other for ever. Something that "
        "is trained takes part in the forward on some ranks only, by what their own tokens are (an `if` "
        "on a mask): let it take part on every rank, multiplied by the mask."
    )
