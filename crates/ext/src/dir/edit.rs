//! Directory blocks, edited where they lie.
//!
//! ```text
//!   | name | slack | name | name | slack ........ | unused ...... |
//!             │                     │                └ room: becomes a name once it has an inode
//!             └──────────┬──────────┘
//!                      room: the record before gets shorter and reveals what was put there
//! ```
//! A power cut may tear a block into sectors, some old and some new; hence
//!
//! Law 1: a name that stays is never moved, and no byte of it changes.
//! Law 2: removing a name changes one field of at most four bytes, which lies in one sector:
//! the record length before it, or its own inode number if it is the first in the block.
//! Law 3: a new name is put where nothing is read ([`hide`]), and shown by one such field
//! ([`reveal`]). If both lie in one sector ([`Room::whole`]), no tear can part them; if not,
//! the hidden bytes must be durable first.
//! Law 4: whatever the bytes, nothing here panics, and a chain that is broken is not edited.
//!
//! These functions know neither disks nor locks.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with places inside a block, which `record` has checked"
)]

pub(crate) mod index;
pub(crate) mod repack;

use draconis_exchange::contract::FileType;

use crate::format::dirent::{self, DirBlockFormat, HEAD_BYTES, min_rec_len, rec_len_from_disk};
use crate::format::{put16, put32};
use crate::{Error, InodeNumber, Result};

/// What a disk writes as a whole or not at all.
const SECTOR_BYTES: usize = 512;
const MAX_NAME_BYTES: usize = 255;

/// A name that was found in a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FoundRecord {
    /// The byte where its record starts.
    pub(crate) at: usize,
    /// Where the record before it starts; `None` if it is the first.
    pub(crate) previous: Option<usize>,
    /// What it names.
    pub(crate) inode: InodeNumber,
    /// The kind of the inode, where the entry knows.
    pub(crate) kind: Option<FileType>,
}

/// A place for a new name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DirentSlot {
    /// The byte where its record will start.
    pub(crate) at: usize,
    /// Whether the new name and the field that reveals it lie in one sector.
    pub(crate) is_tear_safe: bool,
    /// The bytes of its record.
    len: usize,
    /// The record that gets shorter; `None` if an unused one is taken over.
    shortened_record: Option<usize>,
}

/// What a block answers to a name that is to be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SlotSearch {
    /// It is there.
    Found(FoundRecord),
    /// It is not there, but could be here.
    Room(DirentSlot),
    /// It is not there, and there is no room for it.
    Full,
}

/// A block of names in two halves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct LeafSplit {
    /// The lower half, as the old block without the names of the other half: it may be
    /// written over the old block, and torn. See [`pack`] for one without holes.
    pub(crate) low: Vec<u8>,
    /// The upper half, packed.
    pub(crate) high: Vec<u8>,
    /// The lowest hash of the upper half; its lowest bit says that the lower half has names
    /// with this very hash, too.
    pub(crate) hash: u32,
}

/// One record of a chain.
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
    /// Bytes that its name needs; the rest is slack.
    fn used(&self) -> usize {
        if self.inode == 0 { 0 } else { min_rec_len(self.name_len) }
    }

    fn next(&self) -> usize {
        self.at + self.len
    }

    /// The room in it for a record of so many bytes.
    #[inline]
    fn slot_in_record(&self, need_bytes: usize) -> Option<DirentSlot> {
        let used = self.used();
        if self.len < used.saturating_add(need_bytes) {
            return None;
        }
        let at = self.at + used;
        let end = at + need_bytes.max(1) - 1;
        // What reveals: the inode number of an unused record, the length of another.
        let (after, shown_at) =
            if used == 0 { (None, self.at) } else { (Some(self.at), self.at + 4) };
        let whole = shown_at / SECTOR_BYTES == end / SECTOR_BYTES;
        Some(DirentSlot { at, is_tear_safe: whole, len: self.len - used, shortened_record: after })
    }

    #[inline]
    fn matches(&self, block: &[u8], is: impl Fn(&[u8]) -> bool) -> bool {
        self.inode != 0 && is(self.name(block))
    }

    fn found(&self, previous: Option<usize>, filetype: bool) -> FoundRecord {
        let kind = if filetype { dirent::kind(self.kind) } else { None };
        FoundRecord { at: self.at, previous, inode: InodeNumber(self.inode), kind }
    }

    /// Puts it behind a chain, as short as it can be.
    fn append(&self, from: &[u8], chain: &mut Vec<u8>) {
        let (at, used) = (chain.len(), self.used());
        let [i0, i1, i2, i3] = self.inode.to_le_bytes();
        let [l0, l1] = dirent::rec_len_to_disk(used, from.len()).to_le_bytes();
        let [name_len, ..] = self.name_len.to_le_bytes();
        chain.extend([i0, i1, i2, i3, l0, l1, name_len, self.kind]);
        chain.extend(self.name(from));
        chain.resize(at + used, 0);
    }

    fn name<'a>(&self, block: &'a [u8]) -> &'a [u8] {
        let rest = block.get(self.at + HEAD_BYTES..).unwrap_or_default();
        rest.get(..self.name_len).unwrap_or_default()
    }
}

