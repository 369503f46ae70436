//! Log messages on standard error, one line each.

use draconis_service::error_text;
use log::{LevelFilter, Log, Metadata, Record};

use crate::report;

struct StderrLogger;

/// Starts logging: errors and warnings, more with `verbose`.
pub fn init_logging(verbose: u8) {
    let level = match verbose {
        0 => LevelFilter::Warn,
        1 => LevelFilter::Info,
        2 => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    };
    if log::set_logger(&StderrLogger).is_ok() {
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
            report::warn_line(format_args!("draconis: {level}: {}", error_text(record.args())));
        }
    }

    fn flush(&self) {}
}
