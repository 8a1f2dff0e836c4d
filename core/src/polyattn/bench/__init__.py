"""`polyattn bench`: every candidate and the libraries beside them, over sheets of problems, checked before it is timed.

A sheet (`sheets`) has rows; a row is a problem (`rows`), measured with polyattn's candidates and with peers (`peers`)
between two looks at the device itself (`running`). Results are kept in a file (`results`), held to bars (`bars`), and
shown as Markdown (`pages`) and as pictures (`plots`).
"""

from __future__ import annotations

from .bars import Bar
from .peers import Peer
from .rows import Row
from .sheets import Family, Sheet

__all__ = ["Bar", "Family", "Peer", "Row", "Sheet"]
