"""Steps that shift by themselves, and datasets that did so already: each is told once, on one rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from inspect import getsource
from linecache import getline
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_cp.utils.labels import are_shifted, shift
from tests.helpers.models.steps import Case, make_batch, make_model, start
from tests.helpers.pool import run_ranks

IDS = torch.randint(0, 43, (3, 37), generator=torch.Generator().manual_seed(2))
IN_THE_STEP, TWICE = "wrong at every seam", "shifted already"


def accuracy(logits: torch.Tensor, batch: Any) -> Any:
    return (logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).float().mean()


def of_predictions(logits: torch.Tensor, batch: Any) -> Any:
    return (logits.argmax(-1)[..., :-1] == batch["input_ids"][..., 1:]).float().mean()


def of_entropy(logits: torch.Tensor, batch: Any) -> Any:
    length = logits.shape[1]
    labels = batch["labels"].clone()
    return logits[:, : length - 1, :].logsumexp(-1) * (labels[:, 1:length] != -100)


def of_log_probabilities(logits: torch.Tensor, batch: Any) -> Any:
    return logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])


def padded(logits: torch.Tensor, batch: Any) -> Any:
    labels = F.pad(batch["labels"], (0, 1), value=-100)
    return (logits.argmax(-1) == labels[..., 1:]).float().mean()


def padded_after(logits: torch.Tensor, batch: Any) -> Any:
    return (logits.argmax(-1) == F.pad(batch["labels"][:, 1:], (0, 1), value=-100)).float().mean()


def rolled(logits: torch.Tensor, batch: Any) -> Any:
    return (logits.argmax(-1) == torch.roll(batch["labels"], -1, dims=1)).float().mean()


def rolled_by_its_method(logits: torch.Tensor, batch: Any) -> Any:
    return (logits.argmax(-1) == batch["labels"].roll(-1, -1)).float().mean()


def narrowed(logits: torch.Tensor, batch: Any) -> Any:
    n = logits.shape[1] - 1
    labels = torch.narrow(batch["labels"], 1, 1, n)
    return (logits.narrow(1, 0, n).argmax(-1) == labels).float().mean()


def right(logits: torch.Tensor, batch: Any) -> Any:
    return (logits.argmax(-1) == batch["shift_labels"]).float().mean()


def rolled_elsewhere(logits: torch.Tensor, batch: Any) -> Any:
    """No shift of targets: features, the other way, along rows, and padding of whole tensors or in front."""
    ids = batch["input_ids"]
    F.pad(ids[:, 1:], (1, 0))
    return logits.roll(-1, 1), ids.roll(1, 1), ids.roll(-1, 0), ids.roll(-1), F.pad(ids, (0, 1))


def of_other_tensors(logits: torch.Tensor, batch: Any) -> Any:
    """Of no plain tensors of tokens: all of it works as ever."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)])
        assert torch.equal(torch.jit.script(moved)(logits), moved(logits))
    torch.fx.symbolic_trace(Rolled())
    return nested[0], F.pad(input=logits, pad=(0, 1)), torch.narrow(logits, 1, torch.tensor(0), 2)


def moved(x: torch.Tensor) -> torch.Tensor:
    return F.pad(torch.narrow(torch.roll(x, 1, 0), 1, 0, 3), [0, 1])


class Rolled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.roll(x, 1, 1)


def steps_between(logits: torch.Tensor, batch: Any) -> Any:
    positions = batch["position_ids"]
    return positions[:, 1:] - positions[:, :-1], logits[:, :-1] - logits[:, 1:]


METRICS: dict[str, Callable[..., Any]] = {
    metric.__name__: metric
    for metric in (
        *(accuracy, of_predictions, of_entropy, of_log_probabilities, padded),
        *(padded_after, rolled, rolled_by_its_method, narrowed),
        *(right, steps_between, rolled_elsewhere, of_other_tensors),
    )
}


def functions() -> list[Any]:
    """What can shift, as it is now."""
    methods = ("__getitem__", "narrow", "roll")
    found = [vars(torch.Tensor).get(name) for name in methods]
    return [*found, torch.narrow, torch.roll, F.pad]


FUNCTIONS = functions()

Said = list[tuple[str, str]]
"""Messages, each with the line of code that it points at."""


