//! Entries of a directory block, those in use and the remains of removed ones.
//!
//! ```text
//!   | a · rec_len ───────────────▶ | c ..      behind a shorter name, the one that was there before
//!         | b, removed |
//! ```

use std::ops::Range;

use crate::format::dirent::{Dirent, Dirents, HEAD_BYTES, min_rec_len};
use crate::format::superblock::Superblock;

/// Visits the entries of a chain but `.` and `..`, each with true if it is in use. A chain with an
/// invalid record has none.
pub(crate) fn visit_entries(
    chain: &[u8],
    super_: &Superblock,
    visit: &mut impl FnMut(&Dirent<'_>, bool),
) {
    if Dirents::of(chain, super_).any(|entry| entry.is_err()) {
        return;
    }
    let mut behind = 0;
    for entry in Dirents::of(chain, super_).flatten() {
        // An unused record before it: its name may still be there.
        visit_remains(chain, behind..entry.at, super_, visit);
        if !matches!(entry.name, b"." | b"..") {
            visit(&entry, true);
        }
        behind = entry.at.saturating_add(min_rec_len(entry.name.len()));
        visit_remains(chain, behind..entry.next, super_, visit);
        behind = entry.next;
    }
    visit_remains(chain, behind..chain.len(), super_, visit);
}

/// Searches unused bytes of a chain for entries.
fn visit_remains(
    chain: &[u8],
    unused: Range<usize>,
    super_: &Superblock,
    visit: &mut impl FnMut(&Dirent<'_>, bool),
) {
    let mut at = unused.start;
    while at.saturating_add(HEAD_BYTES) < unused.end {
        let name_len = chain.get(at.saturating_add(6)).map_or(0, |len| usize::from(*len));
        let len = min_rec_len(name_len);
        let end = at.saturating_add(len);
        let record = chain.get(at..end.min(unused.end)).unwrap_or_default();
        // The length of a removed record may reach over records that were removed before it.
        let mut alone = record.to_vec();
        if let (Ok(short), Some(field)) = (u16::try_from(len), alone.get_mut(4..6)) {
            field.copy_from_slice(&short.to_le_bytes());
        }
        let found = Dirents::of(&alone, super_).next().and_then(std::result::Result::ok);
        match found.filter(|_| end <= unused.end && name_len > 0) {
            Some(entry) if !matches!(entry.name, b"." | b"..") => {
                visit(&entry, false);
                at = end;
            }
            _ => at = at.saturating_add(4),
        }
    }
}
