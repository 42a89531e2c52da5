"""The real daemon on a GPU: golden answers, self tests, and the same answers as on the CPU.

    daemon_test.py --expertd BINARY --source ROOT

With EXPERTD_TEST_RANKS=2 the same on two GPUs, and what only several ranks can show. Skipped (status 77) where
`expertd serve --backend cuda` finds too few devices.
"""
import json
import os
import signal
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "integration"))
import harness  # noqa: E402
from golden_requests import as_bytes, output_of, relative_l2, unpack  # noqa: E402

GOLDEN_CASES = ("v4-mxfp4", "v4-nvfp4", "v4-nvfp4-pow2", "qwen3-nvfp4")
BOUND = 0.005  # rel-L2 of BF16 activations, intermediates and outputs
USAGE, DATA_ERROR = 2, 65  # config/exit_codes.h
RANKS = int(os.environ.get("EXPERTD_TEST_RANKS", "1"))


def vectors(case, *path):
    return os.path.join(harness.source, "tests", "vectors", case, *path)


def golden_requests(case):
    """The requests of a case, mtp's left out: they are numbered by the server."""
    with open(vectors(case, "requests.json")) as file:
        described = json.load(file)
    for request in described["requests"]:
        tensors = {}
        for key in ("hidden", "ids", "weights", "expected_f64"):
            with open(vectors(case, request[key]), "rb") as file:
                tensors[key] = file.read()
        yield {**request, "H": described["hidden_size"], "bytes": tensors,
               "expected": unpack("d", tensors["expected_f64"])}


class GpuTestCase(harness.TestCase):
    def gpu_daemon(self, *flags, **options):
        return self.daemon("--ranks", RANKS, *flags, backend="cuda", **options)

    def ask(self, daemon, *arguments):
        out, _ = self.expect_status(0, harness.run("call", daemon.address, *arguments))
        return out

    def answer(self, daemon, *arguments):
        found = json.loads(self.ask(daemon, "--json", *arguments))
        return output_of({"output": found.get("output", ""),
                          "output_dtype": found.get("outputDtype", found.get("output_dtype"))})

    def checkpoint(self, *flags):
        path = os.path.join(self.directory(), "checkpoint")
        self.expect_status(0, harness.run("make-checkpoint", path, *flags))
        return path


