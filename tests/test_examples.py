"""Examples that no other test or check runs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.installed import installed_path
from tests.launch.start import all_succeeded, free_port, ranks

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_attention_alone_equals_one_process(tmp_path: Path) -> None:
    run = ("-m", "torch.distributed.run", "--nproc-per-node=4", f"--master-port={free_port()}")
    path = {"PYTHONPATH": installed_path(tmp_path), "OMP_NUM_THREADS": "1"}
    (done,) = all_succeeded(ranks(tmp_path, [path], *run, EXAMPLES / "attention_minimal.py"))
    found = re.search(r"largest difference from one process: (\S+)", done.output)
    assert found
    assert 0.0 < float(found[1]) < 5e-6
