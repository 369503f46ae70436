//! Buffers for direct I/O.

use std::ops::{Deref, DerefMut};

/// Alignment that satisfies every device, in bytes.
const ALIGN_BYTES: usize = 4096;

/// A page-aligned buffer.
pub struct AlignedBuffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    /// Creates a buffer of `len` zeros.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + ALIGN_BYTES];
        let start = bytes.as_ptr().align_offset(ALIGN_BYTES);
        Self { bytes, start, len }
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_is_page_aligned() {
        for len in [0, 1, 512, 5000] {
            let buffer = AlignedBuffer::new(len);
            assert_eq!(buffer.as_ptr() as usize % ALIGN_BYTES, 0);
            assert_eq!(buffer.len(), len);
        }
    }
}