/// What breaks a chain; small, for the sake of those who walk chains.
#[derive(Clone, Copy, Debug)]
struct BrokenChain(&'static str);

impl From<BrokenChain> for Error {
    fn from(BrokenChain(what): BrokenChain) -> Self {
        Self::corrupt(what)
    }
}

/// The record at `at`, which lies in the block with all of its name.
#[inline]
fn record(block: &[u8], at: usize) -> std::result::Result<RawRecord, BrokenChain> {
    let rest = block.get(at..).unwrap_or_default();
    let broken = BrokenChain("directory entry: record length");
    let Some(&[i0, i1, i2, i3, l0, l1, name_len, kind]) = rest.first_chunk() else {
        return Err(broken);
    };
    let len = rec_len_from_disk(u16::from_le_bytes([l0, l1]), block.len());
    if len < HEAD_BYTES || !len.is_multiple_of(4) || len > rest.len() {
        return Err(broken);
    }
    let inode = u32::from_le_bytes([i0, i1, i2, i3]);
    let name_len = usize::from(name_len);
    if inode != 0 && HEAD_BYTES + name_len > len {
        return Err(BrokenChain("directory entry: name length"));
    }
    Ok(RawRecord { at, len, inode, kind, name_len })
}

/// The chain of a block, up to where it breaks.
struct Records<'a> {
    block: &'a [u8],
    at: usize,
}

impl Iterator for Records<'_> {
    type Item = std::result::Result<RawRecord, BrokenChain>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.block.len() {
            return None;
        }
        let found = record(self.block, self.at);
        self.at = found.as_ref().map_or(usize::MAX, RawRecord::next);
        Some(found)
    }
}

const fn records(block: &[u8]) -> Records<'_> {
    Records { block, at: 0 }
}

/// All records of a block.
fn collect_records(block: &[u8]) -> Result<Vec<RawRecord>> {
    Ok(records(block).collect::<std::result::Result<_, BrokenChain>>()?)
}

/// A block without names.
pub(crate) fn empty(shape: DirBlockFormat) -> Vec<u8> {
    shape.with_tail(pack_records([], &[], shape.dirent_area_bytes()))
}

/// Looks for `name` in a block; with `filetype`, entries know the kind of their inode.
///
/// # Errors
/// [`Error::Corrupt`] if the chain breaks before the name is found.
pub(crate) fn find(block: &[u8], filetype: bool, name: &[u8]) -> Result<Option<FoundRecord>> {
    let mut previous = None;
    for record in records(block) {
        let record = record?;
        if record.matches(block, |it| it == name) {
            return Ok(Some(record.found(previous, filetype)));
        }
        previous = Some(record.at);
    }
    Ok(None)
}

/// A place for a record of `need_bytes` (see [`record_bytes`]): the first that no tear can
/// part, or else the first.
///
/// # Errors
/// [`Error::Corrupt`] if the chain breaks before such a place.
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

/// [`find`] and, if the name is not there, [`room`] for it, in one pass.
///
/// # Errors
/// [`Error::Corrupt`] if the chain breaks before the name is found.
#[cfg(test)]
pub(crate) fn find_or_slot(block: &[u8], filetype: bool, name: &[u8]) -> Result<SlotSearch> {
    find_or_slot_by(block, filetype, name.len(), |it| it == name)
}

