"""Questions to a strategy: who a rank is, whole tensors and one process's values."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from lightning_cp.layout import LayoutChoice
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.token_draws import Per, draw_per
from lightning_cp.strategies.step.core import ContextParallelCore


class Answers:
    """Comes before a ``DDPStrategy``; asks the core."""

    _core: ContextParallelCore

    @property
    def mesh(self) -> ContextParallelMesh:
        """The process groups; available from setup on, earlier if the number of heads is given."""
        return self._core.mesh

    @property
    def layout_choice(self) -> LayoutChoice | None:
        """With ``layout="auto"``: the layout of the current batch, and what each was predicted to cost."""
        return self._core.layout_choice

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks with different samples: what samplers shard over, not the world size."""
        return self._core.settings.data_parallel_size

    @property
    def data_rank(self: Any) -> int:
        """The number of this rank's sample, of ``data_parallel_size`` ones."""
        return self._core.data_rank(self.global_rank, self.world_size)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks that share a sample draw the same one."""
        return {"num_replicas": self.data_parallel_size, "rank": self.data_rank}

    def explain(self) -> str:
        """The kernel of each kind of attention call so far, and why each other one was passed over."""
        return self._core.explain()

    def unshard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """A local tensor of the current step, whole, in original order and length, on every rank.

        Differentiable. A loss of it is the same on every rank, and its gradients are those of one process.
        """
        return self._core.unshard_tensor(x, dim)

    def count_targets(self, counted: torch.Tensor | float) -> torch.Tensor:
        """Declare what the loss of this step counts, where that is not the batch's labels.

        For targets that the step draws or leaves out, for weights of classes or of tokens, and for a mean by
        hand. Every rank calls it, before backward; a Hugging Face model that is given ``labels=`` is
        called after it. Averages of the step follow it too. Each call adds up one number per rank on the
        device, which the host does not wait for (with ``token_weighting="global"`` it does).

        Args:
            counted: a mask of this rank's tokens, their weights, or how many targets this rank counts. All
                leave out padding, see ``token_mask``: it is refused before a weight changes.

        Returns:
            The count of this rank, and 1 where it is 0: what a sum over targets is to be divided by.

        Raises:
            ConfigError: no count, or a second one for the same loss; in validation, one of padding.
        """
        return self._core.count_targets(counted)

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over the group, weighted by targets: what one process would show of this step."""
        return self._core.average(value)

    def token_mean(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """(sum of totals) / (sum of counts) over the group: the mean that one process would show.

        Args:
            total: a scalar, the sum over what this rank holds; not looked at where ``count`` is 0.
            count: a scalar, how many it is the sum of.
        """
        return self._core.token_mean(total, count)

    def token_positions(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """int64 [B or 1, L]: the positions of a step's tokens in the whole sequence, 0 for padding."""
        return self._core.token_positions(x, dim)

    def token_mask(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """bool [1, L]: true for tokens of the sequence, false for padding that the strategy added.

        For masks that a step draws or makes of inputs. Padding of the batch's own is true.
        """
        return self._core.token_mask(x, dim)

    def draw_per(self, what: Per) -> AbstractContextManager[None]:
        """A block within which random numbers are of each ``"token"``, or of each ``"row"`` of the batch.

        For dropout and random functions of tensors whose shape does not tell: numbers of tokens differ
        between ranks that share a sample, those of rows (of parameters, of layers) are equal on them.
        """
        return draw_per(what)
