"""Write the tables of the pages in docs that repeat what the code knows.

A table stands between `<!-- table: NAME -->` and `<!-- /table: NAME -->`; `TABLES` says who makes it.

    python docs/tables.py            # write the pages
    python docs/tables.py --check    # exit code 1 where one is not what this writes
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from polyattn import errors
from polyattn.cli.app import EXIT_CODES, app
from polyattn.cli.options import OPTIONS
from polyattn.cli.request_flags import request_flags
from polyattn.contract import request_fields
from polyattn.contract.hookspecs import PolyattnSpecs
from polyattn.envvars import ENVVARS
from polyattn.lowering import MAX_STEPS, lowerings
from polyattn.lowering.base import CALL

DOCS = Path(__file__).parent
BLOCK = re.compile(r"(<!-- table: ([^\n]+?) -->\n).*?(\n<!-- /table: \2 -->)", re.S)
DEFAULT = re.compile(r"(.*?) ?(?:Default|Without it): (.+)\.", re.S)
FLAG = re.compile(r"(?<![\w`-])(--?[a-z][\w-]*)")


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown of a table."""
    head = list(header)
    lines = [f"| {' | '.join(cells)} |".replace("  |", " |") for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


# ----------------------------------------------------------------------------------------------------------- flags


def commands() -> dict[str, Any]:
    """Every command by the words that name it."""
    top = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {}
    for name, command in top.items():
        below = getattr(command, "commands", None)
        found.update({f"{name} {sub}": one for sub, one in below.items()} if below else {name: command})
    return found


def flags(command: str) -> str:
    """The arguments and flags of a command, one table for each heading of its help."""
    panels: dict[str, list[Any]] = defaultdict(list)
    for parameter in commands()[command].params:
        panels[getattr(parameter, "rich_help_panel", None) or ""].append(parameter)
    panels[""] = panels.pop("", [])  # flags without a heading come last
    parts = []
    for panel, parameters in panels.items():
        rows = [flag_row(parameter, SECTIONS if command == "explain" else {}) for parameter in parameters]
        if rows:
            parts += [f"{panel}:"] if panel and len(panels) > 1 else []
            parts.append(table(("flag", "default", "meaning"), rows))
    return "\n\n".join(parts)


def flag_row(parameter: Any, sections: Mapping[str, str]) -> tuple[str, str, str]:
    """(its names, what is taken where it is not given, what it says)."""
    argument = parameter.param_type_name == "argument"
    names = [parameter.metavar or parameter.name.upper()] if argument else parameter.opts
    text, usual = parameter.help or "", ""
    if split := DEFAULT.fullmatch(text):
        text, usual = split.groups()
    elif isinstance(parameter.default, (str, int, float, Path)) and parameter.default is not False:
        usual = f"{parameter.default:g}" if isinstance(parameter.default, float) else str(parameter.default)
    if section := sections.get(parameter.name, ""):
        text = f"{text} ({section})" if text.endswith("...") else f"{text.removesuffix('.')} ({section})."
    return ", ".join(f"`{name}`" for name in names), quoted(usual), quoted(text)


SECTIONS: Mapping[str, str] = {flag.name: flag.section for flag in request_flags() if flag.section}
"""Flags of a request -> the section of semantics.md that defines what they ask for."""


def quoted(text: str) -> str:
    """Help as Markdown: flags in it are code, and nothing in it ends a cell."""
    return FLAG.sub(r"`\1`", text).replace("|", "\\|").replace("*", "\\*")


# --------------------------------------------------------------------------------------------------- configuration


def variables() -> str:
    return table(("variable", "meaning"), ((f"`{name}`", meaning) for name, meaning in ENVVARS.items()))


def settings() -> str:
    rows = (
        (f"`{option.name}`", quoted(option.usual), quoted(option.help), f"`POLYATTN_{option.name.upper()}`")
        for option in OPTIONS
        if option.setting
    )
    shown = ((*row, variable if variable.strip("`") in ENVVARS else "") for *row, variable in rows)
    return table(("setting", "default", "meaning", "variable"), shown)


# ---------------------------------------------------------------------------------------------------------- errors


def error_classes() -> list[type[Exception]]:
    """The errors that people can catch, all but their base."""
    found = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.PolyattnError)]
    return [kind for kind in found if kind is not errors.PolyattnError]


def errors_table() -> str:
    rows = []
    for kind in error_classes():
        builtin = next(base.__name__ for base in kind.__bases__ if base.__module__ == "builtins")
        means = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
        name = kind.__name__
        rows.append((f"[`{name}`](#{name.lower()})", f"`{builtin}`", means, str(EXIT_CODES[kind])))
    return table(("error", "is also", "meaning", "exit code"), rows)


# ----------------------------------------------------------------------------------------------------------- hooks


def hooks() -> str:
    """The hooks in the order of their calls; their docstrings say when each is called."""
    specs = {name: spec for name, spec in vars(PolyattnSpecs).items() if name.startswith("polyattn_")}
    rows = []
    for number, (name, spec) in enumerate(specs.items(), 1):
        text = " ".join((inspect.getdoc(spec) or "").split())
        (called,) = re.findall(r"Called (.+?)[.;] ", text)
        allowed = "torch, the vendor's library" if "torch and of the vendor library are welcome" in text else "records"
        rows.append((str(number), f"`{name}`", called, allowed))
    return table(("", "hook", "called", "may import"), rows)


