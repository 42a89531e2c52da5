#!/usr/bin/env python3
"""What the compiler made of the fused kernel, where it says nothing or only notes what it did.

* Multiplications: ptxas orders them all one behind the other when it finds too few registers (C7512); the results
  stay right. Seen from here, every multiplication is then followed by a wait for all.
* Records: ptxas makes narrow loads of a relaxed 128-bit load of which only some words are used, and a record may
  then be seen in part. All words are used for that reason, and each load must be whole: relaxed at system scope
  nothing else than flags and records is loaded, and flags are words.
* The claim: where a warp's lanes add the same, ptxas adds once for all and hands the answer round (SHFL), so that
  the claiming thread waits for it at once.

sass_checks_test.py holds the checks to instructions that must not pass.

usage: sass_test.py --cuobjdump CUOBJDUMP LIBRARY
"""
import argparse
import re
import subprocess
import sys

VARIANTS = 12  # six ranges of token tiles for each weight format
MAX_LOOP_SPILLS = 32  # local memory between the first and the last multiplication of a kernel, 3 today
MAX_FLAG_LOADS = 20  # instructions that load a flag or a stop word, 19 today
CLAIM_DISTANCE = 32  # instructions behind a claim that hand nothing round; ptxas put the first SHFL 6 behind


def kernels(sass):
    """Yields (name, instructions) of every kernel of the layer."""
    for part in sass.split("Function : ")[1:]:
        name, body = part.split("\n", 1)
        if "moe_layer_kernel" in name:
            yield name.strip(), re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(.*?)\s*;", body)


def multiplication_defects(instructions):
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


def record_defects(instructions):
    loads = [t for t in instructions if re.match(r"(@\S+ )?LD\S*\.STRONG\.SYS\b", t)]
    if not any(".128." in t for t in loads):
        return ["no record is loaded as a whole"]
    found = [f"a record is loaded in part: {t}" for t in loads if ".64." in t]
    words = sum(".128." not in t and ".64." not in t for t in loads)
    if words > MAX_FLAG_LOADS:
        found.append(f"{words} words are loaded at system scope, more than there are flags: parts of records?")
    return found


def claim_defects(instructions):
    claims = [i for i, text in enumerate(instructions) if re.match(r"(@\S+ )?ATOM\S*\.ADD\.64\b", text)]
    if len(claims) != 1:
        return [f"{len(claims)} additions to the claim, expected 1"]
    behind = instructions[claims[0] + 1 : claims[0] + 1 + CLAIM_DISTANCE]
    return ["the answer to a claim is handed round the warp at once"] if any("SHFL" in t for t in behind) else []


def defects(instructions):
    return multiplication_defects(instructions) + record_defects(instructions) + claim_defects(instructions)


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
