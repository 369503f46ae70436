//! Lengths of host files, and detection of changes while the files are read.
//!
//! ```text
//!   st_size is the length   ext4, XFS, tmpfs ..   taken as it is
//!   it may be               FUSE, NFS ..          one byte is read before and one behind it
//!   it is not               proc, sysfs ..        read to the end, and kept
//! ```
//! Law: contents are stored as they were read; files that could not be read, or changed
//! meanwhile, are reported.

use draconis_types::lock::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::fs::{File, Metadata};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use draconis_types::path_bytes::ShowPath;

use crate::messages::format_bytes;

/// Maximum contents of a file of unknown length, in bytes.
const MAX_SPOOLED_BYTES: u64 = 16 << 30;

/// Magic numbers of file systems where `st_size` equals the length of every regular file.
const EXACT_SIZE_FILE_SYSTEMS: &[u64] = &[
    0xEF53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683E, // Btrfs
    0x0102_1994, // tmpfs
    0x8584_58F6, // ramfs
    0x794C_7630, // overlayfs
    0xF2F5_2010, // F2FS
    0xCA45_1A4E, // bcachefs
    0x2FC1_2FC1, // ZFS
    0x9660,      // ISO 9660
    0x7371_7368, // SquashFS
    0xE0F5_E1E2, // EROFS
    0x4D44,      // FAT
    0x2011_BAB0, // exFAT
    0x7366_746E, // NTFS
    0x3153_464A, // JFS
];

/// Returns true if `st_size` equals the readable length, for every file of the file system.
pub fn has_exact_sizes(path: &Path) -> bool {
    // The type of `f_type` is signed and word-sized.
    let magic = rustix::fs::statfs(path).map(|it| it.f_type as u64 & 0xFFFF_FFFF);
    magic.is_ok_and(|magic| EXACT_SIZE_FILE_SYSTEMS.contains(&magic))
}

/// Checks the length of one file by reading around its end.
///
/// # Errors
/// The file cannot be read.
pub fn has_exact_size(file: &File, found: &Metadata) -> Result<bool> {
    let mut byte = [0];
    let has_last = match found.len().checked_sub(1) {
        Some(last) => file.read_at(&mut byte, last)? == 1,
        None => true,
    };
    Ok(has_last && file.read_at(&mut byte, found.len())? == 0)
}

/// Returns a hash of the metadata that changes when a file changes.
#[allow(clippy::cast_sign_loss, reason = "times are compared, not counted")]
pub fn metadata_fingerprint(found: &Metadata) -> u64 {
    let time = (found.mtime() as u64).wrapping_mul(1_000_000_000) ^ found.mtime_nsec() as u64;
    found.len().wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(32) ^ time
}

/// Returns the message for a file that changed.
pub fn changed_file_message(path: &Path) -> String {
    format!("{}: file changed while it was read; what was read is kept", path.shown())
}

/// Contents of files whose length is known only after reading, concatenated in an unnamed
/// file.
#[derive(Default)]
pub struct SpooledFiles {
    file: Option<File>,
    end: u64,
    places: HashMap<u64, (u64, u64)>,
}

impl SpooledFiles {
    /// Copies a file to its end as the contents of `source`, and returns its length.
    pub fn spool_file(
        &mut self,
        source: u64,
        file: &mut File,
        beside: &Path,
    ) -> anyhow::Result<u64> {
        let kept = match &mut self.file {
            Some(kept) => kept,
            none => none.insert(super::temporary_file(beside)?),
        };
        let mut limited = file.take(MAX_SPOOLED_BYTES + 1);
        let len = std::io::copy(&mut limited, kept)?;
        anyhow::ensure!(
            len <= MAX_SPOOLED_BYTES,
            "it does not end within {}",
            format_bytes(MAX_SPOOLED_BYTES)
        );
        self.places.insert(source, (self.end, len));
        self.end += len;
        Ok(len)
    }

    /// Reads kept contents of `source`; `None` if there are none.
    pub fn read(&self, source: u64, at_bytes: u64, into: &mut [u8]) -> Option<Result<()>> {
        let (start, len) = self.places.get(&source)?;
        let file = self.file.as_ref()?;
        let end = at_bytes.checked_add(into.len() as u64);
        Some(match end.is_some_and(|end| end <= *len) {
            true => file.read_exact_at(into, start + at_bytes),
            false => Err(Error::from(ErrorKind::UnexpectedEof)),
        })
    }
}

/// Files that are not stored as they are: unreadable ones, and those that changed while they were
/// read.
#[derive(Debug, Default)]
pub struct ReadFaults {
    unread: Mutex<Vec<String>>,
    /// By file number: path, and length if the file became shorter.
    changed: Mutex<BTreeMap<u64, (PathBuf, Option<u64>)>>,
}

impl ReadFaults {
    /// Records a file that could not be read.
    pub fn record_unreadable(&self, text: String) {
        self.unread.lock().push(text);
    }

    /// Records a file that changed, and its end if the file became shorter.
    pub fn record_changed(&self, source: u64, path: &Path, end: Option<u64>) {
        let mut all = self.changed.lock();
        let (_, shortest) = all.entry(source).or_insert_with(|| (path.to_path_buf(), None));
        *shortest = [*shortest, end].into_iter().flatten().min();
    }

    /// Returns the length of a file that became shorter, in bytes.
    pub fn shortened_len_bytes(&self, source: u64) -> Option<u64> {
        self.changed.lock().get(&source)?.1
    }

    /// Returns one message for each file.
    pub fn messages(&self) -> Vec<String> {
        let unread = self.unread.lock();
        let changes = self.changed.lock();
        let changes = changes.values().map(|(path, _)| changed_file_message(path));
        unread.iter().cloned().chain(changes).collect()
    }
}
