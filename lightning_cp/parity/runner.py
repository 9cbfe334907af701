"""One step of the user, on one process or context parallel, recorded for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lightning_cp.batch.documents import padding_mask_of
from lightning_cp.comm.consensus import raise_in_group
from lightning_cp.comm.reduce import all_sum, any_rank
from lightning_cp.config import StrategyConfig
from lightning_cp.engines.base import Engine
from lightning_cp.engines.checks import mixed_precision_policy
from lightning_cp.engines.gradients import average_present
from lightning_cp.errors import ConfigError, LightningCPError
from lightning_cp.layout.axes import Flat
from lightning_cp.parity.batches import complete_batch, copy_batch, models_shift_labels
from lightning_cp.parity.passes import LocalTokens, Recording, StepPass, plain_loss, recording
from lightning_cp.parity.restore import DrawRecord, restore_after
from lightning_cp.runtime.probe import probe_step, single_rank_step
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.utils.containers import tensors_of
from lightning_cp.utils.dtensor import local_part
from lightning_cp.utils.patching import add_hook

# The same model with other rounding: the effect of rounding alone.
#
# Each output of an innermost module is changed by one unit in the last place, up, down or not at all. This
# changes much what depends on choices (experts), and gradients that are zero up to rounding (biases of keys).


@contextmanager
def perturb_rounding(model: nn.Module, draw: int | None) -> Iterator[None]:
    """Within the block, outputs of modules are rounded otherwise, by random draw ``draw``; ``None`` changes
    nothing.
    """
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
"""The user's step of a batch: returns a loss, or a mapping with it."""


class CannotRun(Exception):  # noqa: N818 - no error: the check is left out, and says so
    """A step that cannot be compared."""


