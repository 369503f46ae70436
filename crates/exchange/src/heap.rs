//! Blocks: buffers with one owner.
//!
//! A block is private memory, or a slot of an [`arena`](arena::Arena) that two processes
//! share: the exchange heap.

pub mod arena;
mod spare;

use std::alloc::{self, Layout};
use std::fmt;

use arena::Lent;

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Alignment of every private block, in bytes: what direct I/O asks of memory.
pub const ALIGN_BYTES: usize = 4096;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Clone)]
#[repr(C, align(4096))]
struct Page([u8; ALIGN_BYTES]);

/// Memory nobody else can reach: page-aligned.
pub struct Private {
    pages: Vec<Page>,
    len: usize,
}

impl Private {
    /// `len` zero bytes.
    pub fn new(len: usize) -> Self {
        match spare::take(len.div_ceil(ALIGN_BYTES)) {
            Some(mut pages) => {
                pages.as_mut_slice().as_mut_bytes().fill(0);
                Self { pages, len }
            }
            None => Self::zeroed(len),
        }
    }

    /// `len` bytes that hold whatever was there before: for who overwrites all of them.
    pub fn unset(len: usize) -> Self {
        match spare::take(len.div_ceil(ALIGN_BYTES)) {
            Some(pages) => Self { pages, len },
            None => Self::zeroed(len),
        }
    }

    /// Makes it `len` bytes long, if it is longer. Its memory stays as large, and serves the
    /// next block of that size.
    pub fn shorten(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    fn zeroed(len: usize) -> Self {
        let count = len.div_ceil(ALIGN_BYTES);
        match Page::new_vec_zeroed(count) {
            Ok(pages) => Self { pages, len },
            // As `vec![0; len]` ends when there is no memory.
            Err(_) => alloc::handle_alloc_error(
                Layout::array::<Page>(count).unwrap_or(Layout::new::<Page>()),
            ),
        }
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        spare::put(std::mem::take(&mut self.pages));
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
pub struct Block(Memory);

#[derive(Debug)]
enum Memory {
    Private(Private),
    Lent(Lent),
}

impl Block {
    /// A block of `len` zero bytes in private memory.
    pub fn private(len: usize) -> Self {
        Self(Memory::Private(Private::new(len)))
    }

    /// The block, and an empty one in its place: for a server that passes on what it is lent.
    #[must_use]
    pub fn take(&mut self) -> Self {
        std::mem::replace(self, Self::private(0))
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        match &self.0 {
            Memory::Private(memory) => memory.len(),
            Memory::Lent(slot) => slot.len(),
        }
    }

    /// Whether the block holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies from the block at `at_bytes` into `into`; returns how many bytes there were.
    pub fn copy_out(&self, at_bytes: usize, into: &mut [u8]) -> usize {
        let n = self.len().saturating_sub(at_bytes).min(into.len());
        match &self.0 {
            Memory::Private(memory) if n > 0 => {
                into[..n].copy_from_slice(&memory[at_bytes..at_bytes + n]);
            }
            Memory::Lent(slot) if n > 0 => slot.copy_out(at_bytes, &mut into[..n]),
            _ => {}
        }
        n
    }

    /// Copies `from` into the block at `at_bytes`; returns how many bytes fitted.
    pub fn copy_in(&mut self, at_bytes: usize, from: &[u8]) -> usize {
        let n = self.len().saturating_sub(at_bytes).min(from.len());
        match &mut self.0 {
            Memory::Private(memory) if n > 0 => {
                memory[at_bytes..at_bytes + n].copy_from_slice(&from[..n]);
            }
            Memory::Lent(slot) if n > 0 => slot.copy_in(at_bytes, &from[..n]),
            _ => {}
        }
        n
    }

    /// The bytes, if this block is private memory.
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.0 {
            Memory::Private(memory) => Some(memory),
            Memory::Lent(_) => None,
        }
    }

    /// The bytes, if this block is private memory.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        match &mut self.0 {
            Memory::Private(memory) => Some(memory),
            Memory::Lent(_) => None,
        }
    }

    /// Private memory with the block's contents: no copy if it was private,
    /// else one copy, and the block goes home.
    pub fn into_private(self) -> Private {
        match self.0 {
            Memory::Private(memory) => memory,
            Memory::Lent(slot) => {
                let mut memory = Private::unset(slot.len());
                slot.copy_out(0, &mut memory);
                memory
            }
        }
    }

    /// The slot behind the block, or the block itself.
    pub(crate) fn into_lent(self) -> Result<Lent, Self> {
        match self.0 {
            Memory::Lent(slot) => Ok(slot),
            Memory::Private(_) => Err(self),
        }
    }
}

impl From<Private> for Block {
    fn from(memory: Private) -> Self {
        Self(Memory::Private(memory))
    }
}

impl From<Lent> for Block {
    fn from(slot: Lent) -> Self {
        Self(Memory::Lent(slot))
    }
}
