"""Options against typed schemas, and which backend they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyattn.contract import BackendInfo, ConfigField, Provider
from polyattn.errors import ConfigError
from polyattn.selection.config import check_options, parse_backend_config, resolve_options

STA = (
    ConfigField("mask_strategy_file_path", "path", doc="JSON file with one mask strategy per layer"),
    ConfigField("sta_mode", "str", "STA_inference"),
    ConfigField("skip_time_steps", "int", 15, low=0),
)
VSA = (ConfigField("sparsity", "float", 0.0, low=0.0, high=1.0),)
VMOBA = (
    ConfigField("temporal_chunk_size", "int", low=1),
    ConfigField("temporal_topk", "int", low=1),
    ConfigField("spatial_chunk_size", "list[int]", length=2, low=1, doc="[H, W]"),
    ConfigField("spatial_topk", "int", low=1),
    ConfigField("st_chunk_size", "list[int]", length=3, low=1, doc="[T, H, W]"),
    ConfigField("st_topk", "int", low=1),
    ConfigField("moba_select_mode", "str", "threshold", choices=("threshold", "topk")),
    ConfigField("moba_threshold", "float", 0.25, low=0.0, high=1.0),
    ConfigField("moba_threshold_type", "str", "query_head", choices=("query_head", "overall")),
    ConfigField("first_full_step", "int", 12, low=0),
    ConfigField("first_full_layer", "int", 0, low=0),
    ConfigField("temporal_layer", "int", 1, low=0),
    ConfigField("spatial_layer", "int", 1, low=0),
    ConfigField("st_layer", "int", 1, low=0),
)
SLA = (
    ConfigField("topk_ratio", "float", 0.1, low=0.0, high=1.0),
    ConfigField("feature_map", "str", "softmax", choices=("softmax", "elu", "relu")),
    ConfigField("linear_scope", "str", "all", choices=("all", "complement")),
)
SVG2 = (
    ConfigField("svg2_num_q_centroids", "int", 300, low=1),
    ConfigField("svg2_num_k_centroids", "int", 1000, low=1),
    ConfigField("svg2_top_p_kmeans", "float", 0.9, low=0.0, high=1.0),
    ConfigField("svg2_zero_step_kmeans_init", "bool", False),
    ConfigField("svg2_first_times_fp", "float", 0.2, low=0.0, high=1.0),
)

SEED_ROWS = [
    (
        STA,
        "mask_strategy_file_path=/abs/path/to/mask_strategy.json",
        {
            "mask_strategy_file_path": "/abs/path/to/mask_strategy.json",
            "sta_mode": "STA_inference",
            "skip_time_steps": 15,
        },
    ),
    (
        STA,
        "mask_strategy_file_path=m.json,sta_mode=STA_searching,skip_time_steps=3",
        {"mask_strategy_file_path": "m.json", "sta_mode": "STA_searching", "skip_time_steps": 3},
    ),
    (VSA, '{"sparsity": 0.5}', {"sparsity": 0.5}),
    (VSA, "sparsity=1", {"sparsity": 1.0}),
    (VSA, "{}", {"sparsity": 0.0}),
    (
        VMOBA,
        (
            "temporal_chunk_size=2,temporal_topk=3,spatial_chunk_size=[4,13],spatial_topk=6,"
            "st_chunk_size=[4, 4, 13],st_topk=18"
        ),
        {
            "temporal_chunk_size": 2,
            "temporal_topk": 3,
            "spatial_chunk_size": [4, 13],
            "spatial_topk": 6,
            "st_chunk_size": [4, 4, 13],
            "st_topk": 18,
            "moba_select_mode": "threshold",
            "moba_threshold": 0.25,
            "moba_threshold_type": "query_head",
            "first_full_step": 12,
            "first_full_layer": 0,
            "temporal_layer": 1,
            "spatial_layer": 1,
            "st_layer": 1,
        },
    ),
    (SLA, "topk_ratio=1.5e-1", {"topk_ratio": 0.15, "feature_map": "softmax", "linear_scope": "all"}),
    (
        SVG2,
        "svg2_num_q_centroids=400,svg2_zero_step_kmeans_init=true,svg2_first_times_fp=0.1",
        {
            "svg2_num_q_centroids": 400,
            "svg2_num_k_centroids": 1000,
            "svg2_top_p_kmeans": 0.9,
            "svg2_zero_step_kmeans_init": True,
            "svg2_first_times_fp": 0.1,
        },
    ),
]


@pytest.mark.parametrize(("schema", "text", "wanted"), SEED_ROWS)
def test_the_rows_of_the_seed_pages(schema: tuple[ConfigField, ...], text: str, wanted: dict[str, Any]) -> None:
    checked = check_options(schema, parse_backend_config(text), "HERE")
    assert checked == wanted
    assert {k: type(v) for k, v in checked.items()} == {k: type(v) for k, v in wanted.items()}
    assert list(checked) == [field.name for field in schema]


def test_the_required_options_of_the_seed_pages() -> None:
    with pytest.raises(ConfigError) as error:
        check_options(VMOBA, {}, "HERE")
    assert str(error.value).split("\n") == [
        "HERE: the backend needs the option 'temporal_chunk_size' (int)",
        "HERE: the backend needs the option 'temporal_topk' (int)",
        "HERE: the backend needs the option 'spatial_chunk_size' (list[int]): [H, W]",
        "HERE: the backend needs the option 'spatial_topk' (int)",
        "HERE: the backend needs the option 'st_chunk_size' (list[int]): [T, H, W]",
        "HERE: the backend needs the option 'st_topk' (int)",
    ]


EVERY = (
    ConfigField("flag", "bool", False),
    ConfigField("count", "int", 4, low=1, high=8),
    ConfigField("least", "int", 4, low=-2),
    ConfigField("ratio", "float", 0.5, high=1.0),
    ConfigField("mode", "str", "fast", choices=("fast", "exact")),
    ConfigField("level", "int", 1, choices=(1, 2, 4)),
    ConfigField("file", "path", None),
    ConfigField("pair", "list[int]", (1, 2), length=2, low=0),
    ConfigField("ratios", "list[float]", ()),
    ConfigField("words", "list[str]", ("a",), choices=("a", "b")),
)
BACKEND = BackendInfo("acme", "cuda", (Provider("acme", ()),), "Acme's", config=EVERY)


def test_defaults_are_fresh_lists() -> None:
    first, second = (check_options(EVERY, {}, "HERE") for _ in range(2))
    assert first == {
        "flag": False,
        "count": 4,
        "least": 4,
        "ratio": 0.5,
        "mode": "fast",
        "level": 1,
        "file": None,
        "pair": [1, 2],
        "ratios": [],
        "words": ["a"],
    }
    first["pair"].append(3)
    assert second["pair"] == [1, 2]
    assert EVERY[7].default == (1, 2)


@pytest.mark.parametrize(
    ("options", "checked"),
    [
        ({"flag": True}, True),
        ({"count": 8}, 8),
        ({"least": -2}, -2),
        ({"ratio": 1}, 1.0),
        ({"ratio": -1e300}, -1e300),
        ({"mode": "exact"}, "exact"),
        ({"level": 4}, 4),
        ({"file": None}, None),
        ({"file": Path("a") / "b"}, str(Path("a") / "b")),
        ({"pair": (0, 3)}, [0, 3]),
        ({"ratios": [1, 2.5]}, [1.0, 2.5]),
        ({"words": ["b", "a"]}, ["b", "a"]),
    ],
)
def test_good_values(options: dict[str, Any], checked: Any) -> None:
    (name,) = options
    value = check_options(BACKEND, options, "HERE")[name]
    assert value == checked
    assert type(value) is type(checked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flag": 1}, "flag=1: got int, expected bool (write true or false)"),
        ({"flag": "yes"}, "flag='yes': got str, expected bool (write true or false)"),
        ({"count": True}, "count=True: got bool, expected int"),
        ({"count": 4.0}, "count=4.0: got float, expected int"),
        ({"count": None}, "count=None: got null, expected int"),
        ({"count": 0}, "count=0 is out of bounds, expected 1 to 8"),
        ({"count": 9}, "count=9 is out of bounds, expected 1 to 8"),
        ({"least": -3}, "least=-3 is out of bounds, expected >= -2"),
        ({"ratio": 1.5}, "ratio=1.5 is out of bounds, expected <= 1"),
        ({"ratio": False}, "ratio=False: got bool, expected float"),
        ({"ratio": "0,5"}, "ratio='0,5': got str, expected float"),
        ({"ratio": float("nan")}, "ratio=nan is not a finite number"),
        ({"ratio": float("-inf")}, "ratio=-inf is not a finite number"),
        ({"ratio": -(10**400)}, "is not a finite number"),
        ({"mode": "fats"}, "mode='fats' is not one of 'fast', 'exact'. Did you mean 'fast'?"),
        ({"mode": 1}, "mode=1: got int, expected str (quote it)"),
        ({"level": 3}, "level=3 is not one of 1, 2, 4."),
        ({"file": 7}, "file=7: got int, expected path (quote it)"),
        ({"pair": 4}, "pair=4: got int, expected list[int] (for example [4, 4])"),
        ({"pair": [4]}, "pair=[4] has 1 entry, expected 2"),
        ({"pair": [1, 2, 3]}, "pair=[1, 2, 3] has 3 entries, expected 2"),
        ({"pair": [1, True]}, "pair[1]=True: got bool, expected int"),
        ({"pair": [-1, 0]}, "pair[0]=-1 is out of bounds, expected >= 0"),
        ({"ratios": 0.5}, "ratios=0.5: got float, expected list[float] (for example [0.5, 1.0])"),
        ({"ratios": [0.5, "x"]}, "ratios[1]='x': got str, expected float"),
        ({"words": "a"}, 'words=\'a\': got str, expected list[str] (for example ["a", "b"])'),
        ({"words": ["a", "c"]}, "words[1]='c' is not one of 'a', 'b'."),
    ],
)
def test_bad_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_options(BACKEND, options, "HERE")
    assert str(error.value).startswith("HERE: ")
    assert message in str(error.value)


def test_unknown_options() -> None:
    with pytest.raises(ConfigError) as error:
        check_options(VSA, {"sparsty": 0.5}, "HERE")
    assert str(error.value) == (
        "HERE: the backend has no option 'sparsty'. Did you mean 'sparsity'? Its options: sparsity."
    )
    bare = BackendInfo("bare", "cpu", (), "takes nothing")
    with pytest.raises(ConfigError) as error:
        check_options(bare, {"sparsity": 0.5}, "HERE")
    assert str(error.value) == "HERE: bare@cpu has no option 'sparsity'. It takes none."


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        check_options(STA, {"sta_mod": "x", "skip_time_steps": -1}, "HERE")
    assert str(error.value).split("\n") == [
        (
            "HERE: the backend has no option 'sta_mod'. Did you mean 'sta_mode'? "
            "Its options: mask_strategy_file_path, sta_mode, skip_time_steps."
        ),
        (
            "HERE: the backend needs the option 'mask_strategy_file_path' (path): "
            "JSON file with one mask strategy per layer"
        ),
        "HERE: skip_time_steps=-1 is out of bounds, expected >= 0",
    ]


def test_an_option_may_need_another() -> None:
    schema = (
        ConfigField("file", "path", "", "what is read", needed=(("mode", "read"), ("mode", "merge"))),
        ConfigField("mode", "str", "read", choices=("read", "merge", "write")),
    )
    for options, mode in (({}, "read"), ({"mode": "merge"}, "merge"), ({"mode": "merge", "file": ""}, "merge")):
        with pytest.raises(ConfigError) as error:
            check_options(schema, options, "HERE")
        said = f"HERE: the backend needs the option 'file' (path) where mode={mode!r}: what is read"
        assert str(error.value) == said
    assert check_options(schema, {"mode": "write"}, "HERE") == {"file": "", "mode": "write"}
    assert check_options(schema, {"file": "m"}, "HERE") == {"file": "m", "mode": "read"}
    with pytest.raises(ConfigError, match=r"^HERE: mode='x' is not one of"):
        check_options(schema, {"mode": "x"}, "HERE")


def test_files_are_checked_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "here.json").write_text("{}")
    absent = str(tmp_path / "absent.json")
    assert check_options(BACKEND, {"file": "absent.json"}, "HERE")["file"] == "absent.json"
    for good in ("here.json", str(tmp_path / "here.json"), "~/here.json"):
        assert Path(check_options(BACKEND, {"file": good}, "HERE", check_files=True)["file"]).is_file()
    for bad, message in {
        "absent.json": "file='absent.json' does not exist; relative paths start at the working directory",
        absent: "absent.json' does not exist",
        ".": "file='.' is a directory, expected a file",
    }.items():
        with pytest.raises(ConfigError, match=r"^HERE: file=") as error:
            check_options(BACKEND, {"file": bad}, "HERE", check_files=True)
        assert message in str(error.value)
    assert check_options(BACKEND, {"file": None}, "HERE", check_files=True)["file"] is None


KNOWN = ("sliding_tile_attn", "video_sparse_attn", "flex_attention", "fa")


@pytest.mark.parametrize("known", [None, KNOWN])
def test_flat_options_belong_to_the_selected_backend(known: tuple[str, ...] | None) -> None:
    assert resolve_options({"sparsity": 0.5}, "video_sparse_attn", "HERE", known) == {
        "video_sparse_attn": {"sparsity": 0.5}
    }


@pytest.mark.parametrize("known", [None, KNOWN])
def test_nested_options_apply_per_backend(known: tuple[str, ...] | None) -> None:
    config = {"sliding_tile_attn": {"skip_time_steps": 3}, "flex_attention": {"compile": True}, "fa": {}}
    resolved = resolve_options(config, "fa", "HERE", known)
    assert resolved == config
    assert resolved["fa"] is not config["fa"]
    assert resolve_options({}, None, "HERE", known) == {}


@pytest.mark.parametrize(
    ("config", "backend", "known", "message"),
    [
        (
            {"flex_attention": {"compile": True}, "sparsity": 0.5},
            "fa",
            None,
            (
                "HERE mixes backends (flex_attention) and plain options (sparsity); move the plain options under the "
                "backend they belong to, for example flex_attention.sparsity=..."
            ),
        ),
        ({"fa": 1, "sparsity": 0.5}, "fa", KNOWN, "HERE mixes backends (fa) and plain options (sparsity)"),
        (
            {"sparsity": 0.5},
            None,
            None,
            (
                "HERE gives sparsity, but the same layer of configuration selects no backend; set attention_backend "
                "beside it, or nest the options under a backend's name: BACKEND.sparsity=..."
            ),
        ),
        (
            {"flex_atention": {"compile": True}},
            "fa",
            KNOWN,
            "HERE: 'flex_atention' is not a backend. Did you mean 'flex_attention'?",
        ),
        (
            {"fa": True},
            "fa",
            KNOWN,
            "HERE: 'fa' is a backend, so its value must be a mapping of options, got True",
        ),
    ],
)
def test_options_whose_backend_is_unclear(
    config: dict[str, Any], backend: str | None, known: tuple[str, ...] | None, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_options(config, backend, "HERE", known)
    assert message in str(error.value)
