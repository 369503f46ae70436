//! In-place changes of directory blocks.
//!
//! ```text
//!   | name | slack | name | name | slack ........ | unused ...... |
//!             │                     │                └ slot: becomes an entry once it has an inode
//!             └──────────┬──────────┘
//!                      slot: the record before gets shorter and reveals the new entry
//! ```
//! A power cut may tear a block into old and new sectors; hence
//!
//! Law 1: an entry that stays is never moved, and none of its bytes changes.
//! Law 2: removing a name changes one field of at most four bytes, within one sector: the record
//! length of the entry before it, or its own inode number if it is the first in the block.
//! Law 3: a new entry is written where no reader looks ([`insert_hidden`]), and made visible by one
//! such field ([`reveal_hidden`]). If both are in one sector ([`DirentSlot::is_tear_safe`]), no tear
//! separates them; if not, the hidden bytes must be durable first.
//! Law 4: no input makes these functions panic, and a broken chain of records is not changed.
//!
//! These functions do not know disks or locks.

pub(crate) mod index;
pub(crate) mod repack;

use draconis_types::FileType;
use zerocopy::IntoBytes;

use super::MAX_NAME_BYTES;
use crate::format::dirent::{
    self, DirBlockFormat, HEAD_BYTES, RawDirent, min_rec_len, rec_len_from_disk,
};
use crate::{Error, InodeNumber, Result};

/// Unit that a disk writes atomically.
const SECTOR_BYTES: usize = 512;

/// An entry found in a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FoundRecord {
    /// Offset of its record.
    pub(crate) at: usize,
    /// Offset of the record before it; `None` for the first.
    pub(crate) previous: Option<usize>,
    /// Inode number.
    pub(crate) inode: InodeNumber,
    /// File type, if the entry stores it.
    pub(crate) kind: Option<FileType>,
}

/// A free slot for a new entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DirentSlot {
    /// Offset of the new record.
    pub(crate) at: usize,
    /// True if the new entry and the field that reveals it are in one sector.
    pub(crate) is_tear_safe: bool,
    /// Length of the new record.
    len: usize,
    /// Offset of the record to be shortened; `None` if an unused record is reused.
    shortened_record: Option<usize>,
}

/// Result of a search for a name or a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SlotSearch {
    /// The name exists.
    Found(FoundRecord),
    /// The name does not exist; a slot for it.
    Free(DirentSlot),
    /// The name does not exist, and no slot is large enough.
    Full,
}

/// The two halves of a split leaf.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct LeafSplit {
    /// Lower half: the old block without the entries of the other half. It may overwrite the old
    /// block, even torn. [`pack_records`] makes a block without gaps.
    pub(crate) low: Vec<u8>,
    /// Upper half, packed.
    pub(crate) high: Vec<u8>,
    /// Lowest hash of the upper half; bit 0 is set if the lower half ends with the same hash.
    pub(crate) hash: u32,
}

/// One record of a block.
#[derive(Clone, Copy)]
struct RawRecord {
    at: usize,
    len: usize,
    /// 0 in an unused record.
    inode: u32,
    kind: u8,
    name_len: usize,
}

impl RawRecord {
    /// Returns the bytes that its name needs; the rest is slack.
    fn used_bytes(&self) -> usize {
        if self.inode == 0 { 0 } else { min_rec_len(self.name_len) }
    }

    fn next(&self) -> usize {
        self.at.saturating_add(self.len)
    }

    /// Returns the slot in this record for a record of `need_bytes`.
    #[inline]
    fn slot_in_record(&self, need_bytes: usize) -> Option<DirentSlot> {
        let used = self.used_bytes();
        if self.len < used.saturating_add(need_bytes) {
            return None;
        }
        let at = self.at.saturating_add(used);
        let end = at.saturating_add(need_bytes.max(1)).saturating_sub(1);
        // The revealing field: the inode number of an unused record, or else the record length.
        let (shortened_record, shown_at) = if used == 0 {
            (None, self.at)
        } else {
            (Some(self.at), self.at.saturating_add(RawDirent::REC_LEN_AT))
        };
        let is_tear_safe = shown_at / SECTOR_BYTES == end / SECTOR_BYTES;
        Some(DirentSlot { at, is_tear_safe, len: self.len.saturating_sub(used), shortened_record })
    }

