//! Progress bars on terminals, for operations that take longer than two seconds.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use draconis_types::lock::Mutex;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{interrupt, report};

/// When to show progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum ProgressMode {
    /// On a terminal, after two seconds.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Delay before the bar appears.
const SHOW_DELAY: Duration = Duration::from_secs(2);
/// Bytes between two looks at the clock.
const CLOCK_CHECK_BYTES: u64 = 1 << 20;

/// A progress bar that counts bytes.
pub struct ByteProgress {
    bar: ProgressBar,
    /// Time at which the bar appears; `None` once it has, or if it never will.
    due: Option<Instant>,
    done_bytes: u64,
    reported_bytes: u64,
}

impl ByteProgress {
    /// Creates a bar for `total_bytes`.
    pub fn new(when: ProgressMode, total_bytes: u64) -> Self {
        let template = "{bar:32} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
        Self::with_template(when, Some(total_bytes), template)
    }

    /// Creates a counter for an unknown number of bytes.
    pub fn unbounded(when: ProgressMode) -> Self {
        Self::with_template(when, None, "{bytes}, {bytes_per_sec}")
    }

    fn with_template(when: ProgressMode, total_bytes: Option<u64>, template: &str) -> Self {
        interrupt::watch();
        let shown = match when {
            ProgressMode::Always => true,
            ProgressMode::Never => false,
            ProgressMode::Auto => std::io::stderr().is_terminal(),
        };
        let bar = ProgressBar::with_draw_target(total_bytes, ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        let wait = if when == ProgressMode::Always { Duration::ZERO } else { SHOW_DELAY };
        Self { bar, due: shown.then(|| Instant::now() + wait), done_bytes: 0, reported_bytes: 0 }
    }

    /// Counts `bytes` more.
    pub fn add(&mut self, bytes: u64) {
        self.done_bytes += bytes;
        if self.done_bytes - self.reported_bytes < CLOCK_CHECK_BYTES {
            return;
        }
        self.reported_bytes = self.done_bytes;
        self.bar.set_position(self.done_bytes);
        if self.due.is_some_and(|due| due <= Instant::now()) {
            self.due = None;
            report::set_bar_shown(true);
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }
}

impl Drop for ByteProgress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
        report::set_bar_shown(false);
    }
}

/// Progress of checks of a volume, one after the other: each begins anew.
pub struct CheckProgress {
    mode: ProgressMode,
    /// The bar of the current check, and what it was told.
    bar: Mutex<Option<(ByteProgress, u64)>>,
}

impl CheckProgress {
    pub fn new(mode: ProgressMode) -> Self {
        interrupt::watch();
        Self { mode, bar: Mutex::default() }
    }

    /// Shows `done` of `total` bytes.
    pub fn show(&self, done: u64, total: u64) {
        let mut bar = self.bar.lock();
        // Threads of one check may report a little out of order.
        if bar.as_ref().is_some_and(|(_, told)| *told > total / 2 && done < *told / 4) {
            *bar = None;
        }
        let (bar, told) = bar.get_or_insert_with(|| (ByteProgress::new(self.mode, total), 0));
        bar.add(done.saturating_sub(*told));
        *told = done.max(*told);
    }
}
