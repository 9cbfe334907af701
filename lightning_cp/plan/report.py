"""What a search has found, in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from lightning_cp.bench.table import aligned
from lightning_cp.layout import Documents, Mask, SequenceLayout, schedule
from lightning_cp.planner.advice import advice, barely_sharded
from lightning_cp.planner.job import Case, Choice, Job
from lightning_cp.planner.loading import stacked, stops_at
from lightning_cp.planner.machines import GIB, TERA
from lightning_cp.planner.search import Found, Plan, Rejected, model_flops
from lightning_cp.planner.wire import Flow, flows

MIB = 1 << 20
PLANS = (
    "plan",
    "mesh",
    "engine",
    "mode",
    "settings",
    "GiB a device",
    "s a step",
    "tokens/s",
    "MFU",
)
EXPOSED = ("ring", "ulysses", "tensor_parallel", "parameters", "offload")
CONVENTION = (
    "MFU: model FLOPs (6 for each parameter that multiplies a token, 12 x head dim for each visible pair and "
    "head; what is computed again does not count) over"
)


def headline(job: Job) -> str:
    """What was asked."""
    model = job.model
    many = f"{job.devices:,} x {job.machine.name} ({job.machine.memory / GIB:,.0f} GiB)"
    what = f"{model.name}, {model.num_parameters:,} parameters, on {many}, {job.precision}"
    if not job.trains:
        return f"{what}: loaded, not trained"
    return f"{what}, {job.optimizer}: {job.global_batch} x {job.seq_len:,} tokens a step"


def summary(found: Found, show: int) -> str:
    """The tables of what fits and of what does not, and the best plan in full."""
    parts = [_plans(found.plans[:show], found)]
    if found.plans:
        parts += [costs(found.plans[:show]), *details(found.plans[0])]
    else:
        parts += list(closest(found.rejected))
    if found.rejected:
        parts.append(_rejected(found.rejected, show))
    return "\n\n".join(parts)


def settings_of(choice: Choice) -> str:
    """What is not at its default, by the strategy's names."""
    given = [] if choice.checkpointing == "none" else [choice.checkpointing]
    given += ["offload"] * choice.offload
    given += ["chunked_loss"] * bool(choice.chunked_loss) + ["tiled_mlp"] * bool(choice.tiled_mlp)
    return ", ".join(given) or "-"


def _plans(plans: Sequence[Plan], found: Found) -> str:
    looked = f"{found.looked_at:,} way{'s' * (found.looked_at != 1)} priced"
    if not plans:
        return f"Nothing fits ({looked})."
    rows = [[str(at), *_row(plan)] for at, plan in enumerate(plans, 1)]
    first = "fastest" if plans[0].case.job.trains else "least memory"
    many = f"{len(found.plans)} mesh{'es' * (len(found.plans) > 1)}; {looked}"
    return f"What fits, {first} first ({many}):\n\n{aligned(PLANS, rows)}"


def _row(plan: Plan) -> list[str]:
    choice = plan.case.choice
    price = ["-"] * 3
    if plan.case.job.trains:
        price = [
            f"{plan.seconds.total:,.4g}",
            f"{plan.tokens_per_second:,.0f}",
            f"{plan.mfu:.1%}",
        ]
    size = _figure(plan.memory.total / GIB)
    return [
        str(choice.mesh) or "1 device",
        choice.engine,
        choice.mode if choice.mesh.cp > 1 else "-",
        settings_of(choice),
        size,
        *price,
    ]


def details(plan: Plan) -> Iterator[str]:
    """The best plan: messages, work, seconds, and what to know of it."""
    if plan.case.job.trains:
        sent = list(flows(plan.case, dict(plan.attention)))
        if sent:
            rows = [[f.what, f.axis.value, f.link, _figure(f.sent / 1e9)] for f in sent]
            yield f"Plan 1.\n\n{aligned(('sent in a step', 'axis', 'link', '10^9 bytes'), rows)}"
        yield work_of(plan)
        yield seconds_of(plan)
    yield from remarks(plan.case)


def costs(plans: Sequence[Plan]) -> str:
    """What each plan costs a device: a column for each."""
    names = ["of a device", *(f"plan {at}" for at in range(1, len(plans) + 1))]
    rows: list[list[str]] = []

    def add(name: str, values: Sequence[float], shown: str = "") -> None:
        if any(values):
            rows.append([name, *(f"{x:{shown}}" if shown else _figure(x) for x in values)])

    memories = [plan.memory for plan in plans]
    for kind in memories[0].by_kind:
        add(f"GiB of {kind}", [memory.by_kind[kind] / GIB for memory in memories])
    add("GiB of reserve (no tensor's)", [memory.reserve / GIB for memory in memories])
    add("GiB in all", [memory.total / GIB for memory in memories])
    add("GiB free", [(memory.capacity - memory.total) / GIB for memory in memories])
    add("GiB while a checkpoint is loaded", [memory.loading / GIB for memory in memories])
    add("GiB of its host", [memory.host / GIB for memory in memories])
    if plans[0].case.job.trains:
        sent = [list(flows(plan.case, dict(plan.attention))) for plan in plans]
        for link in ("within a node", "between nodes"):
            add(f"10^9 bytes sent {link}", [_sent(each, link) / 1e9 for each in sent])
        add("TFLOP, recomputation aside", [_flops(plan) / 1e12 for plan in plans])
        add(
            "attention, busiest ring rank / mean, least even layers",
            [_imbalance(plan) for plan in plans],
            ".3f",
        )
        add("seconds computing", [plan.seconds.computing for plan in plans], ",.4g")
        add("seconds waiting for messages", [plan.seconds.exposed for plan in plans], ",.3g")
    return aligned(names, rows)


