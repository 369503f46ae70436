//! Calls on ranges of files: `fallocate` in each of its modes, direct writes, and inode
//! flags.

use std::fs::{File as Open, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use anyhow::{Context, ensure};
use draconis_device::Random;
use rustix::fs::{FallocateFlags, IFlags, OFlags};
use rustix::io::Errno;

use super::{Client, FILE_BYTES, pick};
use crate::kill_test::Shared;

/// Alignment of offset, length and memory of direct writes.
const DIRECT_BYTES: usize = 4096;
/// Maximum length of a direct write, in units of [`DIRECT_BYTES`].
const DIRECT_UNITS: u64 = 8;

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
    fn any(random: &mut Random) -> Self {
        [Self::Extend, Self::KeepSize, Self::Punch, Self::Zero, Self::ZeroKeepSize]
            [random.below(5) as usize]
    }

    fn flags(self) -> FallocateFlags {
        match self {
            Self::Extend => FallocateFlags::empty(),
            Self::KeepSize => FallocateFlags::KEEP_SIZE,
            Self::Punch => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            Self::Zero => FallocateFlags::ZERO_RANGE,
            Self::ZeroKeepSize => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        }
    }
}

impl Client {
    pub(super) fn reserve(&mut self, shared: &Shared) -> anyhow::Result<()> {
        let nth = self.random.next_u64();
        let how = FallocateMode::any(&mut self.random);
        let at = self.random.below(FILE_BYTES - 70_000);
        let len = 1 + self.random.below(60_000);
        let Some((file, open)) = pick(&self.held, nth) else { return Ok(()) };
        let done = shared.call(|| rustix::fs::fallocate(open, how.flags(), at, len));
        match done {
            // Block-mapped files cannot have blocks beyond the end.
            Err(Errno::OPNOTSUPP)
                if matches!(how, FallocateMode::KeepSize | FallocateMode::ZeroKeepSize) =>
            {
                return Ok(());
            }
            done => done.with_context(|| format!("fallocate {:?}", how.flags()))?,
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
    pub(super) fn write_direct(&mut self, shared: &Shared) -> anyhow::Result<()> {
        let Some((name, file)) = self.file() else { return Ok(()) };
        let path = self.path(&name);
        let mut how = OpenOptions::new();
        how.write(true).custom_flags(OFlags::DIRECT.bits() as i32);
        let open = match shared.call(|| how.open(path)) {
            Err(_) if self.model.files[file].mode & 0o200 == 0 => return Ok(()),
            open => open.context("open for direct writes")?,
        };
        let units = (FILE_BYTES - 70_000) / DIRECT_BYTES as u64;
        let at = self.random.below(units) as usize * DIRECT_BYTES;
        let len = (1 + self.random.below(DIRECT_UNITS)) as usize * DIRECT_BYTES;
        let mut memory = vec![0; len + DIRECT_BYTES];
        let from = memory.as_ptr().align_offset(DIRECT_BYTES);
        let bytes = &mut memory[from..from + len];
        self.random.fill(bytes);
        shared.call(|| open.write_all_at(bytes, at as u64)).context("direct write")?;
        let whole = &mut self.model.files[file].bytes;
        whole.resize(whole.len().max(at + len), 0);
        whole[at..at + len].copy_from_slice(bytes);
        Ok(())
    }

    /// Sets or clears an inode flag that has no other effect.
    pub(super) fn flags(&mut self, shared: &Shared) -> anyhow::Result<()> {
        let Some((name, _)) = self.file() else { return Ok(()) };
        let open = match shared.call(|| Open::open(self.path(&name))) {
            Err(_) if !rustix::process::geteuid().is_root() => return Ok(()),
            open => open.context("open")?,
        };
        let had = shared.call(|| rustix::fs::ioctl_getflags(&open)).context("getflags")?;
        let wanted = had ^ IFlags::NODUMP;
        shared.call(|| rustix::fs::ioctl_setflags(&open, wanted)).context("setflags")?;
        let has = shared.call(|| rustix::fs::ioctl_getflags(&open)).context("getflags")?;
        ensure!(has == wanted, "{name} has the flags {has:?}, not {wanted:?}");
        Ok(())
    }
}
