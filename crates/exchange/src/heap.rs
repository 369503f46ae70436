//! Blocks: buffers with one owner.

use std::fmt;

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Alignment of every private block, in bytes: what direct I/O asks of memory.
pub const ALIGN_BYTES: usize = 4096;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Clone)]
#[repr(C, align(4096))]
struct Page([u8; ALIGN_BYTES]);

/// Memory nobody else can reach: page-aligned, zeroed when made.
pub struct Private {
    pages: Vec<Page>,
    len: usize,
}

impl Private {
    /// `len` zero bytes.
    pub fn new(len: usize) -> Self {
        let pages = Page::new_vec_zeroed(len.div_ceil(ALIGN_BYTES));
        // An allocation this size failing is what `vec![0; len]` would abort on too.
        Self { pages: pages.unwrap_or_default(), len }
    }
}

impl std::ops::Deref for Private {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.pages.as_slice().as_bytes()[..self.len]
    }
}

impl std::ops::DerefMut for Private {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.pages.as_mut_slice().as_mut_bytes()[..self.len]
    }
}

impl fmt::Debug for Private {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Private({} bytes)", self.len)
    }
}

/// A buffer with one owner.
///
/// A block is either private memory or a slot of an arena that another process maps
/// too. Arena bytes may change under their reader, so there is no way to borrow them:
/// copy with [`Block::copy_out`], or turn the block into [`Private`] memory first.
#[derive(Debug)]
pub struct Block {
    memory: Private,
}

impl Block {
    /// A block of `len` zero bytes in private memory.
    pub fn private(len: usize) -> Self {
        Self { memory: Private::new(len) }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether the block holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies from the block at `at_bytes` into `into`; returns how many bytes there were.
    pub fn copy_out(&self, at_bytes: usize, into: &mut [u8]) -> usize {
        let from = self.memory.get(at_bytes..).unwrap_or_default();
        let n = from.len().min(into.len());
        into[..n].copy_from_slice(&from[..n]);
        n
    }

    /// Copies `from` into the block at `at_bytes`; returns how many bytes fitted.
    pub fn copy_in(&mut self, at_bytes: usize, from: &[u8]) -> usize {
        let into = self.memory.get_mut(at_bytes..).unwrap_or_default();
        let n = from.len().min(into.len());
        into[..n].copy_from_slice(&from[..n]);
        n
    }

    /// The bytes, if this block is private memory.
    pub fn bytes(&self) -> Option<&[u8]> {
        Some(&self.memory)
    }

    /// The bytes, if this block is private memory.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        Some(&mut self.memory)
    }

    /// Private memory with the block's contents: no copy if it was private,
    /// else one copy, and the block goes home.
    pub fn into_private(self) -> Private {
        self.memory
    }
}

impl From<Private> for Block {
    fn from(memory: Private) -> Self {
        Self { memory }
    }
}
