"""The file that measurements are kept in: SQLite, one short transaction for each change, no connection kept open.

Any number of processes may read and write one file at a time. A file that cannot be written is read all the same, and
what is recorded stays in the memory of the process, which is said once.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import os
import sqlite3
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..contract.names import parts
from ..errors import ConfigError
from .rows import BACKEND, Place, Quarantined, Row, canonical, check_row, row_of, when
from .similarity import numbers_of

__all__ = ["FORMAT", "SCHEMA", "Asked", "TuningStore", "path_of"]

SCHEMA = 3
"""Version of the tables: 1 had measurements alone, 2 no index of requests. Raise it too where `similarity.numbers_of`
says otherwise of a request. A file with a higher one was made by a later polyattn."""
FORMAT = "polyattn tuning 1"
"""What an exported file says it is."""
_APPLICATION = 0x706F6C79
_WAIT_S = 30.0
_LARGEST = 2**48
"""Larger numbers are no request's. Columns do not hold all that a file may have."""

_MEASUREMENT = """
CREATE TABLE IF NOT EXISTS measurement (
    device TEXT NOT NULL, arch TEXT NOT NULL, versions TEXT NOT NULL, subject TEXT NOT NULL, key TEXT NOT NULL,
    value TEXT NOT NULL, microseconds REAL NOT NULL, date TEXT NOT NULL, source TEXT NOT NULL,
    PRIMARY KEY (device, arch, versions, subject, key)
) WITHOUT ROWID
"""
_QUARANTINE = """
CREATE TABLE IF NOT EXISTS quarantine (
    device TEXT NOT NULL, arch TEXT NOT NULL, versions TEXT NOT NULL, backend TEXT NOT NULL, key TEXT NOT NULL,
    reason TEXT NOT NULL, date TEXT NOT NULL,
    PRIMARY KEY (device, arch, versions, backend, key)
) WITHOUT ROWID
"""
_INDEX = (
    """
CREATE TABLE IF NOT EXISTS request (
    id INTEGER PRIMARY KEY, text TEXT NOT NULL, device TEXT NOT NULL, arch TEXT NOT NULL, versions TEXT NOT NULL,
    kind TEXT, head_dim INTEGER, groups REAL, page_size INTEGER, to_left INTEGER, to_right INTEGER, layout TEXT,
    UNIQUE (text, device, arch, versions)
)
""",
    """
CREATE INDEX IF NOT EXISTS alike ON request (
    kind, device, arch, versions, head_dim, groups, page_size, to_left, to_right, layout
)
""",
    """
CREATE TABLE IF NOT EXISTS lengths (
    request INTEGER NOT NULL, batch INTEGER NOT NULL, q INTEGER NOT NULL, k INTEGER NOT NULL,
    PRIMARY KEY (request, batch, q, k)
) WITHOUT ROWID
""",
)
"""Which requests were measured where, what makes others like them, and at which lengths. With these the key of a
measurement is made, so that it is found without a look at any other."""
_TABLES = (_MEASUREMENT, _QUARANTINE, *_INDEX)
_LACKS = {0: _TABLES, 1: (_QUARANTINE,)}
"""Version of a file -> the tables that who reads it needs, and that it has not yet."""
_PLACE = "device = :device AND arch = :arch AND versions = :versions"
_OWN = f"SELECT id FROM request WHERE text = :text AND {_PLACE}"
_ELSEWHERE = f"""
SELECT device, arch, versions, (SELECT count(*) FROM lengths WHERE request = id) FROM request
WHERE text = :text AND NOT ({_PLACE})
"""
_NUMBERS = ("head_dim", "groups", "page_size", "to_left", "to_right", "layout")
_ALIKE = f"SELECT id, text FROM request WHERE kind = :kind AND {_PLACE} AND text <> :text"
_SAME_NUMBERS = f"{_ALIKE} AND {' AND '.join(f'{name} = :{name}' for name in _NUMBERS)} LIMIT :most"
_APART = " * ".join(
    f"CASE WHEN {name} = :{name} THEN 1 ELSE coalesce(max(1.0 * {name} / :{name}, 1.0 * :{name} / {name}), 1e9) END"
    for name in _NUMBERS[:-1]
)
_NEAR_NUMBERS = f"""
{_ALIKE} AND head_dim BETWEEN :head_dim / 2 AND :head_dim * 2 AND groups BETWEEN :groups / 2 AND :groups * 2
ORDER BY {_APART} * CASE WHEN layout = :layout THEN 1 ELSE 2 END, text LIMIT :most
"""
"""The distance of `similarity` as a product: the nearest first."""
MOST_ALIKE, MOST_ROWS = 16, 256
"""Requests like one that is asked for, the nearest, and measurements of them, that are looked at."""
_COLUMNS = "device, arch, versions, subject, key, value, microseconds, date, source"
_REPLACE = f"""
INSERT INTO measurement ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (device, arch, versions, subject, key) DO UPDATE SET
    value = excluded.value, microseconds = excluded.microseconds, date = excluded.date, source = excluded.source
"""
_REPLACE_OLDER = f"{_REPLACE} WHERE julianday(excluded.date) > coalesce(julianday(measurement.date), 0)"
_OF_LENGTHS = f"""
SELECT {_COLUMNS} FROM lengths JOIN measurement ON {_PLACE} AND subject = '{BACKEND}'
    AND key = printf('{{"batch":%d,"k":%d,"q":%d,"request":%s}}', batch, k, q, :text)
WHERE request = :id
"""
_VARIABLE = "POLYATTN_TUNING_STORE"
_Identity = tuple[str, str, str, str, str]


