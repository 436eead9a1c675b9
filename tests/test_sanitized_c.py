"""The C kernels under AddressSanitizer and UndefinedBehaviorSanitizer: `make test-full`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kullback.backends.c import compile

SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all"


@pytest.mark.full
def test_kernels_are_clean(tmp_path):
    """On the rows that compute-sanitizer watches the CUDA kernels on."""
    name = compile.compiler()[0]
    runtime = subprocess.run([name, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    assert Path(runtime.stdout.strip()).is_absolute(), "the sanitizers' library comes with the compiler"
    environment = {
        **os.environ,
        "CC": f"{name} {SANITIZERS}",
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # of Python itself
        "XDG_CACHE_HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    script = Path(__file__).with_name("sanitize.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "linear: done on cpu, c" in done.stdout
