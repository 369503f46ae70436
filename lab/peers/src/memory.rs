//! Reads of a buffer of which only a part is in memory.
//!
//! ```text
//!   --cgroup: this process joins a group that may have so much memory; what does not fit
//!             goes back to the file (or to swap) by itself
//!   --page-out-above: the part beyond is paged out before each pattern
//! ```

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;

use crate::mapping::MemoryMapping;
use draconis_device::Random;

/// What is read.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Size of the buffer in bytes.
    #[arg(long)]
    bytes: u64,
    /// File to map (default: anonymous memory, which goes to swap).
    #[arg(long)]
    file: Option<PathBuf>,
    /// Control group to join.
    #[arg(long)]
    cgroup: Option<PathBuf>,
    /// Page out everything beyond this offset.
    #[arg(long)]
    page_out_above: Option<u64>,
    /// Number of reads per pattern.
    #[arg(long)]
    reads: u64,
    /// Maximum duration of a pattern in milliseconds.
    #[arg(long)]
    most_ms: u64,
    /// Reads in sequence from one random place: as many as there are reads is the paper's
    /// sequentialReads, 1 its randomReads, anything else its randOffsetsAndSeqReads.
    #[arg(long, value_delimiter = ',')]
    runs: Vec<u64>,
    /// Random seed.
    #[arg(long)]
    seed: u64,
}

/// Result of one pattern.
#[derive(Debug, Serialize)]
pub struct PatternResult {
    /// Length of a sequential run.
    run: u64,
    /// Number of reads.
    reads: u64,
    /// Duration.
    ns: u64,
    /// Pages read from the device.
    major_faults: u64,
}

/// Runs all patterns.
///
/// # Errors
/// A system call fails.
pub fn run(arguments: &Arguments) -> anyhow::Result<Vec<PatternResult>> {
    crate::group::join_cgroup(arguments.cgroup.as_deref())?;
    let len = usize::try_from(arguments.bytes)?;
    let mapping = match &arguments.file {
        Some(path) => {
            let file = File::options().read(true).write(true).open(path)?;
            MemoryMapping::map_file(&file, len)?
        }
        None => MemoryMapping::map_anonymous(len)?,
    };
    touch_buffer(mapping, arguments)
}

/// Touches the whole buffer once, then runs the patterns.
fn touch_buffer(
    mut mapping: MemoryMapping,
    arguments: &Arguments,
) -> anyhow::Result<Vec<PatternResult>> {
    for at in (0..mapping.len()).step_by(4096) {
        if arguments.file.is_some() {
            std::hint::black_box(mapping.get(at));
        } else {
            mapping.set_byte(at, at as u8 | 1);
        }
    }
    let mut dice = Random::new(arguments.seed);
    let mut outcomes = vec![];
    for run in &arguments.runs {
        if let Some(above) = arguments.page_out_above {
            mapping.page_out(usize::try_from(above)?).context("paging out")?;
        }
        outcomes.push(run_pattern(&mapping, arguments, (*run).max(1), &mut dice));
    }
    Ok(outcomes)
}

fn run_pattern(
    mapping: &MemoryMapping,
    arguments: &Arguments,
    run: u64,
    dice: &mut Random,
) -> PatternResult {
    // The clock is read so rarely that its cost is negligible.
    const CLOCK_CHECK_INTERVAL: u64 = 256;
    let most = Duration::from_millis(arguments.most_ms);
    let len = mapping.len() as u64;
    let faults_before = count_major_faults();
    let started = Instant::now();
    let (mut reads, mut next_look, mut sum) = (0, CLOCK_CHECK_INTERVAL, 0u64);
    while reads < arguments.reads {
        let first = dice.next_below(len.saturating_sub(run).max(1));
        for at in first..first + run.min(arguments.reads - reads) {
            sum = sum.wrapping_add(u64::from(mapping.get(at as usize)));
        }
        reads += run.min(arguments.reads - reads);
        if reads >= next_look || run == 1 && reads % 16 == 0 {
            next_look = reads + CLOCK_CHECK_INTERVAL;
            if started.elapsed() > most {
                break;
            }
        }
    }
    let ns = started.elapsed().as_nanos() as u64;
    std::hint::black_box(sum);
    PatternResult { run, reads, ns, major_faults: count_major_faults() - faults_before }
}

/// Returns `majflt`, the 12th field of this process's `stat`.
fn count_major_faults() -> u64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name is in parentheses and may contain any character.
    let after = text.rsplit(") ").next().unwrap_or_default();
    after.split(' ').nth(9).and_then(|figure| figure.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_do_requested_number_of_reads() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        let arguments = Arguments {
            bytes: 1 << 20,
            file: Some(path),
            cgroup: None,
            page_out_above: None,
            reads: 1000,
            most_ms: 10_000,
            runs: vec![1, 100, 1000],
            seed: 1,
        };
        let outcomes = run(&arguments).unwrap();
        assert!(outcomes.iter().all(|outcome| outcome.reads == 1000));
        let outcomes = run(&Arguments { file: None, ..arguments }).unwrap();
        assert_eq!(outcomes.len(), 3);
    }
}
