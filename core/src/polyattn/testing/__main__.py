"""`python -m polyattn.testing BACKEND`: run the conformance of a backend on this machine.

Exit codes: 0 it conforms, 1 it does not, 2 wrong usage, 4 the backend is unknown or cannot run here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import BackendUnavailableError, ConfigError, PolyattnError
from ..records import FAMILIES
from .generate import LEVELS
from .running import FLOATS, record, run

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m polyattn.testing", description="Run the conformance of a backend.")
    parser.add_argument("backend", metavar="BACKEND", help="its name, as `polyattn list` shows it")
    parser.add_argument("--device", default="cpu", help="torch device to run on (default: cpu)")
    parser.add_argument("--level", choices=list(LEVELS), default="quick", help="how many combinations (default: quick)")
    parser.add_argument("--dtypes", type=_words, metavar="A,B", help=f"only these of {', '.join(FLOATS)}")
    parser.add_argument("--families", type=_words, metavar="A,B", help=f"only these of {', '.join(FAMILIES)}")
    parser.add_argument("--per-row", type=int, metavar="N", help="combinations for each capability row and dtype")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--write-evidence", action="store_true", help="record a run without findings beside the plugin")
    return parser


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    given = _parser().parse_args(arguments)
    try:
        report = run(
            given.backend,
            device=given.device,
            dtypes=given.dtypes,
            level=given.level,
            families=given.families,
            per_row=given.per_row,
            progress=_progress if sys.stderr.isatty() else None,
        )
        path = record(report) if given.write_evidence and report.ok else None
    except ConfigError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except BackendUnavailableError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 4
    except PolyattnError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    print(report.to_json() if given.json else report)
    if path is not None:
        print(f"evidence written: {path.name}", file=sys.stderr)
    return 0 if report.ok else 1


def _progress(done: int, total: int, case: str) -> None:
    end = "\n" if done == total else ""
    print(f"\r\x1b[K{done}/{total} {case[:100]}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
