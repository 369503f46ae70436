//! An image file: read by bytes, over a disk with whole sectors.

use std::sync::Arc;

use draconis_device::{Disk, Extent};
use draconis_types::Block;

use crate::Error;

/// Byte-granular access to a disk.
#[derive(Clone)]
pub(crate) struct ImageFile {
    disk: Arc<dyn Disk>,
    len_bytes: u64,
    /// Length up to which it can be read.
    max_len_bytes: u64,
    /// True if it reads as zeros past its end.
    has_zero_tail: bool,
    sector_bytes: u64,
}

impl ImageFile {
    pub(crate) fn new(disk: Arc<dyn Disk>) -> Self {
        let properties = disk.properties();
        let sector_bytes = u64::from(properties.sector_bytes).max(1);
        let len_bytes = properties.len_bytes;
        Self { disk, len_bytes, max_len_bytes: len_bytes, has_zero_tail: false, sector_bytes }
    }

    /// Makes the file read as zeros past its end if it was not closed cleanly: its tables may
    /// already refer there.
    pub(crate) fn zero_tail_if_unclean(mut self, is_unclean: bool) -> Self {
        self.has_zero_tail = is_unclean;
        self
    }

    /// Allows reads up to the length to which the file may grow.
    pub(crate) fn with_growth(mut self) -> Self {
        self.max_len_bytes = self.disk.max_len_bytes().max(self.len_bytes);
        self
    }

    pub(crate) fn max_len_bytes(&self) -> u64 {
        self.max_len_bytes
    }

    pub(crate) fn sector_bytes(&self) -> u64 {
        self.sector_bytes
    }

    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Fills `into` from offset `at`.
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Error> {
        if self.has_zero_tail {
            let there = self.max_len_bytes.saturating_sub(at).min(into.len() as u64) as usize;
            let (there, behind) = into.split_at_mut(there);
            behind.fill(0);
            return self.read_within_file(at, there);
        }
        self.read_within_file(at, into)
    }

    fn read_within_file(&self, at: u64, into: &mut [u8]) -> Result<(), Error> {
        if into.is_empty() {
            return Ok(());
        }
        let len = into.len() as u64;
        let end = at.checked_add(len).filter(|end| *end <= self.max_len_bytes);
        let end = end.ok_or(Error::Damaged("what it refers to lies behind its end"))?;
        let start = at - at % self.sector_bytes;
        let end = end.next_multiple_of(self.sector_bytes).min(self.max_len_bytes);
        let extent = Extent::new(start, end - start);
        let block = Block::private((end - start) as usize);
        let read = self.disk.read_now(extent, block).map_err(|refused| refused.error)?;
        read.copy_out((at - start) as usize, into);
        Ok(())
    }

    /// Returns `len` bytes from offset `at`; the caller has bounded `len`.
    pub(crate) fn read_vec(&self, at: u64, len: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; len];
        self.read(at, &mut bytes)?;
        Ok(bytes)
    }
}

/// Reads a number in a structure that was read whole; bytes past its end are zero.
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    be_number(bytes, at, 4) as u32
}

pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    be_number(bytes, at, 8)
}

pub(crate) fn le16(bytes: &[u8], at: usize) -> u16 {
    (be_number(bytes, at, 2) as u16).swap_bytes()
}

pub(crate) fn le32(bytes: &[u8], at: usize) -> u32 {
    be32(bytes, at).swap_bytes()
}

pub(crate) fn le64(bytes: &[u8], at: usize) -> u64 {
    be64(bytes, at).swap_bytes()
}

fn be_number(bytes: &[u8], at: usize, len: usize) -> u64 {
    let field = bytes.get(at..at.saturating_add(len)).unwrap_or_default();
    field.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
