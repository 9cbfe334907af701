"""Tied weights: one parameter of the model under several names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_cp.checkpoint.pretrained.files import open_weight_files
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.pretrained.models import load, make, save


def test_tied_weights_are_read_once_and_stay_tied(tmp_path: Path) -> None:
    wanted = save(tmp_path, seed=6, tie_word_embeddings=True)
    assert "lm_head.weight" not in open_weight_files(tmp_path).entries
    model = make(device="meta", tie_word_embeddings=True)
    loaded = load(model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(x, wanted[name]) for name, x in model.state_dict().items())
    assert loaded.nbytes == open_weight_files(tmp_path).nbytes


def test_a_tie_is_found_under_its_other_name(tmp_path: Path) -> None:
    weights = {name: x.clone() for name, x in make(seed=6).state_dict().items()}
    del weights["model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    model = make(device="meta", tie_word_embeddings=True)
    load(model, tmp_path)
    assert torch.equal(model.model.embed_tokens.weight, weights["lm_head.weight"])


def test_tied_weights_that_differ_in_the_files_are_refused(tmp_path: Path) -> None:
    weights = {name: x.clone() for name, x in make(seed=6).state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    model = make(device="meta", tie_word_embeddings=True)
    says = "'lm_head.weight' has other values than 'model.embed_tokens.weight', .* one parameter"
    with pytest.raises(CheckpointError, match=says):
        load(model, tmp_path)
    for options in ({"allow_unexpected": ["lm_head.*"]}, {"strict": False}):
        loaded = load(model, tmp_path, **options)
        assert loaded.unexpected == ("lm_head.weight",)
    assert torch.equal(model.lm_head.weight, weights["model.embed_tokens.weight"])
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    assert load(model, tmp_path).unexpected == ()


def test_what_the_error_says_of_twins_helps(tmp_path: Path) -> None:
    save_file(
        {"weight": torch.ones(2, 2), "other": torch.zeros(2, 2)}, tmp_path / "model.safetensors"
    )
    model: Any = nn.Linear(2, 2, bias=False)
    model.other = model.weight
    with pytest.raises(
        CheckpointError, match=r"'other' .* leave 'other' unread .*\['other'\]"
    ) as raised:
        load(model, tmp_path, allow_unexpected=["weight"])  # which is read: it comes first
    assert "or leave one unread" not in str(raised.value)
    load(model, tmp_path, allow_unexpected=["other"])
    assert model.other.eq(1).all()
