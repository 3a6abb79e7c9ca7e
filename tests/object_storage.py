"""A local server of object storage that speaks the protocol of Google Cloud Storage, for paths that begin with gs://.

TensorFlow, by which `etils.epath` reads and writes, knows only the address of the real service. So the server is an
HTTPS proxy that answers in its place, and programs run as they do in the cloud: `environment` sets nothing but the
proxy, the certificates to trust, and a token. JSON and media requests only, one process, all in memory.
"""

import email.utils
import http.server
import itertools
import json
import re
import ssl
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import trustme

HOSTS = ("www.googleapis.com", "storage.googleapis.com")
PAGE = 7  # names in one answer to a listing; the service gives up to 1,000


class ObjectStorage:
  """A server on loopback, while its context lasts.

  objects: (bytes, generation) by `bucket/name`. writes, reads: how often each was written and read. read_only:
  beginnings of such names that may not be written. lose: so many answers to requests that change something get lost.
  """

  def __init__(self, folder: Path):
    self.objects: dict[str, tuple[bytes, int]] = {}
    self.writes: Counter[str] = Counter()
    self.reads: Counter[str] = Counter()
    self.read_only: tuple[str, ...] = ()
    self.lose = 0
    self.lock, self.generations = threading.Lock(), itertools.count(int(time.time() * 1e6))
    self.uploads: dict[str, tuple[str, dict[str, str]]] = {}
    authority, self.tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*HOSTS).configure_cert(self.tls)
    self.certificates = folder / "certificates.pem"
    authority.cert_pem.write_to_path(str(self.certificates))
    self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"storage": self}))
    self.server.daemon_threads = True

  @property
  def environment(self) -> dict[str, str]:
    """The variables by which a program finds the server."""
    trusted = str(self.certificates)
    return {
      "https_proxy": f"http://127.0.0.1:{self.server.server_port}",
      "no_proxy": "",
      "CURL_CA_BUNDLE": trusted,  # TensorFlow reads this one
      "TENSORSTORE_CA_BUNDLE": trusted,
      "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
    }

  def names(self, beginning: str) -> list[str]:
    """Return what follows a beginning in the names of objects, without the marks of empty folders."""
    with self.lock:
      return sorted(
        name.removeprefix(beginning) for name in self.objects if name.startswith(beginning) and name[-1] != "/"
      )

  def __enter__(self) -> "ObjectStorage":
    threading.Thread(target=self.server.serve_forever, daemon=True).start()
    return self

  def __exit__(self, *_) -> None:
    self.server.shutdown()
    self.server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
  """One connection: CONNECT, then TLS, then requests."""

  storage: ObjectStorage
  protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

  def log_message(self, *_) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
    pass

  def do_CONNECT(self) -> None:
    if self.path.split(":")[0] not in HOSTS:
      return self._answer(502)
    self.send_response(200)
    self.end_headers()
    try:
      self.connection = self.storage.tls.wrap_socket(self.connection, server_side=True)
    except OSError:  # whoever asked has gone
      self.close_connection = True
      return
    self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", buffering=0)
    self.close_connection = False
    try:
      while not self.close_connection:
        self.handle_one_request()
    except OSError:  # killed programs close no connection
      self.close_connection = True

  def do_GET(self) -> None:
    self._serve()

  do_POST = do_PUT = do_DELETE = do_GET

  def _serve(self) -> None:
    url = urlsplit(self.path)
    query = {name: values[-1] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
    body = self._body()
    with self.storage.lock:
      answer = self._route(self.command, url.path, query, body)
      if self.command != "GET" and self.storage.lose:
        self.storage.lose -= 1
        answer = (503,)
    self._answer(*answer)

  def _body(self) -> bytes:
    if self.headers.get("Transfer-Encoding") != "chunked":
      return self.rfile.read(int(self.headers.get("Content-Length") or 0))
    chunks = []
    while size := int(self.rfile.readline().split(b";")[0], 16):
      chunks.append(self.rfile.read(size))
      self.rfile.readline()
    self.rfile.readline()
    return b"".join(chunks)

  def _route(self, method: str, path: str, query: dict[str, str], body: bytes) -> tuple[Any, ...]:
    """Return the status, the body (bytes, or an object for JSON) and the headers of the answer."""
    if match := re.fullmatch(r"/upload/storage/v1/b/([^/]+)/o", path):
      return self._upload(match[1], query, body)
    if not (match := re.fullmatch(r"/storage/v1/b/([^/]+)(/o)?(?:/([^/]+)(?:/rewriteTo/b/([^/]+)/o/([^/]+))?)?", path)):
      return self._read(unquote(path).lstrip("/"), query) if method == "GET" else (400,)
    bucket, objects, name, to_bucket, to_name = match.groups()
    if name is None:
      return self._list(bucket, query) if objects else (200, {"name": bucket, "location": "here"})
    key = f"{bucket}/{unquote(name)}"
    if method == "GET":
      return self._read(key, query) if query.get("alt") == "media" else self._stat(key)
    if key not in self.storage.objects:
      return (404,)
    if to_name:
      found = self._write(f"{to_bucket}/{unquote(to_name)}", query, self.storage.objects[key][0])
      return (200, {"done": True, "resource": found[1]}) if found[0] == 200 else found
    if refused := self._refused(key, query):
      return refused
    if method == "DELETE":
      del self.storage.objects[key]
      return (204,)
    return (400,)

  def _upload(self, bucket: str, query: dict[str, str], body: bytes) -> tuple[Any, ...]:
    if "upload_id" in query:
      key, conditions = self.storage.uploads[query["upload_id"]]
      span = self.headers.get("Content-Range")  # of an empty object there is none
      if span and len(body) != int(span.rpartition("/")[2]):  # TensorFlow asks how much has come, and sends all again
        return (308,)
      return self._write(key, conditions, body)
    key = f"{bucket}/{query['name']}"
    if query["uploadType"] == "media":
      return self._write(key, query, body)
    if refused := self._refused(key, query):
      return refused
    upload = str(next(self.storage.generations))
    self.storage.uploads[upload] = (key, query)
    return 200, b"", {"Location": f"https://{HOSTS[0]}/upload/storage/v1/b/{bucket}/o?upload_id={upload}"}

  def _refused(self, key: str, query: dict[str, str]) -> tuple[Any, ...]:
    if key.startswith(self.storage.read_only):
      return 403, {"error": {"code": 403, "message": f"no permission to write {key}"}}
    wanted, found = query.get("ifGenerationMatch"), self.storage.objects.get(key, (b"", 0))[1]
    return (412,) if wanted not in (None, str(found)) else ()

  def _write(self, key: str, query: dict[str, str], data: bytes) -> tuple[Any, ...]:
    if refused := self._refused(key, query):
      return refused
    self.storage.objects[key] = data, next(self.storage.generations)
    self.storage.writes[key] += 1
    return self._stat(key)

  def _stat(self, key: str) -> tuple[Any, ...]:
    return (200, self._describe(key)) if key in self.storage.objects else (404,)

  def _describe(self, key: str) -> dict[str, str]:
    data, generation = self.storage.objects[key]
    written = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(generation / 1e6))
    bucket, _, name = key.partition("/")
    return {"bucket": bucket, "name": name, "size": str(len(data)), "generation": str(generation), "updated": written}

  def _read(self, key: str, query: dict[str, str]) -> tuple[Any, ...]:
    if key not in self.storage.objects:
      return (404,)
    self.storage.reads[key] += 1
    data, generation = self.storage.objects[key]
    if query.get("ifGenerationNotMatch") == str(generation):
      return (304,)
    headers, size = {"x-goog-generation": str(generation)}, len(data)
    if not (span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
      return 200, data, headers
    first, last = int(span[1]), min(int(span[2] or size), size - 1)
    if first >= size:
      return (416,)
    return 206, data[first : last + 1], headers | {"Content-Range": f"bytes {first}-{last}/{size}"}

  def _list(self, bucket: str, query: dict[str, str]) -> tuple[Any, ...]:
    beginning, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    found: dict[str, bool] = {}  # names of objects, and beginnings up to the delimiter
    for key in self.storage.objects:
      name = key.removeprefix(f"{bucket}/")
      after, before = name >= query.get("startOffset", ""), not query.get("endOffset") or name < query["endOffset"]
      if name == key or not name.startswith(beginning) or not after or not before:
        continue
      head, mark, _ = name[len(beginning) :].partition(delimiter) if delimiter else (name, "", "")
      found[beginning + head + mark if mark else name] = not mark
    size = min(PAGE, int(query.get("maxResults", PAGE)))
    names = [name for name in sorted(found) if name > query.get("pageToken", "")]
    page = names[:size]
    answer: dict[str, Any] = {
      "items": [self._describe(f"{bucket}/{name}") for name in page if found[name]],
      "prefixes": [name for name in page if not found[name]],
    }
    if len(names) > size:
      answer["nextPageToken"] = page[-1]
    return 200, {name: value for name, value in answer.items() if value}

  def _answer(self, status: int, body: Any = b"", headers: dict[str, str] | None = None) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    self.send_response(status)
    for name, value in (headers or {}).items():
      self.send_header(name, value)
    self.send_header("Content-Type", "application/octet-stream" if isinstance(body, bytes) else "application/json")
    self.send_header("Date", email.utils.formatdate(usegmt=True))
    if status not in (204, 304):
      self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    if status not in (204, 304):
      self.wfile.write(data)
