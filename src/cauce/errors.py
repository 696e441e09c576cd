"""Every exception that Cauce raises on purpose.

    CauceError
    |-- RecipeError (ValueError)        a setting is wrong: the text names the field, the value seen and what to set
    |-- DataError (ValueError)          a row or a file cannot be used
    |-- RewardError (RuntimeError)      the reward cannot be loaded, or fails above the stated rate
    |-- ModelError (RuntimeError)       a model cannot be loaded, or fails a probe
    |-- WeightsError (RuntimeError)     published weights are missing, torn or of other names
    |   `-- VersionGoneError            newer ones have taken their place
    |-- JournalError (RuntimeError)     the record is broken, or an operation would break it
    |   `-- FencedError                 another process owns this run
    |-- ResourceError (RuntimeError)    this machine or cluster cannot hold what the recipe asks for
    |-- WorkerError (RuntimeError)      an actor died or hung; the text says which, where and why
    `-- TrainingStopped (RuntimeError)  the run stopped itself: nothing trainable, non-finite numbers, a full disk

All of them take one string, so that they survive pickling between processes.
"""


class CauceError(Exception):
    """Root of Cauce's own errors; the command line prints these without a traceback (exit codes: cli/exit_codes.py)."""


class RecipeError(CauceError, ValueError):
    """A setting is wrong."""


class DataError(CauceError, ValueError):
    """A row or a file cannot be used."""


class RewardError(CauceError, RuntimeError):
    """The reward cannot be loaded, or fails above the stated rate."""


class ModelError(CauceError, RuntimeError):
    """A model cannot be loaded, or fails a probe."""


class CheckpointError(CauceError, RuntimeError):
    """A checkpoint is incomplete, or belongs to another model."""


class WeightsError(CauceError, RuntimeError):
    """Published weights are missing, torn or carry other names."""


class VersionGoneError(WeightsError):
    """A version that was published is no longer kept: newer ones have taken its place."""


class JournalError(CauceError, RuntimeError):
    """The record is broken, or an operation would break it."""


class FencedError(JournalError):
    """Another process owns this run."""


class ResourceError(CauceError, RuntimeError):
    """This machine or cluster cannot hold what the recipe asks for."""


class WorkerError(CauceError, RuntimeError):
    """An actor died or hung."""


class TrainingStopped(CauceError, RuntimeError):
    """The run stopped itself, and says why."""
