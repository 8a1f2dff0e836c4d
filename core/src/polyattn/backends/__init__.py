"""Core's own backends: a plugin like any other. `plugin` holds the records, one file per backend the code."""
