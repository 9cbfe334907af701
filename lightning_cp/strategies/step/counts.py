"""Counts of a step's losses beside the weights of their ranks, compared before the optimizer's step.

Numbers stay on the device. Whether they differ is one flag, which the vote on a step reads together with
whether gradients are finite.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from lightning_cp.comm.agreement import gathered_lists
from lightning_cp.errors import ConfigError
from lightning_cp.loss_terms import Count


class TargetCounts:
    """The counts of all means since the last step of an optimizer."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.are_asked = False
        """A loss went backward whose counts matter: known to all ranks, while a mean is known to its own."""

    def note(self, means: Iterable[Count], weighted: Count) -> None:
        """A loss goes backward that is made of ``means``, and has the weight of ``weighted`` targets."""
        self.are_asked = True
        for count in means:
            of_mean = torch.as_tensor(count)
            self._pairs.append((of_mean, torch.as_tensor(weighted).to(of_mean.device)))

    def take(self) -> TargetCounts:
        """All of them, which are forgotten here."""
        taken = TargetCounts()
        taken._pairs, self._pairs = self._pairs, []
        taken.are_asked, self.are_asked = self.are_asked, False
        return taken

    @property
    def differ(self) -> torch.Tensor | None:
        """True if some mean counted something else, on the device; ``None`` without any means."""
        if not self._pairs:
            return None
        return torch.stack([_differ(*pair) for pair in self._pairs]).any()

    def refuse(self, step: int, group: dist.ProcessGroup | None) -> None:
        """Refuse a step whose losses counted something else on any rank. Collective.

        Raises:
            ConfigError: on every rank, with both numbers of each rank where they differ.
        """
        found = self.difference(group)
        if found is not None:
            raise ConfigError(f"step {step}: {found} No rank has stepped.")

    def difference(self, group: dist.ProcessGroup | None) -> str | None:
        """Both numbers of each rank where they differ, and what to do; ``None`` if none does. Collective."""
        own = [(float(a), float(b)) for a, b in self._pairs if _differ(a, b)][:1]
        every = [own] if group is None else gathered_lists(own, group)
        found = [
            f"{counted:g} on rank {rank}, which is weighted by {weight:g}"
            for rank, pairs in enumerate(every)
            for counted, weight in pairs
        ]
        if not found:
            return None
        more = f" ({len(found)} ranks in all)" if len(found) > 4 else ""
        return (
            "a loss counted other targets than its rank is weighted by: "
            f"{'; '.join(found[:4])}{more}. Do not shift or cut labels in the step. For targets that it "
            "draws or leaves out, and for weights of classes, call count_targets(mask or number) in the "
            "step (of ContextParallelMixin, or of the strategy); compute a further loss of other targets "
            "from unshard(...)."
        )


def _differ(count: torch.Tensor, weighted: torch.Tensor) -> torch.Tensor:
    """Sums of classes' weights are rounded; numbers of targets are not."""
    if not count.is_floating_point():
        return count.double() != weighted.double()
    return (count.double() - weighted.double()).abs() > 1e-5 * weighted.double().abs()


ASK = (
    "it is not known what this loss is a mean over: it is more than cross-entropies of PyTorch "
    "(reduction='mean'), times numbers of Python, and values of unshard, so that its gradient could be wrong "
    "silently. Call {count}(mask or number) before its backward: what this rank's loss counts; or {check}. A "
    "loss of sums per sequence (DPO, rewards) is computed from {unshard}(values), which are the same on all "
    "ranks."
)
"""Of a loss that is of no known kind."""