class Asked(NamedTuple):
    """What a store has about a request in a place: its measurements, how many there are of it at each other place, and
    the measurements of requests like it."""

    own: Sequence[Row]
    elsewhere: Sequence[tuple[Place, int]]
    alike: Sequence[Row]


def path_of(name: str | Path) -> Path:
    """A path whose `~` is somebody's home.

    Raises:
        ConfigError: nobody can tell whose.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as exc:
        raise ConfigError(
            f"the tuning store {name} is nowhere ({exc}); name a file with POLYATTN_TUNING_STORE, without ~"
        ) from exc


class TuningStore:
    """Measurements in a file, or in memory.

    Args:
        path: of the file; it is made with the first measurement. None: memory.
        rebuild: a file that is damaged, of another program or of a later polyattn is moved aside (`.old`, `.old2`
            ...), which is warned about, and a new one begun.
        by: what names the file, for messages.

    Raises:
        ConfigError: there is such a file, and `rebuild` is not asked for; or nobody can see whether there is one.
    """

    def __init__(self, path: str | Path | None = None, *, rebuild: bool = False, by: str = _VARIABLE) -> None:
        self.path, self._by = None if path is None else path_of(path), by
        self._own: dict[_Identity, Row] = {}
        self._held: dict[_Identity, Quarantined] = {}
        self._only_memory, self._format = False, 0
        self._told: set[str] = set()
        self._persistence_required = False
        if self.path is None or not self._there(self.path):
            return
        try:
            with self._reading(self.path):
                pass
        except ConfigError as exc:
            if not rebuild:
                raise
            names = (f"{self.path.name}.old{number}" for number in itertools.chain([""], itertools.count(2)))
            aside = next(path for path in map(self.path.with_name, names) if not path.exists())
            for suffix in ("", "-wal"):
                with contextlib.suppress(FileNotFoundError):
                    self.path.with_name(self.path.name + suffix).replace(aside.with_name(aside.name + suffix))
            self.path.with_name(self.path.name + "-shm").unlink(missing_ok=True)
            warnings.warn(f"{exc} It was moved to {aside}, and a new one is begun.", RuntimeWarning, stacklevel=2)

    # ------------------------------------------------------------------------------------------------------- reading

    def rows(self, place: Place | None = None, subject: str | None = None) -> list[Row]:
        """Return all measurements, or those of a place or a subject, in order.

        Raises:
            ConfigError: the file is damaged.
        """
        return self._found(place, subject=subject)

    def _found(self, place: Place | None, **columns: str | None) -> list[Row]:
        found: dict[_Identity, Row] = {}
        where, given = _where(place, **columns)
        if self.path is not None and self._there(self.path):
            with self._reading(self.path) as connection:
                for line in connection.execute(f"SELECT {_COLUMNS} FROM measurement WHERE {where}", given):
                    if (row := self._row(line)) is not None:
                        found[_identity(row)] = row
        for identity, row in self._own.items():
            told = dict(zip(("device", "arch", "versions", "subject", "key"), identity, strict=True))
            if given.items() <= told.items():
                found[identity] = row
        return [found[identity] for identity in sorted(found)]

    def lookup(self, place: Place, subject: str, key: Mapping[str, Any]) -> Row | None:
        """The measurement of a key, if there is one. It reads the file; calls that matter use
        `polyattn.tuning.kernel_config`, which has them in memory."""
        return next(iter(self._found(place, subject=subject, key=canonical(key))), None)

    def asked(self, place: Place, key: Mapping[str, Any]) -> Asked:
        """What was measured of a `request_key`, and of requests like it. Only these are read.

        Raises:
            ConfigError: the file is damaged.
        """
        text, found = canonical(key), Asked([], [], [])
        if self.path is not None and self._there(self.path):
            with self._reading(self.path) as connection:
                if self._format == SCHEMA:
                    found = self._asked(connection, place, text)
            if 0 < self._format < SCHEMA and "former" not in self._told:
                self._convert(self.path)
                return self.asked(place, key)
        if not self._own:
            return found
        mine = [row for row in self._own.values() if row.subject == BACKEND]
        own = [row for row in mine if row.place == place and canonical(row.key["request"]) == text]
        others = collections.Counter(row.place for row in mine if canonical(row.key["request"]) == text)
        del others[place]
        alike = [row for row in mine if row.place == place and row not in own]
        return Asked([*found.own, *own], [*found.elsewhere, *others.items()], [*found.alike, *alike])

    def _asked(self, connection: sqlite3.Connection, place: Place, text: str) -> Asked:
        given: dict[str, Any] = {"text": text, "most": MOST_ALIKE, **_columns(place), **_numbers(text)}
        own = [
            row for (number,) in connection.execute(_OWN, given) for row in self._of(connection, given, number, text)
        ]
        elsewhere = [(_place(*of), count) for *of, count in connection.execute(_ELSEWHERE, given) if count]
        near: list[tuple[int, str]] = []
        if given["kind"] is not None:
            near = connection.execute(_SAME_NUMBERS, given).fetchall()
            near = near if len(near) == MOST_ALIKE else connection.execute(_NEAR_NUMBERS, given).fetchall()
        alike: list[Row] = []
        for id_, other in near:
            if len(alike) < MOST_ROWS:
                alike += self._of(connection, given, id_, other)
        return Asked(own, elsewhere, alike)

    def _of(self, connection: sqlite3.Connection, given: Mapping[str, Any], id_: int, text: str) -> list[Row]:
        lines = connection.execute(_OF_LENGTHS, {**given, "id": id_, "text": text})
        return [row for line in lines if (row := self._row(line)) is not None]

    def _convert(self, path: Path) -> None:
        """Give a file of a former format its index. Where it cannot be written, it is read whole, once."""
        if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK) and self._written(lambda connection: None):
            return
        self._told.add("former")
        warnings.warn(
            f"the tuning store {path} has a former format and cannot be written: each process reads it whole. Measure "
            f"once, or import into it, where it can be written",
            RuntimeWarning,
            stacklevel=7,
        )
        self._own = {_identity(row): row for row in self.rows(subject=BACKEND)} | self._own

    def has(self, subject: str) -> bool:
        """Whether there is any measurement of a subject.

        Raises:
            ConfigError: the file is damaged.
        """
        found = any(row.subject == subject for row in self._own.values())
        if self.path is not None and not found and self._there(self.path):
            with self._reading(self.path) as connection:
                asked = connection.execute("SELECT 1 FROM measurement WHERE subject = ? LIMIT 1", (subject,))
                found = asked.fetchone() is not None
        return found

    def count(self) -> dict[str, int]:
        """How many measurements there are, by subject."""
        found: collections.Counter[str] = collections.Counter(row.subject for row in self._own.values())
        if self.path is not None and self._there(self.path):
            with self._reading(self.path) as connection:
                found.update(dict(connection.execute("SELECT subject, count(*) FROM measurement GROUP BY subject")))
        return dict(found)

    def page(self, first: int, count: int) -> list[Row]:
        """So many measurements in order, beginning with number `first`, from 0 on. Those that are kept in memory come
        after those of the file.

        Raises:
            ConfigError: the file is damaged.
        """
        found, there = [], 0
        if self.path is not None and self._there(self.path):
            with self._reading(self.path) as connection:
                (there,) = connection.execute("SELECT count(*) FROM measurement").fetchone()
                lines = connection.execute(f"SELECT {_COLUMNS} FROM measurement LIMIT ? OFFSET ?", (count, first))
                found = [row for line in lines if (row := self._row(line)) is not None]
        begin = max(first - there, 0)
        return [*found, *list(self._own.values())[begin : max(first + count - there, 0)]]

    def quarantined(self, place: Place | None = None) -> list[Quarantined]:
        """Backends that must not be chosen automatically, of one place or all, in order.

        Raises:
            ConfigError: the file is damaged.
        """
        found = {key: held for key, held in self._held.items() if place in (None, held.place)}
        if self.path is not None and self._there(self.path):
            with self._reading(self.path) as connection:
                where, given = _where(place)
                for line in connection.execute(f"SELECT * FROM quarantine WHERE {where}", given):
                    if (held := self._quarantined(line)) is not None:
                        found.setdefault(_held(held), held)
        return [found[key] for key in sorted(found)]

    def export(self) -> dict[str, Any]:
        """Return all measurements, for `json.dump`."""
        return {"format": FORMAT, "measurements": [row.plain() for row in self.rows()]}

    # ------------------------------------------------------------------------------------------------------- writing

    def require_persistence(self) -> None:
        """Make every failed write an error from here on, for a caller that reports its measurements as kept.

        Raises:
            ConfigError: the file cannot be written now.
        """
        self._persistence_required = True
        self._written(lambda connection: None)

    def record(self, *rows: Row) -> None:
        """Keep measurements, all or none; one of the same place, subject and key replaces what is there.

        Raises:
            ConfigError: one is none; the file is damaged, or was locked for half a minute.
        """
        for row in rows:
            check_row(row, "record", None)

        def put(connection: sqlite3.Connection) -> None:
            connection.executemany(_REPLACE, [_line(row) for row in rows])
            _index(connection, rows)

        if not self._written(put):
            self._own |= {_identity(row): row for row in rows}

    def quarantine(self, *held: Quarantined) -> None:
        """Keep backends out of automatic choice, all or none.

        Raises:
            ConfigError: as `record`.
        """
        lines = [(*_held(one), one.reason, one.date) for one in held]
        put = "INSERT OR REPLACE INTO quarantine VALUES (?, ?, ?, ?, ?, ?, ?)"
        if not self._written(lambda connection: connection.executemany(put, lines)):
            self._held |= {_held(one): one for one in held}

    def release(self, backend: str | None = None) -> int:
        """Let a backend with each of its libraries, one of these, or all, be chosen again, in every place. Returns how
        many entries there were.

        Measurements that were made without it are taken out: who tunes such a request next measures it with all.

        Raises:
            ConfigError: as `record`.
        """
        gone = [one for one in self.quarantined() if backend in (None, one.backend, parts(one.backend)[0])]
        if not gone:
            return 0
        without = {(held.place, held.backend, canonical(held.key)) for held in gone}
        lacking = [
            row
            for place, name, request in without
            for row in self.asked(place, json.loads(request)).own
            if not _took_part(name, row)
        ]
        for held in gone:
            self._held.pop(_held(held), None)
        for row in lacking:
            self._own.pop(_identity(row), None)

        def change(connection: sqlite3.Connection) -> None:
            for name in {held.backend for held in gone}:
                where, given = _where(None, backend=name)
                connection.execute(f"DELETE FROM quarantine WHERE {where}", given)
            where = " AND ".join(f"{name} = ?" for name in ("device", "arch", "versions", "subject", "key"))
            connection.executemany(f"DELETE FROM measurement WHERE {where}", map(_identity, lacking))
            _take_out(connection, lacking)

        self._written(change)
        return len(gone)

    def forget(self, subject: str, place: Place | None = None) -> int:
        """Take measurements of a subject out, of one place or all. Returns how many there were.

        Raises:
            ConfigError: as `record`.
        """
        gone = self.rows(place, subject)
        for row in gone:
            self._own.pop(_identity(row), None)
        where, given = _where(place, subject=subject)

        def change(connection: sqlite3.Connection) -> None:
            connection.execute(f"DELETE FROM measurement WHERE {where}", given)
            _take_out(connection, gone)

        if gone:
            self._written(change)
        return len(gone)

    def import_rows(self, data: Any, backends: Collection[str] | None = None, where: str = "import") -> int:
        """Keep what `export` made elsewhere, all or nothing; of two measurements of one thing the later stays.

        Args:
            data: see `export`. backends: names that rows about backends may have, None = any. where: begins messages.

        Returns:
            How many were not here, or are later than those that were.

        Raises:
            ConfigError: not such data, or it names a kernel, a backend or a choice that nobody here knows.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("measurements"), list):
            found = f" (format {data['format']!r})" if isinstance(data, dict) and "format" in data else ""
            raise ConfigError(f"{where}: this is no export of measurements{found}; one has format {FORMAT!r}")
        rows = []
        for i, one in enumerate(data["measurements"]):
            rows.append(row_of(one, f"{where}: measurement {i}"))
            check_row(rows[-1], f"{where}: measurement {i}", backends)
        kept = 0

        def put(connection: sqlite3.Connection) -> None:
            nonlocal kept
            kept = connection.executemany(_REPLACE_OLDER, [_line(row) for row in rows]).rowcount
            _index(connection, rows)

        if rows and not self._written(put):
            kept, known = 0, {_identity(row): row for row in self.rows()}
            for row in rows:
                before = known.get(_identity(row))
                if before is None or when(row.date) > when(before.date):
                    self._own[_identity(row)] = known[_identity(row)] = row
                    kept += 1
        return kept

    # ------------------------------------------------------------------------------------------------------ the file

    def _written(self, change: Callable[[sqlite3.Connection], Any]) -> bool:
        """Return whether a change was made to the file, as one transaction; False where there is none to write to."""
        path = self.path
        if path is None or self._only_memory:
            return False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)
        except (OSError, sqlite3.OperationalError) as exc:
            return self._stay_in_memory(exc)
        with contextlib.closing(connection), self._understood():
            try:
                self._begin(connection)
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    change(connection)
            except sqlite3.OperationalError as exc:
                if "locked" in str(exc) or "busy" in str(exc):
                    raise ConfigError(
                        f"{path} was locked by others for {_WAIT_S:.0f} s, and nothing was recorded; try again"
                    ) from exc
                return self._stay_in_memory(exc)
        return True

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Make the tables of a new file; two processes may both do so."""
        if self._version(connection) == SCHEMA:
            return
        with contextlib.suppress(sqlite3.OperationalError):  # another process makes the file at this moment
            connection.execute("PRAGMA journal_mode = WAL")
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            former = self._version(connection)
            for table in _TABLES:
                connection.execute(table)
            if 0 < former < SCHEMA:
                said = f"the tuning store {self.path} has a former format and is converted, once"
                warnings.warn(said, RuntimeWarning, stacklevel=7)
                lines = connection.execute(f"SELECT {_COLUMNS} FROM measurement WHERE subject = '{BACKEND}'")
                _index(connection, [row for line in lines if (row := self._row(line)) is not None])
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {SCHEMA}")

    def _stay_in_memory(self, cause: Exception) -> bool:
        said = f"measurements cannot be written to {self.path} ({cause});"
        if self._persistence_required:
            raise ConfigError(f"{said} POLYATTN_TUNING_STORE names another file") from cause
        self._only_memory = True
        warnings.warn(
            f"{said} they are kept for this process only. POLYATTN_TUNING_STORE names another file",
            RuntimeWarning,
            stacklevel=5,
        )
        return False

    def _there(self, path: Path) -> bool:
        """Return whether the file exists. `Path.exists` is not used: without permission it says no or raises, as the
        version of Python has it."""
        with self._understood():
            try:
                path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True

    @contextlib.contextmanager
    def _reading(self, path: Path) -> Iterator[sqlite3.Connection]:
        with self._understood(), contextlib.ExitStack() as stack:
            uri = path.absolute().as_uri()
            # The last to close a file, if it may write, puts the journal into it, and copies of it are whole. Where the
            # folder cannot be written, a journal cannot be opened; nobody writes there then.
            for mode in ("mode=rw", "mode=ro", "immutable=1"):
                try:
                    opened = sqlite3.connect(f"{uri}?{mode}", uri=True, timeout=_WAIT_S)
                    connection = stack.enter_context(contextlib.closing(opened))
                    version = self._format = self._version(connection)
                    break
                except sqlite3.OperationalError:
                    if mode == "immutable=1":
                        raise
            if mode == "immutable=1":
                self._tell_of_journal(path)
            if not version:  # somebody is making it
                connection = stack.enter_context(contextlib.closing(sqlite3.connect(":memory:")))
            # The file is only read: what it lacks is an empty table beside it.
            for table in _LACKS.get(version, ()):
                connection.execute(table.replace("CREATE TABLE", "CREATE TEMP TABLE"))
            yield connection

    def _tell_of_journal(self, path: Path) -> None:
        """Warn of a journal that a killed process left beside the file, or that was not copied with it."""
        journal = path.with_name(path.name + "-wal")
        if "journal" not in self._told and journal.exists() and journal.stat().st_size:
            self._told.add("journal")
            warnings.warn(
                f"the last measurements of the tuning store {path} are not read: they are in {journal.name}, which can "
                "be opened only where the folder can be written; open the store there once, as polyattn tune --show",
                RuntimeWarning,
                stacklevel=7,
            )

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.DatabaseError, sqlite3.Warning, OSError) as exc:
            raise self._unreadable(f"cannot be read ({exc})") from exc

    def _version(self, connection: sqlite3.Connection) -> int:
        """Return the version of the tables; 0 = there are none yet."""
        # Another process may make the file between these: its tables are there no sooner than its name and version.
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application != _APPLICATION and tables:
            raise self._unreadable("is a database of another program")
        if version > SCHEMA:
            what = f"has tables of version {version}, and this polyattn knows {SCHEMA}"
            raise self._unreadable(what, ours=True)
        return int(version)

    def _unreadable(self, what: str, *, ours: bool = False) -> ConfigError:
        """ours: it is known to be a store, and no file of somebody else's."""
        more = ", or move it away: nothing but measurements is in it" if ours and self._by == _VARIABLE else ""
        return ConfigError(f"the tuning store {self.path} {what}; name another file with {self._by}{more}.")

    def _row(self, line: tuple[Any, ...]) -> Row | None:
        """Read one row of the table, or return None if it is not valid."""
        plain = dict(zip(_COLUMNS.split(", "), line, strict=True))
        with self._skipped():
            return row_of(plain | {name: json.loads(plain[name]) for name in ("versions", "key", "value")}, "a row")
        return None

    def _quarantined(self, line: tuple[Any, ...]) -> Quarantined | None:
        """Read one row of the table, or return None if it is not valid."""
        device, arch, versions, backend, key, reason, date = line
        with self._skipped():
            found = json.loads(key)
            if not isinstance(found, dict):
                raise ConfigError(f"what {backend} is quarantined for is {key}; a request it is")
            if not all(isinstance(text, str) for text in (device, arch, backend, reason, date)):
                raise ConfigError(f"a quarantine of {backend!r} at {device!r}, {arch!r} has something that is no text")
            return Quarantined(_place(device, arch, versions), backend, found, reason, date)
        return None

    @contextlib.contextmanager
    def _skipped(self) -> Iterator[None]:
        """Log a row that cannot be read, and go on: one bad row must fail neither a call nor the other rows."""
        try:
            yield
        except (ValueError, TypeError, AttributeError, RecursionError) as exc:
            if "row" not in self._told:
                self._told.add("row")
                said = self._unreadable(f"has a row that is none ({exc})", ours=True)
                warnings.warn(f"{said} Such rows are not used.", RuntimeWarning, stacklevel=7)


