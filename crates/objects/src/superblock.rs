//! Superblock: identity of the store and its checkpoint, in four copies.
//!
//! ```text
//!   | 0 | 1 | segment 0 | segment 1 | .. | segment n-1 | 2 | 3 |
//! ```
//!
//! Law 1: copies 0 and 1 are written together, then 2 and 3 once the first are durable. So two
//! copies of one generation are whole at any moment. Opening repairs copies that a crash left old
//! before writing a newer one: none is more than one generation old.
//! Law 2: a copy lies within one sector of 512 bytes: it is new or old as a whole.
//! Law 3: the newest copy is valid; everything it refers to was durable before it was written.

use draconis_device::{Disk, Extent, Urgency};
use draconis_types::Block;

use crate::codec::{COUNTER_END, Checksummer, Reader, to_usize_saturating};
use crate::index::tree::BlockPtr;
use crate::layout::{layout_kind_of, layout_number};
use crate::test_hooks::{InjectedFault, is_fault_injected};
use crate::{Error, Profile, Result};

/// "DracoObj", as little-endian bytes.
const MAGIC: u64 = u64::from_le_bytes(*b"DracoObj");
/// Versions. 2: summaries of frames are delta-coded. 3: so are leaves and runs, and the log layout
/// has a stream for them. 4: inline values, and two copies of a checkpoint; stores of version 3 are
/// read as version 4 without them. 5: names of objects. 6: forked objects.
const VERSION: u32 = 6;
const VERSION_WITHOUT_COPIES: u32 = 3;
/// Encoded length with its checksum.
const ENCODED_BYTES: usize = 128;
/// Least distance between copies, in bytes.
const MIN_COPY_DISTANCE_BYTES: u32 = 4096;
/// Fewest segments of a store.
const MIN_SEGMENTS: u32 = 24;
/// Smallest segment, in pages.
pub(crate) const MIN_SEGMENT_PAGES: u32 = 4;

/// Addresses and sizes on a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Geometry {
    pub disk_bytes: u64,
    pub page_bytes: u32,
    pub segment_bytes: u32,
    pub segments: u32,
    /// First byte of segment 0.
    pub first_byte: u64,
}

impl Geometry {
    /// Returns the geometry for `profile` on a disk, or the reason why it does not fit.
    pub fn for_disk(profile: &Profile, disk_bytes: u64) -> Result<Self> {
        let page = profile.page_bytes;
        let segment = profile.segment_bytes;
        if !page.is_power_of_two() || !(512..=1 << 20).contains(&page) {
            return Err(Error::Misuse("a page is a power of two from 512 bytes to 1 MiB"));
        }
        if !segment.is_multiple_of(page)
            || segment < page.saturating_mul(MIN_SEGMENT_PAGES)
            || segment > 1 << 30
        {
            return Err(Error::Misuse(
                "a segment is at least four pages, whole ones, and at most 1 GiB",
            ));
        }
        let copies = u64::from(page.max(MIN_COPY_DISTANCE_BYTES)) * 2;
        // Discards prefer aligned segments, but small stores have no space for that.
        let align = u64::from(segment.min(1 << 20)).next_power_of_two().min(disk_bytes / 64);
        let first_byte = match align {
            0 => copies,
            _ => copies.next_multiple_of(align.next_multiple_of(u64::from(page))),
        };
        let usable = round_down_to_page(disk_bytes, page)
            .checked_sub(first_byte.saturating_add(copies))
            .ok_or(Error::Misuse("the disk is too small for a store"))?;
        let segments = usable.checked_div(u64::from(segment)).unwrap_or(0);
        if segments < u64::from(MIN_SEGMENTS) {
            return Err(Error::Misuse("the disk is too small: a store needs 24 segments"));
        }
        let segments = u32::try_from(segments)
            .map_err(|_| Error::Misuse("too many segments: choose larger ones"))?;
        Ok(Self { disk_bytes, page_bytes: page, segment_bytes: segment, segments, first_byte })
    }