    #[inline]
    fn matches(&self, block: &[u8], is: impl Fn(&[u8]) -> bool) -> bool {
        self.inode != 0 && is(self.name(block))
    }

    fn found_record(&self, previous: Option<usize>, filetype: bool) -> FoundRecord {
        let kind = if filetype { FileType::from_number(self.kind.into()) } else { None };
        FoundRecord { at: self.at, previous, inode: InodeNumber(self.inode), kind }
    }

    /// Appends the record to a chain, without slack.
    fn append_to(&self, from: &[u8], chain: &mut Vec<u8>) {
        let (at, used) = (chain.len(), self.used_bytes());
        let [name_len, ..] = self.name_len.to_le_bytes();
        let head = RawDirent {
            inode: self.inode.into(),
            rec_len: dirent::rec_len_to_disk(used, from.len()).into(),
            name_len,
            file_type: self.kind,
        };
        chain.extend(head.as_bytes());
        chain.extend(self.name(from));
        chain.resize(at.saturating_add(used), 0);
    }

    fn name<'a>(&self, block: &'a [u8]) -> &'a [u8] {
        let rest = block.get(self.at.saturating_add(HEAD_BYTES)..).unwrap_or_default();
        rest.get(..self.name_len).unwrap_or_default()
    }
}

/// Reason why a chain is broken; small, since walks return it often.
#[derive(Clone, Copy, Debug)]
struct ChainError(&'static str);

impl From<ChainError> for Error {
    fn from(ChainError(what): ChainError) -> Self {
        Self::corrupt(what)
    }
}

/// Parses the record at `at`, which must be in the block with its whole name.
#[inline]
fn parse_record(block: &[u8], at: usize) -> std::result::Result<RawRecord, ChainError> {
    let broken = ChainError("directory entry: record length");
    let Some(head) = RawDirent::view(block, at) else { return Err(broken) };
    let len = rec_len_from_disk(head.rec_len.get(), block.len());
    if len < HEAD_BYTES || !len.is_multiple_of(4) || len > block.len().saturating_sub(at) {
        return Err(broken);
    }
    let (inode, kind, name_len) = (head.inode.get(), head.file_type, usize::from(head.name_len));
    if inode != 0 && name_len > len.saturating_sub(HEAD_BYTES) {
        return Err(ChainError("directory entry: name length"));
    }
    Ok(RawRecord { at, len, inode, kind, name_len })
}

/// Iterator over the records of a block, up to a broken one.
struct Records<'a> {
    block: &'a [u8],
    at: usize,
}

impl Iterator for Records<'_> {
    type Item = std::result::Result<RawRecord, ChainError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.block.len() {
            return None;
        }
        let found = parse_record(self.block, self.at);
        self.at = found.as_ref().map_or(usize::MAX, RawRecord::next);
        Some(found)
    }
}

const fn records(block: &[u8]) -> Records<'_> {
    Records { block, at: 0 }
}

/// Returns all records of a block.
fn collect_records(block: &[u8]) -> Result<Vec<RawRecord>> {
    Ok(records(block).collect::<std::result::Result<_, ChainError>>()?)
}

/// Returns a block without entries.
pub(crate) fn empty_block(shape: DirBlockFormat) -> Vec<u8> {
    shape.with_tail(pack_records([], &[], shape.dirent_area_bytes()))
}

/// Finds `name` in a block; with `filetype`, entries store the file type.
///
/// # Errors
/// [`Error::Corrupt`] if the chain breaks before the name is found.
pub fn find(block: &[u8], filetype: bool, name: &[u8]) -> Result<Option<FoundRecord>> {
    let mut previous = None;
    for record in records(block) {
        let record = record?;
        if record.matches(block, |it| it == name) {
            return Ok(Some(record.found_record(previous, filetype)));
        }
        previous = Some(record.at);
    }
    Ok(None)
}

