"""Handle of one model's attention swap: state of the active step, checks across ranks, report, undo.

While a step is active, intercepted calls attend over the whole sequence; outside of a step the model
is the plain model. The handle holds the step's state, not a ContextVar or a thread-local: recomputation
runs inside backward, on CUDA in autograd's own thread.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_cp.attention.api import begin_attention_step, end_attention_step
from lightning_cp.attention.function import attend, attend_with_max_logits, cast_as_autocast
from lightning_cp.attention.plan import AttentionPlan, make_plan, make_request
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.batch.step_state import StepState, raise_gradient_mismatch
from lightning_cp.comm.consensus import gather_by_vote
from lightning_cp.errors import ConfigError
from lightning_cp.kernels.auto import MANY_LENGTHS, Tiles, tiles_of
from lightning_cp.kernels.protocol import Request
from lightning_cp.layout.axes import Flat
from lightning_cp.layout.exchange import Exchange
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.qk_scores import (
    AttentionInputs,
    MaxLogitsCollector,
    ScoreCallback,
    make_plan_with_scores,
    make_scores_plan,
)
from lightning_cp.models.rank_checks import RankChecks
from lightning_cp.utils.autograd_notes import Origin, note_origin
from lightning_cp.utils.console import (
    Place,
    common_name,
    plain_table,
    split_name,
    without_layer_numbers,
)
from lightning_cp.utils.patching import (
    PatchSet,
    ReplacedFunction,
    StepPatches,
    do_nothing,
    without_garbage_collection,
)

Listener = Callable[[AttentionPlan, torch.Tensor, torch.Tensor], None]
"""Callback of an attention call: its plan, q and out."""

ATTENTION = re.compile(r"(Attention|Attn)(Layer|Block)?(V?\d+)?$")
"""Names of classes that are expected to call attention at least once when they are called."""

COLUMNS = ("modules", "count", "class", "attention", "was")


class SwapMethod(NamedTuple):
    """The way the attention of a model was swapped, and its implementation outside of a step."""

    how: str
    before: str


@dataclass(frozen=True)
class SwapReportRow:
    """Modules of one class at one place, or a function, and the way their attention was swapped."""

    modules: str
    """Their names, with ``*`` for the number of a layer."""
    count: int | None
    """Number of modules; ``None`` for a function, with any caller."""
    kind: str
    how: str
    before: str
    """Implementation outside of a step."""

    def __str__(self) -> str:
        many = "" if self.count is None else f"{self.count} x "
        return f"{many}{self.kind} ({self.how}, was {self.before})"


class SwapReport(list[SwapReportRow]):
    """Rows of the report on a swap; as a string it is a table."""

    def add(self, model: nn.Module, parts: Sequence[nn.Module], how: str, before: str) -> None:
        """Add one row for all of ``parts`` of the same class whose names differ in numbers only.

        Args:
            model: root of the shown names.
            parts: modules that were swapped, or stay local.
            how: the way in which.
            before: implementation outside of a step.
        """
        names = {module: name for name, module in model.named_modules()}
        groups: dict[tuple[Place, str], list[Place]] = {}
        for part in parts:
            place = split_name(names.get(part, ""))
            kind = type(part).__name__
            groups.setdefault((without_layer_numbers(place), kind), []).append(place)
        for (_, kind), places in groups.items():
            name = common_name(places) or "(the model)"
            self.append(SwapReportRow(name, len(places), kind, how, before))

    def __str__(self) -> str:
        rows = ((x.modules, _number(x.count), x.kind, x.how, x.before) for x in self)
        return plain_table(COLUMNS, rows)


def attention_modules(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the innermost modules whose class is named like attention."""
    for module in root.modules():
        if _is_attention(module):
            inside = (part for part in module.modules() if part is not module)
            if not any(map(_is_attention, inside)):
                yield module


def _is_attention(module: nn.Module) -> bool:
    return ATTENTION.search(type(module).__name__) is not None


def _number(count: int | None) -> str:
    return "-" if count is None else str(count)


