//! How much processes of this program log: as much as the one that starts them.
//!
//! With `-vv` each request of a mount leaves a trace on standard error: the worker names the request
//! and the change that it becomes, the process that writes says up to which change the disk has
//! accepted. A manager that runs in the background writes to `manager.log` in its runtime directory.

/// Returns the option that gives a child process the level of this one.
pub(crate) fn verbosity_argument() -> Option<&'static str> {
    match log::max_level() {
        log::LevelFilter::Info => Some("-v"),
        log::LevelFilter::Debug => Some("-vv"),
        log::LevelFilter::Trace => Some("-vvv"),
        _ => None,
    }
}
