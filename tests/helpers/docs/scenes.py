"""Scenes in which blocks of the docs run: what a page leaves to its reader, and what must come of it.

``docs/snippets.yaml`` names a block's scene. A scene is called on every rank of the pool.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import hydra
import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import lightning_cp
from lightning_cp import (
    AttentionSpec,
    ContextParallelMesh,
    Documents,
    SequenceLayout,
    UlyssesRingStrategy,
    config,
    context_parallel_attention,
)
from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from lightning_cp.optim import QKClip
from lightning_cp.planner.hardware import KernelRate
from tests.helpers.docs import reader
from tests.helpers.docs.pages import Snippet, snippets
from tests.helpers.docs.reader import Batch, Module, SmallTrainer
from tests.helpers.parity.heard import Heard
from tests.helpers.planner.measured import MEASURED
from tests.helpers.strategies.small import whole

Names = dict[str, Any]


def prelude() -> Names:
    """What a reader of a part of a program has imported."""
    settings = {name: kind for name, kind in vars(config).items() if name.endswith("Settings")}
    ours = {name: getattr(lightning_cp, name) for name in lightning_cp.__all__}
    return {
        **settings,
        **ours,
        "__name__": "snippet",
        "__file__": str(Path.cwd() / "snippet.py"),
        "islice": islice,
        "L": L,
        "torch": torch,
        "nn": nn,
        "F": F,
        "Fabric": L.Fabric,
        "ModelCheckpoint": ModelCheckpoint,
        "DataLoader": DataLoader,
        "IterableDataset": IterableDataset,
        "AutoConfig": AutoConfig,
        "AutoModelForCausalLM": AutoModelForCausalLM,
    }


@dataclass
class Stage:
    """A block, the names that it sees, and the page that its errors name."""

    one: Snippet
    code: str
    names: Names

    def run(self, code: str | ast.Module | None = None) -> None:
        """Execute the block, or a part of it."""
        exec(compile(self.code if code is None else code, str(self.one), "exec"), self.names)

    def split(self) -> tuple[ast.Module, ast.Module]:
        """What stands before a step (definitions, a Trainer), and the step."""
        before: list[ast.stmt] = []
        step: list[ast.stmt] = []
        for statement in ast.parse(self.code).body:
            defines = isinstance(
                statement, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef
            )
            makes = isinstance(statement, ast.Assign) and "Strategy(" in ast.unparse(statement)
            (before if defines or makes else step).append(statement)
        return ast.Module(before, []), ast.Module(step, [])

    def parts_of_self(self) -> tuple[str, ...]:
        """The modules that the block takes from ``self``."""
        text = ast.unparse(self.split()[1]) or self.code
        asked = dict.fromkeys(re.findall(r"self\.(\w+)", text))
        return tuple(name for name in asked if name in reader.PARTS)


def as_it_stands(stage: Stage) -> None:
    """With nothing but imports."""
    stage.run()


def with_model_and_data(stage: Stage) -> None:
    """A block that trains."""
    trains(stage)
    assert any(trainer.fitted for trainer in SmallTrainer.made)
    assert all(one.global_step == one.max_steps for one in SmallTrainer.made if one.fitted)


def trains(stage: Stage) -> Module:
    """A model, and data in the forms in which pages take them."""
    module = Module()
    rows = reader.rows()
    stage.names.update(
        model=module,
        data=reader.Data(),
        dataset=rows,
        rows=rows,
        dataloader=reader.loader(),
    )
    stage.code = stage.code.replace("every_n_train_steps=1000", "every_n_train_steps=1")
    stage.run()
    return module


def after_an_interruption(stage: Stage) -> None:
    """A block that resumes from the last checkpoint: one step of two is left."""
    SmallTrainer.saves = True
    try:
        strategy: Any = "ulysses_ring"
        SmallTrainer(strategy=strategy, max_steps=1).fit(Module(), reader.loader())
        stage.names["trainer"] = SmallTrainer(strategy=strategy)
        module = trains(stage)
    finally:
        SmallTrainer.saves = False
    assert (stage.names["trainer"].global_step, module.trained) == (2, 1)


def with_a_full_checkpoint(stage: Stage) -> None:
    """A file of two steps in place of one of a thousand."""
    saves = ModelCheckpoint(dirpath=".", every_n_train_steps=2)
    trained = Module()
    SmallTrainer(strategy="ulysses_ring", callbacks=[saves]).fit(trained, reader.loader())
    stage.names["MyModule"] = Module
    weights, loaded = (
        eval(line, stage.names)
        for line in stage.code.replace("step=1000", "step=2").splitlines()
        if line
    )
    for name, value in trained.state_dict().items():
        assert torch.equal(value, weights[name])
        assert torch.equal(value, loaded.state_dict()[name])


class Step(Module):
    """A module whose training step is a block."""

    def __init__(self, stage: Stage, step: ast.Module, declared: tuple[str, ...]) -> None:
        super().__init__(tuple(dict.fromkeys(("network", *stage.parts_of_self()))))
        self.stage, self.step = stage, step
        self.network: Any
        own: Any = self
        own.context_parallel_sequence_dims = dict.fromkeys(declared, 1)
        for name in ("policy", "reference"):  # models of the block's own class
            if f"self.{name}" in stage.code:
                own, made = reader.llama(), stage.names["Policy"]()
                made.model, made.head = own.model, own.lm_head
                setattr(self, name, made.requires_grad_(name == "policy"))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Run the block after what comes before it in a step."""
        names, ids = self.stage.names, batch["input_ids"]
        hidden = self.network.model(ids, position_ids=batch["position_ids"]).last_hidden_state
        targets = batch["targets"] if "targets" in batch else batch["labels"]
        logits = self.network.lm_head(hidden)
        logps = logits.log_softmax(-1).gather(-1, targets.clamp(0)[..., None]).squeeze(-1)
        preference = self.sequence_mean(logits.logsumexp(-1)).mean()
        names.update(self=self, batch=batch, ids=ids, targets=targets, logits=logits, logps=logps)
        names.update(hidden=hidden, head=self.network.lm_head, model=self.network, x=hidden)
        names.update(layer=getattr(self, "layer", None), preference=preference, MASK=0)
        names.pop("loss", None)
        self.stage.run(self.step)
        if "before" in names:  # log-probabilities of a policy and of its reference
            names["loss"] = -F.logsigmoid(names["logps"] - names["before"]).mean()
        loss = names["loss"] if "loss" in names else self.sequence_mean(names["x"]).square().mean()
        return loss.mean() + 0.0 * preference


