"""This room has what every host's room needs, and nothing that only one host knows.

- `hosts.py`: a host's own package, or what to install. `names.py`: names for a backend that a host can say.
- `keywords.py`: what becomes of keywords that no call of polyattn has. `capabilities.py`: why a request is not served.
- `patching.py`: what an install put into a host, and how it comes out again. `reports.py`: who serves which layer.
- `lse.py`: the LSE in the base that a host expects.

A host's room imports from here; no host imports another.
"""