class GpuDaemonTest(GpuTestCase):
    def test_golden_requests_are_answered_within_twice_the_stated_error(self):
        for case in GOLDEN_CASES:
            daemon = self.gpu_daemon(checkpoint=vectors(case, "checkpoint"))
            count = 0
            for request in golden_requests(case):
                path = os.path.join(self.directory(), "request.json")
                with open(path, "w") as out:
                    json.dump(as_bytes(request), out)
                error = relative_l2(self.answer(daemon, "--input", path), request["expected"])
                self.assertLessEqual(error, 2 * request["expected_rel_l2_bf16"],
                                     f"{case} {request['name']}")
                count += 1
            print(f"{case}: {count} golden requests; {self.ask(daemon, '--info').strip()}")
            self.assertGreater(count, 3)

    def test_every_layer_passes_its_self_test(self):
        for case in GOLDEN_CASES:
            daemon = self.gpu_daemon(checkpoint=vectors(case, "checkpoint"))
            results = json.loads(self.ask(daemon, "--self-test", "all", "--tokens", "8", "--json"))
            self.assertGreaterEqual(len(results), 2)
            self.assertTrue(all(result["passed"] for result in results), results)

    def test_cpu_and_gpu_answers_agree(self):
        shapes = (("--hidden", "1024", "--intermediate", "640", "--experts", "16", "--top-k", "4"),
                  ("--hidden", "2880", "--intermediate", "2880", "--experts", "4", "--top-k", "4"))
        for shape in shapes:
            for recipe in ("mxfp4", "nvfp4"):
                path = self.checkpoint(*shape, "--layers", "0-1", "--recipe", recipe)
                gpu = self.gpu_daemon(checkpoint=path)
                cpu = self.daemon(backend="cpu", checkpoint=path)
                self.assertIn("passed", self.ask(gpu, "--self-test", "all", "--tokens", "4"))
                for layer in ("0", "1"):
                    for tokens in ("1", "64", "200"):
                        request = ("--layer", layer, "--tokens", tokens, "--seed", tokens)
                        error = relative_l2(self.answer(gpu, *request), self.answer(cpu, *request))
                        self.assertLess(error, BOUND, f"{shape} {recipe} {request}")
                        same = self.answer(gpu, *request)
                        self.assertEqual(same, self.answer(gpu, *request))
                print(f"{' '.join(shape)} {recipe}: CPU and GPU agree")
                gpu.stop()
                cpu.stop()

    def test_auto_finds_the_gpu_and_sigterm_ends_with_zero(self):
        daemon = self.daemon(backend="auto")
        self.assertIn("cuda", self.ask(daemon, "--info"))
        daemon.send(signal.SIGTERM)
        self.assertEqual(0, daemon.wait())

    def test_what_cannot_be_served_is_refused_at_start(self):
        narrow = self.checkpoint("--hidden", "96", "--intermediate", "64", "--experts", "2")
        daemon = self.gpu_daemon(checkpoint=narrow, ready=False)
        self.assertEqual(DATA_ERROR, daemon.wait())
        self.assertIn("multiple of 64", daemon.output()[1])
        for flags, text in ((("--ranks", "99"), "at most one a visible GPU"),
                            (("--devices", "63"), "device 63 does not exist"),
                            (("--devices", "0,0"), "named twice"),
                            (("--devices", "0", "--ranks", "2"), "number of devices")):
            status, _, error = harness.run("serve", vectors("v4-mxfp4", "checkpoint"), "--backend", "cuda",
                                           "--listen", "127.0.0.1:0", *flags)
            self.assertEqual(USAGE, status, error)
            self.assertIn(text, error)


@unittest.skipIf(RANKS < 2, "needs EXPERTD_TEST_RANKS >= 2")
class SeveralRanksTest(GpuTestCase):
    def test_rows_of_one_request_are_spread_over_the_ranks(self):
        path = self.checkpoint("--hidden", "1024", "--intermediate", "512", "--experts", "18", "--top-k", "4",
                               "--layers", "0-1")
        both = self.gpu_daemon("--max-tokens-per-rank", "32", checkpoint=path)
        one = self.daemon("--ranks", "1", "--max-tokens-per-rank", 32 * RANKS, backend="cuda", checkpoint=path)
        info = json.loads(self.ask(both, "--info", "--json"))
        print(info)
        most = 32 * RANKS
        for tokens in (1, 2, 3, most - 1, most):
            request = ("--layer", "1", "--tokens", str(tokens), "--seed", "7")
            error = relative_l2(self.answer(both, *request), self.answer(one, *request))
            self.assertLess(error, BOUND, tokens)
        status, _, error = harness.run("call", both.address, "--layer", "1", "--tokens", str(most + 1))
        self.assertNotEqual(0, status)
        self.assertIn(f"sized for {most}", error)

    def test_partial_rows_may_cross_as_bf16(self):
        for case in GOLDEN_CASES[:2]:
            daemon = self.gpu_daemon("--partials", "bf16", checkpoint=vectors(case, "checkpoint"))
            self.assertIn("partial rows BF16", self.ask(daemon, "--info"))
            self.assertIn("passed", self.ask(daemon, "--self-test", "all", "--tokens", "8"))

    def test_replicas_answer_alike(self):
        daemon = self.gpu_daemon("--redundant-slots", "2", checkpoint=vectors("v4-mxfp4", "checkpoint"))
        self.assertIn("passed", self.ask(daemon, "--self-test", "all", "--tokens", "8"))


def setUpModule():
    harness.skip_without_gpu(RANKS)


if __name__ == "__main__":
    harness.main()
