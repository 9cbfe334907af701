"""Names, dtypes, ties and buffers: what a model and a checkpoint need not have alike, and what they must."""

from __future__ import annotations

import io
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_cp.checkpoint import load_pretrained
from lightning_cp.checkpoint.pretrained import load as load_module
from lightning_cp.checkpoint.pretrained.incomplete import require_complete
from lightning_cp.checkpoint.pretrained.index import open_checkpoint
from lightning_cp.checkpoint.pretrained.plan import plan_load
from lightning_cp.checkpoint.pretrained.progress import Progress
from lightning_cp.errors import CheckpointError, ConfigError
from tests.checkpoint.pretrained.models import make, save


def load(model: nn.Module, path: Path, **options: Any) -> Any:
    return load_pretrained(model, path, progress=False, **options)


class Wrapped(nn.Module):
    """A network under another name, with something of its own beside it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.net = network
        self.metric = nn.Linear(2, 2)


def test_a_network_inside_a_module_is_found(tmp_path: Path) -> None:
    wanted = save(tmp_path, seed=6)
    model = Wrapped(make())
    before = model.metric.weight.clone()
    load(model, tmp_path)
    assert all(torch.equal(x, wanted[name]) for name, x in model.net.state_dict().items())
    assert torch.equal(model.metric.weight, before)


def test_a_bare_encoder_takes_its_part_of_a_larger_model(tmp_path: Path) -> None:
    wanted = save(tmp_path, seed=6)
    model = make().model
    with pytest.raises(CheckpointError, match=r"1 tensors that the model lacks \(lm_head.weight\)"):
        load(model, tmp_path)
    loaded = load(model, tmp_path, allow_unexpected=["lm_head.*"])
    assert loaded.unexpected == ("lm_head.weight",)
    assert all(torch.equal(x, wanted[f"model.{name}"]) for name, x in model.state_dict().items())


def test_tied_weights_are_read_once_and_stay_tied(tmp_path: Path) -> None:
    wanted = save(tmp_path, seed=6, tie_word_embeddings=True)
    assert "lm_head.weight" not in open_checkpoint(tmp_path).entries
    model = make(device="meta", tie_word_embeddings=True)
    loaded = load(model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(x, wanted[name]) for name, x in model.state_dict().items())
    assert loaded.nbytes == open_checkpoint(tmp_path).nbytes


def test_a_tie_is_found_under_its_other_name(tmp_path: Path) -> None:
    weights = {name: x.clone() for name, x in make(seed=6).state_dict().items()}
    del weights["model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    model = make(device="meta", tie_word_embeddings=True)
    load(model, tmp_path)
    assert torch.equal(model.model.embed_tokens.weight, weights["lm_head.weight"])


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [None, "bfloat16", torch.float64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dtypes_change_on_the_way(stored: Any, dtype: Any, device: str, tmp_path: Path) -> None:
    wanted = save(tmp_path, stored, seed=6)
    model = make(device=device)
    load(model, tmp_path, dtype=dtype)
    kind = {None: torch.float32, "bfloat16": torch.bfloat16}.get(dtype, dtype)
    for name, x in model.state_dict().items():
        assert x.dtype == kind
        assert torch.equal(x, wanted[name].to(kind)), name
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


class Fused(nn.Module):
    """One projection instead of three."""

    def __init__(self, sizes: tuple[int, ...] = (6, 4, 4), device: str = "meta") -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(5, sum(sizes), bias=False, device=device)})
            for _ in range(2)
        )


class Apart(nn.Module):
    """Three projections."""

    def __init__(self, sizes: tuple[int, ...] = (6, 4, 4), device: str = "meta") -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    name: nn.Linear(5, size, bias=False, device=device)
                    for name, size in zip("qkv", sizes, strict=True)
                }
            )
            for _ in range(2)
        )


PARTS = " + ".join(f"layers.*.{name}.weight" for name in "qkv")
WHOLE = "layers.*.qkv.weight"


def test_a_fused_parameter_is_put_together(tmp_path: Path) -> None:
    torch.manual_seed(1)
    apart = Apart(device="cpu")
    save_file(dict(apart.state_dict()), tmp_path / "model.safetensors")
    fused = Fused()
    load(fused, tmp_path, keys={WHOLE: PARTS})
    for made, layer in zip(fused.layers, apart.layers, strict=True):
        parts: Any = layer
        wanted = torch.cat([parts[name].weight for name in "qkv"])
        assert torch.equal(made["qkv"].weight, wanted)  # type: ignore[index]


def test_a_fused_tensor_is_taken_apart(tmp_path: Path) -> None:
    torch.manual_seed(1)
    fused = Fused(device="cpu")
    save_file(dict(fused.state_dict()), tmp_path / "model.safetensors")
    apart = Apart()
    load(apart, tmp_path, keys={PARTS: WHOLE})
    for made, layer in zip(apart.layers, fused.layers, strict=True):
        parts: Any = made
        whole: Any = layer
        assert torch.equal(torch.cat([parts[name].weight for name in "qkv"]), whole["qkv"].weight)


def test_what_does_not_make_the_fused_parameter_is_refused(tmp_path: Path) -> None:
    save_file(dict(Apart((6, 4, 5), "cpu").state_dict()), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"side by side do not make \[14, 5\]"):
        load(Fused(), tmp_path, keys={WHOLE: PARTS})


def test_other_names_are_declared(tmp_path: Path) -> None:
    torch.manual_seed(1)
    made = nn.Linear(3, 2)
    save_file({"old.w": made.weight, "old.b": made.bias}, tmp_path / "model.safetensors")
    model = nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match=r"lacks 2 parameters of the model \(weight, bias\)"):
        load(model, tmp_path)
    load(model, tmp_path, keys={"weight": "old.w", "bias": "old.b"})
    assert torch.equal(model.weight, made.weight)
    assert torch.equal(model.bias, made.bias)


def refuse(model: nn.Module, path: Path, says: str, **options: Any) -> None:
    """A refused load leaves the model as it was."""
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=says):
        load(model, path, **options)
    for name, x in model.state_dict().items():
        assert x.is_meta or torch.equal(x, before[name])
    require_complete(model)


def without(path: Path, *names: str) -> None:
    """Take tensors out of a checkpoint of one file."""
    weights = {name: x.clone() for name, x in make(seed=6).state_dict().items()}
    for name in names:
        del weights[name]
    save_file(weights, path / "model.safetensors")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    without(tmp_path, "lm_head.weight", "model.norm.weight")
    refuse(
        make(), tmp_path, r"lacks 2 parameters of the model \(model.norm.weight, lm_head.weight\)"
    )
    refuse(make(), tmp_path, r"1 parameters of the model \(model.n", allow_missing=["lm_head.*"])
    model = make()
    kept = model.lm_head.weight.clone()
    loaded = load(model, tmp_path, allow_missing=["lm_head.*", "model.norm.*"])
    assert set(loaded.missing) == {"lm_head.weight", "model.norm.weight"}
    assert torch.equal(model.lm_head.weight, kept)


def test_what_is_missing_on_the_meta_device_is_initialised(tmp_path: Path) -> None:
    without(tmp_path, "lm_head.weight", "model.norm.weight")
    model = make(device="meta")
    load(model, tmp_path, strict=False)
    assert model.model.norm.weight.eq(1).all()  # as transformers' _init_weights says
    assert 0.01 < model.lm_head.weight.std() < 0.04


def test_shapes_that_differ_are_named(tmp_path: Path) -> None:
    save(tmp_path)
    says = r"mlp.gate_proj.weight has shape \[37, 24\], but '.*' in model-.* has \[36, 24\]"
    refuse(make(intermediate_size=37), tmp_path, says)


def test_integers_are_not_converted(tmp_path: Path) -> None:
    save_file(
        {"weight": torch.ones(2, 3, dtype=torch.int32), "bias": torch.zeros(2)},
        tmp_path / "model.safetensors",
    )
    refuse(nn.Linear(3, 2), tmp_path, r"weight has dtype torch.float32, but .* has torch.int32")


class Unsaved(nn.Module):
    """A buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("rates", torch.arange(3.0), persistent=False)


