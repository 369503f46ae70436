//! Result codes, flags and file controls of SQLite.

/// A SQLite result code.
pub type Code = i32;

pub const OK: Code = 0;
pub const BUSY: Code = 5;
pub const READONLY: Code = 8;
pub const IOERR: Code = 10;
pub const NOTFOUND: Code = 12;
pub const FULL: Code = 13;
pub const CANTOPEN: Code = 14;
pub const ERROR: Code = 1;
pub const MISUSE: Code = 21;
/// Returned by the entry point of an extension that must stay loaded.
pub const OK_LOAD_PERMANENTLY: Code = 1 << 8;
/// The file of the database is not at its path any more.
pub const READONLY_DBMOVED: Code = READONLY | 4 << 8;
pub const IOERR_READ: Code = IOERR | 1 << 8;
pub const IOERR_SHORT_READ: Code = IOERR | 2 << 8;
pub const IOERR_WRITE: Code = IOERR | 3 << 8;
pub const IOERR_FSYNC: Code = IOERR | 4 << 8;
pub const IOERR_BEGIN_ATOMIC: Code = IOERR | 29 << 8;
/// A checksum does not match.
pub const IOERR_DATA: Code = IOERR | 32 << 8;

pub const OPEN_READONLY: i32 = 0x1;
pub const OPEN_READWRITE: i32 = 0x2;
pub const OPEN_CREATE: i32 = 0x4;
pub const OPEN_MAIN_DB: i32 = 0x100;
pub const OPEN_MAIN_JOURNAL: i32 = 0x800;
pub const OPEN_SUPER_JOURNAL: i32 = 0x4000;

pub const IOCAP_SAFE_APPEND: i32 = 0x200;
pub const IOCAP_SEQUENTIAL: i32 = 0x400;
pub const IOCAP_POWERSAFE_OVERWRITE: i32 = 0x1000;
pub const IOCAP_BATCH_ATOMIC: i32 = 0x4000;

pub const FCNTL_VFSNAME: i32 = 12;
pub const FCNTL_PRAGMA: i32 = 14;
pub const FCNTL_SYNC: i32 = 21;
pub const FCNTL_COMMIT_PHASETWO: i32 = 22;
pub const FCNTL_BEGIN_ATOMIC_WRITE: i32 = 31;
pub const FCNTL_COMMIT_ATOMIC_WRITE: i32 = 32;
pub const FCNTL_ROLLBACK_ATOMIC_WRITE: i32 = 33;