/// [`seek`] of the first name that `is` what is looked for, or else of room for one of so many
/// bytes.
///
/// # Errors
/// As [`seek`].
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
            return Ok(SlotSearch::Found(record.found(previous, filetype)));
        }
        if !best.is_some_and(|best| best.is_tear_safe)
            && let Some(room) = record.slot_in_record(need_bytes)
            && (best.is_none() || room.is_tear_safe)
        {
            best = Some(room);
        }
        previous = Some(record.at);
    }
    Ok(best.map_or(SlotSearch::Full, SlotSearch::Room))
}

/// Puts a name into a block at a place that [`room`] found there.
///
/// # Errors
/// [`Error::NameTooLong`]; [`Error::Misuse`] if this cannot be a name, or there is no such
/// room. The block is as before.
pub(crate) fn insert(
    block: &mut [u8],
    room: &DirentSlot,
    inode: InodeNumber,
    kind: FileType,
    name: &[u8],
    filetype: bool,
) -> Result<()> {
    hide(block, room, inode, kind, name, filetype)?;
    reveal(block, room, inode)
}

/// The first half of [`insert`]: puts the name where no reader looks.
///
/// # Errors
/// As [`insert`].
pub(crate) fn hide(
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
    let [i0, i1, i2, i3] = shown.to_le_bytes();
    let [l0, l1] = raw_len.to_le_bytes();
    let [name_len, ..] = name.len().to_le_bytes();
    head.copy_from_slice(&[i0, i1, i2, i3, l0, l1, name_len, kind]);
    into.copy_from_slice(name);
    pad.iter_mut().take(used - HEAD_BYTES - name.len()).for_each(|byte| *byte = 0);
    Ok(())
}

/// The second half of [`insert`]: one field of at most four bytes shows the name.
///
/// # Errors
/// [`Error::Misuse`] if there is no such room. The block is as before.
pub(crate) fn reveal(block: &mut [u8], room: &DirentSlot, inode: InodeNumber) -> Result<()> {
    check_slot(block, room)?;
    let done = match room.shortened_record {
        Some(after) => put_len(block, after, room.at - after),
        None => put32(block, room.at, inode.0),
    };
    done.ok_or(Error::Misuse("directory entry: no room"))
}

/// Whether the room is still there.
fn check_slot(block: &[u8], room: &DirentSlot) -> Result<()> {
    let there = record(block, room.shortened_record.unwrap_or(room.at)).is_ok_and(|record| {
        let free =
            if room.shortened_record.is_some() { record.inode != 0 } else { record.inode == 0 };
        free && record.at + record.used() == room.at && record.next() == room.at + room.len
    });
    there.then_some(()).ok_or(Error::Misuse("directory entry: no room"))
}

/// Removes a name that [`find`] found in this block.
///
/// # Errors
/// [`Error::Misuse`] if it is not there.
pub(crate) fn remove(block: &mut [u8], found: &FoundRecord) -> Result<()> {
    let gone = Error::Misuse("directory entry: not there");
    let record = used_record_at(block, found.at)?;
    let done = match found.previous {
        None if found.at == 0 => put32(block, 0, 0),
        None => None,
        Some(previous) => {
            let before = self::record(block, previous)?;
            if before.next() != found.at {
                return Err(gone);
            }
            put_len(block, previous, before.len + record.len)
        }
    };
    done.ok_or(gone)
}

/// Lets the name at `at` name another inode.
///
/// # Errors
/// [`Error::Misuse`] if there is no name.
pub(crate) fn set_inode(
    block: &mut [u8],
    at: usize,
    inode: InodeNumber,
    kind: FileType,
    filetype: bool,
) -> Result<()> {
    used_record_at(block, at)?;
    put32(block, at, inode.0).ok_or(Error::Misuse("directory entry: not there"))?;
    if filetype && let Some(byte) = block.get_mut(at + 7) {
        *byte = dirent::file_type_code(kind);
    }
    Ok(())
}

/// The record in use at `at`.
fn used_record_at(block: &[u8], at: usize) -> Result<RawRecord> {
    record(block, at)
        .ok()
        .filter(|record| record.inode != 0)
        .ok_or(Error::Misuse("directory entry: not there"))
}