/// Finds a slot for a record of `need_bytes` (see [`min_rec_len`]): the first tear-safe one, or
/// else the first.
///
/// # Errors
/// [`Error::Corrupt`] if the chain breaks before such a slot.
#[cfg(test)]
pub(crate) fn find_slot(block: &[u8], need_bytes: usize) -> Result<Option<DirentSlot>> {
    let mut parted = None;
    for record in records(block) {
        match record?.slot_in_record(need_bytes) {
            Some(room) if room.is_tear_safe => return Ok(Some(room)),
            Some(room) if parted.is_none() => parted = Some(room),
            _ => {}
        }
    }
    Ok(parted)
}

/// [`find`], and if the name does not exist, [`find_slot`], in one pass.
///
/// # Errors
/// [`Error::Corrupt`] if the chain breaks before the name is found.
#[cfg(test)]
pub(crate) fn find_or_slot(block: &[u8], filetype: bool, name: &[u8]) -> Result<SlotSearch> {
    find_or_slot_by(block, filetype, name.len(), |it| it == name)
}

/// Finds the first name that satisfies `is`, or else a slot for a name of `name_bytes`.
///
/// # Errors
/// [`Error::Corrupt`] if the chain breaks before the name is found.
pub(crate) fn find_or_slot_by(
    block: &[u8],
    filetype: bool,
    name_bytes: usize,
    is: impl Fn(&[u8]) -> bool,
) -> Result<SlotSearch> {
    let need_bytes = min_rec_len(name_bytes);
    let mut previous = None;
    let mut best: Option<DirentSlot> = None;
    for record in records(block) {
        let record = record?;
        if record.matches(block, &is) {
            return Ok(SlotSearch::Found(record.found_record(previous, filetype)));
        }
        if !best.is_some_and(|best| best.is_tear_safe)
            && let Some(room) = record.slot_in_record(need_bytes)
            && (best.is_none() || room.is_tear_safe)
        {
            best = Some(room);
        }
        previous = Some(record.at);
    }
    Ok(best.map_or(SlotSearch::Full, SlotSearch::Free))
}

/// Inserts an entry into a slot found in this block.
///
/// # Errors
/// [`Error::NameTooLong`]; [`Error::Misuse`] if the name is invalid or the slot does not exist. The
/// block is unchanged then.
pub(crate) fn insert(
    block: &mut [u8],
    room: &DirentSlot,
    inode: InodeNumber,
    kind: FileType,
    name: &[u8],
    filetype: bool,
) -> Result<()> {
    insert_hidden(block, room, inode, kind, name, filetype)?;
    reveal_hidden(block, room, inode)
}

/// First half of [`insert`]: writes the entry where no reader looks.
///
/// # Errors
/// As [`insert`].
pub(crate) fn insert_hidden(
    block: &mut [u8],
    room: &DirentSlot,
    inode: InodeNumber,
    kind: FileType,
    name: &[u8],
    filetype: bool,
) -> Result<()> {
    if name.len() > MAX_NAME_BYTES {
        return Err(Error::NameTooLong);
    }
    if name.is_empty() || name.iter().any(|byte| matches!(byte, 0 | b'/')) || inode.0 == 0 {
        return Err(Error::Misuse("directory entry: name"));
    }
    check_slot(block, room)?;
    let no_room = Error::Misuse("directory entry: no room");
    let used = min_rec_len(name.len());
    if used > room.len {
        return Err(no_room);
    }
    let raw_len = dirent::rec_len_to_disk(room.len, block.len());
    let rest = block.get_mut(room.at..).unwrap_or_default();
    let Some((head, rest)) = rest.split_at_mut_checked(HEAD_BYTES) else { return Err(no_room) };
    let Some((into, pad)) = rest.split_at_mut_checked(name.len()) else { return Err(no_room) };
    let shown = if room.shortened_record.is_some() { inode.0 } else { 0 };
    let kind = if filetype { dirent::file_type_code(kind) } else { 0 };
    let [name_len, ..] = name.len().to_le_bytes();
    let (inode, rec_len) = (shown.into(), raw_len.into());
    head.copy_from_slice(RawDirent { inode, rec_len, name_len, file_type: kind }.as_bytes());
    into.copy_from_slice(name);
    pad.iter_mut()
        .take(used.saturating_sub(HEAD_BYTES).saturating_sub(name.len()))
        .for_each(|byte| *byte = 0);
    Ok(())
}

