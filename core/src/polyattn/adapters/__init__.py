"""What adapters of kernels share: loading a library, layouts, pages, empty rows."""

from .loading import Operator, keywords, load

__all__ = ["Operator", "keywords", "load"]
