//! `writeAndFsync`, the base of all file system experiments of the paper.

use std::sync::Arc;

use crate::buffer::Buffer;
use crate::clock::Stopwatch;
use crate::context::Context;
use crate::subject::{Files, OpenMode, Subject};

/// Returns the number of writes per fsync for the paper's percentage: 100 means only at the end,
/// the minimum after each write.
pub fn interval(percent: f64, writes: u64) -> u64 {
    ((percent * writes as f64 / 100.0).round() as u64).clamp(1, writes.max(1))
}

/// Writes a new file sequentially with an fsync at intervals, and removes it. Returns the time
/// without the final fsync: a good workload waits for nothing.
pub fn write_and_fsync(
    context: &Context,
    subject: &dyn Subject,
    write_bytes: u64,
    writes: u64,
    percent: f64,
) -> anyhow::Result<u64> {
    let clock = subject.clock();
    let files: Arc<dyn Files> = subject.files()?;
    let file = files.create("write-and-fsync", write_bytes * writes, OpenMode::Cached)?;
    file.sync()?;
    let mut bytes = Buffer::new(write_bytes as usize);
    context.rng().fill(&mut bytes);
    let interval = interval(percent, writes);
    let mut watch = Stopwatch::start(&*clock);
    for nth in 0..writes {
        context.check()?;
        file.write(nth * write_bytes, &bytes)?;
        if (nth + 1) % interval == 0 && interval < writes {
            file.sync()?;
        }
    }
    let total = watch.lap_ns();
    file.sync()?;
    drop(file);
    files.remove("write-and-fsync")?;
    Ok(total.max(1))
}

#[cfg(test)]
mod tests {
    #[test]
    fn percentages_are_intervals() {
        assert_eq!(super::interval(100.0, 500), 500);
        assert_eq!(super::interval(10.0, 500), 50);
        assert_eq!(super::interval(0.1, 500), 1);
        assert_eq!(super::interval(1.0, 1000), 10);
    }
}
