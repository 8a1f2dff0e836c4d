"""The conformance of any installed backend as a test suite:

pytest --pyargs polyattn.testing.suite -p polyattn.testing.plugin --polyattn-backend mine
"""

from .conforming import AttentionConformance


class TestConformance(AttentionConformance):
    """Tests the backend that `--polyattn-backend` names."""