def in_a_training_step(stage: Stage) -> None:
    """Two steps of training; the parity check compares the first with one process."""
    before, step = stage.split()
    stage.run(before)
    if "layer(" in stage.code:
        stage.code += "\nself.layer"
    aligned = "head.bias" in stage.code
    labelled = aligned or "labels" in stage.code
    shifted = "shift_labels" in stage.code
    labels = "aligned" if aligned else "shift" if shifted else "auto" if labelled else "none"
    trainer = stage.names.get("trainer") or SmallTrainer(
        strategy=UlyssesRingStrategy(labels=labels)
    )
    module = Step(stage, step, () if labelled else ("targets", "answer"))
    with Heard() as heard:
        trainer.fit(module, reader.loader("" if labelled else "targets", rows_of_batch=2))
    assert module.trained == 2
    if trainer.is_global_zero:
        assert any("one process and context parallel agree" in line for line in heard.lines), (
            heard.lines
        )


def in_a_training_step_after_the_block_before(stage: Stage) -> None:
    """The same, with the lines of the block before it in place of whose last one it stands."""
    *lines, _ = ast.parse(stage.one.before).body
    stage.code = f"{ast.unparse(ast.Module(lines, []))}\n{stage.code}"
    in_a_training_step(stage)


def as_a_module(stage: Stage) -> None:
    """A class, or methods of one: trained, and validated where the block does that."""
    names, code = stage.names, stage.code
    names.update(config=LlamaConfig(**reader.SIZES))
    stage.run()
    made = {k: v for k, v in names.items() if getattr(v, "__module__", "") == "snippet"}
    methods = {name: value for name, value in made.items() if not isinstance(value, type)}
    found = [kind for kind in made.values() if isinstance(kind, type)]

    def validation_step(self: Module, batch: Batch, batch_idx: int) -> None:
        """Run the block's after what comes before it."""
        with torch.no_grad():
            names.update(labels=batch["labels"], logits=self(batch))
        super(tried, self).validation_step(batch, batch_idx)
        self.validated += 1

    parts = () if "self.model = " in code else stage.parts_of_self() or ("network",)
    if "decoder" in parts:
        parts = ("decoder",)
    if 'batch["x"]' in code:
        parts = ("denoising",)
    elif "sentences" in code or "validation_step" in code:
        parts = tuple(dict.fromkeys(("network", *parts)))
    own = {"validation_step": validation_step, "parts": parts}
    tried: Any = type("Tried", (*found, Module), {**own, **methods})
    module = tried()
    data: Any = reader.loader(code, 2)
    if 'batch["a"]' in code:
        data = {"a": data, "b": data}
    validates = "validation" in code
    labels = "aligned" if validates else "auto"
    strategy = names.get("strategy") or UlyssesRingStrategy(labels=labels)
    trainer = SmallTrainer(strategy=strategy)
    trainer.fit(module, data, reader.loader() if validates else None)
    assert module.trained == 2
    if validates:
        assert module.validated >= 4
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    for name in re.findall(r'log\("(\w+)"', code):
        assert 0 <= logged[name] <= 1
    if "recall" in code:
        assert logged["recall"] == 0.75
    if "sentences" in code:
        assert module.sentences.compute().item() <= module.validated * reader.LENGTH
    if "Muon" in code:
        assert isinstance(trainer.optimizers[0], names["Muon"])