def said_by(rank: int, world_size: int, metric: str, ulysses: int, shifted: bool) -> Said:
    """What two steps that train and two that do not are told of, and where."""
    case = Case()
    model = make_model(case)
    runtime = start(ulysses, world_size // ulysses, model)
    batch = make_batch(case)
    if shifted:
        batch["labels"] = shift(batch["input_ids"])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            for gradients in (True, True, False, False):
                with torch.set_grad_enabled(gradients):
                    local = runtime.shard(batch, needs_labels=gradients)
                    runtime.begin_step()
                    METRICS[metric](model(**local).logits, local)
                    runtime.end_step()
        finally:
            runtime.detach()
    assert functions() == FUNCTIONS
    return [(str(one.message), getline(one.filename, one.lineno).strip()) for one in seen]


@pytest.mark.parametrize(
    ("metric", "ranks", "ulysses"),
    [
        *(("accuracy", 2, 1), ("of_predictions", 2, 2), ("of_entropy", 4, 2)),
        *(("of_log_probabilities", 2, 1), ("padded", 2, 1), ("padded_after", 2, 1)),
        *(("rolled", 2, 1), ("rolled_by_its_method", 2, 2), ("narrowed", 3, 1)),
    ],
)
def test_a_metric_of_shifted_logits_is_told_once(metric: str, ranks: int, ulysses: int) -> None:
    first, *others = run_ranks(ranks, said_by, metric, ulysses, False)
    ((message, line),) = first
    assert IN_THE_STEP in message
    assert "batch['shift_labels']" in message
    assert line in getsource(METRICS[metric])
    assert line.count("1:") == 1 or "-1, " in line or ", 1, " in line
    assert others == [[]] * (ranks - 1)


@pytest.mark.parametrize(
    "metric", ["right", "steps_between", "rolled_elsewhere", "of_other_tensors"]
)
def test_what_does_not_shift_is_told_nothing(metric: str) -> None:
    assert run_ranks(2, said_by, metric, 1, False) == [[], []]


def graphs(rank: int, world_size: int) -> int:
    """How many graphs a compiled function that pads and rolls needs in observed steps and others."""
    made: list[object] = []

    def backend(graph: Any, _: object) -> Any:
        made.append(graph)
        return graph.forward

    case = Case()
    model = make_model(case)
    runtime = start(1, world_size, model)
    function = torch.compile(lambda x: F.pad(torch.roll(x, 1, 0), (0, 1)), backend=backend)
    try:
        for gradients in (True, True, False, False):
            with torch.set_grad_enabled(gradients):
                local = runtime.shard(make_batch(case), needs_labels=gradients)
                runtime.begin_step()
                model(**local)
                function(torch.ones(4, 5))
                runtime.end_step()
    finally:
        runtime.detach()
    return len(made)


def test_observed_steps_are_compiled_once_as_others_are() -> None:
    first, other = run_ranks(2, graphs)
    assert first == other


def stops_in_a_step(rank: int, world_size: int) -> None:
    model = make_model(case := Case())
    runtime = start(1, world_size, model)
    runtime.shard(make_batch(case), needs_labels=True)
    runtime.begin_step()
    assert (functions() == FUNCTIONS) == (rank > 0)
    runtime.detach()
    assert functions() == FUNCTIONS


def test_functions_are_restored_after_a_step_that_does_not_end() -> None:
    run_ranks(2, stops_in_a_step)


def test_labels_that_are_shifted_already_are_told_once() -> None:
    first, second = run_ranks(2, said_by, "right", 1, True)
    ((message, line),) = first
    assert TWICE in message
    assert line == "local = runtime.shard(batch, needs_labels=gradients)"
    assert second == []


def half(labels: torch.Tensor) -> torch.Tensor:
    """As where a prompt has no targets."""
    return torch.where(torch.arange(37) < 18, -100, labels)


@pytest.mark.parametrize(
    ("labels", "want"),
    [
        (shift(IDS), True),
        (half(shift(IDS)), True),
        (IDS, False),
        (half(IDS), False),
        (IDS.flip(0), None),
        (torch.full_like(IDS, -100), None),
        (IDS[:, :-1], None),
        (IDS[..., None], None),
    ],
)
def test_whether_labels_are_shifted(labels: torch.Tensor, want: bool | None) -> None:
    assert are_shifted(labels, IDS) is want


def test_a_row_of_one_token_tells_nothing() -> None:
    ones = torch.ones(2, 37, dtype=torch.long)
    assert are_shifted(ones, ones) is None
