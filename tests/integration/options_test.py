"""Configuration and help of the real binary: flag > environment > file > default, and what is refused."""
import os
import re

import harness

SUBCOMMANDS = ("serve", "inspect", "call", "bench", "make-checkpoint")


def settings(text):
    """`key = value` lines of --print-config."""
    return dict(re.findall(r"^([a-z-]+) = (.*)$", text, re.M))


class PrecedenceTest(harness.TestCase):
    def printed(self, *flags, file=None, env=None):
        arguments = list(flags)
        if file is not None:
            path = os.path.join(self.directory(), "expertd.toml")
            with open(path, "w") as out:
                out.write(file)
            arguments += ["--config", path]
        out, _ = self.expect_status(0, harness.run("serve", "--print-config", *arguments, env=env))
        return out

    def test_each_source_wins_over_the_next(self):
        file, env = "ranks = 3\n", {"EXPERTD_RANKS": "4"}
        self.assertEqual("0", settings(self.printed())["ranks"])
        self.assertEqual("3", settings(self.printed(file=file))["ranks"])
        self.assertEqual("4", settings(self.printed(file=file, env=env))["ranks"])
        self.assertEqual("5", settings(self.printed("--ranks", "5", file=file, env=env))["ranks"])

    def test_what_is_printed_reads_back_the_same(self):
        printed = self.printed("--ranks", "2", "--listen", "127.0.0.1:0", "--layers", "1-3",
                               "--allow-symlinks", "--log-format", "json")
        self.assertEqual(printed, self.printed(file=printed))

    def test_the_examples_are_valid(self):
        folder = os.path.join(harness.source, "config", "examples")
        names = sorted(os.listdir(folder))
        self.assertTrue(names)
        for name in names:
            self.expect_status(0, harness.run("serve", "--print-config", "--config",
                                              os.path.join(folder, name)))

    def test_the_variables_of_a_kubernetes_service_named_expertd_are_harmless(self):
        env = {"EXPERTD_PORT": "tcp://10.0.0.1:50061", "EXPERTD_SERVICE_HOST": "10.0.0.1",
               "EXPERTD_PORT_50061_TCP_ADDR": "10.0.0.1"}
        self.assertEqual(self.printed(), self.printed(env=env))


class WrongUsageTest(harness.TestCase):
    def test_wrong_settings_are_2_and_named(self):
        unknown_key = os.path.join(self.directory(), "unknown.toml")
        with open(unknown_key, "w") as out:
            out.write("rank = 2\n")
        for arguments, env, parts in (
                (("--no-such-flag",), None, ["--no-such-flag"]),
                (("--ranks", "many"), None, ["--ranks", "many"]),
                (("--ranks", "-1"), None, ["--ranks", "-1"]),
                (("--listen", "nowhere"), None, ["--listen", "nowhere", "HOST:PORT"]),
                (("--backend", "tpu"), None, ["--backend", "tpu", "cpu"]),
                (("--devices", "255"), None, ["backend: "]),
                (("--devices", "0", "--backend", "cpu"), None, ["devices", "cpu"]),
                ((), {"EXPERTD_RANKS": "many"}, ["EXPERTD_RANKS", "many"]),
                (("--config", unknown_key), None, ["unknown.toml", "rank"]),
                (("--config", "/no/such/file.toml"), None, ["/no/such/file.toml"])):
            with self.subTest(arguments=arguments, env=env):
                status, out, error = harness.run("serve", harness.golden("checkpoint"), *arguments,
                                                 env=env)
                self.assertEqual(2, status, out + error)
                for part in parts:
                    self.assertIn(part, out + error)

    def test_serve_without_a_checkpoint_is_2(self):
        status, out, error = harness.run("serve")
        self.assertEqual(2, status, out + error)
        self.assertIn("checkpoint", out + error)

    def test_no_or_an_unknown_subcommand_is_2(self):
        for arguments in ((), ("swerve",)):
            status, out, error = harness.run(*arguments)
            self.assertEqual(2, status, out + error)


class HelpTest(harness.TestCase):
    def test_the_version_is_printed(self):
        out, _ = self.expect_status(0, harness.run("--version"))
        self.assertRegex(out, r"^expertd \d+\.\d+\.\d+ \(.+\)\n$")

    def test_the_help_names_every_subcommand_with_a_description(self):
        out, _ = self.expect_status(0, harness.run("--help"))
        for name in SUBCOMMANDS:
            self.assertRegex(out, rf"(?m)^  {name} +\w.{{15,}}$")

    def test_every_subcommand_describes_itself_and_every_option(self):
        for name in SUBCOMMANDS:
            with self.subTest(name):
                out, error = self.expect_status(0, harness.run(name, "--help"))
                self.assertEqual("", error)
                self.assertRegex(out.splitlines()[0], r"^\w.{20,}")
                self.assertIn("Usage:", out)
                options = re.split(r"(?m)^ {2}(?=-)", out.split("Options:")[1])[1:]
                self.assertGreater(len(options), 3)
                for option in options:
                    # The name takes the first column; a description follows on its line or on the next.
                    first_paragraph = option.split("\n\n")[0]
                    self.assertRegex(first_paragraph, r"^\S+.*?(?: {2,}|\n +| )[A-Za-z0-9'-].{5,}",
                                     option)

    def test_lines_fit_a_terminal(self):
        for name in SUBCOMMANDS:
            out, _ = self.expect_status(0, harness.run(name, "--help"))
            for line in out.splitlines():
                if not line.startswith("Usage:"):  # has the path of the binary
                    self.assertLessEqual(len(line), 110, f"{name}: {line}")


if __name__ == "__main__":
    harness.main()
