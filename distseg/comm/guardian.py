"""Guardian of one rank: a small process beside the rank that ends a job which hangs.

:mod:`distseg.comm.watch` starts it as a program of its own. It imports only the standard library
and touches no file until a job has to be ended. It reads its rank's progress from a page of shared
memory. Once a second it sends this progress to the guardians of ranks 0 and 1, which decide for all
ranks. A job is ended if

- no rank has made progress within the time limit (a rank may wait while another works),
- a rank is stopped (SIGSTOP) for that long, or its node does not answer,
- a rank's process has ended without telling its guardian, and its launcher has not noticed,
- a rank has left the job, and all other ranks wait for messages.

The time limit is 0 in programs that call distseg from their own loops, because these may do other
work for any time. Then two rules hold: the last one, and that no rank has made progress while one
of them waits for others for longer than this wait may take.

Time is counted in the guardian's own ticks. So a job that is suspended as a whole, or waits for a
busy machine, is not taken for one that hangs. Each guardian kills its own rank, without the help of
a launcher.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import select
import signal
import socket
import struct
import sys
import time

PAGE, TEXT = 4096, 500
# Offsets of the fields in the shared page.
MOVES, LIMIT, ENDING, PHASE, DOING, WAITING = (0, 8, 16, 24, 24 + TEXT, 24 + 2 * TEXT)
PATIENCE = 24 + 3 * TEXT
# Times in seconds.
DEPUTY_WAITS = 1.0  # rank 1's guardian leaves the decision to rank 0's guardian for this long
GONE_AFTER = 5.0  # a launcher may take this long to notice the end of a process
CONNECTED_WITHIN = 20.0  # to connect to the guardians that decide
STILL_WITHIN = 0.5  # until ranks that wait for a stopped one stand still
STACKS_WITHIN = 1.0  # to write the stacks
KEPT_WITHIN = 0.3  # to save the stacks
SEEN_OFF_EVERY = 0.1  # between two checks that an ending process still exists
# Least time that a process gets to end after its work, unless it is stopped. On a busy machine many
# ranks need some time.
ENDS_WITHIN = 60.0
ALONE_AFTER = 5.0  # all other ranks wait for a rank that has left for this long
# Values of the field ENDING: only the watch ends, the process ends, the rank has left its job.
UNWATCHED, FOR_GOOD, LEFT = 1, 2, 3
_LONGEST_LINE = 1 << 16
_OWN_TIMEOUT = "timeout of init_mesh and distribute"  # the limit of waits in a program's own loop


class Rank:
    """Process of a rank that the guardian watches.

    The guardian sees the page of memory to which the process writes its progress, the state that
    the kernel gives, and the stacks of the threads.

    Args:
        page: the shared page of memory to which the process writes its progress.
        stacks: descriptor of the file to which the process writes its stacks at SIGQUIT.
        pid: id of the process.

    Attributes:
        still: seconds since the process last made progress.
    """

    def __init__(self, page: mmap.mmap, stacks: int, pid: int):
        self.page, self.stacks, self.pid = page, stacks, pid
        self.moves, self.still = -1, 0.0

    def tick(self, seconds: float) -> None:
        """Update ``still``; ``seconds`` have passed since the previous call."""
        moves = int.from_bytes(self.page[MOVES : MOVES + 8], "little")
        self.still = 0.0 if moves != self.moves else self.still + seconds
        self.moves = moves

    @property
    def where(self) -> str:
        """Description of what the process is doing, for messages."""
        phase, doing, waiting = (self._text(at) for at in (PHASE, DOING, WAITING))
        parts = [phase or "starting", doing, f"waits for {waiting}" if waiting else ""]
        return ", ".join(part for part in parts if part)

    def _text(self, at: int) -> str:
        return self.page[at : at + TEXT].partition(b"\0")[0].decode(errors="replace")

    @property
    def limit(self) -> float:
        """Seconds without progress after which a job counts as hanging; 0 stands for no limit."""
        return struct.unpack("d", self.page[LIMIT : LIMIT + 8])[0]

    @property
    def patience(self) -> float:
        """Seconds that the current wait for other ranks may take; 0 stands for no limit.

        The value is 0 too while the process does not wait.
        """
        return struct.unpack("d", self.page[PATIENCE : PATIENCE + 8])[0] if self.waits else 0.0

    @property
    def ending(self) -> bool:
        """True if the process has announced that it ends, or that it shall not be watched."""
        return self.page[ENDING] > 0

    @property
    def ends_for_good(self) -> bool:
        """True if the process has announced that it ends."""
        return self.page[ENDING] == FOR_GOOD

    @property
    def has_left(self) -> bool:
        """True if the rank's program has ended; its process may still wait for other ranks."""
        return self.page[ENDING] == LEFT

    @property
    def waits(self) -> bool:
        """True if the process waits for a message of another rank."""
        return self.page[WAITING] > 0

    @property
    def state(self) -> str:
        """State letter of the kernel: R runs, S sleeps, D waits for a disk, T is stopped, Z ended.

        It is "?" if the kernel does not give the state.
        """
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return "?"

    def is_there(self) -> bool:
        """Return True if the rank's process still exists: it is this guardian's parent process."""
        return os.getppid() == self.pid

    def dump(self) -> str:
        """Return the stacks of the process's threads as text, and stop the process by SIGSTOP."""
        if self.has_left:
            return "its program has ended"  # It handles no signals any more.
        # A stopped process must run again to write its stacks. Before that, the guardians of the
        # ranks that wait for it need time to stop those ranks.
        if self.state == "T":
            time.sleep(STILL_WITHIN)
        before = os.fstat(self.stacks).st_size
        self._signal(signal.SIGQUIT, _to_main_thread)
        self._signal(signal.SIGCONT)  # A stopped process handles the pending SIGQUIT first.
        deadline, size = time.monotonic() + STACKS_WITHIN, before
        while time.monotonic() < deadline:
            time.sleep(0.02)
            if size > before and os.fstat(self.stacks).st_size == size:
                break
            size = os.fstat(self.stacks).st_size
        self._signal(signal.SIGSTOP)
        return os.pread(self.stacks, 1 << 20, before).decode(errors="replace")

    def kill(self) -> None:
        """End the process by SIGKILL, if it still exists."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int, send=os.kill) -> None:
        if self.is_there():
            try:
                send(self.pid, number)
            except ProcessLookupError:
                pass


def _to_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process.

    The thread that handles the signal writes the stacks of all threads. If one of MPI's threads
    handled the signal, the main thread would go on, and its stack would be read while it changes.
    """
    try:
        import ctypes

        tgkill = ctypes.CDLL(None, use_errno=True).tgkill
    # ctypes is missing, or the C library has no tgkill.
    except (ImportError, AttributeError, OSError):
        os.kill(pid, number)
        return
    if tgkill(pid, pid, number):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Member:
    """State of one rank of the job, as its guardian reports it.

    Attributes:
        rank, host: number of the rank, and name of its node.
        still: seconds since the rank last made progress.
        unheard: seconds since the last report of its guardian.
        where, state: what the rank is doing, and its kernel state (:class:`Rank`).
        connected: True once the rank's guardian has sent a report.
        waits: True while the rank waits for a message.
        patience: seconds that the rank's current wait may take (:class:`Rank`).
        has_left: True once the rank's program has ended (:class:`Rank`).
        said_bye: True once the guardian has announced that the rank ends or is no longer watched.
        lost: True if the connection to the guardian broke without this announcement.
    """

    def __init__(self, rank: int, host: str):
        self.rank, self.host = rank, host
        self.still = self.unheard = self.patience = 0.0
        self.where, self.state = "starting", "?"
        self.waits = self.has_left = False
        self.connected = self.said_bye = self.lost = False

    def hear(self, message: dict) -> None:
        """Store a report of the rank's guardian, a dict with ``still``, ``where``, ``state``."""
        self.connected, self.lost, self.unheard = True, False, 0.0
        self.still, self.where, self.state = (
            float(message["still"]),
            str(message["where"]),
            str(message["state"]),
        )
        self.waits, self.has_left = bool(message.get("waits")), bool(message.get("left"))
        self.patience = float(message.get("patience", 0.0))

    def line(self) -> str:
        """Return the rank's state in words, for the report to the user."""
        state = {"T": ", is stopped (SIGSTOP)", "D": ", waits for a disk", "Z": ", has ended"}.get(
            self.state, ""
        )
        if self.lost:
            state = ", its process is gone"
        elif self.unheard > self.still:
            state = f", no report for {self.unheard:.0f} s"
        return f"{self.where}{state}, no progress for {self.still:.0f} s"


