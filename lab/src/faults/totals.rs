//! Times of all faults of a run, and of earlier runs that they are added to.

use draconis_types::lock::Mutex;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};

use super::{Round, SharedState};
use crate::print_text;

/// Times that are no faults: they are reported, and not counted.
const UNCOUNTED: [&str; 4] = ["calls in flight", "no effect in 2.5 s", "space again", "upgrade"];

/// Times of all faults.
pub(super) struct Totals {
    file: Option<PathBuf>,
    /// Times in microseconds, by what was injected.
    times: Mutex<BTreeMap<String, Vec<u64>>>,
    calls: AtomicU64,
    rounds: AtomicU64,
    violations: Mutex<Vec<String>>,
}

impl Totals {
    /// Reads the times that `file` has, if there is one.
    pub(super) fn new(file: Option<&Path>) -> anyhow::Result<Self> {
        let mut times: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        if let Some(file) = file {
            let text = match std::fs::read_to_string(file) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
                text => text.with_context(|| file.display().to_string())?,
            };
            for (nth, line) in text.lines().enumerate() {
                let time =
                    line.split_once(' ').and_then(|(us, what)| Some((us.parse().ok()?, what)));
                let (us, what) = time.with_context(|| {
                    format!("{}, line {}: no time and fault", file.display(), nth + 1)
                })?;
                times.entry(what.into()).or_default().push(us);
            }
        }
        Ok(Self {
            file: file.map(Path::to_path_buf),
            times: Mutex::new(times),
            calls: AtomicU64::new(0),
            rounds: AtomicU64::new(0),
            violations: Mutex::default(),
        })
    }

    /// Adds the times of one round, and the calls of its clients.
    pub(super) fn add(
        &self,
        times: Vec<(&'static str, Duration)>,
        shared: &SharedState,
    ) -> anyhow::Result<()> {
        let in_flight = std::mem::take(&mut *shared.waits.lock());
        let in_flight = in_flight.into_iter().map(|wait| ("calls in flight", wait));
        let (mut all, mut lines) = (self.times.lock(), String::new());
        for (what, time) in times.into_iter().chain(in_flight) {
            let us = time.as_micros() as u64;
            writeln!(lines, "{us} {what}")?;
            all.entry(what.into()).or_default().push(us);
        }
        self.calls.fetch_add(shared.calls.load(Ordering::Relaxed), Ordering::Relaxed);
        if let Some(file) = &self.file {
            let mut options = std::fs::OpenOptions::new();
            let mut open = options.append(true).create(true).open(file)?;
            open.write_all(lines.as_bytes())?;
        }
        Ok(())
    }

    pub(super) fn end_round(&self, round: &Round<'_>, done: anyhow::Result<()>) {
        self.rounds.fetch_add(1, Ordering::Relaxed);
        if let Err(why) = done {
            let Round { kind, volume, seed, .. } = round;
            let why = format!("{kind:?} on {volume}, seed {seed}: {why:#}");
            eprintln!("{why}");
            self.violations.lock().push(why);
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        !self.violations.lock().is_empty()
    }

    /// Prints the times; fails if a law was broken.
    pub(super) fn report(&self, json: bool) -> anyhow::Result<()> {
        let times = std::mem::take(&mut *self.times.lock());
        let violations = self.violations.lock();
        let is_counted = |what: &str| !UNCOUNTED.contains(&what);
        let mut all = vec![];
        let mut rows = vec![];
        for (what, mut times) in times {
            if is_counted(&what) {
                all.extend_from_slice(&times);
            }
            times.sort_unstable();
            rows.push((what, times));
        }
        all.sort_unstable();
        rows.push(("all faults".into(), all));
        let (calls, rounds) =
            (self.calls.load(Ordering::Relaxed), self.rounds.load(Ordering::Relaxed));
        if json {
            let row = |(what, times): &(String, Vec<u64>)| {
                serde_json::json!({
                    "fault": what, "count": times.len(), "median_us": quantile(times, 500),
                    "p99_us": quantile(times, 990), "longest_us": quantile(times, 1000),
                })
            };
            let report = serde_json::json!({
                "times": rows.iter().map(row).collect::<Vec<_>>(), "calls": calls,
                "volumes": rounds, "violations": *violations,
            });
            print_text(&(serde_json::to_string_pretty(&report)? + "\n"))?;
        } else {
            let mut text = format!(
                "{:<34}{:>8}{:>12}{:>12}{:>12}\n",
                "time until the next answer", "count", "median", "99 of 100", "longest"
            );
            for (what, times) in &rows {
                let [median, most, longest] = [500, 990, 1000]
                    .map(|part| format!("{:.1?}", Duration::from_micros(quantile(times, part))));
                let count = times.len();
                writeln!(text, "{what:<34}{count:>8}{median:>12}{most:>12}{longest:>12}")?;
            }
            writeln!(text, "{calls} calls on {rounds} volumes in this run")?;
            print_text(&text)?;
        }
        if violations.is_empty() { Ok(()) } else { bail!("{} violations", violations.len()) }
    }
}

/// Returns the quantile `thousandths` of sorted times; 0 without any.
fn quantile(times: &[u64], thousandths: usize) -> u64 {
    let nth = (times.len() * thousandths / 1000).min(times.len().saturating_sub(1));
    times.get(nth).copied().unwrap_or_default()
}
