"""Environments: what turns rows into prompts and answers into text."""