def in_a_fabric_loop(stage: Stage) -> None:
    """A loop of a program of yours; ``...`` stands for its forward and backward."""
    shifted = "F.cross_entropy(" in stage.code
    strategy = FabricStrategy(labels="aligned" if shifted else "auto")
    fabric = reader.SmallFabric(strategy=strategy)
    fabric.launch()
    network = reader.Logits() if shifted else reader.llama()
    start = {name: value.clone() for name, value in network.state_dict().items()}
    plain = torch.optim.SGD(network.parameters(), lr=0.1)
    data: Any = reader.loader()
    options: Any = {"use_distributed_sampler": False, "move_to_device": False}
    loader: Any = fabric.setup_dataloaders(data, **options)
    setup: Any = (network, plain) if "fabric.setup(" in stage.code else fabric.setup(network, plain)
    model, optimizer = setup
    batch = next(iter(data))

    def forward_and_backward(batch: Batch) -> None:
        fabric.backward(model(**strategy.shard_batch(batch)).loss)

    stage.names.update(fabric=fabric, strategy=strategy, model=model, optimizer=optimizer)
    stage.names.update(loader=loader, batch=batch, path="state.ckpt", resume=False, epochs=1)
    stage.names.update(state={"model": model}, documents=["one", "two"], prepare=str.upper)
    stage.names.update(forward_and_backward=forward_and_backward)
    if "backward(" not in stage.code:
        stage.code = stage.code.replace("...", "forward_and_backward(batch)")
    if stage.code.startswith("optimizer.step"):
        forward_and_backward(batch)
    stage.run()
    if "should_stop" in stage.code:
        assert not Path("state.ckpt").exists()
        stops_after_a_signal(stage, lambda: forward_and_backward(batch))
    if "if resume:" in stage.code:
        resumes(stage, network)
    strategy.end_step()
    changed = any(
        not torch.equal(value, start[name]) for name, value in network.state_dict().items()
    )
    assert changed == ("optimizer.step()" in stage.code)
    if "loss" in stage.names:
        assert stage.names["loss"].isfinite()


