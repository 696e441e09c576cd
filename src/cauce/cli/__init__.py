"""The command line. Each module holds the commands of one kind; `main` puts them together.

Nothing here imports torch, ray or transformers when it is loaded: commands import what they need when they
run, so that `cauce --help` and `cauce doctor` answer at once.
"""
