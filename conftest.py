"""What every test of this repository shares is what a plugin's own tests use: the options and fixtures of the kit."""

pytest_plugins = ["polyattn.testing.plugin"]