    /// Returns the same with another start of segment 0; none if that is impossible.
    fn with_first_byte(self, first_byte: u64) -> Option<Self> {
        let copies = self.copy_offsets();
        let page = u64::from(self.page_bytes);
        let least = copies[1].saturating_mul(2);
        let is_sane = first_byte >= least
            && first_byte <= least.max(1 << 20)
            && first_byte.checked_rem(page) == Some(0);
        let usable = copies[2].checked_sub(first_byte).filter(|_| is_sane)?;
        let segments = usable.checked_div(u64::from(self.segment_bytes))?;
        let segments = u32::try_from(segments).ok().filter(|segments| *segments >= MIN_SEGMENTS)?;
        Some(Self { first_byte, segments, ..self })
    }

    /// Returns the same for another length of the disk.
    pub fn resized(&self, profile: &Profile, disk_bytes: u64) -> Result<Self> {
        Self::for_disk(profile, disk_bytes)?
            .with_first_byte(self.first_byte)
            .ok_or(Error::Misuse("the disk is too small: a store needs 24 segments"))
    }

    pub fn start_of(&self, segment: u32) -> u64 {
        let behind = u64::from(segment).saturating_mul(u64::from(self.segment_bytes));
        self.first_byte.saturating_add(behind)
    }

    /// Returns the segment that holds a byte.
    pub fn segment_of(&self, at: u64) -> Option<u32> {
        let behind = at.checked_sub(self.first_byte)?;
        let segment = behind.checked_div(u64::from(self.segment_bytes))?;
        u32::try_from(segment).ok().filter(|segment| *segment < self.segments)
    }

    /// Returns true if `[at, at + len)` lies in one segment.
    pub fn contains(&self, at: u64, len: u64) -> bool {
        let Some(end) = at.checked_add(len.max(1)) else { return false };
        self.segment_of(at).is_some()
            && self.segment_of(at) == self.segment_of(end.saturating_sub(1))
    }

    fn copy_offsets(&self) -> [u64; 4] {
        let stride = u64::from(self.page_bytes.max(MIN_COPY_DISTANCE_BYTES));
        let end = round_down_to_page(self.disk_bytes, self.page_bytes);
        let before_end = |copies| end.saturating_sub(stride.saturating_mul(copies));
        [0, stride, before_end(2), before_end(1)]
    }
}

/// Rounds `len_bytes` down to whole pages.
pub(crate) fn round_down_to_page(len_bytes: u64, page_bytes: u32) -> u64 {
    let rest = len_bytes.checked_rem(u64::from(page_bytes)).unwrap_or(0);
    len_bytes.saturating_sub(rest)
}

/// Contents of a superblock.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Superblock {
    pub id: u128,
    pub generation: u64,
    /// Number of openings for writing.
    pub incarnation: u64,
    /// Incarnation that wrote the log after the checkpoint.
    pub log_incarnation: u64,
    pub profile: Profile,
    pub geometry: Geometry,
    pub checkpoint: BlockPtr,
    /// Second copy of the checkpoint; stores of older versions have none.
    pub checkpoint_copy: Option<BlockPtr>,
}

impl Superblock {
    /// Returns the checksummer for everything in the store but the superblocks.
    pub fn checksummer(&self) -> Checksummer {
        let half = |id: u128| u64::try_from(id & u128::from(u64::MAX)).unwrap_or_default();
        let (low, high) = (half(self.id), half(self.id >> 64));
        Checksummer(crate::codec::mix_bits(low) ^ crate::codec::mix_bits(high ^ 1))
    }