def verdict(members: list[Member], timeout: float) -> str | None:
    """Return the reason to end the job, in words, or None to let it go on.

    Args:
        members: the states of all ranks.
        timeout: ``run.timeout`` in seconds; 0 for no limit.
    """
    if left := _left_alone(members, timeout):
        return left
    at_work = [m for m in members if m.connected and not m.said_bye]
    if not timeout:
        return _waits_too_long(at_work)
    if gone := [m.rank for m in at_work if m.lost and m.unheard > GONE_AFTER]:
        return f"{_ranks(gone)} ended without an error message"
    if silent := [m.rank for m in at_work if m.unheard > timeout]:
        have = "has" if len(silent) == 1 else "have"
        return f"{_ranks(silent)} {have} not been heard of for {timeout:g} s (run.timeout)"
    if stopped := [m.rank for m in at_work if m.state == "T" and m.still > timeout]:
        are = "is" if len(stopped) == 1 else "are"
        return f"{_ranks(stopped)} {are} stopped for {timeout:g} s (run.timeout)"
    if at_work and min(m.still for m in at_work) > timeout:
        return f"nothing has moved for {timeout:g} s (run.timeout)"
    return None


def _left_alone(members: list[Member], timeout: float) -> str | None:
    """Return the reason to end a job that some ranks have left while all others wait, or None.

    Args:
        members: the states of all ranks.
        timeout: ``run.timeout`` in seconds; 0 for no limit. If it is 0, a rank whose guardian
            vanished without a word counts as left; otherwise :func:`verdict` handles this case.
    """
    gone = [m for m in members if m.has_left or m.lost and m.unheard > GONE_AFTER and not timeout]
    others = [m for m in members if m not in gone]
    if not gone or not others:
        return None
    if all(m.connected and m.waits and not m.said_bye and m.still > ALONE_AFTER for m in others):
        have, waits = ("has", "have")[len(gone) > 1], ("waits", "wait")[len(others) > 1]
        return (
            f"{_ranks([m.rank for m in gone])} {have} left the job, but "
            f"{_ranks([m.rank for m in others])} {waits} for all ranks"
        )
    return None