def _place(device: str, arch: str, versions: str) -> Place:
    return Place(device, arch, tuple(sorted(json.loads(versions).items())))


def _where(place: Place | None, **columns: str | None) -> tuple[str, dict[str, str]]:
    """The condition of a query, and its values; None: any."""
    wanted = columns
    if place is not None:
        wanted |= _columns(place)
    given = {name: value for name, value in wanted.items() if value is not None}
    return " AND ".join(f"{name} = :{name}" for name in given) or "1", given


def _took_part(name: str, row: Row) -> bool:
    """Return whether a backend, or one of its libraries, was timed."""
    by = row.value.get("by", {})
    return any(name in (one, f"{one}/{by.get(one, '')}") for one in row.value["times"])


def _columns(place: Place) -> dict[str, str]:
    return {"device": place.device, "arch": place.arch, "versions": canonical(dict(place.versions))}


@functools.lru_cache(maxsize=1024)
def _numbers(text: str) -> Mapping[str, Any]:
    """What makes other requests like one, by the column of `request`."""
    found = numbers_of(json.loads(text))
    if found is None or max(found[1][:4]) > _LARGEST or max(found[1].window) > _LARGEST:
        return dict.fromkeys(("kind", *_NUMBERS))
    kind, of = found
    left, right = of.window
    numbers = (of.head_dim, of.heads / of.kv_heads, of.page_size, left + 1, right + 1, of.layout)
    return {"kind": kind, **dict(zip(_NUMBERS, numbers, strict=True))}


