"""The report on a search of plans: tables and sentences, advice about a plan, and a picture.

The picture has the memory of a device by kind, plan beside plan, and the work of every ring rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightning_cp.layout import Documents, Mask, SequenceLayout, schedule
from lightning_cp.layout.axes import Axis
from lightning_cp.planner.job import Job, PlanCase, TrainingMethod
from lightning_cp.planner.machines import GIB, TERA
from lightning_cp.planner.memory import Memory
from lightning_cp.planner.search import MethodPlan, Rejection, SearchResult, model_flops
from lightning_cp.planner.time_model import CommVolume, comm_volumes
from lightning_cp.utils.colors import color_of
from lightning_cp.utils.console import markdown_table

FEW_TOKENS = 2048
"""Tokens of a rank below which gathering a layer takes longer than its compute on most links."""
MANY_COPIES = 1.5
"""Copies of a parameter over all ranks of one copy of the model that count as many."""

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


@dataclass(frozen=True)
class ParameterMemory:
    """Memory of one parameter on a rank, while a checkpoint is read tensor by tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    whole: int
    """Bytes of the whole parameter."""
    local: int
    """Bytes of a rank's part: equally many rows on each, of those of a tensor-parallel rank."""
    ranks: int
    """Ranks over which the model is sharded; a parameter with fewer rows has fewer."""

    @property
    def excess(self) -> int:
        """Bytes of all ranks together beyond one copy."""
        return self.local * self.ranks - self.whole


@dataclass(frozen=True)
class OutOfMemory:
    """The point where reading runs out of memory."""

    part: ParameterMemory
    free: int
    """Bytes that are left for the part."""
    read: float
    """Fraction of all bytes read by then."""


