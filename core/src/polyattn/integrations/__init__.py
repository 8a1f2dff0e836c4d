"""Hosts that can be taught to call polyattn. One room per host; importing a room imports nothing of its host."""
