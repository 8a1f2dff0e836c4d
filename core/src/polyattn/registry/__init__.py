"""This room knows what is installed: plugins and what they registered, distributions, device kinds, evidence.

This room knows no kernel and makes no choice.
"""
