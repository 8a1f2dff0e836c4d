"""Memory of a serving context: pools, pages, how rows are stored, reuse of prefixes."""
