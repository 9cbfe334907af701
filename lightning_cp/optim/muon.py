"""Muon as an ordinary optimizer, for whole parameters and for any known sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from typing_extensions import override

from lightning_cp.comm.consensus import all_equal, gather_objects
from lightning_cp.errors import CheckpointError, ConfigError, LightningCPError, NonFiniteError
from lightning_cp.optim.matrix_step import MOMENTUM, ActiveParameter, MatrixStep
from lightning_cp.optim.parameters import (
    EMBEDDINGS,
    MuonSettings,
    Named,
    OptimizerInput,
    Rules,
    table_of,
)
from lightning_cp.optim.placement import check_placements, is_shared
from lightning_cp.optim.qk_clip import QKClip
from lightning_cp.optim.work_list import message_device
from lightning_cp.utils.dtensor import local_part

# Checks before anything is changed: gradients are finite, and all ranks have them for the same parameters.


SHOWN = 4
"""The number of names in a message."""


def check_same_gradients(
    gradients: Mapping[str, torch.Tensor],
    whole: Sequence[torch.Tensor] = (),
    problems: Sequence[str] = (),
    *,
    shared: bool,
    device_type: str,
    check_finite: bool,
) -> None:
    """Check that a step is safe: no parameter would become NaN, and no rank would wait for another forever.

    Args:
        gradients: this rank's part of each gradient, by parameter name.
        whole: parameters whose values must be the same on all ranks.
        problems: reasons why this rank cannot use a gradient.
        shared: other ranks take part, so the check is collective over the world.
        device_type: the device type of messages.
        check_finite: if False, values are not read.

    Raises:
        NonFiniteError: on every rank, naming the parameters whose gradients are not finite.
        ConfigError: on every rank, naming the parameters for which only some ranks have gradients; or
            ranks that hold whole parameters hold different values.
    """
    bad = _not_finite(gradients) if check_finite and not problems else []
    if not shared:
        _raise_problems({0: list(problems)}, {0: bad})
        return
    world = dist.group.WORLD
    assert world is not None
    fact = tuple(gradients), [float(x.sum(dtype=torch.float64)) for x in whole]
    if all_equal(fact, world, dissents=bool(bad or problems), device_type=device_type):
        return
    every = dict(enumerate(gather_objects((list(problems), bad, sorted(gradients)), world)))
    _raise_problems(*({rank: of[at] for rank, of in every.items()} for at in (0, 1)))
    named = {rank: names for rank, (_, _, names) in every.items()}
    everywhere = set(named[0]).intersection(*named.values())
    if all(set(names) == everywhere for names in named.values()):
        raise ConfigError(
            "parameters that are not DTensors have other values on other ranks, so these do not train one "
            "model. Muon takes them for copies, as with ddp; broadcast them from one rank first."
        )
    lacking = {rank: sorted(set(names) - everywhere) for rank, names in named.items()}
    raise ConfigError(
        "ranks have gradients of different parameters, so Muon would wait for ever. Only there: "
        f"{_listed(lacking)}. Let all parameters take part on every rank, or freeze them on all."
    )


def _not_finite(gradients: Mapping[str, torch.Tensor]) -> list[str]:
    some = {name: x for name, x in gradients.items() if x.numel()}
    if not some:
        return []
    # The largest of each: NaN and inf propagate, and nothing is squared.
    largest = torch._foreach_norm(list(some.values()), float("inf"))
    finite = torch.stack([x.to(torch.float64).isfinite() for x in largest])
    if bool(finite.all()):
        return []
    return [name for name, good in zip(some, finite.tolist(), strict=True) if not good]


def _raise_problems(problems: Mapping[int, list[str]], bad: Mapping[int, list[str]]) -> None:
    """Raise the problems and the non-finite gradients of each rank."""
    if any(problems.values()):
        raise ConfigError(
            f"gradients that cannot be used: {_listed(problems)}. Nothing was changed."
        )
    if any(bad.values()):
        raise NonFiniteError(
            f"gradients are NaN or infinite: {_listed(bad)}. Nothing was changed. Look for the first loss "
            "that is not finite; lower the learning rate, or clip gradients."
        )


def _listed(found: Mapping[int, list[str]]) -> str:
    return "; ".join(
        f"rank {rank}: {', '.join(names[:SHOWN])}{', ...' * (len(names) > SHOWN)}"
        for rank, names in found.items()
        if names
    )


class Muon(Optimizer):
    """Momentum that is orthogonalised (Muon) for matrices, AdamW for everything else.

    A step of a matrix W [m, n] with gradient G: ``B <- momentum B + (1 - momentum) G``; with Nesterov
    ``U = (1 - momentum) G + momentum B``, else ``U = B``; ``W <- (1 - lr weight_decay) W - lr scale NS(U)``,
    as ``torch.optim.Muon`` has it. Each matrix is gathered to one rank, which alone orthogonalises it, and
    every rank gets what it holds of the result: the numbers are those of one process.

    Args:
        named_parameters: a model, whose modules show embeddings and ties, or
            ``model.named_parameters()``, where only names do. A parameter that is not a DTensor is the same
            on all ranks (as with ``ddp``).
        lr: learning rate of matrices, before their scale.
        weight_decay: of matrices, decoupled.
        momentum: of matrices.
        nesterov: add the gradient to the momentum once more.
        ns_steps: number of Newton-Schulz steps.
        ns_coefficients: of the quintic of Newton-Schulz.
        eps: lower bound of the norm that a matrix is divided by.
        ns_dtype: of Newton-Schulz and of the results that are sent: ``bfloat16``, ``float32``,
            ``float64``.
        adjust_lr_fn: the scale of a matrix: ``match_rms_adamw`` (Moonlight), ``original`` (Keller Jordan).
        adamw_lr: learning rate of all other parameters; ``None``: ``lr``.
        adamw_weight_decay: of all other parameters; ``None``: ``weight_decay``.
        betas: of AdamW.
        adamw_eps: of AdamW.
        matrices: patterns of names (``fnmatch``) of the only parameters that Muon steps; ``None``: all
            with two dimensions that are neither embeddings nor heads.
        adamw: patterns of parameters that AdamW always steps.
        embeddings: patterns of names of embeddings and heads.
        fused: pattern -> sizes of the projections in one parameter, each a matrix by itself:
            ``{"*.qkv_proj.weight": (4096, 1024, 1024)}``, rows, or columns if the sizes add up to their
            number.
        impl: ``owner``, or ``reference``: PyTorch's own Muon, on every rank at once.
        chunk_mib: limit in MiB of whole matrices that a rank holds at a time; at least one matrix.
        check_finite: raise before anything is changed if a gradient is NaN or infinite.
        qk_clip: scales query and key projections down after each step in which attention scores were too
            large; the strategies of this package pass it the scores.

    Raises:
        ConfigError: a setting that is out of range, or parameters that do not fit the settings.
    """

    def __init__(
        self,
        named_parameters: Iterable[Named] | nn.Module,
        lr: float = 2e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_dtype: torch.dtype | str = "bfloat16",
        adjust_lr_fn: str = "match_rms_adamw",
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        matrices: Sequence[str] | None = None,
        adamw: Sequence[str] = (),
        embeddings: Sequence[str] = EMBEDDINGS,
        fused: Mapping[str, Sequence[int]] | None = None,
        impl: str = "owner",
        chunk_mib: float = 256,
        check_finite: bool = True,
        qk_clip: QKClip | None = None,
    ) -> None:
        self._settings = settings = MuonSettings(
            *(lr, weight_decay, momentum, nesterov, ns_steps, ns_coefficients, eps, ns_dtype),
            *(adjust_lr_fn, adamw_lr, adamw_weight_decay, betas, adamw_eps, impl, chunk_mib),
            check_finite,
        ).checked()
        given = OptimizerInput.of(named_parameters)
        self.assigned = Rules(matrices, adamw, embeddings, fused).assign(given)
        by_name = dict(given.named)
        matrices_, others = (
            [(one.name, by_name[one.name]) for one in self.assigned if one.is_matrix == wanted]
            for wanted in (True, False)
        )
        groups = [{"params": matrices_, **settings.matrix_group}]
        if others:
            groups.append({"params": others, **settings.adamw_group})
        super().__init__(groups, {})
        if settings.impl == "reference" and any(one.pieces for one in self.assigned):
            raise ConfigError("fused= is not known to impl='reference'. Use impl='owner'.")
        self._matrix_step = self._new_plan()
        self.qk_clip = qk_clip
        if qk_clip is not None:
            _check_qk_clip(qk_clip)
            qk_clip.bind(given.named)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add one of the groups that the rules make.

        Raises:
            ConfigError: any other group.
        """
        if "kind" not in param_group:
            raise ConfigError(
                "parameters cannot be added to Muon later: it tells matrices by the names of all. Make a new "
                "optimizer of model.named_parameters()."
            )
        super().add_param_group(param_group)

    def named(self) -> Iterator[Named]:
        """Names and parameters of the optimizer now."""
        for group in self.param_groups:
            yield from self._named_of(group)

    def _named_of(self, group: Mapping[str, Any]) -> Iterator[Named]:
        return zip(group["param_names"], group["params"], strict=True)

    def table(self) -> str:
        """A table of the optimizer and the reason for each kind of parameters."""
        return table_of(self.assigned)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step every parameter that has a gradient. Collective.

        Raises:
            NonFiniteError: a gradient is NaN or infinite, on any rank; nothing was changed.
            ConfigError: ranks have gradients for different parameters, or different values of whole
                parameters; a gradient has another layout or type; or QK-clip has no scores of a layer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_placements(self.named())
        self._matrix_step.build_grids(self._named_of(self.param_groups[0]))
        active = {name: ActiveParameter(name, p) for name, p in self.named() if p.grad is not None}
        self._check_gradients(active, shared=any(is_shared(p) for _, p in self.named()))
        for one in active.values():
            one.redistribute_gradient()
        if self.qk_clip is not None:
            self.qk_clip.check_ready()
        for group in self.param_groups:
            some = [active[name] for name in group["param_names"] if name in active]
            step = self._step_matrices if group["kind"] == "muon" else self._step_others
            step(group, some)
        if self.qk_clip is not None:
            self.qk_clip.apply()
        return loss

    def _check_gradients(self, active: dict[str, ActiveParameter], *, shared: bool) -> None:
        try:
            check_same_gradients(
                {name: one.gradient for name, one in active.items()},
                [] if self.state else [one.local for one in active.values() if one.is_whole],
                [one.problem for one in active.values() if one.problem is not None],
                shared=shared,
                device_type=message_device(self.param_groups[0]["params"][0]).type,
                check_finite=self._settings.check_finite,
            )
        except LightningCPError:
            if self.qk_clip is not None:
                self.qk_clip.forget()  # the step is skipped
            raise

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; parameters keep their present names.

        Raises:
            CheckpointError: the state is of another kind of optimizer.
        """
        kinds, own = (
            [g.get("kind") for g in x] for x in (state_dict["param_groups"], self.param_groups)
        )
        if kinds != own:
            raise CheckpointError(
                f"the state is of another optimizer: Muon's groups are {_kinds(own)}, this one's are "
                f"{_kinds(kinds)}. The optimizer has not changed. Make it as it was when the checkpoint "
                "was saved."
            )
        names = [group["param_names"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, of_group in zip(self.param_groups, names, strict=True):
            group["param_names"] = of_group

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which plans its steps again."""
        kept = {name: vars(self)[name] for name in ("_settings", "assigned", "qk_clip")}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, or a state that is loaded."""
        super().__setstate__(state)
        if "_matrix_step" not in vars(self):
            self._matrix_step = self._new_plan()

    def _new_plan(self) -> MatrixStep:
        pieces = {one.name: one.pieces for one in self.assigned if one.pieces}
        return MatrixStep(pieces, self._settings.dtype, self._settings.chunk_bytes)

    def _step_matrices(self, group: dict[str, Any], some: list[ActiveParameter]) -> None:
        for one in some:
            if not self.state[one.parameter]:
                self.state[one.parameter][MOMENTUM] = torch.zeros_like(one.parameter)
        if self._settings.impl == "reference":
            self._step_by_torch(group)
        else:
            self._matrix_step.run(group, some, self.state)

    def _step_by_torch(self, group: dict[str, Any]) -> None:
        """Step with PyTorch's optimizer, with the same settings and state."""
        theirs = torch.optim.Muon(group["params"])
        theirs.param_groups, theirs.state = [group], self.state
        momenta = self._momenta_after(group)
        theirs.step()
        for buffer, right in momenta:
            buffer.copy_(right)

    def _momenta_after(self, group: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Buffers that PyTorch (as of 2.13) orthogonalises in place, and their correct values after
        the step.
        """
        if group["nesterov"]:
            return []
        stepped = [p for p in group["params"] if p.grad is not None and p.dtype == torch.bfloat16]
        buffers = [self.state[p][MOMENTUM] for p in stepped]
        return [
            (buffer, buffer.lerp(p.grad, 1 - group["momentum"]))
            for p, buffer in zip(stepped, buffers, strict=True)
        ]

    def _step_others(self, group: dict[str, Any], some: list[ActiveParameter]) -> None:
        for one in some:
            state = self.state[one.parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(one.parameter)
                state["exp_avg_sq"] = torch.zeros_like(one.parameter)
        states = [self.state[one.parameter] for one in some]
        means, squares = (
            [local_part(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq")
        )
        beta1, beta2 = group["betas"]
        adamw(
            [one.local for one in some],
            [one.gradient for one in some],
            *(means, squares, [], [state["step"] for state in states]),
            **{"amsgrad": False, "beta1": beta1, "beta2": beta2, "lr": group["lr"]},
            **{"weight_decay": group["weight_decay"], "eps": group["eps"], "maximize": False},
        )


def _check_qk_clip(given: object) -> None:
    if not isinstance(given, QKClip):
        raise ConfigError(
            f"qk_clip= is a QKClip(tau=100.0, ...), got {type(given).__name__}. "
            "Pass QKClip(), or leave it out."
        )


def _kinds(groups: list[str | None]) -> str:
    return " and ".join(kind or "of no kind" for kind in groups) or "none"
