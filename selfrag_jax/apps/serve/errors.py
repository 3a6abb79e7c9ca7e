"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` with a status."""

import json
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

_TYPE = re.compile(r"str|int|constrained-.*|list\[.*")  # what pydantic calls the types of a union
LONGEST = 500  # characters of a message: a body of a megabyte is not sent back
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class APIError(Exception):
  """A request that is refused, or that failed; the message says what would do."""

  def __init__(
    self,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
  ):
    super().__init__(message)
    self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

  @property
  def body(self) -> dict[str, Any]:
    """The error as JSON."""
    kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
    message = str(self)
    message = message if len(message) <= LONGEST else f"{message[: LONGEST - 3]}..."
    return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

  def response(self) -> Response:
    """The error as a response."""
    return json_response(self.body, self.status, self.headers)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
  """Return a value as a response. Half a surrogate pair, which JSON can spell and UTF-8 cannot, stays an escape."""
  content = json.dumps(value, allow_nan=False, separators=(",", ":"))
  return Response(content, status, dict(headers or {}), media_type="application/json")


def invalid(error: Exception, param: str | None = None) -> APIError:
  """Return a ValueError of the library as an error of the request."""
  return APIError(400, str(error), param=param, code="invalid_value")


def add_handlers(app: FastAPI) -> None:
  """Let an app answer with these errors, whatever goes wrong."""

  @app.exception_handler(APIError)
  async def refused(request: Request, error: APIError) -> Response:
    return error.response()

  @app.exception_handler(RequestValidationError)
  async def malformed(request: Request, error: RequestValidationError) -> Response:
    return _malformed(error).response()

  @app.exception_handler(HTTPException)
  async def unknown(request: Request, error: HTTPException) -> Response:
    told = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    return APIError(error.status_code, told.get(error.status_code, error.detail), headers=error.headers).response()

  @app.exception_handler(Exception)  # a bug: the traceback goes to the log, and nothing of it to the client
  async def failed(request: Request, error: Exception) -> Response:
    return APIError(500, "the server failed; its log says why", code="internal_error").response()


def _malformed(error: RequestValidationError) -> APIError:
  # of a value that may have several types, the deepest error is of the type that it is nearest to
  deepest = max(error.errors(), key=lambda each: len(each["loc"]))
  where, param = _places(deepest)
  of_value = [each for each in error.errors() if len(each["loc"]) == len(deepest["loc"]) and _places(each)[1] == param]
  first = max(of_value, key=lambda each: not each["type"].endswith("_type"))  # or of the type that it has
  if first["type"] == "json_invalid":
    return APIError(400, f"the body is no JSON: {first['ctx']['error']}", code="invalid_json")
  if first["type"] == "extra_forbidden":
    message = f"there is no field {reprlib.repr(where[-1])}; leave it out"
    return APIError(400, message, param=param, code="unknown_field")
  if not where and first["type"] in ("missing", "model_attributes_type", "dict_type"):
    message = "the body must be a JSON object, sent as Content-Type: application/json"
    return APIError(400, message, code="invalid_json")
  message = first["msg"].removeprefix("Value error, ")
  return APIError(400, f"{param}: {message}" if param else message, param=param, code="invalid_value")


def _places(error: dict[str, Any]) -> tuple[list[str], str | None]:
  """Return the places of an error in the body, and the name of the value that they lead to."""
  where = [str(place) for place in error["loc"][1:]]
  return where, ".".join(place for place in where if not _TYPE.fullmatch(place))[:100] or None
