"""Every form of --attention-backend-config, and what each says when it is wrong."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from polyattn.errors import ConfigError
from polyattn.selection.config import parse_backend_config, read_config_file

FILES = {
    "options.json": '{"sparsity": 0.5, "list": [1, [2]], "a": {"b": null}}',
    "options.yaml": "sparsity: 0.5\nlist: [1, [2]]\na: {b: null}\n",
    "options.yml": "sparsity: 5e-1  # no dot: YAML 1.1 would read a string\nlist:\n  - 1\n  - [2]\na:\n  b:\n",
}
WANTED = {"sparsity": 0.5, "list": [1, [2]], "a": {"b": None}}


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    assert parse_backend_config(str(path)) == WANTED
    assert parse_backend_config(path) == WANTED
    assert parse_backend_config(f"  {path} ") == WANTED


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text("sparsity = 0.5\nlist = [1, [2]]\na.b = true\n")
    assert parse_backend_config(path) == {"sparsity": 0.5, "list": [1, [2]], "a": {"b": True}}


def test_an_empty_yaml_or_toml_file_is_an_empty_mapping(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.toml"):
        (tmp_path / name).write_text("# nothing yet\n")
        assert read_config_file(tmp_path / name) == {}


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + b'{"a": 1}')
    assert read_config_file(tmp_path / "a.json") == {"a": 1}


def test_a_path_relative_to_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert parse_backend_config("~/a.json") == {"a": 1}


def test_json_text_and_mapping() -> None:
    assert parse_backend_config(' {"sparsity": 0.5, "a": {"b": [true, null, -1e-3]}}') == {
        "sparsity": 0.5,
        "a": {"b": [True, None, -1e-3]},
    }
    given_options = {"sparsity": 0.5}
    read = parse_backend_config(given_options)
    assert read == given_options
    assert read is not given_options


def test_pairs_that_end_like_a_path_are_pairs() -> None:
    assert parse_backend_config("mask_strategy_file_path=/abs/path/to/mask_strategy.json") == {
        "mask_strategy_file_path": "/abs/path/to/mask_strategy.json"
    }


def test_pairs_of_backends_by_all_their_names() -> None:
    found = parse_backend_config("fa.x=1,fa@cuda.x=2,fa/fa4.x=3,fa/fa4@cuda.y.z=4")
    assert found == {"fa": {"x": 1}, "fa@cuda": {"x": 2}, "fa/fa4": {"x": 3}, "fa/fa4@cuda": {"y": {"z": 4}}}
    for wrong in ("/fa4.x=1", "fa/.x=1", "fa@.x=1", "fa//b.x=1"):
        with pytest.raises(ConfigError, match="is not a name"):
            parse_backend_config(wrong)


def test_a_path_that_holds_an_equals_sign(tmp_path: Path) -> None:
    folder = tmp_path / "run=3"
    folder.mkdir()
    (folder / "a.json").write_text('{"a": 1}')
    assert parse_backend_config(str(folder / "a.json")) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-15", -15),
        ("+3", 3),
        ("0.5", 0.5),
        ("-.5", -0.5),
        ("2.", 2.0),
        ("1e-3", 1e-3),
        ("-2.5E+4", -2.5e4),
        ("true", True),
        ("False", False),
        ("null", None),
        ("None", None),
        ("none", "none"),
        ("threshold", "threshold"),
        ("1.2.3", "1.2.3"),
        ("1_000", "1_000"),
        ("inf", "inf"),
        ("[]", []),
        ("[1,2]", [1, 2]),
        ("[ -1 , 2.5,x y , true ]", [-1, 2.5, "x y", True]),
        ("[[1,2],[],['a,b']]", [[1, 2], [], ["a,b"]]),
        ('""', ""),
        ("''", ""),
        ('"15"', "15"),
        ('"a,b=\\n\\u0041"', "a,b=\nA"),
        ("'C:\\temp, \"x\"'", 'C:\\temp, "x"'),
        ("a=b=c", "a=b=c"),
        ("/a[1].json", "/a[1].json"),
        ("it's", "it's"),
        ("  spaced out  ", "spaced out"),
    ],
)
def test_values_of_pairs(text: str, value: Any) -> None:
    read = parse_backend_config(f"first=1,key={text},last=x")
    assert read == {"first": 1, "key": value, "last": "x"}
    assert type(read["key"]) is type(value)


def test_keys_of_pairs() -> None:
    assert parse_backend_config("a.b=1, a.c.d=2 ,\n e-f=3,_g = 4") == {
        "a": {"b": 1, "c": {"d": 2}},
        "e-f": 3,
        "_g": 4,
    }


FORMS = "a path ending in .json, .yaml, .yml or .toml, a JSON object '{...}', or key=value pairs separated by commas"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"is empty; give {FORMS}"),
        ("  ", f"is empty; give {FORMS}"),
        ("[1, 2]", f"'[1, 2]' is a list; give {FORMS}"),
        ("sparsity", f"'sparsity' is not key=value; give {FORMS} (character 1 of 'sparsity')"),
        ("a=1,b", f"'b' is not key=value; give {FORMS} (character 5 of 'a=1,b')"),
        ("a=1,,b=2", "an entry is empty; entries look like key=value, with one comma between two (character 5 of"),
        ("a=1,", "an entry is empty; entries look like key=value, with one comma between two (character 5 of"),
        ("9a=1", "the key '9a' is not a name; keys are letters, digits, '_' and '-', with '.' to nest (character 1 of"),
        (
            "a=1, .b=1",
            "the key '.b' is not a name; keys are letters, digits, '_' and '-', with '.' to nest (character 6",
        ),
        ("a=1,a=2", "the key 'a' is given twice (character 5 of 'a=1,a=2')"),
        ("a=1,a.b=2", "'a.b' nests into 'a', which already has a value (character 5 of"),
        ("a.b=1,a=2", "the key 'a' is given twice (character 7 of"),
        (
            "a=",
            'the value is empty; write "" for an empty string, null for no value, [] for an empty list (character 3',
        ),
        ("a=,b=1", "the value is empty"),
        ("a=[1,,2]", "a list entry is empty"),
        ("a=[1,2", "a list is not closed; ']' is missing (character 3 of"),
        ("a=" + "[" * 20, "lists are nested more than 16 deep (character 19 of"),
        ("a='x", "a quoted string is not closed; ' is missing (character 3 of"),
        (
            'a="x',
            "a quoted string is wrong: Unterminated string starting at; single quotes need no escapes (character 3",
        ),
        ('a="x"y,b=1', "unexpected 'y' after 'x'; a comma ends a value (character 6 of"),
        (
            "a={b:1}",
            "a value cannot begin with '{'; nest with a.b=1, or give the whole configuration as JSON (character 3",
        ),
        ("a=1e999", "'1e999' is too large a number; quote it if it is text (character 3 of"),
        ("a=" + "9" * 5000, "is too large a number; quote it if it is text (character 3 of"),
        (
            '{"a": 1,}',
            "is not JSON: ",
        ),
        ('{"a": 1', "is not JSON: Expecting ',' delimiter at line 1 column 8, near the end; JSON looks like"),
        ("{'a': 1}", "is not JSON: Expecting property name enclosed in double quotes at line 1 column 2, near"),
        ('{"a": NaN}', "NaN is not a JSON value; write a finite number or null"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is given twice"),
        ('{"a": ' + "[" * 100_000, "is nested too deeply"),
    ],
)
def test_messages(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_backend_config(text, where="HERE")
    assert str(error.value).startswith("HERE")
    assert message in str(error.value)


@pytest.mark.skipif(not hasattr(sys, "get_int_max_str_digits"), reason="this Python has no limit on digits")
def test_an_integer_beyond_pythons_limit_in_json() -> None:
    with pytest.raises(ConfigError, match="HERE: Exceeds the limit"):
        parse_backend_config('{"a": ' + "9" * 5000 + "}", where="HERE")


def test_a_value_of_another_type() -> None:
    with pytest.raises(ConfigError, match=r"^HERE: 3 is a int; give a path"):
        parse_backend_config(3, where="HERE")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^HERE: the key 1 is a int; keys are strings"):
        parse_backend_config({"a": [{1: 2}]}, where="HERE")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.ini", b"", "has the suffix '.ini'; allowed: .json, .yaml, .yml, .toml"),
        (
            "a.json",
            b'{\n  "a": 1,\n  b: 2}',
            "is not JSON: Expecting property name enclosed in double quotes at line 3",
        ),
        ("a.json", b"[1]", "holds [1], a list; it must hold a mapping of options"),
        ("a.json", b"null", "holds None, a NoneType; it must hold a mapping of options"),
        ("a.json", b'{"a": \xff}', "is not UTF-8 at byte 6; save it as UTF-8"),
        ("a.json", b'{"a": ' + b"[" * 100_000, "is nested too deeply"),
        ("a.yaml", b"a: 1\nb: [1\n", "is not YAML: "),
        ("a.yaml", b"a: 1\n  b: 2\n", "is not YAML: mapping values are not allowed here at line 2 column 4"),
        ("a.yaml", b"- 1\n", "holds [1], a list; it must hold a mapping of options"),
        ("a.yaml", b"a: 1\nb: 2\na: 3\n", "is not YAML: the key 'a' is given twice at line 3 column 1"),
        ("a.yaml", b"a: {1: 2}\n", "the key 1 is a int; keys are strings"),
        ("a.yaml", b"a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor for the tag"),
        ("a.yaml", b"a: 2026-13-45\n", "is not YAML: a value does not fit its type"),
        ("a.yaml", b"a: !!bool x\n", "is not YAML: a value does not fit its type"),
        ("a.yaml", b"? [a]\n: 1\n", "is not YAML: found unhashable key at line 1"),
        ("a.yaml", b"a: !!map 3\n", "is not YAML: expected a mapping node, but found scalar"),
        ("a.toml", b"a = 1\nb = \n", "is not TOML: Invalid value (at line 2, column 5)"),
        ("a.toml", b"a = 1\na = 2\n", "is not TOML: Cannot overwrite a value (at line 2"),
    ],
)
def test_messages_of_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        parse_backend_config(path, where="HERE")
    assert str(error.value).startswith(f"HERE: {path}")
    assert message in str(error.value)


@pytest.mark.parametrize(("name", "start"), [("a.yaml", "a: "), ("a.toml", "a = ")])
def test_a_file_nested_beyond_reason(tmp_path: Path, name: str, start: str) -> None:
    depth = 5 * sys.getrecursionlimit()
    (tmp_path / name).write_text(start + "[" * depth + "]" * depth)
    with pytest.raises(ConfigError, match=f"{name} is nested too deeply$"):
        read_config_file(tmp_path / name)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    for text, message in {
        "missing.json": "missing.json does not exist; relative paths start at the working directory",
        str(tmp_path / "missing.json"): "missing.json does not exist",
        "./missing": "missing does not exist; name a file with one of: .json, .yaml, .yml, .toml",
        "folder.json": "'folder.json' cannot be read: ",
        "nul\0.json": "cannot be read: ",
    }.items():
        with pytest.raises(ConfigError, match=r"^HERE: ") as error:
            parse_backend_config(text, where="HERE")
        assert message in str(error.value)


def test_yaml_aliases_cannot_explode(tmp_path: Path) -> None:
    lines = ["l0: &l0 [x, x]"] + [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 30)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="holds more than 50000 values with its aliases written out"):
        read_config_file(tmp_path / "bomb.yaml")
    (tmp_path / "list.yaml").write_text("- &a [x, x]\n- &b [*a, *a]\n")
    with pytest.raises(ConfigError, match="it must hold a mapping"):
        read_config_file(tmp_path / "list.yaml")


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    real = importlib.import_module

    def fake(name: str, package: str | None = None) -> ModuleType:
        if name in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", fake)


def test_yaml_without_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text("a: 1\n")
    without(monkeypatch, "yaml")
    with pytest.raises(ConfigError, match=r"YAML needs pyyaml: pip install 'polyattn\[cli\]', or write it as JSON"):
        read_config_file(tmp_path / "a.yaml")


def test_toml_without_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.toml").write_text("a = 1\n")
    without(monkeypatch, "tomllib", "tomli")
    with pytest.raises(ConfigError, match=r"TOML on Python 3\.10 needs tomli: pip install tomli, or write it as JSON"):
        read_config_file(tmp_path / "a.toml")


# What is written in one form and read back is what was meant, for any options.

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.text("[]{}'\",=\\ 0123e.-", max_size=8),
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=6)
options = st.recursive(
    st.dictionaries(names, values, min_size=1, max_size=3),
    lambda inner: st.dictionaries(names, st.one_of(values, inner), min_size=1, max_size=3),
    max_leaves=4,
)


def as_value(value: Any, quotes: st.DataObject) -> str:
    if isinstance(value, list):
        return "[" + ",".join(as_value(item, quotes) for item in value) + "]"
    if isinstance(value, str):
        if "'" not in value and quotes.draw(st.booleans()):
            return f"'{value}'"
        return json.dumps(value, ensure_ascii=quotes.draw(st.booleans()))
    return json.dumps(value)


def as_pairs(tree: dict[str, Any], quotes: st.DataObject, prefix: str = "") -> list[str]:
    pairs: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            pairs += as_pairs(value, quotes, f"{prefix}{key}.")
        else:
            pairs.append(f"{prefix}{key}={as_value(value, quotes)}")
    return pairs


@settings(max_examples=100, deadline=None)
@given(options, st.data())
def test_pairs_round_trip(tree: dict[str, Any], quotes: st.DataObject) -> None:
    assert parse_backend_config(", ".join(as_pairs(tree, quotes))) == tree


class Quoted(yaml.SafeDumper):
    """Quotes every string: unquoted, pyyaml reads 0E0 as a string where YAML 1.2, and polyattn, reads a number."""


Quoted.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(options)
def test_json_and_yaml_round_trip(tmp_path: Path, tree: dict[str, Any]) -> None:
    assert parse_backend_config(json.dumps(tree)) == tree
    (tmp_path / "a.yaml").write_text(yaml.dump(tree, Dumper=Quoted), encoding="utf-8")
    assert read_config_file(tmp_path / "a.yaml") == tree


@settings(max_examples=150, deadline=None)
@example("~\0")
@example("~\0.json")
@given(st.one_of(st.text(max_size=30), st.text("ab=,[]{}'\".1e- \\", max_size=20)))
def test_any_text_is_options_or_a_config_error(text: str) -> None:
    try:
        assert isinstance(parse_backend_config(text), dict)
    except ConfigError as error:
        assert str(error).startswith("--attention-backend-config")  # noqa: PT017 - both ends are fine


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.text("ab:-? []{}&*!<'\"\n0123.", max_size=30))
def test_any_yaml_is_options_or_a_config_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    try:
        assert isinstance(read_config_file(tmp_path / "a.yaml"), dict)
    except ConfigError as error:
        assert "a.yaml" in str(error)  # noqa: PT017 - both ends are fine