def _lines(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """What the index has of measurements, by column."""
    places: dict[Place, dict[str, str]] = {}
    found = []
    for row in rows:
        if row.subject == BACKEND:
            place = places.get(row.place) or places.setdefault(row.place, _columns(row.place))
            lengths = {name: row.key[name] for name in ("batch", "q", "k")}
            found.append({"text": canonical(row.key["request"]), **place, **lengths})
    return found


def _index(connection: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """Note which requests these measurements are of, and at which lengths."""
    lines = _lines(rows)
    requests = {(one["text"], one["device"], one["arch"], one["versions"]): one for one in lines}
    names = ("text", "device", "arch", "versions", "kind", *_NUMBERS)
    connection.executemany(
        f"INSERT OR IGNORE INTO request ({', '.join(names)}) VALUES ({', '.join(f':{name}' for name in names)})",
        [{**one, **_numbers(one["text"])} for one in requests.values()],
    )
    connection.executemany(f"INSERT OR IGNORE INTO lengths SELECT id, :batch, :q, :k FROM ({_OWN})", lines)


def _take_out(connection: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """Forget what `_index` noted of these."""
    at = f"request = ({_OWN}) AND batch = :batch AND q = :q AND k = :k"
    connection.executemany(f"DELETE FROM lengths WHERE {at}", _lines(rows))


def _held(one: Quarantined) -> _Identity:
    return one.place.device, one.place.arch, canonical(dict(one.place.versions)), one.backend, canonical(one.key)


def _identity(row: Row) -> _Identity:
    return row.place.device, row.place.arch, canonical(dict(row.place.versions)), row.subject, canonical(row.key)


def _line(row: Row) -> tuple[Any, ...]:
    return (*_identity(row), canonical(row.value), row.microseconds, row.date, row.source)
