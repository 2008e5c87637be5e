"""What a client gets instead of an answer: a status and a body in OpenAI's error form, never a traceback."""

from __future__ import annotations

import dataclasses
from typing import Any

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


@dataclasses.dataclass
class RequestError(Exception):
    """A request that is not answered.

    Attributes:
      status: of HTTP.
      message: what was found and what was expected.
      param: the field of the body that it is about.
      headers: of the response.
    """

    status: int
    message: str
    param: str | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The response's JSON body."""
        kind = _TYPES.get(self.status, "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}
