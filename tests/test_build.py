"""The cache: one build for each key, whatever happens to the file or the directory."""

import subprocess
import sys

import pytest

from kullback.backends import build


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kullback"


class Builder:
    def __init__(self, data=b"binary"):
        self.calls, self.data = 0, data

    def __call__(self):
        self.calls += 1
        return self.data


def test_builds_once_where_xdg_says(cache):
    builder = Builder()
    path = build.cached("key", ".so", builder)
    assert path.parent == cache
    assert build.cached("key", ".so", builder) == path
    assert builder.calls == 1
    assert build.read(path) == b"binary"
    assert build.cached("other", ".so", builder) != path
    assert builder.calls == 2


@pytest.mark.parametrize("damage", [b"", b"binary", b"short", b"bjnary" + bytes(32)])
def test_a_damaged_entry_is_a_miss(damage):
    builder = Builder()
    path = build.cached("key", ".so", builder)
    path.write_bytes(damage)
    assert build.read(build.cached("key", ".so", builder)) == b"binary"
    assert builder.calls == 2


def test_a_failed_build_leaves_nothing(cache):
    def fail():
        raise build.BuildError("no")

    with pytest.raises(build.BuildError):
        build.cached("key", ".so", fail)
    assert not [p for p in cache.iterdir() if p.suffix != ".lock"]


def test_a_directory_that_cannot_be_made(tmp_path, monkeypatch):
    """As with a read-only one (which root may write): the build goes to a directory of this process."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    builder = Builder()
    path = build.cached("key", ".so", builder)
    assert build.read(path) == b"binary"
    assert build.cached("key", ".so", builder) == path
    assert builder.calls == 1


def test_processes_build_once_together(cache, tmp_path):
    log = tmp_path / "log"
    code = (
        "import time; from kullback.backends import build\n"
        f"def make():\n open({str(log)!r}, 'a').write('x'); time.sleep(0.3); return b'data'\n"
        "print(build.read(build.cached('key', '.bin', make)))"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)]
    assert {p.communicate(timeout=120)[0].strip() for p in running} == {b"b'data'"}
    assert log.read_text() == "x"
