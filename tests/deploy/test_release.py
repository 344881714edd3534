"""What a release consists of, made of the binary of the tests instead of an optimised one."""

import hashlib
import os
import pathlib
import platform
import subprocess
import tarfile
import tempfile
import unittest

from manifests import ROOT

TARGET = f"{platform.machine()}-unknown-linux-gnu"


def release(directory):
    """The files in the directory, by name. The binary is there already, so cargo has nothing to do."""
    environment = {**os.environ, "CARGO": "true", "PROFILE": "dev", "SBOM": "no"}
    run = subprocess.run([ROOT / ".ci/release", directory, TARGET], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return {path.name: path.read_bytes() for path in pathlib.Path(directory).iterdir()}


@unittest.skipIf("WARMROUTE" in os.environ, "another binary is tested")
class Release(unittest.TestCase):
    def test_an_archive_has_what_a_machine_needs_and_its_checksum_is_right(self):
        with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as unpacked:
            files = release(directory)
            archive = next(name for name in files if name.endswith(f"-{TARGET}.tar.gz"))
            folder = archive.removesuffix(".tar.gz")
            sums = dict(reversed(line.split()) for line in files["SHA256SUMS"].decode().splitlines())
            self.assertEqual(sums, {archive: hashlib.sha256(files[archive]).hexdigest()})
            with tarfile.open(pathlib.Path(directory) / archive) as members:
                self.assertTrue(all((it.uid, it.gid) == (0, 0) for it in members.getmembers()))
                members.extractall(unpacked)
            root = pathlib.Path(unpacked) / folder
            found = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
            wanted = ["CHANGELOG.md", "LICENSE", "README.md", "config.yaml", "warmroute", "warmroute.service"]
            wanted += [f"completions/warmroute.{shell}" for shell in ("bash", "fish", "zsh")]
            self.assertEqual(found, sorted(wanted))
            run = subprocess.run([root / "warmroute", "check", "--config", root / "config.yaml"], capture_output=True)
            self.assertEqual(run.returncode, 0, run.stderr)
            symbols = subprocess.run(["nm", root / "warmroute"], capture_output=True, text=True)
            self.assertIn("no symbols", symbols.stderr)
            # The same sources make the same archive.
            self.assertEqual(release(directory)[archive], files[archive])


if __name__ == "__main__":
    unittest.main()