class Sets(Unsaved):
    """Knows how it is made."""

    def reset_buffers(self) -> None:
        self.rates = torch.arange(3.0, device=self.rates.device)


class Forgets(Unsaved):
    """Says so, and does not."""

    def reset_buffers(self) -> None:
        return


def test_buffers_that_are_not_saved_are_made_again(tmp_path: Path) -> None:
    save_file({"weight": torch.full((2,), 5.0)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        models = [Unsaved(), Sets(), Forgets()]
    refuse(models[0], tmp_path, r"\(Unsaved\) has buffers .* reset_buffers\(\)")
    load(models[1], tmp_path)
    assert models[1].rates.tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match="Forgets left its rates without a value"):
        load(models[2], tmp_path)
    load(models[0], tmp_path, initialize=lambda module: module.rates.copy_(torch.arange(3.0)))
    assert models[0].rates.tolist() == [0, 1, 2]


def test_ctrl_c_leaves_a_model_that_refuses_to_be_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    model, read = make(device="meta"), []

    class Interrupted(load_module.SliceReader):
        def read(self, entry: Any, offsets: Any, into: torch.Tensor) -> None:
            read.append(entry)
            if len(read) == 5:
                raise KeyboardInterrupt
            super().read(entry, offsets, into)

    monkeypatch.setattr(load_module, "SliceReader", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(model, tmp_path)
    monkeypatch.undo()
    ids = torch.arange(4)[None]
    with pytest.raises(CheckpointError, match="this model is incomplete"):
        model(ids)
    with pytest.raises(CheckpointError, match="this model is incomplete"):
        model.model.layers[0].mlp(torch.zeros(1, 24))
    with pytest.raises(CheckpointError, match="this model is incomplete"):
        require_complete(Wrapped(model))
    load(model, tmp_path)
    require_complete(model)
    assert torch.equal(model(ids).logits, make()(ids).logits)


def test_no_memory_is_an_error_that_names_the_parameter_and_what_would_help(tmp_path: Path) -> None:
    big = nn.Linear(2**14, 2**14, bias=False, device="meta")  # 1 GiB
    save_file(
        {"weight": torch.zeros(2**14, 2**14, dtype=torch.float8_e4m3fn)},
        tmp_path / "model.safetensors",
    )
    status = Path("/proc/self/status").read_text()
    used = int(re.search(r"VmSize:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, before[1]))
    try:
        with pytest.raises(CheckpointError) as raised:
            load(big, tmp_path)
        monkey = pytest.MonkeyPatch()
        monkey.setattr(load_module, "_require_room", lambda *_: None)
        with pytest.raises(CheckpointError) as later:
            load(big, tmp_path)
        with pytest.raises(CheckpointError, match="2,147,483,648 bytes wanted"):
            load(big, tmp_path, dtype="float64")
        monkey.undo()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    for error in (raised, later):
        said = str(error.value)
        assert "weight of shape [16384, 16384]" in said
        assert "1,073,741,824 bytes" in said
        assert re.search(r"\d[\d,]+ (are )?free", said)
        assert "data_parallel='fsdp'" in said
        assert "dtype='bfloat16'" in said


def test_the_line_is_about_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    plan = plan_load(make(device="meta"), open_checkpoint(tmp_path))
    monkeypatch.setattr("lightning_cp.checkpoint.pretrained.progress.EVERY", 0.0)
    out = io.StringIO()
    with Progress(plan, plan.nbytes, stream=out) as progress:
        for one in plan.slices:
            progress.now(one.parameter)
            progress.add(one.nbytes)
    lines = out.getvalue().strip().splitlines()
    shares = [int(re.match(r"loading +(\d+)%", line)[1]) for line in lines]  # type: ignore[index]
    assert shares == sorted(shares)
    assert shares.count(100) == 2  # of the last bytes, and at the end; not once for each file
    assert len(lines) == len(plan.slices) + 1
    size = f"{plan.model_bytes / 1e3:.1f} kB"
    assert all(f" of {size}, " in line for line in lines)
    some = next(line for line in lines if "layers.1.mlp.up_proj.weight" in line)
    assert "layer 2 of 2" in some
    assert re.search(r"\d [kMG]?B/s, \d+:\d\d left, .*peak \d+\.\d+ [MG]B \(rank 0\)", some)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stric": True}, "unknown option.*stric"),
        ({"dtype": "float33"}, "floating-point dtype"),
        ({"dtype": torch.int8}, "floating-point dtype"),
        ({"check_finite": "no"}, "check_finite must be True or False"),
        ({"keys": {"a": 3}}, "text to text"),
        ({"prefix": "nowhere."}, "no parameter of the model begins with"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(ConfigError, match=says):
        load_pretrained(make(), tmp_path, **options)


def test_transformers_reads_the_same_values(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    save(tmp_path, seed=6)
    theirs, ours = LlamaForCausalLM.from_pretrained(tmp_path), make(device="meta")
    load(ours, tmp_path)
    ids = torch.arange(7)[None]
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