def stops_after_a_signal(stage: Stage, work: Callable[[], None]) -> None:
    """All ranks save and end after a step in which one was told to."""
    work()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        stage.run()
    assert ended.value.code == 143
    dist.barrier()
    assert Path("state.ckpt").exists()


def resumes(stage: Stage, network: nn.Module) -> None:
    """The saved state is loaded, and another pass begins."""
    saved = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    stage.names.update(resume=True)  # with as many passes: nothing is left to be trained
    stage.run()
    for name, value in network.state_dict().items():
        assert torch.equal(value, saved[name]), name


CHECKPOINT = "path/to/Llama-3.1-8B"


class Tuned(Module):
    """A model of a checkpoint, whose weights stay as they are loaded."""

    parts = ()
    rate = 0.0
    adapted = False

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    def configure_model(self) -> None:
        """Make it without memory."""
        if self.model is None:
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(LlamaConfig(**reader.SIZES))
            if self.adapted:
                for layer in self.model.model.layers:
                    layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)

    def on_train_start(self) -> None:
        """Require the file's weights."""
        want = AutoModelForCausalLM.from_pretrained(CHECKPOINT).state_dict()
        for name, value in self.model.state_dict().items():
            if "lora_" not in name:
                assert torch.equal(whole(value), want[name.replace(".base_layer", "")]), name


class Adapted(nn.Module):
    """A linear layer with an adapter, in peft's names."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        with torch.device("cpu"):
            self.lora_A = nn.Linear(base.in_features, 2, bias=False)
            self.lora_B = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both."""
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def with_a_checkpoint(stage: Stage) -> None:
    """Pretrained weights reach the model, and an export has what was trained."""
    if dist.get_rank() == 0:
        reader.llama().save_pretrained(CHECKPOINT)
    dist.barrier()
    stage.names.update(path=CHECKPOINT, texts=["a line of text " * reader.LENGTH] * 2)
    stage.names.update(packed_rows=packed_rows())
    stage.code = stage.code.replace("131072", str(reader.LENGTH))
    with (
        mock.patch("huggingface_hub.snapshot_download", return_value=CHECKPOINT),
        mock.patch("transformers.AutoTokenizer.from_pretrained", return_value=Letters()),
    ):
        stage.run()
    if "trainer.fit(" in stage.code:
        new = AutoModelForCausalLM.from_pretrained("tuned").state_dict()
        old = AutoModelForCausalLM.from_pretrained(CHECKPOINT).state_dict()
        assert any(not torch.equal(new[name], value) for name, value in old.items())
        return
    adapted = "lora_" in stage.code
    own = {"adapted": adapted}
    if "configure_model" in stage.names:
        own["configure_model"] = stage.names["configure_model"]
    strategy = stage.names.get("strategy") or UlyssesRingStrategy(pretrained=CHECKPOINT)
    module: Any = type("Tuned", (Tuned,), own)()
    SmallTrainer(strategy=strategy).fit(module, reader.loader())
    assert module.trained == 2


class Letters:
    """A tokenizer of letters, as called by the docs."""

    eos_token = "."

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        """Return a number for each letter."""
        return {"input_ids": [[ord(letter) % reader.VOCAB for letter in text] for text in texts]}

    def save_pretrained(self, folder: str) -> None:
        """Leave a file."""
        Path(folder, "tokenizer.json").write_text("{}")


def packed_rows() -> Any:
    """The function of that name of the guide to data."""
    (code,) = (one.code for one in snippets() if one.code.startswith("def packed_rows"))
    names = {"torch": torch}
    exec(code, names)
    return names["packed_rows"]


def with_a_trained_model(stage: Stage) -> None:
    """A block that takes the model after training."""
    module: Any = Module()
    stage.names.update(model=module)
    before, step = stage.split()
    stage.run(before)
    SmallTrainer(strategy="ulysses_ring").fit(module, reader.loader())
    stage.run(step)
    if "export_pretrained" in stage.code:
        dist.barrier()
        new = AutoModelForCausalLM.from_pretrained("path/to/new").state_dict()
        for name, value in module.network.state_dict().items():
            assert torch.equal(value, new[name]), name


