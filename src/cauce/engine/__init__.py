"""Engines: what turns prompts into sampled tokens. `native` is Cauce's own; `vllm_engine` drives vLLM."""
