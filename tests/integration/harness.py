"""What the integration tests share: the real binary, the real grpcurl, and processes that always end.

A test script calls main(), which reads --expertd and --source and then runs unittest. Exit status 77 means
that the whole script was skipped for want of a tool; with EXPERTD_REQUIRE_TOOLS=1 that is a failure.
"""
import argparse
import atexit
import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

SKIPPED = 77
START_SECONDS = 60  # sanitizer builds on a busy machine
RUN_SECONDS = 60

# EXPERTD_TEST_BACKEND=cuda runs the same tests on EXPERTD_TEST_RANKS GPUs, by default one.
BACKEND = os.environ.get("EXPERTD_TEST_BACKEND", "cpu")
RANKS = int(os.environ.get("EXPERTD_TEST_RANKS", "2" if BACKEND == "cpu" else "1"))

expertd = ""
source = ""
_running = []


def _die_with_parent():
    """In the child: a killed test takes its daemons along (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def clean_environment(extra=None):
    """The caller's environment without EXPERTD_* (they configure the daemon) and proxies."""
    kept = {k: v for k, v in os.environ.items()
            if not k.startswith("EXPERTD_") and not k.lower().endswith("_proxy")}
    kept.update(extra or {})
    return kept


def run(*arguments, env=None, stdin=None, timeout=RUN_SECONDS):
    """Runs expertd to its end: (exit status, stdout, stderr)."""
    done = subprocess.run([expertd, *map(str, arguments)], env=clean_environment(env), input=stdin,
                          capture_output=True, text=True, timeout=timeout,
                          preexec_fn=_die_with_parent)
    return done.returncode, done.stdout, done.stderr


def read(path):
    with open(path) as file:
        return file.read()


class Process:
    """A process group of ours with its output in files; stop() is safe to repeat."""

    def __init__(self, *arguments, env=None):
        self.dir = tempfile.mkdtemp(prefix="expertd-test-")
        self._out = open(os.path.join(self.dir, "stdout"), "w+")
        self._err = open(os.path.join(self.dir, "stderr"), "w+")
        self.popen = subprocess.Popen([expertd, *map(str, arguments)], env=clean_environment(env),
                                      stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err,
                                      start_new_session=True, preexec_fn=_die_with_parent)
        _running.append(self)

    def output(self):
        """stdout and stderr so far."""
        return tuple(read(os.path.join(self.dir, name)) for name in ("stdout", "stderr"))

    def send(self, signal_number):
        self.popen.send_signal(signal_number)

    def wait(self, timeout=RUN_SECONDS):
        """Its exit status, -N for signal N."""
        return self.popen.wait(timeout)

    def stop(self):
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait(RUN_SECONDS)
        self._out.close()
        self._err.close()
        shutil.rmtree(self.dir, ignore_errors=True)
        if self in _running:
            _running.remove(self)


class Daemon(Process):
    """`expertd serve` on a free port, by default on the golden checkpoint."""

    def __init__(self, *flags, checkpoint=None, env=None, listen="127.0.0.1:0", ready=True,
                 backend=BACKEND):
        self._files = tempfile.mkdtemp(prefix="expertd-test-")
        address_file = os.path.join(self._files, "address")
        super().__init__("serve", checkpoint or golden("checkpoint"), "--backend", backend,
                         "--listen", listen, "--address-file", address_file, *flags, env=env)
        self.address = self._wait_for_address(address_file)
        if ready:
            status, _, error = run("call", self.address, "--health", "--wait", f"{START_SECONDS}s")
            if status != 0:
                raise AssertionError(f"not healthy: {error}\n{self.output()[1]}")

    def _wait_for_address(self, path):
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if os.path.exists(path):
                return read(path).strip()
            if self.popen.poll() is not None:
                raise AssertionError(f"serve ended with {self.popen.returncode}: {self.output()[1]}")
            time.sleep(0.02)
        raise AssertionError(f"no address within {START_SECONDS} s: {self.output()[1]}")

    def stop(self):
        super().stop()
        shutil.rmtree(self._files, ignore_errors=True)


@atexit.register
def _stop_all():
    for process in list(_running):
        process.stop()


class TestCase(unittest.TestCase):
    """Daemons started with self.daemon() end with the test."""

    maxDiff = None

    def daemon(self, *flags, **options):
        daemon = Daemon(*flags, **options)
        self.addCleanup(daemon.stop)
        return daemon

    def process(self, *arguments, **options):
        process = Process(*arguments, **options)
        self.addCleanup(process.stop)
        return process

    def directory(self):
        path = tempfile.mkdtemp(prefix="expertd-test-")
        self.addCleanup(shutil.rmtree, path, ignore_errors=True)
        return path

    def expect_status(self, wanted, result):
        """`result` of run(); gives (stdout, stderr)."""
        status, out, error = result
        self.assertEqual(wanted, status, f"stdout: {out}\nstderr: {error}")
        return out, error


