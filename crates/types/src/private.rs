//! Private memory of a block: whole pages, aligned for direct I/O.

use std::alloc::{self, Layout};
use std::fmt;

use zerocopy::{FromZeros, IntoBytes};

use crate::buffer_cache;
use crate::page::{ALIGN_BYTES, Page};

/// Page-aligned memory of this process alone.
pub struct PrivateBuffer {
    pages: Vec<Page>,
    len: usize,
}

impl PrivateBuffer {
    /// Creates a buffer of `len` zero bytes.
    pub fn new(len: usize) -> Self {
        match buffer_cache::take_pages(len.div_ceil(ALIGN_BYTES)) {
            Some(mut pages) => {
                pages.as_mut_slice().as_mut_bytes().fill(0);
                Self { pages, len }
            }
            None => Self::zeroed(len),
        }
    }

    /// Creates a buffer of `len` bytes with undefined contents: for callers that overwrite all of
    /// them.
    pub fn new_uninitialized(len: usize) -> Self {
        match buffer_cache::take_pages(len.div_ceil(ALIGN_BYTES)) {
            Some(pages) => Self { pages, len },
            None => Self::zeroed(len),
        }
    }

    /// Shortens the buffer to `len` bytes. Its memory keeps its size, and serves a later block of
    /// that size.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    fn zeroed(len: usize) -> Self {
        let count = len.div_ceil(ALIGN_BYTES);
        match Page::new_vec_zeroed(count) {
            Ok(pages) => Self { pages, len },
            // Out of memory ends as in `vec![0; len]`.
            Err(_) => alloc::handle_alloc_error(
                Layout::array::<Page>(count).unwrap_or(Layout::new::<Page>()),
            ),
        }
    }
}

impl Drop for PrivateBuffer {
    fn drop(&mut self) {
        buffer_cache::put_pages(std::mem::take(&mut self.pages));
    }
}

impl std::ops::Deref for PrivateBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.pages.as_slice().as_bytes()[..self.len]
    }
}

impl std::ops::DerefMut for PrivateBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.pages.as_mut_slice().as_mut_bytes()[..self.len]
    }
}

impl AsRef<[u8]> for PrivateBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for PrivateBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Private({} bytes)", self.len)
    }
}
