"""Layers over ranks equal one process: two jobs, of 2 and of 4 processes, run all cases."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import polyattn
from polyattn.contract import AttentionRequest
from polyattn.distributed import init_mesh
from polyattn.errors import InvalidInputError
from polyattn.nn import RingAttention

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("cases_of_ranks", HERE / "cases.py")
assert _spec is not None
assert _spec.loader is not None
cases = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = cases
_spec.loader.exec_module(cases)


class Jobs:
    """The results of each world's job, which runs when they are first asked for."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder = folder
        self.names = names
        self.found: dict[int, list[dict[str, str]]] = {}

    def of(self, world: int) -> list[dict[str, str]]:
        if world not in self.found:
            folder = self.folder / str(world)
            folder.mkdir()
            names = [name for name in self.names if cases.CASES[name][0] == world]
            started = [
                subprocess.Popen(
                    [sys.executable, str(HERE / "job.py"), str(rank), str(world), str(folder), *names],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank in range(world)
            ]
            said = [one.communicate(timeout=900)[0] for one in started]
            files = [folder / f"{rank}.json" for rank in range(world)]
            assert all(file.exists() for file in files), "\n".join(said)
            self.found[world] = [json.loads(file.read_text()) for file in files]
        return self.found[world]


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """A job runs the cases that are asked for here, however few those are."""
    test = test_ranks_together_equal_one_process
    items = (item for item in request.session.items if getattr(item, "function", None) is test)
    names = [item.callspec.params["name"] for item in items]
    return Jobs(tmp_path_factory.mktemp("jobs"), names)


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("name", cases.CASES)
def test_ranks_together_equal_one_process(name: str, jobs: Jobs) -> None:
    world, _ = cases.CASES[name]
    for rank, found in enumerate(jobs.of(world)):
        assert not found.get(name, "the job ended before this case"), f"rank {rank}: {found.get(name)}"


def test_without_a_process_group_a_layer_says_how_to_start_one() -> None:
    for make in (lambda: RingAttention(None), init_mesh):
        with pytest.raises(InvalidInputError, match="torchrun --nproc-per-node"):
            make()


def test_the_example_runs_on_two_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/parallel.py"]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=900, check=False)
    assert "ranks with [19, 18] tokens" in done.stdout, done.stdout + done.stderr


def test_on_an_npu_a_ring_chooses_fa_by_itself() -> None:
    """Of what a part asks for: its LSE. Ulysses needs none, and takes what any call does."""
    call = AttentionRequest(family="dense", dtype="bfloat16", heads=24, kv_heads=24, head_dim=128, v_head_dim=128)
    for lse, backend in ((True, "fa"), (False, "torch_sdpa")):
        found = polyattn.what_if(dataclasses.replace(call, lse=lse), platform="npu", installed=["torch-npu"])
        assert found.backend == backend
