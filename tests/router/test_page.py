"""The live page: its picture of a real dispatcher, through the real API, and what a browser makes of it."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette

from pdserve.config import RouterConfig
from pdserve.counters import series
from pdserve.proto import pdserve_pb2 as pb
from pdserve.request import Request, SamplingParams
from pdserve.router.api import PAGE, create_app
from pdserve.router.dispatch import Dispatcher
from pdserve.router.events import CAPACITY, Events
from pdserve.router.fleet import Fleet, Member
from pdserve.router.gate import Gate
from pdserve.router.key_file import declared
from pdserve.router.metrics import Metrics
from pdserve.router.overview import Overview
from pdserve.router.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.router.conftest import Client

EVIL = '<img src=x onerror="window.hit=1">'


class Told(list[pb.RouterFrame]):
    """In place of a connection to an instance: what it was sent."""

    put = list.append

    def close(self) -> None: ...

    def abort(self) -> None: ...


class Scene:
    """A router with members that the test plays, and its app."""

    def __init__(self, tokenizer: Tokenizer, events: Events, **settings: Any) -> None:
        self.fleet = Fleet("router", "demo", 1.0)
        metrics = Metrics(self.fleet)
        config = RouterConfig(model="demo", local_prefill_tokens=0, slo="ttft=1s", **settings)
        self.dispatcher = Dispatcher(config, self.fleet, metrics)
        overview = Overview(self.dispatcher, metrics, events)
        latest = self.dispatcher.timelines.latest
        gate = Gate(declared(config.api_key), config, metrics)
        self.app = create_app(config, tokenizer, self.dispatcher, gate, metrics.text, latest, overview.now)

    def join(self, role: str, name: str) -> Member:
        hello = pb.Hello(instance_id=name, role=role, model="demo", max_model_len=100, vocab_size=50, num_blocks=99)
        hello.connector = "shm"
        return self.fleet.join(hello, Told())

    def serve(self, request_id: str, prefill: Member, decode: Member) -> None:
        """One request of three tokens, from start to end."""
        sampling = SamplingParams(max_tokens=3)
        self.dispatcher.open(Request(request_id=request_id, prompt=[1, 2, 3], sampling=sampling))
        self.says(prefill, request_id, stamps=[pb.Stamp(stage="prefill_started")], tokens=pb.Tokens(computed=3))
        self.says(prefill, request_id, token_ids=[7])
        self.says(prefill, request_id, stored=pb.Stored(num_blocks=1, final=True))
        self.says(decode, request_id, token_ids=[8], stamps=[pb.Stamp(stage="decode_started")])
        self.says(decode, request_id, token_ids=[9], finish_reason="length")

    def says(self, member: Member, request_id: str, **output: Any) -> None:
        self.dispatcher.on_output(member, pb.Output(request_id=request_id, **output))


@pytest.fixture
def events() -> Iterator[Events]:
    """As the router's process keeps them."""
    logger, events = logging.getLogger("pdserve"), Events()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(events)
    yield events
    logger.removeHandler(events)
    logger.setLevel(before)


@pytest.fixture
def scene(tokenizer: Tokenizer, events: Events) -> Callable[..., Scene]:
    return lambda **settings: Scene(tokenizer, events, **settings)


def test_the_picture_of_a_request_and_a_fault(scene: Callable[..., Scene], make_client: type[Client]) -> None:
    made = scene()
    client = make_client(made.app)
    empty = client.get("/debug/overview").json()
    assert not empty["ready"] and empty["why"] == "no prefill and no decode instance is registered"
    prefill, decode = made.join("prefill", "p"), made.join("decode", "d")
    loaded = {series("kv_transfer_bytes", connector="shm", direction="load"): 4096.0, "generation_tokens": 2.0}
    decode.heard_of(pb.Heartbeat(running=1, counters=loaded))
    made.serve("r", prefill, decode)
    made.dispatcher.open(Request(request_id="s", prompt=[1], sampling=SamplingParams(max_tokens=3)))
    made.join("decode", "e")
    made.fleet.leave(decode, "test")
    answer = client.get("/debug/overview")
    assert answer.headers["cache-control"] == "no-store"
    now = answer.json()
    assert now["ready"] and now["router"] == "router" and now["slo"] == {"ttft": 1.0}
    assert now["requests"] == {"length": 1} and (now["under_way"], now["waiting"]) == (1, 0)
    assert now["placements"] == {"split": 3} and now["migrations"] == {"instance_lost": 1}
    assert sum(now["ttft"]["counts"]) == 1 and sum(now["itl"]["counts"]) == 2
    assert len(now["itl"]["counts"]) == len(now["itl"]["limits"]) + 1
    assert [one["instance_id"] for one in now["instances"]] == ["e", "p"]
    running, done = now["timelines"]
    assert (running["request_id"], running["migrations"]) == ("s", 1) and "finished" not in running["stages_ms"]
    assert (done["finish_reason"], done["output_tokens"], done["computed_tokens"]) == ("length", 3, 3)
    assert now["time"] - 60 < done["time"] <= now["time"]
    moved, left, *joined = now["events"]
    assert (moved["event"], moved["request_id"], moved["instance"]) == ("moved", "s", "d")
    assert (left["event"], left["instance"]) == ("left", "d") and left["time"] <= now["time"] + 1
    assert [one["event"] for one in joined] == ["joined"] * 3
    (move,) = client.get("/debug/requests/s").json()["moves"]
    assert move["instance"] == "d" and move["why"].startswith("instance d was lost") and move["ms"] >= 0
    told = client.get("/debug/requests/r").json()
    assert [(part["name"], part["who"]) for part in told["parts"]][-1] == ("decode", "decode")


