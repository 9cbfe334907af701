"""Tutorials: their programs and commands do what the pages say."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM

from tests.helpers.installed import ROOT, installed_path
from tests.helpers.launch.start import (
    all_succeeded,
    environment,
    finish,
    program,
    ranks,
    torchrun_variables,
)

EXAMPLES = ROOT / "examples"
TUTORIALS = ROOT / "docs/tutorials"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LIMIT = 250


def blocks(page: str, language: str) -> list[str]:
    """The page's blocks of one language."""
    found = BLOCK.findall((TUTORIALS / page).read_text())
    return [code for name, code in found if name == language]


def shell(code: str, folder: Path) -> str:
    """What a block of commands prints, which must succeed."""
    path = f"{Path(sys.executable).parent}:{environment()['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", code],
        cwd=folder,
        env=environment(PATH=path, CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)$", output, re.MULTILINE)]


def of_one_and_of_two(folder: Path, script: Path, *arguments: str) -> list[str]:
    """What the first rank prints, of one process and of two."""
    path = {"PYTHONPATH": installed_path(folder), "CUDA_VISIBLE_DEVICES": ""}
    found: list[str] = []
    for count, variables in ((1, [{}]), (2, torchrun_variables(2))):
        given = [argument.replace("COUNT", str(count)) for argument in arguments]
        command = (script, *given, "--devices", count)
        first, *_ = all_succeeded(ranks(folder, [{**own, **path} for own in variables], *command))
        found.append(first.output)
    return found


def test_lora_on_packed_documents_is_that_of_one_process(tmp_path: Path) -> None:
    """Its losses, and the merged model that it exports."""
    alone, shared = of_one_and_of_two(tmp_path, EXAMPLES / "lora.py", "--export", "mergedCOUNT")
    assert len(losses(shared)) == 8
    assert losses(shared)[-1] < losses(shared)[0] - 0.1
    assert losses(shared) == pytest.approx(losses(alone), abs=2e-5)
    torch.manual_seed(0)
    base = lora_model().network
    assert losses(shared)[0] == pytest.approx(loss_of_separate_documents(base), abs=2e-5)
    assert "trained 4,096 of 119,104 parameters" in shared
    assert "parity: one process and context parallel agree" in shared
    one, two = (load_file(tmp_path / f"merged{n}/model.safetensors") for n in (1, 2))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-7, atol=1e-9)
        wrapped = "q_proj" in name or "v_proj" in name
        old = base.get_parameter(name.replace(".weight", ".base.weight") if wrapped else name)
        assert torch.equal(weight, old.double()) != wrapped, name
    loads: Any = AutoModelForCausalLM.from_pretrained
    merged, report = loads(tmp_path / "merged2", output_loading_info=True)
    assert not any(report.values())
    assert loss_of_separate_documents(merged) < losses(shared)[0] - 0.1


def test_a_merged_model_computes_what_its_adapters_did() -> None:
    model = lora_model().double()
    ids = torch.arange(20)[None]
    without = model.network(ids).logits
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    want = model.network(ids).logits
    torch.testing.assert_close(model.merge()(ids).logits, want, rtol=1e-9, atol=1e-9)
    assert (without - want).abs().max() > 0.1
    assert not any(word in name for name in model.state_dict() for word in ("base", "up.", "down."))


def lora_model() -> Any:
    return runpy.run_path(str(EXAMPLES / "lora.py"))["Model"]()


def loss_of_separate_documents(network: Any) -> float:
    """The loss of LoRA's first row, of its documents one by one."""
    network = network.double()
    row = runpy.run_path(str(EXAMPLES / "lora.py"))["rows"]()[0]
    starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
    assert len(starts) > 3
    total = count = 0
    for document in row["input_ids"].tensor_split(starts[1:]):
        logits = network(input_ids=document[None]).logits[0, :-1]
        total += F.cross_entropy(logits, document[1:], reduction="sum").item()
        count += len(document) - 1
    return total / count


