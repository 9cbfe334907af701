"""One step of the user's own, on one process or context parallel, as far as it can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lightning_cp.batch.documents import padding_mask_of
from lightning_cp.comm.consensus import agree
from lightning_cp.comm.reduce import all_sum
from lightning_cp.config import StrategyConfig
from lightning_cp.engines.base import Engine
from lightning_cp.engines.checks import precision_of
from lightning_cp.engines.gradients import average_present
from lightning_cp.errors import ConfigError, LightningCPError
from lightning_cp.layout.axes import Flat
from lightning_cp.parity.batches import as_one_process_has_it, copied, shifting_by_themselves
from lightning_cp.parity.passes import LocalTokens, Recording, StepPass, plain_loss, recording
from lightning_cp.parity.restore import Drawn, untouched
from lightning_cp.runtime.probe import probe_step, single_rank_step
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.utils.containers import tensors_of
from lightning_cp.utils.dtensor import local_part
from lightning_cp.utils.module_hooks import add_hook

# The same model, rounded otherwise: how far rounding alone moves what it computes.
#
# What every innermost module puts out is moved by one unit in the last place, up, down or not at all. What
# a model chooses (experts), and gradients that are zero but for rounding (biases of keys), are moved far by
# that.


@contextmanager
def rounded_otherwise(model: nn.Module, draw: int | None) -> Iterator[None]:
    """Within, what modules put out is rounded otherwise; ``draw`` says how, ``None`` not at all."""
    if draw is None:
        yield
        return
    numbers = torch.Generator().manual_seed(draw)

    def move(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        step = torch.randint(-1, 2, output.shape, generator=numbers, dtype=torch.int8)
        size = torch.finfo(output.dtype).eps
        return output * (1 + size * step.to(output.device, output.dtype))

    innermost = [module for module in model.modules() if next(module.children(), None) is None]
    hooks = [add_hook(module.register_forward_hook, move) for module in innermost]
    try:
        yield
    finally:
        for remove in hooks:
            remove()


Step = Callable[[Any], Any]
"""The user's, of a batch: a loss, or a mapping that has it."""


class CannotRun(Exception):  # noqa: N818 - no error: the check is left out, and says so
    """A step that cannot be compared."""


