//! Storms on mounts: random changes beside a model, many threads at once, sudden deaths, and
//! the programs people use.
//!
//! A storm follows from its seed, which a failure prints (threads aside, whose turns the
//! machine chooses). `DRACONIS_STORMS=n` runs `n` seeds of each instead of one, and what takes
//! minutes; `DRACONIS_SEED=s` starts at another seed.

#[path = "../common/mod.rs"]
mod common;

mod bytes;
mod deaths;
mod names;
mod programs;

/// The seeds to run.
fn seeds() -> impl Iterator<Item = u64> {
    let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let first = number("DRACONIS_SEED").unwrap_or(1);
    (first..first + number("DRACONIS_STORMS").unwrap_or(1)).inspect(|seed| eprintln!("seed {seed}"))
}

/// Whether there is time for what takes minutes.
fn long() -> bool {
    std::env::var_os("DRACONIS_STORMS").is_some()
}

/// Sets the times of all files below, for the sake of comparing them.
///
/// A kernel that writes back owns the times. It does not send them where a change falls into
/// the same tick, of some milliseconds, as one that it has sent, and so the time on the volume
/// is that of the write.
fn settle_times(top: &std::path::Path) {
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000);
    for entry in std::fs::read_dir(top).unwrap() {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            settle_times(&entry.path());
        } else if kind.is_file() {
            std::fs::File::open(entry.path()).unwrap().set_modified(time).unwrap();
        }
    }
}
