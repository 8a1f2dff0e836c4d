"""`Keep`: what a layer declares that it keeps, and what no keep says."""

from __future__ import annotations

from typing import Any

import pytest

from polyattn.contract import Keep
from polyattn.errors import InvalidInputError


def test_a_keep_is_data() -> None:
    keep = Keep("state", "request", [4, 16, 16], "float32")  # type: ignore[arg-type]
    assert keep == Keep("state", "request", (4, 16, 16), "float32")
    assert hash(keep) == hash(Keep("state", "request", (4, 16, 16), "float32"))
    assert keep.shape == (4, 16, 16)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": ""}, r"Keep '': name=''; a word such as 'state' is needed"),
        ({"name": 3}, "Keep 3: name=3; a word"),
        ({"per": "step"}, "Keep 'key': per='step'; allowed: 'token', 'request', 'run'"),
        ({"dtype": "bf16"}, "dtype='bf16'; allowed: '', 'float64', .*'bool'"),
        ({"dtype": "flaot32"}, "Did you mean 'float32'"),
        ({"scales": "row"}, "scales='row'; allowed: '', 'tensor', 'head', 'token', 'block16', 'block128'"),
        ({"layout": "DHN"}, "layout='DHN'; allowed: '', 'NHD', 'HND'"),
        ({"shape": (2, 0)}, r"shape=\(2, 0\); whole numbers above 0 are needed"),
        ({"shape": 16}, "shape=16; whole numbers"),
        ({"shape": (2, 3, 4)}, r"shape=\(2, 3, 4\); the row of a token is \(H, D\), or \(D,\)"),
        ({"shape": ()}, r"shape=\(\); the row of a token"),
        ({"shape": (16,), "layout": "HND"}, "layout='HND'; only rows of tokens by head"),
        ({"per": "request", "scales": "head"}, "scales='head'; only rows of tokens"),
        ({"per": "run", "layout": "NHD"}, "layout='NHD'; only rows of tokens"),
    ],
)
def test_what_no_keep_says(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        Keep(**{"name": "key", "per": "token", "shape": (2, 16), **fields})
