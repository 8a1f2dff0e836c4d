"""What a call means (docs/semantics.md), as code that knows no backend and no plugin."""
