//! Being asked to stop: Ctrl-C ends a run at the next request, so that everything that was
//! made is unmounted and removed on the way out.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Whether it is asked to stop.
#[derive(Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

/// The run was asked to stop.
#[derive(Debug, thiserror::Error)]
#[error("stopped")]
pub struct Stopped;

impl Stop {
    /// Listens for Ctrl-C, `SIGTERM` and `SIGHUP`.
    ///
    /// # Errors
    /// What the system says.
    pub fn listen() -> std::io::Result<Self> {
        let stop = Self::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&stop.0))?;
        }
        Ok(stop)
    }

    /// Nothing, or that it is time to stop.
    ///
    /// # Errors
    /// [`Stopped`].
    pub fn check(&self) -> Result<(), Stopped> {
        if self.0.load(Ordering::Relaxed) { Err(Stopped) } else { Ok(()) }
    }
}