def _sent(each: Sequence[Flow], link: str) -> float:
    return sum(flow.sent for flow in each if flow.link == link)


def _flops(plan: Plan) -> float:
    return model_flops(plan.case.job, plan.attention) / plan.case.choice.mesh.devices


def _imbalance(plan: Plan) -> float:
    return max(cost.imbalance for cost in plan.attention.values())


def work_of(plan: Plan) -> str:
    """FLOPs of a step, and how evenly attention is spread."""
    case, model = plan.case, plan.case.job.model
    total = model_flops(case.job, plan.attention)
    heads = model.flops_per_pair * case.heads.local_heads * case.sequences
    each = total / case.choice.mesh.devices
    even = "; ".join(
        f"attention {_figure(max(cost.pairs) * heads / 1e12)} TFLOP a layer{_of_window(window, plan)}, the "
        f"busiest ring rank has {cost.imbalance:.3f} x the mean"
        for window, cost in plan.attention.items()
    )
    ring = case.choice.mesh.ring
    if ring > 1:
        other = SequenceLayout(case.job.seq_len, ring, case.choice.mesh.ulysses, "contiguous")
        plain = schedule(other, Documents.single(case.job.seq_len), Mask()).imbalance
        even += (
            f" ({case.layout.kind}; contiguous would have {plain:.3f} x{_of_window(None, plan)})"
        )
    return (
        f"Work: {_figure(total / 1e15)} PFLOP a step, {_figure(each / 1e12)} TFLOP a device; of them "
        f"{even}. {CONVENTION} {peak_of(case.job)}."
    )


def _of_window(window: int | None, plan: Plan) -> str:
    """Which layers, where there are several kinds."""
    if set(plan.attention) == {None}:
        return ""
    return " without a window" if window is None else f" of window {window:,}"


def peak_of(job: Job) -> str:
    """What MFU is a part of."""
    peak = f"{job.timed.peak_flops / TERA:,.4g}"
    if job.machine.measured:
        return f"the {peak} TFLOP/s that products were measured to reach in {job.machine.measured}"
    if job.precision == "fp32":
        return f"the data sheet's {peak} TFLOP/s in float32 without TF32 (PyTorch's default)"
    return f"the data sheet's {peak} TFLOP/s in bfloat16"


def seconds_of(plan: Plan) -> str:
    """Where a step's time goes."""
    each = [(f.name.replace("_", " "), getattr(plan.seconds, f.name)) for f in fields(plan.seconds)]
    rows = [
        [name, "waiting" if name.replace(" ", "_") in EXPOSED else "computing", f"{value:,.3g}"]
        for name, value in each
        if value
    ]
    rows.append(["in all", "", f"{plan.seconds.total:,.4g}"])
    share = plan.seconds.exposed / plan.seconds.total
    fullest = f"Fullest moment: {plan.memory.moment.name}."
    return (
        aligned(("seconds of a step", "", ""), rows)
        + f"\n\nExposed communication: {share:.1%}. {fullest}"
    )


def remarks(case: Case) -> Iterator[str]:
    """Warnings, copies of tensors, and what no step of this plan makes whole."""
    assumed = (case.job.model.assumed, case.job.machine.assumed)
    told = [*advice(case), *(one for one in assumed if one)]
    if told:
        yield "Note:\n" + "\n".join(f"  - {line}" for line in told)
    for_copies = [
        f"  - {part.name} {list(part.shape)}: {part.local / MIB:,.1f} MiB a device, "
        f"{part.ranks * part.local / part.whole:.3g} x its size over {part.ranks} ranks"
        for part in barely_sharded(case)
    ]
    if for_copies:
        yield "Hardly sharded (rows that do not divide, or no axis for them):\n" + "\n".join(
            for_copies
        )
    name, size = stacked(case)
    yield (
        f"Never made whole: {name} of all layers in one would be {size:,} bytes ({size / GIB:,.1f} GiB); "
        f"a rank reads its own part of one tensor at a time."
    )


def closest(rejected: Sequence[Rejected]) -> Iterator[str]:
    """Of the mesh that comes closest to fitting: how far loading would come, and what to know of it."""
    priced = [one for one in rejected if one.case is not None]
    if not priced:
        return
    case = priced[0].case
    assert case is not None
    choice = case.choice
    mesh = str(choice.mesh) or "1 device"
    yield f"Closest: {mesh}, {choice.engine}, {settings_of(choice)}: {priced[0].why}."
    stop = stops_at(case)
    if stop is not None:
        part = stop.part
        yield (
            f"Loading alone would end at {part.name} {list(part.shape)}, {part.whole / MIB:,.0f} MiB, with "
            f"{stop.read:.1%} read: {part.local / MIB:,.1f} MiB wanted, {stop.free / MIB:,.1f} MiB free."
        )
    yield from remarks(case)


def _rejected(rejected: Sequence[Rejected], show: int) -> str:
    rows = [[str(one.mesh) or "1 device", one.engine, one.why] for one in rejected[:show]]
    more = len(rejected) - len(rows)
    rest = f"\n\nand {more} more." if more > 0 else ""
    return f"What does not, closest first:\n\n{aligned(('mesh', 'engine', 'why'), rows)}{rest}"


def _figure(value: float) -> str:
    """Digits that are of use, for small models too."""
    return f"{value:,.2f}" if value >= 0.1 or not value else f"{value:.2g}"
