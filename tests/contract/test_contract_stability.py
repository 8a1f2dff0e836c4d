"""Version 2 of the plugin contract only grows: `contract_2.json` is what was promised, and it is all still there.

The toolkit of adapters, `polyattn.adapters`, is promised with it.

What version 1 promised (`contract_1.json`) is there too, but for the tables of paged and latent calls: those of its
plugins core calls as version 1 had it (`registry.version_1`).

An addition passes when packages written before it cannot notice: a new hook, word or record; a new field or argument
with a default; a new field of the request whose default is its off value. Removing or renaming anything, another order
of positional arguments, another default, another way in which a field of the request is judged: these break published
packages and fail here.

Additions are promised by appending them to the snapshot, which a test asks for. The command refuses to write anything
that would take a promise back:

    python tests/contract/test_contract_stability.py
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from polyattn import adapters, contract, errors
from polyattn.contract import AttentionRequest, request_fields
from polyattn.registry import version_1

SNAPSHOT = Path(__file__).with_name("contract_2.json")
MODULES = {module.__name__: module for module in (adapters, contract, errors)}
PROMISED: dict[str, Any] = json.loads(SNAPSHOT.read_text(encoding="utf-8")) if SNAPSHOT.is_file() else {}

KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
REQUIRED = "required"

EARLIER: dict[str, Any] = json.loads(Path(__file__).with_name("contract_1.json").read_text(encoding="utf-8"))
"""What version 1 promised; never written again."""


def surface() -> dict[str, Any]:
    """Everything a plugin may use or must provide, as plain data: module -> name -> what it is."""
    found = {name: {n: described(getattr(m, n)) for n in sorted(m.__all__)} for name, m in MODULES.items()}
    return {"exports": found, "request": judged()}


def described(thing: Any) -> dict[str, Any]:
    words = get_args(thing) if get_origin(thing) is not None else thing
    if isinstance(words, tuple) and words and all(isinstance(word, str) for word in words):
        return {"is": "words", "words": sorted(words)}
    if thing is contract.PolyattnSpecs:
        return {"is": "hooks", "members": dict(members(thing))}
    if inspect.isclass(thing) and getattr(thing, "_is_protocol", False):
        call = vars(thing).get("__call__")
        return {"is": "protocol", **_call(call), "members": dict(members(thing))}
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return {"is": f"subclass of {', '.join(base.__name__ for base in thing.__bases__)}"}
    if inspect.isclass(thing):
        return {"is": "class", **_call(thing), "members": dict(members(thing))}
    if inspect.isfunction(thing):
        return {"is": "function", **_call(thing)}
    return {"is": "value", "value": repr(thing) if isinstance(thing, (int, str)) else type(thing).__name__}


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public attributes of a class; those of methods with their arguments, in the order they were written."""
    fields = getattr(kind, "_fields", ())
    fields = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else fields
    yield from dict.fromkeys(fields, "attribute").items()
    for name, value in vars(kind).items():
        if not name.startswith("_") and name not in fields:
            yield name, _call(value) if inspect.isfunction(value) else "attribute"


def _call(call: Callable[..., Any] | None) -> dict[str, Any]:
    """{"call": {"arguments": [[name, kind, default], ...], "returns": annotation}}; `self` is left out."""
    if call is None:
        return {}
    found = inspect.signature(call)
    given = [p for p in found.parameters.values() if p.name not in ("self", "_cls")]
    rows = [[p.name, KINDS[p.kind], REQUIRED if p.default is p.empty else _shown(p.default)] for p in given]
    returns = "" if found.return_annotation is found.empty else str(found.return_annotation)
    return {"call": {"arguments": rows, "returns": "" if inspect.isclass(call) else returns}}


def _shown(default: Any) -> str:
    return "private" if type(default) is object else repr(default)


def judged() -> dict[str, Any]:
    """How each field of the request is judged: `off` is the expression in the source, a value or a predicate."""
    (source,) = ast.parse(textwrap.dedent(inspect.getsource(AttentionRequest))).body
    assert isinstance(source, ast.ClassDef)
    calls = {s.target.id: s.value for s in source.body if isinstance(s, ast.AnnAssign)}
    written = {n: {k.arg: ast.unparse(k.value) for k in c.keywords} for n, c in calls.items()}
    return {f.name: {"judged": f.kind, "off": written[f.name].get("off", "default")} for f in request_fields()}


# What is promised ----------------------------------------------------------------------------------------------------


