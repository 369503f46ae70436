//! Requests of the virtio block device, parsed from chains.

use virtio_bindings::virtio_blk as blk;
use vm_memory::{Bytes, GuestAddress};

use crate::chain::Chain;
use crate::error::RingError;
use crate::memory::{Memory, Segment, take_front, total_len};

/// Unit of all offsets and lengths of the protocol, for every sector size.
pub(crate) const SECTOR_BYTES: u64 = 512;
const HEADER_BYTES: u64 = 16;
/// Length of the serial number, in bytes.
pub(crate) const ID_BYTES: usize = blk::VIRTIO_BLK_ID_BYTES as usize;
/// Length of a range of DISCARD and WRITE_ZEROES, in bytes.
const RANGE_BYTES: u64 = 16;
/// Maximum number of ranges of a request.
pub(crate) const MAX_RANGES: u32 = 32;
/// Maximum length of a range of DISCARD, in sectors: 2 GiB.
pub(crate) const MAX_DISCARD_SECTORS: u32 = 1 << 22;
/// Maximum length of a range of WRITE_ZEROES, in sectors: 16 MiB, because zeros are written.
pub(crate) const MAX_ZERO_SECTORS: u32 = 1 << 15;
const UNMAP: u32 = 1;

/// Answer to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Status {
    Ok = blk::VIRTIO_BLK_S_OK as isize,
    IoError = blk::VIRTIO_BLK_S_IOERR as isize,
    Unsupported = blk::VIRTIO_BLK_S_UNSUPP as isize,
}

/// A range of bytes of the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DiskRange {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// True if zeroing may free the space.
    pub(crate) unmap: bool,
}

#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Command {
    Read { offset: u64 },
    Write { offset: u64 },
    Flush,
    Id,
    Discard(Vec<DiskRange>),
    WriteZeroes(Vec<DiskRange>),
}

/// A request: its parts are in guest memory.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) head: u16,
    /// The command, or the answer to one that is wrong.
    pub(crate) command: Result<Command, Status>,
    /// Contents to be read by the device.
    pub(crate) input: Vec<Segment>,
    /// Space for contents from the device.
    pub(crate) output: Vec<Segment>,
    /// Address of the status byte.
    pub(crate) status_at: GuestAddress,
}

impl Request {
    /// Parses a chain.
    ///
    /// # Errors
    /// No space for a status: the request cannot be answered.
    pub(crate) fn parse(memory: &Memory, chain: Chain) -> Result<Self, RingError> {
        let Chain { head, readable: mut input, writable: mut output } = chain;
        let Some(last) = output.last_mut() else {
            return Err(RingError::Chain("no space for a status"));
        };
        // Segments have at least one byte.
        last.len -= 1;
        let status_at = GuestAddress(last.at + u64::from(last.len));
        output.retain(|segment| segment.len > 0);
        let command = Self::parse_command(memory, &mut input, &output)?;
        Ok(Self { head, command, input, output, status_at })
    }

    fn parse_command(
        memory: &Memory,
        input: &mut Vec<Segment>,
        output: &[Segment],
    ) -> Result<Result<Command, Status>, RingError> {
        let header = take_front(input, HEADER_BYTES);
        let mut raw = [0; HEADER_BYTES as usize];
        if total_len(&header) < HEADER_BYTES {
            return Ok(Err(Status::IoError));
        }
        read_segments(memory, &header, &mut raw)?;
        let [a, b, c, d, _, _, _, _, sector @ ..] = raw;
        let kind = u32::from_le_bytes([a, b, c, d]);
        let offset = u64::from_le_bytes(sector).checked_mul(SECTOR_BYTES);
        let (Some(offset), output_len) = (offset, total_len(output)) else {
            return Ok(Err(Status::IoError));
        };
        Ok(match kind {
            blk::VIRTIO_BLK_T_IN if output_len.is_multiple_of(SECTOR_BYTES) => {
                Ok(Command::Read { offset })
            }
            blk::VIRTIO_BLK_T_OUT if total_len(input).is_multiple_of(SECTOR_BYTES) => {
                Ok(Command::Write { offset })
            }
            blk::VIRTIO_BLK_T_FLUSH => Ok(Command::Flush),
            blk::VIRTIO_BLK_T_GET_ID => Ok(Command::Id),
            blk::VIRTIO_BLK_T_DISCARD => {
                parse_ranges(memory, input, MAX_DISCARD_SECTORS, 0)?.map(Command::Discard)
            }
            blk::VIRTIO_BLK_T_WRITE_ZEROES => {
                parse_ranges(memory, input, MAX_ZERO_SECTORS, UNMAP)?.map(Command::WriteZeroes)
            }
            blk::VIRTIO_BLK_T_IN | blk::VIRTIO_BLK_T_OUT => Err(Status::IoError),
            _ => Err(Status::Unsupported),
        })
    }
}

fn read_segments(memory: &Memory, segments: &[Segment], into: &mut [u8]) -> Result<(), RingError> {
    let mut done = 0;
    for segment in segments {
        let end = done + segment.len as usize;
        let part = into.get_mut(done..end).ok_or(RingError::Memory)?;
        memory.read_slice(part, GuestAddress(segment.at))?;
        done = end;
    }
    Ok(())
}

fn parse_ranges(
    memory: &Memory,
    input: &[Segment],
    max_sectors: u32,
    known_flags: u32,
) -> Result<Result<Vec<DiskRange>, Status>, RingError> {
    let len = total_len(input);
    if len == 0 || !len.is_multiple_of(RANGE_BYTES) || len > RANGE_BYTES * u64::from(MAX_RANGES) {
        return Ok(Err(Status::IoError));
    }
    let mut raw = vec![0; len as usize];
    read_segments(memory, input, &mut raw)?;
    let (chunks, _) = raw.as_chunks::<{ RANGE_BYTES as usize }>();
    let ranges = chunks.iter().map(|chunk| {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *chunk;
        let sector = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        let sectors = u32::from_le_bytes([i, j, k, l]);
        let flags = u32::from_le_bytes([m, n, o, p]);
        if flags & !known_flags != 0 {
            return Err(Status::Unsupported);
        }
        let offset = sector.checked_mul(SECTOR_BYTES).filter(|_| sectors <= max_sectors);
        let len = u64::from(sectors) * SECTOR_BYTES;
        Ok(DiskRange { offset: offset.ok_or(Status::IoError)?, len, unmap: flags & UNMAP != 0 })
    });
    Ok(ranges.collect())
}
