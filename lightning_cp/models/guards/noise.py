"""Check of a model for noise in training that ranks cannot draw as one process does.

Configs and modules show attention dropout. NEFTune's noise shows by the attribute that transformers and TRL
set on an embedding for their hook; that hook scales the noise by the length it sees.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import attention_modules
from lightning_cp.models.swap import config_value, hf_models

_DROPOUTS = (
    *("attention_dropout", "attn_dropout", "attn_pdrop"),
    "attention_probs_dropout_prob",
)
"""Names in Hugging Face configs."""

NEFTUNE = "neftune_noise_alpha"


def check_training_noise(model: nn.Module, local: Collection[nn.Module] = ()) -> None:
    """Check that a model trains without attention dropout and without NEFTune's noise.

    Args:
        model: everything that a step calls.
        local: modules whose attention each rank computes by itself.

    Raises:
        ConfigError: naming the setting, and what to do.
    """
    for where, rate in _attention_dropouts(model, local):
        raise ConfigError(
            f"attention dropout must be 0.0 under context parallelism, and {where} is {rate}: the ranks "
            "cannot draw the mask that one process would. Set it to 0.0 where the model is made (dropout "
            "elsewhere in the model is fine)."
        )
    for name, module in model.named_modules():
        alpha = getattr(module, NEFTUNE, None)
        if alpha:
            raise ConfigError(
                f"{name or type(module).__name__}.{NEFTUNE} is {alpha}: NEFTune scales its noise by the "
                "length that its hook sees, which is a rank's part of the sequence, so the noise would be "
                f"too large. Remove the hook and the attribute, or set {NEFTUNE} = None."
            )


def _attention_dropouts(
    model: nn.Module, local: Collection[nn.Module]
) -> Iterator[tuple[str, float]]:
    for root in hf_models(model):
        inside = [part for part in attention_modules(root) if part not in local]
        rates = {rate for part in inside for rate in _dropout_rates(part)}
        for config in (root.config, root.config.get_text_config()):
            for name in _DROPOUTS:
                rate = config_value(config, name)
                if (
                    isinstance(rate, float) and rate in rates
                ):  # the modules' rates may have changed since
                    yield f"{name} in the config of {type(root).__name__}", rate
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and module not in local and module.dropout:
            yield f"the dropout of {name or 'the model'} (MultiheadAttention)", module.dropout


def _dropout_rates(module: nn.Module) -> Iterator[float]:
    """Yield the dropout rates of an attention module that are not 0."""
    for name, value in vars(module).items():
        if "drop" in name and isinstance(value, float) and value:
            yield value
    for part in module.modules():
        if isinstance(part, nn.Dropout) and part.p:
            yield part.p
