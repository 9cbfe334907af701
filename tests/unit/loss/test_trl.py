"""The loss functions of TRL's own trainers, on unsharded rows: the numbers of this repository's examples.

``make test-trl`` installs TRL beside the environment; without it these tests are skipped.
"""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

EXAMPLES = Path(__file__).parents[3] / "examples"
NO_TRL = "TRL is not installed: make test-trl"
Batch = dict[str, torch.Tensor]


def trainer_like(model: Any, **settings: Any) -> Any:
    """An object whose attributes a trainer's loss function reads; one process, nothing is gathered."""
    found = mock.MagicMock(model=model, aux_loss_enabled=False, **settings)
    for name in ("gather", "gather_for_metrics"):
        setattr(found.accelerator, name, lambda x: x)
    found.accelerator.reduce = lambda x, reduction: x
    found.accelerator.device = torch.device("cpu")
    return found


def logps_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[B, S - 1]: of the second token and all later ones."""
    logits = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1)


def fused(model: Any) -> Any:
    """The model as TRL patches it: log-probabilities of labels, 0 where there are none."""

    def forward(*, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        logps = logps_of(model, input_ids) * (labels[:, 1:] != -100)
        zeros = torch.zeros_like(logps)
        return SimpleNamespace(
            log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )

    return forward


def without_adapters(policy: Any) -> Any:
    """The policy of ``dpo.py`` with its adapters switched off, as TRL calls a reference."""
    kind = type(policy.model.layers[0].self_attn.v_proj)

    def forward(**given: Any) -> Any:
        with mock.patch.object(kind, "is_on", new=False):
            return fused(policy)(**given)

    return forward


def example(name: str, kind: str) -> tuple[Any, list[Batch]]:
    """The module, its policy unlike its reference, and its batches."""
    found = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    torch.manual_seed(0)
    module = found[kind]().double()
    module.log = lambda *_: None
    with torch.no_grad():
        for p in module.policy.parameters():
            p += 0.02 * torch.randn_like(p)
    return module, found["pairs" if name == "dpo" else "groups"]()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_dpo() -> None:
    trl = pytest.importorskip("trl.trainer.dpo_trainer", reason=NO_TRL)
    module, batches = example("dpo", "DPO")
    settings: dict[str, Any] = {
        "ld_alpha": None,
        "precompute_ref_logps": False,
        "f_divergence_type": "reverse_kl",
        "loss_types": ["sigmoid"],
        "loss_weights": [1.0],
        "beta": 0.1,
        "use_weighting": False,
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    trainer = trainer_like(module.policy, ref_model=without_adapters(module.policy), **settings)
    for batch in batches[:2]:
        ids, answer = batch["input_ids"], batch["answer"].roll(1, 1)
        given = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "completion_mask": answer.long(),
        }
        want = trl.DPOTrainer._compute_loss(trainer, fused(module.policy), given, False)
        got = module.training_step(batch, 0)
        assert (
            abs(float(got.detach()) - 0.6931) > 1e-3
        )  # the loss of a policy that is its reference
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0, check_dtype=False)


def test_grpo() -> None:
    """The second step on a group, whose ratios are not 1."""
    trl = pytest.importorskip("trl.trainer.grpo_trainer", reason=NO_TRL)
    module, batches = example("grpo", "GRPO")
    batch, losses, policies = batches[0], [], [copy.deepcopy(module.policy)]

    def backward(loss: torch.Tensor) -> None:
        losses.append(loss.detach())
        policies.append(copy.deepcopy(module.policy))
        loss.backward()

    optimizer = torch.optim.SGD(module.policy.parameters(), lr=3.0)
    module.manual_backward, module.optimizers = backward, lambda: optimizer
    module.training_step({**batch, "rewards": batch["rewards"].double()}, 0)

    ids, rewards = batch["input_ids"], batch["rewards"].double()
    settings: dict[str, Any] = {
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.04,
        "loss_type": "grpo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False),
    }
    with torch.no_grad():
        old, reference = (logps_of(model, ids) for model in (policies[0], module.reference))
        for policy, got in zip(policies[1:], losses, strict=True):
            logps = logps_of(policy, ids)
            made = (logps, torch.zeros_like(logps), None)
            trainer = trainer_like(policy, **settings)
            trainer._get_per_token_logps_and_entropies.return_value = made
            given = {
                "prompt_ids": ids[:, :1],
                "prompt_mask": torch.ones_like(ids[:, :1]),
                "completion_ids": ids[:, 1:],
                "completion_mask": batch["answer"][:, :-1].long(),
                "advantages": (rewards - rewards.mean()) / (rewards.std() + 1e-4),
                "old_per_token_logps": old,
                "ref_per_token_logps": reference,
            }
            want = trl.GRPOTrainer._compute_loss(trainer, policy, given)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9, check_dtype=False)
    assert abs(float(losses[1] - losses[0])) > 1e-4
