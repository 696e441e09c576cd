"""Data: reading rows of any accepted shape, and the order in which they are admitted."""
