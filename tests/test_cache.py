"""The cache: one build for each key, whatever happens to the file or the folder, and nothing of another user's."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kullback.backends import cache as kernels
from kullback.backends.build import BuildError
from kullback.backends.c import compile

NOBODY = 65534


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels._tell.cache_clear()
    return tmp_path / "kullback"


class Builder:
    def __init__(self, data=b"binary"):
        self.calls, self.data = 0, data

    def __call__(self):
        self.calls += 1
        return self.data


def test_builds_once_where_xdg_says(cache):
    builder = Builder()
    path = kernels.cached("key", ".so", builder)
    assert path.parent == cache
    assert kernels.cached("key", ".so", builder) == path
    assert builder.calls == 1
    assert kernels.read(path) == b"binary"
    assert kernels.cached("other", ".so", builder) != path
    assert builder.calls == 2


def test_a_log_says_when_a_kernel_is_compiled(caplog):
    with caplog.at_level("INFO", logger="kullback"):
        for _ in range(2):
            kernels.cached("key", ".so", Builder())
    assert caplog.messages == ["compiling a kernel", "compiled in 0.0 s"]


def test_a_relative_xdg_folder_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kernels.directory() == tmp_path / "home" / ".cache" / "kullback"


@pytest.mark.parametrize("damage", [b"", b"binary", b"short", b"bjnary" + bytes(32)])
def test_a_damaged_entry_is_a_miss(damage):
    builder = Builder()
    path = kernels.cached("key", ".so", builder)
    path.write_bytes(damage)
    assert kernels.read(kernels.cached("key", ".so", builder)) == b"binary"
    assert builder.calls == 2


def test_a_failed_build_leaves_nothing(cache):
    def fail():
        raise BuildError("no")

    with pytest.raises(BuildError):
        kernels.cached("key", ".so", fail)
    assert not [p for p in cache.iterdir() if p.suffix != ".lock"]


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    """As with a read-only one (which root may write): the build goes to a folder of this process."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    builder = Builder()
    path = kernels.cached("key", ".so", builder)
    assert kernels.read(path) == b"binary"
    assert kernels.cached("key", ".so", builder) == path
    assert builder.calls == 1
    path.unlink()
    path.parent.rmdir()  # as what cleans temporary folders does
    assert kernels.read(kernels.cached("key", ".so", builder)) == b"binary"


def test_a_forked_child_leaves_its_parents_folder(tmp_path):
    (tmp_path / "file").write_text("")
    code = """
        import os, sys
        from kullback.backends import cache
        path = cache.cached("key", ".so", lambda: b"binary")
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        print(cache.read(path))
    """
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True)
    assert done.stdout.strip() == b"b'binary'", done.stderr


def test_no_folder_at_all_is_a_build_that_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(kernels, "_private", [])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(BuildError, match="no folder"):
        kernels.cached("key", ".so", Builder())


def others_may_write(path):
    path.chmod(0o777)


def belongs_to_another(path):
    if os.getuid() != 0:
        pytest.fail("whose a file is can be changed by root alone: run this suite as root, or in a container")
    os.chown(path, NOBODY, NOBODY)


def is_a_link(path):
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("of", ["folder", "entry"])
@pytest.mark.parametrize("change", [others_may_write, belongs_to_another, is_a_link], ids=lambda f: f.__name__)
def test_what_another_may_have_written_is_not_read(change, of, cache, monkeypatch):
    if change is belongs_to_another and os.getuid() != 0:
        monkeypatch.setattr("os.getuid", lambda: NOBODY)
        change = lambda path: None
    path = kernels.cached("key", ".so", Builder(b"planted"))
    change(path if of == "entry" else cache)
    if of == "folder":
        with pytest.warns(RuntimeWarning, match="is not read"):
            own = kernels.cached("key", ".so", Builder())
        assert own.parent != cache
    else:
        own = kernels.cached("key", ".so", Builder())
    assert kernels.read(own) == b"binary"


