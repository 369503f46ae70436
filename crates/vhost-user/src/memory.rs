//! Guest memory: regions that the front end shares, and blocks in them.

use std::fs::File;
use std::sync::Arc;

use draconis_types::BlockMemory;
use rustix::fs::FileType;
use vhost::vhost_user::{Error, Result};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemory, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MmapRegion, Permissions,
};

/// Maximum number of regions.
pub(crate) const MAX_REGIONS: usize = 64;

/// Mapped memory of a guest.
pub(crate) type Memory = Arc<GuestMemoryMmap>;

pub(crate) fn refuse(why: impl std::fmt::Display) -> Error {
    Error::ReqHandlerError(std::io::Error::other(why.to_string()))
}

/// Maps a part of `file`, which must have it: pages past the end of a file cannot be touched.
pub(crate) fn map_file(file: File, offset: u64, len: u64) -> Result<MmapRegion<()>> {
    // The standard library's call is not among those of a confined process.
    let stat = rustix::fs::fstat(&file).map_err(|errno| Error::ReqHandlerError(errno.into()))?;
    let end = offset.checked_add(len).and_then(|end| i64::try_from(end).ok());
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if is_file && end.is_none_or(|end| end > stat.st_size) {
        return Err(refuse("shared memory is longer than its file"));
    }
    let len = usize::try_from(len).map_err(refuse)?;
    MmapRegion::from_file(FileOffset::new(file, offset), len).map_err(refuse)
}

/// A region as the front end describes it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegionInfo {
    pub(crate) guest: u64,
    /// Address in the front end, which it uses for rings.
    pub(crate) user: u64,
    pub(crate) len: u64,
    pub(crate) file_offset: u64,
}

/// The regions of a guest's memory.
#[derive(Default)]
pub(crate) struct MemoryTable {
    regions: Vec<(RegionInfo, Arc<GuestRegionMmap>)>,
}

impl MemoryTable {
    /// Returns the table with one more region.
    pub(crate) fn add(&mut self, info: RegionInfo, file: File) -> Result<()> {
        if self.regions.len() >= MAX_REGIONS {
            return Err(refuse(format_args!("more than {MAX_REGIONS} memory regions")));
        }
        let mapped = map_file(file, info.file_offset, info.len)?;
        let region = GuestRegionMmap::new(mapped, GuestAddress(info.guest));
        let region = region.ok_or(Error::InvalidParam)?;
        self.regions.push((info, Arc::new(region)));
        Ok(())
    }

    pub(crate) fn remove(&mut self, info: RegionInfo) -> Result<()> {
        // The offset of a region to be removed is not always given.
        let is_same =
            |it: &RegionInfo| (it.guest, it.user, it.len) == (info.guest, info.user, info.len);
        let at = self.regions.iter().position(|(it, _)| is_same(it)).ok_or(Error::InvalidParam)?;
        self.regions.remove(at);
        Ok(())
    }

    /// Returns the memory; regions that overlap are refused.
    pub(crate) fn memory(&self) -> Result<Memory> {
        let mut regions: Vec<_> = self.regions.iter().map(|(_, region)| region.clone()).collect();
        if regions.is_empty() {
            return Ok(Memory::default());
        }
        regions.sort_by_key(|region| region.start_addr());
        GuestMemoryMmap::from_arc_regions(regions).map(Arc::new).map_err(refuse)
    }

    /// Returns the guest's address of an address in the front end.
    pub(crate) fn guest_address(&self, user: u64) -> Option<u64> {
        self.regions.iter().find_map(|(info, _)| {
            let offset = user.checked_sub(info.user).filter(|offset| *offset < info.len)?;
            info.guest.checked_add(offset)
        })
    }
}

/// A range of guest memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Segment {
    pub(crate) at: u64,
    pub(crate) len: u32,
}

impl Segment {
    pub(crate) fn is_in(self, memory: &GuestMemoryMmap) -> bool {
        let at = GuestAddress(self.at);
        memory.check_range(at, self.len as usize, Permissions::ReadWrite)
    }
}

/// Returns the total length of segments, in bytes.
pub(crate) fn total_len(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}

/// Removes up to `len` bytes from the start of `segments`, and returns them.
pub(crate) fn take_front(segments: &mut Vec<Segment>, len: u64) -> Vec<Segment> {
    let mut left = len;
    let mut taken = vec![];
    let mut whole = 0;
    for segment in segments.iter_mut() {
        let part = u64::from(segment.len).min(left) as u32;
        if part > 0 {
            taken.push(Segment { at: segment.at, len: part });
        }
        left -= u64::from(part);
        segment.at += u64::from(part);
        segment.len -= part;
        if segment.len > 0 {
            break;
        }
        whole += 1;
    }
    segments.drain(..whole);
    taken
}

