//! State of each inode in one word: type, and links minus names.
//!
//! ```text
//!   | used 1 | file type 3 | link count minus names found, biased by 2^27, 28 bits |
//! ```

use std::sync::atomic::{AtomicU32, Ordering};

use draconis_types::FileType;

use crate::units::saturating_usize;

const LINK_BALANCE_ZERO: u32 = 1 << 27;
const LINK_BALANCE_MASK: u32 = (1 << 28) - 1;
const USED_BIT: u32 = 1 << 31;

/// States of all inodes; see the module documentation.
#[derive(Debug)]
pub(crate) struct InodeStates(Vec<AtomicU32>);

/// State of one inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct InodeState(u32);

impl InodeStates {
    pub(super) fn new(inodes: u32) -> Self {
        let mut words = Vec::new();
        words
            .resize_with(saturating_usize(u64::from(inodes)), || AtomicU32::new(LINK_BALANCE_ZERO));
        Self(words)
    }

    fn word(&self, inode: u32) -> Option<&AtomicU32> {
        self.0.get(saturating_usize(u64::from(inode.checked_sub(1)?)))
    }

    /// Marks `inode` as used.
    pub(crate) fn set_used(&self, inode: u32, kind: Option<FileType>, links: u16) {
        let kind = file_type_code(kind) << 28;
        if let Some(word) = self.word(inode) {
            word.store(
                USED_BIT | kind | LINK_BALANCE_ZERO.wrapping_add(u32::from(links)),
                Ordering::Relaxed,
            );
        }
    }

    /// Counts a name.
    pub(super) fn count_name(&self, inode: u32) {
        let Some(word) = self.word(inode) else { return };
        // The lowest balance saturates: no inode has so many names.
        let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |note| {
            (note & LINK_BALANCE_MASK > 0).then(|| note.wrapping_sub(1))
        });
    }

    pub(crate) fn get(&self, inode: u32) -> InodeState {
        InodeState(self.word(inode).map_or(LINK_BALANCE_ZERO, |word| word.load(Ordering::Relaxed)))
    }
}

impl InodeState {
    pub(crate) fn is_used(self) -> bool {
        self.0 & USED_BIT != 0
    }

    /// Returns the file type code of directory entries; 0 for none.
    pub(crate) fn file_type(self) -> u8 {
        let [.., top] = self.0.to_le_bytes();
        top >> 4 & 7
    }

    pub(crate) fn is_directory(self) -> bool {
        self.is_used() && self.file_type() == 2
    }

    /// Returns the names found, for an inode of `links` links.
    pub(super) fn name_count(self, links: u16) -> u64 {
        let all = u64::from(LINK_BALANCE_ZERO).saturating_add(u64::from(links));
        all.saturating_sub(u64::from(self.0 & LINK_BALANCE_MASK))
    }

    /// Returns true if names and links match.
    pub(super) fn links_match(self) -> bool {
        self.0 & LINK_BALANCE_MASK == LINK_BALANCE_ZERO
    }
}

/// Returns the file type code of directory entries.
fn file_type_code(kind: Option<FileType>) -> u32 {
    match kind {
        None => 0,
        Some(FileType::File) => 1,
        Some(FileType::Directory) => 2,
        Some(FileType::CharDevice) => 3,
        Some(FileType::BlockDevice) => 4,
        Some(FileType::Fifo) => 5,
        Some(FileType::Socket) => 6,
        Some(FileType::Symlink) => 7,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_count_matches_link_count() {
        let notes = InodeStates::new(3);
        notes.set_used(3, Some(FileType::Directory), 2);
        assert!(notes.get(3).is_directory() && !notes.get(3).links_match());
        notes.count_name(3);
        notes.count_name(3);
        assert!(notes.get(3).links_match());
        notes.count_name(3);
        assert_eq!((notes.get(3).name_count(2), notes.get(3).links_match()), (3, false));
        notes.count_name(4);
        assert!(!notes.get(1).is_used() && !notes.get(0).is_used());
    }
}