/// Second half of [`insert`]: one field of at most four bytes makes the entry visible.
///
/// # Errors
/// [`Error::Misuse`] if the slot does not exist. The block is unchanged then.
pub(crate) fn reveal_hidden(block: &mut [u8], room: &DirentSlot, inode: InodeNumber) -> Result<()> {
    check_slot(block, room)?;
    let done = match room.shortened_record {
        Some(after) => set_rec_len(block, after, room.at.saturating_sub(after)),
        None => set_inode_number(block, room.at, inode.0),
    };
    done.ok_or(Error::Misuse("directory entry: no room"))
}

/// Checks that the slot is still free.
fn check_slot(block: &[u8], room: &DirentSlot) -> Result<()> {
    let there = parse_record(block, room.shortened_record.unwrap_or(room.at)).is_ok_and(|record| {
        let free =
            if room.shortened_record.is_some() { record.inode != 0 } else { record.inode == 0 };
        free && record.at.saturating_add(record.used_bytes()) == room.at
            && record.next() == room.at.saturating_add(room.len)
    });
    there.then_some(()).ok_or(Error::Misuse("directory entry: no room"))
}

/// Removes an entry found in this block.
///
/// # Errors
/// [`Error::Misuse`] if it does not exist.
pub(crate) fn remove(block: &mut [u8], found: &FoundRecord) -> Result<()> {
    let gone = Error::Misuse("directory entry: not there");
    let record = used_record_at(block, found.at)?;
    let done = match found.previous {
        None if found.at == 0 => set_inode_number(block, 0, 0),
        None => None,
        Some(previous) => {
            let before = self::parse_record(block, previous)?;
            if before.next() != found.at {
                return Err(gone);
            }
            set_rec_len(block, previous, before.len.saturating_add(record.len))
        }
    };
    done.ok_or(gone)
}

/// Changes the inode of the entry at `at`.
///
/// # Errors
/// [`Error::Misuse`] if there is no entry.
pub(crate) fn set_inode(
    block: &mut [u8],
    at: usize,
    inode: InodeNumber,
    kind: FileType,
    filetype: bool,
) -> Result<()> {
    used_record_at(block, at)?;
    let gone = Error::Misuse("directory entry: not there");
    let raw = RawDirent::view_mut(block, at).ok_or(gone)?;
    raw.inode.set(inode.0);
    if filetype {
        raw.file_type = dirent::file_type_code(kind);
    }
    Ok(())
}

/// Returns the used record at `at`.
fn used_record_at(block: &[u8], at: usize) -> Result<RawRecord> {
    parse_record(block, at)
        .ok()
        .filter(|record| record.inode != 0)
        .ok_or(Error::Misuse("directory entry: not there"))
}

fn set_rec_len(block: &mut [u8], at: usize, len: usize) -> Option<()> {
    let raw = dirent::rec_len_to_disk(len, block.len());
    RawDirent::view_mut(block, at)?.rec_len.set(raw);
    Some(())
}

fn set_inode_number(block: &mut [u8], at: usize, inode: u32) -> Option<()> {
    RawDirent::view_mut(block, at)?.inode.set(inode);
    Some(())
}

/// Returns the inodes that entries of a block reference, up to a broken record.
pub(crate) fn referenced_inodes(block: &[u8]) -> impl Iterator<Item = InodeNumber> + '_ {
    let records = records(block).map_while(std::result::Result::ok);
    records.filter(|record| record.inode != 0).map(|record| InodeNumber(record.inode))
}