def test_what_instances_count(scene: Callable[..., Scene], make_client: type[Client]) -> None:
    made = scene()
    member = made.join("decode", "d")
    counts = {"generation_tokens": 2.0, series("kv_transfer_seconds", connector="shm", direction="load"): 0.5}
    counts[series("kv_transfer_seconds", connector="tier of shm", direction="load")] = 0.25
    member.heard_of(pb.Heartbeat(running=3, waiting=1, counters=counts))
    (one,) = make_client(made.app).get("/debug/overview").json()["instances"]
    assert (one["running"], one["waiting"], one["generation_tokens"], one["load_seconds"]) == (3, 1, 2.0, 0.5)
    assert one["store_bytes"] == 0


def test_events_are_few_and_those_alike_are_one(events: Events) -> None:
    log = logging.getLogger("pdserve.router")
    log.warning("of no kind")
    for i in range(40):
        log.warning("%d moved", i, extra={"event": "moved", "instance": "d", "request_id": f"r{i}"})
    (one,) = events.latest()
    assert (one["count"], one["text"], one["number"]) == (40, "39 moved", 40)
    for i in range(2 * CAPACITY):
        log.warning("left", extra={"event": "left", "instance": str(i)})
    assert len(events.latest()) == CAPACITY


def test_a_page_of_its_own_host_only(client: Client) -> None:
    for path, kind in {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}.items():
        answer = client.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        hosts = set(re.findall(r"https?://([\w.]+)", answer.text))
        assert hosts <= {"www.w3.org"}, "names of formats, which nobody asks for"
        assert "innerHTML" not in answer.text


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
    browser: Any, scene: Callable[..., Scene], serving: Callable[[Starlette], AbstractContextManager[str]]
) -> Iterator[Callable[..., Any]]:
    """open_page(width, **settings) → a page of a router that has served one request and lost an instance."""
    opened: list[Any] = []

    def make(width: int = 1280, **settings: Any) -> Any:
        made = scene(**settings)
        prefill, decode = made.join("prefill", "p"), made.join("decode", EVIL)
        made.serve("the-request", prefill, decode)
        made.fleet.leave(made.join("both", "gone"), EVIL)
        running = serving(made.app)
        url = running.__enter__()
        page = browser.new_context(viewport={"width": width, "height": 800}).new_page()
        page.set_default_timeout(600_000)
        page.complaints = []
        page.on("console", lambda said: page.complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith(url) or page.complaints.append(asked.url))
        opened.extend([page, running])
        page.goto(url)
        return page

    yield make
    for one in opened:
        one.context.close() if hasattr(one, "context") else one.__exit__(None, None, None)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_shows_what_happened(open_page: Callable[..., Any], width: int) -> None:
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
        "the-request",
    ):
        assert part in text
    assert page.evaluate("window.hit") is None and page.query_selector("img") is None
    page.focus("#rows summary")
    page.keyboard.press("Enter")
    page.wait_for_selector(".gantt .lane i")
    told = page.inner_text(".more")
    assert "3 prompt tokens: 3 computed" in told and "decode queue" not in told
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not page.complaints


def test_the_page_asks_for_the_key(open_page: Callable[..., Any]) -> None:
    page = open_page(admin_key="right é")
    page.wait_for_selector("#key", state="visible")
    assert not page.is_visible("#main") and "the-request" not in page.content()
    for key in ("wrong", "right é"):
        page.fill("#key", key)
        page.keyboard.press("Enter")
        page.wait_for_selector("#why:not(:empty)" if key == "wrong" else "#rows summary")
    assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
    assert [said for said in page.complaints if "401" not in said] == []


def test_no_key_opens_what_is_closed(open_page: Callable[..., Any]) -> None:
    page = open_page(api_key="of clients")
    page.wait_for_selector("#why:not(:empty)")
    assert "start it with --admin-key" in page.inner_text("#why")


def test_the_page_goes_on_when_its_router_does(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.wait_for_selector("#rows summary")
    page.route("**/debug/overview", lambda route: route.abort())
    page.wait_for_selector("#trouble", state="visible")
    page.unroute("**/debug/overview")
    page.wait_for_selector("#trouble", state="hidden")
    page.click("#pause")
    assert page.get_attribute("#pause", "aria-pressed") == "true"


def test_the_package_has_the_page() -> None:
    assert {path.name for path in PAGE.iterdir()} == {"page.html", "page.css", "page.js"}
