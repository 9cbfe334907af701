"""Values of one loss that must be equal on ranks that share a sample, and their comparison as texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from lightning_cp.loss.divisors import Divisors, Look
from lightning_cp.utils.autograd_notes import Count
from lightning_cp.utils.tensors import to_list, vector_norm


@dataclass
class SharedValues:
    """Values of one loss that must be equal on ranks that share a sample; norms stay on the device."""

    weighted: Count
    """This rank's targets."""
    joined: Sequence[torch.Tensor] = ()
    """float64 [2] each: of values that terms of parameters compute with another tensor."""
    gradients: Sequence[torch.Tensor] = ()
    """float64 [2] each: of the loss's derivatives by values that are equal, before it is weighted."""
    counted: Sequence[torch.Tensor] = ()
    """float64 [2] each: of weights of tokens in the sums of a loss, times this rank's targets."""
    factors: Sequence[float | torch.Tensor] = ()
    """Numbers and one-element tensors that a loss by hand is multiplied or divided by."""
    value: Sequence[torch.Tensor] = ()
    """float64 [2]: of a loss that must be the same number on all ranks; empty for any other."""
    value_digits: int = 17
    digits: int = 5
    """Compared digits of gradients in every step; joined values must be equal to the last digit."""
    divisors: Divisors | None = None
    """Of its terms; ``None``: of a loss that is written alike none was in doubt."""
    is_followed: bool = False
    """True if the loss has any of these."""
    _found: list[list[float]] | None = None
    """The numbers of all these, on the host."""

    @property
    def votes(self) -> tuple[list[str], ...]:
        """Texts that are compared in every step; waits for the device."""
        return self.texts(self.digits, self.value_digits)

    def texts(self, digits: int = 17, value_digits: int = 17) -> tuple[list[str], ...]:
        """Return the joined values, the gradients, the loss and weights as texts; waits for the device.

        Short texts of two near values may differ by a digit: where a vote finds that, all digits decide.
        """
        (weighted,), joined, gradients, value, counted, *_ = self._numbers
        if not any(gradients) and not weighted:
            gradients = []  # a loss times 0, of a rank without targets
        return (
            _format(joined, 17),
            _format(gradients, digits),
            _format(value, value_digits),
            _format(counted, digits) if weighted else [],
        )

    def factors_by(self, ratios: Iterable[float]) -> list[str]:
        """Return the factors as texts for a vote; the weight times a known ratio is written as the ratio."""
        weight, values, limit = self.weighed_factors
        return [
            next((f"* {x}" for x in ratios if is_near(value, x * weight, limit)), f"{value:.4e}")
            for value in values
        ]

    @property
    def weighed_factors(self) -> tuple[float, list[float], float]:
        """This rank's targets, the factors, and their rounding limit; waits for the device."""
        tensors = [x for x in self.factors if isinstance(x, torch.Tensor)]
        (weighted,), *_, read, _ = self._numbers
        numbers = iter(read)
        values = [float(next(numbers) if isinstance(x, torch.Tensor) else x) for x in self.factors]
        is_short = any(x.is_floating_point() and x.itemsize < 4 for x in tensors)
        return weighted, values, 2e-2 if is_short else 1e-5

    @property
    def doubts(self) -> dict[Look, str | None]:
        """Starts of messages about divisors, see ``Divisors.doubts``; waits for the device."""
        if self.divisors is None:
            return {}
        (weighted,), *_, read = self._numbers
        return self.divisors.doubts(weighted, read)

    @staticmethod
    def read(losses: Sequence[SharedValues]) -> None:
        """Copy the numbers of losses to the host; waits for the device once."""
        kinds = [each._kinds for each in losses]
        numbers = iter(_read([x for of_loss in kinds for kind in of_loss for x in kind]))
        for each, of_loss in zip(losses, kinds, strict=True):
            each._found = [[y for _ in kind for y in next(numbers)] for kind in of_loss]

    @property
    def _kinds(self) -> list[Sequence[torch.Tensor]]:
        """The targets, joined values, gradients, values, weights; factors and divisors that are tensors."""
        factors = [x for x in self.factors if isinstance(x, torch.Tensor)]
        weighted = torch.as_tensor(self.weighted, dtype=torch.float64)
        divisors = [] if self.divisors is None else self.divisors.tensors
        compared = [self.joined, self.gradients, self.value, self.counted]
        return [[weighted], *compared, factors, divisors]

    @property
    def _numbers(self) -> list[list[float]]:
        """The numbers of ``_kinds``; waits for the device if ``read`` has not."""
        if self._found is None:
            self.read([self])
        assert self._found is not None
        return self._found


def is_near(a: float, b: float, limit: float) -> bool:
    return a == b or abs(a - b) <= limit * abs(b) or (math.isnan(a) and math.isnan(b))


def format_values(values: Sequence[torch.Tensor], digits: int) -> list[str]:
    """Return the numbers of tensors as texts; waits for the device once."""
    return [text for numbers in _read(values) for text in _format(numbers, digits)]


def _format(numbers: Iterable[float], digits: int) -> list[str]:
    return [f"{x:.{digits - 1}e}" for x in numbers]


def _read(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
    """Return the numbers of each tensor; waits for the device once."""
    flat = [x.double().reshape(-1) for x in tensors]
    on_device = [x for x in flat if not x.is_cpu]
    numbers = iter(to_list(torch.cat(on_device)) if on_device else ())
    return [to_list(x) if x.is_cpu else list(islice(numbers, len(x))) for x in flat]


def norm_and_projection(x: torch.Tensor) -> torch.Tensor:
    """Return float64 [2]: the norm, and a sum weighted by position, which shows a small local difference."""
    x = x.detach() if x.is_floating_point() else x.detach().double()
    x = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    norm = vector_norm(x, dtype=torch.float64)
    rows, columns = (x.sum(dim, dtype=torch.float64) for dim in (1, 0))
    return torch.stack(
        [norm, rows @ _position_weights(rows) + columns @ _position_weights(columns)]
    )


def _position_weights(x: torch.Tensor) -> torch.Tensor:
    """Return distinct weights in (0, 1]."""
    return torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device) / len(x)


def first_difference(
    own: Sequence[str], others: Sequence[str], digits: int
) -> tuple[float, float] | None:
    """Return the norms of the first finite value that differs by more than rounding, or ``None``."""
    limit = {2: 0.05, 3: 1e-2, 5: 1e-4}.get(digits, 1e-5)
    pairs = [(float(a), float(b)) for a, b in zip(own, others, strict=False)]
    for (norm, other), *more in (pairs[at : at + 2] for at in range(0, len(pairs), 2)):
        apart = max(abs(a - b) for a, b in [(norm, other), *more])
        if math.isfinite(apart) and apart > limit * abs(other):
            return norm, other
    return None
