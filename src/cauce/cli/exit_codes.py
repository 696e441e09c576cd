"""Exit codes: the one place that turns what ended a command into a number.

    0    done
    1    a run failed: it stopped itself, its workers died, its record is damaged
    2    what was given is wrong - recipe, data, model, reward, or more than this machine has: change it first
    3    another process owns the run: do not try again
    130  stopped by Ctrl-C or SIGTERM; nothing is lost, `cauce resume` goes on

A fault of Cauce itself leaves a traceback and ends with 1 as well.
"""

from cauce.errors import CauceError, DataError, FencedError, ModelError, RecipeError, ResourceError, RewardError

FAILED = 1
WRONG_INPUT = 2  # as for a misspelt option, which the argument parser refuses by itself
NOT_OWNER = 3
STOPPED = 130  # as shells have it for Ctrl-C


def exit_code(error: CauceError) -> int:
    """The code that a command ends with after this error."""
    if isinstance(error, FencedError):
        return NOT_OWNER
    is_input = isinstance(error, RecipeError | DataError | ModelError | RewardError | ResourceError)
    return WRONG_INPUT if is_input else FAILED
