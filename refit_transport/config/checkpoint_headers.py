"""Names, shapes and dtypes of a checkpoint, from the headers of its safetensors files, without reading any weight."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from refit_transport.layout.layout import LogicalParameter

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""dtype names of the safetensors format, and torch's."""


def read_headers(folder: Path) -> list[LogicalParameter]:
    """Every tensor of the ``*.safetensors`` files in ``folder``, by file and then in the file's order; empty when there
    are none. Raises ValueError that names a file which is cut off or has an unknown dtype."""
    return [parameter for file in sorted(folder.glob("*.safetensors")) for parameter in _read_header(file)]


def _read_header(file: Path) -> list[LogicalParameter]:
    with file.open("rb") as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        except (struct.error, ValueError, OverflowError) as error:
            raise ValueError(f"{file} has no readable safetensors header: {error}") from None
    header.pop("__metadata__", None)
    unknown = {entry["dtype"] for entry in header.values()} - set(DTYPES)
    if unknown:
        raise ValueError(
            f"{file} has tensors of unknown dtype {', '.join(sorted(unknown))}; known: {', '.join(DTYPES)}"
        )
    return [LogicalParameter(name, tuple(e["shape"]), DTYPES[e["dtype"]]) for name, e in header.items()]
