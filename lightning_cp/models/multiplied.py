"""The FLOPs that a token costs outside of attention: the parameters that it is multiplied by.

A parameter in a matrix product costs every token one multiply-add, 2 FLOPs, in the forward, another 2 in the
backward for the gradient of the input, and 2 for its own: 6 in all (Kaplan et al. 2020, "Scaling Laws for
Neural Language Models", section 2.1; Chowdhery et al. 2022, "PaLM", appendix B). A frozen one has no
gradient of its own: 4; and 2 where nothing that is trained comes before it, so that backward does not
pass it. "Before" is the order in which modules are registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_cp.models.swap import hf_models, told


@dataclass(frozen=True)
class Multiplied:
    """Counts of parameters' numbers that one token is multiplied by."""

    trained: int = 0
    frozen: int = 0
    """That gradients pass through."""
    first: int = 0
    """Frozen, before anything that is trained."""
    unknown: tuple[str, ...] = ()
    """Parameters of which it is not known whether, or how often, they multiply a token."""

    @property
    def flops(self) -> int:
        """Of one token, forward and backward."""
        return 6 * self.trained + 4 * self.frozen + 2 * self.first

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.trained + self.frozen + self.first


def multiplied_by(model: nn.Module) -> Multiplied:
    """Count the parameters that multiply each token: whole ones, however many ranks share them.

    Embeddings are looked up and not counted; an output projection is, also where its weight is that of the
    embedding. Vectors (biases, norms) are no matrix products. Of experts, as many count as the config of
    a Hugging Face model says that each token goes to. A module that is called twice counts once.
    """
    routed = _Routed(model)
    counts = {"trained": 0, "frozen": 0, "first": 0}
    unknown: list[str] = []
    gradients_pass = False
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            kind = "trained" if parameter.requires_grad else "frozen" if gradients_pass else "first"
            gradients_pass |= parameter.requires_grad
            active = _active(module, name, parameter, routed)
            if active is None:
                unknown.append(name)
            else:
                counts[kind] += active
    return Multiplied(**counts, unknown=tuple(unknown))


def _active(module: nn.Module, name: str, parameter: Any, routed: _Routed) -> int | None:
    """The number of a parameter's values that multiply one token; ``None`` if it is not known."""
    size, last = parameter.numel(), name.rpartition(".")[2]
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or parameter.dim() < 2:
        return 0
    if "bias" in last:  # of experts: [experts, features]
        return 0
    share = routed.share(name, parameter)
    if share is not None:
        active, experts = share
        return size * active // experts
    is_matrix = parameter.dim() == 2 and (last == "weight" or last.startswith("in_proj"))
    is_matrix |= parameter.dim() == 2 and last in (
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
    )
    return size if is_matrix and not routed.is_expert(name) else None


class _Routed:
    """The experts of the Hugging Face models inside a module."""

    def __init__(self, model: nn.Module) -> None:
        self._lists: dict[str, tuple[int, int] | None] = dict(_lists_of_experts(model))
        self._known = set(_numbers(model))

    def is_expert(self, name: str) -> bool:
        """True if a parameter is one expert's, of a list of them."""
        return any(name.startswith(prefix) for prefix in self._lists)

    def share(self, name: str, parameter: Any) -> tuple[int, int] | None:
        """(experts that a token goes to, experts) of a parameter of experts, if that is known."""
        for prefix, share in self._lists.items():
            if name.startswith(prefix):
                return share
        if parameter.dim() != 3:
            return None
        return next((known for known in self._known if known[1] == parameter.shape[0]), None)


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token")


def _numbers(model: nn.Module) -> Iterator[tuple[int, int]]:
    """(experts that a token goes to, experts), as configs say it."""
    configs = [root.config for root in hf_models(model)]
    configs += [getattr(config, "text_config", None) for config in configs]
    for config in configs:
        active = [told(config, name) for name in _ACTIVE]
        experts = [told(config, name) for name in _EXPERTS]
        for some in active:
            for every in experts:
                if type(some) is int and type(every) is int and 0 < some <= every:
                    yield some, every


def _lists_of_experts(model: nn.Module) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """Where experts are modules of their own: the beginning of their names, and their share."""
    known = set(_numbers(model))
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts":
            share = next((pair for pair in known if pair[1] == len(module)), None)
            yield f"{name}.", share
