"""What is published: one version, an sdist that is the repository, a wheel that has all that runs, and what CI runs."""

import ast
import importlib
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import kullback
from tests.test_record import kl_of_models, write_noisy, write_tiny

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Neither this checkout's package nor what a test's environment adds may stand in for what was installed.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked(folder="."):
    return set(run("git", "ls-files", folder, cwd=ROOT).splitlines())


def test_one_version():
    assert "version" in PROJECT["dynamic"]
    assert re.findall(r"^version: (.*)$", read("CITATION.cff"), re.M) == [kullback.__version__]
    assert f"\n## [{kullback.__version__}] - " in read("CHANGELOG.md")


def test_ci_runs_what_the_package_promises():
    pairs = re.findall(r'python: "(.*)", torch: "(.*)"', read(".github/workflows/ci.yml"))
    promised = [c.split(" :: ")[-1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    lowest = PROJECT["requires-python"].removeprefix(">=")
    torch = next(d.removeprefix("torch>=") for d in PROJECT["dependencies"] if d.startswith("torch>="))
    assert (lowest, torch) in pairs
    assert [python for python, torch in pairs if torch == "2"] == promised
    assert promised[0] == lowest


ADDRESS, TAG = "https://example.org/owner/kullback", "v1.2.3"
LINK = re.compile(r"\]\(([^)]*)\)")


def test_an_index_gets_absolute_links():
    """And each leads to a file that there is."""
    text = runpy.run_path(str(ROOT / "hatch_build.py"))["with_address"](read("README.md"), ADDRESS, TAG)
    before, after = LINK.findall(read("README.md")), LINK.findall(text)
    assert len(before) == len(after) > 10
    for relative, absolute in zip(before, after, strict=True):
        found = re.fullmatch(rf"{ADDRESS}/(blob|raw)/{TAG}/(.*)", absolute)
        assert found, absolute
        assert found[2] == relative
        assert (ROOT / relative.partition("#")[0]).exists()
        assert (found[1] == "raw") == relative.endswith(".svg")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    address = {"KULLBACK_REPOSITORY": ADDRESS, "GITHUB_REF_NAME": TAG}
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, env={**os.environ, **address})
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.full
def test_the_sdist_is_the_repository(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert f"kullback-{kullback.__version__}.tar.gz" == built[0].name
    assert tracked() <= names


@pytest.mark.full
def test_the_wheel_is_the_package(built):
    names = set(zipfile.ZipFile(built[1]).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    assert package == {name.removeprefix("src/") for name in tracked("src")}
    assert "kullback/py.typed" in package
    assert {Path(name).suffix for name in package} == {".py", ".typed", ".c", ".h", ".cuh"}
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    metadata = zipfile.ZipFile(built[1]).read(f"kullback-{kullback.__version__}.dist-info/METADATA").decode()
    assert f"Project-URL: Repository, {ADDRESS}\n" in metadata
    assert all(link.startswith(f"{ADDRESS}/") for link in LINK.findall(metadata.partition("\n\n")[2]))


@pytest.mark.full
def test_indexes_take_them(built):
    run(sys.executable, "-m", "twine", "check", "--strict", *built)
    run(sys.executable, "-m", "check_wheel_contents", built[1])


@pytest.mark.full
def test_it_runs_where_nothing_else_is_installed(built, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv", env=CLEAN)
    python = tmp_path / "venv/bin/python"
    # Pinned, because the newest PyTorch would bring its own CUDA.
    run(python, "-m", "pip", "install", "-c", ROOT / "constraints.txt", f"{built[1]}[cli]", env=CLEAN)
    outside = {"cwd": tmp_path, "env": {**CLEAN, "XDG_CACHE_HOME": str(tmp_path / "cache")}}
    code = (
        "import kullback, torch\n"
        "p = torch.tensor([[0.25, 0.75]])\n"
        "with kullback.backend('c'): print(kullback.divergence(p, p.flip(-1), form='probs').item())"
    )
    assert float(run(python, "-W", "error", "-c", code, **outside)) == pytest.approx(0.5493061, rel=1e-6)
    assert run(tmp_path / "venv/bin/kullback", "--version", **outside) == f"kullback {kullback.__version__}\n"
    assert "INLINE Element" in run(python, "-m", "kullback", "show", "kl", **outside)


# Of a process that asks for a name or a connection, this is the end.
OFFLINE = """
import os, sys

def end(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        os.write(2, f"{event}{arguments} offline".encode())
        os._exit(9)

sys.addaudithook(end)
"""


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_two_extras_record_and_compare_offline(tmp_path):
    """An environment of `.[compare,transformers]` alone, by its command, on a model of 61 tokens."""
    run(sys.executable, "-m", "venv", tmp_path / "venv", env=CLEAN)
    python = tmp_path / "venv/bin/python"
    # Pinned, as above
    install = (python, "-m", "pip", "install", "-c", ROOT / "constraints.txt", ".[compare,transformers]")
    run(*install, cwd=ROOT, env=CLEAN)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", env=CLEAN).strip())
    (packages / "offline.py").write_text(OFFLINE, encoding="utf-8")
    (packages / "offline.pth").write_text("import offline", encoding="utf-8")
    places = {name: str(tmp_path / "cache") for name in ("XDG_CACHE_HOME", "HF_HOME")}
    outside = {"cwd": tmp_path, "env": {**CLEAN, **places, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}}
    asks = "import socket; socket.create_connection(('127.0.0.1', 9))"
    assert subprocess.run([python, "-c", asks], **outside).returncode == 9

    (tmp_path / "model").mkdir()
    model = write_tiny(tmp_path / "model")
    changed = write_noisy(model, tmp_path / "model", tmp_path / "noisy")
    command = tmp_path / "venv/bin/kullback"
    run(command, "record", "./model", "model/text.txt", "-o", "a", "--window", 25, "--dtype", "float32", **outside)
    run(command, "record", "./noisy", "a", "-o", "b", "--dtype", "float32", **outside)
    run(command, "compare", "a", "b", "--json", "found.json", **outside)
    (found,) = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["candidates"]
    kl = kl_of_models(model, changed, load_file(tmp_path / "a/tokens.safetensors")["tokens"])
    assert found["rows"] == kl.numel() == 16 * 24
    assert found["kl"]["mean"] == pytest.approx(kl.mean().item(), rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ("citation-file-format", "CITATION.cff"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/bug.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/idea.yml"),
        ("github-workflows", ".github/workflows/ci.yml"),
        ("github-workflows", ".github/workflows/release.yml"),
    ],
)
def test_forms_keep_their_schemas(schema, name):
    run(
        *(sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"),
        *("--default-filetype", "yaml", ROOT / name),
    )


@pytest.mark.parametrize("path", sorted(path for path in tracked("benchmarks") if path.endswith(".py")))
def test_benchmarks_use_what_there_is(path):
    """No test runs them."""
    tree = ast.parse(read(path))
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kullback":
            home = importlib.import_module(node.module)
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found = getattr(home, alias.name) if hasattr(home, alias.name) else importlib.import_module(name)
                if inspect.ismodule(found):
                    modules[alias.asname or alias.name] = found
        elif isinstance(node, ast.Import) and any(alias.name == "kullback" for alias in node.names):
            modules["kullback"] = kullback
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
    }
    assert [f"{name}.{attribute}" for name, attribute in used if not hasattr(modules[name], attribute)] == []
