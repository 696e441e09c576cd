"""Rewards: loading a user's scorer by its signature, and verifiers that ship with Cauce."""