def _waits_too_long(members: list[Member]) -> str | None:
    """Return the reason to end a job without a time limit in which ranks wait in vain, or None.

    The job is ended if no rank has made progress for longer than one of the waits may take, and for
    5 s more. In these 5 s the waiting rank itself may raise an error.

    Args:
        members: the states of all ranks.
    """
    waiting = [m for m in members if m.patience]
    if not waiting:
        return None
    limit = min(m.patience for m in waiting)
    if min(max(m.still, m.unheard) for m in members) <= limit + ALONE_AFTER:
        return None
    waits = "waits" if len(waiting) == 1 else "wait"
    return (
        f"{_ranks([m.rank for m in waiting])} {waits} for other ranks, and nothing has moved for "
        f"{limit:g} s ({_OWN_TIMEOUT})"
    )


def report(reason: str, members: list[Member], folder: str | None) -> str:
    """Return the message to the user that the job is ended, with the state of each rank.

    Ranks in the same state on the same host share a line of the message.

    Args:
        reason: the reason to end the job (:func:`verdict`).
        members: the states of all ranks.
        folder: the folder for the stacks of all ranks; None if stacks are printed below the
            message.
    """
    places: dict[tuple[str, str], list[int]] = {}
    for m in members:
        if m.connected and not m.said_bye:
            places.setdefault((m.line(), m.host), []).append(m.rank)
    lines = [f"distseg: error: {reason}, so the job is ended. What its ranks were doing:"]
    lines += [f"  {_ranks(ranks)} on {host}: {line}" for (line, host), ranks in places.items()]
    lines.append(f"  stacks of all ranks: {folder}" if folder else "  stacks: below")
    same_calls = "  All ranks must make the same calls of distseg"
    if any(m.has_left for m in members):
        lines.append(
            f"{same_calls}: let none of them end before the others, as by sys.exit() on one rank."
        )
    elif _OWN_TIMEOUT in reason:
        lines.append(
            f"{same_calls}. If a rank was only busy, give init_mesh and distribute a larger "
            "timeout."
        )
    else:
        lines.append(
            "  If the job was only busy, set run.timeout higher. A training run continues with "
            "--train.resume true."
        )
    return "\n".join(lines)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (
        f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    )
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


