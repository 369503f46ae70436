//! Memory that another process may write at any time.
//!
//! ```text
//!   memfd, sealed against shrinking and growing ── mapped read-write by both sides
//! ```
//!
//! Law 1: no reference to shared bytes exists: bytes are copied, words are atomics. The exception
//! is a part that this process alone writes, as [`PagePool`](crate::heap::PagePool).
//! Law 2: a descriptor from a peer is mapped only if its seals forbid shrinking, and its size is as
//! agreed.
//!
//! Copies use machine instructions that the compiler treats as opaque. So a concurrent write by the
//! peer changes the copied bytes and nothing else.

use std::{
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64},
};

use rustix::{
    fs::{self, MemfdFlags, SealFlags},
    io,
    mm::{self, MapFlags, ProtFlags},
};

use crate::violation::Violation;

const REQUIRED_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A mapping of a sealed memfd.
#[derive(Debug)]
pub struct SharedMemory {
    start: NonNull<u8>,
    len: usize,
    memory: OwnedFd,
}

// SAFETY: the mapping belongs to the process, not to a thread; every access uses atomics or copies
// that tolerate concurrent writers.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates `len` zero bytes that can be shared with another process.
    ///
    /// # Errors
    /// Error of the system.
    pub fn new(len: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
        let memory = fs::memfd_create("draconis-exchange", flags)?;
        fs::ftruncate(&memory, len as u64)?;
        fs::fcntl_add_seals(&memory, REQUIRED_SEALS)?;
        Self::map(memory, len)
    }

    /// Maps a peer's memfd, if its seals guarantee its size.
    ///
    /// # Errors
    /// [`Violation::Memory`]: not sealed, not `len` bytes long, or not mappable.
    pub fn map_peer(memory: OwnedFd, len: usize) -> Result<Self, Violation> {
        let seals =
            fs::fcntl_get_seals(&memory).map_err(|_| Violation::Memory("it is no memfd"))?;
        if !seals.contains(REQUIRED_SEALS) {
            return Err(Violation::Memory("it is not sealed"));
        }
        let stat = fs::fstat(&memory).map_err(|_| Violation::Memory("it has no size"))?;
        if u64::try_from(stat.st_size) != Ok(len as u64) {
            return Err(Violation::Memory("it has another size"));
        }
        Self::map(memory, len).map_err(|_| Violation::Memory("it cannot be mapped"))
    }

    fn map(memory: OwnedFd, len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let start = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, &memory, 0)?
        };
        let start = NonNull::new(start.cast()).ok_or(io::Errno::NOMEM)?;
        Ok(Self { start, len, memory })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the 32-bit word at `at`.
    ///
    /// # Panics
    /// If `at` is not a multiple of 4 within the memory: our own layout is wrong.
    pub fn atomic_u32(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at < self.len && self.len - at >= 4);
        // SAFETY: in bounds and aligned, checked above (the mapping starts on a page); any process
        // may write an atomic at any time.
        unsafe { self.start.add(at).cast().as_ref() }
    }

    /// Returns the 64-bit word at `at`.
    ///
    /// # Panics
    /// If `at` is not a multiple of 8 within the memory: our own layout is wrong.
    pub fn atomic_u64(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at < self.len && self.len - at >= 8);
        // SAFETY: as in `atomic_u32`.
        unsafe { self.start.add(at).cast().as_ref() }
    }

    /// Copies `into.len()` bytes at `at` out of the shared memory.
    ///
    /// # Panics
    /// If the range is out of bounds: the caller has checked it against its own tables.
    pub fn copy_out(&self, at: usize, into: &mut [u8]) {
        assert!(at <= self.len && into.len() <= self.len - at);
        // SAFETY: both ranges are in bounds and distinct: `into` is private memory.
        unsafe { copy(self.start.add(at).as_ptr(), into.as_mut_ptr(), into.len()) }
    }

    /// Copies `from` into the shared memory at `at`.
    ///
    /// # Panics
    /// As [`SharedMemory::copy_out`].
    pub fn copy_in(&self, at: usize, from: &[u8]) {
        assert!(at <= self.len && from.len() <= self.len - at);
        // SAFETY: both ranges are in bounds and distinct: `from` is private memory.
        unsafe { copy(from.as_ptr(), self.start.add(at).as_ptr(), from.len()) }
    }
}

impl SharedMemory {
    /// Faults in pages and maps them for writing with one system call, keeping their contents.
    /// Touching pages one by one costs some microseconds each in a virtual machine.
    ///
    /// # Errors
    /// Error of the system; Linux before 5.14 does not have the call.
    ///
    /// # Panics
    /// If `part` is out of bounds, or does not begin with a page.
    pub fn populate(&self, part: Range<usize>) -> io::Result<()> {
        assert!(part.start <= part.end && part.end <= self.len);
        // SAFETY: the range lies in our mapping, checked above, and no byte of it is changed.
        unsafe {
            let start = self.start.add(part.start).as_ptr();
            mm::madvise(start.cast(), part.len(), mm::Advice::LinuxPopulateWrite)
        }
    }

    /// Returns the address of the memory in this process.
    pub(crate) fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    /// Returns `len` bytes at `at`.
    ///
    /// # Panics
    /// As [`SharedMemory::copy_out`].
    ///
    /// # Safety
    /// No process writes to them while the slice lives.
    pub(crate) unsafe fn slice(&self, at: usize, len: usize) -> &[u8] {
        assert!(at <= self.len && len <= self.len - at);
        // SAFETY: in bounds, initialised as all memory of a file is; the caller promised the rest.
        unsafe { std::slice::from_raw_parts(self.start.add(at).as_ptr(), len) }
    }