def test_a_folder_is_made_for_the_user_alone(cache):
    before = os.umask(0)
    try:
        path = kernels.cached("key", ".so", Builder())
    finally:
        os.umask(before)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o077 == 0


def test_a_lock_that_is_never_released(cache, monkeypatch):
    monkeypatch.setattr(kernels, "LOCK_SECONDS", 0.2)
    lock = Path(kernels.cached("key", ".so", Builder())).with_suffix(".lock")
    lock.with_suffix(".so").unlink()
    code = f"import filelock, time; lock = filelock.FileLock({str(lock)!r}); lock.acquire(); print('held', flush=True)"
    code += "; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.warns(RuntimeWarning, match="has held a lock"):
            path = kernels.cached("key", ".so", Builder())
        holder.kill()
    assert path.parent != cache
    assert kernels.read(path) == b"binary"


def test_old_and_large_is_pruned(cache):
    paths = [kernels.cached(str(i), ".so", Builder(bytes(1000))) for i in range(5)]
    now = time.time()
    for age, path in enumerate(paths):
        os.utime(path, (now - 1000 * age,) * 2)
    for lock in cache.glob("*.lock"):
        lock.unlink()
    assert kernels.prune(most_seconds=3500) == 1
    assert kernels.prune(most_bytes=2 * 1032) == 2
    assert {entry.path for entry in kernels.entries()} == set(paths[:2])
    assert kernels.clear() == 2
    assert not list(kernels.entries())


def test_a_use_is_noted(cache):
    path = kernels.cached("key", ".so", Builder())
    long_ago = time.time() - 10 * kernels.A_DAY
    os.utime(path, (long_ago, long_ago))
    kernels.cached("key", ".so", Builder())
    assert path.stat().st_mtime > time.time() - kernels.A_DAY


def test_a_compiler_that_hangs_is_stopped(fake_compiler):
    script = fake_compiler("sleep 600 | cat")
    begin = time.monotonic()
    with pytest.raises(compile.CompilerTimeoutError, match="did not finish"):
        compile._compile((script,), "", 0.3)
    assert time.monotonic() - begin < 30


def test_an_interrupt_stops_the_compiler(tmp_path, fake_compiler, monkeypatch):
    mark = tmp_path / "mark"
    script = fake_compiler(f"sleep 1\ntouch {mark}")

    def interrupted(process, seconds=None):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile._compile((script,), "")
    time.sleep(2)
    assert not mark.exists()


@pytest.mark.parametrize("script", ["exit 0", "printf '\\344' >&2; exit 1"], ids=["writes nothing", "not UTF-8"])
def test_a_compiler_that_is_none(script, fake_compiler):
    with pytest.raises(BuildError, match="failed"):
        compile._compile((fake_compiler(script),), "")


def test_an_entry_that_cannot_be_loaded_is_made_anew():
    class Arguments(compile.ctypes.Structure):
        _fields_ = ()

    source = "int answer(void *a) { return 42; }\n"
    key = compile.key(compile.compiler(), source)
    path = kernels.cached(key, ".so", lambda: b"made by a broken compiler")
    compile.function(source, "answer", Arguments)
    assert b"made by" not in kernels.read(path)


def test_a_cache_may_be_seen_by_machines_that_differ(monkeypatch):
    command = ("cc",)
    here = compile.key(command, "")
    monkeypatch.setattr(compile, "processor", lambda: "another")
    assert compile.key(command, "") != here


def test_processes_build_once_together(cache, tmp_path):
    log = tmp_path / "log"
    code = (
        "import time; from kullback.backends import cache\n"
        f"def make():\n open({str(log)!r}, 'a').write('x'); time.sleep(0.3); return b'data'\n"
        "print(cache.read(cache.cached('key', '.bin', make)))"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)]
    assert {p.communicate(timeout=120)[0].strip() for p in running} == {b"b'data'"}
    assert log.read_text() == "x"
