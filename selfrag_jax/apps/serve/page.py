"""The web page: the files of the folder `page`, each by its exact name, with a policy that lets nothing else in."""

from pathlib import Path

from fastapi import APIRouter, Response

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = "; ".join(
  [
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data:",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
  ]
)


def page_routes() -> APIRouter:
  """Return the routes of the page. The files are read now: no later request names a path of the disk."""
  router = APIRouter(include_in_schema=False)
  files = {file.name: file.read_bytes() for file in FOLDER.iterdir() if file.suffix in TYPES} if FOLDER.is_dir() else {}

  def add(path: str, name: str) -> None:
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}

    @router.api_route(path, methods=["GET", "HEAD"], name=name)
    async def file() -> Response:
      return Response(files[name], headers=headers, media_type=TYPES[Path(name).suffix])

  for name in files:
    add(f"/{name}", name)
  if INDEX in files:
    add("/", INDEX)
  return router
