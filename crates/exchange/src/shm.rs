//! Memory that another process can write while we look at it.
//!
//! ```text
//!   memfd, sealed against shrinking and growing ── mapped read-write by both sides
//! ```
//!
//! Law 1: no reference to shared bytes ever exists: bytes are copied, words are atomics. But for
//! a part that one process alone writes, which that process sees as
//! [`PagePool`](crate::heap::PagePool).
//! Law 2: a descriptor that came from a peer is mapped only if its seals forbid that the
//! memory is cut away under us, and its size is the one agreed.
//!
//! Copies are made by machine instructions the compiler does not look into, so a peer
//! that writes meanwhile changes which bytes arrive and nothing else.

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

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A mapping of a sealed memfd.
#[derive(Debug)]
pub struct SharedMemory {
    start: NonNull<u8>,
    len: usize,
    memory: OwnedFd,
}

// SAFETY: the mapping belongs to the process, not to a thread; every access goes through
// atomics or through copies that tolerate concurrent writers.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// `len` zero bytes that can be given to another process.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(len: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
        let memory = fs::memfd_create("draconis-exchange", flags)?;
        fs::ftruncate(&memory, len as u64)?;
        fs::fcntl_add_seals(&memory, SEALS)?;
        Self::map(memory, len)
    }

    /// Maps what a peer sent, if it can be trusted to stay.
    ///
    /// # Errors
    /// [`Violation::Memory`]: not sealed, another size than `len`, or not to be mapped.
    pub fn map_peer(memory: OwnedFd, len: usize) -> Result<Self, Violation> {
        let seals =
            fs::fcntl_get_seals(&memory).map_err(|_| Violation::Memory("it is no memfd"))?;
        if !seals.contains(SEALS) {
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

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is shared.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The 32-bit word at `at`.
    ///
    /// # Panics
    /// When `at` is not a multiple of 4 within the memory: our own layout is wrong.
    pub fn atomic_u32(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at < self.len && self.len - at >= 4);
        // SAFETY: in bounds and aligned, checked above (the mapping starts on a page);
        // an atomic may be written by anyone at any time.
        unsafe { self.start.add(at).cast().as_ref() }
    }

    /// The 64-bit word at `at`.
    ///
    /// # Panics
    /// When `at` is not a multiple of 8 within the memory: our own layout is wrong.
    pub fn atomic_u64(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at < self.len && self.len - at >= 8);
        // SAFETY: as in `word`.
        unsafe { self.start.add(at).cast().as_ref() }
    }

    /// Copies `into.len()` bytes at `at` out of the shared memory.
    ///
    /// # Panics
    /// When they do not lie in it: the caller has checked against its own tables.
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
    /// Has pages there and mapped for writing, all with one system call: what is in them stays.
    /// Pages that are touched one by one cost some microseconds each in a virtual machine.
    ///
    /// # Errors
    /// What the system says; Linux before 5.14 does not have the call.
    ///
    /// # Panics
    /// When `part` is not in the memory, or does not begin with a page.
    pub fn populate(&self, part: Range<usize>) -> io::Result<()> {
        assert!(part.start <= part.end && part.end <= self.len);
        // SAFETY: the range lies in our mapping, checked above, and no byte of it is changed.
        unsafe {
            let start = self.start.add(part.start).as_ptr();
            mm::madvise(start.cast(), part.len(), mm::Advice::LinuxPopulateWrite)
        }
    }

    /// Where the memory begins in this process.
    pub(crate) fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    /// `len` bytes at `at`.
    ///
    /// # Panics
    /// As [`Shared::copy_out`].
    ///
    /// # Safety
    /// Nothing writes to them as long as the slice lives, in any process.
    pub(crate) unsafe fn slice(&self, at: usize, len: usize) -> &[u8] {
        assert!(at <= self.len && len <= self.len - at);
        // SAFETY: in bounds, initialised as all memory of a file is; the rest is promised.
        unsafe { std::slice::from_raw_parts(self.start.add(at).as_ptr(), len) }
    }

    /// `len` bytes at `at`, to be changed.
    ///
    /// # Panics
    /// As [`Shared::copy_out`].
    ///
    /// # Safety
    /// Nothing else in this process reads or writes them as long as the slice lives, and no other
    /// process writes them.
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
        // SAFETY: `map` made exactly this mapping, and no reference into it outlives self.
        let unmapped = unsafe { mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Copies where the other side may write at the same time.
///
/// Vectors, where the processor has them: of some processors `rep movsb` takes 25 times as long
/// when `to` lies a few bytes further behind the start of a page than `from` does.
///
/// # Safety
/// `len` bytes must be readable at `from` and writable at `to`, and not overlap.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn copy(mut from: *const u8, mut to: *mut u8, len: usize) {
    let mut left = len;
    // SAFETY: the caller's promise. To the compiler the instructions are foreign writes to `to`;
    // what they read may have been torn, and no value is derived from it here. The direction flag
    // is clear, as the ABI demands; the vector registers are given up as for a call, and the
    // processor was asked for them.
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

/// Copies where the other side may write at the same time.
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
    fn copies_of_every_length_and_place_are_whole_and_no_more() {
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
    fn memory_that_could_change_its_size_is_refused() {
        let adopt = |memory| SharedMemory::map_peer(memory, 4096).unwrap_err();
        for seals in [SealFlags::empty(), SealFlags::SHRINK, SEALS - SealFlags::SEAL] {
            assert_eq!(adopt(memfd(4096, seals)), Violation::Memory("it is not sealed"));
        }
        assert_eq!(adopt(memfd(2048, SEALS)), Violation::Memory("it has another size"));
        assert_eq!(adopt(memfd(8192, SEALS)), Violation::Memory("it has another size"));
        let pipe = rustix::pipe::pipe().unwrap().0;
        assert_eq!(adopt(pipe), Violation::Memory("it is no memfd"));
    }
}
