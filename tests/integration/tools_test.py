"""`expertd call`, `bench` and `inspect` against the real daemon: output, JSON, exit status."""
import json
import os
import signal
import time

import harness
from golden_requests import as_bytes, as_numbers, load_requests, output_of, relative_l2

NOBODY = "127.0.0.1:1"  # a port that no test listens on


class ToolTest(harness.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = harness.Daemon("--ranks", harness.RANKS, "--model-name", "golden")

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def call(self, *arguments, status=0, stdin=None):
        return self.expect_status(status, harness.run("call", self.server.address, *arguments,
                                                      stdin=stdin))

    def request_file(self, request):
        path = os.path.join(self.directory(), "request.json")
        with open(path, "w") as out:
            json.dump(request, out)
        return path


class CallTest(ToolTest):
    def test_health(self):
        self.assertEqual("SERVING\n", self.call("--health")[0])
        self.assertEqual("SERVING\n", self.call("--health", "--service", "")[0])
        out, error = self.call("--health", "--service", "nobody", status=1)
        self.assertIn("nobody", error)

    def test_info_layers_and_progress_for_people(self):
        out, _ = self.call("--info")
        for part in ("serving", "golden", harness.BACKEND, f"{harness.RANKS} ranks"):
            self.assertIn(part, out)
        self.assertEqual(3, len(self.call("--layers")[0].splitlines()))
        self.assertRegex(self.call("--progress")[0], r"^serving: ")

    def test_info_layers_and_progress_as_json(self):
        self.assertEqual("golden", json.loads(self.call("--info", "--json")[0])["model"])
        layers = json.loads(self.call("--layers", "--json")[0])["layers"]
        self.assertEqual([0, 1], [layer["layer"] for layer in layers])
        self.assertEqual("STATE_SERVING", json.loads(self.call("--progress", "--json")[0])["state"])

    def test_self_test_of_all_layers_and_of_one(self):
        out, _ = self.call("--self-test", "all", "--tokens", "8")
        self.assertEqual(2, out.count("passed"))
        results = json.loads(self.call("--self-test", "1", "--json")[0])
        self.assertEqual([1], [result["layer"] for result in results])
        self.assertTrue(results[0]["passed"])

    def test_a_made_up_batch_shows_values_norm_and_timing(self):
        out, _ = self.call("--layer", "1", "--tokens", "2", "--top-k", "3", "--seed", "4")
        for part in ("2 tokens", "top-3", "token 0:", "token 1:", "norm", "kernel", "client:"):
            self.assertIn(part, out)
        self.assertIn("0 of 512 values not finite", out)

    def test_the_seed_decides_the_answer_and_f32_refines_it(self):
        def outputs(*arguments):
            return output_of({**json.loads(self.call("--layer", "0", "--json", *arguments)[0]),
                              "output_dtype": "DTYPE_F32" if "f32" in arguments else "DTYPE_BF16"})
        self.assertEqual(outputs("--seed", "1"), outputs("--seed", "1"))
        self.assertNotEqual(outputs("--seed", "1"), outputs("--seed", "2"))
        self.assertLess(relative_l2(outputs("--seed", "1"),
                                    outputs("--seed", "1", "--dtype", "f32")), 0.02)

    def test_a_request_file_is_answered_with_the_golden_numbers(self):
        request = load_requests()["l1-t17"]
        for form in (as_numbers, as_bytes):
            out, _ = self.call("--input", self.request_file(form(request)), "--json")
            answer = json.loads(out)
            found = output_of({"output": answer["output"], "output_dtype": answer["outputDtype"],
                               "output_values": answer["outputValues"]})
            self.assertLessEqual(relative_l2(found, request["expected"]),
                                 2 * request["expected_rel_l2_bf16"])

    def test_a_request_can_come_from_standard_input(self):
        request = json.dumps(as_numbers(load_requests()["l0-t1"]))
        out, _ = self.call("--input", "-", stdin=request)
        self.assertIn("1 tokens of H 256", out)

    def test_an_error_of_the_server_is_1_and_one_line(self):
        for arguments, parts in (
                (("--layer", "9"), ["layer", "9", "0, 1"]),
                (("--self-test", "9"), ["layer", "9"]),
                (("--layer", "0", "--tokens", "2049"), ["num_tokens", "2049", str(1024 * harness.RANKS)]),
                (("--self-test", "0", "--tokens", "99"), ["self-test of layer 0", "num_tokens", "99"])):
            _, error = self.call(*arguments, status=1)
            self.assertEqual(1, len(error.splitlines()), error)
            self.assertTrue(error.startswith("expertd call: "), error)
            for part in parts:
                self.assertIn(part, error)

    def test_a_wrong_request_file_is_1_and_names_the_file(self):
        path = os.path.join(self.directory(), "wrong.json")
        for text in ("{", '{"no_such_field": 1}', '{"layer": "zero"}'):
            with open(path, "w") as out:
                out.write(text)
            _, error = self.call("--input", path, status=1)
            self.assertIn("wrong.json", error)
        self.assertIn("/no/such/file", self.call("--input", "/no/such/file", status=1)[1])

    def test_wrong_usage_is_2(self):
        for arguments in ((), ("--info", "--layers"), ("--layer", "0", "--dtype", "fp8"),
                          ("--health", "--wait", "soon"), ("--layer", "0", "--tokens", "-1")):
            self.call(*arguments, status=2)
        self.expect_status(2, harness.run("call", "http://127.0.0.1:1", "--info"))

    def test_nobody_there_is_69_and_said_in_one_line(self):
        for arguments in (("--info",), ("--health", "--wait", "300ms"), ("--layer", "0")):
            _, error = self.expect_status(69, harness.run("call", NOBODY, *arguments))
            self.assertEqual(1, len(error.splitlines()), error)
            self.assertIn(NOBODY, error)


class BenchTest(ToolTest):
    def bench(self, *arguments, status=0):
        path = os.path.join(self.directory(), "report.json")
        out, _ = self.expect_status(status, harness.run("bench", self.server.address, "--json", path,
                                                        *arguments))
        return out, json.loads(harness.read(path))

    def test_unary_and_stream_runs_answer_every_request(self):
        for mode in (("--mode", "unary"), ("--mode", "stream", "--inflight", "3")):
            out, report = self.bench("--requests", "60", "--concurrency", "2", "--tokens", "3",
                                     "--warmup", "50ms", *mode)
            self.assertEqual(60, report["requests"])
            self.assertEqual({}, report["errors"])
            self.assertEqual([0, 1], report["load"]["layers"])
            self.assertGreater(report["requests_per_s"], 0)
            self.assertAlmostEqual(3 * report["requests_per_s"], report["tokens_per_s"], places=3)
            latency = report["latency_us"]
            ordered = [latency[key] for key in ("min", "p50", "p90", "p99", "max")]
            self.assertEqual(sorted(ordered), ordered)
            self.assertGreater(ordered[0], 0)
            self.assertGreater(report["server_us"]["kernel"], 0)
            self.assertLess(report["server_us"]["total"], latency["max"])
            self.assertGreaterEqual(report["step_tokens_mean"], 3)
            for part in ("60 requests", "p99", "requests/s", "tokens/s", "kernel"):
                self.assertIn(part, out)

    def test_a_duration_bounds_the_run(self):
        begin = time.monotonic()
        _, report = self.bench("--layer", "1", "--duration", "500ms", "--warmup", "0s")
        self.assertLess(time.monotonic() - begin, 20)
        self.assertGreaterEqual(report["elapsed_s"], 0.3)
        self.assertLessEqual(report["elapsed_s"], 10)
        self.assertEqual([1], report["load"]["layers"])

    def test_failed_requests_are_counted_by_code_and_end_in_1(self):
        _, report = self.bench("--requests", "3", "--tokens", "60000", "--warmup", "0s", status=1)
        self.assertEqual(0, report["requests"])
        self.assertEqual(3, sum(report["errors"].values()))
        self.assertIn(next(iter(report["errors"])), ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"))
        self.assertTrue(report["first_error"])

    def test_ctrl_c_ends_the_run_with_its_report(self):
        path = os.path.join(self.directory(), "report.json")
        process = self.process("bench", self.server.address, "--duration", "1h", "--warmup", "0s",
                               "--json", path)
        time.sleep(1)
        process.send(signal.SIGINT)
        self.assertEqual(0, process.wait(), process.output())
        report = json.loads(harness.read(path))
        self.assertTrue(report["stopped_early"])
        self.assertGreater(report["requests"], 0)
        self.assertIn("stopped early", process.output()[0])

    def test_json_on_standard_output_is_all_there_is(self):
        out, _ = self.expect_status(0, harness.run("bench", self.server.address, "--requests", "5",
                                                   "--warmup", "0s", "--json", "-"))
        self.assertEqual(5, json.loads(out)["requests"])

    def test_wrong_usage_is_2_and_nobody_there_is_69(self):
        for arguments in (("--inflight", "2"), ("--mode", "lazy"), ("--duration", "1s", "--requests",
                                                                    "5"), ("--concurrency", "0")):
            self.expect_status(2, harness.run("bench", self.server.address, *arguments))
        _, error = self.expect_status(69, harness.run("bench", NOBODY))
        self.assertIn(NOBODY, error)
        self.expect_status(1, harness.run("bench", self.server.address, "--layer", "7"))


class InspectTest(harness.TestCase):
    def test_a_servable_checkpoint_is_0_and_described(self):
        out, _ = self.expect_status(0, harness.run("inspect", harness.golden("checkpoint"),
                                                   "--ranks", "2"))
        self.assertIn("mxfp4", out.lower())
        out, _ = self.expect_status(0, harness.run("inspect", harness.golden("checkpoint"), "--json"))
        json.loads(out)

    def test_layers_are_chosen_as_serve_chooses_them(self):
        def inspect(layers, status):
            return self.expect_status(status, harness.run("inspect", harness.golden("checkpoint"),
                                                          "--layers", layers, "--json"))
        self.assertEqual([1], [layer["layer"] for layer in json.loads(inspect("1-", 0)[0])["layers"]])
        self.assertIn("--layers: found 9-, expected layers from 0 to 1", inspect("9-", 1)[0])
        self.assertIn("A-B, A- or A", "".join(inspect("x", 2)))

    def test_a_broken_checkpoint_is_not_0(self):
        path = os.path.join(self.directory(), "broken")
        self.expect_status(0, harness.run("make-checkpoint", path, "--break", "missing-scale"))
        status, out, error = harness.run("inspect", path)
        self.assertEqual(1, status, out + error)
        self.assertIn("scale", out + error)


if __name__ == "__main__":
    harness.main()
