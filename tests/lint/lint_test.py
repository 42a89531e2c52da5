#!/usr/bin/env python3
"""Every rule of includes.py and tree.py, seen passing on a small good tree and failing on a broken one."""
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent

GOOD = {
    "README.md": "| folder | purpose |\n|---|---|\n| `config/` | x |\n| `proto/` | x |\n"
                 "| `kernels/` | x |\n| `server/` | x |\n",
    "config/a.h": "#pragma once\n",
    "config/a.cc": '#include "config/a.h"\n#include <vector>\n',
    "kernels/backend.h": '#pragma once\n#include "config/a.h"\n',
    "kernels/cpu/cpu.h": '#pragma once\n#include "kernels/backend.h"\n',
    "kernels/cuda/device.h": "#pragma once\n#include <cuda_runtime.h>\n",
    "server/service.h": '#pragma once\n#include <grpcpp/grpcpp.h>\n#include "expertd/v1/expertd.pb.h"\n',
    "proto/expertd/v1/a.proto": "  bytes hidden = 1;  // [T, H]\n  string name = 2;\n",
}


def run(script, change=None):
    """Exit status and output of a lint script over the good tree with `change` (file -> text) applied."""
    with tempfile.TemporaryDirectory() as root:
        for name, text in {**GOOD, **(change or {})}.items():
            path = Path(root) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        result = subprocess.run([sys.executable, str(HERE / script), root], capture_output=True, text=True,
                                timeout=60, check=False)
        return result.returncode, result.stdout + result.stderr


class LintTest(unittest.TestCase):
    def assert_refused(self, script, change, message):
        status, output = run(script, change)
        self.assertEqual(status, 1, output)
        self.assertIn(message, output)

    def test_the_good_tree_passes(self):
        for script in ("includes.py", "tree.py"):
            status, output = run(script)
            self.assertEqual(status, 0, output)

    def test_an_upward_include_is_refused(self):
        for path, included in [("config/b.h", "kernels/backend.h"), ("kernels/backend.h", "loader/plan.h"),
                               ("kernels/step.h", "kernels/cpu/cpu.h"),
                               ("kernels/layout/tile.h", "kernels/backend.h"),
                               ("kernels/cpu/x.h", "kernels/cuda/device.h"),
                               ("loader/plan.h", "server/service.h"), ("server/x.h", "tests/testing/y.h"),
                               ("server/x.h", "kernels/cuda/device.h"),
                               ("loader/plan.h", "expertd/v1/expertd.pb.h")]:
            with self.subTest(path=path):
                self.assert_refused("includes.py", {path: f'#pragma once\n#include "{included}"\n'},
                                    f"{path}:2: includes {included}")

    def test_grpc_and_cuda_stay_where_they_belong(self):
        self.assert_refused("includes.py", {"loader/x.h": "#pragma once\n#include <grpcpp/grpcpp.h>\n"},
                            "may know gRPC")
        self.assert_refused("includes.py", {"server/x.h": "#pragma once\n#include <cuda_runtime.h>\n"},
                            "may know CUDA")

    def test_a_path_that_is_not_from_the_root_is_refused(self):
        self.assert_refused("includes.py", {"config/b.h": '#pragma once\n#include "a.h"\n'},
                            "write the path from the root")

    def test_a_source_that_does_not_include_its_header_first_is_refused(self):
        self.assert_refused("includes.py", {"config/a.cc": '#include <vector>\n#include "config/a.h"\n'},
                            "must include config/a.h first")

    def test_a_header_without_pragma_once_is_refused(self):
        self.assert_refused("includes.py", {"config/b.h": "int b;\n"}, "needs #pragma once")

    def test_a_folder_that_the_readme_does_not_name_is_refused(self):
        self.assert_refused("tree.py", {"misc/x.txt": "x\n"}, "`misc/`")

    def test_a_large_file_is_refused(self):
        self.assert_refused("tree.py", {"config/big.txt": "x" * 1_000_001}, "more than 1000000")

    def test_a_tensor_field_without_its_shape_is_refused(self):
        self.assert_refused("tree.py", {"proto/expertd/v1/a.proto": "  bytes hidden = 1;  // states\n"},
                            "hidden needs its shape")

    def test_a_character_outside_ascii_is_refused(self):
        self.assert_refused("tree.py", {"config/b.txt": "a \u2014 b\n"}, "U+2014")


if __name__ == "__main__":
    unittest.main()
