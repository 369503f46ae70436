//! Calls on ranges of files: `fallocate` in each of its modes, direct writes, and inode
//! flags.

use std::fs::{File as Open, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use anyhow::{Context, ensure};
use draconis_device::Random;
use rustix::fs::{FallocateFlags, IFlags, OFlags};
use rustix::io::Errno;

use super::{MAX_FILE_BYTES, StressClient, pick_nth};
use crate::faults::SharedState;

/// Alignment of offset, length and memory of direct writes.
const DIRECT_ALIGN_BYTES: usize = 4096;
/// Maximum length of a direct write, in units of [`DIRECT_ALIGN_BYTES`].
const MAX_DIRECT_UNITS: u64 = 8;

/// Mode of `fallocate`.
#[derive(Clone, Copy)]
enum FallocateMode {
    Extend,
    KeepSize,
    Punch,
    Zero,
    ZeroKeepSize,
}

impl FallocateMode {
    fn random_mode(random: &mut Random) -> Self {
        [Self::Extend, Self::KeepSize, Self::Punch, Self::Zero, Self::ZeroKeepSize]
            [random.next_below(5) as usize]
    }

    fn fallocate_flags(self) -> FallocateFlags {
        match self {
            Self::Extend => FallocateFlags::empty(),
            Self::KeepSize => FallocateFlags::KEEP_SIZE,
            Self::Punch => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            Self::Zero => FallocateFlags::ZERO_RANGE,
            Self::ZeroKeepSize => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        }
    }
}

impl StressClient {
    pub(super) fn fallocate_range(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let nth = self.random.next_u64();
        let how = FallocateMode::random_mode(&mut self.random);
        let at = self.random.next_below(MAX_FILE_BYTES - 70_000);
        let len = 1 + self.random.next_below(60_000);
        let Some((file, open)) = pick_nth(&self.held, nth) else { return Ok(()) };
        let done =
            shared.timed_call(|| rustix::fs::fallocate(open, how.fallocate_flags(), at, len));
        match done {
            // Block-mapped files cannot have blocks beyond the end.
            Err(Errno::OPNOTSUPP)
                if matches!(how, FallocateMode::KeepSize | FallocateMode::ZeroKeepSize) =>
            {
                return Ok(());
            }
            done => done.with_context(|| format!("fallocate {:?}", how.fallocate_flags()))?,
        }
        let bytes = &mut self.model.files[*file].bytes;
        let end = (at + len) as usize;
        if matches!(how, FallocateMode::Extend | FallocateMode::Zero) {
            bytes.resize(bytes.len().max(end), 0);
        }
        if !matches!(how, FallocateMode::Extend | FallocateMode::KeepSize) {
            let end = end.min(bytes.len());
            bytes[(at as usize).min(end)..end].fill(0);
        }
        Ok(())
    }

    /// Writes with O_DIRECT to a file that may be in the page cache.
    pub(super) fn write_direct(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let Some((name, file)) = self.pick_file() else { return Ok(()) };
        let path = self.path(&name);
        let mut how = OpenOptions::new();
        how.write(true).custom_flags(OFlags::DIRECT.bits() as i32);
        let open = match shared.timed_call(|| how.open(path)) {
            Err(_) if self.model.files[file].mode & 0o200 == 0 => return Ok(()),
            open => open.context("open for direct writes")?,
        };
        let units = (MAX_FILE_BYTES - 70_000) / DIRECT_ALIGN_BYTES as u64;
        let at = self.random.next_below(units) as usize * DIRECT_ALIGN_BYTES;
        let len = (1 + self.random.next_below(MAX_DIRECT_UNITS)) as usize * DIRECT_ALIGN_BYTES;
        let mut memory = vec![0; len + DIRECT_ALIGN_BYTES];
        let from = memory.as_ptr().align_offset(DIRECT_ALIGN_BYTES);
        let bytes = &mut memory[from..from + len];
        self.random.fill(bytes);
        shared.timed_call(|| open.write_all_at(bytes, at as u64)).context("direct write")?;
        let whole = &mut self.model.files[file].bytes;
        whole.resize(whole.len().max(at + len), 0);
        whole[at..at + len].copy_from_slice(bytes);
        Ok(())
    }

    /// Sets or clears an inode flag that has no other effect.
    pub(super) fn change_inode_flags(&mut self, shared: &SharedState) -> anyhow::Result<()> {
        let Some((name, _)) = self.pick_file() else { return Ok(()) };
        let open = match shared.timed_call(|| Open::open(self.path(&name))) {
            Err(_) if !rustix::process::geteuid().is_root() => return Ok(()),
            open => open.context("open")?,
        };
        let had = shared.timed_call(|| rustix::fs::ioctl_getflags(&open)).context("getflags")?;
        let wanted = had ^ IFlags::NODUMP;
        shared.timed_call(|| rustix::fs::ioctl_setflags(&open, wanted)).context("setflags")?;
        let has = shared.timed_call(|| rustix::fs::ioctl_getflags(&open)).context("getflags")?;
        ensure!(has == wanted, "{name} has the flags {has:?}, not {wanted:?}");
        Ok(())
    }
}