class Lines:
    """Socket to another guardian, which carries one JSON object per line."""

    def __init__(self, connection: socket.socket):
        self.connection, self.waiting = connection, b""
        connection.settimeout(2.0)

    def fileno(self) -> int:
        """Return the descriptor of the socket, by which ``select`` waits for it."""
        return self.connection.fileno()

    def send(self, what: dict) -> bool:
        """Send a JSON object; return False if the connection is broken."""
        try:
            self.connection.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict] | None:
        """Return the JSON objects of the complete lines that arrived since the previous call.

        Return None if the other side has closed the connection or does not send JSON objects.
        """
        try:
            found = self.connection.recv(_LONGEST_LINE)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not found or len(self.waiting) > _LONGEST_LINE:
            return None
        *lines, self.waiting = (self.waiting + found).split(b"\n")
        try:
            message = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return message if all(isinstance(one, dict) for one in message) else None


class Guardian:
    """Guardian process, which reads the progress of its rank and kills the rank if the job hangs.

    It sends the progress to the guardians of ranks 0 and 1. These two decide when the job is ended,
    and tell the other guardians (the rules are in the module's docstring).

    Args:
        rank: the process that this guardian watches, as a :class:`Rank`.
        number: the rank of this process in the job, from 0.
    """

    def __init__(self, rank: Rank, number: int):
        self.rank, self.number = rank, number
        self.folder: str | None = None
        self.shown: int | None = None  # the rank whose stacks are printed without a folder
        self.secret = secrets.token_hex(16)  # other processes must send it to be heard
        self.rank_pipe = [sys.stdin]  # what the rank writes; empty once it has closed it
        self.listener: socket.socket | None = None
        self.members: list[Member] = []
        self.monitors: list[Lines] = []  # connections to the guardians that decide
        self.guests: dict[int, Lines] = {}  # connections from other guardians, by rank
        self.strangers: list[Lines] = []  # connections that have not sent the secret yet
        self.judged = 0.0  # seconds since this guardian found a reason to end the job

    def run(self) -> None:
        """Watch the rank until its process ends, or until this guardian has ended it."""
        last = time.monotonic()
        while True:
            tick = min(1.0, max(0.02, self.rank.limit / 8)) if self.rank.limit else 1.0
            # Other guardians may connect before `join` has named the members.
            guests = [*self.guests.values(), *self.strangers] if self.members else []
            readers = [*self.rank_pipe, *filter(None, [self.listener]), *self.monitors, *guests]
            ready, _, _ = select.select(readers, [], [], max(0.0, last + tick - time.monotonic()))
            self._listen(ready)
            now = time.monotonic()
            if now - last >= tick:
                # If more time has passed, this guardian itself did not run, and it does not count.
                self._tick(min(now - last, 2 * tick))
                last = now

    # what comes in

    def _listen(self, ready: list) -> None:
        """Handle what has arrived: commands of the rank, connections, and messages of guardians."""
        if sys.stdin in ready:
            self._obey(sys.stdin.readline())
        if self.listener in ready:
            self.strangers.append(Lines(self.listener.accept()[0]))
        for number in [n for n, lines in self.guests.items() if lines in ready]:
            self._hear(number, self.guests[number].receive())
        for lines in [s for s in self.strangers if s in ready]:
            self._let_in(lines)
        for lines in [m for m in self.monitors if m in ready]:
            message = lines.receive()
            if message is None:
                self.monitors.remove(lines)
            for one in message or []:
                if one.get("end"):
                    self.folder, self.shown = one["folder"], one["shown"]
                    self._end(None)

    def _obey(self, line: str) -> None:
        """Carry out a command of the watched rank.

        Args:
            line: the command as a JSON object, or an empty text once the rank's pipe is closed.
        """
        if not line and self.rank.has_left:
            self.rank_pipe = []  # The process may still wait for others in MPI_Finalize.
        elif not line:
            self._leave()
        else:
            message = json.loads(line)
            self._join(message) if "join" in message else self._open()

    def _let_in(self, lines: Lines) -> None:
        """Read from a new connection; close it unless it sends a rank and this job's secret."""
        message = lines.receive()
        if message == []:
            return  # The line is not complete yet.
        self.strangers.remove(lines)
        if (
            message
            and message[0].get("secret") == self.secret
            and message[0].get("rank") in range(len(self.members))
        ):
            self.guests[message[0]["rank"]] = lines
            self._hear(message[0]["rank"], message)
        else:
            lines.connection.close()

    def _hear(self, number: int, message: list[dict] | None) -> None:
        """Store the messages of another rank's guardian, or the loss of its connection.

        Args:
            number: the number of that rank.
            message: the messages that have arrived; None if the connection is broken.
        """
        member = self.members[number]
        if message is None:
            del self.guests[number]
            member.lost = not member.said_bye
        for one in message or []:
            member.said_bye |= bool(one.get("bye"))
            if "still" in one:
                member.hear(one)

    def _leave(self) -> None:
        """End this guardian, because its rank's process has ended or is no longer watched."""
        if self.rank.ending:
            for lines in self.monitors:
                lines.send({"rank": self.number, "bye": True})
        if self.rank.ends_for_good:
            self._see_off()
        os._exit(0)

    def _see_off(self) -> None:
        """Wait until the rank's process has ended, and kill it if it does not end in time.

        MPI waits for all ranks while a process ends, so a process can also hang while it ends.
        """
        for lines in (*self.monitors, *self.guests.values(), *self.strangers):
            lines.connection.close()
        passed = 0.0
        while self.rank.is_there():
            stopped = self.rank.state == "T"
            limit = self.rank.limit if stopped else max(self.rank.limit, ENDS_WITHIN)
            if self.rank.limit and passed >= limit:
                state = ", is stopped (SIGSTOP)" if stopped else ""
                least = "" if stopped else f", at least {ENDS_WITHIN:g}"
                print(
                    f"distseg: error: rank {self.number} on {socket.gethostname()} has done its "
                    f"work, but does not end{state}; "
                    f"it is killed after {limit:g} s (run.timeout{least})",
                    file=sys.stderr,
                    flush=True,
                )
                self.rank.kill()
                return
            time.sleep(SEEN_OFF_EVERY)
            passed += SEEN_OFF_EVERY

    def _open(self) -> None:
        """Listen for other guardians, and print this guardian's address, which its rank reads."""
        self.listener = socket.create_server(("", 0), backlog=4096)
        print(
            json.dumps(
                {
                    "host": socket.gethostname(),
                    "addresses": _addresses(),
                    "port": self.listener.getsockname()[1],
                    "secret": self.secret,
                }
            ),
            flush=True,
        )

    def _join(self, message: dict) -> None:
        """Connect to the guardians of ranks 0 and 1, whose addresses the watched rank has sent."""
        self.folder, self.number = message["folder"], message["rank"]
        self.members = [Member(rank, host) for rank, host in enumerate(message["join"])]
        if len(self.members) == 1:
            self.members = []  # There are no other ranks.
            return
        deadline = time.monotonic() + CONNECTED_WITHIN
        for number, monitor in enumerate(message["monitors"]):
            if monitor and number == self.number:
                self.members[number].connected = True
            elif monitor and (lines := _connected(monitor, deadline)):
                self.monitors.append(lines)
                lines.send({"secret": monitor["secret"], **self._message()})
        if not self.monitors:
            print(
                f"distseg: the guardian of rank {self.number} cannot reach the guardian of rank 0 "
                "or rank 1, so it watches its own rank alone: "
                "after run.timeout it ends this rank even if the rank waits for others that work",
                file=sys.stderr,
                flush=True,
            )

    # what is decided

    def _message(self) -> dict:
        """Return the report on the watched rank, for the guardians of ranks 0 and 1."""
        return {
            "rank": self.number,
            "still": self.rank.still,
            "where": self.rank.where,
            "state": self.rank.state,
            "waits": self.rank.waits,
            "patience": self.rank.patience,
            "left": self.rank.has_left,
        }

    def _tick(self, seconds: float) -> None:
        """Read the rank's progress, send a report on it, and end the job if it hangs.

        Args:
            seconds: the time since the last call.
        """
        if not self.rank.is_there():
            self._leave() if self.rank.has_left else os._exit(0)
        self.rank.tick(seconds)
        message = self._message()
        self.monitors = [lines for lines in self.monitors if lines.send(message)]
        if self.members and self.number < 2:
            self._judge(seconds, message)
        elif not self.monitors and (reason := self._verdict_alone()):
            self._end(reason)

    def _verdict_alone(self) -> str | None:
        """Return the reason to end this rank, or None; used if no other guardian decides."""
        limit = self.rank.limit
        if not limit:
            return _waits_too_long(self._alone())
        if self.rank.still > limit:
            return f"nothing has moved for {limit:g} s (run.timeout)"
        return None

    def _alone(self) -> list[Member]:
        """Return a list with the state of this guardian's own rank only."""
        own = Member(self.number, socket.gethostname())
        own.hear(self._message())
        return [own]

    def _judge(self, seconds: float, own: dict) -> None:
        for m in self.members:
            m.unheard += seconds
        self.members[self.number].hear(own)
        reason = verdict(self.members, self.rank.limit)
        self.judged = self.judged + seconds if reason else 0.0
        if reason and (self.number == 0 or self.judged > DEPUTY_WAITS):
            self._end(reason)

    def _end(self, reason: str | None) -> None:
        """Save the stacks of the watched rank and kill it.

        Args:
            reason: the reason to end the job. The report is then printed first, and all other
                guardians are told to end their ranks. None if another guardian has told this one to
                end its rank.
        """
        members = self.members
        if reason:
            if self.number > 1 or not members:
                members = self._alone()
            self.folder = self.folder and os.path.join(
                self.folder, time.strftime("hang-%Y%m%d-%H%M%S")
            )
            print(report(reason, members, self.folder), file=sys.stderr, flush=True)
            at_work = [m.rank for m in members if not m.has_left]
            self.shown = self.number if self.number in at_work else at_work[0]
            for lines in self.guests.values():
                lines.send({"end": True, "folder": self.folder, "shown": self.shown})
        # All ranks are killed at the same time: after the first death the launcher ends the others,
        # which would lose their stacks.
        killed_at = time.monotonic() + STILL_WITHIN + STACKS_WITHIN + KEPT_WITHIN
        stacks = self.rank.dump()
        # Another process writes the stacks, so that a disk that hangs does not keep the rank alive.
        if os.fork() == 0:
            self._keep(stacks)
            os._exit(0)
        time.sleep(max(KEPT_WITHIN, killed_at - time.monotonic()))
        self.rank.kill()
        os._exit(0)

    def _keep(self, stacks: str) -> None:
        """Write the rank's stacks into the folder for stacks.

        Without a folder, only the stacks of rank ``self.shown`` are printed. This is the rank whose
        guardian decided to end the job, or, if it has left, the first rank that has not left.
        """
        if self.folder is None:
            if self.number == self.shown:
                print(stacks, file=sys.stderr, flush=True)
            return
        os.makedirs(self.folder, exist_ok=True)
        with open(os.path.join(self.folder, f"rank-{self.number:04d}.txt"), "w") as file:
            file.write(f"{self.rank.where}\n\n{stacks}")


