"""A real browser for the web page of the server."""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from tests.apps.stand_in import ORIGIN, StandIn


@pytest.fixture(scope="session")
def browser():
  """Chromium, without a window."""
  program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
  if program is None:
    pytest.skip("no browser for the web page: apt-get install chromium")
  if find_spec("playwright") is None:
    pytest.skip("nothing drives the browser: pip install -e '.[test]'")
  from playwright.sync_api import sync_playwright

  with sync_playwright() as playwright:
    # Chromium does not start as root with its sandbox; the tests load no page but ours
    chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
    yield chromium
    chromium.close()


@pytest.fixture
def new_page(browser):
  """Open pages of given sizes; at the end, each must have run without an error and asked nobody but its server."""
  contexts, problems = [], []

  def open_page(width=1280, height=800, is_dark=False, **options):
    scheme = "dark" if is_dark else "light"
    viewport = {"width": width, "height": height}
    context = browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce", **options)
    context.set_default_timeout(20_000)
    contexts.append(context)
    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("popup", lambda popup: problems.append(f"popup: {popup.url}"))
    page.on("console", lambda said: problems.append(said.text) if "Content Security Policy" in said.text else None)
    return page

  yield open_page
  for context in contexts:
    context.close()
  assert problems == []


@pytest.fixture
def stand_in() -> StandIn:
  """A stand-in for the server."""
  return StandIn()


@pytest.fixture
def open_page(new_page, stand_in) -> Callable[..., Any]:
  """Open the page over the stand-in, and wait until it has asked what there is."""

  def opened(*size: int, is_ready: bool = True, **options: Any) -> Any:
    page = new_page(*size, **options)
    page.route("**/*", stand_in.handle)
    page.goto(ORIGIN)
    if is_ready:
      page.wait_for_selector("#model:not([hidden])")
    return page

  return opened