/// Contents of a request, in guest memory. The guest may change them at any time.
#[derive(Debug)]
pub(crate) struct GuestBlock {
    memory: Memory,
    segments: Vec<Segment>,
    len: usize,
    is_writable: bool,
}

impl GuestBlock {
    /// Creates a block of segments that are in `memory`.
    pub(crate) fn new(memory: &Memory, segments: Vec<Segment>, is_writable: bool) -> Self {
        let len = total_len(&segments) as usize;
        Self { memory: memory.clone(), segments, len, is_writable }
    }

    /// Calls `copy` for each part of `len` bytes from `at_bytes`, with its address and its place in
    /// the range.
    fn for_each_part(
        &self,
        at_bytes: usize,
        len: usize,
        mut copy: impl FnMut(GuestAddress, std::ops::Range<usize>),
    ) {
        let (mut skip, mut done) = (at_bytes, 0);
        for segment in &self.segments {
            let segment_len = segment.len as usize;
            if skip >= segment_len {
                skip -= segment_len;
                continue;
            }
            let part = (segment_len - skip).min(len - done);
            copy(GuestAddress(segment.at + skip as u64), done..done + part);
            done += part;
            skip = 0;
            if done == len {
                break;
            }
        }
    }
}

impl BlockMemory for GuestBlock {
    fn len_bytes(&self) -> usize {
        self.len
    }

    fn copy_out(&self, at_bytes: usize, into: &mut [u8]) {
        self.for_each_part(at_bytes, into.len(), |at, range| {
            let part = into.get_mut(range).unwrap_or_default();
            // The segment was found to be in the memory, which this block keeps mapped.
            let read = self.memory.read_slice(part, at);
            debug_assert!(read.is_ok());
        });
    }

    fn is_writable(&self) -> bool {
        self.is_writable
    }

    fn copy_in(&mut self, at_bytes: usize, from: &[u8]) {
        self.for_each_part(at_bytes, from.len(), |at, range| {
            let part = from.get(range).unwrap_or_default();
            let written = self.memory.write_slice(part, at);
            debug_assert!(written.is_ok());
        });
    }
}

/// Copies `bytes` to the start of `segments`; returns the number of bytes that fit.
pub(crate) fn write_segments(memory: &Memory, segments: &[Segment], bytes: &[u8]) -> usize {
    let mut block = GuestBlock::new(memory, segments.to_vec(), true);
    let len = bytes.len().min(block.len);
    block.copy_in(0, bytes.get(..len).unwrap_or_default());
    len
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(list: &[(u64, u32)]) -> Vec<Segment> {
        list.iter().map(|&(at, len)| Segment { at, len }).collect()
    }

    #[test]
    fn segments_are_taken_from_the_front() {
        let mut left = segments(&[(0, 10), (100, 20), (200, 5)]);
        assert_eq!(take_front(&mut left, 10), segments(&[(0, 10)]));
        assert_eq!(take_front(&mut left, 15), segments(&[(100, 15)]));
        assert_eq!(left, segments(&[(115, 5), (200, 5)]));
        assert_eq!(take_front(&mut left, 100), segments(&[(115, 5), (200, 5)]));
        assert!(left.is_empty() && take_front(&mut left, 1).is_empty());
    }

    #[test]
    fn blocks_are_copied_across_segments_and_regions() {
        let ranges = [(GuestAddress(0), 4096), (GuestAddress(4096), 4096)];
        let memory: Memory = Arc::new(GuestMemoryMmap::from_ranges(&ranges).unwrap());
        assert!(Segment { at: 4090, len: 12 }.is_in(&memory));
        assert!(!Segment { at: 8190, len: 3 }.is_in(&memory));
        assert!(!Segment { at: u64::MAX, len: 3 }.is_in(&memory));
        let mut block = GuestBlock::new(&memory, segments(&[(7000, 3), (4094, 4), (10, 3)]), true);
        block.copy_in(1, b"bcdefghi");
        let mut bytes = [0; 10];
        block.copy_out(0, &mut bytes);
        assert_eq!(&bytes, b"\0bcdefghi\0");
        block.copy_out(6, &mut bytes[..2]);
        assert_eq!(&bytes[..2], b"gh");
        memory.read_slice(&mut bytes[..4], GuestAddress(4094)).unwrap();
        assert_eq!(&bytes[..4], b"defg");
    }
}
