"""Source text -> cubin -> a kernel that is launched on torch's current stream."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kullback.backends import cache
from kullback.backends.build import BuildError
from kullback.backends.cuda import plan

if torch.version.cuda is not None and importlib.util.find_spec("cuda") is not None:
    # Half of a first call's time otherwise. Where it is missing, `unavailable` says so.
    with contextlib.suppress(ImportError):
        importlib.import_module("cuda.core")


def compiled(text: str, arch: str, ptxas: tuple[str, ...] = (), log: Any = None) -> bytes:
    """Machine code for an architecture such as "sm_90a", or PTX for a virtual one, "compute_75". Needs no GPU."""
    core = importlib.import_module("cuda.core")
    options = core.ProgramOptions(arch=arch, std="c++17", ptxas_options=list(ptxas) or None)
    program = core.Program(text, "c++", options)
    try:
        return bytes(program.compile("ptx" if is_virtual(arch) else "cubin", logs=log).code)
    except Exception as error:  # cuda.core raises its own kinds for each stage
        raise BuildError(f"NVRTC did not compile a kernel for {arch}: {error}") from error
    finally:
        program.close()


def is_virtual(arch: str) -> bool:
    """Whether it is a version of PTX, which the driver compiles: so tests run what older devices are compiled."""
    return arch.startswith("compute_")


def architecture(index: int) -> str:
    """The compilation target of a device; from Hopper on with its own instructions."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def _kernel(text: str, name: str, arch: str) -> Any:
    core = importlib.import_module("cuda.core")
    bindings = importlib.import_module("cuda.bindings")
    key = repr((text, arch, core.__version__, bindings.__version__))
    suffix, load = (".ptx", core.ObjectCode.from_ptx) if is_virtual(arch) else (".cubin", core.ObjectCode.from_cubin)
    path = cache.cached(key, suffix, lambda: compiled(text, arch))
    return load(cache.read(path)).get_kernel(name)


class Launcher:
    """A kernel on a device, and how many of its blocks (of clusters, if `cluster` > 1) fill it."""

    def __init__(
        self,
        text: str,
        name: str,
        index: int,
        threads: int = plan.THREADS,
        cluster: int = 1,
        shared: int = 0,
    ) -> None:
        core = importlib.import_module("cuda.core")
        self.index = index
        self.launch = core.launch
        layout: dict[str, int] = {"block": threads, "shmem_size": shared}
        if cluster > 1:
            layout["cluster"] = cluster
        self.config = functools.cache(lambda blocks: core.LaunchConfig(grid=blocks, **layout))
        with torch.cuda.device(index):
            torch.cuda.current_stream()  # the device's context, made current by torch
            core.Device(index).set_current()
            self.kernel = _kernel(text, name, architecture(index))
            if shared > 48 << 10:
                _allow_shared(self.kernel, index)
            if cluster > plan.PORTABLE_CLUSTER:
                _allow(self.kernel, index, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
            occupancy = self.kernel.occupancy
            if cluster > 1:
                stream = _stream(index, raw_stream(index))
                self.blocks = occupancy.max_active_clusters(self.config(1), stream=stream)
            else:
                resident = occupancy.max_active_blocks_per_multiprocessor(threads, shared)
                self.blocks = resident * torch.cuda.get_device_properties(index).multi_processor_count
            self.filling = self.config(max(1, self.blocks))

    def __call__(self, blocks: int, *arguments: int | float) -> None:
        stream = _stream(self.index, raw_stream(self.index))
        config = self.filling if blocks >= self.blocks else self.config(max(1, blocks))
        if current_device() == self.index:
            self.launch(stream, config, self.kernel, *arguments)
        else:
            with torch.cuda.device(self.index):
                self.launch(stream, config, self.kernel, *arguments)


def _allow_shared(kernel: Any, index: int) -> None:
    """More than 48 KiB of shared memory a block have to be asked for.

    All the device has: launchers of other sizes share the kernel.
    """
    properties: Any = torch.cuda.get_device_properties(index)
    size = properties.shared_memory_per_block_optin - kernel.attributes.shared_size_bytes
    _allow(kernel, index, "MAX_DYNAMIC_SHARED_SIZE_BYTES", size)


def _allow(kernel: Any, index: int, name: str, value: int) -> None:
    driver = importlib.import_module("cuda.bindings.driver")
    attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    (status,) = driver.cuKernelSetAttribute(attribute, value, kernel.handle, driver.CUdevice(index))
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BuildError(f"device {index} does not take {value} as {name}: {status}")


# torch.cuda.current_device and current_stream(index).cuda_stream; building a Stream object takes longer than a launch.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
raw_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)


@functools.cache
def _stream(index: int, handle: int) -> Any:
    return importlib.import_module("cuda.core").Stream.from_handle(handle)


class Workspace(NamedTuple):
    """Memory of a launch. Whoever launches holds it till then: freed in a capture, it may be the next tensor's."""

    numbers: Tensor | None
    partial: int  # addresses: of partial sums,
    ticket: int  # and of one that is zero between launches


NO_WORKSPACE = Workspace(None, 0, 0)
_workspaces: dict[tuple[int, int], Workspace] = {}


def workspace(index: int, blocks: int) -> Workspace:
    """Of so many partial sums: one for each stream. A graph being captured gets its own: any stream may replay it."""
    handle = raw_stream(index)
    if handle and torch.cuda.is_current_stream_capturing():  # the default stream cannot be
        return new_workspace(blocks, torch.device("cuda", index))
    key = (index, handle)
    kept = _workspaces.get(key)
    if kept is None or kept.ticket - kept.partial < 8 * blocks:
        kept = _workspaces[key] = new_workspace(blocks, torch.device("cuda", index))
    return kept


def new_workspace(blocks: int, device: torch.device) -> Workspace:
    numbers = torch.zeros(blocks + 1, dtype=torch.float64, device=device)
    return Workspace(numbers, numbers.data_ptr(), numbers.data_ptr() + 8 * blocks)
