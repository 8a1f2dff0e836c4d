"""The records cost nothing: they are read on machines that have no device and no time for torch."""

from __future__ import annotations

import subprocess
import sys


def test_reading_the_records_imports_no_torch() -> None:
    code = (
        "import sys, polyattn; "
        "assert 'template' in {b.name for b in polyattn.list_backends()}; "
        "assert 'torch' not in sys.modules, 'something that plugin.py imports brings torch'"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
