"""Real text as bytes: finding files, splitting them, packing them into sequences, loading them."""

from lightning_cp.data.corpus import Document, Text, load_text, stdlib_files, text_files
from lightning_cp.data.module import ByteDataModule, data_parallel, python_stdlib, user_text
from lightning_cp.data.packing import PackedBytes

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
