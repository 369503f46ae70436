//! Records of a directory block whose chain is broken.

use crate::format::dirent::rec_len_from_disk;
use crate::format::{le16, le32};

/// Parses the record at `at`: inode, name and length.
pub(crate) fn parse(area: &[u8], at: usize) -> Option<(u32, &[u8], usize)> {
    let rest = area.get(at..)?;
    let len = rec_len_from_disk(le16(rest, 4)?, area.len());
    let whole = rest.get(..len)?;
    if len < 12 || !len.is_multiple_of(4) {
        return None;
    }
    let name = whole.get(8..)?.get(..usize::from(*whole.get(6)?))?;
    Some((le32(whole, 0)?, name, len))
}

/// Returns the first place behind `broken` from which on all is a chain of valid records, one of
/// them used.
pub(crate) fn next_chain(
    area: &[u8],
    broken: usize,
    may_be_named: impl Fn(u32) -> bool,
) -> Option<usize> {
    // For each record from the end on: whether a chain begins there, and whether it is used.
    let mut chains: Vec<Option<bool>> = vec![None; area.len().div_ceil(4)];
    let mut first = None;
    let start = broken.saturating_add(4).next_multiple_of(4);
    for at in (start..area.len()).step_by(4).rev() {
        let Some((inode, name, len)) = parse(area, at) else { continue };
        let is_name = !name.is_empty() && !name.iter().any(|it| matches!(it, 0 | b'/'));
        if inode != 0 && !(is_name && may_be_named(inode)) {
            continue;
        }
        let end = at.saturating_add(len);
        let rest = match end == area.len() {
            true => Some(false),
            false => chains.get(end / 4).copied().flatten(),
        };
        let Some(rest) = rest else { continue };
        if let Some(chain) = chains.get_mut(at / 4) {
            *chain = Some(rest || inode != 0);
        }
        if rest || inode != 0 {
            first = Some(at);
        }
    }
    first
}