    fn encode(&self, at: u64) -> Vec<u8> {
        let mut out = Vec::with_capacity(ENCODED_BYTES);
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&VERSION.to_le_bytes());
        let layout = layout_number(self.profile.layout);
        out.extend_from_slice(&layout.to_le_bytes());
        out.extend_from_slice(&self.id.to_le_bytes());
        out.extend_from_slice(&self.generation.to_le_bytes());
        out.extend_from_slice(&self.incarnation.to_le_bytes());
        out.extend_from_slice(&self.log_incarnation.to_le_bytes());
        out.extend_from_slice(&self.geometry.disk_bytes.to_le_bytes());
        out.extend_from_slice(&self.profile.page_bytes.to_le_bytes());
        out.extend_from_slice(&self.profile.segment_bytes.to_le_bytes());
        out.extend_from_slice(&self.profile.queue_depth.to_le_bytes());
        out.extend_from_slice(&self.checkpoint.len.to_le_bytes());
        out.extend_from_slice(&self.checkpoint.at.to_le_bytes());
        out.extend_from_slice(&self.checkpoint.sum.to_le_bytes());
        // It is as long as the first.
        let (twin_at, twin_sum) = self.checkpoint_copy.map_or((0, 0), |twin| (twin.at, twin.sum));
        out.extend_from_slice(&twin_at.to_le_bytes());
        out.extend_from_slice(&twin_sum.to_le_bytes());
        out.extend_from_slice(&self.geometry.first_byte.to_le_bytes());
        out.resize(ENCODED_BYTES - 8, 0);
        let sum = Checksummer(MAGIC).checksum(at, &out);
        out.extend_from_slice(&sum.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8], at: u64) -> Result<Self> {
        let not = |why: &str| Error::NotAStore(why.to_owned());
        let bytes = bytes.get(..ENCODED_BYTES).ok_or_else(|| not("the disk is too small"))?;
        let mut reader = Reader::new(bytes, at);
        if reader.u64()? != MAGIC {
            return Err(not("no superblock"));
        }
        let (told, sum) = bytes.split_last_chunk().ok_or_else(|| not("the disk is too small"))?;
        let is_whole = Checksummer(MAGIC).checksum(at, told) == u64::from_le_bytes(*sum);
        if !is_whole && !is_fault_injected(InjectedFault::SuperblockSum) {
            return Err(Error::Corrupt { what: "a superblock's sum", at_bytes: at });
        }
        let version = reader.u32()?;
        if !(VERSION_WITHOUT_COPIES..=VERSION).contains(&version) {
            return Err(Error::NotAStore(format!(
                "version {version} is not known here (this program knows {VERSION})"
            )));
        }
        let layout = layout_kind_of(reader.u32()?);
        let layout =
            layout.ok_or_else(|| Error::NotAStore("its layout is not known here".to_owned()))?;
        let id = u128::from(reader.u64()?) | u128::from(reader.u64()?) << 64;
        let (generation, incarnation) = (reader.u64()?, reader.u64()?);
        let log_incarnation = reader.u64()?;
        let made_for = reader.u64()?;
        let profile = Profile {
            layout,
            page_bytes: reader.u32()?,
            segment_bytes: reader.u32()?,
            queue_depth: reader.u32()?,
        };
        let len = reader.u32()?;
        let checkpoint = BlockPtr { at: reader.u64()?, len, sum: reader.u64()? };
        let (at, sum) = (reader.u64()?, reader.u64()?);
        let checkpoint_copy = (at > 0).then_some(BlockPtr { at, len, sum });
        if [generation, incarnation, log_incarnation].iter().any(|count| *count >= COUNTER_END) {
            return Err(Error::Corrupt { what: "a superblock's counters", at_bytes: at });
        }
        let wrong = Error::Corrupt { what: "a superblock's sizes", at_bytes: at };
        let mut geometry = Geometry::for_disk(&profile, made_for).map_err(|_| wrong.clone())?;
        // Segments keep their start from creation on, whatever the size is now.
        let first_byte = reader.u64()?;
        if version != VERSION_WITHOUT_COPIES {
            geometry = geometry.with_first_byte(first_byte).ok_or(wrong)?;
        }
        Ok(Self {
            id,
            generation,
            incarnation,
            log_incarnation,
            profile,
            geometry,
            checkpoint,
            checkpoint_copy,
        })
    }

    /// Returns the writes of one pair of copies.
    pub fn copy_writes(&self, pair: usize) -> Vec<draconis_device::Write> {
        let page = self.geometry.page_bytes as usize;
        let copies = self.geometry.copy_offsets().into_iter();
        copies
            .skip(pair.saturating_mul(2))
            .take(2)
            .map(|at_bytes| {
                let mut block = Block::private(page);
                block.copy_in(0, &self.encode(at_bytes));
                draconis_device::Write { at_bytes, block }
            })
            .collect()
    }

    /// Reads all four copies; returns them with their addresses.
    pub fn read_copies(&self, disk: &dyn Disk) -> [(u64, Result<Self>); 4] {
        self.geometry.copy_offsets().map(|at| (at, read_copy(disk, at)))
    }

    /// Returns the newest copy on a disk, and which of the four are equal to it.
    ///
    /// # Errors
    /// [`Error::NotAStore`] if there is no copy, [`Error::Corrupt`] if none is whole, errors of the
    /// disk if they cannot be read.
    pub fn find_newest(disk: &dyn Disk) -> Result<(Self, [bool; 4])> {
        let properties = disk.properties();
        let mut found: Vec<(u64, Self)> = vec![];
        let mut why = Error::NotAStore("no superblock".to_owned());
        let take =
            |at: u64, found: &mut Vec<(u64, Self)>, why: &mut Error| match read_copy(disk, at) {
                Ok(copy) if copy.geometry.copy_offsets().contains(&at) => found.push((at, copy)),
                Ok(_) => {}
                Err(Error::NotAStore(text)) if text == "no superblock" => {}
                Err(error) => *why = error,
            };
        take(0, &mut found, &mut why);
        // The first copy determines the others' addresses. Without it, each page size is tried.
        let places = match found.first() {
            Some((_, copy)) => copy.geometry.copy_offsets()[1..].to_vec(),
            None => possible_copy_offsets(properties.len_bytes),
        };
        places.into_iter().for_each(|at| take(at, &mut found, &mut why));
        let newest = found.iter().max_by_key(|(_, copy)| copy.generation);
        let Some((_, newest)) = newest.cloned() else { return Err(why) };
        // Never an older copy instead: one before a growth describes a state that is gone.
        let (made_for, disk_bytes) = (newest.geometry.disk_bytes, properties.len_bytes);
        if made_for > disk_bytes {
            return Err(Error::NotAStore(format!(
                "the store was made for {made_for} bytes, the disk has {disk_bytes}"
            )));
        }
        let is_newest = |at| found.iter().any(|(place, copy)| *place == at && *copy == newest);
        let agree = newest.geometry.copy_offsets().map(is_newest);
        Ok((newest, agree))
    }
}