# -------------------------------------------------------------------------------------------------------- rewrites

FOR_FAMILIES: Mapping[str, str] = {
    "trim_window": "dense, paged and mla at decode",
    **dict.fromkeys(("layout", "align_causal", "pack_sequences"), "dense"),
    **dict.fromkeys(("pad_head_dim", "pad_value_dim", "crop_value_dim", "expand_gqa_heads"), "dense, varlen"),
    "realign": "dense, varlen, paged, mla",
    **dict.fromkeys(("fold_scale", "additive_mask"), "all"),
    "sinks_from_lse": "dense, varlen, paged",
    "pad_sequences": "varlen",
    "alibi_as_bias": "dense, varlen, paged",
    **dict.fromkeys(("chunk_as_batch", "segments_as_sequences", "segments_as_mask"), "dense"),
    "expand_block_map": "block_sparse",
    "write_new_rows": "paged",
    **dict.fromkeys(("state_layout", "compute_gates", "gather_states", "draft_by_draft"), "linear"),
    **dict.fromkeys(
        (
            "finer_pages",
            "page_table_to_tokens",
            "dequantise_kv",
            "tree_by_lse",
            "chunked_prefix_by_lse",
            "kv_parts_by_lse",
        ),
        "paged, mla",
    ),
}
"""Rewrite -> the families whose calls it serves, in words."""
TRAINED = ("dense", "varlen", "block_sparse", "linear", "all")
"""Families whose calls have gradients."""


def rewrites() -> str:
    rows = []
    for one in lowerings():
        families = FOR_FAMILIES[one.name]
        trained = any(re.search(rf"\b{family}\b", families) for family in TRAINED)
        rows.append((f"`{one.name}`", one.summary, families, "yes" if trained else "-"))
    return table(("name", "what it does", "for", "gradients"), rows)


def limits_of_rewrites() -> str:
    rows = (("rewrites in a chain, at most", str(MAX_STEPS)), ("cost of a further kernel call, in passes", f"{CALL:g}"))
    return table(("limit", "value"), rows)


MUST = {
    "paged": ("page_size",),
    "mla": ("page_size",),
    "block_sparse": ("block_map", "block_shape"),
    "linear": ("method",),
}
"""Options that every request of a family has on."""
NEVER = ("options", "q_bucket", "k_bucket", "batch_bucket")
"""Fields that no row says anything of."""


def fields_of_a_row() -> str:
    """Every field of a request that a row may speak of, and whether it must."""
    rows = []
    for field in (one for one in request_fields() if one.name not in NEVER):
        families = [family for family, names in MUST.items() if field.name in names]
        told = {"required": "must", "context": "only in `when`"}.get(field.kind, "may")
        rows.append(
            (f"`{field.name}`", f"may; must for {', '.join(families)}" if families else told, quoted(field.doc))
        )
    return table(("field", "a row says it", "meaning"), rows)


def published(kind: str) -> str:
    """The rows of SGLang's support matrix, each cell beside what is served here; a test asks selection for every one.

    Args:
        kind: A, names by platform, B, paged caches, or C, latent ones.
    """
    file = DOCS.parent / "tests" / "selection" / "rules" / "test_matrix_b_c_d_e.py"
    spec = importlib.util.spec_from_file_location("published_rows", file)
    if spec is None or spec.loader is None:
        sys.exit(f"{file} is not there, and has the cells of the table of published rows")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows: list[tuple[str, ...]] = []
    if kind == "A":
        said = {"y": "yes", "n": "no"}
        for name, (aliases, published, here) in module.A.items():
            names = ", ".join(f"`{one}`" for one in (name, *aliases))
            pairs = zip(published, here, strict=True)
            rows.append(
                (names, *("-" if set(pair) == {"n"} else " / ".join(said[one] for one in pair) for pair in pairs))
            )
        return table(("backend", *module.A_COLUMNS), rows)
    for name, ((where, _, _), cells) in getattr(module, kind).items():
        rows.append((f"`{name}`", where, *(cell.replace(": ", " / ") for cell in cells)))
    return table(("backend", "asked on", *getattr(module, f"{kind}_COLUMNS")), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    **{f"flags of {name}": lambda name=name: flags(name) for name in commands()},  # type: ignore[misc]
    "environment variables": variables,
    "settings": settings,
    "errors": errors_table,
    "hooks": hooks,
    "fields of a row": fields_of_a_row,
    "rewrites": rewrites,
    "limits of rewrites": limits_of_rewrites,
    "published names": lambda: published("A"),
    "published rows of paged caches": lambda: published("B"),
    "published rows of latent caches": lambda: published("C"),
}
"""What a page may show -> who makes it."""


def written(page: str) -> str:
    """The page with every table as the code has it.

    Raises:
        SystemExit: the page shows a table that nobody makes.
    """

    def made(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            sys.exit(f"a page shows the table {found[2]!r}, which nobody makes; known: {', '.join(TABLES)}")
        return f"{found[1]}{TABLES[found[2]]()}{found[3]}"

    return BLOCK.sub(made, page)


def pages() -> list[Path]:
    """The pages that show a table."""
    return [path for path in sorted(DOCS.glob("*.md")) if BLOCK.search(path.read_text(encoding="utf-8"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = written(before)
        if not args.check:
            page.write_text(after, encoding="utf-8")
        elif before != after:
            sys.exit(f"{page.name} is not what the code says: python docs/tables.py")


if __name__ == "__main__":
    main()
