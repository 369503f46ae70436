//! Stopping a run: Ctrl-C ends it at the next request, so that mounts and files are cleaned
//! up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Stop flag.
#[derive(Clone, Default)]
pub struct StopFlag(Arc<AtomicBool>);

/// The run was asked to stop.
#[derive(Debug, thiserror::Error)]
#[error("stopped")]
pub struct RunStopped;

impl StopFlag {
    /// Installs handlers for Ctrl-C, `SIGTERM` and `SIGHUP`.
    ///
    /// # Errors
    /// Installing the handlers fails.
    pub fn install_signal_handlers() -> std::io::Result<Self> {
        let stop = Self::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&stop.0))?;
        }
        Ok(stop)
    }

    /// Fails if the run was asked to stop.
    ///
    /// # Errors
    /// [`RunStopped`].
    pub fn check_not_stopped(&self) -> Result<(), RunStopped> {
        if self.0.load(Ordering::Relaxed) { Err(RunStopped) } else { Ok(()) }
    }
}
