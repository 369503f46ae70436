//! Progress of anything that takes longer than two seconds, on a terminal only.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// When to show progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum When {
    /// On a terminal, after two seconds.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// What is shorter than this needs no bar.
const PATIENCE: Duration = Duration::from_secs(2);
/// The bar looks at the clock once in so many bytes.
const STEP_BYTES: u64 = 1 << 20;

/// A bar that counts bytes.
pub struct Progress {
    bar: ProgressBar,
    /// When the bar may show itself; `None` once it has, or if it never will.
    due: Option<Instant>,
    done_bytes: u64,
    told_bytes: u64,
}

impl Progress {
    /// A bar for `total_bytes`.
    pub fn new(when: When, total_bytes: u64) -> Self {
        let template = "{bar:32} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
        Self::with(when, Some(total_bytes), template)
    }

    /// A count of bytes where it is not known how many will come.
    pub fn endless(when: When) -> Self {
        Self::with(when, None, "{bytes}, {bytes_per_sec}")
    }

    fn with(when: When, total_bytes: Option<u64>, template: &str) -> Self {
        let shown = match when {
            When::Always => true,
            When::Never => false,
            When::Auto => std::io::stderr().is_terminal(),
        };
        let bar = ProgressBar::with_draw_target(total_bytes, ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        let wait = if when == When::Always { Duration::ZERO } else { PATIENCE };
        Self { bar, due: shown.then(|| Instant::now() + wait), done_bytes: 0, told_bytes: 0 }
    }

    /// Counts `bytes` more.
    pub fn add(&mut self, bytes: u64) {
        self.done_bytes += bytes;
        if self.done_bytes - self.told_bytes < STEP_BYTES {
            return;
        }
        self.told_bytes = self.done_bytes;
        self.bar.set_position(self.done_bytes);
        if self.due.is_some_and(|due| due <= Instant::now()) {
            self.due = None;
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
