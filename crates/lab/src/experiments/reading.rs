//! Creating files to read, and cold reads.

use std::sync::Arc;

use anyhow::bail;

use crate::buffer::Buffer;
use crate::context::Context;
use crate::subject::{Cold, Files, Handle, OpenMode, Subject};
use draconis_device::Random;

/// Size of one write when filling files, in bytes.
const PIECE_BYTES: usize = 1 << 20;

/// Creates a file of `bytes` of incompressible data, unless it exists from an earlier pass.
pub fn prepare(
    context: &Context,
    files: &Arc<dyn Files>,
    name: &str,
    bytes: u64,
) -> anyhow::Result<()> {
    let mut probe = Buffer::new(4096);
    if let Ok(file) = files.open(name, OpenMode::Cached)
        && file.read(bytes - 4096, &mut probe).is_ok_and(|got| got == probe.len())
    {
        return Ok(());
    }
    let file = files.create(name, bytes, OpenMode::Cached)?;
    let mut piece = Buffer::new(PIECE_BYTES);
    let mut dice = Random::new(context.seed);
    let mut at = 0;
    while at < bytes {
        context.check()?;
        let len = (bytes - at).min(PIECE_BYTES as u64) as usize;
        dice.fill(&mut piece[..len]);
        file.write(at, &piece[..len])?;
        at += len as u64;
    }
    file.sync()
}

/// Check of a cold run: it is cold if the subject emptied its caches and the device read as many
/// bytes as the run did.
pub struct ColdCheck {
    emptied: Cold,
    before: Option<u64>,
}

impl ColdCheck {
    /// Empties the subject's caches.
    pub fn down(subject: &mut dyn Subject) -> anyhow::Result<Self> {
        let emptied = subject.cold()?;
        Ok(Self { emptied, before: subject.device_read_bytes() })
    }

    /// Returns true if the data read since came from the device: 90 % suffices, because the end of
    /// a file may have been read with other data.
    pub fn was_cold(&self, subject: &dyn Subject, read_bytes: u64) -> bool {
        let reached = match (self.before, subject.device_read_bytes()) {
            (Some(before), Some(now)) => now.saturating_sub(before) * 10 >= read_bytes * 9,
            _ => false,
        };
        self.emptied != Cold::No && reached
    }
}

/// Reads exactly `into.len()` bytes.
pub fn read_all(file: &dyn Handle, at: u64, into: &mut [u8]) -> anyhow::Result<()> {
    let got = file.read(at, into)?;
    if got != into.len() {
        bail!("read {got} bytes of {} at {at}", into.len());
    }
    Ok(())
}
