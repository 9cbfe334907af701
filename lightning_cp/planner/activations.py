"""PROVISIONAL."""


def kept_per_layer(model, e, tp_size=1, checkpointing="none", tiled=False):
    heads = model.heads * model.head_dim // tp_size
    kv = model.kv_heads * model.head_dim // tp_size
    if checkpointing != "none":
        return e * model.features + (
            e * heads + 4 * model.heads // tp_size if checkpointing == "keep_attention" else 0
        )
    norms = 2 * (4 * model.features + 4 + e * model.features)
    attention = 2 * e * heads + 2 * e * kv + 4 * model.heads // tp_size
    return (
        norms
        + 2 * e * model.features
        + attention
        + (0 if tiled else 4 * e * model.inner // tp_size)
    )


def kept_beside(model, e):
    return 4 * model.features + 4 + 2 * e * model.features + 2 * e * model.head_dim
