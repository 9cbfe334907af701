"""The swap handle: what intercepted attention calls see, how many there were, and how to undo it.

While a step is active, intercepted calls attend over the whole sequence; outside of a step the model
is the plain model. The step's state is held here, on the handle, and not in a ContextVar or a
thread-local: recomputation runs inside backward, on CUDA in autograd's own thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_cp.attention.attend import attend, attend_and_note
from lightning_cp.attention.exchange import Exchange
from lightning_cp.attention.plan import AttentionPlan, make_plan, request_of
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.comm.agreement import lists_of_ranks
from lightning_cp.errors import ConfigError
from lightning_cp.kernels.api import Request
from lightning_cp.loss_terms import note_tokens
from lightning_cp.mesh import ContextParallelMesh, Flat
from lightning_cp.models.checks import Checks
from lightning_cp.models.max_logits import Collector, Inputs, Tell, plan_by_kernel, plan_of_pass
from lightning_cp.models.report import SwapReport
from lightning_cp.models.step_state import StepState

Listener = Callable[[AttentionPlan, torch.Tensor, torch.Tensor], None]


class SwapHandle:
    """Connects one model's attention calls to one mesh."""

    def __init__(
        self,
        mesh: ContextParallelMesh,
        kernel: str = "auto",
        exchange: Exchange | None = None,
    ) -> None:
        self.mesh = mesh
        self.kernel = kernel
        self.exchange = exchange or Exchange()
        self.state: StepState | None = None
        self.requests: dict[Request, None] = {}
        """What attention calls have asked of a kernel, each kind once."""
        self.listeners: Sequence[Listener] = ()
        """Told of every attention call: its plan, q and out."""
        self.progress: Callable[[], None] = _nothing
        """Called at every attention call, before ranks exchange anything for it."""
        self.report = SwapReport()
        self.intercepts_outside = True
        """Whether calls outside of all modules that tell (``scopes``) are intercepted."""
        self.scopes: list[tuple[nn.Module, bool]] = []
        """The modules that are being called and tell so, and whether attention in them is intercepted."""
        self.alone: set[nn.Module] = set()
        """Modules whose attention each rank computes by itself."""
        self.tells_positions = False
        """Models inside are told the positions of their tokens, so that the step need not read them."""
        self.warned: set[str] = set()
        """Models of which something was said once."""
        self.checks = Checks(mesh)
        self.collector = Collector({})
        """Who is told of largest scores."""
        self.has_batch: Callable[[Any], bool] = bool
        """Whether arguments of a call hold a tensor of the step's batch."""
        self._enter: list[Callable[[], Callable[[], None]]] = []
        self._leave: list[Callable[[], None]] = []
        self._stop_waiting: Callable[[], object] = list  # nothing
        self._undo: list[Callable[[], None]] = []

    @property
    def active(self) -> bool:
        """True if a context-parallel step is under way."""
        return self.state is not None

    @property
    def intercepts(self) -> bool:
        """True if an attention call that is made now is the sequence's."""
        return self.state is not None and not self.state.waits and not self.in_local

    @property
    def in_local(self) -> bool:
        """True if what is being called is left alone."""
        return not (self.scopes[-1][1] if self.scopes else self.intercepts_outside)

    def in_local_module(self) -> bool:
        """True if a module is being called that is left alone."""
        return bool(self.scopes) and not self.scopes[-1][1]

    def activate(self, state: StepState) -> None:
        """Begin a step; the state stays until the next one, or until ``deactivate``."""
        self.deactivate()
        self.state = state
        self._leave = [enter() for enter in self._enter]

    def deactivate(self) -> None:
        """End the step: the model is the plain model again."""
        if self.state is not None:
            self.state.ended = True
        self.state = None
        self.scopes.clear()
        self.collector.forget_calls()
        self.checks.drop()
        while self._leave:
            self._leave.pop()()

    def leave(self) -> None:
        """The loop of an unused step is over: models are plain until one is called with the step's batch.

        The first call with a tensor of it, of a module of any kind, takes the step up again.
        """
        state, known = self.state, weakref.ref(self)
        if state is None or state.left:
            return
        state.left = state.waits = True

        def look(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling():  # it was called outside of the compiled code before
                return
            handle = known()
            if handle is not None:
                handle.take_up(args)

        self._stop_waiting = register_module_forward_pre_hook(look).remove
        self._leave.append(self._stop_waiting)

    def take_up(self, given: Any) -> None:
        """Something is called: with a tensor of its batch, the step waits no longer."""
        if self.state is not None and self.state.waits and self.has_batch(given):
            self.state.waits = False
            self._stop_waiting()

    def note_call(self, module: nn.Module, given: Any) -> None:
        """Something of the model is called in a step that could attend.

        Raises:
            ConfigError: the step waits for a call with its batch, and this is none.
        """
        if self.state is None:
            return
        self.take_up(given)
        if self.state.waits:
            raise ConfigError(_OTHER.format(type(module).__name__))
        self.state.model_called = True

    def attention(
        self, q_BLHD: torch.Tensor, k_BLKD: torch.Tensor, v_BLKD: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Attend over the whole sequence of the active step."""
        state = self.state
        assert state is not None
        q, k, v = _autocast(q_BLHD, k_BLKD, v_BLKD)
        self.checks.before_data()
        self.progress()
        inputs = Inputs(q, k, v, spec)
        by_kernel = self.collector.by_kernel(self.kernel, self.exchange)
        plan = self._plan(*inputs, state, max_logits=by_kernel)
        out, largest = (attend_and_note if by_kernel else _attend)(q, k, v, plan)
        of_pass = None if by_kernel else partial(self._plan_of_pass, inputs, state)
        self.collector.note(inputs, largest, self.mesh, of_pass)
        for listener in self.listeners:
            listener(plan, q, out)
        state.need_gradients.append(out.requires_grad)
        if out.requires_grad:
            note_tokens(out)
            out.register_hook(state.note_gradient)
        state.calls += 1
        return out

    def collect(self, modules: Mapping[nn.Module, Tell], *, extra_pass: bool = False) -> None:
        """Tell of the largest scores of these modules' attention, in place of any others'; until ``undo``.

        Args:
            modules: those that make the calls, and who is told of each call in training.
            extra_pass: whether scores that a kernel does not give are computed in a pass of their own.
        """
        self.collector.end()
        self.collector = Collector(modules, extra_pass=extra_pass)
        self.collector.follow(lambda: self.active)

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
        """The plan of a call; ranks agree on each kind of call once, that all of them can.

        What is missing may differ between nodes: packages, the compute capability of a GPU.
        """
        call = (max_logits, *_call(spec, q, k, v))
        if call in state.plans:
            return state.plans[call][1]

        def make(max_logits: bool) -> AttentionPlan:
            return make_plan(
                *(q, k, v, self.mesh, state.layout, spec, self.kernel),
                exchange=self.exchange,
                max_logits=max_logits,
            )

        plan = partial(plan_by_kernel, make) if max_logits else partial(make, False)
        request = request_of(q, v, spec, max_logits=max_logits)
        made = plan() if request in self.requests else self.checks.agreed("an attention call", plan)
        self.requests[request] = None
        state.plans[call] = (
            spec,
            made,
        )  # the spec keeps tensors alive, so that none takes their place
        return made

    def _plan_of_pass(self, inputs: Inputs, state: StepState) -> AttentionPlan:
        """The plan of a pass for the largest scores of a call that did not give them."""
        q, k, v, spec = inputs
        call = ("of a pass", *_call(spec, q, k, v))
        if call not in state.plans:
            make = partial(plan_of_pass, inputs, self.mesh, state.layout, self.exchange)
            state.plans[call] = spec, self.checks.agreed("a pass for the largest scores", make)
        return state.plans[call][1]

    def require_intercepted(self, model: nn.Module) -> None:
        """Refuse a step that called the model, and in which no attention call came through here.

        Raises:
            ConfigError: naming the model's classes that look like attention.
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
            "models, and in calls of torch.nn.functional.scaled_dot_product_attention; call one of these, or "
            "pass context_parallel_size=1 and data_parallel_size=<number of ranks>, which shares no sample."
        )

    def require_same_gradients(self) -> None:
        """Before backward: refuse attention that it reaches on some ranks of the cp group only.

        Raises:
            ConfigError: on every rank, naming the ranks that would wait for the others.
        """
        if self.state is None or self.mesh.sample_size == 1:
            return
        self.checks.tell()
        needs = self.state.need_gradients
        if self.state.compared == len(needs):  # attention calls are made together
            return
        group = self.mesh.control_group(Flat.CP)
        every = lists_of_ranks(needs, group, what="backward")
        if any(other != every[0] for other in every):
            refuse_gradients(dict(zip(dist.get_process_group_ranks(group), every, strict=True)))

    def on_activate(self, action: Callable[[], Callable[[], None]]) -> None:
        """Remember what to do when a step begins; it returns what to do when the step ends."""
        self._enter.append(action)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Remember how to take one replacement back."""
        self._undo.append(action)

    def undo(self) -> None:
        """Give the model its own attention back, in reverse order."""
        self.deactivate()
        self.collector.end()
        while self._undo:
            self._undo.pop()()


_OTHER = (
    "{} is called with no tensor of the batch that its loop over a loader gave last and did not use, so it "
    "is not known whether the call belongs to the step of that batch. Call fabric.strategy.end_step() first, "
    "if its rows are whole. If they are computed from that batch, keep the loop's iterator until the step is "
    "over: batches = iter(loader), then batch = next(batches)."
)


def _attend(*call: Any) -> tuple[torch.Tensor, None]:
    """As ``attend_and_note``, where nobody collects."""
    out = attend(*call)
    assert isinstance(out, torch.Tensor)
    return out, None


def _nothing() -> None:
    """Nobody counts."""


def refuse_gradients(every: Mapping[int, Sequence[bool]]) -> NoReturn:
    """Of each rank that shares a sample: through which attention calls backward would come.

    Raises:
        ConfigError: always.
    """
    reached = {rank: [call for call, needs in enumerate(of) if needs] for rank, of in every.items()}
    shown = ", ".join(f"rank {rank}: calls {calls}" for rank, calls in reached.items())
    raise ConfigError(
        "backward comes through other attention calls on some context-parallel ranks than on the others "
        f"({shown}), so ranks would wait for each other for ever. Something that "
        "is trained takes part in the forward on some ranks only, by what their own tokens are (an `if` "
        "on a mask): let it take part on every rank, multiplied by the mask."
    )


def _call(spec: AttentionSpec, *inputs: torch.Tensor) -> tuple[object, ...]:
    """A key for plans within one batch; slopes and sinks are told apart as objects."""
    values = (getattr(spec, item.name) for item in fields(spec))
    return (
        *(id(value) if isinstance(value, torch.Tensor) else value for value in values),
        *((x.shape, x.dtype, x.device) for x in inputs),
    )


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast as autocast would have cast the inputs of PyTorch's own attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
