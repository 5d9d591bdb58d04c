"""Messages on their way, to be waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..messages import MessageSpec, decode_header

__all__ = ["ConnectionLostError", "DescribedTransfer", "LateTransfer", "Transfer"]


class ConnectionLostError(RuntimeError):
    """The transport gave up on a message: its other end is gone, or the connection was aborted."""

    @classmethod
    def of(cls, error: RuntimeError) -> ConnectionLostError:
        """The error for a transport's own one, which is shortened to one line."""
        return cls(str(error).partition("\n")[0])


class Transfer:
    """Tensors on their way to or from another rank, with the handles to wait for. Owns the tensors until then."""

    __slots__ = ("_works", "spec", "tensors")

    def __init__(self, spec: MessageSpec | None, tensors: list[torch.Tensor], works: Sequence[Any] = ()) -> None:
        self.spec = spec
        """The spec of the expected message; None where it is not needed (sends, gradients)."""
        self.tensors = tensors
        self._works = works

    def wait(self) -> list[torch.Tensor]:
        """Wait until the tensors may be used: the host on CPU, only the current stream on a device.

        Raises:
            ConnectionLostError: the message will not come.
        """
        works, self._works = self._works, ()  # a second wait on a gloo work would hang
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise ConnectionLostError.of(error) from error
        return self.tensors


class LateTransfer(Transfer):
    """A message whose receive is posted only when it is waited for.

    Args:
        post: posts the receive.
    """

    __slots__ = ("_post",)

    def __init__(self, post: Callable[[], Transfer]) -> None:
        super().__init__(None, [])
        self._post = post

    def wait(self) -> list[torch.Tensor]:
        posted = self._post()
        self.spec, self.tensors = posted.spec, posted.wait()
        return self.tensors


class DescribedTransfer(Transfer):
    """A message whose receive was posted by its sizes, and whose header says what else it is."""

    __slots__ = ("_header", "_message")

    def __init__(self, header: Transfer, message: Transfer) -> None:
        super().__init__(None, [])
        self._header, self._message = header, message

    def wait(self) -> list[torch.Tensor]:
        self.spec = decode_header(*self._header.wait())
        self.tensors = self._message.wait()
        return self.tensors
