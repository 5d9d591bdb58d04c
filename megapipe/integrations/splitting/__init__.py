"""Any module, cut into stages by itself.

    chunks = split(model, example, "zbv")  # this rank's PipelineStages

The module's forward is run once on fake tensors. Its units are the modules that it calls: the members of its lists and
Sequentials, and its other children. Each stage then runs the same forward, in which units of other stages return what
has been received from them.
"""

from .cutting import CannotSplitError, split

__all__ = ["CannotSplitError", "split"]
