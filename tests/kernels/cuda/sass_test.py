#!/usr/bin/env python3
"""What the compiler made of the fused kernel: the multiplying loop is as fast as its worst habit.

ptxas orders all multiplications one behind the other when it finds too few registers (C7512) and says so in a
note only; the results stay right. Seen from here, every multiplication is then followed by a wait for all.

usage: sass_test.py --cuobjdump CUOBJDUMP LIBRARY
"""
import argparse
import re
import subprocess
import sys

VARIANTS = 12  # six ranges of token tiles for each weight format
MAX_LOOP_SPILLS = 32  # local memory between the first and the last multiplication of a kernel, 24 today


def kernels(sass):
    """Yields (name, instructions) of every kernel of the layer."""
    for part in sass.split("Function : ")[1:]:
        name, body = part.split("\n", 1)
        if "moe_layer_kernel" in name:
            yield name.strip(), re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(.*?);", body)


def defects(instructions):
    multiplications = [i for i, text in enumerate(instructions) if "HGMMA" in text]
    if not multiplications:
        return ["no multiplication on the tensor cores"]
    found = []
    widths = {re.search(r"HGMMA\.(\S+?)\.", instructions[i]).group(1) for i in multiplications}
    waits_for_all = [t for t in instructions if re.search(r"WARPGROUP\.DEPBAR\S* gsb0, 0x0", t)]
    if len(waits_for_all) > len(widths):
        found.append(f"{len(waits_for_all)} waits for all multiplications, {len(widths)} tiles need one each")
    loop = instructions[multiplications[0] : multiplications[-1]]
    spills = [t for t in loop if re.match(r"(@\S+ )?(STL|LDL)", t)]
    if len(spills) > MAX_LOOP_SPILLS:
        found.append(f"{len(spills)} accesses to local memory among the multiplications")
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuobjdump", required=True)
    parser.add_argument("library")
    options = parser.parse_args()
    sass = subprocess.run([options.cuobjdump, "-sass", options.library], check=True, capture_output=True,
                          text=True, timeout=240).stdout
    found = {name: defects(instructions) for name, instructions in kernels(sass)}
    for name, what in found.items():
        for text in what:
            print(f"{name}: {text}")
    print(f"{len(found)} kernels looked at")
    return 0 if len(found) == VARIANTS and not any(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
