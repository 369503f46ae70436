//! Stress tests on mounts: random changes next to a model, many threads, sudden deaths, and common
//! programs.
//!
//! A test is determined by its seed, which a failure prints (except for the scheduling of threads).
//! `DRACONIS_STORMS=n` runs `n` seeds of each test instead of one, and tests that take minutes;
//! `DRACONIS_SEED=s` starts at another seed.

mod bytes;
mod deaths;
mod names;
mod programs;

/// Returns the seeds to run.
fn test_seeds() -> impl Iterator<Item = u64> {
    let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let first = number("DRACONIS_SEED").unwrap_or(1);
    (first..first + number("DRACONIS_STORMS").unwrap_or(1)).inspect(|seed| eprintln!("seed {seed}"))
}

/// Returns true if tests that take minutes should run.
fn should_run_long_tests() -> bool {
    std::env::var_os("DRACONIS_STORMS").is_some()
}

/// Sets the times of all files below, to make them comparable.
///
/// With write-back caching, the kernel owns the times. It does not send a time that falls into the
/// same tick, of some milliseconds, as one that it has sent, so the volume keeps the time
/// of the write.
fn set_all_times(top: &std::path::Path) {
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000);
    for entry in std::fs::read_dir(top).unwrap() {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            set_all_times(&entry.path());
        } else if kind.is_file() {
            std::fs::File::open(entry.path()).unwrap().set_modified(time).unwrap();
        }
    }
}
