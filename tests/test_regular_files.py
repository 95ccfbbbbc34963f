"""Files that are written whole: their mode, links to them, and what is refused in their place."""

import os
import socket
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
from tiny_tokenizers import write_tokenizer

from fastattn import train
from fastattn.__main__ import main
from fastattn._bench import harness, report
from fastattn._regular_files import replaced

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes and pipes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model and a file of texts."""
    path = tmp_path_factory.mktemp("model")
    tiny.write(path, "bert")
    write_tokenizer(path)
    path.joinpath("texts.txt").write_text("the cat\na dog\n")
    return path


@pytest.fixture
def umask():
    """A function that sets the umask, which is as before after the test."""
    before = os.umask(0)
    os.umask(before)
    yield os.umask
    os.umask(before)


def command(monkeypatch, *arguments):
    """`python -m fastattn` in this process; a ValueError with what it says if it fails."""
    monkeypatch.setattr(sys, "argv", ["fastattn", *map(str, arguments)])
    monkeypatch.setattr(sys, "stderr", said := StandardError())
    try:
        status = main()
    except SystemExit as error:
        status = error.code
    if status:
        raise ValueError("".join(said))


class StandardError(list):
    """A file that keeps what is written."""

    write = list.append

    def flush(self):
        """There is nothing to do."""

    def isatty(self):
        """It is no terminal."""
        return False


def save(path, folder, monkeypatch):
    x = np.ones(3, np.float32)
    train.Trainer(lambda batch: (0.0, {"w": x}), train.SGD({"w": x}, 0.1), [1]).save(path)


def embed(path, folder, monkeypatch):
    command(monkeypatch, "embed", "--model", folder, folder / "texts.txt", "--output", path)


def bench_json(path, folder, monkeypatch):
    monkeypatch.setattr(harness, "run", lambda *args, **options: {})
    monkeypatch.setattr(report, "text", lambda result: "")
    command(monkeypatch, "bench", "--json", path)


WRITERS = {
    "save.safetensors": save,
    "embed.npy": embed,
    "bench.json": bench_json,
}


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", WRITERS)
def test_a_new_file_has_the_mode_that_the_umask_leaves(name, folder, tmp_path, monkeypatch, umask):
    for mask in (0o027, 0o022):
        umask(mask)
        path = tmp_path / f"{mask}-{name}"
        WRITERS[name](path, folder, monkeypatch)
        assert mode(path) == 0o666 & ~mask
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_is_replaced_keeps_its_mode_and_links_to_it(name, folder, tmp_path, monkeypatch):
    there, links = tmp_path / "there", tmp_path / "links"
    there.mkdir()
    links.mkdir()
    target, link, second = there / name, links / f"1-{name}", links / f"2-{name}"
    link.symlink_to(Path("..", "there", name))
    second.symlink_to(link)
    for place in (target, link, second):
        target.write_text("before")
        target.chmod(0o604)
        WRITERS[name](place, folder, monkeypatch)
        assert mode(target) == 0o604
        assert target.read_bytes() != b"before"
    assert os.readlink(link) == str(Path("..", "there", name))
    target.unlink()
    WRITERS[name](second, folder, monkeypatch)  # of a link to nothing
    assert target.is_file()
    assert link.is_symlink()
    assert second.is_symlink()
    assert (list(there.iterdir()), sorted(links.iterdir())) == ([target], [link, second])


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a socket", "a device"])
@pytest.mark.parametrize("name", WRITERS)
def test_nothing_but_a_file_is_replaced(name, kind, folder, tmp_path, monkeypatch):
    path = tmp_path / name
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(name)
    else:
        path.symlink_to(os.devnull)
    before = path.stat()
    for place in (path, Path(name)):
        with pytest.raises(ValueError, match=rf"{name}.* is {kind}"):
            WRITERS[name](place, folder, monkeypatch)
    after = path.stat()
    assert (before.st_mode, before.st_ino) == (after.st_mode, after.st_ino)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_fails_leaves_the_file_as_it_was(error, tmp_path):
    path = tmp_path / "file"
    path.write_text("before")

    def write():
        with replaced(path) as new:
            new.write_text("half")
            raise error("no space")

    with pytest.raises(error, match="no space"):
        write()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_begun_is_seen_by_nobody_who_may_not_see_the_file(tmp_path, umask):
    umask(0o022)
    path = tmp_path / "file"
    path.write_text("before")
    for mask, while_written in ((0o600, 0o600), (0o440, 0o640)):
        path.chmod(mask)
        with replaced(path) as new:
            assert mode(new) == while_written
        assert mode(path) == mask


def test_ctrl_c_while_what_was_begun_is_taken_away(tmp_path, monkeypatch):
    unlink, asked = Path.unlink, []

    def interrupted(path, **options):
        asked.append(path)
        if len(asked) == 1:
            raise KeyboardInterrupt
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt), replaced(tmp_path / "file") as new:
        new.write_text("half")
    assert len(asked) == 2
    assert not new.exists()
