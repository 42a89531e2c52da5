"""deploy/ against the built binary: nothing in it may name a flag, port, service or path that does not exist.

The manifests' own commands are run here: the init container makes its checkpoint, the daemon serves it with
its exact flags, the probes' services are asked, and the Job's containers ask the daemon. Only paths and
addresses are replaced.
"""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "integration"))
import harness  # noqa: E402

try:
    import strict_yaml
    import yaml
except ImportError:
    harness.retry_with_test_packages()  # does not return if there are such
    strict_yaml = yaml = None

SMOKE = "deploy/kubernetes/cpu-smoke"
POD_ADDRESS = "0.0.0.0:50061"
SERVICE_ADDRESS = "expertd:50061"


def path_of(*parts):
    return os.path.join(harness.source, *parts)


def text_of(*parts):
    return harness.read(path_of(*parts))


def shutdown_margin_ms():
    """Beyond the drain deadline: then the daemon's watchdog ends it."""
    (digits,) = re.findall(r"kShutdownMarginMs =\s+([0-9']+);", text_of("config/limits.h"))
    return int(digits.replace("'", ""))


def kustomized():
    """The objects of the kustomization, by kind; image names as its `images` makes them."""
    (kustomization,) = strict_yaml.load(text_of(SMOKE, "kustomization.yaml"), "kustomization.yaml")
    images = {image["name"]: f"{image['newName']}:{image['newTag']}"
              for image in kustomization["images"]}
    objects = {}
    for resource in kustomization["resources"]:
        for one in strict_yaml.load(text_of(SMOKE, resource), resource):
            objects[one["kind"]] = one
            for container in containers_of(one):
                container["image"] = images.get(container["image"], container["image"])
    return kustomization, objects


def pod_of(one):
    return one.get("spec", {}).get("template", {}).get("spec", {})


def containers_of(one):
    return pod_of(one).get("initContainers", []) + pod_of(one).get("containers", [])


def flags_of(words):
    return [word.split("=")[0] for word in words if word.startswith("--")]


def known_flags(subcommand):
    _, out, _ = harness.run(subcommand, "--help")
    return set(re.findall(r"--[a-z][a-z-]*", out.split("Options:", 1)[1]))


def expertd_words(container):
    """The words after `expertd` that this container runs: by its args, or in a shell."""
    if container.get("command") == ["sh", "-c"]:
        words = shlex.split(container["args"][0])
        return words[words.index("expertd") + 1:]
    return container["args"]


class StrictYamlTest(harness.TestCase):
    def test_what_other_parsers_let_pass_is_refused(self):
        good = "apiVersion: v1\nkind: Namespace\nmetadata: {name: x}\n"
        strict_yaml.load(good)
        for wrong in (good + "kind: Namespace\n", good + "spek: {}\n",
                      good.replace("name:", "nam:"), good.replace("Namespace", "Namespaces"),
                      good.replace("x", "3")):
            with self.assertRaises((ValueError, yaml.YAMLError), msg=wrong):
                strict_yaml.load(wrong)