def parameter_memory(case: PlanCase) -> Iterator[ParameterMemory]:
    """Yield the memory of every parameter, in the order of use."""
    choice, itemsize = case.choice, case.job.itemsize
    ranks, tp = choice.shard_ranks, choice.mesh.tp
    for one in case.job.model.parameters:
        shape = one.local_shape(tp)
        local = -(-shape[0] // ranks) * math.prod(shape[1:])
        yield ParameterMemory(
            one.name, one.shape, one.numel * itemsize, local * itemsize, ranks * tp
        )


def find_out_of_memory(case: PlanCase) -> OutOfMemory | None:
    """Find the first parameter that does not fit; ``None`` if all do."""
    machine = case.job.machine
    free, read = machine.memory - machine.reserve, 0
    every = case.job.model.num_parameters * case.job.itemsize
    for part in parameter_memory(case):
        if part.local > free:
            return OutOfMemory(part, free, read / every)
        free -= part.local
        read += part.whole
    return None


def largest_stacked_parameter(case: PlanCase) -> tuple[str, int]:
    """Return the name of the largest parameter stacked over layers, and its bytes if it were whole."""
    job = case.job
    sizes = {one.name: one.numel for one in job.model.layers[0].parameters}
    name = (
        "self_attn.o_proj.weight"
        if "self_attn.o_proj.weight" in sizes
        else max(sizes, key=lambda at: sizes[at])
    )
    return name, sizes[name] * len(job.model.layers) * job.itemsize


def advice(case: PlanCase) -> Iterator[str]:
    """Yield sentences of advice, most important first."""
    job, mesh, heads = case.job, case.choice.mesh, case.heads
    idle = job.devices - mesh.devices
    if idle:
        share = f"{idle} of {job.devices} devices ({idle / job.devices:.1%})"
        yield f"{share} are idle: the mesh has {mesh.devices}"
    full, each = min(mesh.devices, job.machine.devices_per_node), case.devices_per_node
    if each < full:
        nodes = mesh.devices // each
        yield f"{mesh.devices} devices are {nodes} nodes of {each}, as each has equally many"
    copies = mesh.devices // (case.choice.shard_ranks * mesh.tp)
    if copies > 1:
        yield (
            f"{copies} copies of the model's state: {1 - 1 / copies:.1%} of the devices hold what others "
            "hold already. dp_shard in place of dp_replicate shards it"
        )
    for axis in (Axis.TP, Axis.ULYSSES, Axis.RING):
        if case.crosses_nodes(axis):
            beyond = (
                f"{axis.value} of {mesh.size(axis)} goes beyond nodes of {case.devices_per_node}"
            )
            cards = job.machine.cards(each)
            noun = f"network card{'s' * (cards > 1)}"
            shared = f", and {each} devices share {cards} {noun}" if cards < each else ""
            yield f"{beyond}: its messages take the slower link{shared}"
    sent = sum(map(heads.num_local_kv, range(heads.ulysses_size))) / heads.num_kv_heads
    if sent > 1:
        above = f"ulysses of {mesh.ulysses} is above {heads.num_kv_heads} K/V heads"
        yield f"{above}: each is sent to {sent:g} ranks"
    most = job.model.positions
    if most is not None and job.seq_len > most:
        yield (
            f"seq_len={job.seq_len:,} is above the {most:,} positions of the model's config "
            "(max_position_embeddings)"
        )
    padding = case.layout.padded_len - job.seq_len
    if padding:
        yield f"{padding:,} tokens of padding ({padding / job.seq_len:.2%}), which cost no attention"
    if case.local_tokens < FEW_TOKENS:
        yield f"{case.local_tokens:,} tokens a rank are few: gathering parameters may take longer"
    if case.sequences > 1:
        yield (
            f"{case.sequences} sequences one after the other: until the last one, gradients stay whole"
        )


def find_poorly_sharded(case: PlanCase, most: int = 5) -> list[ParameterMemory]:
    """Find parameters that take much more than a rank's even share, largest waste first."""
    found: dict[tuple[str, int], ParameterMemory] = {}
    for part in parameter_memory(case):
        if part.local * part.ranks > MANY_COPIES * part.whole and part.ranks > 1:
            kind = (".".join(p for p in part.name.split(".") if not p.isdecimal()), part.local)
            found.setdefault(kind, part)
    return sorted(found.values(), key=lambda part: -part.excess)[:most]


def headline(job: Job) -> str:
    """Return the planned job in one line."""
    model = job.model
    many = f"{job.devices:,} x {job.machine.name} ({job.machine.memory / GIB:,.0f} GiB)"
    what = f"{model.name}, {model.num_parameters:,} parameters, on {many}, {job.precision}"
    if not job.trains:
        return f"{what}: loaded, not trained"
    return f"{what}, {job.optimizer}: {job.global_batch} x {job.seq_len:,} tokens a step"


def summary(found: SearchResult, show: int) -> str:
    """Return the tables of plans that fit and that do not, and the best plan in detail."""
    parts = [_plans(found.plans[:show], found)]
    if found.plans:
        parts += [costs(found.plans[:show]), *details(found.plans[0])]
    else:
        parts += list(closest(found.rejected))
    if found.rejected:
        parts.append(_rejected(found.rejected, show))
    return "\n\n".join(parts)


def settings_of(choice: TrainingMethod) -> str:
    """Return the settings that differ from their defaults, by the strategy's names."""
    given = ["rotation"] if choice.exchange == "rotation" else []
    given += [] if choice.checkpointing == "none" else [choice.checkpointing]
    given += ["offload"] * choice.offload
    given += ["chunked_loss"] * bool(choice.chunked_loss) + ["tiled_mlp"] * bool(choice.tiled_mlp)
    return ", ".join(given) or "-"


def _plans(plans: Sequence[MethodPlan], found: SearchResult) -> str:
    looked = f"{found.looked_at:,} way{'s' * (found.looked_at != 1)} priced"
    if not plans:
        return f"Nothing fits ({looked})."
    rows = [[str(at), *_row(plan)] for at, plan in enumerate(plans, 1)]
    first = "fastest" if plans[0].case.job.trains else "least memory"
    many = f"{len(found.plans)} mesh{'es' * (len(found.plans) > 1)}; {looked}"
    return f"What fits, {first} first ({many}):\n\n{markdown_table(PLANS, rows)}"


def _row(plan: MethodPlan) -> list[str]:
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


def details(plan: MethodPlan) -> Iterator[str]:
    """Yield the best plan's messages, work, seconds, and remarks."""
    if plan.case.job.trains:
        sent = list(comm_volumes(plan.case, dict(plan.attention)))
        if sent:
            rows = [[f.what, f.axis.value, f.link, _figure(f.sent / 1e9)] for f in sent]
            yield f"Plan 1.\n\n{markdown_table(('sent in a step', 'axis', 'link', '10^9 bytes'), rows)}"
        yield work_of(plan)
        yield seconds_of(plan)
    yield from remarks(plan.case)


def costs(plans: Sequence[MethodPlan]) -> str:
    """Return the costs of each plan on a device, one column for each."""
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
        sent = [list(comm_volumes(plan.case, dict(plan.attention))) for plan in plans]
        for link in ("within a node", "between nodes"):
            add(f"10^9 bytes sent {link}", [_sent(each, link) / 1e9 for each in sent])
        add("TFLOP, without recomputation", [_flops(plan) / 1e12 for plan in plans])
        add(
            "attention, busiest ring rank / mean, least even layers",
            [_imbalance(plan) for plan in plans],
            ".3f",
        )
        add("seconds computing", [plan.seconds.computing for plan in plans], ",.4g")
        add("seconds waiting for messages", [plan.seconds.exposed for plan in plans], ",.3g")
    return markdown_table(names, rows)


def _sent(each: Sequence[CommVolume], link: str) -> float:
    return sum(flow.sent for flow in each if flow.link == link)


def _flops(plan: MethodPlan) -> float:
    return model_flops(plan.case.job, plan.attention) / plan.case.choice.mesh.devices


def _imbalance(plan: MethodPlan) -> float:
    return max(cost.imbalance for cost in plan.attention.values())


def work_of(plan: MethodPlan) -> str:
    """Return the FLOPs of a step, and the balance of attention over ring ranks."""
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


def _of_window(window: int | None, plan: MethodPlan) -> str:
    """Return the window that distinguishes layers, where there are several kinds."""
    if set(plan.attention) == {None}:
        return ""
    return " without a window" if window is None else f" of window {window:,}"


def peak_of(job: Job) -> str:
    """Return the peak that MFU is a share of, in words."""
    peak = f"{job.timed.peak_flops / TERA:,.4g}"
    if job.machine.measured:
        return f"the {peak} TFLOP/s that products were measured to reach in {job.machine.measured}"
    if job.precision == "fp32":
        return f"the data sheet's {peak} TFLOP/s in float32 without TF32 (PyTorch's default)"
    return f"the data sheet's {peak} TFLOP/s in bfloat16"


def seconds_of(plan: MethodPlan) -> str:
    """Return the breakdown of a step's time."""
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
        markdown_table(("seconds of a step", "", ""), rows)
        + f"\n\nExposed communication: {share:.1%}. {fullest}"
    )


