"""The attention backend `template` for polyattn: records in plugin.py, the kernel's adapter in kernel.py."""