/// Returns true if a block has no entries; `.` and `..` in the first block do not count.
///
/// # Errors
/// [`Error::Corrupt`] if the chain breaks: entries after that are unknown.
pub(crate) fn is_empty(block: &[u8], first_block: bool) -> Result<bool> {
    for record in records(block) {
        let record = record?;
        if record.inode == 0 {
            continue;
        }
        if !(first_block && matches!(record.name(block), b"." | b"..")) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the same entries without slack. This moves entries: the result must not overwrite the
/// old block where a tear is possible.
///
/// # Errors
/// [`Error::Corrupt`] if the chain breaks.
#[cfg(test)]
pub(crate) fn pack(block: &[u8]) -> Result<Vec<u8>> {
    Ok(pack_records(collect_records(block)?, block, block.len()))
}

/// Packs the used records of `from`, which must fit, into a block of `len` bytes.
fn pack_records(all: impl IntoIterator<Item = RawRecord>, from: &[u8], len: usize) -> Vec<u8> {
    let mut block = Vec::with_capacity(len);
    for record in all.into_iter().filter(|record| record.inode != 0) {
        record.append_to(from, &mut block);
    }
    extend_last_record(&mut block, len);
    block
}

/// Extends a chain to `len` bytes; its last record reaches to the end.
fn extend_last_record(chain: &mut Vec<u8>, len: usize) {
    let last = records(chain).map_while(std::result::Result::ok).last().map_or(0, |it| it.at);
    chain.resize(len, 0);
    set_rec_len(chain, last, len.saturating_sub(last));
}

/// Splits a leaf by the hashes of its names into halves of about equal bytes. Names with one hash
/// stay together unless all have it.
///
/// # Errors
/// [`Error::Corrupt`] if the chain breaks; [`Error::Misuse`] if there are fewer than two names.
pub(crate) fn split_with_hash(block: &[u8], hash: impl Fn(&[u8]) -> u32) -> Result<LeafSplit> {
    let all = collect_records(block)?;
    let mut hashed: Vec<(u32, usize, RawRecord)> = all
        .iter()
        .filter(|record| record.inode != 0)
        .map(|record| (hash(record.name(block)), record.at, *record))
        .collect();
    hashed.sort_unstable_by_key(|(hash, at, _)| (*hash, *at));
    let cut =
        split_point(&hashed).ok_or(Error::Misuse("directory block: too few names to split"))?;
    let (stay, go) = hashed.split_at(cut);
    let (Some((last, ..)), Some((first, ..))) = (stay.last(), go.first()) else {
        return Err(Error::Misuse("directory block: too few names to split"));
    };
    let hash = first | u32::from(first == last);
    let mut gone: Vec<usize> = go.iter().map(|(_, at, _)| *at).collect();
    gone.sort_unstable();
    let low = remove_records(block, &all, &gone);
    let high = pack_records(go.iter().map(|(.., record)| *record), block, block.len());
    Ok(LeafSplit { low, high, hash })
}

#[cfg(test)]
fn split(block: &[u8], hash: &crate::format::hash::NameHash) -> Result<LeafSplit> {
    split_with_hash(block, |name| hash.hash_name(name))
}

/// Returns the number of these hash-sorted names in the lower half: a change of hash nearest to the
/// middle, or the middle if there is none.
fn split_point(hashed: &[(u32, usize, RawRecord)]) -> Option<usize> {
    let total: usize = hashed.iter().map(|(.., record)| record.used_bytes()).sum();
    let mut below = 0usize;
    // Distance from the middle, and number of names; changes of the hash sort first.
    let mut best: Option<(bool, usize, usize)> = None;
    for (nth, pair) in hashed.windows(2).enumerate() {
        let [(hash, _, record), (next, ..)] = pair else { continue };
        below = below.saturating_add(record.used_bytes());
        let place = (hash == next, total.abs_diff(below.saturating_mul(2)), nth.saturating_add(1));
        best = Some(best.map_or(place, |best| best.min(place)));
    }
    best.map(|(.., cut)| cut)
}

/// Returns the block without the records at `gone`, moving no others.
fn remove_records(block: &[u8], all: &[RawRecord], gone: &[usize]) -> Vec<u8> {
    let mut left = block.to_vec();
    // The record that is extended over the removed ones.
    let mut before: Option<RawRecord> = None;
    for record in all {
        if gone.binary_search(&record.at).is_err() {
            before = Some(*record);
            continue;
        }
        match &mut before {
            Some(before) => {
                before.len = before.len.saturating_add(record.len);
                set_rec_len(&mut left, before.at, before.len);
            }
            // Only the first record has none before it.
            None => {
                set_inode_number(&mut left, record.at, 0);
                before = Some(*record);
            }
        }
    }
    left
}

#[cfg(test)]
mod tests;