    /// Returns `len` mutable bytes at `at`.
    ///
    /// # Panics
    /// As [`SharedMemory::copy_out`].
    ///
    /// # Safety
    /// While the slice lives, nothing else in this process accesses them, and no other process
    /// writes them.
    #[allow(clippy::mut_from_ref, reason = "the caller has them alone")]
    pub(crate) unsafe fn slice_mut(&self, at: usize, len: usize) -> &mut [u8] {
        assert!(at <= self.len && len <= self.len - at);
        // SAFETY: as in `slice`.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at).as_ptr(), len) }
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: `map` created exactly this mapping, and no reference into it outlives self.
        let unmapped = unsafe { mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Copies while the other side may write.
///
/// Uses vector registers if available: on some processors `rep movsb` takes 25 times as long when
/// `to` is a few bytes further into its page than `from`.
///
/// # Safety
/// `len` bytes must be readable at `from` and writable at `to`, and not overlap.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn copy(mut from: *const u8, mut to: *mut u8, len: usize) {
    let mut left = len;
    // SAFETY: the caller's promise. To the compiler the instructions are foreign writes to `to`;
    // the bytes read may be torn, and no value is derived from them here. The direction flag is
    // clear, as the ABI demands; the vector registers are clobbered as for a call, and the
    // processor's support was checked.
    unsafe {
        if left >= 128 && std::arch::is_x86_feature_detected!("avx") {
            std::arch::asm!(
                "2:",
                "vmovups ymm0, [rsi]",
                "vmovups ymm1, [rsi + 32]",
                "vmovups ymm2, [rsi + 64]",
                "vmovups ymm3, [rsi + 96]",
                "vmovups [rdi], ymm0",
                "vmovups [rdi + 32], ymm1",
                "vmovups [rdi + 64], ymm2",
                "vmovups [rdi + 96], ymm3",
                "sub rsi, -128",
                "sub rdi, -128",
                "sub rcx, 128",
                "cmp rcx, 128",
                "jae 2b",
                "vzeroupper",
                inout("rsi") from,
                inout("rdi") to,
                inout("rcx") left,
                clobber_abi("sysv64"),
                options(nostack)
            );
        }
        std::arch::asm!(
            "rep movsb",
            inout("rcx") left => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Copies while the other side may write.
///
/// # Safety
/// `len` bytes must be readable at `from` and writable at `to`, and not overlap.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    for i in 0..len {
        // SAFETY: the caller's promise; volatile keeps the compiler from reading twice.
        unsafe { to.add(i).write_volatile(from.add(i).read_volatile()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = fs::memfd_create("test", flags).unwrap();
        fs::ftruncate(&memory, len).unwrap();
        fs::fcntl_add_seals(&memory, seals).unwrap();
        memory
    }

    #[test]
    fn both_mappings_see_the_same_bytes() {
        let ours = SharedMemory::new(8192).unwrap();
        let theirs =
            SharedMemory::map_peer(ours.as_fd().try_clone_to_owned().unwrap(), 8192).unwrap();
        ours.copy_in(4090, b"across a page");
        let mut bytes = [0; 13];
        theirs.copy_out(4090, &mut bytes);
        assert_eq!(&bytes, b"across a page");
    }

    #[test]
    fn copies_stay_in_bounds_at_every_length_and_offset() {
        let shared = SharedMemory::new(8192).unwrap();
        let bytes: Vec<u8> = (0..700).map(|at| (at % 251) as u8 + 1).collect();
        for len in (0..300).chain([511, 512, 513, 640, 699]) {
            for (at, skip) in [(0, 0), (1, 0), (4095, 3), (31, 64), (77, 13)] {
                shared.copy_in(at, &[0; 1000]);
                shared.copy_in(at + 16, &bytes[..len]);
                let mut into = vec![0xee; 2000];
                shared.copy_out(at + 16, &mut into[skip..skip + len]);
                assert!(into[skip..skip + len] == bytes[..len], "{len} {at} {skip}");
                let (before, behind) = (&into[..skip], &into[skip + len..]);
                assert!(before.iter().chain(behind).all(|byte| *byte == 0xee), "{len} {skip}");
                let mut beside = [9; 32];
                shared.copy_out(at, &mut beside[..16]);
                shared.copy_out(at + 16 + len, &mut beside[16..]);
                assert_eq!(beside, [0; 32], "{len} {at}");
            }
        }
    }

    #[test]
    fn memfd_without_seals_or_wrong_size_is_refused() {
        let adopt = |memory| SharedMemory::map_peer(memory, 4096).unwrap_err();
        for seals in [SealFlags::empty(), SealFlags::SHRINK, REQUIRED_SEALS - SealFlags::SEAL] {
            assert_eq!(adopt(memfd(4096, seals)), Violation::Memory("it is not sealed"));
        }
        assert_eq!(adopt(memfd(2048, REQUIRED_SEALS)), Violation::Memory("it has another size"));
        assert_eq!(adopt(memfd(8192, REQUIRED_SEALS)), Violation::Memory("it has another size"));
        let pipe = rustix::pipe::pipe().unwrap().0;
        assert_eq!(adopt(pipe), Violation::Memory("it is no memfd"));
    }
}
