"""docs/benchmarks.md from the committed result files: every block between `<!-- NAME -->` and `<!-- /NAME -->` is
benchmarks/results/NAME.json as a table.

    python benchmarks/page.py            # write the page
    python benchmarks/page.py --check    # exit code 1 where it is not up to date
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from polyattn.bench import pages

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BLOCK = re.compile(r"(<!-- ([\w-]+) -->\n).*?(\n?<!-- /\2 -->)", re.S)


def table(name: str) -> str:
    """A result file as Markdown, by `polyattn bench` or by the script that measured it.

    Raises:
        SystemExit: there is no such result file.
    """
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise SystemExit(f"{PAGE.name} shows {name}, but there is no {path.name} among the results")
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if result["benchmark"] == pages.BENCHMARK:
        return pages.markdown(result)
    module = importlib.import_module(name.replace("-", "_"))
    text: str = module.markdown(result)
    return text


def written(page: str) -> str:
    """The page with every block as the result files have it."""
    return BLOCK.sub(lambda found: f"{found[1]}{table(found[2])}\n<!-- /{found[2]} -->", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    after = written(before)
    if args.check:
        sys.exit(0 if before == after else f"{PAGE.name} is not what the results say: python benchmarks/page.py")
    PAGE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
