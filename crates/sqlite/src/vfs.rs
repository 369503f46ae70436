//! The file system that SQLite sees, without pointers: opening, deletion, names; open files.
//!
//! Law 1: there are databases, rollback journals and super-journals. Other files, as write-ahead
//! logs, cannot be opened and do not exist.
//! Law 2: a rollback journal exists while the connection that has reserved its database uses it.

use std::sync::Arc;

use draconis_objects::Ticket;

use crate::bucket::BucketParameters;
use crate::codes;
use crate::database::{Database, wait};
use crate::error::{Failure, Result};
use crate::journal::Journal;
use crate::locks::LockLevel;
use crate::name::FileName;
use crate::open_store::{StoreUse, find_registration};

/// Bytes of the header that tell how a database is written and read: 1 for rollback journals, 2 for
/// write-ahead logs.
const VERSION_BYTES: std::ops::Range<usize> = 18..20;
const MAGIC: &[u8] = b"SQLite format 3\0";
const JOURNAL_MODES: [&str; 5] = ["delete", "truncate", "persist", "memory", "off"];
const LOCKING_MODES: [&str; 2] = ["normal", "exclusive"];

/// A file control that SQLite expects an answer to.
#[derive(Debug)]
pub(crate) enum Control<'a> {
    /// All of a transaction is written, with the name of its super-journal.
    Sync(Option<&'a [u8]>),
    CommitPhaseTwo,
    BeginAtomicWrite,
    CommitAtomicWrite,
    RollbackAtomicWrite,
    /// Name and argument.
    Pragma(&'a str, Option<&'a str>),
}

/// Answer to a file control.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// SQLite goes on as without the control.
    Unknown,
    Done,
    /// The only row of a pragma.
    Text(String),
}

/// An open file. Dropping it closes it.
pub(crate) trait File: Send {
    /// Returns the number of bytes before the end of the file.
    fn read(&mut self, at: u64, into: &mut [u8]) -> Result<usize>;
    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<()>;
    fn truncate(&mut self, len: u64) -> Result<()>;
    fn sync(&mut self) -> Result<()>;
    fn len(&mut self) -> Result<u64>;
    fn lock(&mut self, _: LockLevel) -> Result<()> {
        Ok(())
    }
    fn unlock(&mut self, _: LockLevel) {}
    fn is_reserved(&mut self) -> Result<bool> {
        Ok(false)
    }
    fn control(&mut self, _: Control<'_>) -> Result<Answer> {
        Ok(Answer::Unknown)
    }
}

/// Returns the full name of a database.
pub(crate) fn full_name(name: &[u8], store: Option<&[u8]>) -> Result<Vec<u8>> {
    FileName::resolve(name, store, find_registration)
}

/// Opens a file; returns it and the flags it was opened with.
pub(crate) fn open(
    full: &[u8],
    flags: i32,
    parameters: BucketParameters,
) -> Result<(Box<dyn File>, i32)> {
    let name = FileName::parse(full)?;
    if flags & codes::OPEN_MAIN_DB != 0 {
        return DatabaseFile::open(name, flags, parameters);
    }
    let is_read_only = flags & codes::OPEN_CREATE == 0;
    let store = StoreUse::find(&name.store);
    let journal = if flags & codes::OPEN_SUPER_JOURNAL != 0 {
        store.as_ref().and_then(|store| store.super_journals.open(&name.object, !is_read_only))
    } else if flags & codes::OPEN_MAIN_JOURNAL != 0 {
        let database = name.database_of_journal();
        let database =
            database.zip(store.as_ref()).and_then(|(name, store)| store.find_database(name));
        // Without a writer, a journal has nothing to roll back.
        match is_read_only {
            true => database.map(|database| database.active_journal().unwrap_or_default()),
            false => database.map(|database| database.add_journal()),
        }
    } else {
        let why = format!(
            "{name}: a store needs no write-ahead log and has none; PRAGMA journal_mode=DELETE"
        );
        return Err(Failure::new(codes::CANTOPEN, why));
    };
    match journal {
        Some(journal) => {
            Ok((Box::new(JournalFile { journal, is_read_only, _store: store }), flags))
        }
        None => Err(Failure::new(codes::CANTOPEN, format!("{name}: no such journal"))),
    }
}

/// Deletes a super-journal, which commits. Rollback journals end when they are closed.
pub(crate) fn delete(full: &[u8]) -> Result<()> {
    let name = FileName::parse(full)?;
    match StoreUse::find(&name.store) {
        Some(store) if name.is_super_journal() => store.super_journals.delete(&name.object, &store),
        _ => Ok(()),
    }
}

