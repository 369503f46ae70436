//! Waiting, for tests. Law: no test fails because it was slow. A wait polls a condition and gives
//! up only at [`HANG_BOUND`]; only this file sleeps or reads a clock to bound a wait.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Bound against hanging: far more than anything takes beside other load.
pub const HANG_BOUND: Duration = Duration::from_secs(300);

/// Intervals between polls: they double from the first to the last.
const POLL_INTERVALS: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(10)];

/// Returns the time at which a wait that begins now gives up.
pub fn hang_deadline() -> Instant {
    Instant::now() + HANG_BOUND
}

/// Waits until `condition` holds; panics with `what` if it never does.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    wait_for(what, || condition().then_some(()));
}

/// Waits until `poll` returns a value; panics with `what` if it never does.
#[track_caller]
pub fn wait_for<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = hang_deadline();
    let [mut interval, max_interval] = POLL_INTERVALS;
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {HANG_BOUND:?} in vain: {what}");
        std::thread::sleep(interval);
        interval = max_interval.min(interval * 2);
    }
}

/// Runs `call` in a thread; panics with `what` if it does not return.
#[track_caller]
pub fn assert_returns<T: Send + 'static>(
    what: &str,
    call: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (send, result) = channel();
    let thread = std::thread::spawn(move || {
        let _ = send.send(call());
    });
    match result.recv_timeout(HANG_BOUND) {
        Ok(value) => value,
        Err(RecvTimeoutError::Timeout) => panic!("{what} did not return within {HANG_BOUND:?}"),
        Err(RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => panic!("{what} returned nothing"),
        },
    }
}

/// Receives the next message.
///
/// # Errors
///
/// [`RecvTimeoutError::Timeout`] after [`HANG_BOUND`]; [`RecvTimeoutError::Disconnected`] once the
/// sender is gone.
pub fn receive<T>(messages: &Receiver<T>) -> Result<T, RecvTimeoutError> {
    messages.recv_timeout(HANG_BOUND)
}

/// Lets time pass where the passing of time is what a test needs: between requests of a paced
/// workload, before a kill at a random moment, while nothing may happen. `why` says which. The
/// result of a test must not depend on how long the pause really was.
pub fn pause(why: &str, duration: Duration) {
    assert!(!why.is_empty(), "a pause has a reason");
    std::thread::sleep(duration);
}

/// Runs `call`; returns its result and how long it took: for reports, and for choosing moments, such
/// as that of a kill. No assertion looks at it.
pub fn measure<T>(call: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let value = call();
    (value, start.elapsed())
}

/// Finds what hangs in a loop that goes on nevertheless.
pub struct HangClock(Instant);

impl HangClock {
    /// Starts the clock.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Returns the time since the start, for reports.
    pub fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }

    /// Panics with `what` once [`HANG_BOUND`] has passed.
    #[track_caller]
    pub fn assert_not_hung(&self, what: impl std::fmt::Display) {
        assert!(self.elapsed() < HANG_BOUND, "{what} took {:?}", self.elapsed());
    }
}
