"""The tables and pictures of the README and of the pages in docs from the committed result files: every block between
`<!-- NAME -->` and `<!-- /NAME -->` is benchmarks/results/NAME.json. Of a result of `polyattn bench`,
`<!-- NAME: ratios -->` has a line for each bar, `<!-- NAME: summary -->` one for each family and the bars in full,
`<!-- NAME: rows -->` has every row, and `<!-- NAME: pictures -->` its pictures, which are in docs/images/NAME.

    python benchmarks/page.py            # write the pages, and pictures that are not of their result (needs matplotlib)
    python benchmarks/page.py --check    # exit code 1 where one is not up to date
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyattn.bench import pages, plots
from polyattn.bench.bars import best

RESULTS = Path(__file__).parent / "results"
_NAMES = ("README.md", "docs/benchmarks.md", "docs/benchmark-rows.md", "docs/kernels.md")
PAGES = tuple(Path(__file__).parents[1] / name for name in _NAMES)
PICTURES = Path(__file__).parents[1] / "docs" / "images"
"""A folder for each result that is drawn, under its name."""
BLOCK = re.compile(r"(<!-- ([\w-]+(?:: \w+)?) -->\n).*?(\n?<!-- /\2 -->)", re.S)


def ratios(result: dict[str, Any]) -> str:
    """What the bars of a run compare, in short."""
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("polyattn", "torch"))
    head = ["| times as fast | rows | geometric mean | least | verdict |", "|---|---:|---:|---:|---|"]
    lines = [f"{pages.days(result)}, {result['device']}; {versions}.", "", *head]
    for said in result["verdicts"]:
        figures = [f"{said[name]:.2f}" for name in ("geomean", "least") if name in said]
        if len(figures) == 2:
            lines.append(f"| {' | '.join([said['bar'], str(said['rows']), *figures, pages.verdict_of(said)])} |")
    return "\n".join(lines)


def rows(result: dict[str, Any]) -> str:
    """The run in a line; a table of rates for each family; what failed, with its reason."""
    return "\n".join([*pages.head(result)[:-1], *pages.families(result)])


def summary(result: dict[str, Any]) -> str:
    """The run in a line, its bars; each family in a line, the fastest candidate beside the fastest peer."""
    lines = pages.head(result)
    if result["verdicts"]:
        lines += [*pages.bars_table(result["verdicts"]), ""]
    lines += ["| family | rows | fastest candidate | fastest peer, in rows | geometric mean | least | of row |"]
    lines += ["|---|---:|---|---|---:|---:|---|"]
    for name in dict.fromkeys(row["family"] for row in result["rows"]):
        lines.append(in_a_line(name, [row for row in result["rows"] if row["family"] == name]))
    return "\n".join(lines)


def in_a_line(family: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A family: rates from the least to the most, ratios of its accepted rows to the fastest peer."""
    rates, peers, ratios = [], Counter[str](), {}
    for row in (row for row in rows if row["accepted"]):
        own, peer = best(row, peers=False), best(row, peers=True)
        if own is not None:
            rates.append(row["entries"][own]["rate"])
        if peer is not None:
            peers[peer] += 1
        if own is not None and peer is not None:
            ratios[row["name"]] = row["entries"][peer]["us"] / row["entries"][own]["us"]
    least = min(ratios, key=lambda name: ratios[name], default="")
    mean = math.exp(math.fsum(map(math.log, ratios.values())) / len(ratios)) if ratios else None
    count = str(len(rates)) if len(rates) == len(rows) else f"{len(rates)} of {len(rows)}"
    shown = dict.fromkeys(map(pages.figure, (min(rates), max(rates)))) if rates else ()
    named = ", ".join(f"{name} {n}" for name, n in peers.most_common())
    cells = ["" if mean is None else f"{mean:.2f}", f"{ratios[least]:.2f}" if least else "", least]
    span = f"{' to '.join(shown)} {rows[0]['unit']}" if rates else ""
    return f"| {' | '.join([family, count, span, named, *cells])} |"


def drawn(result: dict[str, Any]) -> list[str]:
    """The sheets of a run that have a picture: something of them was timed."""
    timed = (row["sheet"] for row in result["rows"] if any("us" in entry for entry in row["entries"].values()))
    return sorted(set(timed))


def pictures(result: dict[str, Any], folder: str) -> str:
    """The pictures of a run, as a page in docs shows them. folder: of them."""
    return "\n".join(f"![{result['titles'][sheet]}](images/{folder}/{sheet}.svg)" for sheet in drawn(result))


VIEWS = {"": pages.markdown, "summary": summary, "rows": rows, "ratios": ratios}


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
    if view == "pictures":
        return pictures(result, name)
    if result["benchmark"] == pages.BENCHMARK:
        return VIEWS[view](result)
    module = importlib.import_module(result["benchmark"].replace("-", "_"))
    text: str = module.markdown(result)
    return text


def written(page: str) -> str:
    """The page with every block as the result files have it."""
    return BLOCK.sub(lambda found: f"{found[1]}{table(found[2])}\n<!-- /{found[2]} -->", page)


def outdated() -> list[Path]:
    """Folders with a picture that is not of its result."""
    found = []
    for folder in sorted(path for path in PICTURES.iterdir() if path.is_dir()):
        result = json.loads((RESULTS / f"{folder.name}.json").read_text(encoding="utf-8"))
        there = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")}
        if sorted(there) != drawn(result) or not all(plots.digest(result) in text for text in there.values()):
            found.append(folder)
    return found


def draw(folder: Path) -> None:
    """Its pictures anew; of the two formats the pages show the SVG."""
    for path in folder.glob("*.svg"):
        path.unlink()
    for path in plots.draw(json.loads((RESULTS / f"{folder.name}.json").read_text(encoding="utf-8")), folder):
        if path.suffix != ".svg":
            path.unlink()


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
    for folder in outdated():
        if args.check:
            sys.exit(f"{folder.name}: its pictures are not of its result: python benchmarks/page.py")
        draw(folder)


if __name__ == "__main__":
    main()