def _connected(member: dict, deadline: float) -> Lines | None:
    """Return a connection to another guardian, by its first address that answers, or None.

    Args:
        member: the host, addresses and port that the guardian printed.
        deadline: a value of ``time.monotonic()``. Each address has up to 5 s to answer, but not
            beyond the deadline; an address that is tried after the deadline has 0.1 s.
    """
    for address in ["127.0.0.1"] * (member["host"] == socket.gethostname()) + member["addresses"]:
        try:
            return Lines(
                socket.create_connection(
                    (address, member["port"]), max(0.1, min(5.0, deadline - time.monotonic()))
                )
            )
        except OSError:
            continue
    return None


def _addresses() -> list[str]:
    """Return this node's name and IPv4 addresses, by which other nodes may reach it."""
    try:
        found = [
            entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        ]
    except OSError:
        found = []
    return [socket.gethostname(), *dict.fromkeys(found)]


def main() -> None:
    """Run the guardian whose shared memory, stacks file, rank and pid ``sys.argv`` gives."""
    # The rank's pid is an argument, because getppid() would be another process if the rank ended
    # at once.
    memory, stacks, number, watched = map(int, sys.argv[1:])
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # These signals are meant for the rank.
    Guardian(Rank(mmap.mmap(memory, PAGE), stacks, watched), number).run()


if __name__ == "__main__":
    main()
