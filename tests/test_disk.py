"""Files that are whole or not there, names that lead nowhere else, and the words where a disk is full."""

import errno
import os
import resource
import stat
import subprocess
import sys
import time

import pytest

from distseg.report import disk
from distseg.report.disk import DiskFull, atomic_write, locked, opened_plain, require_disk_space


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_file_appears_when_the_block_ends(tmp_path):
    path = tmp_path / "a.json"
    with atomic_write(path) as growing:
        growing.write_text("new")
        assert growing.parent == tmp_path and not path.exists()
    assert path.read_text() == "new" and names(tmp_path) == ["a.json"]


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path) as growing:
        growing.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and names(tmp_path) == ["a.json"]


def test_the_folder_may_be_renamed_as_soon_as_the_file_is_there(tmp_path, monkeypatch):
    replace = os.replace

    def and_renamed(source, destination):
        replace(source, destination)
        replace(
            tmp_path / "partial", tmp_path / "final"
        )  # as the first stage does with a checkpoint of which this was the last part

    (tmp_path / "partial").mkdir()
    monkeypatch.setattr(os, "replace", and_renamed)
    with atomic_write(tmp_path / "partial" / "a.txt") as growing:
        growing.write_text("new")
    assert [p.name for p in (tmp_path / "final").iterdir()] == ["a.txt"]


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_mode_is_the_umasks_whatever_a_library_does(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        with atomic_write(tmp_path / "a") as growing:
            other = tmp_path / "b"
            other.write_text("as safetensors writes it")
            os.chmod(other, 0o600 if mode != 0o600 else 0o666)
            os.replace(other, growing)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


def test_planted_links_are_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "out").mkdir()
    for name in (".a.json.writing", "a.json", "lock"):
        (tmp_path / "out" / name).symlink_to(precious)
    with atomic_write(tmp_path / "out/a.json") as growing:
        assert growing.name != ".a.json.writing"
        growing.write_text("new")
    with pytest.raises(FileExistsError, match="lock is a link, a folder or a device, .* remove it"):
        locked(tmp_path / "out/lock", tmp_path)
    assert precious.read_text() == "mine" and not (tmp_path / "out/a.json").is_symlink()


def test_pipes_and_folders_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, flags in (
        ("pipe", os.O_RDONLY),
        ("pipe", os.O_WRONLY),
        ("pipe", os.O_RDWR),
        ("folder", os.O_RDWR | os.O_CREAT),
        ("folder", os.O_RDONLY),
    ):
        with pytest.raises(FileExistsError, match=f"{name} is a link, a folder or a device"):
            opened_plain(tmp_path / name, flags)


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = names(tmp_path)
    for name, kind in dict(pipe="pipe or device", link="pipe or device", folder="folder").items():
        with (
            pytest.raises(FileExistsError, match=f"{name} is a {kind}, which no file may replace"),
            atomic_write(tmp_path / name),
        ):
            pytest.fail("the work was begun")
    with atomic_write(tmp_path / "dangling") as growing:
        growing.write_text("new")
    assert (
        (tmp_path / "pipe").is_fifo()
        and (tmp_path / "link").is_symlink()
        and names(tmp_path) == before
    )


def test_what_killed_jobs_left_is_removed_what_grows_is_kept(tmp_path, monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    other = "00000000" if disk._HOST != "00000000" else "00000001"
    files = {
        f".a.h5.{disk._HOST}-{ended.pid}-01234567.writing": (120, False),
        f".a.h5.{other}-1-01234567.writing": (7200, False),
        f".b.h5.{disk._HOST}-{os.getpid()}-01234567.writing": (120, True),
        f".b.h5.{disk._HOST}-{ended.pid}-01234568.writing": (5, True),
        f".b.h5.{other}-1-01234568.writing": (120, True),
        "notes.writing": (7200, True),
    }
    for name, (age, _) in files.items():
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    monkeypatch.setattr(disk, "_cleared", set())
    with atomic_write(tmp_path / "c") as growing:
        growing.write_text("new")
    assert names(tmp_path) == sorted(["c", *(name for name, (_, kept) in files.items() if kept)])


def test_a_name_as_long_as_names_may_be(tmp_path):
    with atomic_write(tmp_path / ("x" * 252 + ".h5")) as growing:
        growing.write_text("new")
    assert len(names(tmp_path)[0]) == 255


# full disks


def test_room_is_asked_for_before_the_work(tmp_path):
    require_disk_space(tmp_path / "not/yet/there", 1, "a checkpoint")
    with pytest.raises(
        DiskFull,
        match=r"c.h5 has too little space for a checkpoint: it takes 1e\+0?3 PB, .*B are free; free some space, or choose another output",
    ) as found:
        require_disk_space(tmp_path / "c.h5", 10**18, "a checkpoint")
    assert found.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError(
            "Can't decrement id ref count (file write failed: error message = 'No space left on device')"
        ),
        ValueError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_told_with_file_and_free_bytes_whoever_finds_it(tmp_path, error):
    (tmp_path / "a").write_text("old")
    with pytest.raises(
        DiskFull,
        match="a could not be written, (no space is left|the quota) .* after 5 B of it: .*B are free; free some space",
    ):
        with atomic_write(tmp_path / "a") as growing:
            growing.write_text("12345")
            raise error
    assert names(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(PermissionError, match="not yours"), atomic_write(tmp_path / "a"):
        raise PermissionError(errno.EACCES, "not yours")


def test_the_limit_of_a_file(tmp_path):
    """In a process of its own, which ends with the words, not by the signal."""
    code = "import sys; from distseg.report.disk import atomic_write\nwith atomic_write(sys.argv[1]) as growing: growing.write_bytes(bytes(100_000))"

    def limit():
        return resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    found = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a"],
        preexec_fn=limit,
        capture_output=True,
        text=True,
    )
    assert (
        "a could not be written, files may not grow so large here (ulimit -f" in found.stderr
        and not names(tmp_path)
    )


# locks


def test_a_lock_on_a_file_that_was_renamed_meanwhile_is_not_taken(tmp_path, monkeypatch):
    """Who waits for a store's writer must not empty the finished store under the name it had while it grew."""
    first = locked(tmp_path / "s.partial", tmp_path / "s")
    opened = disk.opened_plain

    def slow(path, flags):
        handle = opened(path, flags)
        if first.closed:
            return handle
        first.write(b"finished")
        first.close()
        os.replace(path, tmp_path / "s")
        return handle

    monkeypatch.setattr(disk, "opened_plain", slow)
    second = locked(tmp_path / "s.partial", tmp_path / "s")
    second.write(b"other")
    second.close()
    assert (tmp_path / "s").read_bytes() == b"finished" and (
        tmp_path / "s.partial"
    ).read_bytes() == b"other"
