"""A Hydra application of a user's own whose loss is of whole sequences: a sweep over modes and ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.launch.programs import OURS, run

APP = """
import hydra
import lightning as L
from examples.reward import Reward, pairs
from torch.utils.data import DataLoader


@hydra.main(version_base="1.3", config_path=None, config_name=None)
def main(config):
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy=hydra.utils.instantiate(config.strategy),
        accelerator="cpu",
        devices=config.devices,
        precision="64-true",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Reward(), DataLoader(pairs(), batch_size=None))


if __name__ == "__main__":
    main()
"""


@pytest.mark.nightly
def test_a_sweep_over_modes_has_one_process_s_losses(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    asked = ("+strategy=ulysses_ring", "strategy.labels=none", "strategy.mode=ulysses,ring")
    done = run(tmp_path, "app.py", "-m", OURS, *asked, "+devices=1,2", timeout=290)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = re.findall(r"^step \d+  loss (\d\.\d+)$", done.stdout, re.MULTILINE)
    one = losses[:3]
    assert len(set(one)) == 3
    assert losses == one * 4


@pytest.mark.nightly
def test_without_the_declaration_the_job_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    done = run(tmp_path, "app.py", "+strategy=ulysses_ring", "+devices=2", timeout=120)
    assert done.returncode == 1
    assert 'labels="none"' in done.stderr
