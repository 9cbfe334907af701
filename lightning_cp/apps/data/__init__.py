"""Real text as bytes: files found, split, packed into sequences and loaded."""

from lightning_cp.apps.data.corpus import (
    Document,
    PackedBytes,
    Text,
    load_text,
    stdlib_files,
    text_files,
)
from lightning_cp.apps.data.module import ByteDataModule, data_parallel, python_stdlib, user_text

__all__ = [
    "ByteDataModule",
    "Document",
    "PackedBytes",
    "Text",
    "data_parallel",
    "load_text",
    "python_stdlib",
    "stdlib_files",
    "text_files",
    "user_text",
]
