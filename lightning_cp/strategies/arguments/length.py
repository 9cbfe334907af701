"""Settings that save memory of long sequences: what they may be, and with what they do not go."""

from __future__ import annotations

from lightning_cp.errors import ConfigError
from lightning_cp.length.cross_entropy import DEFAULT_CHUNK_TOKENS
from lightning_cp.length.tiled import DEFAULT_TILE_TOKENS
from lightning_cp.strategies.arguments.choices import check_module_names
from lightning_cp.strategies.arguments.settings import Settings


def check_length(settings: Settings) -> None:
    """Refuse what is no number of tokens, layers that ranks share, and settings without a use.

    Raises:
        ConfigError: naming the setting.
    """
    _check_tokens("chunked_loss", settings.chunked_loss, "logits exist", DEFAULT_CHUNK_TOKENS)
    _check_tokens("tiled_mlp", settings.tiled_mlp, "an MLP is computed", DEFAULT_TILE_TOKENS)
    size = settings.tensor_parallel_size
    if settings.chunked_loss and size > 1:
        raise ConfigError(
            f"chunked_loss={settings.chunked_loss} does not go with tensor_parallel_size={size}: there each "
            "rank has its own part of the vocabulary, and makes that part of the logits. Use one of the two."
        )
    if settings.tiled_mlp and size > 1:
        raise ConfigError(
            f"tiled_mlp={settings.tiled_mlp} does not go with tensor_parallel_size={size}: there ranks share "
            "each MLP, and would communicate for every tile. Use one of the two."
        )
    if settings.mlp_modules is not None:
        _check_modules(settings)
    if type(settings.activation_offload) is not bool:
        raise ConfigError(
            f"activation_offload must be True or False, got {settings.activation_offload!r}. "
            "Leave it out for False."
        )
    if settings.activation_offload and settings.activation_checkpointing == "none":
        raise ConfigError(
            "activation_offload=True moves what activation checkpointing keeps to host memory, got "
            "activation_checkpointing='none', which keeps everything. Use 'blocks' or 'keep_attention'."
        )


def _check_tokens(name: str, given: object, what: str, default: int) -> None:
    if type(given) is bool or (type(given) is int and given >= 1):
        return
    raise ConfigError(
        f"{name} must be a number of tokens of which {what} at once, an integer of at least 1, "
        f"True ({default}) or False, got {given!r}. "
        "Leave it out for False."
    )


def _check_modules(settings: Settings) -> None:
    given = settings.mlp_modules
    check_module_names(
        "mlp_modules", given, "'LlamaMLP' or 'model.layers.*.mlp'", "the MLPs of blocks"
    )
    if not settings.tiled_mlp:
        raise ConfigError(
            f"mlp_modules={given!r} says which modules tiled_mlp= is of, got tiled_mlp=False. Use "
            "tiled_mlp=True, or leave mlp_modules out."
        )