def with_measurements(stage: Stage) -> None:
    """Files of a measured machine, where the page has them."""
    more = KernelRate("triton", "bfloat16", 128, "causal", 4096, 0.08, 0.1)
    kernels = (*MEASURED.kernels, more, replace(more, mask="full"))
    if dist.get_rank() == 0:
        for file in re.findall(r'"(\S*hardware\.json)"', stage.code):
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            replace(MEASURED, kernels=kernels).save(Path(file))
    dist.barrier()
    stage.names["documents"] = Documents.from_cu_seqlens([0, 20000, 65536])
    stage.run()


def on_tensors(stage: Stage) -> None:
    """Attention of queries, keys and values of 1,000 tokens on the block's mesh, or on one of yours."""
    heads = 4
    q, k, v = torch.randn(3, 1, 1000, heads, 16, dtype=torch.float64).unbind()
    if "mesh =" in stage.code:
        stage.names.update(q=q, k=k, v=v)
        stage.run()
        ends = [0, 700, 1000]
        parts = [slice(*pair) for pair in pairwise(ends)]
        spec = AttentionSpec(softcap=30.0)
        want = [context_parallel_attention(q[:, p], k[:, p], v[:, p], spec=spec) for p in parts]
        torch.testing.assert_close(stage.names["whole"], torch.cat(want, 1))
        return
    mesh, layout = ContextParallelMesh(ring_size=2), SequenceLayout(1000, ring_size=2)
    projections = {name: nn.Linear(64, 64, bias=False) for name in ("q_proj", "k_proj")}
    clip = QKClip(tau=100.0)
    clip.bind((f"layers.0.attention.{name}.weight", x.weight) for name, x in projections.items())
    q, k, v = (mesh.shard(x, layout) for x in (q, k, v))
    stage.names.update(q=q, k=k, v=v, mesh=mesh, layout=layout, clip=clip)
    stage.run()
    assert stage.names["scores"].shape[1] == heads


def as_a_program_of_hydra(stage: Stage) -> None:
    """Configs in a folder beside the program."""
    if dist.get_rank() == 0:
        Path("conf").mkdir()
        target = "_target_: lightning_cp.UlyssesRingStrategy, mode: ring"
        Path("conf/config.yaml").write_text(f"devices: 8\nstrategy: {{{target}}}\n")
    dist.barrier()
    stage.names.update(hydra=hydra, __name__="__main__")
    exec(compile(stage.code, str(Path.cwd() / "program.py"), "exec"), stage.names)
    folder = f"hydra.run.dir=outputs/{dist.get_rank()}"
    quiet = mock.patch("logging.config.dictConfig")  # it would disable loggers of later cases
    with quiet, mock.patch("sys.argv", ["program.py", folder]):
        stage.names["main"]()
    (trainer,) = SmallTrainer.made
    assert isinstance(trainer.strategy, UlyssesRingStrategy)


SCENES: dict[str, Callable[[Stage], None]] = {
    "": as_it_stands,
    "with a model and data": with_model_and_data,
    "after an interruption": after_an_interruption,
    "with a full checkpoint": with_a_full_checkpoint,
    "in a training step": in_a_training_step,
    "in a training step, after the block before it": in_a_training_step_after_the_block_before,
    "as a module": as_a_module,
    "in a Fabric loop": in_a_fabric_loop,
    "with a checkpoint": with_a_checkpoint,
    "with a trained model": with_a_trained_model,
    "with measurements": with_measurements,
    "on tensors": on_tensors,
    "on tensors of four ranks": on_tensors,
    "as a program of Hydra": as_a_program_of_hydra,
}
RANKS = {"on tensors of four ranks": 4}
"""Of scenes that need more than two."""


def play(rank: int, world_size: int, one: Snippet) -> None:
    """Run a block in its scene, on every rank."""
    with reader.small():
        warnings.filterwarnings("ignore")
        torch.manual_seed(0)
        SCENES[one.scene](Stage(one, one.code, prelude()))