def remarks(case: PlanCase) -> Iterator[str]:
    """Yield warnings, hardly sharded tensors, and the largest tensor that is never made whole."""
    assumed = (case.job.model.assumed, case.job.machine.assumed)
    told = [*advice(case), *(one for one in assumed if one)]
    if told:
        yield "Note:\n" + "\n".join(f"  - {line}" for line in told)
    for_copies = [
        f"  - {part.name} {list(part.shape)}: {part.local / MIB:,.1f} MiB a device, "
        f"{part.ranks * part.local / part.whole:.3g} x its size over {part.ranks} ranks"
        for part in find_poorly_sharded(case)
    ]
    if for_copies:
        yield "Hardly sharded (rows that do not divide, or no axis for them):\n" + "\n".join(
            for_copies
        )
    name, size = largest_stacked_parameter(case)
    yield (
        f"Never made whole: {name} of all layers in one would be {size:,} bytes ({size / GIB:,.1f} GiB); "
        f"a rank reads its own part of one tensor at a time."
    )


def closest(rejected: Sequence[Rejection]) -> Iterator[str]:
    """Yield remarks on the mesh closest to fitting: the point at which loading would fail, and notes."""
    priced = [one for one in rejected if one.case is not None]
    if not priced:
        return
    case = priced[0].case
    assert case is not None
    choice = case.choice
    mesh = str(choice.mesh) or "1 device"
    yield f"Closest: {mesh}, {choice.engine}, {settings_of(choice)}: {priced[0].why}."
    stop = find_out_of_memory(case)
    if stop is not None:
        part = stop.part
        yield (
            f"Loading alone would end at {part.name} {list(part.shape)}, {part.whole / MIB:,.0f} MiB, with "
            f"{stop.read:.1%} read: {part.local / MIB:,.1f} MiB wanted, {stop.free / MIB:,.1f} MiB free."
        )
    yield from remarks(case)


