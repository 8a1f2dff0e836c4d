"""Adapters tested without their device: vendor libraries in plain torch, and the conformance kit run over them.

An emulator is a `Library` that holds the modules an adapter would import. Each of its functions has the vendor's own
signature (`Signatures`: a file made from the published package by `python -m polyattn.testing.signatures`), takes a
call only if it binds to it, does what the vendor documents, and is recorded.

    SIGNATURES = Signatures(Path(__file__).parent / "signatures.json")

    def library() -> Library:
        lib = Library("acme-attn", "1.2.3", "acme.attn", signatures=SIGNATURES)

        @lib.function("acme.attn", "acme.attn.attend")
        def attend(q, k, v, causal, **_): ...           # every argument by name, defaults applied

        return lib

    TARGET = Emulated("acme", "acme-attn", "cuda:sm90@12.8")      # backend, provider, chip

    @pytest.mark.parametrize("case", TARGET.cases(per_row=12), ids=str)
    def test_conformance(case, monkeypatch):
        TARGET.passes(case, library().install(monkeypatch))

What kernels compute alike is in `arithmetic`, so that an emulator says what its library does otherwise.

For tests only: nothing that serves a call imports it. docs/publish.md has a section on it.
"""

from .emulated import Emulated, OnDevice, device_suites
from .library import Call, Library
from .signing import OTHER, Signatures, signature_of_schema

__all__ = ["OTHER", "Call", "Emulated", "Library", "OnDevice", "Signatures", "device_suites", "signature_of_schema"]
