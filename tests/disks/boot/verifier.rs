//! A static program for guests: writes numbered blocks to FILE past the page cache and reads them
//! back, in four threads, for SECONDS. Each thread knows the newest write of each of its blocks.
//!
//! ```text
//!   a block: number of the block | number of its newest write | bytes that follow from both
//! ```
//!
//! Any error, and any block that is not as it was written last, ends it with status 1.

use std::fs::File;
use std::io::{Error, Result};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
/// Blocks of a thread.
const BLOCKS: usize = 1024;
const THREADS: usize = 4;
/// Maximum length of a write or read, in blocks.
const MAX_RUN: usize = 32;
const O_DIRECT: i32 = 0o40000;

fn next_random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Fills a block.
fn fill(block: &mut [u8], number: u64, version: u64) {
    let mut state = (number << 32 | version).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let (words, _) = block.as_chunks_mut::<8>();
    for (at, word) in words.iter_mut().enumerate() {
        *word = match at {
            0 => number.to_le_bytes(),
            1 => version.to_le_bytes(),
            _ => next_random(&mut state).to_le_bytes(),
        };
    }
}

/// Returns the part of `space` that is aligned for direct I/O.
fn aligned(space: &mut [u8]) -> &mut [u8] {
    let skip = space.as_ptr().align_offset(BLOCK);
    &mut space[skip..][..MAX_RUN * BLOCK]
}

#[derive(Default)]
struct Operations {
    writes: u64,
    reads: u64,
}

fn check(bytes: &[u8], first: usize, versions: &[u64]) -> Result<()> {
    let mut wanted = [0; BLOCK];
    for ((nth, block), version) in bytes.chunks(BLOCK).enumerate().zip(versions) {
        let number = (first + nth) as u64;
        fill(&mut wanted, number, *version);
        if block != wanted {
            let found = |at| u64::from_le_bytes(block[at..at + 8].try_into().unwrap());
            return Err(Error::other(format!(
                "block {number} should have write {version}; it has block {} write {}",
                found(0),
                found(8)
            )));
        }
    }
    Ok(())
}

fn run_thread(file: &File, thread: usize, until: Instant) -> Result<Operations> {
    let first = thread * BLOCKS;
    let mut space = vec![0; (MAX_RUN + 1) * BLOCK];
    let buffer = aligned(&mut space);
    let mut versions = vec![0u64; BLOCKS];
    let mut counts = Operations::default();
    let mut random = 0x1234_5678_9abc_def1 + thread as u64;
    let offset = |at: usize| ((first + at) * BLOCK) as u64;
    // All blocks are written first, then blocks at random.
    let mut start = (0..BLOCKS).step_by(MAX_RUN);
    loop {
        let chosen = start.next();
        if chosen.is_none() && Instant::now() >= until {
            break;
        }
        let count =
            chosen.map_or_else(|| 1 + next_random(&mut random) as usize % MAX_RUN, |_| MAX_RUN);
        let at = chosen.unwrap_or_else(|| next_random(&mut random) as usize % (BLOCKS - count));
        let bytes = &mut buffer[..count * BLOCK];
        match next_random(&mut random) % 16 {
            choice if choice < 9 || chosen.is_some() => {
                counts.writes += 1;
                for (nth, block) in bytes.chunks_mut(BLOCK).enumerate() {
                    fill(block, (first + at + nth) as u64, counts.writes);
                }
                file.write_all_at(bytes, offset(at))?;
                versions[at..at + count].fill(counts.writes);
            }
            9 => file.sync_data()?,
            _ => {
                counts.reads += 1;
                file.read_exact_at(bytes, offset(at))?;
                check(bytes, first + at, &versions[at..at + count])?;
            }
        }
    }
    file.sync_all()?;
    for at in (0..BLOCKS).step_by(MAX_RUN) {
        let bytes = &mut buffer[..MAX_RUN * BLOCK];
        file.read_exact_at(bytes, offset(at))?;
        check(bytes, first + at, &versions[at..at + MAX_RUN])?;
    }
    Ok(counts)
}

fn verify(path: &str, seconds: u64) -> Result<Operations> {
    let mut options = File::options();
    let file = options.read(true).write(true).create(true).truncate(false);
    let file = file.custom_flags(O_DIRECT).open(path)?;
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut all = Operations::default();
    std::thread::scope(|scope| {
        let run = |thread| {
            scope.spawn({
                let file = &file;
                move || run_thread(file, thread, until)
            })
        };
        let threads: Vec<_> = (0..THREADS).map(run).collect();
        for thread in threads {
            let counts = thread.join().map_err(|_| Error::other("a thread panicked"))??;
            all.writes += counts.writes;
            all.reads += counts.reads;
        }
        Ok(all)
    })
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let seconds = arguments[2].parse().expect("SECONDS");
    match verify(&arguments[1], seconds) {
        Ok(Operations { writes, reads }) => println!("VERIFIED {writes} writes, {reads} reads"),
        Err(error) => {
            println!("WRONG {error}");
            std::process::exit(1);
        }
    }
}
