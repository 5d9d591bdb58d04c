"""The subcommands of `megapipe`."""

from ... import schedules as schedules
from .choose import add_compare, add_tune
from .completion import add_completion
from .fit import add_fit
from .show import add_show
from .status import add_status

__all__ = ["COMMANDS"]

COMMANDS = (add_show, add_compare, add_tune, add_fit, add_status, add_completion)
"""The commands in the order of the help. Each adds its parser, with the function that runs it as the default of
`run`."""
