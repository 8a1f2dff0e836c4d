"""`--assume-platform`: what it means and what it says when it is wrong."""

from __future__ import annotations

import pytest

from polyattn.errors import ConfigError
from polyattn.registry.platforms import CORE_PLATFORMS, CPU_FEATURES, parse_platform


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("cuda", ("cuda", "", (), ())),
        ("cuda:sm90", ("cuda", "sm90", (), ())),
        ("cuda:sm90@12.3", ("cuda", "sm90", (12, 3), ())),
        ("cuda:sm120@13.0.1", ("cuda", "sm120", (13, 0, 1), ())),
        ("cuda@12.3", ("cuda", "", (12, 3), ())),
        (" CUDA:SM90 ", ("cuda", "sm90", (), ())),
        ("rocm:gfx942", ("rocm", "gfx942", (), ())),
        ("rocm:gfx90a@6.4", ("rocm", "gfx90a", (6, 4), ())),
        ("rocm:gfx1201", ("rocm", "gfx1201", (), ())),
        ("npu", ("npu", "", (), ())),
        ("npu:ascend910b@8.1", ("npu", "ascend910b", (8, 1), ())),
        ("npu:ascend910_93", ("npu", "ascend910_93", (), ())),
        ("xpu", ("xpu", "", (), ())),
        ("xpu:bmg", ("xpu", "bmg", (), ("xmx",))),
        ("xpu:pvc", ("xpu", "pvc", (), ("xmx",))),
        ("xpu:acm", ("xpu", "acm", (), ())),
        ("musa:mp31", ("musa", "mp31", (), ())),
        ("mps", ("mps", "", (), ())),
        ("cpu", ("cpu", "", (), ())),
        ("cpu:amx", ("cpu", "", (), ("amx",))),
        ("cpu:amx+avx512+amx", ("cpu", "", (), ("amx", "avx512"))),
    ],
)
def test_meaning(text: str, wanted: tuple[object, ...]) -> None:
    platform, arch, toolkit, features = parse_platform(text)
    assert (platform, arch, toolkit, features) == wanted


def test_a_plugins_platform() -> None:
    assert parse_platform("acme:a1.b@2", ("cuda", "acme")) == ("acme", "a1.b", (2,), ())


def test_the_examples_of_every_platform_parse() -> None:
    for info in CORE_PLATFORMS:
        for arch in info.archs:
            assert parse_platform(f"{info.name}:{arch}").arch == arch
    for feature in CPU_FEATURES:
        assert parse_platform(f"cpu:{feature}").features == (feature,)


SYNTAX = (
    "is not a platform: give PLATFORM, PLATFORM:ARCH or PLATFORM:ARCH@TOOLKIT, such as cuda:sm90@12.3, "
    "and cpu:FEATURE+FEATURE"
)
CUDA = "cuda architectures look like sm80, sm86, sm89, sm90, sm100, sm120."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cude:sm90", "'cude:sm90': 'cude' is not a platform. Did you mean 'cuda'? Known: cuda, rocm, xpu, musa, npu,"),
        ("cude", "'cude' is not a platform. Did you mean 'cuda'? Known: cuda, rocm,"),
        ("", "'' is not a platform. Known: cuda, rocm, xpu, musa, npu, mps, cpu; an architecture may follow, as in"),
        ("acme", "'acme' is not a platform."),
        ("cuda:", f"'cuda:' {SYNTAX}"),
        ("cuda:sm90@", f"'cuda:sm90@' {SYNTAX}"),
        ("cuda:sm90@twelve", f"'cuda:sm90@twelve' {SYNTAX}"),
        ("cuda:sm90@12.", f"'cuda:sm90@12.' {SYNTAX}"),
        ("cuda:sm_90", f"'cuda:sm_90': 'sm_90' is not an architecture of cuda; {CUDA} Did you mean 'cuda:sm90'?"),
        ("cuda:9.0", f"'cuda:9.0': '9.0' is not an architecture of cuda; {CUDA} Did you mean 'cuda:sm90'?"),
        ("cuda:sm90a", f"'cuda:sm90a': 'sm90a' is not an architecture of cuda; {CUDA} Did you mean 'cuda:sm90'?"),
        ("cuda:120", f"'cuda:120': '120' is not an architecture of cuda; {CUDA} Did you mean 'cuda:sm120'?"),
        ("cuda:gfx942", f"'cuda:gfx942': 'gfx942' is not an architecture of cuda; {CUDA}"),
        (
            "rocm:942",
            (
                "'rocm:942': '942' is not an architecture of rocm; rocm architectures look like gfx90a, gfx942, "
                "gfx950, gfx1100, gfx1201. Did you mean 'rocm:gfx942'?"
            ),
        ),
        ("rocm:gfx90a:xnack+", "Did you mean 'rocm:gfx90a'?"),
        ("xpu:0xe20b", "'0xe20b' is not an architecture of xpu; xpu architectures look like pvc, bmg."),
        ("musa:s4000", "'s4000' is not an architecture of musa; musa architectures look like mp22, mp31."),
        ("musa:31", "Did you mean 'musa:mp31'?"),
        ("npu:910b", "architectures look like ascend910b, ascend910_93, ascend310p. Did you mean 'npu:ascend910b'?"),
        ("npu:910_93", "Did you mean 'npu:ascend910_93'?"),
        ("mps:m3", "'mps:m3': mps has no architectures or toolkits; give mps"),
        ("mps@15", "'mps@15': mps has no architectures or toolkits; give mps"),
        ("cpu:", f"'cpu:' {SYNTAX}"),
        ("cpu:amx@2", "'cpu:amx@2': cpu has no toolkit; give cpu or cpu:FEATURE+FEATURE, such as cpu:amx+avx512"),
        ("cpu:avx51", "'cpu:avx51': 'avx51' is not a CPU feature. Did you mean 'avx512'? Known: amx, avx512, sve."),
        ("cpu:amx+", "'cpu:amx+': '' is not a CPU feature. Known: amx, avx512, sve."),
    ],
)
def test_messages(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_platform(text)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["cuda:h100", "cuda:b200", "rocm:mi300x", "musa:s4000", "npu:910x"])
def test_a_product_name_is_not_taken_for_a_number(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_platform(text)
    assert "Did you mean" not in str(error.value)


def test_a_plugins_platform_with_a_malformed_architecture() -> None:
    with pytest.raises(ConfigError) as error:
        parse_platform("acme:a b", ("acme",))
    assert str(error.value) == "'acme:a b': 'a b' is not an architecture of acme."
