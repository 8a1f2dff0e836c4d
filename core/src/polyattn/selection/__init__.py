"""Who serves a request, and who said so: configuration, overrides, measurements, rules. Imports no torch."""
