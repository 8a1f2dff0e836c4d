"""One rank of a job that runs cases: python job.py RANK WORLD FOLDER NAME..., results as JSON in the folder."""

from __future__ import annotations

import datetime
import importlib.util
import json
import sys
import traceback
from pathlib import Path

import torch.distributed as dist


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    spec = importlib.util.spec_from_file_location("cases", Path(__file__).with_name("cases.py"))
    assert spec is not None
    assert spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = cases
    spec.loader.exec_module(cases)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=limit)
    found = {}
    for name in sys.argv[4:] or [name for name, (ranks, _) in cases.CASES.items() if ranks == world]:
        try:
            cases.CASES[name][1]()
            found[name] = ""
        except Exception:  # noqa: BLE001 - told by the test of this case
            found[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main()
