//! `writeAndFsync`, the base of all file system experiments of the paper.

use std::sync::Arc;

use crate::buffer::AlignedBuffer;
use crate::clock::Stopwatch;
use crate::context::RunContext;
use crate::subject::{OpenMode, Subject, SubjectFiles};

/// Returns the number of writes per fsync for the paper's percentage: 100 means only at the end,
/// the minimum after each write.
pub fn writes_per_fsync(percent: f64, writes: u64) -> u64 {
    ((percent * writes as f64 / 100.0).round() as u64).clamp(1, writes.max(1))
}

/// Writes a new file sequentially with an fsync at intervals, and removes it. Returns the time
/// without the final fsync: a good workload waits for nothing.
pub fn write_and_fsync(
    context: &RunContext,
    subject: &dyn Subject,
    write_bytes: u64,
    writes: u64,
    percent: f64,
) -> anyhow::Result<u64> {
    let clock = subject.clock();
    let files: Arc<dyn SubjectFiles> = subject.files()?;
    let file = files.create("write-and-fsync", write_bytes * writes, OpenMode::Cached)?;
    file.sync()?;
    let mut bytes = AlignedBuffer::new(write_bytes as usize);
    context.new_rng().fill(&mut bytes);
    let interval = writes_per_fsync(percent, writes);
    let mut watch = Stopwatch::start(&*clock);
    for nth in 0..writes {
        context.check_not_stopped()?;
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
    fn fsync_percentage_converts_to_interval() {
        assert_eq!(super::writes_per_fsync(100.0, 500), 500);
        assert_eq!(super::writes_per_fsync(10.0, 500), 50);
        assert_eq!(super::writes_per_fsync(0.1, 500), 1);
        assert_eq!(super::writes_per_fsync(1.0, 1000), 10);
    }
}
