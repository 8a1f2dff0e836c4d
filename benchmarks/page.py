"""The tables of docs/benchmarks.md, docs/kernels.md and the README from the committed result files: every block between
`<!-- NAME -->` and `<!-- /NAME -->` is benchmarks/results/NAME.json. Of a result of `polyattn bench`,
`<!-- NAME: summary -->` is a line for each family, `<!-- NAME: ratios -->` one for each bar.

    python benchmarks/page.py            # write the pages
    python benchmarks/page.py --check    # exit code 1 where one is not up to date
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
PAGES = tuple(Path(__file__).parents[1] / name for name in ("README.md", "docs/benchmarks.md", "docs/kernels.md"))
BLOCK = re.compile(r"(<!-- ([\w-]+(?:: \w+)?) -->\n).*?(\n?<!-- /\2 -->)", re.S)


def ratios(result: dict[str, Any]) -> str:
    """What the bars of a run compare, without what they ask."""
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("polyattn", "torch"))
    head = ["| | rows | geometric mean | least |", "|---|---:|---:|---:|"]
    lines = [f"{result['date']}, {result['device']}; {versions}.", "", *head]
    for said in result["verdicts"]:
        figures = [f"{said[name]:.2f}" for name in ("geomean", "least") if name in said]
        lines += [f"| {' | '.join([said['bar'], str(said['rows']), *figures])} |"] if len(figures) == 2 else []
    return "\n".join(lines)


VIEWS = {"": pages.markdown, "summary": pages.summary, "ratios": ratios}


def table(block: str) -> str:
    """A result file as Markdown, by `polyattn bench` or by the script that measured it. block: what its marks say.

    Raises:
        SystemExit: there is no such result file.
    """
    name, _, view = block.partition(": ")
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise SystemExit(f"a page shows {name}, but there is no {path.name} among the results")
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if result["benchmark"] == pages.BENCHMARK:
        return VIEWS[view](result)
    module = importlib.import_module(result["benchmark"].replace("-", "_"))
    text: str = module.markdown(result)
    return text


def written(page: str) -> str:
    """The page with every block as the result files have it."""
    return BLOCK.sub(lambda found: f"{found[1]}{table(found[2])}\n<!-- /{found[2]} -->", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = written(before)
        if not args.check:
            page.write_text(after, encoding="utf-8")
        elif before != after:
            sys.exit(f"{page.name} is not what the results say: python benchmarks/page.py")


if __name__ == "__main__":
    main()