class StepFailed(Exception):  # noqa: N818 - on all ranks, of which one at least knows why
    """A step on a rank's part of a batch that the user's own code ended, or PyTorch."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error


_MIXED = "mixed torch.Tensor and DTensor"
_KNOWN = (LightningCPError, CannotRun)
PATIENCE = timedelta(seconds=60)
"""How long a rank whose step has failed waits for the others to say how theirs went."""


@dataclass
class Runner:
    """Runs a step twice; all ranks come to each method together.

    Args:
        runtime: of the run.
        engine: that shards parameters, or averages gradients.
        model: the user's, whose gradients are compared.
        step: what to run.
        dtypes: that it computes in, besides those of parameters.
        wide: the same step in the parameters' own dtype, where ``step`` has autocast.
        backward: how a loss goes back, where precision has a say in it.
        everything: records what passes through all modules, for where a difference begins.
        plain_loss: instead of the step's own loss, the mean square of the last output along the sequence.
        evaluation: in evaluation mode; by default modules are in the mode of the run.
        seed: added to the run's: other random numbers.
        rounding: of the draws of what is rounded otherwise in every module; ``None``: nothing.
    """

    runtime: ContextParallelRuntime
    engine: Engine
    model: nn.Module
    step: Step
    dtypes: frozenset[torch.dtype] = frozenset()
    wide: Step | None = None
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
    everything: bool = False
    plain_loss: bool = False
    evaluation: bool = False
    seed: int | None = None
    rounding: int | None = None

    def alone(self, batch: Any) -> StepPass:
        """The whole batch on this rank.

        Its attention is the model's own, unless documents are to be isolated that the model does not know.

        Raises:
            CannotRun: on every rank, if the step fails on one.
            ConfigError: it has failed between ranks that gather parameters, which cannot go on.
        """
        with (
            single_rank_step(self.runtime, batch) as isolated,
            untouched(self.model, self.step, seed=self.seed, evaluation=self.evaluation),
            self.engine.aside(self.model),
            Drawn(self.model) as drawn,
        ):
            loss, found = self._together(batch, lambda: self._forward_alone(batch))
            self._together(batch, lambda: self._backward(loss))
            self._average()
            gradients, at_output = self._gradients(), found.end()
        return StepPass(
            *(loss.detach().double(), gradients, found.events),
            documents_isolated=isolated,
            at_output=at_output,
            drawn=drawn.on_cpu,
            drawn_on_cuda=drawn.on_cuda,
            dtypes=frozenset(found.dtypes | {loss.dtype}),
        )

    def _forward_alone(self, batch: Any) -> tuple[torch.Tensor, Recording]:
        given = as_one_process_has_it(batch, self.runtime.binding.rules)
        with (
            recording(self.model, self.runtime.listen, everything=self.everything) as found,
            rounded_otherwise(self.model, self.rounding),
            shifting_by_themselves(self.model, batch, given),
        ):
            loss = self._loss(self.step(given))
        if self.plain_loss:
            x = _last(found)
            loss = plain_loss(x, None, padding_mask_of(dict(tensors_of(batch))), x.shape[1])
        found.follow_last()
        return loss, found

    def _together(self, batch: Any, run: Callable[[], Any]) -> Any:
        """Leave out on all ranks what one of them cannot do."""
        result = told = None
        try:
            result = run()
        except CannotRun as refused:
            told = str(refused)
        except Exception as failed:  # any: it is the user's
            told = f"{type(failed).__name__}: {failed}".splitlines()[0]
            if self.engine.shards:
                raise self._refusal(batch, failed) from failed
        self.require(told, f"the step fails on {self.count(batch)} tokens")
        return result

    def _refusal(self, batch: Any, failed: Exception) -> ConfigError:
        """Ranks that gather parameters cannot go on."""
        if _MIXED in str(failed):
            return ConfigError(
                "the parity check ran the step, and it joins a parameter that is sharded with a plain tensor "
                f"({type(failed).__name__}: {failed}). Make copies of weights from the sharded ones: in "
                "on_fit_start, by p.detach().clone(); with Fabric after fabric.setup."
            )
        other = "lower" if isinstance(failed, torch.OutOfMemoryError) else "raise"
        return ConfigError(
            f"the parity check ran the step on {self.count(batch)} tokens of its batch, and it failed: "
            f"{type(failed).__name__}: {failed}. If it does not fail in training, say parity_check='off', or "
            f"{other} parity_tokens."
        )

    def require(self, told: str | None, what: str) -> None:
        """Leave the check out on all ranks, if one cannot make it.

        Args:
            told: why; ``None`` where all is well on this rank.
            what: cannot be done then.
        """
        if self.anywhere(told is not None):
            raise CannotRun(f"{what} ({'on another rank' if told is None else told})")

    def anywhere(self, here: bool) -> bool:
        """True if it is so on any rank: data ranks have batches of their own, and run passes together."""
        group = self.runtime.mesh.control_group(Flat.LOSS)
        return bool(int(all_sum(torch.tensor([int(here)]), group)))

    def count(self, batch: Any) -> int:
        """Tokens of a batch, all rows together."""
        whole = self.runtime.binding.read(batch)
        return whole.rows * whole.seq_len

    def parallel(self, batch: Any) -> StepPass:
        """This rank's part of it, as in training.

        Raises:
            ConfigError: as a step of training does.
            StepFailed: the step itself has failed, on some rank.
        """
        runtime = self.runtime
        with (
            probe_step(runtime),
            untouched(self.model, self.step, seed=self.seed, evaluation=self.evaluation),
            self.engine.aside(self.model),
            Drawn(self.model) as drawn,
        ):
            local = runtime.shard(copied(batch), needs_labels=True)
            assert runtime.part is not None
            part = LocalTokens(
                runtime.part.layout,
                runtime.mesh.cp_rank,
                runtime.part.rows,
                runtime.part.padding_mask,
            )
            runtime.begin_step()
            try:
                scaled, shown, found = self._forward_together(batch, local, part)
                self._backward(scaled)
                self._average()
                if not self.plain_loss:
                    runtime.step.after_backward(self.model.parameters())
                ignored, share = (
                    runtime.step.positions_ignored,
                    runtime.step.shares[runtime.mesh.cp_rank],
                )
            finally:
                runtime.end_step()
            gradients, at_output = self._gradients(), found.end()
        return StepPass(
            *(shown, gradients, found.events, part, share, ignored),
            at_output=at_output,
            drawn=drawn.on_cpu,
            drawn_on_cuda=drawn.on_cuda,
        )

    def _forward_together(
        self, batch: Any, local: Any, part: LocalTokens
    ) -> tuple[torch.Tensor, torch.Tensor, Recording]:
        """The loss for backward, and one process's value; all ranks learn of what one group refuses."""
        runtime, error = self.runtime, None
        loss = found = weighted = None
        try:
            with (
                recording(self.model, runtime.listen, everything=self.everything) as found,
                runtime.step.gathering(),
            ):
                loss = self._loss(self.step(local))
            runtime.step.check_intercepted()
        except Exception as refused:  # any: a rank that raised alone would leave the others waiting
            error = refused
        self._require_step(batch, error)
        assert loss is not None
        assert found is not None
        try:
            weighted = self._weighted(loss, found, part)
            found.follow_last()
        except Exception as refused:
            error = refused
        self.tell(error)
        assert weighted is not None
        return *weighted, found

    def _require_step(self, batch: Any, error: Exception | None) -> None:
        """End the pass on all ranks if the step failed on one; before ranks send anything for its loss."""
        known = self.runtime.step.take_refused() is not None
        if self.engine.shards and error is not None and not isinstance(error, _KNOWN):
            error = self._refusal(batch, error)
        if error is None or not known:
            error = self._told_in_group(error)
        if self.anywhere(error is not None and not isinstance(error, LightningCPError)):
            raise StepFailed(error)
        self.tell(error)

    def _told_in_group(self, error: Exception | None) -> Exception | None:
        """This rank's error, or that another one of its cp group has one.

        The others may be at an agreement of the model, which ends with this vote. If they wait for data of
        this rank, only its end ends them.
        """
        group, limit = self.runtime.mesh.control_group(Flat.CP), None if error is None else PATIENCE
        try:
            agree({}, group, what="parity check", error=error, limit=limit)
        except LightningCPError as told:
            return error or told
        except Exception as told:
            if told is error:
                return error
            raise error or told from None
        return None

    def tell(self, error: Exception | None) -> None:
        """Raise on all ranks what went wrong on one, if anything did."""
        agree({}, self.runtime.mesh.control_group(Flat.LOSS), what="parity check", error=error)

    def _weighted(
        self, loss: torch.Tensor, found: Recording, part: LocalTokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss for backward, and one process's value."""
        runtime = self.runtime
        if self.plain_loss:
            runtime.step.mark_loss_weighted()
            loss = part.plain_loss(_last(found))
            mean = all_sum(loss.detach(), runtime.mesh.group(Flat.CP)) / runtime.mesh.cp_size
            return loss, mean.double()
        runtime.step.check_connected(loss)
        return runtime.step.scale_loss(loss), runtime.step.average(loss.detach()).double()

    def _loss(self, output: Any) -> torch.Tensor:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad or loss.numel() != 1:
            raise CannotRun("the step returned no loss that can be differentiated")
        return loss.reshape(())

    def _backward(self, loss: torch.Tensor) -> None:
        if self.engine.shards:
            self.engine.expect(loss)
        self.backward(loss)

    def _average(self) -> None:
        if self.engine.shards:
            self.engine.require_averaged()
            return
        mesh = self.runtime.mesh
        trained = [p for p in self.model.parameters() if p.requires_grad]
        average_present(trained, mesh.control_group(Flat.LOSS), mesh.group(Flat.LOSS))

    def _gradients(self) -> dict[str, torch.Tensor]:
        """The values that there are, taken from the model."""
        found: dict[str, torch.Tensor] = {}
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                found[name], p.grad = local_part(p.grad).detach(), None
        return found


def _last(found: Recording) -> torch.Tensor:
    x = found.last_output()
    if x is None:
        raise CannotRun("no module has an output [B, L, any] that can be differentiated")
    return x


# The dtypes that a run computes in, besides its parameters'.


def dtypes_of(precision: str, settings: StrategyConfig) -> frozenset[torch.dtype]:
    """By the name of Lightning's precision, and by what an engine gathers parameters in."""
    found: set[torch.dtype] = set()
    if "bf16" in precision or "transformer-engine" in precision:
        found.add(torch.bfloat16)
    elif "16" in precision:
        found.add(torch.float16)
    policy = precision_of(settings.mixed_precision).param_dtype
    return frozenset(found | ({policy} if policy is not None else set()))