/// Returns the possible addresses of copies other than the first, for any page size.
fn possible_copy_offsets(disk_bytes: u64) -> Vec<u64> {
    let places = (12..=20).flat_map(|shift| {
        let stride = 1u64 << shift;
        let end = round_down_to_page(disk_bytes, 4096);
        [Some(stride), end.checked_sub(stride.saturating_mul(2)), end.checked_sub(stride)]
    });
    places.flatten().collect()
}

/// Returns writes that erase superblock copies of any store and page size. Nothing else is
/// overwritten, so a store that keeps one copy is still whole.
pub(crate) fn wipe_writes(disk: &dyn Disk) -> Vec<draconis_device::Write> {
    let properties = disk.properties();
    let len = properties.sector_bytes.max(512) as usize;
    let mut places = possible_copy_offsets(properties.len_bytes);
    places.push(0);
    places.sort_unstable();
    places.dedup();
    places.retain(|at| read_copy(disk, *at).is_ok());
    let zeros = |at_bytes| draconis_device::Write { at_bytes, block: Block::private(len) };
    places.into_iter().map(zeros).collect()
}

fn read_copy(disk: &dyn Disk, at: u64) -> Result<Superblock> {
    let properties = disk.properties();
    let len = u64::from(properties.sector_bytes.max(512));
    if at.checked_add(len).is_none_or(|end| end > properties.len_bytes) {
        return Err(Error::NotAStore("no superblock".to_owned()));
    }
    let block = disk
        .read(Extent::new(at, len), Block::private(to_usize_saturating(len)), Urgency::Now)
        .wait()
        .unwrap_or(Err(draconis_device::Refused {
            payload: None,
            error: draconis_device::Error::ServiceEnded,
        }))
        .map_err(|refused| Error::Device(refused.error))?;
    Superblock::decode(&block.into_private(), at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LayoutKind;
    use draconis_device::{Group, MemoryDisk};

    fn superblock(disk_bytes: u64) -> Superblock {
        let profile = Profile {
            layout: LayoutKind::Cow,
            page_bytes: 4096,
            segment_bytes: 16 << 10,
            queue_depth: 8,
        };
        Superblock {
            id: 0x1234_5678_9abc_def0_1122_3344_5566_7788,
            generation: 5,
            incarnation: 2,
            log_incarnation: 1,
            profile,
            geometry: Geometry::for_disk(&profile, disk_bytes).unwrap(),
            checkpoint: BlockPtr { at: 9 << 10, len: 77, sum: 0xfeed },
            checkpoint_copy: Some(BlockPtr { at: 99 << 10, len: 77, sum: 0xbeef }),
        }
    }

    #[test]
    fn newest_superblock_copy_is_found() {
        let disk = MemoryDisk::new(vec![0; 1 << 20], 512);
        let mut superblock = superblock(1 << 20);
        for pair in 0..2 {
            disk.submit(Group { writes: superblock.copy_writes(pair) }, &[]).unwrap();
        }
        assert_eq!(Superblock::find_newest(&disk).unwrap(), (superblock.clone(), [true; 4]));
        superblock.generation = 6;
        disk.submit(Group { writes: superblock.copy_writes(0) }, &[]).unwrap();
        assert_eq!(
            Superblock::find_newest(&disk).unwrap(),
            (superblock.clone(), [true, true, false, false])
        );
        // Both copies at the start are lost: the old ones at the end still serve.
        let mut zeros = superblock.copy_writes(0);
        zeros.iter_mut().for_each(|write| write.block = Block::private(4096));
        disk.submit(Group { writes: zeros }, &[]).unwrap();
        assert_eq!(Superblock::find_newest(&disk).unwrap().0.generation, 5);
    }

    #[test]
    fn overflowing_generation_is_refused() {
        let disk = MemoryDisk::new(vec![0; 1 << 20], 512);
        let superblock = Superblock { generation: u64::MAX, ..superblock(1 << 20) };
        disk.submit(Group { writes: superblock.copy_writes(0) }, &[]).unwrap();
        assert!(matches!(Superblock::find_newest(&disk), Err(Error::Corrupt { .. })));
    }

    #[test]
    fn copies_from_before_a_growth_do_not_stand_in_on_a_shorter_disk() {
        let disk = MemoryDisk::new(vec![0; 2 << 20], 512);
        for pair in 0..2 {
            disk.submit(Group { writes: superblock(1 << 20).copy_writes(pair) }, &[]).unwrap();
        }
        let grown = Superblock { generation: 6, ..superblock(2 << 20) };
        disk.submit(Group { writes: grown.copy_writes(0) }, &[]).unwrap();
        assert_eq!(Superblock::find_newest(&disk).unwrap().0, grown);
        // A reader that opened the disk before it grew, or a file that was cut to its old length.
        let mut bytes = disk.into_bytes();
        bytes.truncate(1 << 20);
        let shorter = MemoryDisk::new(bytes, 512);
        let refused = Superblock::find_newest(&shorter).unwrap_err();
        assert!(
            matches!(&refused, Error::NotAStore(why) if why.contains("2097152")),
            "{refused:?}"
        );
    }

    #[test]
    fn blank_disk_has_no_superblock() {
        let disk = MemoryDisk::new(vec![0; 1 << 20], 512);
        assert!(matches!(Superblock::find_newest(&disk), Err(Error::NotAStore(_))));
    }

    #[test]
    fn segments_do_not_overlap() {
        let geometry = superblock(1 << 20).geometry;
        assert!(geometry.segments >= 24);
        for segment in 0..geometry.segments {
            let start = geometry.start_of(segment);
            assert_eq!(geometry.segment_of(start), Some(segment));
            assert!(geometry.contains(start, 16 << 10));
            assert!(!geometry.contains(start + 1, 16 << 10));
        }
        assert_eq!(geometry.segment_of(geometry.start_of(geometry.segments)), None);
        assert!(geometry.start_of(geometry.segments) <= (1 << 20) - 8192);
    }
}