fn put_len(block: &mut [u8], at: usize, len: usize) -> Option<()> {
    let raw = dirent::rec_len_to_disk(len, block.len());
    put16(block, at.checked_add(4)?, raw)
}

/// The inodes that the names of a block lead to, as far as it can be read.
pub(crate) fn referenced_inodes(block: &[u8]) -> impl Iterator<Item = InodeNumber> + '_ {
    let records = records(block).map_while(std::result::Result::ok);
    records.filter(|record| record.inode != 0).map(|record| InodeNumber(record.inode))
}

/// Whether a block holds no names; in the first block of a directory `.` and `..` are none.
///
/// # Errors
/// [`Error::Corrupt`] if the chain breaks: there may be names that cannot be seen.
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

/// The same names without slack between them. It moves them: it must not be written over
/// the old block where a tear can happen.
///
/// # Errors
/// [`Error::Corrupt`] if the chain breaks.
#[cfg(test)]
pub(crate) fn pack(block: &[u8]) -> Result<Vec<u8>> {
    Ok(pack_records(collect_records(block)?, block, block.len()))
}

/// So many bytes of the records in use among these of `from`, which must fit.
fn pack_records(all: impl IntoIterator<Item = RawRecord>, from: &[u8], len: usize) -> Vec<u8> {
    let mut block = Vec::with_capacity(len);
    for record in all.into_iter().filter(|record| record.inode != 0) {
        record.append(from, &mut block);
    }
    extend_last_record(&mut block, len);
    block
}

/// Makes a chain as long as it is to be: its last record reaches to the end.
fn extend_last_record(chain: &mut Vec<u8>, len: usize) {
    let last = records(chain).map_while(std::result::Result::ok).last().map_or(0, |it| it.at);
    chain.resize(len, 0);
    put_len(chain, last, len - last);
}

/// Splits a block of names by their hashes, which `hash` says, into halves of about equal bytes.
/// Names with one hash stay together unless there are no others.
///
/// # Errors
/// [`Error::Corrupt`] if the chain breaks; [`Error::Misuse`] if there are less than two names.
pub(crate) fn split_by(block: &[u8], hash: impl Fn(&[u8]) -> u32) -> Result<LeafSplit> {
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
    let low = without_records(block, &all, &gone);
    let high = pack_records(go.iter().map(|(.., record)| *record), block, block.len());
    Ok(LeafSplit { low, high, hash })
}

#[cfg(test)]
fn split(block: &[u8], hash: &crate::format::hash::NameHash) -> Result<LeafSplit> {
    split_by(block, |name| hash.of(name))
}

/// How many of these names, in the order of their hashes, make the lower half: the place
/// nearest to the middle where the hash changes, or the middle if it never does.
fn split_point(hashed: &[(u32, usize, RawRecord)]) -> Option<usize> {
    let total: usize = hashed.iter().map(|(.., record)| record.used()).sum();
    let mut below = 0;
    // The distance from the middle, and after how many names; changes of the hash go first.
    let mut best: Option<(bool, usize, usize)> = None;
    for (nth, pair) in hashed.windows(2).enumerate() {
        let [(hash, _, record), (next, ..)] = pair else { continue };
        below += record.used();
        let place = (hash == next, total.abs_diff(below * 2), nth + 1);
        best = Some(best.map_or(place, |best| best.min(place)));
    }
    best.map(|(.., cut)| cut)
}

/// The block without the records at `gone`, none of the others being moved.
fn without_records(block: &[u8], all: &[RawRecord], gone: &[usize]) -> Vec<u8> {
    let mut left = block.to_vec();
    // The record that reaches over those which go.
    let mut before: Option<RawRecord> = None;
    for record in all {
        if gone.binary_search(&record.at).is_err() {
            before = Some(*record);
            continue;
        }
        match &mut before {
            Some(before) => {
                before.len += record.len;
                put_len(&mut left, before.at, before.len);
            }
            // Only the first record has none before it.
            None => {
                put32(&mut left, record.at, 0);
                before = Some(*record);
            }
        }
    }
    left
}

#[cfg(test)]
mod tests;