/// Returns true if a journal exists.
pub(crate) fn exists(full: &[u8]) -> bool {
    let Ok(name) = FileName::parse(full) else { return false };
    let Some(store) = StoreUse::find(&name.store) else { return false };
    let database = name.database_of_journal().and_then(|name| store.find_database(name));
    match database {
        Some(database) => database.active_journal().is_some(),
        None => store.super_journals.contains(&name.object),
    }
}

/// A rollback journal or a super-journal.
struct JournalFile {
    journal: Arc<Journal>,
    is_read_only: bool,
    _store: Option<StoreUse>,
}

impl File for JournalFile {
    fn read(&mut self, at: u64, into: &mut [u8]) -> Result<usize> {
        self.journal.read(at, into, !self.is_read_only)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        self.journal.write(at, bytes)
    }

    fn truncate(&mut self, len: u64) -> Result<()> {
        self.journal.truncate(len)
    }

    fn sync(&mut self) -> Result<()> {
        Ok(())
    }

    fn len(&mut self) -> Result<u64> {
        Ok(self.journal.len())
    }
}

/// A connection's database.
struct DatabaseFile {
    name: FileName,
    parameters: BucketParameters,
    is_read_only: bool,
    may_create: bool,
    /// `None` while another process has the store open.
    open: Option<OpenDatabase>,
    /// True once a message said so.
    is_busy_reported: bool,
    level: LockLevel,
    /// Modes that pragmas have set, in lower case: SQLite cannot be asked.
    journal_mode: String,
    locking_mode: String,
    /// Commit that is not known to be durable.
    unsynced: Option<Ticket>,
}

struct OpenDatabase {
    /// Dropped before its store.
    database: Arc<Database>,
    store: StoreUse,
}

impl DatabaseFile {
    fn open(
        name: FileName,
        flags: i32,
        parameters: BucketParameters,
    ) -> Result<(Box<dyn File>, i32)> {
        let is_read_only = flags & codes::OPEN_READONLY != 0 || name.is_snapshot();
        let flags = match is_read_only {
            true => flags & !(codes::OPEN_READWRITE | codes::OPEN_CREATE) | codes::OPEN_READONLY,
            false => flags,
        };
        let mut file = Self {
            name,
            parameters,
            is_read_only,
            may_create: flags & codes::OPEN_CREATE != 0,
            open: None,
            is_busy_reported: false,
            level: LockLevel::None,
            journal_mode: "delete".into(),
            locking_mode: "normal".into(),
            unsynced: None,
        };
        match file.open_database() {
            // The busy handler of the connection waits when it is used.
            Err(failure) if failure.code == codes::BUSY => {}
            opened => opened.map(drop)?,
        }
        Ok((Box::new(file), flags))
    }

    fn open_database(&mut self) -> Result<&OpenDatabase> {
        if self.open.is_none() {
            let opened = StoreUse::open(&self.name.store, &self.parameters, self.is_read_only);
            let store = opened.map_err(|failure| match failure.code {
                codes::BUSY if self.is_busy_reported => Failure::busy(),
                _ => failure,
            })?;
            let database = store.database(&self.name.object);
            if !database.refresh(&store)? && !self.may_create {
                let why = format!(
                    "{}: no such database; draconis store ls {} lists them",
                    self.name,
                    self.name.store.display()
                );
                return Err(Failure::new(codes::CANTOPEN, why));
            }
            self.open = Some(OpenDatabase { database, store });
        }
        self.opened()
    }

    fn opened(&self) -> Result<&OpenDatabase> {
        self.open.as_ref().ok_or_else(Failure::busy)
    }

    fn change(&self, act: impl FnOnce(&mut crate::pending::Pending)) -> Result<()> {
        if self.is_read_only {
            return Err(Failure::new(codes::READONLY, format!("{} is read-only", self.name)));
        }
        let OpenDatabase { database, store } = self.opened()?;
        database.change(store, act)
    }

    fn commit(&mut self, super_journal: Option<&[u8]>) -> Result<()> {
        let Some(OpenDatabase { database, store }) = &self.open else { return Ok(()) };
        let super_journal = super_journal.and_then(|full| FileName::parse(full).ok());
        // Those of other stores cannot be in the group.
        let of_store = super_journal.filter(|name| name.store == self.name.store);
        let ticket = database.commit(store, of_store.as_ref().map(|name| &*name.object))?;
        self.unsynced = ticket.or(self.unsynced);
        Ok(())
    }

