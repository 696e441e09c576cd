"""Exit codes: the one place that turns what ended a command into a number.

    0    done
    1    a run failed: it stopped itself, its workers died, its record is damaged or belongs to another process
    2    what was given is wrong - recipe, data, model, reward, or more than this machine has: change it first
    130  stopped by Ctrl-C or SIGTERM; nothing is lost, `cauce resume` goes on

A fault of Cauce itself leaves a traceback and ends with 1 as well.
"""

from cauce.errors import CauceError, DataError, ModelError, RecipeError, ResourceError, RewardError

FAILED = 1
WRONG_INPUT = 2  # as for a misspelt option, which the argument parser refuses by itself
STOPPED = 130  # as shells have it for Ctrl-C


def exit_code(error: CauceError) -> int:
    """The code that a command ends with after this error."""
    is_input = isinstance(error, RecipeError | DataError | ModelError | RewardError | ResourceError)
    return WRONG_INPUT if is_input else FAILED
