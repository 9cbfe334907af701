"""What goes wrong on one rank, or only for all of a machine's ranks together, is an error on every rank."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_cp.checkpoint import export_pretrained, load_pretrained
from lightning_cp.checkpoint.pretrained import memory
from lightning_cp.checkpoint.pretrained.options import check_complete
from lightning_cp.comm.consensus import error_summary_with_type
from lightning_cp.errors import CheckpointError, RankFailure
from tests.helpers.checkpoint.pretrained.models import config, make, save
from tests.helpers.pool import run_ranks
from tests.ranks.checkpoint.pretrained.test_export import names_in


def raised_by(action: Any) -> str:
    """The error's kind and text."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def initializes_on_one(rank: int, world: int, path: Path) -> str:
    """A mistake of the user's function, on one rank only."""

    def initialize(module: nn.Module) -> None:
        if rank == 1:
            raise ValueError("not today")
        with torch.no_grad():
            for x in (*module.parameters(), *module.buffers()):
                x.zero_()

    model = make(device="meta")
    said = raised_by(lambda: load_pretrained(model, path, initialize=initialize, progress=False))
    with pytest.raises(CheckpointError, match="incomplete"):
        check_complete(model)
    return said


def test_an_error_of_the_users_function_on_one_rank_ends_the_load_on_all(tmp_path: Path) -> None:
    save(tmp_path)
    first, second = run_ranks(2, initializes_on_one, tmp_path)
    assert second == "ValueError: not today"
    assert first.startswith("RankFailure: loading pretrained weights ended on all ranks")
    assert "rank 1 raised ValueError: not today" in first


def asks_wrongly(rank: int, world: int, path: Path, wrong: dict[str, Any]) -> str:
    """A mistake in a call, on one rank only."""
    model: Any = make(device="meta")
    options = {"progress": False, **(wrong if rank else {})}
    model = options.pop("model", model)
    return raised_by(lambda: load_pretrained(model, path, **options))


@pytest.mark.parametrize(
    "wrong",
    [{"strikt": False}, {"device": "gpu"}, {"model": {"weight": 1}}, {"mesh": "cpu"}],
    ids=str,
)
def test_a_wrong_call_on_one_rank_ends_the_load_on_all(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path)
    first, second = run_ranks(2, asks_wrongly, tmp_path, wrong, timeout=30)
    assert not second.startswith("RankFailure")
    assert first.startswith(
        "RankFailure: loading pretrained weights ended on all ranks, because of rank 1: "
    )
    assert second.split(":")[0] in first


def configured_badly(rank: int, world: int, target: Path) -> str:
    """A configuration that cannot be written, as rank 0 finds out at the end."""

    class Broken(type(config())):
        def save_pretrained(self, *_: Any, **__: Any) -> None:
            raise ValueError("the generation config is invalid")

    return raised_by(lambda: export_pretrained(make(), target, config=Broken()))


def test_a_configuration_that_cannot_be_written_ends_the_export_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, configured_badly, tmp_path / "made")
    assert first.startswith("CheckpointError: the export could not be written")
    assert "ValueError: the generation config is invalid" in first
    assert "RankFailure: exporting weights ended on all ranks, because rank 0 raised" in second
    assert names_in(tmp_path) == []


def has_no_memory_for_one(rank: int, world: int, target: Path) -> str:
    """The first rank has no room for the copy of a parameter on the CPU."""
    own = torch.Tensor.cpu

    def cpu(x: torch.Tensor) -> torch.Tensor:
        if rank == 0 and x.is_floating_point():  # the messages of the ranks still fit
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return own(x)

    patch = pytest.MonkeyPatch()
    patch.setattr(torch.Tensor, "cpu", cpu)
    try:
        return raised_by(lambda: export_pretrained(make(), target))
    finally:
        patch.undo()


def test_memory_that_runs_out_ends_the_export_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, has_no_memory_for_one, tmp_path / "made")
    assert first.startswith("CheckpointError: the export could not be written")
    assert "RankFailure: exporting weights ended on all ranks, because rank 0 raised" in second
    for said in (first, second):
        assert "can't allocate memory" in said
    assert names_in(tmp_path) == []


def cannot_have_it_whole(rank: int, world: int, target: Path, poor: int) -> str:
    """One rank may allocate half of what the second parameter takes, whole."""
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Linear(4, 4)
    large = DTensor.from_local(torch.empty(2**28 // world, dtype=torch.bfloat16), mesh, [Shard(0)])
    model.register_parameter("large", nn.Parameter(large))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == poor:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + large.nbytes // 2, limits[1]))
    try:
        return raised_by(lambda: export_pretrained(model, target))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("poor", [0, 1])
def test_a_rank_that_cannot_have_a_parameter_whole_ends_the_export_on_all(
    poor: int, tmp_path: Path
) -> None:
    """Said before they gather: who fails within that leaves the others waiting."""
    found = run_ranks(2, cannot_have_it_whole, tmp_path / "made", poor, timeout=30)
    assert found[poor].startswith("CheckpointError: large of shape [268435456] (torch.bfloat16)")
    assert "nothing of the export is left" in found[poor].lower()
    assert (
        f"RankFailure: exporting weights ended on all ranks, because rank {poor}" in found[1 - poor]
    )
    assert all("can't allocate memory" in said for said in found)
    assert names_in(tmp_path) == []


def too_large_together(rank: int, world: int, path: Path) -> tuple[str, bool]:
    """Each of the two has room for its part; both together do not."""
    wanted = sum(x.nbytes for x in make(device="meta").parameters())
    own = memory._available
    memory._available = lambda: int(1.5 * wanted)
    try:
        model = make(device="meta")
        said = raised_by(lambda: load_pretrained(model, path, progress=False))
    finally:
        memory._available = own
    return said, all(x.is_meta for x in model.parameters())


def test_ranks_of_one_machine_share_its_memory(tmp_path: Path) -> None:
    save(tmp_path)
    for said, untouched in run_ranks(2, too_large_together, tmp_path):
        assert "ranks 0 to 1 are on one machine" in said
        assert "bytes together" in said
        assert "data_parallel='fsdp'" in said
        assert untouched


def test_other_ranks_are_not_told_where_files_are() -> None:
    error = OSError(2, "No such file or directory", "/home/somebody/weights/x.safetensors")
    text = "FileNotFoundError: No such file or directory (x.safetensors)"
    assert error_summary_with_type(error) == text
    assert error_summary_with_type(RankFailure("as it is")) == "RankFailure: as it is"
