"""Order in which models compute queries and keys: what could travel while queries are still projected.

``python -m benchmarks.projection_order`` makes every language model of transformers that can be tiny, calls
it once, and finds the linear layers behind queries, keys and values of its attention calls, by autograd's
graph. A model may send keys or values early only if the last layer behind them ran before the last one behind
queries.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.nightly.models import sweep

OTHERS_FIRST, QUERIES_FIRST, TOGETHER = "keys or values first", "queries first", "one layer for all"


class ProjectionOrder:
    """Linear layers of a forward in the order of their calls, and the orders that attention calls show."""

    def __init__(self, model: nn.Module) -> None:
        self._calls: dict[Any, int] = {}
        """Node of autograd -> number of the linear layer's call that made it."""
        self.found: set[str] = set()
        for module in model.modules():
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                module.register_forward_hook(self._note_linear)

    def _note_linear(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):  # routers return several
            self._calls[output.grad_fn] = len(self._calls)

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        """Note the order of a call, q [B, H, S, D], k [B, K, S, D], v [B, K, S, E]; attend to nothing."""
        of_queries, *others = (self._layers_behind(x) for x in (q, k, v))
        if of_queries and all(others):
            self.found.add(_order(of_queries, others))
        values = v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2)
        return values + q.sum() + k.sum(), None

    def _layers_behind(self, x: torch.Tensor) -> set[int]:
        """Return the numbers of the nearest linear layers behind a tensor."""
        found: set[int] = set()
        ahead: list[Any] = [x.grad_fn]
        seen: set[Any] = set()
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._calls:
                found.add(self._calls[node])
            else:
                ahead.extend(inner for inner, _ in node.next_functions)
        return found


def _order(of_queries: set[int], others: Sequence[set[int]]) -> str:
    if any(max(each) < max(of_queries) for each in others):
        return OTHERS_FIRST
    return TOGETHER if any(each & of_queries for each in others) else QUERIES_FIRST


def order_of(name: str) -> set[str]:
    """Return the orders among the attention calls of a class of transformers; empty if none is seen."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = sweep.make_tiny(name)
    order = ProjectionOrder(model)
    ALL_ATTENTION_FUNCTIONS.register("projection_order", order.attend)
    model.set_attn_implementation("projection_order")
    sweep.step(model, sweep.batch())
    return order.found


def main(wanted: Sequence[str]) -> None:
    """Print how many classes have each order, and which compute keys or values first.

    Args:
        wanted: names of classes; none: all.
    """
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    first: list[str] = []
    for name in wanted or sweep.names():
        try:
            found = order_of(name)
        except Exception:
            counts["cannot be made tiny, or called with tokens alone"] += 1
            continue
        counts[" and ".join(sorted(found)) or "no attention call seen"] += 1
        first += [name] * (OTHERS_FIRST in found)
    print("| order | classes |\n|---|---|")
    for order, count in counts.most_common():
        print(f"| {order} | {count} |")
    print(f"\n{OTHERS_FIRST}: {', '.join(first) or 'none'}")


if __name__ == "__main__":
    main(sys.argv[1:])
