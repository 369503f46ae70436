//! Root: the start of opening a bucket.
//!
//! It holds the first and the last sectors of the disk, where a store keeps its superblocks. For
//! each older epoch it has the number of live objects; later objects of a fenced writer are
//! ignored.
//!
//! ```text
//!   | magic | version | id | sectors of the disk | epochs: n × (epoch, end) | n × (sector, bytes) | sum |
//! ```

use std::collections::BTreeMap;

use bytes::Bytes;
use twox_hash::XxHash3_64;

use crate::SECTOR_BYTES;
use crate::name::SectorRun;

const MAGIC: &[u8; 8] = b"DracoBkt";
const VERSION: u32 = 1;
/// Sectors at each end that the root holds: two superblocks with pages of up to 4 KiB.
pub(crate) const EDGE_SECTORS: u64 = 16;
/// Longest root, in bytes.
const MAX_ROOT_BYTES: usize = 64 << 20;

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Root {
    /// Random id of the disk.
    pub id: u128,
    /// Length of the disk, in sectors.
    pub sectors: u64,
    /// Number of live objects of each older epoch.
    pub epoch_ends: BTreeMap<u32, u64>,
    /// Sectors at the ends of the disk; missing ones are zeros.
    pub edge_sectors: BTreeMap<u64, Bytes>,
}

impl Root {
    /// Returns true if the root holds a sector.
    pub fn has_sector(&self, sector: u64) -> bool {
        sector < EDGE_SECTORS || sector >= self.sectors.saturating_sub(EDGE_SECTORS)
    }

    /// Returns the part of a run that objects hold, and the number of sectors cut off before it.
    pub fn clip_to_objects(&self, run: SectorRun) -> Option<(u64, SectorRun)> {
        let first = run.sector.max(EDGE_SECTORS);
        let end = (run.sector + run.count).min(self.sectors.saturating_sub(EDGE_SECTORS));
        let count = end.checked_sub(first).filter(|count| *count > 0)?;
        Some((first - run.sector, SectorRun { sector: first, count }))
    }

    pub fn encode(&self) -> Bytes {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend(self.id.to_le_bytes());
        out.extend(self.sectors.to_le_bytes());
        out.extend((self.epoch_ends.len() as u64).to_le_bytes());
        for (epoch, end) in &self.epoch_ends {
            out.extend(epoch.to_le_bytes());
            out.extend(end.to_le_bytes());
        }
        out.extend((self.edge_sectors.len() as u64).to_le_bytes());
        for (sector, bytes) in &self.edge_sectors {
            out.extend(sector.to_le_bytes());
            out.extend(&bytes[..]);
        }
        out.extend(XxHash3_64::oneshot(&out).to_le_bytes());
        out.into()
    }

    /// Decodes a root; returns the reason if it is invalid.
    pub fn decode(bytes: &Bytes) -> Result<Self, &'static str> {
        let told = bytes
            .len()
            .checked_sub(8)
            .filter(|_| bytes.len() <= MAX_ROOT_BYTES)
            .ok_or("its length")?;
        let (told, sum) = (bytes.slice(..told), bytes.slice(told..));
        let mut reader = Reader(told.clone());
        if reader.take_bytes(8)?[..] != MAGIC[..] {
            return Err("not a root");
        }
        if XxHash3_64::oneshot(&told).to_le_bytes()[..] != sum[..] {
            return Err("its sum");
        }
        if reader.u32()? != VERSION {
            return Err("its version is not known here");
        }
        let (low, high) = (reader.u64()?, reader.u64()?);
        let id = u128::from(low) | u128::from(high) << 64;
        let mut root = Self { id, sectors: reader.u64()?, ..Self::default() };
        if !(EDGE_SECTORS * 2..1 << 48).contains(&root.sectors) {
            return Err("the length of the disk");
        }
        // Each counted item takes bytes: a wrong count ends with them.
        for _ in 0..reader.u64()? {
            let (epoch, end) = (reader.u32()?, reader.u64()?);
            root.epoch_ends.insert(epoch, end);
        }
        for _ in 0..reader.u64()? {
            let sector = reader.u64()?;
            let bytes = reader.take_bytes(SECTOR_BYTES as usize)?;
            if sector >= root.sectors || !root.has_sector(sector) {
                return Err("a sector that is not at an end");
            }
            root.edge_sectors.insert(sector, bytes);
        }
        if !reader.0.is_empty() {
            return Err("what is behind its end");
        }
        Ok(root)
    }
}

struct Reader(Bytes);

impl Reader {
    fn take_bytes(&mut self, len: usize) -> Result<Bytes, &'static str> {
        if self.0.len() < len {
            return Err("its length");
        }
        Ok(self.0.split_to(len))
    }

    fn u32(&mut self) -> Result<u32, &'static str> {
        let mut word = [0; 4];
        word.copy_from_slice(&self.take_bytes(4)?);
        Ok(u32::from_le_bytes(word))
    }

    fn u64(&mut self) -> Result<u64, &'static str> {
        let mut word = [0; 8];
        word.copy_from_slice(&self.take_bytes(8)?);
        Ok(u64::from_le_bytes(word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_round_trips_and_rejects_other_bytes() {
        let root = Root {
            id: 0x1234_5678_9abc_def0_1122_3344_5566_7788,
            sectors: 4096,
            epoch_ends: [(1, 7), (4, 0)].into(),
            edge_sectors: [
                (0, vec![7; SECTOR_BYTES as usize].into()),
                (4095, vec![9; SECTOR_BYTES as usize].into()),
            ]
            .into(),
        };
        let bytes = root.encode();
        assert_eq!(Root::decode(&bytes), Ok(root));
        for len in 0..bytes.len() {
            assert!(Root::decode(&bytes.slice(..len)).is_err(), "{len}");
        }
        for at in 0..bytes.len() {
            let mut other = bytes.to_vec();
            other[at] ^= 0x10;
            assert!(Root::decode(&other.into()).is_err(), "byte {at}");
        }
    }
}