class KubernetesTest(harness.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.kustomization, cls.objects = kustomized()
        cls.deployment, cls.job = cls.objects["Deployment"], cls.objects["Job"]
        (cls.server,) = pod_of(cls.deployment)["containers"]

    def test_every_manifest_is_a_resource_of_the_kustomization(self):
        files = set(os.listdir(path_of(SMOKE))) - {"kustomization.yaml"}
        self.assertEqual(files, set(self.kustomization["resources"]))
        self.assertEqual({"Namespace", "Deployment", "Service", "Job"}, set(self.objects))
        self.assertEqual(self.kustomization["namespace"],
                         self.objects["Namespace"]["metadata"]["name"])

    def test_every_flag_exists(self):
        checked = 0
        for one in (self.deployment, self.job):
            for container in containers_of(one):
                if "expertd" in container["image"]:
                    words = expertd_words(container)
                    unknown = set(flags_of(words)) - known_flags(words[0])
                    self.assertEqual(set(), unknown, container["name"])
                    checked += len(flags_of(words))
        self.assertGreaterEqual(checked, 12)

    def test_ports_and_selectors_meet(self):
        listen = [word.split("=")[1] for word in self.server["args"]
                  if word.startswith("--listen=")]
        self.assertEqual([POD_ADDRESS], listen)
        port = int(POD_ADDRESS.split(":")[1])
        self.assertEqual([port], [p["containerPort"] for p in self.server["ports"]])
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            self.assertEqual(port, self.server[probe]["grpc"]["port"], probe)
        service = self.objects["Service"]
        (service_port,) = service["spec"]["ports"]
        self.assertEqual(self.server["ports"][0]["name"], service_port["targetPort"])
        self.assertEqual(SERVICE_ADDRESS, f"{service['metadata']['name']}:{service_port['port']}")
        labels = self.deployment["spec"]["template"]["metadata"]["labels"]
        self.assertEqual(labels, self.deployment["spec"]["selector"]["matchLabels"])
        self.assertEqual(labels, service["spec"]["selector"])
        self.assertNotEqual(labels, self.job["spec"]["template"]["metadata"]["labels"])
        for container in containers_of(self.job):
            self.assertIn(SERVICE_ADDRESS, container["args"], container["name"])

    def test_volumes_are_declared_and_hold_the_checkpoint(self):
        volumes = {volume["name"] for volume in pod_of(self.deployment)["volumes"]}
        for container in containers_of(self.deployment):
            (mount,) = container["volumeMounts"]
            self.assertIn(mount["name"], volumes)
            checkpoint = expertd_words(container)[1]
            self.assertTrue(checkpoint.startswith(mount["mountPath"] + "/"), checkpoint)

    def test_the_drain_fits_into_the_termination_grace_period(self):
        (deadline,) = [int(word.split("=")[1]) for word in self.server["args"]
                       if word.startswith("--drain-deadline-ms=")]
        self.assertLess(deadline + shutdown_margin_ms(),
                        1000 * pod_of(self.deployment)["terminationGracePeriodSeconds"])

    def test_pods_are_locked_down(self):
        for one in (self.deployment, self.job):
            pod = pod_of(one)
            self.assertIs(False, pod["enableServiceLinks"])
            self.assertIs(False, pod["automountServiceAccountToken"])
            self.assertIs(True, pod["securityContext"]["runAsNonRoot"])
            self.assertGreater(pod["securityContext"]["runAsUser"], 0)
            for container in containers_of(one):
                context = container["securityContext"]
                self.assertIs(False, context["allowPrivilegeEscalation"], container["name"])
                self.assertIs(True, context["readOnlyRootFilesystem"], container["name"])
                self.assertEqual(["ALL"], context["capabilities"]["drop"], container["name"])
                self.assertIn("memory", container["resources"]["limits"], container["name"])
                self.assertNotRegex(container["image"], r":latest$|^[^:]+$")

    def test_the_grpcurl_image_is_the_version_that_setup_builds(self):
        version = re.search(r"kGrpcurlVersion=(\S+)", text_of("scripts/setup")).group(1)
        images = {c["image"] for c in containers_of(self.job) if "grpcurl" in c["image"]}
        self.assertEqual({f"fullstorydev/grpcurl:{version}"}, images)

    def test_the_manifests_own_commands_work(self):
        folder = self.directory()

        def here(words):
            return [word.replace("/checkpoint/", folder + "/") for word in words]

        (maker,) = pod_of(self.deployment)["initContainers"]
        for _ in range(2):  # the volume outlives a restart of the container
            done = subprocess.run(
                [*maker["command"], *here(maker["args"])], capture_output=True, text=True, timeout=60,
                env={"PATH": os.path.dirname(harness.expertd) + ":/usr/bin:/bin"})
            self.assertEqual(0, done.returncode, done.stderr)
        words = here(self.server["args"])
        self.assertEqual("serve", words[0])
        daemon = self.daemon(
            *[word for word in words[2:] if not word.startswith(("--backend=", "--listen="))],
            checkpoint=words[1])
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            service = self.server[probe]["grpc"].get("service", "")
            self.expect_status(0, harness.run("call", daemon.address, "--health", "--service",
                                              service))
        for container in containers_of(self.job):
            self.ask(container, daemon.address)

    def ask(self, container, address):
        words = [word.replace(SERVICE_ADDRESS, address) for word in container["args"]]
        if "grpcurl" not in container["image"]:
            self.expect_status(0, harness.run(*words))
            return
        if harness.find_grpcurl() is None:
            self.assertNotEqual("1", os.environ.get("EXPERTD_REQUIRE_TOOLS"), "no grpcurl")
            print(f"not run without grpcurl: {container['name']}")
            return
        harness.grpcurl(*words[1:])  # it adds -plaintext itself
        self.assertEqual("-plaintext", words[0])


class SystemdTest(harness.TestCase):
    LISTS = {"After", "Wants", "SystemCallFilter"}  # may be given more than once

    def setUp(self):
        self.settings = self.settings_of("deploy/systemd/expertd.service")

    def settings_of(self, path):
        settings = {}
        section = None
        for line in text_of(path).splitlines():
            if not line or line.startswith("#"):
                continue
            if line.startswith("["):
                section = line.strip("[]")
                continue
            key, separator, value = line.partition("=")
            self.assertEqual("=", separator, line)
            self.assertRegex(key, r"^[A-Z][A-Za-z]+$", line)
            if key not in self.LISTS:
                self.assertNotIn((section, key), settings, "given twice")
            settings[section, key] = value
        return settings

    def test_the_command_exists(self):
        words = shlex.split(self.settings["Service", "ExecStart"])
        self.assertEqual("/opt/expertd/expertd", words[0])
        self.assertEqual("serve", words[1])
        self.assertEqual(set(), set(flags_of(words)) - known_flags("serve"))
        self.assertIn("--prefix " + os.path.dirname(words[0]), text_of("deploy/README.md"))

    def test_exit_codes_that_are_not_restarted_are_ours(self):
        codes = dict(re.findall(r"constexpr int (k\w+) = (\d+);", text_of("config/exit_codes.h")))
        self.assertEqual({codes["kUsage"], codes["kDataError"]},
                         set(self.settings["Service", "RestartPreventExitStatus"].split()))

    def test_the_stop_timeout_covers_the_drain_of_every_example(self):
        seconds = int(self.settings["Service", "TimeoutStopSec"])
        examples = path_of("config/examples")
        for name in sorted(os.listdir(examples)):
            out, _ = self.expect_status(0, harness.run("serve", "--print-config", "--config",
                                                       os.path.join(examples, name)))
            deadline = int(re.search(r"^drain-deadline-ms = (\d+)", out, re.M).group(1))
            self.assertLess(deadline + shutdown_margin_ms(), 1000 * seconds, name)

    def test_it_is_hardened(self):
        for key, value in (("DynamicUser", "yes"), ("ProtectSystem", "strict"),
                           ("NoNewPrivileges", "yes"), ("CapabilityBoundingSet", ""),
                           ("MemoryDenyWriteExecute", "yes"), ("PrivateTmp", "yes")):
            self.assertEqual(value, self.settings["Service", key], key)


    def test_the_gpu_drop_in_opens_what_gpus_need_and_nothing_else(self):
        drop_in = self.settings_of("deploy/systemd/gpu.conf")
        self.assertEqual({"Wants", "After", "PrivateDevices", "DevicePolicy", "DeviceAllow",
                          "LimitMEMLOCK", "RestrictAddressFamilies"}, {key for _, key in drop_in})
        self.assertEqual("char-nvidia* rw", drop_in["Service", "DeviceAllow"])
        self.assertEqual("closed", drop_in["Service", "DevicePolicy"])
        self.assertEqual("AF_NETLINK", drop_in["Service", "RestrictAddressFamilies"])  # is added

    def test_systemd_understands_the_unit_and_its_drop_in(self):
        if shutil.which("systemd-analyze") is None:
            print("not run without systemd-analyze")
            return
        folder = self.directory()
        unit = os.path.join(folder, "expertd.service")
        os.mkdir(unit + ".d")
        for source, target, old, new in (
                ("expertd.service", unit, "/opt/expertd/expertd", "/bin/true"),
                ("gpu.conf", unit + ".d/gpu.conf", "", "")):
            with open(target, "w") as out:
                out.write(text_of("deploy/systemd", source).replace(old, new))
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True,
                              text=True, timeout=60, check=False)
        self.assertNotIn(folder, done.stdout + done.stderr)  # it may complain of the machine's units


