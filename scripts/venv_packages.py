"""What a virtual environment holds, read from its site-packages folder without starting it.

Used by setup_env.py: standard library only, and a syntax that an old Python can still parse.
"""

import csv
import json
import os
import re
import shutil
from urllib.parse import unquote


def normalise(name):
    """The form of a package name in which two spellings of it are equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(paths):
    """Name (normalised) -> version of every `name==version` line in these lock files."""
    result = {}
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for line in file:
                pin = line.split("#")[0].strip()
                if pin:
                    name, version = pin.split("==")
                    result[normalise(name)] = version
    return result


def installed(site):
    """Name (normalised) -> [(version, path of its dist-info)]; a half-made replacement leaves two of one name."""
    result = {}
    for entry in sorted(os.listdir(site)) if os.path.isdir(site) else ():
        match = re.match(r"([^~].*)-([^-]+)\.dist-info$", entry)
        if match:
            result.setdefault(normalise(match.group(1)), []).append((match.group(2), os.path.join(site, entry)))
    return result


def read_record(dist_info):
    """[(path, size in bytes or None)] of the files that the package's RECORD names, without byte code.

    Raises ValueError where the RECORD is missing, empty, cut or otherwise no RECORD.
    """
    try:
        with open(os.path.join(dist_info, "RECORD"), newline="", encoding="utf-8") as file:
            lines = list(file)
        files = [(path, int(size) if size else None) for path, _, size in csv.reader(lines, strict=True)]
    except (OSError, csv.Error) as error:
        raise ValueError(str(error)) from None
    # pip names the RECORD in the RECORD, and ends every line.
    if (os.path.basename(dist_info) + "/RECORD", None) not in files or not lines[-1].endswith("\n"):
        raise ValueError("the RECORD is cut")
    return [(path, size) for path, size in files if not path.endswith(".pyc")]


def damaged(dist_info):
    """Whether a file that the package's RECORD names is gone or has another size, or no RECORD tells."""
    site = os.path.dirname(dist_info)
    try:
        for path, size in read_record(dist_info):
            found = os.stat(os.path.join(site, path)).st_size
            if size is not None and found != size:
                return True
    except (OSError, ValueError):
        return True
    return False


def recorded_bytes(dist_info):
    """The size of a package after its RECORD, byte code left out; 0 where that cannot be read."""
    try:
        return sum(size or 0 for _, size in read_record(dist_info))
    except ValueError:
        return 0


def discard(dist_info, venv):
    """Remove a package, as far as its RECORD names its files: pip itself refuses where the metadata is damaged."""
    site = os.path.dirname(dist_info)
    try:
        files = read_record(dist_info)
    except ValueError:
        files = []  # pip will write over them
    for path, _ in files:
        full = os.path.normpath(os.path.join(site, path))
        if full.startswith(venv + os.sep) and os.path.lexists(full) and not full.startswith(dist_info):
            os.remove(full)
    shutil.rmtree(dist_info)


def discard_leftovers(site):
    """Remove what a killed pip had put aside: it names them with a `~` and never looks at them again."""
    for entry in os.listdir(site) if os.path.isdir(site) else ():
        if entry.startswith("~"):
            path = os.path.join(site, entry)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.remove(path)


def is_editable(dist_info, folder):
    """Whether this is the editable installation (`pip install -e`) of that folder."""
    try:
        with open(os.path.join(dist_info, "direct_url.json"), encoding="utf-8") as file:
            origin = json.load(file)
        return origin["dir_info"]["editable"] is True and unquote(origin["url"]) == "file://" + folder
    except (OSError, ValueError, KeyError, TypeError):
        return False


def torch_accelerator(site):
    """What the installed torch is built for, e.g. "cuda 13.0"; None for a CPU build or where torch is missing."""
    try:
        with open(os.path.join(site, "torch", "version.py"), encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError):
        return None
    for name, value in re.findall(r"^(cuda|hip|xpu)\b[^=\n]*=[ \t]*(.*?)[ \t]*$", text, re.M):
        if value.strip("'\"") not in ("None", ""):
            return "{} {}".format(name, value.strip("'\""))
    return None
