"""Fixtures for all tests: small checkpoints of real architectures with a tokenizer, servers, and the `pdserve` command."""

import gc
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads would take the cores of other tests

import hashlib
import importlib.util
import inspect
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import certifi
import httpx
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

with suppress(ImportError):  # where only kernels are tested
    # As in instances: files of tests import models, in half the time without torch's compiler.
    importlib.import_module("pdserve.engine.without_compiler")

if importlib.util.find_spec("hypothesis"):  # the kernels are also tested on machines without it
    import hypothesis

    # On a busy machine any example can be slow. Each run draws others; `make slow` is thorough.
    slow = hypothesis.HealthCheck.too_slow
    for profile, examples in (("thorough", 500), ("patient", 40)):
        hypothesis.settings.register_profile(
            profile, deadline=None, suppress_health_check=[slow], max_examples=examples
        )
    hypothesis.settings.load_profile("patient")

# A job in the background of a shell ignores SIGINT, and so would the processes of tests, which are stopped by it.
signal.signal(signal.SIGINT, signal.default_int_handler)

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])  # the number of this one

PROCESS_FIXTURES = {
    *("fork_server", "redis_server", "start_redis", "redis_cluster", "start_cluster", "mooncake", "fsspec_package"),
    *("wire_address", "memcached_address", "unbuilt_library"),
}
PROCESS_PARAMETERS = ("redis", "nixl", "memcached", "mooncake")

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _save_tokenizer(path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def _load(name: str) -> Any:
    """Import tests/<name>.py, only for the tests that use it: the others run without, for example, redis-py."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL_MODELS = _load("architectures")

if link_error := _load("links").link_error(Path(__file__).parent.parent):
    sys.exit(link_error)  # before an import fails with a less helpful message


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        help="of the tests' models. 16-bit outputs are compared with an engine of our own, as transformers rounds otherwise",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_load("recorded").Recorded(torch.cuda.is_available()), "recorded")
    if os.environ.get("CI"):
        config.pluginmanager.register(_load("skips"), "skips")


def starts_processes(item: pytest.Item) -> bool:
    """Return whether a test starts processes, as far as its fixtures, its parameters and its module's imports tell."""
    assert isinstance(item, pytest.Function)
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return (
        item.get_closest_marker("integration") is not None
        or not PROCESS_FIXTURES.isdisjoint(item.fixturenames)
        or any(isinstance(one, str) and one.startswith(PROCESS_PARAMETERS) for one in parameters)
        or not {"subprocess", "multiprocessing"}.isdisjoint(vars(item.module))
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked gpu without one, and those marked slow, unless `-m` mentions that marker or they are due.

    Long ones come first.
    """
    items.sort(key=lambda item: item.path.parts)  # all workers have one order again
    for item in items:
        if starts_processes(item):
            item.add_marker("processes")
        if item.get_closest_marker("until_recorded"):
            item.add_marker("slow")
    takes_slow, has_gpu = "slow" in config.option.markexpr, torch.cuda.is_available()
    recorded: Any = config.pluginmanager.get_plugin("recorded")

    def is_left_out(item: pytest.Item) -> bool:
        if item.get_closest_marker("gpu") and not has_gpu:
            return True
        return not takes_slow and item.get_closest_marker("slow") is not None and not recorded.is_due(item)

    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect tests without collecting garbage, and never look for any among them and what they import: it all stays.

    That halves the seconds of CPU before a worker's first test. In a new clone, each worker begins with other files, and
    finds the others compiled: rewriting the assertions of all takes 48 s.
    """
    if WORKERS > 1 and session.config.args == session.config.getini("testpaths"):
        files = sorted(map(str, Path(__file__).parent.rglob("test_*.py")))
        first = len(files) * WORKER // WORKERS
        session.config.args[:] = files[first:] + files[:first]
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def long_http_timeout() -> None:
    """Raise the default timeout of httpx from 5 seconds, which a busy machine may exceed, to 10 minutes.

    Tests of timeouts set their own.
    """
    limits = inspect.signature(httpx.Client).parameters["timeout"].default  # shared by all functions
    limits.connect = limits.read = limits.write = limits.pool = 600.0


@pytest.fixture(scope="session", autouse=True)
def few_probes() -> None:
    """Let instances begin with the fewest probe steps, as those of the fork server do: the others take half of the start."""
    with suppress(ImportError):  # where only kernels are tested
        from pdserve.engine import warm_up

        warm_up.EXTRA_PROBES_S["cpu"] = 0.0


@pytest.fixture(scope="session", autouse=True)
def ports_drawn_once() -> None:
    """Let no two workers of xdist draw the same free port, nor one of them twice: what is to listen there begins later."""
    with suppress(ImportError):  # where only kernels are tested
        from pdserve.cli import deployment

        size = len(deployment.PORT_RANGE) // WORKERS
        draw, drawn = deployment._random_unused_port, set[int]()

        def draw_once() -> int:
            while (port := draw()) in drawn and len(drawn) < size // 2:
                pass
            drawn.add(port)
            return port

        deployment.PORT_RANGE = deployment.PORT_RANGE[WORKER % WORKERS * size :][:size]
        deployment._random_unused_port = draw_once


@pytest.fixture(scope="session", autouse=True)
def small_certificate_bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give httpx a bundle of one CA certificate: it loads the bundle for every client, even without TLS."""
    end = "-----END CERTIFICATE-----\n"
    file = tmp_path_factory.mktemp("certificates") / "ca.pem"
    file.write_text(Path(certifi.where()).read_text().partition(end)[0] + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[..., Path]:
    """checkpoint("llama", seed=0, dtype="float32") → directory of a random model that transformers and pdserve can load."""
    made: dict[tuple[str, int, str], Path] = {}
    default = str(request.config.option.dtype)

    def make(architecture: str, seed: int = 0, dtype: str = default) -> Path:
        key = (architecture, seed, dtype)
        if key not in made:
            name, extra = SMALL_MODELS.ARCHITECTURES[architecture]
            config = getattr(transformers, name)(**{**SMALL_MODELS.SHAPE, **extra})
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(config)
            model = model.to(getattr(torch, dtype))
            path = tmp_path_factory.mktemp(f"{architecture}-{seed}-{dtype}")
            model.save_pretrained(path)
            _save_tokenizer(path)
            made[key] = path
        return made[key]

    return make


@pytest.fixture(scope="session")
def demo_cases() -> Any:
    """What the bundled demo model has learned: capitals, questions about facts far back in a text, and skills.

    None of the facts, and of the cases of skills, were in its training text, whose generator drew them
    (scripts/demo_text at 4d959b4).
    """
    return json.loads(Path(__file__).with_name("demo_cases.json").read_text())


@pytest.fixture(scope="session")
def kept_reference() -> Callable[[Path, str, Callable[[], Any]], Any]:
    """kept_reference(path, "what, and of which inputs", compute) → what `compute` returns, as JSON.

    Its results are kept in .cache/references, by the bytes of the checkpoint, the description, and the versions of torch and
    transformers: `compute` may call nothing of pdserve, and its description must name all that the result depends on.
    """
    folder = Path(__file__).parents[1] / ".cache" / "references"
    checkpoints: dict[Path, str] = {}

    def digest(path: Path) -> str:
        if path not in checkpoints:
            files = sorted([*path.glob("*.json"), *path.glob("*.safetensors")])
            checkpoints[path] = "".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
        return checkpoints[path]

    def find(path: Path, description: str, compute: Callable[[], Any]) -> Any:
        parts = (digest(path), description, transformers.__version__, torch.__version__)
        file = folder / f"{hashlib.sha256(' '.join(parts).encode()).hexdigest()}.json"
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as new:  # others may be writing the same
                json.dump(compute(), new)
            os.replace(new.name, file)
        return json.loads(file.read_text())

    return find


@pytest.fixture(scope="session")
def generate(
    kept_reference: Callable[[Path, str, Callable[[], Any]], Any],
) -> Callable[[Path, list[list[int]], int], list[list[int]]]:
    """generate(path, prompts, new_tokens) → greedy continuations, ignoring EOS.

    By transformers in float32; in 16 bits, where it rounds otherwise, by our engine with one prompt after the other.
    """

    cache: dict[str, list[list[int]]] = {}
    loaded: dict[Path, Any] = {}

    def run(path: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        key = f"{path} {new_tokens} {prompts}"
        if key in cache:
            return cache[key]
        if json.loads((path / "config.json").read_text())["dtype"] == "float32":
            description = f"greedy {new_tokens} {prompts}"
            cache[key] = kept_reference(path, description, lambda: compute(path, prompts, new_tokens))
        else:
            cache[key] = compute_here(path, prompts, new_tokens)
        return cache[key]

    def compute(path: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        outputs: dict[int, list[int]] = {}
        for length in {len(prompt) for prompt in prompts}:  # batches without padding take half the time
            rows = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            ids = torch.tensor([prompts[i] for i in rows])
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            outputs |= dict(zip(rows, output[:, length:].tolist(), strict=True))
        return [outputs[i] for i in range(len(prompts))]

    def compute_here(path: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        from pdserve.config import EngineConfig
        from pdserve.engine.engine import Engine
        from pdserve.request import Request, SamplingParams

        greedy = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        blocks = -(-(max(map(len, prompts)) + new_tokens) // 16)
        outputs = []
        for prompt in prompts:
            engine = Engine(
                EngineConfig(model=str(path), num_blocks=blocks, max_num_batched_tokens=SMALL_MODELS.CONTEXT),
                loaded.get(path),
            )
            loaded[path] = engine.checkpoint
            seq = engine.new_sequence("", Request(prompt=prompt, sampling=greedy))
            engine.add(seq)
            while seq.output.num_generated < new_tokens:
                engine.step()
            outputs.append(seq.output.tokens[len(prompt) :].tolist())
        return outputs

    return run


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """24 random prompts with lengths around block and chunk borders."""
    generator = torch.Generator().manual_seed(7)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 100, 700] * 2 + [1, 16, 33, 100]
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="session")
def fsspec_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder into which pip has installed examples/connector_fsspec; a process needs it on its PYTHONPATH."""
    folder = tmp_path_factory.mktemp("fsspec")
    example = Path(__file__).parent.parent / "examples" / "connector_fsspec"
    shutil.copytree(example, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", folder / "site", folder / "source"], check=True, timeout=1200)
    return folder / "site"


@pytest.fixture(scope="session")
def install_connectors() -> Callable[..., None]:
    """install_connectors(folder, "my_package", Path("source.py"), {"scheme": "Class"}) installs a package as pip would.

    It writes the module and metadata with entry points into `folder`; a process needs the folder on its PYTHONPATH.
    `group` is the entry-point group, that of connectors by default.
    """

    def install(
        folder: Path, name: str, module: Path, connectors: dict[str, str], group: str = "pdserve.connectors"
    ) -> None:
        shutil.copy(module, folder / f"{name}.py")
        metadata = folder / f"{name}-0.1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        lines = [f"{scheme} = {name}:{class_name}" for scheme, class_name in connectors.items()]
        (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))

    return install


@pytest.fixture
def package_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for packages of `install_connectors`, which this process finds while the test runs."""
    from pdserve import plugins

    monkeypatch.syspath_prepend(tmp_path)
    caches = (plugins.names, plugins.all_installed, plugins.load)
    for one in caches:
        one.cache_clear()
    yield tmp_path
    for one in caches:
        one.cache_clear()
    for name in [
        name for name, module in sys.modules.items() if Path(getattr(module, "__file__", None) or "").parent == tmp_path
    ]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def load_test_module() -> Callable[[str], Any]:
    """load_test_module("skips") → the module tests/skips.py."""
    return _load


@pytest.fixture(scope="session")
def fork_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The ForkServer of tests/fork_server.py, which all workers of xdist share."""
    folder = tmp_path_factory.getbasetemp()
    is_worker = hasattr(request.config, "workerinput")
    with closing(_load("fork_server").ForkServer.shared(folder.parent if is_worker else folder)) as server:
        yield server


@pytest.fixture(scope="session")
def pdserve(fork_server: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    """pdserve("up", "--model", "nowhere") → the completed process.

    A first argument ending in `.py` is run as a script, and one after `-c` as a program: in a process that has imported all
    that instances do.
    """

    def run(*arguments: str, env: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            code = fork_server.start(list(arguments), env, output.fileno(), errors.fileno()).wait(1200)
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(arguments, code, output.read(), errors.read())

    return run


@pytest.fixture(scope="session")
def redis_servers() -> Any:
    """The module tests/redis_servers.py."""
    return _load("redis_servers")


@pytest.fixture
def mooncake() -> Iterator[Any]:
    """A Mooncake Store for this test only."""
    pytest.importorskip("mooncake.store", reason="Mooncake cannot be imported", exc_type=ImportError)
    with closing(_load("mooncake_store").Mooncake()) as running:
        yield running


@pytest.fixture(scope="session")
def redis_server(redis_servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with closing(redis_servers.RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture
def start_redis(redis_servers: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """start_redis(*flags) → a RedisServer for this test only."""
    with ExitStack() as stack:
        yield lambda *flags: stack.enter_context(closing(redis_servers.RedisServer(tmp_path, *flags)))


@pytest.fixture(scope="session")
def redis_cluster(redis_servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with closing(redis_servers.RedisCluster(tmp_path_factory.mktemp("cluster"))) as cluster:
        yield cluster


@pytest.fixture
def start_cluster(redis_servers: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """start_cluster(*flags) → a RedisCluster, of three nodes by default, for this test only."""
    with ExitStack() as stack:
        yield lambda *flags, **more: stack.enter_context(closing(redis_servers.RedisCluster(tmp_path, *flags, **more)))


@pytest.fixture
def start_tls_proxy(redis_servers: Any) -> Iterator[Callable[..., int]]:
    """start_tls_proxy(6379, context) → port of a TLS proxy for port 6379."""
    with ExitStack() as stack:
        yield lambda port, context: stack.enter_context(closing(redis_servers.TlsProxy(port, context))).port


@pytest.fixture
def control_files(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """control_files(trustme.CA(), "127.0.0.1") → TLS settings of the control port, with new certificate files."""

    def write(authority: Any, name: str = "127.0.0.1") -> dict[str, str]:
        folder, issued = tempfile.mkdtemp(dir=tmp_path), authority.issue_cert(name)
        paths = {f"control_{kind}": f"{folder}/{kind}.pem" for kind in ("certfile", "keyfile", "cafile")}
        issued.cert_chain_pems[0].write_to_path(paths["control_certfile"])
        issued.private_key_pem.write_to_path(paths["control_keyfile"])
        authority.cert_pem.write_to_path(paths["control_cafile"])
        return paths

    return write
