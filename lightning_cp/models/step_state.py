"""Facts of the current batch for attention calls and a model's forward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.errors import ConfigError
from lightning_cp.labels import IGNORED_LABEL
from lightning_cp.layout import SequenceLayout
from lightning_cp.loss_calls import LossCalls
from lightning_cp.models.facts import PositionFacts


@dataclass
class StepState:
    """Facts of the current batch for the attention calls and the model's forward."""

    layout: SequenceLayout
    position_ids: torch.Tensor
    """int64 [B or 1, L]: global positions of the local tokens, 0 where padded."""
    positions: PositionFacts = field(default_factory=PositionFacts)
    """Of the whole batch."""
    aligned_labels: torch.Tensor | None = None
    """[B, L]: the target of each local token, -100 where there is none."""
    labels: torch.Tensor | None = None
    """[B, L]: a copy of the labels as the step gets them (not shifted), to see whether it changes them."""
    valid_local: int = 0
    """Targets on this rank that are not -100."""
    real_local: int | None = None
    """Local tokens of the sequence, before its padding; ``None``: all."""
    padding_asked: bool = False
    """The step has asked which tokens are padding."""
    padding_gradients: list[torch.Tensor] = field(default_factory=list)
    """Of each attention call that backward came to: whether its gradient is not 0 on padding."""
    counted: torch.Tensor | None = None
    """Targets on this rank by ``count_targets``, in place of ``valid_local``."""
    loss_outside: bool = False
    """It was declared how the step reads labels, so it may compute the loss itself."""
    labels_read: str = ""
    """How labels are read: ``shift`` or ``aligned``; anything else: that does not matter here."""
    needs_loss: bool = True
    """The step trains or evaluates: what it makes of labels counts. Not so when it predicts."""
    trains: bool = True
    """The step trains."""
    labels_taken: bool = False
    """A model was given them, and computes the loss."""
    model_called: bool = False
    """Something of the model was called that could attend."""
    left: bool = False
    """The loop that gave the batch was left before anything of the model was called."""
    waits: bool = False
    """Since then nothing was called with a tensor of the batch."""
    calls: int = 0
    """Attention calls that were intercepted."""
    need_gradients: list[bool] = field(default_factory=list)
    """Of each attention call: whether backward will come through it."""
    compared: int = -1
    """So many attention calls there were when ranks compared that; -1: they did not."""
    plans: dict[tuple[object, ...], tuple[AttentionSpec, AttentionPlan]] = field(
        default_factory=dict
    )
    """How attention calls of this batch are executed: layers make the same call."""
    first_gradient: torch.Tensor | None = None
    """Largest entry of the gradient that backward brought first to an attention call, if there are no
    targets here: it comes from this rank's own loss alone, and should be 0."""
    tokens: torch.Tensor | None = None
    """bool [2, rows, L], once asked for: local tokens within the sequence, and within a document."""
    cached_by: str = ""
    """The model that would make a key/value cache in one process, which hides packing from its masks."""

    losses: LossCalls | None = None
    """Where logged values are looked at: what loss functions have counted."""
    weighted: bool = False
    """A loss of this step was given its weight, as the strategy's ``backward`` does."""
    ended: bool = False
    """Another step has begun, or the models are plain models again."""

    @property
    def targets(self) -> torch.Tensor | int:
        """The number of targets that this rank's loss is a mean over."""
        return self.valid_local if self.counted is None else self.counted

    @property
    def has_target(self) -> torch.Tensor | None:
        """bool [B, L]: which tokens of this rank have a label; ``None`` without labels of that shape."""
        labels = self.aligned_labels
        return None if labels is None or labels.dim() != 2 else labels != IGNORED_LABEL

    def note_gradient(self, gradient: torch.Tensor) -> None:
        """A hook for the outputs of attention calls.

        Raises:
            ConfigError: somebody called ``backward`` on a loss without its weight, or in another step.
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
        """True if backward has trained on padding, on the device; ``None`` where it came to none."""
        found, self.padding_gradients = self.padding_gradients, []
        return torch.stack(found).any() if found else None


ONE_BATCH = (
    "There is one batch for each backward. For a loss of several (chosen and rejected answers), join their "
    "rows in one batch, padded to one length with an attention_mask, shard that one, and split the outputs."
)
