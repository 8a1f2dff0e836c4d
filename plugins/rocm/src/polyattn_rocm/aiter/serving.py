"""The backend `aiter`: which of AITER's entry points serves a request."""

from __future__ import annotations

from typing import ClassVar

from polyattn.contract import AttentionRequest, Bound

from ..records.common import CK_ARCHS, LARGEST_TILE, UNIFIED_PAGES
from .latent import bind_latent
from .mha import bind_mha
from .unified import NEW, OLD, bind_unified

__all__ = ["Aiter", "Aiter017"]


class Aiter:
    """Binds dense, varlen, paged and mla requests to AITER 0.1.20."""

    unified: ClassVar[str] = NEW

    def bind(self, request: AttentionRequest) -> Bound:
        """Raises:
        BackendUnavailableError: the installed build lacks what the request needs.
        """
        if request.family == "mla":
            return bind_latent(request)
        if request.family == "paged" and self._by_unified(request):
            return bind_unified(request, self.unified)
        return bind_mha(request)

    def _by_unified(self, request: AttentionRequest) -> bool:
        """FP8, chips without Composable Kernel, and what it does as well and splits the keys of: but only where free
        slots are no matter, as pages would have to be copied for it."""
        if request.kv_storage != request.dtype or request.arch not in CK_ARCHS:
            return True
        exposed = request.page_size <= LARGEST_TILE or self.unified == OLD
        if exposed and dict(request.options).get("free_slots", "any") != "finite":
            return False
        # A batch decides how keys are split.
        beyond = request.lse or request.window[1] >= 0 or request.s_relation == "more" or request.batch_invariant
        sees_all = request.s_relation != "one" and request.causal == "none"
        return request.page_size in UNIFIED_PAGES and request.same_dims and not (beyond or sees_all)


class Aiter017(Aiter):
    """Binds them to AITER 0.1.7, the version on PyPI."""

    unified = OLD