def _rejected(rejected: Sequence[Rejection], show: int) -> str:
    rows = [[str(one.mesh) or "1 device", one.engine, one.why] for one in rejected[:show]]
    more = len(rejected) - len(rows)
    rest = f"\n\nand {more} more." if more > 0 else ""
    return (
        f"What does not, closest first:\n\n{markdown_table(('mesh', 'engine', 'why'), rows)}{rest}"
    )


def _figure(value: float) -> str:
    """Format useful digits, for small models too."""
    return f"{value:,.2f}" if value >= 0.1 or not value else f"{value:.2g}"


Bar = tuple[str, Memory]
MOST_BARS = 12
"""Bars of plans that fit, and of those that do not: more are not readable."""
CORNER: dict[str, Any] = {"fontsize": 8, "va": "bottom", "ha": "center"}


def draw(found: SearchResult, headline: str, show: int, picture: Path) -> None:
    """Write the picture; do nothing if no plan was priced."""
    from matplotlib.figure import Figure  # needs no display

    shown = min(show, MOST_BARS)
    bars: list[Bar] = [(_name(plan.case), plan.memory) for plan in found.plans[:shown]]
    for one in found.rejected[:shown]:
        if one.case is not None and one.memory is not None:
            bars.append((_name(one.case), one.memory))
    if not bars:
        return
    best = found.plans[0].case if found.plans else None
    panels = 1
    if best is not None and best.job.trains and best.choice.mesh.ring > 1:
        panels = 2
    figure = Figure(figsize=(11, 1.6 + 0.45 * len(bars) + 2.6 * (panels - 1)), layout="constrained")
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    figure.suptitle(headline, fontsize=10)
    _memory(axes[0], bars)
    if best is not None and panels > 1:
        _work(axes[1], best)
    figure.savefig(picture, dpi=130)


def _name(case: PlanCase) -> str:
    choice = case.choice
    mesh = str(choice.mesh).replace(" x ", "\n", 0)
    saved = [] if choice.checkpointing == "none" else [choice.checkpointing]
    saved += ["offload"] * choice.offload
    return f"{mesh or '1 device'}\n{', '.join([choice.engine, *saved])}"


def _memory(axis: Any, bars: Sequence[Bar]) -> None:
    """Draw one bar for each plan, the fastest on top; bars beyond the line do not fit."""
    left = [0.0] * len(bars)
    at, memories = range(len(bars)), [memory for _, memory in bars]
    kinds = [kind for kind in memories[0].by_kind if any(m.by_kind[kind] for m in memories)]
    for number, kind in enumerate([*kinds, "reserve"]):
        sizes = [{**m.by_kind, "reserve": m.reserve}[kind] / GIB for m in memories]
        color = "lightgray" if kind == "reserve" else color_of(number)
        axis.barh(at, sizes, left=left, label=kind, color=color)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    capacity = bars[0][1].capacity / GIB
    axis.axvline(capacity, color="black", ls="--", lw=1)
    axis.text(
        capacity, 1.01, f"{capacity:,.0f} GiB", transform=axis.get_xaxis_transform(), **CORNER
    )
    axis.set_yticks(at, [name for name, _ in bars], fontsize=7)
    axis.set_xlim(0, min(max(*left, capacity), 3 * capacity) * 1.05)
    axis.invert_yaxis()
    axis.set_xlabel("GiB of a device at the fullest moment of a step")
    axis.legend(fontsize=7, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1), borderaxespad=2.5)


def _work(axis: Any, case: PlanCase) -> None:
    """Draw attention pairs of every ring rank over the mean, beside those of a contiguous layout."""
    mesh, length = case.choice.mesh, case.job.seq_len
    documents = Documents.single(length)
    contiguous = SequenceLayout(length, mesh.ring, mesh.ulysses, "contiguous")
    ranks = list(range(mesh.ring))
    for layout, color, aside in ((contiguous, "lightgray", -0.2), (case.layout, color_of(0), 0.2)):
        work = schedule(layout, documents, Mask()).work
        mean, at = sum(work) / len(work), [rank + aside for rank in ranks]
        axis.bar(at, [one / mean for one in work], width=0.4, color=color, label=layout.kind)
    axis.set(xlabel="ring rank", ylabel="attention / mean", ylim=(0, None))
    axis.set_xlim(-0.6, mesh.ring - 0.4)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_title(f"work of every ring rank: {mesh}, layers without a window", fontsize=9)
    axis.legend(fontsize=8)