class StepFailure(Exception):  # noqa: N818 - on all ranks, of which one at least knows why
    """A step that the user's code, or PyTorch, ended with an error on a rank's part of a batch."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error


_MIXED = "mixed torch.Tensor and DTensor"
_KNOWN = (LightningCPError, CannotRun)
PATIENCE = timedelta(seconds=60)
"""Limit of the wait for other ranks, on a rank whose step has failed."""


@dataclass
class Runner:
    """Runs a step twice. Every method is collective.

    Args:
        runtime: the run's state machine.
        engine: shards parameters, or averages gradients.
        model: the user's model, whose gradients are compared.
        step: the step to run.
        dtypes: dtypes of computation, besides those of parameters.
        wide: the same step in the parameters' dtype, if ``step`` has autocast.
        backward: runs backward of a loss, for precision plugins that change it.
        everything: record all modules, to find the first difference.
        plain_loss: instead of the step's own loss, the mean square of the last output along the sequence.
        evaluation: run in evaluation mode; by default modules have the mode of the run.
        seed: added to the run's seed, for other random numbers.
        rounding: draw of other rounding in every module; ``None``: none.
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

    def run_single(self, batch: Any) -> StepPass:
        """Run the whole batch on this rank.

        Attention is the model's own, unless the batch has documents to isolate that the model does not
        support.

        Raises:
            CannotRun: on every rank, if the step fails on one.
            ConfigError: it has failed between ranks that gather parameters, which cannot continue.
        """
        with (
            single_rank_step(self.runtime, batch) as isolated,
            restore_after(self.model, self.step, seed=self.seed, evaluation=self.evaluation),
            self.engine.isolated(self.model),
            DrawRecord(self.model) as drawn,
        ):
            loss, found = self._run_on_all(batch, lambda: self._forward_single(batch))
            self._run_on_all(batch, lambda: self._backward(loss))
            self._average()
            gradients, at_output = self._gradients(), found.end()
        return StepPass(
            *(loss.detach().double(), gradients, found.events),
            documents_isolated=isolated,
            at_output=at_output,
            drawn=drawn.on_cpu,
            drew_on_cuda=drawn.on_cuda,
            dtypes=frozenset(found.dtypes | {loss.dtype}),
        )

    def _forward_single(self, batch: Any) -> tuple[torch.Tensor, Recording]:
        given = complete_batch(batch, self.runtime.binding.rules)
        with (
            recording(self.model, self.runtime.listen, everything=self.everything) as found,
            perturb_rounding(self.model, self.rounding),
            models_shift_labels(self.model, batch, given),
        ):
            loss = self._loss(self.step(given))
        if self.plain_loss:
            x = _last(found)
            loss = plain_loss(x, None, padding_mask_of(dict(tensors_of(batch))), x.shape[1])
        found.retain_last_gradient()
        return loss, found

    def _run_on_all(self, batch: Any, run: Callable[[], Any]) -> Any:
        """Run a function, and raise CannotRun on all ranks if one fails."""
        result = reason = None
        try:
            result = run()
        except CannotRun as refused:
            reason = str(refused)
        except Exception as failed:  # any type: the code is the user's
            reason = f"{type(failed).__name__}: {failed}".splitlines()[0]
            if self.engine.shards:
                raise self._refusal(batch, failed) from failed
        self.check_reason(reason, f"the step fails on {self.count(batch)} tokens")
        return result

    def _refusal(self, batch: Any, failed: Exception) -> ConfigError:
        """The error for ranks that gather parameters, which cannot continue."""
        if _MIXED in str(failed):
            return ConfigError(
                "the parity check ran the step, and it joins a parameter that is sharded with a plain tensor "
                f"({type(failed).__name__}: {failed}). Make copies of weights from the sharded ones: in "
                "on_fit_start, by p.detach().clone(); with Fabric after fabric.setup."
            )
        advice = "Correct the step; if it fails only on so few tokens, raise parity_tokens"
        if isinstance(failed, torch.OutOfMemoryError):
            advice = "Lower parity_tokens"
        return ConfigError(
            f"the parity check ran the step on {self.count(batch)} tokens of its batch, and it failed: "
            f"{type(failed).__name__}: {failed}. {advice}. parity_check='off' leaves the check out."
        )

    def check_reason(self, reason: str | None, what: str) -> None:
        """Raise CannotRun on all ranks, if one has a reason.

        Args:
            reason: the reason; ``None`` without one on this rank.
            what: the part of the check that is left out.
        """
        if self.is_any(reason is not None):
            raise CannotRun(f"{what} ({'on another rank' if reason is None else reason})")

    def is_any(self, here: bool) -> bool:
        """True if it holds on any rank: data ranks have different batches, but run passes together."""
        group = self.runtime.mesh.control_group(Flat.LOSS)
        return any_rank([here], group)[0]

    def count(self, batch: Any) -> int:
        """Number of tokens of a batch, all rows together."""
        whole = self.runtime.binding.read(batch)
        return whole.rows * whole.seq_len

    def run_parallel(self, batch: Any) -> StepPass:
        """Run this rank's part of the batch, as in training.

        Raises:
            ConfigError: the same as in a training step.
            StepFailure: the step itself has failed, on some rank.
        """
        runtime = self.runtime
        with (
            probe_step(runtime),
            restore_after(self.model, self.step, seed=self.seed, evaluation=self.evaluation),
            self.engine.isolated(self.model),
            DrawRecord(self.model) as drawn,
        ):
            local = runtime.shard(copy_batch(batch), needs_labels=True)
            assert runtime.part is not None
            part = LocalTokens(
                runtime.part.layout,
                runtime.mesh.cp_rank,
                runtime.part.rows,
                runtime.part.padding_mask,
            )
            runtime.begin_step()
            try:
                scaled, shown, found = self._forward_parallel(batch, local, part)
                self._backward(scaled)
                self._average()
                if not self.plain_loss:
                    runtime.step.after_backward(self.model.parameters())
                ignored, share = (
                    runtime.step.positions_ignored,
                    float(runtime.step.shares[runtime.mesh.cp_rank]),
                )
            finally:
                runtime.end_step()
            gradients, at_output = self._gradients(), found.end()
        return StepPass(
            *(shown, gradients, found.events, part, share, ignored),
            at_output=at_output,
            drawn=drawn.on_cpu,
            drew_on_cuda=drawn.on_cuda,
        )

    def _forward_parallel(
        self, batch: Any, local: Any, part: LocalTokens
    ) -> tuple[torch.Tensor, torch.Tensor, Recording]:
        """The loss for backward, and one process's value; an error in one group is raised on all ranks."""
        runtime, error = self.runtime, None
        loss = found = weighted = None
        try:
            with (
                recording(self.model, runtime.listen, everything=self.everything) as found,
                runtime.step.gathering(),
            ):
                loss = self._loss(self.step(local))
            runtime.step.check_intercepted()
        except (
            Exception
        ) as refused:  # any type: a rank that raised alone would leave the others waiting
            error = refused
        self._check_step(batch, error)
        assert loss is not None
        assert found is not None
        try:
            weighted = self._weighted(loss, found, part)
            found.retain_last_gradient()
        except Exception as refused:
            error = refused
        self.raise_on_all(error)
        assert weighted is not None
        return *weighted, found

    def _check_step(self, batch: Any, error: Exception | None) -> None:
        """End the pass on all ranks if the step failed on one, before ranks exchange anything for its
        loss.
        """
        known = self.runtime.step.pop_refused() is not None
        if self.engine.shards and error is not None and not isinstance(error, _KNOWN):
            error = self._refusal(batch, error)
        if error is None or not known:
            error = self._error_in_group(error)
        if self.is_any(error is not None and not isinstance(error, LightningCPError)):
            raise StepFailure(error)
        self.raise_on_all(error)

    def _error_in_group(self, error: Exception | None) -> Exception | None:
        """This rank's error, or a StepFailure if another rank of its cp group has one.

        Other ranks may be in an agreement of the model, which ends with this vote. If they wait for data of
        this rank, only the end of its process ends them.
        """
        group, limit = self.runtime.mesh.control_group(Flat.CP), None if error is None else PATIENCE
        try:
            raise_in_group(error, group, what="parity check", limit=limit)
        except LightningCPError as raised:
            return error or raised
        except Exception as raised:
            if raised is error:
                return error
            raise error or raised from None
        return None

    def raise_on_all(self, error: Exception | None) -> None:
        """Raise on all ranks the error of one, if any."""
        raise_in_group(error, self.runtime.mesh.control_group(Flat.LOSS), what="parity check")

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
            self.engine.prepare_backward(loss)
        self.backward(loss)

    def _average(self) -> None:
        if self.engine.shards:
            self.engine.finish_backward()
            return
        mesh = self.runtime.mesh
        trained = [p for p in self.model.parameters() if p.requires_grad]
        average_present(trained, mesh.control_group(Flat.LOSS), mesh.group(Flat.LOSS))

    def _gradients(self) -> dict[str, torch.Tensor]:
        """The gradients, removed from the model."""
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
    """Dtypes of a Lightning precision by name, and of an engine's gathered parameters."""
    found: set[torch.dtype] = set()
    if "bf16" in precision or "transformer-engine" in precision:
        found.add(torch.bfloat16)
    elif "16" in precision:
        found.add(torch.float16)
    policy = mixed_precision_policy(settings.mixed_precision).param_dtype
    return frozenset(found | ({policy} if policy is not None else set()))