@dataclass
class RankContext:
    """The ranks that attend together, how they do, and what they have agreed on."""

    mesh: ContextParallelMesh
    kernel: str = "auto"
    exchange: Exchange = field(default_factory=Exchange)
    requests: dict[Request, Tiles] = field(default_factory=dict)
    """Distinct kernel requests of the attention calls so far, with the tiles of the last call."""
    agreed: set[tuple[Request, str]] = field(default_factory=set)
    """Kinds of attention calls that all ranks have agreed on."""

    def __post_init__(self) -> None:
        self.checks = RankChecks(self.mesh)


class SwapHandle:
    """Connection between one model's attention calls and one mesh."""

    def __init__(
        self,
        mesh: ContextParallelMesh,
        kernel: str = "auto",
        exchange: Exchange | None = None,
    ) -> None:
        self.ranks = RankContext(mesh, kernel, exchange or Exchange())
        self.state: StepState | None = None
        self.lengths: set[int] = set()
        """Lengths of rows so far, at most one more than ``MANY_LENGTHS``."""
        self.listeners: Sequence[Listener] = ()
        """Callbacks of every attention call."""
        self.progress: Callable[[], None] = do_nothing
        """Callback of every attention call, before any communication for it."""
        self.report = SwapReport()
        self.intercepts_outside = True
        """Intercept calls outside of all tracked modules (``scopes``)."""
        self.scopes: list[tuple[nn.Module, bool]] = []
        """Stack of tracked modules that are being called; true: attention inside is intercepted."""
        self.local_modules: set[nn.Module] = set()
        """Modules whose attention each rank computes by itself."""
        self.router_loss: torch.Tensor | None = None
        """The last loss of routers over all tokens, in the model's current call."""
        self.provides_position_ids = False
        """Models inside receive the positions of their tokens, so the step need not read them."""
        self.warned: set[str] = set()
        """Keys of warnings that were shown already."""
        self.collector: MaxLogitsCollector | None = None
        """Collects the largest scores, for QK-clip."""
        self.has_batch: Callable[[Any], bool] = bool
        """True if arguments of a call hold a tensor of the step's batch."""
        self._step_patches = StepPatches()
        self._stop_waiting: Callable[[], object] = list  # nothing
        self.patches = PatchSet()
        """Replacements and hooks until the swap is undone."""

    @property
    def mesh(self) -> ContextParallelMesh:
        """The process groups."""
        return self.ranks.mesh

    @property
    def active(self) -> bool:
        """True if a context-parallel step is active."""
        return self.state is not None

    @property
    def intercepts(self) -> bool:
        """True if an attention call made now attends over the whole sequence."""
        return self.state is not None and not self.state.waits and not self.in_local

    @property
    def in_local(self) -> bool:
        """True if an attention call made now is computed locally."""
        return not (self.scopes[-1][1] if self.scopes else self.intercepts_outside)

    def in_local_module(self) -> bool:
        """True if a local module is being called."""
        return bool(self.scopes) and not self.scopes[-1][1]

    def activate(self, state: StepState) -> None:
        """Begin a step; the state stays until the next one, or until ``deactivate``."""
        if self.state is not None:
            self.deactivate()
        self.state = state
        begin_attention_step(self)
        self._step_patches.begin()

    def deactivate(self) -> None:
        """End the step: the model is the plain model again."""
        if self.state is not None:
            self.state.ended = True
        self.state = None
        self.scopes.clear()
        if self.collector is not None:
            self.collector.forget_calls()
        self.ranks.checks.clear()
        end_attention_step(self)
        self._step_patches.end()

    def suspend(self) -> None:
        """Suspend a step that its loop did not use: models are plain until a call has the step's batch.

        The first call of any module with a tensor of the batch resumes the step.
        """
        state, known = self.state, weakref.ref(self)
        if state is None or state.left:
            return
        state.left = state.waits = True

        def look(module: nn.Module, args: Any) -> None:
            if (
                torch.compiler.is_compiling()
            ):  # the hook saw the call from outside of the compiled code
                return
            handle = known()
            if handle is not None:
                handle.resume(args)

        self._stop_waiting = register_module_forward_pre_hook(look).remove
        self._step_patches.on_end(self._stop_waiting)

    def resume(self, inputs: Any) -> None:
        """Resume a suspended step if the arguments of a call hold a tensor of its batch."""
        if self.state is not None and self.state.waits and self.has_batch(inputs):
            self.state.waits = False
            self._stop_waiting()

    def note_call(self, module: nn.Module, inputs: Any) -> None:
        """Record a call of a module that could attend.

        Raises:
            ConfigError: the step is suspended, and the call has no tensor of its batch.
        """
        if self.state is None:
            return
        if self.state.waits:
            self.resume(inputs)
            if self.state.waits:
                raise ConfigError(_FOREIGN_CALL.format(type(module).__name__))
        self.state.model_called = True

    def attention(
        self, q_BLHD: torch.Tensor, k_BLKD: torch.Tensor, v_BLKD: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Attend over the whole sequence of the active step."""
        state = self.state
        assert state is not None
        q, k, v = cast_as_autocast(q_BLHD, k_BLKD, v_BLKD)
        self.ranks.checks.flush_before_data()
        self.progress()
        inputs = AttentionInputs(q, k, v, spec)
        collector, ranks = self.collector, self.ranks
        by_kernel = collector is not None and collector.by_kernel(ranks.kernel, ranks.exchange)
        plan = self._plan(*inputs, state, max_logits=by_kernel)
        largest: torch.Tensor | None = None
        if by_kernel:
            out, largest = attend_with_max_logits(q, k, v, plan)
        else:
            out = cast(torch.Tensor, attend(q, k, v, plan))
        if collector is not None:
            of_pass = None if by_kernel else partial(self._plan_of_pass, inputs, state)
            collector.note(inputs, largest, self.mesh, of_pass)
        for listener in self.listeners:
            listener(plan, q, out)
        state.need_gradients.append(spec.kind if out.requires_grad else "")
        if out.requires_grad:
            note_origin(out, Origin.TOKENS)
            out.register_hook(state.note_gradient)
        state.calls += 1
        return out

    def collect(
        self, modules: Mapping[nn.Module, ScoreCallback], *, extra_pass: bool = False
    ) -> None:
        """Report the largest scores of these modules' attention until ``undo``; replaces earlier ones.

        Args:
            modules: modules that call attention, and the callback of each call in training.
            extra_pass: compute scores that a kernel does not return in an additional pass.
        """
        self._end_collection()
        if modules:
            self.collector = MaxLogitsCollector(modules, extra_pass=extra_pass)
            self.collector.start(lambda: self.active)

    def _plan(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        state: StepState,
        *,
        max_logits: bool = False,
    ) -> AttentionPlan:
        """Return the plan of a call; ranks agree once per kind of call that all of them can execute it.

        Nodes may differ in installed packages and in the compute capability of their GPU.
        """
        call = (max_logits, *_plan_key(spec, q, k, v))
        if call in state.plans:
            return state.plans[call][1]

        request = make_request(q, v, state.layout, spec, max_logits=max_logits)
        ranks = self.ranks
        arguments = (q, k, v, ranks.mesh, state.layout, spec, ranks.kernel)
        varied = self._is_varied(state.layout.padded_len)
        make = partial(make_plan, *arguments, exchange=ranks.exchange, varied=varied)
        with_scores = partial(make_plan_with_scores, make)
        plan = with_scores if max_logits else partial(make, request=request)
        known = (request, spec.kind) in ranks.agreed
        made = plan() if known else self._agree_on_plan(plan, request, spec)
        ranks.requests[request] = tiles_of(state.layout, varied=varied)
        state.plans[call] = (
            spec,
            made,
        )  # the spec keeps tensors alive, so that none takes their place
        return made

    def _is_varied(self, length: int) -> bool:
        """Count a length of rows; true once there are many."""
        if len(self.lengths) <= MANY_LENGTHS:
            self.lengths.add(length)
        return len(self.lengths) > MANY_LENGTHS

    def _agree_on_plan(
        self, make: Callable[[], AttentionPlan], request: Request, spec: AttentionSpec
    ) -> AttentionPlan:
        """Make the plan of a new kind of call, which has to be the same on all ranks."""
        made = self.ranks.checks.run(
            "an attention call",
            make,
            facts=lambda _: {"attention": spec.kind},
            remedy="All ranks that share a sample make the same attention calls, with the same settings.",
        )
        agreed = self.ranks.agreed
        if len(agreed) == _KINDS:  # on all ranks at once, as they agreed on the same
            agreed.clear()
        agreed.add((request, spec.kind))
        return made

    def _plan_of_pass(self, inputs: AttentionInputs, state: StepState) -> AttentionPlan:
        """Return the plan of a pass for the largest scores of a call that did not return them."""
        q, k, v, spec = inputs
        call = ("of a pass", *_plan_key(spec, q, k, v))
        if call not in state.plans:
            make = partial(make_scores_plan, inputs, self.mesh, state.layout, self.ranks.exchange)
            state.plans[call] = spec, self.ranks.checks.run("a pass for the largest scores", make)
        return state.plans[call][1]

    def check_intercepted(self, model: nn.Module) -> None:
        """Check that a step which called the model intercepted an attention call.

        Raises:
            ConfigError: none was; names the model's classes that look like attention.
        """
        if self.state is None or self.state.calls or not self.state.model_called:
            return
        seen = sorted(
            {type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()}
        )
        raise ConfigError(
            "no attention call was intercepted in this step (0 calls), so every rank would attend to its "
            f"own tokens only. Attention classes seen: {', '.join(seen) or 'none'}. Attention is "
            "intercepted in Hugging Face models that use transformers' attention interface, in LitGPT "
            "models, and in calls of torch.nn.functional.scaled_dot_product_attention or "
            "context_parallel_attention(q, k, v, spec=AttentionSpec(...)); call one of these, or pass "
            "context_parallel_size=1 and data_parallel_size=<number of ranks>, which shares no sample."
        )

    def check_same_gradients(self) -> None:
        """Check, before backward, that it reaches the same attention calls on all ranks of the cp group.

        Raises:
            ConfigError: on every rank; names the ranks that would wait for the others.
        """
        if self.state is None or self.mesh.sample_size == 1:
            return
        self.ranks.checks.flush()
        needs = self.state.need_gradients
        if self.state.compared == len(needs):  # attention calls are made together
            return
        group = self.mesh.control_group(Flat.CP)
        every = gather_by_vote(needs, group, what="backward")
        if any(other != every[0] for other in every):
            raise_gradient_mismatch(
                dict(zip(dist.get_process_group_ranks(group), every, strict=True))
            )

    def on_activate(self, action: Callable[[], Callable[[], None]]) -> None:
        """Register an action for the begin of each step; it returns the action for the step's end."""
        self._step_patches.add(action)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Register the undo action of one replacement."""
        self.patches.add(action)

    def on_undo_or_deletion(self, action: Callable[..., object], *args: Any) -> None:
        """Register an undo action that also happens when the handle is garbage collected."""
        undo = weakref.finalize(self, action, *args)
        undo.atexit = False
        self.patches.add(undo)

    def undo(self) -> None:
        """Restore the model's own attention, in reverse order of the replacements."""
        self.deactivate()
        self._end_collection()
        self.patches.undo()

    def _end_collection(self) -> None:
        if self.collector is not None:
            self.collector.end()
            self.collector = None


_FOREIGN_CALL = (
    "{} is called with no tensor of the batch that its loop over a loader gave last and did not use, so it "
    "is not known whether the call belongs to the step of that batch. Call fabric.strategy.end_step() first, "
    "if its rows are whole. If they are computed from that batch, keep the loop's iterator until the step is "
    "over: batches = iter(loader), then batch = next(batches)."
)


_KINDS = 1024
"""Kinds of attention calls that are known at most: a scale may change with every step."""

_values_of = attrgetter(*[item.name for item in fields(AttentionSpec)])


def _plan_key(spec: AttentionSpec, *inputs: torch.Tensor) -> tuple[object, ...]:
    """Return a key for plans within one batch; slopes and sinks are compared by identity."""
    values = _values_of(spec)
    return (
        *[id(value) if isinstance(value, torch.Tensor) else value for value in values],
        *[(x.shape, x.dtype, x.device) for x in inputs],
    )


def install_replacements(
    handle: SwapHandle, *kinds: Callable[[SwapHandle], Iterable[ReplacedFunction]]
) -> None:
    """Install replacements of these kinds until the swap is undone, or its handle is deleted.

    One call installs all of a swap: a scan of the names of all modules, about 100,000, takes 10 to 50 ms.
    """
    with without_garbage_collection():
        patches = PatchSet()
        patches.put_functions([one for kind in kinds for one in kind(handle)])
    handle.on_undo_or_deletion(patches.undo)
