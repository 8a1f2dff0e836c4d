"""One rank of a job that runs cases, results as JSON in a folder.

python tests/distributed/job.py RANK WORLD FOLDER [NAME...]
torchrun --nproc-per-node 2 tests/distributed/job.py --cuda FOLDER [NAME...]
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = datetime.timedelta(seconds=300)


def started(cases: Any, arguments: list[str]) -> tuple[Path, list[str]]:
    """Join the job; the folder, and the names of cases."""
    if arguments[0] == "--cuda":
        cases.DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(cases.DEVICE)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=LIMIT)
        return Path(arguments[1]), arguments[2:]
    rank, world, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=LIMIT)
    return folder, arguments[3:]


def main() -> None:
    """Run the cases of this number of ranks, or those that are named."""
    spec = importlib.util.spec_from_file_location("cases", Path(__file__).with_name("cases.py"))
    assert spec is not None
    assert spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = cases
    spec.loader.exec_module(cases)
    folder, names = started(cases, sys.argv[1:])
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for name in names or [name for name, (ranks, _) in cases.CASES.items() if ranks == world]:
        try:
            cases.CASES[name][1]()
            found[name] = ""
        except Exception:  # noqa: BLE001 - told by the test of this case
            found[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(found))
    wrong = {name: text for name, text in found.items() if text}
    if "RANK" in os.environ:
        print(f"rank {rank}: {len(found)} cases, {len(wrong)} failed: {list(wrong)}", flush=True)
    dist.destroy_process_group()


main()
