"""The report of a run as one HTML page that needs no network: figures, samples, and what the run was."""
