//! Creating files to read, and cold reads.

use std::sync::Arc;

use anyhow::bail;

use crate::buffer::AlignedBuffer;
use crate::context::RunContext;
use crate::subject::{CacheDropResult, OpenMode, Subject, SubjectFile, SubjectFiles};
use draconis_device::Random;

/// Size of one write when filling files, in bytes.
const WRITE_CHUNK_BYTES: usize = 1 << 20;

/// Creates a file of `bytes` of incompressible data, unless it exists from an earlier pass.
pub fn prepare_file(
    context: &RunContext,
    files: &Arc<dyn SubjectFiles>,
    name: &str,
    bytes: u64,
) -> anyhow::Result<()> {
    let mut probe = AlignedBuffer::new(4096);
    if let Ok(file) = files.open(name, OpenMode::Cached)
        && file.read(bytes - 4096, &mut probe).is_ok_and(|got| got == probe.len())
    {
        return Ok(());
    }
    let file = files.create(name, bytes, OpenMode::Cached)?;
    let mut piece = AlignedBuffer::new(WRITE_CHUNK_BYTES);
    let mut dice = Random::new(context.seed);
    let mut at = 0;
    while at < bytes {
        context.check_not_stopped()?;
        let len = (bytes - at).min(WRITE_CHUNK_BYTES as u64) as usize;
        dice.fill(&mut piece[..len]);
        file.write(at, &piece[..len])?;
        at += len as u64;
    }
    file.sync()
}

/// Check of a cold run: it is cold if the subject emptied its caches and the device read as many
/// bytes as the run did.
pub struct ColdCheck {
    emptied: CacheDropResult,
    before: Option<u64>,
}

impl ColdCheck {
    /// Empties the subject's caches.
    pub fn empty_caches(subject: &mut dyn Subject) -> anyhow::Result<Self> {
        let emptied = subject.empty_caches()?;
        Ok(Self { emptied, before: subject.device_read_bytes() })
    }

    /// Returns true if the data read since came from the device: 90 % suffices, because the end of
    /// a file may have been read with other data.
    pub fn was_cold(&self, subject: &dyn Subject, read_bytes: u64) -> bool {
        let reached = match (self.before, subject.device_read_bytes()) {
            (Some(before), Some(now)) => now.saturating_sub(before) * 10 >= read_bytes * 9,
            _ => false,
        };
        self.emptied != CacheDropResult::No && reached
    }
}

/// Reads exactly `into.len()` bytes.
pub fn read_all(file: &dyn SubjectFile, at: u64, into: &mut [u8]) -> anyhow::Result<()> {
    let got = file.read(at, into)?;
    if got != into.len() {
        bail!("read {got} bytes of {} at {at}", into.len());
    }
    Ok(())
}
