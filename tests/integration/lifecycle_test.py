"""How `expertd serve` starts and ends: address, signals, exit codes, broken checkpoints."""
import json
import os
import re
import signal
import socket
import subprocess
import time

import harness

EXPERT_SERVICE = "expertd.v1.ExpertService"
# A request stays queued for a second, because its step waits for more; a second one is refused meanwhile.
SLOW = ("--batch-wait-us", "1000000", "--max-queued-requests", "1")


def catches(pid, signal_number):
    """Whether the process has a handler for the signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)$", harness.read(f"/proc/{pid}/status"), re.M)
    return caught is not None and int(caught.group(1), 16) >> (signal_number - 1) & 1 == 1


class StartTest(harness.TestCase):
    def test_port_0_is_printed_and_written_to_the_address_file(self):
        daemon = self.daemon()
        self.assertRegex(daemon.address, r"^127\.0\.0\.1:[1-9]\d+$")
        self.assertEqual(daemon.address, daemon.output()[0].strip())

    def test_a_unix_socket_is_served(self):
        path = os.path.join(self.directory(), "socket")
        daemon = self.daemon(listen=f"unix:{path}")
        self.assertEqual(f"unix:{path}", daemon.address)
        self.expect_status(0, harness.run("call", daemon.address, "--layer", "0"))

    def test_two_daemons_serve_side_by_side(self):
        first, second = self.daemon("--model-name", "first"), self.daemon("--model-name", "second")
        for daemon, name in ((first, "first"), (second, "second")):
            out, _ = self.expect_status(0, harness.run("call", daemon.address, "--info", "--json"))
            self.assertEqual(name, json.loads(out)["model"])
            self.expect_status(0, harness.run("call", daemon.address, "--self-test", "all"))

    def test_the_same_request_has_the_same_answer_for_1_2_4_and_8_ranks(self):
        answers = set()
        for ranks in (1, 2, 4, 8) if harness.BACKEND == "cpu" else (1, 1):
            daemon = self.daemon("--ranks", ranks, "--threads", "2")
            out, _ = self.expect_status(0, harness.run("call", daemon.address, "--layer", "1",
                                                       "--tokens", "9", "--json"))
            answers.add(json.loads(out)["output"])
            daemon.stop()
        self.assertEqual(1, len(answers))

    def test_a_port_in_use_is_71_and_named(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            _, error = self.expect_status(71, harness.run(
                "serve", harness.golden("checkpoint"), "--backend", "cpu", "--listen", address))
        self.assertIn(address, error)

    def test_an_address_file_that_cannot_be_written_is_71_and_named(self):
        path = os.path.join(self.directory(), "no", "such", "folder")
        _, error = self.expect_status(71, harness.run(
            "serve", harness.golden("checkpoint"), "--backend", "cpu", "--listen", "127.0.0.1:0",
            "--address-file", path))
        self.assertIn(path, error)


class BrokenCheckpointTest(harness.TestCase):
    def serve(self, checkpoint):
        return harness.run("serve", checkpoint, "--backend", "cpu", "--listen", "127.0.0.1:0")

    def test_no_checkpoint_is_65_and_named(self):
        path = os.path.join(self.directory(), "nothing-here")
        _, error = self.expect_status(65, self.serve(path))
        self.assertIn(path, error)

    def test_every_way_to_break_a_checkpoint_is_65_with_a_reason(self):
        help_text, _ = self.expect_status(0, harness.run("make-checkpoint", "--help"))
        kinds = re.findall(r"^  ([a-z-]+) {2,}.*?(\(nvfp4\))?$",
                           help_text.split("Kinds of --break:")[1].split("\n\n")[0], re.M)
        self.assertGreaterEqual(len(kinds), 20)
        for kind, needs_nvfp4 in kinds:
            with self.subTest(kind):
                path = os.path.join(self.directory(), kind)
                recipe = "nvfp4" if needs_nvfp4 else "mxfp4"
                self.expect_status(0, harness.run(
                    "make-checkpoint", path, "--recipe", recipe, "--shard-size", "256KiB",
                    "--break", kind))
                _, error = self.expect_status(65, self.serve(path))
                reasons = [line for line in error.splitlines() if line.startswith("expertd serve: ")]
                self.assertTrue(reasons, error)
                self.assertGreater(len(reasons[0]), 40, error)


class ShutdownTest(harness.TestCase):
    def health(self, daemon, service=EXPERT_SERVICE):
        return harness.run("call", daemon.address, "--health", "--service", service)[0]

    def in_flight(self, daemon, timeout="60s"):
        """A request that is in the daemon's queue: seen by another one being refused."""
        for _ in range(10):
            process = self.process("call", daemon.address, "--layer", "0", "--tokens", "3",
                                   "--timeout", timeout, "--attempts", "100")
            while process.popen.poll() is None:
                error = harness.run("call", daemon.address, "--layer", "0", "--attempts", "1")[2]
                if "RESOURCE_EXHAUSTED" in error and process.popen.poll() is None:
                    return process
            self.assertEqual(0, process.wait(), process.output())  # answered too early: again
        raise AssertionError("the request was never seen in the queue")

    def test_an_idle_daemon_ends_with_0_at_once(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            daemon = self.daemon()
            begin = time.monotonic()
            daemon.send(number)
            self.assertEqual(0, daemon.wait(), daemon.output())
            self.assertLess(time.monotonic() - begin, 10)

    def test_a_request_in_flight_is_answered_before_the_end(self):
        daemon = self.daemon(*SLOW)
        request = self.in_flight(daemon)
        daemon.send(signal.SIGTERM)
        self.assertEqual(0, request.wait(), request.output())
        self.assertIn("3 tokens", request.output()[0])
        self.assertEqual(0, daemon.wait(), daemon.output())

    def test_in_the_grace_time_it_is_not_serving_but_still_answers(self):
        daemon = self.daemon("--drain-grace-ms", "3000")
        daemon.send(signal.SIGTERM)
        time.sleep(0.2)
        self.assertEqual(1, self.health(daemon))
        self.expect_status(0, harness.run("call", daemon.address, "--layer", "0"))
        self.assertEqual(0, daemon.wait(), daemon.output())

    def test_new_requests_are_refused_while_it_drains(self):
        daemon = self.daemon(*SLOW)
        request = self.in_flight(daemon)
        daemon.send(signal.SIGTERM)
        time.sleep(0.1)
        status, _, error = harness.run("call", daemon.address, "--layer", "0", "--attempts", "1")
        self.assertIn(status, (1, 69), error)
        self.assertIn("UNAVAILABLE", error)
        self.assertEqual(0, request.wait(), request.output())
        self.assertEqual(0, daemon.wait(), daemon.output())

    def test_what_is_in_flight_at_the_drain_deadline_is_cancelled_and_the_end_is_still_0(self):
        for _ in range(5):  # on a busy machine it may be answered before the signal
            daemon = self.daemon(*SLOW, "--drain-deadline-ms", "1")
            request = self.in_flight(daemon, timeout="4s")  # it tries again, in vain
            daemon.send(signal.SIGTERM)
            self.assertEqual(0, daemon.wait(), daemon.output())
            if request.wait() != 0:
                self.assertIn(request.wait(), (1, 69), request.output())
                self.assertIn("UNAVAILABLE", request.output()[1])
                return
        self.fail("it was always answered")

    def test_the_second_signal_ends_it_at_once(self):
        daemon = self.daemon("--drain-grace-ms", "30000")
        daemon.send(signal.SIGTERM)
        time.sleep(0.3)
        self.assertIsNone(daemon.popen.poll())
        begin = time.monotonic()
        daemon.send(signal.SIGTERM)
        self.assertEqual(-signal.SIGTERM, daemon.wait())
        self.assertLess(time.monotonic() - begin, 5)

    def test_a_signal_before_the_port_is_open_ends_it_with_0(self):
        for _ in range(3):
            process = self.process("serve", harness.golden("checkpoint"), "--backend", "cpu",
                                   "--listen", "127.0.0.1:0")
            end = time.monotonic() + harness.START_SECONDS
            while not catches(process.popen.pid, signal.SIGTERM):
                self.assertIsNone(process.popen.poll(), process.output())
                self.assertLess(time.monotonic(), end, process.output())
            process.send(signal.SIGTERM)
            self.assertEqual(0, process.wait(), process.output())

    def test_it_drains_although_nobody_reads_its_log_any_more(self):
        process = subprocess.Popen(
            [harness.expertd, "serve", harness.golden("checkpoint"), "--backend", "cpu",
             "--listen", "127.0.0.1:0"], env=harness.clean_environment(),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(process.kill)
        self.assertRegex(process.stdout.readline(), rb"^127")
        process.stderr.close()
        process.stdout.close()
        process.send_signal(signal.SIGTERM)
        self.assertEqual(0, process.wait(harness.RUN_SECONDS))

    def test_a_client_that_vanishes_disturbs_nobody(self):
        daemon = self.daemon(*SLOW)
        vanishing = self.in_flight(daemon)
        vanishing.stop()
        self.expect_status(0, harness.run("call", daemon.address, "--layer", "0"))
        daemon.send(signal.SIGTERM)
        self.assertEqual(0, daemon.wait(), daemon.output())


if __name__ == "__main__":
    harness.main()