def golden(*path):
    """A file of the golden vectors that these tests serve: H 256, I 128, E 8, K 6, layers 0 and 1."""
    return os.path.join(source, "tests", "vectors", "v4-mxfp4", *path)


def find_grpcurl():
    built = os.path.join(source, "build", "tools", "bin")
    return shutil.which("grpcurl", path=os.pathsep.join([os.environ.get("PATH", ""), built]))


class GrpcurlError(Exception):
    """What grpcurl printed about a failed call."""

    def __init__(self, text):
        super().__init__(text)
        code = re.search(r"^\s*Code: (\w+)$", text, re.M)
        message = re.search(r"^\s*Message: (.*)$", text, re.M)
        self.code = code.group(1) if code else None
        self.message = message.group(1) if message else text


def grpcurl(*arguments, data=None, timeout=RUN_SECONDS):
    """grpcurl's standard output; `data` is the request as an object, or several as a list."""
    command = [find_grpcurl(), "-plaintext"]
    if data is not None:
        command += ["-d", "@"]
    requests = data if isinstance(data, list) else [data]
    text = "" if data is None else "".join(json.dumps(one) for one in requests)
    done = subprocess.run([*command, *arguments], input=text, env=clean_environment(),
                          capture_output=True, text=True, timeout=timeout,
                          preexec_fn=_die_with_parent)
    if done.returncode != 0:
        raise GrpcurlError(done.stdout + done.stderr)
    return done.stdout


class IdleStream:
    """A stream that grpcurl holds open after one answer, until stop(); safe to repeat."""

    def __init__(self, address, method, request):
        self.popen = subprocess.Popen([find_grpcurl(), "-plaintext", "-d", "@", address, method],
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      env=clean_environment(), text=True,
                                      preexec_fn=_die_with_parent)
        _running.append(self)
        self.popen.stdin.write(json.dumps(request))
        self.popen.stdin.flush()
        # The answer says that the server knows the stream.
        answered, _, _ = select.select([self.popen.stdout], [], [], RUN_SECONDS)
        if not answered or not self.popen.stdout.readline():
            self.stop()
            raise AssertionError("no answer on the stream")

    def stop(self):
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(RUN_SECONDS)
        self.popen.stdin.close()
        self.popen.stdout.close()
        if self in _running:
            _running.remove(self)


def _proto_names(value):
    """Field names as in the .proto file: grpcurl's depend on its version and on the reflection service."""
    if isinstance(value, dict):
        return {re.sub(r"(?<=[a-z0-9])([A-Z])", lambda m: "_" + m.group(1).lower(), key):
                _proto_names(item) for key, item in value.items()}
    return [_proto_names(item) for item in value] if isinstance(value, list) else value


def documents(text):
    """The JSON documents that stand one after another in `text`."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while True:
        while at < len(text) and text[at].isspace():
            at += 1
        if at == len(text):
            return found
        document, at = decoder.raw_decode(text, at)
        found.append(_proto_names(document))


def retry_with_test_packages():
    """Starts this script again with the Python that scripts/setup all makes, unless this is it or it is absent."""
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
    python = os.path.join(root, "build", "test-venv", "bin", "python3")
    if os.path.exists(python) and os.environ.get("EXPERTD_TEST_PYTHON") != python:
        os.environ["EXPERTD_TEST_PYTHON"] = python
        os.execv(python, [python, "-B", *sys.argv])


def skip_script(reason):
    print(f"SKIPPED: {reason}")
    if os.environ.get("EXPERTD_REQUIRE_TOOLS") == "1":
        print("EXPERTD_REQUIRE_TOOLS=1: that is a failure")
        sys.exit(1)
    sys.exit(SKIPPED)


def skip_without_gpu(ranks=1):
    """Ends the script as skipped where the CUDA backend finds too few GPUs: never a missing tool."""
    try:
        daemon = Daemon("--ranks", ranks, backend="cuda", ready=False)
    except AssertionError as error:
        print(f"SKIPPED: needs {ranks} GPUs: {str(error).strip()}")
        sys.exit(SKIPPED)
    healthy = False
    while daemon.popen.poll() is None and not healthy:
        healthy = run("call", daemon.address, "--health", "--wait", "1s")[0] == 0
    error = daemon.output()[1]
    daemon.stop()
    if not healthy:
        print(f"SKIPPED: needs {ranks} GPUs: {error.strip()}")
        sys.exit(SKIPPED)


def main(needs_grpcurl=False):
    global expertd, source
    parser = argparse.ArgumentParser()
    parser.add_argument("--expertd", required=True, help="the binary under test")
    parser.add_argument("--source", required=True, help="the root of the source tree")
    arguments, rest = parser.parse_known_args()
    expertd, source = os.path.abspath(arguments.expertd), os.path.abspath(arguments.source)
    if needs_grpcurl and find_grpcurl() is None:
        skip_script("grpcurl is neither in PATH nor in build/tools/bin; scripts/setup all makes it")
    if BACKEND == "cuda":
        skip_without_gpu(RANKS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ctest's timeout: atexit still runs
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