def broken(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One sentence for each promise that `new` does not keep."""
    found: list[str] = []
    for module, names in old["exports"].items():
        for name, was in names.items():
            now = new["exports"].get(module, {}).get(name)
            if now is None:
                found.append(f"{module}.{name} is gone")
            elif now["is"] != was["is"]:
                found.append(f"{module}.{name} is a {now['is']}, it was a {was['is']}")
            else:
                found += _kept(name, was, now)
    for name, how in old["request"].items():
        if name in new["request"] and new["request"][name] != how:
            found.append(f"AttentionRequest.{name} is judged as {new['request'][name]}, it was {how}")
    added = {name: how for name, how in new["request"].items() if name not in old["request"]}
    found += [
        f"AttentionRequest.{n} is new and required: no row has it" for n in added if added[n]["judged"] == REQUIRED
    ]
    return found


def _kept(name: str, was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if was["is"] == "words":
        yield from (f"{name}: the word {word!r} is gone" for word in was["words"] if word not in now["words"])
    elif was["is"] == "value" and name == "API_VERSION":
        if int(now["value"]) < int(was["value"]):
            yield f"API_VERSION is {now['value']}, it was {was['value']}"
    elif was["is"] == "value" and was != now:
        yield f"{name} is {now['value']}, it was {was['value']}"
    if "call" in was:
        yield from _same_call(name, was["call"], now["call"], was["is"])
    for member, then in was.get("members", {}).items():
        here = now["members"].get(member)
        if here is None or (then == "attribute") != (here == "attribute"):
            yield f"{name}.{member} is gone"
        elif then != "attribute":
            yield from _same_call(f"{name}.{member}", then["call"], here["call"], was["is"])
    if was["is"] == "hooks":
        before = list(was["members"])
        if [hook for hook in now["members"] if hook in before] != before:
            yield f"{name}: the hooks are called in another order"


def _same_call(name: str, was: dict[str, Any], now: dict[str, Any], kind: str) -> Iterator[str]:
    """`kind`: hooks take the same arguments (an implementation that lacks one is rejected), a protocol may gain
    keywords with a default (given only to who declared what they are for), all else arguments with a default."""
    old, new = {a[0]: a for a in was["arguments"]}, {a[0]: a for a in now["arguments"]}
    yield from (f"{name}: the argument {a} is gone" for a in old if a not in new)
    for argument, (_, how, default) in old.items():
        if argument in new and new[argument][1:] != [how, default]:
            there = " ".join(new[argument][1:])
            yield f"{name}: the argument {argument} is {there}, it was {how} {default}"
    positional = [[a for a, row in rows.items() if row[1] == "positional"] for rows in (old, new)]
    if [a for a in positional[1] if a in old] != [a for a in positional[0] if a in new] or (
        positional[1][: len(positional[0])] != positional[0] and set(positional[0]) <= set(positional[1])
    ):
        yield f"{name}: the positional arguments are {', '.join(positional[1])}, they were {', '.join(positional[0])}"
    for argument in (a for a in new if a not in old):
        if kind == "hooks" or new[argument][2] == REQUIRED or (kind == "protocol" and new[argument][1] != "keyword"):
            yield f"{name}: the new argument {argument} is not one that older packages can do without"
    if kind in ("hooks", "protocol") and was["returns"] != now["returns"]:
        yield f"{name} returns {now['returns']}, it was {was['returns']}"


def unpromised(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """What `new` has and `old` does not."""
    if isinstance(new, dict):
        for key, value in new.items():
            inner = f"{path}.{key}" if path else key
            yield from [inner] if not isinstance(old, dict) or key not in old else unpromised(old[key], value, inner)
    elif old != new:
        yield path


# Tests ---------------------------------------------------------------------------------------------------------------


def test_every_promise_is_kept() -> None:
    assert PROMISED, f"{SNAPSHOT.name} is not there"
    assert not broken(PROMISED, surface())


def test_of_version_1_only_the_tables_of_a_call_have_changed() -> None:
    """Each of these is what `registry.version_1` makes up for; tests/third_party/test_frozen.py runs its wheels."""
    found = broken(EARLIER, surface())
    # A session takes any keywords: they have another name there.
    found = [sentence for sentence in found if not sentence.startswith("Session.forward: ")]
    assert {sentence.split(":")[0] for sentence in found} == {"PagedForward", "MLAForward"}
    gone = {re.sub(r"^\w+: the argument (\w+) is gone$", r"\1", s) for s in found if s.endswith(" is gone")}
    assert gone == set(version_1.TABLES)
    new = [sentence for sentence in found if not sentence.endswith(" is gone")]
    assert [re.findall("the new argument tables", sentence) for sentence in new] == [["the new argument tables"]] * 2


def test_every_addition_is_promised() -> None:
    added = list(unpromised(PROMISED, surface()))
    assert not added, f"new: {', '.join(added)}. To promise them: python tests/contract/{Path(__file__).name}"


def test_the_snapshot_is_of_the_whole_contract() -> None:
    named = PROMISED["exports"]
    kinds = ("platforms", "backends", "measurements", "tunables", "device_ops")
    hooks = [f"polyattn_{name}" for name in (*(f"register_{kind}" for kind in kinds), "report_capability")]
    assert list(named["polyattn.contract"]["PolyattnSpecs"]["members"])[:7] == [*hooks, "polyattn_load_forward"]
    assert {"DenseForward", "DenseBackward", "VarlenForward", "PagedForward", "Bound"} < set(named["polyattn.contract"])
    assert {"AttentionRequest", "BackendInfo", "Provider", "Row", "row", "Range"} < set(named["polyattn.contract"])
    assert {"FlashAttentionKernels", "append_new_kv", "empty_result", "load"} < set(named["polyattn.adapters"])
    assert set(PROMISED["request"]) >= {"family", "causal", "sinks", "lse", "save_kv_cache"}
    assert named["polyattn.contract"]["API_VERSION"] == {"is": "value", "value": "2"}


def test_every_option_of_the_request_is_off_unless_asked_for() -> None:
    """So a package that is given a plain request is never given what it does not know."""
    plain = AttentionRequest()
    assert not [f.name for f in request_fields() if f.kind == "option" and not f.is_off(plain)]


def edit(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Today's contract with one change."""
    made = copy.deepcopy(surface())
    change(made)
    return made


def export(made: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(names[name] for names in made["exports"].values() if name in names)
    return found


def arguments(made: dict[str, Any], name: str, member: str = "") -> list[list[str]]:
    thing = export(made, name)
    found: list[list[str]] = (thing["members"][member] if member else thing)["call"]["arguments"]
    return found


def hooks(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = export(made, "PolyattnSpecs")["members"]
    return found


def index(rows: list[list[str]], name: str) -> int:
    return next(i for i, row in enumerate(rows) if row[0] == name)


def rename(rows: list[list[str]], name: str) -> None:
    rows[index(rows, name)][0] = f"{name}_"


def swap(rows: list[list[str]]) -> None:
    rows[0], rows[1] = rows[1], rows[0]


def default(rows: list[list[str]], name: str, value: str) -> None:
    rows[index(rows, name)][2] = value


NEW = ["new", "keyword", "None"]
GROWS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda c: None,
    "a record": lambda c: c["exports"]["polyattn.contract"].update(Later=export(c, "Provider")),
    "a hook": lambda c: hooks(c).update(polyattn_later=hooks(c)["polyattn_load_forward"]),
    "a field of a record, last": lambda c: arguments(c, "BackendInfo").append(["new", "positional", "()"]),
    "an attribute": lambda c: export(c, "BackendInfo")["members"].update(new="attribute"),
    "a keyword of a forward": lambda c: arguments(c, "DenseForward").insert(3, NEW),
    "an option of the request": lambda c: (
        arguments(c, "AttentionRequest").insert(5, NEW),
        c["request"].update(new={"judged": "option", "off": "default"}),
    ),
    "a word": lambda c: export(c, "Family")["words"].append("later"),
    "a version": lambda c: export(c, "API_VERSION").update(value="3"),
    "an argument of a function": lambda c: arguments(c, "judge").append(NEW),
}


@pytest.mark.parametrize("change", GROWS.values(), ids=GROWS)
def test_it_may_grow(change: Callable[[dict[str, Any]], Any]) -> None:
    assert not broken(surface(), edit(change))


BREAKS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a record goes": (lambda c: c["exports"]["polyattn.contract"].pop("Alias"), "polyattn.contract.Alias is gone"),
    "a hook goes": (lambda c: hooks(c).pop("polyattn_load_forward"), "PolyattnSpecs.polyattn_load_forward is gone"),
    "hooks change places": (
        lambda c: hooks(c).update(polyattn_register_platforms=hooks(c).pop("polyattn_register_platforms")),
        "the hooks are called in another order",
    ),
    "a hook gains an argument": (
        lambda c: arguments(c, "PolyattnSpecs", "polyattn_report_capability").append(["new", "positional", "None"]),
        "polyattn_report_capability: the new argument new",
    ),
    "a hook's argument has another name": (
        lambda c: rename(arguments(c, "PolyattnSpecs", "polyattn_load_forward"), "provider"),
        "polyattn_load_forward: the argument provider is gone",
    ),
    "a hook returns something else": (
        lambda c: hooks(c)["polyattn_load_forward"]["call"].update(returns="int"),
        "polyattn_load_forward returns int, it was Bound | None",
    ),
    "a field goes": (
        lambda c: arguments(c, "Provider").pop(index(arguments(c, "Provider"), "requires")),
        "Provider: the argument requires is gone",
    ),
    "an attribute goes": (lambda c: export(c, "BackendInfo")["members"].pop("id"), "BackendInfo.id is gone"),
    "fields change places": (
        lambda c: swap(arguments(c, "BackendInfo")),
        "BackendInfo: the positional arguments are platform, name,",
    ),
    "a field comes in between": (
        lambda c: arguments(c, "BackendInfo").insert(4, ["new", "positional", "None"]),
        "they were name, platform, providers, summary, priority",
    ),
    "a field is new and required": (
        lambda c: arguments(c, "BackendInfo").append(["new", "positional", REQUIRED]),
        "BackendInfo: the new argument new is not one that older packages can do without",
    ),
    "another default": (
        lambda c: default(arguments(c, "BackendInfo"), "priority", "5"),
        "BackendInfo: the argument priority is positional 5, it was positional 0",
    ),
    "a forward's argument becomes keyword-only": (
        lambda c: arguments(c, "DenseForward").__setitem__(1, ["key", "keyword", REQUIRED]),
        "DenseForward: the argument key is keyword required, it was positional required",
    ),
    "a forward gains a positional argument": (
        lambda c: arguments(c, "DenseForward").insert(3, ["new", "positional", "None"]),
        "DenseForward: the new argument new",
    ),
    "a forward gains a required keyword": (
        lambda c: arguments(c, "VarlenForward").append(["new", "keyword", REQUIRED]),
        "VarlenForward: the new argument new",
    ),
    "a backward's argument goes": (
        lambda c: arguments(c, "DenseBackward").pop(index(arguments(c, "DenseBackward"), "lse")),
        "DenseBackward: the argument lse is gone",
    ),
    "a request field has another kind": (
        lambda c: c["request"].update(softcap={"judged": "context", "off": "default"}),
        "AttentionRequest.softcap is judged as",
    ),
    "a request field has another off value": (
        lambda c: c["request"]["kv_layout"].update(off="lambda r: True"),
        "AttentionRequest.kv_layout is judged as",
    ),
    "a request field has another default": (
        lambda c: default(arguments(c, "AttentionRequest"), "causal", "'bottom_right'"),
        "AttentionRequest: the argument causal is keyword 'bottom_right', it was keyword 'none'",
    ),
    "a request field goes": (
        lambda c: rename(arguments(c, "AttentionRequest"), "sinks"),
        "AttentionRequest: the argument sinks is gone",
    ),
    "a request field is new and required": (
        lambda c: c["request"].update(new={"judged": REQUIRED, "off": "default"}),
        "AttentionRequest.new is new and required: no row has it",
    ),
    "a word goes": (lambda c: export(c, "Phase")["words"].remove("decode"), "Phase: the word 'decode' is gone"),
    "the version falls": (lambda c: export(c, "API_VERSION").update(value="0"), "API_VERSION is 0, it was 2"),
    "the group of entry points": (
        lambda c: export(c, "ENTRY_POINT_GROUP").update(value="'other'"),
        "ENTRY_POINT_GROUP is 'other', it was 'polyattn.backends'",
    ),
    "a helper of adapters goes": (
        lambda c: c["exports"]["polyattn.adapters"].pop("align16"),
        "polyattn.adapters.align16 is gone",
    ),
    "a helper of adapters is called otherwise": (
        lambda c: rename(arguments(c, "append_new_kv"), "tables"),
        "append_new_kv: the argument tables is gone",
    ),
    "a function becomes a class": (
        lambda c: export(c, "row").update({"is": "class"}),
        "polyattn.contract.row is a class, it was a function",
    ),
}


@pytest.mark.parametrize("change, sentence", BREAKS.values(), ids=BREAKS)
def test_it_may_not_break(change: Callable[[dict[str, Any]], Any], sentence: str) -> None:
    found = broken(surface(), edit(change))
    assert [s for s in found if sentence in s], found
    assert len(found) <= 2, "one mistake, told once or from both sides"


def test_additions_are_found() -> None:
    grown = edit(GROWS["an option of the request"])
    assert list(unpromised(surface(), surface())) == []
    assert list(unpromised(surface(), grown)) == [
        "exports.polyattn.contract.AttentionRequest.call.arguments",
        "request.new",
    ]


def promise() -> int:
    """Append today's additions to the snapshot; 1 and the reasons when it would take a promise back."""
    now = surface()
    if PROMISED and (reasons := broken(PROMISED, now)):
        print(*reasons, sep="\n", file=sys.stderr)
        return 1
    print(*(unpromised(PROMISED, now) if PROMISED else ["everything"]), sep="\n")
    text = re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", json.dumps(now, indent=1))
    assert json.loads(text) == now, "an argument to a line changes nothing but the looks"
    SNAPSHOT.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(promise())
