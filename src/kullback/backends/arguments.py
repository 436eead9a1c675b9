"""A kernel's argument list is written once, in its own source; read here for whoever calls it.

C kernels take a pointer to a struct; CUDA kernels take scalars, of which a struct may be made. Either way a call names
what it passes: `Arguments(x=..., rows=...)` of `table(...)` is a tuple in the kernel's order.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from kullback.work import OF_ROWS, Rows

COMMENT = re.compile(r"/\*.*?\*/", re.S)
DECLARATION = re.compile(r"(?P<type>.*?)(?P<name>\w+)(?:\[(?P<count>\w+)\])?$")
C_TYPES = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "double": ctypes.c_double}

FIRST_TENSOR = Rows._fields.index("known")

Table = Callable[..., tuple[Any, ...]]  # of addresses and numbers; of text, where a call is printed


def address(tensor: Tensor | None) -> int:
    """Of its first element; 0 of none."""
    return 0 if tensor is None else tensor.data_ptr()


def struct_fields(source: str, name: str) -> dict[str, str]:
    """The fields of a struct and their C types; an array's elements as `name_0`, `name_1`, ..."""
    source = COMMENT.sub("", source)
    match = re.search(rf"struct {name} {{(.*?)}}|typedef struct {{([^{{}}]*)}} {name};", source, re.S)
    if match is None:
        raise ValueError(f"the source has no struct {name}")
    fields: dict[str, str] = {}
    for statement in filter(str.strip, (match[1] or match[2]).split(";")):
        first, *others = (part.strip() for part in statement.split(","))
        kind = DECLARATION.match(" ".join(first.split()))
        assert kind is not None
        for declared in (first, *(kind["type"] + other for other in others)):
            found = DECLARATION.match(" ".join(declared.split()))
            assert found is not None
            names = [found["name"]]
            if found["count"]:
                names = [f"{found['name']}_{i}" for i in range(int(found["count"]))]
            fields |= dict.fromkeys(names, found["type"].strip())
    return fields


def parameters(source: str, kernel: str) -> list[str]:
    """The names of a kernel's parameters."""
    match = re.search(rf"\b{kernel}\(([^)]*)\)", COMMENT.sub("", source))
    if match is None:
        raise ValueError(f"the source has no kernel {kernel}")
    return [re.findall(r"\w+", parameter)[-1] for parameter in match[1].split(",")]


def table(names: Iterable[str]) -> Table:
    """What a call passes by name, as a tuple in that order. Made as text: a named tuple takes a fifth longer."""
    listed = ", ".join(names)
    scope: dict[str, Table] = {}
    exec(f"def arguments(*, {listed}): return ({listed},)", scope)
    return scope["arguments"]


def after_tensors(names: Iterable[str], of_rows: Sequence[str] = OF_ROWS) -> list[str]:
    """Those that follow the tensors of a record `Rows`: these come first, in its order, and are passed as they are.

    `of_rows`: which operands that have a number for each row a kernel takes.
    """
    names = list(names)
    tensors = ["x", "y", *of_rows, *(name for name in Rows._fields[FIRST_TENSOR:] if name in names)]
    if names[: len(tensors)] != tensors:
        raise ValueError(f"a kernel's arguments must begin with {', '.join(tensors)}; got {', '.join(names)}")
    return names[len(tensors) :]


def structure(fields: dict[str, str]) -> type[ctypes.Structure]:
    """A struct as ctypes has it, made of its fields in order."""
    kinds = [(name, ctypes.c_void_p if "*" in kind else C_TYPES[kind]) for name, kind in fields.items()]
    return type("Arguments", (ctypes.Structure,), {"_fields_": kinds})


WIRE_TYPES = dict.fromkeys(("float", "double", "real"), "double")  # how numbers are passed; others as long long


def print_entry(kernel: str, bounds: str, structs: dict[str, dict[str, str]]) -> str:
    """A CUDA kernel that takes the structs' fields as scalars, and calls `run` on the `Arguments` made of them."""
    signature, values = [], []
    for fields in structs.values():
        parts: dict[str, list[str]] = {}
        for name, kind in fields.items():
            wire = kind if "*" in kind else WIRE_TYPES.get(kind, "long long")
            signature.append(f"{wire} {name}")
            value = name if kind == wire else f"({kind}){name}"
            parts.setdefault(re.sub(r"_\d+$", "", name), []).append(value)
        grouped = (part[0] if len(part) == 1 else f"{{ {', '.join(part)} }}" for part in parts.values())
        values.append(f"{{ {', '.join(grouped)} }}")
    return (
        f'namespace kullback {{\nextern "C" __global__ void {bounds}\n{kernel}({", ".join(signature)})\n'
        f"{{\n    run(Arguments {{ {', '.join(values)} }});\n}}\n}}\n"
    )