    fn run_pragma(&mut self, name: &str, argument: Option<&str>) -> Result<Answer> {
        match (name.to_ascii_lowercase().as_str(), argument) {
            // SQLite itself knows that there is no such mode, unless it would need no shared memory.
            ("journal_mode", Some(mode)) if mode.eq_ignore_ascii_case("wal") => {
                let is_exclusive = self.level > LockLevel::None || self.locking_mode == "exclusive";
                Ok(match is_exclusive {
                    true => Answer::Text(self.journal_mode.clone()),
                    false => Answer::Unknown,
                })
            }
            ("journal_mode" | "locking_mode", Some(mode)) => {
                let mode = mode.to_ascii_lowercase();
                let (known, modes) = match name.eq_ignore_ascii_case("journal_mode") {
                    true => (&mut self.journal_mode, &JOURNAL_MODES[..]),
                    false => (&mut self.locking_mode, &LOCKING_MODES[..]),
                };
                if modes.contains(&&*mode) {
                    *known = mode;
                }
                Ok(Answer::Unknown)
            }
            ("draconis_snapshot", Some(snapshot)) => {
                let OpenDatabase { database, store } = self.open_database()?;
                database.take_snapshot(store, snapshot)?;
                Ok(Answer::Text(format!("{}@{snapshot}", self.name.object)))
            }
            ("draconis_snapshot", None) => {
                let why = "PRAGMA draconis_snapshot = 'NAME' takes a snapshot";
                Err(Failure::new(codes::ERROR, why))
            }
            _ => Ok(Answer::Unknown),
        }
    }
}

impl Drop for DatabaseFile {
    fn drop(&mut self) {
        self.unlock(LockLevel::None);
    }
}

/// Returns true if these bytes, at the start of a database, say that it has a write-ahead log.
fn is_wal_header(at: u64, bytes: &[u8]) -> bool {
    at == 0 && bytes.starts_with(MAGIC) && bytes.get(VERSION_BYTES) == Some(&[2, 2])
}

fn set_rollback_mode(bytes: &mut [u8]) {
    if let Some(versions) = bytes.get_mut(VERSION_BYTES) {
        versions.fill(1);
    }
}

impl File for DatabaseFile {
    fn read(&mut self, at: u64, into: &mut [u8]) -> Result<usize> {
        // SQLite looks at the page size before it locks.
        let Some(OpenDatabase { database, store }) = &self.open else {
            into.fill(0);
            return Ok(0);
        };
        let len = database.read(store, self.level, at, into)?;
        // Of a database that was a file: its log was empty, or it would be no part of the file.
        if is_wal_header(at, into) {
            set_rollback_mode(into);
        }
        Ok(len)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        if is_wal_header(at, bytes) {
            let mut bytes = bytes.to_vec();
            set_rollback_mode(&mut bytes);
            return self.change(|pending| pending.write(at, &bytes));
        }
        self.change(|pending| pending.write(at, bytes))
    }

    fn truncate(&mut self, len: u64) -> Result<()> {
        self.change(|pending| pending.truncate(len))
    }

    fn sync(&mut self) -> Result<()> {
        let Some(OpenDatabase { database, .. }) = &self.open else { return Ok(()) };
        if database.is_gathered() {
            return Ok(());
        }
        self.commit(None)?;
        let unsynced = self.unsynced.take();
        let OpenDatabase { store, .. } = self.opened()?;
        wait(store, unsynced)
    }

    fn len(&mut self) -> Result<u64> {
        Ok(self.open.as_ref().map_or(0, |open| open.database.len(self.level)))
    }

    fn lock(&mut self, wanted: LockLevel) -> Result<()> {
        if let Err(failure) = self.open_database() {
            self.is_busy_reported |= failure.code == codes::BUSY;
            return Err(failure);
        }
        let Some(OpenDatabase { database, store }) = &self.open else {
            return Err(Failure::busy());
        };
        database.lock(store, &mut self.level, wanted)
    }

    fn unlock(&mut self, wanted: LockLevel) {
        if let Some(OpenDatabase { database, store }) = &self.open {
            database.unlock(store, &mut self.level, wanted);
        }
    }

    fn is_reserved(&mut self) -> Result<bool> {
        Ok(self.open.as_ref().is_some_and(|open| open.database.is_reserved()))
    }

    fn control(&mut self, control: Control<'_>) -> Result<Answer> {
        match control {
            Control::Sync(super_journal) => self.commit(super_journal)?,
            // A shrunk database is truncated after the commit.
            Control::CommitPhaseTwo => {
                self.commit(None)?;
                if let Some(OpenDatabase { database, store }) = &self.open {
                    database.finish_commit(store);
                }
            }
            Control::BeginAtomicWrite => {
                if self.opened()?.database.has_pending() {
                    // SQLite goes on with a rollback journal.
                    return Err(Failure::new(codes::IOERR_BEGIN_ATOMIC, ""));
                }
            }
            Control::CommitAtomicWrite => self.commit(None)?,
            Control::RollbackAtomicWrite => {
                let OpenDatabase { database, store } = self.opened()?;
                database.discard(store)?;
            }
            Control::Pragma(name, argument) => return self.run_pragma(name, argument),
        }
        Ok(Answer::Done)
    }
}
