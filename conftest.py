"""What every test of this repository shares is what a plugin's own tests use: the options and fixtures of the kit."""

import os

import torch

# Triton reads its switch when it is first imported, by whoever that is: before any test, then.
if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest_plugins = ["polyattn.testing.plugin"]
