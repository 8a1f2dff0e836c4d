"""The attention backend `template` for polyattn. plugin.py: records, kernel.py: adapter."""
