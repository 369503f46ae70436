//! The tables of a new VHDX image, after \[MS-VHDX\].
//!
//! ```text
//!   | file type | header 1 | header 2 | regions ×2 | log | metadata | blocks .. | BAT |
//! ```

use super::{FileWrite, UnitOffsets};
use crate::vhdx::{
    BAT_GUID, DISK_SIZE_GUID, FILE_PARAMETERS_GUID, KIB, METADATA_GUID, MIB, SECTOR_SIZE_GUID,
    guid, set_checksum,
};

/// Payload block size: the smallest, since unwritten blocks take no space.
pub(super) const BLOCK_BYTES: u64 = MIB;
pub(super) const FIRST_BLOCK_OFFSET: u64 = 3 * MIB;
pub(super) const MAX_DISK_BYTES: u64 = 4 << 40;

const LOG_OFFSET: u64 = MIB;
const METADATA_OFFSET: u64 = 2 * MIB;
const SECTOR_BYTES: u32 = 512;
/// Payload blocks between two bitmap entries, which an image without a parent leaves unused.
const BLOCKS_PER_CHUNK: u64 = ((SECTOR_BYTES as u64) << 23) / BLOCK_BYTES;
const PAYLOAD_BLOCK_FULLY_PRESENT: u64 = 6;
/// Flags of a metadata item: required, and a property of the virtual disk.
const METADATA_IS_REQUIRED: u32 = 4;
const METADATA_IS_VIRTUAL_DISK: u32 = 2;

const PAGE_83_DATA_GUID: [u8; 16] =
    guid(0xBECA_12AB, 0xB2E6, 0x4523, [0x93, 0xEF, 0xC3, 0x09, 0xE0, 0x00, 0xC7, 0x46]);
const PHYSICAL_SECTOR_SIZE_GUID: [u8; 16] =
    guid(0xCDA3_48C7, 0x445D, 0x4471, [0x9C, 0xC9, 0xE9, 0x88, 0x52, 0x51, 0xC5, 0x56]);

/// Returns the tables, the header, and the end of the file.
pub(super) fn build_tables(
    places: &UnitOffsets,
    len_bytes: u64,
    identity: [u8; 16],
) -> (Vec<FileWrite>, Vec<FileWrite>, u64) {
    let blocks = len_bytes.div_ceil(BLOCK_BYTES);
    let entries = blocks + blocks.saturating_sub(1) / BLOCKS_PER_CHUNK;
    let table_bytes = (entries * 8).next_multiple_of(MIB);
    let mut table = vec![0; table_bytes as usize];
    for (nth, place) in &places.units {
        let at = ((nth + nth / BLOCKS_PER_CHUNK) * 8) as usize;
        write_bytes_at(&mut table, at, &(place | PAYLOAD_BLOCK_FULLY_PRESENT).to_le_bytes());
    }
    let table_at = places.end;
    let pieces =
        vec![(table_at, table), (METADATA_OFFSET, build_metadata_region(len_bytes, identity))];

    let mut head = vec![0; MIB as usize];
    write_bytes_at(&mut head, 0, b"vhdxfile");
    let name: Vec<u8> = "draconis".encode_utf16().flat_map(u16::to_le_bytes).collect();
    write_bytes_at(&mut head, 8, &name);
    for (sequence, at) in [(1u64, 64 * KIB), (2, 128 * KIB)] {
        let mut header = vec![0; 4 * KIB as usize];
        write_bytes_at(&mut header, 0, b"head");
        write_bytes_at(&mut header, 8, &sequence.to_le_bytes());
        write_bytes_at(&mut header, 16, &identity);
        write_bytes_at(&mut header, 32, &identity);
        // Version of the log; no log is in use.
        write_bytes_at(&mut header, 66, &1u16.to_le_bytes());
        write_bytes_at(&mut header, 68, &(MIB as u32).to_le_bytes());
        write_bytes_at(&mut header, 72, &LOG_OFFSET.to_le_bytes());
        set_checksum(&mut header);
        write_bytes_at(&mut head, at as usize, &header);
    }
    let mut regions = vec![0; 64 * KIB as usize];
    write_bytes_at(&mut regions, 0, b"regi");
    write_bytes_at(&mut regions, 8, &2u32.to_le_bytes());
    for (nth, (id, at, len)) in
        [(BAT_GUID, table_at, table_bytes), (METADATA_GUID, METADATA_OFFSET, MIB)]
            .into_iter()
            .enumerate()
    {
        let entry = 16 + 32 * nth;
        write_bytes_at(&mut regions, entry, &id);
        write_bytes_at(&mut regions, entry + 16, &at.to_le_bytes());
        write_bytes_at(&mut regions, entry + 24, &(len as u32).to_le_bytes());
        write_bytes_at(&mut regions, entry + 28, &1u32.to_le_bytes());
    }
    set_checksum(&mut regions);
    write_bytes_at(&mut head, 192 * KIB as usize, &regions);
    write_bytes_at(&mut head, 256 * KIB as usize, &regions);
    (pieces, vec![(0, head)], table_at + table_bytes)
}

fn build_metadata_region(len_bytes: u64, identity: [u8; 16]) -> Vec<u8> {
    let parameters = [BLOCK_BYTES as u32, 0].into_iter().flat_map(u32::to_le_bytes).collect();
    let items: [([u8; 16], Vec<u8>, u32); 5] = [
        (FILE_PARAMETERS_GUID, parameters, METADATA_IS_REQUIRED),
        (
            DISK_SIZE_GUID,
            len_bytes.to_le_bytes().to_vec(),
            METADATA_IS_REQUIRED | METADATA_IS_VIRTUAL_DISK,
        ),
        (PAGE_83_DATA_GUID, identity.to_vec(), METADATA_IS_REQUIRED | METADATA_IS_VIRTUAL_DISK),
        (
            SECTOR_SIZE_GUID,
            SECTOR_BYTES.to_le_bytes().to_vec(),
            METADATA_IS_REQUIRED | METADATA_IS_VIRTUAL_DISK,
        ),
        (
            PHYSICAL_SECTOR_SIZE_GUID,
            4096u32.to_le_bytes().to_vec(),
            METADATA_IS_REQUIRED | METADATA_IS_VIRTUAL_DISK,
        ),
    ];
    let mut region = vec![0; MIB as usize];
    write_bytes_at(&mut region, 0, b"metadata");
    write_bytes_at(&mut region, 10, &(items.len() as u16).to_le_bytes());
    let mut at = 64 * KIB as usize;
    for (nth, (id, value, flags)) in items.into_iter().enumerate() {
        let entry = 32 + 32 * nth;
        write_bytes_at(&mut region, entry, &id);
        write_bytes_at(&mut region, entry + 16, &(at as u32).to_le_bytes());
        write_bytes_at(&mut region, entry + 20, &(value.len() as u32).to_le_bytes());
        write_bytes_at(&mut region, entry + 24, &flags.to_le_bytes());
        write_bytes_at(&mut region, at, &value);
        at += value.len();
    }
    region
}

fn write_bytes_at(bytes: &mut [u8], at: usize, what: &[u8]) {
    if let Some(room) = bytes.get_mut(at..).and_then(|rest| rest.get_mut(..what.len())) {
        room.copy_from_slice(what);
    }
}
