"""One error for all that a run does not declare: heads, labels, and dimensions of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_cp.batch import BatchRules, read_batch
from lightning_cp.batch.read import labels_per_row
from lightning_cp.batch.rules import KNOWN_DIMS
from lightning_cp.config import StrategyConfig, not_default
from lightning_cp.errors import ConfigError, ShapeError, UndeclaredError
from lightning_cp.utils.containers import tensors_of
from lightning_cp.utils.labels import are_shifted


@contextmanager
def complete_errors(settings: StrategyConfig) -> Iterator[None]:
    """A block whose errors show all of the strategy's arguments, ready to be pasted."""
    try:
        yield
    except UndeclaredError as error:
        raise merge_errors([error], settings) from None


def merge_errors(errors: Sequence[UndeclaredError], settings: StrategyConfig) -> UndeclaredError:
    """Merge errors into one, whose arguments are the user's and the missing ones."""
    questions = list(dict.fromkeys(line for error in errors for line in error.questions))
    if not any(error.arguments for error in errors):
        return UndeclaredError(questions, {})  # the user's own arguments would not help
    arguments = not_default(settings)
    for error in errors:
        for name, value in error.arguments.items():
            known = arguments.get(name)
            both = isinstance(value, Mapping) and isinstance(known, Mapping)
            arguments[name] = {**known, **value} if both else value  # type: ignore[dict-item]
    return UndeclaredError(questions, arguments)


def collect_undeclared(
    first: UndeclaredError,
    model: nn.Module,
    options: Mapping[str, Any],
    settings: StrategyConfig,
    *,
    needs_labels: bool,
    batch: Any = None,
) -> UndeclaredError:
    """Return one error for all that a run does not declare; the run ends with it.

    Args:
        first: the error that ends the run.
        model: the model whose labels are read.
        options: declarations of its mixin.
        settings: the user's.
        needs_labels: the run weights a loss by labels.
        batch: the step's batch; ``None``: there is none yet.

    Raises:
        ConfigError: layers that no declaration makes shareable.
    """
    from lightning_cp.models.guards.token_mixing import check_no_mixing
    from lightning_cp.models.swap import hf_models, unswapped_hf_models
    from lightning_cp.runtime.model_binding import resolve_labels

    check_no_mixing(model, unswapped_hf_models(model, options.get("modules")))
    errors = [first]
    key = options.get("label_key") or settings.label_key
    declared = options.get("labels") or settings.labels
    try:
        resolve_labels(model, declared, required=needs_labels)
    except UndeclaredError as error:
        errors.append(error)
    if batch is None:
        return merge_errors(errors, settings)
    one_a_row = labels_per_row(dict(tensors_of(batch)), key) if needs_labels else None
    if one_a_row is not None:
        return UndeclaredError([one_a_row], {})
    try:
        dims = settings.with_sequence_dims(options.get("sequence_dims") or {}).sequence_dims
        kind = "none" if declared == "none" else "ignore"
        rules = BatchRules(dims, key, kind, reads_masks=bool(hf_models(model)))
        read_batch(batch, rules, needs_labels=needs_labels)
    except UndeclaredError as error:
        errors.append(error)
    except (ConfigError, ShapeError):
        pass  # refused when it is sharded
    asks_labels = any("labels" in error.arguments for error in errors)
    asks_key = any("label_key" in error.arguments for error in errors)
    tensors = dict(tensors_of(batch))
    labels, ids = tensors.get(key), tensors.get("input_ids")
    if asks_labels and labels is None and not asks_key:  # how it reads them is no question
        errors = [error for error in errors if error.arguments != {"labels": "aligned"}]
        return merge_errors([*errors, UndeclaredError([], {"labels": "none"})], settings)
    merged = merge_errors(errors, settings)
    shifted = None if labels is None or ids is None else are_shifted(labels, ids)
    if asks_labels and shifted is False:  # with "aligned", each token would be its own target
        return UndeclaredError(merged.questions, {**merged.arguments, "labels": "shift"})
    return merged


def collect_undeclared_of_trainer(
    first: UndeclaredError, trainer: Trainer, options: Mapping[str, Any], settings: StrategyConfig
) -> UndeclaredError:
    """Return one error for all that a Trainer's run does not declare; read a batch, as the run ends here."""
    module = trainer.lightning_module
    training = trainer.state.fn == TrainerFn.FITTING
    batch = None
    with suppress(Exception):  # any error of the user's code: it comes again later
        batch = _first_batch(trainer)
    if first.arguments.get("num_heads") is ... and batch is not None:
        heads = _count_heads_in_step(module, batch, training=training)
        if heads is ... and not _has_attention_or_sequence(module, batch, options, settings):
            ranks = trainer.world_size // settings.tensor_parallel_size
            alone = {"context_parallel_size": 1, "data_parallel_size": ranks}
            return merge_errors([UndeclaredError(first.questions, alone)], settings)
        first.arguments["num_heads"] = heads
    needs_labels = trainer.state.fn != TrainerFn.PREDICTING
    return collect_undeclared(
        first, module, options, settings, needs_labels=needs_labels, batch=batch
    )


def _has_attention_or_sequence(
    module: nn.Module, batch: Any, options: Mapping[str, Any], settings: StrategyConfig
) -> bool:
    """True if a module looks like attention, or a tensor of the batch like a sequence."""
    declared = settings.sequence_dims or options.get("sequence_dims")
    names = {name.rsplit(".", 1)[-1] for name, _ in tensors_of(batch)}
    kinds = (type(part).__name__.lower() for part in module.modules())
    return bool(declared or names & KNOWN_DIMS.keys()) or any("atten" in kind for kind in kinds)


def _first_batch(trainer: Trainer) -> Any:
    """Return the first batch of a run as a step gets it, on the host."""
    loops: dict[Any, Any] = {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    loop = loops[trainer.state.fn]
    loader = loop._data_source.dataloader()
    while isinstance(loader, (list, tuple)) and loop is not trainer.fit_loop:
        loader = loader[0]  # evaluation takes loaders one after the other
    batch = next(iter(CombinedLoader(loader)))[0]
    module: Any = trainer.lightning_module
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        data: Any = getattr(trainer, "datamodule", None)
        holder = data if data is not None and is_overridden(hook, data) else module
        batch = getattr(holder, hook)(batch, 0)
    return batch


def _count_heads_in_step(module: Any, batch: Any, *, training: bool) -> Any:
    """Return the query heads that a small model's step gives to PyTorch's attention; ``...``: not known."""
    from lightning_cp.models.sdpa import observe_sdpa

    seen: list[int] = []
    if sum(p.numel() for p in module.parameters()) > _SMALL:
        return ...
    end = observe_sdpa(lambda query, *rest: seen.append(query.shape[1]))
    try:
        with torch.no_grad(), suppress(Exception):  # any: logging fails before the run
            (module.training_step if training else module.validation_step)(batch, 0)
    finally:
        end()
    return seen[0] if seen else ...


_SMALL = 10**8
"""Maximum number of parameters of a model whose step the host calls."""
