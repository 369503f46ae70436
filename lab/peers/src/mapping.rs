//! Memory mappings whose pages may have to be read from a file or swap.
#![allow(unsafe_code)]

use std::fs::File;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// A mapping, unmapped on drop.
pub struct MemoryMapping {
    start: NonNull<u8>,
    len: usize,
}

impl MemoryMapping {
    /// Maps the first `len` bytes of a file. The file must not shrink meanwhile: it is an unnamed
    /// file created for this purpose.
    ///
    /// # Errors
    /// `mmap` fails.
    pub fn map_file(file: &File, len: usize) -> std::io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe { mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, file, 0)? };
        NonNull::new(start.cast())
            .map(|start| Self { start, len })
            .ok_or_else(|| std::io::ErrorKind::OutOfMemory.into())
    }

    /// Maps anonymous memory, whose pages go to swap.
    ///
    /// # Errors
    /// `mmap` fails.
    pub fn map_anonymous(len: usize) -> std::io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, MapFlags::PRIVATE)? };
        NonNull::new(start.cast())
            .map(|start| Self { start, len })
            .ok_or_else(|| std::io::ErrorKind::OutOfMemory.into())
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Reads the byte at an offset by a volatile access; 0 beyond the end.
    #[inline]
    pub fn get(&self, at: usize) -> u8 {
        if at >= self.len {
            return 0;
        }
        // SAFETY: inside the mapping, which lives as long as `self`.
        unsafe { self.start.as_ptr().add(at).read_volatile() }
    }

    /// Writes the byte at an offset; does nothing beyond the end.
    pub fn set_byte(&mut self, at: usize, byte: u8) {
        if at < self.len {
            // SAFETY: inside the mapping, which is borrowed mutably.
            unsafe { self.start.as_ptr().add(at).write_volatile(byte) };
        }
    }

    /// Pages out everything from offset `at` on.
    ///
    /// # Errors
    /// `madvise` fails, for example on old kernels.
    pub fn page_out(&self, at: usize) -> std::io::Result<()> {
        let at = at.next_multiple_of(4096);
        if at >= self.len {
            return Ok(());
        }
        // SAFETY: a part of the mapping; paged-out data is read back on access.
        let start = unsafe { self.start.as_ptr().add(at) };
        // SAFETY: as above.
        unsafe { madvise(start.cast(), self.len - at, Advice::LinuxPageOut)? };
        Ok(())
    }
}

impl Drop for MemoryMapping {
    fn drop(&mut self) {
        // SAFETY: no reference into the mapping exists.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_bytes_survive_page_out() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let mut mapping = MemoryMapping::map_file(&file, 1 << 20).unwrap();
        mapping.set_byte(5000, 7);
        mapping.set_byte(1 << 20, 9);
        file.sync_all().unwrap();
        let _ = mapping.page_out(0);
        assert_eq!((mapping.get(5000), mapping.get(1 << 20)), (7, 0));
        assert_eq!(MemoryMapping::map_anonymous(4096).unwrap().len(), 4096);
    }
}