@pytest.mark.parametrize("steps", [10, pytest.param(60, marks=pytest.mark.nightly)])
def test_a_checkpoint_there_and_back(steps: int, tmp_path: Path) -> None:
    """The page's programs; the trained weights are those of one process, and of a loop of plain PyTorch."""
    script = of_steps("pretrained.py", steps, tmp_path)
    made, used, *_ = blocks("pretrained.md", "python")
    (tmp_path / "used.py").write_text(used)
    all_succeeded(ranks(tmp_path, [{}], "-c", made))
    torch.manual_seed(0)
    plain = loop_over(AutoModelForCausalLM.from_pretrained(tmp_path / "small"), script)
    for printed in of_one_and_of_two(tmp_path, script, "small", "trainedCOUNT"):
        assert losses(printed) == pytest.approx(plain[9::10], abs=2e-3)
        assert len(losses(printed)) == steps // 10
    one, two = (load_file(tmp_path / f"trained{n}/model.safetensors") for n in (1, 2))
    assert one.keys() == two.keys()
    for name, weight in load_file(tmp_path / "small/model.safetensors").items():
        change = (one[name] - weight).norm()
        assert change > 0
        assert (two[name] - one[name]).norm() < 0.02 * change, name
    (tmp_path / "trained2").rename(tmp_path / "trained")
    (generated,) = all_succeeded(ranks(tmp_path, [{}], "used.py"))
    text = re.findall(r"^b['\"].*['\"]$", generated.output, re.MULTILINE)[-1]
    assert len(ast.literal_eval(text)) == 5 + 20  # a text of bytes


def of_steps(name: str, steps: int, folder: Path) -> Path:
    """A copy of an example that trains for a number of steps."""
    text, count = re.subn(
        r"^SEQ_LEN, STEPS = 512, \d+$",
        f"SEQ_LEN, STEPS = 512, {steps}",
        (EXAMPLES / name).read_text(),
        flags=re.MULTILINE,
    )
    assert count == 1
    (folder / name).write_text(text)
    return folder / name


def loop_over(model: Any, script: Path) -> list[float]:
    """The losses of the tutorial's rows in plain PyTorch."""
    rows = runpy.run_path(str(script))["rows"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found: list[float] = []
    model.train()
    for row in rows:
        loss = model(**default_collate([row])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.nightly
def test_modes_of_a_sweep_agree(tmp_path: Path) -> None:
    sweep, compare = blocks("sweep.md", "sh")
    assert shell(sweep, tmp_path).count("trained               4 steps, 2,048 tokens") == 3
    printed = shell(compare, tmp_path)
    results = dict(re.findall(r"^(\w+) .* (\w+)$", printed, re.MULTILINE))
    assert (results["single"], results["ring"], results["ulysses"]) == ("baseline", "pass", "pass")
    assert "pass: no loss is further than 0.0001 from its baseline" in printed
    assert list(tmp_path.glob("outputs/*/*/comparison.png"))


@pytest.mark.nightly
def test_a_plan_is_trained_and_profiled(tmp_path: Path) -> None:
    plan, train = blocks("plan-train-profile.md", "sh")
    planned = shell(plan, tmp_path)
    assert re.search(r"^\| 1 +\| +ring 2 \| +fsdp \|", planned, re.MULTILINE)
    trained = shell(train, tmp_path)
    assert "Training step 3, milliseconds of the wall clock:" in trained
    assert re.search(r"mesh +ring 2$", trained, re.MULTILINE)
    step = tmp_path / "outputs/profiled/metrics/profile/step-3"
    assert {"profile.png", "profile.md", "rank-0.trace.json", "rank-1.trace.json"} <= {
        file.name for file in step.iterdir()
    }


def cells() -> list[dict[str, Any]]:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_has_no_outputs() -> None:
    for cell in cells():
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        compile("".join(cell["source"]), cell["id"], "exec")


@pytest.mark.nightly
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Interactively, where other ways to start ranks are refused. There an error does not end the program."""
    code = "\n".join("".join(cell["source"]) for cell in cells())
    with program(tmp_path, "-i", "-c", code, CUDA_VISIBLE_DEVICES="") as started:
        printed = finish(started)
    assert "Traceback" not in printed
    found = re.findall(r"^(\w+): loss of the last step (\S+)$", printed, re.MULTILINE)
    assert [name for name, _ in found] == ["ulysses_ring_fork", "auto"]
    shared, alone = (float(loss) for _, loss in found)
    assert shared == pytest.approx(alone, abs=2e-3)
    worst = re.search(r"^largest difference of a weight: (\S+)$", printed, re.MULTILINE)
    assert worst
    assert float(worst[1]) < 2e-3
    assert re.search(r"^b'    def ", printed, re.MULTILINE)
