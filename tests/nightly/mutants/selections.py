"""Tests by what tells them apart, so that the tables of mutants stay readable."""

from __future__ import annotations


def modes(grid: str, kernel: str = "aten") -> str:
    """Out, lse and gradients of one grid of ranks against the dense answer."""
    return f"tests/ranks/attention/test_equivalence.py::test_equals_dense[{grid}-{kernel}]"


def kernel(cell: str, name: str = "reference") -> str:
    """One kernel through the schedule of one layout, in one process: ``mask-heads-documents-layout``."""
    return f"tests/unit/kernels/test_exactness.py::test_equals_dense[{name}-{cell}]"


def scores(cell: str) -> str:
    """The reference kernel with changed scores: ``how-mask-documents-layout``."""
    return f"tests/unit/kernels/test_scores.py::test_equals_dense[reference-{cell}]"


def triton(cell: str, file: str = "") -> str:
    """Our Triton kernels in Triton's interpreter: a test, its cell, and what its file is called."""
    return f"tests/unit/kernels/test_triton{file}.py::test_{cell}"


def triton_modes(grid: str) -> str:
    """They on one grid of ranks."""
    return f"tests/ranks/attention/test_triton.py::test_equals_dense[{grid}]"


def poisoned(cell: str) -> str:
    """Padding that holds NaN: ``grid-sequences-dtype-kernel``."""
    return f"tests/ranks/attention/test_leaks.py::test_padding_neither_shows_nor_gets_a_gradient[{cell}]"


def sends(grid: str) -> str:
    """Bytes on the wire against the schedule's."""
    return f"tests/ranks/attention/test_traffic.py::test_sends_what_the_schedule_says[{grid}]"


def moved(cell: str) -> str:
    """Transfers that start when they are waited for: ``grid-dtype``."""
    name = "test_results_do_not_depend_on_when_data_moves"
    return f"tests/ranks/attention/test_overlap.py::{name}[{cell}-postponed]"


def late(grid: str) -> str:
    """Attention whose data arrives at its wait, and not before: a grid of ranks."""
    name = "test_attention_reads_what_has_arrived_and_sends_what_stays"
    return f"tests/ranks/attention/test_late_delivery.py::{name}[{grid}]"


def layout(name: str) -> str:
    """A test of ``tests/unit/layout``: ``file::test``."""
    return f"tests/unit/layout/test_{name}"


def planner(name: str) -> str:
    """A test of ``tests/unit/planner``: ``file::test``."""
    return f"tests/unit/planner/test_{name}"


def streams(cell: str) -> str:
    """The order of the attention code's posts, waits and computes, and its time: a test, with its cell."""
    return f"tests/unit/attention/test_streams.py::test_{cell}"


COVER = layout("tiles.py::test_tiles_cover_each_visible_pair_once")
DESCRIPTIONS = layout("documents.py::test_packed_descriptions_agree")
