//! Log messages on standard error, one line each, with the time (UTC) in processes that run for long.

use std::sync::OnceLock;

use draconis_service::error_text;
use log::{LevelFilter, Log, Metadata, Record};

use crate::report;

struct StderrLogger {
    /// True if each line begins with the time.
    has_times: bool,
}

/// Commands that run for long, beside others: their logs have times.
const LONG_RUNNING: &[&str] =
    &["disk-process", "export", "keeper", "serve", "store-keeper", "store-process", "worker"];

/// Starts logging of a command: errors and warnings, more with `verbose`.
pub fn init_logging(verbose: u8, command: &str) {
    let level = match verbose {
        0 => LevelFilter::Warn,
        1 => LevelFilter::Info,
        2 => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    };
    static LOGGER: OnceLock<StderrLogger> = OnceLock::new();
    let has_times = LONG_RUNNING.contains(&command);
    if log::set_logger(LOGGER.get_or_init(|| StderrLogger { has_times })).is_ok() {
        log::set_max_level(level);
    }
}

impl Log for StderrLogger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Messages of other crates appear only at trace level.
        metadata.target().starts_with("draconis") || log::max_level() == LevelFilter::Trace
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let level = record.level().as_str().to_lowercase();
            let text = error_text(record.args());
            match self.has_times {
                true => {
                    let now = jiff::Timestamp::now();
                    report::warn_line(format_args!("{now:.3} draconis: {level}: {text}"));
                }
                false => report::warn_line(format_args!("draconis: {level}: {text}")),
            }
        }
    }

    fn flush(&self) {}
}
