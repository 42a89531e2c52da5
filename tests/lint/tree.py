#!/usr/bin/env python3
"""Rules about the tree as a whole.

usage: tree.py ROOT

- README.md's folder table has every top folder.
- No file beside the golden vectors is larger than 1 MB.
- A tensor field of our proto (bytes, or repeated numbers) has its shape in a comment: // [T, H] ...
- Text files are ASCII, apart from the characters that diagrams need.
"""
import re
import subprocess
import sys
from pathlib import Path

MAX_BYTES = 1_000_000
LARGE_ALLOWED = ("tests/vectors/",)
TEXT = {".h", ".cc", ".cuh", ".cu", ".py", ".md", ".proto", ".cmake", ".txt", ".toml", ".yaml", ".json",
        ".service"}
DRAWING = set("→←↑↓─│┌┐└┘├┤┬┴┼►◄▲▼×≤≥µ")
TENSOR = re.compile(r"^\s*(?:bytes|repeated\s+(?:float|double|u?int32|u?int64))\s+(\w+)\s*=\s*\d+;(.*)$")


def tracked_files(root):
    """Files that git knows or would add; all files where there is no git."""
    listing = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard", "-z"],
                             capture_output=True, check=False)
    if listing.returncode == 0:
        names = [name for name in listing.stdout.decode().split("\0") if name]
    else:
        names = [str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_file()]
    return sorted(name for name in names
                  if not name.startswith("build/") and (Path(root) / name).is_file())


def check_readme_table(root, files):
    folders = sorted({name.split("/")[0] for name in files if "/" in name})
    rows = (root / "README.md").read_text(encoding="utf-8").splitlines()
    table = [row for row in rows if row.startswith("|")]
    return [f"README.md: no row of the folder table starts with `{folder}/`" for folder in folders
            if not any(row.startswith(f"| `{folder}/`") for row in table)]


def check_sizes(root, files):
    return [f"{name}: {size} bytes, more than {MAX_BYTES}" for name in files
            if not name.startswith(LARGE_ALLOWED) and (size := (root / name).stat().st_size) > MAX_BYTES]


def check_proto(root, files):
    errors = []
    for name in files:
        if not name.startswith("proto/expertd/") or not name.endswith(".proto"):
            continue
        for number, line in enumerate((root / name).read_text(encoding="utf-8").splitlines(), 1):
            match = TENSOR.match(line)
            if match and not re.search(r"//\s*\[[^\]]+\]", match[2]):
                errors.append(f"{name}:{number}: {match[1]} needs its shape in a comment: // [T, H] ...")
    return errors


def check_characters(root, files):
    errors = []
    for name in files:
        if Path(name).suffix not in TEXT or name.startswith(LARGE_ALLOWED):
            continue
        for number, line in enumerate((root / name).read_text(encoding="utf-8").splitlines(), 1):
            bad = sorted({c for c in line if ord(c) > 126 and c not in DRAWING})
            if bad:
                errors.append(f"{name}:{number}: not ASCII: {' '.join(f'U+{ord(c):04X}' for c in bad)}")
    return errors


def main():
    root = Path(sys.argv[1])
    files = tracked_files(root)
    errors = [error for check in (check_readme_table, check_sizes, check_proto, check_characters)
              for error in check(root, files)]
    print("\n".join(errors + [f"tree: {len(files)} files, {len(errors)} errors"]))
    return 1 if errors or not files else 0


if __name__ == "__main__":
    sys.exit(main())
