#!/usr/bin/env python3
"""Checks the #include lines of the tree: which folder may use which, and what proves a header whole.

usage: includes.py ROOT
"""
import re
import sys
from pathlib import Path

# The one table: a folder and what it may include of the tree, apart from itself. The longest matching
# folder decides; an entry allows what lies below it too.
MAY_USE = {
    "config": [],
    "proto": [],
    "kernels": ["config", "kernels/*"],  # the interfaces: backend.h, step.h, formats.h
    "kernels/layout": ["config", "kernels/formats.h"],
    "kernels/reference": ["config", "kernels/*", "kernels/layout"],
    "kernels/cpu": ["config", "kernels/*", "kernels/layout"],
    "kernels/cuda": ["config", "kernels/*", "kernels/layout"],
    "loader": ["config", "kernels/*", "kernels/layout", "kernels/reference", "kernels/cpu"],
    "server": ["config", "kernels/*", "kernels/layout", "kernels/reference", "kernels/cpu",
               "kernels/cuda/cuda_backend.h", "loader", "expertd/", "grpc/"],
    "tests": ["config", "kernels", "loader", "server", "expertd/", "grpc/"],
}

# What comes from outside and only some folders may know.
OUTSIDE = [
    (re.compile(r"^(grpc|grpcpp|google/protobuf)/|^grpc/"), ["server", "tests"], "gRPC and Protobuf"),
    (re.compile(r"^(cuda|nccl|cooperative_groups)"), ["kernels/cuda", "tests/gpu", "tests/bench"],
     "CUDA and NCCL"),
    (re.compile(r"^CLI/"), ["server", "tests"], "CLI11"),
    (re.compile(r"^(gtest|gmock)/"), ["tests"], "GoogleTest"),
]

SOURCES = {".h", ".cc", ".cuh", ".cu"}
TOP = ["config", "proto", "kernels", "loader", "server", "tests"]
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def folder_of(path, table):
    """The longest key of `table` that is `path` or a folder above it."""
    parts = path.split("/")
    for length in range(len(parts), 0, -1):
        key = "/".join(parts[:length])
        if key in table:
            return key
    return None


def allowed(included, entry):
    if entry.endswith("/*"):  # the files directly in the folder
        return re.fullmatch(re.escape(entry[:-1]) + r"[^/]+", included) is not None
    return included == entry or included.startswith(entry.rstrip("/") + "/")


def check_line(path, included):
    """An error text, or None."""
    folder = folder_of(path, MAY_USE)
    for pattern, folders, what in OUTSIDE:
        if pattern.search(included):
            if not any(allowed(path, owner) for owner in folders):
                return f"includes {included}: only {', '.join(folders)} may know {what}"
    ours = included.split("/")[0] in TOP + ["expertd"]
    if not ours or folder_of(included, MAY_USE) == folder:
        return None
    if any(allowed(included, entry) for entry in MAY_USE[folder]):
        return None
    return f"includes {included}: {folder} may use only {', '.join(MAY_USE[folder]) or 'itself'}"


def check_file(root, path):
    errors = []
    lines = (root / path).read_text(encoding="utf-8").splitlines()
    includes = [(number, match[1], match[2]) for number, line in enumerate(lines, 1)
                if (match := INCLUDE.match(line))]
    for number, quote, included in includes:
        if quote == '"' and "/" not in included:
            errors.append(f"{path}:{number}: includes {included}: write the path from the root")
        elif error := check_line(path, included):
            errors.append(f"{path}:{number}: {error}")
    # A header with a source of the same name is proven to stand alone by being included first there.
    # The build compiles the other headers alone (tests/lint/CMakeLists.txt).
    header = str(Path(path).with_suffix(".h"))
    if path.endswith(".cc") and (root / header).exists():
        if not includes or includes[0][2] != header:
            errors.append(f"{path}:1: must include {header} first, which proves that it stands alone")
    if path.endswith((".h", ".cuh")) and "#pragma once" not in lines:
        errors.append(f"{path}:1: a header needs #pragma once")
    return errors


def main():
    root = Path(sys.argv[1])
    files = sorted(str(path.relative_to(root)) for top in TOP if (root / top).is_dir()
                   for path in (root / top).rglob("*") if path.suffix in SOURCES)
    errors = [error for path in files for error in check_file(root, path)]
    print("\n".join(errors + [f"includes: {len(files)} files, {len(errors)} errors"]))
    return 1 if errors or not files else 0


if __name__ == "__main__":
    sys.exit(main())
