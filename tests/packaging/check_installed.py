"""Check an environment that has the wheels, pluggy and packaging, and no torch: `python check_installed.py cuda ...`.

Run by the `packaging` session with `python -I`, so nothing of the checkout is importable but what was installed.
"""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def missing_files(distribution: str, source: Path) -> set[str]:
    """Files under `source` (a src/ folder) that the installed distribution lacks."""
    installed = {file.as_posix() for file in metadata.files(distribution) or ()}
    expected = (f for f in source.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    return {name for f in expected if (name := f.relative_to(source).as_posix()) not in installed}


def check(plugins: list[str]) -> list[str]:
    """One sentence for each thing that is wrong."""
    wrong = []
    if importlib.util.find_spec("torch"):
        wrong.append("torch is installed here, so this run would not show that loading plugins needs none")
    names = {"polyattn": ROOT / "core" / "src"}
    names |= {f"polyattn-{plugin}": ROOT / "plugins" / plugin / "src" for plugin in plugins}
    versions = {name: metadata.version(name) for name in names}
    if len(set(versions.values())) != 1:
        wrong.append(f"versions differ: {versions}")
    for name, source in names.items():
        if missing := missing_files(name, source):
            wrong.append(f"{name}: the wheel lacks {sorted(missing)}: strays, or name them in its pyproject.toml")
        if not any(file.name == "LICENSE" for file in metadata.files(name) or ()):
            wrong.append(f"{name}: the wheel lacks LICENSE")

    entries = {entry.name: entry for entry in metadata.entry_points(group="polyattn.backends")}
    if set(entries) != {"core", *plugins}:
        wrong.append(f"entry points are {sorted(entries)}, expected {sorted(['core', *plugins])}")
    for entry in entries.values():
        module = entry.load()
        if not any(name.startswith("polyattn_register_") for name in vars(module)):
            wrong.append(f"{entry.value} has no polyattn_register_... hook")

    import polyattn

    if polyattn.__version__ != versions["polyattn"]:
        wrong.append(f"polyattn.__version__ is {polyattn.__version__}, its metadata says {versions['polyattn']}")
    brought = {status.package for status in polyattn.list_backends()}
    if lacking := set(names) - brought:
        wrong.append(f"no backend registered by {sorted(lacking)} (registered: {sorted(brought)})")
    return wrong


if __name__ == "__main__":
    problems = check(sys.argv[1:])
    print(*problems or [f"{len(sys.argv)} distributions installed, loaded and registered without torch"], sep="\n")
    sys.exit(bool(problems))
