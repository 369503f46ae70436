//! MMP block: detects that another host uses the volume (`mmp`,
//! `Documentation/filesystems/ext4/mmp.rst`).

use super::checksum::Checksum;
use super::{le16, le32, put16, put32};
use crate::{Error, Result};

/// Bytes of the MMP structure; the rest of its block is unused.
pub const LEN_BYTES: usize = 1024;

const MAGIC: u32 = 0x004D_4D50;
const SEQUENCE_AT: usize = 4;
const TIME_AT: usize = 8;
const NODE_AT: usize = 16;
const NODE_BYTES: usize = 64;
const DEVICE_AT: usize = 80;
const DEVICE_BYTES: usize = 32;
const INTERVAL_AT: usize = 112;
const SUM_AT: usize = 1020;

/// Minimum seconds to wait for the next update of another host.
pub const MIN_CHECK_INTERVAL: u16 = 5;

/// Largest sequence number of a mounted volume.
pub const SEQ_MAX: u32 = 0xE24D_4D4F;
/// Sequence number of an unused volume.
pub const SEQ_CLEAN: u32 = 0xFF4D_4D50;
/// Sequence number while a tool such as e2fsck works on the volume.
pub const SEQ_FSCK: u32 = 0xE24D_4D50;

/// Contents of the MMP block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MmpRecord {
    /// Sequence number, changed by each update.
    pub sequence: u32,
    /// Interval of updates in seconds.
    pub interval_seconds: u16,
    /// Name of the host.
    pub node: String,
    /// Name that the host has for the device.
    pub device: String,
}

/// Parses an MMP block.
///
/// # Errors
/// [`Error::Corrupt`] if the magic number or the checksum is wrong.
pub fn read(bytes: &[u8], seed: Option<Checksum>) -> Result<MmpRecord> {
    let corrupt = Error::corrupt("the block that guards against mounting twice");
    let whole = bytes.get(..LEN_BYTES).ok_or(corrupt.clone())?;
    let sum = seed.and_then(|seed| Some(seed.update(whole.get(..SUM_AT)?).value()));
    if le32(whole, 0) != Some(MAGIC) || sum.is_some() && le32(whole, SUM_AT) != sum {
        return Err(corrupt);
    }
    let text = |at: usize, len: usize| {
        let field = whole.get(at..).and_then(|rest| rest.get(..len)).unwrap_or_default();
        let text = field.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).escape_default().to_string()
    };
    Ok(MmpRecord {
        sequence: le32(whole, SEQUENCE_AT).unwrap_or(SEQ_FSCK),
        interval_seconds: le16(whole, INTERVAL_AT).unwrap_or(0),
        node: text(NODE_AT, NODE_BYTES),
        device: text(DEVICE_AT, DEVICE_BYTES),
    })
}

/// Writes an MMP block with the time `seconds`.
pub fn write(bytes: &mut [u8], record: &MmpRecord, seconds: u64, seed: Option<Checksum>) {
    let Some(whole) = bytes.get_mut(..LEN_BYTES) else { return };
    put32(whole, 0, MAGIC);
    put32(whole, SEQUENCE_AT, record.sequence);
    put16(whole, INTERVAL_AT, record.interval_seconds);
    if let Some(field) = whole.get_mut(TIME_AT..NODE_AT) {
        field.copy_from_slice(&seconds.to_le_bytes());
    }
    for (text, at, len) in
        [(&record.node, NODE_AT, NODE_BYTES), (&record.device, DEVICE_AT, DEVICE_BYTES)]
    {
        let field = whole.get_mut(at..).and_then(|rest| rest.get_mut(..len)).unwrap_or_default();
        let text = text.bytes().chain(std::iter::repeat(0));
        field.iter_mut().zip(text).for_each(|(to, from)| *to = from);
    }
    if let Some(sum) = seed.and_then(|seed| Some(seed.update(whole.get(..SUM_AT)?).value())) {
        put32(whole, SUM_AT, sum);
    }
}
