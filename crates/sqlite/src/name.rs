//! Names of files as SQLite passes them: `STORE#DATABASE`, and the suffixes of journals.
//!
//! Law: a full name is the canonical path or URL of the store, `#`, and the name of the database. No name
//! of a database has a `#`, so the last one separates them.

use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use draconis_access::bucket_host::{normalize_url, parse_url};
use draconis_access::store_disk::{parse_disk_name, parse_existing_disk_name};

use crate::codes;
use crate::error::{Failure, Result};
use crate::open_store::Registration;

/// Separates a database from its snapshot.
const SNAPSHOT_SEPARATOR: char = '@';
/// A name and the suffix of a hidden parent must fit 255 bytes.
const MAX_NAME_BYTES: usize = 230;

/// A file in a store.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct FileName {
    pub store: PathBuf,
    /// Name of a database, or of a journal.
    pub object: String,
}

impl FileName {
    /// Parses a full name.
    pub fn parse(full: &[u8]) -> Result<Self> {
        let at = full.iter().rposition(|byte| *byte == b'#');
        let parts = at.and_then(|at| full.split_at_checked(at));
        parts.and_then(|(store, object)| Self::from_parts(store, object.get(1..)?)).ok_or_else(|| {
            Failure::new(
                codes::CANTOPEN,
                format!(
                    "{}: a database in a store is file:NAME?vfs=draconis&store=STORE, or STORE#NAME",
                    String::from_utf8_lossy(full)
                ),
            )
        })
    }

    fn from_parts(store: &[u8], object: &[u8]) -> Option<Self> {
        let object = std::str::from_utf8(object).ok()?.to_owned();
        let store = Path::new(OsStr::from_bytes(store)).to_owned();
        (!store.as_os_str().is_empty()).then_some(Self { store, object })
    }

    /// Returns the full name; `find` returns what is registered under the path of a store.
    ///
    /// Connections to a file that was replaced keep its path: the new file gets another spelling of
    /// it, so that SQLite does not take journals of the one for those of the other.
    pub fn resolve(
        name: &[u8],
        store: Option<&[u8]>,
        find: impl Fn(&OsStr) -> Option<Registration>,
    ) -> Result<Vec<u8>> {
        let parsed = match store {
            None => Self::parse(name)?,
            Some(store) => Self::from_parts(store, name).ok_or_else(|| {
                let name = String::from_utf8_lossy(name);
                Failure::new(codes::CANTOPEN, format!("{name}: the parameter store is empty"))
            })?,
        };
        parsed.check_database()?;
        let canonical = match parse_url(&parsed.store) {
            _ if find(parsed.store.as_os_str()) == Some(Registration::Shared) => parsed.store,
            Some(address) => normalize_url(address).into(),
            // A path that does not exist fails when it is opened.
            None => std::fs::canonicalize(&parsed.store)
                .or_else(|_| std::path::absolute(&parsed.store))
                .unwrap_or(parsed.store),
        };
        let mut full = canonical.into_os_string().into_vec();
        while find(OsStr::from_bytes(&full)) == Some(Registration::Replaced) {
            full.insert(0, b'/');
        }
        full.push(b'#');
        full.extend_from_slice(parsed.object.as_bytes());
        Ok(full)
    }

    fn check_database(&self) -> Result<()> {
        let checked = match self.object.split_once(SNAPSHOT_SEPARATOR) {
            None => parse_disk_name(&self.object),
            Some((disk, snapshot)) => {
                parse_existing_disk_name(disk).and_then(|_| parse_existing_disk_name(snapshot))
            }
        };
        let checked = checked.and_then(|name| match self.object.len() > MAX_NAME_BYTES {
            true => Err(format!("a database has a name of at most {MAX_NAME_BYTES} bytes")),
            false => Ok(name),
        });
        checked.map(drop).map_err(|why| Failure::new(codes::CANTOPEN, format!("{self}: {why}")))
    }

    /// Returns true if the database is a snapshot, which is read-only.
    pub fn is_snapshot(&self) -> bool {
        self.object.contains(SNAPSHOT_SEPARATOR)
    }

    /// Returns the name of the database that a rollback journal belongs to.
    pub fn database_of_journal(&self) -> Option<&str> {
        self.object.strip_suffix("-journal")
    }

    /// Returns true if this is the name of a super-journal: `DATABASE-mjXXXXXXXXX`.
    pub fn is_super_journal(&self) -> bool {
        self.object.rsplit_once("-mj").is_some_and(|(_, digits)| {
            !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
        })
    }
}

impl std::fmt::Display for FileName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}#{}", self.store.display(), self.object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_resolved_and_checked() {
        let shared = |name: &str, store: Option<&str>| {
            FileName::resolve(name.as_bytes(), store.map(str::as_bytes), |_| {
                Some(Registration::Shared)
            })
            .map(|full| String::from_utf8(full).unwrap())
        };
        assert_eq!(shared("app.db", Some("a#b.store")).unwrap(), "a#b.store#app.db");
        assert_eq!(shared("x.store#app.db@monday", None).unwrap(), "x.store#app.db@monday");
        for (name, store) in [
            ("app.db", None),
            ("/tmp/app.db", Some("s")),
            ("a#b", Some("s")),
            ("", Some("s")),
            ("17", Some("s")),
            ("app.db", Some("")),
            ("a@b@c", Some("s")),
            (&*"n".repeat(231), Some("s")),
        ] {
            assert_eq!(shared(name, store).unwrap_err().code, codes::CANTOPEN, "{name}");
        }
        let private = FileName::resolve(b"app.db", Some(b"no/such.store"), |_| None).unwrap();
        assert!(private.starts_with(b"/") && private.ends_with(b"/no/such.store#app.db"));
    }

    #[test]
    fn journals_are_told_from_databases() {
        let name = |object: &str| FileName { store: "s".into(), object: object.into() };
        assert_eq!(name("app.db-journal").database_of_journal(), Some("app.db"));
        assert!(name("app.db-mj0A1B2C3D9").is_super_journal());
        assert!(!name("app.db-mj").is_super_journal() && !name("app-mjx").is_super_journal());
    }
}