class DockerfileTest(harness.TestCase):
    def setUp(self):
        text = text_of("deploy/Dockerfile.cpu")
        joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", text))
        self.lines = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
        self.text = text

    def arguments(self, instruction):
        return [rest for name, rest in self.lines if name == instruction]

    def test_only_known_instructions_and_no_secrets(self):
        self.assertEqual(set(), {name for name, _ in self.lines} - {
            "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT",
            "CMD"})
        self.assertNotRegex(self.text, r"(?i)password|secret=|token|api_?key")

    def test_both_stages_are_debian_12_and_the_last_is_not_root(self):
        self.assertEqual(["debian:12-slim AS build", "debian:12-slim"], self.arguments("FROM"))
        (user,) = self.arguments("USER")
        self.assertRegex(user, r"^[1-9]\d*:[1-9]\d*$")
        after_user = [name for name, _ in self.lines][[name for name, _ in self.lines].index("USER"):]
        self.assertNotIn("RUN", after_user)

    def test_what_it_copies_and_runs_exists(self):
        for rest in self.arguments("COPY"):
            words = rest.split()
            if not words[0].startswith("--from"):
                self.assertTrue(os.path.exists(path_of(words[0])), rest)
        commands = " && ".join(self.arguments("RUN"))
        for script in re.findall(r"\bscripts/\w+", commands):
            self.assertTrue(os.access(path_of(script), os.X_OK), script)
        self.assertIn("scripts/setup cpu", commands)
        presets = {one["name"] for one in json.loads(text_of("CMakePresets.json"))["configurePresets"]}
        for preset in re.findall(r"--preset (\S+)", commands):
            self.assertIn(preset, presets)
        for variable in re.findall(r"-D(\w+)=", commands):
            self.assertRegex(text_of("CMakeLists.txt"), rf"option\({variable} ")
        (component,) = re.findall(r"--component (\S+)", commands)
        self.assertRegex(text_of("cmake/ExpertdBundle.cmake"), rf"COMPONENT {component}\b")
        (prefix,) = re.findall(r"--prefix (\S+)", commands)
        (entry_point,) = self.arguments("ENTRYPOINT")
        self.assertEqual([prefix + "/expertd"], json.loads(entry_point))

    def test_the_command_and_the_example_are_valid(self):
        (command,) = self.arguments("CMD")
        self.expect_status(0, harness.run(*json.loads(command)))
        example = re.search(r"expertd:cpu \\\n#\s+(serve .*)", self.text).group(1)
        self.assertEqual(set(), set(flags_of(example.split())) - known_flags("serve"))
        (port,) = self.arguments("EXPOSE")
        self.assertIn(f"--listen 0.0.0.0:{port}", example)

    def test_the_build_folder_is_not_sent(self):
        self.assertIn("build", text_of("deploy/Dockerfile.cpu.dockerignore").splitlines())


class ReadmeTest(harness.TestCase):
    def test_every_file_it_names_exists(self):
        text = text_of("deploy/README.md")
        for name in re.findall(r"(?<![\w/])(?:deploy|config|scripts|tests)/[\w./-]+\w", text):
            self.assertTrue(os.path.exists(path_of(name)), name)
        for name in re.findall(r"^\| `([^`]+)`", text, re.M):
            self.assertTrue(os.path.exists(path_of("deploy", name)), name)


if __name__ == "__main__":
    if yaml is None:
        harness.skip_script("PyYAML is missing; scripts/setup all installs it into build/test-venv")
    harness.main()
