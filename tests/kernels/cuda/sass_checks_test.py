#!/usr/bin/env python3
"""Every check of sass_test.py, seen passing on the instructions of a small good kernel and failing on broken ones."""
import unittest

import sass_test

LOAD = "@!P1 LDG.E.128.STRONG.SYS R8, desc[UR8][R2.64]"
CLAIM = "ATOMG.E.ADD.64.STRONG.GPU PT, R2, desc[UR8][R2.64], R4"
MULTIPLICATION = "HGMMA.64x8x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0"
WAIT_FOR_ALL = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
HAND_ROUND = "SHFL.IDX PT, R2, R4, R9, 0x1f"
OTHER = "IADD3 R1, R1, 0x1, RZ"

GOOD = [LOAD, MULTIPLICATION, "WARPGROUP.DEPBAR.LE gsb0, 0x1", MULTIPLICATION, WAIT_FOR_ALL,
        CLAIM, *[OTHER] * sass_test.CLAIM_DISTANCE, HAND_ROUND]


def text_of(name, instructions):
    """As cuobjdump prints a function: an address before each instruction, its code behind."""
    lines = [f"        /*{16 * i:04x}*/   {text} ;   /* 0x000000000000794d */\n" for i, text in enumerate(instructions)]
    return f"\t\tFunction : {name}\n" + "".join(lines)


class SassChecksTest(unittest.TestCase):
    def assert_found(self, instructions, message):
        found = sass_test.defects(instructions)
        self.assertEqual(len(found), 1, found)
        self.assertIn(message, found[0])

    def test_a_good_kernel_passes(self):
        self.assertEqual(sass_test.defects(GOOD), [])

    def test_kernels_of_the_layer_are_found_in_what_cuobjdump_prints(self):
        text = text_of("other", [OTHER]) + text_of("_Z16moe_layer_kernelILi8EE", GOOD)
        self.assertEqual(list(sass_test.kernels(text)), [("_Z16moe_layer_kernelILi8EE", GOOD)])

    def test_a_wait_behind_every_multiplication_is_found(self):
        self.assert_found([*GOOD, MULTIPLICATION, WAIT_FOR_ALL], "2 waits for all multiplications, 1 tiles")

    def test_spills_among_the_multiplications_are_found(self):
        spills = ["@P0 STL [R1+0x8], R3"] * (sass_test.MAX_LOOP_SPILLS + 1)
        self.assert_found([*GOOD[:2], *spills, *GOOD[2:]], "accesses to local memory")

    def test_a_kernel_without_multiplications_is_found(self):
        self.assert_found([t for t in GOOD if t != MULTIPLICATION], "no multiplication")

    def test_a_narrow_load_of_a_record_is_found(self):
        narrow = LOAD.replace(".128", ".64")
        self.assert_found([*GOOD, narrow], f"a record is loaded in part: {narrow}")

    def test_records_loaded_word_by_word_are_found(self):
        words = [LOAD.replace(".128", "")] * (sass_test.MAX_FLAG_LOADS + 1)
        self.assert_found([*GOOD, *words], f"{len(words)} words are loaded at system scope")

    def test_records_loaded_by_ordinary_accesses_are_found(self):
        plain = LOAD.replace(".STRONG.SYS", "")
        self.assert_found([plain, *GOOD[1:]], "no record is loaded as a whole")

    def test_a_claim_whose_answer_is_handed_round_is_found(self):
        at = GOOD.index(CLAIM) + 6
        self.assert_found([*GOOD[:at], HAND_ROUND, *GOOD[at:]], "handed round")

    def test_a_claim_that_is_not_there_or_there_twice_is_found(self):
        self.assert_found([t for t in GOOD if t != CLAIM], "0 additions")
        self.assert_found([f"@P0 {CLAIM}", *GOOD], "2 additions")


if __name__ == "__main__":
    unittest.main()
