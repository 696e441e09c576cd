"""Engines: what turns prompts into sampled tokens. `native` is Cauce's own, for CPUs and GPUs."""
