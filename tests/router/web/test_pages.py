"""The live page and Swagger UI: their files, and their behaviour in a browser."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.application import Application
from pdserve.router.web.pages import FILES, PAGE

if TYPE_CHECKING:
    from tests.router.conftest import Client
    from tests.router.web.conftest import Scene

EVIL = '<img src=x onerror="window.hit=1">'


def test_the_page_loads_only_from_its_own_host(client: Client) -> None:
    for path in ("", *FILES):
        answer = client.get(f"/{path}")
        kind = {"": "html", "css": "css", "js": "javascript"}[path.rpartition(".")[2]]
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(f"text/{kind}")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        hosts = set(re.findall(r"https?://([\w.]+)", answer.text))
        assert hosts <= {"www.w3.org"}, "XML namespaces, which are not fetched"
        assert "innerHTML" not in answer.text


def test_swagger_ui_is_served_from_this_host(client: Client) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html") and "://" not in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    for path in re.findall(r'(?:src|href)="(/[^"]+)"', page.text):
        assert client.get(path).status_code == 200


def test_without_swagger_ui_a_page_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
    make_app: Callable[..., Application],
    make_client: type[Client],
    tokenizer: Tokenizer,
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi_offline", None)
    page = make_client(make_app(tokenizer)).get("/docs")
    assert "pip install -e '.[swagger]'" in page.text and "script" not in page.text


# ---- in a browser -------------------------------------------------------------------------------------------------

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium on the PATH")
    with playwright.sync_playwright() as playing:
        browser = playing.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(
    browser: Any, make_scene: Callable[..., Scene], serving: Callable[[Application], AbstractContextManager[str]]
) -> Iterator[Callable[..., Any]]:
    """Factory: open_page(width, path, history, fault, **settings) opens a page of a router that served and lost an instance.

    With `fault`, a stream has moved from it to another.
    """
    opened: list[Any] = []

    def make(width: int = 1280, path: str = "/", history: int = 0, fault: bool = False, **settings: Any) -> Any:
        scene = make_scene(**settings)
        prefill, decode = scene.join("prefill", "p", ranks=2), scene.join("decode", EVIL)
        for _ in range(history):
            scene.overview.record()
        scene.serve("the-request", prefill, decode)
        if fault:
            scene.move("moved", prefill, decode)
        scene.fleet.deregister(scene.join("both", "gone"), EVIL)
        running = serving(scene.app)
        url = running.__enter__()
        page = browser.new_context(viewport={"width": width, "height": 800}).new_page()
        page.set_default_timeout(600_000)
        page.problems = []
        page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("request", lambda request: request.url.startswith(url) or page.problems.append(request.url))
        opened.extend([page, running])
        page.goto(url + path)
        return page

    yield make
    for resource in opened:
        resource.context.close() if hasattr(resource, "context") else resource.__exit__(None, None, None)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_shows_instances_requests_and_faults(open_page: Callable[..., Any], width: int) -> None:
    page = open_page(width)
    page.wait_for_selector("#rows summary")
    text = page.inner_text("body")
    for part in (
        "ready",
        "Prefill · 1",
        "Decode · 1",
        "Time to first token",
        EVIL,
        f"gone left: {EVIL}",
        "p on 2 ranks",
        "the-request",
    ):
        assert part in text
    assert page.evaluate("window.hit") is None and page.query_selector("img") is None
    page.focus("#rows summary")
    page.keyboard.press("Enter")
    page.wait_for_selector(".gantt .lane i")
    detail = page.inner_text(".detail")
    assert "3 prompt tokens: 3 computed" in detail and "decode queue" not in detail
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not page.problems


def test_curves_begin_before_the_page_was_opened(open_page: Callable[..., Any]) -> None:
    page = open_page(history=3)
    page.wait_for_selector("#figures path.curve")
    first = page.evaluate("document.querySelector('#figures path.curve').getAttribute('d')")
    assert first.count("L") >= 2, "it is drawn of the history and the current state"
    assert page.get_by_role("link", name="API").get_attribute("href") == "/docs"
    assert page.get_by_role("link", name="Metrics").get_attribute("href") == "/metrics"
    assert not page.problems


def test_curves_have_units_values_the_slo_and_marks_of_faults(open_page: Callable[..., Any]) -> None:
    page = open_page(history=3)
    page.wait_for_selector("#figures line.fault", state="attached")
    panel = page.locator("#figures > div", has_text="Time to first token")
    assert panel.locator("text.name").text_content() == "SLO 1 s"
    ticks = panel.locator("text.tick").all_text_contents()
    assert len(ticks) >= 2 and all(re.fullmatch(r"[\d.]+ m?s", tick) for tick in ticks)
    assert "SLO 1 s" in panel.locator(".plot").get_attribute("aria-label")
    counts = page.locator("#figures > div", has_text="Under way").locator("text.tick").all_text_contents()
    assert all(count.isdigit() for count in counts), "requests are counted in whole numbers"
    panel.locator(".plot").focus()
    page.keyboard.press("ArrowLeft")
    assert re.fullmatch(
        r"\d\d:\d\d:\d\dmedian (–|[\d.]+ m?s)p99 (–|[\d.]+ m?s).*", panel.locator(".tip").text_content()
    )
    assert page.locator("#figures line.cross").count() == page.locator("#figures > div").count(), (
        "all charts show that time"
    )
    page.locator("#latency .column").first.hover()
    assert "requests" in page.locator("#latency .column .tip").first.inner_text()
    assert not page.problems


@pytest.mark.parametrize(("slowest_s", "end_s"), [(0.1, 10), (120, 120)])
def test_a_histogram_ends_at_its_highest_value_and_not_after_hours(
    open_page: Callable[..., Any], slowest_s: float, end_s: float
) -> None:
    page = open_page(path="/docs")
    told = page.evaluate("fetch('/debug/overview').then((answer) => answer.json())")
    limits = told["ttft"]["limits"]
    told["ttft"]["counts"] = [float(limit == slowest_s) for limit in [*limits, None]]
    page.route("**/debug/overview*", lambda route: route.fulfill(json=told))
    page.goto(page.url.removesuffix("docs"))
    page.select_option("#window", "0")
    columns = page.locator("#latency .card").first.locator(".column")
    assert columns.count() == limits.index(end_s) + 1 < len(limits)
    assert columns.nth(limits.index(slowest_s)).locator("i").bounding_box()["height"] > 50
    assert not page.problems


def test_a_curve_begins_at_the_axis_though_there_is_more(open_page: Callable[..., Any]) -> None:
    page = open_page(path="/docs", history=3)
    told = page.evaluate("fetch('/debug/overview?history=true').then((answer) => answer.json())")
    for one, age in zip(told["history"], (500, 400, 30), strict=False):
        one["time"] = told["time"] - age
    page.route("**/debug/overview*", lambda route: route.fulfill(json=told))
    page.goto(page.url.removesuffix("docs"))
    page.select_option("#range", "60")
    panel = page.locator("#figures > div", has_text="Under way")
    curve = panel.locator("path.curve").first.get_attribute("d")
    assert min(float(x) for x in re.findall(r"[ML](-?[\d.]+) ", curve)) >= 64
    assert panel.locator("text.time").count() <= 2, "labels with seconds do not touch"
    assert not page.problems


def test_a_dark_page_is_printed_as_a_light_one(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.documentElement).color") == "rgb(22, 25, 29)"
    page.emulate_media(media="screen", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.documentElement).color") == "rgb(232, 235, 239)"


def test_a_fault_has_its_cost(open_page: Callable[..., Any]) -> None:
    page = open_page(history=1, fault=True)
    page.wait_for_selector("#faults .cost")
    cost = page.inner_text("#faults .cost")
    assert re.search(r"1 stream moved, for whose next token clients waited .* · no request failed", cost), cost
    assert not page.problems


def test_routers_that_share_an_address_are_shown_together_or_alone(open_page: Callable[..., Any]) -> None:
    page = open_page(path="/docs", history=1)
    told = page.evaluate("fetch('/debug/overview?history=true').then((answer) => answer.json())")
    answers = itertools.count(1)

    def answer(route: Any) -> None:
        number = next(answers)
        changed = {"router": f"router-{number % 2}", "time": told["time"] + number, "under_way": 3 + number % 2}
        route.fulfill(json=told | changed)

    page.route("**/debug/overview*", answer)
    page.goto(page.url.removesuffix("docs"))
    page.wait_for_selector("#router", state="visible")
    assert page.inner_text("#about").startswith("2 routers · ")
    assert page.locator("#router option").all_text_contents() == ["all 2", "router-0", "router-1"]
    panel = page.locator("#figures > div", has_text="Under way")
    assert panel.locator(".number").inner_text() == "7requests", "the sum"
    page.select_option("#router", "router-1")
    assert page.inner_text("#about").startswith("router-1 · ")
    assert panel.locator(".number").inner_text() == "4requests"
    assert not page.problems


def test_the_page_asks_for_the_key(open_page: Callable[..., Any]) -> None:
    page = open_page(admin_key="right é")
    page.wait_for_selector("#key", state="visible")
    assert not page.is_visible("#main") and "the-request" not in page.content()
    for key in ("wrong", "right é"):
        page.fill("#key", key)
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-message:not(:empty)" if key == "wrong" else "#rows summary")
    assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
    assert [problem for problem in page.problems if "401" not in problem] == []


def test_without_an_admin_key_the_page_is_closed(open_page: Callable[..., Any]) -> None:
    page = open_page(api_key="of clients")
    page.wait_for_selector("#key-message:not(:empty)")
    assert "start it with --admin-key" in page.inner_text("#key-message")


def test_the_page_resumes_when_its_router_answers_again(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.wait_for_selector("#rows summary")
    page.route("**/debug/overview", lambda route: route.abort())
    page.wait_for_selector("#connection-error", state="visible")
    page.unroute("**/debug/overview")
    page.wait_for_selector("#connection-error", state="hidden")
    page.click("#pause")
    assert page.get_attribute("#pause", "aria-pressed") == "true"


@pytest.mark.until_recorded("router/web")
def test_swagger_ui_shows_the_endpoints_and_calls_them_with_the_key_it_is_given(open_page: Callable[..., Any]) -> None:
    page = open_page(path="/docs", api_key="of clients", admin_key="of operators")
    page.wait_for_selector("#operations-model-models")
    document = page.evaluate("fetch('/openapi.json').then((answer) => answer.json())")
    assert len(page.query_selector_all(".opblock")) == sum(map(len, document["paths"].values()))
    page.click("#operations-generation-chat .opblock-summary-control")
    page.wait_for_selector("#operations-generation-chat .opblock-section-request-body")
    assert "Continue a conversation" in page.inner_text("#operations-generation-chat")

    def list_models() -> str:
        page.click("#operations-model-models .execute")
        page.wait_for_selector("#operations-model-models .live-responses-table")
        return str(page.inner_text("#operations-model-models .live-responses-table tr.response .response-col_status"))

    page.click("#operations-model-models .opblock-summary-control")
    page.click("#operations-model-models .try-out__btn")
    assert list_models().startswith("401")
    page.click(".btn.authorize")
    form = page.locator(".auth-container", has_text="api_key")
    form.locator("input").fill("of clients")
    form.locator("button.authorize").click()
    page.click(".modal-ux .close-modal")
    page.click("#operations-model-models .btn-clear")
    assert list_models().startswith("200")
    assert "demo" in page.inner_text("#operations-model-models .live-responses-table")
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""], "a key stays in its tab"
    assert [problem for problem in page.problems if "401" not in problem] == []


def test_the_package_has_the_pages() -> None:
    assert {path.name for path in PAGE.iterdir()} == {"page.html", *FILES, "docs.html", "docs.js", "no_docs.html"}
