"""Refusal of second derivatives, which messages between ranks do not have."""

from __future__ import annotations

import torch

from lightning_cp.errors import ConfigError


def check_first_derivative() -> None:
    """Check, in a backward that sends messages, that autograd records no graph of it.

    Raises:
        ConfigError: ``create_graph=True``; the graph would lack what other ranks computed.
    """
    if torch.is_grad_enabled():
        raise ConfigError(
            "a value that ranks exchange (of unshard, gather_data, sequence_sum, sequence_mean or "
            "sequence_pick) has no second derivative, for which create_graph=True asks. Compute what needs "
            "it (a gradient penalty) from a rank's own tokens, or without context parallelism."
        )
