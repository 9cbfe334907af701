"""Muon as an ordinary optimizer, on parameters that are whole or sharded in any of the known ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from typing_extensions import override

from lightning_cp.comm.consensus import World, stable_hash, sum_over_world
from lightning_cp.errors import CheckpointError, ConfigError, LightningCPError, NonFiniteError
from lightning_cp.optim.matrix_step import MOMENTUM, ActiveParameter, MatrixStep
from lightning_cp.optim.parameters import EMBEDDINGS, Named, OptimizerInput, Rules, table_of
from lightning_cp.optim.placement import check_placements, is_shared
from lightning_cp.optim.qk_clip import QKClip
from lightning_cp.optim.settings import MuonSettings
from lightning_cp.optim.work_list import Round, message_device
from lightning_cp.utils.dtensor import local_part

# Before anything is changed: gradients are finite, and all ranks have them of the same parameters.


SHOWN = 4
"""Names in a message."""


def check_same_gradients(
    gradients: Mapping[str, torch.Tensor],
    whole: Sequence[torch.Tensor] = (),
    problems: Sequence[str] = (),
    *,
    shared: bool,
    device_type: str,
    check_finite: bool,
) -> None:
    """Refuse a step that would spoil parameters, or in which ranks would wait for each other for ever.

    Args:
        gradients: what this rank holds of each, by parameter.
        whole: parameters whose values are the same on all ranks, if that is to be seen too.
        problems: what this rank cannot use.
        shared: other ranks take part; all of the world come here.
        device_type: where messages travel from.
        check_finite: whether values are looked at.

    Raises:
        NonFiniteError: on every rank, naming the parameters whose gradients are not finite.
        ConfigError: on every rank, naming the parameters that only some have gradients of; or ranks that hold
            whole parameters hold other values.
    """
    bad = _not_finite(gradients) if check_finite and not problems else []
    if not shared:
        _refuse({0: list(problems)}, {0: bad})
        return
    world = World()
    # Adds up to 0 over ranks with the same names, and hardly ever over others.
    values = [float(x.sum(dtype=torch.float64)) for x in whole]
    ballot = (stable_hash((tuple(gradients), values)) >> 24) * (1 if world.rank else 1 - world.size)
    failed, ballots = sum_over_world([int(bool(bad or problems)), ballot], device_type)
    if not failed and not ballots:
        return
    every = dict(enumerate(world.gather((list(problems), bad, sorted(gradients)))))
    _refuse(*({rank: of[at] for rank, of in every.items()} for at in (0, 1)))
    named = {rank: names for rank, (_, _, names) in every.items()}
    everywhere = set(named[0]).intersection(*named.values())
    if all(set(names) == everywhere for names in named.values()):
        raise ConfigError(
            "parameters that are no DTensors have other values on other ranks, so these do not train one "
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
    # The largest of each: NaN and inf stay what they are, and nothing is squared.
    largest = torch._foreach_norm(list(some.values()), float("inf"))
    finite = torch.stack([x.to(torch.float64).isfinite() for x in largest])
    if bool(finite.all()):
        return []
    return [name for name, good in zip(some, finite.tolist(), strict=True) if not good]


def _refuse(problems: Mapping[int, list[str]], bad: Mapping[int, list[str]]) -> None:
    """Of each rank: what it cannot use, and parameters whose gradients are not finite."""
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
        named_parameters: a model, whose modules tell embeddings and ties, or
            ``model.named_parameters()``, of which names alone do. A parameter that is no DTensor is the same
            on all ranks (as with ``ddp``).
        lr: of matrices, before their scale.
        weight_decay: of matrices, decoupled.
        momentum: of matrices.
        nesterov: whether the gradient is looked at once more.
        ns_steps: of Newton-Schulz.
        ns_coefficients: of its quintic.
        eps: the least norm that it divides by.
        ns_dtype: in which it computes, and in which results travel: ``bfloat16``, ``float32``, ``float64``.
        adjust_lr_fn: the scale of a matrix: ``match_rms_adamw`` (Moonlight), ``original`` (Keller Jordan).
        adamw_lr: of all other parameters; ``None``: ``lr``.
        adamw_weight_decay: likewise.
        betas: of AdamW.
        adamw_eps: of AdamW.
        matrices: patterns of names (``fnmatch``) of the parameters that Muon steps, and no others; ``None``:
            all with two dimensions that are neither embeddings nor heads.
        adamw: patterns of those that AdamW steps whatever they are.
        embeddings: patterns that tell embeddings and heads.
        fused: pattern -> sizes of the projections in one parameter, each of which is a matrix by itself:
            ``{"*.qkv_proj.weight": (4096, 1024, 1024)}``, rows, or columns where these add up to them.
        impl: ``owner``, or ``reference``: PyTorch's own Muon, on every rank at once.
        chunk_mib: MiB of whole matrices that a rank holds at a time, or one matrix.
        check_finite: gradients that are NaN or infinite are an error before anything is changed.
        qk_clip: scales query and key projections down after each step where attention's scores have grown
            too large; the strategies of this package tell it the scores.

    Raises:
        ConfigError: a setting that is out of range, or parameters that are not what they are said to be.
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
        groups = [{"params": matrices_, **settings.of_matrices}]
        if others:
            groups.append({"params": others, **settings.of_others})
        super().__init__(groups, {})
        if settings.impl == "reference" and any(one.pieces for one in self.assigned):
            raise ConfigError("fused= is not known to impl='reference'. Use impl='owner'.")
        self._matrix_step = self._planned_anew()
        self.qk_clip = qk_clip
        if qk_clip is not None:
            _check_qk_clip(qk_clip)
            qk_clip.bind(given.named)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only those that the rules make.

        Raises:
            ConfigError: it is another one.
        """
        if "kind" not in param_group:
            raise ConfigError(
                "parameters cannot be added to Muon later: it tells matrices by the names of all. Make a new "
                "optimizer of model.named_parameters()."
            )
        super().add_param_group(param_group)

    def named(self) -> Iterator[Named]:
        """The names and parameters that are stepped now."""
        for group in self.param_groups:
            yield from self._named_of(group)

    def _named_of(self, group: Mapping[str, Any]) -> Iterator[Named]:
        return zip(group["param_names"], group["params"], strict=True)

    def table(self) -> str:
        """What steps which parameters, and why."""
        return table_of(self.assigned)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of every parameter that has a gradient; all ranks call it together.

        Raises:
            NonFiniteError: a gradient is NaN or infinite, on any rank; nothing was changed.
            ConfigError: ranks have gradients of other parameters, or other values of those that they hold
                whole; a gradient is of another kind; or a layer has told QK-clip no scores.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_placements(self.named())
        self._matrix_step.meet(self._named_of(self.param_groups[0]))
        active = {name: ActiveParameter(name, p) for name, p in self.named() if p.grad is not None}
        self._require_agreed(active, shared=any(is_shared(p) for _, p in self.named()))
        for one in active.values():
            one.place()
        if self.qk_clip is not None:
            self.qk_clip.check_ready()
        for group in self.param_groups:
            some = [active[name] for name in group["param_names"] if name in active]
            step = self._step_matrices if group["kind"] == "muon" else self._step_others
            step(group, some)
        if self.qk_clip is not None:
            self.qk_clip.apply()
        return loss

    def _require_agreed(self, active: dict[str, ActiveParameter], *, shared: bool) -> None:
        try:
            check_same_gradients(
                {name: one.gradient for name, one in active.items()},
                [] if self.state else [one.held for one in active.values() if one.is_whole],
                [one.problem for one in active.values() if one.problem is not None],
                shared=shared,
                device_type=message_device(self.param_groups[0]["params"][0]).type,
                check_finite=self._settings.check_finite,
            )
        except LightningCPError:
            if self.qk_clip is not None:
                self.qk_clip.forget()  # the step is not made
            raise

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state; parameters keep the names that they were given here.

        Raises:
            CheckpointError: it is of another kind of optimizer.
        """
        kinds, own = (
            [g.get("kind") for g in x] for x in (state_dict["param_groups"], self.param_groups)
        )
        if kinds != own:
            raise CheckpointError(
                f"the state is of another optimizer: Muon's groups are {_kinds(own)}, this one's are "
                f"{_kinds(kinds)}. The optimizer was left as it was."
            )
        names = [group["param_names"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, of_group in zip(self.param_groups, names, strict=True):
            group["param_names"] = of_group

    def __getstate__(self) -> dict[str, Any]:
        """For copies: what is planned is planned again."""
        kept = {name: vars(self)[name] for name in ("_settings", "assigned", "qk_clip")}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, or of a state that is loaded."""
        super().__setstate__(state)
        if "_matrix_step" not in vars(self):
            self._matrix_step = self._planned_anew()

    def _planned_anew(self) -> MatrixStep:
        pieces = {one.name: one.pieces for one in self.assigned if one.pieces}
        return MatrixStep(pieces, self._settings.dtype, self._settings.chunk_bytes)

    def rounds(self) -> list[Round]:
        """What was exchanged in the last step; see ``flops_of_ranks`` and ``sent_bytes_of_ranks``."""
        return self._matrix_step.rounds

    def _step_matrices(self, group: dict[str, Any], some: list[ActiveParameter]) -> None:
        for one in some:
            if not self.state[one.parameter]:
                self.state[one.parameter][MOMENTUM] = torch.zeros_like(one.parameter)
        if self._settings.impl == "reference":
            self._step_by_torch(group)
        else:
            self._matrix_step.run(group, some, self.state)

    def _step_by_torch(self, group: dict[str, Any]) -> None:
        """By PyTorch's optimizer, with the same settings and state."""
        theirs = torch.optim.Muon(group["params"])
        theirs.param_groups, theirs.state = [group], self.state
        momenta = self._momenta_after(group)
        theirs.step()
        for buffer, right in momenta:
            buffer.copy_(right)

    def _momenta_after(self, group: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Buffers that PyTorch orthogonalises in place (as of 2.13), and what they are to hold afterwards."""
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
            [one.held for one in some],
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
