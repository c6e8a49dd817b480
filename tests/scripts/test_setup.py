"""setup.sh, check_environment.sh and the help of all scripts. Installs nothing: apt-get and id are stand-ins."""

import os
import pathlib
import shutil
import stat
import subprocess
import tempfile
import unittest

SOURCE = pathlib.Path(os.environ.get("MGP_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
SCRIPTS = SOURCE / "scripts"


class SetupTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="mgp-test-"))
        self.addCleanup(shutil.rmtree, self.folder, True)
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        self.cache = self.folder / "cache"
        self.environment = {k: v for k, v in os.environ.items() if k not in ("Torch_DIR", "CMAKE_PREFIX_PATH")}
        self.environment["XDG_CACHE_HOME"] = str(self.cache)

    def script(self, name, text):
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text("#!/bin/bash\n" + text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def path_without(self, *missing):
        """A PATH on which these programs do not exist."""
        for folder in reversed(self.environment["PATH"].split(":")):
            for program in pathlib.Path(folder).glob("*") if folder else ():
                if program.name not in missing:
                    link = self.bin / program.name
                    link.unlink(missing_ok=True)
                    link.symlink_to(program)
        self.environment["PATH"] = str(self.bin)

    def libtorch(self):
        root = self.folder / "libtorch"
        (root / "lib").mkdir(parents=True)
        (root / "lib" / "libtorch_cpu.so").touch()
        return root

    def run_script(self, name, *arguments, **environment):
        return subprocess.run([shutil.which("bash"), str(SCRIPTS / name), *arguments], text=True, timeout=60,
                              env={**self.environment, **environment}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def test_every_script_has_help(self):
        for script in sorted(SCRIPTS.glob("*.sh")):
            with self.subTest(script=script.name):
                self.assertTrue(os.access(script, os.X_OK))
                result = self.run_script(script.name, "--help")
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertTrue(result.stdout.startswith("Usage: scripts/%s" % script.name), result.stdout[:60])

    def test_unknown_options(self):
        for name in ("setup.sh", "check_environment.sh"):
            result = self.run_script(name, "--nonsense")
            self.assertEqual(result.returncode, 2)
            self.assertEqual(len(result.stderr.splitlines()), 1)
            self.assertIn("--nonsense", result.stderr)

    def test_uses_the_users_libtorch_and_says_nothing(self):
        root = self.libtorch()
        for variables in ({"CMAKE_PREFIX_PATH": "/nowhere:%s" % root}, {"Torch_DIR": "%s/share/cmake/Torch" % root}):
            (root / "share" / "cmake" / "Torch").mkdir(parents=True, exist_ok=True)
            result = self.run_script("setup.sh", "--skip-packages", **variables)
            self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "", ""))
            self.assertFalse(self.cache.exists())

    def test_wrong_torch_dir(self):
        result = self.run_script("setup.sh", Torch_DIR="/nowhere")
        self.assertEqual(result.returncode, 1)
        self.assertEqual(len(result.stderr.splitlines()), 1)
        self.assertIn("/nowhere", result.stderr)

    def test_without_rights_it_prints_the_command_and_changes_nothing(self):
        self.path_without("ninja", "patch", "ccache")
        self.script("id", "echo 1000")
        self.script("sudo", "exit 1")
        self.script("apt-get", "touch %s/apt-was-called" % self.folder)
        result = self.run_script("setup.sh")
        self.assertEqual(result.returncode, 1)
        self.assertIn("  sudo apt-get update && sudo apt-get install -y ninja-build patch", result.stderr)
        self.assertFalse((self.folder / "apt-was-called").exists())
        self.assertFalse(self.cache.exists())

    def test_as_root_it_installs_what_is_missing_only(self):
        self.path_without("ninja")
        self.script("id", "echo 0")
        log = self.folder / "log"
        # "Installing" makes ninja appear.
        self.script("apt-get", 'echo "$*" >>%s; case $1 in install) ln -s /bin/true %s/ninja ;; esac' % (log, self.bin))
        root = self.libtorch()
        result = self.run_script("setup.sh", CMAKE_PREFIX_PATH=str(root))
        self.assertEqual(result.returncode, 0, result.stderr)
        calls = log.read_text().splitlines()
        self.assertEqual(len(calls), 2, calls)
        self.assertTrue(calls[0].startswith("update"))
        self.assertIn("ninja-build", calls[1])
        self.assertNotIn("g++", calls[1])

    def test_check_environment(self):
        result = self.run_script("check_environment.sh", XDG_CACHE_HOME=os.environ.get("XDG_CACHE_HOME", ""))
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        trainers = [line for line in result.stdout.splitlines() if line.startswith("  train_")]
        self.assertEqual(len(trainers), 10)
        self.assertIn("LibTorch", result.stdout)


if __name__ == "__main__":
    unittest.main()
